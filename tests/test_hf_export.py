"""Writing Hugging Face directories: the same bytes back, one complete directory, and the same model in transformers."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import distance
from hf_dirs import (
    BF16,
    Array,
    Tensors,
    as_read,
    config,
    read_directory,
    read_safetensors,
    tensors,
    write_directory,
    write_safetensors,
    write_tokenizer,
)

from duomesh.converters.hf.config import read_config
from duomesh.converters.hf.oracle import HfOracle
from duomesh.converters.hf.reader import HfCheckpoint
from duomesh.converters.hf.writer import ExportReport, export_hf
from duomesh.converters.pairing import convert_pairing, with_pairing
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.errors import ConversionError, DataError, OutputError
from duomesh.core.ir.build import build_program
from duomesh.core.random import draw
from duomesh.core.spec.model import ModelSpec
from duomesh.core.spec.presets import preset
from duomesh.kernels.reference.model import ReferenceModel

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER1 = "model.layers.1."
INDEX = "model.safetensors.index.json"


def trip(source: Path, target: Path, **options: Any) -> ExportReport:
    """HF directory -> canonical tensors -> HF directory."""
    reading = {k: options.pop(k) for k in ("allow_nonfinite", "allow_missing", "tie_source") if k in options}
    writing = {k: v for k, v in reading.items() if k == "allow_missing"}
    with HfCheckpoint(source, **reading) as checkpoint:
        return export_hf(target, checkpoint.spec, checkpoint.params(), source=checkpoint, **options, **writing)


def random_params(spec: ModelSpec, dtype: Any = np.float32) -> dict[str, Array]:
    """Weights, norm weights and biases all random."""
    return {n: draw(p, 3, perturb=0.2).astype(dtype) for n, p in build_program(spec).params.items()}


def tokens(vocab: int, seq: int = 32) -> Batch:
    ids = np.random.default_rng(2).integers(0, vocab, (2, seq)).astype(np.int32)
    return Batch(ids, np.where(np.arange(seq) < seq - 1, np.roll(ids, -1, axis=1), IGNORE).astype(np.int32))


def fields_of(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "config.json").read_text()))


# ---- bytes -------------------------------------------------------------------------------------------------------

TRIPS = {
    "llama": config(attention_bias=True, mlp_bias=True),
    "mistral": config(model_type="mistral", sliding_window=8),
    "qwen2": config(model_type="qwen2", attention_bias=...),
    "qwen3": config(model_type="qwen3", head_dim=24),
    "ministral": config(model_type="ministral", sliding_window=8, layer_types=["full_attention", "sliding_attention"]),
    "tied": config(tie_word_embeddings=True),
}


@pytest.mark.parametrize("case", TRIPS)
def test_every_byte_survives_the_trip(tmp_path: Path, case: str) -> None:
    """Also with bf16 norm weights that an added and subtracted 1 would round away."""
    fields = TRIPS[case]
    data = tensors(fields, dtype=BF16)
    data["model.norm.weight"][:2] = (0.00390625, -0.001)
    write_directory(tmp_path / "in", fields, data, shards=3)
    trip(tmp_path / "in", tmp_path / "out")
    assert read_directory(tmp_path / "out") == as_read(data)
    assert read_config(tmp_path / "out").spec == read_config(tmp_path / "in").spec


def test_c002_biases_survive_in_the_order_of_their_rows_and_no_other_appears(tmp_path: Path) -> None:
    fields = TRIPS["qwen2"]
    data = tensors(fields)
    biases = [name for name in data if name.endswith("bias")]
    for i, name in enumerate(biases):
        data[name] = np.arange(data[name].size, dtype=np.float32) + 1000 * i
    write_directory(tmp_path / "in", fields, data)
    trip(tmp_path / "in", tmp_path / "out")
    found = read_directory(tmp_path / "out")
    assert [name for name in found if name.endswith("bias")] == biases
    assert found == as_read(data)


@pytest.mark.parametrize("layout", ["only embed", "only head", "both"])
def test_c006_a_tied_head_is_written_if_the_source_had_it(tmp_path: Path, layout: str) -> None:
    fields = config(tie_word_embeddings=True)
    data = tensors(fields)
    if layout != "only embed":
        data[HEAD] = data[EMBED]
    source = {name: a for name, a in data.items() if name != EMBED} if layout == "only head" else data
    write_directory(tmp_path / "in", fields, source)
    trip(tmp_path / "in", tmp_path / "out")
    assert read_directory(tmp_path / "out") == as_read(data)


def test_c006_the_member_that_was_picked_is_written_for_both(tmp_path: Path) -> None:
    fields = config(tie_word_embeddings=True)
    data = tensors(fields)
    write_directory(tmp_path / "in", fields, {**data, HEAD: data[EMBED] + 1})
    trip(tmp_path / "in", tmp_path / "out", tie_source="head")
    found = read_directory(tmp_path / "out")
    assert found[EMBED] == found[HEAD] == as_read({HEAD: data[EMBED] + 1})[HEAD]


def test_c014_rotary_buffers_of_the_source_are_kept_verbatim(tmp_path: Path) -> None:
    fields = config()
    data = {**tensors(fields, dtype=BF16), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    write_directory(tmp_path / "in", fields, data)
    trip(tmp_path / "in", tmp_path / "out", dtype="float16")
    assert read_directory(tmp_path / "out")["model.layers.0.self_attn.rotary_emb.inv_freq"][0] == "F32"


def mixed(fields: dict[str, Any]) -> Tensors:
    """bf16 matrices, fp32 norms, one fp16 tensor."""
    data = {n: a.astype(np.float32 if "norm" in n else BF16) for n, a in tensors(fields).items()}
    data[LAYER1 + "mlp.up_proj.weight"] = data[LAYER1 + "mlp.up_proj.weight"].astype(np.float16)
    return data


def test_c036_each_tensor_keeps_its_dtype_and_the_config_states_the_main_one(tmp_path: Path) -> None:
    write_directory(tmp_path / "in", config(), mixed(config()))
    report = trip(tmp_path / "in", tmp_path / "out")
    assert read_directory(tmp_path / "out") == as_read(mixed(config()))
    assert fields_of(tmp_path / "out")["torch_dtype"] == "bfloat16"
    assert set(report.dtypes) == {"bfloat16", "float32", "float16"}


def test_c036_with_a_dtype_every_weight_has_it_and_the_config_says_so(tmp_path: Path) -> None:
    """These families have no weights that must stay fp32."""
    write_directory(tmp_path / "in", config(), mixed(config()))
    trip(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    found = read_directory(tmp_path / "out")
    assert {code for code, _, _ in found.values()} == {"BF16"}
    want = {name: array.astype(BF16) for name, array in mixed(config()).items()}
    assert found == as_read(want)
    assert fields_of(tmp_path / "out")["torch_dtype"] == "bfloat16"


def test_c036_a_v5_source_stays_v5(tmp_path: Path) -> None:
    fields = config(
        rope_theta=..., rope_scaling=..., torch_dtype=..., dtype="float32", rope_parameters={"rope_theta": 1e6}
    )
    write_directory(tmp_path / "in", fields, tensors(fields))
    trip(tmp_path / "in", tmp_path / "out", dtype="float16")
    out = fields_of(tmp_path / "out")
    assert out["dtype"] == "float16" and "torch_dtype" not in out and "rope_theta" not in out
    assert out["rope_parameters"] == {"rope_theta": 1e6, "rope_type": "default"}


def test_fields_that_say_nothing_about_the_model_are_kept(tmp_path: Path) -> None:
    fields = config(my_note="kept", bos_token_id=7, eos_token_id=[1, 2], auto_map={"a": "b"}, attention_dropout=0.1)
    del fields["use_cache"]
    write_directory(tmp_path / "in", fields, tensors(fields))
    (tmp_path / "in" / "generation_config.json").write_text('{"temperature": 0.5}')
    trip(tmp_path / "in", tmp_path / "out")
    out = fields_of(tmp_path / "out")
    assert (out["my_note"], out["bos_token_id"], out["eos_token_id"]) == ("kept", 7, [1, 2])
    assert out["attention_dropout"] == 0.1
    assert "auto_map" not in out and "pad_token_id" not in out
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"temperature": 0.5}


# ---- casts -------------------------------------------------------------------------------------------------------


def export_cast(path: Path, value_dtype: Any, values: list[float], **options: Any) -> ExportReport:
    """Exports D0 with `values` at the start of its final norm."""
    spec = read_config(config()).spec
    params = {name: array.astype(value_dtype) for name, array in random_params(spec).items()}
    params["head.norm.weight"][: len(values)] = values
    return export_hf(path, spec, params.items(), **options)


def test_c040_values_that_overflow_stop_with_counts(tmp_path: Path) -> None:
    with pytest.raises(
        ConversionError,
        match=r"head\.norm\.weight: 2 of 64 values do not fit float16, whose largest number is 65504; "
        r"the largest is 99840 \(bfloat16\)",
    ):
        export_cast(tmp_path / "out", BF16, [1e5, -8e4, 3e-8], dtype="float16")
    with pytest.raises(ConversionError, match=r"1 of 64 values do not fit float8_e4m3fn.* 448; the largest is 1000"):
        export_cast(tmp_path / "out", BF16, [1000.0], dtype="float8_e4m3fn")
    assert list(tmp_path.iterdir()) == []


def test_c040_saturation_is_explicit_and_small_values_are_counted(tmp_path: Path) -> None:
    report = export_cast(tmp_path / "out", BF16, [1e5, -8e4, 3e-8, 1e-9], dtype="float16", saturate=True)
    _, _, data = read_directory(tmp_path / "out")["model.norm.weight"]
    written = np.frombuffer(data, np.float16)
    assert written[:2].tolist() == [65504.0, -65504.0]
    assert written[3] == 0.0 and 0 < written[2] < np.finfo(np.float16).tiny
    notes = "\n".join(report.notes)
    assert "head.norm.weight: 2 values up to 99840 were set to the largest float16" in notes
    assert "head.norm.weight: 2 values below the smallest normal float16 lost precision, 1 of them became zero" in notes


def test_c040_a_cast_that_loses_nothing_says_nothing(tmp_path: Path) -> None:
    # the second is below the smallest normal fp16, and exactly one of its subnormal numbers
    report = export_cast(tmp_path / "out", np.float32, [65504.0, 2.0**-20, 0.0], dtype="float16")
    assert not any(note.startswith("head.norm.weight") for note in report.notes)
    report = export_cast(tmp_path / "wide", np.float16, [65504.0, 2.0**-20], dtype="float32")
    assert all("values" not in note for note in report.notes)


@pytest.mark.parametrize("dtype", ["int8", "bool", "float7"])
def test_a_dtype_that_cannot_hold_weights_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ConversionError, match=f"dtype '{dtype}' cannot hold weights"):
        export_cast(tmp_path / "out", np.float32, [], dtype=dtype)


# ---- the directory -----------------------------------------------------------------------------------------------


def test_c012_an_export_never_mixes_with_files_of_an_earlier_one(tmp_path: Path) -> None:
    write_directory(tmp_path / "in", config(), tensors(config()))
    first = trip(tmp_path / "in", tmp_path / "out", max_shard_bytes=200_000)
    assert sum(name.startswith("model-0000") for name in first.files) == 3
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with pytest.raises(OutputError, match="out is not empty"):
        trip(tmp_path / "in", tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    (tmp_path / "out" / "stray.txt").write_text("old")
    second = trip(tmp_path / "in", tmp_path / "out", overwrite=True)
    assert set(second.files) == {file.name for file in (tmp_path / "out").iterdir()}
    assert set(second.files) == {"config.json", "generation_config.json", "model.safetensors"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_shards_are_bounded_and_the_index_is_complete(tmp_path: Path) -> None:
    data = tensors(config())
    write_directory(tmp_path / "in", config(), data)
    trip(tmp_path / "in", tmp_path / "out", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in data.values())
    found = {name: file.name for file in files for name in read_safetensors(file)}
    assert index["weight_map"] == found
    for file in files:
        sizes = [len(raw) for _, _, raw in read_safetensors(file).values()]
        assert len(sizes) == 1 or sum(sizes) <= 100_000
    assert b'"format":"pt"' in files[0].read_bytes()[:200]


def test_a_directory_can_be_rewritten_in_place(tmp_path: Path) -> None:
    data = tensors(config())
    write_directory(tmp_path / "here", config(), data, shards=3)
    trip(tmp_path / "here", tmp_path / "here", overwrite=True)
    assert read_directory(tmp_path / "here") == as_read(data)
    assert not (tmp_path / "here" / INDEX).exists()


FAULTY_PARAMS: dict[str, tuple[Any, str]] = {
    "unknown": (lambda p: {**p, "layers.9.mlp.up.weight": p["head.norm.weight"]}, "layers.9.mlp.up.weight: it is no"),
    "shape": (lambda p: {**p, "head.norm.weight": np.zeros(65)}, r"shape \(65,\) instead of \(64,\)"),
    "missing": (lambda p: {n: a for n, a in p.items() if n != "embed.weight"}, "1 parameters were not given"),
    "nothing": (lambda p: {}, "21 parameters were not given"),
    "nan": (lambda p: {**p, "head.norm.weight": np.full(64, np.nan)}, "head.norm.weight holds values that are not"),
}


@pytest.mark.parametrize("case", FAULTY_PARAMS)
def test_parameters_that_do_not_fit_leave_nothing_behind(tmp_path: Path, case: str) -> None:
    change, message = FAULTY_PARAMS[case]
    spec = read_config(config()).spec
    with pytest.raises(ConversionError, match=message):
        export_hf(tmp_path / "out", spec, change(random_params(spec)).items())
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_given_twice_is_refused(tmp_path: Path) -> None:
    spec = read_config(config()).spec
    params = [*random_params(spec).items()]
    with pytest.raises(ConversionError, match=r"embed\.weight: it is given twice"):
        export_hf(tmp_path / "out", spec, [*params, params[0]])


def test_c013_missing_weights_are_left_out_only_when_allowed(tmp_path: Path) -> None:
    data = tensors(config())
    del data[LAYER1 + "mlp.down_proj.weight"]
    write_directory(tmp_path / "in", config(), data)
    report = trip(tmp_path / "in", tmp_path / "out", allow_missing=True)
    assert read_directory(tmp_path / "out") == as_read(data)
    assert "left out, because they were missing: layers.1.mlp.down.weight." in report.notes


def test_c039_allowed_nonfinite_weights_are_copied_as_they_are(tmp_path: Path) -> None:
    data = tensors(config())
    data["model.norm.weight"][3] = np.inf
    data[EMBED][0, 0] = np.frombuffer(b"\x01\x00\xa0\x7f", np.float32)[0]  # a NaN with a payload
    write_directory(tmp_path / "in", config(), data)
    trip(tmp_path / "in", tmp_path / "out", allow_nonfinite=True)
    assert read_directory(tmp_path / "out") == as_read(data)


def test_c172_memory_is_bounded_by_a_few_of_the_largest_tensors(tmp_path: Path) -> None:
    """60 MB in tensors of at most 4 MB, in one shard; a reader that gathers a shard needs all of it."""
    fields = config(vocab_size=16384, num_hidden_layers=12, intermediate_size=8192)
    data = tensors(fields)
    largest = max(array.nbytes for array in data.values())
    total = sum(array.nbytes for array in data.values())
    assert total > 12 * largest
    write_safetensors(write_directory(tmp_path / "in", fields, data) / "model.safetensors", data)
    del data
    tracemalloc.start()
    trip(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * largest


# ---- tokenizers --------------------------------------------------------------------------------------------------


def test_c041_an_export_is_self_contained_and_loads_from_its_folder_alone(tmp_path: Path) -> None:
    """A model that never was a Hugging Face one: config, weights and tokenizer suffice transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = preset("tiny-llama3")
    write_tokenizer(tmp_path / "tokenizer", 490, 6)
    export_hf(
        tmp_path / "out",
        spec,
        random_params(spec).items(),
        tokenizer_dir=tmp_path / "tokenizer",
        token_ids={"bos_token_id": 490, "eos_token_id": 491},
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert len(tokenizer) == 496 and tokenizer("w3 w7")["input_ids"] == [3, 7]
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (490, 491, None)
    assert model.generation_config.eos_token_id == 491
    assert sum(p.numel() for p in model.parameters()) == build_program(spec).num_params


def test_c041_without_a_hf_tokenizer_there_is_a_clear_note(tmp_path: Path) -> None:
    spec = preset("tiny-llama3")
    report = export_hf(tmp_path / "a", spec, random_params(spec).items())
    assert any(note.startswith("no tokenizer was given") for note in report.notes)
    (tmp_path / "own").mkdir()
    report = export_hf(tmp_path / "b", spec, random_params(spec).items(), tokenizer_dir=tmp_path / "own")
    assert any("own holds no Hugging Face tokenizer" in note for note in report.notes)
    with pytest.raises(ConversionError, match="no tokenizer directory"):
        export_hf(tmp_path / "c", spec, random_params(spec).items(), tokenizer_dir=tmp_path / "nowhere")
    # ids that nobody gave are null, not some other vocabulary's
    assert fields_of(tmp_path / "a")["eos_token_id"] is None


def test_c035_the_whole_tokenizer_must_fit_the_rows_of_the_model(tmp_path: Path) -> None:
    """500 base and 6 added entries: 512 rows are enough, 504 are not although 500 would be."""
    write_tokenizer(tmp_path / "tokenizer", 500, 6)
    for rows in (512, 504):
        spec = read_config(config(vocab_size=rows)).spec
        params = random_params(spec)
        if rows == 512:
            export_hf(tmp_path / "512", spec, params.items(), tokenizer_dir=tmp_path / "tokenizer")
            assert fields_of(tmp_path / "512")["vocab_size"] == 512
            continue
        with pytest.raises(DataError, match=r"500.*506.*504"):
            export_hf(tmp_path / "504", spec, params.items(), tokenizer_dir=tmp_path / "tokenizer")
    assert not (tmp_path / "504").exists()


def test_c035_a_source_that_does_not_fit_its_tokenizer_is_copied_with_a_note(tmp_path: Path) -> None:
    fields = config(vocab_size=504)
    write_tokenizer(write_directory(tmp_path / "in", fields, tensors(fields)), 500, 6)
    report = trip(tmp_path / "in", tmp_path / "out")
    assert any("506" in note for note in report.notes)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "in" / "tokenizer.json").read_bytes()


# ---- the model in transformers -----------------------------------------------------------------------------------


def reference_logits(spec: ModelSpec, params: dict[str, Array], data: Batch) -> Array:
    wide = {name: array.astype(np.float64) for name, array in params.items()}
    return ReferenceModel(build_program(spec), wide).forward(data)["head.logits"]


def exported_logits(path: Path, data: Batch) -> Array:
    """What transformers makes of a directory."""
    return HfOracle.from_directory(path, dtype="float64").trace(data, grads=False).values["head.logits"]


@pytest.mark.parametrize("dialect", ["v4", "v5"])
@pytest.mark.parametrize("name", ["tiny-llama3", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_an_exported_model_computes_what_it_did(tmp_path: Path, name: str, dialect: Any) -> None:
    spec = preset(name)
    params = random_params(spec)
    export_hf(tmp_path / "out", spec, params.items(), dialect=dialect, max_shard_bytes=200_000)
    data = tokens(spec.vocab_size)
    error = distance(exported_logits(tmp_path / "out", data), reference_logits(spec, params, data))
    assert error <= bound("logits", "float64")


def test_c023_an_interleaved_model_exports_as_its_half_split_twin_and_comes_back(tmp_path: Path) -> None:
    """With q/k biases and per-head q/k norms, whose weights must move too."""
    spec = with_pairing(read_config(config(model_type="qwen3", attention_bias=True)).spec, "interleaved")
    params = random_params(spec)
    export_hf(tmp_path / "out", spec, params.items())
    data = tokens(spec.vocab_size)
    want = reference_logits(spec, params, data)
    assert distance(exported_logits(tmp_path / "out", data), want) <= bound("logits", "float64")
    with HfCheckpoint(tmp_path / "out", pairing="interleaved") as checkpoint:
        assert checkpoint.spec == spec
        assert {n: a.tobytes() for n, a in checkpoint.params()} == {n: a.tobytes() for n, a in params.items()}
    # the pairing matters: without the reordering the model is another one
    assert distance(reference_logits(with_pairing(spec, "half"), params, data), want) > 0.01
    name = "layers.0.attention.q.weight"
    assert not np.array_equal(convert_pairing(spec, name, params[name], "half"), params[name])


def test_c023_the_oracle_takes_interleaved_models_and_gives_their_gradients() -> None:
    spec = with_pairing(preset("tiny-qwen3"), "interleaved")
    params = random_params(spec, np.float64)
    data = tokens(spec.vocab_size)
    trace = HfOracle(spec, params.items(), dtype="float64").trace(data, grads=True)
    loss, grads = ReferenceModel(build_program(spec), params).loss_and_grads([data])
    assert abs(trace.loss - loss) <= bound("loss", "float64") * loss
    for name, want in grads.items():
        assert distance(trace.grads[name], want) <= bound("gradient", "float64"), name


def test_c028_a_window_on_one_layer_means_the_same_in_transformers(tmp_path: Path) -> None:
    """Window 8: token 8 of layer 1 sees tokens 1 to 8 and not token 0; layer 0 sees all."""
    import torch
    from transformers import AutoModelForCausalLM

    fields = TRIPS["ministral"]
    data = tensors(fields)
    write_directory(tmp_path / "in", fields, data)
    trip(tmp_path / "in", tmp_path / "out")
    assert fields_of(tmp_path / "out")["sliding_window"] == 8
    assert fields_of(tmp_path / "out")["layer_types"] == fields["layer_types"]
    sample = tokens(512)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", local_files_only=True, attn_implementation="eager", dtype=torch.float64
    )
    with torch.no_grad():
        seen = model(torch.from_numpy(sample.tokens.astype(np.int64)), output_attentions=True).attentions
    assert (seen[1][:, :, 8, 0] == 0).all() and (seen[1][:, :, 8, 1] > 0).all()
    assert (seen[0][:, :, 8, 0] > 0).all()
    with HfCheckpoint(tmp_path / "out") as checkpoint:
        want = reference_logits(checkpoint.spec, dict(checkpoint.params()), sample)
    assert distance(exported_logits(tmp_path / "out", sample), want) <= bound("logits", "float64")


def test_c030_an_eps_that_shows_survives(tmp_path: Path) -> None:
    """Small activations and eps 1e-3: a norm with another eps would be off by far."""
    fields = config(model_type="qwen3", rms_norm_eps=1e-3)
    data = {n: a * np.float32(0.1) if n == EMBED else a for n, a in tensors(fields).items()}
    write_directory(tmp_path / "in", fields, data)
    trip(tmp_path / "in", tmp_path / "out")
    sample = tokens(512)
    with HfCheckpoint(tmp_path / "in") as checkpoint:
        want = reference_logits(checkpoint.spec, dict(checkpoint.params()), sample)
    assert distance(exported_logits(tmp_path / "out", sample), want) <= bound("logits", "float64")


def test_params_may_come_from_a_generator_and_in_any_order(tmp_path: Path) -> None:
    spec = preset("tiny-qwen2")
    params = random_params(spec)

    def backwards() -> Iterator[tuple[str, Array]]:
        yield from reversed(params.items())

    report = export_hf(tmp_path / "out", spec, backwards())
    assert report.num_tensors == len(params) and report.family == "qwen2"
    with HfCheckpoint(tmp_path / "out") as checkpoint:
        assert {n: a.tobytes() for n, a in checkpoint.params()} == {n: a.tobytes() for n, a in params.items()}
