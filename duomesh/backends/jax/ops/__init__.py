"""The JAX function of every op kind but those of experts, in the order of `core.ir.ops.KINDS`."""

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
from duomesh.backends.jax.ops.dropout import dropout
from duomesh.backends.jax.ops.loss import cross_entropy, masked_sum
from duomesh.backends.jax.ops.split import Split, gathered_linear, split_cross_entropy, split_embedding, split_norm
from duomesh.core.ir.ops import EXPERT_KINDS, KINDS

__all__ = [
    "OPS",
    "Split",
    "activation",
    "add",
    "attention",
    "cross_entropy",
    "dropout",
    "embedding",
    "gathered_linear",
    "glu",
    "linear",
    "masked_sum",
    "norm",
    "rope",
    "rope_table",
    "scale",
    "softcap",
    "split_cross_entropy",
    "split_embedding",
    "split_norm",
]

OPS: dict[str, Callable[..., Any]] = {kind: globals()[kind] for kind in KINDS if kind not in EXPERT_KINDS}
