"""Reading a checkpoint: opened and checked without touching tensor data, then tensor by tensor, or piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from duomesh.core.arrays import DTYPES, Array
from duomesh.core.boxes import Box, Deferred, box_shape, common, show_box, slices, tiles, whole, within
from duomesh.core.checkpoint.manifest import MANIFEST, Shard, StoredTensor, TrainingState, read_manifest
from duomesh.core.checkpoint.write import checksum
from duomesh.core.closing import Closing
from duomesh.core.errors import BackendError, CheckpointError, TensorFileError
from duomesh.core.ir.build import build_program
from duomesh.core.session import STATE_GROUPS, StateLoader
from duomesh.core.spec.model import ModelSpec
from duomesh.core.tensorfile import TensorFile

__all__ = ["Checkpoint"]


class Checkpoint(Closing):
    """A complete checkpoint directory.

    Args:
        path: the directory.
        verify: compare every stored slice that is read whole with its checksum. What is read of others is not
            compared: the rest of the slice would have to be read as well.

    Attributes:
        spec: the model. training: the run's progress; None for weights alone. config: its configuration, or {}.
        written_by: backend and version that wrote it. plan: by which its ranks shared the model.

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
        self.written_by, self.plan = manifest.written_by, manifest.plan
        self._names = tuple(build_program(self.spec).params)
        self._tensors = {(tensor.group, tensor.name): tensor for tensor in manifest.tensors}
        self._files: dict[str, TensorFile] = {}
        self._closed_bytes = 0
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
            is_sound = all(len(shard.offset) == len(shard.shape) for shard in tensor.shards)
            if not (is_sound and tiles([shard.box for shard in tensor.shards], tensor.shape)):
                raise CheckpointError(
                    f"{self.path / MANIFEST}: the slices of {tensor.group} {tensor.name} do not fill its shape "
                    f"{tensor.shape} exactly once. The manifest is damaged; use an earlier checkpoint."
                )

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of tensors that it holds: optimizer state, or "params" alone."""
        return STATE_GROUPS if self.training else ("params",)

    @property
    def num_bytes_read(self) -> int:
        """From the files of tensors so far, their headers included."""
        return self._closed_bytes + sum(file.num_bytes_read for file in self._files.values())

    def close(self) -> None:
        while self._files:
            _, file = self._files.popitem()
            self._closed_bytes += file.num_bytes_read
            file.close()

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.path / name)
        return self._files[name]

    def read(self, group: str, name: str, box: Sequence[tuple[int, int]] = ()) -> Array:
        """A tensor, or a rectangle of it, [start, stop) along its first dims, from the slices that hold it.

        Raises:
            CheckpointError: there is no such tensor, or stored bytes are not those that were written.
        """
        tensor = self._tensors.get((group, name))
        if tensor is None:
            raise CheckpointError(f"{self.path} holds no tensor {name!r} in the group {group!r}.")
        wanted = within(box, tensor.shape)
        if wanted is None:
            raise CheckpointError(f"{show_box(box)} is not within {name} of shape {tensor.shape}.")
        out: Array = np.empty(box_shape(wanted), DTYPES[tensor.dtype])
        for shard in tensor.shards:
            part = common(wanted, shard.box)
            if part is not None:
                out[slices(part, [start for start, _ in wanted])] = self._read_shard(tensor, shard, part)
        return out

    def _read_shard(self, tensor: StoredTensor, shard: Shard, part: Box) -> Array:
        file, key = self._file(shard.file), shard.key or tensor.name
        info = file.info(key)
        if (info.dtype, info.shape) != (tensor.dtype, shard.shape):
            raise TensorFileError(
                f"{file.path}: {key} is {info.dtype} of shape {info.shape}; "
                f"the manifest says {tensor.dtype} of shape {shard.shape}."
            )
        out = file.read(key, [(s.start, s.stop) for s in slices(part, shard.offset)])
        if self._verify and part == shard.box and checksum(out) != shard.checksum:
            raise CheckpointError(
                f"{file.path}: {tensor.group} {tensor.name} does not have the checksum that was written. "
                f"The file is damaged; delete {self.path} to go on from an earlier checkpoint."
            )
        return out

    def deferred_params(self) -> Iterator[tuple[str, Deferred]]:
        """(canonical name, weights): as stored, or for a trained model `master` rounded to the run's dtype."""
        if self.training is None:
            return ((name, self._deferred("params", name)) for name in self._names)
        dtype = DTYPES[self.training.compute_dtype]
        return ((name, self._deferred("master", name).astype(dtype)) for name in self._names)

    def deferred_state(self) -> Iterator[tuple[str, str, Deferred]]:
        """(group, canonical name, tensor) as `Session.load_optimizer_state` takes it, read as far as it is used.

        Raises:
            CheckpointError: the checkpoint holds weights alone.
        """
        if self.training is None:
            raise CheckpointError(
                f"{self.path} holds weights without optimizer state, so a run cannot be resumed from it. "
                "Use it as model.path to start a new run from its weights."
            )
        return ((group, name, self._deferred(group, name)) for group in STATE_GROUPS for name in self._names)

    def _deferred(self, group: str, name: str) -> Deferred:
        return Deferred(self._tensors[group, name].shape, lambda box: self.read(group, name, box))

    def params(self) -> Iterator[tuple[str, Array]]:
        """`deferred_params`, whole."""
        return ((name, whole(tensor)) for name, tensor in self.deferred_params())

    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]:
        """`deferred_state`, whole."""
        return ((group, name, whole(tensor)) for group, name, tensor in self.deferred_state())
