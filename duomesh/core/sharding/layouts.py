"""Layouts: the states of a value on every axis of a mesh, and the steps that take it from one layout to another.

A dim that several axes split is cut by the slowest of them first: it has a *major* and a *minor* end. Only the minor
end can be joined or cut, which is what decides the order of steps. Equal moves of several axes are one step, and one
collective, over the tuple of axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from duomesh.core.ir.values import Axes
from duomesh.core.sharding import transitions
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.transitions import INVARIANT, REPLICATED, Action, State, dual

__all__ = ["Extents", "Layout", "Step", "backward_steps", "dual_layout", "steps"]

Layout = Mapping[str, State]  # mesh axis -> state

# What shrinks a buffer goes before what enlarges it.
_CHEAPEST_FIRST = (
    Action.NOTHING,
    Action.SLICE,
    Action.KEEP_FIRST,
    Action.REDUCE_SCATTER,
    Action.ALL_TO_ALL,
    Action.ALL_REDUCE,
    Action.ALL_GATHER,
    Action.PAD,
)


@dataclass(frozen=True)
class Step:
    """One transition of a value on the ranks of one or more axes together, axes from major to minor."""

    axes: tuple[str, ...]
    before: State
    after: State

    @property
    def action(self) -> Action:
        return transitions.forward(self.before, self.after)

    def apply(self, layout: Layout) -> dict[str, State]:
        return {**layout, **dict.fromkeys(self.axes, self.after)}


def dual_layout(layout: Layout) -> dict[str, State]:
    """The layout of a value's cotangent."""
    return {axis: dual(state) for axis, state in layout.items()}


def backward_steps(ahead: Iterable[Step]) -> tuple[Step, ...]:
    """What a cotangent goes through: each step's dual, the last one first."""
    return tuple(Step(step.axes, dual(step.after), dual(step.before)) for step in reversed(list(ahead)))


def steps(mesh: Mesh, before: Layout, after: Layout) -> tuple[Step, ...]:
    """The steps from one layout to another. Axes of size 1 take none.

    A move whose dim has its minor end elsewhere waits for that end; where moves wait for each other, the axis at the
    minor end is made whole and cut again afterwards.
    """
    names = tuple(name for name in mesh.names if mesh.size(name) > 1)
    return _steps(tuple(before[name] for name in names), tuple(after[name] for name in names), names)


@lru_cache(maxsize=4096)
def _steps(before: tuple[State, ...], after: tuple[State, ...], names: tuple[str, ...]) -> tuple[Step, ...]:
    current, goal = list(before), list(after)
    made: list[Step] = []
    while current != goal:
        move = _next_move(current, goal)
        members, state = move if move is not None else ((_blocker(current, goal),), INVARIANT)
        made.append(Step(tuple(names[i] for i in members), current[members[0]], state))
        for i in members:
            current[i] = state
    return tuple(made)


def _next_move(current: list[State], goal: list[State]) -> tuple[tuple[int, ...], State] | None:
    """The cheapest move that can be made now: axes with equal moves together if they can, else one alone."""
    pending = [i for i in range(len(current)) if current[i] != goal[i]]
    alike: dict[tuple[State, State], list[int]] = {}
    for i in pending:
        alike.setdefault((current[i], goal[i]), []).append(i)
    groups = [*alike.values(), *([i] for i in pending)]
    ready = [tuple(group) for group in groups if _is_free(group, current, goal)]
    if not ready:
        return None
    best = min(ready, key=lambda g: _CHEAPEST_FIRST.index(transitions.forward(current[g[0]], goal[g[0]])))
    return best, goal[best[0]]


def _is_free(group: list[int], current: list[State], goal: list[State]) -> bool:
    """Whether the axes are the minor end of the dim that they leave and can be that of the dim that they come to."""
    others = [i for i in range(len(current)) if i not in group]
    source, target = current[group[0]].dim, goal[group[0]].dim
    if source is not None and any(current[i].dim == source and i > group[0] for i in others):
        return False
    if target is None:
        return True
    is_settled = all(
        i < group[0] and current[i] == goal[i] for i in others if current[i].dim == target
    )  # whoever is there is major to us and stays
    is_complete = all(
        i > group[-1] for i in others if goal[i].dim == target and current[i].dim != target
    )  # whoever is still to come is minor to us
    return is_settled and is_complete


def _blocker(current: list[State], goal: list[State]) -> int:
    """The fastest axis on a dim that a waiting move leaves or comes to."""
    pending = [i for i in range(len(current)) if current[i] != goal[i]]
    dims = {state.dim for i in pending for state in (current[i], goal[i])} - {None}
    return max(i for i, state in enumerate(current) if state.dim in dims)


@dataclass(frozen=True)
class Extents:
    """Sizes of a step: of the mesh, of the batch, and what padding adds.

    Attributes:
        batch: samples of a micro-batch over all ranks. seq: tokens of a sample.
        multiples: logical axes that are padded, and to a multiple of what.
    """

    mesh: Mesh
    batch: int
    seq: int
    multiples: Mapping[str, int]

    def padded(self, axis: str, size: int) -> int:
        """The size that is cut into equal parts: padding comes with the first cut and goes with the last join."""
        multiple = self.multiples.get(axis, 1)
        return -(-size // multiple) * multiple

    def splitting(self, dim: str, layout: Layout) -> list[str]:
        """Mesh axes that split a dim; one of size 1 splits nothing."""
        return [axis for axis, state in layout.items() if state.dim == dim and self.mesh.size(axis) > 1]

    def shape(self, axes: Axes, layout: Layout) -> tuple[int, ...]:
        """What one rank holds."""
        return tuple(self._local(axes, layout))

    def elements(self, axes: Axes, layout: Layout) -> int:
        return prod(self._local(axes, layout))

    def _local(self, axes: Axes, layout: Layout) -> Iterator[int]:
        run_time = {"batch": self.batch, "seq": self.seq, "kv_seq": self.seq}
        for axis in axes:
            size = run_time[axis.name] if axis.size is None else axis.size
            parts = prod(self.mesh.size(a) for a in self.splitting(axis.name, layout))
            yield size if parts == 1 else self.padded(axis.name, size) // parts

    def moves(self, axes: Axes, before: Layout, path: Iterable[Step]) -> Iterator[tuple[Step, int]]:
        """Every collective among the steps, with the elements of its larger buffer on one rank: the result of an
        all-gather, the input of a reduce-scatter, what an all-reduce or an all-to-all sends."""
        current = dict(before)
        for step in path:
            if step.action.is_collective:
                yield step, self._buffer(axes, step, current)
            current = step.apply(current)

    def _buffer(self, axes: Axes, step: Step, before: Layout) -> int:
        is_kept = step.action is Action.ALL_TO_ALL
        layout = before if is_kept else {**before, **dict.fromkeys(step.axes, REPLICATED)}
        cut = {step.before.dim, step.after.dim}  # padding is part of the buffer that is cut, or was joined
        total = 1
        for axis, size in zip(axes, self.shape(axes, layout), strict=True):
            is_whole = not self.splitting(axis.name, layout)
            total *= self.padded(axis.name, size) if is_whole and axis.name in cut else size
        return total
