"""Meshes, rules, models and batches of the sharding tests."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from spec_cases import MLP, attention, model

from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.dropout import DropoutKey
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.ir.program import ModelProgram
from duomesh.core.sharding.mesh import Mesh, MeshAxis
from duomesh.core.sharding.program import ShardedModelProgram, shard_model
from duomesh.core.sharding.typing import AxisRule
from duomesh.core.spec.model import ModelSpec, MoeSpec, NormSpec
from duomesh.core.verify.compare import relative_error
from duomesh.kernels.reference.model import ReferenceModel

Array = npt.NDArray[Any]
DROPOUT = DropoutKey(seed=5, step=3)  # for models that have dropout
SPLIT = ("kv_heads", "ffn", "vocab")
TP = AxisRule("tp", SPLIT)
SP = AxisRule("tp", SPLIT, stream="seq", regathers=True)
DP = AxisRule("dp", data="batch", stream="batch", shares=True)
CP = AxisRule("cp", data="seq", stream="seq", shares=True)
COPIES = AxisRule("copies", ("q_per_kv", "ffn", "vocab"))  # of kv heads, where tp is larger than their number


def with_experts(rule: AxisRule, claim: str, name: str = "") -> AxisRule:
    """An atom of the expert view: it splits experts, or each expert's ffn, beside what it splits of dense layers."""
    return replace(rule, axis=name or rule.axis, params=(*rule.params, claim))


EP_DP, ETP_DP = with_experts(DP, "experts"), with_experts(DP, "expert_ffn")
EP_CP = with_experts(CP, "experts")
EP_TP, ETP_TP = with_experts(TP, "experts"), with_experts(TP, "expert_ffn")
EP_SP, ETP_SP = with_experts(SP, "experts"), with_experts(SP, "expert_ffn")
ZIGZAG = replace(CP, order="zigzag")
REPLICAS = replace(DP, axis="dp_replicas", shares=False)

MESHES: dict[str, list[tuple[AxisRule, int]]] = {
    "one": [(TP, 1)],
    "tp2": [(TP, 2)],
    "sp2": [(SP, 2)],
    "dp2": [(DP, 2)],
    "dp4": [(DP, 4)],
    "cp2": [(CP, 2)],
    "cp3": [(CP, 3)],
    "zigzag2": [(ZIGZAG, 2)],
    "zigzag3": [(ZIGZAG, 3)],
    "dp2-tp2": [(DP, 2), (TP, 2)],
    "dp2-sp2": [(DP, 2), (SP, 2)],
    "dp2-zigzag2-sp2": [(DP, 2), (ZIGZAG, 2), (SP, 2)],
    "tp2-copies3": [(TP, 2), (COPIES, 3)],
    "dp2-sp2-copies3": [(DP, 2), (SP, 2), (COPIES, 3)],
    "sp2-spcopies3": [(SP, 2), (replace(COPIES, stream="seq", regathers=True), 3)],  # positions are split over both
    "replicas2-dp2-tp2": [(REPLICAS, 2), (DP, 2), (TP, 2)],
}
EXPERT_MESHES: dict[str, list[tuple[AxisRule, int]]] = {
    "ep of dp": [(EP_DP, 4)],
    "etp of dp": [(ETP_DP, 2)],
    "ep of tp": [(EP_TP, 2)],
    "ep of sp": [(EP_SP, 4)],
    "etp of tp": [(ETP_TP, 2)],
    "etp of sp": [(ETP_SP, 2)],
    "edp of dp, ep of sp": [(DP, 2), (EP_SP, 2)],
    "edp and ep of dp": [(replace(DP, axis="edp"), 2), (EP_DP, 2)],
    "ep of dp and of sp": [(EP_DP, 2), (EP_SP, 2)],
    "ep of dp, etp of sp": [(EP_DP, 2), (ETP_SP, 2)],
    "ep of dp, etp of tp": [(EP_DP, 2), (ETP_TP, 2)],
    "ep and etp of sp": [(EP_SP, 2), (with_experts(SP, "expert_ffn", "etp"), 2)],
    "ep and etp of tp": [(EP_TP, 2), (with_experts(TP, "expert_ffn", "etp"), 2)],
    "edp of dp, ep of zigzag, etp of sp": [(DP, 2), (with_experts(ZIGZAG, "experts"), 2), (ETP_SP, 2)],
    "ep of cp and of sp": [(EP_CP, 2), (EP_SP, 2)],
}
WIDE = replace(MLP, ffn_size=36)  # 6 divides it
NORM = NormSpec(eps=1e-3)
MOE = MoeSpec(
    num_experts=4,
    top_k=2,
    ffn_size=12,
    activation="silu",
    is_gated=True,
    renormalize=True,
    balance_coefficient=0.1,
    z_coefficient=0.05,
)


def wide(**fields: Any) -> Any:
    return replace(attention(**fields), mlp=WIDE)


MODELS: dict[str, ModelSpec] = {
    # 37 rows are padded wherever the vocabulary is split
    "plain": model(wide(), wide(), vocab_size=37),
    "everything": model(
        replace(
            wide(q_bias=True, k_bias=True, v_bias=True, o_bias=True, qk_norm=NORM),
            mlp=replace(WIDE, up_bias=True, down_bias=True),
            attention_post_norm=NORM,
            mlp_post_norm=NORM,
        ),
        wide(window=5, softcap=2.0),
        vocab_size=37,
        tie_embeddings=True,
        embedding_scale=3.0,
        logit_softcap=4.0,
    ),
    "full_width_norms": model(wide(qk_norm=NORM, qk_norm_over="all"), vocab_size=36),
    "plain_mlp": model(
        replace(wide(), mlp=replace(WIDE, activation="relu2", is_gated=False, up_bias=True)),
        final_norm=NormSpec(kind="layer", eps=1e-3, has_bias=True),
        vocab_size=36,
    ),
    "dropout": model(replace(wide(o_bias=True), mlp_post_norm=NORM), vocab_size=37, dropout=0.3),
}
# heads that 4 divides, so that every expert mesh fits
_HEADS = attention(num_heads=8, num_kv_heads=4)
EXPERT_MODELS: dict[str, ModelSpec] = {
    "shared": model(
        replace(_HEADS, mlp=WIDE, moe=MOE, mlp_post_norm=NORM),
        replace(_HEADS, mlp=WIDE),
        replace(_HEADS, mlp=None, moe=replace(MOE, balance_coefficient=0.0)),
        vocab_size=37,
    ),
    "experts_and_dropout": model(replace(_HEADS, mlp=WIDE, moe=MOE), vocab_size=37, dropout=0.2),
    "plain_experts": model(
        replace(_HEADS, mlp=None, moe=replace(MOE, is_gated=False, renormalize=False, activation="relu2")),
        vocab_size=36,
        tie_embeddings=True,
    ),
}
ALL = {
    **{(name, mesh): (spec, entries) for name, spec in MODELS.items() for mesh, entries in MESHES.items()},
    **{
        (name, mesh): (spec, entries) for name, spec in EXPERT_MODELS.items() for mesh, entries in EXPERT_MESHES.items()
    },
}
SPECS = {**MODELS, **EXPERT_MODELS}


def mesh_of(entries: list[tuple[AxisRule, int]]) -> tuple[Mesh, list[AxisRule]]:
    return Mesh(tuple(MeshAxis(rule.axis, size) for rule, size in entries)), [rule for rule, _ in entries]


def sharded(name: str, mesh: str, stages: list[int] | None = None) -> ShardedModelProgram:
    spec, entries = ALL[name, mesh]
    return shard_model(build_program(spec), *mesh_of(entries), stages=stages)


def batches(vocab: int = 36, seq: int = 12) -> list[Batch]:
    """Two micro-batches of 4 samples: unequal targets by sample and position, one sample with none."""
    rng = np.random.default_rng(2)
    out = []
    for i in range(2):
        ids = rng.integers(0, vocab, (4, seq + 1)).astype(np.int32)
        ids[1, 3] = vocab - 1  # the last row of the last vocabulary shard
        labels = ids[:, 1:].copy()
        labels[0, : 5 + i] = IGNORE
        labels[3] = IGNORE
        mask = rng.uniform(0.5, 2.0, labels.shape).astype(np.float32)
        samples = 4 * i + np.array([1, 0, 3, 2])
        out.append(Batch(np.ascontiguousarray(ids[:, :-1]), labels, mask, sample_ids=samples))
    return out


def params_of(program: ModelProgram) -> dict[str, Array]:
    """Random weights, norm weights and biases included, in float64."""
    return {name: array.astype(np.float64) for name, array in initial_params(program, 3, perturb=0.3)}


@lru_cache
def one_rank(name: str) -> tuple[dict[str, Array], float, dict[str, Array]]:
    """Parameters, loss and gradients without a mesh."""
    program = build_program(SPECS[name])
    params = params_of(program)
    return params, *ReferenceModel(program, params).loss_and_grads(batches(SPECS[name].vocab_size), DROPOUT)


def assert_same_grads(got: dict[str, Array], want: dict[str, Array]) -> None:
    """Every gradient within the bound of float64 values, relative to its own largest element.

    A gradient that is nothing but rounding (a bias of keys has none, as a softmax does not see it) must be so on both
    sides.
    """
    assert set(got) == set(want)
    limit = bound("value", "float64")
    largest = max(float(np.abs(grad).max()) for grad in want.values())
    for name, grad in want.items():
        is_rounding = float(np.abs(grad).max()) <= limit * largest
        assert relative_error(grad, got[name], floor=largest if is_rounding else 0.0)[0] <= limit, name
