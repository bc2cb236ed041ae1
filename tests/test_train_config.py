"""Configurations: sources, names, ranges, and what a resume makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_session import tiny_spec
from test_checkpoint import SPEC, random_state, training_state

from duomesh.cli import train as train_command
from duomesh.core.checkpoint import Checkpoint, write_checkpoint
from duomesh.core.errors import CheckpointError, ConfigError, SpecError
from duomesh.core.spec.codec import encode
from duomesh.core.spec.model import RopeSpec
from duomesh.core.spec.serialize import spec_differences
from duomesh.core.training.config import (
    CombinedConfigError,
    DataConfig,
    ModelConfig,
    TrainConfig,
    micro_batches_per_step,
)
from duomesh.core.training.model import change_spec
from duomesh.core.training.resolve import FIELDS, Resolved, resolve, values_of
from duomesh.core.training.resume import merge

TOML = """
[model]
preset = "tiny"
[data]
paths = ["text"]
[optimizer]
lr = 1e-3
betas = [0.8, 0.9]
[train]
steps = 50
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


def problems_of(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> list[str]:
    with pytest.raises(CombinedConfigError) as caught:
        resolve(write(tmp_path, text), overrides)
    return caught.value.problems


# Sources and values


def test_c164_every_value_has_a_source_and_the_command_line_wins(tmp_path: Path) -> None:
    found = resolve(write(tmp_path, TOML), [("optimizer.lr", "2e-4"), ("train.seed", "7"), ("train.seed", "8")])
    assert found.sources.keys() == FIELDS.keys() == values_of(found.config).keys()
    expected = {
        "model.preset": ("tiny", "file"),
        "data.paths": (("text",), "file"),
        "optimizer.lr": (2e-4, "command line"),
        "optimizer.betas": ((0.8, 0.9), "file"),
        "optimizer.eps": (1e-8, "default"),
        "train.steps": (50, "file"),
        "train.seed": (8, "command line"),
    }
    values = values_of(found.config)
    assert {name: (values[name], found.sources[name]) for name in expected} == expected
    assert sum(source == "default" for source in found.sources.values()) == len(FIELDS) - 6


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optimizer.lr", "1", 1.0),
        ("optimizer.lr", "1e-3", 1e-3),
        ("optimizer.betas", "0.5,0.75", (0.5, 0.75)),
        ("optimizer.betas", "[0.5, 0.75]", (0.5, 0.75)),
        ("data.paths", "a.txt,b c.txt", ("a.txt", "b c.txt")),
        ("data.paths", '["a,b.txt"]', ("a,b.txt",)),
        ("data.tokenizer", "12", "12"),
        ("data.shuffle", "false", False),
        ("train.stop_step", "none", None),
        ("train.stop_step", "5", 5),
        ("train.device", "none", None),
        ("train.device", "cuda:1", "cuda:1"),
        ("train.dtype", "bfloat16", "bfloat16"),
        ("model.tie_embeddings", "true", True),
    ],
)
def test_words_of_the_command_line(tmp_path: Path, name: str, text: str, value: Any) -> None:
    got = values_of(resolve(write(tmp_path, TOML), [(name, text)]).config)[name]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("optimizer.lr", "fast", "of type float"),
        ("optimizer.lr", "nan", "finite"),
        ("train.steps", "1.5", "of type int"),
        ("train.steps", "true", "of type int"),
        ("train.dtype", "fp16", "'float32', 'bfloat16', 'float64'"),
        ("data.shuffle", "maybe", "of type bool"),
        ("optimizer.betas", "0.9", "two numbers"),
    ],
)
def test_a_wrong_type_is_named(tmp_path: Path, name: str, text: str, match: str) -> None:
    (problem,) = problems_of(tmp_path, TOML, (name, text))
    assert name in problem and match in problem


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("optimzer.lr", "optimizer.lr"),
        ("train.lr", "optimizer.lr"),
        ("steps", "train.steps"),
        ("data.path", "data.paths"),
        ("optimizer.learning_rate", "lr, min_lr"),
        ("nothing.like", "model, data, optimizer, train"),
    ],
)
def test_a_wrong_name_is_an_error_with_the_closest_ones(tmp_path: Path, name: str, closest: str) -> None:
    (problem,) = problems_of(tmp_path, TOML, (name, "1"))
    assert repr(name) in problem and "the command line" in problem and closest in problem
    if "." in name:
        section, leaf = name.split(".")
        known = {"train": TOML, "optimizer": TOML.replace("[optimizer]", f"[optimizer]\n{leaf} = 1")}
        text = known.get(section, TOML + f"\n[{section}x]\n{leaf} = 1")
        if section == "train":
            text = TOML + f"{leaf} = 1"
        (problem,) = problems_of(tmp_path, text)
        assert "run.toml" in problem and leaf in problem


@pytest.mark.parametrize(
    ("text", "match"),
    [(None, "cannot read the configuration .*absent.toml"), ("[train", "run.toml is not valid TOML")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, match: str) -> None:
    file = tmp_path / "absent.toml" if text is None else write(tmp_path, text)
    with pytest.raises(ConfigError, match=match):
        resolve(file)


def test_c167_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = """
    [modle]
    preset = "x"
    [optimizer]
    lr = -1.0
    betas = [0.9, 1.0]
    eps = "small"
    [train]
    dtype = "fp16"
    eval_batches = -2
    stop_step = 2000
    global_batch_size = 10
    micro_batch_size = 4
    """
    problems = problems_of(tmp_path, text, ("optimizer.warmup_steps", "1001"))
    expected = [
        "modle.preset",
        "optimizer.eps is 'small'",
        "train.dtype is 'fp16'",
        "data.paths is empty",
        "optimizer.lr is -1.0",
        "optimizer.min_lr",
        "optimizer.betas is [0.9, 1.0]",
        "train.eval_batches is -2",
        "train.stop_step=2000",
        "train.global_batch_size=10",
        "optimizer.warmup_steps=1001 is more than train.steps=1000",
    ]
    assert len(problems) == len(expected), problems
    assert all(any(text in problem for problem in problems) for text in expected), problems


def test_a_value_that_could_not_be_read_causes_no_second_problem(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, TOML.replace('["text"]', '"text"'))
    assert "data.paths" in problem and "must be a list" in problem


@pytest.mark.parametrize(("sizes", "number"), [((10, 2, 1), 5), ((8, 8, 1), 1), ((16, 2, 4), 2)])
def test_micro_batches_per_step(sizes: tuple[int, int, int], number: int) -> None:
    assert micro_batches_per_step(*sizes) == number


@pytest.mark.parametrize(
    ("sizes", "nearest"), [((10, 4, 2), "8 or 16"), ((2, 1, 4), "4"), ((17, 4, 1), "16 or 20"), ((3, 4, 1), "4")]
)
def test_c163_batch_sizes_are_exact_or_refused(sizes: tuple[int, int, int], nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        micro_batches_per_step(*sizes)
    message = str(caught.value)
    assert all(str(size) in message for size in sizes) and message.endswith(f"are {nearest}.")


def test_two_sources_of_validation_text_are_refused(tmp_path: Path) -> None:
    text = TOML.replace("[data]", '[data]\nvalidation_fraction = 0.1\nvalidation_paths = ["v"]')
    assert "keep one of them" in problems_of(tmp_path, text)[0]


# The model


def test_a_preset_takes_the_numbers_of_the_configuration() -> None:
    base = tiny_spec(num_layers=2)
    rope = RopeSpec(base=1e4, rotary_dim=2)
    block = replace(base.blocks[0], attention=replace(base.blocks[0].attention, rope=rope, head_dim=4))
    base = replace(base, blocks=(block,) * 2)
    config = ModelConfig(
        vocab_size=300,
        num_layers=3,
        hidden_size=10,
        ffn_size=20,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=99,
        tie_embeddings=True,
        init_std=0.5,
        dropout=0.25,
    )
    got = change_spec(base, config)
    attention = got.blocks[2].attention
    assert (got.vocab_size, got.num_layers, got.hidden_size, got.max_positions) == (300, 3, 10, 99)
    assert (got.tie_embeddings, got.init_std, got.dropout, got.blocks[2].mlp.ffn_size) == (True, 0.5, 0.25, 20)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 8)
    assert attention.rope == replace(rope, rotary_dim=4)  # half of a head, as before
    assert change_spec(base, ModelConfig()) == base
    assert change_spec(base, ModelConfig(num_layers=1)).blocks == base.blocks[:1]


def test_numbers_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(SpecError, match="num_heads=3 is not a multiple of num_kv_heads=2"):
        change_spec(tiny_spec(), ModelConfig(num_heads=3, num_kv_heads=2))
    mixed = tiny_spec(num_layers=2)
    other = replace(mixed.blocks[0], mlp=replace(mixed.blocks[0].mlp, ffn_size=9))
    with pytest.raises(ConfigError, match="whose layers differ"):
        change_spec(replace(mixed, blocks=(other, mixed.blocks[0])), ModelConfig(num_layers=3))


def test_spec_differences_name_the_fields() -> None:
    a = tiny_spec()
    assert spec_differences(a, a) == []
    b = change_spec(a, ModelConfig(hidden_size=128, ffn_size=5))
    assert spec_differences(a, b) == ["hidden_size: 6, 128", "block_kinds[0].mlp.ffn_size: 4, 5"]
    assert spec_differences(a, tiny_spec(num_layers=2)) == ["layers: [0], [0, 0]"]


def test_model_path_and_changes_exclude_each_other() -> None:
    data = DataConfig(paths=("x",))
    with pytest.raises(CombinedConfigError, match=r"model\.preset and model\.path are both given"):
        TrainConfig(model=ModelConfig(preset="a", path="b"), data=data)
    with pytest.raises(CombinedConfigError, match=r"model\.hidden_size cannot change the model of model\.path"):
        TrainConfig(model=ModelConfig(path="b", hidden_size=3), data=data)


# Resuming


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A function that makes a checkpoint at step 50 whose run had these settings."""

    def make(*overrides: tuple[str, str], step: int = 50) -> Checkpoint:
        config = resolve(write(tmp_path, TOML), [("train.steps", "100"), *overrides]).config
        path = tmp_path / "checkpoint"
        write_checkpoint(
            path, SPEC, random_state(), training=training_state(step=step), config=encode(config), overwrite=True
        )
        return Checkpoint(path)

    return make


def now(tmp_path: Path, *overrides: tuple[str, str], text: str = "") -> Resolved:
    return resolve(write(tmp_path, TOML.replace("steps = 50", "steps = 100") + text), overrides)


def test_c164_explicit_beats_checkpoint_beats_default(tmp_path: Path, saved: Any) -> None:
    checkpoint = saved(("optimizer.lr", "1e-3"), ("data.tokenizer", "A"), ("optimizer.eps", "1e-6"))
    merged, notes = merge(now(tmp_path, ("optimizer.lr", "1e-4"), ("data.tokenizer", "B")), checkpoint)
    config = merged.config
    assert (config.optimizer.lr, config.data.tokenizer, config.optimizer.eps) == (1e-4, "B", 1e-6)
    sources = [merged.sources[n] for n in ("optimizer.lr", "data.tokenizer", "optimizer.eps", "optimizer.schedule")]
    assert sources == ["command line", "command line", "checkpoint", "default"]
    assert any("optimizer.lr changes from 0.001 to 0.0001" in note for note in notes)
    assert any("data.tokenizer changes from 'A' to 'B'" in note for note in notes)


def test_c113_other_settings_in_the_file_are_an_error_that_lists_them_all(tmp_path: Path, saved: Any) -> None:
    checkpoint = saved(("optimizer.lr", "6e-4"), ("optimizer.betas", "0.8,0.95"), ("train.global_batch_size", "16"))
    with pytest.raises(CheckpointError) as caught:
        merge(now(tmp_path, text="global_batch_size = 8"), checkpoint)
    message = str(caught.value)
    assert "optimizer.lr is 0.001 in the file and 0.0006 in the checkpoint" in message
    assert "optimizer.betas is [0.8, 0.9] in the file and [0.8, 0.95] in the checkpoint" in message
    assert "train.global_batch_size is 8 in the file and 16 in the checkpoint" in message


def test_c113_the_command_line_settles_it(tmp_path: Path, saved: Any) -> None:
    checkpoint = saved(("optimizer.lr", "6e-4"), ("optimizer.schedule", "constant"))
    merged, notes = merge(now(tmp_path, ("optimizer.lr", "6e-4"), ("optimizer.schedule", "cosine")), checkpoint)
    assert merged.config.optimizer.schedule == "cosine"
    assert any("learning rate of step 51 is" in note and "would be 0.0006" in note for note in notes)


def test_c114_a_changed_length_shows_both_rates(tmp_path: Path, saved: Any) -> None:
    merged, notes = merge(now(tmp_path, ("train.steps", "200")), saved())
    assert merged.config.train.steps == 200
    (note,) = notes
    # 0.001 / 2 * (1 + cos(pi * 51 / 200)) and / 100
    assert "train.steps changes from 100 to 200" in note
    assert "step 51 is 0.000847956" in note and "would be 0.000484295" in note


def test_settings_of_the_place_are_not_taken_from_the_checkpoint(tmp_path: Path, saved: Any) -> None:
    checkpoint = saved(
        ("train.stop_step", "50"), ("train.device", "cuda"), ("train.output", "elsewhere"), ("train.backend", "jax")
    )
    merged, notes = merge(now(tmp_path), checkpoint)
    run = merged.config.train
    assert (run.stop_step, run.device, run.output, run.backend) == (None, None, "run", "jax")
    assert notes == []


@pytest.mark.parametrize("name", ["train.micro_batch_size", "train.eval_every", "train.keep", "train.max_skipped"])
def test_c111_settings_without_influence_on_the_course_may_change(tmp_path: Path, saved: Any, name: str) -> None:
    merged, notes = merge(now(tmp_path, text=f"{name.split('.')[1]} = 4"), saved())
    assert (values_of(merged.config)[name], merged.sources[name], notes) == (4, "file", [])


@pytest.mark.parametrize(
    ("override", "match"),
    [(("train.dtype", "float64"), "another width"), (("train.seed", "5"), r"train\.seed cannot change")],
)
def test_what_cannot_change_is_refused_even_on_the_command_line(
    tmp_path: Path, saved: Any, override: tuple[str, str], match: str
) -> None:
    with pytest.raises(CheckpointError, match=match):
        merge(now(tmp_path, override), saved())


def test_a_checkpoint_of_weights_alone_is_not_resumed(tmp_path: Path) -> None:
    weights = (("params", n, a) for g, n, a in random_state() if g == "master")
    path = write_checkpoint(tmp_path / "weights", SPEC, weights)
    with pytest.raises(CheckpointError, match=r"model\.path"):
        merge(now(tmp_path), Checkpoint(path))


# The command line


def test_words_are_split_into_settings() -> None:
    words = ["run.toml", "a.b=c=d", "--optimizer.lr", "1", "--backend=jax", "--eval-every", "5", "--check"]
    args = train_command.parse(words)
    assert args.file == Path("run.toml") and args.is_check
    assert args.overrides == (
        ("a.b", "c=d"),
        ("optimizer.lr", "1"),
        ("train.backend", "jax"),
        ("train.eval_every", "5"),
    )


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "a configuration file is needed"),
        (["a", "b"], "'b' is a second file"),
        (["a", "--lr"], "--lr needs a value"),
    ],
)
def test_words_that_make_no_sense_are_named(words: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        train_command.parse(words)


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_command.run(train_command.parse(["--help"])) == 0
    text = capsys.readouterr().out
    assert all(name.split(".")[1] in text for name in FIELDS)
    assert "bfloat16 keeps an fp32 master" in text


def test_check_prints_values_and_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, TOML)
    assert train_command.run(train_command.parse([str(file), "--check", "optimizer.lr=2e-4"])) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["optimizer.lr", "0.0002", "command", "line"] in rows
    assert ["train.steps", "50", "file"] in rows
    assert ["optimizer.eps", "1e-08", "default"] in rows


@pytest.mark.parametrize("file", sorted(Path(__file__).parents[1].glob("examples/*.toml")), ids=lambda f: f.name)
def test_examples_are_valid(file: Path) -> None:
    assert resolve(file).config.model.preset is not None
