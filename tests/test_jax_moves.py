"""Movements on simulated devices: as the ranks of the reference move, in both directions, with the listed collectives.

Arrays hold small whole numbers, so that sums are exact in any order and equality is of bits.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from random import Random

import jax
import numpy as np
import pytest
from jax_mesh import asked, expected, run_on

from duomesh.backends.jax.moves import Move, reshard
from duomesh.core.errors import BackendError
from duomesh.core.ir.program import Program
from duomesh.core.ir.values import Axis, Value
from duomesh.core.sharding.layouts import Extents, Layout, backward_steps, dual_layout, steps
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.program import Reshard, ShardedProgram
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, Action, Kind, State, shard
from duomesh.kernels.reference.ranks import Local, Ranks

AXES = (Axis("batch"), Axis("vocab", 21), Axis("embed", 16))  # the vocabulary is padded where it is split
NAMES, SHAPE = tuple(axis.name for axis in AXES), (8, 21, 16)
STATES = [INVARIANT, PARTIAL, REPLICATED, *(shard(name) for name in NAMES)]
MESHES = [(2,), (8,), (2, 4), (4, 1, 2), (2, 2, 2)]


def extents_of(mesh: Mesh) -> Extents:
    return Extents(mesh, SHAPE[0], 1, {"vocab": mesh.world_size})


def moved_by(mesh: Mesh, before: Layout, after: Layout, *, is_differentiated: bool = True) -> tuple[Move, Reshard]:
    ahead = steps(mesh, before, after)
    made = Reshard("x", "x@1", ahead, backward_steps(ahead) if is_differentiated else ())
    value = Value("x", AXES)
    program = Program("p", (value,), (), (), (), (), {"x": value})
    return Move.of(ShardedProgram(program, (made,), {"x": before, "x@1": after}, ()), made, extents_of(mesh)), made


def made_in(layout: Layout, ranks: Ranks, rng: np.random.Generator) -> Local:
    """Random whole numbers in a layout: equal, sliced, or summands."""
    mesh = ranks.mesh
    partial_axes = [mesh.index(axis) for axis in mesh.names if layout[axis] == PARTIAL]
    sliced = {axis: INVARIANT if layout[axis] == PARTIAL else layout[axis] for axis in mesh.names}
    summands = {
        place: ranks.spread(rng.integers(-9, 10, SHAPE).astype(np.float64), NAMES, sliced)
        for place in product(*(range(mesh.axes[i].size) for i in partial_axes))
    }
    return [
        summands[tuple(coordinate[i] for i in partial_axes)][rank] for rank, coordinate in enumerate(mesh.coordinates())
    ]


def pairs_of(mesh: Mesh, count: int = 32) -> list[tuple[Layout, Layout]]:
    """Every pair of layouts of one axis; of more, random ones, many with axes that move alike."""
    if len(mesh.names) == 1:
        return [({"a0": before}, {"a0": after}) for before, after in product(STATES, repeat=2)]
    rng = Random(7)

    def layout() -> Layout:
        states = rng.choices(STATES, k=2)
        return {axis: rng.choice(states) for axis in mesh.names}

    return [(layout(), layout()) for _ in range(count)]


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_values_arrive_and_cotangents_go_back_as_the_reference_moves_them(sizes: tuple[int, ...]) -> None:
    mesh = Mesh.of(**{f"a{i}": size for i, size in enumerate(sizes)})
    ranks, rng, extents = Ranks(extents_of(mesh)), np.random.default_rng(3), extents_of(mesh)
    pairs = pairs_of(mesh)
    moves, operands, want, listed = [], [], [], []
    for before, after in pairs:
        move, made = moved_by(mesh, before, after)
        value, cotangent = made_in(before, ranks, rng), made_in(dual_layout(after), ranks, rng)
        moves.append(move)
        operands += [value, cotangent]
        for local, layout, path in ((value, before, made.ahead), (cotangent, dual_layout(after), made.back)):
            want.append(ranks.move(local, NAMES, SHAPE, layout, path, ""))
            listed += [
                expected(mesh, step.action.value, step.axes, "f64", elements)
                for step, elements in extents.moves(AXES, layout, path)
            ]

    def function(*local: jax.Array) -> tuple[jax.Array, ...]:
        out = []
        for i, move in enumerate(moves):
            made, pull = jax.vjp(partial(reshard, move=move), local[2 * i])
            out += [made, *pull(local[2 * i + 1])]
        return tuple(out)

    with jax.enable_x64(True):
        got, traced = run_on(mesh, function, *operands)
    for i, (before, after) in enumerate(pairs):
        for what, at in (("value", 2 * i), ("cotangent", 2 * i + 1)):
            shown = f"{what} of {list(map(str, before.values()))} -> {list(map(str, after.values()))}"
            for rank in range(mesh.world_size):
                assert np.array_equal(got[at][rank], want[at][rank]), f"{shown} on rank {rank}"
    assert asked(mesh, traced) == listed


def test_the_meshes_have_every_action_over_one_axis_and_over_several() -> None:
    """What the test above can see."""
    meshes = [Mesh.of(**{f"a{i}": size for i, size in enumerate(sizes)}) for sizes in MESHES]
    seen = {(step.action, len(step.axes) > 1) for m in meshes for pair in pairs_of(m) for step in steps(m, *pair)}
    assert seen == set(product(Action, (False, True)))


def undifferentiated(mesh: Mesh) -> tuple[Move, Local, Local]:
    """A gather of a value without a cotangent, the value and what comes of it."""
    before, after = {"a0": shard("batch"), "a1": shard("embed")}, {"a0": REPLICATED, "a1": REPLICATED}
    move, made = moved_by(mesh, before, after, is_differentiated=False)
    assert move.ahead and not move.back
    ranks = Ranks(extents_of(mesh))
    value = made_in(before, ranks, np.random.default_rng(4))
    return move, value, ranks.move(value, NAMES, SHAPE, before, made.ahead, "")


def test_ids_move_without_a_cotangent() -> None:
    """While a gradient is taken of a weight that meets them."""
    mesh = Mesh.of(a0=2, a1=2)
    move, value, want = undifferentiated(mesh)

    def function(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        made, pull = jax.vjp(lambda w: reshard(x, move) * w, w)
        return reshard(x, move), *pull(made)

    weight = [np.ones((), np.float32)] * mesh.world_size
    (got, d_weight), _ = run_on(mesh, function, [x.astype(np.int32) for x in value], weight)
    assert got[0].dtype == np.int32
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(d == np.square(whole).sum() for d, whole in zip(d_weight, want, strict=True))


def test_what_is_not_differentiated_issues_nothing_in_backward() -> None:
    """Masks and tables, even if a gradient is asked for: it is zero, and not what JAX would make of a gather."""
    mesh = Mesh.of(a0=2, a1=2)
    move, value, want = undifferentiated(mesh)

    def function(x: jax.Array) -> tuple[jax.Array, ...]:
        made, pull = jax.vjp(partial(reshard, move=move), x)
        return made, *pull(made)

    (got, d_x), traced = run_on(mesh, function, [x.astype(np.float32) for x in value])
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert not np.any(d_x)
    assert [c.kind for c in asked(mesh, traced)] == ["all-gather"] * len(move.ahead)


def test_a_move_is_static_data() -> None:
    """Equal moves are one entry of JAX's caches."""
    mesh = Mesh.of(a0=2)
    made = [moved_by(mesh, {"a0": PARTIAL}, {"a0": shard("vocab")})[0] for _ in range(2)]
    assert made[0] == made[1] and hash(made[0]) == hash(made[1])
    assert made[0] != moved_by(mesh, {"a0": PARTIAL}, {"a0": shard("batch")})[0]


@pytest.mark.parametrize("before", [shard("batch", "zigzag"), REPLICATED])
def test_zigzag_order_is_refused_by_name(before: State) -> None:
    after = REPLICATED if before.kind is Kind.SHARD else shard("batch", "zigzag")
    with pytest.raises(BackendError, match=r"S\(batch, zigzag\).*cp"):
        moved_by(Mesh.of(cp=2), {"cp": before}, {"cp": after})
