"""Plans: their text, every problem that one can have, and that the axis rules of a good one keep the model the same."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_cases import BLOCK, MLP, attention, model

from duomesh.api import new_session
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.errors import PlanError
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import ContextKind, Plan, PlanDType, Schedule
from duomesh.core.plan.problem import Problem
from duomesh.core.plan.rules import expert_view, mesh_and_rules
from duomesh.core.plan.shard import shard, shard_for_session
from duomesh.core.plan.validate import check, check_step, validate
from duomesh.core.session import AdamW
from duomesh.core.sharding.check import check_model
from duomesh.core.sharding.collectives import StepShape, step_collectives
from duomesh.core.sharding.mesh import MeshAxis, atoms
from duomesh.core.spec.model import ModelSpec, MoeSpec
from duomesh.core.verify.compare import relative_error
from duomesh.kernels.reference.model import ReferenceModel
from duomesh.kernels.reference.sharded import ShardedModel


def heads(num_heads: int, num_kv_heads: int, ffn_size: int = 48, vocab_size: int = 48) -> ModelSpec:
    block = attention(num_heads=num_heads, num_kv_heads=num_kv_heads)
    return model(replace(block, mlp=replace(MLP, ffn_size=ffn_size)), vocab_size=vocab_size)


EVEN = heads(8, 8)  # tp of 1, 2, 4 and 8 fit
GQA = heads(8, 2)
MOE = MoeSpec(num_experts=12, top_k=2, ffn_size=12, activation="silu", is_gated=True, renormalize=True)
EXPERTS = model(replace(EVEN.blocks[0], moe=MOE), vocab_size=48)
WIDE = replace(BLOCK, mlp=replace(MLP, ffn_size=48))
MIXED = model(  # kv heads 2 and 4: tp=4 asks for two copies in both, and the second has one query head for each
    replace(attention(num_heads=4, num_kv_heads=2), mlp=WIDE.mlp),
    replace(attention(num_heads=4, num_kv_heads=4), mlp=WIDE.mlp),
    vocab_size=48,
)

# name: model, plan, other arguments, what each sentence of a structural problem must say
IMPOSSIBLE: dict[str, tuple[ModelSpec, str, dict[str, int], list[str]]] = {
    "heads": (
        heads(7, 7),
        "tp=2",
        {},
        [
            "num_heads=7, num_kv_heads=7, tp=2: tp must divide the query heads; use tp in 1.",
            "num_kv_heads=7, tp=2: tp must divide the kv heads or be a multiple of them",
        ],
    ),
    "c158_kv_heads": (
        heads(6, 3),
        "tp=2",
        {},
        ["num_kv_heads=3, tp=2: tp must divide the kv heads or be a multiple of them; use tp in 1, 3, 6."],
    ),
    "c066_query_heads_of_copies": (
        GQA,
        "tp=3",
        {},
        [
            "num_heads=8, num_kv_heads=2, tp=3: tp must divide the query heads; use tp in 1, 2, 4, 8.",
            "num_kv_heads=2, tp=3",
        ],
    ),
    "more_copies_than_query_heads": (GQA, "tp=16", {}, ["num_heads=8, num_kv_heads=2, tp=16: tp must divide"]),
    "blocks_that_disagree": (
        MIXED,
        "tp=4",
        {},
        ["num_heads=4, num_kv_heads=4, tp=4: its 1 query heads per kv head must be a multiple of the 2 copies"],
    ),
    "ffn": (
        heads(8, 8, ffn_size=28),
        "tp=8",
        {},
        ["ffn_size=28, tp=8: tp must divide the ffn size; use tp in 1, 2, 4."],
    ),
    "c056_sequence": (
        EVEN,
        "tp=4,sequence_parallel",
        {"seq": 30},
        ["seq=30, tp=4: tp must divide the sequence length under sequence_parallel; use seq=28 or 32."],
    ),
    "c056_packed_sequence": (EVEN, "tp=4,sequence_parallel", {"seq": 61}, ["seq=61, tp=4: .*; use seq=60 or 64."]),
    "sequence_shorter_than_tp": (EVEN, "tp=4,sequence_parallel", {"seq": 3}, ["seq=3, tp=4: .*; use seq=4."]),
    "sequence_over_two_axes": (
        EVEN,
        "tp=2,cp=3,sequence_parallel",
        {"seq": 16},
        [r"seq=16, cp=3, tp=2: 2\*cp=6 and cp\*tp=6 must divide the sequence length under .*; use seq=12 or 18."],
    ),
    "sequence_over_cp": (
        EVEN,
        "tp=4,cp=2",
        {"seq": 15},
        [r"seq=15, cp=2, tp=4: 2\*cp=4 must divide the sequence length; use seq=12 or 16."],
    ),
    "c167_sequence_parallel_alone": (
        EVEN,
        "sequence_parallel",
        {},
        ["sequence_parallel, tp=1: sequence parallelism is over the tp ranks; leave it out or use tp=2"],
    ),
    "c163_global_batch": (
        EVEN,
        "dp=2,global_batch_size=10,micro_batch_size=4",
        {},
        [
            "global_batch_size=10, micro_batch_size=4, micro_batches=1, dp=2: .*=8; use global_batch_size=8 or 16, "
            "micro_batches=1 or 2."
        ],
    ),
    "c163_batch_below_dp": (
        EVEN,
        "dp=4,global_batch_size=2",
        {},
        [r"global_batch_size=2, micro_batches=1, dp=4: .* multiple of micro_batches\*dp=4; use global_batch_size=4."],
    ),
    "c163_micro_batches": (EVEN, "dp=2,global_batch_size=16,micro_batch_size=4", {}, ["=8; use micro_batches=2."]),
    "c163_three_micro_batches": (
        EVEN,
        "dp=2,micro_batches=3,global_batch_size=16",
        {},
        ["use global_batch_size=12 or 18."],
    ),
    "world_that_another_dp_fills": (
        EVEN,
        "tp=4,dp=4",
        {"world_size": 8},
        [r"8 ranks, tp=4, dp=4, cp=1, pp=1: tp\*dp\*cp\*pp=16 ranks are needed; use dp=2 or start 16 ranks."],
    ),
    "world_that_nothing_fills": (EVEN, "tp=4,dp=4", {"world_size": 6}, ["6 ranks, .*start 16 ranks, or 4 or 8 with"]),
    "zero_alone": (EVEN, "zero=1", {}, ["zero=1, dp=1: zero shares state among dp ranks; use zero=0 or dp=2 or more."]),
    "zero_shard": (
        EVEN,
        "dp=12,zero=3,zero_shard=5",
        {},
        ["zero_shard=5, dp=12: zero_shard must divide dp; use zero_shard=4 or 6."],
    ),
    "zero_shard_of_nothing": (EVEN, "dp=4,zero_shard=2", {}, ["zero_shard=2, zero=0: zero_shard needs zero"]),
    "narrow_sums": (
        EVEN,
        "precision=bfloat16,grad_dtype=bfloat16,micro_batches=2",
        {},
        ["grad_dtype=bfloat16, micro_batches=2: .*; use grad_dtype=float32 or micro_batches=1."],
    ),
    "narrow_gradients": (
        EVEN,
        "precision=float64,grad_dtype=float32",
        {},
        ["grad_dtype=float32, precision=float64: .* kept in float64; use grad_dtype=float64."],
    ),
    "wide_gradients": (EVEN, "precision=bfloat16,grad_dtype=float64", {}, ["use grad_dtype=float32 or bfloat16."]),
    "c160_views_without_atoms": (
        EXPERTS,
        "tp=4,dp=3,ep=6,etp=1",
        {},
        ["dp=3,cp=1,tp=4, ep=6, etp=1: .* at 4 and at 6, which is no multiple.*; use ep=4 or 12 with etp=1."],
    ),
    "c161_derived_etp": (
        EXPERTS,
        "tp=4,ep=4",
        {},
        [
            r"ep=4 and etp = tp = 4 \(etp was not given\) need a multiple of ep\*etp=16 ranks, "
            "but dp=1,cp=1,tp=4 has 4; use etp=1."
        ],
    ),
    "replicas_without_atoms": (
        EXPERTS,
        "dp=12,zero=1,zero_shard=4,ep=6,etp=1",
        {},
        ["dp=12,cp=1,tp=1, ep=6, etp=1, zero_shard=4: .* at 4 and at 6, which is no multiple.*; leave zero_shard out."],
    ),
    "copies_of_kv_heads_without_atoms": (
        model(replace(attention(num_heads=12, num_kv_heads=2), mlp=WIDE.mlp, moe=MOE), vocab_size=48),
        "tp=6,ep=3,etp=2",
        {"seq": 24},
        ["dp=1,cp=1,tp=6, ep=3, etp=2: tp=2,tp_copies=3 .* at 2 and at 3, which is no multiple.*; use another tp"],
    ),
    "experts_that_ep_does_not_divide": (
        EXPERTS,
        "dp=8,ep=8",
        {},
        ["num_experts=12, ep=8: ep must divide the experts; use ep in 1, 2, 3, 4, 6, 12."],
    ),
    "experts_that_etp_does_not_divide": (
        EXPERTS,
        "tp=8,ep=1",
        {},
        [r"expert ffn_size=12, etp=8 \(etp was not given\): etp must divide .*; use etp=6 or 12."],
    ),
    "ep_without_experts": (EVEN, "dp=2,ep=2,etp=1", {}, ["ep=2: the model has no experts; leave it out."]),
    "tokens_that_experts_cannot_share": (
        EXPERTS,
        "tp=4,ep=4,etp=1",
        {"seq": 30},
        ["seq=30, tp=4, ep=4: the 4 tp ranks that share the experts must divide .*; use seq=28 or 32."],
    ),
    "more_experts_than_ranks": (
        EXPERTS,
        "tp=4,ep=12,etp=1",
        {},
        [r"etp=1 need .* ep\*etp=12 ranks.*; use ep=4 with etp=1."],
    ),
    "c167_virtual_stages": (EVEN, "vpp=2", {}, ["vpp=2, pp=1: parts of pipeline ranks need pp > 1"]),
    "schedule": (EVEN, "schedule=1f1b", {}, ["schedule=1f1b, pp=1: a schedule needs pp > 1"]),
    "stages_without_layers": (EVEN, "pp=2,vpp=2", {}, [r"pp=2, vpp=2, num_layers=2: .*; use pp\*vpp of at most 2."]),
    "context_kind": (EVEN, "cp_kind=ring", {}, ["cp_kind=ring, cp=1: cp_kind needs cp > 1"]),
    "c167_five_at_once": (
        heads(7, 7),
        "tp=2,vpp=2,zero=1,micro_batches=3,global_batch_size=10",
        {"world_size": 3},
        ["num_heads=7", "num_kv_heads=7", "vpp=2", "zero=1", "global_batch_size=10", "3 ranks, tp=2"],
    ),
}


def structural(spec: ModelSpec, plan: Plan, **others: int) -> list[Problem]:
    return [problem for problem in validate(spec, plan, **others) if problem.kind == "impossible"]


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_plans_are_told_all_that_is_wrong(name: str) -> None:
    """No problem is missing, none is invented, and `check` raises the same lines."""
    spec, text, others, expected = IMPOSSIBLE[name]
    plan = Plan.parse(text)
    lines = [str(problem) for problem in structural(spec, plan, **others)]
    assert len(lines) == len(expected), lines
    for fragment in expected:
        assert any(_says(line, fragment) for line in lines), (fragment, lines)
    with pytest.raises(PlanError) as caught:
        check(spec, plan, **others)
    assert set(lines) <= set(str(caught.value).split("\n"))


def _says(line: str, pattern: str) -> bool:
    return pattern in line or re.search(pattern, line) is not None


@pytest.mark.parametrize(
    "text",
    ["", "tp=8,sequence_parallel", "dp=4,zero=3,zero_shard=2", "dp=2,micro_batches=3,global_batch_size=12",
     "dp=2,micro_batches=3,micro_batch_size=2,global_batch_size=12", "precision=float64,grad_dtype=float64",
     "precision=float64", "precision=bfloat16,grad_dtype=bfloat16"],
)  # fmt: skip
def test_plans_that_fit_have_no_problem(text: str) -> None:
    plan = Plan.parse(text)
    assert validate(EVEN, plan, seq=16, world_size=plan.world_size) == []
    check(EVEN, plan)


def test_c066_kv_heads_in_copies_fit() -> None:
    for tp in (2, 4, 8):
        assert validate(GQA, Plan(tp=tp)) == []


def test_what_a_sentence_offers_is_right() -> None:
    """Each tp of the list fits, every other is refused."""
    for spec, allowed in ((GQA, {1, 2, 4, 8}), (heads(6, 3), {1, 3, 6}), (heads(12, 4), {1, 2, 4, 12})):
        assert {tp for tp in range(1, 30) if not validate(spec, Plan(tp=tp))} == allowed
        (problem, *_) = validate(spec, Plan(tp=5))
        assert problem.fix == f"use tp in {', '.join(map(str, sorted(allowed)))}"


def test_what_is_not_built_hides_nothing() -> None:
    spec = model(replace(heads(7, 7).blocks[0], moe=MOE), heads(7, 7).blocks[0], vocab_size=48)
    found = validate(spec, Plan.parse("tp=2,pp=2,schedule=gpipe,cp=2,cp_kind=a2a,ep=4,etp=1"))
    assert [p.given for p in found if p.kind == "not_built"] == [
        "pp=2", "schedule=gpipe", "cp=2", "cp_kind=a2a", "ep=4", "etp=1",
    ]  # fmt: skip
    assert "pp=2: pp is not built yet; leave it out." in map(str, found)
    assert len([p for p in found if p.kind == "impossible"]) == 2
    with pytest.raises(PlanError, match="vpp is not built yet"):
        check(EVEN, Plan(vpp=2))


# What a session makes of a plan

NOT_BUILT = {"pp": 2, "vpp": 2, "schedule": "gpipe", "cp": 2, "cp_kind": "ring", "ep": 2, "etp": 1}
OF_A_STEP = ("micro_batches", "global_batch_size", "micro_batch_size")
LAYOUTS = {
    "tp": "tp=2",
    "dp": "dp=4",
    "sequence_parallel": "tp=2,sequence_parallel",
    "zero": "dp=4,zero=1",
    "zero_shard": "dp=4,zero=1,zero_shard=2",
}


def test_c166_every_field_has_an_effect_or_is_refused() -> None:
    dtypes = {"precision", "grad_dtype"}
    assert {*NOT_BUILT, *OF_A_STEP, *LAYOUTS, *dtypes} == {f.name for f in fields(Plan)}
    seen = set()
    for text in ("", *LAYOUTS.values()):
        made = shard_for_session(build_program(EVEN), Plan.parse(text), "float32")
        shape = StepShape(batch=4, seq=16)
        seen.add((made.sharded.mesh, tuple(step_collectives(made, shape))))
    assert len(seen) == len(LAYOUTS) + 1


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", NOT_BUILT)
def test_c166_a_session_refuses_what_is_not_built(name: str, backend: str) -> None:
    spec = EXPERTS if name in ("ep", "etp") else EVEN
    with pytest.raises(PlanError, match=f"{name} is not built yet"):
        new_session(spec, backend=backend, device="cpu", plan=Plan(**{name: NOT_BUILT[name]}))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_c166_a_session_refuses_another_precision(backend: str) -> None:
    with pytest.raises(PlanError, match=r"^precision=bfloat16, dtype=float32: .* use dtype=bfloat16"):
        new_session(EVEN, backend=backend, device="cpu", plan=Plan(precision="bfloat16"))
    with pytest.raises(PlanError, match="grad_dtype=float32, precision=float64"):
        new_session(EVEN, backend=backend, device="cpu", dtype="float64", plan=Plan(grad_dtype="float32"))
    made = new_session(EVEN, backend=backend, device="cpu", dtype="bfloat16", plan=Plan(precision="bfloat16"))
    assert made.plan == Plan(precision="bfloat16")


def step_batches(*samples: int) -> list[Batch]:
    ids = np.arange(64, dtype=np.int32).reshape(8, 8) % 48
    return [Batch(ids[:count], ids[:count]) for count in samples]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_c166_a_step_has_the_batches_that_its_plan_states(backend: str) -> None:
    program = build_program(EVEN)
    for text, samples, sentence in (
        ("micro_batches=2", (2,), r"micro_batches=2, batches of the step: 1: .*; give 2 or"),
        ("micro_batches=1", (2, 2), r"micro_batches=1, batches of the step: 2"),
        ("global_batch_size=8", (2, 2), r"global_batch_size=8, samples of the step's batches: 4: .*; give 8 or"),
        ("micro_batch_size=4", (4, 2), r"micro_batch_size=4, dp=1, samples of a batch: 4, 2: .*; give 4 or"),
        ("grad_dtype=bfloat16,precision=bfloat16", (2, 2), "too narrow to add up several micro-batches"),
    ):
        plan = Plan.parse(text)
        session = new_session(EVEN, backend=backend, device="cpu", dtype=plan.resolved_precision, plan=plan)
        session.load_params(initial_params(program, 0))
        session.init_optimizer(AdamW())
        with pytest.raises(PlanError, match=sentence):
            session.train_step(step_batches(*samples), 0.1)
        with pytest.raises(PlanError, match=sentence):
            session.loss_and_grads(step_batches(*samples))
        assert session.optimizer_step_count() == 0


def test_a_step_as_its_plan_states_it() -> None:
    for text in ("", "micro_batches=2", "dp=2,micro_batches=2,micro_batch_size=2,global_batch_size=8"):
        check_step(Plan.parse(text), [4, 4])
    check_step(Plan(dp=2), [4, 4, 2])
    check_step(Plan(grad_dtype="bfloat16", precision="bfloat16"), [4])


@pytest.mark.parametrize(
    ("ep", "sizes", "names"), [(8, (1, 8, 1), ["dp.ep", "tp.ep"]), (4, (2, 4, 1), ["dp.edp", "tp.ep"])]
)
def test_c160_two_tilings_of_the_same_ranks(ep: int, sizes: tuple[int, ...], names: list[str]) -> None:
    plan = Plan(tp=4, dp=2, ep=ep, etp=1)
    view = expert_view(plan)
    assert [(axis.name, axis.size) for axis in view] == list(zip(("edp", "ep", "etp"), sizes, strict=True))
    assert structural(model(replace(EVEN.blocks[0], moe=replace(MOE, num_experts=8))), plan) == []
    made, members = atoms([MeshAxis("dp", 2), MeshAxis("tp", 4)], view)
    assert [axis.name for axis in made] == names
    assert members["ep"] == tuple(name for name in names if name.endswith(".ep"))  # from major to minor


# Text

_sizes = st.integers(1, 9999)


def _maybe(kind: Any) -> st.SearchStrategy[Any]:
    return st.none() | st.sampled_from(get_args(kind))


PLANS = st.builds(
    Plan, tp=_sizes, dp=_sizes, sequence_parallel=st.booleans(), zero=st.integers(0, 3), zero_shard=st.none() | _sizes,
    micro_batches=st.none() | _sizes, global_batch_size=st.none() | _sizes, micro_batch_size=st.none() | _sizes,
    precision=_maybe(PlanDType), grad_dtype=_maybe(PlanDType), pp=_sizes, vpp=_sizes,
    schedule=_maybe(Schedule), cp=_sizes, cp_kind=_maybe(ContextKind), ep=_sizes, etp=st.none() | _sizes,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(PLANS)
def test_text_and_back(plan: Plan) -> None:
    text = str(plan)
    assert Plan.parse(text) == plan
    assert Plan.parse(text.replace(",", " , ")) == plan
    named = {entry.partition("=")[0] for entry in text.split(",") if entry}
    assert named == {f.name for f in fields(plan) if getattr(plan, f.name) != f.default}


def test_text_of_the_readme() -> None:
    plan = Plan.parse("tp=8,dp=4,zero=1,sequence_parallel")
    assert plan == Plan(tp=8, dp=4, zero=1, sequence_parallel=True)
    assert plan.world_size == 32
    assert str(plan) == "tp=8,dp=4,sequence_parallel,zero=1"
    assert str(Plan(micro_batches=1, precision="float32")) == "micro_batches=1,precision=float32"
    assert str(Plan()) == "" and Plan.parse("") == Plan() == Plan.parse("tp=1,sequence_parallel=false")


def test_values_that_follow_from_others() -> None:
    plan = Plan(tp=4, dp=6, cp=2, pp=3, precision="float64", zero=1)
    assert (plan.world_size, plan.resolved_zero_shard, plan.resolved_etp) == (144, 6, 4)
    assert (Plan().resolved_micro_batches, Plan().resolved_precision) == (1, "float32")
    assert plan.resolved_grad_dtype == "float64"
    assert Plan(precision="bfloat16").resolved_grad_dtype == Plan().resolved_grad_dtype == "float32"
    assert replace(plan, precision="float32").resolved_grad_dtype == "float32"
    assert Plan(precision="bfloat16", grad_dtype="bfloat16").resolved_grad_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tpp=2", "plan: there is no field 'tpp'; did you mean tp"),
        ("sp", "plan: there is no field 'sp'; did you mean sequence_parallel?"),
        ("zero_shards=2", "did you mean zero_shard"),
        ("colour=red", "plan: there is no field 'colour'; the fields are tp, dp,"),
        ("=2", "there is no field ''"),
        ("tp=two", "plan: tp is 'two'; it must be an integer of at least 1."),
        ("tp=0", "plan: tp is 0; it must be"),
        ("tp=-1", "plan: tp is '-1'; it must be"),
        ("tp=2.0", "plan: tp is '2.0'"),
        ("tp=99999999999", "plan: tp is '99999999999'"),
        ("tp", "plan: tp is without a value; it must be an integer"),
        ("tp=", "plan: tp is without a value"),
        ("zero=4", "plan: zero is 4; it must be 0, 1, 2 or 3."),
        ("sequence_parallel=yes", "plan: sequence_parallel is 'yes'; it must be true or false"),
        ("precision=float16", "plan: precision is 'float16'; it must be one of float32, bfloat16, float64."),
        ("schedule=1b1f", "it must be one of gpipe, 1f1b, interleaved"),
        ("tp=2,tp=4", "plan: tp is given twice; leave one."),
    ],
)
def test_text_that_is_no_plan(text: str, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_the_words_of_an_error_begin_with_its_source() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse("tp=two,dpp=2", source="train.plan")
    assert [line.partition(": ")[0] for line in str(caught.value).split("\n")] == ["train.plan"] * 2
    assert "plan: plan" not in str(caught.value)


def test_every_wrong_entry_is_named() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse("tp=0,dpp=2,zero=9,dp=2,dp=3")
    assert len(str(caught.value).split("\n")) == 4
    with pytest.raises(PlanError, match=r"tp is 0.*\n.*zero is True.*\n.*precision is 'fp32'"):
        Plan(tp=0, zero=True, precision="fp32")  # type: ignore[arg-type]


# Mesh and rules


def test_mesh_of_a_plan() -> None:
    mesh, rules = mesh_and_rules(EVEN, Plan(tp=4, dp=2, pp=2, cp=1))
    assert [(a.name, a.size) for a in mesh.axes] == [("dp", 2), ("tp", 4)]  # axes of size 1 make no difference
    assert [rule.axis for rule in rules] == list(mesh.names)
    mesh, rules = mesh_and_rules(GQA, Plan(tp=8, cp=2, sequence_parallel=True))
    assert [(a.name, a.size) for a in mesh.axes] == [("cp", 2), ("tp", 2), ("tp_copies", 4)]
    assert [rule.stream for rule in rules] == ["seq", "seq", "seq"]
    assert [rule.order for rule in rules] == ["zigzag", "contiguous", "contiguous"]
    assert [rule.shares for rule in rules] == [True, False, False]
    mesh, _ = mesh_and_rules(EVEN, Plan(dp=8, zero=1, zero_shard=2))
    assert [(a.name, a.size) for a in mesh.axes] == [("dp_replicas", 4), ("dp", 2)]
    with pytest.raises(PlanError, match="tp must divide the query heads"):
        shard(build_program(GQA), Plan(tp=3))


def test_mesh_of_a_plan_with_experts() -> None:
    """Dense view dp=4,tp=2; experts over 4 ranks of two atoms: the dense axes are cut where the experts' are."""
    mesh, rules = mesh_and_rules(EXPERTS, Plan(dp=4, tp=2, ep=4, etp=1, sequence_parallel=True))
    assert [(a.name, a.size) for a in mesh.axes] == [("dp.edp", 2), ("dp.ep", 2), ("tp.ep", 2)]
    assert [rule.params for rule in rules] == [(), ("experts",), ("kv_heads", "ffn", "vocab", "experts")]
    assert [rule.shares for rule in rules] == [True, True, False]
    # experts that no rank splits over tp have other tokens on each of its ranks
    _, rules = mesh_and_rules(EXPERTS, Plan(dp=2, tp=2, ep=2, etp=1, sequence_parallel=True))
    assert [(rule.axis, rule.shares) for rule in rules] == [("dp.edp", True), ("tp.ep", False)]
    # so have copies of experts within tp, if its ranks have other tokens
    for text, shares in (("tp=4,ep=2,etp=1,sequence_parallel", True), ("tp=4,ep=2,etp=1", False)):
        _, rules = mesh_and_rules(EXPERTS, Plan.parse(text))
        assert [(rule.axis, rule.shares) for rule in rules] == [("tp.edp", shares), ("tp.ep", False)]
    # nothing of the experts is split: the dense axes are enough
    assert mesh_and_rules(EXPERTS, Plan(dp=2, etp=1))[0].names == ("dp",)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (heads(4, 2, ffn_size=12, vocab_size=22), text)
        for text in ("tp=2,dp=2,sequence_parallel", "tp=4,sequence_parallel", "tp=4,dp=2", "tp=2,cp=2", "dp=2,zero=1")
    ]
    + [
        (model(replace(heads(4, 2, ffn_size=12).blocks[0], moe=MOE), vocab_size=22), text)
        for text in ("tp=2,dp=2,ep=4,etp=1", "tp=2,dp=2,sequence_parallel,ep=2", "dp=2,cp=2,ep=4", "tp=4,etp=2,ep=2")
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_keeps_the_model_the_same(spec: ModelSpec, text: str) -> None:
    program = build_program(spec)
    params = {name: array.astype(np.float64) for name, array in initial_params(program, 3, perturb=0.3)}
    ids = np.random.default_rng(0).integers(0, 22, (2, 9)).astype(np.int32)
    labels = ids[:, 1:].copy()
    labels[0, :5] = IGNORE
    batch = Batch(np.ascontiguousarray(ids[:, :-1]), labels, None)
    loss, grads = ReferenceModel(program, params).loss_and_grads([batch])
    made = shard(program, Plan.parse(text)).sharded
    check_model(made)
    got_loss, got = ShardedModel(made, params).loss_and_grads([batch])
    assert abs(got_loss - loss) <= bound("loss", "float64") * abs(loss)
    assert set(got) == set(grads)
    for name, want in grads.items():
        assert relative_error(want, got[name])[0] <= bound("value", "float64"), name


def test_a_vocabulary_that_tp_does_not_divide_is_padded() -> None:
    spec = heads(8, 8, vocab_size=50257)
    assert validate(spec, Plan(tp=4)) == []
    assert shard(build_program(spec), Plan(tp=4)).local_elements("embed.weight", 0) == 50260 // 4 * spec.hidden_size
