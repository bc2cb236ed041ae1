"""`duomesh explain MODEL [--plan PLAN]`: what a model computes, op by op, and where everything lives under a plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from duomesh.api import explain, open_model
from duomesh.core.errors import ConfigError, PlanError
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.validate import axis_rules, check
from duomesh.core.sharding.listing import LayoutListing, list_layout
from duomesh.core.sharding.mesh import Mesh

__all__ = ["Args", "run"]


@dataclass(frozen=True)
class Args:
    """Print a model's programs: values with their logical axes, ops, weights and axis signatures; with a plan, the
    layouts on every mesh axis, the collectives of a step with their bytes, and what one rank holds."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A preset's name or a checkpoint directory."""
    plan: str | None = None
    """Such as tp=8,dp=4,sequence_parallel."""
    seq: int | None = None
    """Tokens of a sample; the model's own context if left out."""
    json: bool = False
    """Print JSON; with a plan only."""


def _layout(args: Args) -> LayoutListing:
    spec = open_model(args.model).spec
    plan = Plan.parse(args.plan or "")
    seq = args.seq or spec.max_positions
    check(spec, plan, seq=seq)
    if plan.zero:
        raise PlanError(f"zero={plan.zero}: layouts of storage and optimizer state are not listed yet. Use zero=0.")
    whole, all_rules = axis_rules(spec, plan)
    # an axis of size 1 makes no difference to anything
    mesh = Mesh(tuple(axis for axis in whole.axes if axis.size > 1))
    rules = [rule for rule in all_rules if rule.axis in mesh.names]
    batch = plan.dp * (plan.micro_batch_size or 1)
    return list_layout(
        build_program(spec),
        mesh,
        rules,
        batch=batch,
        seq=seq,
        micro_batches=plan.micro_batches,
        compute=plan.precision,
        grads=plan.resolved_grad_dtype,
    )


def run(args: Args) -> int:
    if args.seq is not None and args.seq < 1:
        raise ConfigError(f"--seq is {args.seq}; it must be at least 1.")
    if args.plan is None:
        if args.json:
            raise ConfigError("--json lists layouts and needs --plan, such as --plan tp=2.")
        print(explain(args.model, seq=args.seq))
        return 0
    listing = _layout(args)
    print(json.dumps(listing.to_dict(), indent=1) if args.json else listing.to_text())
    return 0
