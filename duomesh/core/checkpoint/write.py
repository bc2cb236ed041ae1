"""Writing a checkpoint: tensors are streamed to files one at a time, and published by one rename.

Every rank writes the pieces that it owns to files of its own and makes a table of them. Rank 0 makes the directory,
joins the tables into one manifest, and publishes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from duomesh.core.arrays import Array, dtype_name
from duomesh.core.boxes import Box, box_shape, tiles
from duomesh.core.checkpoint.manifest import MANIFEST, Manifest, Shard, StoredFile, StoredTensor, TrainingState
from duomesh.core.errors import BackendError, OutputError
from duomesh.core.ir.build import build_program
from duomesh.core.ir.program import ModelProgram
from duomesh.core.ir.values import Param
from duomesh.core.peers import ALONE, Peers, share
from duomesh.core.publish import explaining, flush, publish_directory
from duomesh.core.session import STATE_GROUPS, StateLoader, whole_boxes
from duomesh.core.spec.codec import decode, encode
from duomesh.core.spec.model import ModelSpec
from duomesh.core.tensorfile import TensorFileWriter, header_capacity

__all__ = ["checksum", "write_checkpoint"]

_FILE_BYTES = 4 << 30  # a new file is begun beyond this size

Boxes = Mapping[str, Sequence[Box]]


def checksum(array: Array) -> str:
    """blake2b of an array's bytes in C order, little endian."""
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    return hashlib.blake2b(flat.view(np.uint8).data, digest_size=16).hexdigest()


def write_checkpoint(
    target: Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, str, Array]],
    *,
    boxes: Boxes | None = None,
    peers: Peers = ALONE,
    training: TrainingState | None = None,
    config: Mapping[str, Any] | None = None,
    written_by: str = "",
    plan: str = "",
    file_bytes: int = _FILE_BYTES,
    overwrite: bool = False,
) -> Path:
    """Writes a complete checkpoint directory, or nothing. Of several ranks each calls it, with its own tensors.

    Args:
        target: the directory to create, where all ranks see it.
        spec: the model; it says which tensors there must be.
        tensors: (group, canonical name, array) in any order; each is held only while it is written. The groups are
            those of `STATE_GROUPS` if `training` is given, else "params" alone.
        boxes: which rectangles of each parameter come, those of one name in their order; None for whole parameters.
            All ranks' together must have each element once.
        peers: the ranks that write.
        training: the progress of a run; None for weights without an optimizer.
        config: the effective configuration, JSON values.
        written_by: the backend and version, for people.
        plan: by which the ranks share the model, for people.
        file_bytes: size beyond which a group goes on in a new file.
        overwrite: replace what `target` holds.

    Returns:
        `target`.

    Raises:
        OutputError: the place cannot be written or lacks space; the message has the bytes needed and free.
        BackendError: tensors are missing, unknown, or of another shape.
    """
    program = build_program(spec)
    groups = STATE_GROUPS if training else ("params",)
    # master and moments are as wide as the run, weights alone at most fp32 (an upper bound is enough here)
    width = 8 if training and training.compute_dtype == "float64" else 4
    needed = program.num_params * width * len(groups)
    mine = boxes or whole_boxes(program)
    files = {
        key: file for group in groups for key, file in _assign_files(group, mine, width, file_bytes, peers).items()
    }
    with ExitStack() as publication:

        def begin() -> str:
            with _explaining(target, needed):
                _check_space(target, needed if training else 0)
                return str(publication.enter_context(publish_directory(target, overwrite=overwrite)))

        def write() -> str:
            with _explaining(target, needed):
                return json.dumps(encode(_write_part(work, program, mine, files, tensors, peers)))

        def publish() -> str:
            parts = [decode(_Part, json.loads(table)) for table in tables]
            manifest = Manifest(
                spec=spec,
                written_by=written_by,
                plan=plan,
                training=training,
                # through JSON once, so that what is kept equals what is read back
                config=json.loads(json.dumps(dict(config or {}))),
                files=tuple(file for part in parts for file in part.files),
                tensors=tuple(_join(parts, program, groups)),
            )
            with _explaining(target, needed):
                (work / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
                publication.close()
            return ""

        work = Path(share(peers, str if peers.rank else begin)[0])
        tables = share(peers, write)
        share(peers, str if peers.rank else publish)
    return target


@dataclass(frozen=True)
class _Part:
    """What one rank has written."""

    files: tuple[StoredFile, ...]
    tensors: tuple[StoredTensor, ...]


_Key = tuple[str, str, Box]  # group, canonical name, rectangle


def _assign_files(group: str, boxes: Boxes, width: int, file_bytes: int, peers: Peers) -> dict[_Key, str]:
    """The file of each piece; a piece is never cut."""
    owner = f"rank{peers.rank:05d}-" if peers.world_size > 1 else ""
    out: dict[_Key, str] = {}
    number, used = 1, 0
    for name, parts in boxes.items():
        for box in parts:
            size = prod(box_shape(box)) * width
            if used and used + size > file_bytes:
                number, used = number + 1, 0
            out[group, name, box] = f"{group}-{owner}{number:05d}.safetensors"
            used += size
    return out


def _key_in_file(param: Param, box: Box) -> str | None:
    """A whole parameter goes by its own name, a piece by that and its place."""
    is_whole = box_shape(box) == param.shape
    return None if is_whole else f"{param.name}@{','.join(str(start) for start, _ in box)}"


def _write_part(
    work: Path,
    program: ModelProgram,
    boxes: Boxes,
    files: Mapping[_Key, str],
    tensors: Iterable[tuple[str, str, Array]],
    peers: Peers,
) -> _Part:
    if not work.is_dir():
        raise OutputError(f"{work}, which rank 0 has made, is not there. All ranks must write to one file system.")
    loader = StateLoader(program, tuple(dict.fromkeys(group for group, _, _ in files)), boxes)
    keys = {(group, name, box): _key_in_file(program.params[name], box) for group, name, box in files}
    stored = {}
    with ExitStack() as stack:
        writers: dict[str, TensorFileWriter] = {}
        for file in dict.fromkeys(files.values()):
            names = [keys[piece] or piece[1] for piece, assigned in files.items() if assigned == file]
            writers[file] = TensorFileWriter(work / file, header_capacity(names))
            stack.callback(writers[file].abort)
        for group, name, array in tensors:
            box = loader.check(group, name, array.shape)
            piece = group, name, box
            writers[files[piece]].add(keys[piece] or name, array)
            offset = tuple(start for start, _ in box)
            shard = Shard(
                file=files[piece], offset=offset, shape=array.shape, checksum=checksum(array), key=keys[piece]
            )
            shape, dtype = program.params[name].shape, dtype_name(array.dtype)
            stored[piece] = StoredTensor(group=group, name=name, shape=shape, dtype=dtype, shards=(shard,))
        loader.finish()
        for writer in writers.values():
            writer.close()
    for file in writers if peers.rank else ():  # rank 0 flushes the directory, but can only reach its own host's memory
        flush(work / file)
    sizes = [StoredFile(name=file, num_bytes=(work / file).stat().st_size) for file in sorted(writers)]
    return _Part(tuple(sizes), tuple(stored[piece] for piece in files))


def _join(parts: Sequence[_Part], program: ModelProgram, groups: Sequence[str]) -> Iterator[StoredTensor]:
    """Every tensor with the pieces of all ranks.

    Raises:
        BackendError: pieces are missing, or overlap.
    """
    found: dict[tuple[str, str], list[StoredTensor]] = {}
    for part in parts:
        for tensor in part.tensors:
            found.setdefault((tensor.group, tensor.name), []).append(tensor)
    for group in groups:
        for name, param in program.params.items():
            pieces = found.get((group, name), [])
            shards = tuple(sorted((s for piece in pieces for s in piece.shards), key=lambda shard: shard.offset))
            dtypes = {piece.dtype for piece in pieces}
            if len(dtypes) > 1 or not tiles([shard.box for shard in shards], param.shape):
                raise BackendError(
                    f"{len(parts)} ranks gave {len(shards)} pieces of {group} {name} in {len(dtypes)} dtypes, which do "
                    f"not make up its shape {param.shape}. Every rank of the plan must write."
                )
            yield replace(pieces[0], shards=shards)


@contextmanager
def _explaining(target: Path, needed: int) -> Iterator[None]:
    """As `core.publish.explaining`; where space has run out, it says how much there must be."""
    try:
        with explaining(target):
            yield
    except OutputError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(target, needed) from error
        raise


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
