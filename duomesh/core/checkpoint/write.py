"""Writing a checkpoint: tensors are streamed to files one at a time, and published by one rename."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from duomesh.core.arrays import Array, dtype_name
from duomesh.core.checkpoint.manifest import MANIFEST, Manifest, Shard, StoredFile, StoredTensor, TrainingState
from duomesh.core.errors import OutputError
from duomesh.core.ir.build import build_program
from duomesh.core.ir.program import ModelProgram
from duomesh.core.ir.values import Param
from duomesh.core.publish import publish_directory
from duomesh.core.session import STATE_GROUPS, StateLoader
from duomesh.core.spec.model import ModelSpec
from duomesh.core.tensorfile import TensorFileWriter, header_capacity

__all__ = ["checksum", "write_checkpoint"]

_FILE_BYTES = 4 << 30  # a new file is begun beyond this size


def checksum(array: Array) -> str:
    """blake2b of an array's bytes in C order, little endian."""
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    return hashlib.blake2b(flat.view(np.uint8).data, digest_size=16).hexdigest()


def write_checkpoint(
    target: Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, str, Array]],
    *,
    training: TrainingState | None = None,
    config: Mapping[str, Any] | None = None,
    written_by: str = "",
    file_bytes: int = _FILE_BYTES,
    overwrite: bool = False,
) -> Path:
    """Writes a complete checkpoint directory, or nothing.

    Args:
        target: the directory to create.
        spec: the model; it says which tensors there must be.
        tensors: (group, canonical name, array) in any order; each is held only while it is written. The groups are
            those of `STATE_GROUPS` if `training` is given, else "params" alone.
        training: the progress of a run; None for weights without an optimizer.
        config: the effective configuration, JSON values.
        written_by: the backend and version, for people.
        file_bytes: size beyond which a group goes on in a new file.
        overwrite: replace what `target` holds.

    Returns:
        `target`.

    Raises:
        OutputError: the place cannot be written or lacks space; the message has the bytes needed and free.
        BackendError: tensors are missing, unknown, or of another shape.
    """
    program = build_program(spec)
    params = program.params
    groups = STATE_GROUPS if training else ("params",)
    # master and moments are as wide as the run, weights alone at most fp32 (an upper bound is enough here)
    width = 8 if training and training.compute_dtype == "float64" else 4
    files = {
        (group, name): file
        for group in groups
        for name, file in _assign_files(group, params, width, file_bytes).items()
    }
    needed = sum(param.size for param in params.values()) * width * len(groups)
    _check_space(target, needed if training else 0)
    try:
        with publish_directory(target, overwrite=overwrite) as work:
            stored = _write_tensors(work, program, files, tensors)
            sizes = tuple(
                StoredFile(name=name, num_bytes=(work / name).stat().st_size) for name in sorted(set(files.values()))
            )
            manifest = Manifest(
                spec=spec,
                written_by=written_by,
                training=training,
                # through JSON once, so that what is kept equals what is read back
                config=json.loads(json.dumps(dict(config or {}))),
                files=sizes,
                tensors=tuple(stored),
            )
            (work / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    except OutputError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(target, needed) from error
        raise
    return target


def _assign_files(group: str, params: Mapping[str, Param], width: int, file_bytes: int) -> dict[str, str]:
    """Canonical name -> file, in the program's order; a tensor is never cut."""
    out: dict[str, str] = {}
    number, used = 1, 0
    for name, param in params.items():
        size = param.size * width
        if used and used + size > file_bytes:
            number, used = number + 1, 0
        out[name] = f"{group}-{number:05d}.safetensors"
        used += size
    return out


def _write_tensors(
    work: Path,
    program: ModelProgram,
    files: Mapping[tuple[str, str], str],
    tensors: Iterable[tuple[str, str, Array]],
) -> list[StoredTensor]:
    groups = tuple(dict.fromkeys(group for group, _ in files))
    loader = StateLoader(program, groups)
    stored = {}
    with ExitStack() as stack:
        writers: dict[str, TensorFileWriter] = {}
        for file in dict.fromkeys(files.values()):
            names = [name for (_, name), assigned in files.items() if assigned == file]
            writers[file] = TensorFileWriter(work / file, header_capacity(names))
            stack.callback(writers[file].abort)
        for group, name, array in tensors:
            loader.check(group, name, array.shape)
            file = files[group, name]
            writers[file].add(name, array)
            shard = Shard(file=file, offset=(0,) * array.ndim, shape=array.shape, checksum=checksum(array))
            dtype = dtype_name(array.dtype)
            stored[group, name] = StoredTensor(group=group, name=name, shape=array.shape, dtype=dtype, shards=(shard,))
        loader.finish()
        for writer in writers.values():
            writer.close()
    return [stored[key] for key in files]


def _existing(path: Path) -> Path:
    """The nearest parent that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def _check_space(target: Path, needed: int) -> None:
    if shutil.disk_usage(_existing(target)).free < needed:
        raise _no_space(target, needed)


def _no_space(target: Path, needed: int) -> OutputError:
    free = shutil.disk_usage(_existing(target)).free
    return OutputError(
        f"cannot write {target}: it needs {needed:,} bytes, and {free:,} are free. "
        "Earlier checkpoints are intact. Free some space (train.keep limits how many are kept) and resume."
    )
