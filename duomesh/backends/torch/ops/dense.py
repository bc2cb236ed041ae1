"""Ops that act on each token by itself. Same names, in the same order, as the JAX backend's.

Signatures and meanings: `duomesh.core.ir.ops`. Shape letters: B batch, S sequence, H hidden, R rotary_dim / 2.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "activation",
    "add",
    "embedding",
    "glu",
    "linear",
    "norm",
    "rope",
    "rope_table",
    "scale",
    "scaled",
    "softcap",
    "unpacked",
    "wide",
]


def wide(x: Tensor) -> Tensor:
    """x in at least fp32."""
    return x if x.dtype == torch.float64 else x.float()


class _Lookup(torch.autograd.Function):
    """A look-up in a narrow table whose gradient is summed in the wide dtype and rounded once."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids, weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ids, weight = ctx.saved_tensors
        total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        total.index_add_(0, ids.flatten(), grad.flatten(0, -2).float())
        return None, total.to(weight.dtype)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """[B, S] ids -> [B, S, H]. The gradient of a row that occurs many times is summed in the wide dtype."""
    if weight.dtype in (torch.float32, torch.float64):
        return F.embedding(ids, weight)
    return _Lookup.apply(ids, weight)


def scale(x: Tensor, *, factor: float) -> Tensor:
    # checkpoints of families that scale hold the factor as a tensor of the activation dtype: round it first
    return x * torch.tensor(factor, dtype=x.dtype, device=x.device)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    centered: bool,
    eps: float,
    weight_offset: float,
    cast: str,
    norm_dims: int,
) -> Tensor:
    """Over the last `norm_dims` dims together, statistics in at least fp32; returns x's dtype."""
    shape, x = x.shape, x.flatten(-norm_dims)
    x_wide = wide(x)
    if centered:
        x_wide = x_wide - x_wide.mean(-1, keepdim=True)
    normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return scaled(normed, weight, bias, x.dtype, weight_offset=weight_offset, cast=cast).view(shape)


def scaled(
    normed: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, weight_offset: float, cast: str
) -> Tensor:
    """A normed value times its gain, plus its bias, rounded to `dtype` where the convention says."""
    gain = weight if weight_offset == 0.0 else wide(weight) + weight_offset
    if cast == "before_weight":
        out = normed.to(dtype) * gain.to(dtype)
        return out if bias is None else out + bias
    out = normed * wide(gain)
    return (out if bias is None else out + wide(bias)).to(dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    outs: tuple[tuple[int, ...], ...],
    biased: tuple[bool, ...],
    in_dims: int,
) -> tuple[Tensor, ...]:
    """[..., in dims] by a pack [sum of rows, in] -> one [..., *out] for each of `outs`."""
    if in_dims > 1:
        x = x.flatten(-in_dims)
    return unpacked(F.linear(x, weight, bias if all(biased) else None), bias, outs, biased)


def unpacked(
    y: Tensor, bias: Tensor | None, outs: tuple[tuple[int, ...], ...], biased: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    """The results of a pack, each in its own shape, with the biases that not all of them have."""
    rows = [prod(out) for out in outs]
    parts = list(y.split(rows, -1)) if len(outs) > 1 else [y]
    if bias is not None and not all(biased):
        pieces = iter(bias.split([n for n, has in zip(rows, biased, strict=True) if has]))
        parts = [part + next(pieces) if has else part for part, has in zip(parts, biased, strict=True)]
    return tuple(part.unflatten(-1, out) if len(out) > 1 else part for part, out in zip(parts, outs, strict=True))


def rope_table(positions: Tensor, inv_freq: Tensor, *, attention_factor: float) -> tuple[Tensor, Tensor]:
    """[B, S] positions, [R] frequencies -> cos, sin [B, S, R] in inv_freq's dtype, which is wide."""
    angles = positions[..., None].to(inv_freq.dtype) * inv_freq
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, pairing: str, compute: str) -> Tensor:
    """Rotates the first 2R channels of x [B, S, *heads, D]."""
    heads = x.dim() - cos.dim()
    shape = (*cos.shape[:2], *[1] * heads, cos.shape[-1])
    dtype = x.dtype if compute == "activation" else wide(x).dtype
    cos, sin = cos.reshape(shape).to(dtype), sin.reshape(shape).to(dtype)
    rotated, rest = x[..., : 2 * cos.shape[-1]].to(dtype), x[..., 2 * cos.shape[-1] :]
    if pairing == "half":
        first, second = rotated.chunk(2, -1)
        out = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    out = out.to(x.dtype)
    return out if rest.shape[-1] == 0 else torch.cat((out, rest), -1)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def glu(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    return _ACTIVATIONS[activation](gate) * up


def activation(x: Tensor, *, activation: str) -> Tensor:
    return _ACTIVATIONS[activation](x)


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def softcap(x: Tensor, *, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)
