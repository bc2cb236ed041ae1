"""Stored arrays in and out of devices, as host arrays under canonical names.

On the way in a tensor is read only where this process has a part of it. On the way out, whole arrays are for
comparison; what a checkpoint takes are the rectangles that this process saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from duomesh.core.arrays import Array
from duomesh.core.boxes import Box, Sliceable, cut
from duomesh.core.ir.values import Axes, Param
from duomesh.core.sharding.pieces import rectangles
from duomesh.core.sharding.stacks import Stack, Stacks

__all__ = ["Filling", "Store"]

Ranges = tuple[tuple[int, int], ...]  # [start, stop) along each dim of an array


class Store:
    """Where the arrays of a model are.

    Args:
        stacks: which arrays there are. shardings: of each by name.
    """

    def __init__(self, stacks: Stacks, shardings: Mapping[str, jax.sharding.Sharding]) -> None:
        self.stacks, self.shardings = stacks, shardings

    def put(self, params: Iterable[tuple[str, Sliceable]], dtype: Any) -> dict[str, jax.Array]:
        """Every canonical parameter -> stored arrays of one dtype. The caller has checked names and shapes."""
        filling = Filling(self, dtype)
        for name, tensor in params:
            filling.add(name, tensor)
        return filling.arrays()

    def parts(self, stack: Stack) -> dict[jax.Device, Ranges]:
        """Which part of an array each device of this process has."""
        found = self.shardings[stack.name].addressable_devices_indices_map(stack.shape)
        return {device: _ranges(index or (), stack.shape) for device, index in found.items()}

    def take(self, stored: Mapping[str, jax.Array]) -> Iterator[tuple[str, Array]]:
        """Whole canonical parameters, in the program's order and the arrays' own dtypes. Every process takes part."""
        host: dict[str, Array] = {}
        for name, place in self.stacks.places.items():
            stack = self.stacks.stacks[place.stack]
            if place.stack not in host:
                host[place.stack] = _whole(stored[place.stack])
            entry = host[place.stack] if place.index is None else host[place.stack][place.index]
            param = self.stacks.sharded.model.params[name]
            yield name, entry[tuple(slice(axis.size) for axis in stack.axes)].reshape(param.shape).copy()
            if name == stack.members[-1]:
                del host[place.stack]

    def whole(self, x: jax.Array, axes: Axes) -> Array:
        """A value on this host, without padding. Every process takes part."""
        made = _whole(x)[tuple(slice(axis.size) for axis in axes)]
        return made if made.flags.writeable else made.copy()

    def _saved(self, stack: Stack) -> list[tuple[jax.Device, Ranges]]:
        """The parts that this process saves: each is saved from the first device that has it."""
        first: dict[Ranges, jax.Device] = {}
        for device, index in self.shardings[stack.name].devices_indices_map(stack.shape).items():
            first.setdefault(_ranges(index or (), stack.shape), device)
        process = jax.process_index()
        return [(device, ranges) for ranges, device in first.items() if device.process_index == process]

    def boxes(self) -> dict[str, list[Box]]:
        """Canonical name -> the rectangles that this process saves; names of which it saves nothing are left out."""
        found: dict[str, list[Box]] = {}
        for name, place in self.stacks.places.items():
            stack = self.stacks.stacks[place.stack]
            for _, ranges in self._saved(stack):
                for box, _ in rectangles(stack.param, ranges[len(stack.lead) :]):
                    found.setdefault(name, []).append(box)
        return found

    def pieces(self, stored: Mapping[str, jax.Array]) -> Iterator[tuple[str, Array]]:
        """What is in `boxes`, those of one name in their order. Nothing moves between processes."""
        host: dict[str, dict[jax.Device, Array]] = {}
        for name, place in self.stacks.places.items():
            stack = self.stacks.stacks[place.stack]
            if place.stack not in host:
                shards = stored[place.stack].addressable_shards
                host[place.stack] = {shard.device: np.asarray(shard.data) for shard in shards}
            for device, ranges in self._saved(stack):
                part = host[place.stack][device]
                entry = part if place.index is None else part[place.index]
                merged = entry.reshape(_merged(stack.param, entry.shape))
                for _, index in rectangles(stack.param, ranges[len(stack.lead) :]):
                    yield name, merged[index].copy()
            if name == stack.members[-1]:
                del host[place.stack]


class Filling:
    """Arrays on their way in: a tensor is read when it comes, as its file may be closed later."""

    def __init__(self, store: Store, dtype: Any) -> None:
        self._store = store
        self._held = {
            stack.name: {ranges: np.zeros([b - a for a, b in ranges], dtype) for ranges in store.parts(stack).values()}
            for stack in store.stacks.stacks.values()
        }

    def add(self, name: str, tensor: Sliceable) -> None:
        place = self._store.stacks.places[name]
        stack = self._store.stacks.stacks[place.stack]
        for ranges, buffer in self._held[place.stack].items():
            entry = buffer if place.index is None else buffer[place.index]
            _fill(entry, stack.param, ranges[len(stack.lead) :], tensor)

    def arrays(self) -> dict[str, jax.Array]:
        """On the devices; once, after the last tensor."""
        return {name: self._array(self._store.stacks.stacks[name], self._held.pop(name)) for name in [*self._held]}

    def _array(self, stack: Stack, held: Mapping[Ranges, Array]) -> jax.Array:
        arrays = [jax.device_put(held[ranges], device) for device, ranges in self._store.parts(stack).items()]
        sharding = self._store.shardings[stack.name]
        return jax.make_array_from_single_device_arrays(stack.shape, sharding, arrays)


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> Ranges:
    return tuple(side.indices(size)[:2] for side, size in zip(index, shape, strict=True))


def _merged(param: Param, sizes: Iterable[int]) -> list[int]:
    """Local sizes of logical axes -> the local shape with stored dims."""
    left = iter(sizes)
    return [prod(next(left) for _ in group) for group in param.groups]


def _fill(entry: Array, param: Param, ranges: Ranges, tensor: Sliceable) -> None:
    merged = entry.reshape(_merged(param, entry.shape))
    assert np.shares_memory(merged, entry) or not entry.size
    for box, index in rectangles(param, ranges):
        merged[index] = cut(tensor, box)


def _whole(x: jax.Array) -> Array:
    """The array on this host, from all processes."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
