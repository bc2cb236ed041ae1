"""The JAX function of every op kind, in the order of `core.ir.ops.KINDS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duomesh.backends.jax.ops.attend import attention
from duomesh.backends.jax.ops.dense import (
    activation,
    add,
    embedding,
    glu,
    linear,
    norm,
    rope,
    rope_table,
    scale,
    softcap,
)
from duomesh.backends.jax.ops.loss import cross_entropy, masked_sum

__all__ = ["OPS"]

OPS: dict[str, Callable[..., Any]] = {
    "embedding": embedding,
    "scale": scale,
    "norm": norm,
    "linear": linear,
    "rope_table": rope_table,
    "rope": rope,
    "attention": attention,
    "glu": glu,
    "activation": activation,
    "add": add,
    "softcap": softcap,
    "cross_entropy": cross_entropy,
    "masked_sum": masked_sum,
}
