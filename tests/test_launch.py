"""Starting ranks, joining them, and failures: whatever one rank does, all end soon and say which rank and where."""

from __future__ import annotations

import inspect
import logging
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_targets import LIMITS, STEP, Fault, large_save, long_save, steps
from test_checkpoint import ThreadPeers, on_ranks

from duomesh.backends.torch import collectives, groups
from duomesh.backends.torch.launch import is_launched, join, launch
from duomesh.backends.torch.verdict import Failure, Status, judge, raised, silent
from duomesh.backends.torch.watch import Limits, Watcher, _is_in_collective
from duomesh.core.activity import UNTOLD, activity_of, current, doing, each, read_activity, transfer_s
from duomesh.core.errors import BackendError, DataError, DuomeshError
from duomesh.core.peers import together

SCRIPT = Path(__file__).resolve().parent / "rank_targets.py"

# as `how` fails -> the message, of the culprit's rank
MESSAGES = {
    "raise": rf'rank {{rank}}, during "{STEP}": ValueError: boom',
    "user error": rf'rank {{rank}}, during "{STEP}": the text ends before the first token\. Give more text\.',
    "sys.exit": rf'rank {{rank}}, during "{STEP}": SystemExit: 3',
    "kill": rf'rank {{rank}} was killed by SIGKILL during "{STEP}"\.',
    "os._exit": r"rank {rank} has given no sign of life for \d\.\d s(; it last said |\. It was killed)",
    "lock": rf'rank {{rank}} ended with exit code 1 during "{STEP}"\.',
    "hang": rf'rank {{rank}} hangs during "{STEP}": it has not got on for \d s \(ranks? [\d, ]+: "step ',
    "return": r"rank {rank} has finished, while others wait in a collective: a rank left out a collective",
    "leave out a collective": r"rank {rank} .* a rank left out a collective or met collectives in another order",
}


def assert_gone(directory: Path, world: int, *, within_s: float = 0.0) -> None:
    """No process of a job is left."""
    pids = [int((directory / f"pid{rank}").read_text()) for rank in range(world)]
    end = time.monotonic() + within_s
    while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def run_script(*words: object, torchrun: int = 0) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(torchrun)] if torchrun else []
    command = [sys.executable, *start, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# Jobs that work


@pytest.mark.parametrize(("world", "target"), [(1, steps), (2, "rank_targets:steps"), (4, steps)])
def test_launch_returns_the_result_of_rank_0(tmp_path: Path, world: int, target: object) -> None:
    result = launch(world, target, Fault("none", 0, tmp_path), device="cpu", limits=LIMITS)  # type: ignore[arg-type]
    np.testing.assert_array_equal(result, np.full(3, sum(range(world)) * world**2))
    assert_gone(tmp_path, world)


def test_a_section_may_say_that_it_takes_long() -> None:
    """The others wait longer than their limit, but for a rank that may take its time, and then go on."""
    assert launch(3, long_save, LIMITS.stall_s + 4 * LIMITS.beat_s, device="cpu", limits=LIMITS) == "saved"


def test_a_section_may_take_longer_the_more_it_moves() -> None:
    assert launch(2, large_save, LIMITS.stall_s + 4 * LIMITS.beat_s, device="cpu", limits=LIMITS) == "saved"


def test_launch_leaves_signals_and_logging_as_they_were(tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    launch(1, steps, Fault("none", 0, tmp_path), device="cpu", limits=LIMITS)
    assert [signal.getsignal(number) for number in numbers] == before
    assert not logging.getLogger("torch.distributed.elastic.multiprocessing.api").disabled


def test_a_script_shows_what_rank_0_prints(tmp_path: Path) -> None:
    done = run_script("none", 2, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "rank 0 is through\nthe result is [4.0, 4.0, 4.0]\n"


def test_the_same_script_under_torchrun(tmp_path: Path) -> None:
    done = run_script("none", tmp_path, torchrun=2)
    assert done.returncode == 0, done.stderr
    assert "rank 0 is through" in done.stdout and "rank 1 is through" in done.stdout


# Jobs that fail


def test_a_message_names_no_activity_where_none_was_told() -> None:
    status = Status(beat=1, doing=UNTOLD, number=0, for_s=1.0)
    assert current().text == UNTOLD
    assert raised(2, DataError("No text.")).sentence == "rank 2: No text."
    assert silent(1, status, 4.0).sentence.startswith("rank 1 has given no sign of life for 4.0 s. It was killed")
    with doing("step 3"):
        assert raised(2, DataError("No text.")).sentence == 'rank 2, during "step 3": No text.'


def test_only_the_first_of_equal_errors_is_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Watcher.stop", "faulthandler.dump_traceback_later"):
        monkeypatch.setattr(f"duomesh.backends.torch.watch.{name}", lambda *_, **__: None)
    monkeypatch.setattr("duomesh.backends.torch.watch._LINGER_S", 0.0)
    board = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    errors = [DataError("No text."), DataError("No text."), DataError("No model.")]
    for rank in (1, 0, 2):
        Watcher(board, rank=rank, world_size=3, limits=LIMITS).fail(errors[rank])
    assert [error.is_told for error in errors] == [True, False, False]


def test_what_every_rank_refuses_is_said_once(tmp_path: Path) -> None:
    """Under torchrun, whose own report has the sentence of each rank, and no traceback of ours."""
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\npreset = "tiny-llama3"\n[data]\npaths = ["{tmp_path}"]\nseq_len = 33\n'
        f'[train]\nsteps = 1\ndevice = "cpu"\noutput = "{tmp_path / "out"}"\nplan = "tp=2,sequence_parallel"\n'
    )
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "duomesh.cli.main", "train", str(file)]
    done = subprocess.run([sys.executable, *start], capture_output=True, text=True, timeout=60, check=False)
    said = "seq=33, tp=2: tp must divide the sequence length"
    lines = done.stderr.splitlines()
    assert done.returncode != 0 and sum(line.startswith("duomesh train: ") for line in lines) == 1, done.stderr
    assert any(line.startswith(f"duomesh train: {said}") for line in lines)
    assert sum(line.startswith("  traceback : rank") and said in line for line in lines) == 2
    assert "/duomesh/" not in done.stderr


# as those fail that take some seconds to be found
SLOW = ("os._exit", "lock", "hang", "return", "leave out a collective")


@pytest.mark.parametrize(
    ("how", "world", "culprit"),
    [
        pytest.param(how, *ranks, marks=pytest.mark.slow if how in SLOW and ranks != (2, 1) else ())
        for how in MESSAGES
        for ranks in ((2, 0), (2, 1), (4, 1))
    ],
)
def test_a_failing_rank_ends_the_job(tmp_path: Path, how: str, world: int, culprit: int) -> None:
    # a rank that does not let go of Python's lock ends itself after 3/4 of dead_s
    limits = replace(LIMITS, dead_s=4.0) if how == "lock" else LIMITS
    begin = time.monotonic()
    with pytest.raises(DataError if how == "user error" else BackendError) as failure:
        launch(world, steps, Fault(how, culprit, tmp_path), device="cpu", limits=limits)
    assert time.monotonic() - begin < 20
    assert re.match(MESSAGES[how].format(rank=culprit), str(failure.value)), failure.value
    assert_gone(tmp_path, world)


@pytest.mark.parametrize("how", ["raise", "kill", "hang"])
def test_a_rank_on_its_own_fails_alike(tmp_path: Path, how: str) -> None:
    with pytest.raises(BackendError, match=f'^rank 0.* during "{STEP}"'):
        launch(1, steps, Fault(how, 0, tmp_path), device="cpu", limits=LIMITS)
    assert_gone(tmp_path, 1)


@pytest.mark.parametrize(
    ("how", "error", "shown"),
    [
        ("raise", "BackendError", "in _fail"),
        ("user error", "DataError", ""),
        pytest.param("hang", "BackendError", "time.sleep", marks=pytest.mark.slow),
    ],
)
def test_the_last_line_on_screen_is_the_first_error(tmp_path: Path, how: str, error: str, shown: str) -> None:
    """Before it comes the stack of the rank that failed, unless its user made the mistake."""
    done = run_script(how, 2, tmp_path)
    *before, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert re.match(f"{error}: {MESSAGES[how].format(rank=1)}", last), done.stderr
    assert shown in "\n".join(before) and ("rank_targets.py" in "\n".join(before)) == bool(shown)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill", "hang", "leave out a collective"])
def test_a_failing_rank_ends_torchrun(tmp_path: Path, how: str) -> None:
    """The other rank says it, and torchrun shows it once more."""
    done = run_script(how, tmp_path, torchrun=2)
    said = MESSAGES[how].format(rank=1)
    if how == "kill":
        said = f'rank 1 has given no sign of life for .\\.. s; it last said "{STEP}"'
    assert done.returncode != 0
    assert re.search(f"^rank 0 stops. {said}", done.stderr, re.MULTILINE), done.stderr
    root_cause = done.stderr.split("Root Cause")[1]
    assert "rank      : 1 " in root_cause
    assert how == "kill" or re.search("ValueError: boom" if how == "raise" else said, root_cause), root_cause
    assert_gone(tmp_path, 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path, number: int) -> None:
    process = subprocess.Popen([sys.executable, str(SCRIPT), "hang", "2", str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        while len([path for path in tmp_path.glob("pid*") if path.read_text()]) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(20) != 0
    finally:
        process.kill()
    assert_gone(tmp_path, 2, within_s=20)


# Mistakes


def test_mistakes_are_told_before_a_rank_starts() -> None:
    assert not is_launched()
    with pytest.raises(BackendError, match="0 ranks were asked for"):
        launch(0, steps)
    with pytest.raises(BackendError, match="device 'tpu' is none that ranks run on"):
        launch(2, steps, device="tpu")
    for target in ("rank_targets", "rank_targets:LIMITS", "rank_targets:absent", "absent:steps", ":steps"):
        with pytest.raises(BackendError, match=f"'{target}' names no function.* Write 'package.module:function'"):
            launch(2, target)
    gpus = torch.cuda.device_count()
    with pytest.raises(
        BackendError, match=f"{gpus + 1} ranks on this host need {gpus + 1} GPUs, and torch finds {gpus}"
    ):
        launch(gpus + 1, steps, device="cuda")
    with pytest.raises(BackendError, match=r"this process is no rank of a job .*RANK.* Start it with torchrun"):
        join()
    with pytest.raises(BackendError, match=r"dead_s=1\.0 with beat_s=0\.5; it must be at least 4\.0"):
        Limits(dead_s=1.0)


# What a process does, and what is made of it


def test_the_innermost_section_is_where_an_error_was_raised() -> None:
    doing("step 1")
    number = current().number
    with pytest.raises(ValueError) as error, doing("step 1, forward", stall_s=5):
        with doing("layers.0", waits=True):
            assert (current().text, current().waits, current().stall_s) == ("layers.0", True, None)
        assert (current().text, current().waits, current().stall_s) == ("step 1, forward", False, 5)
        with doing("layers.1"):
            raise ValueError
    assert activity_of(error.value) == "layers.1"
    assert activity_of(ValueError()) == "step 1"
    assert (current().text, current().number) == ("step 1", number + 6)


def test_tensors_are_told_one_by_one() -> None:
    """Each with time for its size, and all of them with time for the whole; an error is raised at one of them."""
    tensors = [("master", "embed.weight", np.zeros((10, 50))), ("master", "head.weight", np.zeros(20))]
    doing("step 1")
    with doing("step 1, saving"):
        told = [(current().text, current().more_s) for _ in each("saving", tensors)]
        assert (current().text, current().more_s) == ("saving", transfer_s(520 * 8))
    assert told == [
        ("saving master embed.weight", transfer_s(500 * 8)),
        ("saving master head.weight", transfer_s(20 * 8)),
    ]
    assert (current().text, current().more_s) == ("step 1", 0)
    with pytest.raises(ValueError) as error, doing("step 1, saving"):
        for _, name, _ in each("saving", tensors):
            if name == "head.weight":
                raise ValueError
    assert activity_of(error.value) == "saving master head.weight"


def test_what_all_ranks_raise_together_is_the_error_of_the_one(tmp_path: Path) -> None:
    """Whichever of them is heard first."""

    def run(peers: ThreadPeers) -> Failure:
        def act() -> None:
            if peers.rank == 1:
                with doing("step 3, reading shard 7"):
                    raise DataError("the file is gone. Bring it back.")

        try:
            together(peers, act)
        except DuomeshError as error:
            return replace(raised(peers.rank, error), stack="")
        raise AssertionError

    want = 'rank 1, during "step 3, reading shard 7": the file is gone. Bring it back.'
    assert {(made.rank, made.sentence, made.error) for made in on_ranks(3, run)} == {(1, want, "DataError")}


def test_a_shared_activity_outlives_its_process(tmp_path: Path) -> None:
    source = f"""
        import os, pathlib, signal
        from duomesh.core.activity import doing, share_activity
        doing("a text that is longer than the next")
        share_activity(pathlib.Path({str(tmp_path / "doing")!r}))
        doing("step 1")
        with doing("\u00e9" * 1000):
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", dedent(source)], timeout=60, check=False)
    assert read_activity(tmp_path / "doing") == "step 1"
    assert read_activity(tmp_path / "absent") == ""


def status(doing: str, for_s: float, *, number: int = 0, waits: bool = False, is_done: bool = False) -> Status:
    """That of a rank which may take 10 s."""
    return Status(
        beat=1,
        doing=doing,
        number=number,
        for_s=for_s,
        is_overdue=for_s > 10,
        waits=waits,
        is_done=is_done,
        stack="its stack" if for_s > 10 else "",
    )


WAITS = status("step 3", 12, number=6, waits=True)
AHEAD = status("step 4", 11, number=8, waits=True)
DONE = status("finished", 11, number=9, waits=True, is_done=True)


@pytest.mark.parametrize(
    ("file", "waits"),
    [(collectives.__file__, True), (groups.__file__, False), ("/lib/torch/distributed/x.py", True), ("/x.py", False)],
)
def test_our_own_collectives_are_waits(file: str, waits: bool) -> None:
    """Their ops leave no frame of torch.distributed, and our folder is called torch too."""
    namespace: dict[str, Any] = {}
    exec(compile("def within(call):\n    return call()", file, "exec"), namespace)
    inner: dict[str, Any] = {"currentframe": inspect.currentframe}
    exec(compile("def call():\n    return currentframe()", "/lib/torch/_ops.py", "exec"), inner)
    assert _is_in_collective(namespace["within"](inner["call"])) == waits


@pytest.mark.parametrize(
    ("statuses", "culprit", "sentence"),
    [
        ([status("step 3", 0), status("step 3", 9)], None, ""),
        # one computes and may go on
        ([WAITS, status("step 3", 9)], None, ""),
        ([WAITS, WAITS, status("step 2", 11, number=4)], 2, 'rank 2 hangs during "step 2": it has not got on for 11 s'),
        ([status("step 2", 11), *[WAITS] * 9], 0, '(ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1 more: "step 3").'),
        # both compute: the one behind
        ([status("step 3", 20, number=7), status("step 2", 11, number=4)], 1, 'rank 1 hangs during "step 2"'),
        ([status("step 3", 11, number=7), status("step 3", 20, number=7)], 1, "it has not got on for 20 s"),
        # both compute, and the one that is behind still may
        ([status("step 3", 11, number=7), status("step 2", 9, number=4)], None, ""),
        ([status("step 3", 11, number=7), status("step 2", 9, number=4, waits=True)], 0, 'hangs during "step 3"'),
        # all wait: the odd one out, else the one ahead
        ([WAITS, AHEAD, WAITS], 1, 'rank 1 hangs during "step 4": a rank left out'),
        ([AHEAD, WAITS], 0, '(rank 1: "step 3").'),
        ([WAITS, WAITS], 0, "a rank left out a collective"),
        ([WAITS, DONE, WAITS], 1, "rank 1 has finished, while others wait in a collective"),
        # what they wait for was just there, and not every rank has said so yet
        ([WAITS, status("step 4", 1, number=8, waits=True)], None, ""),
        ([WAITS, status("finished", 1, number=9, waits=True, is_done=True)], None, ""),
        # a rank waits at its end for those that run
        ([DONE, status("step 9", 9)], None, ""),
        ([DONE, DONE], None, ""),
    ],
)
def test_who_holds_a_job_up(statuses: list[Status], culprit: int | None, sentence: str) -> None:
    failure = judge(dict(enumerate(statuses)))
    if culprit is None:
        assert failure is None
    else:
        assert failure is not None and failure.rank == culprit and sentence in failure.sentence
        assert "its stack" in failure.stack
