"""What a process does, in words, for messages about ranks that fail.

    doing("step 12, data")  # from now on
    with doing("step 12, save", stall_s=600):  # for a while, and for up to ten minutes
        ...
    for name, tensor in each("loading", tensors):  # "loading embed.weight", and so on
        ...

Nothing computes with it. `watch.py` tells other ranks, and holds a rank to the time that it has.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "UNTOLD",
    "Activity",
    "activity_of",
    "blame",
    "blamed_rank",
    "current",
    "doing",
    "each",
    "read_activity",
    "share_activity",
    "transfer_s",
]

UNTOLD = "nothing that it told"  # what a process does that has said nothing yet
_PAGE_BYTES = 512
_MARK, _RANK = "_raised_during", "_raised_on"  # attributes of an exception
_SLOWEST_BYTES_PER_S = 20e6  # of a disk or a network that is not yet taken for one that hangs

T = TypeVar("T", bound=tuple[Any, ...])


class Activity(NamedTuple):
    """What a process does, since when (monotonic), and how long it may. number: how many there were before it.

    item: of `each`, how many were begun within this number; ranks may have different ones. stall_s: None for the limit
    of the job. more_s: beyond that. waits: it only waits for other ranks.
    """

    text: str
    number: int
    item: int
    since_s: float
    stall_s: float | None
    more_s: float
    waits: bool


class _Process:
    """The activity of this process. One for all threads and written without a lock: the last word counts."""

    def __init__(self) -> None:
        self.activity = Activity(UNTOLD, 0, 0, time.monotonic(), math.inf, 0.0, False)
        self.page: mmap.mmap | None = None

    def turn_to(self, text: str, stall_s: float | None, more_s: float, waits: bool) -> Activity:
        """Sets the activity and returns the one before."""
        before = self.activity
        self.activity = Activity(text, before.number + 1, 0, time.monotonic(), stall_s, more_s, waits)
        self.write_page()
        return before

    def turn_to_item(self, text: str, more_s: float) -> None:
        """Within the same activity; it may take its time again."""
        now = self.activity
        self.activity = now._replace(text=text, item=now.item + 1, since_s=time.monotonic(), more_s=more_s)
        self.write_page()

    def turn_back_to(self, before: Activity) -> None:
        """As `turn_to`: it may take its time once more."""
        self.turn_to(before.text, before.stall_s, before.more_s, before.waits)

    def write_page(self) -> None:
        if self.page is not None:
            words = self.activity.text.encode()[: _PAGE_BYTES - 1] + b"\0"
            self.page[: len(words)] = words


_process = _Process()


def activity_of(error: BaseException) -> str:
    """What this process did when it raised an error: the innermost section that the error left, or the present one."""
    return str(getattr(error, _MARK, _process.activity.text))


def blame(error: BaseException, rank: int, activity: str) -> None:
    """Says of an error that it repeats what another rank raised, and during what."""
    setattr(error, _MARK, activity)
    setattr(error, _RANK, rank)


def blamed_rank(error: BaseException) -> int | None:
    """The rank whose error this one repeats; None for an error of this process."""
    return getattr(error, _RANK, None)


class _Section:
    """What `doing` returns: left as a context manager, it puts the activity before it back."""

    __slots__ = ("_before",)

    def __init__(self, before: Activity) -> None:
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not hasattr(error, _MARK):
            with suppress(AttributeError):  # of an exception that is frozen
                setattr(error, _MARK, _process.activity.text)
        _process.turn_back_to(self._before)


def doing(text: str, *, stall_s: float | None = None, more_s: float = 0.0, waits: bool = False) -> _Section:
    """Says what this process does from now on: `doing("step 12")`, or `with doing("step 12, save"):` for a while.

    Costs about a microsecond.

    Args:
        text: completes "rank 3, during ...".
        stall_s: how long it may last; None for the limit of the job, math.inf for no limit.
        more_s: added to that, for work that grows with something. See `transfer_s`.
        waits: whether it does nothing but wait for other ranks, as a collective does.
    """
    return _Section(_process.turn_to(text, stall_s, more_s, waits))


def transfer_s(num_bytes: float) -> float:
    """How long a slow disk or network takes for so many bytes."""
    return num_bytes / _SLOWEST_BYTES_PER_S


def each(text: str, tensors: Iterable[T]) -> Iterator[T]:
    """Tensors one by one, as tuples (*names, tensor); this process is doing `text` with the names of the last one.

    Use it within a section: what it says last, with time for all of them together, stands until that ends.
    """
    doing(text)
    num_bytes = 0
    for item in tensors:
        *names, tensor = item
        size = 8 * math.prod(tensor.shape)
        num_bytes += size
        _process.turn_to_item(" ".join([text, *names]), transfer_s(size))
        yield item
    _process.turn_to_item(text, transfer_s(num_bytes))


def current() -> Activity:
    """What this process does."""
    return _process.activity


def share_activity(path: Path) -> None:
    """Keeps what this process does in a file too, which outlives it however it ends. `read_activity` reads it."""
    path.write_bytes(bytes(_PAGE_BYTES))
    with path.open("r+b") as file:
        _process.page = mmap.mmap(file.fileno(), _PAGE_BYTES)
    _process.write_page()


def read_activity(path: Path) -> str:
    """What the process that shares a file did last; empty if none does."""
    return path.read_bytes().partition(b"\0")[0].decode(errors="replace") if path.exists() else ""
