"""Dropout without a generator: what is dropped is a pure function of where an element stands.

An element of a dropout op is dropped if a random word of its own is below rate * 2^32. The word is word feature mod 4
of Philox4x32-10 (`core.random`) with

    counter  (place within the sample, feature // 4, index of the sample, site of the op within its program)
    key      a hash of the run's seed, the step, and the application of the program, such as "layers.3."

So a mask depends on no layout, on no cut of a step into micro-batches, and on no order of execution; a pass that is
run again draws it again; and all backends draw the same bits. Neither is there a state to save.

Here are the words' inputs. They enter a program as three values: `samples` [batch], `places` [seq] and `dropout_key`
[2], which each application has of its own. Not here: the masks themselves, which are ops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.batch import Batch
from duomesh.core.errors import BackendError, DataError
from duomesh.core.ir.program import ModelProgram
from duomesh.core.random import key_words

__all__ = ["DropoutKey", "check_dropout", "drop_below", "dropout_inputs"]


@dataclass(frozen=True)
class DropoutKey:
    """What the masks of a training step are drawn for: the run's seed, and the number of the step."""

    seed: int
    step: int


def dropout_inputs(model: ModelProgram, batch: Batch, key: DropoutKey | None) -> dict[str, Array | None]:
    """What the dropouts of a pass over a batch are counted with.

    Args:
        key: None for a pass that drops nothing.

    Returns:
        "samples": [B] int32, the low words of the samples' indices. "places": [S] int32. "dropout_keys":
        [len(model.steps), 2] int32, of which each application of a program takes its row as `dropout_key`. All three
        are None without a key, and for a model without dropout.

    Raises:
        DataError: the batch has no `sample_ids`. Numbers that a rank or a micro-batch made up for itself would give
            two samples of a step one mask.
    """
    if key is None or not model.has_dropout:
        return {"samples": None, "places": None, "dropout_keys": None}
    if batch.sample_ids is None:
        raise DataError(
            "a step with dropout needs sample_ids in every batch: the index of each sample among all of the run, so "
            "that no two samples of the step share a mask. Give them to Batch, or set the spec's dropout to 0."
        )
    low = batch.sample_ids.astype(np.int64) & 0xFFFFFFFF
    words = [key_words(key.seed, f"dropout/{key.step}/{prefix}") for prefix, _ in model.steps]
    return {
        "samples": low.astype(np.uint32).view(np.int32),
        "places": np.arange(batch.tokens.shape[1], dtype=np.int32),
        "dropout_keys": np.asarray(words, np.uint32).view(np.int32),
    }


def check_dropout(model: ModelProgram, key: DropoutKey | None) -> None:
    """Raises BackendError for a training step that would leave out the dropout which its model asks for."""
    if model.has_dropout and key is None:
        raise BackendError(
            f"this model has dropout={model.spec.dropout}, and the step was given no key to draw masks for. Call "
            "train_step with dropout=DropoutKey(seed, step), or set the spec's dropout to 0."
        )


def drop_below(rate: float) -> int:
    """The least random word that keeps its element, in [0, 2^32)."""
    return min(round(rate * 2**32), 2**32 - 1)
