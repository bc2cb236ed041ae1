"""Canonical parameter names <-> names in a Hugging Face checkpoint.

Buffers that hold no weights (rotary tables of old files) are known by pattern; they may be there or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

__all__ = ["LLAMA_NAMES", "NameMap", "is_buffer"]

_BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def is_buffer(hf_name: str) -> bool:
    """Whether a tensor is derived data that no model needs and every model may carry."""
    return _BUFFERS.fullmatch(hf_name) is not None


@dataclass(frozen=True)
class NameMap:
    """Two-way name rules of a family.

    model: canonical name -> HF name, outside of layers. layer: the same for modules inside one, without prefix and
    without the last word (weight or bias), which both sides share. layer_prefix: what HF writes before the number.
    """

    model: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str = "model.layers."

    def to_hf(self, name: str) -> str:
        """The HF name of a canonical one. Raises KeyError if the family has no such parameter."""
        if not name.startswith("layers."):
            return self.model[name]
        _, number, rest = name.split(".", 2)
        module, leaf = rest.rsplit(".", 1)
        return f"{self.layer_prefix}{number}.{self.layer[module]}.{leaf}"

    def to_canonical(self, hf_name: str) -> str | None:
        """The canonical name of an HF one, or None if the rules do not know it."""
        if hf_name in self._model_back:
            return self._model_back[hf_name]
        match = self._layer_pattern.fullmatch(hf_name)
        module = None if match is None else self._layer_back.get(match[2])
        return None if match is None or module is None else f"layers.{match[1]}.{module}.{match[3]}"

    @cached_property
    def _model_back(self) -> dict[str, str]:
        return {hf: name for name, hf in self.model.items()}

    @cached_property
    def _layer_back(self) -> dict[str, str]:
        return {hf: name for name, hf in self.layer.items()}

    @cached_property
    def _layer_pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.layer_prefix) + r"(\d+)\.(.+)\.(weight|bias)")


LLAMA_NAMES = NameMap(
    model={
        "embed.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
    layer={
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)
