"""Every op of both backends against the numpy reference: forward, and every operand's gradient.

A backend whose op differs in a convention (a window off by one, another rotary pairing, a cap after the mask) fails
here by the op's name, before a whole model is compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from op_cases import OP_CASES, Case

from duomesh.core.bounds import bound
from duomesh.core.ir.ops import KINDS
from duomesh.core.verify.compare import relative_error
from duomesh.kernels.reference import ADJOINTS, OPS

Array = npt.NDArray[Any]
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
    count = len(case.inputs)
    inputs, storage = tuple(operands[:count]), tuple(operands[count:])
    pulled = ADJOINTS[case.kind](tuple(cotangents), inputs, storage, outputs, **case.attrs)
    grads = {i: g for i, g in enumerate(pulled) if g is not None}
    return [np.asarray(out) for out in outputs], cotangents, grads


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.id)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.id)
def test_op_in_bf16_is_as_good_as_the_reference_in_bf16(case: Case, backend: str) -> None:
    """Each backend's bf16 error against float64 stays within twice the reference's, or one rounding."""
    import ml_dtypes

    bf16 = np.dtype(ml_dtypes.bfloat16)

    def is_rounded(i: int) -> bool:
        # tables, losses and masks are wide in every run
        wide_inputs = {"rope": (1, 2), "rope_table": (1,), "masked_sum": (0, 1)}.get(case.kind, ())
        return i not in wide_inputs

    low: list[Array | None] = []
    for i, x in enumerate(case.operands):
        is_float = x is not None and x.dtype == np.float64
        low.append(x.astype(bf16 if is_rounded(i) else np.float32) if x is not None and is_float else x)
    exact = [x.astype(np.float64) if x is not None and x.dtype in (bf16, np.float32) else x for x in low]
    truth, _, _ = reference(case, exact)
    own, cotangents, _ = reference(case, low)
    got, _ = BACKENDS[backend](case, low, cotangents)
    for want, mine, theirs in zip(truth, own, got, strict=True):
        assert theirs.dtype == mine.dtype
        rounding = (
            float(ml_dtypes.finfo(theirs.dtype).eps) if theirs.dtype == bf16 else bound("value", "float32", terms=64)
        )
        limit = max(bound("value", "bfloat16", own_error=relative_error(want, mine)[0]), rounding)
        assert relative_error(want, theirs)[0] <= limit


def test_both_backends_have_every_kind_with_the_reference_s_names_and_order() -> None:
    from duomesh.backends.jax.ops import OPS as JAX_OPS
    from duomesh.backends.torch.ops import OPS as TORCH_OPS

    assert list(TORCH_OPS) == list(JAX_OPS) == list(OPS) == list(KINDS)
    for kind, definition in KINDS.items():
        mine, theirs = (inspect.signature(ops[kind]).parameters for ops in (TORCH_OPS, JAX_OPS))
        # jax's attention has one more word, bound when the model is lowered
        assert [n for n in theirs if n != "allow_cudnn"] == list(mine), kind
        assert [n for n, p in mine.items() if p.kind is inspect.Parameter.KEYWORD_ONLY] == list(definition.attrs), kind


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
        pulled = ADJOINTS["cross_entropy"]((np.ones((1, 64)),), (wide, labels), (), (want,))
        assert relative_error(pulled[0], grads[0])[0] <= float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps), name


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
