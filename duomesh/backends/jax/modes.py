"""Two ways to run a sharded program on a mesh, over the same bodies of ops.

*Manual* (`manual`): one `shard_map` around a whole function of the session, gradients taken inside. Arrays are local, a
movement is what `moves` does, and the compiled module has just the collectives that the program lists.

*Explicit* (`explicit`): arrays are global, and their types are their layouts: S is an entry of the `PartitionSpec`, P
is `unreduced`, R is `reduced`, I neither. A movement is `jax.sharding.reshard`; an op is one `shard_map` forward and
one backward (`typed`), whose specs are the op's layouts. A movement that is missing is a type error, and XLA chooses
the collectives.

Both take `shard_map(check_vma=False)`: what is equal on which devices is the sharded program's to say, and it is
checked there. One device is the manual mode without a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from duomesh.backends.jax.bodies import Body
from duomesh.core.ir.values import Axes
from duomesh.core.session import JaxMode
from duomesh.core.sharding.layouts import Extents, Layout
from duomesh.core.sharding.program import Reshard, ShardedProgram
from duomesh.core.sharding.stacks import Stack, Stacks
from duomesh.core.sharding.transitions import Kind

__all__ = ["Mode", "jax_mesh", "spec_of", "stack_spec"]


def jax_mesh(stacks: Stacks, devices: Sequence[jax.Device], mode: JaxMode) -> jax.sharding.Mesh:
    """The mesh of a plan on these devices, in the order of ranks; axes of size 1 are left out."""
    axes = [axis for axis in stacks.sharded.mesh.axes if axis.size > 1]
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    grid = np.array(devices).reshape([axis.size for axis in axes])
    return jax.sharding.Mesh(grid, tuple(axis.name for axis in axes), axis_types=(kind,) * len(axes))


def spec_of(axes: Axes, layout: Layout, extents: Extents) -> PartitionSpec:
    """A layout as a type."""
    entries = [tuple(extents.splitting(axis.name, layout)) or None for axis in axes]
    real = {axis: state.kind for axis, state in layout.items() if extents.mesh.size(axis) > 1}
    return PartitionSpec(
        *entries,
        unreduced={axis for axis, kind in real.items() if kind is Kind.PARTIAL},
        reduced={axis for axis, kind in real.items() if kind is Kind.REPLICATED},
    )


def stack_spec(stack: Stack, *, is_shared: bool) -> PartitionSpec:
    """How a stored array is split, in storage or where ops meet it."""
    return PartitionSpec(*(axes or None for axes in stack.splits(is_shared=is_shared)))


class Mode(Protocol):
    """What lowering and session ask of a mode. Arrays are local or global, as its own `apply` hands them out."""

    def apply(self, function: Callable[..., Any], args: tuple[Any, ...], specs: Any, out_specs: Any) -> Any:
        """Calls a function on arrays of these specs, inside a jitted one."""

    def pack(self, body: Body, params: Sequence[Array | None]) -> list[Array | None]:
        """What `call` takes of an op's parameters."""

    def call(
        self, program: ShardedProgram, body: Body, inputs: Sequence[Array | None], weights: Sequence[Array | None]
    ) -> tuple[Array, ...]: ...
    def reshard(self, program: ShardedProgram, made: Reshard, x: Array) -> Array: ...
    def weights(self, stack: Stack, x: Array, dtype: Any) -> Array:
        """A stored array, whole on its shared axes and in the layout in which ops meet it."""

    def parts(self, stack: Stack, x: Array) -> Array:
        """A stored array as `member` takes entries of it."""

    def member(self, stack: Stack, x: Array, dtype: Any) -> Array:
        """The same of one entry of a stored array, differentiable; its cotangent is summed over shared axes."""

    def share(self, stack: Stack, grad: Array) -> Array:
        """Summed over the shared axes, and a part of it kept."""

    def total(self, stack: Stack, grad: Array) -> Array:
        """Summed over the other axes."""

    def zeros(self, stack: Stack, dtype: Any, *, is_shared: bool) -> Array:
        """What gradients are added to."""

    def norm(self, grads: Mapping[str, Array]) -> Array:
        """Global 2-norm of gradients that are summed."""

    def join(self, program: ShardedProgram, name: str, x: Array) -> Array:
        """A recorded value without partial sums."""
