"""Reshards on tensors: transitions as collectives and local moves, with their duals as backward.

A `Move` is one reshard of a sharded program, made ready for this rank. `reshard(x, move)` is differentiable: its
backward takes the cotangent through the dual steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from duomesh.backends.torch.collectives import all_gather, all_reduce, reduce_scatter
from duomesh.backends.torch.groups import Groups
from duomesh.core.errors import BackendError
from duomesh.core.ir.values import Axes
from duomesh.core.sharding.layouts import Extents, Layout, Step, dual_layout
from duomesh.core.sharding.program import Reshard, ShardedProgram
from duomesh.core.sharding.transitions import Action

__all__ = ["Hop", "Move", "reshard"]


@dataclass(frozen=True)
class Hop:
    """One step on this rank.

    Attributes:
        group: its name; empty for a local step. size, place: ranks of the step and this one's place among them.
        cut, joined: dims that the step splits and makes whole, None if it does not.
        padded: size of the cut dim with the padding that comes with its first cut, None if it is split already.
        true: size of the joined dim without the padding that goes with its last join, None if it stays split.
    """

    action: Action
    group: str
    size: int
    place: int
    cut: int | None
    joined: int | None
    padded: int | None
    true: int | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.cut is not None and self.padded is not None and self.padded > x.shape[self.cut]:
            widths = [0, 0] * (x.dim() - 1 - self.cut) + [0, self.padded - x.shape[self.cut]]
            x = F.pad(x, widths)
        out = self._act(x)
        if self.joined is not None and self.true is not None and self.true < out.shape[self.joined]:
            out = out.narrow(self.joined, 0, self.true).contiguous()
        return out

    def _act(self, x: Tensor) -> Tensor:
        match self.action:
            case Action.ALL_REDUCE:
                out = all_reduce(x, self.group)
            case Action.ALL_GATHER:
                out = all_gather(x, _dim(self.joined), self.size, self.group)
            case Action.REDUCE_SCATTER:
                out = reduce_scatter(x, _dim(self.cut), self.size, self.group)
            case Action.SLICE:
                out = x.chunk(self.size, _dim(self.cut))[self.place].contiguous()
            case Action.KEEP_FIRST:
                out = x if self.place == 0 else torch.zeros_like(x)
            case Action.PAD:
                parts = [torch.zeros_like(x)] * self.size
                parts[self.place] = x
                out = torch.cat(parts, _dim(self.joined))
            case _:
                assert self.action is Action.NOTHING, self.action
                out = x
        return out


def _dim(dim: int | None) -> int:
    assert dim is not None
    return dim


@dataclass(frozen=True)
class Move:
    """A reshard on this rank: hops forward, and those of the cotangent."""

    ahead: tuple[Hop, ...]
    back: tuple[Hop, ...]

    @classmethod
    def of(cls, program: ShardedProgram, made: Reshard, extents: Extents, groups: Groups) -> Move:
        axes = program.axes(made.source)
        before, after = program.layouts[made.source], program.layouts[made.result]
        ahead = tuple(_hops(axes, before, made.ahead, extents, groups))
        return cls(ahead, tuple(_hops(axes, dual_layout(after), made.back, extents, groups)))

    def forward(self, x: Tensor) -> Tensor:
        return _through(x, self.ahead)

    def backward(self, cotangent: Tensor) -> Tensor:
        return _through(cotangent, self.back)


def _through(x: Tensor, hops: Sequence[Hop]) -> Tensor:
    for hop in hops:
        x = hop(x)
    return x


def _hops(axes: Axes, layout: Layout, path: Iterable[Step], extents: Extents, groups: Groups) -> Iterable[Hop]:
    names = [axis.name for axis in axes]
    current = dict(layout)
    for step in path:
        if step.action is Action.ALL_TO_ALL or "zigzag" in (step.before.order, step.after.order):
            raise BackendError(f"torch cannot move {step.before} to {step.after} yet; use a plan without cp and ep.")
        cut, joined = step.after.dim, step.before.dim
        padded = true = None
        if cut is not None and not extents.splitting(str(cut), current):
            size = axes[names.index(str(cut))].size
            padded = None if size is None else extents.padded(str(cut), size)
        current = step.apply(current)
        if joined is not None and not extents.splitting(str(joined), current):
            true = axes[names.index(str(joined))].size
        yield Hop(
            action=step.action,
            group=groups.of(step.axes).group_name if step.action.is_collective else "",
            size=groups.size(step.axes),
            place=groups.place(step.axes),
            cut=None if cut is None else names.index(str(cut)),
            joined=None if joined is None else names.index(str(joined)),
            padded=padded,
            true=true,
        )


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move) -> Tensor:
        ctx.move = move
        out = move.forward(x)
        return out.view_as(out) if out is x else out  # an input may not be returned as it is

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return ctx.move.backward(cotangent), None


def reshard(x: Tensor, move: Move) -> Tensor:
    """The value in its new layout; differentiable."""
    return _Reshard.apply(x, move)
