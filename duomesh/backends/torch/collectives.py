"""Collectives on tensors, as torch's functional ops: `torch.compile` traces them, and eager code calls the same.

Groups go by name, which is what the ops take. Every call waits for its result; on a GPU only the stream waits.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor

__all__ = ["all_gather", "all_gather_into", "all_max", "all_reduce", "reduce_scatter", "reduce_scatter_into", "wait"]

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of all ranks' tensors."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))


def all_max(x: Tensor, group: str) -> Tensor:
    """Elementwise the largest of all ranks' tensors."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "max", group))


def all_gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """All ranks' slices one after another along a dim."""
    lead, x = _led(x, dim)
    out = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group))
    if lead is None:
        return torch.cat(out.chunk(size), dim)
    return out.reshape(*lead, *out.shape)


def reduce_scatter(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """The sum of all ranks' tensors, of which each keeps its slice along a dim."""
    lead, x = _led(x, dim)
    if lead is None:
        x = torch.cat(x.chunk(size, dim))
    out = _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))
    return out if lead is None else out.reshape(*lead, *out.shape)


# The executor's own, into buffers that it keeps. torch 2.13 has new names for these two.
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def wait(work: dist.Work) -> None:
    """For a collective that was started without waiting. Called here, it is seen to be a wait (`watch.py`)."""
    work.wait()


def _led(x: Tensor, dim: int) -> tuple[tuple[int, ...] | None, Tensor]:
    """Dims before `dim` that have one element each, and x without them: the collective then needs no copy."""
    lead = tuple(x.shape[:dim])
    return (lead, x.reshape(x.shape[dim:])) if prod(lead) == 1 else (None, x)
