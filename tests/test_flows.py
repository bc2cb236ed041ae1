"""C122: a rank that fails while it checks settings, reads data, saves or loads ends `duomesh train` on all ranks.

Every case is the real command with real ranks; `faulty_command.py` makes one of them fail. The last words name the rank
and what it was doing. Also what is left of a run whose ranks are gone, and ranks that do not hold what they should.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_session import FakeSession, tiny_spec
from markupsafe import escape
from plan_cases import CONFIG, LR, plan_batches, plan_model
from rank_pool import RankPool
from sharding_cases import params_of
from test_checkpoint import ThreadPeers, on_ranks

import duomesh as dm
from duomesh.backends.torch.session import TorchSession
from duomesh.cli import main as command_line
from duomesh.core.errors import BackendError, ConfigError
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.spec.model import ModelSpec
from duomesh.core.training.console import Console
from duomesh.core.training.model import Model
from duomesh.core.training.resolve import resolve
from duomesh.core.training.run import run_training

SCRIPT = Path(__file__).resolve().parent / "faulty_command.py"
TENSOR = r"[\w.]+"
# what the rank was doing in each flow
DOING = {
    "settings": "checking the settings",
    "text": "reading the text",
    "data": "step 2, data",
    "save": rf"step 2, saving master {TENSOR}",
    "load": rf"loading master {TENSOR}",
}
SAID = {
    "raise": 'rank {rank}, during "{doing}": ValueError: boom',
    "user error": r'rank {rank}, during "{doing}": this cannot be done\. Do something else\.',
    "kill": r'rank {rank} was killed by SIGKILL during "{doing}"\.',
    "hang": r'rank {rank} hangs during "{doing}": it has not got on for \d+ s \(rank',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_bytes(np.random.default_rng(0).integers(97, 123, 3000).astype(np.uint8).tobytes())
    (tmp_path / "run.toml").write_text(
        f"""
        [model]
        preset = "tiny-llama3"
        [data]
        paths = ["{tmp_path}/text.txt"]
        seq_len = 16
        [train]
        steps = 4
        global_batch_size = 4
        micro_batch_size = 2
        device = "cpu"
        checkpoint_every = 2
        output = "{tmp_path}/run"
        """
    )
    return tmp_path


def train(
    folder: Path, fault: tuple[object, ...], *words: str, torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    """`duomesh train` on two ranks or more; every process has ended, and that within a minute."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if torchrun else []
    command = [sys.executable, *start, str(SCRIPT), *map(str, fault), "train", str(folder / "run.toml"), *words]
    command += ["train.stall_s=8"]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert time.monotonic() - begin < 60
    return done


QUICK = [("settings", "raise", 2, 1), ("data", "kill", 2, 0), ("save", "hang", 2, 1), ("load", "user error", 2, 0)]
CASES = [(flow, how, 2, 1) for flow in DOING for how in SAID]
CASES += [(flow, how, world, rank) for flow in DOING for how, world, rank in (("kill", 2, 0), ("raise", 4, 2))]


@pytest.mark.parametrize(
    ("flow", "how", "world", "rank"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in QUICK)],
)
def test_c122_a_failing_rank_ends_the_command(folder: Path, flow: str, how: str, world: int, rank: int) -> None:
    words = ["--plan", {2: "tp=2", 4: "tp=2,dp=2,zero=1"}[world]]  # with something to save on every rank
    if flow == "load":
        assert command_line.main(["train", str(folder / "run.toml"), "train.stop_step=1"]) == 0
        words.append("train.resume=must")
    done = train(folder, (flow, how, rank), *words)
    assert done.returncode == 2, done.stderr
    said = SAID[how].format(rank=rank, doing=DOING[flow])
    assert re.match(f"duomesh train: {said}", done.stderr.splitlines()[-1]), done.stderr
    assert ("in fail" in done.stderr) == (how in ("raise", "hang"))  # the stack of the rank that failed
    if flow in ("data", "save"):  # the run has begun, and has a report whoever has failed
        sentence = done.stderr.splitlines()[-1].removeprefix("duomesh train: ")
        report = (folder / "run/report.html").read_text()
        assert "The run has failed." in report and str(escape(sentence)) in report


def test_a_run_without_a_fault_goes_through(folder: Path) -> None:
    """What makes ranks fail in the other tests does not do it by itself."""
    done = train(folder, ("data", "raise", 7), "--plan", "tp=2", "train.check_invariants_every=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 of 4 steps" in done.stdout


# A configuration that is wrong on one rank only


REFUSED = {
    "wrong settings": r"optimizer\.eps is -1\.0; it must be positive",
    "other settings": r"rank 1 has another setting than rank 0: optimizer\.lr is 0\.5 there",
    "no plan": "1 ranks are needed, and 2 were started",
}


@pytest.mark.parametrize(
    "fault", ["wrong settings", *(pytest.param(f, marks=pytest.mark.slow) for f in ("other settings", "no plan"))]
)
def test_c122_settings_that_are_wrong_on_one_rank_are_refused_on_all(folder: Path, fault: str) -> None:
    said = REFUSED[fault]
    done = train(folder, (fault, "", 1), "--plan", "tp=2", torchrun=True)
    assert done.returncode == 1
    assert re.search(f"^duomesh train: {said}", done.stderr, re.MULTILINE), done.stderr
    root_cause = done.stderr.split("Root Cause")[1]
    assert re.search(said, root_cause)
    assert fault == "other settings" or "rank      : 1 " in root_cause
    assert not (folder / "run").exists()


def test_c122_all_ranks_refuse_different_settings(tmp_path: Path) -> None:
    def run(peers: ThreadPeers) -> Any:
        rates = [("optimizer.lr", "0.1" if peers.rank == 1 else "0.2")]
        spec = tiny_spec(num_layers=1)
        settings = {"model.preset": "tiny", "data.paths": "absent", "train.output": str(tmp_path / "run")}
        return run_training(
            resolve(None, [*settings.items(), *rates]),
            lambda config: Model(spec),
            lambda made, config: FakeSession(made),
            Console(io.StringIO()),
            peers,
        )

    want = "rank 1 has another setting than rank 0: optimizer.lr is 0.1 there, and 0.2 on rank 0."
    assert [(type(e), str(e)) for e in on_ranks(3, run)] == [(ConfigError, f"{want} Give every rank the same.")] * 3


def test_c122_all_ranks_refuse_different_models(tmp_path: Path) -> None:
    def run(peers: ThreadPeers) -> Any:
        settings = {"model.preset": "tiny", "data.paths": "absent", "train.output": str(tmp_path / "run")}
        return run_training(
            resolve(None, list(settings.items())),
            lambda config: Model(tiny_spec(num_layers=2 if peers.rank == 2 else 1)),
            lambda made, config: FakeSession(made),
            Console(io.StringIO()),
            peers,
        )

    errors = on_ranks(3, run)
    assert all(type(error) is ConfigError and "rank 2 has another model than rank 0" in str(error) for error in errors)


def test_a_run_that_has_not_begun_leaves_the_report_of_another(folder: Path) -> None:
    assert command_line.main(["train", str(folder / "run.toml"), "train.stop_step=1"]) == 0
    before = (folder / "run/report.html").read_bytes()
    done = train(folder, ("text", "raise", 1), "--plan", "tp=2", "train.resume=must")
    assert done.returncode == 2 and "boom" in done.stderr
    assert (folder / "run/report.html").read_bytes() == before


# Ranks that do not hold what they should


def test_a_weight_that_one_rank_has_lost_stops_the_run(folder: Path) -> None:
    """It is found after the step in which it changed, and before it is saved."""
    name = "layers.0.attention_norm.weight"
    done = train(folder, ("corrupt", name, 1), "--plan", "tp=2", "train.check_invariants_every=1")
    want = (
        rf'during "step 2, comparing ranks": the weight {re.escape(name)} should be equal on the ranks of tp, and '
        r"rank 1 has other bits than rank 0\."
    )
    assert done.returncode == 2 and re.search(want, done.stderr.splitlines()[-1]), done.stderr
    assert not list((folder / "run/checkpoints").glob("*"))


def hold(rank: int, world: int, plan: str, group: str, name: str, odd: int) -> str:
    """Two updates, a change on one rank, and what is found."""
    spec: ModelSpec = plan_model()
    program = build_program(spec)
    session = TorchSession(program, plan=Plan.parse(plan), device="cpu")
    session.load_params((n, array.astype(np.float32)) for n, array in params_of(program).items())
    session.init_optimizer(CONFIG)
    batches = plan_batches(1)
    for _ in range(2):
        session.train_step(batches, LR)
    session.check_invariants(batches[0])
    if rank == odd:
        spoil(session, group, name)
    try:
        session.check_invariants(batches[0])
    except BackendError as error:
        return str(error)
    return ""


def spoil(session: TorchSession, group: str, name: str) -> None:
    """Changes one element of what this rank holds."""
    if group == "tables":
        next(session.model.tables.buffers())[1] += 1 << 12  # of the bits of a float
        return
    state = session._state.optimizer.inner.state()
    found = {
        "params": lambda: [held.tensor for held in session._state.held() if (held.group, held.name) == (group, name)],
        "exp_avg": lambda: [tensor for made, _, tensor in state if made == group],
    }
    tensors = found[group]()
    assert tensors
    for tensor in tensors:
        tensor.data.view(-1)[0] += 1


@pytest.mark.parametrize(
    ("plan", "group", "name", "odd", "said"),
    [
        ("tp=2", "params", "layers.0.attention_norm.weight", 1, "weight {name} should be equal on the ranks of tp"),
        ("dp=2,zero=1", "params", "layers.1.mlp.down.weight", 0, "weight {name} should be equal on the ranks of dp"),
        ("dp=4", "params", "embed.weight", 0, "ranks of dp, and rank 0 has other bits than ranks 1, 2, 3"),
        ("tp=2,dp=2,zero=3", "params", "head.norm.weight", 1, "weight {name} should be equal on the ranks of tp"),
        ("dp=2", "exp_avg", "", 1, "exp_avg embed.weight should be equal on the ranks of dp"),
        ("tp=2,sequence_parallel", "tables", "", 1, "value tables.rope0.cos should be equal on the ranks of tp"),
    ],
)  # fmt: skip
def test_what_ranks_hold_alike_is_compared(
    ranks: RankPool, plan: str, group: str, name: str, odd: int, said: str
) -> None:
    world = Plan.parse(plan).world_size
    found = ranks.run(world, hold, plan, group, name, odd)
    assert len(set(found)) == 1 and said.format(name=name) in found[0], found


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_on_one_device_there_is_nothing_to_compare(backend: str) -> None:
    session = dm.new_session(tiny_spec(), backend=backend, device="cpu")
    session.check_invariants(plan_batches(1)[0])
