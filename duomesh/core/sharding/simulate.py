"""All ranks in one process: what a state means, and transitions carried out on lists of numpy arrays.

This is the oracle of the sharding IR. It works on the ranks of one mesh axis (or of a tuple of axes) at a time, in
float64 if fed that. Dims are named by position.
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
        return _joined(local, state)
    if state.kind is Kind.PARTIAL:
        return np.asarray(sum(local[1:], start=local[0]))
    for rank, array in enumerate(local):
        assert np.array_equal(array, local[0], equal_nan=True), f"{state}: rank {rank} differs from rank 0"
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
        return [_alone(array, before, rank, size) for rank, array in enumerate(local)]
    if action is Action.SLICE:
        return [_part(array, after, rank, size) for rank, array in enumerate(local)]
    whole = meaning(local, before)
    if after.kind is Kind.SHARD:  # reduce-scatter and all-to-all
        return [_part(whole, after, rank, size) for rank in range(size)]
    return [whole] * size


def reshard_backward(cotangent: Ranks, before: State, after: State) -> list[Array]:
    """The cotangent of a value in `before`, from that of the same value after `before -> after`."""
    return reshard(cotangent, dual(after), dual(before))


def _dim(state: State) -> int:
    assert isinstance(state.dim, int), f"{state} must name a dim by position"
    return state.dim


def _chunks(state: State, rank: int, size: int) -> tuple[tuple[int, ...], int]:
    """Which chunks a rank has, in its order, and of how many."""
    return ((rank,), size) if state.order == "contiguous" else ((rank, 2 * size - 1 - rank), 2 * size)


def _part(array: Array, state: State, rank: int, size: int) -> Array:
    chunks, count = _chunks(state, rank, size)
    dim = _dim(state)
    assert array.shape[dim] % count == 0, f"{array.shape[dim]} cannot be cut into {count} equal chunks"
    parts = np.split(array, count, axis=dim)
    return np.concatenate([parts[chunk] for chunk in chunks], axis=dim)


def _joined(local: Ranks, state: State) -> Array:
    parts: dict[int, Array] = {}
    for rank, array in enumerate(local):
        chunks, _ = _chunks(state, rank, len(local))
        parts.update(zip(chunks, np.split(array, len(chunks), axis=_dim(state)), strict=True))
    return np.concatenate([parts[chunk] for chunk in sorted(parts)], axis=_dim(state))


def _alone(array: Array, state: State, rank: int, size: int) -> Array:
    """Zeros of the whole value, with this rank's part in its place."""
    return _joined([array if other == rank else np.zeros_like(array) for other in range(size)], state)
