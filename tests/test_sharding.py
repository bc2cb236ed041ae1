"""Whole models on simulated meshes against one rank: loss and every gradient, for what each axis can split.

A wrong state, transition, reduction axis or bias rule shows as a gradient that is off by a factor or a summand; layouts
that are right agree to rounding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from sharding_cases import (
    ALL,
    CP,
    DP,
    DROPOUT,
    EXPERT_MESHES,
    SP,
    SPECS,
    TP,
    Array,
    assert_same_grads,
    batches,
    mesh_of,
    one_rank,
    params_of,
    sharded,
)
from spec_cases import CASES, MLP, attention, model

from duomesh.core.batch import num_targets
from duomesh.core.bounds import bound
from duomesh.core.errors import PlanError
from duomesh.core.ir.build import build_program
from duomesh.core.objective import LOSS
from duomesh.core.sharding.check import check_model
from duomesh.core.sharding.collectives import StepShape, step_collectives, step_trace
from duomesh.core.sharding.modes import OpView
from duomesh.core.sharding.program import ShardedModelProgram, ShardedProgram, shard_model
from duomesh.core.sharding.storage import Storage
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, Kind, shard
from duomesh.core.sharding.typing import AxisRule
from duomesh.core.verify.compare import relative_error
from duomesh.kernels.reference.model import ReferenceModel
from duomesh.kernels.reference.sharded import Applied, ShardedModel

CASE_IDS = [f"{name}-{mesh}".replace(" ", "_") for name, mesh in ALL]


def assert_same(got: tuple[float, dict[str, Array]], loss: float, grads: dict[str, Array]) -> None:
    assert abs(got[0] - loss) <= bound("loss", "float64") * abs(loss)
    assert_same_grads(got[1], grads)


@pytest.mark.parametrize(("name", "mesh"), ALL, ids=CASE_IDS)
def test_every_layout_is_the_same_model(name: str, mesh: str) -> None:
    """Loss and gradients are those of one rank; the types pass the check; and the collectives of a step, one by one and
    in order, are those that its ranks issued."""
    made = sharded(name, mesh)
    check_model(made)
    params, loss, grads = one_rank(name)
    model = ShardedModel(made, params)
    assert_same(model.loss_and_grads(batches(SPECS[name].vocab_size), DROPOUT), loss, grads)
    shape = StepShape(batch=4, seq=12, micro_batches=2)
    listed = [c for c in step_trace(Storage(made, 0), shape) if c.phase in ("forward", "backward", "recompute")]
    issued = model.ranks.issued
    assert [(c.phase, c.kind, c.axes, c.elements) for c in listed] == [
        (c.phase, c.kind, c.axes, c.elements) for c in issued
    ]
    assert bool(issued) == (made.mesh.world_size > 1)
    assert not any(c.kind == "all-to-all" for c in issued) or mesh in EXPERT_MESHES


def masks_of(name: str, mesh: str) -> tuple[ShardedModel, list[Applied]]:
    """A run of the first batch with dropout."""
    sharded_model = ShardedModel(sharded(name, mesh), one_rank(name)[0])
    return sharded_model, sharded_model.run(batches(SPECS[name].vocab_size)[0], DROPOUT)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [(name, mesh) for name, mesh in ALL if SPECS[name].dropout],
    ids=lambda value: value.replace(" ", "_"),
)
def test_c081_masks_are_equal_in_every_layout(name: str, mesh: str) -> None:
    params, _, _ = one_rank(name)
    want = ReferenceModel(build_program(SPECS[name]), params).forward(batches(37)[0], DROPOUT)
    sharded_model, applied = masks_of(name, mesh)
    found = 0
    for step in applied:
        for made in step.program.calls():
            out = made.call.op.outputs[0]
            if made.call.op.kind == "dropout":
                found += 1
                whole = sharded_model.whole(step.values[out], step.program.axes(out), step.program.layouts[out])
                assert np.array_equal(whole == 0, want[step.prefix + out] == 0), step.prefix + out
    assert found == 1 + 2 * SPECS[name].num_layers


@pytest.mark.parametrize("mesh", ["dp2-tp2", "dp2-sp2", "dp2-zigzag2-sp2"])
def test_c081_ranks_with_equal_activations_have_equal_masks(mesh: str) -> None:
    """Without sequence parallelism tp ranks drop the same elements; with it each drops those of its own positions; data
    parallel ranks always drop others."""
    sharded_model, applied = masks_of("dropout", mesh)
    (layer,) = [step for step in applied if step.prefix == "layers.0."]
    local = [x == 0 for x in layer.values["attention_post_dropout"]]
    by_axis = {axis: sharded_model.sharded.mesh.groups(axis) for axis in sharded_model.sharded.mesh.names}
    for axis, groups in by_axis.items():
        for group in groups:
            is_equal = axis == "tp" and mesh == "dp2-tp2"
            assert np.array_equal(local[group[0]], local[group[1]]) == is_equal, (axis, group)


@pytest.mark.parametrize("name", ["everything", "shared"])
def test_counted_collectives_are_those_of_the_trace(name: str) -> None:
    storage = Storage(sharded(name, "dp2-sp2" if name == "everything" else "ep of dp, etp of sp"), 2)
    shape = StepShape(batch=4, seq=12, micro_batches=3)
    counted = Counter({replace(c, count=1): c.count for c in step_collectives(storage, shape)})
    assert counted == Counter(step_trace(storage, shape))


def test_packed_documents_under_context_parallelism() -> None:
    """Segments cross the border of two ranks' positions."""
    params, _, _ = one_rank("plain")
    segments = np.repeat([[0] * 4 + [1] * 5 + [2] * 3], 4, 0).astype(np.int32)
    positions = np.repeat([[*range(4), *range(5), *range(3)]], 4, 0).astype(np.int32)
    packed = [replace(batch, segment_ids=segments, positions=positions) for batch in batches(37)]
    want = ReferenceModel(build_program(SPECS["plain"]), params).loss_and_grads(packed)
    made = sharded("plain", "dp2-zigzag2-sp2")
    sharded_model = ShardedModel(made, params)
    assert_same(sharded_model.loss_and_grads(packed), *want)
    shape = StepShape(batch=4, seq=12, micro_batches=2, has_segments=True)
    phases = ("forward", "backward", "recompute")
    listed = [c.elements for c in step_trace(Storage(made, 0), shape) if c.phase in phases]
    assert listed == [c.elements for c in sharded_model.ranks.issued]
    assert len(listed) > len(list(step_trace(Storage(made, 0), replace(shape, has_segments=False)))) - len(params)


def test_gpt2_s_vocabulary_over_four_ranks() -> None:
    """50,257 rows are padded to 50,260: three rows of the last rank are zero, stay zero and are in no softmax."""
    spec = model(
        replace(attention(num_heads=4, num_kv_heads=4), mlp=replace(MLP, ffn_size=8)),
        vocab_size=50_257,
        tie_embeddings=True,
    )
    program = build_program(spec)
    params = params_of(program)
    few = batches(50_257, seq=4)
    loss, grads = ReferenceModel(program, params).loss_and_grads(few)
    made = shard_model(program, *mesh_of([(SP, 4)]))
    sharded_model = ShardedModel(made, params)
    table = sharded_model.params["embed.weight", 0]
    assert [len(local) for local in table] == [12_565] * 4
    assert not table[3][-3:].any() and table[3][-4].any()
    assert_same(sharded_model.loss_and_grads(few), loss, grads)
    logits = {c.elements for c in sharded_model.ranks.issued}
    assert 4 * 4 * 50_260 not in logits  # no rank ever sees all of them


def reductions(name: str, mesh: str) -> dict[str, tuple[str, ...]]:
    made = sharded(name, mesh)
    return {parameter: made.reduction_axes(parameter) for parameter in made.model.params}


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
    assert all("cp" in axes and "dp" in axes for axes in reductions("everything", "dp2-zigzag2-sp2").values())


def test_reduction_axes_of_experts_are_their_own() -> None:
    """Experts are summed over the ranks that have the same experts and other tokens; the router over all of those."""
    made = reductions("shared", "edp of dp, ep of zigzag, etp of sp")
    layer = "layers.0.moe."
    assert made[layer + "up.weight"] == made[layer + "down.weight"] == ("dp",)
    assert made[layer + "router.weight"] == ("dp", "cp", "tp")
    assert made["layers.0.mlp.up.weight"] == ("dp", "cp")
    folded = reductions("shared", "ep of dp and of sp")
    assert folded[layer + "up.weight"] == () and folded[layer + "router.weight"] == ("dp", "tp")
    # without sequence parallelism the tp ranks route the same tokens
    assert reductions("shared", "etp of tp")[layer + "router.weight"] == ()


@pytest.mark.parametrize(
    ("name", "mesh"), [("everything", "dp2-sp2"), ("shared", "edp of dp, ep of sp"), ("shared", "etp of sp")]
)
def test_every_reduction_axis_is_needed(name: str, mesh: str) -> None:
    """Leaving an axis out of a parameter's sum, or adding one, gives another gradient: the derived set is exact."""
    params, _, _ = one_rank(name)
    made, batch = sharded(name, mesh), batches(37)[0]
    sharded_model = ShardedModel(made, params)
    _, cotangents = sharded_model.local_grads([batch])
    _, grads = ReferenceModel(made.model, params).loss_and_grads([batch])

    def gradient(parameter: str, *, toggled: str | None = None) -> Array:
        """The whole gradient, one axis summed where it should not be, or the other way round."""
        local, layout = list(cotangents[parameter, 0]), {}
        for axis, state in made.params[parameter, 0].items():
            is_summed = (state == REPLICATED) != (axis == toggled)
            layout[axis] = state if state.kind is Kind.SHARD else (PARTIAL if is_summed else INVARIANT)
            if axis == toggled and not is_summed:
                for group in made.mesh.groups(axis):
                    for rank in group:
                        local[rank] = local[group[0]]
        axes = sharded_model._param_axes(parameter)
        return sharded_model.whole(local, axes, layout).reshape(made.model.params[parameter].shape)

    toggles = 0
    for parameter, want in grads.items():
        assert relative_error(want, gradient(parameter))[0] <= bound("gradient", "float64"), parameter
        for axis, state in made.params[parameter, 0].items():
            if state.kind is not Kind.SHARD:
                toggles += 1
                assert relative_error(want, gradient(parameter, toggled=axis))[0] > 0.1, (parameter, axis)
    assert toggles >= 10


def moves(program: ShardedProgram) -> tuple[Counter[str], Counter[str]]:
    """Collectives of values that carry a gradient in one application of a program, forward and backward."""
    differentiated = [made for made in program.reshards() if made.back]
    ahead = Counter(step.action.value for made in differentiated for step in made.ahead if step.action.is_collective)
    back = Counter(step.action.value for made in differentiated for step in made.back if step.action.is_collective)
    return ahead, back


def plain(rule: AxisRule) -> ShardedModelProgram:
    return shard_model(build_program(SPECS["plain"]), *mesh_of([(rule, 2)]))


def test_a_llama_block_has_megatron_s_collectives() -> None:
    """With sequence parallelism two all-gathers and two reduce-scatters forward, and their duals backward; without it
    two all-reduces forward and two backward (arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2)."""
    sequence = Counter({"all-gather": 2, "reduce-scatter": 2})
    assert moves(plain(SP).programs["block0"]) == (sequence, sequence)
    assert moves(plain(TP).programs["block0"]) == (Counter({"all-reduce": 2}), Counter({"all-reduce": 2}))
    assert moves(plain(DP).programs["block0"]) == (Counter(), Counter())
    # keys and values
    assert moves(plain(CP).programs["block0"]) == (Counter({"all-gather": 2}), Counter({"reduce-scatter": 2}))
    # what was gathered for a linear is gathered again in backward, instead of being kept
    regathered = {made.source for made in plain(SP).programs["block0"].reshards() if made.regathers}
    assert regathered == {"attention_norm", "mlp_norm"}
    assert not any(made.regathers for rule in (TP, DP, CP) for made in plain(rule).programs["block0"].reshards())
    # but not what experts take too
    shared = sharded("shared", "etp of sp").programs["block0"]
    assert {made.source for made in shared.reshards() if made.regathers} == {"attention_norm"}
    # copies of kv heads add no collective of values: their gradients are summed with those of their weights
    assert moves(sharded("plain", "tp2-copies3").programs["block0"]) == moves(plain(TP).programs["block0"])


def test_the_embedding_leaves_in_the_stream_s_layout() -> None:
    """A table split by rows makes partial sums, which are reduced straight into the stream's layout."""
    for rule, action in ((SP, "reduce-scatter"), (TP, "all-reduce"), (DP, None), (CP, None)):
        ahead, _ = moves(plain(rule).programs["embed"])
        assert ahead == (Counter() if action is None else Counter([action])), rule


def test_dropout_moves_nothing() -> None:
    """It acts on the stream's own part, where Megatron has it too (arXiv:2205.05198, section 4.2)."""
    for mesh in ("sp2", "tp2", "dp2-zigzag2-sp2"):
        block, without = (sharded(name, mesh).programs["block0"] for name in ("dropout", "plain"))
        assert moves(block) == moves(without)
        for name in ("attention_post_dropout", "mlp_post_dropout"):
            assert block.layouts[name] == block.layouts["mlp_residual"]


def test_equal_moves_of_two_axes_are_one_collective() -> None:
    """The stream's positions are split over both axes: one gather over the pair, and one reduce-scatter back."""
    made = sharded("plain", "sp2-spcopies3").programs["block0"]
    steps = [s for m in made.reshards() if m.source == "attention_norm" for s in (*m.ahead, *m.back)]
    assert [(s.axes, s.action.value) for s in steps] == [
        (("tp", "copies"), "all-gather"),
        (("tp", "copies"), "reduce-scatter"),
    ]


def test_a_partial_sum_before_a_norm_goes_to_the_stream_s_layout() -> None:
    """Reduced whole, it would move twice as much and be cut right afterwards."""
    made = sharded("everything", "sp2").programs["block0"]
    assert made.layouts["attention_post_norm"]["tp"] == shard("seq")
    assert moves(made)[0] == Counter({"all-gather": 2, "reduce-scatter": 2})


def test_states_of_a_block_by_name() -> None:
    layouts = plain(SP).programs["block0"].layouts
    values = {name: layout["tp"] for name, layout in layouts.items()}
    assert values["attention_norm"] == values["attention_residual"] == values["mlp_residual"] == shard("seq")
    assert values["attention.q"] == values["attention.core"] == shard("kv_heads")
    assert values["mlp.glu"] == shard("ffn")
    assert values["attention.o"] == values["mlp.down"] == PARTIAL
    # the order of positions is their axis's own
    both = sharded("plain", "dp2-zigzag2-sp2").programs["block0"].layouts["attention_norm"]
    assert both == {"dp": shard("batch"), "cp": shard("seq", "zigzag"), "tp": shard("seq")}


def test_a_dim_that_an_op_needs_whole_is_in_none_of_its_modes() -> None:
    program = plain(TP).programs["block0"].program
    modes = {op.name: {mode.axis for mode in OpView(program, op).modes()} - {None} for op in program.ops}
    assert modes["attention_norm"] == {"batch", "seq"}
    assert modes["attention.q_rope"] == modes["attention.core"] == {"batch", "seq", "kv_heads", "q_per_kv"}
    assert modes["attention.o"] == {"batch", "seq", "kv_heads", "q_per_kv", "head_dim", "embed"}


def test_tokens_travel_to_their_experts_and_back() -> None:
    """One all-to-all there and one back over ep; on etp tokens are gathered and sums scattered."""

    def of(mesh: str, source: str) -> list[tuple[str, str]]:
        made = sharded("shared", mesh).programs["block0"]
        return [
            (step.action.value, "+".join(step.axes)) for m in made.reshards() if m.source == source for step in m.ahead
        ]

    assert of("ep of dp, etp of sp", "moe.dispatch") == [("all-to-all", "dp")]
    assert of("ep of dp, etp of sp", "moe.down") == [("all-to-all", "dp")]
    assert of("ep of dp, etp of sp", "mlp_norm") == [("all-gather", "tp")]
    assert of("ep of dp, etp of sp", "moe.sum") == [("reduce-scatter", "tp")]
    # ranks that have the same tokens share them out before they travel
    assert of("ep of tp", "mlp_norm") == [("nothing", "tp"), ("slice", "tp")]  # for the MLP beside, and for experts
    assert of("ep of tp", "moe.gates") == [("slice", "tp")]
    assert of("ep of tp", "moe.dispatch") == of("ep of tp", "moe.down") == [("all-to-all", "tp")]
    # experts split over two axes: tokens come over the slower first and leave over the faster first
    assert of("ep of dp and of sp", "moe.dispatch") == [("all-to-all", "dp"), ("all-to-all", "tp")]
    assert of("ep of dp and of sp", "moe.down") == [("all-to-all", "tp"), ("all-to-all", "dp")]


def test_rows_that_do_not_exist_do_not_travel() -> None:
    """Two of four experts a token: the buffer of a dispatch has two rows a token, not four."""
    made = Storage(sharded("shared", "ep of dp"), 0)
    (sent,) = [
        c for c in step_collectives(made, StepShape(4, 12)) if c.op == "block0.moe.dispatch" and c.phase == "forward"
    ]
    hidden = SPECS["shared"].hidden_size
    assert (sent.kind, sent.elements) == ("all-to-all", (4 // 4) * 12 * 2 * hidden)


def test_dims_that_do_not_divide_are_refused_by_name() -> None:
    program = build_program(CASES["gqa"])  # 2 kv heads, ffn 28
    with pytest.raises(PlanError, match=r"layers\.0\.attention\.q\.weight: kv_heads=2 cannot be split over tp=4"):
        shard_model(program, *mesh_of([(AxisRule("tp", ("kv_heads",)), 4)]))
    with pytest.raises(PlanError, match=r"ffn=28 cannot be split over tp=3\. Use tp in 1, 2, 4, 7, 14, 28\."):
        shard_model(program, *mesh_of([(AxisRule("tp", ("ffn",)), 3)]))
    with pytest.raises(PlanError, match=r"the mesh has the axes tp, the rules are for dp; give one rule for each axis"):
        shard_model(program, mesh_of([(TP, 2)])[0], [DP])


def test_what_parameters_are_split_on_must_fit_their_op() -> None:
    program = build_program(SPECS["everything"])
    with pytest.raises(PlanError, match=r"attention\.q_norm\.weight is S\(head_dim\), and the op needs head_dim whole"):
        shard_model(program, *mesh_of([(AxisRule("tp", ("head_dim",)), 2)]))
    with pytest.raises(
        PlanError, match=r"q\.weight is S\(q_per_kv\) and attention\.k\.weight is S\(kv_heads\); split all"
    ):
        shard_model(program, *mesh_of([(AxisRule("copies", ("q_per_kv", "kv_heads")), 1)]))


@pytest.mark.parametrize(("data", "stream"), [("seq", None), (None, "seq")])
def test_every_parameter_rule_is_over_all_uses(data: str | None, stream: str | None) -> None:
    """A weight that one program uses whole and another replicated is replicated, whichever comes first: only tokens are
    split, or only the stream."""
    rule = AxisRule("cp", data=data, stream=stream)
    made = shard_model(build_program(SPECS["everything"]), *mesh_of([(rule, 2)]))
    asked = {
        layouts[name]["cp"]
        for program, layouts in ((p, p.layouts) for p in (made.programs["embed"], made.programs["head"]))
        for call in program.calls()
        for name in call.operands
        if name is not None and program.origin[name] == "weight"
    }
    assert asked == {INVARIANT, REPLICATED}
    assert made.params["embed.weight", 0]["cp"] == REPLICATED


def test_a_tie_across_stages_has_two_owners() -> None:
    """Each stage types its own uses; gradients are summed within a stage, then over the owners."""
    made = sharded("everything", "dp2-sp2", stages=[0, 0, 0, 1, 1, 1])
    assert made.owners["embed.weight"] == (0, 1)
    assert made.owners["layers.0.mlp.up.weight"] == (0,) and made.owners["layers.1.mlp.up.weight"] == (1,)
    params, loss, grads = one_rank("everything")
    assert_same(ShardedModel(made, params).loss_and_grads(batches(37)), loss, grads)


def test_seeds_are_the_cotangents_of_terms() -> None:
    """A loss seeded with twice its weight has twice the gradient: the seed is not read anywhere else."""
    params, _, _ = one_rank("plain")
    batch = batches(37)[0]
    sharded_model = ShardedModel(sharded("plain", "dp2-sp2"), params)
    grads: list[dict[tuple[str, int], list[Array]]] = []
    for factor in (1.0, 2.0):
        totals = {key: [np.zeros_like(x) for x in local] for key, local in sharded_model.params.items()}
        sharded_model.add_grads(batch, {LOSS: factor / num_targets([batch])}, totals)
        grads.append(totals)
    for key, local in grads[0].items():
        assert all(np.array_equal(2.0 * a, b) for a, b in zip(local, grads[1][key], strict=True)), key
