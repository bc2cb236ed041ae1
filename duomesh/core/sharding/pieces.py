"""Which rectangles of whole parameters a rank owns: what it reads and writes of a checkpoint.

A rank owns its range of each bucket, cut into *spans*, one for each parameter in it: a range of the flattened local
shard. A span is a few *pieces*, rectangles of the whole parameter: rows, and where the range begins or ends within one,
a part of a row. Rows of padding belong to no piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.boxes import Box, Sliceable, cut, slices
from duomesh.core.ir.values import Param
from duomesh.core.sharding.local import local_param, place_on, stored_indices, stored_positions
from duomesh.core.sharding.storage import Bucket, Member, Storage
from duomesh.core.sharding.transitions import Kind

__all__ = ["Piece", "Span", "rectangles", "spans"]


@dataclass(frozen=True)
class Piece:
    """A rectangle of a whole parameter, and where it is in a flattened span.

    box: the rectangle. It is [index] of the elements from `start` on, taken as an array of this shape.
    """

    box: Box
    start: int
    shape: tuple[int, ...]
    index: tuple[slice, ...]

    def of(self, flat: Array) -> Array:
        """The piece as a view of a flattened span."""
        return flat[self.start : self.start + prod(self.shape)].reshape(self.shape)[self.index]


@dataclass(frozen=True)
class Span:
    """What a rank owns of one parameter.

    Attributes:
        name: canonical.
        bucket: where it lies, [start, stop) of this rank's range of it.
        is_first: whether no rank before this one owns the same elements; the first one saves them.
    """

    name: str
    bucket: Bucket
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    is_first: bool

    def fill(self, tensor: Sliceable) -> Array:
        """The span, flattened, from the whole parameter, of which no more than this is made; padding is zero."""
        out: Array | None = None
        for piece in self.pieces:
            part = cut(tensor, piece.box)
            if out is None:
                out = np.zeros(self.stop - self.start, part.dtype)
            piece.of(out)[...] = part
        return np.zeros(self.stop - self.start, np.float32) if out is None else out


def spans(storage: Storage, coordinate: Mapping[str, int]) -> Iterator[Span]:
    """Everything that the rank at a place of the mesh owns, in the order of buckets."""
    for bucket in storage.buckets:
        part = place_on(storage.sharded.mesh, bucket.shared, coordinate)
        first = bucket.flat(part).start
        for member, start, stop in bucket.slices(part):
            at = member.start - first
            pieces = tuple(_pieces(storage, bucket, member, coordinate, start, stop))
            is_first = _is_first(storage, bucket, member, coordinate)
            yield Span(member.name, bucket, at + start, at + stop, pieces, is_first)


def _is_first(storage: Storage, bucket: Bucket, member: Member, coordinate: Mapping[str, int]) -> bool:
    """Ranks own the same elements that differ only on axes that split neither the parameter nor its bucket."""
    sharded = storage.sharded
    layout = sharded.params[member.name, bucket.stage]
    split = {*bucket.shared, *(axis for axis, state in layout.items() if state.kind is Kind.SHARD)}
    is_first = all(coordinate[axis] == 0 for axis in sharded.mesh.names if axis not in split)
    return is_first and bucket.stage == sharded.owners[member.name][0]


def _pieces(
    storage: Storage, bucket: Bucket, member: Member, coordinate: Mapping[str, int], start: int, stop: int
) -> Iterator[Piece]:
    """Of elements [start, stop) of a parameter's flattened local shard."""
    param, layout = storage.sharded.model.params[member.name], storage.sharded.params[member.name, bucket.stage]
    extents = storage.sharded.extents(batch=1, seq=1)
    shape = local_param(param, layout, extents).shape
    runs = [_runs(positions) for positions in stored_indices(param, layout, extents, coordinate)]
    done = 0
    for block in _blocks(start, stop, shape):
        sizes = tuple(last - first for first, last in block)
        for chosen in product(*(list(_cut(run, *side)) for run, side in zip(runs, block, strict=True))):
            local, box = zip(*chosen, strict=True)
            yield Piece(box, done, sizes, slices(local, [first for first, _ in block]))
        done += prod(sizes)


def rectangles(param: Param, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    """The part of a whole parameter that has every logical axis within its range, as rectangles.

    ranges: [start, stop) along each logical axis, padding included.

    Yields each rectangle, and its index in the array of the part with stored dims.
    """
    runs = [_runs(positions) for positions in stored_positions(param, ranges)]
    for chosen in product(*runs):
        box = tuple((position, position + length) for _, position, length in chosen)
        yield box, tuple(slice(place, place + length) for place, _, length in chosen)


def _blocks(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Elements [start, stop) of a flattened shape as boxes, one after another."""
    if not shape:
        yield ()
        return
    width = prod(shape[1:])
    while start < stop:
        row, skipped = divmod(start, width)
        rows = (stop - start) // width
        if skipped or not rows:
            end = min(stop, (row + 1) * width)
            for block in _blocks(skipped, end - row * width, shape[1:]):
                yield ((row, row + 1), *block)
            start = end
        else:
            yield ((row, row + rows), *((0, size) for size in shape[1:]))
            start += rows * width


def _runs(positions: Array) -> list[tuple[int, int, int]]:
    """Runs of neighbouring positions: (place of the first, position of the first, length)."""
    cuts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [(a, int(positions[a]), b - a) for a, b in pairwise(cuts) if a < b]


def _cut(runs: list[tuple[int, int, int]], first: int, last: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The runs within places [first, last), as places and as positions."""
    for place, position, length in runs:
        low, high = max(first, place), min(last, place + length)
        if low < high:
            yield (low, high), (position + low - place, position + high - place)
