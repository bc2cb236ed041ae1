"""The learning rate is a pure function of step and settings."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from duomesh.core.training.config import OptimizerConfig
from duomesh.core.training.schedule import learning_rate

COSINE = OptimizerConfig(lr=1.0, min_lr=0.25, warmup_steps=4)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_warmup_rises_linearly_to_the_full_rate(step: int) -> None:
    assert learning_rate(step, 100, COSINE) == Fraction(step, 4)


@pytest.mark.parametrize(
    # at these shares of the way the cosine is exact, or as exact as cos(pi / 2) = 6e-17 lets the sum be
    ("step", "rate"),
    [(4, 1.0), (10, 0.625), (16, 0.25), (17, 0.25)],
)
def test_cosine_ends_at_the_minimum(step: int, rate: float) -> None:
    assert learning_rate(step, 16, COSINE) == rate


def test_cosine_falls_all_the_way() -> None:
    rates = [learning_rate(step, 50, COSINE) for step in range(4, 51)]
    assert all(a > b for a, b in itertools.pairwise(rates))


def test_without_warmup_the_first_step_is_already_on_the_curve() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.0, warmup_steps=0)
    assert learning_rate(1, 2, config) == 0.5
    assert learning_rate(2, 2, config) == 0.0


def test_constant_stays() -> None:
    config = OptimizerConfig(lr=0.3, schedule="constant", warmup_steps=3)
    assert [learning_rate(step, 9, config) for step in range(3, 12)] == [0.3] * 9


def test_all_of_the_run_may_be_warmup() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=8)
    assert [learning_rate(step, 8, config) for step in range(1, 9)] == [step / 8 for step in range(1, 9)]
