"""Every rank of a mesh in one process: arrays of ranks, and how they are cut, joined and moved.

A value on all ranks is a list with one array a rank, and a layout that names dims by logical axis. Padding is added
with the first cut of a dim and dropped with its last join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.sharding import simulate
from duomesh.core.sharding.layouts import Extents, Layout, Step
from duomesh.core.sharding.transitions import INVARIANT, Action, State

__all__ = ["Issued", "Local", "Ranks"]

Local = list[Array]  # one array a rank


@dataclass(frozen=True)
class Issued:
    """A collective that was carried out; `elements` are those of the larger buffer on one rank."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    elements: int


class Ranks:
    """The ranks of a mesh.

    Attributes:
        issued: collectives so far, in order.
    """

    def __init__(self, extents: Extents) -> None:
        self.mesh, self._extents = extents.mesh, extents
        self.issued: list[Issued] = []

    def spread(self, whole: Array, names: Sequence[str], layout: Layout) -> Local:
        """A whole array in a layout of sharded and equal states, dims by name."""
        local = [whole] * self.mesh.world_size
        current: dict[str, State] = dict.fromkeys(self.mesh.names, INVARIANT)
        for axis in self.mesh.names:
            if layout[axis].dim is not None and self.mesh.size(axis) > 1:
                step = Step((axis,), INVARIANT, layout[axis])
                local = self._moved(local, names, whole.shape, current, step)[0]
                current = step.apply(current)
        return local

    def whole(self, local: Local, names: Sequence[str], sizes: Sequence[int], layout: Layout) -> Array:
        """The value; ranks that must be equal are checked to be. sizes: true size of every dim."""
        current = dict(layout)
        for axis in reversed(self.mesh.names):
            state = _positional(current[axis], names)
            local = self.reduce((axis,), local, partial(simulate.meaning, state=state), None)
            local = self._trimmed(local, names, sizes, current, current[axis], (axis,))
            current[axis] = INVARIANT
        return local[0]

    def move(
        self,
        local: Local,
        names: Sequence[str],
        sizes: Sequence[int],
        layout: Layout,
        path: Sequence[Step],
        phase: str,
        rows: Array | None = None,
    ) -> Local:
        """Takes a value through steps and records their collectives.

        rows: whole, by the value's first dims, which of its rows exist; no others move.
        """
        current = dict(layout)
        for step in path:
            moved, buffer = self._moved(local, names, sizes, current, step)
            if rows is not None:
                is_gather = step.action is Action.ALL_GATHER
                layout, held = (step.apply(current), moved) if is_gather else (current, local)
                buffer = self._existing(rows, names, layout, held)
            if step.action.is_collective:
                self.record(phase, step.action, step.axes, buffer)
            local, current = moved, step.apply(current)
        return local

    def _existing(self, rows: Array, names: Sequence[str], layout: Layout, held: Local) -> int:
        """Elements of the rows that exist, a mean over ranks."""
        first = names[: rows.ndim]
        there = self.spread(rows, first, {a: s if s.dim in first else INVARIANT for a, s in layout.items()})
        return sum(int(array.sum()) for array in there) * held[0].size // there[0].size // len(held)

    def record(self, phase: str, action: Action, axes: Sequence[str], elements: int) -> None:
        """Groups of one rank issue nothing."""
        real = tuple(axis for axis in axes if self.mesh.size(axis) > 1)
        if real:
            self.issued.append(Issued(phase, action.value, real, elements))

    def reduce(self, axes: Sequence[str], local: Local, function: Callable[[Local], Array], phase: str | None) -> Local:
        """A reduction over axes that leaves its result on every rank; recorded under a phase, if one is given."""
        if phase is not None:
            self.record(phase, Action.ALL_REDUCE, axes, local[0].size)
        return self._along(axes, local, lambda group: [function(group)] * len(group))

    def places(self, name: str, size: int, layout: Layout) -> Local:
        """By rank the positions along a dim that it holds, padding included."""
        along = {axis: state if state.dim == name else INVARIANT for axis, state in layout.items()}
        is_split = self._extents.splitting(name, along)
        return self.spread(np.arange(self._extents.padded(name, size) if is_split else size), (name,), along)

    def _along(self, axes: Sequence[str], local: Local, move: Callable[[Local], Local]) -> Local:
        """Applies a move of the ranks of some axes, for every place in the others."""
        out = list(local)
        for group in self.mesh.groups(*axes):
            for rank, array in zip(group, move([local[rank] for rank in group]), strict=True):
                out[rank] = array
        return out

    def _moved(
        self, local: Local, names: Sequence[str], sizes: Sequence[int], layout: Layout, step: Step
    ) -> tuple[Local, int]:
        """The ranks' arrays after a step, and the size of its larger buffer."""
        local = self._with_padding(local, names, layout, step.after)
        before, after = (_positional(state, names) for state in (step.before, step.after))
        made = self._along(step.axes, local, lambda group: simulate.reshard(group, before, after))
        buffer = max(local[0].size, made[0].size)
        return self._trimmed(made, names, sizes, layout, step.before, step.axes), buffer

    def _with_padding(self, local: Local, names: Sequence[str], layout: Layout, after: State) -> Local:
        """Pads a dim with zeros before it is cut for the first time."""
        if after.dim is None or self._extents.splitting(str(after.dim), layout):
            return local
        dim = names.index(str(after.dim))
        size = local[0].shape[dim]
        missing = self._extents.padded(str(after.dim), size) - size
        widths = [(0, missing if i == dim else 0) for i in range(len(names))]
        return [np.pad(array, widths) for array in local] if missing else local

    def _trimmed(
        self,
        local: Local,
        names: Sequence[str],
        sizes: Sequence[int],
        layout: Layout,
        left: State,
        axes: Sequence[str],
    ) -> Local:
        """Drops the padding of a dim that was joined by `axes` and that no other axis splits."""
        if left.dim is None or set(self._extents.splitting(str(left.dim), layout)) - set(axes):
            return local
        dim = names.index(str(left.dim))
        if local[0].shape[dim] <= sizes[dim]:
            return local
        for array in local:
            padding = np.take(array, range(sizes[dim], array.shape[dim]), axis=dim)
            assert not padding.any(), f"padding of {left.dim} is not zero"
        return [np.take(array, range(sizes[dim]), axis=dim) for array in local]


def _positional(state: State, names: Sequence[str]) -> State:
    return state if state.dim is None else replace(state, dim=list(names).index(str(state.dim)))
