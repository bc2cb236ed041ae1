"""What every session holds to, on one device and under a plan: settings of the optimizer, and contexts of any shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
from plan_cases import VOCAB, plan_model
from rank_pool import RankPool
from sharding_cases import Array, params_of

from duomesh.api import Model, new_session
from duomesh.core.bounds import bound
from duomesh.core.errors import ConfigError, DataError
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.session import AdamW, JaxMode
from duomesh.core.verify.compare import relative_error

PLANS = ("dp=4", "tp=2,dp=2,sequence_parallel,zero=3")


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", None, True])
@pytest.mark.parametrize("name", ["beta1", "beta2", "eps", "weight_decay", "max_grad_norm"])
def test_adamw_refuses_what_would_destroy_the_weights(name: str, value: object) -> None:
    if (name, value) == ("max_grad_norm", None):
        assert AdamW(max_grad_norm=None).max_grad_norm is None
        return
    with pytest.raises(ConfigError, match=f"^AdamW: {name} is {value!r}; it must be [^\\n]*$"):
        AdamW(**{name: value})  # type: ignore[arg-type]


def test_the_ends_of_adamws_ranges() -> None:
    """A limit of 0 would scale every gradient to nothing; no clipping is None."""
    AdamW(beta1=0, beta2=0.0, weight_decay=0, eps=1e-300, max_grad_norm=1e-300)
    with pytest.raises(ConfigError) as caught:
        AdamW(beta1=1.0, beta2=1, eps=0.0, max_grad_norm=0.0)
    assert [line.split()[1] for line in str(caught.value).splitlines()] == ["beta1", "beta2", "eps", "max_grad_norm"]
    assert "None for no clipping" in str(caught.value)


def generated(backend: str, plan: str, mode: JaxMode = "manual") -> tuple[list[int], Array]:
    """A continuation, and logits of three samples of 13 tokens, which no plan here divides."""
    spec = plan_model()
    session = new_session(spec, backend=backend, dtype="float64", device="cpu", plan=Plan.parse(plan), mode=mode)
    session.load_params(params_of(build_program(spec)).items())
    ids = (np.arange(39, dtype=np.int32) * 5 % VOCAB).reshape(3, 13)
    with pytest.raises(DataError, match="they must be"):
        session.logits(ids[0])
    return Model(session).generate([1, 2, 3], max_new_tokens=4), session.logits(ids)


def generated_on_rank(rank: int, world: int, plan: str) -> tuple[list[int], Array]:
    return generated("torch", plan)


def assert_same(got: tuple[list[int], Array], want: tuple[list[int], Array]) -> None:
    assert got[0] == want[0] and len(want[0]) == 4
    assert got[1].shape == (3, 13, VOCAB)
    assert relative_error(want[1], got[1])[0] <= bound("logits", "float64")


@pytest.mark.parametrize("plan", PLANS)
def test_torchs_ranks_generate_as_one(plan: str, ranks: RankPool) -> None:
    for got in ranks.run(4, generated_on_rank, plan):
        assert_same(got, generated("torch", ""))


@pytest.mark.parametrize("mode", ["manual", "explicit"])
@pytest.mark.parametrize("plan", PLANS)
def test_jaxs_devices_generate_as_one(plan: str, mode: JaxMode) -> None:
    assert_same(generated("jax", plan, mode), generated("torch", ""))
