"""Sharded programs: every movement of a value is an instruction of its own, beside the ops.

`shard_model` types a model on every axis of a mesh and writes the result down. Interpreters and backends walk the
instructions in order; they decide nothing. `check` holds a sharded program, whoever wrote it, against the modes of its
ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from duomesh.core.errors import PlanError
from duomesh.core.ir.kind import Own
from duomesh.core.ir.ops import KINDS
from duomesh.core.ir.program import Call, ModelProgram, Program
from duomesh.core.ir.values import Axes, Param
from duomesh.core.sharding.layouts import Extents, Layout, Step, backward_steps, steps
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.transitions import INVARIANT, REPLICATED, Kind, State
from duomesh.core.sharding.typing import PADDED, AxisRule, ProgramStates, param_state, type_model

__all__ = [
    "Reshard",
    "ShardedCall",
    "ShardedModelProgram",
    "ShardedProgram",
    "param_axes",
    "shard_model",
    "write_model",
]


@dataclass(frozen=True, eq=False)
class Reshard:
    """A value or a parameter in another layout, under a new name.

    ahead: steps forward. back: steps of the cotangent; empty for a value that is not differentiated.
    regathers: whether `result` is not kept for backward, which takes the steps forward once more.
    """

    source: str
    result: str
    ahead: tuple[Step, ...]
    back: tuple[Step, ...]
    regathers: bool = False


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """An op on local arrays. operands: names, inputs then parameters, in the layouts that the op wants."""

    call: Call
    operands: tuple[str | None, ...]

    @property
    def own(self) -> Own:
        """Collectives that the op makes itself where an inner axis is split."""
        return KINDS[self.call.op.kind].own


@dataclass(frozen=True, eq=False)
class ShardedProgram:
    """One program on a mesh.

    layouts: of every name: inputs, parameters, results of ops and of reshards.
    outputs: pairs (outside name, inside name).
    """

    program: Program
    instructions: tuple[Reshard | ShardedCall, ...]
    layouts: Mapping[str, Layout]
    outputs: tuple[tuple[str, str], ...]

    @cached_property
    def origin(self) -> Mapping[str, str]:
        """The value or parameter that each name is, in some layout."""
        found = {name: name for name in (*self.program.values, *self.program.param_by_name)}
        for made in self.instructions:
            if isinstance(made, Reshard):
                found[made.result] = found[made.source]
        return found

    def axes(self, name: str) -> Axes:
        """Logical axes of a name; a parameter's one by one."""
        source = self.origin[name]
        if source in self.program.param_by_name:
            return param_axes(self.program.param_by_name[source])
        return self.program.values[source].axes

    def calls(self) -> Iterator[ShardedCall]:
        return (made for made in self.instructions if isinstance(made, ShardedCall))

    def reshards(self) -> Iterator[Reshard]:
        return (made for made in self.instructions if isinstance(made, Reshard))


@dataclass(frozen=True, eq=False)
class ShardedModelProgram:
    """A model on a mesh.

    rules: by mesh axis, in the mesh's order. programs: by name. params: the layout in which each parameter enters its
    uses, by (canonical name, stage); stages that do not own one are left out. stages: of each of the model's steps.
    """

    model: ModelProgram
    mesh: Mesh
    rules: Mapping[str, AxisRule]
    programs: Mapping[str, ShardedProgram]
    params: Mapping[tuple[str, int], Layout]
    stages: tuple[int, ...]
    multiples: Mapping[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[tuple[str, int, ShardedProgram], ...]:
        """(prefix, stage, program) of every application in order."""
        return tuple(
            (prefix, stage, self.programs[program.name])
            for (prefix, program), stage in zip(self.model.steps, self.stages, strict=True)
        )

    def canonical(self, prefix: str, local: str) -> str:
        return self.model.aliases.get(prefix + local, prefix + local)

    @cached_property
    def owners(self) -> Mapping[str, tuple[int, ...]]:
        """The stages that hold each parameter, in order: one, or two for a tie across stages."""
        found: dict[str, list[int]] = {}
        for name, stage in self.params:
            found.setdefault(name, []).append(stage)
        return {name: tuple(sorted(stages)) for name, stages in found.items()}

    def reduction_axes(self, name: str, stage: int | None = None) -> tuple[str, ...]:
        """Mesh axes over which a stage sums its gradient of a parameter; its first owner if no stage is named."""
        layout = self.params[name, self.owners[name][0] if stage is None else stage]
        return tuple(axis for axis, state in layout.items() if state == REPLICATED)

    def extents(self, *, batch: int, seq: int) -> Extents:
        return Extents(self.mesh, batch, seq, self.multiples)


def param_axes(param: Param) -> Axes:
    """A parameter's logical axes one by one; its stored dims merge them in groups."""
    return tuple(axis for group in param.groups for axis in group)


def shard_model(
    model: ModelProgram, mesh: Mesh, rules: Sequence[AxisRule], *, stages: Sequence[int] | None = None
) -> ShardedModelProgram:
    """Types a model and writes down every movement.

    Args:
        mesh: axes of one pipeline stage, slowest first.
        rules: one for each axis of the mesh.
        stages: the pipeline stage of each of the model's steps (`ModelProgram.steps`); None for one stage.

    Raises:
        PlanError: a dim that a rule splits is no multiple of its axis.
    """
    by_axis = {rule.axis: rule for rule in rules}
    if set(by_axis) != set(mesh.names) or len(rules) != len(by_axis):
        shown = [", ".join(names) or "none" for names in (mesh.names, [rule.axis for rule in rules])]
        raise PlanError(f"the mesh has the axes {shown[0]}, the rules are for {shown[1]}; give one rule for each axis.")
    ordered = {name: by_axis[name] for name in mesh.names}
    typed = {name: type_model(model, rule, mesh.size(name)) for name, rule in ordered.items()}
    return write_model(model, mesh, ordered, typed, stages=stages)


def write_model(
    model: ModelProgram,
    mesh: Mesh,
    rules: Mapping[str, AxisRule],
    typed: Mapping[str, Mapping[str, ProgramStates]],
    *,
    stages: Sequence[int] | None = None,
) -> ShardedModelProgram:
    """Writes down the movements that states ask for, whoever chose them.

    Args:
        rules: by axis, in the mesh's order.
        typed: axis -> program name -> states.
        stages: as of `shard_model`.
    """
    at = tuple(stages) if stages is not None else (0,) * len(model.steps)
    params = _param_layouts(model, rules, typed, at)
    programs: dict[str, ShardedProgram] = {}
    for (prefix, program), stage in zip(model.steps, at, strict=True):
        if program.name not in programs:
            states = {axis: typed[axis][program.name] for axis in mesh.names}
            enter = {
                param.name: params[model.aliases.get(prefix + param.name, prefix + param.name), stage]
                for param in program.params
            }
            programs[program.name] = _Writer(mesh, rules, program, states, enter).write()
    layouts = [*params.values(), *(layout for program in programs.values() for layout in program.layouts.values())]
    return ShardedModelProgram(model, mesh, rules, programs, params, at, _multiples(mesh, layouts))


def _multiples(mesh: Mesh, layouts: Sequence[Layout]) -> dict[str, int]:
    """What a padded axis is a multiple of: all axes that split it anywhere, together."""
    splitting = {name: {a for layout in layouts for a, s in layout.items() if s.dim == name} for name in PADDED}
    return {name: prod(mesh.size(axis) for axis in axes) for name, axes in splitting.items()}


def _param_layouts(
    model: ModelProgram,
    rules: Mapping[str, AxisRule],
    typed: Mapping[str, Mapping[str, ProgramStates]],
    stages: Sequence[int],
) -> dict[tuple[str, int], Layout]:
    """What every use of a parameter within a stage asks for decides the layout in which it enters them all."""
    asked: dict[tuple[str, int], dict[str, set[State]]] = {}
    for (prefix, program), stage in zip(model.steps, stages, strict=True):
        for index, op in enumerate(program.ops):
            for i, local in enumerate(op.params, start=len(op.inputs)):
                if local is None:
                    continue
                name = model.aliases.get(prefix + local, prefix + local)
                entry = asked.setdefault((name, stage), {axis: set() for axis in rules})
                for axis in rules:
                    state = typed[axis][program.name].ops[index].operands[i]
                    assert state is not None
                    entry[axis].add(state)
    return {
        (name, stage): {
            axis: param_state(rule.of_param(model.params[name]), asked[name, stage][axis])
            for axis, rule in rules.items()
        }
        for name, stage in asked
    }


class _Writer:
    """Writes one program's instructions: each (value, layout) is made once and shared by all that want it."""

    def __init__(
        self,
        mesh: Mesh,
        rules: Mapping[str, AxisRule],
        program: Program,
        states: Mapping[str, ProgramStates],
        params: Mapping[str, Layout],
    ) -> None:
        self._mesh, self._rules, self._program, self._states = mesh, rules, program, states
        self._layouts: dict[str, Layout] = dict(params)
        for name in (*(v.name for v in program.inputs), *(c.name for c in program.constants)):
            self._layouts[name] = {axis: s.values[name] for axis, s in states.items()}
        self._made: dict[tuple[str, tuple[State, ...]], str] = {}
        self._instructions: list[Reshard | ShardedCall] = []

    def write(self) -> ShardedProgram:
        for index, call in enumerate(self._program.calls):
            op = call.op
            operands = []
            for i, name in enumerate((*op.inputs, *op.params)):
                wanted = {axis: s.ops[index].operands[i] or INVARIANT for axis, s in self._states.items()}
                operands.append(None if name is None else self._bring(name, wanted))
            self._instructions.append(ShardedCall(call, tuple(operands)))
            for i, name in enumerate(op.outputs):
                self._layouts[name] = {axis: s.ops[index].outputs[i] for axis, s in self._states.items()}
        outputs = []
        for outside, name in self._program.outputs:
            wanted_out = {axis: s.outputs[outside] for axis, s in self._states.items()}
            outputs.append((outside, self._bring(name, wanted_out)))
        instructions = self._with_regathers({name for _, name in outputs})
        return ShardedProgram(self._program, instructions, self._layouts, tuple(outputs))

    def _bring(self, name: str, wanted: Layout) -> str:
        """The name of the value in the wanted layout."""
        is_param = name in self._program.param_by_name
        is_differentiated = is_param or name in self._program.differentiated
        made = self._layouts[name]
        if not is_differentiated:  # for ids, tables and masks invariant and replicated are one
            wanted = {
                a: made[a] if {made[a], state} == {INVARIANT, REPLICATED} else state for a, state in wanted.items()
            }
        if wanted == made:
            return name
        key = (name, tuple(wanted.values()))
        if key not in self._made:
            result = f"{name}@{sum(known == name for known, _ in self._made) + 1}"
            ahead = steps(self._mesh, made, wanted)
            back = backward_steps(ahead) if is_differentiated else ()
            self._instructions.append(Reshard(name, result, ahead, back))
            self._layouts[result] = wanted
            self._made[key] = result
        return self._made[key]

    def _with_regathers(self, kept: Set[str]) -> tuple[Reshard | ShardedCall, ...]:
        """Marks what one linear alone takes, and can gather again for the gradient of its weights."""
        takers: dict[str, list[str]] = {name: ["output"] for name in kept}
        for made in self._instructions:
            if isinstance(made, ShardedCall):
                for name in made.operands:
                    takers.setdefault(name or "", []).append(made.call.op.kind)
        return tuple(
            replace(made, regathers=takers.get(made.result) == ["linear"] and self._may_regather(made.ahead))
            if isinstance(made, Reshard)
            else made
            for made in self._instructions
        )

    def _may_regather(self, ahead: Sequence[Step]) -> bool:
        """Only if all that moves is gathered: nothing is summed a second time."""
        moving = [step for step in ahead if step.action.is_collective]
        is_gather = all(step.before.kind is Kind.SHARD and step.after == REPLICATED for step in moving)
        return bool(moving) and is_gather and all(self._rules[a].regathers for step in moving for a in step.axes)
