"""safetensors files as host arrays: read by slice, checked whole before the first tensor is used.

A file is 8 bytes of header length (little endian), a JSON header, and one buffer that the tensors tile without gap
or overlap. Opening a `TensorFile` checks all of that, so a tensor that is read later can only fail with the disk.
Reading is by position and copies: memory holds what was asked for, no other byte is read, and nothing is mapped.

Not here: folders of several files (`core.tensordir`), and pickles, which are never opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np

from duomesh.core.arrays import DTYPES, Array, dtype_name
from duomesh.core.boxes import box_shape, runs, show_box, within
from duomesh.core.closing import Closing
from duomesh.core.errors import TensorFileError

__all__ = ["TensorFile", "TensorFileWriter", "TensorInfo", "header_capacity", "write_tensor_file"]

_MAX_HEADER = 100_000_000  # the safetensors library refuses longer ones too
_ALIGNMENT = 8
_READ_BYTES = 1 << 30  # of one call of the system, which takes less than 2 GiB
_ALIAS = "duomesh.alias/"  # metadata key of a tensor that is another one under a second name

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
_DTYPE_OF_CODE = {code: name for name, code in _CODES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor is without its data; `dtype` is a key of `core.arrays.DTYPES`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class _Entry:
    """A tensor and its place in the buffer."""

    info: TensorInfo
    start: int
    stop: int


class TensorFile(Closing):
    """One open safetensors file. Threads may read from it at the same time.

    Attributes:
        names: tensors in the header's order, then aliases.
        metadata: the header's `__metadata__`, without aliases.
        num_bytes_read: so far, the header included.

    Raises:
        TensorFileError: the file is missing, truncated or malformed.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock = Lock()
        try:
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise TensorFileError(f"cannot read {self.path}: {error.strerror}.") from error
        try:
            header, self._base, size = _read_header(self._file, self.path)
            self._entries, metadata = _parse_header(header, size, self.path)
        except BaseException:
            self._file.close()
            raise
        self.metadata: Mapping[str, str] = {k: v for k, v in metadata.items() if not k.startswith(_ALIAS)}
        for key, target in metadata.items():
            if key.startswith(_ALIAS):
                self._add_alias(key.removeprefix(_ALIAS), target)
        self.names: tuple[str, ...] = tuple(self._entries)
        self.num_bytes_read = self._base

    def _add_alias(self, name: str, target: str) -> None:
        if name in self._entries or target not in self._entries:
            self._file.close()
            raise TensorFileError(f"{self.path}: {name} is recorded as an alias of {target}, which cannot be.")
        self._entries[name] = self._entries[target]

    def close(self) -> None:
        self._file.close()

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise TensorFileError(f"{self.path} holds no tensor {name!r}.")
        return self._entries[name]

    def info(self, name: str) -> TensorInfo:
        return self._entry(name).info

    def read(self, name: str, box: Sequence[tuple[int, int]] = ()) -> Array:
        """A copy of a tensor, or of a rectangle of it: [start, stop) along its first dims."""
        if self._file.closed:
            raise TensorFileError(f"{self.path} was closed before {name} was read. Read it while the file is open.")
        entry = self._entry(name)
        shape, dtype = entry.info.shape, DTYPES[entry.info.dtype]
        found = within(box, shape)
        if found is None:
            raise TensorFileError(f"{self.path}: {show_box(box)} is not within {name} of shape {shape}.")
        out: Array = np.empty(box_shape(found), dtype)
        if not out.size:
            return out
        # bytes through a uint8 view: numpy's buffer protocol knows no bfloat16
        view = out.reshape(-1).view(np.uint8).data
        starts, length = runs(found, shape)
        size, first = length * dtype.itemsize, self._base + entry.start
        for number, start in enumerate(starts.tolist()):
            self._read_at(first + start * dtype.itemsize, view[number * size : (number + 1) * size], name)
        with self._lock:
            self.num_bytes_read += len(view)
        return out

    def _read_at(self, position: int, view: memoryview, name: str) -> None:
        while len(view):
            count = os.preadv(self._file.fileno(), [view[:_READ_BYTES]], position)
            if count == 0:
                raise TensorFileError(f"{self.path} became shorter while {name} was read.")
            position, view = position + count, view[count:]


def _read_header(file: FileIO, path: Path) -> tuple[bytes, int, int]:
    """(header text, offset of the buffer, bytes of the buffer)."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    if prefix == b"version ":
        raise TensorFileError(f"{path} is a Git LFS pointer and not the file itself; fetch it with `git lfs pull`.")
    if len(prefix) < 8:
        raise TensorFileError(f"{path} has {size} bytes; a safetensors file begins with 8 bytes of header length.")
    length = int.from_bytes(prefix, "little")
    if length > _MAX_HEADER:
        raise TensorFileError(f"{path} states a header of {length} bytes; it is no safetensors file.")
    if 8 + length > size:
        raise TensorFileError(f"{path} is truncated: its header has {length} bytes, the file {size}. Fetch it again.")
    return file.read(length), 8 + length, size - 8 - length


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice")
    return out


def _parse_header(header: bytes, buffer_size: int, path: Path) -> tuple[dict[str, _Entry], dict[str, str]]:
    """Entries in header order and metadata; every fault that a header can have is found here."""
    try:
        data = json.loads(header.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"{path} has a malformed safetensors header: {error}.") from None
    if not isinstance(data, dict):
        raise TensorFileError(f"{path} has a malformed safetensors header: it is not a JSON object.")
    metadata = data.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise TensorFileError(f"{path}: __metadata__ must map names to strings.")
    entries = {name: _parse_entry(name, value, path) for name, value in data.items()}
    _check_tiling(entries, buffer_size, path)
    return entries, metadata


def _is_sizes(value: Any, length: int | None = None) -> bool:
    """Whether a JSON value is a list of non-negative integers."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _parse_entry(name: str, value: Any, path: Path) -> _Entry:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        raise TensorFileError(f"{path}: the entry of {name} lacks dtype, shape or data_offsets.")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPE_OF_CODE:
        raise TensorFileError(f"{path}: {name} has dtype {code!r}; known are {', '.join(_DTYPE_OF_CODE)}.")
    if not _is_sizes(shape) or not _is_sizes(offsets, 2):
        raise TensorFileError(f"{path}: {name} has shape {shape!r} and offsets {offsets!r}; they must be sizes.")
    entry = _Entry(TensorInfo(_DTYPE_OF_CODE[code], tuple(shape)), offsets[0], offsets[1])
    if entry.stop - entry.start != entry.info.nbytes:
        raise TensorFileError(
            f"{path}: {name} occupies {entry.stop - entry.start} bytes, "
            f"but {code} of shape {entry.info.shape} needs {entry.info.nbytes}."
        )
    return entry


def _check_tiling(entries: Mapping[str, _Entry], buffer_size: int, path: Path) -> None:
    """Tensors follow one another from 0 to the end of the buffer."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            fault = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
            raise TensorFileError(f"{path}: {name} starts at byte {entry.start} and {fault} (byte {position}).")
        position = entry.stop
    if position > buffer_size:
        raise TensorFileError(
            f"{path} is truncated: its tensors need {position} bytes, the file has {buffer_size}. Fetch it again."
        )
    if position < buffer_size:
        raise TensorFileError(f"{path} has {buffer_size - position} bytes that belong to no tensor.")


def _header(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None) -> bytes:
    """The header of a file that holds these tensors in this order, padded so that its buffer is aligned."""
    out: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, info in infos.items():
        offsets = [position, position + info.nbytes]
        out[name] = {"dtype": _CODES[info.dtype], "shape": list(info.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(out, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def _info(array: Array) -> TensorInfo:
    # an array in the other byte order is of the same dtype: it is written in the file's order
    return TensorInfo(dtype_name(array.dtype.newbyteorder("=")), array.shape)


def header_capacity(names: Iterable[str], metadata: Mapping[str, str] | None = None) -> int:
    """Bytes that suffice for the header of any of these tensors, of up to six dims each."""
    # a name, some 60 bytes of JSON, and eight numbers of up to 20 digits
    return 64 + len(json.dumps(dict(metadata or {}))) + sum(len(json.dumps(name)) + 240 for name in names)


class TensorFileWriter:
    """Writes tensors as they come, holding none of them, under a header whose size is reserved beforehand.

    A tensor whose bytes are not a multiple of `alignment` is kept until `close` and then written in falling element
    size: readers that view the buffer in place need every tensor aligned to its element.

    Args:
        header_size: bytes to reserve, such as `header_capacity` of every tensor that may come.
        alignment: 8, or the largest element that comes.
    """

    def __init__(
        self,
        path: Path,
        header_size: int,
        metadata: Mapping[str, str] | None = None,
        *,
        alignment: int = _ALIGNMENT,
    ) -> None:
        self._metadata, self._alignment = metadata, alignment
        self._header_size = header_size + -header_size % _ALIGNMENT
        self._infos: dict[str, TensorInfo] = {}
        self._late: list[tuple[str, Array]] = []
        self._file = path.open("wb")
        self._file.seek(8 + self._header_size)

    def add(self, name: str, array: Array) -> None:
        """Appends a tensor. A view is written as its own bytes, in C order."""
        assert name not in self._infos and array.dtype.itemsize <= self._alignment, name
        if array.nbytes % self._alignment:
            self._late.append((name, array))
        else:
            self._write(name, array)

    def _write(self, name: str, array: Array) -> None:
        self._infos[name] = _info(array)
        flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
        self._file.write(flat.view(np.uint8).data)

    def close(self) -> None:
        """Writes what was kept, then the header."""
        for name, array in sorted(self._late, key=lambda item: -item[1].dtype.itemsize):
            self._write(name, array)
        header = _header(self._infos, self._metadata)
        assert len(header) <= self._header_size, "the reserved header is too short"
        self._file.seek(0)
        self._file.write(self._header_size.to_bytes(8, "little") + header.ljust(self._header_size))
        self._file.close()

    def abort(self) -> None:
        """Closes an incomplete file; the caller removes it."""
        self._file.close()


def write_tensor_file(
    path: Path | str,
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    *,
    aliases: Literal["record", "copy"] = "record",
) -> None:
    """Writes a safetensors file whose tensors are aligned to their elements.

    Args:
        tensors: arrays of `core.arrays.DTYPES`. Views of any strides are written as their own bytes.
        aliases: "record" stores an array that is the very same memory, shape and strides as an earlier one in
            the metadata, and `TensorFile` gives it back under both names; "copy" stores it twice.

    Raises:
        OSError: from the file system; the caller, which publishes the file, explains it.
    """
    kept, same = (
        ({name: np.asarray(a) for name, a in tensors.items()}, {}) if aliases == "copy" else _split_aliases(tensors)
    )
    entries = {**(metadata or {}), **{_ALIAS + name: target for name, target in same.items()}}
    # the writer's own order, so that the reserved header is exact
    order = sorted(kept, key=lambda n: (kept[n].nbytes % _ALIGNMENT != 0, -kept[n].dtype.itemsize, n))
    infos = {name: _info(kept[name]) for name in order}
    writer = TensorFileWriter(Path(path), len(_header(infos, entries)), entries)
    try:
        for name in order:
            writer.add(name, kept[name])
        writer.close()
    finally:
        writer.abort()


def _split_aliases(tensors: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, str]]:
    """(arrays stored, name -> the stored name that it is an alias of)."""
    kept: dict[str, Array] = {}
    same: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, array in ((name, np.asarray(a)) for name, a in tensors.items()):
        key = (array.ctypes.data, array.shape, array.strides, array.dtype)
        # empty arrays may share an address by chance
        if array.size and key in first:
            same[name] = first[key]
        else:
            first[key] = name
            kept[name] = array
    return kept, same
