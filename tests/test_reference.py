"""Each reference op against torch in float64, each adjoint against torch's autograd and against central differences;
what ops do below float64 against the roundings that their conventions name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from compare import distance, rounding
from op_cases import OP_CASES, Case, torch_activation

from duomesh.core.batch import IGNORE
from duomesh.core.bounds import bound
from duomesh.core.ir.ops import KINDS
from duomesh.core.spec.model import ACTIVATIONS
from duomesh.kernels.reference import ADJOINTS, OPS

Array = npt.NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)

by_id = pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.id)


def call(case: Case, operands: tuple[Array | None, ...] | None = None) -> tuple[Array, ...]:
    """The op's outputs as a tuple."""
    out = OPS[case.kind](*(case.operands if operands is None else operands), **case.attrs)
    return out if isinstance(out, tuple) else (out,)


def pull_back(case: Case, cotangents: tuple[Array, ...]) -> tuple[Array | None, ...]:
    return ADJOINTS[case.kind](cotangents, case.inputs, case.storage, **case.attrs)


def seeds(case: Case) -> tuple[Array, ...]:
    """A random cotangent for every output; zeros for integers."""
    rng = np.random.default_rng(7)
    made = (np.asarray(rng.standard_normal(out.shape), out.dtype) for out in call(case))
    return tuple(np.zeros_like(c) if c.dtype.kind == "i" else c for c in made)


def test_every_kind_has_a_reference_an_adjoint_and_a_case() -> None:
    assert list(OPS) == list(KINDS)
    assert list(ADJOINTS) == list(KINDS)
    assert {case.kind for case in OP_CASES} == set(KINDS)


@by_id
def test_op_and_adjoint_match_torch_in_float64(case: Case) -> None:
    import torch

    tensors = [
        None if x is None else torch.tensor(x, requires_grad=i in case.differentiated)
        for i, x in enumerate(case.operands)
    ]
    expected = case.torch_form(*tensors)
    expected = expected if isinstance(expected, tuple) else (expected,)
    outputs = call(case)
    assert len(outputs) == len(expected)
    for got, want in zip(outputs, expected, strict=True):
        assert got.dtype == want.detach().numpy().dtype
        assert distance(got, want.detach().numpy()) <= bound("value", "float64")
    cotangents = seeds(case)
    pulled = pull_back(case, cotangents)
    assert [i for i, c in enumerate(pulled) if c is not None] == case.differentiated
    if not case.differentiated:
        return
    pairs = [(out, torch.tensor(c)) for out, c in zip(expected, cotangents, strict=True) if out.requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    for i in case.differentiated:
        tensor, got = tensors[i], pulled[i]
        assert tensor is not None and tensor.grad is not None and got is not None
        assert got.dtype == np.float64
        assert distance(got, tensor.grad.numpy()) <= bound("gradient", "float64"), f"operand {i}"


@by_id
def test_adjoint_matches_central_differences(case: Case) -> None:
    """A random direction for each operand; a wrong linear map cannot agree in one.

    D(h) = (L(x + h d) - L(x - h d)) / 2h has the error a h^2 + O(h^4), so (4 D(h/2) - D(h)) / 3 is better than
    D(h/2), and |D(h) - D(h/2)| bounds its error; to which the rounding of L over h is added.
    """
    cotangents = seeds(case)
    pulled = pull_back(case, cotangents)
    rng = np.random.default_rng(11)
    h = 2.0**-13
    for i in case.differentiated:
        base, got = case.operands[i], pulled[i]
        assert base is not None and got is not None
        direction = rng.standard_normal(base.shape)

        def slope(step: float, i: int = i, base: Array = base, direction: Array = direction) -> float:
            def moved(sign: int) -> tuple[Array, ...]:
                return call(case, (*case.operands[:i], base + sign * step * direction, *case.operands[i + 1 :]))

            # differences first: they cancel less than a difference of two sums
            pairs = zip(cotangents, moved(1), moved(-1), strict=True)
            return float(sum(np.sum(c * (up - down)) for c, up, down in pairs)) / (2 * step)

        coarse, fine = slope(h), slope(h / 2)
        size = sum(float(np.abs(c * out).sum()) for c, out in zip(cotangents, call(case), strict=True))
        noise = rounding(1) * size / h
        assert abs((4 * fine - coarse) / 3 - np.sum(got * direction)) <= abs(coarse - fine) + noise, f"operand {i}"


def test_ops_are_linear_in_the_operands_that_they_say() -> None:
    """f(a u + b v) = a f(u) + b f(v) for the operands of a group together, the others held: a sum may pass through."""
    rng = np.random.default_rng(12)
    for case in OP_CASES:
        kind = KINDS[case.kind]
        for group in kind.linear:
            moved = [i for i, role in enumerate((*kind.inputs, *kind.params)) if role in group]
            moved = [i for i in moved if case.operands[i] is not None]
            u, v = ([rng.standard_normal(np.shape(case.operands[i])) for i in moved] for _ in range(2))

            def at(values: list[Array], case: Case = case, moved: list[int] = moved) -> tuple[Array, ...]:
                return call(
                    case, tuple(dict(zip(moved, values, strict=True)).get(i, x) for i, x in enumerate(case.operands))
                )

            both = at([1.5 * x - 0.7 * y for x, y in zip(u, v, strict=True)])
            for out, first, second in zip(both, at(u), at(v), strict=True):
                assert distance(out, 1.5 * first - 0.7 * second) <= bound("value", "float64"), (case.id, group)


def _bf16(*arrays: Array) -> list[Array]:
    return [np.asarray(x, np.float64).astype(BF16) for x in arrays]


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
@by_id
def test_lower_precision_dtypes(case: Case, dtype: np.dtype[Any]) -> None:
    """Outputs and cotangents of inputs have the input's dtype; tables, losses and weight gradients are wide."""
    operands = case.lowered(dtype)
    outputs = call(case, operands)
    floats = {out.dtype for out in outputs if out.dtype != np.int32}
    assert floats <= {np.dtype(np.float32) if case.makes_wide else dtype}
    assert floats or case.kind == "count_choices"
    inputs, storage = operands[: len(case.inputs)], operands[len(case.inputs) :]
    cotangents = tuple(np.ones_like(out) for out in outputs)
    pulled = ADJOINTS[case.kind](cotangents, inputs, storage, **case.attrs)
    for i in case.differentiated:
        operand, got = operands[i], pulled[i]
        assert operand is not None and got is not None
        assert got.dtype == (operand.dtype if i < len(inputs) else np.float32), f"operand {i}"
        assert got.shape == operand.shape


def test_norm_rounds_where_its_cast_says() -> None:
    """The normed value is rounded before the product, or not at all until the end."""
    rng = np.random.default_rng(3)
    x, weight = _bf16(rng.standard_normal((9, 33)), rng.standard_normal(33))
    attrs: dict[str, Any] = {"centered": False, "eps": 1e-5, "weight_offset": 1.0, "norm_dims": 1}
    x64, gain = x.astype(np.float64), 1.0 + weight.astype(np.float64)
    normed = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5)
    before = normed.astype(BF16) * gain.astype(BF16)
    after = (normed * gain).astype(BF16)
    assert (before != after).any()
    np.testing.assert_array_equal(OPS["norm"](x, weight, None, cast="before_weight", **attrs), before)
    np.testing.assert_array_equal(OPS["norm"](x, weight, None, cast="after_weight", **attrs), after)


def test_rope_rounds_where_its_compute_says() -> None:
    """Every product is rounded, or only the sum of the two."""
    rng = np.random.default_rng(4)
    (x,) = _bf16(rng.standard_normal((2, 9, 3, 8)))
    angles = rng.uniform(-9, 9, (2, 9, 4)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :4], x[..., 4:]
    c, s = (t[:, :, None].astype(BF16) for t in (cos, sin))
    rounded = np.concatenate((a * c - b * s, b * c + a * s), -1)
    a, b = a.astype(np.float64), b.astype(np.float64)
    c, s = (t[:, :, None].astype(np.float64) for t in (cos, sin))
    exact = np.concatenate((a * c - b * s, b * c + a * s), -1).astype(BF16)
    assert (rounded != exact).any()
    np.testing.assert_array_equal(OPS["rope"](x, cos, sin, pairing="half", compute="activation"), rounded)
    np.testing.assert_array_equal(OPS["rope"](x, cos, sin, pairing="half", compute="fp32"), exact)


def test_scale_rounds_its_factor_first() -> None:
    (x,) = _bf16(np.linspace(-3, 3, 257))
    factor = 20**0.5
    rounded_first = (x.astype(np.float64) * float(np.asarray(factor, BF16))).astype(BF16)
    assert (rounded_first != (x.astype(np.float64) * factor).astype(BF16)).any()
    np.testing.assert_array_equal(OPS["scale"](x, factor=factor), rounded_first)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_finite_and_right_far_out(name: str) -> None:
    """No overflow, no cancellation: small values keep their leading digits."""
    import torch

    x = np.array([-700.0, -40.0, -9.0, -1e-9, 0.0, 1e-9, 9.0, 40.0, 700.0])
    tensor = torch.tensor(x, requires_grad=True)
    want = torch_activation(name)(tensor)
    want.sum().backward()
    assert tensor.grad is not None
    with np.errstate(over="raise", invalid="raise"):
        got = OPS["activation"](x, activation=name)
        (slope,) = ADJOINTS["activation"]((np.ones_like(x),), (x,), (), activation=name)
    assert distance(got, want.detach().numpy()) <= bound("value", "float64")
    assert distance(slope, tensor.grad.numpy()) <= bound("gradient", "float64")


@pytest.mark.parametrize("dtype", [np.dtype(np.float64), np.dtype(np.float32), BF16], ids=str)
def test_cross_entropy_of_extreme_logits(dtype: np.dtype[Any]) -> None:
    """Logits of +-1e4 overflow any exponential that is taken before the maximum is off."""
    top = float(np.asarray(1e4, dtype))
    logits = np.array([[top, -top, 0.0], [-top, -top, top]]).astype(dtype)
    losses = OPS["cross_entropy"](logits, np.array([1, 2]))
    np.testing.assert_array_equal(losses, [2 * top, 0.0])
    (d_logits, _) = ADJOINTS["cross_entropy"]((np.ones(2, losses.dtype),), (logits, np.array([1, 2])), ())
    np.testing.assert_array_equal(d_logits, [[1, -1, 0], [0, 0, 0]])


def test_ignored_labels_give_exactly_nothing() -> None:
    """Not even where the logits are not finite, as they may be in padding."""
    logits = np.random.default_rng(0).standard_normal((2, 3, 11))
    logits[0, 1] = np.nan
    labels = np.array([[1, IGNORE, 2], [IGNORE, 0, IGNORE]])
    losses = OPS["cross_entropy"](logits, labels)
    assert (losses[labels == IGNORE] == 0).all() and (losses[labels != IGNORE] > 0).all()
    (d_logits, _) = ADJOINTS["cross_entropy"]((np.ones((2, 3)),), (logits, labels), ())
    assert (d_logits[labels == IGNORE] == 0).all() and np.isfinite(d_logits).all()


def test_attention_never_reads_what_it_must_not_see() -> None:
    """Later tokens, tokens outside the window and other segments change no bit."""
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((1, 8, 1, 1, 4)), rng.standard_normal((1, 8, 1, 4)), rng.standard_normal((1, 8, 1, 4))
    segment_ids = np.array([[0, 0, 1, 1, 1, 1, 1, 1]])

    def last(window: int | None, segments: Array | None) -> Array:
        return np.asarray(OPS["attention"](q, k, v, segments, scale=0.5, window=window, softcap=None)[0, 5])

    everything, window, segment = last(None, None), last(3, None), last(None, segment_ids)
    k[0, 6:], v[0, 6:] = 1e3, -1e3  # later than position 5
    np.testing.assert_array_equal(last(None, None), everything)
    k[0, :2], v[0, :2] = 1e3, -1e3  # another segment
    np.testing.assert_array_equal(last(None, segment_ids), segment)
    k[0, 2], v[0, 2] = 1e3, -1e3  # four tokens back, itself included; a window of three sees positions 3, 4, 5
    np.testing.assert_array_equal(last(3, None), window)
    k[0, 3] += 1.0
    assert (last(3, None) != window).all()
