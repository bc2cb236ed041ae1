"""Faults of parallel training that users have met, each as a plan on the simulated ranks: see the id in the name."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

import numpy as np
import pytest
from sharding_cases import Array, assert_same_grads, params_of
from spec_cases import attention, model

from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.rules import mesh_and_rules
from duomesh.core.plan.shard import shard
from duomesh.core.session import AdamW
from duomesh.core.sharding.program import shard_model
from duomesh.core.sharding.storage import Storage
from duomesh.core.spec.model import MlpSpec, ModelSpec, MoeSpec, NormSpec
from duomesh.core.verify.compare import relative_error
from duomesh.kernels.reference.model import ReferenceModel
from duomesh.kernels.reference.sharded import ShardedModel
from duomesh.kernels.reference.sharded_step import ShardedTraining

MLP = MlpSpec(ffn_size=32, activation="silu", is_gated=True)
HEADS = attention(num_heads=8, num_kv_heads=4)
MOE = MoeSpec(num_experts=8, top_k=2, ffn_size=16, activation="silu", is_gated=True, renormalize=True)


def dense(vocab_size: int = 64, **fields: object) -> ModelSpec:
    block = replace(HEADS, mlp=MLP)
    return model(block, block, vocab_size=vocab_size, hidden_size=16, **fields)


def experts(**fields: object) -> ModelSpec:
    block = replace(HEADS, mlp=None, moe=replace(MOE, **fields))  # type: ignore[arg-type]
    return model(block, block, vocab_size=64, hidden_size=16)


def tokens(samples: int = 4, seq: int = 16, vocab: int = 64, seed: int = 0) -> Batch:
    ids = np.random.default_rng(seed).integers(0, vocab, (samples, seq + 1)).astype(np.int32)
    return Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]), None)


def run(spec: ModelSpec, plan: str, batches: list[Batch], params: dict[str, Array]) -> tuple[float, dict[str, Array]]:
    return ShardedModel(shard(build_program(spec), Plan.parse(plan)).sharded, params).loss_and_grads(batches)


def assert_same(got: tuple[float, dict[str, Array]], want: tuple[float, dict[str, Array]]) -> None:
    assert abs(got[0] - want[0]) <= bound("loss", "float64") * abs(want[0])
    assert_same_grads(got[1], want[1])


def assert_like_one_rank(spec: ModelSpec, plan: str, batches: list[Batch]) -> None:
    program = build_program(spec)
    params = params_of(program)
    assert_same(run(spec, plan, batches, params), ReferenceModel(program, params).loss_and_grads(batches))


@pytest.mark.parametrize("plan", ["tp=4", "tp=8,sequence_parallel", "tp=4,dp=2"])
def test_c047_padding_rows_have_no_probability_and_no_gradient(plan: str) -> None:
    """With all output weights zero the loss is the log of the true vocabulary."""
    spec = dense(vocab_size=301)  # untied: the head alone is zero
    params = params_of(build_program(spec)) | {"head.weight": np.zeros((301, 16))}
    made = ShardedModel(shard(build_program(spec), Plan.parse(plan)).sharded, params)
    batch = tokens(vocab=301)
    loss, _ = made.loss_and_grads([batch])
    assert abs(loss - log(301)) <= bound("loss", "float64") * log(301)
    _, grads = made.local_grads([batch])
    rows = made.sharded.extents(batch=1, seq=1).padded("vocab", 301)
    assert rows > 301
    last = np.concatenate([grads["head.weight", 0][rank] for rank in range(Plan.parse(plan).tp)])
    assert last.shape[0] == rows and not last[301:].any() and last[:301].any()


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("positions", [[3], [1, 15]])
def test_c050_one_valid_target_weighs_the_same_over_context_ranks(cp: int, positions: list[int]) -> None:
    batch = tokens()
    labels = np.full_like(batch.labels, IGNORE)
    labels[:, positions] = batch.labels[:, positions]
    assert_like_one_rank(dense(), f"cp={cp}", [replace(batch, labels=labels)])


@pytest.mark.parametrize("cp", [2, 4])
def test_c051_token_losses_are_those_of_their_positions(cp: int) -> None:
    """Labels were shifted before they were cut: gathered, losses are those of one rank, position by position."""
    spec, batch = dense(), tokens(samples=1)
    program = build_program(spec)
    params = params_of(program)
    made = ShardedModel(shard(program, Plan(cp=cp)).sharded, params)
    step = made.run(batch)[-1]
    axes, layout = step.program.axes("token_loss"), step.program.layouts["token_loss"]
    got = made.whole(step.values["token_loss"], axes, layout)
    want = ReferenceModel(program, params).forward(batch)["loss.token_loss"]
    assert relative_error(want, got)[0] <= bound("value", "float64")


@pytest.mark.parametrize("plan", ["tp=4", "cp=4", "tp=2,cp=2", "tp=2,dp=2", "cp=2,dp=2"])
@pytest.mark.parametrize("spec", [dense(), experts()], ids=["dense", "experts"])
def test_c053_pairs_of_dimensions(spec: ModelSpec, plan: str) -> None:
    assert_like_one_rank(spec, plan, [tokens()])


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,sequence_parallel", "tp=4,sequence_parallel"])
@pytest.mark.parametrize("over", ["head", "all"])
def test_c043_c058_qk_norms_are_exact_under_tp(over: str, plan: str) -> None:
    norm = NormSpec(eps=1e-6)
    block = replace(attention(num_heads=8, num_kv_heads=4, qk_norm=norm, qk_norm_over=over), mlp=MLP)
    assert_like_one_rank(model(block, vocab_size=64, hidden_size=16), plan, [tokens()])


@pytest.mark.parametrize(
    "plan", ["tp=2", "tp=4,sequence_parallel", "dp=4", "tp=2,dp=2,zero=1", "dp=4,zero=3,zero_shard=2"]
)
def test_c059_every_element_enters_the_norm_once(plan: str) -> None:
    """With every gradient 1 the norm is the root of the number of parameters."""
    spec = dense()
    program = build_program(spec)
    made = ShardedTraining(shard(program, Plan.parse(plan)), params_of(program), AdamW())
    made._sums = {}
    for bucket in made.storage.buckets:
        ones = np.zeros(bucket.size)
        for member in bucket.members:
            ones[member.start : member.start + member.size] = 1.0
        made._sums[bucket.name] = made._own_ranges(bucket, [ones] * made.sharded.mesh.world_size)
    count = sqrt(program.num_params)
    assert abs(made._norm() - count) <= bound("global_norm", "float64") * count


def test_c060_copies_of_a_tie_stay_equal() -> None:
    """Ten updates with weight decay on two stages: `whole_params` refuses owners that differ in a bit."""
    spec = dense(tie_embeddings=True)
    program = build_program(spec)
    for plan in ("dp=2", "dp=2,zero=1"):
        mesh, rules = mesh_and_rules(spec, Plan.parse(plan))
        cut = shard_model(program, mesh, rules, stages=[0, 0, 0, 1, 1, 1])
        made = ShardedTraining(Storage(cut, Plan.parse(plan).zero), params_of(program), AdamW())
        for step in range(10):
            made.step([tokens(seed=step)], 0.01)
        assert "embed.weight" in made.whole_params()


@pytest.mark.parametrize("plan", ["tp=8", "tp=8,sequence_parallel", "tp=8,dp=2"])
def test_c066_kv_heads_in_copies(plan: str) -> None:
    """8 query heads and 4 kv heads over 8 ranks: two copies of each kv head."""
    assert_like_one_rank(dense(), plan, [tokens()])


@pytest.mark.parametrize("plan", ["", "dp=2", "dp=2,micro_batches=2"])
def test_c067_a_target_weighs_the_same_however_a_step_is_cut(plan: str) -> None:
    """Two samples with 3 and 15 targets: together, one after the other, on two ranks."""
    spec, batch = dense(), tokens(samples=4)
    labels = batch.labels.copy()
    labels[0, 3:], labels[1, 15:] = IGNORE, IGNORE
    whole = replace(batch, labels=labels)
    params = params_of(build_program(spec))
    halves = [Batch(whole.tokens[i : i + 2], labels[i : i + 2], None) for i in (0, 2)]
    want = run(spec, "", [whole], params)
    assert_same(run(spec, plan, halves if "micro" in plan else [whole], params), want)
    assert_same(run(spec, "", halves, params), want)


def test_c069_auxiliary_losses_do_not_grow_with_accumulation() -> None:
    spec = experts(balance_coefficient=0.01)
    params = params_of(build_program(spec))
    one = run(spec, "dp=2", [tokens()], params)
    for count in (2, 4):
        assert_same(run(spec, "dp=2", [tokens()] * count, params), one)


@pytest.mark.parametrize("plan", ["tp=2", "cp=2", "tp=2,cp=2", "tp=2,cp=2,sequence_parallel", "dp=2,tp=2,ep=2,etp=1"])
def test_c070_weights_of_auxiliary_losses_do_not_depend_on_layout(plan: str) -> None:
    assert_like_one_rank(experts(balance_coefficient=0.01, z_coefficient=1e-3), plan, [tokens()])


@pytest.mark.parametrize("plan", ["dp=2,etp=1", "dp=2,ep=2,etp=1", "dp=4,ep=2,etp=1,zero=1"])
def test_c074_c075_c077_experts_over_data_ranks(plan: str) -> None:
    """Gradients are summed over the global batch, each expert is once in the norm, and all ranks clip alike."""
    spec = experts(balance_coefficient=0.01)
    program = build_program(spec)
    params = params_of(program)
    assert_like_one_rank(spec, plan, [tokens()])
    _, grads = ReferenceModel(program, params).loss_and_grads([tokens()])
    norm = sqrt(sum(float(np.sum(g**2)) for g in grads.values()))
    made = ShardedTraining(shard(program, Plan.parse(plan)), params, AdamW(max_grad_norm=0.1))
    _, got = made.step([tokens()], 0.01)  # every rank's norm is compared within
    assert norm > 0.1 and abs(got - norm) <= bound("global_norm", "float64") * norm
    made.whole_params()  # dense parameters are equal to the bit on all ranks


@pytest.mark.parametrize("plan", ["tp=2,etp=1", "tp=2,etp=1,sequence_parallel", "dp=2,etp=2", "tp=4,etp=2,ep=2"])
def test_c078_experts_use_their_own_groups(plan: str) -> None:
    assert_like_one_rank(experts(balance_coefficient=0.01), plan, [tokens()])
