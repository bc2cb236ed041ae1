"""Reshards on the arrays of one device: transitions as collectives and local moves, with their duals as backward.

For code inside a `jax.shard_map(check_vma=False)` over all axes of the mesh that takes its gradients inside, too. A
`Move` is one reshard of a sharded program as static data: the same on every device, which finds its place by its
coordinate. `reshard(x, move)` is differentiable: its backward takes the cotangent through the dual steps, so that no
collective comes from JAX's own transposition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import Array, lax

from duomesh.core.errors import BackendError
from duomesh.core.ir.values import Axes
from duomesh.core.sharding.layouts import Extents, Layout, Step, dual_layout
from duomesh.core.sharding.program import Reshard, ShardedProgram
from duomesh.core.sharding.transitions import Action

__all__ = ["Hop", "Move", "reshard"]


@dataclass(frozen=True)
class Hop:
    """One step.

    Attributes:
        axes: mesh axes from major to minor. size: how many devices they are together.
        cut, joined: dims that the step splits and makes whole, None if it does not.
        padded: size of the cut dim with the padding that comes with its first cut, None if it is split already.
        true: size of the joined dim without the padding that goes with its last join, None if it stays split.
    """

    action: Action
    axes: tuple[str, ...]
    size: int
    cut: int | None
    joined: int | None
    padded: int | None
    true: int | None

    def __call__(self, x: Array) -> Array:
        if self.cut is not None and self.padded is not None and self.padded > x.shape[self.cut]:
            missing = self.padded - x.shape[self.cut]
            x = jnp.pad(x, [(0, missing if dim == self.cut else 0) for dim in range(x.ndim)])
        out = self._act(x)
        if self.joined is not None and self.true is not None and self.true < out.shape[self.joined]:
            out = lax.slice_in_dim(out, 0, self.true, axis=self.joined)
        return out

    def _act(self, x: Array) -> Array:
        match self.action:
            case Action.ALL_REDUCE:
                out = lax.psum(x, self.axes)
            case Action.ALL_GATHER:
                out = lax.all_gather(x, self.axes, axis=_dim(self.joined), tiled=True)
            case Action.REDUCE_SCATTER:
                out = lax.psum_scatter(x, self.axes, scatter_dimension=_dim(self.cut), tiled=True)
            case Action.ALL_TO_ALL:
                cut, joined = _dim(self.cut), _dim(self.joined)
                out = lax.all_to_all(x, self.axes, split_axis=cut, concat_axis=joined, tiled=True)
            case Action.KEEP_FIRST:
                out = jnp.where(lax.axis_index(self.axes) == 0, x, jnp.zeros_like(x))
            case Action.SLICE:
                out = self._part(x, _dim(self.cut))
            case Action.PAD:
                out = self._alone(x, _dim(self.joined))
            case _:
                assert self.action is Action.NOTHING, self.action
                out = x
        return out

    def _part(self, x: Array, dim: int) -> Array:
        length, rest = divmod(x.shape[dim], self.size)
        assert rest == 0, f"{x.shape[dim]} cannot be cut into {self.size} equal parts"
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes) * length, length, dim)

    def _alone(self, x: Array, dim: int) -> Array:
        """Zeros of the whole value, with this device's part in its place."""
        length = x.shape[dim]
        zeros = jnp.zeros((*x.shape[:dim], self.size * length, *x.shape[dim + 1 :]), x.dtype)
        return lax.dynamic_update_slice_in_dim(zeros, x, lax.axis_index(self.axes) * length, dim)


def _dim(dim: int | None) -> int:
    assert dim is not None
    return dim


@dataclass(frozen=True)
class Move:
    """A reshard: hops forward, and those of the cotangent; none back for a value that is not differentiated."""

    ahead: tuple[Hop, ...]
    back: tuple[Hop, ...]

    @classmethod
    def of(cls, program: ShardedProgram, made: Reshard, extents: Extents) -> Move:
        """Raises BackendError for positions in zigzag order."""
        axes = program.axes(made.source)
        before, after = program.layouts[made.source], program.layouts[made.result]
        ahead = tuple(_hops(axes, before, made.ahead, extents))
        return cls(ahead, tuple(_hops(axes, dual_layout(after), made.back, extents)))

    def forward(self, x: Array) -> Array:
        return _through(x, self.ahead)

    def backward(self, cotangent: Array) -> Array:
        return _through(cotangent, self.back)


def _through(x: Array, hops: Sequence[Hop]) -> Array:
    for hop in hops:
        x = hop(x)
    return x


def _hops(axes: Axes, layout: Layout, path: Iterable[Step], extents: Extents) -> Iterable[Hop]:
    names = [axis.name for axis in axes]
    current = dict(layout)
    for step in path:
        if "zigzag" in (step.before.order, step.after.order):
            raise BackendError(f"jax cannot move {step.before} to {step.after} yet; use a plan without cp.")
        cut, joined = step.after.dim, step.before.dim
        padded = true = None
        if cut is not None and not extents.splitting(str(cut), current):
            size = axes[names.index(str(cut))].size
            padded = None if size is None else extents.padded(str(cut), size)
        current = step.apply(current)
        if joined is not None and not extents.splitting(str(joined), current):
            true = axes[names.index(str(joined))].size
        yield Hop(
            action=step.action,
            axes=step.axes,
            size=prod(extents.mesh.size(axis) for axis in step.axes),
            cut=None if cut is None else names.index(str(cut)),
            joined=None if joined is None else names.index(str(joined)),
            padded=padded,
            true=true,
        )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reshard(x: Array, move: Move) -> Array:
    return move.forward(x)


def _reshard_forward(x: Array, move: Move) -> tuple[Array, None]:
    return move.forward(x), None


def _reshard_backward(move: Move, saved: None, cotangent: Array) -> tuple[Array]:
    return (move.backward(cotangent),)


_reshard.defvjp(_reshard_forward, _reshard_backward)


def reshard(x: Array, move: Move) -> Array:
    """The value in its new layout, one dim for each logical axis. Differentiable, unless it moves ahead only."""
    if move.back:
        return _reshard(x, move)
    return lax.stop_gradient(move.forward(x)) if move.ahead else x
