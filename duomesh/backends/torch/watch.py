"""Failures of ranks: a rank that raises, dies or hangs ends every rank within a minute, and each says who and where.

A daemon thread on each rank, the watcher, talks to a store over a connection of its own, so that a blocked collective
does not block it. Every `beat_s` it writes what its rank is doing. Rank 0 reads all of them; the others read rank 0's.
Whoever finds a failure first writes it where all look; then every rank says it and leaves, by os._exit, since nothing
else gets out of a blocked collective.

Code says what it is doing with `doing`. A section may last `stall_s`; outside of sections only death is found.

Not here: who starts the ranks (see `launch.py`).
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import math
import mmap
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from duomesh.core.errors import BackendError, DuomeshError

__all__ = [
    "Activity",
    "Failure",
    "Limits",
    "Status",
    "Watcher",
    "current",
    "doing",
    "judge",
    "read_activity",
    "read_failure",
    "share_activity",
]

# Beats that a rank may miss once there is a sign that some rank is gone.
_MISSED_BEATS = 4
# A rank that saw another fail stays this long: whoever started the ranks should see the cause end first.
_LINGER_S = 2.0
# A rank that has raised must have unwound its stack and ended by then.
_UNWIND_S = 20.0
# Of the time after which a rank counts as dead: when one that cannot beat shows its stack and ends by itself.
_LOCKED = 0.75
_STACK_CHARACTERS = 8000
_NAMED_RANKS = 8  # of a list, before "and 1016 more"
_POLL_S = 0.02
_PAGE_BYTES = 512
_FINISHED = "finished"
# What torch says, in errors of no class of their own, when another rank is gone.
_LOST = re.compile("gloo|nccl|by peer|broken pipe|timed out", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long, in seconds, ranks may take. Construction raises BackendError."""

    beat_s: float = 0.5  # between two signs of life
    dead_s: float = 40.0  # without a sign of life
    stall_s: float = 40.0  # in one section, unless it says otherwise
    start_s: float = 120.0  # until every rank has joined
    collective_s: float = 900.0  # in one collective; beyond it torch itself gives up

    def __post_init__(self) -> None:
        if not 0 < self.beat_s * 2 * _MISSED_BEATS <= self.dead_s:
            needed = 2 * _MISSED_BEATS * self.beat_s
            raise BackendError(f"dead_s={self.dead_s} with beat_s={self.beat_s}; it must be at least {needed}.")


# What this process does


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


class _Section:
    """What `doing` returns: left as a context manager, it puts the activity before it back."""

    __slots__ = ("_before", "_text")

    def __init__(self, text: str, before: Activity) -> None:
        self._text, self._before = text, before

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not hasattr(error, "doing"):
            with suppress(AttributeError):  # of an exception that is frozen
                error.doing = self._text  # type: ignore[attr-defined]  # the innermost section is where it was raised
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


# What ranks tell each other


@dataclass(frozen=True, kw_only=True)
class Status:
    """What a rank says of itself with beat number `beat`: its activity, and for how long.

    is_overdue: for longer than allowed; then it adds its stack. waits: in a collective. is_done: at its end.
    """

    beat: int
    doing: str
    number: int
    for_s: float
    is_overdue: bool = False
    waits: bool = False
    is_done: bool = False
    stack: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a job ends: `rank`, during `doing`, did what `sentence` says in full. stack: of that rank, if known.

    error: the class of what it raised.
    """

    kind: Literal["raised", "died", "hangs"]
    rank: int
    doing: str
    sentence: str
    stack: str = ""
    error: str = ""


def _raised(rank: int, error: BaseException) -> Failure:
    at, name = str(getattr(error, "doing", current().text)), type(error).__name__
    text = str(error) if isinstance(error, DuomeshError) else f"{name}: {error}".removesuffix(": ")
    trace = "".join(traceback.format_exception(error))[-_STACK_CHARACTERS:]
    sentence = f'rank {rank}, during "{at}": {text}'
    return Failure(kind="raised", rank=rank, doing=at, sentence=sentence, stack=trace, error=name)


def _silent(rank: int, status: Status, for_s: float) -> Failure:
    sentence = (
        f'rank {rank} has given no sign of life for {for_s:.1f} s; it last said "{status.doing}". It was killed, its '
        "host or the network is gone, or native code does not let go of Python's lock."
    )
    return Failure(kind="died", rank=rank, doing=status.doing, sentence=sentence)


def _absent(rank: int, start_s: float) -> Failure:
    sentence = f"rank {rank} has not joined the others within {start_s:.0f} s. Look at its output, and at its host."
    return Failure(kind="died", rank=rank, doing="start", sentence=sentence)


def judge(statuses: Mapping[int, Status]) -> Failure | None:
    """Which rank holds the job up, if any does.

    A rank that is overdue and computes is to blame. Ranks that wait in a collective are not, as long as some rank may
    still get there. If none may, they wait for each other, and the odd one out is named.
    """
    overdue = [rank for rank, status in sorted(statuses.items()) if status.is_overdue]
    stuck = [rank for rank in overdue if not statuses[rank].waits]
    if stuck:
        # the one that got least far holds the others up
        rank = min(stuck, key=lambda r: (statuses[r].number, -statuses[r].for_s, r))
        what = f'hangs during "{statuses[rank].doing}": it has not got on for {statuses[rank].for_s:.0f} s'
    elif overdue and all(status.is_overdue or status.is_done for status in statuses.values()):
        # one that is ahead of the others has left something out
        rank = min(statuses, key=lambda r: (_alike(statuses, r), -statuses[r].number, r))
        what = f'hangs during "{statuses[rank].doing}"'
        if statuses[rank].is_done:
            what = "has finished, while others wait in a collective"
        what += ": a rank left out a collective or met collectives in another order"
    else:
        return None
    status = statuses[rank]
    sentence = f"rank {rank} {what}{_others(statuses, rank)}."
    shown = rank if status.stack else overdue[0]
    stack = f"rank {shown} is here:\n{statuses[shown].stack}"
    return Failure(kind="hangs", rank=rank, doing=status.doing, sentence=sentence, stack=stack)


def _alike(statuses: Mapping[int, Status], rank: int) -> int:
    """How many ranks are at the same place as this one."""
    place = (statuses[rank].doing, statuses[rank].stack)
    return sum((status.doing, status.stack) == place for status in statuses.values())


def _others(statuses: Mapping[int, Status], rank: int) -> str:
    """Where the other ranks are: ' (ranks 0, 2: "step 3"; rank 3: "step 2")', or nothing."""
    places: dict[str, list[int]] = {}
    for other, status in sorted(statuses.items()):
        if other != rank:
            places.setdefault(status.doing, []).append(other)
    texts = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_NAMED_RANKS]))}"
        + (f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else "")
        + f': "{text}"'
        for text, ranks in places.items()
    ]
    return f" ({'; '.join(texts)})" if texts else ""


# Stacks


def _stacks() -> tuple[str, bool]:
    """The Python stacks of all other threads, and whether one of them is inside of torch.distributed."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts, waits = [], False
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            texts.append(f"Thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)))
            waits |= _is_in_collective(frame)
    return "".join(texts)[-_STACK_CHARACTERS:], waits


def _is_in_collective(frame: FrameType | None) -> bool:
    """Whether the innermost frames, up to the first outside of torch, belong to torch.distributed."""
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


# The watcher


def _own_connection(store: dist.Store, limits: Limits) -> dist.Store:
    connection = store.clone()
    connection.set_timeout(timedelta(seconds=limits.dead_s))
    return dist.PrefixStore("watch", connection)


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an error may be no more than the echo of another rank's end."""
    return isinstance(error, (dist.DistError, ConnectionError)) or (
        isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    )


def read_failure(store: dist.Store) -> Failure | None:
    """The failure that some rank has written, if one has."""
    return Failure(**json.loads(store.get("failure"))) if store.check(["failure"]) else None


class Watcher:
    """The watcher of one rank.

    store: where ranks meet; the watcher takes a connection of its own. is_reported: whether the process that started
    the ranks says what failed; this one then ends without a word.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, world_size: int, limits: Limits, is_reported: bool = False
    ) -> None:
        self.rank, self.world_size, self.limits, self.is_reported = rank, world_size, limits, is_reported
        self._store = _own_connection(store, limits)
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._wake_read, self._wake_write = os.pipe()
        self._num_beats = 0
        self._started_s = time.monotonic()
        self._heard: dict[int, tuple[Status, float]] = {}  # of each rank, its last status and when that was new
        self._suspects_until_s = 0.0
        self._is_terminated = self._is_done = self._is_stopped = False
        self._wakeup_before = -1

    def start(self) -> None:
        """Begins to watch. In the main thread SIGTERM, unless somebody handles it, first looks for a cause."""
        os.set_blocking(self._wake_write, False)
        if not self.is_reported and threading.current_thread() is threading.main_thread():
            # Python runs handlers only when a blocked call returns; the descriptor is written at once
            self._wakeup_before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._on_sigterm)
        self._thread.start()
        atexit.register(self.stop)  # a daemon thread within a C++ call would abort a process that ends

    def stop(self) -> None:
        """Ends watching without a word to the others."""
        if self._is_stopped:
            return
        self._is_stopped = True
        os.write(self._wake_write, b"\0")
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        atexit.unregister(self.stop)
        if not self.is_reported and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup_before)
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank raised, unless another's failure is the cause: then this ends the process."""
        if _is_lost_connection(error):
            self._suspect()
            while time.monotonic() < self._suspects_until_s:
                time.sleep(_POLL_S)  # the thread ends the process if it finds the cause
        with suppress(dist.DistError):
            self._claim(_raised(self.rank, error))
        self.stop()
        if not self.is_reported:
            get_error_handler().record_exception(error)
        faulthandler.dump_traceback_later(_UNWIND_S, exit=True, file=2)

    def finish(self) -> None:
        """Waits until every rank has come here. One that fails until then ends this process."""
        doing(_FINISHED, stall_s=math.inf, waits=True)
        self._is_done = True
        # whoever keeps the store has seen all ranks here, if it is gone
        with suppress(dist.DistError):
            self._store.add("done", 1)
            while self._store.add("done", 0) < self.world_size:
                time.sleep(_POLL_S)
        self.stop()

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                # should this thread not come back, because code keeps Python's lock or the store hangs
                faulthandler.dump_traceback_later(_LOCKED * self.limits.dead_s, exit=True, file=2)
                self._beat()
                failure = read_failure(self._store) or self._found()
                if failure is not None and not (failure.kind == "raised" and failure.rank == self.rank):
                    self._end(failure)
                self._sleep()
        except dist.DistError as error:
            if not (self._is_done or self._is_stopped):
                reason = str(error).splitlines()[0]
                self._leave(1, f"rank {self.rank}: the process that keeps the job together is gone ({reason}).")

    def _beat(self) -> None:
        activity = current()
        for_s = time.monotonic() - activity.since_s
        is_overdue = for_s > (self.limits.stall_s if activity.stall_s is None else activity.stall_s)
        stack, is_in_collective = _stacks() if is_overdue else ("", False)
        self._num_beats += 1
        status = Status(
            beat=self._num_beats,
            doing=activity.text,
            number=activity.number,
            for_s=for_s,
            is_overdue=is_overdue,
            waits=activity.waits or is_in_collective,
            is_done=self._is_done,
            stack=stack,
        )
        self._store.set(f"status{self.rank}", json.dumps(asdict(status)))

    def _found(self) -> Failure | None:
        """A failure that this rank sees, unless another's word came first; then that one."""
        now = time.monotonic()
        is_suspicious = now < self._suspects_until_s
        ranks = range(self.world_size) if self.rank == 0 or is_suspicious else (0,)
        self._hear(ranks)
        patience_s = _MISSED_BEATS * self.limits.beat_s if is_suspicious else self.limits.dead_s
        for rank in ranks:
            status, at_s = self._heard.get(rank, (None, self._started_s))
            if status is not None and now - at_s > patience_s:
                return self._claim(_silent(rank, status, now - at_s))
            if status is None and now - at_s > self.limits.start_s:
                return self._claim(_absent(rank, self.limits.start_s))
        if self.rank == 0 and len(self._heard) == self.world_size:
            failure = judge({rank: status for rank, (status, _) in self._heard.items()})
            return failure and self._claim(failure)
        return None

    def _hear(self, ranks: Iterable[int]) -> None:
        """Reads the last status of some ranks. A rank that has not joined yet has none."""
        keys = {rank: f"status{rank}" for rank in ranks}
        present = [rank for rank in keys if rank in self._heard or self._store.check([keys[rank]])]
        texts = self._store.multi_get([keys[rank] for rank in present]) if present else []
        for rank, text in zip(present, texts, strict=True):
            status = Status(**json.loads(text))
            if rank not in self._heard or self._heard[rank][0].beat != status.beat:
                self._heard[rank] = status, time.monotonic()

    def _claim(self, failure: Failure) -> Failure:
        """Writes a failure, unless there is one. Returns what is there now."""
        return Failure(**json.loads(self._store.compare_set("failure", "", json.dumps(asdict(failure)))))

    def _suspect(self) -> None:
        """From now on for some beats, a rank that is silent is the cause of what was seen here."""
        self._suspects_until_s = time.monotonic() + 2 * _MISSED_BEATS * self.limits.beat_s

    def _sleep(self) -> None:
        """Until the next beat, a signal, or `stop`."""
        ready, _, _ = select.select([self._wake_read], [], [], self.limits.beat_s)
        if ready and signal.SIGTERM in os.read(self._wake_read, 64):
            self._is_terminated = True
            self._suspect()
        if self._is_terminated and time.monotonic() >= self._suspects_until_s:
            self._is_terminated = False
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                self._leave(128 + signal.SIGTERM, f"rank {self.rank}: stopped by SIGTERM.")

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """The thread ends the process once it has looked for a cause."""

    def _end(self, failure: Failure) -> None:
        is_own = failure.rank == self.rank
        if not self.is_reported:
            said = (failure.stack, failure.sentence) if is_own else (f"rank {self.rank} stops. {failure.sentence}",)
            _say(*said)
            try:
                raise BackendError(failure.sentence)
            except BackendError as error:
                get_error_handler().record_exception(error)  # torchrun shows it for the rank that it saw end first
        time.sleep(0 if is_own else _LINGER_S)
        os._exit(1)

    def _leave(self, code: int, sentence: str) -> None:
        if not self.is_reported:
            _say(sentence)
        os._exit(code)


def _say(*texts: str) -> None:
    """Prints to stderr after what waits in the buffers, unless a blocked thread holds their locks."""

    def say() -> None:
        sys.stdout.flush()
        print(*filter(None, texts), sep="\n", file=sys.stderr, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    thread.join(1.0)
