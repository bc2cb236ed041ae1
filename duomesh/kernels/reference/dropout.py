"""The mask of a dropout, drawn in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from duomesh.core.arrays import Array
from duomesh.core.dropout import drop_below
from duomesh.core.random import Words, philox

__all__ = ["kept"]


def kept(samples: Array, places: Array, key: Array, *, features: int, rate: float, site: int) -> npt.NDArray[np.bool_]:
    """[B], [S], [2] int32 -> [B, S, features] which elements a dropout keeps; see `core.dropout`."""
    group = np.arange(-(-features // 4), dtype=np.uint64)
    counter = (_words(places)[:, None], group, _words(samples)[:, None, None], np.full(1, site, np.uint64))
    k0, k1 = _words(key)
    words = np.stack(philox(counter, (int(k0), int(k1))), axis=-1)
    flat = words.reshape(len(samples), len(places), -1)[..., :features]
    return np.asarray(flat >= np.uint64(drop_below(rate)))


def _words(x: Array) -> Words:
    """int32 numbers as the words of their bits."""
    return x.astype(np.int32).view(np.uint32).astype(np.uint64)
