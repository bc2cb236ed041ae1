"""Checks and casts of tensor values that every converter makes: nothing is altered without being counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import ml_dtypes
import numpy as np

from duomesh.core.arrays import DTYPES, Array, dtype_name, is_float
from duomesh.core.errors import ConversionError

__all__ = ["CastCounts", "NonFinite", "cast", "find_nonfinite", "largest_difference"]

_CHUNK = 1 << 20  # elements looked at at once: temporaries stay at some MiB


@dataclass(frozen=True)
class NonFinite:
    """What is not finite in a tensor."""

    num_nan: int
    num_inf: int
    first: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.num_nan} NaN and {self.num_inf} Inf, the first at {list(self.first)}"


def _chunks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _CHUNK):
        yield tuple(array[start : start + _CHUNK] for array in flat)


def find_nonfinite(array: Array, *, origin: Sequence[int] = ()) -> NonFinite | None:
    """Counts of NaN and Inf and the index of the first, or None. `origin`: where the array begins in its first dims."""
    if not is_float(array.dtype):
        return None
    num_nan = num_inf = 0
    first: int | None = None
    for i, (chunk,) in enumerate(_chunks(array)):
        bad = ~np.isfinite(chunk)
        if not bad.any():
            continue
        first = i * _CHUNK + int(bad.argmax()) if first is None else first
        nans = int(np.isnan(chunk).sum())
        num_nan, num_inf = num_nan + nans, num_inf + int(bad.sum()) - nans
    if first is None:
        return None
    index = np.unravel_index(first, array.shape)
    return NonFinite(num_nan, num_inf, tuple(int(n) + start for n, start in zip_longest(index, origin, fillvalue=0)))


def largest_difference(a: Array, b: Array) -> float:
    """max |a - b| in float64; 0.0 exactly if all values are equal; infinite where only one of two is NaN."""
    worst = 0.0
    for x, y in _chunks(a, b):
        x64, y64 = x.astype(np.float64), y.astype(np.float64)
        # equal infinities and NaNs are no difference
        same = (x64 == y64) | (np.isnan(x64) & np.isnan(y64))
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0.0, np.abs(x64 - y64))
        worst = max(worst, float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0.0)))
    return worst


@dataclass(frozen=True)
class CastCounts:
    """What a cast did to finite values.

    num_overflowed: became the largest number of the target, because saturation was asked for.
    num_underflowed: lay below the smallest normal number of the target and lost precision; num_zeroed of them all.
    """

    num_overflowed: int = 0
    largest: float = 0.0
    num_underflowed: int = 0
    num_zeroed: int = 0

    def notes(self, name: str, dtype: str) -> list[str]:
        """Sentences about what was lost in `name`."""
        out = []
        if self.num_overflowed:
            out.append(f"{name}: {self.num_overflowed} values up to {self.largest:g} were set to the largest {dtype}.")
        if self.num_underflowed:
            out.append(
                f"{name}: {self.num_underflowed} values below the smallest normal {dtype} lost precision, "
                f"{self.num_zeroed} of them became zero."
            )
        return out


def cast(name: str, array: Array, dtype: str, *, saturate: bool = False) -> tuple[Array, CastCounts]:
    """Rounds a tensor to another float dtype. NaN and Inf stay what they are.

    Raises:
        ConversionError: finite values overflow and `saturate` is not set.
    """
    target = DTYPES[dtype]
    if array.dtype == target:
        return array, CastCounts()
    limit = ml_dtypes.finfo(target)
    top, tiny = float(limit.max), float(limit.smallest_normal)
    out: Array = np.empty(array.shape, target)
    overflowed = underflowed = zeroed = 0
    largest = 0.0
    for x, y in _chunks(array, out):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            y[:] = x.astype(target)
        finite = np.isfinite(x)
        over = finite & ~np.isfinite(y)
        if over.any():
            overflowed += int(over.sum())
            big = x[over].astype(np.float64)
            largest = max(largest, float(np.abs(big).max()))
            y[over] = (np.sign(big) * top).astype(target)
        under, zero = _underflow(x, y, finite & ~over, tiny)
        underflowed, zeroed = underflowed + under, zeroed + zero
    if overflowed and not saturate:
        raise ConversionError(
            f"{name}: {overflowed} of {array.size} values do not fit {dtype}, whose largest number is {top:g}; "
            f"the largest is {largest:g} ({dtype_name(array.dtype)}). Choose a wider dtype, or ask to saturate."
        )
    return out, CastCounts(overflowed, largest, underflowed, zeroed)


def _underflow(x: Array, y: Array, finite: np.ndarray[Any, Any], tiny: float) -> tuple[int, int]:
    """(values below `tiny` that changed, those of them that became zero)."""
    # tiny is a power of two: exact in the dtype of x, or zero there and then nothing is below it
    small = finite & (np.abs(x) < x.dtype.type(tiny)) & (x != 0)
    if not small.any():
        return 0, 0
    before, after = x[small].astype(np.float64), y[small].astype(np.float64)
    return int((before != after).sum()), int((after == 0).sum())
