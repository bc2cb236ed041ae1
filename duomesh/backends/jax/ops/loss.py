"""Token losses and their weighted sum. Normalisation is the session's: it knows the whole step's denominator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from duomesh.backends.jax.ops.dense import wide
from duomesh.core.batch import IGNORE

__all__ = ["cross_entropy", "masked_sum"]


def cross_entropy(logits: Array, labels: Array) -> Array:
    """[B, S, V] logits, [B, S] labels -> [B, S] losses in at least fp32; 0 where the label is IGNORE."""
    logits = wide(logits)
    is_target = labels != IGNORE
    picked = jnp.take_along_axis(logits, jnp.where(is_target, labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(is_target, jax.nn.logsumexp(logits, axis=-1) - picked, 0)


def masked_sum(x: Array, mask: Array) -> Array:
    return (x * mask).sum()
