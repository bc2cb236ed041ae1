"""A token stream as an endless sequence of samples, any place of which is reached in constant time.

Sample i reads tokens [i*S, i*S + S]: S inputs and, shifted by one, S labels. Neighbours share one token, the last
label of one and the first input of the next, so that every token but the tail is an input exactly once an epoch.

The sequence of an epoch is a permutation of all samples, a pure function of (seed, epoch, place). What a step is fed
therefore depends only on the number of samples consumed before it: not on how a step is split into micro-batches,
on workers, or on where a run was stopped. Epochs follow one another without a gap; a step that reaches the end of
one goes on with the first samples of the next, so no sample is ever dropped for want of a full step.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

import numpy as np
import numpy.typing as npt

from duomesh.core.arrays import Array
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.errors import DataError
from duomesh.core.random import random_bits

__all__ = ["Sampler", "permute"]

Index = npt.NDArray[np.int64]

_ROUNDS = 6


def permute(places: Index, size: int, seed: int, name: str) -> Index:
    """The entries at `places` of a random permutation of 0..size-1, without building the permutation.

    An alternating Feistel network over a grid of about sqrt(size) x sqrt(size) cells, whose round functions are tables
    of random words; a place that leaves 0..size-1 is sent through again (Black and Rogaway 2002, "Ciphers with
    arbitrary finite domains"). Time and memory are those of the tables, O(sqrt(size)), and of the places.

    Args:
        places: [n] int64 in [0, size).
        name: the stream of random words; equal names and seeds give equal permutations.
    """
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    tables = [
        (random_bits(seed, f"{name}/{i}", 0, columns if i % 2 == 0 else rows)).astype(np.int64) for i in range(_ROUNDS)
    ]
    out = np.array(places, np.int64)
    outside = np.ones(out.shape, bool)
    while outside.any():
        row, column = np.divmod(out[outside], columns)
        for i, table in enumerate(tables):
            if i % 2 == 0:
                row = (row + table[column]) % rows
            else:
                column = (column + table[row]) % columns
        out[outside] = row * columns + column
        outside = out >= size
    return out


class Sampler:
    """Samples of S tokens from one stream.

    Args:
        tokens: [n] ids; anything that numpy can index, such as a memory map.
        seq_len: S.
        seed: of the shuffle.
        shuffle: False keeps the order of the stream in every epoch.

    Raises:
        DataError: the stream is too short for one sample.
    """

    def __init__(self, tokens: Array, seq_len: int, *, seed: int = 0, shuffle: bool = True) -> None:
        self.num_samples = max(0, (len(tokens) - 1) // seq_len)
        if self.num_samples == 0:
            raise DataError(
                f"there are {len(tokens)} tokens, but one sample of data.seq_len={seq_len} needs {seq_len + 1}. "
                "Add text or shorten data.seq_len."
            )
        self.seq_len = seq_len
        self._tokens, self._seed, self._shuffle = tokens, seed, shuffle

    def sample_ids(self, first: int, count: int) -> Index:
        """[count] int64: which samples stand at places first, first + 1, ... of the endless sequence."""
        epoch, place = np.divmod(np.arange(first, first + count, dtype=np.int64), self.num_samples)
        if not self._shuffle:
            return place
        parts = [permute(place[epoch == e], self.num_samples, self._seed, f"data/epoch/{e}") for e in np.unique(epoch)]
        return np.concatenate(parts) if parts else place

    def batch(self, sample_ids: Index, *, rows: int | None = None) -> Batch:
        """The samples as one batch, which does not say at which places they stand.

        Args:
            sample_ids: [B].
            rows: fill up to this many rows with samples that have no target, which keeps shapes equal.
        """
        offsets = np.asarray(sample_ids, np.int64)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        read = np.asarray(self._tokens[offsets], np.int32)
        tokens, labels = read[:, :-1], read[:, 1:]
        padding = ((0, (rows or len(read)) - len(read)), (0, 0))
        return Batch(np.pad(tokens, padding), np.pad(labels, padding, constant_values=IGNORE))

    def batches(self, first: int, count: int, micro_batch_size: int) -> list[Batch]:
        """The samples at places first .. first + count, in micro-batches of equal size.

        Their places are the batches' `sample_ids`: the same text met again, in a later epoch, is another sample.
        `count` must be a multiple of `micro_batch_size`: configurations are checked for it.
        """
        assert count % micro_batch_size == 0, (count, micro_batch_size)
        ids = self.sample_ids(first, count)
        places = np.arange(first, first + count, dtype=np.int64)
        cuts = [slice(i, i + micro_batch_size) for i in range(0, count, micro_batch_size)]
        return [replace(self.batch(ids[cut]), sample_ids=places[cut]) for cut in cuts]
