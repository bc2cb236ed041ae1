"""Validation: how much is evaluated, and C087: without a single target it is finite, says so, and ends no run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_train_loop import SPEC, Trainer

import duomesh as dm
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.data.sampler import Sampler
from duomesh.core.errors import DataError, DuomeshWarning
from duomesh.core.init import initial_params
from duomesh.core.training import run as run_module
from duomesh.core.training.loop import evaluate


class NoTargets(Sampler):
    """Samples without a single target."""

    def batch(self, sample_ids: Any, *, rows: int | None = None) -> Batch:
        batch = super().batch(sample_ids, rows=rows)
        return Batch(batch.tokens, np.full_like(batch.labels, IGNORE))


@pytest.mark.parametrize(("num_batches", "samples"), [(1, 4), (2, 8), (100, 9), (-1, 9)])
def test_c170_the_amount_evaluated_is_as_asked_and_printed(tmp_path: Path, num_batches: int, samples: int) -> None:
    train = Trainer(tmp_path)
    # 9 validation samples, global batches of 4
    run = train(train__eval_batches=num_batches, train__steps=2, train__global_batch_size=4, train__micro_batch_size=2)
    assert run.column("samples", "validation") == [samples]
    assert f"over {samples} samples" in run.printed


@pytest.mark.parametrize("num_batches", [1, -1])
def test_c170_plan_and_micro_batch_do_not_change_what_is_evaluated(tmp_path: Path, num_batches: int) -> None:
    """The last pass of a plan may be filled up; what fills it counts for nothing."""
    train, rows = Trainer(tmp_path), []
    for plan, micro in (("", 6), ("", 1), ("dp=2", 3), ("dp=3", 2), ("dp=6,zero=1", 1)):
        run = train(
            train__plan=plan,
            train__micro_batch_size=micro,
            train__global_batch_size=6,
            train__eval_batches=num_batches,
            train__steps=1,
            optimizer__lr=1e-300,
            data__validation_fraction=0.1,
            train__output=train.folder / f"{plan}-{micro}",
        )
        rows += [row for row in run.rows if row["kind"] == "validation"]
    assert len(rows) == 5 and {(row["samples"], row["targets"]) for row in rows} == {
        (6, 6 * 16) if num_batches == 1 else (18, 18 * 16)
    }
    for row in rows[1:]:
        assert abs(row["loss"] - rows[0]["loss"]) <= bound("loss", "float64") * rows[0]["loss"]


def test_c170_zero_means_no_evaluation_and_needs_no_data(tmp_path: Path) -> None:
    train = Trainer(tmp_path)
    run = train(train__eval_batches=0, train__eval_every=1, data__validation_fraction=0)
    assert run.column("loss", "validation") == []


def test_c139_validation_that_is_too_small(tmp_path: Path) -> None:
    train = Trainer(tmp_path)
    run = train(data__validation_fraction=0.005, train__steps=2)
    assert "no evaluation: validation has 15 tokens, but one sample of data.seq_len=16 needs 17" in run.printed
    assert run.column("loss", "validation") == []
    with pytest.raises(DataError, match=r"15 tokens.*needs 17, and train\.eval_every asks"):
        train(data__validation_fraction=0.005, train__eval_every=1, train__output=train.folder / "b")
    with pytest.raises(DataError, match=r"3001 tokens.*seq_len=9999 needs 10000"):
        train(data__validation_fraction=0, data__seq_len=9999, train__output=train.folder / "c")


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_c087_validation_without_targets_is_finite_and_says_so(backend: str) -> None:
    session = dm.new_session(SPEC, backend=backend, device="cpu")
    session.load_params(initial_params(session.program, 0))
    with pytest.warns(DuomeshWarning, match="validation after step 7 has no targets: no token of its 3 samples counts"):
        row = evaluate(session, NoTargets(np.arange(50), 16, shuffle=False), None, 2, step=7)
    assert (row.loss, row.targets, row.samples) == (0.0, 0.0, 3)


def test_c087_training_goes_on_after_a_validation_without_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Trainer(tmp_path)
    clean = train(train__output=train.folder / "clean")
    assert all(targets == 9 * 16 for targets in clean.column("targets", "validation"))
    empty = NoTargets(np.arange(50), 16, shuffle=False)
    monkeypatch.setattr(run_module, "_validation", lambda *_: empty)
    with pytest.warns(DuomeshWarning, match="has no targets"):
        run = train(train__eval_every=4)
    assert run.state == clean.state
    assert run.column("loss", "validation") == run.column("targets", "validation") == [0.0] * 3
    assert "step 4: no targets in 3 validation samples" in run.printed and "validation loss" not in run.printed
    # zero is not the best loss there was
    report = run.outcome.report.read_text()
    assert "validation loss" in clean.outcome.report.read_text() and "validation loss" not in report
