"""What a process does, in words, for messages about ranks that fail.

    doing("step 12, data")  # from now on
    with doing("step 12, save", stall_s=600):  # for a while, and for up to ten minutes
        ...

Nothing computes with it. `watch.py` tells other ranks, and holds a rank to the time that it has.
"""

from __future__ import annotations

import math
import mmap
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Activity", "activity_of", "current", "doing", "read_activity", "share_activity"]

_PAGE_BYTES = 512
_MARK = "_raised_during"  # attribute of an exception


class Activity(NamedTuple):
    """What a process does, since when (monotonic), and how long it may. number: how many there were before it.

    stall_s: None for the limit of the job. waits: it only waits for other ranks.
    """

    text: str
    number: int
    since_s: float
    stall_s: float | None
    waits: bool


class _Process:
    """The activity of this process. One for all threads and written without a lock: the last word counts."""

    def __init__(self) -> None:
        self.activity = Activity("nothing that it told", 0, time.monotonic(), math.inf, False)
        self.page: mmap.mmap | None = None

    def turn_to(self, text: str, stall_s: float | None, waits: bool) -> Activity:
        """Sets the activity and returns the one before."""
        before = self.activity
        self.activity = Activity(text, before.number + 1, time.monotonic(), stall_s, waits)
        if self.page is not None:
            words = text.encode()[: _PAGE_BYTES - 1] + b"\0"
            self.page[: len(words)] = words
        return before


_process = _Process()


def activity_of(error: BaseException) -> str:
    """What this process did when it raised an error: the innermost section that the error left, or the present one."""
    return str(getattr(error, _MARK, _process.activity.text))


class _Section:
    """What `doing` returns: left as a context manager, it puts the activity before it back."""

    __slots__ = ("_before", "_text")

    def __init__(self, text: str, before: Activity) -> None:
        self._text, self._before = text, before

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not hasattr(error, _MARK):
            with suppress(AttributeError):  # of an exception that is frozen
                setattr(error, _MARK, self._text)
        _process.turn_to(self._before.text, self._before.stall_s, self._before.waits)


def doing(text: str, *, stall_s: float | None = None, waits: bool = False) -> _Section:
    """Says what this process does from now on: `doing("step 12")`, or `with doing("step 12, save"):` for a while.

    Costs about a microsecond.

    Args:
        text: completes "rank 3, during ...".
        stall_s: how long it may last; None for the limit of the job, math.inf for no limit.
        waits: whether it does nothing but wait for other ranks, as a collective does.
    """
    return _Section(text, _process.turn_to(text, stall_s, waits))


def current() -> Activity:
    """What this process does."""
    return _process.activity


def share_activity(path: Path) -> None:
    """Keeps what this process does in a file too, which outlives it however it ends. `read_activity` reads it."""
    path.write_bytes(bytes(_PAGE_BYTES))
    with path.open("r+b") as file:
        _process.page = mmap.mmap(file.fileno(), _PAGE_BYTES)
    now = _process.activity
    _process.turn_to(now.text, now.stall_s, now.waits)


def read_activity(path: Path) -> str:
    """What the process that shares a file did last; empty if none does."""
    return path.read_bytes().partition(b"\0")[0].decode(errors="replace") if path.exists() else ""
