"""Every op of both backends against the numpy reference: forward, and every operand's gradient.

A backend whose op differs in a convention (a window off by one, another rotary pairing, a cap after the mask) fails
here by the op's name, before a whole model is compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from op_cases import OP_CASES, Case

from duomesh.core.bounds import bound
from duomesh.core.ir.ops import EXPERT_KINDS, KINDS
from duomesh.core.verify.compare import relative_error
from duomesh.kernels.reference import ADJOINTS, OPS

Array = npt.NDArray[Any]
# no backend has the kinds of experts yet
KINDS_OF_BACKENDS = [kind for kind in KINDS if kind not in EXPERT_KINDS]
by_case = pytest.mark.parametrize(
    "case", [case for case in OP_CASES if case.kind in KINDS_OF_BACKENDS], ids=lambda case: case.id
)
Outcome = tuple[list[Array], dict[int, Array]]  # outputs, and cotangents by operand


def run_torch(case: Case, operands: list[Array | None], cotangents: list[Array]) -> Outcome:
    import torch

    from duomesh.backends.torch.arrays import to_array, to_tensor
    from duomesh.backends.torch.ops import OPS as TORCH_OPS

    tensors = [
        None if x is None else to_tensor(x).requires_grad_(i in case.differentiated) for i, x in enumerate(operands)
    ]
    made = TORCH_OPS[case.kind](*tensors, **case.attrs)
    outputs = made if isinstance(made, tuple) else (made,)
    grads: dict[int, Array] = {}
    if case.differentiated:
        sources = [tensors[i] for i in case.differentiated]
        pulled = torch.autograd.grad(outputs, sources, [to_tensor(c) for c in cotangents])
        grads = {i: to_array(g) for i, g in zip(case.differentiated, pulled, strict=True)}
    return [to_array(out) for out in outputs], grads


def run_jax(case: Case, operands: list[Array | None], cotangents: list[Array]) -> Outcome:
    import jax

    from duomesh.backends.jax.ops import OPS as JAX_OPS

    def function(*differentiated: Any) -> Any:
        full: list[Any] = [None if x is None else jax.numpy.asarray(x) for x in operands]
        for i, x in zip(case.differentiated, differentiated, strict=True):
            full[i] = x
        made = JAX_OPS[case.kind](*full, **case.attrs)
        return made if isinstance(made, tuple) else (made,)

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        outputs, pull = jax.vjp(function, *[jax.numpy.asarray(operands[i]) for i in case.differentiated])
        pulled = pull(tuple(jax.numpy.asarray(c) for c in cotangents)) if case.differentiated else ()
    grads = {i: np.asarray(g) for i, g in zip(case.differentiated, pulled, strict=True)}
    return [np.asarray(out) for out in outputs], grads


BACKENDS: dict[str, Callable[[Case, list[Array | None], list[Array]], Outcome]] = {"torch": run_torch, "jax": run_jax}


def reference(case: Case, operands: list[Array | None]) -> tuple[list[Array], list[Array], dict[int, Array]]:
    """Outputs, random cotangents for them, and what the adjoint makes of these."""
    made = OPS[case.kind](*operands, **case.attrs)
    outputs = made if isinstance(made, tuple) else (made,)
    rng = np.random.default_rng(5)
    cotangents = [np.asarray(rng.standard_normal(np.shape(out)), out.dtype) for out in outputs]
    return [np.asarray(out) for out in outputs], cotangents, pull(case, operands, cotangents)


def pull(case: Case, operands: list[Array | None], cotangents: list[Array]) -> dict[int, Array]:
    """What the adjoint makes of cotangents, by operand."""
    count = len(case.inputs)
    inputs, storage = tuple(operands[:count]), tuple(operands[count:])
    pulled = ADJOINTS[case.kind](tuple(cotangents), inputs, storage, **case.attrs)
    return {i: g for i, g in enumerate(pulled) if g is not None}


@pytest.mark.parametrize("backend", BACKENDS)
@by_case
def test_op_equals_reference_in_float64(case: Case, backend: str) -> None:
    outputs, cotangents, grads = reference(case, list(case.operands))
    got_outputs, got_grads = BACKENDS[backend](case, list(case.operands), cotangents)
    assert len(got_outputs) == len(outputs)
    for want, got in zip(outputs, got_outputs, strict=True):
        assert got.dtype == want.dtype
        assert relative_error(want, got)[0] <= bound("value", "float64")
    assert set(got_grads) == set(grads)
    for i, want in grads.items():
        assert relative_error(want, got_grads[i])[0] <= bound("gradient", "float64"), f"operand {i}"


def narrow(case: Case) -> list[Array | None]:
    """The case's operands as a bf16 run has them."""
    import ml_dtypes

    return list(case.lowered(ml_dtypes.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
@by_case
def test_op_in_bf16_is_as_good_as_the_reference_in_bf16(case: Case, backend: str) -> None:
    """Outputs and gradients: a backend's error against float64 is within twice the reference's, or a few roundings."""
    import ml_dtypes

    low = narrow(case)
    exact = [x if x is None or x.dtype.kind in "iu" else x.astype(np.float64) for x in low]
    truth, _, _ = reference(case, exact)
    own, cotangents, own_grads = reference(case, low)
    got, got_grads = BACKENDS[backend](case, low, cotangents)
    true_grads = pull(case, exact, [c.astype(np.float64) for c in cotangents])
    pairs = list(zip(truth, own, got, strict=True))
    pairs += [(true_grads[i], own_grads[i], got_grads[i]) for i in own_grads]
    for want, mine, theirs in pairs:
        is_narrow = theirs.dtype.itemsize == 2
        unit = float(ml_dtypes.finfo(theirs.dtype).eps) if is_narrow else bound("value", "float32", terms=64)
        limit = max(bound("value", "bfloat16", own_error=relative_error(want, mine)[0]), 2 * unit)
        assert relative_error(want, theirs)[0] <= limit


def convention_cases() -> dict[str, tuple[Case, Array]]:
    """bf16 calls whose result shows where they round: with the reference's result, what the other place gives."""
    import ml_dtypes

    bf16 = np.dtype(ml_dtypes.bfloat16)
    rng = np.random.default_rng(8)
    x, weight = rng.standard_normal((2, 9, 3, 8)).astype(bf16), rng.standard_normal(8).astype(bf16)
    angles = rng.uniform(-9, 9, (2, 9, 4)).astype(np.float32)
    factor = 20**0.5

    def case(name: str, kind: str, inputs: tuple[Any, ...], storage: tuple[Any, ...], fixed: tuple[int, ...]) -> Case:
        return Case(name, kind, inputs, storage, {}, lambda: None, fixed)

    norm = case("norm", "norm", (x,), (weight, None), ())
    rope = case("rope", "rope", (x, np.cos(angles), np.sin(angles)), (), (1, 2))
    calls: list[tuple[Case, dict[str, Any], str, tuple[str, str]]] = [
        (
            norm,
            {"centered": False, "eps": 1e-5, "weight_offset": 1.0, "norm_dims": 1},
            "cast",
            ("before_weight", "after_weight"),
        ),
        (rope, {"pairing": "half"}, "compute", ("activation", "fp32")),
    ]
    out = {}
    for one, attrs, key, (first, second) in calls:
        for asked, other in ((first, second), (second, first)):
            called = replace(one, attrs=attrs | {key: asked})
            out[f"{one.id}-{asked}"] = called, OPS[one.kind](*one.operands, **attrs, **{key: other})
    scale = replace(case("scale", "scale", (x,), (), ()), attrs={"factor": factor})
    out["scale"] = scale, (x.astype(np.float64) * factor).astype(bf16)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", convention_cases())
def test_bf16_is_rounded_where_the_convention_says(name: str, backend: str) -> None:
    """The convention that is asked for gives the reference's bits, but for a few: statistics summed in another order
    may carry a value across a rounding. The other convention gives other bits in far more places."""
    case, other = convention_cases()[name]
    want = OPS[case.kind](*case.operands, **case.attrs)
    (got,), _ = BACKENDS[backend](case, list(case.operands), [np.ones_like(want)])
    assert 10 * int((got != want).sum()) < int((got != other).sum())


def test_both_backends_have_every_kind_with_the_reference_s_names_and_order() -> None:
    from duomesh.backends.jax.ops import OPS as JAX_OPS
    from duomesh.backends.torch.ops import OPS as TORCH_OPS

    assert list(TORCH_OPS) == list(JAX_OPS) == KINDS_OF_BACKENDS
    assert list(OPS) == list(KINDS)
    for kind in KINDS_OF_BACKENDS:
        definition = KINDS[kind]
        mine, theirs = (inspect.signature(ops[kind]).parameters for ops in (TORCH_OPS, JAX_OPS))
        # jax's attention has one more word, bound when the model is lowered
        assert [n for n in theirs if n != "allow_cudnn"] == list(mine), kind
        assert [n for n, p in mine.items() if p.kind is inspect.Parameter.KEYWORD_ONLY] == [
            *definition.attrs,
            *definition.derived,
        ], kind


def test_c091_cross_entropy_of_bf16_logits_is_computed_in_fp32() -> None:
    """64 x 512 bf16 logits with a loss of about 36; a loss in bf16 would move in steps of 0.25."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    logits = (30 * rng.standard_normal((1, 64, 512))).astype(ml_dtypes.bfloat16)
    labels = rng.integers(0, 512, (1, 64)).astype(np.int32)
    wide = logits.astype(np.float64)
    want = OPS["cross_entropy"](wide, labels)
    case = next(c for c in OP_CASES if c.kind == "cross_entropy")
    seed = np.ones((1, 64), np.float32)
    for name, run in BACKENDS.items():
        one = Case(case.id, case.kind, (logits, labels), (), {}, case.torch_form, (1,))
        (got,), grads = run(one, [logits, labels], [seed])
        assert got.dtype == np.float32, name
        assert relative_error(want, got)[0] <= bound("loss", "float32", terms=512), name
        pulled = ADJOINTS["cross_entropy"]((np.ones((1, 64)),), (wide, labels), ())
        assert relative_error(pulled[0], grads[0])[0] <= float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_scores_of_bf16_inputs_are_fp32(backend: str) -> None:
    """Scores around 30: in bf16 they would be off by up to 1/8, and probabilities by 13 %."""
    import ml_dtypes

    rng = np.random.default_rng(2)
    shapes = ((2, 9, 3, 4, 16), (2, 9, 3, 16), (2, 9, 3, 16))
    low = [
        (s * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16) for s, shape in zip((3, 3, 1), shapes, strict=True)
    ]
    attrs = {"scale": 0.7, "window": None, "softcap": None}
    want = OPS["attention"](*[x.astype(np.float64) for x in low], None, **attrs)
    case = Case("attention", "attention", (*low, None), (), attrs, lambda: None, (3,))
    (got,), _ = BACKENDS[backend](case, [*low, None], [np.ones(want.shape, low[0].dtype)])
    assert relative_error(want, got)[0] <= float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)


def test_c092_log_softmax_stays_in_the_log_domain() -> None:
    """Gaps of 200 and logits of 1e4 give finite losses equal to the float64 form."""
    logits = np.array([[[0.0, 200.0, -200.0, 1.0], [1e4, -1e4, 0.0, 3.0]]], np.float32)
    labels = np.array([[2, 1]], np.int32)
    want = OPS["cross_entropy"](logits.astype(np.float64), labels)
    case = next(c for c in OP_CASES if c.kind == "cross_entropy")
    for name, run in BACKENDS.items():
        one = Case(case.id, case.kind, (logits, labels), (), {}, case.torch_form, (1,))
        (got,), _ = run(one, [logits, labels], [np.ones((1, 2), np.float32)])
        assert np.isfinite(got).all(), name
        assert relative_error(want, got)[0] <= bound("loss", "float32"), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bf16_table_sums_the_gradient_of_a_repeated_row_in_fp32(backend: str) -> None:
    """4,096 cotangents of 1 are 4096; in bf16 the sum would stop at 256."""
    import ml_dtypes

    table = np.zeros((3, 2), ml_dtypes.bfloat16)
    ids = np.full((2, 2048), 1, np.int32)
    ones = np.ones((2, 2048, 2), ml_dtypes.bfloat16)
    case = next(c for c in OP_CASES if c.kind == "embedding")
    one = Case(case.id, case.kind, (ids,), (table,), {}, case.torch_form, (0,))
    _, grads = BACKENDS[backend](one, [ids, table], [ones])
    assert grads[1].dtype == table.dtype
    assert np.array_equal(grads[1].astype(np.float64), [[0, 0], [4096, 4096], [0, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_capped_scores_of_bf16_queries_are_fp32(backend: str) -> None:
    """Scores of some hundreds rounded to bf16 move by 1: far more than the reference's own error."""
    rng = np.random.default_rng(3)
    case = next(c for c in OP_CASES if c.kind == "attention" and c.attrs["softcap"] is not None)
    operands = [None if x is None or x.dtype.kind in "iu" else 6 * rng.standard_normal(x.shape) for x in case.operands]
    big = Case(
        case.id, case.kind, tuple(operands), (), {**case.attrs, "softcap": 50.0, "scale": 1.0}, case.torch_form, (3,)
    )
    low = narrow(big)
    exact = [None if x is None else x.astype(np.float64) for x in low]
    (truth,), _, _ = reference(big, exact)
    (own,), cotangents, _ = reference(big, low)
    (got,), _ = BACKENDS[backend](big, low, cotangents)
    limit = bound("value", "bfloat16", own_error=relative_error(truth, own)[0])
    assert relative_error(truth, got)[0] <= limit
