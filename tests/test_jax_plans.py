"""Plans on a mesh of simulated devices, in both modes: values, gradients, norms and updates are those of one device,
and in the manual mode a step asks for just the collectives that the sharded program lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from plan_cases import CONFIG, LR, SEQ, STEPS, plan_batches, plan_model, reference_steps
from plan_matrix import MATRIX, PlanCase
from sharding_cases import Array, params_of

from duomesh.backends.jax.explicit import Explicit
from duomesh.backends.jax.session import JaxSession
from duomesh.backends.jax.traced import traced_collectives
from duomesh.core.bounds import bound
from duomesh.core.dropout import DropoutKey
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.session import JaxMode
from duomesh.core.sharding.collectives import StepShape
from duomesh.core.sharding.program import Reshard, ShardedProgram
from duomesh.core.sharding.stacks import stack_trace
from duomesh.core.spec.model import ModelSpec
from duomesh.core.verify.compare import gradient_floor, relative_error
from duomesh.kernels.reference.model import ReferenceModel

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODES: tuple[JaxMode, ...] = ("manual", "explicit")
REPEATS = 2  # two layers, twice: a scan over a pattern


@lru_cache
def reference(ties: bool, dropout: bool, micro_batches: int, over: str = "head") -> Any:
    return reference_steps(plan_model(ties=ties, dropout=dropout, over=over, repeats=REPEATS), micro_batches)


def session_of(
    spec: ModelSpec, plan: str, mode: JaxMode = "manual", dtype: Any = "float64", *, remat: bool = False
) -> JaxSession:
    program = build_program(spec)
    session = JaxSession(program, plan=Plan.parse(plan), compute_dtype=dtype, device="cpu", mode=mode, remat=remat)
    cast = np.float64 if dtype == "float64" else np.float32
    session.load_params((name, array.astype(cast)) for name, array in params_of(program).items())
    return session


def assert_grads(got: dict[str, Array], want: dict[str, Array]) -> None:
    floor = gradient_floor(want)
    assert list(got) == list(want)
    for name in want:
        assert relative_error(want[name], got[name], floor=floor)[0] <= bound("gradient", "float64"), name


def step_arguments(session: JaxSession, dropout: DropoutKey | None) -> tuple[Any, ...]:
    inputs = session._stack_inputs(plan_batches(session.plan.resolved_micro_batches), dropout)
    assert session._state is not None
    return session._state, inputs, session._wide.type(1), session._wide.type(LR)


def differing_collectives(session: JaxSession, dropout: DropoutKey | None = None, *, remat: bool = False) -> list[str]:
    """What a step asks for against what is listed: as a multiset, and in order within a kind and its axes."""
    with session._context():
        traced = session.functions.step(CONFIG).trace(*step_arguments(session, dropout))
    wide = str(session._wide)
    dtypes = {"compute": str(session._compute), "wide": wide, "int": "int32", "grad": wide}
    listed = [
        (c.kind, c.axes, dtypes[c.dtype], c.elements)
        for c in stack_trace(session.stacks, StepShape(4, SEQ, session.plan.resolved_micro_batches), remat=remat)
    ]
    issued = [
        (c.kind, c.axes, c.dtype, c.elements)
        for c in traced_collectives(traced.jaxpr, session.stacks.sharded.mesh)
        for _ in range(c.count)
    ]
    missing, extra = Counter(listed) - Counter(issued), Counter(issued) - Counter(listed)
    return [f"listed, not issued: {c} x{n}" for c, n in missing.items()] + [
        f"issued, not listed: {c} x{n}" for c, n in extra.items()
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_a_plan_is_the_same_model(case: PlanCase, mode: JaxMode) -> None:
    """float64: loss 1e-12, gradients 1e-10, norm 1e-12, parameters after three updates 1e-9; and the collectives."""
    session = session_of(plan_model(ties=case.ties, dropout=case.dropout, repeats=REPEATS), case.plan, mode)
    assert (session.mesh is None) == (case.world == 1)
    loss, grads, history, params = reference(case.ties, case.dropout, case.micro_batches)
    data = plan_batches(case.micro_batches)
    keys = [DropoutKey(7, step) if case.dropout else None for step in range(STEPS + 1)]
    got, made = session.loss_and_grads(data, dropout=keys[0])
    assert abs(got - loss) <= bound("loss", "float64") * abs(loss)
    assert_grads(made, grads)
    session.init_optimizer(CONFIG)
    if mode == "manual":
        assert differing_collectives(session, keys[1]) == []
    for (want_loss, want_norm), key in zip(history, keys[1:], strict=True):
        result = session.train_step(data, LR, dropout=key)
        assert abs(result.loss - want_loss) <= bound("loss", "float64") * abs(want_loss)
        assert abs(result.grad_norm - want_norm) <= bound("global_norm", "float64") * want_norm
    state = {(group, name): array for group, name, array in session.optimizer_state()}
    for name, array in session.params():
        assert relative_error(params[name], array)[0] <= bound("updated_parameter", "float64"), name
        assert np.array_equal(state["master", name], array), name
    assert session.functions.step(CONFIG)._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", ["tp=2,dp=2,sequence_parallel,zero=1", "dp=4,zero=3"])
def test_a_plan_in_fp32(plan: str, mode: JaxMode) -> None:
    """Within four times the error that one device has in fp32, or the caps for small models."""
    spec = plan_model(repeats=REPEATS)
    loss, grads, _, _ = reference(False, False, 1)
    (own_loss, own), (got_loss, got) = (
        session_of(spec, p, mode, "float32").loss_and_grads(plan_batches(1)) for p in ("", plan)
    )
    assert abs(got_loss - loss) <= bound("loss", "float32", own_error=abs(own_loss - loss) / loss) * loss
    floor = gradient_floor(grads)
    for name, want in grads.items():
        one = relative_error(want, own[name], floor=floor)[0]
        error = relative_error(want, got[name], floor=floor)[0]
        assert error <= bound("gradient", "float32", own_error=one), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", ["tp=4", "dp=2,tp=2,sequence_parallel", "dp=4,zero=3"])
@pytest.mark.parametrize("over", ["head", "all"])
def test_every_value_of_a_pass(plan: str, over: str, mode: JaxMode) -> None:
    """Joined over devices, every op's output is that of one device."""
    spec = plan_model(over=over)
    session = session_of(spec, plan, mode)
    want = ReferenceModel(session.program, params_of(session.program)).forward(plan_batches(1)[0])
    trace = session.trace(plan_batches(1)[0], grads=False)
    assert list(trace.values) == list(want)
    for name, value in want.items():
        assert relative_error(value, trace.values[name])[0] <= bound("value", "float64"), name


@pytest.mark.parametrize("mode", MODES)
def test_full_width_norms_and_copies_of_kv_heads(mode: JaxMode) -> None:
    """Two kv heads over eight devices: four copies of each, under norms over the whole width."""
    loss, grads, _, _ = reference(False, False, 1, "all")
    session = session_of(plan_model(over="all", repeats=REPEATS), "tp=8,sequence_parallel", mode)
    got, made = session.loss_and_grads(plan_batches(1))
    assert abs(got - loss) <= bound("loss", "float64") * loss
    assert_grads(made, grads)
    trace = session.trace(plan_batches(1)[0], grads=True)
    assert_grads(dict(trace.grads), grads)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", ["", "tp=4", "tp=2,dp=2,sequence_parallel,zero=3,micro_batches=2"])
def test_layers_that_are_computed_again(plan: str, mode: JaxMode) -> None:
    """The same gradients; what is done again is listed, and a scan keeps nothing but the inputs of its layers."""
    micro_batches = Plan.parse(plan).micro_batches or 1
    loss, grads, _, _ = reference(False, True, micro_batches, "all")
    session = session_of(plan_model(dropout=True, over="all", repeats=REPEATS), plan, mode, remat=True)
    key = DropoutKey(7, 0)
    got, made = session.loss_and_grads(plan_batches(micro_batches), dropout=key)
    assert abs(got - loss) <= bound("loss", "float64") * loss
    assert_grads(made, grads)
    if mode == "explicit":
        return
    session.init_optimizer(CONFIG)
    assert differing_collectives(session, key, remat=True) == []
    traced = session.traced_step(StepShape(4, SEQ, micro_batches), CONFIG)
    scans = [e for e in equations(traced.jaxpr.jaxpr) if e.primitive.name == "scan"]
    forward = next(e for e in scans if not any(i.primitive.name == "scan" for i in equations(e.params["jaxpr"].jaxpr)))
    stream, *kept = [variable.aval.shape for variable in forward.outvars]
    assert kept == [(REPEATS, *stream)] * 2


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, those of inner programs after the one that has them."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def reshards(session: JaxSession) -> list[tuple[str, Reshard]]:
    return [(name, made) for name, p in session.stacks.sharded.programs.items() for made in p.reshards() if made.ahead]


# plan, program, and value whose movement is left out: one of each kind
MISSING = [
    ("tp=2,sequence_parallel", "embed", "scale"),
    ("tp=2", "block0", "attention_norm"),
    ("tp=2", "block0", "attention.o"),
    ("tp=2", "block0", "attention.o.bias"),
    ("dp=2", "loss", "loss_sum"),
]


@pytest.mark.parametrize(("plan", "program", "value"), MISSING)
def test_a_missing_movement_is_a_type_error(plan: str, program: str, value: str, monkeypatch: Any) -> None:
    """In the explicit mode, found while the step is traced, before anything runs.

    A loss that is still a partial sum meets no op of ours: JAX refuses to divide it, as what it has no rule for.
    """
    session = session_of(plan_model(), plan, "explicit")
    names = {(name, made.source) for name, made in reshards(session)}
    assert (program, value) in names, sorted(names)
    move = Explicit.reshard

    def without(self: Explicit, sharded: ShardedProgram, made: Reshard, x: jax.Array) -> jax.Array:
        is_left_out = (sharded.program.name, made.source) == (program, value)
        return x if is_left_out else move(self, sharded, made, x)

    monkeypatch.setattr(Explicit, "reshard", without)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=r"specs of the input|unreduced"):
        session.loss_and_grads(plan_batches(1))


@pytest.mark.parametrize("mode", MODES)
def test_one_compilation_whatever_the_depth(mode: JaxMode) -> None:
    """A step is traced and compiled once; the program that XLA gets is as long for 32 layers as for 2."""
    lines = []
    for repeats in (1, 16):
        session = session_of(plan_model(repeats=max(repeats, 2)), "tp=2,dp=2,zero=3", mode)
        session.init_optimizer(CONFIG)
        with session._context():
            text = session.functions.step(CONFIG).lower(*step_arguments(session, None)).as_text()
        lines.append(len(text.splitlines()))
    assert lines[0] == lines[1]
