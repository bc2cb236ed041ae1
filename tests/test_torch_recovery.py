"""An exception anywhere in a training step, caught by the caller, leaves nothing behind that a later pass could use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from plan_cases import CONFIG, LR, plan_batches, plan_model
from rank_pool import RankPool
from sharding_cases import Array, params_of
from torch.utils._python_dispatch import TorchDispatchMode

from duomesh.backends.torch.session import TorchSession
from duomesh.core.errors import BackendError
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.spec.model import ModelSpec

Params = dict[str, Array]
Values = dict[str, Array]

# plan -> how many of the ops between two collectives fail: on one device there is nothing but ops
PLANS = {
    "micro_batches=2": 40,
    "dp=2": 2,
    "dp=2,zero=1": 2,
    "dp=2,zero=2,micro_batches=2": 1,
    "dp=2,zero=3,micro_batches=2": 1,
    "dp=2,zero=3,zero_shard=1": 2,
}


class StoppedError(Exception):
    """What the caller catches."""


class Fault(TorchDispatchMode):
    """Raises StoppedError at an op, counted from the collective before it, and before the next collective at the
    latest: then all ranks have issued the same collectives.

    Attributes:
        gaps: ops before the first collective, between two of them, and after the last.

    Args:
        at: (collectives, ops) that have passed; None never raises.
    """

    def __init__(self, at: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._at = at
        self.gaps = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_collective = "c10d" in func.name() and "wait" not in func.name()
        if (
            self._at is not None
            and len(self.gaps) - 1 == self._at[0]
            and (is_collective or self.gaps[-1] >= self._at[1])
        ):
            raise StoppedError
        if is_collective:
            self.gaps.append(0)
        else:
            self.gaps[-1] += 1
        return func(*args, **(kwargs or {}))


def points(gaps: list[int], per_gap: int) -> Iterator[tuple[int, int]]:
    """Where faults are tried: so many in each gap, and at the last op."""
    last = len(gaps) - 1
    for index, count in enumerate(gaps):
        if count or index < last:  # nothing fails after the end
            yield from ((index, count * part // per_gap) for part in range(per_gap))
    if gaps[last]:
        yield last, gaps[last] - 1


class Case:
    """A session whose steps are stopped, and what a session gives that never was."""

    def __init__(self, plan: str, spec: ModelSpec) -> None:
        self.plan, self.program = Plan.parse(plan), build_program(spec)
        self.data = plan_batches(self.plan.resolved_micro_batches)
        params = params_of(self.program)
        self.weights = [params, {name: array * 1.25 for name, array in params.items()}]
        self.want = [self.values(self.loaded(which)) for which in (0, 1)]
        self.session = self.loaded(0)

    def loaded(self, which: int) -> TorchSession:
        session = TorchSession(self.program, plan=self.plan, compute_dtype="float64", device="cpu")
        session.load_params(self.weights[which].items())
        session.init_optimizer(CONFIG)
        return session

    def values(self, session: TorchSession) -> Values:
        """Of an evaluation, gradients and an update."""
        out = {"eval": np.array(session.eval_loss(self.data[0])), **self.gradients(session)}
        result = session.train_step(self.data, LR)
        out["step"] = np.array([result.loss, result.grad_norm])
        return out | {f"after {name}": array for name, array in session.params()}

    def gradients(self, session: TorchSession) -> Values:
        loss, grads = session.loss_and_grads(self.data)
        return {"loss": np.array(loss), **grads}

    def gaps(self) -> list[int]:
        """Of a step; the weights are as before."""
        self.reload(0, masters=True)
        with Fault() as fault:
            self.session.train_step(self.data, LR)
        self.reload(0, masters=True)
        return fault.gaps

    def reload(self, which: int, *, masters: bool) -> None:
        if masters:
            self.session.init_optimizer(CONFIG, self.weights[which].items())
        else:
            self.session.load_params(self.weights[which].items())
            self.session.init_optimizer(CONFIG)

    def stop(self, at: tuple[int, int]) -> bool:
        """Whether the weights are still usable after a step that ends there."""
        with pytest.raises(StoppedError), Fault(at):
            self.session.train_step(self.data, LR)
        try:
            self.session.optimizer_state()
        except BackendError as error:
            assert "interrupted" in str(error)
            return False
        return True


def differing(got: Values, want: Values) -> list[str]:
    return [name for name, array in got.items() if not np.array_equal(array, want[name])]


def run_faults(rank: int, world: int, plan: str, spec: ModelSpec, per_gap: int) -> tuple[int, int, list[str]]:
    """How many faults left the weights usable, how many did not, and what is not, to the bit, as without a fault."""
    case = Case(plan, spec)
    usable, refused, wrong = 0, 0, []
    now = 0
    for number, at in enumerate(points(case.gaps(), per_gap)):
        if case.stop(at):
            usable += 1
            if number % 2:  # else what the fault left meets other weights
                wrong += [f"{at}, same weights: {n}" for n in differing(case.gradients(case.session), case.want[now])]
        else:
            refused += 1
        now = 1 - now
        case.reload(now, masters=number % 4 < 2)
        wrong += [f"{at}, other weights: {n}" for n in differing(case.values(case.session), case.want[now])]
        case.reload(now, masters=True)
    return usable, refused, wrong


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_that_was_stopped_leaves_nothing_behind(ranks: RankPool, plan: str) -> None:
    """Wherever it stops: the same weights give the same again, other weights give what they always give, and weights
    that are updated in part are refused."""
    world = 2 if "dp" in plan else 1
    for usable, refused, wrong in ranks.run(world, run_faults, plan, plan_model(ties=True), PLANS[plan], timeout_s=120):
        assert not wrong, wrong[:4]
        assert usable > 2 and refused > 0
