"""The one protocol through which a backend is driven, by training, verification and generation alike.

A session holds a lowered model, its parameters and optimizer state. Everything that crosses it is a host array
under a canonical name, so nothing above it knows which backend it talks to.

On the ranks of a plan each has a session, and all call the same methods with the same arguments. What goes in may be
`Deferred`: a rank then reads or makes only the rectangles that it owns. What a rank saves comes out the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, Protocol, cast, get_args

from duomesh.core.arrays import Array
from duomesh.core.batch import Batch
from duomesh.core.boxes import Box, Sliceable, box_shape, whole_box
from duomesh.core.dropout import DropoutKey
from duomesh.core.errors import BackendError, ConfigError
from duomesh.core.ir.program import ModelProgram
from duomesh.core.plan.plan import Plan

__all__ = [
    "STATE_GROUPS",
    "AdamW",
    "ComputeDType",
    "JaxMode",
    "Session",
    "StateLoader",
    "StepResult",
    "Trace",
    "check_compute_dtype",
    "check_learning_rate",
    "whole_boxes",
]

ComputeDType = Literal["float32", "bfloat16", "float64"]
JaxMode = Literal["manual", "explicit"]  # how JAX runs a plan: see `backends.jax.modes`

# What optimizer state consists of, beside the step count. `master` is the fp32 (float64 in a float64 run) weight
# that compute weights are rounded from.
STATE_GROUPS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Decoupled weight decay Adam (arXiv:1711.05101, algorithm 2), decay on matrices only.

    m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
    w = w - lr (m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps) + weight_decay w)

    max_grad_norm: gradients are scaled by min(1, max_grad_norm / norm) of the global 2-norm; None for no clipping.

    Constructing one raises ConfigError, with every field that is out of its range.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        wrong = []
        for name, (needed, is_right) in _ADAMW_RANGES.items():
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
            if not (is_right(value) if is_number else (name, value) == ("max_grad_norm", None)):
                wrong.append(f"AdamW: {name} is {value!r}; it must be {needed}.")
        if wrong:
            raise ConfigError("\n".join(wrong))


# what each field must be, in words and as a test of a finite number
_ADAMW_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "beta1": ("at least 0 and less than 1", lambda x: 0 <= x < 1),
    "beta2": ("at least 0 and less than 1", lambda x: 0 <= x < 1),
    "eps": ("finite and more than 0", lambda x: x > 0),
    "weight_decay": ("finite and at least 0", lambda x: x >= 0),
    "max_grad_norm": ("finite and more than 0, or None for no clipping", lambda x: x > 0),
}


@dataclass(frozen=True)
class StepResult:
    """loss: the step's objective before the update. grad_norm: global norm before clipping.
    num_targets: the objective's denominator. is_skipped: no valid target, or a gradient that is not finite."""

    loss: float
    grad_norm: float
    num_targets: float
    is_skipped: bool = False


@dataclass(frozen=True, eq=False)
class Trace:
    """Everything that one forward and backward pass made, for comparison.

    values: op outputs by global name ("layers.0.attention.q"), in order of execution.
    loss: the mean loss over targets. grads: by canonical name; empty if not asked for.
    """

    values: Mapping[str, Array]
    loss: float
    grads: Mapping[str, Array]


class Session(Protocol):
    """A lowered model on one backend."""

    program: ModelProgram
    plan: Plan
    compute_dtype: ComputeDType

    def load_params(self, params: Iterable[tuple[str, Sliceable]]) -> None:
        """Sets every parameter by canonical name; names missing or unknown raise BackendError. Resets the optimizer."""

    def params(self) -> Iterator[tuple[str, Array]]:
        """Parameters in the compute dtype, in the program's order."""

    def trace(self, batch: Batch, *, grads: bool) -> Trace:
        """One pass that keeps every op's output."""

    def loss_and_grads(
        self, batches: Sequence[Batch], *, dropout: DropoutKey | None = None
    ) -> tuple[float, dict[str, Array]]:
        """The objective over all batches as one step, and its gradients by canonical name.

        dropout: what masks are drawn for; None drops nothing.
        """

    def init_optimizer(self, config: AdamW, params: Iterable[tuple[str, Sliceable]] | None = None) -> None:
        """Fresh optimizer state.

        params: weights to start from, every one by canonical name; masters keep them in full and compute weights are
            rounded from those. None starts from the current compute weights.
        """

    def train_step(self, batches: Sequence[Batch], lr: float, *, dropout: DropoutKey | None = None) -> StepResult:
        """One optimizer step over the micro-batches; the objective's denominator is that of all of them.

        dropout: what masks are drawn for. A model with dropout needs one (BackendError), no other reads it.

        Raises PlanError if the plan states other numbers of micro-batches or samples; so does `loss_and_grads`.
        """

    def eval_loss(self, batch: Batch) -> tuple[float, float]:
        """(sum of weighted target losses, sum of weights)."""

    def logits(self, tokens: Array) -> Array:
        """[B, S] ids -> [B, S, V] logits, float32 or float64.

        What the ranks of a plan cannot share in equal parts is filled up for the pass (`fill_batch`).
        """

    def check_invariants(self, batch: Batch) -> None:
        """Compares, to the bit, what several ranks hold and the plan says is equal: weights, optimizer state, and every
        value of a forward pass over `batch`. On one device there is nothing to compare.

        Raises:
            BackendError: on every rank, naming the first tensor that differs, the mesh axis and the ranks.
        """

    def optimizer_step_count(self) -> int:
        """Updates made since `init_optimizer`, restored ones included."""

    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]:
        """(group of STATE_GROUPS, canonical name, whole array)."""

    def owned_boxes(self) -> Mapping[str, Sequence[Box]]:
        """Canonical name -> the rectangles of it that this rank saves. Each element is saved by one rank."""

    def owned_state(self) -> Iterator[tuple[str, str, Array]]:
        """(group, canonical name, array): what is in each of `owned_boxes`, those of one name in their order.

        Nothing moves between ranks.
        """

    def load_optimizer_state(self, config: AdamW, step_count: int, state: Iterable[tuple[str, str, Sliceable]]) -> None:
        """Replaces optimizer state and, from `master`, the parameters. Incomplete state raises BackendError."""


def whole_boxes(program: ModelProgram) -> dict[str, tuple[Box]]:
    """`Session.owned_boxes` of one rank that has everything."""
    return {name: (whole_box(param.shape),) for name, param in program.params.items()}


def check_compute_dtype(dtype: str) -> ComputeDType:
    """Raises ConfigError for a dtype that no model is computed in."""
    if dtype not in get_args(ComputeDType):
        raise ConfigError(f"dtype {dtype!r} cannot be computed in; use one of {', '.join(get_args(ComputeDType))}.")
    return cast(ComputeDType, dtype)


def check_learning_rate(lr: float) -> None:
    """Raises BackendError for a rate that would destroy the weights."""
    if not (math.isfinite(lr) and lr >= 0):
        raise BackendError(f"the learning rate of a step is {lr}; it must be finite and not negative.")


class StateLoader:
    """Checks a stream of named tensors against what a model needs: no name unknown, twice or missing, no other shape.

    Args:
        program: the model.
        groups: the groups of tensors that are expected, each with every canonical parameter.
        boxes: the rectangles of each parameter that are expected, one after another; None for whole parameters.
    """

    def __init__(
        self,
        program: ModelProgram,
        groups: Sequence[str] = STATE_GROUPS,
        boxes: Mapping[str, Sequence[Box]] | None = None,
    ) -> None:
        boxes = whole_boxes(program) if boxes is None else boxes
        self._params = program.params
        self._missing = {(group, name): [*boxes[name]] for group in groups for name in boxes}
        self._groups = tuple(groups)

    def check(self, group: str, name: str, shape: tuple[int, ...]) -> Box:
        """Accepts one tensor and says which rectangle it is. Raises BackendError, naming it, if it does not fit."""
        if group not in self._groups or name not in self._params:
            raise BackendError(f"{group} tensor {name!r} is not part of this model.")
        left = self._missing.get((group, name))
        if not left:
            raise BackendError(f"{group} tensor {name} was given twice.")
        wanted = box_shape(left[0])
        if tuple(shape) != wanted:
            raise BackendError(f"{group} tensor {name} has shape {tuple(shape)}; this model needs {wanted}.")
        return left.pop(0)

    def finish(self) -> None:
        """Raises BackendError if a tensor never came."""
        missing = sorted(key for key, left in self._missing.items() if left)
        if missing:
            listed = ", ".join(f"{group} {name}" for group, name in missing[:5])
            raise BackendError(f"{len(missing)} tensors are missing: {listed}{', ...' * (len(missing) > 5)}.")
