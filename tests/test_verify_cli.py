"""The commands that only look: verify, explain, generate, env; and the Python interface beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import duomesh as dm
from duomesh.cli.main import main
from duomesh.core.bounds import bound
from duomesh.core.errors import BackendError, CheckpointError, ConfigError, DataError, SpecError
from duomesh.core.session import Trace
from duomesh.core.verify.compare import Bounds, Row, compare_traces, relative_error
from duomesh.core.verify.run import random_batch
from duomesh.sides import verify


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a tiny model."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    dm.build("tiny-llama3", backend="torch", seed=2, device="cpu").export_hf(folder)
    return folder


def changed(exported: Path, folder: Path, **fields: object) -> Path:
    """A copy of the directory whose config.json has other values."""
    folder.mkdir()
    for file in exported.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    assert set(fields) <= set(config)
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def test_c044_verify_names_the_first_op_that_differs(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An epsilon of 1e-2 in the second checkpoint: exit code 1 and the first norm by name; unchanged: exit code 0."""
    other = changed(exported, tmp_path / "other", rms_norm_eps=1e-2)
    file = tmp_path / "report.json"
    words = ["verify", str(exported), "torch", f"torch:model={other}", "--seq", "16", "--json", str(file)]
    assert main(words) == 1
    assert "layers.0.attention_norm" in capsys.readouterr().out
    pair = json.loads(file.read_text())["pairs"][0]
    assert not pair["passed"]
    assert pair["first_difference"]["name"] == "layers.0.attention_norm"
    assert pair["first_difference"]["error"] > pair["first_difference"]["bound"]
    assert len(pair["first_difference"]["index"]) == 3
    assert main(["verify", str(exported), "torch", f"torch:model={exported}", "--seq", "16"]) == 0
    assert "passed" in capsys.readouterr().out


def test_an_hf_directory_is_read_by_transformers_itself(exported: Path, tmp_path: Path) -> None:
    """The hf side reads the files, so a config that our importer and transformers read apart would show."""
    report = verify(str(exported), ["hf", "torch"], seq=24)
    assert report.passed
    assert report.comparisons[0].reference == "hf"
    other = changed(exported, tmp_path / "other", rms_norm_eps=1e-2)
    source = replace(dm.open_model(exported), directory=other)
    report = verify(source, ["torch", "hf"], seq=24)
    assert not report.passed


def test_json_report(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "report.json"
    words = ["verify", "tiny-qwen2", "torch", "jax", "torch", "--grads", "--seq", "16", "--dtype", "fp64"]
    assert main([*words, "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    assert data["passed"] is True and data["dtype"] == "float64"
    assert [(p["reference"], p["side"]) for p in data["pairs"]] == [("torch", "jax"), ("torch", "torch")]
    for pair in data["pairs"]:
        assert pair["passed"] and pair["first_difference"] is None
        for key, quantity in (("loss_rel", "loss"), ("logits_max_rel", "logits"), ("grads_max_rel", "gradient")):
            assert 0 <= pair[key] <= bound(quantity, "float64")  # type: ignore[arg-type]
    same = data["pairs"][1]
    assert same["loss_rel"] == same["logits_max_rel"] == same["grads_max_rel"] == 0.0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["verify", "tiny-qwen2", "torch"], "at least two sides"),
        (["verify", "tiny-qwen2", "torch", "tensorflow"], "'tensorflow' is not one of torch, jax, hf"),
        (["verify", "tiny-qwen2", "torch", "torch:colour=red"], "there is no field 'colour'"),
        (["verify", "tiny-qwen2", "torch", "torch:tp=3"], "tp must divide the query heads"),
        (["verify", "tiny-qwen2", "torch", "torch:tp=two"], "duomesh verify: side 'torch:tp=two': tp is 'two'"),
        (["verify", "tiny-qwen2", "torch", "hf:tp=2"], "transformers runs on one device; give a plan to torch or jax"),
        (["verify", "tiny-qwen2", "torch", "hf:micro_batches=2"], "transformers runs on one device"),
        (["verify", "tiny-qwen2", "jax", "torch:tp=2,mode=explicit"], "only jax has modes, manual and explicit"),
        (["verify", "tiny-qwen2", "torch", "jax:tp=2,mode=auto"], "only jax has modes, manual and explicit"),
        (["verify", "tiny-qwen2", "torch", "torch:tp=2,precision=bfloat16"], "precision=bfloat16, dtype=float32"),
        (["verify", "tiny-qwen2", "torch", "jax:precision=bfloat16"], "precision=bfloat16, dtype=float32"),
        (["verify", "tiny-qwen2", "torch", "torch:micro_batches=2"], "micro_batches=2, batches of the step: 1"),
        (["verify", "tiny-qwen2", "torch", "jax:global_batch_size=64"], "samples of the step's batches: 2"),
        (["verify", "tiny-qwen2", "torch", "torch:pp=2"], "pp is not built yet"),
        (["verify", "tiny-qwen2", "torch", "jax:cp=2"], "cp is not built yet"),
        (["verify", "tiny-qwen2", "torch", "hf:device=cuda"], "the hf side runs on the cpu only"),
        (["verify", "tiny-qwen2", "torch", "torch:model=nowhere/at/all"], "is not a directory"),
        (["verify", "tiny-qwen2", "torch", "torch:model=tiny-qwen3"], "other parameters or shapes"),
        (["verify", "tiny-qwen2", "torch", "jax", "--seq", "0"], "--seq is 0"),
        (["verify", "tiny-qwen", "torch", "jax"], "tiny-qwen2"),
        (["verify", "no/such/dir", "torch", "jax"], "no/such/dir is not a directory"),
        (["verify", "tiny-qwen2", "torch", "torch:device=cuda:99"], "'cuda:99' was asked for"),
        (["verify", "tiny-qwen2", "torch", "torch:device=banana"], "'banana'"),
        (["verify", "tiny-qwen2", "torch", "jax:device=banana"], "JAX has no device 'banana'"),
        (["verify", "tiny-qwen2", "torch", "jax:device=cpu:77"], "'cpu:77' was asked for"),
        (["explain", "tiny-qwen"], "tiny-qwen2"),
        (["generate", "tiny-qwen2", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["generate", "tiny-qwen2", "--prompt", ""], "the prompt is empty"),
        (["generate", "tiny-qwen2", "--prompt", "a", "--tokenizer", "nowhere"], "nowhere"),
        (["nonsense"], "there is no command 'nonsense'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert "Traceback" not in captured.err


def test_an_unwritable_report_is_an_error_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "report.json"
    assert main(["verify", "tiny-qwen2", "torch", "torch", "--seq", "4", "--json", str(target)]) == 2
    assert str(target) in capsys.readouterr().err


def test_c030_the_listing_shows_every_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    spec = dm.spec.preset("tiny-qwen3")
    block = spec.blocks[0]
    norm = replace(spec.final_norm, eps=1e-3)
    attention = replace(block.attention, qk_norm=norm)
    block = replace(block, attention_norm=norm, mlp_norm=norm, attention=attention, attention_post_norm=norm)
    listing = dm.explain(replace(spec, blocks=(block,) * 3, final_norm=norm))
    assert listing.count("= norm(") == listing.count("eps=0.001") == 6


def test_explain_lists_every_op_weight_and_tie(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tiny-mistral"]) == 0
    out = capsys.readouterr().out
    for word in ("embed", "block0", "head", "loss", "attention.q.weight", "window=8", "sums kv_seq", "cross_entropy"):
        assert word in out, word
    assert main(["explain", "tiny-qwen2"]) == 0
    assert "head.weight is embed.weight: one tensor" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_generate_prints_the_prompt_and_a_continuation(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "demo-llama", "--prompt", "def f", "--max-new-tokens", "5", "--backend", backend]
    assert main([*words, "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("def f")
    assert "random" in captured.err


def test_env_names_both_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "backend torch" in out and "backend jax" in out


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main(["--help"]) == 0 and main(["--version"]) == 0
    assert dm.__version__ in capsys.readouterr().out


def test_python_interface(exported: Path, tmp_path: Path) -> None:
    model = dm.build("tiny-llama3", backend="torch", seed=0, device="cpu").load(exported)
    again = dm.build(exported, backend="jax", device="cpu")
    for (name, a), (name2, b) in zip(model.params(), again.params(), strict=True):
        assert name == name2 and a.tobytes() == b.tobytes()
    assert dm.spec.from_hf(exported) == model.spec
    assert dm.spec.from_json(dm.spec.to_json(model.spec)) == model.spec
    with pytest.raises(SpecError, match="another model"):
        model.load("tiny-qwen2")
    with pytest.raises(CheckpointError, match=r"neither a config\.json"):
        dm.open_model(tmp_path)
    with pytest.raises(BackendError, match="there is no backend 'tensorflow'"):
        dm.build("tiny-qwen2", backend="tensorflow")
    with pytest.raises(ConfigError, match="at least two sides"):
        verify("tiny-qwen2", ["torch"])
    with pytest.raises(DataError, match="loss_mask has shape"):
        dm.Batch(np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32), np.ones((1, 3), np.float32))


def test_dtypes_that_nothing_computes_in_are_refused() -> None:
    for dtype in ("float16", "fp32", "int8"):
        with pytest.raises(ConfigError, match=f"dtype '{dtype}' cannot be computed in"):
            dm.build("tiny-qwen2", backend="torch", dtype=dtype)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"dtype '{dtype}' cannot be computed in"):
            verify("tiny-qwen2", ["torch", "jax"], dtype=dtype)


@pytest.mark.parametrize("name", ["tiny-mistral", "tiny-qwen2"])
def test_bf16_sides_agree_and_start_from_the_same_rounded_weights(name: str) -> None:
    """The float64 run that sets the bounds has the rounded weights: a look-up has no error of its own."""
    (comparison,) = verify(name, ["torch", "jax"], dtype="bfloat16").comparisons
    assert comparison.passed, comparison.first_difference
    lookup = next(row for row in comparison.rows if row.name == "embed.lookup")
    assert lookup.error == lookup.bound == lookup.difference == 0.0


def test_loading_a_checkpoint_of_another_length_is_no_other_model(exported: Path) -> None:
    longer = replace(dm.spec.from_hf(exported), max_positions=4096, init_std=0.5)
    dm.build(longer, backend="torch", device="cpu").load(exported)
    other = replace(longer, logit_softcap=3.0)
    with pytest.raises(SpecError, match=r"logit_softcap: None, 3\.0"):
        dm.build(other, backend="torch", device="cpu").load(exported)


def test_relative_error_sees_shapes_and_what_is_not_finite() -> None:
    one = np.array([1.0, -2.0, 3.0])
    assert relative_error(one, one.copy()) == (0.0, (0,))
    assert relative_error(one, np.array([1.0, -2.0, np.nan])) == (np.inf, (2,))
    assert relative_error(one, np.array([1.0, np.inf, 3.0])) == (np.inf, (1,))
    assert relative_error(one, np.ones(2))[0] == np.inf
    bad = np.array([1.0, np.nan, np.inf])
    assert relative_error(bad, bad.copy())[0] == np.inf
    assert not Row("value", "x", np.inf, np.inf, np.inf).passed
    assert relative_error(np.zeros(2), np.array([0.0, 1.0])) == (np.inf, (1,))
    assert relative_error(np.array([1.0, -4.0]), np.array([1.5, -4.0])) == (0.125, (0,))


def test_a_missing_value_or_gradient_is_a_difference() -> None:
    values = {"embed.lookup": np.ones(3), "head.logits": np.ones(2)}
    full = Trace(values, 1.0, {"embed.weight": np.ones(3)})
    fewer = Trace({"embed.lookup": np.ones(3)}, 1.0, {})
    bounds = Bounds(dtype="float64", terms=1, across_frameworks=False, num_params=1)
    comparison = compare_traces(("a", full), ("b", fewer), bounds)
    assert [row.name for row in comparison.rows if not row.passed] == ["head.logits", "embed.weight"]
    assert comparison.first_difference is not None and comparison.first_difference.name == "head.logits"
    shared = compare_traces(("a", full), ("b", fewer), bounds, exposes_all=False)
    assert [row.name for row in shared.rows if not row.passed] == ["embed.weight"]


def test_the_random_batch_sets_its_traps() -> None:
    batch = random_batch(503, batch=3, seq=17, seed=4)
    assert batch.tokens.shape == (3, 17) and batch.tokens.max() <= 502
    assert 502 in batch.labels or 502 in batch.tokens
    counts = (batch.labels != dm.IGNORE).sum(1)
    assert len(set(counts.tolist())) == 3
    assert len(np.unique(batch.weights)) == 3
    again = random_batch(503, batch=3, seq=17, seed=4)
    assert np.array_equal(batch.tokens, again.tokens)


def test_a_side_on_the_ranks_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The command starts the ranks that the side needs; every value and gradient agrees with one rank."""
    words = ["verify", "tiny-qwen3", "torch", "torch:tp=2,dp=2,zero=1,sequence_parallel", "--seq", "16"]
    assert main([*words, "--grads", "--dtype", "fp64"]) == 0
    assert "passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("side", "words", "sentence"),
    [
        ("torch:tp=2,dp=2", ["--batch", "3"], "3 is no multiple of 2. Give a multiple of 2 samples."),
        ("torch:tp=2,sequence_parallel", ["--seq", "15"], "tp must divide the sequence length"),
        ("torch:tp=3", [], "tp must divide the query heads"),
        ("torch:tp=2", ["--json", "{file}/report.json"], "is no directory. Choose another place."),
    ],
)
def test_a_side_that_cannot_run_starts_no_rank(
    side: str,
    words: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is computed at all: the reference side is not even made."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("duomesh.sides.verify_sides", None)
    monkeypatch.setattr("duomesh.backends.torch.launch.launch", None)
    given = [word.format(file=tmp_path / "file") for word in words]
    assert main(["verify", "tiny-qwen3", "torch", side, *given]) == 2
    error = capsys.readouterr().err
    assert sentence in error and "during" not in error and error.startswith("duomesh verify: ")


def test_a_side_takes_dtypes_that_are_the_runs() -> None:
    """The run that sets the bounds is float64, whatever the plan of the reference says."""
    side = "jax:dp=2,precision=bfloat16,grad_dtype=bfloat16,micro_batches=1,global_batch_size=2"
    assert verify("tiny-qwen3", [side, "torch"], dtype="bfloat16", seq=8).passed


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("side", ["jax:tp=2,dp=2", "jax:tp=2,sequence_parallel,mode=explicit"])
def test_a_side_on_the_devices_of_a_plan(side: str, dtype: str) -> None:
    report = verify("tiny-qwen3", ["torch", side], dtype=dtype, seq=16)
    assert report.passed and [c.side for c in report.comparisons] == [side]


def test_ranks_against_simulated_devices() -> None:
    """A process in which JAX has not started simulates its devices, and torch starts its ranks."""
    words = ["verify", "tiny-qwen3", "torch:tp=2", "jax:tp=4", "jax:tp=2,mode=explicit", "--seq", "16", "--grads"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    command = [sys.executable, "-m", "duomesh.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agree within their bounds") == 2


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ("tp=3", "tp must divide the query heads"),
        ("tp=2,sequence_parallel", "tp must divide the sequence length"),
        ("tp=2,micro_batches=2", "train.plan sets micro_batches"),
        ("dp=3", "is not a multiple of train.micro_batch_size=2 x 3 data ranks"),
        ("tpp=2", "there is no field 'tpp'"),
        ("tp=two", "duomesh train: train.plan: tp is 'two'"),
        ("micro_batches=1", "train.plan sets micro_batches"),
    ],
)
def test_a_plan_that_does_not_fit_starts_no_rank(
    plan: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """c056, c158: everything is found while the plan is built."""
    (tmp_path / "text.txt").write_text("some text " * 200)
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\npreset = "tiny-llama3"\n[data]\npaths = ["{tmp_path / "text.txt"}"]\nseq_len = 33\n'
        f'[train]\nsteps = 1\nglobal_batch_size = 8\nmicro_batch_size = 2\ndevice = "cpu"\n'
        f'output = "{tmp_path / "out"}"\n'
    )
    assert main(["train", str(file), "--plan", plan]) == 2
    error = capsys.readouterr().err
    assert sentence in error and "rank 0" not in error
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_starts_no_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("some text " * 200)
    monkeypatch.setattr("duomesh.backends.torch.launch.launch", None)
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\npreset = "tiny-llama3"\n[data]\npaths = ["{tmp_path / "text.txt"}"]\nseq_len = 32\n'
        f'[train]\nsteps = 1\ndevice = "cpu"\nmicro_batch_size = 2\noutput = "{tmp_path / "text.txt" / "run"}"\n'
    )
    assert main(["train", str(file), "--plan", "tp=2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("duomesh train: cannot write ") and "text.txt is no directory" in error
