"""How parameters lie in memory: packs of canonical weights, and stacks of equal layers.

A pack is storage only: names, initialisation, checkpoints and (later) layouts belong to the canonical weights.
Members of a pack lie one after another along dim 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duomesh.core.ir.values import Op, Param

__all__ = ["Member", "Placement", "Segment", "Slot", "segments", "slots_of"]


@dataclass(frozen=True)
class Member:
    """A canonical parameter's rows [start, stop) of its slot's dim 0."""

    param: Param
    start: int
    stop: int


@dataclass(frozen=True)
class Slot:
    """One stored tensor and the parameters that it holds."""

    name: str
    members: tuple[Member, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.members[-1].stop, *self.members[0].param.shape[1:])

    @property
    def is_decayed(self) -> bool:
        return self.members[0].param.is_decayed


@dataclass(frozen=True)
class Placement:
    """A canonical parameter is rows [start, stop) of a storage tensor, named within the whole model."""

    storage: str
    start: int
    stop: int


def _slot(name: str, params: Sequence[Param]) -> Slot:
    members, start = [], 0
    for param in params:
        members.append(Member(param, start, start + param.shape[0]))
        start += param.shape[0]
    return Slot(name, tuple(members))


def slots_of(op: Op, params: Mapping[str, Param]) -> tuple[Slot | None, ...]:
    """The storage tensors that the op's function takes after its inputs, in role order; None for an absent one.

    A `linear` takes two: all of its weights in one, and the biases that exist in one.
    """
    if op.kind != "linear":
        return tuple(None if name is None else _slot(name, [params[name]]) for name in op.params)
    half = len(op.params) // 2
    out: list[Slot | None] = []
    for names, role in ((op.params[:half], "weight"), (op.params[half:], "bias")):
        present = [params[name] for name in names if name is not None]
        if len(present) == 1:
            out.append(_slot(present[0].name, present))
        else:
            out.append(_slot(f"{op.name}.{role}", present) if present else None)
    return tuple(out)


@dataclass(frozen=True)
class Segment:
    """Layers [start, start + repeats * len(pattern)) that repeat a pattern of block kinds."""

    start: int
    pattern: tuple[int, ...]
    repeats: int

    @property
    def stop(self) -> int:
        return self.start + self.repeats * len(self.pattern)

    def layers(self, position: int) -> range:
        """The layers at one position of the pattern."""
        return range(self.start + position, self.stop, len(self.pattern))


def segments(layers: Sequence[int], *, longest_pattern: int = 8) -> tuple[Segment, ...]:
    """Cuts a list of block kinds into repeated patterns, the longest repetition first found at each place.

    A backend that scans over layers compiles each segment once: `AAAA` is one segment of pattern A, and
    `LLLLLG LLLLLG` one of pattern LLLLLG.
    """
    out: list[Segment] = []
    start = 0
    while start < len(layers):
        best = Segment(start, (layers[start],), 1)
        for period in range(1, min(longest_pattern, len(layers) - start) + 1):
            pattern = tuple(layers[start : start + period])
            repeats = 1
            while tuple(layers[start + repeats * period : start + (repeats + 1) * period]) == pattern:
                repeats += 1
            candidate = Segment(start, pattern, repeats)
            # a longer pattern must cover more layers to be worth a larger body
            if repeats > 1 and candidate.stop > best.stop:
                best = candidate
        out.append(best)
        start = best.stop
    return tuple(out)
