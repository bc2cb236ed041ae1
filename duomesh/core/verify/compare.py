"""Two traces side by side: errors of every op output, the loss and every gradient, and the first that is too large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.bounds import Quantity, bound
from duomesh.core.session import Trace

__all__ = ["Bounds", "Comparison", "Row", "compare_traces", "relative_error"]

# max|ref| of a gradient counts as at least this share of the largest gradient: one that is zero but for rounding
# (a key bias, say) has no digits to agree on.
_GRADIENT_FLOOR = 1e-6
_ABSENT: Array = np.empty(0)  # no tensor has this shape: the difference is infinite


@dataclass(frozen=True)
class Row:
    """One compared tensor. `index` is where the largest error is; `reference` and `got` are the values there."""

    kind: Literal["value", "loss", "gradient"]
    name: str
    error: float
    bound: float
    index: tuple[int, ...] = ()
    reference: float = 0.0
    got: float = 0.0

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Comparison:
    """A side against the reference. Rows: forward values in order, the loss, then gradients from the last op back."""

    reference: str
    side: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def first_difference(self) -> Row | None:
        """The first row beyond its bound."""
        return next((row for row in self.rows if not row.passed), None)

    def largest(self, kind: str, name: str | None = None) -> Row | None:
        """The row of a kind (and name) with the largest error."""
        rows = [row for row in self.rows if row.kind == kind and name in (None, row.name)]
        return max(rows, key=lambda row: row.error, default=None)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What `core.bounds.bound` needs to know of a pair of sides."""

    dtype: str
    terms: int
    across_frameworks: bool
    num_params: int

    def of(self, quantity: Quantity, own_error: float) -> float:
        return bound(
            quantity,
            self.dtype,
            terms=self.terms,
            own_error=own_error,
            across_frameworks=self.across_frameworks,
            num_params=self.num_params,
        )


def relative_error(reference: Array, got: Array, *, floor: float = 0.0) -> tuple[float, tuple[int, ...]]:
    """max|got - reference| / max(max|reference|, floor) and the index of that element.

    Infinite if the shapes differ, if only one side is finite somewhere, or if anything differs from a zero reference.
    """
    if reference.shape != got.shape:
        return float("inf"), ()
    if reference.size == 0:
        return 0.0, ()
    a, b = reference.astype(np.float64), got.astype(np.float64)
    # infinities and NaNs agree only with themselves
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(a - b))
    difference = np.where(np.isnan(difference), np.inf, difference)
    index = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), difference.shape))
    largest = float(difference[index])
    finite = np.abs(a[np.isfinite(a)])
    scale = max(float(finite.max(initial=0.0)), floor)
    if largest == 0.0:
        return 0.0, index
    return (largest / scale if scale > 0 else float("inf")), index


def _own_errors(trace: Trace, truth: Trace | None, floor: float) -> dict[tuple[str, str], float]:
    """Errors that the reference makes in its own dtype, by (kind, name)."""
    if truth is None:
        return {}
    out = {("value", n): relative_error(truth.values[n], v)[0] for n, v in trace.values.items()}
    out |= {("gradient", n): relative_error(truth.grads[n], g, floor=floor)[0] for n, g in trace.grads.items()}
    out["loss", "loss"] = abs(trace.loss - truth.loss) / max(abs(truth.loss), 1e-300)
    return out


def _floor(grads: Mapping[str, Array]) -> float:
    largest = max((float(np.abs(g.astype(np.float64)).max(initial=0.0)) for g in grads.values()), default=0.0)
    return _GRADIENT_FLOOR * largest


def compare_traces(
    reference: tuple[str, Trace],
    side: tuple[str, Trace],
    bounds: Bounds,
    *,
    truth: Trace | None = None,
    exposes_all: bool = True,
) -> Comparison:
    """Compares what both sides made.

    Args:
        reference, side: names and traces.
        bounds: rules of the pair.
        truth: the reference's trace in float64, which says how large its own errors are; None in a float64 run.
        exposes_all: whether both sides show every op output. If not (transformers shows embeddings, block outputs,
            the last norm and logits), only shared names are compared; otherwise a missing one is a difference.
    """
    (reference_name, a), (side_name, b) = reference, side
    floor = _floor(a.grads)
    own = _own_errors(a, truth, floor)
    rows: list[Row] = []

    def add(kind: Literal["value", "loss", "gradient"], quantity: Quantity, name: str, x: Array, y: Array) -> None:
        error, index = relative_error(x, y, floor=floor if kind == "gradient" else 0.0)
        limit = bounds.of(quantity, own.get((kind, name), 0.0))
        has_element = x.shape == y.shape and x.size > 0
        values = (float(x[index]), float(y[index])) if has_element else (float("nan"), float("nan"))
        rows.append(Row(kind, name, error, limit, index, *values))

    for name, value in a.values.items():
        if name != "loss.loss_sum" and (exposes_all or name in b.values):  # the loss has a row of its own
            quantity: Quantity = "logits" if name.startswith("head.") else "value"
            add("value", quantity, name, value, b.values.get(name, _ABSENT))
    add("loss", "loss", "loss", np.asarray(a.loss), np.asarray(b.loss))
    for name in reversed(list(a.grads)):
        add("gradient", "gradient", name, a.grads[name], b.grads.get(name, _ABSENT))
    return Comparison(reference_name, side_name, tuple(rows))
