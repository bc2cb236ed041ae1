"""The one protocol through which a backend is driven, by training, verification and generation alike.

A session holds a lowered model, its parameters and optimizer state. Everything that crosses it is a host array
under a canonical name, so nothing above it knows which backend it talks to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from duomesh.core.arrays import Array
from duomesh.core.batch import Batch
from duomesh.core.errors import BackendError
from duomesh.core.ir.program import ModelProgram

__all__ = [
    "STATE_GROUPS",
    "AdamW",
    "ComputeDType",
    "Session",
    "StateLoader",
    "StepResult",
    "Trace",
    "check_learning_rate",
]

ComputeDType = Literal["float32", "bfloat16", "float64"]

# What optimizer state consists of, beside the step count. `master` is the fp32 (float64 in a float64 run) weight
# that compute weights are rounded from.
STATE_GROUPS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Decoupled weight decay Adam (arXiv:1711.05101, algorithm 2), decay on matrices only.

    m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
    w = w - lr (m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps) + weight_decay w)

    max_grad_norm: gradients are scaled by min(1, max_grad_norm / norm) of the global 2-norm; None for no clipping.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0


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
    compute_dtype: ComputeDType

    def load_params(self, params: Iterable[tuple[str, Array]]) -> None:
        """Sets every parameter by canonical name; names missing or unknown raise BackendError. Resets the optimizer."""

    def params(self) -> Iterator[tuple[str, Array]]:
        """Parameters in the compute dtype, in the program's order."""

    def trace(self, batch: Batch, *, grads: bool) -> Trace:
        """One pass that keeps every op's output."""

    def loss_and_grads(self, batches: Sequence[Batch]) -> tuple[float, dict[str, Array]]:
        """The objective over all batches as one step, and its gradients by canonical name."""

    def init_optimizer(self, config: AdamW, params: Iterable[tuple[str, Array]] | None = None) -> None:
        """Fresh optimizer state.

        params: weights to start from, every one by canonical name; masters keep them in full and compute weights are
            rounded from those. None starts from the current compute weights.
        """

    def train_step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """One optimizer step over the micro-batches; the objective's denominator is that of all of them."""

    def eval_loss(self, batch: Batch) -> tuple[float, float]:
        """(sum of weighted target losses, sum of weights)."""

    def logits(self, tokens: Array) -> Array:
        """[B, S] ids -> [B, S, V] logits, float32 or float64."""

    def optimizer_step_count(self) -> int:
        """Updates made since `init_optimizer`, restored ones included."""

    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]:
        """(group of STATE_GROUPS, canonical name, array)."""

    def load_optimizer_state(self, config: AdamW, step_count: int, state: Iterable[tuple[str, str, Array]]) -> None:
        """Replaces optimizer state and, from `master`, the parameters. Incomplete state raises BackendError."""


def check_learning_rate(lr: float) -> None:
    """Raises BackendError for a rate that would destroy the weights."""
    if not (math.isfinite(lr) and lr >= 0):
        raise BackendError(f"the learning rate of a step is {lr}; it must be finite and not negative.")


class StateLoader:
    """Checks a stream of named tensors against what a model needs: no name unknown, twice or missing, no other shape.

    Args:
        program: the model.
        groups: the groups of tensors that are expected, each with every canonical parameter.
    """

    def __init__(self, program: ModelProgram, groups: Sequence[str] = STATE_GROUPS) -> None:
        self._params = program.params
        self._missing = {(group, name) for group in groups for name in program.params}
        self._groups = tuple(groups)

    def check(self, group: str, name: str, shape: tuple[int, ...]) -> None:
        """Accepts one tensor. Raises BackendError, naming it, if it does not fit."""
        if group not in self._groups or name not in self._params:
            raise BackendError(f"{group} tensor {name!r} is not part of this model.")
        wanted = self._params[name].shape
        if tuple(shape) != wanted:
            raise BackendError(f"{group} tensor {name} has shape {tuple(shape)}; this model needs {wanted}.")
        if (group, name) not in self._missing:
            raise BackendError(f"{group} tensor {name} was given twice.")
        self._missing.remove((group, name))

    def finish(self) -> None:
        """Raises BackendError if a tensor never came."""
        if self._missing:
            listed = ", ".join(f"{group} {name}" for group, name in sorted(self._missing)[:5])
            raise BackendError(
                f"{len(self._missing)} tensors are missing: {listed}{', ...' * (len(self._missing) > 5)}."
            )
