"""Safetensors files of bounded size with the index that Hugging Face readers expect."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from duomesh.core.arrays import Array
from duomesh.core.errors import ConversionError
from duomesh.core.tensordir import INDEX_NAME
from duomesh.core.tensorfile import TensorFileWriter, header_capacity

__all__ = ["Shards", "write_json"]

_METADATA = {"format": "pt"}  # transformers refuses files without it


class Shards:
    """Streams tensors into files; how many there are is known at the end, so they get their names there.

    Args:
        max_bytes: a file that would pass it ends before the tensor; a larger tensor has a file of its own.
        names: every tensor that may come.
    """

    def __init__(self, folder: Path, max_bytes: int, names: Iterable[str]) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._header_size = header_capacity(names, _METADATA)
        self._file_of: dict[str, int] = {}
        self._writer: TensorFileWriter | None = None
        self._count = self._filled = self._total = 0

    def add(self, name: str, array: Array) -> None:
        if self._writer is not None and self._filled + array.nbytes > self._max_bytes:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = TensorFileWriter(self._path(self._count), self._header_size, _METADATA)
            self._count, self._filled = self._count + 1, 0
        self._writer.add(name, array)
        self._file_of[name] = self._count - 1
        self._filled += array.nbytes
        self._total += array.nbytes

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number}.partial"

    def close(self) -> list[str]:
        """Gives the files their names, writes the index if there are several, and returns the names."""
        if self._writer is None:
            raise ConversionError("cannot export: there are no tensors.")
        self._writer.close()
        self._writer = None
        if self._count == 1:
            names = ["model.safetensors"]
        else:
            names = [f"model-{i + 1:05d}-of-{self._count:05d}.safetensors" for i in range(self._count)]
        for i, name in enumerate(names):
            self._path(i).rename(self._folder / name)
        if self._count > 1:
            weight_map = {tensor: names[i] for tensor, i in self._file_of.items()}
            write_json(self._folder / INDEX_NAME, {"metadata": {"total_size": self._total}, "weight_map": weight_map})
        return names

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
