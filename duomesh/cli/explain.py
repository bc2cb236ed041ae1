"""`duomesh explain MODEL`: what a model computes, op by op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from duomesh.api import explain
from duomesh.core.errors import ConfigError

__all__ = ["Args", "run"]


@dataclass(frozen=True)
class Args:
    """Print a model's programs: values with their logical axes, ops, weights and axis signatures."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A preset's name or a checkpoint directory."""
    seq: int | None = None
    """Sequence length of the operation count; the model's own context if left out."""


def run(args: Args) -> int:
    if args.seq is not None and args.seq < 1:
        raise ConfigError(f"--seq is {args.seq}; it must be at least 1.")
    print(explain(args.model, seq=args.seq))
    return 0
