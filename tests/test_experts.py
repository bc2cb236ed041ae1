"""Mixtures of experts: routing, rows that do not exist, the terms of the loss, what the builder makes and refuses, and
who says that it cannot run them yet.

That a model computes what the papers say is shown in `test_oracle.py`, that adjoints are right in `test_reference.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from compare import distance
from spec_cases import BLOCK, CASES, EXPERT_CASES, MLP, MOE, experts, model
from test_oracle import full_batch, make_params, plain_batch, reference, routes_clearly
from test_report import settings

from duomesh.api import new_session
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.errors import BackendError, ConfigError, DataError, SpecError
from duomesh.core.ir.build import build_program
from duomesh.core.ir.cost import matmul_params
from duomesh.core.ir.listing import explain_program
from duomesh.core.ir.ops import EXPERT_KINDS
from duomesh.core.ir.program import ProgramBuilder, Term
from duomesh.core.ir.values import Axis, Init, Param, Value
from duomesh.core.objective import LOSS, term_seeds
from duomesh.core.spec.model import ModelSpec
from duomesh.core.spec.presets import preset
from duomesh.core.training.config import ModelConfig
from duomesh.core.training.model import change_spec
from duomesh.core.training.report import write_report
from duomesh.kernels.reference import ADJOINTS, OPS

Array = npt.NDArray[Any]

# --------------------------------------------------------------------------------------------------------- routing


def chosen(scores: list[float], top_k: int) -> list[int]:
    _, _, ids = OPS["route"](np.array([[scores]]), top_k=top_k, renormalize=False)
    assert ids.dtype == np.int32
    return list(ids[0, 0])


def test_choices_are_the_highest_scores_and_ties_go_to_the_lowest_id() -> None:
    assert chosen([0.1, 3.0, -1.0, 2.0], 3) == [1, 3, 0]
    assert chosen([1.0, 2.0, 1.0, 2.0, 1.0], 4) == [1, 3, 0, 2]
    assert chosen([0.0] * 6, 3) == [0, 1, 2]
    assert chosen([-0.0, 0.0], 1) == [0]
    # scores that differ by less than their probabilities can show
    assert chosen([1.0, np.nextafter(1.0, 2.0)], 1) == [1]


def test_gates_are_probabilities_or_their_shares() -> None:
    scores = np.log([[[0.1, 0.4, 0.2, 0.3]]])
    probs, gates, ids = OPS["route"](scores, top_k=2, renormalize=False)
    _, shares, _ = OPS["route"](scores, top_k=2, renormalize=True)
    assert list(ids[0, 0]) == [1, 3]
    assert distance(probs, np.exp(scores)) <= bound("value", "float64")
    assert distance(gates, np.array([[[0.4, 0.3]]])) <= bound("value", "float64")
    assert distance(shares, np.array([[[4 / 7, 3 / 7]]])) <= bound("value", "float64")


def test_routing_of_extreme_scores_is_finite() -> None:
    scores = np.array([[[1e4, -1e4, 9e3]]])
    probs, gates, _ = OPS["route"](scores, top_k=2, renormalize=True)
    assert list(probs[0, 0]) == [1, 0, 0] and list(gates[0, 0]) == [1, 0]
    assert OPS["z_sum"](scores) == 1e8
    (slope,) = ADJOINTS["z_sum"]((np.ones(()),), (scores,), ())
    assert slope.tolist() == [[[2e4, 0, 0]]]


def test_every_choice_is_counted_once() -> None:
    ids = np.array([[[0, 3], [3, 1]], [[4, 3], [0, 1]]], np.int32)
    counts = OPS["count_choices"](ids, num_experts=6)
    assert counts.tolist() == [2, 2, 0, 3, 1, 0] and counts.sum() == ids.size


def test_rows_of_experts_that_a_token_did_not_choose_are_never_read() -> None:
    """Forward and backward, whatever is in them."""
    rng = np.random.default_rng(0)
    ids = np.array([[[2, 0], [1, 2]]], np.int32)
    y, gates, c = rng.standard_normal((3, 1, 2, 4)), rng.uniform(0, 1, (1, 2, 2)), rng.standard_normal((1, 2, 4))
    filled = y.copy()
    filled[1, 0, 0] = filled[0, 0, 1] = np.nan
    np.testing.assert_array_equal(OPS["combine"](filled, gates, ids), OPS["combine"](y, gates, ids))
    want = ADJOINTS["combine"]((c,), (y, gates, ids), ())
    got = ADJOINTS["combine"]((c,), (filled, gates, ids), ())
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    assert not want[0][1, 0, 0].any() and not want[0][0, 0, 1].any()
    d_rows = rng.standard_normal((3, 1, 2, 4))
    (d_x, _) = ADJOINTS["dispatch"]((d_rows,), (c, ids), (), num_experts=3)
    d_rows[1, 0, 0] = np.nan
    (again, _) = ADJOINTS["dispatch"]((d_rows,), (c, ids), (), num_experts=3)
    np.testing.assert_array_equal(again, d_x)


def test_experts_that_are_elsewhere_add_nothing() -> None:
    """A rank that holds experts 3 to 5 of 6 counts ids from 3; the two halves add up to the whole."""
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(6)[:3] for _ in range(10)]).reshape(2, 5, 3).astype(np.int32)
    x, gates = rng.standard_normal((2, 5, 4)), rng.uniform(0, 1, (2, 5, 3))
    y, c = rng.standard_normal((6, 2, 5, 4)), rng.standard_normal((2, 5, 4))
    rows = OPS["dispatch"](x, ids, num_experts=6)
    out = OPS["combine"](y, gates, ids)
    d_y, d_gates, _ = ADJOINTS["combine"]((c,), (y, gates, ids), ())
    halves = [(slice(0, 3), ids), (slice(3, 6), ids - 3)]
    parts = []
    for half, local in halves:
        np.testing.assert_array_equal(OPS["dispatch"](x, local, num_experts=3), rows[half])
        pulled = ADJOINTS["combine"]((c,), (y[half], gates, local), ())
        np.testing.assert_array_equal(pulled[0], d_y[half])
        parts.append((OPS["combine"](y[half], gates, local), pulled[1]))
    assert distance(parts[0][0] + parts[1][0], out) <= bound("value", "float64")
    assert distance(parts[0][1] + parts[1][1], d_gates) <= bound("value", "float64")


def test_a_sum_of_gated_rows_is_rounded_once() -> None:
    """bf16 counts in twos from 256 on: 256 + 0.6 + 0.6 is 258, and 256 if every sum is rounded."""
    import ml_dtypes

    bf16 = np.dtype(ml_dtypes.bfloat16)
    y = np.array([256.0, 1.0, 1.0]).reshape(3, 1, 1, 1).astype(bf16)
    gates, ids = np.array([[[1.0, 0.6, 0.6]]], np.float32), np.array([[[0, 1, 2]]], np.int32)
    out = OPS["combine"](y, gates, ids)
    assert out.dtype == bf16 and float(out[0, 0, 0]) == 258.0


# ------------------------------------------------------------------------------------------------------- objective


def test_seeds_of_a_step_of_two_batches() -> None:
    """loss_sum by all targets, z by all tokens, balance by its own micro-batch's tokens times all."""
    spec = EXPERT_CASES["mixed_layers"]
    program = build_program(spec)
    assert program.terms == (
        Term("block0", "balance", 0.7 * 5 / 2, 2),
        Term("block2", "balance", 0.2 * 4 / 2, 2),
        Term("block2", "z", 0.3, 1),
    )
    first = Batch(np.zeros((2, 3), np.int32), np.array([[1, IGNORE, 1], [1, 1, 1]], np.int32))
    second = Batch(np.zeros((1, 4), np.int32), np.full((1, 4), 2, np.int32), np.array([[0.5, 0, 1, 1]], np.float32))
    seeds = term_seeds(program, [first, second])
    for made, tokens in zip(seeds, (6, 4), strict=True):
        assert made == {
            LOSS: 1 / 7.5,
            ("block0", "balance"): 0.7 * 5 / 2 / (tokens * 10),
            ("block2", "balance"): 0.2 * 4 / 2 / (tokens * 10),
            ("block2", "z"): 0.3 / 10,
        }
    with pytest.raises(DataError, match="at least one batch"):
        term_seeds(program, [])


def test_a_dense_model_has_only_the_loss_of_its_targets() -> None:
    program = build_program(CASES["gqa"])
    assert program.terms == ()
    batch = plain_batch(CASES["gqa"])
    assert term_seeds(program, [batch]) == [{LOSS: 1 / batch.tokens.size}]


def two_batches(spec: ModelSpec) -> tuple[dict[str, Array], list[Batch], Batch]:
    """Weights that route clearly; two batches of different sizes, and both in one."""
    whole = full_batch(spec)
    cut = [{f: None if x is None else x[rows] for f, x in vars(whole).items()} for rows in (slice(1), slice(1, 5))]
    return make_params(spec), [Batch(**fields) for fields in cut], whole


@pytest.mark.parametrize("balance", [0.0, 0.9])
def test_only_balance_depends_on_how_a_step_is_cut(balance: float) -> None:
    """z is a mean over all tokens; a balance term is that of each micro-batch, weighted by its tokens."""
    spec = model(experts(z_coefficient=0.4, balance_coefficient=balance))
    params, parts, whole = two_batches(spec)
    oracle = reference(spec, params)
    loss, grads = oracle.loss_and_grads(parts)
    want_loss, want = oracle.loss_and_grads([whole])
    is_equal = abs(loss - want_loss) <= bound("loss", "float64") * want_loss
    errors = [distance(grads[name], want[name]) for name in want]
    assert is_equal == (balance == 0.0)
    assert (max(errors) <= bound("gradient", "float64")) == (balance == 0.0)


def balance_of(spec: ModelSpec, params: dict[str, Array], batch: Batch) -> float:
    """The balance terms of a batch alone, from its traced routing: a E sum f P of each layer."""
    values = reference(spec, params).forward(batch)
    total = 0.0
    for n, block in enumerate(spec.blocks):
        assert block.moe is not None
        probs, ids = values[f"layers.{n}.moe.probs"], values[f"layers.{n}.moe.ids"]
        shares = [(ids == e).mean() * probs[..., e].mean() for e in range(block.moe.num_experts)]
        total += block.moe.balance_coefficient * block.moe.num_experts * sum(shares)
    return total


def test_balance_terms_are_averaged_by_tokens() -> None:
    spec = model(experts(balance_coefficient=0.9))
    params, parts, _ = two_batches(spec)
    loss, _ = reference(spec, params).loss_and_grads(parts)
    without = model(experts())
    plain, _ = reference(without, params).loss_and_grads(parts)
    want = sum(balance_of(spec, params, part) * part.tokens.size for part in parts) / 55
    assert abs(loss - plain - want) <= bound("loss", "float64") * loss


def test_a_step_without_targets_still_balances() -> None:
    """The router moves, and nothing else of the last layer."""
    spec = EXPERT_CASES["shared_expert"]
    batch = plain_batch(spec)
    batch.labels[:] = IGNORE
    params = make_params(spec, plain_batch)
    loss, grads = reference(spec, params).loss_and_grads([batch])
    assert loss > 0
    moved = {name for name, grad in grads.items() if grad.any() and "layers.1." in name}
    assert "layers.1.moe.router.weight" in moved and "layers.1.mlp_norm.weight" in moved
    still = ("moe.gate", "moe.up", "moe.down", "mlp.", "mlp_post_norm")
    assert not [name for name in moved if name.removeprefix("layers.1.").startswith(still)]
    assert not grads["head.weight"].any()
    dense = model()
    assert reference(dense, make_params(dense)).loss_and_grads([batch])[0] == 0.0


def test_perfect_balance_costs_its_coefficient() -> None:
    """The least that the term can be (Switch Transformer, section 2.2): f and P are 1 / E, so E sum f P is 1."""
    experts_, tokens = 4, 8
    probs = np.full((1, tokens, experts_), 1 / experts_)
    ids = (np.arange(tokens * 2) % experts_).reshape(1, tokens, 2).astype(np.int32)
    counts = OPS["count_choices"](ids, num_experts=experts_)
    program = build_program(model(experts(num_experts=experts_, balance_coefficient=0.3)))
    batch = Batch(np.zeros((1, tokens), np.int32), np.zeros((1, tokens), np.int32))
    (seeds,) = term_seeds(program, [batch])
    cost = seeds["block0", "balance"] * OPS["balance_sum"](probs, counts)
    assert abs(cost - 0.3) <= bound("loss", "float64")


def test_weights_that_route_clearly_are_told_from_others() -> None:
    """The search that other tests lean on refuses a router whose scores are all equal."""
    spec = EXPERT_CASES["experts"]
    batch = full_batch(spec)
    params = make_params(spec)
    assert routes_clearly(spec, params, batch)
    name = "layers.0.moe.router.weight"
    assert not routes_clearly(spec, params | {name: np.ones_like(params[name])}, batch)


# --------------------------------------------------------------------------------------------------------- builder


def test_names_and_shapes_of_a_block_with_a_shared_expert() -> None:
    program = build_program(EXPERT_CASES["shared_expert"])
    block = program.blocks[0]
    names = [op.name for op in block.ops]
    assert names[names.index("mlp_norm") + 1 :] == [
        *("mlp.gate_up", "mlp.glu", "mlp.down", "moe.router", "moe.route", "moe.counts", "moe.balance", "moe.z"),
        *("moe.dispatch", "moe.gate", "moe.up", "moe.glu", "moe.down", "moe.combine", "moe.sum"),
        *("mlp_post_norm", "mlp_residual"),
    ]
    assert dict(block.outputs) == {"x": "mlp_residual", "balance": "moe.balance", "z": "moe.z"}
    shapes = {n.removeprefix("layers.0.moe."): p.shape for n, p in program.params.items() if "layers.0.moe." in n}
    assert shapes == {
        "router.weight": (5, 20),
        "gate.weight": (5, 12, 20),
        "up.weight": (5, 12, 20),
        "down.weight": (5, 20, 12),
    }
    assert [op.outputs for op in block.ops if op.name == "moe.route"] == [("moe.probs", "moe.gates", "moe.ids")]


def test_ops_of_terms_exist_only_where_a_coefficient_does() -> None:
    for name, spec in EXPERT_CASES.items():
        program = build_program(spec)
        for kind, block in zip(program.blocks, dict.fromkeys(spec.blocks), strict=True):
            kinds, outputs = {op.kind for op in kind.ops}, set(dict(kind.outputs))
            balances = block.moe is not None and block.moe.balance_coefficient > 0
            has_z = block.moe is not None and block.moe.z_coefficient > 0
            assert ({"count_choices", "balance_sum"} <= kinds) == ("balance" in outputs) == balances, name
            assert ("z_sum" in kinds) == ("z" in outputs) == has_z, name


def test_without_a_shared_expert_nothing_is_added() -> None:
    program = build_program(EXPERT_CASES["plain_experts"])
    names = [op.name for op in program.blocks[0].ops]
    assert names[-6:] == ["moe.dispatch", "moe.up", "moe.activation", "moe.down", "moe.combine", "mlp_residual"]
    assert not [name for name in program.params if ".mlp." in name]


def test_dispatched_values_say_how_many_rows_exist() -> None:
    values = build_program(EXPERT_CASES["plain_experts"]).blocks[0].values
    live = {name: value.live for name, value in values.items() if value.live is not None}
    assert live == dict.fromkeys(("moe.dispatch", "moe.up", "moe.activation", "moe.down"), (3, 5))
    assert all(values[name].axes[0] == Axis("experts", 5) for name in live)


def test_experts_count_as_many_as_a_token_chooses() -> None:
    spec = EXPERT_CASES["shared_expert"]
    attention, mlp, router, expert = 48 * 20 * 2 + 16 * 20 * 2, 3 * 28 * 20, 5 * 20, 3 * 12 * 20
    program = build_program(spec)
    assert matmul_params(program) == 2 * (attention + mlp + router + 2 * expert) + 37 * 20
    assert program.num_params > 2 * (attention + mlp + router + 5 * expert) + 2 * 37 * 20


def test_weight_decay_takes_every_experts_matrix_and_no_bias() -> None:
    program = build_program(EXPERT_CASES["experts"])
    decayed = {name.removeprefix("layers.0.moe.") for name, p in program.params.items() if p.is_decayed}
    assert {"router.weight", "gate.weight", "up.weight", "down.weight"} <= decayed
    bias = Param("bias", ((Axis("experts", 5),), (Axis("expert_ffn", 12),)), Init("fill", 0.0))
    assert not bias.is_decayed


def test_initialisers_of_experts() -> None:
    spec = replace(EXPERT_CASES["experts"], init_std=0.02, init_scaled_output=True)
    inits = {name: param.init for name, param in build_program(spec).params.items()}
    for name in ("router", "gate", "up"):
        assert inits[f"layers.0.moe.{name}.weight"] == Init("normal", 0.02)
    assert inits["layers.0.moe.down.weight"] == Init("normal", 0.02 / 4**0.5)


def test_explain_shows_experts() -> None:
    text = explain_program(build_program(preset("tiny-moe")))
    assert "moe.dispatch [experts=8, batch, seq, embed=56] live 2/8" in text
    assert "gives x = mlp_residual, balance = moe.balance, z = moe.z" in text


BATCH, SEQ, EMBED, FFN = Axis("batch"), Axis("seq"), Axis("embed", 6), Axis("expert_ffn", 10)
SCORES, CHOICE, EXPERTS = Axis("scores", 5), Axis("choice", 2), Axis("experts", 5)


def _ids(b: ProgramBuilder, choice: Axis = CHOICE) -> Value:
    return b.input(Value("ids", (BATCH, SEQ, choice), "int"))


def _weight(b: ProgramBuilder, *axes: Axis) -> Param:
    return b.param("w", tuple((axis,) for axis in axes), Init("normal", 1.0))


def _stream(b: ProgramBuilder) -> Value:
    return b.input(Value("x", (BATCH, SEQ, EMBED)))


def _rows(b: ProgramBuilder) -> Value:
    return b.input(Value("rows", (EXPERTS, BATCH, SEQ, EMBED), live=(2, 5)))


def _scores(b: ProgramBuilder) -> Value:
    return b.input(Value("scores", (BATCH, SEQ, SCORES), "wide"))


MISTAKES: dict[str, Callable[[ProgramBuilder], Any]] = {
    r"router weight w has shape \(5, 10\); its input ends in embed=6": lambda b: b.op(
        "router", "r", [_stream(b)], [_weight(b, SCORES, FFN)]
    ),
    "top_k is 6; it must be at most the number of scores=5": lambda b: b.op(
        "route", "r", [_scores(b)], top_k=6, renormalize=True
    ),
    "top_k is 0; it must be a positive integer": lambda b: b.op("route", "r", [_scores(b)], top_k=0, renormalize=True),
    "num_experts is 'all'; it must be a positive integer": lambda b: b.op(
        "count_choices", "n", [_ids(b)], num_experts="all"
    ),
    r"counts have the axes \[scores=4\]; the probabilities end in scores=5": lambda b: b.op(
        "balance_sum", "s", [_scores(b), b.input(Value("n", (Axis("scores", 4),), "int"))]
    ),
    r"choices have the axes \[batch, kv_seq, choice=2\]; the tokens have \[batch, seq, embed=6\]": lambda b: b.op(
        "dispatch", "d", [_stream(b), b.input(Value("i", (BATCH, Axis("kv_seq"), CHOICE), "int"))], num_experts=5
    ),
    r"expert weight w has shape \(4, 10, 6\); its input begins with experts=5 and ends in embed=6": lambda b: b.op(
        "expert_linear", "l", [_rows(b)], [_weight(b, Axis("experts", 4), FFN, EMBED), None]
    ),
    r"expert weight w has shape \(5, 6, 10\)": lambda b: b.op(
        "expert_linear", "l", [_rows(b)], [_weight(b, EXPERTS, EMBED, FFN), None]
    ),
    r"bias v has shape \(10,\)": lambda b: b.op(
        "expert_linear",
        "l",
        [_rows(b)],
        [_weight(b, EXPERTS, FFN, EMBED), b.param("v", ((FFN,),), Init("fill", 0.0))],
    ),
    r"gates \[batch, seq, choice=3\] and choices \[batch, seq, choice=2\] do not fit": lambda b: b.op(
        "combine", "c", [_rows(b), b.input(Value("g", (BATCH, SEQ, Axis("choice", 3)), "wide")), _ids(b)]
    ),
    "must have the same axes": lambda b: b.op(
        "add", "a", [_rows(b), b.input(Value("y", (EXPERTS, BATCH, SEQ, EMBED)))]
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_builder_names_the_mistake(message: str) -> None:
    with pytest.raises(SpecError, match=f"program p, op .: .*{message}"):
        MISTAKES[message](ProgramBuilder("p"))


# ------------------------------------------------------------------------------------------- who cannot have them yet


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_backends_refuse_experts_by_op(backend: str) -> None:
    kinds = "router, route, dispatch, expert_linear, combine"
    with pytest.raises(BackendError, match=f"^{backend} cannot run {kinds} yet; build a model whose blocks have no"):
        new_session(EXPERT_CASES["experts"], backend=backend, device="cpu")
    used = {op.kind for p in build_program(preset("tiny-moe")).distinct for op in p.ops} & set(EXPERT_KINDS)
    assert used == set(EXPERT_KINDS)


def test_a_width_is_not_given_to_a_model_that_has_no_mlp() -> None:
    shared, alone = model(replace(BLOCK, moe=MOE)), EXPERT_CASES["experts"]
    changed = change_spec(shared, ModelConfig(ffn_size=44)).blocks[0]
    assert changed.mlp == replace(MLP, ffn_size=44) and changed.moe == MOE
    with pytest.raises(ConfigError, match=r"model\.ffn_size is the width of an MLP"):
        change_spec(alone, ModelConfig(ffn_size=44))
    assert change_spec(alone, ModelConfig(num_layers=1)).blocks[0].moe == MOE


def test_the_report_of_a_run_names_both_parts(tmp_path: Path) -> None:
    for spec, facts in (
        (EXPERT_CASES["shared_expert"], ("28, gated silu", "2 of 5, each 12, gated silu")),
        (EXPERT_CASES["plain_experts"], ("3 of 5, each 12, gelu",)),
    ):
        write_report(tmp_path / "report.html", [], settings(), build_program(spec))
        text = (tmp_path / "report.html").read_text()
        assert all(fact in text for fact in facts)
        assert ("feed-forward" in text) == (len(facts) == 2)


def test_older_descriptions_have_no_experts() -> None:
    """JSON from before there were any: the fields are left out."""
    from duomesh.core.spec.serialize import spec_from_json, spec_to_dict

    for spec in (CASES["gqa"], CASES["qk_norm"]):
        data = spec_to_dict(spec)
        for kind in data["block_kinds"]:
            del kind["moe"], kind["attention"]["qk_norm_over"]
        assert spec_from_json(json.dumps(data)) == spec
