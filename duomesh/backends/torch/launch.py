"""Starts ranks on this host, and joins the ranks of a job, whoever started them.

    launch(4, "package.module:function", payload)  # function(context, payload) on four ranks; rank 0's result

`launch` uses torch's elastic agent, as torchrun does, and so a rank finds its place in the same way under both. In a
process that torchrun started, `launch` starts nothing: it joins, and calls the function.

How a failure on one rank ends the others is in `watch.py`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from duomesh.backends.torch.verdict import Failure
from duomesh.backends.torch.watch import Limits, Watcher, read_failure
from duomesh.core import errors
from duomesh.core.activity import UNTOLD, doing, read_activity, share_activity
from duomesh.core.errors import BackendError, DuomeshError

__all__ = ["Limits", "RankContext", "Target", "is_launched", "join", "launch", "withdraw"]

_HOST = "127.0.0.1"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# They report in their own words what `launch` says.
_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.multiprocessing.spawn",
)
_LOG_LINES = 30


@dataclass(frozen=True)
class RankContext:
    """A rank's place in its job. Left as a context manager it waits for the other ranks, or tells them the error.

    local_rank: its number among the ranks of this host. device: what its tensors and its process group are on.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    _watcher: Watcher

    def __enter__(self) -> RankContext:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._watcher.finish()
            dist.destroy_process_group()
        else:
            self._watcher.fail(error)


Target = Callable[[RankContext, Any], Any]


def is_launched() -> bool:
    """Whether torchrun, or `launch`, started this process as a rank."""
    return bool(dist.is_torchelastic_launched())


# In a rank


def join(*, device: str | None = None, world_size: int | None = None, limits: Limits | None = None) -> RankContext:
    """Joins the job that this process was started for: a process group, with gloo on the CPU and NCCL on GPUs.

    Use it as a context manager around all that the rank does.

    Args:
        device: "cpu" or "cuda"; None takes GPUs if there are any. A rank has the GPU of its local rank.
        world_size: number of ranks that are needed.

    Raises:
        BackendError: nobody started this process as a rank, there are other than `world_size` ranks, or no GPU is
            left for this one.
    """
    return _join(device, world_size, limits or Limits())


def withdraw(error: BaseException) -> None:
    """Tells the other ranks why this process will not join them. Nothing, if it was started as no rank."""
    if not is_launched():
        return
    limits = Limits()
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=limits.start_s)))
    watcher = Watcher(store, rank=rank, world_size=size, limits=limits)
    watcher.start()
    watcher.fail(error)


def _join(
    device: str | None,
    world_size: int | None,
    limits: Limits,
    *,
    board: dist.Store | None = None,
    directory: Path | None = None,
) -> RankContext:
    """board, directory: where watchers meet, and where ranks keep what they are doing, if whoever started the ranks
    reads there and reports. Else watchers meet in the store of the process group."""
    if dist.is_initialized():
        raise BackendError("this process has joined a job already. Leave the first context before joining again.")
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=limits.start_s)))
        local_rank = dist.get_node_local_rank()
    except (ValueError, RuntimeError) as error:
        if isinstance(error, dist.DistError):
            raise
        raise BackendError(f"this process is no rank of a job ({error}). Start it with torchrun.") from error
    watcher = Watcher(board or store, rank=rank, world_size=size, limits=limits, is_reported=board is not None)
    watcher.start()
    if directory is not None:
        share_activity(_activity_file(directory, rank))
    try:
        with doing("joining the others", stall_s=limits.start_s, waits=True):
            _check_world(size, world_size)
            place = _device(device, local_rank)
            _check_same_device(store, rank, place)
            is_gpu = place.type == "cuda"
            dist.init_process_group(
                "nccl" if is_gpu else "gloo",
                store=dist.PrefixStore("ranks", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=limits.collective_s),
                device_id=place if is_gpu else None,
            )
    except BaseException as error:
        watcher.fail(error)
        raise
    return RankContext(rank, size, local_rank, place, watcher)


def _check_world(started: int, needed: int | None) -> None:
    if needed is not None and started != needed:
        raise BackendError(
            f"{needed} ranks are needed, and {started} were started. "
            f"Start {needed} (torchrun --nproc-per-node, --nnodes), or change the plan."
        )


def _check_same_device(store: dist.Store, rank: int, device: torch.device) -> None:
    """One process group is on one kind of device. Whoever differs from rank 0 tells it."""
    if rank == 0:
        store.set("device", device.type)
    first = store.get("device").decode()  # waits until it is there
    if device.type != first:
        raise BackendError(f"rank 0 runs on {first}, and this rank on {device.type}. Give every rank the same device.")


def _device(kind: str | None, local_rank: int) -> torch.device:
    gpus = torch.cuda.device_count()
    _check_devices(kind, local_rank + 1)
    if kind == "cpu" or not gpus:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _check_devices(kind: str | None, needed: int) -> None:
    if kind not in (None, "cpu", "cuda"):
        raise BackendError(f"device {kind!r} is none that ranks run on. Use 'cpu' or 'cuda'.")
    gpus = torch.cuda.device_count()
    if kind != "cpu" and needed > gpus and (gpus or kind):
        raise BackendError(
            f"{needed} ranks on this host need {needed} GPUs, and torch finds {gpus}. "
            "Use fewer ranks a host, more hosts (torchrun --nnodes), or device='cpu'."
        )


# In the process that starts ranks


@dataclass(frozen=True)
class _Job:
    """What a rank of `launch` is sent.

    port: of the store where its watcher meets the others'. directory: where it keeps what it is doing.
    """

    world_size: int
    target: str | Target
    payload: Any
    device: str | None
    limits: Limits
    port: int
    directory: Path


def launch(
    world_size: int,
    target: str | Target,
    payload: Any = None,
    *,
    device: str | None = None,
    limits: Limits | None = None,
) -> Any:
    """Calls target(context, payload) on `world_size` ranks of this host.

    Rank 0 has this process's standard output and error; the others' are kept, and shown of a rank that fails. As with
    all of Python's multiprocessing, a script that calls this does so under `if __name__ == "__main__":`.

    Args:
        target: "package.module:function", or a function at the top of a module.
        payload: sent to every rank, pickled.
        device: as of `join`.

    Returns:
        Rank 0's result; in a process that torchrun started, that of its own rank.

    Raises:
        DuomeshError: a rank failed. The message says which, during what, and why; the class is that of what was
            raised, if that was a DuomeshError, and else BackendError.
    """
    limits = limits or Limits()
    function = _resolve(target)
    if is_launched():
        with join(device=device, world_size=world_size, limits=limits) as context:
            return function(context, payload)
    if world_size < 1:
        raise BackendError(f"{world_size} ranks were asked for; at least 1 is needed.")
    _check_devices(device, world_size)
    board = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    with TemporaryDirectory(prefix="duomesh-ranks-") as logs, _as_it_was():
        job = _Job(world_size, target, payload, device, limits, board.port, Path(logs))
        try:
            return elastic_launch(_config(world_size, logs), _run_rank)(job)[0]
        except ChildFailedError as failed:
            raise _explained(failed.get_first_failure(), dist.PrefixStore("watch", board), Path(logs)) from None
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stopped.sigval) from None


def _config(world_size: int, logs: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_HOST}:0",
        local_addr=_HOST,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=dict.fromkeys(range(1, world_size), Std.ALL)),
    )


def _resolve(target: str | Target) -> Target:
    """The function that a caller means; its module is the caller's, which may well stand above this one."""
    if not isinstance(target, str):
        return target
    try:
        function: Target = resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise BackendError(f"{target!r} names no function ({error}). Write 'package.module:function'.") from error
    if not callable(function):
        raise BackendError(f"{target!r} names no function. Write 'package.module:function'.")
    return function


def _run_rank(job: _Job) -> Any:
    """A rank's whole life. What it raises goes to the board, where the process that started it reads it."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.world_size))
    board = dist.TCPStore(_HOST, job.port, is_master=False, wait_for_workers=False)
    try:
        with _join(job.device, job.world_size, job.limits, board=board, directory=job.directory) as context:
            result = _resolve(job.target)(context, job.payload)
            return result if context.rank == 0 else None
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # torch takes a KeyboardInterrupt for an end in good order


def _activity_file(directory: Path, rank: int) -> Path:
    return directory / f"doing{rank}"


def _explained(first: tuple[int, ProcessFailure], board: dist.Store, logs: Path) -> DuomeshError:
    """The error of a job, after what the failed rank had to say is shown.

    first: the rank that the agent saw end first, and how. What the ranks found out themselves is better, except about
    a death: they only miss signs of life.
    """
    failure = read_failure(board)
    rank, process = first
    if failure is None or (failure.kind == "died" and (process.exitcode < 0 or rank == failure.rank)):
        at = read_activity(_activity_file(logs, rank)) or "start"
        how = f"ended with exit code {process.exitcode}"
        if process.exitcode < 0:
            how = f"was killed by {process.signal_name()}"
        hint = " The kernel does that when memory runs out." if process.exitcode == -signal.SIGKILL else ""
        where = "" if at == UNTOLD else f' during "{at}"'
        sentence = f"rank {rank} {how}{where}.{hint}"
        failure = Failure(kind="died", rank=rank, doing=at, sentence=sentence)
    kind = getattr(errors, failure.error, BackendError)
    if failure.error not in errors.__all__:
        print(failure.stack or _last_output(logs, failure.rank), end="", file=sys.stderr)
    error: DuomeshError = kind(failure.sentence)
    return error


def _last_output(logs: Path, rank: int) -> str:
    """The last lines that a rank wrote to stderr, with a heading; nothing if it wrote to our own."""
    lines = [line for path in logs.glob(f"*/attempt_0/{rank}/stderr.log") for line in path.read_text().splitlines()]
    return "\n".join([f"rank {rank} wrote last:", *lines[-_LOG_LINES:], ""]) if lines else ""


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Silences torch's agent, and puts back the signal handlers that it replaces and does not restore."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if is_main else {}
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled
        for number, handler in handlers.items():
            signal.signal(number, handler)
