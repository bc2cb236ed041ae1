"""Pullbacks taken apart, so that backward keeps nothing that it can be given again.

What `jax.vjp` keeps for backward are arrays. Some are the very operands that it was given: those need not be kept where
they are at hand, or can be made again. It is how weights that were gathered for one use are let go of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import Array, lax

__all__ = ["Pullback", "regathered"]


class Pullback:
    """The structure of a pullback: found when its forward is traced, used when its backward is."""

    def __init__(self) -> None:
        self._tree: Any = None
        # of each array that it keeps: which operand it is, or None for one that has to be kept
        self.origins: list[int | None] = []

    def kept(self, pull: Any, given: Sequence[Any]) -> list[Array]:
        """What must be kept of a pullback if the operands can be given again."""
        leaves, self._tree = jax.tree.flatten(pull)
        self.origins = [next((i for i, x in enumerate(given) if x is leaf), None) for leaf in leaves]
        return [leaf for leaf, origin in zip(leaves, self.origins, strict=True) if origin is None]

    def restored(self, kept: Sequence[Array], given: Sequence[Any]) -> Any:
        """The pullback."""
        rest = iter(kept)
        leaves = [next(rest) if origin is None else given[origin] for origin in self.origins]
        return jax.tree.unflatten(self._tree, leaves)


def regathered(
    gather: Callable[[Any], Any], run: Callable[[Any, Any, Any], Any]
) -> Callable[[Mapping[str, Any], Mapping[str, Any], Any], Any]:
    """run(varied, fixed, gather(parts)) as a function of (varied, fixed, parts) that keeps parts alone for backward.

    Backward gathers once more. varied and parts are differentiated, fixed is not.
    """
    pullback = Pullback()

    @jax.custom_vjp
    def whole(varied: Any, fixed: Any, parts: Any) -> Any:
        return run(varied, fixed, gather(parts))

    def forward(varied: Any, fixed: Any, parts: Any) -> tuple[Any, Any]:
        weights = gather(parts)
        made, pull = jax.vjp(lambda varied, weights: run(varied, fixed, weights), varied, weights)
        return made, (pullback.kept(pull, jax.tree.leaves(weights)), parts)

    def backward(saved: Any, cotangents: Any) -> Any:
        # else XLA may see that forward has gathered the same, and keep that
        kept, parts = lax.optimization_barrier(saved)
        weights, to_parts = jax.vjp(gather, parts)
        d_varied, d_weights = pullback.restored(kept, jax.tree.leaves(weights))(cotangents)
        return d_varied, None, to_parts(d_weights)[0]

    whole.defvjp(forward, backward)
    return whole
