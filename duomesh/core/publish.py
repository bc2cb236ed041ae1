"""Outputs that appear whole or not at all.

A directory is written beside its final place under a temporary name, flushed to disk, and published by one rename.
A process that dies in between leaves only a temporary directory, which no reader takes for a result.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from duomesh.core.errors import OutputError

__all__ = ["check_place", "explaining", "flush", "is_temporary", "publish_directory", "publish_file"]

_MARK = ".duomesh-tmp-"


def is_temporary(path: Path) -> bool:
    """Whether the path is an unpublished leftover of a process that died."""
    return _MARK in path.name


def check_place(target: Path) -> None:
    """Raises OutputError if nothing can be made at a path, as far as that shows without an attempt. Changes nothing."""
    above = next(path for path in target.absolute().parents if path.exists())
    if not above.is_dir():
        raise OutputError(f"cannot write {target}: {above} is no directory. Choose another place.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {target}: you may not write in {above}. Choose another place.")


@contextmanager
def explaining(target: Path) -> Iterator[None]:
    """What the file system refuses while `target` is written becomes an OutputError that names it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and _MARK not in str(error.filename):
            raise  # reading something else failed; not this output's fault
        raise _explain(target, error) from error


def _explain(target: Path, error: OSError) -> OutputError:
    return OutputError(
        f"cannot write {target}: {error.strerror or error}. Choose a place that is writable and has space."
    )


def flush(path: Path) -> None:
    """Waits until a file, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            flush(Path(folder, name))
        flush(Path(folder))


@contextmanager
def publish_directory(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory that becomes `target` when the block ends without an error.

    Args:
        target: the final place. A directory that exists and is not empty is refused unless `overwrite`.
        overwrite: replace the whole directory; none of its old files remains.

    Raises:
        OutputError: the place cannot be written, or holds files. Nothing half-written stays behind.
    """
    target = Path(os.path.realpath(target))  # a link is followed, never replaced
    if target.is_file():
        raise OutputError(f"cannot write the directory {target}: a file of that name exists.")
    if overwrite and target in (Path.home(), *(Path.cwd() / "x").parents):
        raise OutputError(f"{target} would be replaced whole, and you work within it. Choose another directory.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise OutputError(f"{target} is not empty. Choose another directory, or ask to overwrite it.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # mkdtemp makes 0700; the result should have the mode that mkdir would give
        work = Path(tempfile.mkdtemp(prefix=f"{target.name}{_MARK}", dir=target.parent))
        work.chmod(0o777 & ~_umask())
    except OSError as error:
        raise _explain(target, error) from error
    try:
        with explaining(target):
            yield work
            _fsync_tree(work)
            _replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _replace(work: Path, target: Path) -> None:
    if target.exists():
        # rename cannot replace a directory that has files: move the old one aside first
        old = Path(tempfile.mkdtemp(prefix=f"{target.name}{_MARK}", dir=target.parent))
        target.rename(old / "old")
        try:
            work.rename(target)
        except OSError:
            (old / "old").rename(target)  # the user's directory is worth more than ours
            raise
        finally:
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
    else:
        work.rename(target)
    flush(target.parent)


def publish_file(target: Path, data: bytes) -> None:
    """Writes a file whole or not at all; what is no regular file, such as a pipe, is written to. Raises OutputError."""
    target = Path(os.path.realpath(target))
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f"{target.name}{_MARK}", dir=target.parent)
    except OSError as error:
        raise _explain(target, error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(target)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise _explain(target, error) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
