"""The text of an HLO module, as `compiled.as_text()` prints it: computations, instructions, trip counts of loops.

Not a full parser: shapes and attributes stay text, in which readers look for what they need.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

__all__ = ["Computation", "HloModule", "Instruction", "called", "leaves", "parse_module", "tuple_parts"]

_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"^\s*([a-z][a-z0-9\-]*)\(")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_LEAF = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\]")
# as JSON, or inside a quoted string as older versions print it
_TRIPS = re.compile(r'known_trip_count\\?":\s*\{\\?"n\\?":\s*\\?"?(\d+)')
_MAX_TRIPS = 10_000  # of a loop whose count is found by running its counter


@dataclass(frozen=True)
class Instruction:
    """One line. `shape` is that of the result, `arguments` the text between the parentheses, `attributes` the rest
    without quoted strings; `trips` is the trip count that the compiler wrote down, if any."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str
    trips: int | None
    is_root: bool

    @cached_property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def attribute(self, name: str, pattern: str) -> str | None:
        """The part of `name=...` that a pattern's only group matches."""
        found = re.search(rf"(?:^|[ ,]){name}={pattern}", self.attributes)
        return found[1] if found else None


Computation = list[Instruction]


@dataclass(frozen=True)
class HloModule:
    """Computations by name. Devices are numbered replica * partitions + partition."""

    computations: Mapping[str, Computation]
    entry: str
    replicas: int
    partitions: int

    def trip_count(self, loop: Instruction, within: Computation) -> int | None:
        """How often a `while` of a computation runs its body; None if that is not known before it runs.

        As the compiler wrote it down; otherwise the loop's scalar integers are run from their initial values.
        """
        if loop.trips is not None:
            return loop.trips
        condition, body = (called(loop, name)[0] for name in ("condition", "body"))
        values = self._scalars(within, [None] * len(within))
        state = values.get(loop.operands[0])
        for count in range(_MAX_TRIPS):
            goes_on = self._run(condition, [state])
            if not isinstance(goes_on, int):
                return None
            if not goes_on:
                return count
            state = self._run(body, [state])
        return None

    def _run(self, name: str, arguments: Sequence[_Value]) -> _Value:
        computation = self.computations[name]
        root = next(made.name for made in computation if made.is_root)
        return self._scalars(computation, arguments)[root]

    def _scalars(self, computation: Computation, arguments: Sequence[_Value]) -> dict[str, _Value]:
        """Values of scalar integers, and of tuples that hold some, as far as simple arithmetic gives them."""
        values: dict[str, _Value] = {}
        for made in computation:
            values[made.name] = self._value(made, [values.get(name) for name in made.operands], arguments)
        return values

    def _value(self, made: Instruction, operands: list[_Value], arguments: Sequence[_Value]) -> _Value:
        is_integer = re.match(r"(?:[su]\d+|pred)\[\]", made.shape)
        out: _Value = None
        match made.opcode:
            case "parameter":
                out = arguments[int(made.arguments)]
            case "tuple":
                out = tuple(operands)
            case "get-tuple-element" if isinstance(operands[0], tuple):
                out = operands[0][int(made.attribute("index", r"(\d+)") or 0)]
            case "call" | "fusion":
                out = self._run(called(made, "calls|to_apply")[0], operands)
            case "constant" if is_integer and re.fullmatch(r"-?\d+|true|false", made.arguments):
                out = int(_TRUTH.get(made.arguments, made.arguments))
            case "copy" | "bitcast":
                out = operands[0]
            case "convert" if is_integer:
                out = operands[0]
            case _:
                compute = _ARITHMETIC.get(made.attribute("direction", r"(\w+)") or made.opcode)
                if compute is not None and all(isinstance(value, int) for value in operands):
                    out = int(compute(*operands))
        return out


_Value = int | tuple["_Value", ...] | None
_TRUTH = {"true": "1", "false": "0"}
_ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def parse_module(text: str) -> HloModule:
    """Reads a module that has an entry computation."""
    computations: dict[str, Computation] = {}
    current: Computation = []
    entry = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            made = _instruction(found[2], found[3], is_root=bool(found[1]))
            if made is not None:
                current.append(made)
    sizes = [re.search(rf"\b{name}=(\d+)", text.partition("\n")[0]) for name in ("replica_count", "num_partitions")]
    replicas, partitions = (int(size[1]) if size else 1 for size in sizes)
    return HloModule(computations, entry, replicas, partitions)


def _instruction(name: str, rest: str, *, is_root: bool) -> Instruction | None:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest[end:])
    if end < 1 or opcode is None:
        return None
    opened = end + opcode.end() - 1
    closed = _closing(rest, opened)
    tail = rest[closed + 1 :]
    trips = _TRIPS.search(tail)
    return Instruction(
        name=name,
        shape=rest[:end],
        opcode=opcode[1],
        arguments=rest[opened + 1 : closed],
        attributes=_QUOTED.sub("", tail),
        trips=int(trips[1]) if trips else None,
        is_root=is_root,
    )


def _closing(text: str, opened: int) -> int:
    """Where the parenthesis at `opened` closes."""
    depth = 0
    for place in range(opened, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    return len(text)


def called(made: Instruction, names: str) -> list[str]:
    """Computations in attributes of these names, joined by |; one computation, or several in braces."""
    found = re.findall(rf"(?:^|[ ,])(?:{names})=(%[\w.\-]+|\{{[^}}]*\}})", made.attributes)
    return [name for one in found for name in re.findall(r"%([\w.\-]+)", one)]


def tuple_parts(shape: str) -> list[str]:
    """Shapes of a tuple's elements; the shape itself if it is no tuple."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, start = [], 0, 1
    for place, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or not depth:
            parts.append(shape[start:place].strip())
            start = place + 1
    return parts


def leaves(shape: str) -> list[tuple[str, int]]:
    """(HLO's name of the dtype, elements) of every array in a shape."""
    found = _LEAF.findall(shape)
    return [(dtype, prod(int(size) for size in re.findall(r"\d+", dims))) for dtype, dims in found if dtype != "token"]
