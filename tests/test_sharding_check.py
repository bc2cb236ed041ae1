"""Sharded programs with one fault each: the check names op, value, axis and states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from sharding_cases import sharded

from duomesh.core.errors import PlanError
from duomesh.core.sharding.check import check_model
from duomesh.core.sharding.layouts import Step
from duomesh.core.sharding.program import Reshard, ShardedModelProgram, ShardedProgram
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, State, shard


def changed(
    name: str, edit: Callable[[ShardedProgram], ShardedProgram], mesh: str = "sp2", model: str = "plain"
) -> ShardedModelProgram:
    made = sharded(model, mesh)
    return replace(made, programs={**made.programs, name: edit(made.programs[name])})


def with_state(program: ShardedProgram, value: str, axis: str, state: State) -> ShardedProgram:
    layouts = {**program.layouts, value: {**program.layouts[value], axis: state}}
    return replace(program, layouts=layouts)


def with_reshard(program: ShardedProgram, source: str, edit: Callable[[Reshard], Reshard]) -> ShardedProgram:
    made = [edit(m) if isinstance(m, Reshard) and m.source == source else m for m in program.instructions]
    return replace(program, instructions=tuple(made))


def fault(made: ShardedModelProgram) -> str:
    with pytest.raises(PlanError) as caught:
        check_model(made)
    return str(caught.value)


STATES: list[tuple[str, str, State, str]] = [
    # a column-split linear on a whole input: its input's gradient would lack the other ranks' summands
    ("attention_norm@1", "tp", INVARIANT,
     "op attention.qkv (linear) on axis tp: attention_norm@1 is I; split on kv_heads, which is closest to its other "
     "operands, it must be R."),
    # a sum over a split dim that is taken for a whole value
    ("mlp.down", "tp", REPLICATED,
     "op mlp.down (linear) on axis tp: mlp.down is R; split on ffn, which is closest to its other operands, it must be "
     "P."),
    ("attention.core", "tp", REPLICATED,
     "op attention.core (attention) on axis tp: attention.core is R; split on kv_heads"),
    # an activation of a partial sum
    ("mlp.gate", "tp", PARTIAL, "op mlp.gate_up (linear) on axis tp: mlp.gate is P; split on ffn"),
    # a norm over a dim that it needs whole
    ("attention_norm", "tp", shard("embed"), "op attention_norm (norm) on axis tp: attention_norm is S(embed)"),
    # a norm weight that counts once, although ranks see other positions
    ("attention_norm.weight", "tp", INVARIANT,
     "op attention_norm (norm) on axis tp: attention_norm.weight is I; split on seq, which is closest to its other "
     "operands, it must be R."),
    ("mlp.up.weight", "tp", shard("embed"), "op mlp.gate_up (linear) on axis tp: mlp.up.weight is S(embed)"),
    # a dim that the value does not have, and one that cannot be cut
    ("mlp.glu", "tp", shard("kv_heads"), "block0: mlp.glu is S(kv_heads) on tp, and has only batch, seq, ffn."),
]  # fmt: skip


@pytest.mark.parametrize(("value", "axis", "state", "sentence"), STATES, ids=lambda v: str(v)[:24].replace(" ", "_"))
def test_a_wrong_state_is_told_by_op_value_axis_and_state(value: str, axis: str, state: State, sentence: str) -> None:
    assert sentence in fault(changed("block0", lambda program: with_state(program, value, axis, state)))


def test_dims_that_cannot_be_cut_equally() -> None:
    made = changed("block0", lambda p: with_state(p, "mlp.glu", "dp", shard("ffn")), mesh="dp2-sp2-copies3")
    assert "mlp.glu is S(ffn) on dp, tp, copies; ffn=36 is no multiple of 12 ranks." not in fault(made)
    odd = changed("block0", lambda p: with_state(p, "attention.q", "copies", shard("kv_heads")), mesh="dp2-sp2-copies3")
    assert "attention.q is S(kv_heads) on tp, copies; kv_heads=2 is no multiple of 6 ranks." in fault(odd)


def test_a_loss_that_is_replicated_would_scale_gradients() -> None:
    (result,) = [inside for _, inside in sharded("plain", "dp2").programs["loss"].outputs]
    made = changed("loss", lambda p: with_state(p, result, "dp", REPLICATED), mesh="dp2")
    assert f"loss: output loss_sum ({result}) on axis dp is R; it must be I." in fault(made)


def test_a_stream_that_leaves_otherwise_than_it_came() -> None:
    (result,) = [inside for _, inside in sharded("plain", "sp2").programs["block0"].outputs]
    made = changed("block0", lambda p: with_state(p, result, "tp", INVARIANT))
    assert f"block0: output x ({result}) on axis tp is I; it must be S(seq)." in fault(made)


def test_positions_in_another_order() -> None:
    made = changed("block0", lambda p: with_state(p, "attention_norm", "cp", shard("seq")), mesh="zigzag2")
    assert "op attention_norm (norm) on axis cp: its values are S(seq), S(seq, zigzag); they must hold" in fault(made)


def test_movements() -> None:
    """Steps that do not begin or end where they should, a backward that is no dual, a sum within the step."""
    name = "block0: reshard of attention.o to attention.o@1"

    def of(edit: Callable[[Reshard], Reshard]) -> str:
        return fault(changed("block0", lambda p: with_reshard(p, "attention.o", edit)))

    wrong = (Step(("tp",), REPLICATED, shard("seq")),)
    assert f"{name}: on tp it is P, and the step is R -> S(seq)." in of(lambda m: replace(m, ahead=wrong))
    short = of(lambda m: replace(m, ahead=(), back=()))
    assert f"{name}: on tp its steps lead to P, and the result is S(seq)." in short
    assert f"{name}: backward must be the duals of its steps, S(seq) -> R on tp." in of(lambda m: replace(m, back=()))

    def summed(program: ShardedProgram) -> ShardedProgram:
        made = Reshard("mlp.down.weight", "w@1", (Step(("dp",), INVARIANT, REPLICATED),), ())
        made = replace(made, back=(Step(("dp",), PARTIAL, INVARIANT),))
        entered = with_state(program, "mlp.down.weight", "dp", INVARIANT)
        layouts = {**entered.layouts, "w@1": {**entered.layouts["mlp.down.weight"], "dp": REPLICATED}}
        return replace(entered, instructions=(made, *program.instructions), layouts=layouts)

    sentence = fault(changed("block0", summed, mesh="dp2-sp2"))
    assert "reshard of mlp.down.weight to w@1: a parameter's P -> I on dp is an all-reduce within the step" in sentence


def test_programs_that_do_not_fit_together() -> None:
    """The head of another plan, a parameter held otherwise than it is used, an instruction that comes too late."""
    made, other = sharded("plain", "sp2"), sharded("plain", "tp2")
    mixed = replace(made, programs={**made.programs, "head": other.programs["head"]})
    assert "head: input x on axis tp is I; it comes as S(seq) from block0." in fault(mixed)
    key = ("head.norm.weight", 0)
    held = replace(made, params={**made.params, key: {"tp": INVARIANT}})
    assert "head: parameter norm.weight on axis tp is R, and stage 0 holds it as I." in fault(held)
    late = changed("block0", lambda p: replace(p, instructions=tuple(reversed(p.instructions))))
    assert "block0: mlp.down@1 is used before anything makes it." in fault(late)


def test_every_fault_is_told() -> None:
    def two(program: ShardedProgram) -> ShardedProgram:
        return with_state(with_state(program, "mlp.down", "tp", REPLICATED), "attention_norm@1", "tp", INVARIANT)

    lines = fault(changed("block0", two)).split("\n")
    assert len(lines) >= 3  # two ops, and the movement that begins at the wrong state
    assert any("attention.qkv" in line for line in lines) and any("op mlp.down" in line for line in lines)


def test_non_differentiated_values_may_be_either() -> None:
    """For ids and masks invariant and replicated are one."""
    check_model(changed("loss", lambda p: with_state(p, "labels", "tp", REPLICATED)))
