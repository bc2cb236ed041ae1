"""The reference model against the straight-line oracle: blocks' outputs, routing, logits, losses, and the slope of the
loss in a random direction of all parameters; and the rule by which it sums micro-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from compare import distance, rounding
from oracle import OracleResult, run_oracle
from spec_cases import ALL_CASES, CASES, model

from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.errors import BackendError, DataError
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.spec.model import ModelSpec
from duomesh.kernels.reference import ReferenceModel

Params = dict[str, npt.NDArray[Any]]
B, S = 5, 11

by_case = pytest.mark.parametrize("spec", ALL_CASES.values(), ids=ALL_CASES.keys())


def plain_batch(spec: ModelSpec, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    tokens, labels = rng.integers(0, spec.vocab_size, (2, B, S)).astype(np.int32)
    return Batch(tokens, labels)


def full_batch(spec: ModelSpec, seed: int = 1) -> Batch:
    """Every optional field given: fractional weights, ignored labels, odd positions, several segments."""
    rng = np.random.default_rng(seed)
    batch = plain_batch(spec, seed)
    batch.labels[rng.random((B, S)) < 0.2] = IGNORE
    return replace(
        batch,
        loss_mask=rng.choice([0.0, 0.3, 1.0], (B, S)).astype(np.float32),
        positions=rng.integers(0, 60, (B, S)).astype(np.int32),
        segment_ids=np.sort(rng.integers(0, 3, (B, S)), axis=1).astype(np.int32),
    )


def make_params(spec: ModelSpec, make_batch: Callable[[ModelSpec], Batch] = full_batch) -> Params:
    """Random weights, and norm weights and biases that are not at their neutral values; float64.

    With experts, weights that route the batch clearly: no rounding changes a token's choices.
    """
    return dict(_drawn(spec, make_batch))


@cache
def _drawn(spec: ModelSpec, make_batch: Callable[[ModelSpec], Batch]) -> Params:
    for seed in itertools.count(3):
        params = {k: v.astype(np.float64) for k, v in initial_params(build_program(spec), seed, perturb=0.3)}
        if routes_clearly(spec, params, make_batch(spec)):
            break
    return params


def routes_clearly(spec: ModelSpec, params: Params, batch: Batch) -> bool:
    """Whether each token's last chosen score is above the next one by more than 1/50 of what scores vary by."""
    if all(block.moe is None for block in spec.blocks):
        return True
    values = reference(spec, params).forward(batch)
    for n, block in enumerate(spec.blocks):
        if block.moe is not None and block.moe.top_k < block.moe.num_experts:
            scores = values[f"layers.{n}.moe.router"]
            ranked = np.sort(scores, axis=-1)[..., ::-1]
            gaps = ranked[..., block.moe.top_k - 1] - ranked[..., block.moe.top_k]
            if gaps.min() < scores.std() / 50:
                return False
    return True


def reference(spec: ModelSpec, params: Params) -> ReferenceModel:
    return ReferenceModel(build_program(spec), params)


def oracle(spec: ModelSpec, params: Params, batch: Batch) -> OracleResult:
    return run_oracle(spec, params, batch.tokens, batch.labels, batch.loss_mask, batch.positions, batch.segment_ids)


@pytest.mark.parametrize("make_batch", [plain_batch, full_batch])
@by_case
def test_forward_matches_the_oracle(spec: ModelSpec, make_batch: Any) -> None:
    params, batch = make_params(spec, make_batch), make_batch(spec)
    values, want = reference(spec, params).forward(batch), oracle(spec, params, batch)
    embedded = "embed.lookup" if spec.embedding_scale is None else "embed.scale"
    logits = "head.logits" if spec.logit_softcap is None else "head.capped_logits"
    pairs = {embedded: want.embedded, logits: want.logits, "loss.token_loss": want.token_losses}
    pairs |= {f"layers.{n}.mlp_residual": block for n, block in enumerate(want.blocks)}
    for name, expected in pairs.items():
        assert values[name].dtype == np.float64
        assert distance(values[name], expected) <= bound("value", "float64"), name
    for n, tokens in enumerate(want.routed):
        if tokens:
            assert [token.chosen for token in tokens] == np.concatenate(values[f"layers.{n}.moe.ids"]).tolist()
            probs = np.concatenate(values[f"layers.{n}.moe.probs"])
            assert distance(probs, np.array([token.probs for token in tokens])) <= bound("value", "float64")
    loss, _ = reference(spec, params).loss_and_grads([batch])
    assert abs(loss - want.loss) <= bound("loss", "float64") * want.loss


@by_case
def test_gradients_match_the_oracle_s_slope(spec: ModelSpec) -> None:
    """Central differences of the oracle's loss, in a random direction of each parameter (over all layers at once).

    The error of D(h) is a h^2 + O(h^4): |D(h) - D(h/2)| bounds that of their extrapolation; the loss's own rounding
    is added over h.
    """
    params, batch = make_params(spec), full_batch(spec)
    small = replace(batch, **{f: array[:2] for f, array in vars(batch).items() if array is not None})
    loss, grads = reference(spec, params).loss_and_grads([small])
    assert list(grads) == list(params)
    rng = np.random.default_rng(5)
    h, terms = 2.0**-14, small.tokens.size * spec.vocab_size
    # one direction for all parameters of a kind: their names without the layer
    kinds = {".".join(part for part in name.split(".") if not part.isdigit()) for name in params}
    for kind in sorted(kinds):
        members = [n for n in params if ".".join(p for p in n.split(".") if not p.isdigit()) == kind]
        direction = {name: rng.standard_normal(params[name].shape) for name in members}

        def slope(step: float, direction: Params = direction) -> float:
            ends = []
            for sign in (1, -1):
                moved = params | {name: params[name] + sign * step * d for name, d in direction.items()}
                ends.append(oracle(spec, moved, small).loss)
            return (ends[0] - ends[1]) / (2 * step)

        coarse, fine = slope(h), slope(h / 2)
        got = sum(float(np.sum(grads[name] * d)) for name, d in direction.items())
        assert abs((4 * fine - coarse) / 3 - got) <= abs(coarse - fine) + rounding(terms) * loss / h, kind


def test_tied_gradients_are_summed() -> None:
    """A tied embedding's gradient is that of the lookup plus that of the head."""
    tied, untied = model(tie_embeddings=True), model()
    params, batch = make_params(tied), full_batch(tied)
    both = params | {"head.weight": params["embed.weight"]}
    loss, grads = reference(tied, params).loss_and_grads([batch])
    untied_loss, apart = reference(untied, {n: both[n] for n in build_program(untied).params}).loss_and_grads([batch])
    assert loss == untied_loss
    np.testing.assert_array_equal(grads["embed.weight"], apart["head.weight"] + apart["embed.weight"])


def test_micro_batches_are_one_objective() -> None:
    """Unequal numbers of targets: the mean is over all of them, never a mean of means."""
    spec = CASES["qkv_bias_tied"]
    params, whole = make_params(spec), full_batch(spec)
    whole.labels[0, :-1] = IGNORE
    fields = {f: array for f, array in vars(whole).items() if array is not None}
    parts = [replace(whole, **{f: array[rows] for f, array in fields.items()}) for rows in (slice(0, 1), slice(1, B))]
    assert parts[0].weights.sum() != parts[1].weights.sum() / 4
    want_loss, want = reference(spec, params).loss_and_grads([whole])
    loss, grads = reference(spec, params).loss_and_grads(parts)
    assert abs(loss - want_loss) <= bound("loss", "float64") * want_loss
    for name in want:
        assert distance(grads[name], want[name]) <= bound("gradient", "float64"), name


def test_no_target_gives_zero_loss_and_gradients() -> None:
    spec = CASES["gqa"]
    batch = plain_batch(spec)
    batch.labels[:] = IGNORE
    loss, grads = reference(spec, make_params(spec)).loss_and_grads([batch])
    assert loss == 0.0
    assert all((g == 0).all() for g in grads.values())


def test_default_positions_and_segments() -> None:
    spec = CASES["gqa"]
    params, batch = make_params(spec), plain_batch(spec)
    written = replace(
        batch, positions=np.tile(np.arange(S, dtype=np.int32), (B, 1)), segment_ids=np.full((B, S), 4, np.int32)
    )
    first, second = (reference(spec, params).forward(b) for b in (batch, written))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_packed_documents_equal_separate_ones() -> None:
    """Segments with restarted positions: each document's values are those that it has alone."""
    spec = CASES["window"]
    params, batch = make_params(spec), plain_batch(spec)
    cut = 4
    positions = np.tile(np.r_[np.arange(cut), np.arange(S - cut)].astype(np.int32), (B, 1))
    segments = np.tile(np.r_[np.zeros(cut), np.ones(S - cut)].astype(np.int32), (B, 1))
    packed = reference(spec, params).forward(replace(batch, positions=positions, segment_ids=segments))["head.logits"]
    for rows in (slice(0, cut), slice(cut, S)):
        alone = reference(spec, params).forward(Batch(batch.tokens[:, rows], batch.labels[:, rows]))["head.logits"]
        assert distance(packed[:, rows], alone) <= bound("logits", "float64")


def test_c088_casting_the_model_leaves_the_rotary_tables_unchanged() -> None:
    spec = CASES["llama3_scaling"]
    batch = full_batch(spec)
    tables = {}
    for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        params = {name: value.astype(dtype) for name, value in make_params(spec).items()}
        values = reference(spec, params).forward(batch)
        assert values["layers.0.attention.q_rope"].dtype == dtype
        tables[dtype] = [values["tables.rope0.cos"], values["tables.rope0.sin"]]
    first, second = tables.values()
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)], ids=str)
@by_case
def test_lower_precision_stays_near_float64(spec: ModelSpec, dtype: np.dtype[Any]) -> None:
    """A wrong dtype somewhere (a float64 leak, a bf16 softmax) shows as the wrong dtype, or as an error above the cap
    that the bounds set for tiny models (which the table's wide weights would amplify: narrower ones here)."""
    spec = replace(spec, init_std=0.1)
    params = {name: value.astype(dtype) for name, value in make_params(spec).items()}
    batch = full_batch(spec)
    exact = reference(spec, {name: value.astype(np.float64) for name, value in params.items()})
    values, want = reference(spec, params).forward(batch), exact.forward(batch)
    program = build_program(spec)
    for prefix, part in program.steps:
        for op in part.ops:
            for name in op.outputs:
                wanted = {"wide": np.dtype(np.float32), "int": np.dtype(np.int32), "compute": dtype}[
                    part.values[name].dtype
                ]
                assert values[prefix + name].dtype == wanted, prefix + name
    dtype_name = str(dtype)
    logits = "head." + program.head.outputs[0][1]
    error = distance(values[logits].astype(np.float64), want[logits])
    assert error <= bound("logits", dtype_name, own_error=math.inf)
    loss, grads = reference(spec, params).loss_and_grads([batch])
    want_loss, want_grads = exact.loss_and_grads([batch])
    assert abs(loss - want_loss) <= bound("loss", dtype_name, own_error=math.inf) * want_loss
    for name, grad in grads.items():
        assert grad.dtype == np.float32
        mlp = spec.blocks[0].mlp
        if dtype != np.float32 and mlp is not None and mlp.activation == "relu":
            continue  # its derivative steps: rounding that moves a value across 0 is not a small error
        error = distance(grad.astype(np.float64), want_grads[name])
        assert error <= bound("gradient", dtype_name, own_error=math.inf), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("layers.1.mlp.up.weight"), "lacks parameter layers.1.mlp.up.weight"),
        (lambda p: p.update({"layers.2.mlp.up.weight": np.zeros(3)}), "has no parameter layers.2.mlp.up.weight"),
        (lambda p: p.update({"head.norm.weight": np.zeros(21)}), r"head.norm.weight has shape \(21,\)"),
        (lambda p: p.update({"head.norm.weight": np.zeros(20, np.float32)}), "head.norm.weight is float32"),
    ],
)
def test_wrong_parameters_are_named(change: Any, message: str) -> None:
    spec = model()
    params = make_params(spec)
    change(params)
    with pytest.raises(BackendError, match=message):
        reference(spec, params)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    spec = model()
    batch = plain_batch(spec)
    batch.tokens[1, 1] = spec.vocab_size
    with pytest.raises(DataError, match="37"):
        reference(spec, make_params(spec)).forward(batch)
