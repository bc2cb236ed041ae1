"""Small model descriptions for tests: a table that has every convention once, and a hypothesis strategy.

Dims are pairwise distinct, so that a transposed or swapped dim cannot pass: vocabulary 37, hidden 20, 2 kv heads of
3 query heads, head dim 8, ffn 28, 5 experts of 12. Weights are drawn wide (init_std 0.3), so that no nonlinearity
stays linear.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from duomesh.core.spec.model import (
    ACTIVATIONS,
    AttentionSpec,
    BlockSpec,
    LinearScaling,
    Llama3Scaling,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    YarnScaling,
)

RMS = NormSpec(eps=1e-5)
ROPE = RopeSpec(base=10000.0, rotary_dim=8)
ATTENTION = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=8, rope=ROPE)
MLP = MlpSpec(ffn_size=28, activation="silu", is_gated=True)
BLOCK = BlockSpec(attention=ATTENTION, mlp=MLP, attention_norm=RMS, mlp_norm=RMS)
MOE = MoeSpec(num_experts=5, top_k=2, ffn_size=12, activation="silu", is_gated=True, renormalize=True)


def model(*blocks: BlockSpec, **fields: Any) -> ModelSpec:
    """A model of these blocks; a single one, or the plain one if none is given, makes two layers."""
    defaults: dict[str, Any] = {
        "vocab_size": 37,
        "hidden_size": 20,
        "final_norm": RMS,
        "tie_embeddings": False,
        "max_positions": 64,
        "init_std": 0.3,
        "init_scaled_output": False,
    }
    blocks = blocks or (BLOCK,)
    return ModelSpec(blocks=blocks if len(blocks) > 1 else blocks * 2, **(defaults | fields))


def attention(**fields: Any) -> BlockSpec:
    """The plain block with another attention."""
    return replace(BLOCK, attention=replace(ATTENTION, **fields))


def experts(**fields: Any) -> BlockSpec:
    """The plain block with experts instead of its MLP."""
    return replace(BLOCK, mlp=None, moe=replace(MOE, **fields))


def rope(**fields: Any) -> BlockSpec:
    """The plain block with another rotary embedding."""
    return attention(rope=replace(ROPE, **fields))


LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
YARN = YarnScaling(factor=4.0, original_max_positions=400)
_LAYER_NORM = NormSpec(kind="layer", eps=1e-3, has_bias=True, weight_offset=1.0)
_OFFSET_NORM = NormSpec(eps=1e-3, weight_offset=1.0, cast="after_weight")

CASES: dict[str, ModelSpec] = {
    "gqa": model(),
    "qkv_bias_tied": model(attention(q_bias=True, k_bias=True, v_bias=True), tie_embeddings=True),
    "some_biases": model(
        replace(attention(q_bias=True, v_bias=True, o_bias=True), mlp=replace(MLP, up_bias=True, down_bias=True))
    ),
    "qk_norm": model(attention(qk_norm=NormSpec(eps=1e-3))),
    "qk_norm_over_all": model(attention(qk_norm=replace(_OFFSET_NORM, has_bias=True), qk_norm_over="all")),
    "window": model(attention(window=4), BLOCK, attention(window=1)),
    "repeated_pattern": model(*[attention(window=3), BLOCK] * 2),
    "softcaps": model(attention(softcap=1.5), logit_softcap=2.5),
    "scale": model(attention(scale=0.61)),
    "no_rope": model(attention(rope=None)),
    "interleaved": model(rope(pairing="interleaved")),
    "partial": model(rope(rotary_dim=6)),
    "partial_interleaved": model(rope(rotary_dim=4, pairing="interleaved", compute="fp32")),
    "linear_scaling": model(rope(scaling=LinearScaling(factor=3.0))),
    "llama3_scaling": model(rope(base=500.0, scaling=LLAMA3)),
    "yarn": model(rope(scaling=YARN)),
    "yarn_not_truncated": model(rope(scaling=replace(YARN, truncate=False, mscale=1.3, mscale_all_dim=0.7))),
    "yarn_explicit_factor": model(rope(scaling=replace(YARN, attention_factor=1.21))),
    "two_rotary_tables": model(rope(base=100.0), rope(base=1000.0, rotary_dim=6), rope(base=100.0)),
    "layer_norm": model(
        replace(BLOCK, attention_norm=_LAYER_NORM, mlp_norm=replace(_LAYER_NORM, weight_offset=0.0)),
        final_norm=_LAYER_NORM,
    ),
    "offset_norm": model(replace(BLOCK, attention_norm=_OFFSET_NORM, mlp_norm=_OFFSET_NORM), final_norm=_OFFSET_NORM),
    "post_norms": model(replace(BLOCK, attention_post_norm=RMS, mlp_post_norm=_LAYER_NORM)),
    "only_post_norms": model(
        replace(BLOCK, attention_norm=None, mlp_norm=None, attention_post_norm=RMS, mlp_post_norm=RMS)
    ),
    "plain_mlp": model(replace(BLOCK, mlp=replace(MLP, activation="relu2", is_gated=False, up_bias=True))),
    "embedding_scale": model(embedding_scale=20**0.5, tie_embeddings=True),
    **{f"glu_{name}": model(replace(BLOCK, mlp=replace(MLP, activation=name))) for name in ACTIVATIONS},
}

# Models with experts, which no backend runs yet.
EXPERT_CASES: dict[str, ModelSpec] = {
    "experts": model(experts()),
    "experts_as_scored": model(experts(renormalize=False, balance_coefficient=0.7)),
    "one_choice": model(experts(top_k=1, renormalize=False, z_coefficient=0.4)),
    "one_choice_renormalised": model(experts(top_k=1, balance_coefficient=0.7)),
    "all_experts": model(experts(top_k=5, renormalize=False)),
    "plain_experts": model(experts(activation="gelu", is_gated=False, top_k=3)),
    "shared_expert": model(
        replace(
            BLOCK,
            moe=replace(MOE, balance_coefficient=0.7, z_coefficient=0.3),
            mlp_post_norm=NormSpec(eps=1e-3, cast="after_weight"),
        )
    ),
    # a different term in each layer, and one layer without any
    "mixed_layers": model(
        experts(balance_coefficient=0.7),
        BLOCK,
        experts(num_experts=4, ffn_size=10, balance_coefficient=0.2, z_coefficient=0.3),
    ),
}
ALL_CASES = CASES | EXPERT_CASES

# ---------------------------------------------------------------------------------------------------------------------

_numbers = st.floats(1e-6, 1e6)
_norms = st.builds(
    NormSpec,
    kind=st.sampled_from(["rms", "layer"]),
    eps=st.floats(1e-12, 1.0),
    weight_offset=st.sampled_from([0.0, 1.0, -0.5]),
    has_bias=st.booleans(),
    cast=st.sampled_from(["before_weight", "after_weight"]),
)
_maybe_number = st.none() | _numbers
_scalings = st.one_of(
    st.none(),
    st.builds(LinearScaling, factor=_numbers),
    st.builds(
        Llama3Scaling,
        factor=_numbers,
        low_freq_factor=st.floats(0.5, 1.0),
        high_freq_factor=st.floats(1.5, 8.0),
        original_max_positions=st.integers(1, 10**6),
    ),
    st.builds(
        YarnScaling,
        factor=_numbers,
        original_max_positions=st.integers(1, 10**6),
        beta_fast=st.floats(2.0, 64.0),
        beta_slow=st.floats(0.1, 1.5),
        attention_factor=_maybe_number,
        mscale=_maybe_number,
        mscale_all_dim=_maybe_number,
        truncate=st.booleans(),
    ),
)


@st.composite
def _attentions(draw: st.DrawFn) -> AttentionSpec:
    head_dim, kv_heads = draw(st.integers(2, 12)), draw(st.integers(1, 3))
    ropes = st.builds(
        RopeSpec,
        base=st.floats(1.5, 1e7),
        rotary_dim=st.integers(1, head_dim // 2).map(lambda pairs: 2 * pairs),
        pairing=st.sampled_from(["half", "interleaved"]),
        scaling=_scalings,
        compute=st.sampled_from(["activation", "fp32"]),
    )
    flags = {name: draw(st.booleans()) for name in ("q_bias", "k_bias", "v_bias", "o_bias")}
    qk_norm = draw(st.none() | _norms)
    over = ["head", "all"] if qk_norm is not None and qk_norm.kind == "rms" else ["head"]
    return AttentionSpec(
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=draw(st.none() | ropes),
        qk_norm=qk_norm,
        qk_norm_over=draw(st.sampled_from(over)),
        window=draw(st.none() | st.integers(1, 100)),
        softcap=draw(_maybe_number),
        scale=draw(_maybe_number),
        **flags,
    )


_mlps = st.builds(
    MlpSpec,
    ffn_size=st.integers(1, 30),
    activation=st.sampled_from(ACTIVATIONS),
    is_gated=st.booleans(),
    up_bias=st.booleans(),
    down_bias=st.booleans(),
)


@st.composite
def _moes(draw: st.DrawFn) -> MoeSpec:
    num_experts = draw(st.integers(1, 9))
    coefficients = st.just(0.0) | st.floats(1e-6, 1.0)
    return MoeSpec(
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        ffn_size=draw(st.integers(1, 30)),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        is_gated=draw(st.booleans()),
        renormalize=draw(st.booleans()),
        balance_coefficient=draw(coefficients),
        z_coefficient=draw(coefficients),
    )


@st.composite
def _blocks(draw: st.DrawFn) -> BlockSpec:
    moe = draw(st.none() | _moes())
    return BlockSpec(
        attention=draw(_attentions()),
        mlp=draw(_mlps if moe is None else st.none() | _mlps),
        attention_norm=draw(st.none() | _norms),
        mlp_norm=draw(st.none() | _norms),
        attention_post_norm=draw(st.none() | _norms),
        mlp_post_norm=draw(st.none() | _norms),
        moe=moe,
    )


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Any valid small model; layers repeat a few kinds of blocks."""
    kinds = draw(st.lists(_blocks(), min_size=1, max_size=3))
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    return ModelSpec(
        vocab_size=draw(st.integers(1, 40)),
        hidden_size=draw(st.integers(1, 24)),
        blocks=tuple(layers),
        final_norm=draw(_norms),
        tie_embeddings=draw(st.booleans()),
        max_positions=draw(st.integers(1, 100)),
        embedding_scale=draw(_maybe_number),
        logit_softcap=draw(_maybe_number),
        init_std=draw(st.floats(1e-3, 1.0)),
        init_scaled_output=draw(st.booleans()),
    )
