"""Several JAX processes as one job: they train, save and load as one process with all devices, and end together."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from duomesh.backends.jax.processes import Processes
from duomesh.cli.main import main
from duomesh.cli.train import parse
from duomesh.core.bounds import bound
from duomesh.core.checkpoint import Checkpoint, checkpoint_path
from duomesh.core.errors import BackendError
from duomesh.core.training.metrics import read_rows

# what gloo's threads write to stdout, in pieces that they mix as they like
GLOO = re.compile(
    r"\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : |\s"
)
SCRIPT = Path(__file__).resolve().parent / "process_command.py"
STOP, STEPS = 3, 5
WIDTH = {"float64": 8, "float32": 4}


class Ended(NamedTuple):
    """What a process left."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "text.txt").write_bytes(np.random.default_rng(0).integers(97, 123, 3000).astype(np.uint8).tobytes())
    (folder / "run.toml").write_text(
        f"""
        [model]
        preset = "tiny-llama3"
        dropout = 0.1
        [data]
        paths = ["{folder}/text.txt"]
        seq_len = 16
        [train]
        steps = {STEPS}
        global_batch_size = 8
        micro_batch_size = 2
        device = "cpu"
        """
    )
    return folder / "run.toml"


def start(config: Path, fault: tuple[str, int], *words: str, count: int = 2) -> list[Ended]:
    """`duomesh train` in two processes, or the first `count` of two; all end within a minute of the first's end."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{found.getsockname()[1]}"
    # each is to have its share of the devices
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    common = [sys.executable, str(SCRIPT), fault[0], str(fault[1]), "train", str(config), "--backend", "jax", *words]
    place = ["--coordinator", coordinator, "--num-processes", "2", "--process-id"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    running = [subprocess.Popen([*common, *place, str(index)], **pipes) for index in range(count)]
    begin = time.monotonic()
    while all(process.poll() is None for process in running):
        assert time.monotonic() - begin < 200
        time.sleep(0.1)
    try:
        said = [process.communicate(timeout=60) for process in running]
        return [Ended(process.returncode, *texts) for process, texts in zip(running, said, strict=True)]
    finally:
        for process in running:
            process.kill()


def losses(output: Path) -> list[float]:
    return [row["loss"] for row in read_rows(output / "metrics.jsonl") if row["kind"] == "step"]


def saved(output: Path, step: int) -> list[tuple[str, str, bytes]]:
    with Checkpoint(checkpoint_path(output / "checkpoints", step)) as checkpoint:
        return [(group, name, array.tobytes()) for group, name, array in checkpoint.optimizer_state()]


@pytest.fixture(scope="module")
def alone(config: Path) -> Callable[[str, str], Path]:
    """The output of one process that has all devices, which stops after three steps; by plan and dtype."""

    def run(plan: str, dtype: str) -> Path:
        output = config.parent / f"alone-{plan}-{dtype}"
        words = ["--plan", plan, "--dtype", dtype, "--output", str(output), f"train.stop_step={STOP}"]
        assert main(["train", str(config), "--backend", "jax", *words]) == 0
        return output

    return run


@pytest.mark.parametrize(
    ("plan", "dtype", "moves"),
    [
        ("dp=2,tp=4,zero=1", "float64", [("jax", ""), ("torch", "tp=2,dp=2,zero=1")]),
        pytest.param("dp=2,zero=3", "float32", [("jax", "tp=2"), ("torch", "")], marks=pytest.mark.slow),
        pytest.param("tp=2", "float32", [], marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(
    config: Path,
    alone: Callable[[str, str], Path],
    tmp_path: Path,
    plan: str,
    dtype: str,
    moves: list[tuple[str, str]],
) -> None:
    """Four devices each, or one; the checkpoint is that of one process, and goes on everywhere."""
    words = ["--plan", plan, "--dtype", dtype, "--output", str(tmp_path / "run"), "train.check_invariants_every=1"]
    first, second = start(config, ("none", 0), *words, f"train.stop_step={STOP}")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert f"{STOP} of {STEPS} steps" in first.out
    assert GLOO.sub("", second.out) == ""

    one = alone(plan, dtype)
    want, got = losses(one), losses(tmp_path / "run")
    assert len(got) == STOP
    for a, b in zip(want, got, strict=True):
        assert abs(a - b) <= bound("loss_curve", dtype) * abs(a)
    _check_files(checkpoint_path(tmp_path / "run" / "checkpoints", STOP), plan, dtype)

    for backend, other in moves:
        moved = tmp_path / f"{backend}-{other}"
        shutil.copytree(tmp_path / "run", moved)
        on = ["--backend", backend, "--plan", other, "--dtype", dtype, "--output", str(moved), "--resume", "must"]
        assert main(["train", str(config), *on]) == 0
        assert len(losses(moved)) == STEPS
    rest = start(config, ("none", 0), *words, "--resume", "must")
    assert [ended.code for ended in rest] == [0, 0], rest[0].err + rest[1].err
    _check_reads(rest, plan, dtype, checkpoint_path(tmp_path / "run" / "checkpoints", STOP))
    for backend, other in moves:
        for a, b in zip(losses(tmp_path / "run"), losses(tmp_path / f"{backend}-{other}"), strict=True):
            assert abs(a - b) <= bound("loss_curve", dtype) * abs(a)


def _check_files(checkpoint: Path, plan: str, dtype: str) -> None:
    """Where the processes share state each wrote its part, and all parts are as large as the state."""
    sizes = [sum(f.stat().st_size for f in checkpoint.glob(f"*rank0000{rank}*")) for rank in range(2)]
    with Checkpoint(checkpoint) as found:
        elements = sum(array.size for _, _, array in found.optimizer_state())
        assert found.plan.replace("tp=4,dp=2", "dp=2,tp=4").startswith(plan)
    assert elements * WIDTH[dtype] <= sum(sizes) < 1.5 * elements * WIDTH[dtype]
    assert max(sizes) < 1.2 * min(sizes)


def _check_reads(ended: list[Ended], plan: str, dtype: str, checkpoint: Path) -> None:
    """A process reads what it holds of the checkpoint."""
    whole = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    for process in ended:
        read = max(int(number) for number in re.findall(r"bytes read: (\d+)", process.out))
        assert 0.4 * whole < read < 0.75 * whole


# Failures


@pytest.mark.parametrize(
    ("how", "culprit"),
    [
        ("kill", 1),
        ("raise", 0),
        *(
            pytest.param(how, culprit, marks=pytest.mark.slow)
            for how, culprit in (("kill", 0), ("raise", 1), ("user error", 0), ("user error", 1))
        ),
    ],
)
def test_c122_a_process_that_fails_ends_the_others(config: Path, tmp_path: Path, how: str, culprit: int) -> None:
    """It says why; the other says that it is alone, or JAX does, if the process that is gone kept the job together."""
    ended = start(config, (how, culprit), "--plan", "dp=2", "--output", str(tmp_path))
    failed, other = ended[culprit], ended[1 - culprit]
    said = {
        "kill": "",
        "raise": "ValueError: boom\n",
        "user error": "duomesh train: this cannot be done. Do something else.\n",
    }
    assert failed.err.endswith(said[how]) and failed.code == {"kill": -9, "raise": 1, "user error": 2}[how], failed.err
    lost = f'process {1 - culprit} has lost another process during "step 2". What that one printed says why.'
    if culprit == 1:
        assert other.err == f"duomesh train: {lost}\n" and other.code == 2
    else:
        assert lost in other.err or "the JAX distributed service detected fatal errors" in other.err
        assert other.code in (2, -6)
    if how != "kill" or culprit == 1:
        assert "The run has failed." in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("fault", ["wrong setting", pytest.param("other setting", marks=pytest.mark.slow)])
def test_c122_settings_that_are_wrong_in_one_process_are_refused_in_all(
    config: Path, tmp_path: Path, fault: str
) -> None:
    ended = start(config, (fault, 1), "--plan", "dp=2", "--output", str(tmp_path / "run"))
    said = {
        "wrong setting": ("rank 1: optimizer.eps is -1.0; it must be positive.", "optimizer.eps is -1.0"),
        "other setting": ("rank 1 has another setting than rank 0: optimizer.lr is 0.5 there",) * 2,
    }
    for process, words in zip(ended, said[fault], strict=True):
        assert process.code == 2 and process.err.startswith(f"duomesh train: {words}"), process.err
    assert not (tmp_path / "run").exists()


def test_a_process_that_never_comes_is_not_waited_for(config: Path, tmp_path: Path) -> None:
    (ended,) = start(config, ("absent", 1), "--plan", "dp=2", "--output", str(tmp_path / "run"), count=1)
    assert ended.code == 2 and re.fullmatch(
        r"process 0 \(coordinator 127\.0\.0\.1:\d+\) has waited 2 s for the others\. Start all of them, with the same "
        r"coordinator\.\n",
        ended.err,
    )


# What a process is told of its place


def test_a_place_is_no_setting() -> None:
    args = parse(["a.toml", "--coordinator=h:1", "--num-processes", "2", "--process-id=1", "--backend", "jax"])
    assert args.place == {"coordinator": "h:1", "num_processes": "2", "process_id": "1"}
    assert args.overrides == (("train.backend", "jax"),)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--process-id", "1"], "--coordinator needs a value"),
        (["--coordinator", "h:1", "--num-processes", "2", "--process-id", "x"], "--process-id needs a number"),
        (["--coordinator", "h:1", "--num-processes", "2"], "needs the number of processes and this one's index"),
        (["--coordinator", "h", "--num-processes", "2", "--process-id", "0"], "'h' is no HOST:PORT"),
        (["--coordinator", "h:1", "--num-processes", "2", "--process-id", "2"], "process 2 of 2: the index counts"),
    ],
)
def test_a_place_that_is_none_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["train", str(config), "--backend", "jax", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("duomesh train: ") and said in error and error.count("\n") == 1


def test_the_scheduler_may_say_all() -> None:
    assert Processes("auto") == Processes("auto", None, None)
    with pytest.raises(BackendError, match="process 3 of 2"):
        Processes("auto", 2, 3)
