"""Dropout by counters: see `duomesh.core.dropout`. Same names, in the same order, as the JAX backend's.

Masks are drawn again in the backward pass, which therefore keeps three small vectors. Shape letters: B batch,
S sequence, G groups of four features.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from duomesh.core.dropout import drop_below
from duomesh.core.random import KEY_STEPS, MULTIPLIERS, ROUNDS

__all__ = ["dropout"]

_U32 = 0xFFFFFFFF
Words = tuple[Tensor, Tensor, Tensor, Tensor]


def dropout(
    x: Tensor, samples: Tensor | None, places: Tensor | None, key: Tensor | None, *, rate: float, site: int
) -> Tensor:
    """x / (1 - rate) where it is kept, else 0; x itself without a key. [B, S, ...], [B], [S], [2] -> [B, S, ...]."""
    if samples is None or places is None or key is None:
        return x
    return _Dropout.apply(x, samples, places, key, rate, site)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, samples: Tensor, places: Tensor, key: Tensor, rate: float, site: int) -> Tensor:
        ctx.save_for_backward(samples, places, key)
        ctx.rate, ctx.site = rate, site
        return _drop(x, samples, places, key, rate, site)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        samples, places, key = ctx.saved_tensors
        return _drop(grad, samples, places, key, ctx.rate, ctx.site), None, None, None, None, None


def _drop(x: Tensor, samples: Tensor, places: Tensor, key: Tensor, rate: float, site: int) -> Tensor:
    keep = _kept(samples, places, key, prod(x.shape[2:]), rate, site).view(x.shape)
    factor = torch.tensor(1 / (1 - rate), dtype=x.dtype, device=x.device)
    return torch.where(keep, x * factor, 0)


def _kept(samples: Tensor, places: Tensor, key: Tensor, features: int, rate: float, site: int) -> Tensor:
    """[B, S, features] which elements are kept."""
    # An arange as one of the two words that Philox multiplies would be compiled to a product in int32 (torch 2.11).
    group = torch.arange(-(-features // 4), device=samples.device)
    words = _philox((_word(places)[:, None], group, _word(samples)[:, None, None], site), _word(key))
    # one byte for four features: a kernel that expands it does not draw the words four times
    bits = sum(((word >= drop_below(rate)).to(torch.uint8) << i for i, word in enumerate(words)), 0)
    spread = bits[..., None] >> torch.arange(4, dtype=torch.uint8, device=bits.device)
    return (spread & 1).bool().flatten(-2)[..., :features]


def _word(x: Tensor) -> Tensor:
    """int32 numbers as the words of their bits, in int64."""
    return x.long() & _U32


def _philox(counter: tuple[Tensor, Tensor, Tensor, Tensor | int], key: Tensor) -> Words:
    """Four words of random bits in int64 for each counter of four, broadcast together. Products of words wrap around
    2^64, which leaves their bits as they are."""
    c0, c1, c2, c3 = counter
    k0, k1 = key.unbind()
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _U32) ^ c1 ^ k0, p1 & _U32, (p0 >> 32 & _U32) ^ c3 ^ k1, p0 & _U32
        k0, k1 = k0 + KEY_STEPS[0] & _U32, k1 + KEY_STEPS[1] & _U32
    return c0, c1, c2, c3
