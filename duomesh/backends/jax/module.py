"""A lowered model as a flax module, for loops and tools that speak nnx."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from duomesh.backends.jax.lower import LoweredModel, Params

__all__ = ["FlaxModel"]


class FlaxModel(nnx.Module):
    """The model's stored arrays as `nnx.Param`s, and its forward pass.

    Layers of one kind are stacked: see `LoweredModel.shapes` for the names. `nnx.split`, `nnx.grad` and optimizers
    of flax work on it as on any module.

    Args:
        model: the lowered model.
        params: stored arrays by name, in the dtype that the forward pass computes in.
    """

    def __init__(self, model: LoweredModel, params: Params) -> None:
        self._model = model
        # nnx walks attributes: names with dots cannot be attributes, keys of a Dict can be any string
        self.params = nnx.Dict({name: nnx.Param(array) for name, array in params.items()})

    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """[B, S] ids -> [B, S, V] logits. positions: 0..S-1 if not given."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        params = {name: param[...] for name, param in self.params.items()}
        return self._model(params, {"tokens": tokens, "positions": positions, "segment_ids": segment_ids})
