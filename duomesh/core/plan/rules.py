"""What a plan stands for: the mesh of one pipeline stage, and for each of its axes what it splits.

The dense layers see the ranks as (dp_replicas, dp, cp, tp, tp_copies), the experts as (edp, ep, etp). Where a model has
experts and the views differ, the mesh's axes are their common atoms: `dp.ep` is a part of dp over which experts are
split. An atom splits what its two axes split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd, prod

from duomesh.core.errors import PlanError
from duomesh.core.plan.plan import Plan
from duomesh.core.sharding.mesh import Mesh, MeshAxis, atoms
from duomesh.core.sharding.typing import AxisRule
from duomesh.core.spec.model import AttentionSpec, ModelSpec

__all__ = ["attentions", "dense_view", "expert_view", "kv_copies", "mesh_and_rules"]

_EXPERT_CLAIMS = {"edp": (), "ep": ("experts",), "etp": ("expert_ffn",)}


def attentions(spec: ModelSpec) -> list[AttentionSpec]:
    """Distinct ones, in order of first use."""
    return list(dict.fromkeys(block.attention for block in spec.blocks))


def kv_copies(spec: ModelSpec, plan: Plan) -> int:
    """Ranks that hold the same kv heads, in every block."""
    return plan.tp // gcd(plan.tp, *(a.num_kv_heads for a in attentions(spec)))


def dense_view(plan: Plan) -> tuple[MeshAxis, ...]:
    return MeshAxis("dp", plan.dp), MeshAxis("cp", plan.cp), MeshAxis("tp", plan.tp)


def expert_view(plan: Plan) -> tuple[MeshAxis, ...]:
    """A stage's ranks as the experts cut them: edp, ep, etp from slowest to fastest.

    Raises PlanError if the view has no whole number of copies, or no common atoms with (dp, cp, tp).
    """
    dense = dense_view(plan)
    ranks, needed = prod(axis.size for axis in dense), plan.ep * plan.resolved_etp
    if ranks % needed:
        source = f"etp = tp = {plan.tp} (etp was not given)" if plan.etp is None else f"etp={plan.etp}"
        shown = ",".join(f"{axis.name}={axis.size}" for axis in dense)
        raise PlanError(f"ep={plan.ep} and {source} need a multiple of ep*etp={needed} ranks, but {shown} has {ranks}")
    view = (MeshAxis("edp", ranks // needed), MeshAxis("ep", plan.ep), MeshAxis("etp", plan.resolved_etp))
    atoms(dense, view)
    return view


def mesh_and_rules(spec: ModelSpec, plan: Plan) -> tuple[Mesh, list[AxisRule]]:
    """The mesh, slowest axis first, and one rule for each of its axes. Axes of size 1 are left out.

    Where there are fewer kv heads than tp ranks, tp is cut into `tp`, over kv heads, and `tp_copies`, over the query
    heads of each; ffn and vocabulary are split over both. Where ZeRO shares state among some dp ranks only, dp is cut
    into `dp_replicas` and `dp`.

    Raises PlanError if the views of dense layers and experts have no common atoms.
    """
    dense = _dense_rules(spec, plan)
    if not any(block.moe for block in spec.blocks):
        return Mesh(tuple(axis for axis, _ in dense)), [rule for _, rule in dense]
    return _with_experts(dense, expert_view(plan))


def _dense_rules(spec: ModelSpec, plan: Plan) -> list[tuple[MeshAxis, AxisRule]]:
    copies = kv_copies(spec, plan)
    replicas = plan.dp // plan.resolved_zero_shard if plan.zero else 1
    stream = "seq" if plan.sequence_parallel else None
    dp = AxisRule("dp", data="batch", stream="batch", shares=True)
    tp = AxisRule("tp", ("kv_heads", "ffn", "vocab"), stream=stream, regathers=plan.sequence_parallel)
    rules = [
        (replicas, replace(dp, axis="dp_replicas", shares=False)),
        (plan.dp // replicas, dp),
        (plan.cp, AxisRule("cp", data="seq", stream="seq", order="zigzag", shares=True)),
        (plan.tp // copies, tp),
        (copies, replace(tp, axis="tp_copies", params=("q_per_kv", "ffn", "vocab"))),
    ]
    return [(MeshAxis(rule.axis, size), rule) for size, rule in rules if size > 1]


def _with_experts(
    dense: Sequence[tuple[MeshAxis, AxisRule]], experts: Iterable[MeshAxis]
) -> tuple[Mesh, list[AxisRule]]:
    view = [axis for axis in experts if axis.size > 1]
    if [axis.name for axis in view] in ([], ["edp"]):  # no expert is split: the dense axes are enough
        return Mesh(tuple(axis for axis, _ in dense)), [_as_experts_use(rule, "edp") for _, rule in dense]
    made, members = atoms([axis for axis, _ in dense], view)
    rules = []
    for atom in made:
        rule = next(rule for axis, rule in dense if atom.name in members[axis.name])
        role = next(axis.name for axis in view if atom.name in members[axis.name])
        rules.append(replace(_as_experts_use(rule, role), axis=atom.name))
    return Mesh(made), rules


def _as_experts_use(rule: AxisRule, role: str) -> AxisRule:
    """An axis with what it is to the experts. Those that see other tokens on each of its ranks share their state."""
    shares = rule.shares or (role == "edp" and rule.stream is not None and rule.axis != "dp_replicas")
    return replace(rule, params=rule.params + _EXPERT_CLAIMS[role], shares=shares)
