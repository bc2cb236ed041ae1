"""config.json -> spec -> config.json, held against transformers' own reading of the same files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import distance
from hf_dirs import config

from duomesh.converters.hf.config import HfConfig, read_config
from duomesh.converters.hf.config_writer import write_config
from duomesh.converters.hf.families import FAMILIES, HF_ACTIVATIONS
from duomesh.converters.hf.fields import HARMLESS, REFUSED, USED
from duomesh.converters.pairing import with_pairing
from duomesh.core.bounds import bound
from duomesh.core.errors import ConversionError
from duomesh.core.ir.build import build_program
from duomesh.core.rope import attention_factor, inverse_frequencies
from duomesh.core.spec.model import (
    AttentionSpec,
    BlockSpec,
    LinearScaling,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    YarnScaling,
)
from duomesh.core.spec.presets import preset, preset_names

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def attention(fields: dict[str, Any], layer: int = 0) -> AttentionSpec:
    return read_config(fields).spec.blocks[layer].attention


def rope(fields: dict[str, Any], layer: int = 0) -> RopeSpec:
    found = attention(fields, layer).rope
    assert found is not None
    return found


def windows(fields: dict[str, Any]) -> list[int | None]:
    return [block.attention.window for block in read_config(fields).spec.blocks]


# ---- the spec of a file ------------------------------------------------------------------------------------------


def test_d0_is_read_field_by_field() -> None:
    norm = NormSpec(eps=1e-6)
    block = BlockSpec(
        attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeSpec(base=10000.0, rotary_dim=16)),
        mlp=MlpSpec(ffn_size=128, activation="silu", is_gated=True),
        attention_norm=norm,
        mlp_norm=norm,
    )
    want = ModelSpec(
        vocab_size=512,
        hidden_size=64,
        blocks=(block, block),
        final_norm=norm,
        tie_embeddings=False,
        max_positions=128,
        init_std=0.02,
    )
    got = read_config(config())
    assert got.spec == want
    assert (got.warnings, got.dtype, got.dialect) == ((), "float32", "v4")


@pytest.mark.parametrize("dialect", ["v4", "v5"])
@pytest.mark.parametrize("name", [name for name in preset_names() if preset(name).blocks[0].moe is None])
def test_every_preset_survives_the_trip(name: str, dialect: Any) -> None:
    spec = preset(name)
    read = read_config(json.loads(json.dumps(write_config(spec, dialect=dialect))))
    assert read.spec == spec
    assert (read.warnings, read.dialect) == ((), dialect)


DIALECTS = {
    "llama plain": (config(rope_theta=5e5), {"rope_theta": 5e5, "rope_type": "default"}),
    "llama linear": (config(rope_scaling={"type": "linear", "factor": 2.0}), {"rope_type": "linear", "factor": 2.0}),
    "llama llama3": (config(rope_scaling=LLAMA3), LLAMA3),
    "qwen3 yarn": (config(model_type="qwen3", rope_scaling=YARN), YARN),
    "qwen2": (config(model_type="qwen2", rope_theta=1e6), {"rope_theta": 1e6, "rope_type": "default"}),
    "mistral": (config(model_type="mistral", sliding_window=8), {"rope_type": "default"}),
}


@pytest.mark.parametrize("case", DIALECTS)
def test_both_dialects_of_a_model_give_one_spec(case: str) -> None:
    v4, parameters = DIALECTS[case]
    v5 = {name: value for name, value in v4.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")}
    v5 |= {"rope_parameters": {"rope_theta": v4["rope_theta"], **parameters}, "dtype": "float32"}
    old, new = read_config(v4), read_config(v5)
    assert old.spec == new.spec
    assert (old.dialect, new.dialect, new.dtype) == ("v4", "v5", "float32")


UNSAID: dict[str, Any] = dict.fromkeys(
    ("tie_word_embeddings", "hidden_act", "rms_norm_eps", "rope_theta", "max_position_embeddings", "sliding_window"),
    ...,
)
FILES = {
    **{f"{name} defaults": config(model_type=name, **UNSAID) for name in FAMILIES},
    "llama": config(),
    "llama biases": config(attention_bias=True, mlp_bias=True),
    "llama kv null": config(num_key_value_heads=None, head_dim=None),
    "llama kv absent": config(num_key_value_heads=..., head_dim=...),
    "llama wide heads": config(head_dim=24),
    "llama3": config(rope_theta=5e5, rope_scaling=LLAMA3),
    "linear": config(rope_scaling={"type": "linear", "factor": 4.0}),
    "yarn": config(rope_scaling=YARN),
    "yarn whole": config(
        rope_scaling={**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5}
    ),
    "yarn factor": config(rope_scaling={**YARN, "attention_factor": 1.25, "beta_fast": None, "truncate": False}),
    "yarn at top": config(rope_scaling={"rope_type": "yarn", "factor": 4.0}, original_max_position_embeddings=32),
    "mistral null": config(model_type="mistral", sliding_window=None),
    "mistral 8": config(model_type="mistral", sliding_window=8),
    "mistral absent": config(model_type="mistral"),
    "ministral all": config(model_type="ministral", sliding_window=8),
    "ministral some": config(
        model_type="ministral", sliding_window=8, layer_types=["full_attention", "sliding_attention"]
    ),
    "qwen2 inert": config(model_type="qwen2", sliding_window=8, use_sliding_window=False, max_window_layers=1),
    "qwen2 switched": config(model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1),
    "qwen2 from none": config(model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2),
    "qwen2 default start": config(
        model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=..., num_hidden_layers=30
    ),
    "qwen2 null": config(model_type="qwen2", sliding_window=None, use_sliding_window=True, max_window_layers=0),
    "qwen2 list": config(
        model_type="qwen2",
        sliding_window=8,
        use_sliding_window=True,
        max_window_layers=28,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3": config(model_type="qwen3", rope_theta=1e6),
    "qwen3 biases": config(model_type="qwen3", attention_bias=True),
    "qwen3 no head_dim": config(model_type="qwen3", head_dim=...),
    "tied": config(tie_word_embeddings=True),
    "gelu": config(hidden_act="gelu_pytorch_tanh"),
}


@pytest.mark.parametrize("case", FILES)
def test_transformers_reads_the_same_model(case: str) -> None:
    """Parameter shapes, windows, frequencies and eps, against a model that transformers builds from the same file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads(json.dumps(FILES[case]))
    read = read_config(fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="eager")
    ours = {read.family.names.to_hf(n): p.shape for n, p in build_program(read.spec).params.items()}
    assert ours == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    rotary = type(model.model.rotary_emb)(config=model.config)  # on the cpu, with numbers
    for layer, block in enumerate(read.spec.blocks):
        assert block.attention.window == _window(model, layer), layer
        assert block.attention.rope is not None
        error = distance(inverse_frequencies(block.attention.rope), rotary.inv_freq.numpy().astype(np.float64))
        assert error <= bound("value", "float32", terms=4)
        factors = np.array([attention_factor(block.attention.rope)]), np.array([rotary.attention_scaling])
        assert distance(*factors) <= bound("value", "float64")
    norms = {m.variance_epsilon for name, m in model.named_modules() if hasattr(m, "variance_epsilon")}
    assert norms == {read.spec.final_norm.eps}
    assert read.spec.blocks[0].mlp.activation == HF_ACTIVATIONS[model.config.hidden_act]
    assert read.spec.tie_embeddings == model.config.tie_word_embeddings


def _window(model: Any, layer: int) -> int | None:
    """The window that transformers' mask of a layer has."""
    layer_types = getattr(model.config, "layer_types", None)
    window = getattr(model.config, "sliding_window", None)
    return window if layer_types is None or layer_types[layer] == "sliding_attention" else None


@pytest.mark.parametrize("name", HF_ACTIVATIONS)
def test_activation_names_mean_the_same_function(name: str) -> None:
    import torch
    from transformers.activations import ACT2FN

    from duomesh.kernels.reference.activations import ACTIVATIONS

    x = np.linspace(-6, 6, 121)
    want = ACT2FN[name](torch.from_numpy(x)).numpy()
    got = ACTIVATIONS[HF_ACTIVATIONS[name]].value(x)
    # gelu_fast writes sqrt(2 / pi) with ten digits
    assert distance(got, want) <= bound("value", "float32" if name == "gelu_fast" else "float64")


# ---- rotary base -------------------------------------------------------------------------------------------------

TYPES = ["full_attention", "sliding_attention"]
BASES: dict[str, dict[str, Any]] = {
    "top level": config(rope_theta=1e6),
    "rope_parameters": config(rope_theta=..., rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
    "rope_scaling": config(rope_theta=..., rope_scaling={"rope_theta": 1e6, "rope_type": "default"}),
    "nested": config(
        model_type="qwen3", rope_theta=..., rope_scaling=..., use_sliding_window=True, sliding_window=8,
        layer_types=TYPES, rope_parameters={t: {"rope_theta": 1e6, "rope_type": "default"} for t in TYPES},
    ),
    "both places": config(rope_theta=1e6, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
}  # fmt: skip


@pytest.mark.parametrize("case", BASES)
def test_c027_the_rotary_base_is_found_in_every_place(case: str) -> None:
    read = read_config(BASES[case])
    for block in read.spec.blocks:
        assert block.attention.rope is not None and block.attention.rope.base == 1e6
    assert read.warnings == ()


@pytest.mark.parametrize("fields", [{"rope_theta": ...}, {"rope_theta": None}])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_c027_a_missing_base_is_the_documented_default_and_announced(model_type: str, fields: dict[str, Any]) -> None:
    read = read_config(config(model_type=model_type, sliding_window=..., **fields))
    assert rope(config(model_type=model_type, **fields)).base == 10000.0
    assert any("rope_theta is absent; the documented default 10000.0" in warning for warning in read.warnings)


def test_c027_places_that_disagree_are_an_error() -> None:
    with pytest.raises(ConversionError, match=r"rope_theta is 1000000.0, but 10000.0 at top level"):
        read_config(config(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, rope_scaling=...))
    nested = dict(BASES["nested"], rope_parameters={"full_attention": {"rope_theta": 1e6, "rope_type": "default"}})
    with pytest.raises(ConversionError, match=r"no table for the layer type 'sliding_attention'"):
        read_config(nested)
    with pytest.raises(ConversionError, match="both given and differ"):
        read_config(config(rope_parameters=LLAMA3, rope_scaling=YARN))


def test_rotary_parameters_may_differ_by_layer_type() -> None:
    tables = {"full_attention": {"rope_theta": 1e6, **YARN}, "sliding_attention": {"rope_theta": 1e4}}
    fields = dict(BASES["nested"], rope_parameters=tables)
    assert rope(fields, 0) == RopeSpec(
        base=1e6, rotary_dim=16, scaling=YarnScaling(factor=4.0, original_max_positions=32)
    )
    assert rope(fields, 1) == RopeSpec(base=1e4, rotary_dim=16)
    with pytest.raises(ConversionError, match=r"blocks\[1\]\.attention\.rope\.base cannot be written"):
        write_config(read_config(fields).spec)


ROPE_FAULTS = {
    "unknown type": ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, "rope_type 'foo' is not supported"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
    "longrope": ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
    "no type": ({"rope_scaling": {"factor": 2.0}}, "no rope_type"),
    "two types": ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "but type is 'yarn'"),
    "unknown key": ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
    "factor a word": ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
    "factor negative": ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor is -2.0"),
    "no low": ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor is None"),
    "low above high": ({"rope_scaling": {**LLAMA3, "low_freq_factor": 5.0}}, "low_freq_factor"),
    "truncate a word": ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate is 'no'"),
    "lengths differ": ({"rope_scaling": YARN, "original_max_position_embeddings": 64}, "is 32, but 64 at top level"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "partial inside": ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "= 0.25"),
    "not a table": ({"rope_scaling": 2.0}, "rope_scaling is 2.0"),
    "base a word": ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
    "mixed": ({"rope_parameters": {"full_attention": {}, "rope_theta": 1e4}}, "mixes tables"),
}


@pytest.mark.parametrize("case", ROPE_FAULTS)
def test_rotary_parameters_that_cannot_be_represented_stop(case: str) -> None:
    changes, message = ROPE_FAULTS[case]
    with pytest.raises(ConversionError, match=message):
        read_config(config(**changes))


def test_lengths_that_fall_back_are_announced() -> None:
    read = read_config(config(rope_scaling={"rope_type": "yarn", "factor": 4.0}))
    assert any("max_position_embeddings = 128 was taken" in warning for warning in read.warnings)
    read = read_config(config(rope_scaling={**YARN, "factor": 3.0}))
    assert any("factor 3 was taken although" in warning for warning in read.warnings)
    read = read_config(config(rope_scaling={"rope_type": "linear", "factor": 2.0, "beta_fast": 1.0}))
    assert any("beta_fast has no effect" in warning for warning in read.warnings)


# ---- windows -----------------------------------------------------------------------------------------------------


def test_c028_a_window_on_one_layer_survives_every_trip() -> None:
    """The number counts the token itself, in config.json as in the spec."""
    from duomesh.core.spec.serialize import spec_from_json, spec_to_json

    fields = FILES["ministral some"]
    spec = read_config(fields).spec
    assert [block.attention.window for block in spec.blocks] == [None, 8]
    for dialect in ("v4", "v5"):
        out = write_config(spec_from_json(spec_to_json(spec)), dialect=dialect)
        assert out["sliding_window"] == 8
        assert out["layer_types"] == ["full_attention", "sliding_attention"]
        assert read_config(out).spec == spec


WINDOW_FAULTS = {
    "llama": ({"sliding_window": 8}, "model_type 'llama' has no window"),
    "llama layers": ({"layer_types": TYPES}, "treats all layers as full_attention; use a model_type .*ministral"),
    "mistral layers": ({"model_type": "mistral", "sliding_window": 8, "layer_types": TYPES}, "all layers as sliding"),
    "mistral off": ({"model_type": "mistral", "sliding_window": 8, "use_sliding_window": False}, "is false"),
    "zero": ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
    "word": ({"model_type": "mistral", "sliding_window": "8"}, "sliding_window is '8'"),
    "types without window": ({"model_type": "qwen2", "layer_types": TYPES}, "needs sliding_window"),
    "too few types": ({"model_type": "qwen3", "layer_types": TYPES[:1]}, "must list 2 layers"),
    "chunked": ({"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]}, "must list 2 layers"),
}


@pytest.mark.parametrize("case", WINDOW_FAULTS)
def test_windows_that_contradict_the_family_stop(case: str) -> None:
    changes, message = WINDOW_FAULTS[case]
    with pytest.raises(ConversionError, match=message):
        read_config(config(**changes))


def test_false_means_no_window_and_no_scaling_where_files_say_so() -> None:
    assert windows(config(model_type="mistral", sliding_window=False, rope_scaling=False)) == [None, None]
    assert windows(config(sliding_window=4096, use_sliding_window=False)) == [None, None]


# ---- fields ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_c029_fields_that_change_the_maths_stop_by_name_and_value(name: str) -> None:
    with pytest.raises(ConversionError, match=rf"{name} = 50\.5 changes what the model computes"):
        read_config(config(**{name: 50.5}))
    for off in (None, *REFUSED[name]):
        assert read_config(config(**{name: off})).warnings == ()


def test_c029_a_switch_is_not_taken_for_a_factor() -> None:
    with pytest.raises(ConversionError, match="residual_multiplier = True"):
        read_config(config(residual_multiplier=True))
    with pytest.raises(ConversionError, match="attn_logit_softcapping = 50"):
        read_config(config(attn_logit_softcapping=50))


def test_c029_unknown_fields_are_announced_and_harmless_ones_are_not() -> None:
    read = read_config(config(my_note="x"))
    assert read.warnings == ("config.json: the field my_note is unknown and was ignored.",)
    assert read.spec == read_config(config()).spec
    quiet = dict.fromkeys(HARMLESS, 1)
    assert read_config(config(**quiet)).warnings == ()
    assert read_config(config(auto_map={"AutoModel": "x.Y"})).warnings[0].startswith("config.json: auto_map names")
    assert "training only" in read_config(config(attention_dropout=0.1)).warnings[0]


def test_c029_every_field_has_one_class() -> None:
    assert not USED & HARMLESS and not USED & REFUSED.keys() and not HARMLESS & REFUSED.keys()


def test_c029_fields_that_transformers_writes_are_all_known() -> None:
    """A config that transformers saves, defaults and all, is read without a warning."""
    from transformers import AutoConfig

    for model_type in FAMILIES:
        fields = config(model_type=model_type, attention_bias=..., num_hidden_layers=3)
        saved = json.loads(AutoConfig.for_model(**fields).to_json_string(use_diff=False))
        assert read_config(saved).warnings == ()


NULL_AS_ABSENT = {
    "llama": ["head_dim", "rope_scaling", "num_key_value_heads", "attention_bias", "mlp_bias", "quantization_config"],
    "qwen2": ["head_dim", "rope_scaling", "layer_types", "use_sliding_window", "torch_dtype", "attention_dropout"],
    "qwen3": ["rope_scaling", "layer_types", "architectures", "initializer_range"],
}


@pytest.mark.parametrize("model_type", NULL_AS_ABSENT)
def test_null_is_absence_for_optional_fields(model_type: str) -> None:
    for name in NULL_AS_ABSENT[model_type]:
        null, absent = (read_config(config(model_type=model_type, **{name: v})) for v in (None, ...))
        assert null.spec == absent.spec, name


def test_null_window_is_none_and_an_absent_one_is_the_default() -> None:
    assert windows(config(model_type="mistral", sliding_window=None)) == [None, None]
    read = read_config(config(model_type="mistral", sliding_window=...))
    assert read.spec.blocks[0].attention.window == 4096
    assert any("sliding_window is absent" in warning for warning in read.warnings)


FAULTS = {
    "no model_type": ({"model_type": ...}, "model_type is None; supported are llama"),
    "other model_type": ({"model_type": "mamba2"}, "model_type is 'mamba2'"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    "no hidden_size": ({"hidden_size": ...}, "hidden_size is missing"),
    "null layers": ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    "heads a word": ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    "layers a bool": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "vocab negative": ({"vocab_size": -1}, "vocab_size is -1"),
    "kv missing": ({"model_type": "mistral", "num_key_value_heads": ...}, "num_key_value_heads is missing"),
    "kv not a divisor": ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
    "heads not a divisor": ({"head_dim": ..., "num_attention_heads": 6}, "hidden_size = 64 is not a multiple"),
    "odd head_dim": ({"head_dim": 15}, "rotary_dim is 15"),
    "eps zero": ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    "activation": ({"hidden_act": "mish"}, "hidden_act is 'mish'; supported are silu"),
    "flag a number": ({"attention_bias": 1}, "attention_bias is 1"),
    "mistral bias": ({"model_type": "mistral", "attention_bias": True}, "'mistral' has no biases"),
    "qwen mlp bias": ({"model_type": "qwen3", "mlp_bias": True}, "'qwen3' has no biases in its MLP"),
    "tie a word": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_fields_that_are_missing_or_wrong_are_named(case: str) -> None:
    changes, message = FAULTS[case]
    with pytest.raises(ConversionError, match=message):
        read_config(config(**changes))


def test_defaults_that_were_taken_are_announced_by_name() -> None:
    for name in ("rms_norm_eps", "hidden_act", "tie_word_embeddings", "max_position_embeddings"):
        assert any(f"{name} is absent" in warning for warning in read_config(config(**{name: ...})).warnings), name


def test_c030_every_norm_has_the_eps_of_the_file() -> None:
    spec = read_config(config(model_type="qwen3", rms_norm_eps=1e-3)).spec
    norms = [op for _, program in build_program(spec).steps for op in program.ops if op.kind == "norm"]
    assert len(norms) == 2 * 4 + 1
    assert {dict(op.attrs)["eps"] for op in norms} == {1e-3}
    assert write_config(spec)["rms_norm_eps"] == 1e-3


def test_files_that_are_no_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    for text, message in (("{", "not valid JSON"), ("[]", "must hold a table")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConversionError, match=message):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert read_config(tmp_path).spec == read_config(tmp_path / "config.json").spec == read_config(config()).spec


# ---- export ------------------------------------------------------------------------------------------------------

BASE = read_config(config()).spec


def changed(spec: ModelSpec = BASE, **changes: Any) -> ModelSpec:
    """A spec with changed blocks: keys are `attention_x`, `mlp_x`, `rope_x`, or fields of a block."""
    block = spec.blocks[0]
    for path, value in changes.items():
        part, _, name = path.partition("__")
        if part == "rope":
            assert block.attention.rope is not None
            block = replace(
                block, attention=replace(block.attention, rope=replace(block.attention.rope, **{name: value}))
            )
        else:
            block = replace(block, **{part: replace(getattr(block, part), **{name: value}) if name else value})
    return replace(spec, blocks=(block,) * spec.num_layers)


MOE = MoeSpec(num_experts=4, top_k=2, ffn_size=24, activation="silu", is_gated=True, renormalize=True)
REFUSED_SPECS = {
    "attention.softcap": changed(attention__softcap=50.0),
    "attention.scale": changed(attention__scale=0.1),
    "attention.rope ": changed(attention__rope=None),
    "attention.rope.rotary_dim": changed(rope__rotary_dim=8),
    "attention.rope.compute": changed(rope__compute="fp32"),
    "attention.q_bias": changed(attention__q_bias=True),
    "attention.qk_norm_over": changed(attention__qk_norm=NormSpec(eps=1e-6), attention__qk_norm_over="all"),
    r"blocks\[0\]\.moe": changed(moe=MOE),
    r"blocks\[0\]\.moe ": changed(moe=MOE, mlp=None),
    "attention_post_norm": changed(attention_post_norm=NormSpec(eps=1e-6)),
    "mlp_post_norm": changed(mlp_post_norm=NormSpec(eps=1e-6)),
    "mlp_norm ": changed(mlp_norm=None),
    "mlp_norm.eps": changed(mlp_norm=NormSpec(eps=1e-3)),
    "attention_norm.cast": changed(attention_norm=NormSpec(eps=1e-6, cast="after_weight")),
    "attention_norm.kind": changed(attention_norm=NormSpec(eps=1e-6, kind="layer")),
    "mlp.is_gated": changed(mlp__is_gated=False),
    "mlp.up_bias": changed(mlp__up_bias=True),
    "final_norm.kind": replace(BASE, final_norm=NormSpec(eps=1e-6, has_bias=True)),
    "embedding_scale": replace(BASE, embedding_scale=8.0),
    "logit_softcap": replace(BASE, logit_softcap=30.0),
    r"blocks\[1\].mlp.ffn_size": replace(BASE, blocks=(BASE.blocks[0], changed(mlp__ffn_size=96).blocks[0])),
    r"blocks\[\]\.attention\.window": replace(
        BASE, blocks=tuple(changed(attention__window=w).blocks[0] for w in (8, 16))
    ),
}


@pytest.mark.parametrize("path", REFUSED_SPECS)
def test_a_spec_that_no_family_has_is_refused_by_field(path: str) -> None:
    with pytest.raises(ConversionError, match=rf"{path.strip()}\b[^.]* cannot be written for any supported"):
        write_config(REFUSED_SPECS[path])


def test_c031_a_norm_offset_is_never_folded_into_weights() -> None:
    offset = NormSpec(eps=1e-6, weight_offset=1.0)
    with pytest.raises(ConversionError, match=r"final_norm\.weight_offset cannot be written"):
        write_config(replace(BASE, final_norm=offset))


QK = NormSpec(eps=1e-6)
CHOICES = {
    "llama": BASE,
    "mistral": changed(attention__window=8),
    "ministral": replace(BASE, blocks=(BASE.blocks[0], changed(attention__window=8).blocks[0])),
    "qwen2": changed(attention__q_bias=True, attention__k_bias=True, attention__v_bias=True),
    "qwen3": changed(attention__qk_norm=QK),
}


@pytest.mark.parametrize("family", CHOICES)
def test_the_family_that_can_represent_a_spec_is_chosen(family: str) -> None:
    out = write_config(CHOICES[family])
    assert out["model_type"] == family
    assert out["architectures"] == [FAMILIES[family].architecture]
    assert read_config(out).spec == CHOICES[family]


def test_a_hidden_size_that_heads_do_not_divide_goes_to_a_family_that_allows_it() -> None:
    spec = replace(changed(attention__num_heads=6), hidden_size=64)
    assert write_config(spec)["model_type"] == "mistral"
    assert read_config(write_config(spec)).spec == spec


def test_a_named_family_must_fit_and_reasons_are_given() -> None:
    with pytest.raises(ConversionError, match=r"window cannot be written for llama: this model type has no window"):
        write_config(CHOICES["mistral"], family="llama")
    # q/k norms and q, k, v biases alone exist, but in no family together
    both = changed(CHOICES["qwen2"], attention__qk_norm=QK)
    with pytest.raises(ConversionError, match=r"no supported .* qwen2: blocks\[0\]\.attention\.qk_norm"):
        write_config(both)


def test_scalings_are_written_as_transformers_reads_them() -> None:
    for scaling in (
        LinearScaling(factor=2.0),
        YarnScaling(factor=4.0, original_max_positions=32, attention_factor=1.5, truncate=False),
        YarnScaling(factor=4.0, original_max_positions=32, mscale=0.7, mscale_all_dim=0.5, beta_fast=20.0),
    ):
        spec = changed(rope__scaling=scaling)
        for dialect in ("v4", "v5"):
            assert read_config(write_config(spec, dialect=dialect)).spec == spec


def test_c023_interleaved_specs_are_written_as_their_half_split_twins() -> None:
    twin = with_pairing(BASE, "interleaved")
    assert twin != BASE and with_pairing(twin, "half") == BASE
    assert write_config(twin) == write_config(BASE)


def test_token_ids_are_written_as_null_rather_than_left_to_a_default() -> None:
    out = write_config(BASE, token_ids={"eos_token_id": 5})
    assert (out["bos_token_id"], out["eos_token_id"], out["pad_token_id"]) == (None, 5, None)


def test_bookkeeping_leaves_out_what_the_spec_says() -> None:
    read: HfConfig = read_config(config(my_note=1, auto_map={}, use_mrope=False))
    assert read.bookkeeping.keys() == {"attention_dropout", "bos_token_id", "eos_token_id", "use_cache", "my_note"}
