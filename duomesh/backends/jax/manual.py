"""The manual mode: local arrays inside one `shard_map` around a whole function of the session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from duomesh.backends.jax.bodies import Body
from duomesh.backends.jax.moves import Move, reshard
from duomesh.core.sharding.layouts import Extents, Layout
from duomesh.core.sharding.program import Reshard, ShardedProgram
from duomesh.core.sharding.stacks import Stack, Stacks
from duomesh.core.sharding.transitions import Kind

__all__ = ["Manual"]


class Manual:
    """Local arrays. mesh: None for one device."""

    def __init__(self, stacks: Stacks, mesh: jax.sharding.Mesh | None) -> None:
        self._stacks, self._mesh = stacks, mesh
        self._extents = stacks.sharded.extents(batch=1, seq=1)  # no parameter depends on them

    def apply(self, function: Callable[..., Any], args: tuple[Any, ...], specs: Any, out_specs: Any) -> Any:
        if self._mesh is None:
            return function(*args)
        mapped = jax.shard_map(function, mesh=self._mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return mapped(*args)

    def pack(self, body: Body, params: Sequence[Array | None]) -> list[Array | None]:
        return body.pack(params)

    def call(
        self, program: ShardedProgram, body: Body, inputs: Sequence[Array | None], weights: Sequence[Array | None]
    ) -> tuple[Array, ...]:
        return body.apply(inputs, weights)

    def reshard(self, program: ShardedProgram, made: Reshard, x: Array) -> Array:
        return reshard(x, Move.of(program, made, self._extents)) if made.ahead or made.back else x

    def weights(self, stack: Stack, x: Array, dtype: Any) -> Array:
        return _gathered(x.astype(dtype), stack.shared, _dim(stack, x))

    def parts(self, stack: Stack, x: Array) -> Array:
        return x

    def member(self, stack: Stack, x: Array, dtype: Any) -> Array:
        return _gather_member(x, dtype, x.dtype, stack.shared, _dim(stack, x))

    def share(self, stack: Stack, grad: Array) -> Array:
        return _scattered(grad, stack.shared, _dim(stack, grad))

    def total(self, stack: Stack, grad: Array) -> Array:
        return lax.psum(grad, stack.rest) if stack.rest else grad

    def zeros(self, stack: Stack, dtype: Any, *, is_shared: bool) -> Array:
        return jnp.zeros(stack.local_shape(is_shared=is_shared), dtype)

    def norm(self, grads: Mapping[str, Array]) -> Array:
        total = sum(self._counted(name, jnp.sum(jnp.square(grad))) for name, grad in grads.items())
        axes = self._stacks.norm_axes
        return jnp.sqrt(lax.psum(total, axes) if axes else total)

    def _counted(self, name: str, squares: Array) -> Array:
        """Each element of a gradient counts on one device."""
        repeats = self._stacks.repeats(self._stacks.stacks[name])
        return jnp.where(lax.axis_index(repeats) == 0, squares, 0) if repeats else squares

    def join(self, program: ShardedProgram, name: str, x: Array) -> Array:
        axes = _partial_axes(program.layouts[name], self._extents)
        return lax.psum(x, axes) if axes else x


def _partial_axes(layout: Layout, extents: Extents) -> tuple[str, ...]:
    return tuple(a for a, state in layout.items() if state.kind is Kind.PARTIAL and extents.mesh.size(a) > 1)


def _dim(stack: Stack, x: Array) -> int:
    """Where the shared axes cut: of a whole array or of one entry of it."""
    return 0 if stack.dim is None else x.ndim - len(stack.axes) + stack.dim


def _gathered(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _scattered(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather_member(x: Array, dtype: Any, wide: Any, axes: tuple[str, ...], dim: int) -> Array:
    """Gathers in `dtype`, and sums the cotangent in `wide`, which is x's own."""
    return _gathered(x.astype(dtype), axes, dim)


def _gather_forward(x: Array, dtype: Any, wide: Any, axes: tuple[str, ...], dim: int) -> tuple[Array, None]:
    return _gathered(x.astype(dtype), axes, dim), None


def _gather_backward(dtype: Any, wide: Any, axes: tuple[str, ...], dim: int, saved: None, c: Array) -> tuple[Array]:
    return (_scattered(c.astype(wide), axes, dim),)


_gather_member.defvjp(_gather_forward, _gather_backward)
