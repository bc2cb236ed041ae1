"""What every op computes, in numpy: the definition that backends and kernels are compared with.

Functions have the names and the order of `core.ir.ops.KINDS` and are called as `core.ir.program.run` does:
`fn(*inputs, *storage tensors, **attrs)`. A result has the dtype of the op's first float input. Sums, norms, softmax
and transcendental functions are evaluated in the *wide* dtype, float32 or float64 if the input is float64, and
rounded once at the end; an op whose convention demands an earlier rounding says where. Fed float64, nothing rounds
below float64.

Shape letters: B batch, S queries, T keys, H hidden, V vocabulary, K kv heads, G query heads per kv head,
D head dim, R rotary channel pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from duomesh.core.arrays import Array
from duomesh.core.batch import IGNORE
from duomesh.core.ir.ops import KINDS
from duomesh.kernels.reference.activations import ACTIVATIONS
from duomesh.kernels.reference.arrays import log_softmax, merge_last, wide
from duomesh.kernels.reference.dropout import kept
from duomesh.kernels.reference.experts import (
    balance_sum,
    combine,
    count_choices,
    dispatch,
    expert_linear,
    route,
    router,
    z_sum,
)

__all__ = [
    "OPS",
    "attention_scores",
    "balance_sum",
    "combine",
    "count_choices",
    "dispatch",
    "expert_linear",
    "normalise",
    "rotate",
    "route",
    "router",
    "z_sum",
]


def embedding(ids: Array, weight: Array) -> Array:
    """[B, S] ids, [V, H] -> [B, S, H] rows of the table."""
    return np.asarray(weight[ids])


def scale(x: Array, *, factor: float) -> Array:
    """x * factor, the factor rounded to x's dtype first."""
    return np.asarray(x * np.asarray(factor, x.dtype))


def normalise(x: Array, *, centered: bool, eps: float) -> tuple[Array, Array]:
    """[..., N] -> x (less its mean if `centered`) over its root mean square, wide, and [..., 1] 1 / that root."""
    x = wide(x)
    if centered:
        x = x - x.mean(axis=-1, keepdims=True)
    inverse = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.asarray(eps, x.dtype))
    return x * inverse, inverse


def norm(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    centered: bool,
    eps: float,
    weight_offset: float,
    cast: str,
    norm_dims: int,
) -> Array:
    """Root-mean-square norm, or layer norm if `centered`, over the last `norm_dims` dims together.

    [..., *N], [prod(N)], [prod(N)] -> [..., *N].

    cast: "before_weight" rounds the normed value and the gain to x's dtype and multiplies there; "after_weight"
    multiplies, and adds the bias, in the wide dtype and rounds once.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4; Ba et al. 2016, arXiv:1607.06450, equation 3.
    """
    normed, _ = normalise(merge_last(x, norm_dims), centered=centered, eps=eps)
    gain = wide(weight) + np.asarray(weight_offset, normed.dtype)
    work = x.dtype if cast == "before_weight" else normed.dtype
    out = normed.astype(work) * gain.astype(work)
    if bias is not None:
        out = out + bias.astype(work)
    return np.asarray(out).astype(x.dtype).reshape(x.shape)


def linear(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    outs: tuple[tuple[int, ...], ...],
    biased: tuple[bool, ...],
    in_dims: int,
) -> tuple[Array, ...]:
    """Several linears of one input: x W_i^T + b_i.

    Args:
        x: [..., in dims].
        weight: [sum of rows, in] members one after another; member i has prod(outs[i]) rows.
        bias: the biases of the members that have one, one after another; None if none has.
        outs: the shape that each output's last dim is viewed as.
        biased: which members have a bias.
        in_dims: how many trailing dims of x are contracted.

    Returns:
        One array per member, x.shape[:-in_dims] + outs[i].
    """
    batch = x.shape[: x.ndim - in_dims]
    product = wide(x).reshape(*batch, -1) @ wide(weight).reshape(weight.shape[0], -1).T
    results, row, bias_row = [], 0, 0
    for out, has_bias in zip(outs, biased, strict=True):
        rows = prod(out)
        part = product[..., row : row + rows]
        if has_bias:
            assert bias is not None
            part = part + wide(bias[bias_row : bias_row + rows])
            bias_row += rows
        results.append(part.astype(x.dtype).reshape(batch + out))
        row += rows
    return tuple(results)


def rope_table(positions: Array, inv_freq: Array, *, attention_factor: float) -> tuple[Array, Array]:
    """[B, S] integers, [R] radians per position -> cos and sin [B, S, R] times the factor, wide."""
    frequencies = wide(inv_freq)
    angles = positions[..., None].astype(frequencies.dtype) * frequencies
    factor = np.asarray(attention_factor, angles.dtype)
    return np.cos(angles) * factor, np.sin(angles) * factor


def rotate(x: Array, cos: Array, sin: Array, *, pairing: str) -> Array:
    """Turns the channel pairs (a, b) of x to (a cos - b sin, b cos + a sin); other channels stay.

    x is [B, S, ..., D] and cos, sin are [B, S, R] of x's dtype. "half" pairs channel j with j + R, "interleaved"
    2j with 2j + 1, for j < R. Channels keep their places.
    """
    half = cos.shape[-1]
    heads = (1,) * (x.ndim - cos.ndim)
    cos, sin = (table.reshape(*table.shape[:-1], *heads, half) for table in (cos, sin))
    first, second = (
        (slice(0, half), slice(half, 2 * half)) if pairing == "half" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    a, b = x[..., first], x[..., second]
    out = x.copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def rope(x: Array, cos: Array, sin: Array, *, pairing: str, compute: str) -> Array:
    """Rotary embedding of the first 2R channels; [B, S, ..., D], [B, S, R] twice -> [B, S, ..., D].

    compute: "activation" rounds cos and sin to x's dtype and every product and sum there; "fp32" turns in the wide
    dtype and rounds once.

    Source: Su et al. 2021, arXiv:2104.09864, equation 34.
    """
    work = x if compute == "activation" else wide(x)
    return rotate(work, cos.astype(work.dtype), sin.astype(work.dtype), pairing=pairing).astype(x.dtype)


def visible(length: int, window: int | None, segment_ids: Array | None) -> npt.NDArray[np.bool_]:
    """[1 or B, S, T] whether query s sees key t: not later, nearer than `window`, in the same segment."""
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    if segment_ids is None:
        return seen[None]
    return np.asarray(seen & (segment_ids[:, :, None] == segment_ids[:, None, :]))


def attention_scores(
    q: Array, k: Array, segment_ids: Array | None, *, scale: float, window: int | None, softcap: float | None
) -> tuple[Array, Array]:
    """Probabilities and capped scores before the mask, both wide [B, K, G, S, T]."""
    scores = np.einsum("bskgd,btkd->bkgst", wide(q), wide(k)) * np.asarray(scale, wide(q).dtype)
    if softcap is not None:
        scores = softcap * np.tanh(scores / np.asarray(softcap, scores.dtype))
    seen = visible(q.shape[1], window, segment_ids)[:, None, None]
    # every query sees itself, so the maximum is finite
    masked = np.where(seen, scores, -np.inf)
    weights = np.exp(masked - masked.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True), scores


def attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Array:
    """Causal grouped-query attention; q [B, S, K, G, D], k and v [B, S, K, D] -> [B, S, K, G, D].

    window: how many keys a query sees, its own included. softcap acts on scaled scores, before the mask.
    segment_ids: [B, S]; keys of another segment are not seen.

    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1; Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """
    weights, _ = attention_scores(q, k, segment_ids, scale=scale, window=window, softcap=softcap)
    return np.asarray(np.einsum("bkgst,btkd->bskgd", weights, wide(v))).astype(q.dtype)


def glu(gate: Array, up: Array, *, activation: str) -> Array:
    """activation(gate) * up, rounded once. Source: Shazeer 2020, arXiv:2002.05202, equation 5."""
    return np.asarray(ACTIVATIONS[activation].value(wide(gate)) * wide(up)).astype(gate.dtype)


def activation(x: Array, *, activation: str) -> Array:
    """A pointwise activation by name, rounded once."""
    return ACTIVATIONS[activation].value(wide(x)).astype(x.dtype)


def add(x: Array, y: Array) -> Array:
    """x + y."""
    return np.asarray(x + y)


def dropout(
    x: Array, samples: Array | None, places: Array | None, key: Array | None, *, rate: float, site: int
) -> Array:
    """x / (1 - rate) where it is kept, else 0; x without a key. [B, S, ...], [B], [S], [2] -> [B, S, ...].

    1 / (1 - rate) is rounded to x's dtype, and the product once more.

    Source: Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", section 10.
    """
    if samples is None or places is None or key is None:
        return x
    keep = kept(samples, places, key, features=prod(x.shape[2:]), rate=rate, site=site).reshape(x.shape)
    return np.where(keep, x * np.asarray(1 / (1 - rate), x.dtype), np.zeros_like(x))


def softcap(x: Array, *, cap: float) -> Array:
    """cap * tanh(x / cap), rounded once."""
    limit = np.asarray(cap, wide(x).dtype)
    return np.asarray(limit * np.tanh(wide(x) / limit)).astype(x.dtype)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """[..., V] logits, [...] ids -> [...] wide -log p(label); exactly 0 where the label is IGNORE."""
    is_target = labels != IGNORE
    index = np.where(is_target, labels, 0)[..., None]
    picked = np.take_along_axis(log_softmax(logits), index, axis=-1)[..., 0]
    return np.where(is_target, -picked, np.zeros_like(picked))


def masked_sum(x: Array, mask: Array) -> Array:
    """sum(x * mask) over everything, a wide scalar."""
    return np.asarray(np.sum(wide(x) * mask.astype(wide(x).dtype)))


OPS: dict[str, Callable[..., Any]] = {kind: globals()[kind] for kind in KINDS}
