"""Faults of parallel training that users have met, each as a plan on real ranks: see the id in the name.

`test_parallel_cases.py` has the same ids on simulated ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import inf, log, nan, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankPool
from sharding_cases import Array, assert_same_grads, params_of
from spec_cases import MLP, attention, model
from torch import Tensor, nn

from duomesh.backends.torch.reduce import leaves_of
from duomesh.backends.torch.session import TorchSession
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.dropout import DropoutKey
from duomesh.core.errors import BackendError, PlanError
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.validate import check
from duomesh.core.session import AdamW, StepResult
from duomesh.core.spec.model import ModelSpec, NormSpec
from duomesh.core.verify.compare import relative_error
from duomesh.kernels.reference.model import ReferenceModel

Grads = tuple[float, dict[str, Array]]
LR = 0.01
NORM = NormSpec(eps=1e-6)


def dense(vocab_size: int = 64, *, num_kv_heads: int = 4, **fields: Any) -> ModelSpec:
    """Two layers with q/k norms."""
    over = fields.pop("over", "head")
    heads = attention(num_heads=8, num_kv_heads=num_kv_heads, qk_norm=NORM, qk_norm_over=over)
    block = replace(heads, mlp=replace(MLP, ffn_size=32))
    return model(block, block, vocab_size=vocab_size, hidden_size=16, **fields)


def tokens(samples: int = 4, seq: int = 16, vocab: int = 64, seed: int = 0) -> Batch:
    ids = np.random.default_rng(seed).integers(0, vocab, (samples, seq + 1)).astype(np.int32)
    ids[0, 1] = vocab - 1
    return Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]))


def world_of(plan: str) -> int:
    return Plan.parse(plan).world_size


def session_of(spec: ModelSpec, plan: str = "", params: Mapping[str, Array] | None = None) -> TorchSession:
    """In float64, on the ranks of the plan; on one device in a process that is no rank."""
    program = build_program(spec)
    made = TorchSession(program, plan=Plan.parse(plan), compute_dtype="float64", device="cpu")
    made.load_params((params or params_of(program)).items())
    return made


def local_weights(made: TorchSession) -> dict[str, bytes]:
    """This rank's part of every parameter, by canonical name."""
    out = {}
    for leaf in leaves_of(made.model, made.storage):
        for _, member, first, stop in leaf.places:
            out[member.name] = leaf.parameter.detach()[first:stop].numpy().tobytes()
    return out


def run_grads(rank: int, world: int, plans: Sequence[str], spec: ModelSpec, data: Sequence[Batch]) -> list[Grads]:
    return [session_of(spec, plan).loss_and_grads(data) for plan in plans]


def assert_same(got: Grads, want: Grads) -> None:
    assert abs(got[0] - want[0]) <= bound("loss", "float64") * abs(want[0])
    assert_same_grads(got[1], want[1])


def reference(spec: ModelSpec, data: Sequence[Batch]) -> Grads:
    program = build_program(spec)
    return ReferenceModel(program, params_of(program)).loss_and_grads(data)


def assert_like_one_rank(ranks: RankPool, spec: ModelSpec, plans: Sequence[str], data: Sequence[Batch]) -> None:
    """All plans have the same number of ranks."""
    want = reference(spec, data)
    for results in ranks.run(world_of(plans[0]), run_grads, plans, spec, data):
        for got in results:
            assert_same(got, want)


# The vocabulary


@dataclass(frozen=True)
class Rows:
    """What a rank has of the vocabulary's weights: gradients of a pass, and weights after two updates."""

    loss: float
    tp: int
    grads: dict[str, Array]
    weights: dict[str, Array]
    logits: tuple[int, ...]


def run_rows(rank: int, world: int, plan: str, spec: ModelSpec, params: dict[str, Array], batch: Batch) -> Rows:
    made = session_of(spec, plan, params)
    grads: dict[str, Array] = {}

    def keep(grad: Tensor, name: str) -> None:
        grads[name] = grad.numpy().copy()

    names = ["embed.weight"] if spec.tie_embeddings else ["embed.weight", "head.weight"]
    hooks = [made.model.get_parameter(name).register_hook(partial(keep, name=name)) for name in names]
    loss, _ = made.loss_and_grads([batch])
    for hook in hooks:
        hook.remove()
    made.init_optimizer(AdamW())
    for _ in range(2):
        made.train_step([batch], LR)
    weights = {name: made.model.get_parameter(name).detach().numpy().copy() for name in names}
    return Rows(loss, made.groups.coordinate["tp"], grads, weights, made.logits(batch.tokens).shape)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("plan", ["tp=4", "tp=4,sequence_parallel", "tp=2,dp=2"])
def test_c047_padding_rows_have_no_probability_and_no_gradient(ranks: RankPool, plan: str, ties: bool) -> None:
    """With all output weights zero the loss is the log of the true vocabulary. Padding rows stay zero for good."""
    spec = dense(vocab_size=301, tie_embeddings=ties)
    params = params_of(build_program(spec))
    if not ties:
        params["head.weight"] = np.zeros((301, 16))
    tp = Plan.parse(plan).tp
    for rows in ranks.run(world_of(plan), run_rows, plan, spec, params, tokens(vocab=301)):
        assert ties or abs(rows.loss - log(301)) <= bound("loss", "float64") * log(301)
        assert rows.logits[-1] == 301
        for name, weights in rows.weights.items():
            held = len(weights)
            assert held == -(-301 // tp)
            real = min(301 - rows.tp * held, held)
            assert real == held or rows.tp == tp - 1
            assert rows.grads[name][:real].any() == (ties or name == "head.weight")
            assert not rows.grads[name][real:].any(), name
            assert weights[:real].any() and not weights[real:].any(), name


def run_state(rank: int, world: int, plan: str, spec: ModelSpec, batch: Batch) -> list[tuple[str, str, Array]]:
    made = session_of(spec, plan)
    made.init_optimizer(AdamW())
    made.train_step([batch], LR)
    return list(made.optimizer_state())


def run_reload(
    rank: int, world: int, plan: str, spec: ModelSpec, state: list[tuple[str, str, Array]]
) -> tuple[list[tuple[str, str, Array]], int, Array]:
    """State that was loaded, the place on tp, and this rank's rows of the embedding."""
    made = session_of(spec, plan)
    made.load_optimizer_state(AdamW(), 1, state)
    rows = made.model.get_parameter("embed.weight").detach().numpy().copy()
    return list(made.optimizer_state()), made.groups.coordinate["tp"], rows


def test_c033_state_of_one_padding_is_loaded_into_another(ranks: RankPool) -> None:
    """302 rows at tp=2, 304 at tp=4: real rows and moments keep their bits, and padding is zero."""
    spec = dense(vocab_size=301)
    state = ranks.run(2, run_state, "tp=2", spec, tokens(vocab=301))[0]
    embedding = next(array for group, name, array in state if (group, name) == ("master", "embed.weight"))
    for loaded, place, rows in ranks.run(4, run_reload, "tp=4", spec, state):
        assert [key[:2] for key in loaded] == [key[:2] for key in state]
        assert all(np.array_equal(a, b) for (*_, a), (*_, b) in zip(loaded, state, strict=True))
        assert np.array_equal(rows, np.pad(embedding, ((0, 3), (0, 0)))[76 * place : 76 * (place + 1)])


def test_c047_a_vocabulary_of_50257_rows_over_four_ranks(ranks: RankPool) -> None:
    spec = dense(vocab_size=50257)
    assert_like_one_rank(ranks, spec, ["tp=4", "tp=4,sequence_parallel"], [tokens(2, 8, 50257)])


def run_losses(rank: int, world: int, plans: Sequence[str], spec: ModelSpec, data: Sequence[Batch]) -> list[list[Any]]:
    """For each plan and batch: the sums of an evaluation, and whole logits."""
    made = [session_of(spec, plan) for plan in plans]
    return [[(session.eval_loss(batch), session.logits(batch.tokens)) for batch in data] for session in made]


@pytest.mark.parametrize("plans", [("tp=2", "dp=2"), ("tp=4", "tp=2,dp=2,sequence_parallel", "dp=4,zero=3")])
def test_c049_c087_an_evaluation_adds_up_sums_and_counts(ranks: RankPool, plans: Sequence[str]) -> None:
    """One target in the first batch and nine in the second, on ranks with none: sums of losses and counts are those of
    the logits, which come out whole. So the mean is over targets and not over batches."""
    data = [tokens(vocab=61, seed=1), tokens(vocab=61, seed=2)]
    for batch, count in zip(data, (1, 9), strict=True):
        batch.labels.reshape(-1)[: batch.labels.size - count] = IGNORE
    for results in ranks.run(world_of(plans[0]), run_losses, plans, dense(vocab_size=61), data):
        for made in results:
            for (got, weight), logits, batch in ((*found, batch) for found, batch in zip(made, data, strict=True)):
                chosen = batch.labels != IGNORE
                assert weight == chosen.sum() and logits.shape[-1] == 61
                z, targets = logits[chosen], batch.labels[chosen]
                losses = np.log(np.exp(z).sum(-1)) - z[np.arange(len(z)), targets]
                assert abs(got - losses.sum()) <= bound("loss", "float64") * losses.sum()


def run_scaled(rank: int, world: int, plan: str, spec: ModelSpec, params: dict[str, Array], batch: Batch) -> Grads:
    return session_of(spec, plan, params).loss_and_grads([batch])


def test_c092_a_split_softmax_stays_in_the_log_domain(ranks: RankPool) -> None:
    """Logits of several thousands, whose exponentials no float64 holds, on ranks with different maxima."""
    spec, batch = dense(), tokens()
    params = params_of(build_program(spec))
    params["head.weight"] = params["head.weight"] * 3000
    one = ReferenceModel(build_program(spec), params)
    assert np.abs(one.forward(batch)["head.logits"]).max() > log(np.finfo(np.float64).max)
    for got in ranks.run(2, run_scaled, "tp=2", spec, params, batch):
        assert_same(got, one.loss_and_grads([batch]))


# What a plan is refused for, and what it gives


def run_refusals(rank: int, world: int, plan: str, spec: ModelSpec, data: Sequence[Batch]) -> list[str]:
    made, said = session_of(spec, plan), []
    for batch in data:
        with pytest.raises(BackendError) as raised:
            made.loss_and_grads([batch])
        said.append(str(raised.value))
    return said


def test_c056_a_length_that_sequence_parallelism_cannot_cut_is_refused(ranks: RankPool) -> None:
    """By the check of a plan, and by every rank before it sends anything; a single sample is no exception."""
    plan = "tp=4,sequence_parallel"
    with pytest.raises(PlanError, match=r"seq=30, tp=4"):
        check(dense(), Plan.parse(plan), seq=30)
    for said in ranks.run(4, run_refusals, plan, dense(), [tokens(seq=30), tokens(samples=1, seq=61)]):
        assert "30" in said[0] and "61" in said[1] and all("tp=4" in words for words in said)


def test_c053_pairs_of_dimensions(ranks: RankPool) -> None:
    assert_like_one_rank(ranks, dense(), ["tp=4", "tp=2,dp=2", "tp=2,dp=2,sequence_parallel,zero=3"], [tokens()])


def run_entry_points(
    rank: int, world: int, plans: Sequence[str], spec: ModelSpec, batch: Batch
) -> list[tuple[Grads, Grads, dict[str, Array]]]:
    """Gradients by either call, and parameters after an update."""
    out = []
    for plan in plans:
        made = session_of(spec, plan)
        trace = made.trace(batch, grads=True)
        grads = made.loss_and_grads([batch])
        made.init_optimizer(AdamW())
        made.train_step([batch], LR)
        out.append(((trace.loss, dict(trace.grads)), grads, dict(made.params())))
    return out


@pytest.mark.parametrize("over", ["head", "all"])
def test_c043_c058_qk_norms_are_exact_at_every_entry_point(ranks: RankPool, over: str) -> None:
    spec, batch = dense(over=over), tokens()
    _, want, updated = run_entry_points(0, 1, [""], spec, batch)[0]
    assert_same(want, reference(spec, [batch]))
    for results in ranks.run(2, run_entry_points, ["tp=2", "tp=2,sequence_parallel"], spec, batch):
        for traced, grads, params in results:
            assert_same(traced, want)
            assert_same(grads, want)
            for name, value in updated.items():
                assert relative_error(value, params[name])[0] <= bound("updated_parameter", "float64"), name


@contextmanager
def fixed_grads(made: TorchSession, value: float, *, is_mean: bool = True) -> Iterator[None]:
    """Every local gradient is this number; with `is_mean`, over the ranks that sum it, so that sums are this number."""
    hooks = []
    for leaf in leaves_of(made.model, made.storage):
        fixed = torch.empty(leaf.parameter.shape, dtype=leaf.parameter.dtype)
        for bucket, _, first, stop in leaf.places:
            fixed[first:stop] = value / (made.groups.size(bucket.summed) if is_mean else 1)
        hooks.append(leaf.parameter.register_hook(lambda grad, fixed=fixed: fixed.clone()))
    yield
    for hook in hooks:
        hook.remove()


def run_norms(rank: int, world: int, plans: Sequence[str], spec: ModelSpec) -> list[float]:
    """The norm of a step in which every gradient is 1."""
    out = []
    for plan in plans:
        made = session_of(spec, plan)
        made.init_optimizer(AdamW())
        with fixed_grads(made, 1.0):
            out.append(made.train_step([tokens()], LR).grad_norm)
    return out


@pytest.mark.parametrize(
    "plans",
    [
        ("tp=2", "tp=2,sequence_parallel", "dp=2,zero=1"),
        (
            "tp=4,sequence_parallel",
            "tp=2,dp=2,zero=1",
            "tp=2,dp=2,zero=3,sequence_parallel",
            "dp=4,zero=3,zero_shard=2",
        ),
    ],
)
def test_c059_every_element_enters_the_norm_once(ranks: RankPool, plans: Sequence[str]) -> None:
    """With every gradient 1 the norm is the root of the number of parameters; 2 kv heads have copies at tp=4."""
    spec = dense(num_kv_heads=2)
    count = sqrt(build_program(spec).num_params)
    for norms in ranks.run(world_of(plans[0]), run_norms, plans, spec):
        for got in norms:
            assert abs(got - count) <= bound("global_norm", "float64") * count


# Copies


def run_ties(rank: int, world: int, plan: str, spec: ModelSpec, data: Sequence[Batch]) -> list[Any]:
    """(loss, weights as the embedding had them, as the head had them) of each of ten updates with decay."""
    made = session_of(spec, plan)
    made.init_optimizer(AdamW())
    seen: dict[str, bytes] = {}

    def look(module: nn.Module, _: Any, name: str) -> None:
        # a copy: what numpy shares, ZeRO-3 cannot free
        seen[name] = module.get_parameter("weight").detach().clone().numpy().tobytes()

    made.model.embed.register_forward_pre_hook(partial(look, name="embed"))
    made.model.head.register_forward_pre_hook(partial(look, name="head"))
    return [(made.train_step([batch], LR).loss, seen["embed"], seen["head"]) for batch in data]


@pytest.mark.parametrize("plan", ["tp=2,sequence_parallel", "dp=2,zero=3", "tp=2,dp=2,zero=3"])
def test_c060_copies_of_a_tie_stay_equal(ranks: RankPool, plan: str) -> None:
    """To the bit where both are used, in every one of ten steps and on all data ranks; losses are those of one rank."""
    spec, data = dense(vocab_size=61, tie_embeddings=True), [tokens(vocab=61, seed=step) for step in range(10)]
    want = run_ties(0, 1, "", spec, data)
    results = ranks.run(world_of(plan), run_ties, plan, spec, data)
    tp = Plan.parse(plan).tp
    for rank, steps in enumerate(results):
        for (loss, embed, head), (one, *_) in zip(steps, want, strict=True):
            assert embed == head
            assert abs(loss - one) <= bound("loss_curve", "float64") * one
        assert [step[1] for step in steps] == [step[1] for step in results[rank % tp]]
    assert len({embed for _, embed, _ in results[0]}) == 10


def run_copies(
    rank: int, world: int, plans: Sequence[str], spec: ModelSpec, batch: Batch
) -> list[tuple[Grads, int, dict[str, bytes], dict[str, tuple[int, ...]]]]:
    out = []
    for plan in plans:
        made = session_of(spec, plan)
        grads = made.loss_and_grads([batch])
        made.init_optimizer(AdamW())
        for _ in range(3):
            made.train_step([batch], LR)
        shapes = {name: array.shape for name, array in made.params()}
        out.append((grads, made.groups.coordinate["tp"], local_weights(made), shapes))
    return out


def test_c066_kv_heads_in_copies(ranks: RankPool) -> None:
    """8 query heads and 2 kv heads over 4 ranks: equal gradients, copies equal to the bit, two heads to save."""
    spec, batch = dense(num_kv_heads=2), tokens()
    want = reference(spec, [batch])
    results = ranks.run(4, run_copies, ["tp=4", "tp=4,sequence_parallel"], spec, batch)
    for runs in zip(*results, strict=True):
        assert [place for _, place, _, _ in runs] == [0, 0, 1, 1]
        for grads, place, held, shapes in runs:
            assert_same(grads, want)
            for name in ("layers.0.attention.k.weight", "layers.1.attention.v.weight"):
                assert shapes[name] == (2 * 8, 16)
                assert held[name] == runs[2 * place][2][name] and len(held[name]) == 8 * 16 * 8
                assert held[name] != runs[2 - 2 * place][2][name]
    with pytest.raises(PlanError, match="tp=3"):
        TorchSession(build_program(spec), plan=Plan(tp=3), device="cpu")


# Steps


def test_c067_a_target_weighs_the_same_however_a_step_is_cut(ranks: RankPool) -> None:
    """Two samples with 11 and 101 targets: together, one after the other, on two ranks; and with one that has none."""
    spec, whole = dense(), tokens(samples=4, seq=104)
    whole.labels[0, 11:] = whole.labels[1, 101:] = whole.labels[2] = IGNORE
    pairs = [Batch(whole.tokens[i : i + 2], whole.labels[i : i + 2]) for i in (0, 2)]
    singles = [Batch(whole.tokens[i : i + 1], whole.labels[i : i + 1]) for i in (0, 1)]
    want = reference(spec, pairs[:1])
    assert_same(session_of(spec).loss_and_grads(singles), want)
    assert_like_one_rank(ranks, spec, ["dp=2", "dp=2,zero=2", "dp=2,zero=3"], pairs[:1])
    assert_like_one_rank(ranks, spec, ["dp=2,micro_batches=2", "dp=2,zero=3,micro_batches=2"], pairs)


def run_clipped(rank: int, world: int, plan: str, spec: ModelSpec, steps: int) -> list[tuple[float, dict[str, bytes]]]:
    """The norm of each step, and this rank's weights after it."""
    made = session_of(spec, plan)
    made.init_optimizer(AdamW(max_grad_norm=0.1))
    out = []
    for step in range(steps):
        norm = made.train_step([tokens(seed=step)], LR).grad_norm
        out.append((norm, local_weights(made)))
    return out


@pytest.mark.parametrize("plan", ["tp=2,dp=2", "tp=2,dp=2,sequence_parallel,zero=1", "tp=4,sequence_parallel", "dp=4"])
def test_c075_all_ranks_clip_alike(ranks: RankPool, plan: str) -> None:
    """Twenty clipped steps: norms are equal to the bit, and so is every weight that two ranks have."""
    spec = dense()
    results = ranks.run(world_of(plan), run_clipped, plan, spec, 20)
    _, grads = reference(spec, [tokens()])
    norm = sqrt(sum(float(np.sum(grad**2)) for grad in grads.values()))
    assert abs(results[0][0][0] - norm) <= bound("global_norm", "float64") * norm
    tp = Plan.parse(plan).tp
    for made in zip(*results, strict=True):
        assert made[0][0] > 0.1 and len({norm for norm, _ in made}) == 1
        for rank, (_, held) in enumerate(made):
            for name, data in held.items():
                peer = 0 if "norm" in name else rank % tp
                assert data == made[peer][1][name], name


def run_sums(rank: int, world: int, plan: str, spec: ModelSpec, micro: Sequence[float]) -> dict[str, Array]:
    """Gradients of a bf16 model whose local gradients are 1 + rank / 128, times a number for each micro-batch."""
    program = build_program(spec)
    made = TorchSession(program, plan=Plan.parse(plan + ",precision=bfloat16"), compute_dtype="bfloat16", device="cpu")
    made.load_params((name, array.astype(np.float32)) for name, array in params_of(program).items())
    left: dict[str, list[float]] = {}

    def fixed(grad: Tensor, name: str) -> Tensor:
        return torch.full_like(grad, (1 + rank / 128) * left.setdefault(name, [*micro]).pop(0))

    for name, parameter in made.model.named_parameters():
        parameter.register_hook(partial(fixed, name=name))
    return made.loss_and_grads([tokens(seed=i) for i in range(len(micro))])[1]


@pytest.mark.parametrize("zero", ["", ",zero=1", ",zero=2", ",zero=3", ",zero=2,zero_shard=2"])
def test_c093_c094_narrow_gradients_are_summed_wide(ranks: RankPool, zero: str) -> None:
    """Four ranks with 1, 1 + 1/128, ...: bf16 has no number for their sum. Micro-batches of 256 and 1 times that."""
    want = 4 + 6 / 128
    for micro in ([1.0], [256.0, 1.0]):
        plan = f"dp=4,micro_batches={len(micro)}{zero}"
        for grads in ranks.run(4, run_sums, plan, dense(), micro):
            assert all(np.array_equal(grad, np.full_like(grad, want * sum(micro))) for grad in grads.values())
    narrow = ranks.run(4, run_sums, f"dp=4,grad_dtype=bfloat16{zero}", dense(), [1.0])[0]
    assert not np.array_equal(narrow["head.norm.weight"].astype(np.float64), np.full(16, want))


def run_masks(rank: int, world: int, plan: str, spec: ModelSpec, batch: Batch) -> tuple[dict[str, int], Any]:
    """This rank's place, and where each dropout keeps an element in one step and in the next."""
    made = session_of(spec, plan)
    masks: list[dict[str, Array]] = []
    for step in range(2):
        record: dict[str, Tensor] = {}
        made.model(**made._device_inputs(batch, DropoutKey(7, step)), record=record)
        masks.append({name: (value != 0).numpy() for name, value in record.items() if "dropout" in name})
    return made.groups.coordinate, masks


@pytest.mark.parametrize("is_split", [False, True])
def test_c081_dropout_masks_in_every_layout(ranks: RankPool, is_split: bool) -> None:
    """Equal on tp ranks, different on shards of the sequence and on data ranks, and together those of one rank."""
    spec = dense(dropout=0.1)
    batch = replace(tokens(8, 32), sample_ids=np.arange(8, dtype=np.int64))
    _, want = run_masks(0, 1, "", spec, batch)
    kept = np.concatenate([mask.ravel() for masks in want for mask in masks.values()])
    assert 100 * abs(kept.mean() - 0.9) <= 0.9  # one per cent of nine tenths
    assert len({mask.tobytes() for masks in want for mask in masks.values()}) == 10
    results = ranks.run(4, run_masks, "tp=2,dp=2" + ",sequence_parallel" * is_split, spec, batch)
    for step, masks in enumerate(want):
        for name, whole in masks.items():
            parts = {(at["dp"], at["tp"]): made[step][name] for at, made in results}
            for (dp, tp), mask in parts.items():
                places = slice(16 * tp, 16 * (tp + 1)) if is_split else slice(None)
                assert np.array_equal(mask, whole[4 * dp : 4 * (dp + 1), places]), name
            for a, b in combinations(parts, 2):
                assert np.array_equal(parts[a], parts[b]) == (not is_split and a[0] == b[0]), name


@dataclass(frozen=True)
class Faulty:
    """Results of a run's steps, whether a skipped one left all state as it was, and what came out in the end."""

    results: list[StepResult]
    is_kept: bool
    params: dict[str, Array]
    updates: int


@contextmanager
def bad_numbers(made: TorchSession, fault: str) -> Iterator[None]:
    """On this rank alone: NaN in what the head computes, or an infinite element of one gradient."""
    if fault == "loss":
        hook: Any = made.model.head.register_forward_hook(lambda _module, _inputs, out: tuple(x * nan for x in out))
    else:
        parameter = made.model.get_parameter("layers.1.mlp.down.weight")
        hook = parameter.register_hook(lambda grad: grad.flatten().index_fill(0, torch.tensor(3), inf).view_as(grad))
    yield
    hook.remove()


def run_faulty(
    rank: int, world: int, plan: str, spec: ModelSpec, steps: int, faults: Mapping[int, str], *, leaves_out: bool
) -> Faulty:
    """A run in which rank 1 makes bad numbers at some steps, or one without those steps."""
    made, results, is_kept = session_of(spec, plan), [], True
    made.init_optimizer(AdamW())
    for step in range(steps):
        fault = faults.get(step)
        if fault is None:
            results.append(made.train_step([tokens(seed=step)], LR))
        elif not leaves_out:
            before = [array.tobytes() for *_, array in made.optimizer_state()]
            with bad_numbers(made, fault) if rank == 1 else nullcontext():
                results.append(made.train_step([tokens(seed=step)], LR))
            is_kept = is_kept and before == [array.tobytes() for *_, array in made.optimizer_state()]
    return Faulty(results, is_kept, dict(made.params()), made.optimizer_step_count())


FAULTS = {1: "loss", 3: "gradient"} | dict.fromkeys(range(4, 9), "loss")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "tp=2,dp=2,sequence_parallel,zero=1"])
def test_c119_all_ranks_skip_the_same_steps(ranks: RankPool, plan: str) -> None:
    """Whatever one rank's numbers are. A skipped step is as if it had not been: the run goes on to the same bits."""
    world = world_of(plan)
    made: list[Faulty] = ranks.run(world, partial(run_faulty, leaves_out=False), plan, dense(), 10, FAULTS)
    want: list[Faulty] = ranks.run(world, partial(run_faulty, leaves_out=True), plan, dense(), 10, FAULTS)
    for got, clean in zip(made, want, strict=True):
        assert [step for step, result in enumerate(got.results) if result.is_skipped] == list(FAULTS)
        assert got.is_kept and got.updates == clean.updates == 10 - len(FAULTS)
        assert [result for result in got.results if not result.is_skipped] == clean.results
        assert all(np.array_equal(got.params[name], value) for name, value in clean.params.items())
