"""A pool of rank processes for tests.

    results = ranks.run(4, function, argument)  # function(rank, 4, argument) on ranks 0..3; results in order of rank

Processes start once, from a fork server that has torch loaded, and serve one case after another. A case has a gloo
group of its own. Functions are sent by name, so they live at the top of a module; each rank imports that module, which
must not import jax. Arguments and results are pickled.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore

__all__ = ["RankError", "RankPool"]

_PRELOAD = [
    "pytest",
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "duomesh.backends.torch.launch",
]
_LAST_WORDS_S = 1.0  # how long the others have to answer once one is dead, and a hung one to dump its stack


class RankError(AssertionError):
    """Some ranks of a case raised, died or did not answer. The message says which, and what they were doing."""


@dataclass(frozen=True)
class _Case:
    number: int
    rank: int
    world: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    timeout_s: float


@dataclass(frozen=True)
class _Answer:
    """value: the result, pickled, unless `error` has a traceback, of what was raised during `doing`.

    at_s: when, on the clock that all processes of a host share.
    """

    value: bytes = b""
    error: str = ""
    doing: str = ""
    at_s: float = field(default_factory=time.monotonic)


# In a rank


def _serve(connection: Connection, port: int, notes: Path) -> None:
    """A rank's process: cases in, answers out, until the other end closes."""
    import torch
    from torch.distributed import TCPStore

    from duomesh.core.activity import doing, share_activity

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share_activity(notes / "doing")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the test's ends this one
    with (notes / "stack").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        while True:
            try:
                data = connection.recv_bytes()
            except EOFError:
                return
            doing("the case has begun", stall_s=math.inf)
            connection.send_bytes(pickle.dumps(_answer(data, store)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(data: bytes, store: TCPStore) -> _Answer:
    import torch.distributed as dist

    from duomesh.core.activity import activity_of

    try:
        case: _Case = pickle.loads(data)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"case{case.number}", store),
            rank=case.rank,
            world_size=case.world,
            timeout=timedelta(seconds=case.timeout_s),
        )
        return _Answer(pickle.dumps(case.function(case.rank, case.world, *case.arguments)))
    # whatever it is, pytest's own exceptions and exits too, belongs to the test
    except BaseException as error:
        return _Answer(error=traceback.format_exc(), doing=activity_of(error))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# In the test's process


@dataclass(frozen=True)
class _Rank:
    process: ForkServerProcess
    connection: Connection
    notes: Path

    @property
    def doing(self) -> str:
        from duomesh.core.activity import read_activity

        return read_activity(self.notes / "doing")

    @property
    def stack(self) -> str:
        return (self.notes / "stack").read_text().strip()


class RankPool:
    """Ranks that wait for cases. They start when a case first needs them; after a death or a hang, new ones do."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._store: TCPStore | None = None
        self._num_cases = 0
        self._notes = Path(tempfile.mkdtemp(prefix="rank-pool-"))

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """function(rank, world, *arguments) on each of `world` ranks, in a process group over all of them.

        Returns:
            The results in order of rank.

        Raises:
            RankError: on some rank it raised, the rank died, or it gave no answer within `timeout_s`.
        """
        self._num_cases += 1
        cases = [
            pickle.dumps(_Case(self._num_cases, rank, world, function, arguments, timeout_s)) for rank in range(world)
        ]
        self._grow(world)
        ranks = self._ranks[:world]
        lost: list[str] = []
        try:
            for rank, case in zip(ranks, cases, strict=True):
                with suppress(BrokenPipeError, ConnectionResetError):  # found dead below
                    rank.connection.send_bytes(case)
            answers, dead = self._collect(ranks, timeout_s)
            lost = _last_words(ranks, answers, dead, timeout_s)
        except BaseException:
            self.close()  # an interrupted case must not answer the next one
            raise
        if lost:
            self.close()
            raise RankError("\n\n".join([*lost, *_raised(answers)]))
        if errors := _raised(answers):
            raise RankError("\n\n".join(errors))
        return [pickle.loads(answers[number].value) for number in range(world)]

    def _grow(self, world: int) -> None:
        from torch.distributed import TCPStore

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._notes.mkdir(exist_ok=True)
        while len(self._ranks) < world:
            ours, theirs = context.Pipe()
            notes = Path(tempfile.mkdtemp(dir=self._notes))
            process = context.Process(target=_serve, args=(theirs, self._store.port, notes), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, notes))

    def _collect(self, ranks: list[_Rank], timeout_s: float) -> tuple[dict[int, _Answer], list[int]]:
        """Answers by rank, and ranks that died. After the first death the others have little time left."""
        answers: dict[int, _Answer] = {}
        dead: list[int] = []
        end_s = time.monotonic() + timeout_s
        while len(answers) + len(dead) < len(ranks) and (left_s := end_s - time.monotonic()) > 0:
            pending = {r.connection: n for n, r in enumerate(ranks) if n not in answers and n not in dead}
            for connection in wait(list(pending), left_s):
                try:
                    answers[pending[connection]] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    dead.append(pending[connection])
                    end_s = min(end_s, time.monotonic() + _LAST_WORDS_S)
        return answers, dead

    def close(self) -> None:
        """Ends all processes. The pool can be used again."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks = []
        shutil.rmtree(self._notes, ignore_errors=True)


def _last_words(ranks: list[_Rank], answers: dict[int, _Answer], dead: list[int], timeout_s: float) -> list[str]:
    """Of ranks without an answer: how each died, or, if none did, what each is doing, with its stack."""
    if dead:
        for rank in dead:
            ranks[rank].process.join(_LAST_WORDS_S)
        ends = {rank: _ending(ranks[rank].process.exitcode) for rank in dead}
        return [f'rank {rank} died ({end}) during "{ranks[rank].doing}"' for rank, end in ends.items()]
    hung = [rank for rank in range(len(ranks)) if rank not in answers]
    for rank in hung:
        os.kill(ranks[rank].process.pid or 0, signal.SIGUSR1)
    if hung:
        time.sleep(_LAST_WORDS_S)
    at = [f'rank {rank} did not answer within {timeout_s:g} s, during "{ranks[rank].doing}"' for rank in hung]
    return [f"{line}\n{ranks[rank].stack}" for rank, line in zip(hung, at, strict=True)]


def _raised(answers: dict[int, _Answer]) -> list[str]:
    """Tracebacks, that of the first in full: most of the others follow from it."""
    failed = sorted((rank for rank in answers if answers[rank].error), key=lambda rank: answers[rank].at_s)
    lines = [
        f'rank {rank} raised first, during "{answers[rank].doing}":\n{answers[rank].error}'
        if rank == failed[0]
        else f"rank {rank} raised {answers[rank].error.strip().splitlines()[-1]}"
        for rank in failed
    ]
    returned = [f"rank {rank}" for rank in sorted(answers) if rank not in failed]
    return [*lines, f"returned: {', '.join(returned)}"] if lines and returned else lines


def _ending(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
