"""What can be wrong with the experts of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm, prod

from duomesh.core.errors import PlanError
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.problem import Problem, Problems, divisors, multiples, nearest
from duomesh.core.plan.rules import dense_view, expert_view, mesh_and_rules
from duomesh.core.spec.model import ModelSpec, MoeSpec

__all__ = ["experts"]


def experts(spec: ModelSpec, plan: Plan, seq: int | None) -> Problems:
    """Problems of splitting experts; seq as of `validate`."""
    moes = list(dict.fromkeys(block.moe for block in spec.blocks if block.moe is not None))
    if not moes:
        for name in ("ep", "etp"):
            if getattr(plan, name) not in (None, 1):
                yield Problem(f"{name}={getattr(plan, name)}", "the model has no experts", "leave it out")
        return
    views = list(_views(spec, plan))
    yield from views
    for moe in moes:
        yield from _sizes(moe, plan)
    if not views:
        yield from _tokens(spec, plan, seq)


def _sizes(moe: MoeSpec, plan: Plan) -> Problems:
    if moe.num_experts % plan.ep:
        fix = f"use ep in {', '.join(map(str, divisors(moe.num_experts)))}"
        yield Problem(f"num_experts={moe.num_experts}, ep={plan.ep}", "ep must divide the experts", fix)
    etp = plan.resolved_etp
    if moe.ffn_size % etp:
        given = f"expert ffn_size={moe.ffn_size}, etp={etp}" + (" (etp was not given)" if plan.etp is None else "")
        fix = f"use etp={nearest(etp, divisors(moe.ffn_size))}"
        yield Problem(given, "etp must divide the ffn size of an expert", fix)


def _views(spec: ModelSpec, plan: Plan) -> Iterator[Problem]:
    if plan.ep == 1 and plan.etp is None:
        return
    dense = dense_view(plan)
    shown = ",".join(f"{axis.name}={axis.size}" for axis in dense)
    given = f"{shown}, ep={plan.ep}" + ("" if plan.etp is None else f", etp={plan.etp}")
    ranks = prod(axis.size for axis in dense)
    try:
        expert_view(plan)
    except PlanError as error:
        yield Problem(given, str(error).removesuffix("."), _fix(plan, ranks))
        return
    if plan.dp % plan.resolved_zero_shard:
        return
    try:  # dp may be cut where ZeRO's groups end, tp where copies of kv heads begin
        mesh_and_rules(spec, plan)
    except PlanError as error:
        if plan.zero_shard is not None:
            yield Problem(f"{given}, zero_shard={plan.zero_shard}", _phrase(error), "leave zero_shard out")
            return
        fitting = nearest(plan.ep, _fitting(spec, plan))
        yield Problem(given, _phrase(error), f"use ep={fitting}, or another tp" if fitting else "use another tp")


def _phrase(error: PlanError) -> str:
    return str(error).partition(". ")[0].removesuffix(".")


def _fitting(spec: ModelSpec, plan: Plan) -> list[int]:
    """Every ep whose view has atoms in common with the dense one, as it is cut for this model."""
    found = []
    for ep in divisors(prod(axis.size for axis in dense_view(plan))):
        try:
            mesh_and_rules(spec, replace(plan, ep=ep))
        except PlanError:
            continue
        found.append(ep)
    return found


def _tokens(spec: ModelSpec, plan: Plan, seq: int | None) -> Problems:
    """Ranks that have the same tokens and different experts share the tokens out among themselves."""
    if seq is None or plan.dp % plan.resolved_zero_shard:
        return
    mesh, rules = mesh_and_rules(spec, plan)
    parts = prod(mesh.size(rule.axis) for rule in rules if "experts" in rule.params and rule.stream is None)
    chunks = lcm(2 * plan.cp, plan.cp * parts) if plan.cp > 1 else parts
    if parts > 1 and seq % chunks:
        needed = f"the {parts} tp ranks that share the experts must divide the positions that they have"
        yield Problem(f"seq={seq}, tp={plan.tp}, ep={plan.ep}", needed, f"use seq={multiples(seq, chunks)}")


def _fix(plan: Plan, ranks: int) -> str:
    def fitting(etp: int) -> list[int]:
        """Every ep that fits with this etp."""
        found = []
        for ep in divisors(ranks):
            try:
                expert_view(replace(plan, ep=ep, etp=etp))
            except PlanError:
                continue
            found.append(ep)
        return found

    etp = plan.resolved_etp
    if plan.ep in fitting(1):
        return "use etp=1"
    near = nearest(plan.ep, fitting(etp))
    return f"use ep={near} with etp={etp}" if near else f"use ep={nearest(plan.ep, fitting(1))} with etp=1"
