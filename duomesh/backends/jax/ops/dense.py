"""Ops that act on each token by itself. Same names, in the same order, as the torch backend's.

Signatures and meanings: `duomesh.core.ir.ops`. Shape letters: B batch, S sequence, H hidden, R rotary_dim / 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = ["activation", "add", "embedding", "glu", "linear", "norm", "rope", "rope_table", "scale", "softcap", "wide"]


def wide(x: Array) -> Array:
    """x in at least fp32."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


# Elementwise work in the wide dtype is done again in the backward pass: what it would save is wider than its inputs,
# and XLA fuses it into what reads it. Inside a scan nothing could undo this, so no barrier is needed.
_recomputed = partial(jax.checkpoint, prevent_cse=False)


def _spread(weight: Array, like: Array) -> Array:
    """A weight of the last dims, broadcast to `like` in its dtype.

    The broadcast is done in the wide dtype, so that its transpose, the sum over tokens that makes the weight's
    gradient, accumulates there: XLA sums bf16 in bf16.
    """
    return jnp.broadcast_to(wide(weight), like.shape).astype(like.dtype)


def embedding(ids: Array, weight: Array) -> Array:
    """[B, S] ids -> [B, S, H]. The gradient of a row that occurs many times is summed in the wide dtype."""
    return _embedding(ids, weight, weight.shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _embedding(ids: Array, weight: Array, rows: int) -> Array:
    return weight[ids]


def _embedding_forward(ids: Array, weight: Array, rows: int) -> tuple[Array, Array]:
    return weight[ids], ids  # not the weight: it may have been gathered


def _embedding_backward(rows: int, ids: Array, cotangent: Array) -> tuple[None, Array]:
    zeros = jnp.zeros((rows, cotangent.shape[-1]), wide(cotangent).dtype)
    return None, zeros.at[ids].add(cotangent.astype(zeros.dtype)).astype(cotangent.dtype)


_embedding.defvjp(_embedding_forward, _embedding_backward)


def scale(x: Array, *, factor: float) -> Array:
    # checkpoints of families that scale hold the factor as a tensor of the activation dtype: round it first
    return x * jnp.asarray(factor, x.dtype)


def norm(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    centered: bool,
    eps: float,
    weight_offset: float,
    cast: str,
    norm_dims: int,
) -> Array:
    """Over the last `norm_dims` dims together, statistics in at least fp32; returns x's dtype."""
    shape = x.shape

    @_recomputed
    def normalise(x: Array, weight: Array, bias: Array | None) -> Array:
        x_wide = wide(x)
        if centered:
            x_wide = x_wide - x_wide.mean(-1, keepdims=True)
        normed = x_wide * jax.lax.rsqrt(jnp.square(x_wide).mean(-1, keepdims=True) + eps)
        gain = weight if weight_offset == 0.0 else wide(weight) + weight_offset
        if cast == "before_weight":
            out = normed.astype(x.dtype)
            out = out * _spread(gain.astype(x.dtype), out)
            return out if bias is None else out + _spread(bias, out)
        out = normed * wide(gain)
        return (out if bias is None else out + wide(bias)).astype(x.dtype)

    return normalise(x.reshape(*shape[: len(shape) - norm_dims], -1), weight, bias).reshape(shape)


def linear(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    outs: tuple[tuple[int, ...], ...],
    biased: tuple[bool, ...],
    in_dims: int,
) -> tuple[Array, ...]:
    """[..., in dims] by a pack [sum of rows, in] -> one [..., *out] for each of `outs`."""
    lead = x.shape[: x.ndim - in_dims]
    x = x.reshape(*lead, weight.shape[1])
    y = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    if bias is not None and all(biased):
        y = y + _spread(bias, y)
    rows = [prod(out) for out in outs]
    parts = jnp.split(y, np.cumsum(rows)[:-1], axis=-1)
    if bias is not None and not all(biased):
        pieces = iter(jnp.split(bias, np.cumsum([n for n, has in zip(rows, biased, strict=True) if has])[:-1]))
        parts = [part + _spread(next(pieces), part) if has else part for part, has in zip(parts, biased, strict=True)]
    return tuple(part.reshape(*lead, *out) for part, out in zip(parts, outs, strict=True))


def rope_table(positions: Array, inv_freq: Array, *, attention_factor: float) -> tuple[Array, Array]:
    """[B, S] positions, [R] frequencies -> cos, sin [B, S, R] in inv_freq's dtype, which is wide."""
    angles = positions[..., None].astype(inv_freq.dtype) * inv_freq
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def rope(x: Array, cos: Array, sin: Array, *, pairing: str, compute: str) -> Array:
    """Rotates the first 2R channels of x [B, S, *heads, D]."""
    heads = x.ndim - cos.ndim
    shape = (*cos.shape[:2], *[1] * heads, cos.shape[-1])
    dtype = x.dtype if compute == "activation" else wide(x).dtype
    cos, sin = cos.reshape(shape).astype(dtype), sin.reshape(shape).astype(dtype)
    rotated, rest = x[..., : 2 * cos.shape[-1]].astype(dtype), x[..., 2 * cos.shape[-1] :]
    if pairing == "half":
        first, second = jnp.split(rotated, 2, axis=-1)
        out = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        out = jnp.stack((first * cos - second * sin, second * cos + first * sin), -1).reshape(rotated.shape)
    out = out.astype(x.dtype)
    return out if rest.shape[-1] == 0 else jnp.concatenate((out, rest), -1)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def glu(gate: Array, up: Array, *, activation: str) -> Array:
    function = _ACTIVATIONS[activation]
    return _recomputed(lambda g, u: (function(wide(g)) * wide(u)).astype(g.dtype))(gate, up)


def activation(x: Array, *, activation: str) -> Array:
    function = _ACTIVATIONS[activation]
    return _recomputed(lambda x: function(wide(x)).astype(x.dtype))(x)


def add(x: Array, y: Array) -> Array:
    return x + y


def softcap(x: Array, *, cap: float) -> Array:
    return cap * jnp.tanh(x / cap)
