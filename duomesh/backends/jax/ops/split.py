"""Ops on arrays of which a device holds a part, where that is more than the whole op on a smaller array.

A look-up in a table split by rows, a cross entropy over a split vocabulary, a norm over split heads, and a linear whose
input is gathered again in backward. For code inside a `jax.shard_map(check_vma=False)` that takes its gradients inside:
each has its own backward, with exactly the collectives that its kind declares.

Shape letters: B batch, S sequence, H hidden, V vocabulary rows of this device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from duomesh.backends.jax.moves import Move
from duomesh.backends.jax.ops.dense import embedding, linear, wide
from duomesh.core.batch import IGNORE

__all__ = ["Split", "gathered_linear", "split_cross_entropy", "split_embedding", "split_norm"]

_recomputed = partial(jax.checkpoint, prevent_cse=False)  # as in `dense`


@dataclass(frozen=True)
class Split:
    """The parts of a dim that devices have.

    axes: mesh axes that split it, from major to minor. size: true size of the whole dim.
    """

    axes: tuple[str, ...]
    size: int

    def first(self, length: int) -> Array:
        """Position of the first of the `length` elements that this device has."""
        return lax.axis_index(self.axes) * length


def split_embedding(ids: Array, weight: Array, *, split: Split) -> Array:
    """[B, S] ids, [V, H] rows -> [B, S, H], zeros where another device has the row."""
    local = ids - split.first(weight.shape[0])
    is_here = (local >= 0) & (local < weight.shape[0])
    rows = embedding(jnp.where(is_here, local, 0), weight)
    return jnp.where(is_here[..., None], rows, jnp.zeros_like(rows))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits: Array, labels: Array, split: Split) -> Array:
    return _cross_entropy_forward(logits, labels, split)[0]


def _cross_entropy_forward(logits: Array, labels: Array, split: Split) -> tuple[Array, tuple[Array, Array, Array]]:
    """Saves logits and two numbers a token; the softmax is made again in backward."""
    z = _without_padding(wide(logits), split)
    top = lax.pmax(z.max(-1), split.axes)
    total = lax.psum(jnp.exp(z - top[..., None]).sum(-1), split.axes)
    local = labels - split.first(logits.shape[-1])
    is_here = (local >= 0) & (local < logits.shape[-1])  # IGNORE is negative, and nowhere
    picked = jnp.take_along_axis(z, jnp.where(is_here, local, 0)[..., None], axis=-1)[..., 0]
    picked = lax.psum(jnp.where(is_here, picked, 0), split.axes)
    log_sum = jnp.log(total) + top
    return jnp.where(labels != IGNORE, log_sum - picked, 0), (logits, labels, log_sum)


def _cross_entropy_backward(split: Split, saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, None]:
    """(softmax - one-hot) c in this device's columns."""
    logits, labels, log_sum = saved
    z = _without_padding(wide(logits), split)
    columns = split.first(logits.shape[-1]) + jnp.arange(logits.shape[-1])
    one_hot = (columns == labels[..., None]).astype(z.dtype)
    weight = jnp.where(labels != IGNORE, cotangent, 0)
    return ((jnp.exp(z - log_sum[..., None]) - one_hot) * weight[..., None]).astype(logits.dtype), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _without_padding(logits: Array, split: Split) -> Array:
    """Columns beyond the vocabulary are in no softmax."""
    length = logits.shape[-1]
    if lax.axis_size(split.axes) * length == split.size:
        return logits
    return jnp.where(split.first(length) + jnp.arange(length) < split.size, logits, -jnp.inf)


def split_cross_entropy(logits: Array, labels: Array, *, split: Split) -> Array:
    """[B, S, V] columns of logits, [B, S] labels -> [B, S] losses in at least fp32; 0 where the label is IGNORE."""
    return _cross_entropy(logits, labels, split)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_over(x: Array, axes: tuple[str, ...]) -> Array:
    """A sum over devices of what each then uses for its own part: partial -> replicated, whose dual is the same."""
    return lax.psum(x, axes)


_sum_over.defvjp(lambda x, axes: (lax.psum(x, axes), None), lambda axes, saved, c: (lax.psum(c, axes),))


def split_norm(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    centered: bool,
    eps: float,
    weight_offset: float,
    cast: str,
    norm_dims: int,
    split: Split,
) -> Array:
    """A root-mean-square norm over dims that devices have parts of: their sums of squares are added up.

    split.size is the number of elements that are normed together.
    """
    assert not centered
    shape = x.shape
    x = x.reshape(*shape[: len(shape) - norm_dims], -1)

    def rounded(y: Array) -> Array:
        """What "before_weight" holds in x's dtype. Products stay wide, for their sums over tokens in backward."""
        return wide(y.astype(x.dtype)) if cast == "before_weight" else y

    @_recomputed
    def scaled(x: Array, squares: Array, weight: Array, bias: Array | None) -> Array:
        normed = wide(x) * lax.rsqrt(squares / split.size + eps)
        out = rounded(rounded(normed) * rounded(wide(weight) + weight_offset))
        return (out if bias is None else out + wide(bias)).astype(x.dtype)

    squares = _sum_over(_recomputed(lambda x: jnp.square(wide(x)).sum(-1, keepdims=True))(x), split.axes)
    return scaled(x, squares, weight, bias).reshape(shape)


_Outs = tuple[tuple[int, ...], ...]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _gathered_linear(
    x: Array, weight: Array, bias: Array | None, move: Move, outs: _Outs, biased: tuple[bool, ...], in_dims: int
) -> tuple[Array, ...]:
    return linear(move.forward(x), weight, bias, outs=outs, biased=biased, in_dims=in_dims)


def _gathered_linear_forward(
    x: Array, weight: Array, bias: Array | None, move: Move, outs: _Outs, biased: tuple[bool, ...], in_dims: int
) -> tuple[tuple[Array, ...], tuple[Array, Array, Array | None]]:
    """Saves the part of the input that the device had."""
    return _gathered_linear(x, weight, bias, move, outs, biased, in_dims), (x, weight, bias)


def _gathered_linear_backward(
    move: Move,
    outs: _Outs,
    biased: tuple[bool, ...],
    in_dims: int,
    saved: tuple[Array, Array, Array | None],
    cotangents: tuple[Array, ...],
) -> tuple[Array, Array, Array | None]:
    x, weight, bias = saved
    # else XLA may see that forward has gathered the same, and keep that
    x, cotangents = lax.optimization_barrier((x, cotangents))
    whole = move.forward(x)
    _, pull = jax.vjp(partial(linear, outs=outs, biased=biased, in_dims=in_dims), whole, weight, bias)
    d_whole, d_weight, d_bias = pull(cotangents)
    return move.backward(d_whole), d_weight, d_bias


_gathered_linear.defvjp(_gathered_linear_forward, _gathered_linear_backward)


def gathered_linear(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    move: Move,
    outs: _Outs,
    biased: tuple[bool, ...],
    in_dims: int,
) -> tuple[Array, ...]:
    """`linear` of a value that `move` gathers, forward and once more in backward."""
    return _gathered_linear(x, weight, bias, move, outs, biased, in_dims)
