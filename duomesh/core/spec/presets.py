"""Published models and small test models by name, as one table of numbers.

The numbers are those of the config.json files of the checkpoints, the base ones where there are such. Every row is
expanded by the same function: a decoder with pre-norm RMSNorm, grouped-query attention and a gated SiLU MLP, beside
which there may be experts.
Presets named `tiny-*` are for tests: pairwise distinct dims, and each has what makes its family special.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from duomesh.core.errors import SpecError
from duomesh.core.spec.model import (
    AttentionSpec,
    BlockSpec,
    Llama3Scaling,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeScaling,
    RopeSpec,
)

__all__ = ["preset", "preset_names"]


@dataclass(frozen=True)
class _Row:
    """One model. Positional: hidden, layers, heads, kv_heads, ffn, vocab; head_dim None means hidden / heads."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    base: float
    max_positions: int
    eps: float = 1e-5
    head_dim: int | None = None
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    scaling: RopeScaling | None = None
    moe: MoeSpec | None = None


def _llama3(factor: float, original: int = 8192) -> Llama3Scaling:
    return Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=original)


_LLAMA_31 = _llama3(8.0)
_LLAMA_32 = _llama3(32.0)
_TINY_EXPERTS = MoeSpec(
    num_experts=8,
    top_k=2,
    ffn_size=48,
    activation="silu",
    is_gated=True,
    renormalize=True,
    balance_coefficient=0.01,
    z_coefficient=0.001,
)
_QWEN = 1e6  # rotary base of every Qwen2 and Qwen3 model

_ROWS: dict[str, _Row] = {
    "llama2-7b": _Row(4096, 32, 32, 32, 11008, 32000, 1e4, 4096),
    "llama2-13b": _Row(5120, 40, 40, 40, 13824, 32000, 1e4, 4096),
    "llama2-70b": _Row(8192, 80, 64, 8, 28672, 32000, 1e4, 4096),
    "llama3-8b": _Row(4096, 32, 32, 8, 14336, 128256, 5e5, 8192),
    "llama3-70b": _Row(8192, 80, 64, 8, 28672, 128256, 5e5, 8192),
    "llama3.1-8b": _Row(4096, 32, 32, 8, 14336, 128256, 5e5, 131072, scaling=_LLAMA_31),
    "llama3.1-70b": _Row(8192, 80, 64, 8, 28672, 128256, 5e5, 131072, scaling=_LLAMA_31),
    "llama3.1-405b": _Row(16384, 126, 128, 8, 53248, 128256, 5e5, 131072, scaling=_LLAMA_31),
    "llama3.2-1b": _Row(2048, 16, 32, 8, 8192, 128256, 5e5, 131072, tied=True, scaling=_LLAMA_32),
    "llama3.2-3b": _Row(3072, 28, 24, 8, 8192, 128256, 5e5, 131072, tied=True, scaling=_LLAMA_32),
    "llama3.3-70b": _Row(8192, 80, 64, 8, 28672, 128256, 5e5, 131072, scaling=_LLAMA_31),
    "mistral-7b": _Row(4096, 32, 32, 8, 14336, 32000, 1e4, 32768, window=4096),
    "mistral-7b-v0.3": _Row(4096, 32, 32, 8, 14336, 32768, 1e6, 32768),
    "qwen2-0.5b": _Row(896, 24, 14, 2, 4864, 151936, _QWEN, 131072, 1e-6, tied=True, qkv_bias=True),
    "qwen2-1.5b": _Row(1536, 28, 12, 2, 8960, 151936, _QWEN, 131072, 1e-6, tied=True, qkv_bias=True),
    "qwen2-7b": _Row(3584, 28, 28, 4, 18944, 152064, _QWEN, 131072, 1e-6, qkv_bias=True),
    "qwen2-72b": _Row(8192, 80, 64, 8, 29568, 152064, _QWEN, 131072, 1e-5, qkv_bias=True),
    "qwen2.5-0.5b": _Row(896, 24, 14, 2, 4864, 151936, _QWEN, 32768, 1e-6, tied=True, qkv_bias=True),
    "qwen2.5-1.5b": _Row(1536, 28, 12, 2, 8960, 151936, _QWEN, 131072, 1e-6, tied=True, qkv_bias=True),
    "qwen2.5-3b": _Row(2048, 36, 16, 2, 11008, 151936, _QWEN, 32768, 1e-6, tied=True, qkv_bias=True),
    "qwen2.5-7b": _Row(3584, 28, 28, 4, 18944, 152064, _QWEN, 131072, 1e-6, qkv_bias=True),
    "qwen2.5-14b": _Row(5120, 48, 40, 8, 13824, 152064, _QWEN, 131072, 1e-5, qkv_bias=True),
    "qwen2.5-32b": _Row(5120, 64, 40, 8, 27648, 152064, _QWEN, 131072, 1e-5, qkv_bias=True),
    "qwen2.5-72b": _Row(8192, 80, 64, 8, 29568, 152064, _QWEN, 131072, 1e-5, qkv_bias=True),
    "qwen3-0.6b": _Row(1024, 28, 16, 8, 3072, 151936, _QWEN, 40960, 1e-6, 128, tied=True, qk_norm=True),
    "qwen3-1.7b": _Row(2048, 28, 16, 8, 6144, 151936, _QWEN, 40960, 1e-6, 128, tied=True, qk_norm=True),
    "qwen3-4b": _Row(2560, 36, 32, 8, 9728, 151936, _QWEN, 40960, 1e-6, 128, tied=True, qk_norm=True),
    "qwen3-8b": _Row(4096, 36, 32, 8, 12288, 151936, _QWEN, 40960, 1e-6, 128, qk_norm=True),
    "qwen3-14b": _Row(5120, 40, 40, 8, 17408, 151936, _QWEN, 40960, 1e-6, 128, qk_norm=True),
    "qwen3-32b": _Row(5120, 64, 64, 8, 25600, 151936, _QWEN, 40960, 1e-6, 128, qk_norm=True),
    "smollm2-135m": _Row(576, 30, 9, 3, 1536, 49152, 1e5, 8192, tied=True),
    "smollm2-360m": _Row(960, 32, 15, 5, 2560, 49152, 1e5, 8192, tied=True),
    "smollm2-1.7b": _Row(2048, 24, 32, 32, 8192, 49152, 1.3e5, 8192, tied=True),
    # Original context 64: one rotary frequency is kept, one blended, the rest divided, all within 64 positions.
    "tiny-llama3": _Row(64, 3, 8, 2, 112, 500, 5e5, 512, head_dim=12, scaling=_llama3(8.0, 64)),
    "tiny-mistral": _Row(80, 2, 8, 2, 144, 520, 1e4, 512, head_dim=14, window=8),
    "tiny-qwen2": _Row(72, 2, 4, 2, 120, 480, _QWEN, 512, 1e-6, 20, tied=True, qkv_bias=True),
    "tiny-qwen3": _Row(64, 3, 4, 2, 104, 508, _QWEN, 512, 1e-6, 24, qk_norm=True),
    # Experts beside a shared one.
    "tiny-moe": _Row(56, 2, 4, 2, 112, 504, 1e4, 512, head_dim=20, moe=_TINY_EXPERTS),
    # Bytes and special tokens; about a million parameters, for training on a laptop.
    "demo-llama": _Row(128, 4, 4, 2, 384, 512, 1e4, 1024),
}


def preset_names() -> tuple[str, ...]:
    """All presets, published models first."""
    return tuple(_ROWS)


def preset(name: str) -> ModelSpec:
    """The spec of a preset; names are matched without regard to case. Raises SpecError with close matches."""
    row = _ROWS.get(name.lower())
    if row is None:
        close = get_close_matches(name.lower(), _ROWS, n=4, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}?" if close else f"presets are {', '.join(_ROWS)}."
        raise SpecError(f"there is no preset {name!r}; {hint}")
    return _expand(row)


def _expand(row: _Row) -> ModelSpec:
    norm = NormSpec(eps=row.eps)
    head_dim = row.head_dim or row.hidden // row.heads
    attention = AttentionSpec(
        num_heads=row.heads,
        num_kv_heads=row.kv_heads,
        head_dim=head_dim,
        rope=RopeSpec(base=row.base, rotary_dim=head_dim, scaling=row.scaling),
        q_bias=row.qkv_bias,
        k_bias=row.qkv_bias,
        v_bias=row.qkv_bias,
        qk_norm=norm if row.qk_norm else None,
        window=row.window,
    )
    mlp = MlpSpec(ffn_size=row.ffn, activation="silu", is_gated=True)
    block = BlockSpec(attention=attention, mlp=mlp, attention_norm=norm, mlp_norm=norm, moe=row.moe)
    return ModelSpec(
        vocab_size=row.vocab,
        hidden_size=row.hidden,
        blocks=(block,) * row.layers,
        final_norm=norm,
        tie_embeddings=row.tied,
        max_positions=row.max_positions,
    )
