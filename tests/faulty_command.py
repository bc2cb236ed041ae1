"""`duomesh` with a fault on one rank, for `test_flows.py`: faulty_command.py FLOW HOW RANK WORD...

The ranks of a job import this script too, and so have what it puts in the place of the library's functions.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from duomesh.backends.torch import launch, session, watch
from duomesh.cli.main import main
from duomesh.core.checkpoint.read import TensorFile
from duomesh.core.checkpoint.write import TensorFileWriter
from duomesh.core.data.sampler import Sampler
from duomesh.core.errors import CheckpointError, ConfigError, DataError, DuomeshError, OutputError
from duomesh.core.training import begin, run

# flow -> (owner, the function that fails, in which call, with which error that users get)
FLOWS: dict[str, tuple[Any, str, int, type[DuomeshError]]] = {
    "settings": (begin, "check", 1, ConfigError),
    "text": (run, "read_corpus", 1, DataError),
    "data": (Sampler, "batches", 2, DataError),
    "save": (TensorFileWriter, "add", 5, OutputError),
    "load": (TensorFile, "read", 5, CheckpointError),
}
# what a rank of torchrun is told beside the others
OTHER_WORDS = {
    "wrong settings": ("optimizer.eps=-1",),
    "other settings": ("optimizer.lr=0.5",),
    "no plan": ("--plan", ""),
}


class Limits(watch.Limits):
    """Short enough for tests, long enough for a busy machine."""

    def __init__(self, stall_s: float = 8.0) -> None:
        super().__init__(beat_s=0.3, dead_s=20.0, stall_s=stall_s)


def fail(how: str, error: type[DuomeshError]) -> None:
    match how:
        case "raise":
            raise ValueError("boom")
        case "user error":
            raise error("this cannot be done. Do something else.")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)


def break_flow(flow: str, how: str, rank: str) -> None:
    """From some call on, the function of a flow fails on one rank."""
    owner, name, at, error = FLOWS[flow]
    whole: Callable[..., Any] = getattr(owner, name)
    calls: list[None] = []

    def broken(*arguments: Any, **named: Any) -> Any:
        if os.environ.get("RANK") == rank:
            calls.append(None)
            if len(calls) == at:
                fail(how, error)
        return whole(*arguments, **named)

    setattr(owner, name, broken)


def corrupt(rank: str, name: str) -> None:
    """After the second update, a weight of one rank changes by itself."""
    update = session.OnMesh.update

    def updating(self: Any, lr: float, *, scale: float) -> None:
        update(self, lr, scale=scale)
        if os.environ.get("RANK") == rank and self.step_count() == 2:
            (held,) = (held for held in self.held() if (held.group, held.name) == ("params", name))
            held.tensor.data.view(-1)[3] += 1

    session.OnMesh.update = updating  # type: ignore[method-assign]


flow, how, culprit, *words = sys.argv[1:]
launch.Limits = Limits  # type: ignore[misc,assignment]
if flow in FLOWS:
    break_flow(flow, how, culprit)
elif flow == "corrupt":
    corrupt(culprit, how)
elif os.environ.get("RANK") == culprit:
    words += OTHER_WORDS[flow]

if __name__ == "__main__":
    sys.exit(main(words))
