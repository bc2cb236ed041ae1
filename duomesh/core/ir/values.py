"""The nouns of the IR: axes, values, parameters, constants and ops.

An `Axis` is a *logical* axis: what a dim means, not where it lives. A `Value` is an activation, a `Param` a
weight under its canonical name. An `Op` computes named output values from named input values and parameters; its
`Signature` says, einsum-like, which axes it keeps, contracts, creates, or needs whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal

__all__ = ["Attr", "Axes", "Axis", "Constant", "Init", "Op", "Param", "Signature", "Value"]

Attr = str | int | float | bool | None | tuple["Attr", ...]


@dataclass(frozen=True)
class Axis:
    """A logical axis. `size` is None where only the batch decides it (batch, seq)."""

    name: str
    size: int | None = None

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}={self.size}"


Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Value:
    """A named array that flows between ops.

    dtype: "compute" is the run's compute dtype; "wide" is fp32, or float64 in a float64 run; "int" is int32.
    live: (choices, experts) if the value is [experts, ...] and each token has rows for its `choices` of them only.
        The other rows stand for nothing, so that a value needs choices / experts of the elements that its axes have.
    """

    name: str
    axes: Axes
    dtype: Literal["compute", "wide", "int"] = "compute"
    live: tuple[int, int] | None = None


@dataclass(frozen=True)
class Init:
    """How a parameter is drawn: a normal of mean 0 and this std, or a constant fill."""

    kind: Literal["normal", "fill"]
    value: float


@dataclass(frozen=True)
class Param:
    """A parameter under its canonical name.

    `groups` holds one tuple of axes per stored dim: a dim of q's weight merges (kv_heads, q_per_kv, head_dim).
    Stored matrices are [out, in] in both backends and in checkpoints.
    """

    name: str
    groups: tuple[Axes, ...]
    init: Init

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(axis.size or 0 for axis in group) for group in self.groups)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_decayed(self) -> bool:
        """Weight decay acts on matrices only, never on norm weights or biases, also where every expert has one."""
        matrix = [group for group in self.groups if group[0].name != "experts"]
        return len(matrix) > 1


@dataclass(frozen=True)
class Constant:
    """Numbers that an op needs and that no training changes; float32, whatever the model's dtype."""

    name: str
    data: tuple[float, ...]


@dataclass(frozen=True)
class Signature:
    """Which axes each operand has, by name, as the op sees them.

    Attention names the sequence axis of k and v `kv_seq`. `local` axes must be whole on a rank: the op
    normalises, takes a softmax or pairs channels over them. `inner` axes may be split, although the op reduces over
    them by more than a sum: it then talks to the other ranks itself (see `OpKind.own`).
    """

    inputs: tuple[tuple[str, ...], ...]
    params: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    local: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()

    @property
    def contracted(self) -> tuple[str, ...]:
        """Axes of inputs or parameters that no output keeps, in order of appearance."""
        kept = {name for out in self.outputs for name in out}
        seen = [name for operand in (*self.inputs, *self.params) for name in operand if name not in kept]
        return tuple(dict.fromkeys(seen))

    def __str__(self) -> str:
        def side(operands: tuple[tuple[str, ...], ...]) -> str:
            return ", ".join(" ".join(names) if names else "scalar" for names in operands)

        operands = side(self.inputs + tuple(p for p in self.params if p))
        return f"{operands} -> {side(self.outputs)}"


@dataclass(frozen=True)
class Op:
    """One step of a program.

    inputs: value names; None for an optional input that is absent.
    params: parameter names in the role order of the kind; None for an absent one.
    attrs: conventions and numbers, as pairs.
    """

    kind: str
    name: str
    inputs: tuple[str | None, ...]
    params: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attrs: tuple[tuple[str, Attr], ...]
    signature: Signature = field(compare=False)
