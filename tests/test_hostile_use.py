"""What a hostile but honest user does: surroundings, half-loaded sessions, outputs in odd places, idle options."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import duomesh as dm
from duomesh.cli.main import main
from duomesh.core.errors import BackendError, DataError, DuomeshWarning, OutputError, SpecError
from duomesh.core.publish import publish_directory, publish_file
from duomesh.core.training.run import LOCK
from duomesh.sides import verify

BACKENDS = ("torch", "jax")
IDS = np.arange(12, dtype=np.int32).reshape(2, 6)
BATCH = dm.Batch(IDS, IDS)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    dm.build("tiny-llama3", backend="torch", device="cpu").export_hf(folder)
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_session_without_weights_refuses_to_compute(backend: str) -> None:
    """Memory that was never written must not pass for a model, nor a stream of weights that stopped half-way."""
    spec = dm.spec.preset("tiny-qwen2")
    session = dm.new_session(spec, backend=backend, device="cpu")
    params = list(dm.open_model(spec).params())
    for attempt in range(2):
        for use in (
            lambda: session.logits(IDS),
            lambda: list(session.params()),
            lambda: session.loss_and_grads([BATCH]),
            lambda: session.eval_loss(BATCH),
            lambda: session.trace(BATCH, grads=False),
            lambda: session.init_optimizer(dm.AdamW()),
        ):
            with pytest.raises(BackendError, match="no parameters yet"):
                use()
        if attempt == 0:
            with pytest.raises(BackendError, match="are missing"):
                session.load_params(params[:3])
    session.load_params(params)
    assert session.logits(IDS).shape == (2, 6, spec.vocab_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_learning_rate_that_would_destroy_the_weights_is_refused(backend: str) -> None:
    model = dm.build("tiny-qwen2", backend=backend, device="cpu")
    model.session.init_optimizer(dm.AdamW())
    for lr in (float("nan"), float("inf"), -1e-3):
        with pytest.raises(BackendError, match="learning rate"):
            model.session.train_step([BATCH], lr)


def test_the_caller_s_torch_state_changes_nothing() -> None:
    """no_grad, inference mode, autocast, TF32 switches, default dtype and device are the caller's, not the run's."""
    import torch

    model = dm.build("tiny-qwen2", backend="torch", device="cpu")
    want_loss, want = model.loss_and_grads(BATCH)

    def same() -> bool:
        loss, grads = model.loss_and_grads(BATCH)
        return loss == want_loss and all(np.array_equal(grads[n], g) for n, g in want.items())

    with torch.no_grad():
        assert same()
    with torch.inference_mode():
        assert same()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same()
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    try:
        assert same()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": IDS.tolist()}, "tokens are a list"),
        ({"tokens": IDS.astype(np.float32)}, "tokens are float32; they must be integers"),
        ({"tokens": IDS[0]}, r"shape \(6,\)"),
        ({"tokens": IDS[:0]}, r"shape \(0, 6\)"),
        ({"positions": IDS.astype(np.int64) + 2**33}, "must fit in 32 bits"),
        ({"segment_ids": IDS + 0.5}, "segment_ids are float64"),
    ],
)
def test_batches_that_would_be_cast_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        dm.Batch(**{"tokens": IDS, "labels": IDS, **change})  # type: ignore[arg-type]


def test_the_mask_of_what_is_no_target_does_not_count() -> None:
    labels = IDS.copy()
    labels[0] = dm.IGNORE
    mask = np.where(labels == dm.IGNORE, np.nan, 0.5).astype(np.float32)
    assert np.array_equal(dm.Batch(IDS, labels, mask).weights, [[0] * 6, [0.5] * 6])


def test_a_model_that_makes_nan_fails_although_both_sides_make_it() -> None:
    source = dm.open_model("tiny-qwen2")

    def spoiled() -> Iterator[tuple[str, np.ndarray]]:
        for name, array in source.params():
            yield name, np.full_like(array, np.nan) if name == "layers.0.mlp.up.weight" else array

    report = verify(replace(source, tensors=spoiled), ["torch", "jax"], seq=8)
    first = report.comparisons[0].first_difference
    assert not report.passed and first is not None and first.name == "layers.0.mlp.up"
    assert json.loads(report.to_json())["pairs"][0]["first_difference"]["error"] == "inf"


def test_a_preset_agrees_with_itself_as_another_model() -> None:
    assert verify("tiny-qwen2", ["torch", "torch:model=tiny-qwen2"], seq=8, seed=3).passed


def test_c027_every_command_announces_a_default(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rotary base that the file does not give is taken from the family, and said so, by whoever opens it."""
    config = json.loads((exported / "config.json").read_text())
    for field in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(field, None)
    (exported / "config.json").write_text(json.dumps(config))
    text, run = tmp_path / "a.txt", tmp_path / "run"
    text.write_text("some words " * 200)
    settings = [f"data.paths={text}", f"model.path={exported}", "train.steps=1", f"train.output={run}"]
    (tmp_path / "c.toml").write_text("")
    commands = [
        ["explain", str(exported)],
        ["generate", str(exported), "--prompt", "a", "--max-new-tokens", "1"],
        ["verify", str(exported), "torch", "torch", "--seq", "4"],
        ["train", str(tmp_path / "c.toml"), *settings, "data.seq_len=16", "train.eval_batches=0"],
        ["convert", str(exported), str(tmp_path / "again")],
    ]
    for command in commands:
        assert main(command) == 0, command
        assert "rope_theta" in capsys.readouterr().err, command
    with pytest.warns(DuomeshWarning, match="rope_theta"):
        dm.build(exported, backend="torch", device="cpu")


def test_an_overwrite_never_takes_what_the_user_stands_on(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(exported), str(tmp_path), "--overwrite"]) == 2
    assert "holds the source" in capsys.readouterr().err
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    for target in (inner, tmp_path, Path.home()):
        with pytest.raises(OutputError, match="work within it"), publish_directory(target, overwrite=True):
            raise AssertionError("must not be entered")
    assert (exported / "config.json").is_file()


def test_links_are_followed_and_pipes_written_to(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    with publish_directory(tmp_path / "link") as work:
        (work / "a").write_text("1")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "far" / "a").read_text() == "1"
    (tmp_path / "name").symlink_to(tmp_path / "far" / "b")
    publish_file(tmp_path / "name", b"2")
    assert (tmp_path / "name").is_symlink() and (tmp_path / "far" / "b").read_text() == "2"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    publish_file(tmp_path / "pipe", b"3")
    assert os.read(reader, 10) == b"3"
    os.close(reader)


@pytest.mark.parametrize(
    "words",
    [
        ["--to", "neutral", "--max-shard-gb", "1"],
        ["--to", "neutral", "--tokenizer", "/nowhere"],
        ["--to", "neutral", "--allow-missing"],
        ["--saturate"],
        ["--max-shard-gb", "inf"],
    ],
    ids=" ".join,
)
def test_c166_options_without_an_effect_are_refused(
    exported: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(exported), str(tmp_path / "out"), *words]) == 2
    assert words[-2 if words[-1][0] != "-" else -1] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_two_runs_never_share_an_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "a.txt").write_text("words " * 300)
    (tmp_path / "c.toml").write_text("")
    words = [f"data.paths={tmp_path / 'a.txt'}", "data.seq_len=16", "model.preset=tiny-llama3", "train.steps=1"]
    command = ["train", str(tmp_path / "c.toml"), *words, f"train.output={run}", "train.eval_batches=0"]
    with (run / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(command) == 2
        assert "another run is writing" in capsys.readouterr().err
    assert main(command) == 0


def test_a_reader_that_leaves_and_a_full_disk_are_no_tracebacks() -> None:
    command = [sys.executable, "-m", "duomesh.cli.main", "explain", "llama3.1-405b"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 128 + signal.SIGPIPE
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2 and b"No space left" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["explain", "tiny-qwen2", "--seq", "0"], "--seq is 0"),
        (["explain", "x" * 300], "x" * 300),
        (["generate", "tiny-qwen2", "--prompt", "a", "--device", "meta"], "'meta' is none that this backend runs on"),
        (["verify", "tiny-qwen2", "torch", "torch:device=cpu:7"], "'cpu:7' was asked for"),
        (["verify", "tiny-qwen2", "torch", "jax:device="], "'device=' has no value"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_more_mistakes_are_sentences(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


@pytest.mark.parametrize(
    "fields",
    [
        {"rms_norm_eps": float("inf")},
        {"rope_scaling": {"rope_type": []}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
        {"rope_theta": 10**400},
        {"hidden_size": 10**400},
    ],
    ids=str,
)
def test_numbers_that_no_model_has_are_errors_of_the_config(exported: Path, fields: dict[str, object]) -> None:
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | fields))
    assert main(["explain", str(exported)]) == 2


def test_a_whole_number_is_an_integer() -> None:
    attention = dm.spec.preset("tiny-qwen2").blocks[0].attention
    with pytest.raises(SpecError, match=r"num_heads is 4\.0; it must be an integer"):
        replace(attention, num_heads=4.0)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="attention scale is 0"):
        replace(attention, scale=0.0)
