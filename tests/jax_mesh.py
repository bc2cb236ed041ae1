"""Functions of one device run on a mesh of simulated ones, and the collectives that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from duomesh.backends.jax.traced import traced_steps
from duomesh.core.sharding.mesh import Mesh
from duomesh.kernels.reference.ranks import Local

__all__ = ["Asked", "asked", "equal_on", "expected", "run_on"]

_SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "int32": "i32"}


@dataclass(frozen=True)
class Asked:
    """A collective. groups: ranks of each, in order. elements: of the larger buffer on one device."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    dtype: str
    elements: int


def asked(mesh: Mesh, traced: Any) -> list[Asked]:
    """Collectives of a traced function, in order."""
    return [expected(mesh, c.kind, c.axes, _SHORT[c.dtype], c.elements) for c in traced_steps(traced.jaxpr, mesh)]


def expected(mesh: Mesh, kind: str, axes: Sequence[str], dtype: str, elements: int) -> Asked:
    """A collective of the ranks that differ on some axes."""
    return Asked(kind, tuple(map(tuple, mesh.groups(*axes))), dtype, elements)


def equal_on(mesh: Mesh, array: Any) -> Local:
    """The same array on every rank."""
    return [np.asarray(array)] * mesh.world_size


def run_on(mesh: Mesh, function: Callable[..., tuple[Any, ...]], *operands: Local) -> tuple[list[Local], Any]:
    """Runs a function of one device on all.

    Args:
        function: of arrays of one device, returns a tuple of them.
        operands: each with one array a rank.

    Returns:
        Its results, each with one array a rank, and the traced function.
    """
    shape = [axis.size for axis in mesh.axes]
    devices = jax.sharding.Mesh(np.array(jax.devices()[: mesh.world_size]).reshape(shape), mesh.names)
    spec = jax.P(mesh.names)

    def local(*stacked: Any) -> Any:
        return tuple(made[None] for made in function(*(x[0] for x in stacked)))

    mapped = jax.shard_map(local, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)
    stacked = [np.stack(operand) for operand in operands]
    traced = jax.jit(mapped).trace(*stacked)
    return [list(np.asarray(made)) for made in traced.lower().compile()(*stacked)], traced
