"""Random programs on random meshes in random layouts: whatever passes the check is the unsharded program.

Two choosers: the typing rules with random claims, and modes drawn for every op. A layout with a wrong state either does
not pass the check, or is one more right layout.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_programs import LENGTH, NUM_SAMPLES, random_mesh, random_model, random_rule, random_states
from sharding_cases import DROPOUT, Array, assert_same_grads, params_of

from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.errors import PlanError
from duomesh.core.ir.program import ModelProgram
from duomesh.core.sharding.check import check_model
from duomesh.core.sharding.collectives import StepShape, step_trace
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.program import ShardedModelProgram, shard_model, write_model
from duomesh.core.sharding.storage import Storage
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, shard
from duomesh.kernels.reference.model import ReferenceModel
from duomesh.kernels.reference.sharded import ShardedModel

SEEDS = st.integers(0, 2**32 - 1)


def batch_of(rng: Random) -> Batch:
    generator = np.random.default_rng(rng.randrange(2**32))
    ids = generator.integers(0, 11, (NUM_SAMPLES, LENGTH + 1)).astype(np.int32)
    labels = np.where(generator.random((NUM_SAMPLES, LENGTH)) < 0.2, IGNORE, ids[:, 1:]).astype(np.int32)
    mask = generator.uniform(0.5, 2.0, labels.shape).astype(np.float32)
    return Batch(np.ascontiguousarray(ids[:, :-1]), labels, mask, sample_ids=generator.permutation(NUM_SAMPLES))


def check_sizes(made: ShardedModelProgram) -> None:
    """Drops an example whose dims cannot be cut equally; every other fault is one."""
    try:
        check_model(made)
    except PlanError as error:
        faults = [line for line in str(error).split("\n") if "is no multiple of" not in line]
        assert not faults, faults
        assume(False)
    parts = {"batch": NUM_SAMPLES, "seq": LENGTH}
    for program in made.programs.values():
        for layout in program.layouts.values():
            for dim, size in parts.items():
                split = [axis for axis, state in layout.items() if state.dim == dim]
                chunks = np.prod([made.mesh.size(a) * (1 + (layout[a].order == "zigzag")) for a in split], dtype=int)
                assume(size % chunks == 0)


def assert_same(made: ShardedModelProgram, params: dict[str, Array], batch: Batch) -> None:
    loss, grads = ReferenceModel(made.model, params).loss_and_grads([batch], DROPOUT)
    model = ShardedModel(made, params)
    got_loss, got = model.loss_and_grads([batch], DROPOUT)
    assert abs(got_loss - loss) <= bound("loss", "float64") * abs(loss)
    assert_same_grads(got, grads)
    phases = ("forward", "backward", "recompute")
    listed = [c for c in step_trace(Storage(made, 0), StepShape(NUM_SAMPLES, LENGTH)) if c.phase in phases]
    assert [(c.phase, c.kind, c.axes, c.elements) for c in listed] == [
        (c.phase, c.kind, c.axes, c.elements) for c in model.ranks.issued
    ]


def case(seed: int) -> tuple[Random, ModelProgram, Mesh, dict[str, Array]]:
    rng = Random(seed)
    model = random_model(rng)
    params = params_of(model)
    # the k-th and the next score of a token must not change places by rounding
    return rng, model, random_mesh(rng), params


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEEDS)
def test_typed_programs_are_the_same(seed: int) -> None:
    rng, model, mesh, params = case(seed)
    rules = [random_rule(rng, axis, claims=True) for axis in mesh.names]
    try:
        made = shard_model(model, mesh, rules)
    except PlanError as error:
        assert any(words in str(error) for words in ("cannot be split over", "needs", "split all of"))
        assume(False)
    check_sizes(made)
    assert_same(made, params, batch_of(rng))


def random_layout(seed: int) -> tuple[Random, ShardedModelProgram, dict[str, Array]]:
    rng, model, mesh, params = case(seed)
    rules = {axis: random_rule(rng, axis, claims=False) for axis in mesh.names}
    typed = {axis: random_states(rng, model, rule, mesh.size(axis)) for axis, rule in rules.items()}
    return rng, write_model(model, mesh, rules, typed), params


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEEDS)
def test_any_modes_are_the_same(seed: int) -> None:
    rng, made, params = random_layout(seed)
    check_sizes(made)
    assert_same(made, params, batch_of(rng))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEEDS)
def test_a_wrong_state_is_refused_or_is_no_mistake(seed: int) -> None:
    """One state of one op is changed, and the movements are written again around it."""
    rng, model, mesh, params = case(seed)
    rules = {axis: random_rule(rng, axis, claims=False) for axis in mesh.names}
    typed = {axis: random_states(rng, model, rule, mesh.size(axis)) for axis, rule in rules.items()}
    check_sizes(write_model(model, mesh, rules, typed))
    axis = rng.choice([a for a in mesh.names if mesh.size(a) > 1] or list(mesh.names))
    program = rng.choice(model.distinct)
    index = rng.randrange(len(program.ops)) if program.ops else 0
    assume(bool(program.ops))
    op, states = program.ops[index], typed[axis][program.name].ops[index]
    named = [i for i, name in enumerate((*op.inputs, *op.params)) if name is not None]
    position = rng.choice([*named, *(len(states.operands) + i for i in range(len(op.outputs)))])
    everything = [*states.operands, *states.outputs]
    others = [s for s in (INVARIANT, PARTIAL, REPLICATED, shard("batch")) if s != everything[position]]
    everything[position] = rng.choice(others)
    split = len(states.operands)
    changed = replace(states, operands=tuple(everything[:split]), outputs=tuple(s for s in everything[split:] if s))
    old = typed[axis][program.name]
    values = {**old.values, **dict(zip(op.outputs, changed.outputs, strict=True))}
    ops = (*old.ops[:index], changed, *old.ops[index + 1 :])
    typed[axis] = {**typed[axis], program.name: replace(old, ops=ops, values=values)}
    made = write_model(model, mesh, rules, typed)
    try:
        check_model(made)
    except PlanError as error:
        lines = str(error).split("\n")
        assert all(line.startswith(tuple(f"{p.name}: " for p in model.distinct)) for line in lines)
        return
    check_sizes(made)
    assert_same(made, params, batch_of(rng))
