"""The hand-derived vector-Jacobian products of the ops of a mixture of experts. Conventions as in `adjoints`.

Shape letters: B batch, S sequence, H hidden, E experts, C choices of a token.
"""

from __future__ import annotations

import numpy as np

from duomesh.kernels.reference.arrays import Arrays, Cotangents, Operands, log_softmax, wide
from duomesh.kernels.reference.experts import is_chosen, log_sum_exp, only_chosen
from duomesh.kernels.reference.experts import route as forward_route

__all__ = ["balance_sum", "combine", "count_choices", "dispatch", "expert_linear", "route", "router", "z_sum"]


def router(cotangents: Arrays, inputs: Arrays, storage: Arrays) -> Cotangents:
    """z = x W^T: dx = c W, dW = c^T x."""
    (x,), (weight,) = inputs, storage
    c = wide(cotangents[0])
    d_weight = np.einsum("bse,bsh->eh", c, wide(x))
    return (c @ wide(weight)).astype(x.dtype), d_weight


def route(cotangents: Arrays, inputs: Arrays, storage: Arrays, *, top_k: int, renormalize: bool) -> Cotangents:
    """p = softmax(z), g = p[ids], over their sum t if renormalised; the ids are constants.

    Renormalised, dp[ids] += (c - sum(c g)) / t, else dp[ids] += c; then dz = p (dp - sum(p dp)).
    """
    (scores,) = inputs
    probs, gates, ids = forward_route(scores, top_k=top_k, renormalize=renormalize)
    d_probs, d_gates = wide(cotangents[0]).copy(), wide(cotangents[1])
    kept = np.take_along_axis(probs, ids, axis=-1)
    if renormalize:
        d_gates = (d_gates - np.sum(d_gates * gates, axis=-1, keepdims=True)) / kept.sum(axis=-1, keepdims=True)
    np.put_along_axis(d_probs, ids, np.take_along_axis(d_probs, ids, axis=-1) + d_gates, axis=-1)
    d_scores = probs * (d_probs - np.sum(probs * d_probs, axis=-1, keepdims=True))
    return (d_scores.astype(scores.dtype),)


def count_choices(cotangents: Arrays, inputs: Arrays, storage: Arrays, *, num_experts: int) -> Cotangents:
    """Whole numbers have no slope."""
    return (None,)


def balance_sum(cotangents: Arrays, inputs: Arrays, storage: Arrays) -> Cotangents:
    """y = sum(p n): dp = c n; the counts n are constants."""
    probs, counts = inputs
    d_probs = wide(cotangents[0]) * counts.astype(wide(probs).dtype)
    return np.broadcast_to(d_probs, probs.shape).astype(probs.dtype), None


def z_sum(cotangents: Arrays, inputs: Arrays, storage: Arrays) -> Cotangents:
    """y = sum(l^2) with l = logsumexp(z): dz = 2 c l softmax(z)."""
    (scores,) = inputs
    slope = 2.0 * wide(cotangents[0]) * log_sum_exp(scores)
    return ((slope[..., None] * np.exp(log_softmax(scores))).astype(scores.dtype),)


def dispatch(cotangents: Arrays, inputs: Arrays, storage: Arrays, *, num_experts: int) -> Cotangents:
    """y[e] = x where e is chosen: dx = the sum of c[e] over the chosen e."""
    x, ids = inputs
    c = only_chosen(wide(cotangents[0]), ids, num_experts)
    return c.sum(axis=0).astype(x.dtype), None


def expert_linear(cotangents: Arrays, inputs: Arrays, storage: Operands) -> Cotangents:
    """y[e] = x[e] W[e]^T + b[e]: dx[e] = c[e] W[e], dW[e] = c[e]^T x[e], db[e] = the sum of c[e] over tokens."""
    (x,), (weight, bias) = inputs, storage
    assert weight is not None
    c = wide(cotangents[0])
    d_x = np.einsum("ebso,eoi->ebsi", c, wide(weight))
    d_weight = np.einsum("ebso,ebsi->eoi", c, wide(x))
    return d_x.astype(x.dtype), d_weight, None if bias is None else c.sum(axis=(1, 2))


def combine(cotangents: Arrays, inputs: Arrays, storage: Arrays) -> Cotangents:
    """o = the sum over choices of g y[id]: dy[id] = g c, dg = y[id] . c; other rows of y get 0."""
    y, gates, ids = inputs
    c, chose = wide(cotangents[0]), is_chosen(ids, len(y))
    weights = np.einsum("bsc,bsce->ebs", wide(gates), chose)
    dots = np.einsum("ebsh,bsh->ebs", only_chosen(wide(y), ids, len(y)), c)
    d_gates = np.einsum("bsce,ebs->bsc", chose, dots)
    return (weights[..., None] * c).astype(y.dtype), d_gates.astype(gates.dtype), None
