"""Reading a checkpoint: opened and checked without touching tensor data, then tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from duomesh.core.arrays import DTYPES, Array
from duomesh.core.checkpoint.manifest import MANIFEST, Shard, StoredTensor, TrainingState, read_manifest
from duomesh.core.checkpoint.write import checksum
from duomesh.core.closing import Closing
from duomesh.core.errors import BackendError, CheckpointError, TensorFileError
from duomesh.core.ir.build import build_program
from duomesh.core.session import STATE_GROUPS, StateLoader
from duomesh.core.spec.model import ModelSpec
from duomesh.core.tensorfile import TensorFile

__all__ = ["Checkpoint"]


def _is_tiled(tensor: StoredTensor) -> bool:
    """Whether slices lie within the tensor, overlap nowhere and together have all of its elements."""
    boxes = [tuple(zip(shard.offset, shard.shape, strict=False)) for shard in tensor.shards]
    for shard, box in zip(tensor.shards, boxes, strict=True):
        if not len(shard.offset) == len(shard.shape) == len(tensor.shape):
            return False
        if any(
            start < 0 or size < 0 or start + size > whole
            for (start, size), whole in zip(box, tensor.shape, strict=True)
        ):
            return False
    for a, b in combinations(boxes, 2):
        if all(i < j + m and j < i + n for (i, n), (j, m) in zip(a, b, strict=True)):
            return False
    return sum(prod(shard.shape) for shard in tensor.shards) == prod(tensor.shape)


class Checkpoint(Closing):
    """A complete checkpoint directory.

    Args:
        path: the directory.
        verify: compare every stored slice that is read with its checksum. A read of a few rows then reads the
            whole slice; without it only the rows.

    Attributes:
        spec: the model. training: the run's progress; None for weights alone. config: its configuration, or {}.
        written_by: backend and version that wrote it.

    Raises:
        CheckpointError: the directory is missing, incomplete or damaged; a tensor that the spec needs is not there.
    """

    def __init__(self, path: Path | str, *, verify: bool = True) -> None:
        self.path, self._verify = Path(path), verify
        manifest = read_manifest(self.path)
        for file in manifest.files:
            place = self.path / file.name
            size = place.stat().st_size if place.is_file() else None
            if size != file.num_bytes:
                found = "is missing" if size is None else f"has {size} bytes instead of {file.num_bytes}"
                raise CheckpointError(f"{self.path} is incomplete: {file.name} {found}.")
        self.spec: ModelSpec = manifest.spec
        self.training: TrainingState | None = manifest.training
        self.config: Mapping[str, Any] = manifest.config
        self.written_by = manifest.written_by
        self._tensors = {(tensor.group, tensor.name): tensor for tensor in manifest.tensors}
        self._files: dict[str, TensorFile] = {}
        self._listed = {file.name for file in manifest.files}
        if len(self._tensors) != len(manifest.tensors) or any(Path(name).name != name for name in self._listed):
            raise CheckpointError(f"{self.path / MANIFEST} names a tensor twice, or a file elsewhere. It is damaged.")
        self._check_tensors()

    def _check_tensors(self) -> None:
        """Every tensor of the model once in each group: state that is missing is an error, never a fresh start."""
        loader = StateLoader(build_program(self.spec), self.groups)
        try:
            for tensor in self._tensors.values():
                loader.check(tensor.group, tensor.name, tensor.shape)
            loader.finish()
        except BackendError as error:
            raise CheckpointError(f"{self.path / MANIFEST} does not fit its own model: {error}") from None
        unknown = {tensor.dtype for tensor in self._tensors.values()} - set(DTYPES)
        if unknown:
            raise CheckpointError(f"{self.path / MANIFEST} names the unknown dtype {min(unknown)!r}.")
        for tensor in self._tensors.values():
            strangers = {shard.file for shard in tensor.shards} - self._listed
            if strangers:
                raise CheckpointError(
                    f"{self.path / MANIFEST} lists no file {min(strangers)!r}, yet {tensor.name} is in it."
                )
            if not _is_tiled(tensor):
                raise CheckpointError(
                    f"{self.path / MANIFEST}: the slices of {tensor.group} {tensor.name} do not fill its shape "
                    f"{tensor.shape} exactly once. The manifest is damaged; use an earlier checkpoint."
                )

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of tensors that it holds: optimizer state, or "params" alone."""
        return STATE_GROUPS if self.training else ("params",)

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.path / name)
        return self._files[name]

    def read(self, group: str, name: str, rows: tuple[int, int] | None = None) -> Array:
        """A tensor, or its rows [start, stop) of dim 0, assembled from the slices that hold them.

        Raises:
            CheckpointError: there is no such tensor, or stored bytes are not those that were written.
        """
        tensor = self._tensors.get((group, name))
        if tensor is None:
            raise CheckpointError(f"{self.path} holds no tensor {name!r} in the group {group!r}.")
        start, stop = rows or (0, tensor.shape[0])
        if not 0 <= start <= stop <= tensor.shape[0]:
            raise CheckpointError(f"rows {start}:{stop} are not within {name} of shape {tensor.shape}.")
        out: Array = np.empty((stop - start, *tensor.shape[1:]), DTYPES[tensor.dtype])
        for shard in tensor.shards:
            first, last = max(start, shard.offset[0]), min(stop, shard.offset[0] + shard.shape[0])
            if first < last:
                rest = tuple(slice(o, o + n) for o, n in zip(shard.offset[1:], shard.shape[1:], strict=True))
                out[first - start : last - start, *rest] = self._read_shard(
                    tensor, shard, first - shard.offset[0], last - shard.offset[0]
                )
        return out

    def _read_shard(self, tensor: StoredTensor, shard: Shard, first: int, last: int) -> Array:
        file = self._file(shard.file)
        info = file.info(tensor.name)
        if (info.dtype, info.shape) != (tensor.dtype, shard.shape):
            raise TensorFileError(
                f"{file.path}: {tensor.name} is {info.dtype} of shape {info.shape}; "
                f"the manifest says {tensor.dtype} of shape {shard.shape}."
            )
        if not self._verify:
            return file.read(tensor.name, (first, last))
        whole = file.read(tensor.name)
        if checksum(whole) != shard.checksum:
            raise CheckpointError(
                f"{file.path}: {tensor.group} {tensor.name} does not have the checksum that was written. "
                f"The file is damaged; delete {self.path} to go on from an earlier checkpoint."
            )
        return whole[first:last]

    def params(self) -> Iterator[tuple[str, Array]]:
        """(canonical name, weights): as stored, or for a trained model `master` rounded to the run's dtype."""
        group = "master" if self.training else "params"
        for name in build_program(self.spec).params:
            array = self.read(group, name)
            yield name, array.astype(DTYPES[self.training.compute_dtype], copy=False) if self.training else array

    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]:
        """(group, canonical name, array) as `Session.load_optimizer_state` takes it.

        Raises:
            CheckpointError: the checkpoint holds weights alone.
        """
        if self.training is None:
            raise CheckpointError(
                f"{self.path} holds weights without optimizer state, so a run cannot be resumed from it. "
                "Use it as model.path to start a new run from its weights."
            )
        for group in STATE_GROUPS:
            for name in build_program(self.spec).params:
                yield group, name, self.read(group, name)
