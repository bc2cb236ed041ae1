"""Token losses and their weighted sum. Normalisation is the session's: it knows the whole step's denominator."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from duomesh.backends.torch.ops.dense import wide
from duomesh.core.batch import IGNORE

__all__ = ["cross_entropy", "masked_sum"]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, S, V] logits, [B, S] labels -> [B, S] losses in at least fp32; 0 where the label is IGNORE."""
    flat = F.cross_entropy(wide(logits).flatten(0, 1), labels.flatten().long(), ignore_index=IGNORE, reduction="none")
    return flat.view(labels.shape)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum()
