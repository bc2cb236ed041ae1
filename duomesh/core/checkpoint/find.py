"""Which checkpoint of a run counts: the newest complete one. There is no pointer file that could be stale."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from duomesh.core.checkpoint.manifest import MANIFEST
from duomesh.core.checkpoint.read import Checkpoint
from duomesh.core.errors import DuomeshError
from duomesh.core.publish import is_temporary

__all__ = ["Found", "checkpoint_path", "find_fault", "find_latest", "keep_last"]

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Found:
    """latest: the newest complete checkpoint, if any. skipped: newer or unfinished ones and why they do not count."""

    latest: Path | None
    skipped: tuple[tuple[Path, str], ...]


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies; names sort by step up to 99,999,999."""
    return Path(root) / f"step-{step:08d}"


def _newest_first(root: Path) -> list[Path]:
    """Everything named as a checkpoint."""
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def find_fault(path: Path) -> str | None:
    """Why a directory is no complete checkpoint; None if it is one. Tensor data are not read."""
    try:
        Checkpoint(path).close()
    except DuomeshError as error:
        return str(error)
    return None


def find_latest(root: Path) -> Found:
    """Looks through a run's checkpoint folder; one that does not exist holds none."""
    root = Path(root)
    if not root.is_dir():
        return Found(None, ())
    skipped = [(path, "a save that was interrupted") for path in sorted(root.iterdir()) if is_temporary(path)]
    for path in _newest_first(root):
        fault = find_fault(path)
        if fault is None:
            return Found(path, tuple(skipped))
        skipped.append((path, fault))
    return Found(None, tuple(skipped))


def keep_last(root: Path, count: int) -> list[Path]:
    """Removes complete checkpoints beyond the newest `count` (0 keeps all), and what interrupted saves left behind.

    Call it after a save, from the one process that writes here. Returns what was removed.
    """
    complete = [path for path in _newest_first(root) if find_fault(path) is None] if count else []
    removed = complete[count:]
    removed += [path for path in root.iterdir() if is_temporary(path)]
    for path in removed:
        # the manifest goes first: a removal that is interrupted leaves nothing that looks complete
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return removed
