"""All ranks in one process: what a state means, and transitions carried out on lists of numpy arrays.

This is the oracle of the sharding IR. It works on the ranks of one mesh axis at a time, in float64 if fed that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.sharding.transitions import Action, Kind, State, dual, forward

__all__ = ["meaning", "pairing", "reshard", "reshard_backward"]

Ranks = Sequence[Array]


def meaning(local: Ranks, state: State) -> Array:
    """The value that the ranks' arrays stand for. Ranks that must be equal are checked to be."""
    if state.kind is Kind.SHARD:
        return np.concatenate(list(local), axis=_dim(state))
    if state.kind is Kind.PARTIAL:
        return np.asarray(sum(local[1:], start=local[0]))
    for rank, array in enumerate(local):
        assert np.array_equal(array, local[0]), f"{state}: rank {rank} differs from rank 0"
    return local[0]


def pairing(cotangent: Ranks, value: Ranks, state: State) -> float:
    """<cotangent, value> of a value in `state`, whose cotangent is in its dual: each element of the true inner product
    once. Equal arrays on both sides (I) count once; in every other state the ranks' products add up."""
    products = [float(np.sum(c * v)) for c, v in zip(cotangent, value, strict=True)]
    return products[0] if state.kind is Kind.INVARIANT else sum(products)


def reshard(local: Ranks, before: State, after: State) -> list[Array]:
    """The ranks' arrays after the forward of `before -> after`."""
    size = len(local)
    action = forward(before, after)
    if action is Action.NOTHING:
        return list(local)
    if action is Action.KEEP_FIRST:
        return [local[0], *(np.zeros_like(array) for array in local[1:])]
    if action is Action.PAD:
        return [_padded(array, _dim(before), rank, size) for rank, array in enumerate(local)]
    if action is Action.SLICE:
        return [_slice(array, _dim(after), rank, size) for rank, array in enumerate(local)]
    whole = meaning(local, before)
    if after.kind is Kind.SHARD:  # reduce-scatter and all-to-all
        return [_slice(whole, _dim(after), rank, size) for rank in range(size)]
    return [whole] * size


def reshard_backward(cotangent: Ranks, before: State, after: State) -> list[Array]:
    """The cotangent of a value in `before`, from that of the same value after `before -> after`."""
    return reshard(cotangent, dual(after), dual(before))


def _dim(state: State) -> int:
    assert isinstance(state.dim, int), f"{state} must name a dim by position"
    return state.dim


def _slice(array: Array, dim: int, rank: int, size: int) -> Array:
    length = array.shape[dim] // size
    index = [slice(None)] * array.ndim
    index[dim] = slice(rank * length, (rank + 1) * length)
    return array[tuple(index)]


def _padded(array: Array, dim: int, rank: int, size: int) -> Array:
    """Zeros of the whole value, with this rank's slice in its place."""
    parts = [np.zeros_like(array)] * size
    parts[rank] = array
    return np.concatenate(parts, axis=dim)
