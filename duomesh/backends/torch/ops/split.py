"""Ops on tensors of which a rank holds a part, where that is more than the whole op on a smaller tensor.

A look-up in a table split by rows, a cross entropy over a split vocabulary, a norm over split heads, and a linear whose
input is gathered again in backward.

Shape letters: B batch, S sequence, H hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from duomesh.backends.torch.collectives import all_max, all_reduce
from duomesh.backends.torch.moves import Move
from duomesh.backends.torch.ops.dense import embedding, scaled, unpacked, wide
from duomesh.core.batch import IGNORE

__all__ = ["Split", "gathered_linear", "split_cross_entropy", "split_embedding", "split_norm"]


@dataclass(frozen=True)
class Split:
    """The part of a dim that this rank has.

    group: name of the process group that has the others; empty where none is needed. first: position of its first
    element. size: true size of the whole dim.
    """

    group: str
    first: int
    size: int


def split_embedding(ids: Tensor, weight: Tensor, *, split: Split) -> Tensor:
    """[B, S] ids, [V, H] rows -> [B, S, H], zeros where another rank has the row."""
    local = ids - split.first
    is_here = (local >= 0) & (local < weight.shape[0])
    rows = embedding(torch.where(is_here, local, 0), weight)
    return rows * is_here[..., None].to(rows.dtype)


class _CrossEntropy(torch.autograd.Function):
    """Saves logits and two numbers a token; the softmax is made again in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, split: Split) -> Tensor:
        z = _without_padding(wide(logits), split)
        top = all_max(z.amax(-1), split.group)
        total = all_reduce((z - top[..., None]).exp().sum(-1), split.group)
        local = labels - split.first
        is_here = (local >= 0) & (local < logits.shape[-1]) & (labels != IGNORE)
        index = torch.where(is_here, local, 0).long()
        picked = z.gather(-1, index[..., None])[..., 0]
        picked = all_reduce(torch.where(is_here, picked, 0.0), split.group)
        log_sum = total.log() + top
        ctx.save_for_backward(logits, labels, index, is_here, log_sum)
        ctx.split = split
        return torch.where(labels != IGNORE, log_sum - picked, 0.0)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        """(softmax - one-hot) c in this rank's columns."""
        logits, labels, index, is_here, log_sum = ctx.saved_tensors
        z = _without_padding(wide(logits), ctx.split)
        out = (z - log_sum[..., None]).exp_()
        out.scatter_add_(-1, index[..., None], -is_here[..., None].to(out.dtype))
        weight = torch.where(labels != IGNORE, cotangent, 0.0)
        return (out * weight[..., None]).to(logits.dtype), None, None


def _without_padding(logits: Tensor, split: Split) -> Tensor:
    """Columns beyond the vocabulary are in no softmax."""
    real = split.size - split.first
    if real >= logits.shape[-1]:
        return logits
    columns = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(columns >= real, float("-inf"))


def split_cross_entropy(logits: Tensor, labels: Tensor, *, split: Split) -> Tensor:
    """[B, S, V] columns of logits, [B, S] labels -> [B, S] losses in at least fp32; 0 where the label is IGNORE."""
    return _CrossEntropy.apply(logits, labels, split)


class _SumOver(torch.autograd.Function):
    """A sum over ranks of what each then uses for its own part: partial -> replicated, whose dual is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return all_reduce(cotangent, ctx.group), None


def split_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    centered: bool,
    eps: float,
    weight_offset: float,
    cast: str,
    norm_dims: int,
    split: Split,
) -> Tensor:
    """A root-mean-square norm over dims that ranks have parts of: their sums of squares are added up.

    split.size is the number of elements that are normed together.
    """
    assert not centered
    shape, x = x.shape, x.flatten(-norm_dims)
    x_wide = wide(x)
    squares = _SumOver.apply(x_wide.square().sum(-1, keepdim=True), split.group)
    normed = x_wide * torch.rsqrt(squares / split.size + eps)
    return scaled(normed, weight, bias, x.dtype, weight_offset=weight_offset, cast=cast).view(shape)


class _GatheredLinear(torch.autograd.Function):
    """Saves the part of the input that the rank had, and gathers the rest again for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, move: Move) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.move, ctx.has_bias = move, bias is not None
        return F.linear(move.forward(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, c: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        whole = ctx.move.forward(x)  # on its way while the next matmul runs
        d_x = ctx.move.backward(c @ weight)
        rows = c.flatten(0, -2)
        d_weight = rows.T @ whole.flatten(0, -2)
        return d_x, d_weight, rows.sum(0) if ctx.has_bias else None, None


def gathered_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    move: Move,
    outs: tuple[tuple[int, ...], ...],
    biased: tuple[bool, ...],
    in_dims: int,
) -> tuple[Tensor, ...]:
    """`linear` of a value that `move` gathers, forward and once more in backward."""
    assert in_dims == 1
    packed = _GatheredLinear.apply(x, weight, bias if all(biased) else None, move)
    return unpacked(packed, bias, outs, biased)
