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
from itertools import product
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
    # through JSON once, so that what is kept equals what is read back
    kept_config = json.loads(json.dumps(dict(config or {})))
    empty = Manifest(
        spec=spec, written_by=written_by, plan=plan, training=training, config=kept_config, files=(), tensors=()
    )
    job = _Job(target, program, training, whole_boxes(program) if boxes is None else boxes, peers)
    with ExitStack() as publication:

        def begin() -> str:
            with job.explaining():
                job.check_space()
                return str(publication.enter_context(publish_directory(target, overwrite=overwrite)))

        def publish() -> str:
            manifest = job.join(empty, [decode(_Part, json.loads(table)) for table in tables])
            with job.explaining():
                (work / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
                publication.close()
            return ""

        work = Path(share(peers, str if peers.rank else begin)[0])
        tables = share(peers, lambda: json.dumps(encode(job.write(work, tensors, file_bytes))))
        share(peers, str if peers.rank else publish)
    return target


@dataclass(frozen=True)
class _Part:
    """What one rank has written."""

    files: tuple[StoredFile, ...]
    tensors: tuple[StoredTensor, ...]


_Key = tuple[str, str, Box]  # group, canonical name, rectangle


@dataclass(frozen=True)
class _Job:
    """One rank's share of a checkpoint."""

    target: Path
    program: ModelProgram
    training: TrainingState | None
    boxes: Boxes
    peers: Peers

    @property
    def groups(self) -> tuple[str, ...]:
        return STATE_GROUPS if self.training else ("params",)

    @property
    def width(self) -> int:
        """Bytes of an element: master and moments are as wide as the run, weights alone at most fp32."""
        return 8 if self.training and self.training.compute_dtype == "float64" else 4

    @property
    def needed(self) -> int:
        return self.program.num_params * self.width * len(self.groups)

    def check_space(self) -> None:
        if self.training and shutil.disk_usage(_existing(self.target)).free < self.needed:
            raise self._no_space()

    def _no_space(self) -> OutputError:
        free = shutil.disk_usage(_existing(self.target)).free
        return OutputError(
            f"cannot write {self.target}: it needs {self.needed:,} bytes, and {free:,} are free. "
            "Earlier checkpoints are intact. Free some space (train.keep limits how many are kept) and resume."
        )

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """As `core.publish.explaining`; where space has run out, it says how much there must be."""
        try:
            with explaining(self.target):
                yield
        except OutputError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._no_space() from error
            raise

    def write(self, work: Path, tensors: Iterable[tuple[str, str, Array]], file_bytes: int) -> _Part:
        """Writes this rank's files. Raises OutputError or BackendError."""
        if not work.is_dir():
            raise OutputError(f"{work}, which rank 0 has made, is not there. All ranks must write to one file system.")
        with self.explaining():
            part = self._write_files(work, tensors, self._files(file_bytes))
            # rank 0 flushes the directory, but what others wrote may be in the memory of another host
            for file in part.files if self.peers.rank else ():
                flush(work / file.name)
        return part

    def _files(self, file_bytes: int) -> dict[_Key, str]:
        """The file of each piece; a piece is never cut."""
        owner = f"rank{self.peers.rank:05d}-" if self.peers.world_size > 1 else ""
        out: dict[_Key, str] = {}
        for group in self.groups:
            number, used = 1, 0
            for name, box in ((name, box) for name, boxes in self.boxes.items() for box in boxes):
                size = prod(box_shape(box)) * self.width
                if used and used + size > file_bytes:
                    number, used = number + 1, 0
                out[group, name, box] = f"{group}-{owner}{number:05d}.safetensors"
                used += size
        return out

    def _write_files(self, work: Path, tensors: Iterable[tuple[str, str, Array]], files: Mapping[_Key, str]) -> _Part:
        loader = StateLoader(self.program, self.groups, self.boxes)
        keys = {piece: _key_in_file(self.program.params[piece[1]], piece[2]) for piece in files}
        stored = {}
        with ExitStack() as stack:
            writers: dict[str, TensorFileWriter] = {}
            for file in dict.fromkeys(files.values()):
                names = [keys[piece] or piece[1] for piece, assigned in files.items() if assigned == file]
                # weights alone may have any dtype; state has one, and none of its tensors is kept until the end
                alignment = self.width if self.training else 8
                writers[file] = TensorFileWriter(work / file, header_capacity(names), alignment=alignment)
                stack.callback(writers[file].abort)
            for group, name, array in tensors:
                box = loader.check(group, name, array.shape)
                file, key = files[group, name, box], keys[group, name, box]
                writers[file].add(key or name, array)
                offset = tuple(start for start, _ in box)
                shard = Shard(file=file, offset=offset, shape=array.shape, checksum=checksum(array), key=key)
                stored[group, name, box] = StoredTensor(
                    group=group,
                    name=name,
                    shape=self.program.params[name].shape,
                    dtype=dtype_name(array.dtype),
                    shards=(shard,),
                )
            loader.finish()
            for writer in writers.values():
                writer.close()
        sizes = [StoredFile(name=file, num_bytes=(work / file).stat().st_size) for file in sorted(writers)]
        return _Part(tuple(sizes), tuple(stored[piece] for piece in files))

    def join(self, manifest: Manifest, parts: Sequence[_Part]) -> Manifest:
        """The manifest with what all ranks have written. Raises BackendError if pieces are missing, or overlap."""
        found: dict[tuple[str, str], list[StoredTensor]] = {}
        for tensor in (tensor for part in parts for tensor in part.tensors):
            found.setdefault((tensor.group, tensor.name), []).append(tensor)
        tensors = []
        for group, (name, param) in product(self.groups, self.program.params.items()):
            pieces = found.get((group, name), [])
            shards = tuple(sorted((s for piece in pieces for s in piece.shards), key=lambda shard: shard.offset))
            dtypes = {piece.dtype for piece in pieces}
            if len(dtypes) > 1 or not tiles([shard.box for shard in shards], param.shape):
                raise BackendError(
                    f"{len(parts)} ranks gave {len(shards)} pieces of {group} {name} in {len(dtypes)} dtypes, which do "
                    f"not make up its shape {param.shape}. Every rank of the plan must write."
                )
            tensors.append(replace(pieces[0], shards=shards))
        return replace(manifest, files=tuple(file for part in parts for file in part.files), tensors=tuple(tensors))


def _key_in_file(param: Param, box: Box) -> str | None:
    """A whole parameter goes by its own name, a piece by that and its place."""
    is_whole = box_shape(box) == param.shape
    return None if is_whole else f"{param.name}@{','.join(str(start) for start, _ in box)}"


def _existing(path: Path) -> Path:
    """The nearest parent that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())
