"""Program and plan -> sharded program with its storage: every communication of a step is decided here."""

from __future__ import annotations

from duomesh.core.ir.program import ModelProgram
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.problem import refuse
from duomesh.core.plan.rules import mesh_and_rules
from duomesh.core.plan.validate import validate
from duomesh.core.sharding.program import shard_model
from duomesh.core.sharding.storage import Storage

__all__ = ["shard"]


def shard(program: ModelProgram, plan: Plan) -> Storage:
    """Types a model on the mesh of one pipeline stage of the plan.

    Raises PlanError if the plan is impossible for the model, with every reason.
    """
    refuse(problem for problem in validate(program.spec, plan) if problem.kind == "impossible")
    mesh, rules = mesh_and_rules(program.spec, plan)
    return Storage(shard_model(program, mesh, rules), plan.zero)
