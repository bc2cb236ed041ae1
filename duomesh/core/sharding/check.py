"""Whether a sharded program is right, whoever wrote it.

Every op must have, on every axis, a mode whose states are those that its operands and results have; every movement must
be made of transitions, with their duals behind them; programs must hand values over in one layout; a term of the loss
must be invariant. A program whose ops are those of the unsharded one and that passes computes the same, forward and
backward. Whether it is fast is another question.
"""

from __future__ import annotations

from collections.abc import Iterator

from duomesh.core.errors import PlanError
from duomesh.core.sharding.layouts import Layout, backward_steps
from duomesh.core.sharding.modes import Mode, OpStates, OpView
from duomesh.core.sharding.program import Reshard, ShardedCall, ShardedModelProgram, ShardedProgram
from duomesh.core.sharding.transitions import INVARIANT, REPLICATED, Kind, State
from duomesh.core.sharding.typing import PADDED

__all__ = ["check_model"]


def check_model(sharded: ShardedModelProgram) -> None:
    """Raises PlanError with everything that is wrong, one fault a line: op, value, axis and states of each."""
    faults = [fault for program in sharded.programs.values() for fault in _Checker(sharded, program).faults()]
    faults += dict.fromkeys([*_handed_over(sharded), *_entering(sharded)])
    if faults:
        raise PlanError("\n".join(faults))


def _handed_over(sharded: ShardedModelProgram) -> Iterator[str]:
    """A program takes what earlier ones made in the layout in which it left them, and all parts of the batch alike."""
    made: dict[str, tuple[str, Layout]] = {}
    for _, _, program in sharded.steps:
        name = program.program.name
        for value in program.program.inputs:
            takes = program.layouts[value.name]
            if value.name in made:
                maker, leaves = made[value.name]
            else:
                names = [axis.name for axis in value.axes]
                rules = sharded.rules.items()
                maker = "the batch"
                leaves = {axis: rule.state(rule.data if rule.data in names else None) for axis, rule in rules}
            is_either = value.name not in program.program.differentiated
            for axis, state in takes.items():
                same = {INVARIANT, REPLICATED} if is_either else set()
                if state != leaves[axis] and not {state, leaves[axis]} <= same:
                    given = f"{name}: input {value.name} on axis {axis} is {state}"
                    yield f"{given}; it comes as {leaves[axis]} from {maker}."
        made.update({outside: (name, program.layouts[inside]) for outside, inside in program.outputs})


def _entering(sharded: ShardedModelProgram) -> Iterator[str]:
    """A parameter has one layout in all of its uses within a stage."""
    for prefix, stage, program in sharded.steps:
        for param in program.program.params:
            held = sharded.params[sharded.canonical(prefix, param.name), stage]
            for axis, state in program.layouts[param.name].items():
                if state != held[axis]:
                    name = f"{program.program.name}: parameter {param.name}"
                    yield f"{name} on axis {axis} is {state}, and stage {stage} holds it as {held[axis]}."


class _Checker:
    def __init__(self, sharded: ShardedModelProgram, program: ShardedProgram) -> None:
        self._sharded, self._program = sharded, program
        self._name = program.program.name

    def faults(self) -> Iterator[str]:
        for name, layout in self._program.layouts.items():
            yield from self._dims(name, layout)
        known = {v.name for v in self._program.program.inputs} | {c.name for c in self._program.program.constants}
        known |= set(self._program.program.param_by_name)
        for made in self._program.instructions:
            used = [made.source] if isinstance(made, Reshard) else [n for n in made.operands if n is not None]
            for name in used:
                if name not in known:
                    yield f"{self._name}: {name} is used before anything makes it."
            known |= {made.result} if isinstance(made, Reshard) else set(made.call.op.outputs)
            yield from self._reshard(made) if isinstance(made, Reshard) else self._call(made)
        for outside, name in self._program.outputs:
            yield from self._output(outside, name)

    # Layouts

    def _dims(self, name: str, layout: Layout) -> Iterator[str]:
        """What a layout splits exists and can be cut into equal parts."""
        mesh = self._sharded.mesh
        parts: dict[str, int] = {}
        for axis, state in layout.items():
            if state.kind is Kind.SHARD:
                parts[str(state.dim)] = parts.get(str(state.dim), 1) * mesh.size(axis)
        sizes = {axis.name: axis.size for axis in self._program.axes(name)}
        for dim, count in parts.items():
            axes = ", ".join(axis for axis, state in layout.items() if state.dim == dim)
            if dim not in sizes:
                yield f"{self._name}: {name} is S({dim}) on {axes}, and has only {', '.join(sizes) or 'no axis'}."
            elif (sizes[dim] or 0) % count and dim not in PADDED:
                yield f"{self._name}: {name} is S({dim}) on {axes}; {dim}={sizes[dim]} is no multiple of {count} ranks."

    def _is_differentiated(self, name: str) -> bool:
        source = self._program.origin[name]
        program = self._program.program
        return source in program.param_by_name or source in program.differentiated

    # Movements

    def _reshard(self, made: Reshard) -> Iterator[str]:
        layouts = self._program.layouts
        where = f"{self._name}: reshard of {made.source} to {made.result}"
        current = dict(layouts[made.source])
        for step in made.ahead:
            for axis in step.axes:
                if current[axis] != step.before:
                    yield f"{where}: on {axis} it is {current[axis]}, and the step is {step.before} -> {step.after}."
            current = step.apply(current)
        for axis, state in layouts[made.result].items():
            if current[axis] != state and self._sharded.mesh.size(axis) > 1:
                yield f"{where}: on {axis} its steps lead to {current[axis]}, and the result is {state}."
        wanted = backward_steps(made.ahead) if self._is_differentiated(made.source) else ()
        if made.back != wanted:
            shown = ", ".join(f"{s.before} -> {s.after} on {'+'.join(s.axes)}" for s in wanted) or "no steps"
            yield f"{where}: backward must be the duals of its steps, {shown}."
        if made.source in self._program.program.param_by_name:
            for step in (*made.ahead, *made.back):
                if step.action.is_collective:
                    yield (
                        f"{where}: a parameter's {step.before} -> {step.after} on {'+'.join(step.axes)} is an "
                        f"{step.action.value} within the step; let it enter as R, so that its gradient is summed once."
                    )

    # Ops

    def _call(self, made: ShardedCall) -> Iterator[str]:
        view = OpView(self._program.program, made.call.op)
        for axis in self._sharded.mesh.names:
            given = self._given(made, axis)
            misfits = [(mode, list(self._misfits(made, view.states(mode), given))) for mode in view.modes()]
            mode, misfit = min(misfits, key=lambda pair: len(pair[1]))
            if misfit:
                yield self._sentence(made, axis, mode, misfit[0])
            else:
                yield from self._orders(made, axis, given)

    def _given(self, made: ShardedCall, axis: str) -> OpStates:
        layouts = self._program.layouts
        operands = tuple(None if name is None else layouts[name][axis] for name in made.operands)
        return OpStates(operands, tuple(layouts[name][axis] for name in made.call.op.outputs))

    def _misfits(self, made: ShardedCall, wanted: OpStates, given: OpStates) -> Iterator[tuple[str, State, State]]:
        """(value, its state, the state that the mode wants) of everything that is otherwise."""
        names = (*made.operands, *made.call.op.outputs)
        pairs = zip((*given.operands, *given.outputs), (*wanted.operands, *wanted.outputs), strict=True)
        for name, (has, wants) in zip(names, pairs, strict=True):
            if name is None or has is None or wants is None or (has.kind, has.dim) == (wants.kind, wants.dim):
                continue
            if self._is_differentiated(name) or not {has, wants} <= {INVARIANT, REPLICATED}:
                yield name, has, wants

    def _sentence(self, made: ShardedCall, axis: str, mode: Mode, misfit: tuple[str, State, State]) -> str:
        name, has, wants = misfit
        return (
            f"{self._name}: op {made.call.op.name} ({made.call.op.kind}) on axis {axis}: {name} is {has}; "
            f"{mode}, which is closest to its other operands, it must be {wants}."
        )

    def _orders(self, made: ShardedCall, axis: str, given: OpStates) -> Iterator[str]:
        """Values of one op that are split on the same dim hold the same positions."""
        split = [state for state in (*given.operands, *given.outputs) if state is not None and state.dim == "seq"]
        if len({state.order for state in split}) > 1:
            shown = ", ".join(sorted({str(state) for state in split}))
            yield (
                f"{self._name}: op {made.call.op.name} ({made.call.op.kind}) on axis {axis}: its values are {shown}; "
                "they must hold positions in the same order."
            )

    def _output(self, outside: str, name: str) -> Iterator[str]:
        """The stream leaves as it is declared, so that every block can take it; a term of the loss leaves invariant."""
        value = self._program.program.values[self._program.origin[name]]
        for axis, state in self._program.layouts[name].items():
            rule = self._sharded.rules[axis]
            if outside == "x":
                wanted = rule.state(rule.stream)
            elif not value.axes:
                wanted = INVARIANT
            else:
                continue
            if state != wanted:
                yield f"{self._name}: output {outside} ({name}) on axis {axis} is {state}; it must be {wanted}."
