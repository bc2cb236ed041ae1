"""What a step is fed: a batch of token ids with everything that the objective needs, as host arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.errors import DataError

__all__ = ["IGNORE", "Batch", "denominator", "num_targets"]

IGNORE = -100  # a label that is no target: zero loss, zero gradient, not counted


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of one micro-batch. B samples, S tokens each.

    Attributes:
        tokens: [B, S] int32 ids.
        labels: [B, S] int32, already shifted: labels[b, s] is the token after tokens[b, s], or IGNORE.
        loss_mask: [B, S] float32 weight of each target; None for ones.
        positions: [B, S] int32 rotary positions; None for 0..S-1.
        segment_ids: [B, S] int32; a token attends within its own id only. None for one segment.
        sample_ids: [B] int64; the index of each sample among all that the run is fed, equal on whatever rank and in
            whatever micro-batch it lies. Only a step with dropout reads them.
    """

    tokens: Array
    labels: Array
    loss_mask: Array | None = None
    positions: Array | None = None
    segment_ids: Array | None = None
    sample_ids: Array | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "labels", "loss_mask", "positions", "segment_ids", "sample_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, np.ndarray):
                raise DataError(f"batch {name} are a {type(value).__name__}; they must be a numpy array.")
        if self.tokens.ndim != 2 or not self.tokens.size:
            raise DataError(f"batch tokens have shape {self.tokens.shape}; they must be [samples, sequence].")
        for name in ("tokens", "labels", "positions", "segment_ids", "sample_ids"):
            array = getattr(self, name)
            if array is not None and array.dtype.kind not in "iu":
                raise DataError(f"batch {name} are {array.dtype}; they must be integers.")
            if array is not None and name != "sample_ids" and (array.min() < -(2**31) or array.max() >= 2**31):
                raise DataError(f"batch {name} reach from {array.min()} to {array.max()}; they must fit in 32 bits.")
        for name in ("labels", "loss_mask", "positions", "segment_ids"):
            array = getattr(self, name)
            if array is not None and array.shape != self.tokens.shape:
                raise DataError(f"batch {name} has shape {array.shape}, tokens have {self.tokens.shape}.")
        if self.sample_ids is not None and self.sample_ids.shape != self.tokens.shape[:1]:
            raise DataError(
                f"batch sample_ids have shape {self.sample_ids.shape}; {len(self.tokens)} samples need one each."
            )

    @property
    def weights(self) -> Array:
        """[B, S] float32 weight of each target, 0 where the label is IGNORE."""
        valid: Array = (self.labels != IGNORE).astype(np.float32)
        if self.loss_mask is None:
            return valid
        # not a product: whatever stands in the mask of what is no target does not count, NaN included
        counted: Array = np.where(valid > 0, self.loss_mask, 0).astype(np.float32)
        return counted

    @property
    def resolved_positions(self) -> Array:
        """[B, S] int32 positions, the default filled in."""
        if self.positions is not None:
            return self.positions.astype(np.int32)
        return np.broadcast_to(np.arange(self.tokens.shape[1], dtype=np.int32), self.tokens.shape)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises DataError for an id that no row of the embedding stands for."""
        ids = [self.tokens, self.labels[self.labels != IGNORE]]
        low = min((int(a.min()) for a in ids if a.size), default=0)
        high = max((int(a.max()) for a in ids if a.size), default=0)
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise DataError(f"token id {bad} is outside the model's vocabulary of {vocab_size} rows.")


def num_targets(batches: Sequence[Batch]) -> float:
    """The weight of all targets of a **whole step**: what its loss is divided by (docs/design.md, objective).

    Raises DataError if there is no batch.
    """
    if not batches:
        raise DataError("a step needs at least one batch.")
    return float(sum(batch.weights.sum(dtype=np.float64) for batch in batches))


def denominator(batches: Sequence[Batch]) -> float:
    """`num_targets`, or 1 where there is none: the term of a step without targets is zero, not undefined."""
    return num_targets(batches) or 1.0
