"""What one rank holds of a sharded model: shapes of its arrays, and which part of each whole parameter they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.ir.storage import Member, Slot
from duomesh.core.ir.values import Attr, Axis, Param
from duomesh.core.sharding.layouts import Extents, Layout
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.program import ShardedCall, ShardedProgram, param_axes

__all__ = ["local_kwargs", "local_param", "local_slots", "place_on", "stored_indices"]


def place_on(mesh: Mesh, axes: Iterable[str], coordinate: Mapping[str, int]) -> int:
    """A rank's place among those that differ from it on these axes only, axes from major to minor."""
    place = 0
    for axis in axes:
        place = place * mesh.size(axis) + coordinate[axis]
    return place


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
    held = dict(zip((axis.name for axis in axes), extents.shape(axes, layout), strict=True))
    out = []
    for group in param.groups:
        positions = np.zeros(1, np.int64)
        for axis in group:
            size, length = axis.size or 0, held[axis.name]
            place = place_on(extents.mesh, extents.splitting(axis.name, layout), coordinate)
            along = np.arange(min(place * length, size), min((place + 1) * length, size))
            positions = (positions[:, None] * size + along).reshape(-1)
        out.append(positions)
    return tuple(out)
