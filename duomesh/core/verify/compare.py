"""Two traces side by side: errors of every op output, the loss and every gradient, and the first that is too large."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.bounds import Quantity, bound
from duomesh.core.session import Trace

__all__ = ["Bounds", "Comparison", "Row", "compare_traces", "gradient_floor", "relative_error"]

# max|ref| of a gradient counts as at least this share of the largest gradient: one that is zero but for rounding
# (a key bias, say) has no digits to agree on.
_GRADIENT_FLOOR = 1e-6
_ABSENT: Array = np.empty(0)  # no tensor has this shape: the difference is infinite


@dataclass(frozen=True)
class Row:
    """One compared tensor.

    Attributes:
        difference: relative error against the reference side.
        error: relative error against the reference side's float64 run; `difference` again where there is none.
            This is what the bound limits: both sides round, and a side must not be judged by the other's rounding.
        bound: the largest `error` that passes.
        index: where the largest difference is; `reference` and `got` are the values there.
    """

    kind: Literal["value", "loss", "gradient"]
    name: str
    difference: float
    error: float
    bound: float
    index: tuple[int, ...] = ()
    reference: float = 0.0
    got: float = 0.0

    @property
    def passed(self) -> bool:
        return math.isfinite(self.error) and self.error <= self.bound


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
        """The row of a kind (and name) with the largest difference."""
        rows = [row for row in self.rows if row.kind == kind and name in (None, row.name)]
        return max(rows, key=lambda row: row.difference, default=None)


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

    Infinite if the shapes differ, if either side is not finite somewhere, or if anything differs from a zero reference.
    """
    if reference.shape != got.shape:
        return float("inf"), ()
    if reference.size == 0:
        return 0.0, ()
    a, b = reference.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    # a model that makes NaN has failed, even if both sides make it
    difference = np.where(np.isfinite(a) & np.isfinite(b), difference, np.inf)
    index = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), difference.shape))
    largest = float(difference[index])
    scale = max(float(np.abs(a[np.isfinite(a)]).max(initial=0.0)), floor)
    if largest == 0.0:
        return 0.0, index
    return (largest / scale if scale > 0 else float("inf")), index


def gradient_floor(grads: Mapping[str, Array]) -> float:
    """The size that a gradient counts as at least, given all gradients of the model."""
    largest = max((float(np.abs(g.astype(np.float64)).max(initial=0.0)) for g in grads.values()), default=0.0)
    return _GRADIENT_FLOOR * largest


def _mean_error(trace: Trace, truth: Trace) -> float:
    """What rounding does to the loss, from the tokens' losses: their largest error over the root of their number.

    The loss is one number, and its own error may be zero by luck; a mean of N independent errors is not.
    """
    name = "loss.token_loss"
    if name not in trace.values:
        return 0.0
    error, _ = relative_error(truth.values[name], trace.values[name])
    return float(error / np.sqrt(max(trace.values[name].size, 1)))


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
    c = truth or a
    floor = gradient_floor(a.grads)
    rows: list[Row] = []

    def add(
        kind: Literal["value", "loss", "gradient"], quantity: Quantity, name: str, *, x: Array, y: Array, z: Array
    ) -> None:
        """x: the reference's tensor, y: the side's, z: the truth."""
        smallest = floor if kind == "gradient" else 0.0
        difference, index = relative_error(x, y, floor=smallest)
        error, _ = relative_error(z, y, floor=smallest)
        own_error, _ = relative_error(z, x, floor=smallest)
        if kind == "loss":
            own_error = max(own_error, _mean_error(a, c))
        has_element = x.shape == y.shape and x.size > 0
        values = (float(x[index]), float(y[index])) if has_element else (float("nan"), float("nan"))
        rows.append(Row(kind, name, difference, error, bounds.of(quantity, own_error), index, *values))

    for name, value in a.values.items():
        if name != "loss.loss_sum" and (exposes_all or name in b.values):  # the loss has a row of its own
            quantity: Quantity = "logits" if name.startswith("head.") else "value"
            add("value", quantity, name, x=value, y=b.values.get(name, _ABSENT), z=c.values[name])
    add("loss", "loss", "loss", x=np.asarray(a.loss), y=np.asarray(b.loss), z=np.asarray(c.loss))
    for name in reversed(list(a.grads)):
        add("gradient", "gradient", name, x=a.grads[name], y=b.grads.get(name, _ABSENT), z=c.grads[name])
    return Comparison(reference_name, side_name, tuple(rows))
