"""Where JAX keeps what a plan places: compiled functions, the state of each device, what backward is handed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from plan_cases import CONFIG, LR, SEQ, plan_batches
from test_jax_cases import FOUR, session_of, small, trained

from duomesh.backends.jax import lower
from duomesh.backends.jax.session import JaxSession
from duomesh.backends.jax.step import Functions
from duomesh.core.batch import Batch
from duomesh.core.errors import BackendError
from duomesh.core.session import STATE_GROUPS, JaxMode
from duomesh.core.sharding.collectives import StepShape
from duomesh.core.sharding.layouts import Layout

pytestmark = pytest.mark.usefixtures("quick_compilation")


# C149: planned shardings

Ranges = tuple[tuple[int, int], ...]


def planned(session: JaxSession, shape: Sequence[int], cuts: Sequence[Sequence[str]]) -> list[Ranges]:
    """What each device has of an array whose dims are cut by mesh axes, from major to minor."""
    mesh, out = session.stacks.sharded.mesh, []
    for place in mesh.coordinates():
        coordinate, ranges = dict(zip(mesh.names, place, strict=True)), []
        for size, axes in zip(shape, cuts, strict=True):
            start, length = 0, size
            for axis in axes:
                length //= mesh.size(axis)
                start += coordinate[axis] * length
            ranges.append((start, start + length))
        out.append(tuple(ranges))
    return out


def found(session: JaxSession, shape: Sequence[int], sharding: Any) -> list[Ranges]:
    """The same of an array that there is."""
    indices = sharding.devices_indices_map(tuple(shape))
    return [
        tuple(side.indices(size)[:2] for side, size in zip(indices[device], shape, strict=True))
        for device in session.devices
    ]


def assert_stored(session: JaxSession, arrays: Mapping[str, Any]) -> None:
    """arrays: of [shape, sharding], by the name of a stack."""
    for name, (shape, sharding) in arrays.items():
        stack = session.stacks.stacks[name]
        cuts = stack_cuts(session, name)
        assert tuple(shape) == stack.shape
        assert found(session, shape, sharding) == planned(session, shape, cuts), name


def stack_cuts(session: JaxSession, name: str) -> list[list[str]]:
    """From the layout of a member: axes of its dims, and those of ZeRO behind them on the dim that they share."""
    stack, sharded = session.stacks.stacks[name], session.stacks.sharded
    layout = sharded.params[stack.members[0], 0]
    extents = sharded.extents(batch=1, seq=1)
    cuts = [list(extents.splitting(axis.name, layout)) for axis in stack.axes]
    if stack.dim is not None:
        cuts[stack.dim] += [axis for axis in sharded.mesh.names if sharded.rules[axis].shares]
    return [[] for _ in stack.lead] + cuts


def value_cuts(session: JaxSession) -> dict[str, list[list[str]]]:
    """Of every marked activation: the axes that its layout says, sums and copies being whole."""
    sharded, out = session.stacks.sharded, {}
    extents = sharded.extents(batch=4, seq=SEQ)
    for prefix, _, program in sharded.steps:
        for op in program.program.ops:
            for name in op.outputs:
                layout: Layout = program.layouts[name]
                out[prefix + name] = [list(extents.splitting(axis.name, layout)) for axis in program.axes(name)]
    return out


def placed(tree: Any) -> Any:
    """(shape, sharding) of each array of a dict."""
    return {name: (array.shape, array.sharding) for name, array in tree.items()}


@pytest.mark.parametrize(("plan", "mode"), [(f"{FOUR},sequence_parallel", "manual"), ("dp=2,tp=2,zero=3", "explicit")])
def test_c149_compiled_functions_place_everything_as_planned(plan: str, mode: JaxMode) -> None:
    """Weights, gradients, optimizer state and marked activations of every function of a session."""
    session = trained(small(), plan, mode, steps=0)
    functions, state = session.functions, session._state
    with session._context():
        params, inputs = session._compute_params(), session._inputs(plan_batches(1)[0])
        stacked, one = session._stack_inputs(plan_batches(1), None), np.float32(1)
        tokens = {name: inputs[name] for name in ("tokens", "positions")}
        arguments: dict[str, tuple[Any, ...]] = {
            "cast": (state.master,),
            "loss_sum": (params, inputs),
            "logits": (params, tokens),
            "grads": (params, inputs, one),
            "trace": (params, inputs, one),
            "trace_grads": (params, inputs, one),
            "step": (state, stacked, one, np.float32(LR)),
        }
        public = [name for name in vars(Functions) if not name.startswith("_") and name != "stored"]
        assert sorted(arguments) == sorted(public)
        made, taken = {}, {}
        for name, args in arguments.items():
            function = functions.step(CONFIG) if name == "step" else getattr(functions, name)
            compiled = function.lower(*args).compile()
            taken[name], made[name] = compiled.input_shardings[0], compiled(*args)
    shapes = {name: stack.shape for name, stack in session.stacks.stacks.items()}
    for name, shardings in taken.items():
        groups = shardings[0][1:] if name == "step" else [shardings[0]]
        for group in groups:
            assert_stored(session, {n: (shapes[n], sharding) for n, sharding in group.items()})
    for stored in (made["cast"], made["grads"][1], made["trace_grads"][2], *made["step"][0][1:]):
        assert_stored(session, placed(stored))
    values = value_cuts(session)
    assert any("tp" in axes for cuts in values.values() for axes in cuts)
    for records in (made["trace"][1], made["trace_grads"][1]):
        assert set(records) == set(values)
        for name, (shape, sharding) in placed(records).items():
            assert found(session, shape, sharding) == planned(session, shape, values[name]), name
    logits = made["logits"]
    assert found(session, logits.shape, logits.sharding) == planned(session, logits.shape, values["head.logits"])


@pytest.mark.parametrize("mode", ["manual", "explicit"])
def test_c149_a_batch_that_cannot_be_split_is_an_error(mode: JaxMode) -> None:
    """It is not given whole to every device."""
    session, batch = session_of(small(), FOUR, mode), plan_batches(1)[0]
    with pytest.raises(BackendError, match="cannot share a micro-batch of 3 samples"):
        session.eval_loss(Batch(batch.tokens[:3], batch.labels[:3]))


# ZeRO


@pytest.mark.parametrize("mode", ["manual", "explicit"])
@pytest.mark.parametrize("plan", ["dp=8", "dp=8,zero=1", "dp=8,zero=3", "dp=4,tp=2,zero=2,zero_shard=2"])
def test_state_per_device_is_the_share_of_the_plan(plan: str, mode: JaxMode) -> None:
    """Three fp32 arrays for each stack, of the size that the stacks say; over dp=8 an eighth of the parameters."""
    session = trained(small(), plan, mode, steps=0)
    share = sum(stack.elements(is_shared=True) for stack in session.stacks.stacks.values())
    held = dict.fromkeys(session.devices, 0)
    for array in jax.tree.leaves(session._state[1:]):
        for part in array.addressable_shards:
            held[part.device] += part.data.nbytes
    assert set(held.values()) == {len(STATE_GROUPS) * 4 * share}
    if "tp" not in plan:
        assert share * (8 if "zero" in plan else 1) == session.program.num_params


def residuals(jaxpr: Any) -> Iterator[int]:
    """Elements on one device, of one layer, of all that scans hand out; innermost scans too.

    What they carry is counted in the same way, and is no weight.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            for made in equation.outvars:
                sharding = made.aval.sharding
                entries = [(e,) if isinstance(e, str) else e or () for e in sharding.spec.partitions]
                splitting = [axis for entry in entries for axis in entry]
                yield prod(made.aval.shape[1:]) // prod(sharding.mesh.shape[axis] for axis in splitting)
        for value in equation.params.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from residuals(inner)


@pytest.mark.parametrize("mode", ["manual", "explicit"])
def test_no_gathered_weight_is_kept_for_backward(mode: JaxMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero=3, the scan over layers hands parts of weights to its backward; were they not gathered again, it would
    hand out whole ones."""
    shape = StepShape(batch=4, seq=11)  # of which no value of a layer is as large as a matrix

    def kept() -> set[int]:
        session = session_of(small(num_heads=6), "dp=4,zero=3", mode)
        layers = [stack for stack in session.stacks.stacks.values() if stack.is_stacked]
        whole = {stack.elements(is_shared=False) // 2 for stack in layers if len(stack.axes) > 1}
        found = list(residuals(session.traced_step(shape).jaxpr))
        shares = {stack.elements(is_shared=True) // 2 for stack in layers}
        assert shares & set(found) and not shares & whole
        return whole & set(found)

    assert kept() == set()

    def without(gather: Any, run: Any) -> Any:
        return lambda varied, fixed, parts: run(varied, fixed, gather(parts))

    monkeypatch.setattr(lower, "regathered", without)
    assert kept()
