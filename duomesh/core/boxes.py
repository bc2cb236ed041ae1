"""Rectangles of tensors, and tensors of which only the rectangles that are asked for are read or made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from duomesh.core.arrays import Array

__all__ = [
    "Box",
    "Deferred",
    "Sliceable",
    "box_shape",
    "common",
    "cut",
    "runs",
    "show_box",
    "slices",
    "tiles",
    "whole",
    "whole_box",
    "within",
]

Box = tuple[tuple[int, int], ...]  # [start, stop) along each dim


def whole_box(shape: Iterable[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def slices(box: Box, origin: Iterable[int] | None = None) -> tuple[slice, ...]:
    """The index of a box; in an array whose first element is at `origin`, if that is given."""
    first = [0] * len(box) if origin is None else origin
    return tuple(slice(start - zero, stop - zero) for (start, stop), zero in zip(box, first, strict=True))


def within(box: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> Box | None:
    """The box, dims that it leaves out at the end taken whole; None if it does not lie in the shape."""
    full = (*box, *whole_box(shape[len(box) :]))
    is_inside = len(full) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(full, shape, strict=True)
    )
    return full if is_inside else None


def common(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if that is nothing."""
    out = tuple((max(i, j), min(m, n)) for (i, m), (j, n) in zip(a, b, strict=True))
    return out if all(start < stop for start, stop in out) else None


def show_box(box: Sequence[tuple[int, int]]) -> str:
    """[0:4, 3:7]"""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def tiles(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes lie in a shape of at least one dim, share nothing, and together have all of its elements."""
    if any(within(box, shape) != box for box in boxes) or sum(prod(box_shape(box)) for box in boxes) != prod(shape):
        return False
    live: list[Box] = []  # of those before, the ones that reach the rows where this one starts
    for box in sorted(boxes):
        live = [other for other in live if other[0][1] > box[0][0]]
        if any(common(box, other) for other in live):
            return False
        live.append(box)
    return True


def runs(box: Box, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], int]:
    """A box as runs of elements that lie one after another in the flattened tensor: their starts, and their length."""
    starts, length = np.zeros(1, np.int64), 1
    is_whole = True  # every dim after this one
    for (start, stop), size, stride in reversed([*zip(box, shape, _strides(shape), strict=True)]):
        if is_whole:
            starts, length = starts + start * stride, length * (stop - start)
        else:
            starts = (np.arange(start, stop)[:, None] * stride + starts).reshape(-1)
        is_whole = is_whole and (start, stop) == (0, size)
    return starts, length


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


class Deferred:
    """A tensor that is read or made when, and as far as, it is asked for.

    Attributes:
        shape: of the whole.
        read: makes the array of a box.
    """

    def __init__(self, shape: tuple[int, ...], read: Callable[[Box], Array]) -> None:
        self.shape, self.read = shape, read

    def astype(self, dtype: npt.DTypeLike) -> Deferred:
        return Deferred(self.shape, lambda box: self.read(box).astype(dtype, copy=False))


Sliceable = Array | Deferred


def cut(tensor: Sliceable, box: Box) -> Array:
    """A rectangle of a tensor; of an array it is a view."""
    return tensor.read(box) if isinstance(tensor, Deferred) else tensor[slices(box)]


def whole(tensor: Sliceable) -> Array:
    return tensor.read(whole_box(tensor.shape)) if isinstance(tensor, Deferred) else tensor
