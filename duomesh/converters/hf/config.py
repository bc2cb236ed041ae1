"""config.json -> ModelSpec, strictly: a field that is not understood is announced, one that changes the maths stops.

The reader knows both dialects of transformers (see `rotary.py`) and asks transformers for nothing. The way back is
`config_writer.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duomesh.converters.hf.families import FAMILIES, HF_ACTIVATIONS, Family, family_of
from duomesh.converters.hf.fields import REFUSED, USED, Fields, classify, is_integer
from duomesh.converters.hf.rotary import Dialect, LayerType, read_ropes
from duomesh.core.arrays import DTYPES
from duomesh.core.errors import ConversionError, SpecError
from duomesh.core.spec.model import AttentionSpec, BlockSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec

__all__ = ["HfConfig", "read_config"]


@dataclass(frozen=True)
class HfConfig:
    """A config.json that was understood.

    Attributes:
        dtype: the dtype that the file states, as in `core.arrays.DTYPES`; None if it states none. Only the tensors
            say what is stored.
        dialect: "v5" if rotary parameters are where transformers 5 writes them.
        warnings: defaults that were taken and fields that were ignored, one sentence each.
        raw: the file.
    """

    spec: ModelSpec
    family: Family
    dtype: str | None
    dialect: Dialect
    warnings: tuple[str, ...]
    raw: Mapping[str, Any]

    @property
    def bookkeeping(self) -> dict[str, Any]:
        """Fields that change no number in inference, token ids among them; an export keeps them."""
        dropped = (USED | REFUSED.keys() | {"auto_map"}) - {"attention_dropout"}
        return {name: value for name, value in self.raw.items() if name not in dropped}


def read_config(source: Path | str | Mapping[str, Any]) -> HfConfig:
    """Reads a config.json, the directory that holds one, or its parsed content.

    What a config cannot say (how fresh weights are scaled with depth) takes the value of `ModelSpec`.

    Raises:
        ConversionError: a field is missing, mistyped, contradicts another, or changes the maths unsupportedly.
    """
    where, raw = ("config.json", source) if isinstance(source, Mapping) else _load(Path(source))
    family = family_of(raw.get("model_type"), where)
    warnings = classify(raw, where)
    fields = Fields(raw, where, family.defaults, family.quiet_defaults)
    _check_architecture(fields)
    try:
        spec = _spec(fields, family)
    except SpecError as error:
        raise ConversionError(f"{where}: {error}") from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConversionError(f"{where} holds a value that no model can have: {error}.") from error
    dtype = _dtype(fields)
    _note_training_only(fields)
    dialect: Dialect = "v5" if fields.has("rope_parameters") else "v4"
    return HfConfig(spec, family, dtype, dialect, tuple(dict.fromkeys(warnings + fields.warnings)), dict(raw))


def _load(path: Path) -> tuple[str, Mapping[str, Any]]:
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{file} does not exist; a Hugging Face directory has a config.json.") from None
    except OSError as error:
        raise ConversionError(f"cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise ConversionError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ConversionError(f"{file} must hold a table of fields, not {type(data).__name__}.")
    return str(file), data


def _check_architecture(fields: Fields) -> None:
    names = fields.raw.get("architectures")
    if not names:
        return
    if not isinstance(names, list) or not any(str(name).endswith("ForCausalLM") for name in names):
        raise fields.fault("architectures", "only causal language models (...ForCausalLM) can be represented")


def _dtype(fields: Fields) -> str | None:
    """The stated dtype; transformers prefers `dtype` to the older `torch_dtype`."""
    for name in ("dtype", "torch_dtype"):
        if fields.has(name):
            value = str(fields.raw[name]).removeprefix("torch.")
            if value in DTYPES:
                return value
            fields.warnings.append(f"{fields.where}: {name} is {fields.raw[name]!r}, which is no dtype; ignored.")
    return None


def _note_training_only(fields: Fields) -> None:
    dropout = fields.raw.get("attention_dropout")
    if dropout:
        fields.warnings.append(
            f"{fields.where}: attention_dropout = {dropout!r} acts in training only and is not applied here."
        )


def _spec(fields: Fields, family: Family) -> ModelSpec:
    eps = fields.number("rms_norm_eps")
    norm = NormSpec(eps=eps)
    windows = _windows(fields, family)
    kinds: list[LayerType] = ["full_attention" if w is None else "sliding_attention" for w in windows]
    head_dim = _head_dim(fields, family)
    ropes = read_ropes(fields, head_dim, kinds)
    mlp = _mlp(fields, family)

    def block(window: int | None, kind: LayerType) -> BlockSpec:
        attention = _attention(fields, family, head_dim, ropes[kind], window, norm)
        return BlockSpec(attention=attention, mlp=mlp, attention_norm=norm, mlp_norm=norm)

    # built once a kind, so that equal layers are one object
    blocks = {(w, k): block(w, k) for w, k in dict.fromkeys(zip(windows, kinds, strict=True))}
    return ModelSpec(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        blocks=tuple(blocks[pair] for pair in zip(windows, kinds, strict=True)),
        final_norm=norm,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        max_positions=fields.integer("max_position_embeddings"),
        init_std=fields.number("initializer_range"),
    )


def _head_dim(fields: Fields, family: Family) -> int:
    if fields.has("head_dim") or "head_dim" in family.defaults:
        return fields.integer("head_dim")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % heads:
        raise ConversionError(
            f"{fields.where}: head_dim is absent, and hidden_size = {hidden} is not a multiple of "
            f"num_attention_heads = {heads}."
        )
    return hidden // heads


def _attention(
    fields: Fields, family: Family, head_dim: int, rope: RopeSpec, window: int | None, norm: NormSpec
) -> AttentionSpec:
    heads = fields.integer("num_attention_heads")
    # null is the documented way to say: as many as query heads
    is_null = "num_key_value_heads" in fields.raw and not fields.has("num_key_value_heads")
    kv_heads = heads if is_null else fields.integer("num_key_value_heads", otherwise=heads)
    qkv, out = _attention_biases(fields, family)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        q_bias=qkv,
        k_bias=qkv,
        v_bias=qkv,
        o_bias=out,
        qk_norm=norm if family.has_qk_norm else None,
        window=window,
    )


def _attention_biases(fields: Fields, family: Family) -> tuple[bool, bool]:
    """(bias on q, k and v; bias on o)."""
    flag = fields.flag("attention_bias")
    if family.attention_bias == "flag":
        return flag, flag
    if family.attention_bias == "qkv":
        if fields.has("attention_bias"):
            fields.warnings.append(
                f"{fields.where}: attention_bias has no effect for model_type {family.model_type!r}, "
                "which always has biases on q, k and v and none on o."
            )
        return True, False
    if flag:
        raise fields.fault("attention_bias", f"model_type {family.model_type!r} has no biases")
    return False, False


def _mlp(fields: Fields, family: Family) -> MlpSpec:
    name = fields.text("hidden_act")
    if name not in HF_ACTIVATIONS:
        raise fields.fault("hidden_act", f"supported are {', '.join(HF_ACTIVATIONS)}")
    has_bias = fields.flag("mlp_bias")
    if has_bias and not family.has_mlp_bias_flag:
        raise fields.fault("mlp_bias", f"model_type {family.model_type!r} has no biases in its MLP")
    return MlpSpec(
        ffn_size=fields.integer("intermediate_size"),
        activation=HF_ACTIVATIONS[name],  # type: ignore[arg-type]
        is_gated=True,
        up_bias=has_bias,
        down_bias=has_bias,
    )


def _windows(fields: Fields, family: Family) -> tuple[int | None, ...]:
    """The window of every layer: keys that a query sees, its own position included; None for all."""
    num_layers = fields.integer("num_hidden_layers")
    layer_types = _layer_types(fields, num_layers)
    window = _window(fields, family)
    if layer_types is None:
        start = fields.integer("max_window_layers") if family.windows == "gated" and window is not None else 0
        return tuple(window if i >= start else None for i in range(num_layers))
    if family.windows in ("none", "all"):
        # transformers' code of these families looks at no layer's type
        expected = "full_attention" if window is None else "sliding_attention"
        if set(layer_types) != {expected}:
            raise fields.fault(
                "layer_types",
                f"model_type {family.model_type!r} treats all layers as {expected}; "
                f"use a model_type with a window per layer ({', '.join(_per_layer_types())})",
            )
    if window is None and "sliding_attention" in layer_types:
        raise fields.fault("layer_types", "sliding_attention needs sliding_window, and its switch where there is one")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _per_layer_types() -> list[str]:
    return [name for name, family in FAMILIES.items() if family.windows in ("layers", "gated")]


def _layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    value = fields.raw.get("layer_types")
    if value is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(value, list) or len(value) != num_layers or not all(kind in known for kind in value):
        raise fields.fault("layer_types", f"it must list {num_layers} layers, each of {' or '.join(known)}")
    return value


def _window(fields: Fields, family: Family) -> int | None:
    """The model's window before any layer's type is looked at."""
    value: Any = fields.raw.get("sliding_window")
    switch = fields.raw.get("use_sliding_window")
    is_set = value is not None and value is not False  # some files say false for none
    if is_set and (not is_integer(value) or value < 1):
        raise fields.fault("sliding_window", "it must be a positive integer or null")
    if family.windows == "gated":
        if not fields.flag("use_sliding_window"):
            return None
    elif is_set and family.windows == "none" and switch is not False:
        raise fields.fault("sliding_window", f"model_type {family.model_type!r} has no window in transformers")
    elif family.windows == "none":
        return None
    elif is_set and switch is False:
        raise fields.fault("sliding_window", "but use_sliding_window is false, which this model_type ignores")
    if "sliding_window" in fields.raw:
        return int(value) if is_set else None
    return fields.integer("sliding_window")
