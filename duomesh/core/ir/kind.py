"""What an op kind is: its operands, its attributes, and the inference from operands to results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from duomesh.core.errors import SpecError
from duomesh.core.ir.values import Attr, Axes, Axis, Param, Signature, Value

__all__ = ["Attrs", "DType", "Inferred", "Inputs", "OpKind", "Own", "Params", "axis_names", "infer_plainly", "required"]

DType = Literal["compute", "wide", "int"]
Inputs = Sequence[Value | None]
Params = Sequence[Param | None]
Attrs = Mapping[str, Attr]
Own = tuple[tuple[Literal["forward", "backward"], str], ...]


@dataclass(frozen=True)
class Inferred:
    """Axes and dtype of each output, the op's signature, and which elements of the outputs exist (`Value.live`)."""

    outputs: tuple[tuple[Axes, DType], ...]
    signature: Signature
    live: tuple[int, int] | None = None


@dataclass(frozen=True)
class OpKind:
    """What a kind takes and makes.

    Attributes:
        inputs, params: operand names; a trailing `?` marks one that may be absent, a trailing `*` a list that an op
            holds as many of as its first list.
        attrs: names of the attributes that an op stores: conventions and numbers.
        infer: outputs and signature from operands and attributes.
        own: collectives of the op's own where an `inner` axis of its signature is split, as (phase, what) pairs: each
            is an all-reduce of one wide number for each element of the first input without its `inner` and `local`
            axes.
        linear: groups of operand names; the op is linear in the operands of a group together, the others held fixed.
            A sum over ranks may then be taken after the op instead of before.
        derived: names of further keyword arguments of the functions, which follow from shapes; `derive` makes them.
    """

    inputs: tuple[str, ...]
    params: tuple[str, ...]
    attrs: tuple[str, ...]
    infer: Callable[[Inputs, Params, Attrs], Inferred]
    derived: tuple[str, ...] = ()
    derive: Callable[[Inputs, Params], dict[str, Attr]] = lambda inputs, params: {}
    own: Own = ()
    linear: tuple[tuple[str, ...], ...] = ()

    def check(self, inputs: Inputs, params: Params, attrs: Attrs) -> None:
        """Raises SpecError unless operands and attributes are those of the kind."""
        if set(attrs) != set(self.attrs):
            raise SpecError(f"takes the attributes {self.attrs}, got {tuple(attrs)}.")
        for operands, roles in ((inputs, self.inputs), (params, self.params)):
            if any(role.endswith("*") for role in roles):
                if not operands or len(operands) % len(roles):
                    raise SpecError(f"takes equally many {' and '.join(roles)}, got {len(operands)} in all.")
                continue
            if len(operands) != len(roles):
                raise SpecError(f"takes {roles}, got {len(operands)} operands.")
            for operand, role in zip(operands, roles, strict=True):
                if operand is None and not role.endswith("?"):
                    raise SpecError(f"operand {role!r} is required.")


def required(value: Value | None, role: str) -> Value:
    """The operand. Raises SpecError if it is absent."""
    if value is None:
        raise SpecError(f"operand {role!r} is required.")
    return value


def axis_names(axes: Iterable[Axis]) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes)


def infer_plainly(
    inputs: Inputs,
    params: Params,
    outputs: Sequence[tuple[Axes, DType]],
    *,
    local: tuple[str, ...] = (),
    inner: tuple[str, ...] = (),
    live: tuple[int, int] | None = None,
) -> Inferred:
    """An inference whose op sees every operand under its own axis names."""
    return Inferred(
        tuple(outputs),
        Signature(
            inputs=tuple(() if v is None else axis_names(v.axes) for v in inputs),
            params=tuple(() if p is None else axis_names(axis for group in p.groups for axis in group) for p in params),
            outputs=tuple(axis_names(axes) for axes, _ in outputs),
            local=local,
            inner=inner,
        ),
        live,
    )
