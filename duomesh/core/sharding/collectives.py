"""The collectives of a training step, listed from the types alone: what moves, over which axis, when, how much.

A value goes from one layout to another axis by axis (`move_order`), and the first op that wants a layout pays for it.
Sizes are those of the buffer on one rank that holds the axis whole: the result of an all-gather, the input of a
reduce-scatter, the buffer of an all-reduce.

Not here: storage and optimizer layouts, buckets, recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from duomesh.core.ir.ops import KINDS
from duomesh.core.ir.program import ModelProgram, Program
from duomesh.core.ir.values import Axes, Param, Value
from duomesh.core.sharding import transitions
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.transitions import REPLICATED, Action, Kind, State, dual
from duomesh.core.sharding.typing import AxisRule, ProgramStates, at_home, param_state, type_model

__all__ = ["Collective", "Layout", "distinct_parameters", "move_order", "step_collectives"]

Layout = Mapping[str, State]  # mesh axis -> state, S by logical axis
Phase = Literal["forward", "backward", "sync"]


@dataclass(frozen=True)
class Collective:
    """One collective that a rank takes part in.

    Attributes:
        op: the value that moves, or the parameter whose gradient is summed, as `<program>.<local name>`.
        kind: "all-gather", "all-reduce", "reduce-scatter" or "all-to-all".
        axis: mesh axis.
        phase: "sync" is the sum of parameter gradients, once a step.
        dtype: "compute", "wide" (losses) or "int", as values have; "grad" for gradients.
        elements: of the buffer on one rank.
        count: how often in a step.
    """

    op: str
    kind: str
    axis: str
    phase: Phase
    dtype: str
    elements: int
    count: int


def move_order(names: Sequence[str], layout: Layout) -> tuple[str, ...]:
    """In which order the axes of a mesh, slowest first, are taken when a value moves to a layout.

    Joins come first, from the fastest axis on, then cuts from the slowest: a dim that several axes split is only ever
    changed at its minor end.
    """
    cuts = [name for name in names if layout[name].kind is Kind.SHARD]
    return (*(name for name in reversed(names) if name not in cuts), *cuts)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of logical axes on the whole mesh, and of the mesh's axes."""

    mesh: Mesh
    batch: int
    seq: int

    def elements(self, axes: Axes, layout: Layout) -> int:
        """Elements that one rank holds."""
        run_time = {"batch": self.batch, "seq": self.seq}
        out = prod(run_time[axis.name] if axis.size is None else axis.size for axis in axes)
        for name, state in layout.items():
            if state.kind is Kind.SHARD:
                out //= self.mesh.size(name)
        return out


def _moves(sizes: _Sizes, axes: Axes, before: Layout, after: Layout) -> Iterator[tuple[str, Action, int]]:
    """(axis, action, elements) of every collective between two layouts."""
    current = dict(before)
    for name in move_order(sizes.mesh.names, after):
        action = transitions.forward(current[name], after[name])
        whole = {**current, name: REPLICATED}  # the buffer that holds this axis whole
        if action.is_collective and sizes.mesh.size(name) > 1:
            yield name, action, sizes.elements(axes, whole)
        current[name] = after[name]


def _wanted(
    program: Program, states: Mapping[str, ProgramStates]
) -> Iterator[tuple[Value, dict[str, State], dict[str, State]]]:
    """Every (value, layout it is made in, layout that is wanted), each once: the joint form of `typing.conversions`."""
    seen: set[tuple[str, tuple[State, ...]]] = set()

    def once(name: str, wanted: dict[str, State]) -> Iterator[tuple[Value, dict[str, State], dict[str, State]]]:
        made = {a: s.values[name] for a, s in states.items()}
        key = (name, tuple(wanted.values()))
        if wanted != made and key not in seen:
            seen.add(key)
            yield program.values[name], made, wanted

    for index, op in enumerate(program.ops):
        for i, name in enumerate(op.inputs):
            if name is not None:
                yield from once(name, {a: at_home(s.ops[index].operands[i]) for a, s in states.items()})
    for name, value in program.outputs:
        yield from once(value, {a: s.outputs[name] for a, s in states.items()})


def step_collectives(
    model: ModelProgram,
    mesh: Mesh,
    rules: Sequence[AxisRule],
    *,
    batch: int,
    seq: int,
    micro_batches: int = 1,
    has_segments: bool = False,
) -> list[Collective]:
    """Every collective of a step, equal ones counted together.

    Args:
        batch: samples of a micro-batch over all data ranks.
        seq: tokens of a sample.
        has_segments: whether batches carry segment ids.
    """
    if not mesh.axes:
        return []
    by_axis = {rule.axis: (rule, type_model(model, rule, mesh.size(rule.axis))) for rule in rules}
    sizes = _Sizes(mesh, batch, seq)
    counts: Counter[Collective] = Counter()
    applied = Counter(program.name for _, program in model.steps)
    for program in model.distinct:
        states = {a: by_axis[a][1][program.name] for a in mesh.names}
        for made in _program_collectives(sizes, program, states, has_segments=has_segments):
            counts[made] += applied[program.name] * micro_batches
    for (program_name, local), (name, repeats) in distinct_parameters(model).items():
        layout = {a: param_state(model, states, rule, name) for a, (rule, states) in by_axis.items()}
        for made in _parameter_sums(sizes, f"{program_name}.{local}", model.params[name], layout):
            counts[made] += repeats
    return [Collective(c.op, c.kind, c.axis, c.phase, c.dtype, c.elements, count) for c, count in counts.items()]


def distinct_parameters(model: ModelProgram) -> dict[tuple[str, str], tuple[str, int]]:
    """(program, local name) -> the first global name, and how many layers repeat it; aliases left out."""
    out: dict[tuple[str, str], tuple[str, int]] = {}
    for prefix, program in model.steps:
        for param in program.params:
            if prefix + param.name not in model.aliases:
                first, count = out.get((program.name, param.name), (prefix + param.name, 0))
                out[program.name, param.name] = (first, count + 1)
    return out


def _program_collectives(
    sizes: _Sizes, program: Program, states: Mapping[str, ProgramStates], *, has_segments: bool
) -> Iterator[Collective]:
    prefix = program.name
    differentiated = next(iter(states.values())).differentiated
    for value, made, wanted in _wanted(program, states):
        if value.name == "segment_ids" and not has_segments:
            continue
        for axis, action, elements in _moves(sizes, value.axes, made, wanted):
            yield Collective(f"{prefix}.{value.name}", action.value, axis, "forward", value.dtype, elements, 1)
        if value.name in differentiated:
            ahead, back = ({a: dual(s) for a, s in layout.items()} for layout in (made, wanted))
            for axis, action, elements in _moves(sizes, value.axes, back, ahead):
                yield Collective(f"{prefix}.{value.name}", action.value, axis, "backward", value.dtype, elements, 1)
    yield from _own_collectives(sizes, program, states)


def _own_collectives(sizes: _Sizes, program: Program, states: Mapping[str, ProgramStates]) -> Iterator[Collective]:
    """Those that an op declares: a cross entropy over a split vocabulary takes a maximum and two sums."""
    for index, op in enumerate(program.ops):
        inner = KINDS[op.kind].inner
        for axis, s in states.items():
            operand = s.ops[index].operands[0]
            if inner and operand is not None and operand.kind is Kind.SHARD and operand.dim in inner:
                result = program.values[op.outputs[0]]
                layout = {a: t.ops[index].outputs[0] for a, t in states.items()}
                for what in ("maximum", "sum of exponentials", "label's logit"):
                    name = f"{program.name}.{op.name} {what}"
                    elements = sizes.elements(result.axes, layout)
                    if sizes.mesh.size(axis) > 1:
                        yield Collective(name, Action.ALL_REDUCE.value, axis, "forward", result.dtype, elements, 1)


def _parameter_sums(sizes: _Sizes, name: str, param: Param, layout: Layout) -> Iterator[Collective]:
    axes = tuple(axis for group in param.groups for axis in group)
    for axis, state in layout.items():
        if state == REPLICATED and sizes.mesh.size(axis) > 1:
            elements = sizes.elements(axes, layout)
            yield Collective(name, Action.ALL_REDUCE.value, axis, "sync", "grad", elements, 1)
