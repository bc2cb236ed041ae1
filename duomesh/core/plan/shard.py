"""Program and plan -> sharded program with its storage: every communication of a step is decided here."""

from __future__ import annotations

from dataclasses import replace

from duomesh.core.ir.program import ModelProgram
from duomesh.core.plan.plan import Plan, PlanDType
from duomesh.core.plan.problem import Problem, refuse
from duomesh.core.plan.rules import mesh_and_rules
from duomesh.core.plan.validate import validate
from duomesh.core.sharding.program import shard_model
from duomesh.core.sharding.storage import Storage

__all__ = ["check_for_session", "shard", "shard_for_session"]


def shard(program: ModelProgram, plan: Plan) -> Storage:
    """Types a model on the mesh of one pipeline stage of the plan.

    Raises PlanError if the plan is impossible for the model, with every reason.
    """
    refuse(problem for problem in validate(program.spec, plan) if problem.kind == "impossible")
    mesh, rules = mesh_and_rules(program.spec, plan)
    return Storage(shard_model(program, mesh, rules), plan.zero)


def check_for_session(program: ModelProgram, plan: Plan, dtype: PlanDType, *, seq: int | None = None) -> None:
    """Whether a session that computes in a dtype can train by the plan: no field of it is left without effect.

    Raises PlanError if the plan is impossible for the model, asks for what is not built, or has another precision,
    with every reason. seq: as of `validate`.
    """
    problems = validate(program.spec, replace(plan, precision=dtype), seq=seq)
    if plan.precision not in (None, dtype):
        fix = f"use dtype={plan.precision}, or leave precision out of the plan"
        given = f"precision={plan.precision}, dtype={dtype}"
        problems.append(Problem(given, "the session computes in its dtype, and the plan has another", fix))
    refuse(problems)


def shard_for_session(program: ModelProgram, plan: Plan, dtype: PlanDType) -> Storage:
    """`shard`, after `check_for_session`."""
    check_for_session(program, plan, dtype)
    return shard(program, replace(plan, precision=dtype))
