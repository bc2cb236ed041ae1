"""Parameters as stacked arrays whose dims are shared: the storage of a backend that has no flat buckets.

Equal layers at one place of a repeated pattern are one array with a new first dim. Each array has one dim for each
logical axis of its parameter, so that an axis can be split wherever it is; an op takes them merged.

ZeRO shares a dim: beside its compute layout, an array has one in which one dim is cut once more, by the shared axes as
its minor axes. The table of `storage` holds with "shared" for "flat"; what no dim of can be cut into equal parts stays
whole on the shared axes, and its gradient is summed over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Literal

from duomesh.core.ir.backward import read_in_backward, recomputed_values
from duomesh.core.ir.storage import Segment, segments
from duomesh.core.ir.values import Axes, Param
from duomesh.core.sharding.collectives import Collective, Phase, ProgramLister, StepShape
from duomesh.core.sharding.layouts import Layout
from duomesh.core.sharding.program import ShardedModelProgram, param_axes
from duomesh.core.sharding.transitions import Action

__all__ = ["Place", "Stack", "Stacks", "stack_collectives", "stack_trace"]


@dataclass(frozen=True)
class Place:
    """Where a canonical parameter lies: entry `index` of a stack, or the whole array if None."""

    stack: str
    index: int | None


@dataclass(frozen=True)
class Stack:
    """One stored array.

    Attributes:
        name: the canonical name, or `segments.<segment>.<place in the pattern>.<local name>`.
        members: canonical names, one for each layer.
        is_stacked: whether the first dim counts layers.
        param: of a member.
        layout: of a member where ops meet it.
        summed: mesh axes over which the gradient is summed.
        shared: those of them that cut `dim` in storage; none without ZeRO.
        dim: position of the logical axis that they cut; None if there is none.
        sizes: of each logical axis, padding included.
        cuts: mesh axes that split each logical axis in the compute layout, from major to minor.
        parts: size of every mesh axis.
    """

    name: str
    members: tuple[str, ...]
    is_stacked: bool
    param: Param
    layout: Layout
    summed: tuple[str, ...]
    shared: tuple[str, ...]
    dim: int | None
    sizes: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]
    parts: Mapping[str, int]

    @property
    def rest(self) -> tuple[str, ...]:
        """Axes of the sum on which every rank keeps the same part."""
        return tuple(axis for axis in self.summed if axis not in self.shared)

    @property
    def axes(self) -> Axes:
        return param_axes(self.param)

    @property
    def lead(self) -> tuple[int, ...]:
        """What comes before the logical axes."""
        return (len(self.members),) if self.is_stacked else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return (*self.lead, *self.sizes)

    def splits(self, *, is_shared: bool) -> tuple[tuple[str, ...], ...]:
        """Mesh axes that split each dim of the array, from major to minor; in storage if `is_shared`."""
        cuts = [(*cut, *self.shared) if is_shared and i == self.dim else cut for i, cut in enumerate(self.cuts)]
        return (*[() for _ in self.lead], *cuts)

    def local_shape(self, *, is_shared: bool) -> tuple[int, ...]:
        splits = self.splits(is_shared=is_shared)
        return tuple(n // prod(self.parts[a] for a in axes) for n, axes in zip(self.shape, splits, strict=True))

    def elements(self, *, is_shared: bool) -> int:
        """Of all members on one rank."""
        return prod(self.local_shape(is_shared=is_shared))


class Stacks:
    """The stored arrays of a sharded model of one stage.

    Args:
        zero: 0 to 3.

    Attributes:
        segments: the repeated patterns of layers.
    """

    def __init__(self, sharded: ShardedModelProgram, zero: int) -> None:
        self.sharded, self.zero = sharded, zero
        self.segments: tuple[Segment, ...] = segments(sharded.model.layers)

    @cached_property
    def places(self) -> Mapping[str, Place]:
        """Every canonical parameter, in the program's order."""
        model = self.sharded.model
        found: dict[str, Place] = {}
        for s, segment in enumerate(self.segments):
            for position, kind in enumerate(segment.pattern):
                for i, layer in enumerate(segment.layers(position)):
                    for param in model.blocks[kind].params:
                        stack = f"segments.{s}.{position}.{param.name}"
                        found[f"layers.{layer}.{param.name}"] = Place(stack, i if segment.repeats > 1 else None)
        return {name: found.get(name, Place(name, None)) for name in model.params}

    @cached_property
    def stacks(self) -> Mapping[str, Stack]:
        """By name, in the program's order."""
        members: dict[str, list[str]] = {}
        for name, place in self.places.items():
            members.setdefault(place.stack, []).append(name)
        return {name: self._stack(name, tuple(names)) for name, names in members.items()}

    def of(self, name: str) -> Stack:
        """The stack of a canonical parameter."""
        return self.stacks[self.places[name].stack]

    def _stack(self, name: str, members: tuple[str, ...]) -> Stack:
        sharded, mesh = self.sharded, self.sharded.mesh
        param, layout = sharded.model.params[members[0]], sharded.params[members[0], 0]
        extents = sharded.extents(batch=1, seq=1)
        axes = param_axes(param)
        cuts = tuple(tuple(extents.splitting(axis.name, layout)) for axis in axes)
        parts = {axis.name: axis.size for axis in mesh.axes}
        local = extents.shape(axes, layout)
        sizes = tuple(n * prod(parts[a] for a in cut) for n, cut in zip(local, cuts, strict=True))
        summed = tuple(axis for axis in sharded.reduction_axes(members[0], 0) if mesh.size(axis) > 1)
        shared = tuple(axis for axis in summed if sharded.rules[axis].shares) if self.zero else ()
        dim = _largest_dim(local, prod(parts[axis] for axis in shared)) if shared else None
        return Stack(
            name=name,
            members=members,
            is_stacked=self.places[members[0]].index is not None,
            param=param,
            layout=layout,
            summed=summed,
            shared=() if dim is None else shared,
            dim=dim,
            sizes=sizes,
            cuts=cuts,
            parts=parts,
        )

    def used(self, index: int, *, by: Literal["forward", "backward", "recompute"] = "forward") -> list[Stack]:
        """Arrays of which a step of the model reads an entry, once each.

        by: "backward" for those that its backward reads, "recompute" if that computes the step again from its input.
        """
        prefix, _, sharded = self.sharded.steps[index]
        program = sharded.program
        local = [p.name for p in program.params]
        if by != "forward":
            read = set(chain.from_iterable(read_in_backward(program, op) for op in program.ops))
            needed = read if by == "backward" else recomputed_values(program)
            local = [name for name in local if name in needed]
        return list(
            {stack.name: stack for stack in (self.of(self.sharded.canonical(prefix, n)) for n in local)}.values()
        )

    @cached_property
    def norm_axes(self) -> tuple[str, ...]:
        """Axes over which the squares of gradients are summed: those that split any of them."""
        found = {axis for stack in self.stacks.values() for cut in stack.splits(is_shared=True) for axis in cut}
        return tuple(axis for axis in self.sharded.mesh.names if axis in found)

    def repeats(self, stack: Stack) -> tuple[str, ...]:
        """Axes among them on which every rank has the same part of a gradient: the first counts in the norm."""
        splitting = {axis for cut in stack.splits(is_shared=True) for axis in cut}
        return tuple(axis for axis in self.norm_axes if axis not in splitting)


def _largest_dim(local: tuple[int, ...], parts: int) -> int | None:
    """The longest dim that can be cut into equal parts, the first of equals."""
    fitting = [i for i, size in enumerate(local) if size % parts == 0]
    return max(fitting, key=lambda i: local[i]) if fitting else None


def stack_collectives(stacks: Stacks, shape: StepShape, *, remat: bool = False) -> list[Collective]:
    """Every collective of a step, equal ones counted together, in order of first occurrence.

    remat: as of `stack_trace`.
    """
    counts = Counter(stack_trace(stacks, shape, remat=remat))
    return [replace(made, count=count) for made, count in counts.items()]


def stack_trace(stacks: Stacks, shape: StepShape, *, remat: bool = False) -> Iterator[Collective]:
    """The same one by one: weights that are shared, forward and backward of each micro-batch, the end of the step.

    remat: whether backward computes each layer again from its input.
    """
    lister = _Lister(stacks, shape, remat)
    yield from lister.begin()
    yield from chain.from_iterable(lister.micro_batch() for _ in range(shape.micro_batches))
    yield from lister.end()


class _Lister:
    def __init__(self, stacks: Stacks, shape: StepShape, remat: bool) -> None:
        self._stacks, self._sharded = stacks, stacks.sharded
        self._again = {block.name for block in stacks.sharded.model.blocks} if remat else set()
        extents = self._sharded.extents(batch=shape.batch, seq=shape.seq)
        self._programs = {
            name: ProgramLister(program, extents, has_segments=shape.has_segments)
            for name, program in self._sharded.programs.items()
        }

    def begin(self) -> Iterator[Collective]:
        """Shared masters become weights."""
        if self._stacks.zero in (1, 2):
            for stack in self._stacks.stacks.values():
                yield from self._gather(stack, "optimizer", len(stack.members))

    def micro_batch(self) -> Iterator[Collective]:
        steps, zero = list(enumerate(self._sharded.steps)), self._stacks.zero
        for index, (_, _, program) in steps:
            if zero == 3:
                yield from chain.from_iterable(self._gather(s, "forward", 1) for s in self._stacks.used(index))
            yield from self._programs[program.program.name].forward()
        for index, (_, _, program) in reversed(steps):
            name = program.program.name
            is_again = name in self._again
            used = self._stacks.used(index, by="recompute" if is_again else "backward")
            if zero == 3:
                yield from chain.from_iterable(self._gather(s, "recompute", 1) for s in used)
            if is_again:
                yield from self._programs[name].recomputed()
            yield from self._programs[name].backward(regathers=not is_again)
            if zero == 3:
                yield from chain.from_iterable(self._scatter(s, "backward", 1) for s in self._stacks.used(index))
        if zero == 2:
            yield from self._scatters()

    def end(self) -> Iterator[Collective]:
        if self._stacks.zero == 1:
            yield from self._scatters()
        for stack in self._stacks.stacks.values():
            if stack.rest:
                elements = stack.elements(is_shared=True)
                yield Collective(stack.name, Action.ALL_REDUCE.value, stack.rest, "sync", "grad", elements)
        if self._stacks.norm_axes:
            yield Collective("global norm", Action.ALL_REDUCE.value, self._stacks.norm_axes, "norm", "wide", 1)

    def _scatters(self) -> Iterator[Collective]:
        for stack in self._stacks.stacks.values():
            yield from self._scatter(stack, "sync", len(stack.members))

    def _gather(self, stack: Stack, phase: Phase, layers: int) -> Iterable[Collective]:
        return self._moved(stack, Action.ALL_GATHER, phase, "compute", layers)

    def _scatter(self, stack: Stack, phase: Phase, layers: int) -> Iterable[Collective]:
        return self._moved(stack, Action.REDUCE_SCATTER, phase, "grad", layers)

    def _moved(self, stack: Stack, action: Action, phase: Phase, dtype: str, layers: int) -> Iterable[Collective]:
        if stack.shared:
            elements = stack.elements(is_shared=False) // len(stack.members) * layers
            yield Collective(stack.name, action.value, stack.shared, phase, dtype, elements)
