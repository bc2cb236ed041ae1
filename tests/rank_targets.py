"""What ranks do in `test_launch.py`; as a script, a job of them: rank_targets.py HOW WORLD DIRECTORY, or under torchrun
rank_targets.py HOW DIRECTORY."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from duomesh.backends.torch.launch import RankContext, is_launched, join, launch
from duomesh.backends.torch.watch import Limits
from duomesh.core.activity import doing
from duomesh.core.errors import DataError, DuomeshError

LIMITS = Limits(beat_s=0.3, dead_s=12.0, stall_s=3.0, start_s=60.0)
STEP = "step 2, forward, layers.1"


@dataclass(frozen=True)
class Fault:
    """How a rank fails, and which. Every rank leaves a file with its process id in `directory`."""

    how: str
    culprit: int
    directory: Path


def _fail(how: str) -> None:
    match how:
        case "raise":
            raise ValueError("boom")
        case "user error":
            raise DataError("the text ends before the first token. Give more text.")
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(0)
        case "kill":
            time.sleep(5 * LIMITS.beat_s)  # what it does is known
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)
        case "lock":
            ctypes.PyDLL(None).sleep(1000)  # a call through PyDLL keeps Python's lock


def steps(context: RankContext, fault: Fault) -> np.ndarray:
    """Three steps with two collectives each; the culprit fails in the second, and leaves no process group behind."""
    (fault.directory / f"pid{context.rank}").write_text(str(os.getpid()))
    x = torch.full((3,), float(context.rank))
    for step in range(1, 4):
        doing(f"step {step}")
        with doing(f"step {step}, forward, layers.1"):
            is_faulty = context.rank == fault.culprit and step == 2
            if is_faulty:
                if fault.how == "return":
                    return x.numpy()
                _fail(fault.how)
            if not (is_faulty and fault.how == "leave out a collective"):
                dist.all_reduce(x)
        with doing(f"step {step}, backward", waits=True):
            parts = [torch.zeros(3) for _ in range(context.world_size)]
            dist.all_gather(parts, x)
    print(f"rank {context.rank} is through", flush=True)
    return x.numpy()


def long_save(context: RankContext, seconds: float) -> str:
    """Rank 0 saves for longer than a section may last, while the others wait for it, and go on for a while."""
    if context.rank == 0:
        with doing("save", stall_s=math.inf):
            time.sleep(seconds)
    with doing("wait for the save"):
        dist.barrier()
        if context.rank == 1:
            time.sleep(2 * LIMITS.beat_s)
    return "saved"


def large_save(context: RankContext, seconds: float) -> str:
    """Rank 0 saves for longer than a section may last that moves nothing."""
    if context.rank == 0:
        with doing("save", more_s=seconds):
            time.sleep(seconds)
    with doing("wait for the save"):
        dist.barrier()
    return "saved"


def main(how: str, *words: str) -> None:
    if is_launched():
        with join(device="cpu", limits=LIMITS) as context:
            steps(context, Fault(how, 1, Path(words[0])))
    else:
        result = launch(int(words[0]), steps, Fault(how, 1, Path(words[1])), device="cpu", limits=LIMITS)
        print(f"the result is {result.tolist()}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except DuomeshError as error:
        sys.exit(f"{type(error).__name__}: {error}")
