"""What one rank holds of a sharded model: shapes of its arrays, and which part of each whole parameter they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.errors import BackendError
from duomesh.core.ir.storage import Member, Slot
from duomesh.core.ir.values import Attr, Axis, Param
from duomesh.core.sharding.layouts import Extents, Layout
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.program import ShardedCall, ShardedModelProgram, ShardedProgram, param_axes

__all__ = [
    "check_batch",
    "fill_batch",
    "local_kwargs",
    "local_param",
    "local_slots",
    "place_on",
    "stored_indices",
    "stored_positions",
]


def place_on(mesh: Mesh, axes: Iterable[str], coordinate: Mapping[str, int]) -> int:
    """A rank's place among those that differ from it on these axes only, axes from major to minor."""
    place = 0
    for axis in axes:
        place = place * mesh.size(axis) + coordinate[axis]
    return place


def check_batch(sharded: ShardedModelProgram, shape: tuple[int, int]) -> None:
    """Raises BackendError if the ranks cannot share a micro-batch of [samples, tokens] in equal parts."""
    for what, size, parts in zip(("samples", "tokens"), shape, _parts(sharded), strict=True):
        if size % parts:
            layout = ",".join(f"{axis.name}={axis.size}" for axis in sharded.mesh.axes)
            raise BackendError(
                f"a mesh of {layout} cannot share a micro-batch of {shape[0]} samples of {shape[1]} tokens: "
                f"{size} is no multiple of {parts}. Give a multiple of {parts} {what}."
            )


def fill_batch(sharded: ShardedModelProgram, tokens: Array) -> Array:
    """Ids [B, S] as the ranks can share them: with the last samples again, and ids 0 at the end of each, which a causal
    model cannot see from before."""
    extra = [-size % parts for size, parts in zip(tokens.shape, _parts(sharded), strict=True)]
    longer = np.pad(tokens, ((0, 0), (0, extra[1])))
    return np.pad(longer, ((0, extra[0]), (0, 0)), "edge")


def _parts(sharded: ShardedModelProgram) -> tuple[int, int]:
    """What the samples and the tokens of a batch must be multiples of."""
    mesh, rules = sharded.mesh, sharded.rules
    samples, tokens = (
        prod(mesh.size(axis) for axis in mesh.names if name in (rules[axis].data, rules[axis].stream))
        for name in ("batch", "seq")
    )
    return samples, tokens


def local_param(param: Param, layout: Layout, extents: Extents) -> Param:
    """The parameter as one rank has it: the same name, axes of local size, padding included."""
    sizes = iter(extents.shape(param_axes(param), layout))
    groups = tuple(tuple(Axis(axis.name, next(sizes)) for axis in group) for group in param.groups)
    return Param(param.name, groups, param.init)


def local_slots(sharded: ShardedProgram, extents: Extents) -> dict[str, Slot]:
    """Storage tensors of one application of a program, with the rows that a rank has, by local name."""
    out = {}
    for slot in sharded.program.slots.values():
        members, start = [], 0
        for member in slot.members:
            param = local_param(member.param, sharded.layouts[member.param.name], extents)
            members.append(Member(param, start, start + param.shape[0]))
            start += param.shape[0]
        out[slot.name] = Slot(slot.name, tuple(members))
    return out


def local_kwargs(sharded: ShardedProgram, made: ShardedCall, extents: Extents) -> dict[str, Attr]:
    """Keyword arguments of an op's function for local shapes."""
    kwargs = dict(made.call.kwargs)
    if made.call.op.kind == "linear":
        half = len(made.operands) // 2
        outs = []
        for name in made.operands[1 : 1 + half]:
            assert name is not None
            param = sharded.program.param_by_name[sharded.origin[name]]
            outs.append(tuple(a.size for a in local_param(param, sharded.layouts[name], extents).groups[0]))
        kwargs["outs"] = tuple(outs)
    return kwargs


def stored_indices(param: Param, layout: Layout, extents: Extents, coordinate: Mapping[str, int]) -> tuple[Array, ...]:
    """Which positions a rank has along each stored dim of a whole parameter, in the order of its local part.

    Its part is `whole[np.ix_(*indices)]`, followed by rows of padding where there are any. A stored dim merges several
    axes, so the positions may be several runs. Axes are split contiguously.
    """
    axes = param_axes(param)
    ranges = []
    for axis, length in zip(axes, extents.shape(axes, layout), strict=True):
        place = place_on(extents.mesh, extents.splitting(axis.name, layout), coordinate)
        ranges.append((place * length, (place + 1) * length))
    return stored_positions(param, ranges)


def stored_positions(param: Param, ranges: Sequence[tuple[int, int]]) -> tuple[Array, ...]:
    """Positions along each stored dim of a whole parameter that have every logical axis within its range.

    ranges: [start, stop) along each logical axis; what is beyond its size is padding.
    """
    sides = iter(ranges)
    out = []
    for group in param.groups:
        positions = np.zeros(1, np.int64)
        for axis in group:
            size = axis.size or 0
            start, stop = next(sides)
            positions = (positions[:, None] * size + np.arange(min(start, size), min(stop, size))).reshape(-1)
        out.append(positions)
    return tuple(out)
