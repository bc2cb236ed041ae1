"""One run that moves between backends and meshes through its output folder, as the command `duomesh train` makes it.

Each part is the real command: torch's ranks are started by it, JAX runs on simulated devices. The model has dropout,
so that masks, too, must not depend on the place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from duomesh.cli import train as train_command
from duomesh.cli.main import main
from duomesh.core.bounds import bound
from duomesh.core.checkpoint import Checkpoint, checkpoint_path
from duomesh.core.session import Session

STEPS = 90
State = list[tuple[str, str, bytes]]


class Part(NamedTuple):
    """Up to which step a place trains; place as the report names it."""

    backend: str
    plan: str
    stop: int

    @property
    def place(self) -> str:
        return f"{self.backend} {self.plan}".rstrip()


TORCH_JAX_ONE = (Part("torch", "tp=2,dp=2,zero=1", 30), Part("jax", "tp=4,dp=2", 60), Part("torch", "", STEPS))
# as `make demo` moves, and back
AS_THE_DEMO = (Part("torch", "tp=2", 30), Part("jax", "tp=2,dp=2", 60), Part("torch", "", STEPS))
JAX_ALONE = (Part("jax", "", 30), Part("jax", "tp=2,dp=2,zero=3", 60), Part("torch", "", STEPS))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some tens of kilobytes with something to learn: sums, written out."""
    folder = tmp_path_factory.mktemp("moving")
    lines = [f"{a} plus {b} is {a + b}, and {b} times {a} is {a * b}.\n" for a in range(30) for b in range(20)]
    (folder / "sums.txt").write_text("".join(lines))
    (folder / "run.toml").write_text(
        f"""
        [model]
        preset = "tiny-llama3"
        dropout = 0.1
        [data]
        paths = ["{folder}/sums.txt"]
        seq_len = 32
        [optimizer]
        lr = 1e-3
        warmup_steps = 5
        [train]
        steps = {STEPS}
        global_batch_size = 8
        micro_batch_size = 2
        eval_every = 30
        eval_batches = 2
        keep = 0
        device = "cpu"
        """
    )
    return folder / "run.toml"


def rows(output: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


@pytest.fixture(scope="module")
def whole(config: Path) -> Callable[[str], Path]:
    """The output of an uninterrupted run on one device by its dtype."""
    made: dict[str, Path] = {}

    def run(dtype: str) -> Path:
        if dtype not in made:
            output = config.parent / f"whole-{dtype}"
            assert main(["train", str(config), f"train.dtype={dtype}", f"train.output={output}"]) == 0
            made[dtype] = output
        return made[dtype]

    return run


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[State]:
    """What sessions of this process hold right after they have loaded a checkpoint."""
    found: list[State] = []
    make = train_command.new_session

    def made(*arguments: Any, **options: Any) -> Session:
        session = make(*arguments, **options)
        load = session.load_optimizer_state

        def loading(*state: Any) -> None:
            load(*state)
            found.append([(group, name, array.tobytes()) for group, name, array in session.optimizer_state()])

        session.load_optimizer_state = loading  # type: ignore[method-assign]
        return session

    monkeypatch.setattr(train_command, "new_session", made)
    return found


def saved(output: Path, step: int) -> State:
    with Checkpoint(checkpoint_path(output / "checkpoints", step)) as checkpoint:
        return [(group, name, array.tobytes()) for group, name, array in checkpoint.optimizer_state()]


@pytest.mark.parametrize(
    ("parts", "dtype"),
    [
        (TORCH_JAX_ONE, "float64"),
        pytest.param(TORCH_JAX_ONE, "float32", marks=pytest.mark.slow),
        pytest.param(AS_THE_DEMO, "float32", marks=pytest.mark.slow),
        pytest.param(JAX_ALONE, "float64", marks=pytest.mark.slow),
    ],
)
def test_a_moving_run_is_the_uninterrupted_one(
    config: Path,
    whole: Callable[[str], Path],
    loaded: list[State],
    tmp_path: Path,
    parts: tuple[Part, ...],
    dtype: str,
) -> None:
    for part in parts:
        words = ["--backend", part.backend, "--plan", part.plan, "--stop-step", str(part.stop)]
        settings = [f"train.dtype={dtype}", f"train.output={tmp_path}", "train.resume=if_present"]
        assert main(["train", str(config), *settings, *words]) == 0
    assert loaded == [saved(tmp_path, part.stop) for part in parts[:-1]]

    for kind, column in (("step", "loss"), ("step", "grad_norm"), ("validation", "loss")):
        want, got = rows(whole(dtype), kind), rows(tmp_path, kind)
        assert [row["step"] for row in got] == [row["step"] for row in want]
        assert [row["lr"] for row in got if "lr" in row] == [row["lr"] for row in want if "lr" in row]
        for a, b in zip(want, got, strict=True):
            assert abs(a[column] - b[column]) <= bound("loss_curve", dtype) * abs(a[column]), (column, a["step"])
    losses = np.array([row["loss"] for row in rows(tmp_path, "step")])
    assert len(losses) == STEPS and losses[-1] < 0.9 * losses[0]
    assert {row["samples"] for row in rows(tmp_path, "validation")} == {16}
    _check_report((tmp_path / "report.html").read_text(), parts)


def _check_report(html: str, parts: tuple[Part, ...]) -> None:
    """One curve, with its places named in order."""
    assert " → ".join(part.place for part in parts) in html
    loss = html.split("<svg", 2)[1]
    assert re.findall(r'class="region"[^>]*>([^<]*)<', loss) == [part.place for part in parts]
    assert len(re.findall('class="switch"', loss)) == len(parts) - 1
    curves = re.findall(r'class="line train" d="([^"]*)"', loss)
    assert [curve.count("M") for curve in curves] == [1]
