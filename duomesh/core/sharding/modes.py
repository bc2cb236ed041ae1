"""How an op can work on a mesh axis: a handful of modes, and the states that each asks of operands and gives results.

| mode | operands | results |
|---|---|---|
| `whole` | I | I: every rank does the same |
| `replicated` | R | R: every rank does the same work, what comes after differs |
| `split` on w | S(w), or R without w | S(w); P where w was summed; I where the op talks about w itself; R without w |
| `sum` of a linear group | P in the group, R outside | P |

A layout is right if every op has a mode on every axis whose states are those that its operands and results have: that
is what `check` asks. Which of its modes an op takes is `typing`'s choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from duomesh.core.ir.ops import KINDS
from duomesh.core.ir.program import Program
from duomesh.core.ir.values import Op
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, State, shard

__all__ = ["REPLICATED_MODE", "WHOLE", "Mode", "OpStates", "OpView", "split", "sum_of"]


@dataclass(frozen=True)
class Mode:
    """See the table. `axis` names w by the op's signature; `group` is a position in `OpKind.linear`."""

    kind: Literal["whole", "replicated", "split", "sum"]
    axis: str | None = None
    group: int | None = None

    def __str__(self) -> str:
        return self.kind if self.axis is None else f"{self.kind} on {self.axis}"


WHOLE, REPLICATED_MODE = Mode("whole"), Mode("replicated")


def split(axis: str) -> Mode:
    return Mode("split", axis=axis)


def sum_of(group: int) -> Mode:
    return Mode("sum", group=group)


@dataclass(frozen=True)
class OpStates:
    """States that operands are brought to, inputs then parameters (None for an absent one), and of the results.

    A state names the axes of the operand itself; what attention sees as `kv_seq` is its keys' `seq`.
    """

    operands: tuple[State | None, ...]
    outputs: tuple[State, ...]


class OpView:
    """An op with the axes that its signature gives to each operand.

    Attributes:
        seen: axes of each operand by the op's names, inputs then parameters; None for an absent one.
        own: the same by the operands' own names.
    """

    def __init__(self, program: Program, op: Op) -> None:
        self.program, self.op, self.kind = program, op, KINDS[op.kind]
        given = iter(op.signature.inputs)
        inputs = [None if name is None else next(given, ()) for name in op.inputs]
        params = [None if n is None else seen for n, seen in zip(op.params, op.signature.params, strict=True)]
        self.seen: list[tuple[str, ...] | None] = [*inputs, *params]
        owned = [None if n is None else tuple(a.name for a in program.values[n].axes) for n in op.inputs]
        self.own: list[tuple[str, ...] | None] = [*owned, *params]
        self.outputs = op.signature.outputs

    def modes(self) -> Iterator[Mode]:
        """Every mode of the op."""
        yield WHOLE
        yield REPLICATED_MODE
        names = dict.fromkeys(name for seen in (*self.seen, *self.outputs) for name in seen or ())
        yield from (split(name) for name in names if self.can_split(name))
        yield from (sum_of(i) for i in range(len(self.kind.linear)))

    def can_split(self, axis: str) -> bool:
        return axis not in self.op.signature.local

    def states(self, mode: Mode) -> OpStates:
        """What the mode asks of the operands and gives to the results."""
        if mode.kind == "split":
            assert mode.axis is not None
            return self._split(mode.axis)
        if mode.kind == "sum":
            assert mode.group is not None
            group = self.members(mode.group)
            operands = tuple(
                None if seen is None else (PARTIAL if i in group else REPLICATED) for i, seen in enumerate(self.seen)
            )
            return OpStates(operands, tuple(PARTIAL for _ in self.outputs))
        state = INVARIANT if mode.kind == "whole" else REPLICATED
        return OpStates(
            tuple(None if seen is None else state for seen in self.seen), tuple(state for _ in self.outputs)
        )

    def members(self, group: int) -> set[int]:
        """Positions of the operands of a linear group that are present."""
        roles = self.kind.linear[group]
        return {i for i, seen in enumerate(self.seen) if seen is not None and self._role(i) in roles}

    def _role(self, position: int) -> str:
        if position < len(self.op.inputs):
            return self.kind.inputs[position]
        roles, at = self.kind.params, position - len(self.op.inputs)
        # lists lie one after another: all weights, then all biases
        return roles[at * len(roles) // len(self.op.params)]

    def _split(self, axis: str) -> OpStates:
        outputs = tuple(self._result(i, axis) for i in range(len(self.outputs)))
        operands = tuple(self._operand(i, axis, outputs) for i in range(len(self.seen)))
        return OpStates(operands, outputs)

    def _result(self, i: int, axis: str) -> State:
        if axis in self.outputs[i]:
            return shard(axis)
        if axis in self.op.signature.inner:
            return INVARIANT
        is_summed = any(axis in (self.seen[j] or ()) for j in self._sources(i))
        return PARTIAL if is_summed else REPLICATED

    def _sources(self, output: int) -> list[int]:
        """Operands that a result is made from: each weight of a pack has a result of its own."""
        count = len(self.op.inputs)
        if not self._is_pack():
            return list(range(len(self.seen)))
        return [*range(count), *range(count + output, len(self.seen), len(self.outputs))]

    def _is_pack(self) -> bool:
        return any(role.endswith("*") for role in self.kind.params)

    def _operand(self, i: int, axis: str, outputs: Sequence[State]) -> State | None:
        seen, own = self.seen[i], self.own[i]
        if seen is None or own is None:
            return None
        if axis in seen:
            return shard(own[seen.index(axis)])
        makes = [o for o, state in enumerate(outputs) if state == PARTIAL and i in self._sources(o)]
        # a bias of a partial sum is one more summand: only then does it count once
        return PARTIAL if makes and self._adds_to_split(i, axis) else REPLICATED

    def _adds_to_split(self, i: int, axis: str) -> bool:
        groups = [self.members(g) for g in range(len(self.kind.linear))]
        return any(i in group and any(axis in (self.seen[j] or ()) for j in group) for group in groups)
