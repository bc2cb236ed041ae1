"""Grouped-query causal attention.

Shape letters: B batch, S sequence, K kv heads, G query heads per kv head, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from duomesh.backends.torch.ops.dense import wide

__all__ = ["attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_ids: Tensor | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """q [B, S, K, G, D], k and v [B, S, K, D] -> [B, S, K, G, D]; scores and softmax in at least fp32."""
    _, length, _, group, _ = q.shape
    is_windowed = window is not None and window < length
    mask = _mask(length, window, segment_ids, q.device) if is_windowed or segment_ids is not None else None
    if softcap is not None:
        return _capped(q, k, v, mask, scale=scale, softcap=softcap)
    out = F.scaled_dot_product_attention(
        rearrange(q, "b s k g d -> b (k g) s d"),
        rearrange(k, "b s k d -> b k s d"),
        rearrange(v, "b s k d -> b k s d"),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=group > 1,
    )
    return rearrange(out, "b (k g) s d -> b s k g d", g=group)


def _mask(length: int, window: int | None, segment_ids: Tensor | None, device: torch.device) -> Tensor:
    """True where query i may read key j: [S, S], or [B, 1, S, S] with segments."""
    i = torch.arange(length, device=device)[:, None]
    j = torch.arange(length, device=device)[None, :]
    allowed = j <= i
    if window is not None:
        allowed = allowed & (j > i - window)  # the window counts the current token
    if segment_ids is not None:
        allowed = allowed & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return allowed


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, softcap: float) -> Tensor:
    """The written-out form: no fused kernel in torch caps its scores."""
    scores = torch.einsum("bikgd,bjkd->bkgij", wide(q), wide(k)) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = _mask(q.shape[1], None, None, q.device)
    if mask.dim() == 4:
        mask = mask[:, :, None]
    probs = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
    return torch.einsum("bkgij,bjkd->bikgd", probs, v)
