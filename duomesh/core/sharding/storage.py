"""Where parameters, gradients and optimizer state live between uses: buckets, and the ranges of them that ranks own.

A parameter has three layouts. *Compute* is the one in which ops meet it. *Storage* and *optimizer state* are the same
without ZeRO; with it they are `Flat`: the local compute shards of a bucket lie one after another, padded, and each rank
of the bucket's shared axes owns one range.

| zero | optimizer state | gradients | parameters |
|---|---|---|---|
| 0 | compute | compute | compute |
| 1 | flat | compute until the end of the step | compute |
| 2 | flat | flat, after every micro-batch | compute |
| 3 | flat | flat, after every micro-batch | flat; gathered for each use |

A bucket holds the parameters of one step of the model (the embedding, a layer, the head) whose gradients are summed
over the same axes, so that one collective serves them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from duomesh.core.ir.program import Program
from duomesh.core.sharding.layouts import Layout
from duomesh.core.sharding.program import ShardedModelProgram, param_axes
from duomesh.core.sharding.transitions import Kind

__all__ = ["Bucket", "Flat", "Member", "Storage"]


@dataclass(frozen=True)
class Member:
    """A parameter's local compute shard, flattened: elements [start, start + size) of its bucket."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Flat:
    """Elements [start, stop) of a bucket."""

    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed together.

    Attributes:
        name: `<prefix of the step>bucket<n>`.
        stage, step: of the pipeline and of the model's steps.
        summed: mesh axes over which the gradients are summed.
        shared: those of them whose ranks own one range each; none without ZeRO.
        parts: number of ranges.
    """

    name: str
    stage: int
    step: int
    summed: tuple[str, ...]
    shared: tuple[str, ...]
    parts: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        """Elements with padding, a multiple of `parts`."""
        used = self.members[-1].start + self.members[-1].size
        return -(-used // self.parts) * self.parts

    @property
    def rest(self) -> tuple[str, ...]:
        """Axes of the sum on which every rank keeps the same range."""
        return tuple(axis for axis in self.summed if axis not in self.shared)

    def flat(self, part: int) -> Flat:
        length = self.size // self.parts
        return Flat(part * length, (part + 1) * length)

    def slices(self, part: int) -> Iterator[tuple[Member, int, int]]:
        """(member, start, stop) of the elements of its flattened shard that lie in a rank's range."""
        mine = self.flat(part)
        for member in self.members:
            start = max(mine.start - member.start, 0)
            stop = min(mine.stop - member.start, member.size)
            if start < stop:
                yield member, start, stop


class Storage:
    """The buckets of a sharded model.

    Args:
        zero: 0 to 3, see the table.
    """

    def __init__(self, sharded: ShardedModelProgram, zero: int) -> None:
        self.sharded, self.zero = sharded, zero

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order of the model's steps."""
        sharded = self.sharded
        groups: dict[tuple[int, tuple[str, ...], tuple[int, ...]], list[str]] = {}
        seen: set[tuple[str, int]] = set()
        for index, (prefix, stage, program) in enumerate(sharded.steps):
            # in the order in which they are stored, so that a pack is one run of its bucket
            packed = [member.param.name for slot in program.program.slots.values() for member in slot.members]
            for local in packed:
                name = sharded.canonical(prefix, local)
                if (name, stage) not in seen:
                    seen.add((name, stage))
                    owners = sharded.owners[name]
                    tie = owners if len(owners) > 1 else ()  # its ranges must be the same in every owner
                    groups.setdefault((index, sharded.reduction_axes(name, stage), tie), []).append(name)
        made: list[Bucket] = []
        numbers: dict[int, int] = {}
        for (index, summed, _), names in groups.items():
            number = numbers.get(index, 0)
            numbers[index] = number + 1
            made.append(self._bucket(index, number, summed, names))
        return tuple(made)

    def _bucket(self, index: int, number: int, summed: tuple[str, ...], names: list[str]) -> Bucket:
        prefix, stage, _ = self.sharded.steps[index]
        mesh, rules = self.sharded.mesh, self.sharded.rules
        summed = tuple(axis for axis in summed if mesh.size(axis) > 1)
        shared = tuple(axis for axis in summed if rules[axis].shares) if self.zero else ()
        members, start = [], 0
        for name in names:
            size = self.local_elements(name, stage)
            members.append(Member(name, start, size))
            start += size
        parts = prod(mesh.size(axis) for axis in shared)
        return Bucket(f"{prefix}bucket{number}", stage, index, summed, shared, parts, tuple(members))

    @cached_property
    def by_param(self) -> dict[tuple[str, int], Bucket]:
        """The bucket of each (canonical name, stage)."""
        return {(member.name, bucket.stage): bucket for bucket in self.buckets for member in bucket.members}

    def used(self, index: int, *, in_backward: bool = False) -> list[Bucket]:
        """Buckets that a step of the model reads; those that its backward reads."""
        prefix, stage, program = self.sharded.steps[index]
        wanted = _read_in_backward(program.program) if in_backward else [p.name for p in program.program.params]
        found = {self.by_param[self.sharded.canonical(prefix, local), stage]: None for local in wanted}
        return list(found)

    def local_elements(self, name: str, stage: int) -> int:
        """Elements of a parameter's compute shard, padding included."""
        axes = param_axes(self.sharded.model.params[name])
        return self.sharded.extents(batch=1, seq=1).elements(axes, self.sharded.params[name, stage])

    @cached_property
    def norm_axes(self) -> tuple[str, ...]:
        """Axes over which the squares of gradients are summed: those that split a parameter's shard or a bucket."""
        found: set[str] = set()
        for bucket in self.buckets:
            found.update(bucket.shared)
            for member in bucket.members:
                found.update(_split_axes(self.sharded.params[member.name, bucket.stage]))
        return tuple(axis for axis in self.sharded.mesh.names if axis in found and self.sharded.mesh.size(axis) > 1)

    def counts(self, bucket: Bucket, member: Member, coordinate: Mapping[str, int]) -> bool:
        """Whether a rank's elements of a gradient count in the global norm, where each element counts once.

        Ranks that hold the same elements are those of the axes that split neither the parameter nor its bucket; the
        first of them counts, on the axes that the norm sums over. Of the stages that own a parameter the first counts.
        """
        layout = self.sharded.params[member.name, bucket.stage]
        repeated = {*self.norm_axes} - {*_split_axes(layout), *bucket.shared}
        is_first = all(coordinate[axis] == 0 for axis in repeated)
        return is_first and bucket.stage == self.sharded.owners[member.name][0]


def _split_axes(layout: Layout) -> list[str]:
    return [axis for axis, state in layout.items() if state.kind is Kind.SHARD]


def _read_in_backward(program: Program) -> list[str]:
    """A weight is needed again for the cotangent of what it met; a look-up table met nothing that has one."""
    return [
        name
        for op in program.ops
        if any(value in program.differentiated for value in op.inputs)
        for name in op.params
        if name is not None
    ]
