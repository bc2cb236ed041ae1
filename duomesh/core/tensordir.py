"""A folder of safetensors files as one set of named tensors, such as a Hugging Face checkpoint.

With `model.safetensors.index.json` the index alone decides which copy of a tensor counts; without it every
*.safetensors file counts and no name may occur twice. Everything is checked at opening: that each file exists, that
each holds what the index says, and (through `TensorFile`) that no file is truncated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

from duomesh.core.arrays import Array
from duomesh.core.closing import Closing
from duomesh.core.errors import TensorFileError
from duomesh.core.tensorfile import TensorFile, TensorInfo

__all__ = ["INDEX_NAME", "TensorDirectory"]

INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LISTED = 8  # names spelled out in a message


class TensorDirectory(Closing):
    """The tensors of a folder, read lazily and by slice.

    Attributes:
        names: in the index's order, or by file and header order without an index.
        file_of: tensor name -> file name.
        warnings: copies and files that were ignored, one sentence each.

    Raises:
        TensorFileError: no usable files, a file or tensor that the index lists is missing, or duplicates.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.warnings: list[str] = []
        if not self.path.is_dir():
            fault = "is a file" if self.path.exists() else "does not exist"
            raise TensorFileError(f"{self.path} {fault}; a directory of safetensors files is needed.")
        with ExitStack() as stack:
            self._files: dict[str, TensorFile] = {}
            if (self.path / INDEX_NAME).exists():
                self.file_of: Mapping[str, str] = _read_index(self.path / INDEX_NAME)
                self._open_indexed(stack)
            else:
                self.file_of = self._open_all(stack)
            self.names: tuple[str, ...] = tuple(self.file_of)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def _file(self, name: str) -> TensorFile:
        if name not in self.file_of:
            raise TensorFileError(f"{self.path} holds no tensor {name!r}.")
        return self._files[self.file_of[name]]

    def info(self, name: str) -> TensorInfo:
        return self._file(name).info(name)

    def read(self, name: str, box: Sequence[tuple[int, int]] = ()) -> Array:
        """A copy of a tensor, or of a rectangle of it: [start, stop) along its first dims."""
        return self._file(name).read(name, box)

    def _open_indexed(self, stack: ExitStack) -> None:
        files = sorted(set(self.file_of.values()))
        missing = [name for name in files if not (self.path / name).is_file()]
        if missing:
            raise TensorFileError(
                f"{self.path}: the index names {len(files)} files, of which these are missing: "
                f"{', '.join(missing)}. Fetch them again; nothing was read."
            )
        self._files = {name: stack.enter_context(TensorFile(self.path / name)) for name in files}
        absent = [f"{name} (in {file})" for name, file in self.file_of.items() if name not in self._files[file].names]
        if absent:
            raise TensorFileError(f"{self.path}: the index lists tensors that their files lack: {_some(absent)}.")
        self._warn_of_ignored()

    def _warn_of_ignored(self) -> None:
        """Notes tensors that exist beside the ones that the index chose."""
        for file in self._safetensors():
            try:
                names = self._files[file].names if file in self._files else _names_in(self.path / file)
            except TensorFileError as error:
                self.warnings.append(f"ignored {file}, which the index does not name ({error})")
                continue
            copies = [name for name in names if self.file_of.get(name, file) != file]
            extra = [name for name in names if name not in self.file_of]
            if copies:
                self.warnings.append(f"ignored copies in {file}: the index takes {_some(copies)} from another file.")
            if extra:
                self.warnings.append(f"ignored tensors in {file} that the index does not list: {_some(extra)}.")

    def _open_all(self, stack: ExitStack) -> dict[str, str]:
        names = self._safetensors()
        if not names:
            raise TensorFileError(self._explain_empty())
        self._files = {name: stack.enter_context(TensorFile(self.path / name)) for name in names}
        file_of: dict[str, str] = {}
        twice: list[str] = []
        for file, opened in self._files.items():
            twice += [f"{name} (in {file_of[name]} and {file})" for name in opened.names if name in file_of]
            file_of.update(dict.fromkeys(opened.names, file))
        if twice:
            raise TensorFileError(
                f"{self.path} has no {INDEX_NAME}, and tensors occur in two files: {_some(twice)}. "
                "Remove the file that is not wanted."
            )
        return file_of

    def _safetensors(self) -> list[str]:
        return sorted(file.name for file in self.path.glob("*.safetensors"))

    def _explain_empty(self) -> str:
        pickles = sorted(file.name for pattern in _PICKLES for file in self.path.glob(pattern))
        if not pickles:
            return f"{self.path} holds no *.safetensors file."
        return (
            f"{self.path} holds only pickled weights ({_some(pickles)}). A pickle can run any code and is never "
            "opened; convert them to safetensors first."
        )


def _names_in(path: Path) -> tuple[str, ...]:
    with TensorFile(path) as file:
        return file.names


def _some(names: list[str]) -> str:
    """The first few of many names."""
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, the file being below the folder."""
    try:
        data: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise TensorFileError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise TensorFileError(f"{path} is not valid JSON: {error}.") from None
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise TensorFileError(f"{path} has no weight_map; it must map tensor names to files.")
    for name, file in weight_map.items():
        pure = PurePosixPath(file) if isinstance(file, str) else None
        if pure is None or pure.is_absolute() or ".." in pure.parts or pure.suffix != ".safetensors":
            raise TensorFileError(f"{path}: {name} is said to be in {file!r}, which is no safetensors file below it.")
    return dict(weight_map)
