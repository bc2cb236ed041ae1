"""Dropout by counters: see `duomesh.core.dropout`. Same names, in the same order, as the torch backend's.

Masks are drawn again in the backward pass, which therefore keeps three small vectors. Shape letters: B batch,
S sequence, G groups of four features.
"""

from __future__ import annotations

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import Array, lax

from duomesh.core.dropout import drop_below
from duomesh.core.random import KEY_STEPS, MULTIPLIERS, ROUNDS

__all__ = ["dropout"]

Words = tuple[Array, Array, Array, Array]


def dropout(
    x: Array, samples: Array | None, places: Array | None, key: Array | None, *, rate: float, site: int
) -> Array:
    """x / (1 - rate) where it is kept, else 0; x itself without a key. [B, S, ...], [B], [S], [2] -> [B, S, ...]."""
    if samples is None or places is None or key is None:
        return x
    return _dropout(x, samples, places, key, rate, site)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _dropout(x: Array, samples: Array, places: Array, key: Array, rate: float, site: int) -> Array:
    return _drop(x, samples, places, key, rate, site)


Saved = tuple[Array, Array, Array]


def _forward(x: Array, samples: Array, places: Array, key: Array, rate: float, site: int) -> tuple[Array, Saved]:
    return _drop(x, samples, places, key, rate, site), (samples, places, key)


def _backward(rate: float, site: int, saved: Saved, cotangent: Array) -> tuple[Array, None, None, None]:
    return _drop(cotangent, *saved, rate, site), None, None, None


_dropout.defvjp(_forward, _backward)


def _drop(x: Array, samples: Array, places: Array, key: Array, rate: float, site: int) -> Array:
    keep = _kept(samples, places, key, prod(x.shape[2:]), rate, site).reshape(x.shape)
    return jnp.where(keep, x * jnp.asarray(1 / (1 - rate), x.dtype), 0)


def _kept(samples: Array, places: Array, key: Array, features: int, rate: float, site: int) -> Array:
    """[B, S, features] which elements are kept."""
    group = jnp.arange(-(-features // 4), dtype=jnp.uint32)
    counter = (_word(places)[:, None], group, _word(samples)[:, None, None], jnp.uint32(site))
    words = _philox(counter, _word(key))
    # one byte for four features: a kernel that expands it does not draw the words four times
    limit = jnp.uint32(drop_below(rate))
    bits = sum(((word >= limit).astype(jnp.uint8) << i for i, word in enumerate(words)), jnp.uint8(0))
    spread = bits[..., None] >> jnp.arange(4, dtype=jnp.uint8)
    return (spread & 1).astype(bool).reshape(*bits.shape[:2], -1)[..., :features]


def _word(x: Array) -> Array:
    """int32 numbers as the words of their bits."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def _philox(counter: Words, key: Array) -> Words:
    """Four words of random bits for each counter of four, broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key[0], key[1]
    m0, m1 = MULTIPLIERS
    for _ in range(ROUNDS):
        p0, p1 = c0 * jnp.uint32(m0), c2 * jnp.uint32(m1)
        c0, c1, c2, c3 = _high(c2, m1) ^ c1 ^ k0, p1, _high(c0, m0) ^ c3 ^ k1, p0
        k0, k1 = k0 + jnp.uint32(KEY_STEPS[0]), k1 + jnp.uint32(KEY_STEPS[1])
    return c0, c1, c2, c3


def _high(x: Array, multiplier: int) -> Array:
    """The upper 32 bits of a product of words."""
    # Products of 16-bit halves would do without 64-bit types, which most runs do not have: but XLA takes ten times as
    # long to compile them on a CPU (jax 0.10.2).
    with jax.enable_x64(True):
        return (x.astype(jnp.uint64) * jnp.uint64(multiplier) >> jnp.uint64(32)).astype(jnp.uint32)
