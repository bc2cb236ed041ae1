"""Several JAX processes as one job: `jax.distributed`, and what `core.peers` needs of it.

Every process runs the same program. All devices of all processes are one mesh, in the order of processes; the first
process has rank 0 and keeps the job together.

A process that fails leaves without waiting for the others. They find that out in one of three ways: a collective over
the network breaks, and they raise BackendError; JAX sees that rank 0 is gone and ends them at once; or JAX misses a
process for `HEARTBEAT_S`, as where GPUs wait for each other, and ends them then. Where JAX ends a process, it prints
its own words and aborts.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from duomesh.backends.jax.devices import simulate
from duomesh.core.activity import activity_of, doing
from duomesh.core.errors import BackendError, DuomeshError

__all__ = ["HEARTBEAT_S", "JaxPeers", "Processes", "joined"]

# Limits: until all have joined; without a sign of life of a process; until all have come to the end.
_START_S, HEARTBEAT_S, _END_S = 120, 30, 60
# Rank 0 stays this long when it fails: those that fail alike should say so before JAX ends them.
_LINGER_S = 2.0
# What JAX says, in errors of no class of their own, when another process is gone.
_LOST = re.compile("gloo|nccl|by peer|broken pipe|coordination service|heartbeat", re.IGNORECASE)


@dataclass(frozen=True)
class Processes:
    """Where a process belongs. Construction raises BackendError.

    coordinator: `host:port` of the first process, or "auto": what the cluster's scheduler says (Slurm, MPI, Kubernetes,
    Cloud TPU). count, index: of the processes and of this one; "auto" finds what is not given.
    """

    coordinator: str
    count: int | None = None
    index: int | None = None

    def __post_init__(self) -> None:
        if self.coordinator != "auto" and (self.count is None or self.index is None):
            raise BackendError(
                f"the coordinator {self.coordinator} needs the number of processes and this one's index, too."
            )
        if self.coordinator != "auto" and not re.search(r".:\d+$", self.coordinator):
            raise BackendError(
                f"the coordinator {self.coordinator!r} is no HOST:PORT of the first process, nor 'auto'."
            )
        if self.count is not None and self.index is not None and not 0 <= self.index < self.count:
            raise BackendError(f"process {self.index} of {self.count}: the index counts from 0.")

    def __str__(self) -> str:
        who = "this process" if self.index is None else f"process {self.index}"
        return f"{who} (coordinator {self.coordinator})"


class JaxPeers:
    """All processes of this job. They talk through one device each, one short text at a time."""

    def __init__(self) -> None:
        self.rank, self.world_size = jax.process_index(), jax.process_count()
        first = {device.process_index: device for device in reversed(jax.devices())}
        mesh = Mesh(np.array([first[process] for process in range(self.world_size)]), ("process",))
        self._parted, self._whole = NamedSharding(mesh, jax.P("process")), NamedSharding(mesh, jax.P())
        self._join = jax.jit(lambda parts: parts, out_shardings=self._whole)

    def exchange(self, text: str) -> list[str]:
        data = np.frombuffer(text.encode(), np.uint8)
        with doing("waiting for what the other processes have to say", waits=True):
            sizes = self._gather(np.array([len(data)], np.int32))[:, 0]
            longest = int(sizes.max())
            if longest == 0:
                return [""] * self.world_size
            # few lengths: each is compiled
            padded = np.zeros(1 << (longest - 1).bit_length(), np.uint8)
            padded[: len(data)] = data
            parts = self._gather(padded)
        return [bytes(part[:size]).decode() for part, size in zip(parts, sizes, strict=True)]

    def _gather(self, mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """[processes, ...]"""
        parts = jax.make_array_from_process_local_data(self._parted, mine[None])
        return np.asarray(self._join(parts))


@contextmanager
def joined(processes: Processes, devices: int) -> Iterator[JaxPeers]:
    """Makes this process one of a job for as long as it is entered. JAX must not have been used before.

    Left by an error, this process ends as soon as it can, whoever waits for it.

    Args:
        devices: of the whole job; a CPU simulates this process's share of them, if the number of processes is given.

    Raises:
        BackendError: the processes have not all come together in time; another one is gone.
    """
    _initialize(processes, devices)
    try:
        yield JaxPeers()
    except BaseException as error:
        is_lost = isinstance(error, jax.errors.JaxRuntimeError) and _LOST.search(str(error)) is not None
        atexit.register(_end, _exit_code(error, is_lost))  # runs before JAX's own, which waits for the others
        if is_lost:
            raise BackendError(
                f'process {jax.process_index()} has lost another process during "{activity_of(error)}". What that one '
                "printed says why."
            ) from error
        raise
    with doing("waiting for the other processes to end", waits=True):
        jax.distributed.shutdown()


def _initialize(processes: Processes, devices: int) -> None:
    if processes.count is not None:
        simulate(-(-devices // processes.count))
    # it would take SIGTERM from us, for which training has an answer of its own
    jax.config.update("jax_enable_preemption_service", False)
    is_auto = processes.coordinator == "auto"
    # JAX itself would abort
    patience = threading.Timer(_START_S, _give_up, [processes])
    patience.daemon = True
    patience.start()
    try:
        with doing("joining the others", waits=True):
            jax.distributed.initialize(
                None if is_auto else processes.coordinator,
                processes.count,
                processes.index,
                cluster_detection_method=None if is_auto else "deactivate",
                initialization_timeout=2 * _START_S,
                heartbeat_timeout_seconds=HEARTBEAT_S,
                shutdown_timeout_seconds=_END_S,
            )
    except (RuntimeError, ValueError) as error:
        hint = " No scheduler that JAX knows has started this process; name a coordinator." if is_auto else ""
        raise BackendError(f"{processes} cannot join the others: {str(error).splitlines()[0]}{hint}") from error
    finally:
        patience.cancel()


def _give_up(processes: Processes) -> None:
    print(
        f"{processes} has waited {_START_S} s for the others. Start all of them, with the same coordinator.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def _exit_code(error: BaseException, is_lost: bool) -> int:
    """That of the command."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 2 if is_lost or isinstance(error, DuomeshError) else 1


def _end(code: int) -> None:
    """Ends this process without a farewell to the others."""
    if jax.process_index() == 0:
        time.sleep(_LINGER_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
