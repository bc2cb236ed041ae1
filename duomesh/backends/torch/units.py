"""ZeRO-3: weights are gathered before each step of the model that reads them, and released after it.

The buckets of a step of the model are its unit. Forward gathers a unit and starts on the next one's; backward gathers
it again when the cotangent of the step's outputs arrives, and its weights go as their gradients come. `GradientSums`
scatters those. Buckets that no other rank shares always stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duomesh.backends.torch.flat import FlatParams
from duomesh.core.sharding.storage import Bucket, Storage

__all__ = ["Units"]


class Units:
    """Gathers and releases the units of a model.

    Args:
        flat: the weights; only ranges of them are kept from now on.
    """

    def __init__(self, storage: Storage, flat: FlatParams) -> None:
        self._flat = flat
        count = len(storage.sharded.steps)
        self._used = [storage.used(index) for index in range(count)]
        self._read_back = [storage.used(index, in_backward=True) for index in range(count)]

    def before(self, index: int) -> None:
        if index == 0:
            self._flat.release_all()  # the last pass may have ended anywhere in an exception, and weights were set
        for bucket in self._used[index]:
            self._flat.acquire(bucket)
        if index + 1 < len(self._used):
            for bucket in self._used[index + 1]:
                self._flat.prefetch(bucket)

    def after(self, index: int, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Releases what the next step does not read, and marks where backward enters the step."""
        following = self._used[index + 1] if index + 1 < len(self._used) else []
        for bucket in self._used[index]:
            if bucket not in following:
                self._flat.release(bucket)
        return {
            name: _Entry.apply(tensor, self, index) if tensor.requires_grad else tensor
            for name, tensor in outputs.items()
        }

    def enter_backward(self, index: int) -> None:
        for bucket in self._read_back[index]:
            self._flat.acquire(bucket)
        if index:
            for bucket in self._read_back[index - 1]:
                self._flat.prefetch(bucket)

    def done(self, bucket: Bucket, index: int) -> None:
        """All gradients of a bucket's weights in one step of the model have been made."""
        earlier = self._read_back[index - 1] if index else []
        if bucket not in earlier:
            self._flat.release(bucket)


class _Entry(torch.autograd.Function):
    """An output of a step: when its cotangent arrives, the step's weights are needed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: Units, index: int) -> Tensor:
        ctx.units, ctx.index = units, index
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        ctx.units.enter_backward(ctx.index)
        return cotangent, None, None
