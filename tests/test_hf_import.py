"""Reading Hugging Face directories: names, shapes, ties, dtypes and values, and every fault before the first tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import distance
from hf_dirs import BF16, Array, Tensors, config, tensors, write_directory, write_safetensors

from duomesh.converters.hf.config import read_config
from duomesh.converters.hf.oracle import HfOracle
from duomesh.converters.hf.reader import HfCheckpoint
from duomesh.converters.pairing import Pairing, convert_pairing, with_pairing
from duomesh.converters.values import find_nonfinite, largest_difference
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.errors import BackendError, ConversionError, TensorFileError
from duomesh.core.ir.build import build_program
from duomesh.core.rope import inverse_frequencies
from duomesh.core.spec.model import ModelSpec
from duomesh.kernels.reference.model import ReferenceModel

LAYER1 = "model.layers.1."
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def batch(vocab: int, *, seq: int = 32, seed: int = 0) -> Batch:
    """Two samples with targets left out unevenly, weights, and positions that jump."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (2, seq)).astype(np.int32)
    labels = np.roll(tokens, -1, axis=1)
    labels[:, -1] = IGNORE
    labels[1, 3:9] = IGNORE
    positions = np.stack([np.arange(seq), 2 * np.arange(seq) % (seq + 5)]).astype(np.int32)
    return Batch(tokens, labels, loss_mask=rng.random((2, seq)).astype(np.float32), positions=positions)


def loaded(path: Path, **options: Any) -> dict[str, Array]:
    with HfCheckpoint(path, **options) as checkpoint:
        return dict(checkpoint.params())


MODELS = {
    "llama": config(),
    "llama biases": config(attention_bias=True, mlp_bias=True),
    "llama3 scaling": config(
        rope_theta=5e5,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "yarn": config(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    "wide heads": config(head_dim=24, hidden_act="gelu"),
    "tied": config(tie_word_embeddings=True),
    "mistral": config(model_type="mistral", sliding_window=8),
    "ministral": config(model_type="ministral", sliding_window=8, layer_types=["full_attention", "sliding_attention"]),
    "qwen2": config(model_type="qwen2", attention_bias=..., tie_word_embeddings=True),
    "qwen2 window": config(
        model_type="qwen2", attention_bias=..., use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": config(model_type="qwen3", head_dim=24, rms_norm_eps=1e-3),
}


@pytest.mark.parametrize("case", MODELS)
def test_an_imported_model_computes_what_transformers_computes(tmp_path: Path, case: str) -> None:
    """Our reader and the float64 reference against transformers reading the directory by itself."""
    fields = MODELS[case]
    write_directory(tmp_path, fields, tensors(fields), shards=2)
    data = batch(fields["vocab_size"])
    oracle = HfOracle.from_directory(tmp_path, dtype="float64").trace(data, grads=True)
    with HfCheckpoint(tmp_path) as checkpoint:
        params = {name: array.astype(np.float64) for name, array in checkpoint.params()}
        reference = ReferenceModel(build_program(checkpoint.spec), params)
    values = reference.forward(data)
    loss, grads = reference.loss_and_grads([data])
    assert set(oracle.values) == {
        "embed.lookup", "layers.0.mlp_residual", "layers.1.mlp_residual", "head.norm", "head.logits",
    }  # fmt: skip
    for name, want in oracle.values.items():
        assert distance(values[name], want) <= bound("logits", "float64"), name
    assert abs(loss - oracle.loss) <= bound("loss", "float64") * oracle.loss
    assert set(grads) == set(oracle.grads)
    for name, want in oracle.grads.items():
        assert distance(grads[name], want) <= bound("gradient", "float64"), name


def test_frequencies_of_the_float64_oracle_are_those_of_the_models_table() -> None:
    """transformers' own formulas, evaluated in float64 and rounded once, give our numbers bit for bit."""
    for case in ("llama", "llama3 scaling", "yarn"):
        fields = MODELS[case]
        spec, oracle = random_oracle(fields)
        rope = spec.blocks[0].attention.rope
        assert rope is not None
        assert np.array_equal(oracle._model.model.rotary_emb.inv_freq.numpy(), inverse_frequencies(rope))


def test_nothing_in_the_float64_oracle_is_narrowed() -> None:
    import torch

    from duomesh.converters.hf.oracle import _wide

    x = torch.full((3,), 1 / 3, dtype=torch.float64)
    with _wide():
        made = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), torch.softmax(x, -1, dtype=torch.float32)]
        assert all(y.dtype == torch.float64 for y in made)
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
    assert x.float().dtype == torch.float32


def random_oracle(fields: dict[str, Any], dtype: Any = "float64") -> tuple[ModelSpec, HfOracle]:
    """An oracle made from random parameters of a config."""
    spec = read_config(fields).spec
    rng = np.random.default_rng(1)
    shapes = {name: param.shape for name, param in build_program(spec).params.items()}
    params = {name: (0.1 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    return spec, HfOracle(spec, params.items(), dtype=dtype)


def test_the_oracle_refuses_what_it_cannot_do_exactly(tmp_path: Path) -> None:
    spec, oracle = random_oracle(config())
    tokens = np.zeros((1, 4), np.int32)
    with pytest.raises(BackendError, match="segment_ids"):
        oracle.trace(Batch(tokens, tokens, segment_ids=tokens), grads=False)
    with pytest.raises(BackendError, match="were not given"):
        HfOracle(spec, [])
    with pytest.raises(BackendError, match="no parameter of this model"):
        HfOracle(spec, [("embed.weight", np.zeros((3, 3)))])
    empty = oracle.trace(Batch(tokens, np.full_like(tokens, IGNORE)), grads=True)
    assert empty.loss == 0.0
    assert all(not grad.any() for grad in empty.grads.values())
    assert oracle.logits(tokens).shape == (1, 4, 512)
    data = tensors(config())
    del data["model.norm.weight"]
    write_directory(tmp_path, config(), data)
    with pytest.raises(BackendError, match=r"does not find all weights.*model\.norm\.weight"):
        HfOracle.from_directory(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_oracle_runs_in_lower_precision(dtype: Any) -> None:
    """Within the rounding of the dtype, and never in a wider one."""
    data = batch(512)
    got, want = (random_oracle(config(), d)[1].trace(data, grads=True) for d in (dtype, "float64"))
    assert str(got.values["head.logits"].dtype) == dtype == str(got.grads["embed.weight"].dtype)
    error = distance(got.values["head.logits"].astype(np.float64), want.values["head.logits"])
    unit = 2.0 ** (-24 if dtype == "float32" else -8)
    assert 0.1 * unit < error < bound("logits", "bfloat16", own_error=1.0)


# ---- names, shapes and dtypes ------------------------------------------------------------------------------------


def test_c002_biases_are_read_in_the_order_of_their_rows(tmp_path: Path) -> None:
    """Biases on q, k and v only, of unique integers; nothing else has one."""
    fields = config(model_type="qwen2", attention_bias=...)
    data = tensors(fields)
    for n in range(2):
        for i, part in enumerate("qkv"):
            name = f"model.layers.{n}.self_attn.{part}_proj.bias"
            data[name] = np.arange(data[name].size, dtype=np.float32) + 1000 * i + 100 * n
    write_directory(tmp_path, fields, data)
    params = loaded(tmp_path)
    for n in range(2):
        for part in "qkv":
            want = data[f"model.layers.{n}.self_attn.{part}_proj.bias"]
            assert np.array_equal(params[f"layers.{n}.attention.{part}.bias"], want)
    assert sum(name.endswith("bias") for name in params) == 6


def test_every_name_goes_to_its_own_parameter(tmp_path: Path) -> None:
    fields = config(model_type="qwen3", attention_bias=True)
    data = {name: np.full(a.shape, i, np.float32) for i, (name, a) in enumerate(tensors(fields).items())}
    write_directory(tmp_path, fields, data)
    params = loaded(tmp_path)
    number = {name: float(a.flat[0]) for name, a in data.items()}
    assert {n: float(a.flat[0]) for n, a in params.items() if n.startswith(("embed", "head", "layers.1"))} == {
        "embed.weight": number[EMBED],
        "layers.1.attention_norm.weight": number[LAYER1 + "input_layernorm.weight"],
        **{
            f"layers.1.attention.{x}.{leaf}": number[f"{LAYER1}self_attn.{x}_proj.{leaf}"]
            for x in "qkvo"
            for leaf in ("weight", "bias")
        },
        "layers.1.attention.q_norm.weight": number[LAYER1 + "self_attn.q_norm.weight"],
        "layers.1.attention.k_norm.weight": number[LAYER1 + "self_attn.k_norm.weight"],
        "layers.1.mlp_norm.weight": number[LAYER1 + "post_attention_layernorm.weight"],
        **{f"layers.1.mlp.{x}.weight": number[f"{LAYER1}mlp.{x}_proj.weight"] for x in ("gate", "up", "down")},
        "head.norm.weight": number["model.norm.weight"],
        "head.weight": number[HEAD],
    }


def test_slices_are_read_alone_and_keep_their_dtype(tmp_path: Path) -> None:
    fields = config()
    data = tensors(fields, dtype=BF16)
    write_directory(tmp_path, fields, data)
    with HfCheckpoint(tmp_path) as checkpoint:
        name = "layers.1.attention.q.weight"
        want = data[LAYER1 + "self_attn.q_proj.weight"]
        assert checkpoint.info(name).dtype == "bfloat16"
        assert checkpoint.read(name, [(5, 40)]).tobytes() == want[5:40].tobytes()
        assert checkpoint.read(name).tobytes() == want.tobytes()


def test_c014_rotary_buffers_of_old_files_are_optional(tmp_path: Path) -> None:
    fields = config()
    data = tensors(fields)
    write_directory(tmp_path / "without", fields, data)
    extra = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for n in range(2)}
    write_directory(tmp_path / "with", fields, {**data, **extra, "model.rotary_emb.inv_freq": np.ones(8, np.float32)})
    a, b = loaded(tmp_path / "without"), loaded(tmp_path / "with")
    assert a.keys() == b.keys()
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    with HfCheckpoint(tmp_path / "with") as checkpoint:
        assert len(checkpoint.buffers) == 3
        assert checkpoint.read_buffer(checkpoint.buffers[0]).tobytes() == np.ones(8, np.float32).tobytes()


def test_c013_a_missing_weight_is_an_error_unless_allowed(tmp_path: Path) -> None:
    fields = config()
    data = tensors(fields)
    del data[LAYER1 + "mlp.down_proj.weight"]
    write_directory(tmp_path, fields, data)
    with pytest.raises(ConversionError, match=r"lacks 1 of 21 parameters: model\.layers\.1\.mlp\.down_proj\.weight"):
        HfCheckpoint(tmp_path)
    with HfCheckpoint(tmp_path, allow_missing=True) as checkpoint:
        assert checkpoint.missing == ("layers.1.mlp.down.weight",)
        assert any("left uninitialised: model.layers.1.mlp.down_proj" in w for w in checkpoint.warnings)
        assert "layers.1.mlp.down.weight" not in dict(checkpoint.params())


def test_c013_an_untied_model_without_head_is_not_tied_silently(tmp_path: Path) -> None:
    data = tensors(config())
    del data[HEAD]
    write_directory(tmp_path, config(), data)
    with pytest.raises(ConversionError, match=r"lm_head\.weight \(tie_word_embeddings is false\)"):
        HfCheckpoint(tmp_path)


UNEXPECTED = {
    "a bias": LAYER1 + "self_attn.q_proj.bias",
    "a q norm": LAYER1 + "self_attn.q_norm.weight",
    "a layer too many": "model.layers.2.mlp.up_proj.weight",
    "a leading zero": "model.layers.01.mlp.up_proj.weight",
    "quantisation scales": LAYER1 + "mlp.up_proj.weight_scale",
    "another model": "vision_tower.patch.weight",
    "no prefix": "layers.1.mlp.up_proj.weight",
}


@pytest.mark.parametrize("case", UNEXPECTED)
def test_tensors_that_the_model_does_not_have_are_named(tmp_path: Path, case: str) -> None:
    data = {**tensors(config()), UNEXPECTED[case]: np.zeros((2, 2), np.float32)}
    write_directory(tmp_path, config(), data)
    with pytest.raises(ConversionError, match=rf"does not have: {UNEXPECTED[case]}"):
        HfCheckpoint(tmp_path)


def test_a_wrong_shape_is_found_before_anything_is_read(tmp_path: Path) -> None:
    data = tensors(config())
    data[LAYER1 + "mlp.down_proj.weight"] = np.zeros((128, 64), np.float32)
    write_directory(tmp_path, config(), data)
    with pytest.raises(
        ConversionError, match=r"down_proj.weight has shape \(128, 64\); config.json asks for \(64, 128"
    ):
        HfCheckpoint(tmp_path)


def test_a_weight_of_integers_is_refused(tmp_path: Path) -> None:
    data = tensors(config())
    data["model.norm.weight"] = np.ones(64, np.int64)
    write_directory(tmp_path, config(), data)
    with pytest.raises(ConversionError, match=r"model\.norm\.weight is stored as int64"):
        HfCheckpoint(tmp_path)


@pytest.mark.parametrize(("part", "heads"), [("q", 4), ("k", 2)])
def test_c043_a_full_width_norm_is_told_from_a_norm_of_every_head(tmp_path: Path, part: str, heads: int) -> None:
    fields = config(model_type="qwen3")
    data = tensors(fields)
    name = f"{LAYER1}self_attn.{part}_norm.weight"
    data[name] = np.ones(heads * 16, np.float32)
    write_directory(tmp_path, fields, data)
    with pytest.raises(
        ConversionError,
        match=rf"{name} has shape \({heads * 16},\).*every head has length head_dim = 16.*"
        rf"full width has {heads} x 16 = {heads * 16}",
    ):
        HfCheckpoint(tmp_path)


def test_c009_c013_shards_that_are_missing_stop_before_any_tensor(tmp_path: Path) -> None:
    write_directory(tmp_path, config(), tensors(config()), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(TensorFileError, match=r"missing: model-00002-of-00003\.safetensors"):
        HfCheckpoint(tmp_path)


def test_c011_warnings_about_ignored_copies_reach_the_checkpoint(tmp_path: Path) -> None:
    fields = config()
    data = tensors(fields)
    write_directory(tmp_path, fields, data, shards=2)
    write_safetensors(tmp_path / "model.safetensors", {name: a + 1 for name, a in data.items()})
    with HfCheckpoint(tmp_path) as checkpoint:
        assert any("ignored copies in model.safetensors" in warning for warning in checkpoint.warnings)
        assert checkpoint.read("embed.weight").tobytes() == data[EMBED].tobytes()


# ---- ties --------------------------------------------------------------------------------------------------------


def tied_directories(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Dirs a (only the embedding), b (only the head), c (both, different), d (both, equal); fields and tensors of a."""
    fields = config(tie_word_embeddings=True)
    data = tensors(fields)
    rest = {name: array for name, array in data.items() if name != EMBED}
    other = data[EMBED].copy()
    other[511, 63] += 0.25
    write_directory(path / "a", fields, data)
    write_directory(path / "b", fields, {**rest, HEAD: data[EMBED]})
    write_directory(path / "c", fields, {**data, HEAD: other})
    write_directory(path / "d", fields, {**data, HEAD: data[EMBED]})
    return fields, data


def test_c006_a_tied_group_loads_from_whichever_member_exists(tmp_path: Path) -> None:
    _, data = tied_directories(tmp_path)
    for name in "abd":
        params = loaded(tmp_path / name)
        assert params["embed.weight"].tobytes() == data[EMBED].tobytes(), name
        assert "head.weight" not in params
    # one member is not missing as long as the other is there
    fields = config(tie_word_embeddings=True)
    write_directory(tmp_path / "e", fields, {n: a for n, a in data.items() if n != EMBED})
    with pytest.raises(ConversionError, match=r"lacks 1 of 20 parameters: model\.embed_tokens\.weight"):
        HfCheckpoint(tmp_path / "e")


def test_c006_members_that_differ_are_an_error_unless_one_is_picked(tmp_path: Path) -> None:
    _, data = tied_directories(tmp_path)
    with pytest.raises(
        ConversionError,
        match=r"model\.embed_tokens\.weight and lm_head\.weight differ \(the largest difference is 0\.25",
    ):
        loaded(tmp_path / "c")
    embed = loaded(tmp_path / "c", tie_source="embed")["embed.weight"]
    head = loaded(tmp_path / "c", tie_source="head")["embed.weight"]
    assert embed.tobytes() == data[EMBED].tobytes()
    assert float(head[511, 63]) == float(data[EMBED][511, 63] + np.float32(0.25))


def test_c006_members_of_other_shapes_or_with_nan_differ(tmp_path: Path) -> None:
    fields = config(tie_word_embeddings=True)
    data = tensors(fields)
    write_directory(tmp_path / "shape", fields, {**data, HEAD: np.zeros((500, 64), np.float32)})
    with pytest.raises(ConversionError, match=r"shapes are \(512, 64\) and \(500, 64\)"):
        HfCheckpoint(tmp_path / "shape")
    other = data[EMBED].copy()
    other[3, 3] = np.nan
    write_directory(tmp_path / "nan", fields, {**data, HEAD: other})
    with pytest.raises(ConversionError, match="the largest difference is inf"):
        loaded(tmp_path / "nan")


def test_c006_members_are_compared_as_far_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Element [511, 63] differs; in chunks that do not begin where the rectangle does."""
    monkeypatch.setattr("duomesh.converters.hf.reader._ROWS", 100)
    _, data = tied_directories(tmp_path)
    with HfCheckpoint(tmp_path / "c") as checkpoint:
        for box in ([(150, 511)], [(150, 512), (7, 63)], [(511, 512), (0, 63)]):
            want = data[EMBED][tuple(slice(*side) for side in box)]
            assert checkpoint.read("embed.weight", box).tobytes() == want.tobytes()
        for box in ([(150, 512)], [(511, 512), (63, 64)]):
            with pytest.raises(ConversionError, match=r"the largest difference is 0\.25"):
                checkpoint.read("embed.weight", box)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rectangles_of_every_parameter_are_those_of_the_whole(tmp_path: Path, pairing: Pairing) -> None:
    fields = config(model_type="qwen3", attention_bias=True)
    write_directory(tmp_path, fields, tensors(fields), shards=2)
    whole = loaded(tmp_path, pairing=pairing)
    with HfCheckpoint(tmp_path, pairing=pairing) as checkpoint:
        deferred = list(checkpoint.deferred_params())  # each knows its own name later too
        assert [name for name, _ in deferred] == list(whole)
        for name, tensor in deferred:
            box = tuple((size // 3, size - size // 4) for size in tensor.shape)
            want = whole[name][tuple(slice(*side) for side in box)]
            assert tensor.shape == whole[name].shape and tensor.read(box).tobytes() == want.tobytes(), name


# ---- values ------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path: Path) -> tuple[Path, Tensors]:
    data = tensors(config())
    data[LAYER1 + "mlp.up_proj.weight"][3, 5] = np.nan
    data[LAYER1 + "mlp.up_proj.weight"][7, 0] = np.nan
    data["model.norm.weight"][9] = -np.inf
    return write_directory(tmp_path / "broken", config(), data), data


def test_c039_weights_that_are_not_finite_are_reported_by_name(broken: tuple[Path, Tensors]) -> None:
    """Both tensors, their counts and first indices; nothing is replaced."""
    path, _ = broken
    with (
        HfCheckpoint(path) as checkpoint,
        pytest.raises(
            ConversionError,
            match=r"model\.layers\.1\.mlp\.up_proj\.weight: 2 NaN and 0 Inf, the first at \[3, 5\]; "
            r"model\.norm\.weight: 0 NaN and 1 Inf, the first at \[9\]",
        ),
    ):
        list(checkpoint.params())


def test_c039_slices_are_checked_as_they_are_read(broken: tuple[Path, Tensors]) -> None:
    path, data = broken
    with HfCheckpoint(path) as checkpoint:
        assert np.array_equal(
            checkpoint.read("layers.1.mlp.up.weight", [(8, 20)]), data[LAYER1 + "mlp.up_proj.weight"][8:20]
        )
        with pytest.raises(ConversionError, match=r"1 NaN and 0 Inf, the first at \[7, 0\]\. Repair"):
            checkpoint.read("layers.1.mlp.up.weight", [(6, 10)])
        with pytest.raises(ConversionError, match=r"1 NaN and 0 Inf, the first at \[3, 5\]\. Repair"):
            checkpoint.read("layers.1.mlp.up.weight", [(2, 10), (4, 6)])


def test_c039_allowed_ones_are_taken_as_they_are_with_a_warning(broken: tuple[Path, Tensors]) -> None:
    path, data = broken
    with HfCheckpoint(path, allow_nonfinite=True) as checkpoint:
        params = dict(checkpoint.params())
        assert params["layers.1.mlp.up.weight"].tobytes() == data[LAYER1 + "mlp.up_proj.weight"].tobytes()
        assert params["head.norm.weight"].tobytes() == data["model.norm.weight"].tobytes()
        assert sum("not finite were taken as they are" in warning for warning in checkpoint.warnings) == 2


def test_nonfinite_values_are_found_across_chunks_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duomesh.converters.values._CHUNK", 7)
    array = np.zeros((5, 4, 3), np.float32)
    assert find_nonfinite(array) is None
    array[2, 1, 1] = np.inf
    array[4, 3, 2] = np.nan
    for dtype in (np.float32, np.float16, np.float64, BF16):
        found = find_nonfinite(array.astype(dtype), origin=[10, 5])
        assert found is not None
        assert (found.num_nan, found.num_inf, found.first) == (1, 1, (12, 6, 1))
    assert find_nonfinite(np.array([1, 2])) is None
    scalar = find_nonfinite(np.array(np.nan))
    assert scalar is not None and scalar.first == ()
    other = array.copy()
    assert largest_difference(array, other) == 0.0
    other[0, 0, 0] = -0.5
    assert largest_difference(array, other) == 0.5


# ---- rotary pairing ----------------------------------------------------------------------------------------------


def test_c023_an_interleaved_reading_reorders_weights_biases_and_norms(tmp_path: Path) -> None:
    """By hand for one head: channel 2j of the interleaved order is channel j, 2j + 1 is j + 8."""
    fields = config(model_type="qwen3", attention_bias=True)
    data = tensors(fields)
    write_directory(tmp_path, fields, data)
    order = [channel for j in range(8) for channel in (j, j + 8)]
    with HfCheckpoint(tmp_path, pairing="interleaved") as checkpoint:
        params = dict(checkpoint.params())
        rope = checkpoint.spec.blocks[0].attention.rope
        assert rope is not None and rope.pairing == "interleaved"
        part = checkpoint.read("layers.1.attention.k.weight", [(5, 30)])
    for part_name, heads in (("q", 4), ("k", 2)):
        rows = [head * 16 + channel for head in range(heads) for channel in order]
        for leaf in ("weight", "bias"):
            want = data[f"{LAYER1}self_attn.{part_name}_proj.{leaf}"][rows]
            assert params[f"layers.1.attention.{part_name}.{leaf}"].tobytes() == want.tobytes()
        want = data[f"{LAYER1}self_attn.{part_name}_norm.weight"][order]
        assert params[f"layers.1.attention.{part_name}_norm.weight"].tobytes() == want.tobytes()
    assert part.tobytes() == params["layers.1.attention.k.weight"][5:30].tobytes()
    for name in ("v.weight", "v.bias", "o.weight", "o.bias"):
        want = data[f"{LAYER1}self_attn.{name[0]}_proj.{name[2:]}"]
        assert params[f"layers.1.attention.{name}"].tobytes() == want.tobytes()


def test_c023_partial_rotation_moves_only_the_rotated_channels() -> None:
    from dataclasses import replace

    from duomesh.core.spec.presets import preset

    spec = preset("tiny-qwen3")
    block = spec.blocks[0]
    assert block.attention.rope is not None
    rope = replace(block.attention.rope, rotary_dim=8)
    spec = replace(spec, blocks=(replace(block, attention=replace(block.attention, rope=rope)),) * 2)
    channels = np.arange(24.0)
    got = convert_pairing(spec, "layers.0.attention.q_norm.weight", channels, "interleaved")
    assert got.tolist() == [0, 4, 1, 5, 2, 6, 3, 7, *range(8, 24)]
    back = convert_pairing(with_pairing(spec, "interleaved"), "layers.0.attention.q_norm.weight", got, "half")
    assert back.tolist() == channels.tolist()
