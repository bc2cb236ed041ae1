"""A second oracle: a decoder written straight down from the papers, one sample at a time, in float64.

It shares nothing with the library's programs or op references: it reads the fields of a `ModelSpec` and canonical
parameters, and loops over heads and positions. Slow, for tiny models only.

    rotary position   RoFormer, arXiv:2104.09864, as multiplication by e^(i m theta_j)
    its scalings      arXiv:2306.15595 (linear), LLaMA 3.1's published code (llama3), arXiv:2309.00071 (yarn)
    grouped heads     arXiv:2305.13245
    RMSNorm           arXiv:1910.07467; LayerNorm arXiv:1607.06450
    gated units       arXiv:2002.05202
    experts           arXiv:1701.06538; their losses arXiv:2101.03961 (balance) and arXiv:2202.08906 (z)
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duomesh.core.spec.model import (
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

Matrix = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]


@dataclass
class OracleResult:
    """embedded [B, S, H]; blocks: each layer's output [B, S, H]; logits [B, S, V]; token_losses [B, S]; loss.

    routed: for each layer, what its router made of every token.
    """

    embedded: Matrix
    blocks: list[Matrix]
    logits: Matrix
    token_losses: Matrix
    loss: float
    routed: list[list[Routed]]


@dataclass
class Routed:
    """A router's scores of one token, their softmax, and the experts that were chosen, best first."""

    scores: list[float]
    probs: list[float]
    chosen: list[int]


def run_oracle(
    spec: ModelSpec,
    params: Mapping[str, npt.NDArray[np.generic]],
    tokens: Ids,
    labels: Ids,
    loss_mask: npt.NDArray[np.float32] | None = None,
    positions: Ids | None = None,
    segment_ids: Ids | None = None,
) -> OracleResult:
    """The whole model; arguments as the fields of a batch."""
    weights = {name: np.asarray(value, np.float64) for name, value in params.items()}
    batch, length = tokens.shape
    embedded, logits, losses = [], [], np.zeros((batch, length))
    blocks: list[list[Matrix]] = [[] for _ in spec.blocks]
    routed: list[list[Routed]] = [[] for _ in spec.blocks]
    total, count = 0.0, 0.0
    for b in range(batch):
        where = [int(p) for p in positions[b]] if positions is not None else list(range(length))
        segment = [int(s) for s in segment_ids[b]] if segment_ids is not None else [0] * length
        x, outputs, z = _decode(spec, weights, tokens[b], where, segment, routed)
        embedded.append(x)
        logits.append(z)
        for block, output in zip(blocks, outputs, strict=True):
            block.append(output)
        for s in range(length):
            if labels[b, s] == -100:
                continue
            weight = 1.0 if loss_mask is None else float(loss_mask[b, s])
            losses[b, s] = _log_of_sum_of_exp(list(z[s])) - z[s, labels[b, s]]
            total += weight * losses[b, s]
            count += weight
    loss = total / count + sum(_router_losses(b.moe, tokens) for b, tokens in zip(spec.blocks, routed, strict=True))
    return OracleResult(np.stack(embedded), [np.stack(x) for x in blocks], np.stack(logits), losses, loss, routed)


def _decode(
    spec: ModelSpec,
    weights: Mapping[str, Matrix],
    tokens: Ids,
    where: list[int],
    segment: list[int],
    routed: list[list[Routed]],
) -> tuple[Matrix, list[Matrix], Matrix]:
    """One sample: its embeddings [S, H], each block's output [S, H], its logits [S, V]. Adds to each layer's routed."""
    x = weights["embed.weight"][tokens]
    if spec.embedding_scale is not None:
        x = x * spec.embedding_scale
    embedded, outputs = x, []
    for n, block in enumerate(spec.blocks):
        name = f"layers.{n}."
        h = _maybe_norm(x, block.attention_norm, weights, name + "attention_norm")
        h = _attention(h, block.attention, weights, name + "attention.", where, segment)
        x = x + _maybe_norm(h, block.attention_post_norm, weights, name + "attention_post_norm")
        h = _maybe_norm(x, block.mlp_norm, weights, name + "mlp_norm")
        h = _feed_forward(h, block, weights, name, routed[n])
        x = x + _maybe_norm(h, block.mlp_post_norm, weights, name + "mlp_post_norm")
        outputs.append(x)
    head = weights["embed.weight" if spec.tie_embeddings else "head.weight"]
    z = _maybe_norm(x, spec.final_norm, weights, "head.norm") @ head.T
    if spec.logit_softcap is not None:
        z = np.tanh(z / spec.logit_softcap) * spec.logit_softcap
    return embedded, outputs, z


def _log_of_sum_of_exp(values: list[float]) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values))


def _maybe_norm(x: Matrix, norm: NormSpec | None, weights: Mapping[str, Matrix], name: str) -> Matrix:
    """Rows of x [S, H]."""
    if norm is None:
        return x
    gain = norm.weight_offset + weights[name + ".weight"]
    rows = []
    for row in x:
        mean = row.sum() / len(row) if norm.kind == "layer" else 0.0
        power = sum((v - mean) ** 2 for v in row) / len(row)
        rows.append((row - mean) / math.sqrt(power + norm.eps) * gain)
    out = np.stack(rows)
    return out + weights[name + ".bias"] if norm.has_bias else out


def _affine(x: Matrix, weights: Mapping[str, Matrix], name: str, has_bias: bool) -> Matrix:
    y = x @ weights[name + ".weight"].T
    return y + weights[name + ".bias"] if has_bias else y


def _attention(
    x: Matrix, spec: AttentionSpec, weights: Mapping[str, Matrix], name: str, where: list[int], segment: list[int]
) -> Matrix:
    """[S, H] -> [S, H]; one head and one query at a time."""
    d, length = spec.head_dim, len(where)
    q = _affine(x, weights, name + "q", spec.q_bias)
    k = _affine(x, weights, name + "k", spec.k_bias)
    v = _affine(x, weights, name + "v", spec.v_bias)
    scale = 1.0 / math.sqrt(d) if spec.scale is None else spec.scale
    if spec.qk_norm_over == "all":
        q = _maybe_norm(q, spec.qk_norm, weights, name + "q_norm")
        k = _maybe_norm(k, spec.qk_norm, weights, name + "k_norm")
    heads = []
    for head in range(spec.num_heads):
        kv = head // (spec.num_heads // spec.num_kv_heads)
        qh, kh, vh = q[:, head * d : (head + 1) * d], k[:, kv * d : (kv + 1) * d], v[:, kv * d : (kv + 1) * d]
        if spec.qk_norm_over == "head":
            qh = _maybe_norm(qh, spec.qk_norm, weights, name + "q_norm")
            kh = _maybe_norm(kh, spec.qk_norm, weights, name + "k_norm")
        if spec.rope is not None:
            qh, kh = _rotate(qh, spec.rope, where), _rotate(kh, spec.rope, where)
        out = np.zeros((length, d))
        for i in range(length):
            first = 0 if spec.window is None else max(0, i - spec.window + 1)
            seen = [j for j in range(first, i + 1) if segment[j] == segment[i]]
            scores = [scale * float(qh[i] @ kh[j]) for j in seen]
            if spec.softcap is not None:
                scores = [spec.softcap * math.tanh(s / spec.softcap) for s in scores]
            norm = _log_of_sum_of_exp(scores)
            for j, score in zip(seen, scores, strict=True):
                out[i] += math.exp(score - norm) * vh[j]
        heads.append(out)
    return _affine(np.concatenate(heads, axis=1), weights, name + "o", spec.o_bias)


def _rotate(x: Matrix, rope: RopeSpec, where: list[int]) -> Matrix:
    """Channel pairs of x [S, D] as complex numbers, multiplied by magnitude * e^(i m theta)."""
    thetas, magnitude = _frequencies(rope)
    out = x.copy()
    for s, m in enumerate(where):
        for j, theta in enumerate(thetas):
            a, b = (2 * j, 2 * j + 1) if rope.pairing == "interleaved" else (j, j + len(thetas))
            z = complex(x[s, a], x[s, b]) * cmath.rect(magnitude, m * theta)
            out[s, a], out[s, b] = z.real, z.imag
    return out


def _frequencies(rope: RopeSpec) -> tuple[list[float], float]:
    """Radians per position, rounded to float32 as the library's contract has it, and the magnitude of the rotation."""
    d, scaling = rope.rotary_dim, rope.scaling
    thetas = [rope.base ** (-2.0 * j / d) for j in range(d // 2)]
    magnitude = 1.0
    if isinstance(scaling, LinearScaling):
        thetas = [theta / scaling.factor for theta in thetas]
    elif isinstance(scaling, Llama3Scaling):
        thetas = [_llama3(theta, scaling) for theta in thetas]
    elif isinstance(scaling, YarnScaling):
        thetas = _yarn(thetas, rope.base, d, scaling)
        magnitude = _yarn_magnitude(scaling)
    return [float(np.float32(theta)) for theta in thetas], magnitude


def _llama3(theta: float, scaling: Llama3Scaling) -> float:
    wavelength = 2 * math.pi / theta
    if wavelength < scaling.original_max_positions / scaling.high_freq_factor:
        return theta
    if wavelength > scaling.original_max_positions / scaling.low_freq_factor:
        return theta / scaling.factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * theta / scaling.factor + smooth * theta


def _yarn(thetas: list[float], base: float, d: int, scaling: YarnScaling) -> list[float]:
    def index_of(turns: float) -> float:
        # theta_j L = 2 pi turns, solved for j
        return d * math.log(scaling.original_max_positions / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    out = []
    for j, theta in enumerate(thetas):
        ramp = min(max((j - low) / (high - low), 0.0), 1.0)
        out.append((1 - ramp) * theta + ramp * theta / scaling.factor)
    return out


def _yarn_magnitude(scaling: YarnScaling) -> float:
    def temperature(coefficient: float) -> float:
        return 1.0 + 0.1 * coefficient * math.log(scaling.factor)

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


_ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))) / 2,
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


def _mlp(x: Matrix, spec: MlpSpec, weights: Mapping[str, Matrix], name: str) -> Matrix:
    act = np.vectorize(_ACTIVATIONS[spec.activation], otypes=[np.float64])
    up = _affine(x, weights, name + "up", spec.up_bias)
    hidden = act(_affine(x, weights, name + "gate", spec.up_bias)) * up if spec.is_gated else act(up)
    return _affine(hidden, weights, name + "down", spec.down_bias)


def _feed_forward(
    x: Matrix, block: BlockSpec, weights: Mapping[str, Matrix], name: str, routed: list[Routed]
) -> Matrix:
    """[S, H] -> [S, H]: the MLP, the experts, or both added."""
    out = np.zeros_like(x)
    if block.mlp is not None:
        out = out + _mlp(x, block.mlp, weights, name + "mlp.")
    if block.moe is not None:
        out = out + np.stack([_experts(row, block.moe, weights, name + "moe.", routed) for row in x])
    return out


def _experts(x: Matrix, spec: MoeSpec, weights: Mapping[str, Matrix], name: str, routed: list[Routed]) -> Matrix:
    """One token [H]: the sum of G(x)_i E_i(x) over the experts that are chosen."""
    act = np.vectorize(_ACTIVATIONS[spec.activation], otypes=[np.float64])
    scores = [float(row @ x) for row in weights[name + "router.weight"]]
    norm = _log_of_sum_of_exp(scores)
    probs = [math.exp(score - norm) for score in scores]
    chosen = sorted(range(spec.num_experts), key=lambda i: -scores[i])[: spec.top_k]
    routed.append(Routed(scores, probs, chosen))
    kept = sum(probs[i] for i in chosen) if spec.renormalize else 1.0
    out = np.zeros_like(x)
    for i in chosen:
        hidden = weights[name + "up.weight"][i] @ x
        hidden = act(weights[name + "gate.weight"][i] @ x) * hidden if spec.is_gated else act(hidden)
        out = out + probs[i] / kept * (weights[name + "down.weight"][i] @ hidden)
    return out


def _router_losses(spec: MoeSpec | None, routed: list[Routed]) -> float:
    """What one layer's router adds to the loss, over all tokens: alpha N sum f_i P_i, and the mean of z^2."""
    if spec is None:
        return 0.0
    tokens = len(routed)
    balance = 0.0
    for i in range(spec.num_experts):
        fraction = sum(token.chosen.count(i) for token in routed) / (spec.top_k * tokens)
        balance += fraction * sum(token.probs[i] for token in routed) / tokens
    z = sum(_log_of_sum_of_exp(token.scores) ** 2 for token in routed) / tokens
    return spec.balance_coefficient * spec.num_experts * balance + spec.z_coefficient * z
