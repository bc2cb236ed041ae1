"""Specs: JSON there and back, strict reading that names the path, and refusal of what cannot be built."""

from __future__ import annotations

import copy
import json
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from spec_cases import ALL_CASES, ATTENTION, BLOCK, CASES, MLP, MOE, RMS, ROPE, YARN, attention, model, rope, specs

from duomesh.core.errors import ConfigError, SpecError
from duomesh.core.spec.codec import decode, encode
from duomesh.core.spec.model import LinearScaling, Llama3Scaling, ModelSpec, NormSpec, RopeSpec, YarnScaling
from duomesh.core.spec.serialize import spec_from_dict, spec_from_json, spec_to_dict, spec_to_json

# ------------------------------------------------------------------------------------------------------ round trips


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(specs())
def test_json_round_trip(spec: ModelSpec) -> None:
    text = spec_to_json(spec)
    again = spec_from_json(text)
    assert again == spec and hash(again) == hash(spec)
    assert spec_to_json(again) == text
    assert decode(ModelSpec, json.loads(json.dumps(encode(spec)))) == spec


@pytest.mark.parametrize("spec", ALL_CASES.values(), ids=ALL_CASES.keys())
def test_every_field_is_written(spec: ModelSpec) -> None:
    """No field is left to a default: a later change of defaults must not change a stored model."""

    def check(value: Any, data: Any) -> None:
        if isinstance(value, tuple):
            for item, entry in zip(value, data, strict=True):
                check(item, entry)
        elif is_dataclass(value):
            assert set(data) == {f.name for f in fields(value)}
            for f in fields(value):
                check(getattr(value, f.name), data[f.name])
        else:
            assert data == value

    check(spec, encode(spec))


def test_equal_blocks_are_written_once_and_layers_refer_to_them() -> None:
    data = spec_to_dict(model(attention(window=4), BLOCK, attention(window=4), BLOCK))
    assert [kind["attention"]["window"] for kind in data["block_kinds"]] == [4, None]
    assert data["layers"] == [0, 1, 0, 1]
    assert "blocks" not in data


def test_reading_leaves_its_argument_alone() -> None:
    data = spec_to_dict(model())
    before = copy.deepcopy(data)
    spec_from_dict(data)
    assert data == before


def test_whole_numbers_are_accepted_for_real_ones() -> None:
    data = spec_to_dict(model())
    data["block_kinds"][0]["attention"]["rope"]["base"] = 10000
    base = spec_from_dict(data).blocks[0].attention.rope.base  # type: ignore[union-attr]
    assert base == 10000.0 and isinstance(base, float)


def test_specs_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        model().vocab_size = 3  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------- strict reading

_KIND = ("block_kinds", 0)
_ROPE = (*_KIND, "attention", "rope")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("vocab_size",), "37", r"ModelSpec\.vocab_size is '37'; it must be of type int"),
        (("vocab_size",), 37.0, r"ModelSpec\.vocab_size is 37\.0; it must be of type int"),
        (("vocab_size",), True, r"ModelSpec\.vocab_size is True; it must be of type int"),
        (("vocab_size",), None, r"ModelSpec\.vocab_size is None"),
        (("tie_embeddings",), 1, r"ModelSpec\.tie_embeddings is 1; it must be of type bool"),
        (("init_std",), True, r"ModelSpec\.init_std is True; it must be of type float"),
        (("init_std",), "0.02", r"ModelSpec\.init_std is '0.02'; it must be of type float"),
        (("embedding_scale",), "big", r"ModelSpec\.embedding_scale is 'big'; it must be of type float"),
        (("embedding_scale",), float("nan"), r"ModelSpec\.embedding_scale is nan; it must be finite"),
        (("logit_softcap",), float("inf"), r"ModelSpec\.logit_softcap is inf; it must be finite"),
        (("logit_softcap",), 10**400, r"ModelSpec\.logit_softcap is 10+; it must be finite"),
        (("hidden_dropout",), 0.1, r"ModelSpec has no field 'hidden_dropout'; its fields are .*vocab_size"),
        (("dropout",), 1.0, r"dropout is 1\.0; it must be at least 0 and below 1"),
        (("dropout",), -0.1, r"dropout is -0\.1; it must be at least 0"),
        (("final_norm",), "rms", r"ModelSpec\.final_norm is 'rms'; it must be a table of fields"),
        (("final_norm",), None, r"ModelSpec\.final_norm is None; it must be a table of fields"),
        (("final_norm", "kind"), "group", r"ModelSpec\.final_norm\.kind is 'group'; it must be one of 'rms', 'layer'"),
        (("final_norm", "kind"), ["rms"], r"ModelSpec\.final_norm\.kind is \['rms'\]; it must be one of"),
        ((*_KIND, "mlp", "ffn_size"), [28], r"block_kinds\[0\]\.mlp\.ffn_size is \[28\]; it must be of type int"),
        ((*_KIND, "mlp", "activation"), "swish", r"block_kinds\[0\]\.mlp\.activation is 'swish'.*'silu'"),
        ((*_KIND, "mlp", "experts"), 8, r"block_kinds\[0\]\.mlp has no field 'experts'"),
        ((*_KIND, "attention", "window"), 4.0, r"block_kinds\[0\]\.attention\.window is 4\.0; it must be of type int"),
        ((*_ROPE, "scaling"), "linear", r"block_kinds\[0\]\.attention\.rope\.scaling is 'linear'"),
        ((*_ROPE, "scaling"), {"factor": 2.0}, r"rope\.scaling\.kind is None; it must be one of linear, llama3, yarn"),
        ((*_ROPE, "scaling"), {"kind": "ntk"}, r"rope\.scaling\.kind is 'ntk'; it must be one of linear, llama3, yarn"),
        ((*_ROPE, "scaling"), {"kind": ["linear"]}, r"rope\.scaling\.kind is \['linear'\]; it must be one of"),
        (
            (*_ROPE, "scaling"),
            {"kind": "linear"},
            r"block_kinds\[0\]\.attention\.rope\.scaling lacks the field 'factor'",
        ),
        (
            (*_ROPE, "scaling"),
            {"kind": "linear", "factor": 2.0, "beta_fast": 1.0},
            r"rope\.scaling has no field 'beta_fast'",
        ),
        (("layers",), [0, 1], r"layers\[1\] is 1; it must index one of the 1 block_kinds"),
        (("layers",), [0, -1], r"layers\[1\] is -1"),
        (("layers",), [False], r"layers\[0\] is False"),
        (("layers",), [0.0], r"layers\[0\] is 0\.0"),
        (("layers",), 2, "needs the lists 'block_kinds' and 'layers'"),
        (("layers",), [], "at least one block"),
        (("block_kinds",), {}, "needs the lists 'block_kinds' and 'layers'"),
        (("block_kinds",), ["llama"], r"block_kinds\[0\] is 'llama'; it must be a table of fields"),
        (("blocks",), [], r"has no field 'blocks'"),
    ],
)
def test_wrong_fields_are_named_by_their_path(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = spec_to_dict(model())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(SpecError, match=message):
        spec_from_dict(data)


def _paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of every table."""
    if isinstance(data, list):
        return [p for i, item in enumerate(data) for p in _paths(item, (*path, i))]
    if not isinstance(data, dict):
        return []
    return [p for key, item in data.items() for p in ((*path, key), *_paths(item, (*path, key)))]


def test_required_fields_cannot_be_left_out() -> None:
    """Each field that has no default, wherever it is: the message names it."""
    data = spec_to_dict(CASES["layer_norm"])
    required = 0
    for path in _paths(data):
        without = copy.deepcopy(data)
        place: Any = without
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        try:
            spec_from_dict(without)
        except SpecError as error:
            required += 1
            assert path[-1] in str(error), path
    # the model's 7, the block's 4, attention's 4, the rope's 2, the mlp's 3, eps of three norms
    assert required == 7 + 4 + 4 + 2 + 3 + 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ('{"vocab_size": 3', "not valid JSON"),
        ("[]", "must be a table of fields, not list"),
        ("null", "must be a table of fields"),
        ("{}", "'block_kinds' and 'layers'"),
    ],
)
def test_text_that_is_no_spec(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_from_json(text)


def test_the_error_class_is_the_callers() -> None:
    with pytest.raises(ConfigError, match=r"run\.eps is 'x'"):
        decode(NormSpec, {"eps": "x"}, path="run", error=ConfigError)


# ----------------------------------------------------------------------------------------------------- invalid values

LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_positions": 64,
}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NormSpec(eps=0.0), "norm eps is 0.0"),
        (lambda: NormSpec(eps=float("nan")), r"NormSpec\.eps is nan; it must be finite"),
        (lambda: NormSpec(eps=1e-5, kind="RMSNorm"), r"NormSpec\.kind is 'RMSNorm'; it must be one of 'rms', 'layer'"),  # type: ignore[arg-type]
        (lambda: NormSpec(eps=1e-5, cast="before"), r"NormSpec\.cast is 'before'"),  # type: ignore[arg-type]
        (lambda: RopeSpec(base=float("inf"), rotary_dim=8), r"RopeSpec\.base is inf"),
        (lambda: RopeSpec(base=1e4, rotary_dim=8, pairing="half-split"), r"RopeSpec\.pairing is 'half-split'"),  # type: ignore[arg-type]
        (lambda: RopeSpec(base=1e4, rotary_dim=8, compute="bf16"), r"RopeSpec\.compute is 'bf16'"),  # type: ignore[arg-type]
        (lambda: LinearScaling(factor=float("inf")), r"LinearScaling\.factor is inf"),
        (lambda: LinearScaling(factor=0.0), "factor is 0.0"),
        (lambda: Llama3Scaling(**LLAMA3 | {"factor": -1.0}), "factor is -1.0"),
        (lambda: Llama3Scaling(**LLAMA3 | {"low_freq_factor": 4.0}), r"low_freq_factor \(4.0\) < high_freq_factor"),
        (lambda: Llama3Scaling(**LLAMA3 | {"low_freq_factor": 0.0}), r"0 < low_freq_factor \(0.0\)"),
        (lambda: Llama3Scaling(**LLAMA3 | {"original_max_positions": 0}), "original_max_positions > 0"),
        (lambda: replace(YARN, factor=0.0), "factor is 0.0"),
        (lambda: replace(YARN, beta_slow=32.0), r"beta_fast \(32.0\) > beta_slow \(32.0\)"),
        (lambda: replace(YARN, original_max_positions=0), "original_max_positions > 0"),
        (lambda: RopeSpec(base=1.0, rotary_dim=8), "rope base is 1.0"),
        (lambda: RopeSpec(base=1e4, rotary_dim=7), "rotary_dim is 7"),
        (lambda: RopeSpec(base=1e4, rotary_dim=0), "rotary_dim is 0"),
        (lambda: rope(rotary_dim=10), "rotary_dim=10 is larger than head_dim=8"),
        (lambda: attention(num_heads=0), "num_heads is 0"),
        (lambda: attention(num_kv_heads=4), "num_heads=6 is not a multiple of num_kv_heads=4"),
        (lambda: attention(head_dim=-8), "head_dim is -8"),
        (lambda: attention(window=0), "window is 0"),
        (lambda: attention(softcap=0.0), "attention softcap is 0.0"),
        (lambda: replace(MLP, ffn_size=0), "ffn_size is 0"),
        (lambda: replace(MLP, activation="swish"), r"MlpSpec\.activation is 'swish'; it must be one of 'silu'"),
        (lambda: attention(qk_norm_over="all"), "qk_norm_over='all' needs a qk_norm"),
        (
            lambda: attention(qk_norm=NormSpec(eps=1e-5, kind="layer"), qk_norm_over="all"),
            "qk_norm_over='all' needs a qk_norm of kind 'rms'",
        ),
        (lambda: attention(qk_norm=RMS, qk_norm_over="width"), r"qk_norm_over is 'width'; it must be one of 'head'"),
        (lambda: replace(MOE, num_experts=0), "num_experts is 0"),
        (lambda: replace(MOE, ffn_size=-1), "ffn_size is -1"),
        (lambda: replace(MOE, top_k=0), "top_k is 0; a token chooses at least 1 and at most all 5 experts"),
        (lambda: replace(MOE, top_k=6), "top_k is 6; a token chooses at least 1"),
        (lambda: replace(MOE, top_k=2.0), r"MoeSpec\.top_k is 2\.0; it must be an integer"),
        (lambda: replace(MOE, activation="swish"), r"MoeSpec\.activation is 'swish'"),
        (lambda: replace(MOE, balance_coefficient=-0.1), "balance_coefficient is -0.1; it must not be negative"),
        (lambda: replace(MOE, z_coefficient=float("nan")), r"MoeSpec\.z_coefficient is nan"),
        (lambda: replace(BLOCK, mlp=None), "a block needs an mlp, a moe, or both"),
        (lambda: model(vocab_size=0), "vocab_size is 0"),
        (lambda: model(hidden_size=-1), "hidden_size is -1"),
        (lambda: model(max_positions=0), "max_positions is 0"),
        (lambda: model(init_std=0.0), "init_std is 0.0"),
        (lambda: model(logit_softcap=-1.0), "logit_softcap is -1.0"),
        (lambda: replace(model(), blocks=()), "at least one block"),
    ],
)
def test_invalid_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_derived_numbers() -> None:
    assert ATTENTION.q_per_kv == 3
    assert ATTENTION.softmax_scale == 8**-0.5
    assert replace(ATTENTION, scale=0.25).softmax_scale == 0.25
    assert model(BLOCK, BLOCK, BLOCK).num_layers == 3
    assert ROPE.scaling is None and YarnScaling(factor=4.0, original_max_positions=400) == YARN
