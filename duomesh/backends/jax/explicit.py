"""The explicit mode: global arrays whose types are their layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from duomesh.backends.jax.bodies import Body
from duomesh.backends.jax.modes import spec_of, stack_spec
from duomesh.backends.jax.typed import TypedOp
from duomesh.core.sharding.layouts import Layout, dual_layout
from duomesh.core.sharding.program import Reshard, ShardedProgram
from duomesh.core.sharding.stacks import Stack, Stacks
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL

__all__ = ["Explicit"]


class Explicit:
    """Global arrays whose types are their layouts."""

    def __init__(self, stacks: Stacks, mesh: jax.sharding.Mesh) -> None:
        self._stacks, self._mesh = stacks, mesh
        self._extents = stacks.sharded.extents(batch=1, seq=1)

    def apply(self, function: Callable[..., Any], args: tuple[Any, ...], specs: Any, out_specs: Any) -> Any:
        return function(*args)  # arguments have their types

    # Ops and movements

    def _layout(self, program: ShardedProgram, name: str) -> Layout:
        """As a type: what has no cotangent is equal or not, and nothing more."""
        layout = program.layouts[name]
        if self._has_cotangent(program, name):
            return layout
        assert all(state != PARTIAL for state in layout.values()), f"{name} has no cotangent and is a partial sum"
        return {axis: INVARIANT if state.dim is None else state for axis, state in layout.items()}

    def _spec(self, program: ShardedProgram, name: str, *, is_cotangent: bool = False) -> PartitionSpec:
        layout = self._layout(program, name)
        return spec_of(program.axes(name), dual_layout(layout) if is_cotangent else layout, self._extents)

    def pack(self, body: Body, params: Sequence[Array | None]) -> list[Array | None]:
        return list(params)  # packed on each device: no global array of them could be split as they are

    def call(
        self, program: ShardedProgram, body: Body, inputs: Sequence[Array | None], weights: Sequence[Array | None]
    ) -> tuple[Array, ...]:
        operands = [*inputs, *weights]
        present = [i for i, x in enumerate(operands) if x is not None]
        names = [str(body.operands[i]) for i in present]
        typed = TypedOp(
            body=body,
            places=present,
            is_differentiated=[self._has_cotangent(program, name) for name in names],
            specs=[self._spec(program, n) for n in names],
            cotangents=[self._spec(program, n, is_cotangent=True) for n in names],
            made=tuple(self._spec(program, n) for n in body.results),
            made_cotangents=tuple(self._spec(program, n, is_cotangent=True) for n in body.results),
            mesh=self._mesh,
        )
        return typed([operands[i] for i in present])

    def _has_cotangent(self, program: ShardedProgram, name: str) -> bool:
        origin = program.origin[name]
        return origin in program.program.param_by_name or origin in program.program.differentiated

    def reshard(self, program: ShardedProgram, made: Reshard, x: Array) -> Array:
        axes, before, after = program.axes(made.source), program.layouts[made.source], program.layouts[made.result]
        for dim, axis in enumerate(axes):
            if self._is_split(axis.name, after) and not self._is_split(axis.name, before) and axis.size is not None:
                missing = self._extents.padded(axis.name, axis.size) - axis.size
                if missing:
                    x = jnp.pad(x, [(0, missing if i == dim else 0) for i in range(x.ndim)])
        x = jax.sharding.reshard(x, self._spec(program, made.result))
        for dim, axis in enumerate(axes):
            if axis.size is not None and not self._is_split(axis.name, after) and x.shape[dim] > axis.size:
                x = lax.slice_in_dim(x, 0, axis.size, axis=dim)
        return x

    def _is_split(self, name: str, layout: Layout) -> bool:
        return bool(self._extents.splitting(name, layout))

    def join(self, program: ShardedProgram, name: str, x: Array) -> Array:
        axes, layout = program.axes(name), program.layouts[name]
        whole = {axis: INVARIANT if state.dim is None else state for axis, state in layout.items()}
        return jax.sharding.reshard(x, spec_of(axes, whole, self._extents))

    # Parameters and gradients

    def _typed(self, stack: Stack, *, is_shared: bool, **more: Iterable[str]) -> PartitionSpec:
        return PartitionSpec(*stack_spec(stack, is_shared=is_shared), **{k: set(v) for k, v in more.items()})

    def weights(self, stack: Stack, x: Array, dtype: Any) -> Array:
        return jax.sharding.reshard(x.astype(dtype), self._typed(stack, is_shared=False, reduced=stack.summed))

    def parts(self, stack: Stack, x: Array) -> Array:
        return jax.sharding.reshard(x, self._typed(stack, is_shared=True, reduced=stack.rest))

    def member(self, stack: Stack, x: Array, dtype: Any) -> Array:
        lead = len(stack.shape) - x.ndim

        def entry(spec: PartitionSpec) -> PartitionSpec:
            parts = tuple(spec.partitions)[lead:]
            return PartitionSpec(*parts, unreduced=spec.unreduced, reduced=spec.reduced)

        met = entry(self._typed(stack, is_shared=False, reduced=stack.summed))
        stored = entry(self._typed(stack, is_shared=True, unreduced=stack.rest))

        def gather(x: Array) -> Array:
            return jax.sharding.reshard(x.astype(dtype), met)

        wide, gathered = x.dtype, jax.custom_vjp(gather)
        gathered.defvjp(lambda x: (gather(x), None), lambda _, c: (jax.sharding.reshard(c.astype(wide), stored),))
        return gathered(x)

    def share(self, stack: Stack, grad: Array) -> Array:
        return jax.sharding.reshard(grad, self._typed(stack, is_shared=True, unreduced=stack.rest))

    def total(self, stack: Stack, grad: Array) -> Array:
        return jax.sharding.reshard(grad, self._typed(stack, is_shared=True))

    def zeros(self, stack: Stack, dtype: Any, *, is_shared: bool) -> Array:
        left = stack.rest if is_shared else stack.summed
        return jax.sharding.reshard(
            jnp.zeros(stack.shape, dtype), self._typed(stack, is_shared=is_shared, unreduced=left)
        )

    def norm(self, grads: Mapping[str, Array]) -> Array:
        total: Any = sum(jnp.sum(jnp.square(grad)) for grad in grads.values())
        return jnp.sqrt(total)
