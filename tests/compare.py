"""How far a result may be from its reference when only rounding separates them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["distance", "rounding"]


def rounding(terms: int, dtype: Any = np.float64) -> float:
    """8 u sqrt(terms): u the unit roundoff, `terms` the longest chain of summed terms."""
    unit = float(np.finfo(dtype).eps) / 2
    return 8 * unit * math.sqrt(terms)


def distance(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> float:
    """max|got - want| / max|want|; infinite where `got` is not finite, or not 0 and `want` is 0 everywhere."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if not np.isfinite(got).all():
        return math.inf
    error, size = float(np.abs(got.astype(np.float64) - want).max()), float(np.abs(want).max())
    return error / size if size else (math.inf if error else 0.0)
