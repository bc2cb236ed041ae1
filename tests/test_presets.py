"""Presets: the numbers of published models, and what the tiny ones promise."""

from __future__ import annotations

import numpy as np
import pytest

from duomesh.core.errors import SpecError
from duomesh.core.ir.build import build_program
from duomesh.core.rope import inverse_frequencies
from duomesh.core.spec.model import RopeSpec
from duomesh.core.spec.presets import preset, preset_names
from duomesh.core.spec.serialize import spec_from_json, spec_to_json

# Distinct parameters (a tied head counts once), as the model cards and checkpoints have them.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}
TINY = [name for name in preset_names() if name.startswith("tiny-")]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert build_program(preset(name)).num_params == PUBLISHED[name]


def test_every_preset_is_known_and_survives_json() -> None:
    assert set(preset_names()) == {*PUBLISHED, *TINY, "demo-llama"}
    for name in preset_names():
        assert spec_from_json(spec_to_json(preset(name))) == preset(name)


@pytest.mark.parametrize("name", TINY)
def test_tiny_presets_have_pairwise_distinct_dims(name: str) -> None:
    """A swapped or transposed dim cannot pass where no two are equal."""
    spec = preset(name)
    attention, mlp, moe = spec.blocks[0].attention, spec.blocks[0].mlp, spec.blocks[0].moe
    q, kv = (n * attention.head_dim for n in (attention.num_heads, attention.num_kv_heads))
    dims = [spec.vocab_size, spec.hidden_size, q, kv, attention.head_dim, attention.num_heads]
    dims += [] if mlp is None else [mlp.ffn_size]
    dims += [] if moe is None else [moe.num_experts, moe.ffn_size]
    assert len(set(dims)) == len(dims) >= 7
    assert 1 < attention.num_kv_heads < attention.num_heads
    assert spec.num_layers in (2, 3)


def test_tiny_llama3_scaling_has_all_three_regimes_within_its_context() -> None:
    rope = preset("tiny-llama3").blocks[0].attention.rope
    assert rope is not None and rope.scaling is not None
    plain = inverse_frequencies(RopeSpec(base=rope.base, rotary_dim=rope.rotary_dim))
    ratio = plain / inverse_frequencies(rope)
    assert ratio[0] == 1 and 1 < ratio[1] < rope.scaling.factor
    assert (ratio[2:] == rope.scaling.factor).all()  # a power of two: division is exact
    # the change turns some pair by a fifth of a radian within 64 positions
    assert np.abs(plain - inverse_frequencies(rope)).max() * 64 > 0.2


def test_tiny_presets_have_what_makes_their_family_special() -> None:
    blocks = {name: preset(name).blocks[0].attention for name in TINY}
    assert blocks["tiny-mistral"].window == 8
    biased = blocks["tiny-qwen2"]
    assert (biased.q_bias, biased.k_bias, biased.v_bias, biased.o_bias) == (True, True, True, False)
    assert preset("tiny-qwen2").tie_embeddings
    assert blocks["tiny-qwen3"].qk_norm is not None
    experts = preset("tiny-moe").blocks[0]
    assert experts.mlp is not None and experts.moe is not None
    assert (experts.moe.num_experts, experts.moe.top_k) == (8, 2)
    assert experts.moe.balance_coefficient and experts.moe.z_coefficient
    spec = preset("tiny-qwen3")
    assert spec.hidden_size != blocks["tiny-qwen3"].num_heads * blocks["tiny-qwen3"].head_dim


def test_demo_llama_is_small_enough_to_train_anywhere() -> None:
    assert 500_000 < build_program(preset("demo-llama")).num_params < 1_500_000


def test_an_unknown_name_lists_close_matches() -> None:
    with pytest.raises(SpecError, match=r"'llama-3-8b'; did you mean llama3-8b"):
        preset("llama-3-8b")
    with pytest.raises(SpecError, match="presets are llama2-7b"):
        preset("???")
    assert preset("LLaMA3-8B") == preset("llama3-8b")
