"""The hand-derived vector-Jacobian product of every op.

    adjoint(cotangents, inputs, storage, **attrs) -> cotangents of (*inputs, *storage)

Arguments are tuples as the forward function took and returned them. With L a scalar and c = dL/d(output), an
adjoint returns dL/d(operand) for each operand, or None for one that is not differentiated (ids, positions, tables,
masks, labels) or absent. Everything is evaluated in the wide dtype (float32, or float64 for float64 inputs);
cotangents of inputs are rounded to the input's dtype, those of weights stay wide, because they are summed further.

Shape letters as in `ops`. Not here: which cotangents meet (see `model`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.batch import IGNORE
from duomesh.core.ir.ops import KINDS
from duomesh.kernels.reference.activations import ACTIVATIONS
from duomesh.kernels.reference.arrays import Arrays, Cotangents, Operands, log_softmax, merge_last, wide
from duomesh.kernels.reference.expert_adjoints import (
    balance_sum,
    combine,
    count_choices,
    dispatch,
    expert_linear,
    route,
    router,
    z_sum,
)
from duomesh.kernels.reference.ops import attention_scores, normalise, rotate
from duomesh.kernels.reference.ops import dropout as forward_dropout

__all__ = [
    "ADJOINTS",
    "balance_sum",
    "combine",
    "count_choices",
    "dispatch",
    "expert_linear",
    "route",
    "router",
    "z_sum",
]


def _sum_rows(x: Array) -> Array:
    """[..., N] -> [N], summed over every other dim."""
    return np.asarray(x.reshape(-1, x.shape[-1]).sum(axis=0))


def embedding(cotangents: Arrays, inputs: Arrays, storage: Arrays) -> Cotangents:
    """Row i of the table collects the cotangents of every position that looked it up."""
    (table,) = storage
    d_table = np.zeros(table.shape, wide(cotangents[0]).dtype)
    np.add.at(d_table, inputs[0], wide(cotangents[0]))
    return None, d_table


def scale(cotangents: Arrays, inputs: Arrays, storage: Arrays, *, factor: float) -> Cotangents:
    """y = f x: dx = f c, with the factor that the forward used."""
    (x,) = inputs
    return ((wide(cotangents[0]) * wide(np.asarray(factor, x.dtype))).astype(x.dtype),)


def norm(
    cotangents: Arrays,
    inputs: Arrays,
    storage: Operands,
    *,
    centered: bool,
    eps: float,
    weight_offset: float,
    cast: str,
    norm_dims: int,
) -> Cotangents:
    """n = x r with r = (mean(x^2) + eps)^(-1/2), y = n w + b.

    dr/dx_j = -r^3 x_j / N, so with g = c w: dx = r g - r^3 x mean(g x) = r (g - n mean(g n)). Centring is the
    projection x - mean(x), symmetric, so it is applied to that once more; n has mean 0, which leaves g alone to
    be centred.
    """
    (x,), (weight, bias) = inputs, storage
    assert weight is not None
    c = merge_last(wide(cotangents[0]), norm_dims)
    normed, inverse = normalise(merge_last(x, norm_dims), centered=centered, eps=eps)
    g = c * (wide(weight) + np.asarray(weight_offset, normed.dtype))
    d_normed = g - normed * np.mean(g * normed, axis=-1, keepdims=True)
    if centered:
        d_normed = d_normed - g.mean(axis=-1, keepdims=True)
    d_bias = None if bias is None else _sum_rows(c)
    return (inverse * d_normed).astype(x.dtype).reshape(x.shape), _sum_rows(c * normed), d_bias


def linear(
    cotangents: Arrays,
    inputs: Arrays,
    storage: Operands,
    *,
    outs: tuple[tuple[int, ...], ...],
    biased: tuple[bool, ...],
    in_dims: int,
) -> Cotangents:
    """y_i = x W_i^T + b_i: dx = sum_i c_i W_i, dW_i = c_i^T x, db_i = sum of c_i over the batch."""
    (x,), (weight, bias) = inputs, storage
    assert weight is not None
    flat = [wide(c).reshape(-1, prod(out)) for c, out in zip(cotangents, outs, strict=True)]
    packed = np.concatenate(flat, axis=1)  # [tokens, sum of rows]
    matrix = wide(weight).reshape(weight.shape[0], -1)
    tokens = wide(x).reshape(packed.shape[0], -1)
    d_bias = None
    if bias is not None:
        d_bias = np.concatenate([_sum_rows(c) for c, has_bias in zip(flat, biased, strict=True) if has_bias])
    return (packed @ matrix).reshape(x.shape).astype(x.dtype), (packed.T @ tokens).reshape(weight.shape), d_bias


def rope_table(cotangents: Arrays, inputs: Arrays, storage: Arrays, *, attention_factor: float) -> Cotangents:
    """Nothing that is trained enters the table."""
    return None, None


def rope(cotangents: Arrays, inputs: Arrays, storage: Arrays, *, pairing: str, compute: str) -> Cotangents:
    """Each pair is turned (and stretched by the table's factor) by a matrix whose transpose has the angle negated."""
    x, cos, sin = inputs
    c = wide(cotangents[0])
    table = [t.astype(x.dtype) if compute == "activation" else t for t in (cos, sin)]
    turned = rotate(c, table[0].astype(c.dtype), -table[1].astype(c.dtype), pairing=pairing)
    return turned.astype(x.dtype), None, None


def attention(
    cotangents: Arrays,
    inputs: Operands,
    storage: Arrays,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Cotangents:
    """o = p v, p = softmax(s), s = cap tanh(t / cap), t = scale q k^T.

    dv = p^T c; dp = c v^T; ds = p (dp - sum_t(p dp)); dt = ds (1 - (s / cap)^2); dq = scale dt k;
    dk = scale dt^T q. k and v serve G queries each, so theirs are summed over G.
    """
    q, k, v, segment_ids = inputs
    assert q is not None and k is not None and v is not None
    c = wide(cotangents[0])
    weights, scores = attention_scores(q, k, segment_ids, scale=scale, window=window, softcap=softcap)
    d_v = np.einsum("bkgst,bskgd->btkd", weights, c)
    d_weights = np.einsum("bskgd,btkd->bkgst", c, wide(v))
    d_scores = weights * (d_weights - np.sum(weights * d_weights, axis=-1, keepdims=True))
    if softcap is not None:
        d_scores = d_scores * (1.0 - (scores / np.asarray(softcap, scores.dtype)) ** 2)
    d_scores = d_scores * np.asarray(scale, d_scores.dtype)
    d_q = np.einsum("bkgst,btkd->bskgd", d_scores, wide(k))
    d_k = np.einsum("bkgst,bskgd->btkd", d_scores, wide(q))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


def glu(cotangents: Arrays, inputs: Arrays, storage: Arrays, *, activation: str) -> Cotangents:
    """y = a(g) u: dg = c u a'(g), du = c a(g)."""
    gate, up = inputs
    c, function = wide(cotangents[0]), ACTIVATIONS[activation]
    d_gate = c * wide(up) * function.derivative(wide(gate))
    return d_gate.astype(gate.dtype), (c * function.value(wide(gate))).astype(up.dtype)


def activation(cotangents: Arrays, inputs: Arrays, storage: Arrays, *, activation: str) -> Cotangents:
    """y = a(x): dx = c a'(x)."""
    (x,) = inputs
    return ((wide(cotangents[0]) * ACTIVATIONS[activation].derivative(wide(x))).astype(x.dtype),)


def add(cotangents: Arrays, inputs: Arrays, storage: Arrays) -> Cotangents:
    """y = a + b: both get c."""
    return cotangents[0].astype(inputs[0].dtype), cotangents[0].astype(inputs[1].dtype)


def dropout(cotangents: Arrays, inputs: Operands, storage: Arrays, *, rate: float, site: int) -> Cotangents:
    """y = m x with m 0 or 1 / (1 - rate): dx = m c, with the mask drawn again."""
    (c,) = cotangents
    return np.asarray(forward_dropout(c, *inputs[1:], rate=rate, site=site)), None, None, None


def softcap(cotangents: Arrays, inputs: Arrays, storage: Arrays, *, cap: float) -> Cotangents:
    """y = cap tanh(x / cap): dx = c (1 - tanh^2(x / cap))."""
    (x,) = inputs
    t = np.tanh(wide(x) / np.asarray(cap, wide(x).dtype))
    return ((wide(cotangents[0]) * (1.0 - t * t)).astype(x.dtype),)


def cross_entropy(cotangents: Arrays, inputs: Arrays, storage: Arrays) -> Cotangents:
    """l = -log softmax(z)[label]: dz = c (softmax(z) - onehot(label)); exactly 0 where the label is IGNORE."""
    logits, labels = inputs
    is_target = (labels != IGNORE)[..., None]
    index = np.where(is_target, labels[..., None], 0)
    d_logits = np.exp(log_softmax(logits))
    picked = np.take_along_axis(d_logits, index, axis=-1)
    np.put_along_axis(d_logits, index, picked - 1.0, axis=-1)
    # where, not a product: a position without a target gets 0 even if its logits are not finite
    d_logits = np.where(is_target, d_logits * wide(cotangents[0])[..., None], np.zeros_like(d_logits))
    return d_logits.astype(logits.dtype), None


def masked_sum(cotangents: Arrays, inputs: Arrays, storage: Arrays) -> Cotangents:
    """y = sum(x m): dx = c m."""
    x, mask = inputs
    return (wide(cotangents[0]) * mask.astype(wide(x).dtype)).astype(x.dtype), None


ADJOINTS: dict[str, Callable[..., Cotangents]] = {kind: globals()[kind] for kind in KINDS}
