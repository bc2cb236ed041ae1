"""Mesh, atoms and transitions: the backward of every transition is the adjoint of its forward."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duomesh.core.bounds import bound
from duomesh.core.errors import PlanError
from duomesh.core.sharding import simulate, transitions
from duomesh.core.sharding.mesh import Mesh, MeshAxis, atoms
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, Action, Kind, State, shard

Array = npt.NDArray[np.float64]
STATES = (shard(0), shard(1), INVARIANT, PARTIAL, REPLICATED)
PAIRS = list(product(STATES, STATES))
by_pair = pytest.mark.parametrize(("before", "after"), PAIRS, ids=str)

# The table of docs/design.md, written out: (forward, backward).
TABLE = {
    "S(0) -> R": ("all-gather", "reduce-scatter"),
    "S(0) -> I": ("all-gather", "slice"),
    "S(0) -> S(1)": ("all-to-all", "all-to-all"),
    "S(0) -> P": ("pad with zeros", "slice"),
    "I -> R": ("nothing", "all-reduce"),
    "I -> S(0)": ("slice", "all-gather"),
    "I -> P": ("keep on coordinate 0, zero elsewhere", "nothing"),
    "P -> I": ("all-reduce", "nothing"),
    "P -> R": ("all-reduce", "all-reduce"),
    "P -> S(0)": ("reduce-scatter", "all-gather"),
    "R -> S(0)": ("slice", "pad with zeros"),
    "R -> I": ("nothing", "keep on coordinate 0, zero elsewhere"),
    "R -> P": ("keep on coordinate 0, zero elsewhere", "keep on coordinate 0, zero elsewhere"),
}


def random_local(rng: np.random.Generator, state: State, size: int) -> list[Array]:
    """Arrays that a value [6 size, 4 size] may have on the ranks of an axis in this state."""
    shape = [6 * size, 4 * size]
    if state.kind is Kind.SHARD:
        shape[state.dim or 0] //= size
    if state.kind in (Kind.SHARD, Kind.PARTIAL):
        return [rng.standard_normal(shape) for _ in range(size)]
    return [rng.standard_normal(shape)] * size


def test_the_table_is_the_one_that_the_design_states() -> None:
    states = {str(state): state for state in STATES}
    for row, (ahead, back) in TABLE.items():
        before, after = (states[name] for name in row.split(" -> "))
        assert transitions.forward(before, after).value == ahead, row
        assert transitions.backward(before, after).value == back, row
    distinct = {(a.kind, b.kind) for a, b in PAIRS if a != b}
    assert len(TABLE) == len(distinct) == 13


def test_duals() -> None:
    assert [transitions.dual(state) for state in STATES] == [shard(0), shard(1), INVARIANT, REPLICATED, PARTIAL]
    assert all(transitions.dual(transitions.dual(state)) == state for state in STATES)


@by_pair
@given(size=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_a_transition_keeps_the_value(before: State, after: State, size: int, seed: int) -> None:
    local = random_local(np.random.default_rng(seed), before, size)
    moved = simulate.reshard(local, before, after)
    want = simulate.meaning(local, before)
    assert np.abs(simulate.meaning(moved, after) - want).max() <= bound("value", "float64") * np.abs(want).max()


@by_pair
@given(size=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_the_backward_is_the_adjoint(before: State, after: State, size: int, seed: int) -> None:
    """<c, F v> after the transition is <B c, v> before it, for every value and cotangent that the states allow."""
    rng = np.random.default_rng(seed)
    value = random_local(rng, before, size)
    cotangent = random_local(rng, transitions.dual(after), size)
    ahead = simulate.pairing(cotangent, simulate.reshard(value, before, after), after)
    pulled = simulate.reshard_backward(cotangent, before, after)
    simulate.meaning(pulled, transitions.dual(before))  # equal where the dual state says so
    scale = sum(float(np.abs(c).sum()) for c in cotangent)
    assert abs(ahead - simulate.pairing(pulled, value, before)) <= bound("value", "float64") * scale


def test_only_four_actions_move_data() -> None:
    moving = {action for action in Action if action.is_collective}
    assert {action.value for action in moving} == {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}


def test_mesh_ranks_and_groups() -> None:
    mesh = Mesh.of(dp=2, cp=1, tp=3)
    assert mesh.world_size == 6 and mesh.size("tp") == 3
    assert [mesh.rank(c) for c in mesh.coordinates()] == list(range(6))
    assert mesh.groups("tp") == [[0, 1, 2], [3, 4, 5]]
    assert mesh.groups("dp") == [[0, 3], [1, 4], [2, 5]]
    assert mesh.groups("cp") == [[r] for r in range(6)]
    with pytest.raises(PlanError, match="no axis 'ep'; its axes are dp, cp, tp"):
        mesh.size("ep")
    with pytest.raises(PlanError, match="axis tp occurs twice"):
        Mesh((MeshAxis("tp", 2), MeshAxis("tp", 2)))
    with pytest.raises(PlanError, match="axis tp has size 0"):
        Mesh.of(tp=0)


def view(**sizes: int) -> tuple[MeshAxis, ...]:
    return tuple(MeshAxis(name, size) for name, size in sizes.items())


@pytest.mark.parametrize(
    ("dense", "expert", "sizes", "members"),
    [
        # C160: tp 4 x dp 2 beside experts over all 8 ranks, and over 4 with 2 expert data ranks
        (view(dp=2, tp=4), view(edp=1, ep=8, etp=1), [2, 4], {"dp": 1, "tp": 1, "edp": 0, "ep": 2, "etp": 0}),
        (view(dp=2, tp=4), view(edp=2, ep=4, etp=1), [2, 4], {"dp": 1, "tp": 1, "edp": 1, "ep": 1, "etp": 0}),
        (view(dp=4, tp=2), view(edp=1, ep=2, etp=4), [2, 2, 2], {"dp": 2, "tp": 1, "edp": 0, "ep": 1, "etp": 2}),
        (view(dp=6), view(edp=3, ep=2), [3, 2], {"dp": 2, "edp": 1, "ep": 1}),
    ],
)
def test_c160_two_views_have_common_atoms(
    dense: tuple[MeshAxis, ...], expert: tuple[MeshAxis, ...], sizes: list[int], members: dict[str, int]
) -> None:
    made, merged = atoms(dense, expert)
    assert [atom.size for atom in made] == sizes
    assert {name: len(names) for name, names in merged.items()} == members
    by_name = {atom.name: atom.size for atom in made}
    assert len(by_name) == len(made)
    for axis in (*dense, *expert):
        assert prod(by_name[name] for name in merged[axis.name]) == axis.size


def test_views_without_common_atoms_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"dp=3,tp=2 and edp=2,ep=3 cut the ranks at 2 and at 3"):
        atoms(view(dp=3, tp=2), view(edp=2, ep=3))
    with pytest.raises(PlanError, match=r"dp=2,tp=2 is 4 ranks, edp=3,ep=2 is 6"):
        atoms(view(dp=2, tp=2), view(edp=3, ep=2))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_atoms_refine_both_views(first: list[int], second: list[int]) -> None:
    """Where they exist, atoms give every rank the coordinates that each view gives it."""
    views = [
        tuple(MeshAxis(f"{letter}{i}", n) for i, n in enumerate(sizes))
        for letter, sizes in zip("ab", (first, second), strict=True)
    ]
    try:
        made, merged = atoms(*views)
    except PlanError:
        return
    fine = Mesh(made)
    for axes in views:
        coarse = Mesh(axes)
        for rank, coordinate in enumerate(fine.coordinates()):
            place = dict(zip(fine.names, coordinate, strict=True))
            folded = []
            for axis in axes:
                position = 0
                for name in merged[axis.name]:
                    position = position * fine.size(name) + place[name]
                folded.append(position)
            assert coarse.rank(folded) == rank
