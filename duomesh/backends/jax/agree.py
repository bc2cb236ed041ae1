"""Whether devices hold the same bits where the plan says that they do."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from duomesh.core.arrays import Array
from duomesh.core.sharding.agree import check_digests
from duomesh.core.sharding.mesh import Mesh

__all__ = ["check_copies"]


def check_copies(mesh: Mesh, devices: list[jax.Device], what: str, arrays: Mapping[str, jax.Array]) -> None:
    """Compares, bit by bit, the copies that devices have of the same part of an array. Every process calls it.

    Args:
        mesh, devices: its ranks, in order.
        what: the arrays are, as "weight".

    Raises:
        BackendError: in every process, naming the first array that differs, the axis and the ranks.
    """
    table = _digests(devices, arrays)
    for (name, array), row in zip(arrays.items(), table, strict=True):
        parts = array.sharding.devices_indices_map(array.shape)
        same: dict[str, dict[int, str]] = {}
        for rank, device in enumerate(devices):
            same.setdefault(str(parts[device]), {})[rank] = f"{row[rank]:x}"
        for digests in same.values():
            check_digests(mesh, f"{what} {name}", mesh.names, digests)


def _digests(devices: list[jax.Device], arrays: Mapping[str, jax.Array]) -> Array:
    """[arrays, ranks] uint32."""
    place = {device: rank for rank, device in enumerate(devices)}
    table = np.zeros((len(arrays), len(devices)), np.uint32)
    for row, array in zip(table, arrays.values(), strict=True):
        for shard in array.addressable_shards:
            row[place[shard.device]] = zlib.crc32(np.ascontiguousarray(shard.data).tobytes())
    if jax.process_count() == 1:
        return table
    # each entry is another process's zero
    return np.asarray(multihost_utils.process_allgather(table)).reshape(-1, *table.shape).max(axis=0)
