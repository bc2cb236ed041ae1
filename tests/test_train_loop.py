"""Whole runs over a session without a framework: resume, evaluation, skipped steps, interrupts, refusals."""

from __future__ import annotations

import io
import json
import math
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_session import FakeSession, tiny_spec

from duomesh.cli import main as command_line
from duomesh.cli import train as train_command
from duomesh.core.batch import Batch
from duomesh.core.bounds import bound
from duomesh.core.checkpoint import Checkpoint, checkpoint_path, find_latest
from duomesh.core.data.sampler import Sampler
from duomesh.core.dropout import DropoutKey
from duomesh.core.errors import CheckpointError, ConfigError, DuomeshError, OutputError, TrainingError
from duomesh.core.session import StepResult
from duomesh.core.spec.model import ModelSpec
from duomesh.core.tensorfile import TensorFileWriter
from duomesh.core.training.config import RunConfig, TrainConfig
from duomesh.core.training.console import Console
from duomesh.core.training.loop import evaluate
from duomesh.core.training.metrics import Metrics, StepRow, read_rows
from duomesh.core.training.model import Model, change_spec
from duomesh.core.training.resolve import resolve
from duomesh.core.training.run import Outcome, run_training
from duomesh.core.training.schedule import learning_rate

SPEC = tiny_spec()


@dataclass
class Run:
    """What a run left behind."""

    outcome: Outcome
    session: FakeSession
    printed: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.outcome.output / "metrics.jsonl")

    def column(self, name: str, kind: str = "step") -> list[Any]:
        return [row[name] for row in self.rows if row["kind"] == kind]

    @property
    def state(self) -> list[tuple[str, str, bytes]]:
        return [(group, name, array.tobytes()) for group, name, array in self.session.optimizer_state()]


class Trainer:
    """Runs with small defaults in a folder of its own; keyword arguments are settings, `__` for the dot."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed = ""
        text = np.random.default_rng(0).integers(97, 123, 3000).astype(np.uint8).tobytes()
        (folder / "text.txt").write_bytes(text)

    def settings(self, **given: Any) -> list[tuple[str, str]]:
        defaults = {
            "model__preset": "tiny",
            "data__paths": self.folder / "text.txt",
            "data__seq_len": 16,
            "optimizer__lr": 0.01,
            "optimizer__warmup_steps": 1,
            "train__steps": 10,
            "train__global_batch_size": 8,
            "train__micro_batch_size": 4,
            "train__dtype": "float64",
            "train__output": self.folder / "run",
        }
        return [(name.replace("__", "."), str(value)) for name, value in {**defaults, **given}.items()]

    def __call__(
        self, session: FakeSession | None = None, *, toml: dict[str, dict[str, Any]] | None = None, **given: Any
    ) -> Run:
        """toml: tables of a configuration file; their settings are not given on the command line as well."""
        file = None
        overrides = self.settings(**given)
        if toml:
            file = self.folder / "run.toml"
            file.write_text(
                "\n".join(
                    f"[{section}]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in table.items())
                    for section, table in toml.items()
                )
            )
            names = {f"{section}.{name}" for section, table in toml.items() for name in table}
            explicit = {name.replace("__", ".") for name in given}
            overrides = [(name, text) for name, text in overrides if name not in names or name in explicit]
        made: list[FakeSession] = []

        def make_session(spec: ModelSpec, run: RunConfig) -> FakeSession:
            made.append(session or FakeSession(spec, compute_dtype=run.dtype, seed=run.seed))
            return made[0]

        def find_model(config: TrainConfig) -> Model:
            return Model(change_spec(SPEC, config.model))

        stream = io.StringIO()
        try:
            outcome = run_training(resolve(file, overrides), find_model, make_session, Console(stream))
        finally:
            self.printed = stream.getvalue()
        return Run(outcome, made[0], self.printed)


@pytest.fixture
def train(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def tokens_of(steps: Sequence[Sequence[Batch]]) -> list[list[list[int]]]:
    """For each step its rows of tokens, in any order."""
    return [sorted(row for batch in step for row in batch.tokens.tolist()) for step in steps]


# A whole run


def test_a_run_learns_and_records(train: Trainer) -> None:
    run = train(train__eval_every=4, train__steps=40, optimizer__lr=0.3, train__log_every=20)
    losses = run.column("loss")
    assert len(losses) == 40 and run.column("step") == list(range(1, 41))
    assert losses[-1] < losses[0] - 1  # from log 259 towards log 26
    assert run.column("step", "validation") == list(range(4, 41, 4))
    config = resolve(None, train.settings(train__steps=40, optimizer__lr=0.3)).config
    assert run.column("lr") == [learning_rate(step, 40, config.optimizer) for step in range(1, 41)]
    assert set(run.column("tokens")) == {8 * 16}
    assert run.outcome.progress.consumed_samples == 40 * 8
    assert run.outcome.progress.consumed_tokens == 40 * 8 * 16
    assert run.outcome.checkpoint == checkpoint_path(run.outcome.output / "checkpoints", 40)
    assert run.outcome.report.is_file()
    assert "step 20/40" in run.printed and "tokens/s" in run.printed and "ETA" in run.printed


def test_the_loop_feeds_what_the_sampler_says(train: Trainer) -> None:
    run = train(train__steps=30)  # 23 steps are an epoch
    stream = np.frombuffer((train.folder / "text.txt").read_bytes(), np.uint8)
    stream = np.append(stream, 257)
    sampler = Sampler(stream[: len(stream) - int(len(stream) * 0.05)], 16, seed=1234)
    want = [sampler.batches(8 * step, 8, 4) for step in range(30)]
    assert tokens_of(run.session.seen) == tokens_of(want)


# Resuming


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("stop", [1, 4, 9])
def test_resume_is_bit_equal(train: Trainer, dtype: str, stop: int) -> None:
    whole = train(train__dtype=dtype, train__output=train.folder / "whole")
    train(train__dtype=dtype, train__stop_step=stop, train__backend="torch")
    rest = train(train__dtype=dtype, train__resume="must", train__backend="jax")
    assert rest.state == whole.state
    assert rest.session.count == whole.session.count == 10
    for name in ("step", "loss", "lr", "grad_norm"):
        assert rest.column(name) == whole.column(name), name
    assert rest.outcome.progress == whole.outcome.progress
    assert rest.column("backend") == ["torch"] * stop + ["jax"] * (10 - stop)
    assert rest.column("step", "run") == [0, stop]


def test_c106_the_two_halves_are_fed_what_the_whole_is(train: Trainer) -> None:
    """Tokens, the numbers of samples, and what dropout masks are drawn for."""
    whole = train(train__steps=20, train__seed=77, train__output=train.folder / "whole").session
    first = train(train__steps=20, train__seed=77, train__stop_step=7).session
    second = train(train__steps=20, train__seed=77, train__resume="must").session
    assert tokens_of(first.seen) + tokens_of(second.seen) == tokens_of(whole.seen)
    assert first.keys + second.keys == [DropoutKey(77, step) for step in range(1, 21)]
    ids = [batch.sample_ids.tolist() for step in first.seen + second.seen for batch in step]
    assert ids == [[*range(place, place + 4)] for place in range(0, 160, 4)]


def test_c111_only_the_global_batch_defines_progress(train: Trainer) -> None:
    whole = train(train__output=train.folder / "whole", train__micro_batch_size=1)
    train(train__stop_step=5, train__micro_batch_size=1)
    rest = train(train__resume="must", train__micro_batch_size=4)
    assert rest.outcome.progress == whole.outcome.progress
    assert [len(step) for step in rest.session.seen] == [2] * 5
    assert tokens_of(rest.session.seen) == tokens_of(whole.session.seen)[5:]
    got, want = np.array(rest.column("loss")), np.array(whole.column("loss"))
    assert np.max(np.abs(got - want) / want) <= bound("loss", "float64")


def test_c113_a_schedule_changed_on_the_command_line_holds_exactly(train: Trainer) -> None:
    first = {"optimizer__schedule": "constant", "optimizer__lr": 6e-4, "optimizer__warmup_steps": 0}
    train(train__steps=20, train__stop_step=5, **first)
    new = {"optimizer__schedule": "cosine", "optimizer__min_lr": 6e-5}
    rest = train(train__steps=20, train__resume="must", **{**first, **new})
    config = resolve(None, train.settings(train__steps=20, **{**first, **new})).config.optimizer
    assert rest.column("lr") == [6e-4] * 5 + [learning_rate(step, 20, config) for step in range(6, 21)]


def test_c113_other_values_in_the_file_stop_the_run(train: Trainer) -> None:
    train(toml={"optimizer": {"lr": 6e-4}}, train__stop_step=5)
    with pytest.raises(CheckpointError, match=r"optimizer\.lr is 0\.001 in the file and 0\.0006 in the checkpoint"):
        train(toml={"optimizer": {"lr": 1e-3}}, train__resume="must")
    # as it was, it goes on
    assert train(toml={"optimizer": {"lr": 6e-4}}, train__resume="must").outcome.progress.step == 10


def test_c114_the_rate_after_a_resume_needs_no_stored_schedule(train: Trainer) -> None:
    train(train__steps=100, train__stop_step=50, optimizer__warmup_steps=10)
    rest = train(train__steps=100, train__resume="must", optimizer__warmup_steps=10, train__stop_step=51)
    config = resolve(None, train.settings(train__steps=100, optimizer__warmup_steps=10)).config.optimizer
    assert rest.column("lr")[50] == learning_rate(51, 100, config)
    # half a wave from step 10 to 100, at step 51
    assert rest.column("lr")[50] == 0.5 * 0.01 * (1 + math.cos(math.pi * (41 / 90)))
    train(train__steps=200, train__resume="must", optimizer__warmup_steps=10, train__stop_step=52)
    assert "train.steps changes from 100 to 200: the learning rate of step 52 is" in train.printed


def test_rows_after_the_resumed_step_are_dropped(train: Trainer) -> None:
    class Crashes(FakeSession):
        def train_step(self, batches: Sequence[Batch], lr: float, *, dropout: DropoutKey | None = None) -> StepResult:
            if self.calls == 7:
                raise RuntimeError("injected")
            return super().train_step(batches, lr, dropout=dropout)

    with pytest.raises(RuntimeError, match="injected"):
        train(Crashes(SPEC, seed=1234), train__checkpoint_every=5)
    assert [r["step"] for r in read_rows(train.folder / "run/metrics.jsonl") if r["kind"] == "step"][-1] == 7
    with (train.folder / "run/metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # what a kill can leave
    whole = train(train__output=train.folder / "whole")
    rest = train(train__resume="must")
    assert rest.column("step") == list(range(1, 11))
    assert rest.column("loss") == whole.column("loss")
    assert rest.state == whole.state


def test_c171_a_run_never_starts_from_scratch_beside_checkpoints(train: Trainer) -> None:
    with pytest.raises(CheckpointError, match=r"'must', but .* has no checkpoint"):
        train(train__resume="must")
    assert not (train.folder / "run").exists()
    assert train(train__resume="if_present", train__stop_step=4, train__checkpoint_every=2).rows[0]["step"] == 0
    with pytest.raises(CheckpointError, match=r"step-00000004.*train\.resume=must"):
        train(train__resume="never")
    # the newest is damaged: the one before it is used, and said
    root = train.folder / "run/checkpoints"
    (checkpoint_path(root, 4) / "manifest.json").unlink()
    (root / "step-00000006.duomesh-tmp-abc").mkdir()
    rest = train(train__resume="if_present", train__stop_step=4)
    assert "skipped step-00000004" in rest.printed and "skipped step-00000006.duomesh-tmp-abc" in rest.printed
    assert rest.column("step", "run") == [0, 2]
    # and the damaged one of the same step was replaced
    assert find_latest(root).latest == checkpoint_path(root, 4)
    for path in root.iterdir():
        (path / "manifest.json").unlink()
    for resume in ("if_present", "must", "never"):
        with pytest.raises(CheckpointError, match="only unfinished checkpoints"):
            train(train__resume=resume)


def test_a_finished_run_is_left_as_it_is(train: Trainer) -> None:
    first = train()
    again = train(train__resume="must")
    assert again.session.seen == [] and again.column("step") == first.column("step")
    assert again.outcome.checkpoint == first.outcome.checkpoint


def test_c164_a_changed_model_is_an_error_that_names_the_field(train: Trainer) -> None:
    train(train__stop_step=2)
    with pytest.raises(CheckpointError, match="hidden_size: 128, 6"):
        train(train__resume="must", model__hidden_size=128)
    # no model named: that of the checkpoint
    overrides = [(n, v) for n, v in train.settings(train__resume="must") if n != "model.preset"]
    console = Console(io.StringIO())
    outcome = run_training(resolve(None, overrides), _no_model, lambda spec, run: FakeSession(spec), console)
    assert outcome.progress.step == 10
    # nor a preset beside a changed number
    with pytest.raises(CheckpointError, match="hidden_size: 128, 6"):
        run_training(
            resolve(None, [*overrides, ("model.hidden_size", "128")]),
            lambda config: Model(change_spec({"tiny": SPEC}[str(config.model.preset)], config.model)),
            lambda spec, run: FakeSession(spec),
            console,
        )


def _no_model(config: TrainConfig) -> Model:
    raise AssertionError("the model of the checkpoint is known")


def test_no_model_is_an_error(train: Trainer) -> None:
    with pytest.raises(ConfigError, match=r"model\.preset or model\.path"):
        run_training(
            resolve(None, [o for o in train.settings() if o[0] != "model.preset"]),
            _no_model,
            lambda spec, run: FakeSession(spec),
            Console(io.StringIO()),
        )


def test_changed_text_stops_a_resume_unless_the_command_line_says_so(train: Trainer) -> None:
    text = train.folder / "text.txt"
    data = {"data": {"paths": [str(text)], "seq_len": 16}}
    train(toml=data, train__stop_step=2)
    moved = train.folder / "moved.txt"
    shutil.copy(text, moved)
    train(toml={"data": {"paths": [str(moved)], "seq_len": 16}}, train__resume="must", train__stop_step=3)
    text.write_bytes(text.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match="training text has changed"):
        train(toml=data, train__resume="must", train__stop_step=4)
    run = train(toml=data, train__resume="must", data__paths=text)
    assert "training text is not that of the checkpoint" in run.printed


def test_weights_can_be_the_start(train: Trainer) -> None:
    source = FakeSession(SPEC, seed=9)
    session = FakeSession(SPEC, seed=1)
    config = resolve(None, train.settings(optimizer__lr=1e-300, optimizer__weight_decay=0))
    model = Model(SPEC, source.params)
    run_training(config, lambda c: model, lambda spec, run: session, Console(io.StringIO()))
    assert all(session.master[n].tobytes() == source.master[n].tobytes() for n in source.master)


# Evaluation


class Weighted(Sampler):
    """Samples whose rows have different numbers of targets."""

    def batch(self, sample_ids: Any, *, rows: int | None = None) -> Batch:
        batch = super().batch(sample_ids, rows=rows)
        labels = batch.labels.copy()
        for row, i in enumerate(sample_ids):
            labels[row, 3 + 5 * (int(i) % 3) :] = -100
        return Batch(batch.tokens, labels)


@pytest.mark.parametrize("micro", [1, 2, 5, 8, 100])
def test_c087_validation_is_the_mean_over_all_targets(micro: int) -> None:
    """The mean of batch means would differ: rows have 3, 8 or 13 targets, and the last batch is ragged."""
    session = FakeSession(SPEC, seed=2)
    session.master["head.weight"] *= 100
    session.master["embed.weight"] *= 100
    samples = Weighted(np.random.default_rng(1).integers(0, 259, 16 * 13 + 1), 16, shuffle=False)
    row = evaluate(session, samples, None, micro)
    probs = np.exp(session.master["embed.weight"] @ session.master["head.weight"].T)
    losses = []
    for i in range(13):
        batch = samples.batch(np.array([i]))
        for token, label in zip(batch.tokens[0], batch.labels[0], strict=True):
            if label >= 0:
                losses.append(-math.log(probs[token, label] / math.fsum(probs[token])))
    assert len(losses) == sum(3 + 5 * (i % 3) for i in range(13))
    want = math.fsum(losses) / len(losses)
    assert abs(row.loss - want) / want <= bound("loss", "float64")
    assert (row.samples, row.tokens) == (13, 13 * 16)


# Skipped steps


@pytest.mark.parametrize("name", ["embed.weight", "layers.0.mlp.up.weight"])
def test_c119_a_skipped_step_changes_nothing_and_is_counted(train: Trainer, name: str) -> None:
    clean = train(train__stop_step=3, train__output=train.folder / "clean")
    session = FakeSession(SPEC, seed=1234, nan_at=(4,), nan_in=name)
    run = train(session, train__stop_step=4)
    assert run.state == clean.state and session.count == 3
    assert run.outcome.progress.num_skipped == 1 and run.outcome.progress.step == 4
    assert run.column("is_skipped") == [False] * 3 + [True]
    assert run.rows[4]["grad_norm"] is None  # JSON has no NaN
    assert "step 4: skipped" in run.printed
    state = Checkpoint(run.outcome.checkpoint).training
    assert (state.step, state.optimizer_step_count, state.num_skipped, state.consumed_samples) == (4, 3, 1, 32)
    # the schedule and the data have moved on
    rest = train(train__resume="must")
    config = resolve(None, train.settings()).config.optimizer
    assert rest.column("lr") == [learning_rate(step, 10, config) for step in range(1, 11)]
    assert rest.outcome.progress.num_skipped == 1 and rest.session.count == 9


def test_c119_skips_in_a_row_stop_the_run_and_name_the_culprit(train: Trainer) -> None:
    session = FakeSession(SPEC, seed=1234, nan_at=(2, 4, 5, 6), nan_in="layers.0.mlp.up.weight")
    with pytest.raises(TrainingError) as caught:
        train(session, train__max_skipped=3, train__checkpoint_every=3)
    message = str(caught.value)
    ids = Sampler(np.zeros(2852), 16, seed=1234).sample_ids(5 * 8, 8).tolist()
    assert "3 steps in a row were skipped, up to step 6" in message
    assert "the gradient of layers.0.mlp.up.weight" in message
    assert f"samples {', '.join(map(str, ids))})" in message
    # what was saved before is intact, and the report of the failed run is there
    assert find_latest(train.folder / "run/checkpoints").latest == checkpoint_path(train.folder / "run/checkpoints", 3)
    assert (train.folder / "run/report.html").is_file()


def test_c119_samples_with_a_bad_loss_are_singled_out(train: Trainer) -> None:
    run = train(train__steps=1, train__output=train.folder / "clean")
    micro = run.session.seen[0][1]
    ids = Sampler(np.zeros(2852), 16, seed=1234).sample_ids(0, 8).tolist()
    # only the second micro-batch has this token
    stream = bytearray((train.folder / "text.txt").read_bytes())
    stream[ids[5] * 16 + 3] = 1
    (train.folder / "text.txt").write_bytes(bytes(stream))
    assert micro.tokens.shape == (4, 16)
    with pytest.raises(TrainingError, match=rf"samples {', '.join(map(str, ids[4:]))}\)"):
        train(FakeSession(SPEC, nan_tokens=(1,)), train__max_skipped=1)


# Interrupts and failures


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_the_rest_is_bit_equal(train: Trainer, number: int) -> None:
    class Interrupted(FakeSession):
        def train_step(self, batches: Sequence[Batch], lr: float, *, dropout: DropoutKey | None = None) -> StepResult:
            if self.calls == 3:
                signal.raise_signal(number)  # in the middle of step 4, which is finished first
            return super().train_step(batches, lr, dropout=dropout)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    whole = train(train__output=train.folder / "whole")
    run = train(Interrupted(SPEC, seed=1234))
    assert run.outcome.signal == number
    assert run.outcome.progress.step == 4
    assert run.outcome.checkpoint == checkpoint_path(run.outcome.output / "checkpoints", 4)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert train(train__resume="must").state == whole.state


def test_a_second_interrupt_acts_at_once(train: Trainer) -> None:
    class Impatient(FakeSession):
        def train_step(self, batches: Sequence[Batch], lr: float, *, dropout: DropoutKey | None = None) -> StepResult:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            return super().train_step(batches, lr, dropout=dropout)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background has none
    try:
        with pytest.raises(KeyboardInterrupt):
            train(Impatient(SPEC))
    finally:
        signal.signal(signal.SIGINT, before)
    assert find_latest(train.folder / "run/checkpoints").latest is None


def test_c117_a_save_that_fails_stops_the_run_and_loses_nothing(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(train__output=train.folder / "whole")
    add, calls = TensorFileWriter.add, []

    def full(self: TensorFileWriter, name: str, array: Any) -> None:
        calls.append(name)
        if len(calls) > 40:  # within the second save
            raise OSError(28, "No space left on device")
        add(self, name, array)

    def no_report(*_: Any) -> None:
        raise OutputError("nor has the report any space")

    with monkeypatch.context() as patch:
        patch.setattr(TensorFileWriter, "add", full)
        patch.setattr("duomesh.core.training.run.write_report", no_report)
        with pytest.raises(OutputError, match=r"step-00000006.* bytes, and .* are free"):
            train(train__checkpoint_every=3)
    assert [p.name for p in (train.folder / "run/checkpoints").iterdir()] == ["step-00000003"]
    rest = train(train__checkpoint_every=3, train__resume="must")
    assert rest.state == whole.state
    assert [p.name for p in sorted((train.folder / "run/checkpoints").iterdir())] == ["step-00000009", "step-00000010"]


@pytest.mark.parametrize(("keep", "left"), [(1, [10]), (3, [6, 8, 10]), (0, [2, 4, 6, 8, 10])])
def test_the_newest_checkpoints_are_kept(train: Trainer, keep: int, left: list[int]) -> None:
    run = train(train__checkpoint_every=2, train__keep=keep)
    root = run.outcome.output / "checkpoints"
    assert sorted(root.iterdir()) == [checkpoint_path(root, step) for step in left]


def test_an_unwritable_output_is_named(train: Trainer) -> None:
    (train.folder / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*file/run"):
        train(train__output=train.folder / "file" / "run")


def test_metrics_write_null_for_what_json_lacks(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl", 0)
    row = StepRow(
        step=1,
        time=0.0,
        loss=math.nan,
        lr=0.1,
        grad_norm=math.inf,
        tokens=3,
        tokens_per_s=1.0,
        step_s=3.0,
        backend="torch",
    )
    metrics.write(row)
    (read,) = (json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "m.jsonl").read_text().splitlines())
    assert read["loss"] is None and read["grad_norm"] is None and read["lr"] == 0.1


# The command


@pytest.fixture
def command(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `duomesh train` with fake sessions."""

    def run(*words: str, kind: type[FakeSession] = FakeSession) -> int:
        monkeypatch.setattr(
            train_command,
            "new_session",
            lambda spec, **options: kind(spec, compute_dtype=options["dtype"]),
        )
        file = train.folder / "empty.toml"
        file.write_text("")
        settings = {**dict(train.settings()), "model.preset": "tiny-llama3"}
        return command_line.main(["train", str(file), *(f"{n}={v}" for n, v in settings.items()), *words])

    return run


def test_the_command_trains_and_says_where_things_are(
    command: Any, train: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("train.stop_step=3") == 0
    printed = capsys.readouterr().out
    assert "3 of 10 steps" in printed
    assert f"report      {train.folder / 'run' / 'report.html'}" in printed
    # weights of a finished run start another one
    checkpoint = str(checkpoint_path(train.folder / "run/checkpoints", 3))
    assert command(f"model.path={checkpoint}", "model.preset=none", f"train.output={train.folder / 'b'}") == 0


def test_a_backend_that_is_named_nowhere_is_that_of_the_checkpoint(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so is what is started for it: torch's ranks are not, for a run of JAX."""
    made: list[tuple[str, str]] = []
    assert command("train.stop_step=3", "train.backend=jax", "train.plan=dp=2") == 0
    make = train_command.new_session
    monkeypatch.setattr(
        train_command,
        "_make_session",
        lambda spec, run: made.append((run.backend, run.plan)) or make(spec, dtype=run.dtype),
    )
    monkeypatch.setattr(train_command, "simulate_devices", lambda count: made.append(("devices", str(count))))
    assert command("train.resume=must", "train.plan=dp=2,zero=1") == 0
    assert made == [("devices", "2"), ("jax", "dp=2,zero=1")]
    assert "resumed after step 3 on jax dp=2,zero=1" in capsys.readouterr().out


def test_the_command_exits_with_130_after_an_interrupt(command: Any, train: Trainer) -> None:
    class Interrupted(FakeSession):
        def train_step(self, batches: Sequence[Batch], lr: float, *, dropout: DropoutKey | None = None) -> StepResult:
            signal.raise_signal(signal.SIGINT)
            return super().train_step(batches, lr, dropout=dropout)

    assert command(kind=Interrupted) == 130
    assert find_latest(train.folder / "run/checkpoints").latest is not None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["optimzer.lr=1"], "optimizer.lr"),
        (["data.paths=/absent"], "/absent"),
        (["model.preset=tiny-lama3"], "tiny-llama3"),
        (["model.vocab_size=200"], "model.vocab_size"),
        (["train.output=/proc/x"], "/proc/x"),
        (["train.resume=must"], "has no checkpoint"),
        (["data.tokenizer=/absent"], "/absent"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    command: Any, train: Trainer, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert command(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("duomesh train: ") and error.count("\n") == 1 and text in error
    assert not (train.folder / "run").exists()


def test_a_model_with_its_own_tokenizer_is_not_silently_fed_bytes(command: Any, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    args = train_command.parse(["x.toml", f"--model.path={folder}", "--data.paths=x"])
    resolved = resolve(None, args.overrides)
    with pytest.raises(DuomeshError, match=r"data\.tokenizer="):
        train_command._check_tokenizer(resolved)
    train_command._check_tokenizer(resolve(None, [*args.overrides, ("data.tokenizer", "bytes")]))
