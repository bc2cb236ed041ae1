"""ModelSpec -> config.json of a family that can represent it, or an error that names what no family can.

A spec whose rotary pairing is interleaved is written as its half-split twin; `export_hf` reorders the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from typing import Any

from duomesh.converters.hf.families import FAMILIES, HF_ACTIVATIONS, Family, family_of
from duomesh.converters.hf.rotary import Dialect, write_rope
from duomesh.converters.pairing import with_pairing
from duomesh.core.errors import ConversionError
from duomesh.core.spec.model import AttentionSpec, BlockSpec, ModelSpec, NormSpec

__all__ = ["choose_family", "write_config"]

Obstacle = tuple[str, str]  # (path of a spec field, what the family needs)


def write_config(
    spec: ModelSpec,
    *,
    family: str | None = None,
    dtype: str = "float32",
    dialect: Dialect = "v4",
    token_ids: Mapping[str, int | list[int] | None] | None = None,
) -> dict[str, Any]:
    """The content of a config.json.

    Args:
        family: a model_type to write; None chooses the first that can represent the spec.
        dtype: what the file says about the stored weights.
        dialect: "v4" is understood by every version of transformers, "v5" by 5.0 and later only.
        token_ids: bos_token_id, eos_token_id, pad_token_id. Ids that are not given are written as null: a
            missing one would be read as the family's default, some other vocabulary's id.

    Raises:
        ConversionError: the family, or every family, lacks something that the spec has.
    """
    chosen = choose_family(spec, family)
    block = spec.blocks[0]
    attention, rope, mlp = block.attention, block.attention.rope, block.mlp
    assert rope is not None and mlp is not None
    windows = [b.attention.window for b in spec.blocks]
    out: dict[str, Any] = {
        "architectures": [chosen.architecture],
        "model_type": chosen.model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": _hf_activation(mlp.activation),
        "max_position_embeddings": spec.max_positions,
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.final_norm.eps,
        "tie_word_embeddings": spec.tie_embeddings,
        **write_rope(rope, dialect),
        **_window_fields(windows, chosen),
        "attention_dropout": 0.0,
        "use_cache": True,
        **{name: (token_ids or {}).get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "dtype" if dialect == "v5" else "torch_dtype": dtype,
    }
    if chosen.attention_bias == "flag":
        out["attention_bias"] = attention.q_bias
    if chosen.has_mlp_bias_flag:
        out["mlp_bias"] = mlp.up_bias
    return out


def choose_family(spec: ModelSpec, family: str | None = None) -> Family:
    """The family to write. Raises ConversionError naming the spec fields that stand against it."""
    spec = with_pairing(spec, "half")
    candidates = list(FAMILIES.values()) if family is None else [family_of(family, "export")]
    against: dict[str, list[Obstacle]] = {}
    for candidate in candidates:
        against[candidate.model_type] = list(_obstacles(spec, candidate))
        if not against[candidate.model_type]:
            return candidate
    every = set.intersection(*(set(obstacles) for obstacles in against.values()))
    if every:
        path, needed = min(every)
        who = family or "any supported Hugging Face model type"
        raise ConversionError(f"{path} cannot be written for {who}: {needed}.")
    reasons = "; ".join(f"{name}: {found[0][0]} ({found[0][1]})" for name, found in against.items())
    raise ConversionError(f"no supported Hugging Face model type has all that the spec has. {reasons}.")


def _obstacles(spec: ModelSpec, family: Family) -> Iterator[Obstacle]:
    """What keeps a family from representing a spec; the same fault has the same words for every family."""
    yield from _model_obstacles(spec)
    yield from _difference_obstacles(spec)
    block = spec.blocks[0]
    yield from _attention_obstacles(block.attention, spec.final_norm, family)
    yield from _mlp_obstacles(block, family)
    if family.heads_divide_hidden and spec.hidden_size % block.attention.num_heads:
        yield "hidden_size", "transformers wants it to be a multiple of num_heads"
    yield from _window_obstacles([b.attention.window for b in spec.blocks], family)


def _model_obstacles(spec: ModelSpec) -> Iterator[Obstacle]:
    if spec.embedding_scale is not None:
        yield "embedding_scale", "embeddings cannot be scaled"
    if spec.logit_softcap is not None:
        yield "logit_softcap", "logits cannot be capped"
    for i, block in enumerate(spec.blocks[:1]):
        for name in ("attention_post_norm", "mlp_post_norm"):
            if getattr(block, name) is not None:
                yield f"blocks[{i}].{name}", "there is no norm after attention or MLP"
        for name in ("attention_norm", "mlp_norm"):
            if getattr(block, name) is None:
                yield f"blocks[{i}].{name}", "a norm is needed before attention and MLP"
            else:
                yield from _norm_obstacles(f"blocks[{i}].{name}", getattr(block, name), spec.final_norm)
    yield from _norm_obstacles("final_norm", spec.final_norm, spec.final_norm)


def _norm_obstacles(path: str, norm: NormSpec, final: NormSpec) -> Iterator[Obstacle]:
    if norm.kind != "rms" or norm.has_bias:
        yield f"{path}.kind", "only RMSNorm without bias can be written"
    if norm.weight_offset != 0.0:
        yield f"{path}.weight_offset", "gains are stored as they are; nothing is added to them"
    if norm.cast != "before_weight":
        yield f"{path}.cast", "the norm rounds before it multiplies by its weight"
    if norm.eps != final.eps:
        yield f"{path}.eps", f"all norms share one eps, and final_norm.eps is {final.eps:g}"


def _difference_obstacles(spec: ModelSpec) -> Iterator[Obstacle]:
    """Layers may differ in their window only."""
    first = spec.blocks[0]
    for i, block in enumerate(spec.blocks):
        path = _first_difference(first, block, f"blocks[{i}]")
        if path is not None:
            yield path, "layers can differ in their window only"
            return


def _first_difference(a: Any, b: Any, path: str) -> str | None:
    if a == b:
        return None
    if not is_dataclass(a) or type(a) is not type(b):
        return path
    for field in dataclass_fields(a):
        if field.name != "window":
            found = _first_difference(getattr(a, field.name), getattr(b, field.name), f"{path}.{field.name}")
            if found is not None:
                return found
    return None


def _attention_obstacles(attention: AttentionSpec, final: NormSpec, family: Family) -> Iterator[Obstacle]:
    path = "blocks[0].attention"
    if attention.softcap is not None:
        yield f"{path}.softcap", "attention scores cannot be capped"
    if attention.softmax_scale != attention.head_dim**-0.5:
        yield f"{path}.scale", "the scale is head_dim ** -0.5"
    rope = attention.rope
    if rope is None:
        yield f"{path}.rope", "every layer has a rotary embedding"
    else:
        if rope.rotary_dim != attention.head_dim:
            yield f"{path}.rope.rotary_dim", "the whole head is rotated"
        if rope.compute != "activation":
            yield f"{path}.rope.compute", "the rotation is made in the activation dtype"
    biases = (attention.q_bias, attention.k_bias, attention.v_bias, attention.o_bias)
    allowed = {
        "flag": ((False,) * 4, (True,) * 4),
        "qkv": ((True, True, True, False),),
        "none": ((False,) * 4,),
    }[family.attention_bias]
    if biases not in allowed:
        known = any(biases == pattern for pattern in ((False,) * 4, (True,) * 4, (True, True, True, False)))
        needed = (
            "not with the other fields of this spec" if known else "no model type has this set of q, k, v, o biases"
        )
        yield f"{path}.q_bias", needed
    if attention.qk_norm_over == "all":
        yield f"{path}.qk_norm_over", "q and k are normed head by head"
    if family.has_qk_norm and attention.qk_norm is None:
        yield f"{path}.qk_norm", "this model type needs a norm of every head of q and k"
    elif attention.qk_norm is not None and not family.has_qk_norm:
        yield f"{path}.qk_norm", "this model type has no norm of q and k"
    elif attention.qk_norm is not None:
        yield from _norm_obstacles(f"{path}.qk_norm", attention.qk_norm, final)


def _mlp_obstacles(block: BlockSpec, family: Family) -> Iterator[Obstacle]:
    mlp = block.mlp
    if block.moe is not None or mlp is None:
        yield "blocks[0].moe", "mixtures of experts cannot be written yet"
        return
    if not mlp.is_gated:
        yield "blocks[0].mlp.is_gated", "only gated MLPs can be written"
    if mlp.activation not in HF_ACTIVATIONS.values():
        yield "blocks[0].mlp.activation", f"{mlp.activation} has no name there"
    if mlp.up_bias != mlp.down_bias:
        yield "blocks[0].mlp.up_bias", "biases must be on all of the MLP's matrices or on none"
    elif mlp.up_bias and not family.has_mlp_bias_flag:
        yield "blocks[0].mlp.up_bias", "this model type has no biases in its MLP"


def _window_obstacles(windows: list[int | None], family: Family) -> Iterator[Obstacle]:
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        yield "blocks[].attention.window", f"windows must have one size, not {sorted(sizes)}"
    if sizes and family.windows == "none":
        yield "blocks[].attention.window", "this model type has no window"
    if sizes and None in windows and family.windows == "all":
        yield "blocks[].attention.window", "this model type has a window on all layers or on none"


def _window_fields(windows: list[int | None], family: Family) -> dict[str, Any]:
    window = next((w for w in windows if w is not None), None)
    layer_types = ["full_attention" if w is None else "sliding_attention" for w in windows]
    if family.windows == "none":
        return {}
    if family.windows == "all":
        return {"sliding_window": window}
    if family.windows == "layers":
        return {"sliding_window": window, "layer_types": layer_types}
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        # for readers that know no layer_types: the last run of windowed layers
        "max_window_layers": max((i + 1 for i, w in enumerate(windows) if w is None), default=0),
        "layer_types": layer_types,
    }


def _hf_activation(activation: str) -> str:
    return next(hf for hf, ours in HF_ACTIVATIONS.items() if ours == activation)
