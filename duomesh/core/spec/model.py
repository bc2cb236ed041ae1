"""What a model is: a frozen, hashable tree of numbers and conventions, without any architecture's name.

Every convention that checkpoints of different families disagree on is a field here and never a default
inside a backend: the rotary pairing, where a norm rounds, whether a window counts the current token.

A `ModelSpec` is checked when it is constructed; a spec that exists is one that can be built.
Not here: sizes of a batch, parallel layouts, optimizer settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from duomesh.core.errors import SpecError

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "AttentionSpec",
    "BlockSpec",
    "LinearScaling",
    "Llama3Scaling",
    "MlpSpec",
    "ModelSpec",
    "MoeSpec",
    "NormSpec",
    "RopeScaling",
    "RopeSpec",
    "YarnScaling",
]

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh"]
ACTIVATIONS: tuple[str, ...] = Activation.__args__  # type: ignore[attr-defined]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message)


def _check_fields(spec: Any) -> None:
    """Numbers must be finite and words among those that the field names: a typo would mean the other convention."""
    for name, hint in get_type_hints(type(spec)).items():
        value = getattr(spec, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            words = ", ".join(map(repr, get_args(hint)))
            raise SpecError(f"{type(spec).__name__}.{name} is {value!r}; it must be one of {words}.")
        if hint is int and (not isinstance(value, int) or isinstance(value, bool)):
            raise SpecError(f"{type(spec).__name__}.{name} is {value!r}; it must be an integer.")
        if isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{type(spec).__name__}.{name} is {value}; it must be finite.")


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm over the last dim; statistics are always taken in at least fp32.

    rms:   y = x / sqrt(mean(x^2) + eps) * (weight_offset + weight)
    layer: y = (x - mean(x)) / sqrt(var(x) + eps) * (weight_offset + weight) + bias

    Attributes:
        weight_offset: added to the stored weight in fp32; 1.0 where a checkpoint stores the gain minus one.
        has_bias: whether a bias is stored.
        cast: "before_weight" rounds the normed value to the activation dtype and multiplies there
            (LLaMA, Mistral, Qwen); "after_weight" multiplies in fp32 and rounds once (OLMo 2, Gemma).
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    weight_offset: float = 0.0
    has_bias: bool = False
    cast: Literal["before_weight", "after_weight"] = "before_weight"

    def __post_init__(self) -> None:
        _check_fields(self)
        _require(self.eps > 0, f"norm eps is {self.eps}; it must be positive.")


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every rotary frequency divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float
    kind: Literal["linear"] = "linear"

    def __post_init__(self) -> None:
        _check_fields(self)
        _require(self.factor > 0, f"rope scaling factor is {self.factor}; it must be positive.")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a linear blend between (LLaMA 3.1 model code)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    kind: Literal["llama3"] = "llama3"

    def __post_init__(self) -> None:
        _check_fields(self)
        _require(self.factor > 0, f"rope scaling factor is {self.factor}; it must be positive.")
        _require(
            self.high_freq_factor > self.low_freq_factor > 0,
            f"llama3 rope scaling needs 0 < low_freq_factor ({self.low_freq_factor}) "
            f"< high_freq_factor ({self.high_freq_factor}).",
        )
        _require(self.original_max_positions > 0, "llama3 rope scaling needs original_max_positions > 0.")


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """NTK-by-parts interpolation and a temperature on cos and sin (YaRN, arXiv:2309.00071, section 3).

    `attention_factor` multiplies cos and sin; None derives it from `factor`, or from `mscale` and
    `mscale_all_dim` where both are given. `truncate` rounds the two correction dims outwards to integers.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    kind: Literal["yarn"] = "yarn"

    def __post_init__(self) -> None:
        _check_fields(self)
        _require(self.factor > 0, f"rope scaling factor is {self.factor}; it must be positive.")
        _require(self.original_max_positions > 0, "yarn rope scaling needs original_max_positions > 0.")
        _require(
            self.beta_fast > self.beta_slow > 0,
            f"yarn needs beta_fast ({self.beta_fast}) > beta_slow ({self.beta_slow}) > 0.",
        )


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) on the first `rotary_dim` channels of a head.

    Attributes:
        pairing: "half" rotates channels (j, j + rotary_dim/2); "interleaved" rotates (2j, 2j+1).
        compute: "activation" rounds cos and sin to the activation dtype and rotates there (LLaMA, Mistral,
            Qwen); "fp32" rotates in fp32 and rounds once. Angles are fp32 or wider in both.
    """

    base: float
    rotary_dim: int
    pairing: Literal["half", "interleaved"] = "half"
    scaling: RopeScaling | None = None
    compute: Literal["activation", "fp32"] = "activation"

    def __post_init__(self) -> None:
        _check_fields(self)
        _require(self.base > 1, f"rope base is {self.base}; it must be greater than 1.")
        _require(
            self.rotary_dim > 0 and self.rotary_dim % 2 == 0,
            f"rotary_dim is {self.rotary_dim}; it must be a positive even number.",
        )


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query causal attention (arXiv:2305.13245): query head h reads kv head h // q_per_kv.

    scores = softcap(scale * q k^T), then the mask, then softmax in at least fp32.

    Attributes:
        scale: multiplies q k^T; None means head_dim ** -0.5.
        softcap: c in c * tanh(scores / c), applied before the mask; None for no cap.
        window: number of keys a query sees, **its own position included**; None for all earlier ones.
        qk_norm: norm of q and of k, each with a weight of its own, applied before the rotation; None for none.
        qk_norm_over: "head" norms every head over head_dim, with weights of length head_dim (Qwen 3); "all" norms all
            heads of q together, and all of k, with weights of their whole widths (OLMo 2, arXiv:2501.00656).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    qk_norm: NormSpec | None = None
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    qk_norm_over: Literal["head", "all"] = "head"

    def __post_init__(self) -> None:
        _check_fields(self)
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive.")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
            "every kv head must serve the same number of query heads.",
        )
        if self.rope is not None:
            _require(
                self.rope.rotary_dim <= self.head_dim,
                f"rotary_dim={self.rope.rotary_dim} is larger than head_dim={self.head_dim}.",
            )
        if self.window is not None:
            _require(self.window >= 1, f"window is {self.window}; it counts the current token, so at least 1.")
        if self.scale is not None:
            _require(self.scale > 0, f"attention scale is {self.scale}; it must be positive.")
        if self.softcap is not None:
            _require(self.softcap > 0, f"attention softcap is {self.softcap}; it must be positive.")
        if self.qk_norm_over == "all":
            _require(self.qk_norm is not None, "qk_norm_over='all' needs a qk_norm; without one, leave it at 'head'.")
            _require(
                self.qk_norm is None or self.qk_norm.kind == "rms",
                "qk_norm_over='all' needs a qk_norm of kind 'rms'; a layer norm is over one head only.",
            )

    @property
    def q_per_kv(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """The number that multiplies q k^T."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x)) if gated, else down(activation(up(x)))."""

    ffn_size: int
    activation: Activation
    is_gated: bool
    up_bias: bool = False
    down_bias: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        _require(self.ffn_size > 0, f"ffn_size is {self.ffn_size}; it must be positive.")


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """A mixture of experts: each token goes to the `top_k` experts that a linear router scores highest.

    p = softmax(router(x)) over all experts, in at least fp32; y = sum over the chosen experts e of gate_e * mlp_e(x).

    Attributes:
        ffn_size, activation, is_gated: of each expert's MLP, as in `MlpSpec`; no biases.
        renormalize: whether gates are the chosen p divided by their sum, or the chosen p themselves.
        balance_coefficient: a in the loss term a * E * sum over experts e of f_e * P_e, where f_e is the share of the
            micro-batch's choices that are e, and P_e the mean of p_e over its tokens (Switch Transformer,
            arXiv:2101.03961, equations 4 to 6). Terms of micro-batches are averaged by their tokens, those of layers
            added. 0 for none.
        z_coefficient: b in the loss term b * mean over tokens of logsumexp(router(x))^2 (ST-MoE, arXiv:2202.08906,
            equation 5). 0 for none.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    activation: Activation
    is_gated: bool
    renormalize: bool
    balance_coefficient: float = 0.0
    z_coefficient: float = 0.0

    def __post_init__(self) -> None:
        _check_fields(self)
        for name in ("num_experts", "ffn_size"):
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive.")
        _require(
            1 <= self.top_k <= self.num_experts,
            f"top_k is {self.top_k}; a token chooses at least 1 and at most all {self.num_experts} experts.",
        )
        for name in ("balance_coefficient", "z_coefficient"):
            _require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must not be negative.")


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One layer: x += post(attention(pre(x))); x += post(mlp(pre(x))). A norm that is None is left out.

    Attributes:
        mlp, moe: the feed-forward part. With both, the mlp is an expert that every token uses: the two outputs are
            added before the post norm.
    """

    attention: AttentionSpec
    mlp: MlpSpec | None
    attention_norm: NormSpec | None
    mlp_norm: NormSpec | None
    attention_post_norm: NormSpec | None = None
    mlp_post_norm: NormSpec | None = None
    moe: MoeSpec | None = None

    def __post_init__(self) -> None:
        _require(self.mlp is not None or self.moe is not None, "a block needs an mlp, a moe, or both.")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only language model.

    Attributes:
        vocab_size: the true number of rows of the embedding; padding belongs to a layout, not to a model.
        blocks: one entry per layer; equal entries share one program.
        tie_embeddings: whether the head uses the embedding's weight.
        embedding_scale: multiplies the embedding's output after being rounded to the activation dtype.
        logit_softcap: c in c * tanh(logits / c); None for no cap.
        max_positions: context length that the model was made for; nothing here depends on it.
        init_std: standard deviation of freshly drawn matrices.
        init_scaled_output: divide the std of attention.o, mlp.down and moe.down by sqrt(2 * number of layers).
        dropout: share of elements that a training step sets to zero, the others being divided by 1 - dropout: in the
            embedding's output, and in what each attention and each feed-forward adds to the stream (arXiv:1706.03762,
            section 5.4). 0 for none. No other pass drops anything. Attention probabilities are never dropped.
    """

    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockSpec, ...]
    final_norm: NormSpec
    tie_embeddings: bool
    max_positions: int
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    init_std: float = 0.02
    init_scaled_output: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_fields(self)
        for name in ("vocab_size", "hidden_size", "max_positions"):
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive.")
        _require(len(self.blocks) > 0, "a model needs at least one block.")
        _require(self.init_std > 0, f"init_std is {self.init_std}; it must be positive.")
        _require(0 <= self.dropout < 1, f"dropout is {self.dropout}; it must be at least 0 and below 1.")
        if self.logit_softcap is not None:
            _require(self.logit_softcap > 0, f"logit_softcap is {self.logit_softcap}; it must be positive.")

    @property
    def num_layers(self) -> int:
        return len(self.blocks)
