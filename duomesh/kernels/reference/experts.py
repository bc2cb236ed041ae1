"""What the ops of a mixture of experts compute, in numpy. Conventions as in `ops`.

An id outside [0, E) names an expert that is not here: nothing is dispatched to it and it adds nothing. A rank that
holds some of the experts counts ids from its first one.

Shape letters: B batch, S sequence, H hidden, E experts, C choices of a token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from duomesh.core.arrays import Array
from duomesh.kernels.reference.arrays import log_softmax, wide

__all__ = [
    "balance_sum",
    "combine",
    "count_choices",
    "dispatch",
    "expert_linear",
    "is_chosen",
    "log_sum_exp",
    "only_chosen",
    "route",
    "router",
    "z_sum",
]


def router(x: Array, weight: Array) -> Array:
    """[B, S, H], [E, H] -> wide scores [B, S, E]."""
    return np.asarray(wide(x) @ wide(weight).T)


def route(scores: Array, *, top_k: int, renormalize: bool) -> tuple[Array, Array, Array]:
    """[B, S, E] -> probabilities [B, S, E] and gates [B, S, C], wide, and ids [B, S, C] int32, C = top_k.

    A token's choices are the experts with its highest scores, highest first, the lower id first where two are equal.
    Gates are their probabilities, over their sum if `renormalize`.

    Source: Shazeer et al. 2017, arXiv:1701.06538, equations 3 and 5, without noise: renormalised, the softmax of
    all scores is theirs of the kept ones; Fedus et al. 2021, arXiv:2101.03961, equations 1 and 2, are not renormalised.
    """
    probs = np.exp(log_softmax(scores))
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]
    gates = np.take_along_axis(probs, ids, axis=-1)
    if renormalize:
        gates = gates / gates.sum(axis=-1, keepdims=True)
    return probs, gates, ids.astype(np.int32)


def is_chosen(ids: Array, num_experts: int) -> npt.NDArray[np.bool_]:
    """[B, S, C] -> [B, S, C, E] whether the choice is this expert."""
    return np.asarray(ids[..., None] == np.arange(num_experts))


def only_chosen(x: Array, ids: Array, num_experts: int) -> Array:
    """[B, S, H] or [E, B, S, H] -> [E, B, S, H]: x where the token chose the expert; zeros elsewhere, whatever x is."""
    chose = np.moveaxis(np.asarray(is_chosen(ids, num_experts).any(axis=2)), -1, 0)
    return np.where(chose[..., None], x, np.zeros_like(x))


def count_choices(ids: Array, *, num_experts: int) -> Array:
    """[B, S, C] -> [E] int32: how many choices each expert has."""
    return np.asarray(is_chosen(ids, num_experts).sum(axis=(0, 1, 2))).astype(np.int32)


def balance_sum(probs: Array, counts: Array) -> Array:
    """[B, S, E], [E] -> the wide scalar sum(probs * counts).

    Source: Fedus et al. 2021, arXiv:2101.03961, equation 4: the sum over experts of f P, each times its number of
    tokens.
    """
    return np.asarray(np.sum(wide(probs) * counts.astype(wide(probs).dtype)))


def log_sum_exp(scores: Array) -> Array:
    """[..., E] -> wide [...]."""
    top = wide(scores).max(axis=-1, keepdims=True)
    return np.asarray(np.log(np.exp(wide(scores) - top).sum(axis=-1)) + top[..., 0])


def z_sum(scores: Array) -> Array:
    """[B, S, E] -> the wide scalar sum over tokens of logsumexp(scores)^2.

    Source: Zoph et al. 2022, arXiv:2202.08906, equation 5, times its number of tokens.
    """
    return np.asarray(np.sum(log_sum_exp(scores) ** 2))


def dispatch(x: Array, ids: Array, *, num_experts: int) -> Array:
    """[B, S, H], [B, S, C] -> [E, B, S, H]: x where the token chose the expert, else zeros."""
    return only_chosen(x, ids, num_experts)


def expert_linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """Each expert's own linear: [E, B, S, in], [E, out, in], [E, out] -> [E, B, S, out]."""
    out = np.einsum("ebsi,eoi->ebso", wide(x), wide(weight))
    if bias is not None:
        out = out + wide(bias)[:, None, None]
    return np.asarray(out).astype(x.dtype)


def combine(y: Array, gates: Array, ids: Array) -> Array:
    """Sum over a token's choices of gate * y[id], rounded once; [E, B, S, H], [B, S, C] twice -> [B, S, H].

    Rows of experts that the token did not choose are not read.

    Source: Shazeer et al. 2017, arXiv:1701.06538, equation 1.
    """
    weights = np.einsum("bsc,bsce->ebs", wide(gates), is_chosen(ids, len(y)))
    rows = only_chosen(wide(y), ids, len(y))
    return np.asarray(np.einsum("ebs,ebsh->bsh", weights, rows)).astype(y.dtype)
