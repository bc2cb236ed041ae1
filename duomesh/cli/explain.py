"""`duomesh explain MODEL [--plan PLAN]`: what a model computes, op by op, and where everything lives under a plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from duomesh.api import draw, explain, explain_compiled
from duomesh.core.errors import ConfigError
from duomesh.core.publish import publish_file
from duomesh.core.session import JaxMode
from duomesh.core.sharding.compare import CompiledTable
from duomesh.core.sharding.listing import LayoutListing

__all__ = ["Args", "run"]


@dataclass(frozen=True)
class Args:
    """Print a model's programs: values with their logical axes, ops, weights and axis signatures; with a plan, the
    layouts on every mesh axis, the collectives of a step with their bytes, and what one rank holds."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A preset's name or a checkpoint directory."""
    plan: str | None = None
    """Such as tp=8,dp=4,sequence_parallel,zero=1."""
    seq: int | None = None
    """Tokens of a sample; the model's own context if left out."""
    compiled: bool = False
    """With a plan: compile a training step with JAX, and print XLA's collectives beside those that the plan lists."""
    mode: JaxMode = "manual"
    """With --compiled: how JAX runs the plan."""
    remat: bool = False
    """With --compiled: whether layers are computed again in backward."""
    device: str | None = None
    """With --compiled: the kind of devices to compile for, such as cpu or cuda; JAX's default if left out."""
    json: bool = False
    """Print JSON; with a plan only."""
    picture: Path | None = None
    """Draw one program of the model under the plan into this SVG file, instead of printing."""
    program: str = "block0"
    """Which program to draw."""


def run(args: Args) -> int:
    if args.seq is not None and args.seq < 1:
        raise ConfigError(f"--seq is {args.seq}; it must be at least 1.")
    if not args.compiled and (args.mode != "manual" or args.device is not None or args.remat):
        raise ConfigError("--mode, --remat and --device say how a step is compiled; give --compiled with them.")
    if args.picture is not None and (args.compiled or args.json):
        raise ConfigError("--picture draws and prints nothing; leave out --json and --compiled, or --picture.")
    if args.plan is None:
        for name in ("json", "picture", "compiled"):
            if getattr(args, name):
                raise ConfigError(f"--{name} shows layouts and needs --plan, such as --plan tp=2.")
        print(explain(args.model, seq=args.seq))
        return 0
    if args.picture is not None:
        publish_file(args.picture, draw(args.model, args.plan, args.program, seq=args.seq).encode())
        print(f"drew {args.program} of {args.model} in {args.picture}")
        return 0
    listing: CompiledTable | LayoutListing
    if args.compiled:
        listing = explain_compiled(
            args.model, args.plan, seq=args.seq, mode=args.mode, remat=args.remat, device=args.device
        )
    else:
        listing = explain(args.model, args.plan, seq=args.seq)
    print(json.dumps(listing.to_dict(), indent=1) if args.json else listing)
    return 0
