"""Ops on parts of a dim, on simulated devices: as the whole op in numpy, with the collectives that their kinds declare.

Vocabularies of 37 are padded, and one of 9 leaves three of eight devices nothing but padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from jax_mesh import Asked, asked, equal_on, expected, run_on

from duomesh.backends.jax.moves import Move
from duomesh.backends.jax.ops import Split, gathered_linear, norm, split_cross_entropy, split_embedding, split_norm
from duomesh.core.batch import IGNORE
from duomesh.core.bounds import bound
from duomesh.core.ir.ops import KINDS
from duomesh.core.ir.program import Program
from duomesh.core.ir.values import Axis, Value
from duomesh.core.sharding.layouts import Extents, backward_steps, steps
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.program import Reshard, ShardedProgram
from duomesh.core.sharding.transitions import INVARIANT, REPLICATED, State, shard
from duomesh.core.verify.compare import relative_error
from duomesh.kernels.reference import ADJOINTS, OPS
from duomesh.kernels.reference.ranks import Local, Ranks

Array = npt.NDArray[Any]
B, S, H = 3, 8, 6
MESHES = {
    "one axis": (Mesh.of(tp=2), ("tp",)),
    "eight": (Mesh.of(tp=8), ("tp",)),
    "beside another": (Mesh.of(dp=2, tp=4), ("tp",)),
    "the slower one": (Mesh.of(tp=4, dp=2), ("tp",)),
    "two axes": (Mesh.of(tp=2, dp=2, copies=2), ("tp", "copies")),
}
by_mesh = pytest.mark.parametrize(("mesh", "axes"), MESHES.values(), ids=MESHES)
by_vocab = pytest.mark.parametrize("vocab", [37, 40, 9])


class Parts:
    """A dim of an array cut over some axes of a mesh, and joined again."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.mesh, self.split = mesh, {a: shard("cut") if a in axes else INVARIANT for a in mesh.names}
        self.ranks = Ranks(Extents(mesh, 1, 1, {"cut": mesh.world_size}))

    def cut(self, whole: Array, dim: int) -> Local:
        return self.ranks.spread(whole, self._names(whole, dim), self.split)

    def joined(self, local: Local, dim: int, size: int) -> Array:
        """Devices that hold the same part are checked to; what is beyond the size must be zero."""
        sizes = [size if d == dim else n for d, n in enumerate(local[0].shape)]
        return self.ranks.whole(local, self._names(local[0], dim), sizes, self.split)

    def summed(self, local: Local, axes: tuple[str, ...]) -> Local:
        return self.ranks.reduce(axes, local, lambda group: np.sum(group, axis=0), None)

    @staticmethod
    def _names(array: Array, dim: int) -> tuple[str, ...]:
        return tuple("cut" if d == dim else f"d{d}" for d in range(array.ndim))


def pulled(function: Callable[..., Any], count: int) -> Callable[..., tuple[Any, ...]]:
    """Of `count` operands and then cotangents: the function's results and the operands' cotangents, all in a row."""

    def both(*arrays: Any) -> tuple[Any, ...]:
        made, pull = jax.vjp(lambda *operands: jax.tree.leaves(function(*operands)), *arrays[:count])
        return *made, *pull(list(arrays[count:]))

    return both


def own(mesh: Mesh, kind: str, axes: tuple[str, ...], dtype: str, elements: int) -> list[Asked]:
    """What the kind declares, forward and backward."""
    return [expected(mesh, "all-reduce", axes, dtype, elements) for _ in KINDS[kind].own]


def assert_within(got: Array, want: Array, quantity: Any = "gradient") -> None:
    assert got.shape == want.shape
    assert relative_error(want, got)[0] <= bound(quantity, "float64")


def assert_equal_on_all(local: Local) -> Array:
    assert all(np.array_equal(array, local[0]) for array in local)
    return local[0]


# Look-ups


@by_mesh
@by_vocab
def test_an_embedding_split_by_rows_is_the_sum_of_its_parts(mesh: Mesh, axes: tuple[str, ...], vocab: int) -> None:
    rng, parts = np.random.default_rng(1), Parts(mesh, axes)
    ids = rng.integers(0, vocab, (B, S)).astype(np.int32)
    ids[0, :3], ids[1, 0] = vocab - 1, 0
    weight, c = rng.standard_normal((vocab, H)), rng.standard_normal((B, S, H))
    function = pulled(partial(split_embedding, ids, split=Split(axes, vocab)), 1)
    with jax.enable_x64(True):
        (made, d_weight), traced = run_on(mesh, function, parts.cut(weight, 0), equal_on(mesh, c))
    assert np.array_equal(assert_equal_on_all(parts.summed(made, axes)), OPS["embedding"](ids, weight))
    assert_within(parts.joined(d_weight, 0, vocab), ADJOINTS["embedding"]((c,), (ids,), (weight,))[1])
    assert asked(mesh, traced) == []


def test_rows_that_occur_often_are_summed_in_the_wide_dtype() -> None:
    """1000 ones: in bf16 a sum of ones ends at 256."""
    mesh = Mesh.of(tp=2)
    weight = [np.zeros((2, 3), ml_dtypes.bfloat16)] * 2
    c = equal_on(mesh, np.ones((1, 1000, 3), ml_dtypes.bfloat16))
    ids = np.full((1, 1000), 2, np.int32)
    function = pulled(partial(split_embedding, ids, split=Split(("tp",), 4)), 1)
    (_, d_weight), _ = run_on(mesh, function, weight, c)
    assert d_weight[0].dtype == ml_dtypes.bfloat16 and not d_weight[0].any()
    assert np.array_equal(d_weight[1].astype(np.float32), [[1000.0] * 3, [0.0] * 3])


# Cross entropy


@by_mesh
@by_vocab
def test_cross_entropy_over_a_split_vocabulary(mesh: Mesh, axes: tuple[str, ...], vocab: int) -> None:
    rng, parts = np.random.default_rng(2), Parts(mesh, axes)
    logits = 3 * rng.standard_normal((B, S, vocab))
    logits[0, 1] += 800  # beyond what exp can take
    logits[0, 2, 0] += 60  # a whole softmax on one device
    labels = rng.integers(0, vocab, (B, S)).astype(np.int32)
    labels[0, :2], labels[1, 2:5] = vocab - 1, IGNORE
    c = rng.standard_normal((B, S))
    split = parts.cut(logits, 2)
    # what padding holds is in no softmax
    held = parts.cut(np.ones(vocab), 0)
    filled = [np.where(real > 0, z, 900.0) for z, real in zip(split, held, strict=True)]
    function = pulled(lambda z: split_cross_entropy(z, labels, split=Split(axes, vocab)), 1)
    with jax.enable_x64(True):
        (loss, d_logits), traced = run_on(mesh, function, filled, equal_on(mesh, c))
    want = OPS["cross_entropy"](logits, labels)
    assert_within(assert_equal_on_all(loss), want, "loss")
    assert np.array_equal(loss[0] == 0, labels == IGNORE)
    assert_within(parts.joined(d_logits, 2, vocab), ADJOINTS["cross_entropy"]((c,), (logits, labels), ())[0])
    assert asked(mesh, traced) == own(mesh, "cross_entropy", axes, "f64", B * S)


def test_a_device_without_a_target_and_a_batch_without_any() -> None:
    mesh, vocab = Mesh.of(tp=4), 12
    rng, parts = np.random.default_rng(3), Parts(mesh, ("tp",))
    logits, c = rng.standard_normal((B, S, vocab)), rng.standard_normal((B, S))

    def function(z: Any, c: Any, labels: Any) -> tuple[Any, ...]:
        return pulled(lambda z: split_cross_entropy(z, labels, split=Split(("tp",), vocab)), 1)(z, c)

    def of(labels: Array) -> tuple[Array, Array]:
        with jax.enable_x64(True):
            operands = parts.cut(logits, 2), equal_on(mesh, c), equal_on(mesh, labels)
            (loss, d_logits), _ = run_on(mesh, function, *operands)
        return assert_equal_on_all(loss), parts.joined(d_logits, 2, vocab)

    labels = rng.integers(0, 3, (B, S)).astype(np.int32)  # all of them on the first device
    loss, d_logits = of(labels)
    assert_within(loss, OPS["cross_entropy"](logits, labels), "loss")
    assert_within(d_logits, ADJOINTS["cross_entropy"]((c,), (logits, labels), ())[0])
    loss, d_logits = of(np.full((B, S), IGNORE, np.int32))
    assert not loss.any() and not d_logits.any()


# Norms


@by_mesh
@pytest.mark.parametrize("cast", ["before_weight", "after_weight"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_norm_over_split_heads(mesh: Mesh, axes: tuple[str, ...], cast: str, has_bias: bool) -> None:
    rng, parts, heads, dim = np.random.default_rng(4), Parts(mesh, axes), 8, 5
    x, c = rng.standard_normal((2, B, S, heads, dim))
    weight, bias = rng.standard_normal((2, heads * dim))
    attrs: dict[str, Any] = {"centered": False, "eps": 1e-2, "weight_offset": 0.5, "cast": cast, "norm_dims": 2}
    storage = (weight, bias if has_bias else None)

    def function(x: Any, weight: Any, *bias: Any) -> Any:
        made = bias[0].reshape(-1) if bias else None
        return split_norm(x, weight.reshape(-1), made, split=Split(axes, heads * dim), **attrs)

    held = [parts.cut(w.reshape(heads, dim), 0) for w in storage if w is not None]
    operands = [parts.cut(x, 2), *held]
    with jax.enable_x64(True):
        (made, d_x, *d_rest), traced = run_on(mesh, pulled(function, len(operands)), *operands, parts.cut(c, 2))
    assert_within(parts.joined(made, 2, heads), OPS["norm"](x, *storage, **attrs), "value")
    want_x, *want = (d for d in ADJOINTS["norm"]((c,), (x,), storage, **attrs) if d is not None)
    assert_within(parts.joined(d_x, 2, heads), want_x)
    for got, d in zip(d_rest, want, strict=True):
        assert_within(parts.joined(got, 0, heads).reshape(-1), d)
    assert asked(mesh, traced) == own(mesh, "norm", axes, "f64", B * S)


@pytest.mark.parametrize("cast", ["before_weight", "after_weight"])
def test_in_bf16_collectives_and_sums_over_tokens_are_wide(cast: str) -> None:
    """1000 tokens whose normed values are 1: in bf16 a sum of ones ends at 256."""
    mesh, tokens = Mesh.of(tp=2), 1000
    attrs: dict[str, Any] = {"centered": False, "eps": 0.0, "weight_offset": 0.0, "cast": cast, "norm_dims": 1}
    function = pulled(partial(split_norm, split=Split(("tp",), 4), **attrs), 3)
    ones = [equal_on(mesh, np.ones(shape, ml_dtypes.bfloat16)) for shape in ((1, tokens, 2), (2,), (2,))]
    (made, _, d_weight, d_bias), traced = run_on(mesh, function, *ones, ones[0])
    assert made[0].dtype == d_weight[0].dtype == ml_dtypes.bfloat16
    assert np.array_equal(np.asarray([d_weight, d_bias], np.float32), np.full((2, 2, 2), tokens))
    assert asked(mesh, traced) == own(mesh, "norm", ("tp",), "f32", tokens)


def test_in_bf16_a_norm_rounds_where_the_whole_one_does() -> None:
    """Squares whose sums are exact, so that equality is of bits."""
    rng, parts = np.random.default_rng(6), Parts(Mesh.of(tp=2), ("tp",))
    x = rng.integers(-9, 10, (B, S, 8)).astype(ml_dtypes.bfloat16)
    weight = rng.standard_normal(8).astype(ml_dtypes.bfloat16)
    made = []
    for cast in ("before_weight", "after_weight"):
        attrs: dict[str, Any] = {"centered": False, "eps": 1e-2, "weight_offset": 1.0, "cast": cast, "norm_dims": 1}

        def function(x: Any, weight: Any, attrs: Any = attrs) -> tuple[Any, ...]:
            return (split_norm(x, weight, None, split=Split(("tp",), 8), **attrs),)

        (local,), _ = run_on(parts.mesh, function, parts.cut(x, 2), parts.cut(weight, 0))
        made.append(parts.joined(local, 2, 8))
        assert np.array_equal(made[-1], jax.jit(partial(norm, **attrs))(x, weight, None))
    assert not np.array_equal(*made)


def test_in_bf16_losses_are_wide() -> None:
    mesh, labels = Mesh.of(tp=2), np.zeros((1, S), np.int32)
    logits = [np.zeros((1, S, 4), ml_dtypes.bfloat16)] * 2
    function = pulled(lambda z: split_cross_entropy(z, labels, split=Split(("tp",), 8)), 1)
    (loss, d_logits), traced = run_on(mesh, function, logits, equal_on(mesh, np.ones((1, S), np.float32)))
    assert loss[0].dtype == np.float32 and d_logits[0].dtype == ml_dtypes.bfloat16
    assert asked(mesh, traced) == own(mesh, "cross_entropy", ("tp",), "f32", S)


# Linears


def gather_of_seq(mesh: Mesh, axes: tuple[str, ...]) -> Move:
    before: dict[str, State] = {a: shard("seq") if a in axes else INVARIANT for a in mesh.names}
    after = {a: REPLICATED if a in axes else INVARIANT for a in mesh.names}
    ahead = steps(mesh, before, after)
    made = Reshard("x", "x@1", ahead, backward_steps(ahead), regathers=True)
    value = Value("x", (Axis("batch"), Axis("seq"), Axis("embed", H)))
    program = Program("p", (value,), (), (), (), (), {"x": value})
    return Move.of(ShardedProgram(program, (made,), {"x": before, "x@1": after}, ()), made, Extents(mesh, B, S, {}))


@by_mesh
@pytest.mark.parametrize("biased", [(False, False), (True, True), (False, True)])
def test_a_linear_that_gathers_again(mesh: Mesh, axes: tuple[str, ...], biased: tuple[bool, ...]) -> None:
    """Two weights of one pack, split by rows: one gather forward, one more and a scatter backward."""
    rng, parts, rows = np.random.default_rng(5), Parts(mesh, axes), (8, 16)
    x = rng.standard_normal((B, S, H))
    weights = [rng.standard_normal((n, H)) for n in rows]
    biases = [rng.standard_normal(n) for n, has in zip(rows, biased, strict=True) if has]
    cotangents = [rng.standard_normal((B, S, n)) for n in rows]
    size = int(np.prod([mesh.size(a) for a in axes]))
    attrs: dict[str, Any] = {"outs": tuple((n // size,) for n in rows), "biased": biased, "in_dims": 1}

    def function(x: Any, *params: Any) -> Any:
        bias = jnp.concatenate(params[2:]) if biases else None
        return gathered_linear(x, jnp.concatenate(params[:2]), bias, move=gather_of_seq(mesh, axes), **attrs)

    operands = [parts.cut(x, 1), *(parts.cut(p, 0) for p in (*weights, *biases))]
    given = [parts.cut(c, 2) for c in cotangents]
    with jax.enable_x64(True):
        results, traced = run_on(mesh, pulled(function, len(operands)), *operands, *given)
    made, d_x, d_params = results[:2], results[2], results[3:]
    attrs["outs"] = tuple((n,) for n in rows)
    storage = np.concatenate(weights), np.concatenate(biases) if biases else None
    for got, want in zip(made, OPS["linear"](x, *storage, **attrs), strict=True):
        assert_within(parts.joined(got, 2, want.shape[2]), want, "value")
    want_x, d_weight, d_bias = ADJOINTS["linear"](tuple(cotangents), (x,), storage, **attrs)
    assert_within(parts.joined(d_x, 1, S), want_x)
    pieces = [
        *np.split(d_weight, [rows[0]]),
        *([] if d_bias is None else np.split(d_bias, [rows[0]][: len(biases) - 1])),
    ]
    for got, want in zip(d_params, pieces, strict=True):
        assert_within(parts.joined(got, 0, len(want)), want)
    moves = [expected(mesh, kind, axes, "f64", B * S * H) for kind in ("all-gather", "all-gather", "reduce-scatter")]
    assert asked(mesh, traced) == moves
    assert "optimization_barrier" in traced.lower().as_text()  # or a GPU's compiler may keep what it has gathered


def test_only_parts_are_saved_for_backward() -> None:
    """Of a linear the part of the input that the device had; of a loss the logits and two numbers a token."""
    mesh, parts, saved = Mesh.of(tp=2), Parts(Mesh.of(tp=2), ("tp",)), {}
    weight, labels = np.ones((4, H), np.float32), np.zeros((B, S), np.int32)

    def function(x: Any, logits: Any) -> tuple[Any, ...]:
        attrs: dict[str, Any] = {"outs": ((4,),), "biased": (False,), "in_dims": 1}
        gathered = partial(gathered_linear, bias=None, move=gather_of_seq(mesh, ("tp",)), **attrs)
        loss = partial(split_cross_entropy, labels=labels, split=Split(("tp",), 14))
        for name, call, operands in (("linear", gathered, (x, weight)), ("loss", loss, (logits,))):
            made, pull = jax.vjp(call, *operands)
            saved[name] = sorted(leaf.shape for leaf in jax.tree.leaves(pull))
        return (made,)

    run_on(mesh, function, parts.cut(np.ones((B, S, H), np.float32), 1), parts.cut(np.ones((B, S, 14), np.float32), 2))
    assert saved["linear"] == [(B, S // 2, H), (4, H)]
    assert saved["loss"] == [(B, S), (B, S), (B, S, 7)]
