"""`duomesh convert`: what a user types, and one clear sentence with exit code 2 for every bad input."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_dirs import BF16, as_read, config, read_directory, tensors, write_directory, write_tokenizer

from duomesh.cli.main import main
from duomesh.converters.hf.config import read_config
from duomesh.core.arrays import Array
from duomesh.core.checkpoint import Checkpoint, write_checkpoint
from duomesh.core.ir.build import build_program
from duomesh.core.random import draw
from duomesh.core.spec.presets import preset

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "in", config(), tensors(config()), shards=3)


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


def test_a_directory_is_converted_with_a_summary(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(source, tmp_path / "out") == 0
    assert read_directory(tmp_path / "out") == as_read(tensors(config()))
    out, err = capsys.readouterr()
    assert f"{source} (hf) -> {tmp_path / 'out'} (hf)" in out
    assert f"{build_program(read_config(config()).spec).num_params:,} parameters" in out
    assert err.startswith("note:") and "holds no Hugging Face tokenizer" in err


def test_warnings_and_notes_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = config(my_note=1, rope_theta=...)
    write_tokenizer(write_directory(tmp_path / "in", fields, tensors(fields)), 500, 6)
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    out, err = capsys.readouterr()
    assert "my_note" not in out
    assert "warning: " in err and "my_note is unknown" in err and "rope_theta is absent" in err
    assert "note:" not in err


@pytest.mark.parametrize(("name", "code"), [("bf16", "BF16"), ("float16", "F16"), ("fp64", "F64")])
def test_dtype_names_long_and_short(source: Path, tmp_path: Path, name: str, code: str) -> None:
    assert convert(source, tmp_path / "out", "--dtype", name) == 0
    assert {found for found, _, _ in read_directory(tmp_path / "out").values()} == {code}


def test_options_reach_the_converter(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(source, tmp_path / "out", "--max-shard-gb", 0.0001) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert convert(source, tmp_path / "out") == 2
    assert convert(source, tmp_path / "out", "--overwrite") == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1

    data = tensors(config())
    data[UP][3, 5] = np.nan
    data["model.norm.weight"][0] = 1e9
    del data["model.layers.0.mlp.up_proj.weight"]
    write_directory(tmp_path / "bad", config(), data)
    out = tmp_path / "bad-out"
    assert convert(tmp_path / "bad", out) == 2
    assert convert(tmp_path / "bad", out, "--allow-missing") == 2
    assert convert(tmp_path / "bad", out, "--allow-missing", "--allow-nonfinite", "--dtype", "fp16") == 2
    assert not out.exists()
    assert convert(tmp_path / "bad", out, "--allow-missing", "--allow-nonfinite", "--dtype", "fp16", "--saturate") == 0

    fields = config(tie_word_embeddings=True)
    data = tensors(fields)
    write_directory(tmp_path / "tied", fields, {**data, HEAD: data[EMBED] + 1})
    assert convert(tmp_path / "tied", tmp_path / "tied-out") == 2
    assert convert(tmp_path / "tied", tmp_path / "tied-out", "--tie-source", "head") == 0
    assert read_directory(tmp_path / "tied-out")[EMBED] == as_read({EMBED: data[EMBED] + 1})[EMBED]

    write_tokenizer(tmp_path / "tokenizer", 500, 6)
    assert convert(source, tmp_path / "t", "--tokenizer", tmp_path / "tokenizer") == 0
    assert (tmp_path / "t" / "tokenizer.json").is_file()


# ---- bad input ---------------------------------------------------------------------------------------------------


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def drop_shard(path: Path) -> None:
    (path / "model-00002-of-00003.safetensors").unlink()


def rewrite(path: Path, **changes: Any) -> None:
    (path / "config.json").write_text(json.dumps(config(**changes)))


def nan_weight(path: Path) -> None:
    data = tensors(config())
    data[UP][3, 5] = np.nan
    write_directory(path, config(), data, shards=3)


def only_pickles(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")


SHARD = "model-00002-of-00003.safetensors"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "holds neither a config.json"),
    "config not json": (lambda p: (p / "config.json").write_text("{"), "config.json is not valid JSON"),
    "shard absent": (drop_shard, f"missing: {SHARD}"),
    "shard truncated": (lambda p: edit(p / SHARD, lambda b: b[:-100]), f"{SHARD} is truncated"),
    "header truncated": (lambda p: edit(p / SHARD, lambda b: b[:40]), f"{SHARD} is truncated"),
    "shard malformed": (lambda p: edit(p / SHARD, lambda b: b[:8] + b"x" + b[9:]), f"{SHARD} has a malformed"),
    "shard empty": (lambda p: edit(p / SHARD, lambda b: b""), f"{SHARD} has 0 bytes"),
    "index malformed": (lambda p: (p / "model.safetensors.index.json").write_text("x"), "index.json is not valid JSON"),
    "rope type": (lambda p: rewrite(p, rope_scaling={"rope_type": "foo"}), "rope_type 'foo' is not supported"),
    "soft cap": (lambda p: rewrite(p, attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0"),
    "quantised": (lambda p: rewrite(p, quantization_config={"bits": 4}), "quantization_config = {'bits': 4}"),
    "model type": (lambda p: rewrite(p, model_type="gpt2"), "model_type is 'gpt2'; supported are"),
    "shape": (lambda p: rewrite(p, intermediate_size=96), "config.json asks for (96, 64)"),
    "layers": (lambda p: rewrite(p, num_hidden_layers=3), "lacks 9 of 30 parameters"),
    "nan": (nan_weight, f"{UP}: 1 NaN and 0 Inf, the first at [3, 5]"),
    "only pickles": (only_pickles, "pytorch_model.bin). A pickle can run any code and is never opened"),
    "no directory": (lambda p: p.rename(p.with_name("moved")), "there is no directory"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    spoil, message = BAD[case]
    spoil(source)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert convert(source, tmp_path / "out") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("duomesh convert: ") and err.count("\n") == 1 and "Traceback" not in err
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("target", ["a file", "below a file", "not empty", "read only"])
def test_an_output_that_cannot_be_written_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    out = tmp_path / "out"
    if target == "read only":
        if os.geteuid() == 0:
            out = Path("/proc/duomesh/out")  # root may write anywhere else
        else:
            (tmp_path / "locked").mkdir(mode=0o500)
            out = tmp_path / "locked" / "out"
    elif target == "not empty":
        out.mkdir()
        (out / "precious").write_text("x")
    else:
        out.write_text("x")
        out = out / "deeper" if target == "below a file" else out
    assert convert(source, out) == 2
    _, err = capsys.readouterr()
    assert str(out) in err and err.count("\n") == 1
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left in (["in", "out"], ["in", "locked"], ["in"])
    if target == "not empty":
        assert [path.name for path in out.iterdir()] == ["precious"]


def test_bad_options_are_named(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(source, tmp_path / "out", "--dtype", "int8") == 2
    assert "dtype 'int8' cannot hold weights; choose one of fp64, fp32, bf16" in capsys.readouterr().err
    assert convert(source, tmp_path / "out", "--max-shard-gb", "0") == 2
    assert convert(source, tmp_path / "out", "--tokenizer", tmp_path / "nowhere") == 2
    with pytest.raises(SystemExit) as caught:
        convert(source, tmp_path / "out", "--no-such-option")
    assert caught.value.code == 2
    assert not (tmp_path / "out").exists()


# ---- the neutral checkpoint --------------------------------------------------------------------------------------


def test_a_trip_through_the_neutral_checkpoint_keeps_every_byte(tmp_path: Path) -> None:
    fields = config(model_type="qwen2", attention_bias=...)
    data = {name: a.astype(np.float32 if "norm" in name else BF16) for name, a in tensors(fields).items()}
    write_directory(tmp_path / "in", fields, data)
    assert convert(tmp_path / "in", tmp_path / "neutral", "--to", "neutral") == 0
    with Checkpoint(tmp_path / "neutral") as checkpoint:
        assert checkpoint.spec == read_config(fields).spec
    assert convert(tmp_path / "neutral", tmp_path / "out") == 0
    assert read_directory(tmp_path / "out") == as_read(data)
    assert read_config(tmp_path / "out").spec == read_config(fields).spec


def test_a_neutral_checkpoint_can_be_cast(source: Path, tmp_path: Path) -> None:
    assert convert(source, tmp_path / "neutral", "--to", "neutral", "--dtype", "bf16") == 0
    with Checkpoint(tmp_path / "neutral") as checkpoint:
        params: dict[str, Array] = dict(checkpoint.params())
    assert params["embed.weight"].tobytes() == tensors(config())[EMBED].astype(BF16).tobytes()
    assert convert(source, tmp_path / "neutral", "--to", "neutral") == 2


@pytest.mark.parametrize("tokenizer", ["bytes", "directory", "gone", "unknown"])
def test_c041_the_tokenizer_of_a_run_goes_with_its_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str
) -> None:
    """Bytes: token ids and a note. A directory: its files. One that is gone: a note, not a crash."""
    spec = preset("tiny-llama3")
    write_tokenizer(tmp_path / "tokenizer", 490, 6)
    name = {"bytes": "bytes", "directory": str(tmp_path / "tokenizer"), "gone": str(tmp_path / "gone")}.get(tokenizer)
    run_config = {} if name is None else {"data": {"tokenizer": name}}
    params = (("params", n, draw(p, 0)) for n, p in build_program(spec).params.items())
    write_checkpoint(tmp_path / "run", spec, params, config=run_config)
    assert convert(tmp_path / "run", tmp_path / "out") == 0
    err = capsys.readouterr().err
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = (fields["bos_token_id"], fields["eos_token_id"], fields["pad_token_id"])
    assert ids == ((256, 257, 258) if tokenizer == "bytes" else (None, None, None))
    assert (tmp_path / "out" / "tokenizer.json").is_file() == (tokenizer == "directory")
    assert ("trained on bytes" in err, "not there any more" in err) == (tokenizer == "bytes", tokenizer == "gone")


def test_a_damaged_neutral_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = preset("tiny-qwen2")
    params = (("params", n, draw(p, 0)) for n, p in build_program(spec).params.items())
    write_checkpoint(tmp_path / "run", spec, params)
    file = next((tmp_path / "run").glob("*.safetensors"))
    edit(file, lambda data: data[:-4] + b"\xff\xff\xff\xff")
    assert convert(tmp_path / "run", tmp_path / "out") == 2
    assert file.name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
