"""Host arrays <-> tensors, bit for bit, bfloat16 and float8 included."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from duomesh.core.arrays import DTYPES, Array, dtype_name

__all__ = ["TORCH_DTYPES", "to_array", "to_tensor"]

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# dtypes that numpy itself lacks travel as the unsigned integers of their size
_CARRIERS = {2: (np.uint16, torch.uint16), 1: (np.uint8, torch.uint8)}


def _is_foreign(name: str) -> bool:
    return name == "bfloat16" or name.startswith("float8")


def to_tensor(array: Array) -> Tensor:
    """A CPU tensor; shares memory with the array where that is writable."""
    name = dtype_name(array.dtype)
    array = np.asarray(array, order="C")  # ascontiguousarray would make a scalar one-dimensional
    if not array.flags.writeable:
        array = array.copy()
    if _is_foreign(name):
        carrier, _ = _CARRIERS[array.dtype.itemsize]
        return torch.from_numpy(array.view(carrier)).view(TORCH_DTYPES[name])
    return torch.from_numpy(array)


def to_array(tensor: Tensor) -> Array:
    """A host copy in the tensor's own dtype."""
    name = _NAMES[tensor.dtype]
    host = tensor.detach().to("cpu").contiguous()
    if _is_foreign(name):
        _, carrier = _CARRIERS[host.element_size()]
        return host.view(carrier).numpy().view(DTYPES[name]).copy()
    return host.numpy().copy()
