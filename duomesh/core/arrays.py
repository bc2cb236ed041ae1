"""Host arrays that carry the dtypes of checkpoints, and the names by which we speak of them.

numpy knows no bfloat16 or float8; `ml_dtypes` adds them as numpy dtypes. Both backends exchange tensors with the
rest of the library as such arrays.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["DTYPES", "Array", "dtype_name", "is_float"]

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
    "bool": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The library's name of a numpy dtype, such as "bfloat16"."""
    return _NAMES[np.dtype(dtype)]


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype holds floating-point numbers, the ml_dtypes ones included."""
    return "float" in _NAMES[np.dtype(dtype)]
