"""Failures of ranks: a rank that raises, dies or hangs ends every rank within a minute, and each says who and where.

A daemon thread on each rank, the watcher, talks to a store over a connection of its own, so that a blocked collective
does not block it. Every `beat_s` it writes what its rank is doing. Rank 0 reads all of them; the others read rank 0's.
Whoever finds a failure first writes it where all look; then every rank says it and leaves, by os._exit, since nothing
else gets out of a blocked collective.

A section of `activity.doing` may last `stall_s`; outside of sections only death is found. A process that is stopped for
longer than `dead_s` and goes on later counts as dead.

Not here: who starts the ranks (`launch.py`), and who is to blame (`verdict.py`).
"""

from __future__ import annotations

import atexit
import faulthandler
import json
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

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from duomesh.backends.torch import collectives
from duomesh.backends.torch.verdict import STACK_CHARACTERS, Failure, Status, absent, judge, raised, silent
from duomesh.core.activity import current, doing
from duomesh.core.errors import BackendError, DuomeshError

__all__ = ["Limits", "Watcher", "read_failure"]

# Beats that a rank may miss once there is a sign that some rank is gone.
_MISSED_BEATS = 4
# A rank that saw another fail stays this long: whoever started the ranks should see the cause end first.
_LINGER_S = 2.0
# A rank that has raised must have unwound its stack and ended by then.
_UNWIND_S = 20.0
# Of the time after which a rank counts as dead: when one that cannot beat shows its stack and ends by itself.
_LOCKED = 0.75
_POLL_S = 0.02
_OUR_FOLDER = str(Path(collectives.__file__).parent)  # is called torch too
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


def _frames() -> dict[str, FrameType]:
    """What the other threads do now, by name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    return {names.get(ident, str(ident)): frame for ident, frame in frames.items() if ident != threading.get_ident()}


def _stacks(frames: Mapping[str, FrameType]) -> str:
    texts = [f"Thread {name}:\n" + "".join(traceback.format_stack(frame)) for name, frame in frames.items()]
    return "".join(texts)[-STACK_CHARACTERS:]


def _is_in_collective(frame: FrameType | None) -> bool:
    """Whether the innermost frames, up to the first outside of torch, belong to torch.distributed, or that one to our
    own collectives, whose ops leave no frame there."""
    while frame is not None:
        file = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in file or file == collectives.__file__:
            return True
        if f"{os.sep}torch{os.sep}" not in file or file.startswith(_OUR_FOLDER):
            return False
        frame = frame.f_back
    return False


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
        self._seen, self._seen_since_s = ((-1, -1), False), 0.0  # the activity, whether it waits, and since when
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
        mine = raised(self.rank, error)
        first = mine
        with suppress(dist.DistError):
            first = self._claim(mine)
        self.stop()
        if not self.is_reported and isinstance(error, DuomeshError):
            _record(mine.sentence)
            if first.rank != self.rank and _without_rank(first) == _without_rank(mine):
                error.is_told = True
                time.sleep(_LINGER_S)
        elif not self.is_reported:
            get_error_handler().record_exception(error)
        faulthandler.dump_traceback_later(_UNWIND_S, exit=True, file=2)

    def finish(self) -> None:
        """Waits until every rank has come here. One that fails until then ends this process."""
        doing("finished", waits=True)
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
        activity, now, frames = current(), time.monotonic(), _frames()
        waits = activity.waits or any(map(_is_in_collective, frames.values()))
        place = activity.number, activity.item
        if (place, waits) != self._seen:
            # to come out of a collective, or into one, is to get on
            self._seen_since_s = activity.since_s if place != self._seen[0] else now
            self._seen = place, waits
        for_s = now - self._seen_since_s
        stall_s = self.limits.stall_s if activity.stall_s is None else activity.stall_s
        is_overdue = for_s > stall_s + activity.more_s
        self._num_beats += 1
        status = Status(
            beat=self._num_beats,
            doing=activity.text,
            number=activity.number,
            for_s=for_s,
            is_overdue=is_overdue,
            waits=waits,
            is_done=self._is_done,
            stack=_stacks(frames) if is_overdue else "",
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
                return self._claim(silent(rank, status, now - at_s))
            if status is None and now - at_s > self.limits.start_s:
                return self._claim(absent(rank, self.limits.start_s))
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
        time.sleep(0 if is_own else _LINGER_S)
        if not self.is_reported:
            _record(failure.sentence)
        os._exit(1)

    def _leave(self, code: int, sentence: str) -> None:
        if not self.is_reported:
            _say(sentence)
        os._exit(code)


def _without_rank(failure: Failure) -> str:
    return failure.sentence.removeprefix(f"rank {failure.rank}")


def _record(sentence: str) -> None:
    """Leaves a sentence for torchrun, which shows it of each rank, first that of the rank that recorded first.

    A traceback, which torch's own recorder adds, would say nothing to the user.
    """
    file = get_error_handler()._get_error_file_path()  # None where nobody reads it
    if file and not Path(file).exists():  # what was recorded first is the cause
        extra = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": sentence, "extraInfo": extra}}))


def _say(*texts: str) -> None:
    """Prints to stderr after what waits in the buffers, unless a blocked thread holds their locks."""

    def say() -> None:
        sys.stdout.flush()
        print(*filter(None, texts), sep="\n", file=sys.stderr, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    thread.join(1.0)
