"""Whole models on simulated meshes against one rank: loss and every gradient, for what each axis can split.

A wrong state, transition, reduction axis or bias rule shows as a gradient that is off by a factor or a summand; layouts
that are right agree to rounding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from spec_cases import BLOCK, CASES, MLP, attention, model

from duomesh.core.batch import IGNORE, Batch, num_targets
from duomesh.core.bounds import bound
from duomesh.core.errors import PlanError
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.sharding.collectives import step_collectives
from duomesh.core.sharding.mesh import Mesh, MeshAxis
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, Kind, shard
from duomesh.core.sharding.typing import AxisRule, conversions, param_state, type_model
from duomesh.core.spec.model import ModelSpec, NormSpec
from duomesh.core.verify.compare import relative_error
from duomesh.kernels.reference.model import ReferenceModel
from duomesh.kernels.reference.sharded import ShardedModel

Array = npt.NDArray[Any]
SPLIT = ("kv_heads", "ffn", "vocab")
RULES = {
    "tp": AxisRule("tp", SPLIT),
    "sp": AxisRule("tp", SPLIT, stream="seq"),  # tensor parallel with sequence parallelism
    "dp": AxisRule("dp", data="batch", stream="batch"),
    "cp": AxisRule("cp", data="seq", stream="seq"),  # keys and values are gathered
    "copies": AxisRule("copies", ("q_per_kv", "ffn", "vocab")),  # of kv heads, where tp is larger than their number
}
RULES["spcopies"] = AxisRule("copies", RULES["copies"].params, stream="seq")
MESHES: dict[str, list[tuple[str, int]]] = {
    "one": [("tp", 1)],
    "tp2": [("tp", 2)],
    "sp2": [("sp", 2)],
    "dp2": [("dp", 2)],
    "dp4": [("dp", 4)],
    "cp2": [("cp", 2)],
    "cp3": [("cp", 3)],
    "dp2-sp2": [("dp", 2), ("sp", 2)],
    "dp2-cp2-sp2": [("dp", 2), ("cp", 2), ("sp", 2)],
    "tp2-copies3": [("tp", 2), ("copies", 3)],
    "dp2-sp2-copies3": [("dp", 2), ("sp", 2), ("copies", 3)],
    "sp2-spcopies3": [("sp", 2), ("spcopies", 3)],  # the stream's positions are split over both
}
# ffn and vocabulary that 6 divides
WIDE = replace(BLOCK, mlp=replace(MLP, ffn_size=36))


def wide(**fields: Any) -> Any:
    return replace(attention(**fields), mlp=replace(MLP, ffn_size=36))


MODELS: dict[str, ModelSpec] = {
    "plain": model(WIDE, WIDE, vocab_size=36),
    "everything": model(
        replace(
            wide(q_bias=True, k_bias=True, v_bias=True, o_bias=True, qk_norm=NormSpec(eps=1e-3)),
            mlp=replace(MLP, ffn_size=36, up_bias=True, down_bias=True),
            attention_post_norm=NormSpec(eps=1e-3),
        ),
        wide(window=5, softcap=2.0),
        vocab_size=36,
        tie_embeddings=True,
        embedding_scale=3.0,
        logit_softcap=4.0,
    ),
    "plain_mlp": model(
        replace(WIDE, mlp=replace(MLP, ffn_size=36, activation="relu2", is_gated=False, up_bias=True)),
        final_norm=NormSpec(kind="layer", eps=1e-3, has_bias=True),
        vocab_size=36,
    ),
}  # fmt: skip


def mesh_of(name: str) -> tuple[Mesh, list[AxisRule]]:
    entries = MESHES[name]
    rules = [RULES[rule] for rule, _ in entries]
    return Mesh(tuple(MeshAxis(rule.axis, size) for rule, (_, size) in zip(rules, entries, strict=True))), rules


def batches() -> list[Batch]:
    """Two micro-batches of 4 samples of 12 tokens: unequal targets by sample and position, one sample with none."""
    rng = np.random.default_rng(2)
    out = []
    for i in range(2):
        ids = rng.integers(0, 36, (4, 13)).astype(np.int32)
        ids[1, 3] = 35  # the last row of the last vocabulary shard
        labels = ids[:, 1:].copy()
        labels[0, : 5 + i] = IGNORE
        labels[3] = IGNORE
        mask = rng.uniform(0.5, 2.0, labels.shape).astype(np.float32)
        out.append(Batch(np.ascontiguousarray(ids[:, :-1]), labels, mask))
    return out


@lru_cache
def one_rank(name: str) -> tuple[dict[str, Array], float, dict[str, Array]]:
    program = build_program(MODELS[name])
    params = {n: p.astype(np.float64) for n, p in initial_params(program, 3, perturb=0.3)}
    return params, *ReferenceModel(program, params).loss_and_grads(batches())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_is_the_same_model(name: str, mesh: str) -> None:
    params, loss, grads = one_rank(name)
    sharded = ShardedModel(build_program(MODELS[name]), *mesh_of(mesh), params)
    got_loss, got = sharded.loss_and_grads(batches())
    assert abs(got_loss - loss) <= bound("loss", "float64") * abs(loss)
    assert set(got) == set(grads)
    for parameter, want in grads.items():
        assert relative_error(want, got[parameter])[0] <= bound("value", "float64"), parameter


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_the_listed_collectives_are_those_that_are_issued(name: str, mesh: str) -> None:
    """As a multiset of (phase, kind, axis, size): the list that is derived from types against what a step did."""
    params, _, _ = one_rank(name)
    program = build_program(MODELS[name])
    sharded = ShardedModel(program, *mesh_of(mesh), params)
    sharded.loss_and_grads(batches())
    listed: Counter[tuple[str, str, str, int]] = Counter()
    for c in step_collectives(program, *mesh_of(mesh), batch=4, seq=12, micro_batches=2):
        listed[c.phase, c.kind, c.axis, c.elements] += c.count
    assert listed == sharded.issued
    assert bool(listed) == (sharded.mesh.world_size > 1)


def test_packed_documents_under_context_parallelism() -> None:
    """Segments cross the border of two ranks' positions."""
    params, _, _ = one_rank("plain")
    segments = np.repeat([[0] * 4 + [1] * 5 + [2] * 3], 4, 0).astype(np.int32)
    positions = np.repeat([[*range(4), *range(5), *range(3)]], 4, 0).astype(np.int32)
    packed = [replace(batch, segment_ids=segments, positions=positions) for batch in batches()]
    program = build_program(MODELS["plain"])
    loss, grads = ReferenceModel(program, params).loss_and_grads(packed)
    got_loss, got = ShardedModel(program, *mesh_of("dp2-cp2-sp2"), params).loss_and_grads(packed)
    assert abs(got_loss - loss) <= bound("loss", "float64") * abs(loss)
    for parameter, want in grads.items():
        assert relative_error(want, got[parameter])[0] <= bound("value", "float64"), parameter


def reductions(name: str, mesh: str) -> dict[str, tuple[str, ...]]:
    params, _, _ = one_rank(name)
    sharded = ShardedModel(build_program(MODELS[name]), *mesh_of(mesh), params)
    return {parameter: sharded.reduction_axes(parameter) for parameter in params}


def test_reduction_axes_are_those_of_the_one_rule() -> None:
    """Norms, q/k norms and biases under each axis; nothing of it is written down anywhere else."""
    plain, sp, copies = (reductions("everything", mesh) for mesh in ("tp2", "sp2", "tp2-copies3"))
    layer = "layers.0."
    # without sequence parallelism a block's input is whole, and so is the gradient of its norm's weight
    assert plain[layer + "attention_norm.weight"] == () and sp[layer + "attention_norm.weight"] == ("tp",)
    assert plain["head.norm.weight"] == () and sp["head.norm.weight"] == ("tp",)
    # heads differ by rank in both
    assert plain[layer + "attention.q_norm.weight"] == sp[layer + "attention.q_norm.weight"] == ("tp",)
    # a bias of a partial sum counts once; those of split rows are split
    assert plain[layer + "attention.o.bias"] == sp[layer + "attention.o.bias"] == ()
    assert plain[layer + "attention.q.bias"] == plain[layer + "mlp.gate.weight"] == ()
    # copies of kv heads: k and v, their biases and norm are summed over them, q is split
    assert copies[layer + "attention.k.weight"] == copies[layer + "attention.v.bias"] == ("copies",)
    assert copies[layer + "attention.q.weight"] == ()
    assert all(axes == ("dp",) for axes in reductions("everything", "dp2").values())
    assert all("cp" in axes and "dp" in axes for axes in reductions("everything", "dp2-cp2-sp2").values())


def test_every_reduction_axis_is_needed() -> None:
    """Leaving an axis out of a parameter's sum, or adding one, gives another gradient: the derived set is exact."""
    params, _, _ = one_rank("everything")
    program, batch = build_program(MODELS["everything"]), batches()[0]
    sharded = ShardedModel(program, *mesh_of("dp2-sp2"), params)
    tape, stream = sharded._run(batch)
    cotangents = sharded._backward(tape, stream["loss_sum"], 1.0 / num_targets([batch]))
    _, grads = ReferenceModel(program, params).loss_and_grads([batch])

    def gradient(name: str, *, toggled: str | None = None) -> Array:
        """The whole gradient, one axis summed where it should not be, or the other way round."""
        held = sharded._params[name]
        local, layout = list(cotangents[id(held)]), {}
        for axis, state in held.layout.items():
            is_summed = (state == REPLICATED) != (axis == toggled)
            layout[axis] = state if state.kind is Kind.SHARD else (PARTIAL if is_summed else INVARIANT)
            if axis == toggled and not is_summed:
                for group in sharded.mesh.groups(axis):
                    for rank in group:
                        local[rank] = local[group[0]]
        return sharded.whole(replace(held, local=local, layout=layout)).reshape(program.params[name].shape)

    toggles = 0
    for name, want in grads.items():
        assert relative_error(want, gradient(name))[0] <= bound("gradient", "float64"), name
        for axis, state in sharded.param_layout(name).items():
            if state.kind is not Kind.SHARD:
                toggles += 1
                assert relative_error(want, gradient(name, toggled=axis))[0] > 0.1, (name, axis)
    assert toggles > len(grads)


def test_a_llama_block_has_megatron_s_collectives() -> None:
    """With sequence parallelism two all-gathers and two reduce-scatters forward, and their duals backward; without it
    two all-reduces forward and two backward (arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2)."""

    def count(rule: str) -> tuple[Counter[str], Counter[str]]:
        program = build_program(MODELS["plain"])
        states = type_model(program, RULES[rule], 2)
        moves = [c for c in conversions(program.blocks[0], states["block0"]) if c.is_differentiated]
        ahead = Counter(c.forward.value for c in moves if c.forward.is_collective)
        back = Counter(c.backward.value for c in moves if c.backward.is_collective)
        return ahead, back

    sequence = Counter({"all-gather": 2, "reduce-scatter": 2})
    assert count("sp") == (sequence, sequence)
    assert count("tp") == (Counter({"all-reduce": 2}), Counter({"all-reduce": 2}))
    assert count("dp") == (Counter(), Counter())
    assert count("cp") == (Counter({"all-gather": 2}), Counter({"reduce-scatter": 2}))  # keys and values


def test_the_embedding_leaves_in_the_stream_s_layout() -> None:
    """A table split by rows makes partial sums, which are reduced straight into the stream's layout."""
    program = build_program(MODELS["plain"])
    for rule, action in (("sp", "reduce-scatter"), ("tp", "all-reduce"), ("dp", None), ("cp", None)):
        moves = conversions(program.embed, type_model(program, RULES[rule], 2)["embed"])
        made = [c.forward.value for c in moves if c.is_differentiated and c.forward.is_collective]
        assert made == ([] if action is None else [action]), rule


def test_states_of_a_block_by_name() -> None:
    program = build_program(MODELS["plain"])
    values = type_model(program, RULES["sp"], 2)["block0"].values
    assert values["attention_norm"] == values["attention_residual"] == values["mlp_residual"] == shard("seq")
    assert values["attention.q"] == values["attention.core"] == shard("kv_heads")
    assert values["mlp.glu"] == shard("ffn")
    assert values["attention.o"] == values["mlp.down"] == PARTIAL


def test_dims_that_do_not_divide_are_refused_by_name() -> None:
    program = build_program(CASES["gqa"])  # 2 kv heads, ffn 28, vocabulary 37
    with pytest.raises(PlanError, match=r"embed\.weight: vocab=37 cannot be split over tp=2\. Use tp in 1, 37"):
        type_model(program, RULES["tp"], 2)
    with pytest.raises(PlanError, match=r"layers\.0\.attention\.q\.weight: kv_heads=2 cannot be split over tp=4"):
        type_model(program, AxisRule("tp", ("kv_heads",)), 4)


def test_every_parameter_rule_is_over_all_uses() -> None:
    """A tied table is whole in neither use under context parallelism; a weight that one program uses whole and another
    replicated is replicated."""
    program = build_program(MODELS["everything"])
    rule = AxisRule("cp", data="seq", stream=None)  # tokens are split, the stream is gathered before the first block
    states = type_model(program, rule, 2)
    asked = {
        typed.operands[len(op.inputs)]
        for prefix, part in program.steps
        for op, typed in zip(part.ops, states[part.name].ops, strict=True)
        if op.params and program.aliases.get(prefix + str(op.params[0]), prefix + str(op.params[0])) == "embed.weight"
    }
    assert asked == {INVARIANT, REPLICATED}
    assert param_state(program, states, rule, "embed.weight") == REPLICATED
