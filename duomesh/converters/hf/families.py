"""The Hugging Face model types that are read and written, as data: names, biases, windows and documented defaults.

Families differ here and in nothing else; no code below asks for a model type by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from duomesh.converters.hf.names import LLAMA_NAMES, NameMap
from duomesh.core.errors import ConversionError

__all__ = ["FAMILIES", "HF_ACTIVATIONS", "Family", "family_of"]

# hidden_act of config.json -> Activation. Several names stand for one function; the first is written on export.
HF_ACTIVATIONS: dict[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a model type means.

    Attributes:
        attention_bias: "flag" means that the field attention_bias decides about q, k, v and o together;
            "qkv" means always on q, k, v and never on o; "none" means never.
        has_mlp_bias_flag: whether the field mlp_bias is honoured.
        windows: which fields decide about sliding windows. "none": there are none. "all": sliding_window holds for
            every layer. "layers": layer_types says for which, all if absent. "gated": use_sliding_window must be
            true, then layer_types says for which, from layer max_window_layers on if absent.
        defaults: what transformers assumes for a field that config.json lacks.
        quiet_defaults: those of them that older files lack as a rule; the others are announced.
        heads_divide_hidden: transformers refuses a hidden size that the heads do not divide.
    """

    model_type: str
    architecture: str
    attention_bias: Literal["flag", "qkv", "none"]
    has_mlp_bias_flag: bool = False
    has_qk_norm: bool = False
    windows: Literal["none", "all", "layers", "gated"] = "none"
    heads_divide_hidden: bool = False
    defaults: Mapping[str, Any]
    quiet_defaults: Mapping[str, Any]
    names: NameMap = LLAMA_NAMES


_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_QUIET: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "initializer_range": 0.02}
_QWEN_WINDOWS: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            attention_bias="flag",
            has_mlp_bias_flag=True,
            heads_divide_hidden=True,
            defaults={**_COMMON, "max_position_embeddings": 2048},
            # files of LLaMA 1 and 2 lack it: every query head had its own key and value
            quiet_defaults={**_QUIET, "num_key_value_heads": None},
        ),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            attention_bias="none",
            windows="all",
            defaults={**_COMMON, "max_position_embeddings": 131072, "sliding_window": 4096},
            quiet_defaults=_QUIET,
        ),
        Family(
            model_type="ministral",
            architecture="MinistralForCausalLM",
            attention_bias="none",
            windows="layers",
            defaults={**_COMMON, "max_position_embeddings": 131072, "sliding_window": 4096},
            quiet_defaults=_QUIET,
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            attention_bias="qkv",
            windows="gated",
            defaults={**_COMMON, **_QWEN_WINDOWS, "max_position_embeddings": 32768},
            quiet_defaults={**_QUIET, "use_sliding_window": False},
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            attention_bias="flag",
            has_qk_norm=True,
            windows="gated",
            defaults={**_COMMON, **_QWEN_WINDOWS, "max_position_embeddings": 32768, "head_dim": 128},
            quiet_defaults={**_QUIET, "use_sliding_window": False},
        ),
    )
}


def family_of(model_type: Any, where: str) -> Family:
    """The family of a model type. Raises ConversionError that lists the known ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConversionError(f"{where}: model_type is {model_type!r}; supported are {', '.join(FAMILIES)}.")
    return FAMILIES[model_type]
