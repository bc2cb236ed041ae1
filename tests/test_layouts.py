"""Steps between layouts of several axes: they arrive, they keep the value, and their duals are their adjoints."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_cases import Array

from duomesh.core.bounds import bound
from duomesh.core.ir.values import Axis
from duomesh.core.sharding.layouts import Extents, Layout, backward_steps, dual_layout, steps
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, Action, Kind, State, shard
from duomesh.kernels.reference.ranks import Local, Ranks

NAMES = ("batch", "seq")
SHAPE = (24, 48)  # twice what three axes of up to 4, 3 and 2 cut
STATES = [INVARIANT, PARTIAL, REPLICATED, shard("batch"), shard("seq"), shard("seq", "zigzag")]
sizes = st.sampled_from([(2,), (4,), (2, 3), (3, 2), (2, 2, 3), (4, 1, 2), (1, 3, 2)])


def ranks_of(mesh: Mesh) -> Ranks:
    return Ranks(Extents(mesh, 1, 1, {}))


def made_in(layout: Layout, ranks: Ranks, rng: np.random.Generator) -> Local:
    """Random arrays of ranks in a layout: equal, sliced, or summands."""
    mesh = ranks.mesh
    partial = [axis for axis in mesh.names if layout[axis] == PARTIAL]
    sliced = {axis: INVARIANT if layout[axis] == PARTIAL else layout[axis] for axis in mesh.names}
    local: Local = [np.zeros(0)] * mesh.world_size
    for place in product(*(range(mesh.size(axis)) for axis in partial)):
        spread = ranks.spread(rng.normal(size=SHAPE), NAMES, sliced)
        for rank, coordinate in enumerate(mesh.coordinates()):
            if tuple(coordinate[mesh.index(axis)] for axis in partial) == place:
                local[rank] = spread[rank]
    return local


def pairing(cotangent: Local, value: Local, layout: Layout, mesh: Mesh) -> float:
    """<cotangent, value>: ranks of an invariant axis hold the same product, of every other axis a summand of it."""
    total = 0.0
    for rank, coordinate in enumerate(mesh.coordinates()):
        if all(place == 0 or layout[a] != INVARIANT for a, place in zip(mesh.names, coordinate, strict=True)):
            total += float(np.sum(cotangent[rank] * value[rank]))
    return total


@settings(max_examples=400, deadline=None)
@given(sizes, st.data())
def test_steps_arrive_keep_the_value_and_have_adjoint_duals(shape: tuple[int, ...], data: st.DataObject) -> None:
    mesh = Mesh.of(**{f"a{i}": size for i, size in enumerate(shape)})
    before, after = ({a: data.draw(st.sampled_from(STATES)) for a in mesh.names} for _ in range(2))
    path = steps(mesh, before, after)
    ranks, rng = ranks_of(mesh), np.random.default_rng(data.draw(st.integers(0, 99)))
    value = made_in(before, ranks, rng)
    moved = ranks.move(value, NAMES, SHAPE, before, path, "forward")
    reached = dict(before)
    for step in path:
        reached = step.apply(reached)
    assert all(reached[a] == after[a] for a in mesh.names if mesh.size(a) > 1)
    want, got = (ranks.whole(x, NAMES, SHAPE, layout) for x, layout in ((value, before), (moved, after)))
    assert np.max(np.abs(want - got)) <= bound("value", "float64") * np.max(np.abs(want))

    cotangent = made_in(dual_layout(after), ranks, rng)
    back = ranks.move(cotangent, NAMES, SHAPE, dual_layout(after), backward_steps(path), "backward")
    ahead, behind = pairing(cotangent, moved, after, mesh), pairing(back, value, before, mesh)
    assert abs(ahead - behind) <= bound("value", "float64") * prod(SHAPE) * mesh.world_size


@settings(max_examples=200, deadline=None)
@given(sizes, st.data())
def test_listed_buffers_are_those_that_move(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Padding included: 21 columns are padded to what the axes cut them into."""
    mesh = Mesh.of(**{f"a{i}": size for i, size in enumerate(shape)})
    choice = st.sampled_from([INVARIANT, PARTIAL, REPLICATED, shard("batch"), shard("vocab")])
    before = {
        a: data.draw(st.sampled_from([INVARIANT, REPLICATED, shard("batch"), shard("vocab")])) for a in mesh.names
    }
    after = {a: data.draw(choice) for a in mesh.names}
    extents = Extents(mesh, 24, 1, {"vocab": mesh.world_size})
    ranks = Ranks(extents)
    axes = (Axis("batch"), Axis("vocab", 21))
    names, whole = ("batch", "vocab"), np.ones((24, 21))
    path = steps(mesh, before, after)
    local = ranks.spread(whole, names, before)
    ranks.move(local, names, whole.shape, before, path, "forward")
    listed = [(step.action.value, step.axes, elements) for step, elements in extents.moves(axes, before, path)]
    assert listed == [(c.kind, c.axes, c.elements) for c in ranks.issued]


CASES: list[tuple[str, dict[str, State], dict[str, State], list[tuple[str, str]]]] = [
    ("one gather over both", {"a": shard("seq"), "b": shard("seq")}, {"a": REPLICATED, "b": REPLICATED},
     [("a+b", "all-gather")]),
    ("one scatter over both", {"a": PARTIAL, "b": PARTIAL}, {"a": shard("seq"), "b": shard("seq")},
     [("a+b", "reduce-scatter")]),
    ("one exchange over both", {"a": shard("seq"), "b": shard("seq")}, {"a": shard("batch"), "b": shard("batch")},
     [("a+b", "all-to-all")]),
    ("the minor end leaves first", {"a": shard("seq"), "b": shard("seq")}, {"a": shard("batch"), "b": REPLICATED},
     [("b", "all-gather"), ("a", "all-to-all")]),
    ("the major end comes first", {"a": PARTIAL, "b": shard("batch")}, {"a": shard("seq"), "b": shard("seq")},
     [("a", "reduce-scatter"), ("b", "all-to-all")]),
    ("a minor axis that is there already makes way", {"a": PARTIAL, "b": shard("seq")},
     {"a": shard("seq"), "b": shard("seq")}, [("b", "all-gather"), ("a", "reduce-scatter"), ("b", "slice")]),
    ("a minor axis waits for the major one", {"a": shard("batch"), "b": PARTIAL},
     {"a": shard("seq"), "b": shard("seq")}, [("a", "all-to-all"), ("b", "reduce-scatter")]),
    ("what shrinks goes first", {"a": shard("batch"), "b": PARTIAL}, {"a": INVARIANT, "b": shard("seq")},
     [("b", "reduce-scatter"), ("a", "all-gather")]),
    ("an exchange of two dims goes by way of a whole one", {"a": shard("batch"), "b": shard("seq")},
     {"a": shard("seq"), "b": shard("batch")},
     [("b", "all-gather"), ("a", "all-to-all"), ("b", "slice")]),
    ("another order of positions is an exchange", {"a": shard("seq", "zigzag"), "b": REPLICATED},
     {"a": shard("seq"), "b": REPLICATED}, [("a", "all-to-all")]),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_order_of_steps(before: Layout, after: Layout, expected: list[tuple[str, str]]) -> None:
    path = steps(Mesh.of(a=2, b=2), before, after)
    assert [("+".join(step.axes), step.action.value) for step in path] == expected


def test_axes_of_size_one_take_no_step() -> None:
    mesh = Mesh.of(a=1, b=2)
    path = steps(mesh, {"a": PARTIAL, "b": shard("seq")}, {"a": INVARIANT, "b": REPLICATED})
    assert [(step.axes, step.action) for step in path] == [(("b",), Action.ALL_GATHER)]


def test_zigzag_gives_every_rank_an_early_and_a_late_part() -> None:
    ranks = ranks_of(Mesh.of(cp=3))
    places = ranks.spread(np.arange(12), ("seq",), {"cp": shard("seq", "zigzag")})
    assert [list(p) for p in places] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    # a minor axis cuts what the major one has given
    both = ranks_of(Mesh.of(cp=3, tp=2)).spread(
        np.arange(12), ("seq",), {"cp": shard("seq", "zigzag"), "tp": shard("seq")}
    )
    assert [list(p) for p in both] == [[0, 1], [10, 11], [2, 3], [8, 9], [4, 5], [6, 7]]


def test_padding_is_zero_and_goes_with_the_last_join() -> None:
    mesh = Mesh.of(tp=2, copies=2)
    ranks = Ranks(Extents(mesh, 1, 1, {"vocab": 4}))
    whole: Array = np.arange(1.0, 6.0)
    split, half = {"tp": shard("vocab"), "copies": shard("vocab")}, {"tp": shard("vocab"), "copies": REPLICATED}
    local = ranks.spread(whole, ("vocab",), split)
    assert [list(x) for x in local] == [[1, 2], [3, 4], [5, 0], [0, 0]]
    joined = ranks.move(local, ("vocab",), (5,), split, steps(mesh, split, half), "forward")
    assert [list(x) for x in joined] == [[1, 2, 3, 4]] * 2 + [[5, 0, 0, 0]] * 2
    assert all(state.kind is Kind.SHARD for state in split.values())
    assert np.array_equal(ranks.whole(joined, ("vocab",), (5,), half), whole)
