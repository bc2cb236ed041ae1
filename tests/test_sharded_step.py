"""Training steps on simulated meshes against one rank: sums of gradients, the global norm, AdamW, every ZeRO level."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from adamw import adamw_steps
from sharding_cases import SPECS, Array, batches, one_rank, sharded

from duomesh.core.bounds import bound
from duomesh.core.ir.build import build_program
from duomesh.core.session import AdamW
from duomesh.core.sharding.collectives import StepShape, step_collectives, step_trace
from duomesh.core.sharding.listing import list_layout
from duomesh.core.sharding.storage import Storage
from duomesh.core.verify.compare import relative_error
from duomesh.kernels.reference.model import ReferenceModel
from duomesh.kernels.reference.sharded_step import ShardedTraining

CONFIG = AdamW(max_grad_norm=0.25)
LR, STEPS = 0.01, 3
# (model, mesh, stages); cut after the first layer where there are stages
CASES: list[tuple[str, str, list[int] | None]] = [
    ("everything", "one", None),
    ("everything", "dp2", None),
    ("everything", "sp2", None),
    ("everything", "dp2-sp2", None),
    ("everything", "zigzag3", None),  # buckets are padded
    ("everything", "dp2-zigzag2-sp2", None),
    ("everything", "dp2-sp2-copies3", None),
    ("everything", "replicas2-dp2-tp2", None),
    ("everything", "dp2", [0, 0, 0, 1, 1, 1]),  # where the tie is summed over the axes of its neighbours
    ("everything", "dp2-sp2", [0, 0, 0, 1, 1, 1]),
    ("plain", "tp2-copies3", [0, 0, 0, 1, 1, 1]),
    ("shared", "ep of dp", None),
    ("shared", "edp and ep of dp", None),
    ("shared", "edp of dp, ep of sp", None),
    ("shared", "ep of dp, etp of sp", None),
    ("plain_experts", "edp of dp, ep of zigzag, etp of sp", None),
]


@lru_cache
def one_rank_steps(name: str) -> tuple[dict[str, Array], list[tuple[float, float]]]:
    """Parameters after three steps, and (loss, norm) of each."""
    program, data = build_program(SPECS[name]), batches(SPECS[name].vocab_size)

    def pull(params: dict[str, Array], step: int) -> tuple[float, dict[str, Array]]:
        return ReferenceModel(program, params).loss_and_grads(data)

    return adamw_steps(program, one_rank(name)[0], pull, CONFIG, LR, STEPS)


def trained(
    name: str, mesh: str, stages: list[int] | None, zero: int
) -> tuple[ShardedTraining, list[tuple[float, float]]]:
    made = ShardedTraining(Storage(sharded(name, mesh, stages), zero), one_rank(name)[0], CONFIG)
    return made, [made.step(batches(SPECS[name].vocab_size), LR) for _ in range(STEPS)]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("name", "mesh", "stages"), CASES, ids=lambda value: str(value).replace(" ", "_"))
def test_three_steps_are_those_of_one_rank(name: str, mesh: str, stages: list[int] | None, zero: int) -> None:
    """Losses, global norms and parameters; and the collectives of a step, in order, are those that were issued."""
    want, history = one_rank_steps(name)
    made, got = trained(name, mesh, stages, zero)
    for (loss, norm), (got_loss, got_norm) in zip(history, got, strict=True):
        assert norm > (CONFIG.max_grad_norm or 0.0)  # clipping acts
        assert abs(got_loss - loss) <= bound("loss", "float64") * abs(loss)
        assert abs(got_norm - norm) <= bound("global_norm", "float64") * norm
    params = made.whole_params()
    assert set(params) == set(want)
    for parameter, array in want.items():
        assert relative_error(array, params[parameter])[0] <= bound("updated_parameter", "float64"), parameter
    listed = [(c.phase, c.kind, c.axes, c.elements) for c in step_trace(made.storage, StepShape(4, 12, 2))]
    assert listed * STEPS == [(c.phase, c.kind, c.axes, c.elements) for c in made.ranks.issued]


def test_an_owned_range_is_what_the_rank_holds() -> None:
    """`slices` maps every rank's range back to elements of parameters: together they are each element once."""
    for zero, mesh in ((1, "dp4"), (1, "cp3"), (3, "dp2-sp2"), (2, "replicas2-dp2-tp2")):
        storage = Storage(sharded("everything", mesh), zero)
        for bucket in storage.buckets:
            assert bucket.size % bucket.parts == 0
            seen = {member.name: np.zeros(member.size, int) for member in bucket.members}
            for part in range(bucket.parts):
                flat = bucket.flat(part)
                for member, start, stop in bucket.slices(part):
                    assert flat.start <= member.start + start < member.start + stop <= flat.stop
                    seen[member.name][start:stop] += 1
            assert all((count == 1).all() for count in seen.values()), bucket.name


def test_state_that_a_rank_holds() -> None:
    """ZeRO shares what the table of `core.sharding.storage` says, among the ranks of its axes only."""
    for mesh, parts in (("dp4", 4), ("replicas2-dp2-tp2", 2), ("dp2-zigzag2-sp2", 4)):
        storage = Storage(sharded("everything", mesh), 1)
        assert {bucket.parts for bucket in storage.buckets if bucket.shared} == {parts}
        made = ShardedTraining(storage, one_rank("everything")[0], CONFIG)
        for bucket in storage.buckets:
            assert made.owned[bucket.name][0].size == bucket.size // bucket.parts
    assert {bucket.parts for bucket in Storage(sharded("everything", "dp4"), 0).buckets} == {1}


def test_experts_are_shared_among_their_own_replicas() -> None:
    storage = Storage(sharded("shared", "edp and ep of dp"), 1)
    assert storage.by_param["layers.0.moe.up.weight", 0].shared == ("edp",)
    assert storage.by_param["layers.0.attention.q.weight", 0].shared == ("edp", "dp")


def test_every_element_counts_once_in_the_global_norm() -> None:
    """Over all ranks and buckets, each element of each parameter counts exactly once for every place on the axes that
    the norm does not sum over."""
    for name, mesh, stages in CASES:
        for zero in (0, 1):
            storage = Storage(sharded(name, mesh, stages), zero)
            mesh_, counted = storage.sharded.mesh, dict.fromkeys(storage.sharded.model.params, 0)
            for place in mesh_.coordinates():
                coordinate = dict(zip(mesh_.names, place, strict=True))
                if any(coordinate[axis] for axis in mesh_.names if axis not in storage.norm_axes):
                    continue
                for bucket in storage.buckets:
                    part = 0
                    for axis in bucket.shared:
                        part = part * mesh_.size(axis) + coordinate[axis]
                    for member, start, stop in bucket.slices(part):
                        counted[member.name] += (stop - start) * storage.counts(bucket, member, coordinate)
            for parameter, elements in counted.items():
                size = storage.sharded.model.params[parameter].size
                padding = 37 if parameter in ("embed.weight", "head.weight") else size
                assert size <= elements < size + padding * SPECS[name].hidden_size, (name, mesh, zero, parameter)


def test_which_phase_moves_what() -> None:
    """What each level of ZeRO adds: where gradients are scattered, where weights are gathered, and how often."""

    def phases(zero: int) -> set[tuple[str, str, bool]]:
        """(phase, kind, whether it happens for every micro-batch)."""
        storage = Storage(sharded("plain", "dp2"), zero)
        one, two = (step_collectives(storage, StepShape(4, 12, n)) for n in (1, 2))
        return {(a.phase, a.kind, b.count > a.count) for a, b in zip(one, two, strict=True) if "bucket" in a.op}

    assert phases(0) == {("sync", "all-reduce", False)}
    assert phases(1) == {("sync", "reduce-scatter", False), ("optimizer", "all-gather", False)}
    assert phases(2) == {("sync", "reduce-scatter", True), ("optimizer", "all-gather", False)}
    assert phases(3) == {
        ("forward", "all-gather", True),
        ("recompute", "all-gather", True),
        ("backward", "reduce-scatter", True),
    }
    # a look-up's backward does not read its table
    trace = [c for c in step_trace(Storage(sharded("plain", "dp2"), 3), StepShape(4, 12)) if "bucket" in c.op]
    gathered, again = ({c.op for c in trace if c.phase == phase} for phase in ("forward", "recompute"))
    assert gathered - again == {"embed.bucket0"} and again < gathered


def test_one_step_of_the_model_is_gathered_at_once() -> None:
    """Under ZeRO-3 a rank holds its half of all weights, and all of the largest step, a layer: q and o, k and v, gate,
    up and down, two norms."""
    storage = Storage(sharded("plain", "dp2"), 3)
    held = list_layout(storage, StepShape(4, 12), compute="float32").per_rank
    layer = 20 * (2 * 48 + 2 * 16 + 3 * 36 + 2)
    assert held["parameters gathered at once"] == 4 * layer
    assert held["parameters"] == 4 * (2 * layer + 20 * (37 + 37 + 1)) // 2


def test_a_released_weight_cannot_be_used() -> None:
    """Under ZeRO-3 a weight that was not gathered is NaN, in the loss at once."""
    made = ShardedTraining(Storage(sharded("plain", "dp2"), 3), one_rank("plain")[0], CONFIG)
    made._gather = lambda *arguments: None  # type: ignore[method-assign]
    assert all(np.isnan(loss) for loss in made.run(batches(37)[0])[-1].values["loss_sum"])


def test_one_sum_for_a_step_however_it_is_cut() -> None:
    """Without ZeRO-2 and 3 gradients of all micro-batches are summed over ranks once."""
    storage = Storage(sharded("plain", "dp2-sp2"), 0)
    one, three = (list(step_trace(storage, StepShape(4, 12, n))) for n in (1, 3))
    assert [c for c in one if c.phase == "sync"] == [c for c in three if c.phase == "sync"]
    assert [replace(c, count=1) for c in one if c.phase == "norm"] == [c for c in three if c.phase == "norm"]
