"""The same weights and tokens through several sides, and what came of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.errors import ConfigError
from duomesh.core.ir.cost import longest_sum
from duomesh.core.ir.program import ModelProgram
from duomesh.core.random import random_bits
from duomesh.core.session import Trace
from duomesh.core.verify.compare import Bounds, Comparison, Row, compare_traces

__all__ = ["Side", "Tracer", "VerifyReport", "random_batch", "verify_sides"]


class Tracer(Protocol):
    """Anything that can run a batch and show what it made: a session, or an oracle."""

    def trace(self, batch: Batch, *, grads: bool) -> Trace: ...


@dataclass(frozen=True)
class Side:
    """One way to run the model.

    framework: sides of two frameworks may differ more (see `core.bounds`).
    exposes_all: whether its traces hold every op output.
    open: makes the side in a compute dtype, with weights that were first rounded to another: open("float64",
        "bfloat16") computes in float64 from bf16 weights.
    """

    name: str
    framework: str
    exposes_all: bool
    open: Callable[[str, str], Tracer]


@dataclass(frozen=True)
class VerifyReport:
    """All comparisons of one run, each against the first side."""

    model: str
    dtype: str
    batch: int
    seq: int
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(c.passed for c in self.comparisons)

    def to_json(self) -> str:
        """Summary and every row. An error that is infinite or not a number is written as a string."""
        data = {
            "model": self.model,
            "dtype": self.dtype,
            "batch": self.batch,
            "seq": self.seq,
            "passed": self.passed,
            "pairs": [_comparison(c) for c in self.comparisons],
        }
        return json.dumps(data, indent=2, allow_nan=False)


def _number(x: float | None) -> float | str | None:
    return x if x is None or math.isfinite(x) else str(x)


def _row(row: Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        "kind": row.kind,
        "name": row.name,
        "difference": _number(row.difference),
        "error": _number(row.error),
        "bound": _number(row.bound),
        "index": list(row.index),
        "reference": _number(row.reference),
        "got": _number(row.got),
    }


def _comparison(c: Comparison) -> dict[str, Any]:
    def largest(kind: str, name: str | None = None) -> float | str | None:
        row = c.largest(kind, name)
        return None if row is None else _number(row.difference)

    last = next((row.name for row in reversed(c.rows) if row.kind == "value" and row.name.startswith("head.")), None)
    return {
        "reference": c.reference,
        "side": c.side,
        "passed": c.passed,
        "loss_rel": largest("loss"),
        "logits_max_rel": None if last is None else largest("value", last),
        "values_max_rel": largest("value"),
        "grads_max_rel": largest("gradient"),
        "first_difference": _row(c.first_difference),
        "rows": [_row(row) for row in c.rows],
    }


def random_batch(vocab_size: int, *, batch: int, seq: int, seed: int) -> Batch:
    """Random ids with the traps that a fault would fall into: the last id of the vocabulary, rows with different
    numbers of targets, labels that are no target, and unequal weights."""
    count = batch * (seq + 1)
    ids: Array = (random_bits(seed, "verify/tokens", 0, count) % np.uint64(vocab_size)).astype(np.int32)
    ids = ids.reshape(batch, seq + 1)
    ids[-1, seq // 2] = vocab_size - 1
    labels = ids[:, 1:].copy()
    for row in range(batch):
        labels[row, : min(row + 1, seq - 1)] = IGNORE
    mask = np.ones((batch, seq), np.float32)
    mask[0, seq - 1] = 0.5
    return Batch(tokens=np.ascontiguousarray(ids[:, :-1]), labels=labels, loss_mask=mask)


def verify_sides(
    sides: Sequence[Side], program: ModelProgram, batch: Batch, *, model: str, dtype: str, grads: bool
) -> VerifyReport:
    """Traces each side and compares it with the first.

    Unless the run is float64, the first side also runs in float64, from the same rounded weights: the rounding error
    of its computation sets the bounds.
    """
    if len(sides) < 2:
        raise ConfigError("verify needs at least two sides, such as: torch jax.")
    first, *others = sides
    reference = first.open(dtype, dtype).trace(batch, grads=grads)
    truth = None if dtype == "float64" else first.open("float64", dtype).trace(batch, grads=grads)
    rows, length = batch.tokens.shape
    terms = longest_sum(program, batch=rows, seq=length)
    comparisons = []
    for side in others:
        bounds = Bounds(
            dtype=dtype,
            terms=terms,
            across_frameworks=side.framework != first.framework,
            num_params=program.num_params,
        )
        trace = side.open(dtype, dtype).trace(batch, grads=grads)
        exposes_all = first.exposes_all and side.exposes_all
        pair = ((first.name, reference), (side.name, trace))
        comparisons.append(compare_traces(*pair, bounds, truth=truth, exposes_all=exposes_all))
    return VerifyReport(model, dtype, rows, length, tuple(comparisons))
