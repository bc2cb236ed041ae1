"""What ops and adjoints have in common: the wide dtype, and types of operands."""

from __future__ import annotations

import numpy as np

from duomesh.core.arrays import Array

__all__ = ["Arrays", "Cotangents", "Operands", "log_softmax", "merge_last", "wide"]

Arrays = tuple[Array, ...]
Operands = tuple[Array | None, ...]  # None for an optional one that is absent
Cotangents = tuple[Array | None, ...]


def wide(x: Array) -> Array:
    """x in float32, or as it is if it is float64."""
    return x if x.dtype == np.float64 else x.astype(np.float32)


def merge_last(x: Array, dims: int) -> Array:
    """[..., a, b, c] -> [..., a * b * c] for dims = 3."""
    return x.reshape(*x.shape[: x.ndim - dims], -1)


def log_softmax(logits: Array) -> Array:
    """[..., V] -> wide log-probabilities; finite for any finite input, as nothing leaves the log domain."""
    shifted = wide(logits) - wide(logits).max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
