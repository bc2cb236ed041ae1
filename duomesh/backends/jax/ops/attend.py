"""Grouped-query causal attention.

Shape letters: B batch, S sequence, K kv heads, G query heads per kv head, D head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array

from duomesh.backends.jax.ops.dense import wide

__all__ = ["attention"]


def attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    allow_cudnn: bool = False,
) -> Array:
    """q [B, S, K, G, D], k and v [B, S, K, D] -> [B, S, K, G, D]; scores and softmax in at least fp32.

    allow_cudnn: use cuDNN's fused kernel where it computes the same function (16-bit, no cap, no segments).
    """
    _, length, _, group, dim = q.shape
    fits = q.dtype.itemsize == 2 and dim % 8 == 0 and dim <= 256 and softcap is None and segment_ids is None
    if allow_cudnn and fits:
        is_windowed = window is not None and window < length
        out = jax.nn.dot_product_attention(
            rearrange(q, "b s k g d -> b s (k g) d"),
            k,
            v,
            scale=scale,
            is_causal=True,
            # JAX counts the keys to the left of the current token
            local_window_size=(window - 1, 0) if is_windowed and window is not None else None,
            implementation="cudnn",
        )
        return rearrange(out, "b s (k g) d -> b s k g d", g=group)
    accumulator = wide(q).dtype
    scores = jnp.einsum("bikgd,bjkd->bkgij", q, k, preferred_element_type=accumulator) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(_mask(length, window, segment_ids), scores, -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgij,bjkd->bikgd", probs, v)


def _mask(length: int, window: int | None, segment_ids: Array | None) -> Array:
    """True where query i may read key j: [S, S], or [B, 1, 1, S, S] with segments."""
    i = jnp.arange(length)[:, None]
    j = jnp.arange(length)[None, :]
    allowed = j <= i
    if window is not None:
        allowed = allowed & (j > i - window)  # the window counts the current token
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        allowed = allowed & same[:, None, None]
    return allowed
