"""Process groups of a mesh: one for every set of axes that something moves over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from duomesh.core.activity import doing
from duomesh.core.errors import BackendError
from duomesh.core.sharding.collectives import StepShape, step_collectives
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.storage import Storage

__all__ = ["Groups", "Stage", "needed_groups"]


_FIRST_STEP_S = 900.0


class Stage:
    """What a rank is doing, for those who watch it: "forward", "backward", "sync", "norm", "optimizer", or "idle"."""

    def __init__(self) -> None:
        self.name = "idle"
        self.step = self._num_steps = 0
        self._seen: set[str] = set()

    def begin_step(self, number: int | None) -> None:
        """A training step; None for the one after the last."""
        self.step = self.step + 1 if number is None else number
        self._num_steps += 1

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before, self.name = self.name, name
        # the first step, like the first of anything, compiles and meets whatever is done once
        is_first = self._num_steps <= 1 or name not in self._seen
        self._seen.add(name)
        try:
            with doing(f"step {self.step}, {name}", stall_s=_FIRST_STEP_S if is_first else None):
                yield
        finally:
            self.name = before


class Groups:
    """Where this rank stands on a mesh, and whom it talks to.

    Every rank makes all groups, in the same order. Axes of size 1 have no group and no place in a tuple.

    Attributes:
        stage: what this rank is doing.

    Args:
        mesh: its ranks are those of the default process group; a mesh of one rank needs none.
        needed: sets of axes, from major to minor, that a collective is over.
        device: of the tensors that move.

    Raises:
        BackendError: the number of ranks is not the mesh's.
    """

    def __init__(self, mesh: Mesh, needed: Iterable[tuple[str, ...]], device: torch.device) -> None:
        self.mesh, self.stage = mesh, Stage()
        is_running = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if is_running else 0
        world = dist.get_world_size() if is_running else 1
        if world != mesh.world_size:
            raise BackendError(
                f"the plan has {mesh.world_size} ranks and {world} were started. Start {mesh.world_size}, for example "
                f"with torchrun --nproc-per-node {mesh.world_size}."
            )
        place = list(mesh.coordinates())[self.rank]
        self.coordinate = dict(zip(mesh.names, place, strict=True))
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        if world == 1:
            return
        device_mesh = init_device_mesh(device.type, tuple(axis.size for axis in mesh.axes), mesh_dim_names=mesh.names)
        for axes in sorted(set(needed)):
            if len(axes) == 1:
                self._groups[axes] = device_mesh.get_group(axes[0])
                continue
            for ranks in mesh.groups(*axes):
                group = dist.new_group(ranks)
                if self.rank in ranks:
                    self._groups[axes] = group

    def of(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The group of this rank over some axes."""
        return self._groups[axes]

    def names(self) -> dict[str, tuple[str, ...]]:
        """Axes by the name of their group."""
        return {group.group_name: axes for axes, group in self._groups.items()}

    def size(self, axes: Iterable[str]) -> int:
        size = 1
        for axis in axes:
            size *= self.mesh.size(axis)
        return size

    def place(self, axes: Iterable[str]) -> int:
        """This rank's place among those that differ in these axes, from major to minor."""
        place = 0
        for axis in axes:
            place = place * self.mesh.size(axis) + self.coordinate[axis]
        return place


def needed_groups(storage: Storage) -> set[tuple[str, ...]]:
    """Every set of axes that a step of the model has a collective over, whatever its batch."""
    ranks = storage.sharded.mesh.world_size
    shape = StepShape(batch=ranks, seq=2 * ranks, has_segments=True)
    return {made.axes for made in step_collectives(storage, shape)}
