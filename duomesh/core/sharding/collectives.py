"""The collectives of a training step, in the order in which a rank meets them, listed from a sharded program alone.

Sizes are those of the larger buffer on one rank: the result of an all-gather, the input of a reduce-scatter, what an
all-reduce or an all-to-all sends; padding included.

Not here: sends and receives between pipeline stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from duomesh.core.ir.backward import recomputed_values
from duomesh.core.ir.values import Axes, Value
from duomesh.core.sharding.layouts import Extents, Layout, Step, dual_layout
from duomesh.core.sharding.program import Reshard, ShardedCall, ShardedProgram
from duomesh.core.sharding.storage import Bucket, Storage
from duomesh.core.sharding.transitions import Action, Kind

__all__ = ["Collective", "Phase", "ProgramLister", "StepShape", "inner_axes", "step_collectives", "step_trace"]

Phase = Literal["forward", "backward", "recompute", "sync", "norm", "optimizer"]


@dataclass(frozen=True)
class Collective:
    """One collective that a rank takes part in.

    Attributes:
        op: what moves: a value as `<program>.<local name>`, a collective of an op's own as `<program>.<op> <what>`, or
            a bucket of parameters as `<program>.bucket<n>`.
        kind: "all-gather", "all-reduce", "reduce-scatter" or "all-to-all".
        axes: mesh axes, from major to minor; together they are the group.
        phase: "sync" sums gradients, "norm" is the global norm, "optimizer" hands out updated weights.
        dtype: of the buffer on the wire: "compute", "wide" or "int" as values have, "grad" for gradients.
        elements: of the buffer on one rank.
        count: how often in a step.
    """

    op: str
    kind: str
    axes: tuple[str, ...]
    phase: Phase
    dtype: str
    elements: int
    count: int = 1


@dataclass(frozen=True)
class StepShape:
    """How a step's batch is cut.

    batch: samples of a micro-batch over all data ranks. seq: tokens of a sample. has_segments: whether batches carry
    segment ids.
    """

    batch: int
    seq: int
    micro_batches: int = 1
    has_segments: bool = False


def step_collectives(storage: Storage, shape: StepShape) -> list[Collective]:
    """Every collective of a step, equal ones counted together, in order of first occurrence."""
    lister = _Lister(storage, shape)
    counts: Counter[Collective] = Counter()
    for made in lister.micro_batch():
        counts[made] += shape.micro_batches
    for made in lister.end_of_step():
        counts[made] += 1
    return [replace(made, count=count) for made, count in counts.items()]


def step_trace(storage: Storage, shape: StepShape) -> Iterator[Collective]:
    """The same one by one, in the order of execution: forward and backward of each micro-batch, then the end."""
    lister = _Lister(storage, shape)
    return chain(chain.from_iterable(lister.micro_batch() for _ in range(shape.micro_batches)), lister.end_of_step())


class _Lister:
    def __init__(self, storage: Storage, shape: StepShape) -> None:
        self._storage, self._sharded, self._shape = storage, storage.sharded, shape
        self._extents = self._sharded.extents(batch=shape.batch, seq=shape.seq)
        self._forward: dict[str, list[Collective]] = {}
        self._backward: dict[str, list[Collective]] = {}
        for _, _, program in self._sharded.steps:
            name = program.program.name
            if name not in self._forward:
                one = ProgramLister(program, self._extents, has_segments=shape.has_segments)
                self._forward[name], self._backward[name] = list(one.forward()), list(one.backward())

    def micro_batch(self) -> Iterator[Collective]:
        steps = list(enumerate(self._sharded.steps))
        for index, (_, _, program) in steps:
            if self._storage.zero == 3:
                yield from self._gathers(self._storage.used(index), "forward", "compute")
            yield from self._forward[program.program.name]
        for index, (_, _, program) in reversed(steps):
            if self._storage.zero == 3:
                yield from self._gathers(self._storage.used(index, in_backward=True), "recompute", "compute")
            yield from self._backward[program.program.name]
            if self._storage.zero == 3:
                yield from self._scatters(reversed(self._storage.used(index)), "backward")
            elif self._storage.zero == 2:
                yield from self._scatters([b for b in reversed(self._storage.buckets) if b.step == index], "sync")

    def end_of_step(self) -> Iterator[Collective]:
        """Sums that are left, buckets of the last step first, as backward has made their gradients ready."""
        buckets = self._storage.buckets
        for bucket in reversed(buckets):
            if self._storage.zero == 1:
                yield from self._scatters([bucket], "sync")
            if bucket.rest:
                yield self._of(bucket, Action.ALL_REDUCE, bucket.rest, "sync", "grad", bucket.size // bucket.parts)
        for bucket in reversed(buckets):
            if len(self._sharded.owners[bucket.members[0].name]) > 1:
                yield self._of(bucket, Action.ALL_REDUCE, ("pp",), "sync", "grad", bucket.size // bucket.parts)
        axes = self._storage.norm_axes + (("pp",) if len(set(self._sharded.stages)) > 1 else ())
        if axes:
            yield Collective("global norm", Action.ALL_REDUCE.value, axes, "norm", "wide", 1)
        if self._storage.zero in (1, 2):
            yield from self._gathers(buckets, "optimizer", "compute")

    def _gathers(self, buckets: Iterable[Bucket], phase: Phase, dtype: str) -> Iterator[Collective]:
        for bucket in buckets:
            if bucket.shared:
                yield self._of(bucket, Action.ALL_GATHER, bucket.shared, phase, dtype, bucket.size)

    def _scatters(self, buckets: Iterable[Bucket], phase: Phase) -> Iterator[Collective]:
        for bucket in buckets:
            if bucket.shared:
                yield self._of(bucket, Action.REDUCE_SCATTER, bucket.shared, phase, "grad", bucket.size)

    def _of(
        self, bucket: Bucket, action: Action, axes: tuple[str, ...], phase: Phase, dtype: str, elements: int
    ) -> Collective:
        program = self._sharded.steps[bucket.step][2].program.name
        name = f"{program}.{bucket.name.rpartition('.')[2]}"
        return Collective(name, action.value, axes, phase, dtype, elements)


class ProgramLister:
    """One application of a program."""

    def __init__(self, sharded: ShardedProgram, extents: Extents, *, has_segments: bool) -> None:
        self._sharded, self._extents = sharded, extents
        self._absent = frozenset() if has_segments else frozenset({"segment_ids"})

    def forward(self) -> Iterator[Collective]:
        for made in self._sharded.instructions:
            if isinstance(made, ShardedCall):
                yield from self._own(made, "forward")
            elif made.source not in self._absent:
                yield from self._moves(made, self._sharded.layouts[made.source], made.ahead, "forward")

    def backward(self, *, regathers: bool = True) -> Iterator[Collective]:
        """Only of values that the program's outputs depend on: no cotangent comes to others.

        regathers: whether what was gathered for one linear is gathered again.
        """
        again = {made.result: made for made in self._sharded.reshards() if made.regathers and regathers}
        reached: set[str | None] = {name for _, name in self._sharded.outputs}
        for made in reversed(self._sharded.instructions):
            if isinstance(made, Reshard):
                if made.result in reached:
                    reached.add(made.source)
                    layout = dual_layout(self._sharded.layouts[made.result])
                    yield from self._moves(made, layout, made.back, "backward")
                continue
            if not reached.intersection(made.call.op.outputs):
                continue
            reached.update(made.operands)
            for name in made.operands:
                if name in again:
                    kept = again.pop(name)
                    yield from self._moves(kept, self._sharded.layouts[kept.source], kept.ahead, "recompute")
            yield from self._own(made, "backward")

    def recomputed(self) -> Iterator[Collective]:
        """What is done again of the forward pass if nothing but the program's inputs was kept for backward."""
        needed = recomputed_values(self._sharded.program)
        for made in self._sharded.instructions:
            if isinstance(made, ShardedCall):
                if needed.intersection(made.call.op.outputs):
                    yield from self._own(made, "forward", "recompute")
            elif self._sharded.origin[made.source] in needed and made.source not in self._absent:
                yield from self._moves(made, self._sharded.layouts[made.source], made.ahead, "recompute")

    def _moves(self, made: Reshard, layout: Layout, path: Iterable[Step], phase: Phase) -> Iterator[Collective]:
        name = self._sharded.origin[made.source]
        value = self._sharded.program.values.get(name)
        live = (1, 1) if value is None or value.live is None else value.live
        dtype = "compute" if value is None else value.dtype
        for step, held in self._extents.moves(self._sharded.axes(made.source), layout, path):
            elements = -(-held * live[0] // live[1])  # rows that do not exist do not travel
            op = f"{self._sharded.program.name}.{name}"
            yield Collective(op, step.action.value, step.axes, phase, dtype, elements)

    def _own(
        self, made: ShardedCall, phase: Literal["forward", "backward"], shown: Phase | None = None
    ) -> Iterator[Collective]:
        """An op reduces over the axes that split what it cannot work on alone. shown: the phase that it belongs to."""
        op = made.call.op
        axes = inner_axes(self._sharded, made)
        real = tuple(axis for axis in axes if self._extents.mesh.size(axis) > 1)
        if not real:
            return
        value = self._sharded.program.values[str(op.inputs[0])]
        kept = own_axes(value, made)
        layout = {a: s for a, s in self._sharded.layouts[str(made.operands[0])].items() if a not in axes}
        for when, what in made.own:
            if when == phase:
                name = f"{self._sharded.program.name}.{op.name} {what}"
                elements = self._extents.elements(kept, layout)
                yield Collective(name, Action.ALL_REDUCE.value, real, shown or phase, "wide", elements)


def inner_axes(sharded: ShardedProgram, made: ShardedCall) -> tuple[str, ...]:
    """Mesh axes that split an inner axis of the op's first input."""
    inner = made.call.op.signature.inner
    layout = sharded.layouts[str(made.operands[0])]
    return tuple(axis for axis, state in layout.items() if state.kind is Kind.SHARD and state.dim in inner)


def own_axes(value: Value, made: ShardedCall) -> Axes:
    """What one of the op's own collectives has a number for."""
    signature = made.call.op.signature
    return tuple(axis for axis in value.axes if axis.name not in (*signature.inner, *signature.local))
