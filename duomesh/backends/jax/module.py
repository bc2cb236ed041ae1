"""A lowered model as a flax module, for loops and tools that speak nnx."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from duomesh.backends.jax.lower import LoweredModel, Params
from duomesh.backends.jax.store import Store
from duomesh.core.arrays import Array

__all__ = ["FlaxModel"]


class FlaxModel(nnx.Module):
    """The model's stored arrays as `nnx.Param`s, and its forward pass.

    Layers of one kind are stacked, and arrays have a dim for each logical axis: see `core.sharding.stacks`.
    `nnx.split`, `nnx.grad` and optimizers of flax work on it as on any module.

    Args:
        model: the lowered model.
        store: knows which canonical parameters the arrays hold.
        params: stored arrays by name, in the dtype that the forward pass computes in.
    """

    def __init__(self, model: LoweredModel, store: Store, params: Params) -> None:
        self._model, self._store = model, store
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

    def canonical(self, arrays: Mapping[str, jax.Array]) -> Iterator[tuple[str, Array]]:
        """Arrays like `params`, as gradients of them -> whole parameters by canonical name."""
        return self._store.take(arrays)
