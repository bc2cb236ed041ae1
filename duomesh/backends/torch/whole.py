"""Whole values and parameters from the parts of all ranks, as host arrays.

For comparison: every rank takes part, and every rank gets the whole array. Checkpoints go by pieces instead.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from duomesh.backends.torch.arrays import to_array
from duomesh.backends.torch.groups import Groups
from duomesh.core.arrays import Array
from duomesh.core.ir.values import Axes, Param
from duomesh.core.sharding.layouts import Extents, Layout
from duomesh.core.sharding.program import param_axes
from duomesh.kernels.reference.ranks import Ranks

__all__ = ["gather_value", "whole_param"]


def whole_param(local: Tensor, param: Param, layout: Layout, extents: Extents, groups: Groups) -> Array:
    """The parameter from all ranks' parts, dtype kept. Ranks that have the same part must have the same bits."""
    if groups.mesh.world_size == 1:
        return to_array(local)
    shape = extents.shape(param_axes(param), layout)
    return gather_value(local.reshape(shape), param_axes(param), layout, extents, groups).reshape(param.shape)


def gather_value(local: Tensor, axes: Axes, layout: Layout, extents: Extents, groups: Groups) -> Array:
    """A value from all ranks' arrays: slices joined, sums taken, padding dropped."""
    if groups.mesh.world_size == 1:
        return to_array(local)
    bits = local.detach().contiguous()
    parts = [torch.empty_like(bits) for _ in range(groups.mesh.world_size)]
    dist.all_gather(parts, bits)
    run_time = {"batch": extents.batch, "seq": extents.seq}
    sizes = [run_time[axis.name] if axis.size is None else axis.size for axis in axes]
    names = [axis.name for axis in axes]
    return Ranks(extents).whole([to_array(part) for part in parts], names, sizes, layout)
