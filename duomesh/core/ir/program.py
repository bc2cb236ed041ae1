"""Programs: straight-line lists of ops, the builder that makes them, and the walker that runs them.

A `ModelProgram` is a few programs (`embed`, `tables`, one per distinct block, `head`, `loss`) that hand values to each
other by name: `tokens -> x`; `positions -> rotary tables`, which has no parameters and which any part of the model can
run for itself; `x, tables -> x` for every layer; `x -> logits`; `logits, labels, loss_mask -> loss_sum`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from duomesh.core.errors import BackendError, SpecError
from duomesh.core.ir.ops import KINDS
from duomesh.core.ir.storage import Placement, Slot, slots_of
from duomesh.core.ir.values import Attr, Axes, Constant, Init, Op, Param, Value
from duomesh.core.spec.model import ModelSpec

__all__ = ["Call", "ModelProgram", "Program", "ProgramBuilder", "Term", "check_kinds", "run"]


@dataclass(frozen=True)
class Call:
    """An op as a function call: storage tensors by name after the inputs, then keyword arguments."""

    op: Op
    slots: tuple[str | None, ...]
    kwargs: Mapping[str, Attr]


@dataclass(frozen=True, eq=False)
class Program:
    """Ops in order. Names of values and parameters are local to the program.

    outputs: pairs (name the outside sees, name of the value inside).
    """

    name: str
    inputs: tuple[Value, ...]
    constants: tuple[Constant, ...]
    params: tuple[Param, ...]
    ops: tuple[Op, ...]
    outputs: tuple[tuple[str, str], ...]
    values: Mapping[str, Value] = field(repr=False)

    @cached_property
    def slots(self) -> Mapping[str, Slot]:
        """Storage tensors by name: a packed linear's weights are one."""
        return {slot.name: slot for op in self.ops for slot in slots_of(op, self.param_by_name) if slot}

    @cached_property
    def param_by_name(self) -> Mapping[str, Param]:
        return {param.name: param for param in self.params}

    @cached_property
    def differentiated(self) -> frozenset[str]:
        """Values that carry a gradient: all but ids, tables, masks and what is made of those alone."""
        found = {value.name for value in self.inputs if value.dtype == "compute"}
        for op in self.ops:
            if op.params or any(name in found for name in op.inputs):
                found |= {name for name in op.outputs if self.values[name].dtype != "int"}
        return frozenset(found)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Each op with everything that its function takes."""

        def call(op: Op) -> Call:
            slots = tuple(None if slot is None else slot.name for slot in slots_of(op, self.param_by_name))
            inputs = [None if name is None else self.values[name] for name in op.inputs]
            params = [None if name is None else self.param_by_name[name] for name in op.params]
            return Call(op, slots, {**dict(op.attrs), **KINDS[op.kind].derive(inputs, params)})

        return tuple(call(op) for op in self.ops)


@dataclass(frozen=True)
class Term:
    """A scalar that enters the loss beside that of the targets, once for each layer that makes it.

    program, output: a program's name and one of its outputs, which sums over the tokens of a micro-batch.
    coefficient: what the mean is multiplied by.
    power: of the number of tokens, 2 for a sum of products of two sums; `core.objective` divides by it.
    """

    program: str
    output: str
    coefficient: float
    power: int


@dataclass(frozen=True, eq=False)
class ModelProgram:
    """A whole model.

    blocks: the distinct block programs. layers: for each layer the index of its program.
    aliases: parameters that are another one under a second name (a tied head).
    terms: what the loss has beside `loss_sum`.
    """

    spec: ModelSpec
    embed: Program
    tables: Program
    blocks: tuple[Program, ...]
    layers: tuple[int, ...]
    head: Program
    loss: Program
    aliases: Mapping[str, str]
    terms: tuple[Term, ...]

    @property
    def steps(self) -> tuple[tuple[str, Program], ...]:
        """(prefix, program) of every application in order. A prefix is what local names become global with."""
        layers = tuple((f"layers.{i}.", self.blocks[kind]) for i, kind in enumerate(self.layers))
        first = (("embed.", self.embed), ("tables.", self.tables))
        return (*first, *layers, ("head.", self.head), ("loss.", self.loss))

    @property
    def distinct(self) -> tuple[Program, ...]:
        """Every program once."""
        return (self.embed, self.tables, *self.blocks, self.head, self.loss)

    @cached_property
    def slots(self) -> Mapping[str, Slot]:
        """Storage tensors of the whole model by global name, aliases included."""
        return {prefix + slot.name: slot for prefix, program in self.steps for slot in program.slots.values()}

    @cached_property
    def params(self) -> Mapping[str, Param]:
        """Every distinct parameter by canonical name, in the order of `steps`; tied ones once."""
        out: dict[str, Param] = {}
        for prefix, program in self.steps:
            for param in program.params:
                name = prefix + param.name
                if name not in self.aliases:
                    out[name] = Param(name, param.groups, param.init)
        return out

    @cached_property
    def placements(self) -> Mapping[str, Placement]:
        """Where each canonical parameter is stored, in the order of `params`."""
        places = {
            prefix + member.param.name: Placement(prefix + slot.name, member.start, member.stop)
            for prefix, program in self.steps
            for slot in program.slots.values()
            for member in slot.members
        }
        return {name: places[name] for name in self.params}

    @property
    def num_params(self) -> int:
        return sum(param.size for param in self.params.values())

    @cached_property
    def has_dropout(self) -> bool:
        return any(op.kind == "dropout" for program in self.distinct for op in program.ops)


class ProgramBuilder:
    """Appends ops to a program under construction; every mistake is found here, by name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inputs: list[Value] = []
        self._constants: list[Constant] = []
        self._params: dict[str, Param] = {}
        self._ops: list[Op] = []
        self._values: dict[str, Value] = {}

    def _define(self, value: Value) -> Value:
        if value.name in self._values:
            raise SpecError(f"program {self._name}: value {value.name} is defined twice.")
        self._values[value.name] = value
        return value

    def input(self, value: Value) -> Value:
        self._inputs.append(value)
        return self._define(value)

    def constant(self, name: str, data: Sequence[float], axes: Axes) -> Value:
        self._constants.append(Constant(name, tuple(data)))
        return self._define(Value(name, axes, "wide"))

    def param(self, name: str, groups: tuple[Axes, ...], init: Init) -> Param:
        assert name not in self._params, name
        self._params[name] = Param(name, groups, init)
        return self._params[name]

    def op(
        self,
        kind: str,
        name: str,
        inputs: Sequence[Value | None],
        params: Sequence[Param | None] = (),
        outputs: Sequence[str] = (),
        **attrs: Attr,
    ) -> tuple[Value, ...]:
        """Appends an op. Outputs are named after the op unless names are given."""
        definition = KINDS[kind]
        try:
            definition.check(inputs, params, attrs)
            inferred = definition.infer(inputs, params, attrs)
        except SpecError as error:
            raise SpecError(f"program {self._name}, op {name}: {error}") from None
        names = tuple(outputs) or (name,)
        self._ops.append(
            Op(
                kind=kind,
                name=name,
                inputs=tuple(None if v is None else v.name for v in inputs),
                params=tuple(None if p is None else p.name for p in params),
                outputs=names,
                attrs=tuple(attrs.items()),
                signature=inferred.signature,
            )
        )
        made = zip(names, inferred.outputs, strict=True)
        return tuple(self._define(Value(n, axes, dtype, inferred.live)) for n, (axes, dtype) in made)

    def build(self, outputs: Mapping[str, Value]) -> Program:
        return Program(
            name=self._name,
            inputs=tuple(self._inputs),
            constants=tuple(self._constants),
            params=tuple(self._params.values()),
            ops=tuple(self._ops),
            outputs=tuple((name, value.name) for name, value in outputs.items()),
            values=MappingProxyType(dict(self._values)),
        )


def check_kinds(model: ModelProgram, functions: Mapping[str, Callable[..., Any]], backend: str) -> None:
    """Raises BackendError if the model has an op for whose kind the backend has no function."""
    kinds = dict.fromkeys(op.kind for program in model.distinct for op in program.ops)
    missing = [kind for kind in kinds if kind not in functions]
    if missing:
        raise BackendError(
            f"{backend} cannot run {', '.join(missing)} yet; build a model whose blocks have no experts (moe)."
        )


def run(
    program: Program,
    functions: Mapping[str, Callable[..., Any]],
    inputs: Mapping[str, Any],
    weights: Mapping[str, Any],
    record: MutableMapping[str, Any] | None = None,
    scope: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Walks a program with one backend's functions.

    Args:
        functions: op kind -> function.
        inputs: the program's inputs and constants by name; an optional input may be None.
        weights: storage tensors by local name.
        record: receives every op output under its local name.
        scope: context manager made from an op's name, entered around it (profilers, traces).

    Returns:
        The program's outputs by their outside names.
    """
    env: dict[str | None, Any] = {None: None, **{v.name: inputs[v.name] for v in program.inputs}}
    env.update({c.name: inputs[c.name] for c in program.constants})
    for call in program.calls:
        op = call.op
        arguments = [env[name] for name in op.inputs]
        arguments += [None if slot is None else weights[slot] for slot in call.slots]
        with nullcontext() if scope is None else scope(op.name):
            result = functions[op.kind](*arguments, **call.kwargs)
        made = result if isinstance(result, tuple) else (result,)
        env.update(zip(op.outputs, made, strict=True))
        if record is not None:
            record.update(zip(op.outputs, made, strict=True))
    return {name: env[value] for name, value in program.outputs}
