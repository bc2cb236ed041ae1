"""Typing: which mode every op of a program takes on one mesh axis, and with that the state of every value.

Axes are typed independently of each other. A declared rule says what the axis splits; everything else follows, op by
op, from signatures (docs/design.md, section 4). In order of precedence, an op is

1. on the residual stream, or a dropout before it: split as the stream is declared, or whole;
2. a dispatch to experts or a combine of what they made: by what the axis splits of the experts;
3. split on a dim on which one of its parameters is split;
4. a sum, if it is linear in its partial operands and nothing else is split;
5. split on a dim on which an activation is split; never on one that the op needs whole;
6. split as the stream is, if one operand is partial and has to be reduced anyway;
7. replicated, if a differentiated activation is; else whole.

Not here: collectives and their bytes, which follow from these states by the table of transitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from duomesh.core.errors import PlanError
from duomesh.core.ir.kind import axis_names
from duomesh.core.ir.program import ModelProgram, Program
from duomesh.core.ir.values import Op, Param
from duomesh.core.sharding.modes import REPLICATED_MODE, WHOLE, Mode, OpStates, OpView, split, sum_of
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, Kind, Order, State, shard

__all__ = ["PADDED", "AxisRule", "ProgramStates", "param_state", "type_model", "type_program"]

PADDED = ("vocab",)  # logical axes that need not divide: padding rows are zero and no op looks at them
_STREAM = "x"
_EXPERTS, _EXPERT_FFN = "experts", "expert_ffn"


@dataclass(frozen=True)
class AxisRule:
    """What one mesh axis splits: the one table of choices from which all layouts follow.

    Attributes:
        axis: the mesh axis.
        params: logical axes of parameters; a parameter is split on the first of these that it has.
        data: logical axis of tokens, positions, labels and masks: "batch", "seq", or None for whole.
        stream: logical axis of the residual stream, or None for whole. Data parallel axes split both on "batch",
            sequence parallelism the stream alone on "seq".
        order: of positions, where the axis splits "seq".
        regathers: whether backward gathers again what forward gathered for a linear, instead of keeping it.
        shares: whether ZeRO shares state among the ranks of the axis.
    """

    axis: str
    params: tuple[str, ...] = ()
    data: str | None = None
    stream: str | None = None
    order: Order = "contiguous"
    regathers: bool = False
    shares: bool = False

    def state(self, axis: str | None) -> State:
        """Split on a logical axis, or whole."""
        return INVARIANT if axis is None else shard(axis, self.order if axis == "seq" else "contiguous")

    def of_param(self, param: Param) -> str | None:
        """The logical axis on which a parameter is split."""
        names = {axis.name for group in param.groups for axis in group}
        return next((name for name in self.params if name in names), None)


@dataclass(frozen=True)
class ProgramStates:
    """One program on one axis.

    modes, ops: by op. values: the state in which each value is made. outputs: the state in which one leaves, by its
    outside name.
    """

    modes: tuple[Mode, ...]
    ops: tuple[OpStates, ...]
    values: Mapping[str, State]
    outputs: Mapping[str, State]


class _Typer:
    """Types the ops of one program in order."""

    def __init__(self, program: Program, rule: AxisRule, inputs: Mapping[str, State]) -> None:
        self._program, self._rule = program, rule
        self.values: dict[str, State] = {v.name: inputs[v.name] for v in program.inputs}
        self.values |= {constant.name: INVARIANT for constant in program.constants}
        self._stream = {v.name for v in program.inputs if v.name == _STREAM}

    def type_op(self, op: Op) -> tuple[Mode, OpStates]:
        view = OpView(self._program, op)
        mode = self._choose(view)
        states = self._ordered(view.states(mode))
        self.values.update(zip(op.outputs, states.outputs, strict=True))
        return mode, states

    def _ordered(self, states: OpStates) -> OpStates:
        """Positions keep the order that the axis gives them."""

        def ordered(state: State) -> State:
            return self._rule.state("seq") if state.dim == "seq" else state

        operands = tuple(None if state is None else ordered(state) for state in states.operands)
        return OpStates(operands, tuple(ordered(state) for state in states.outputs))

    def _choose(self, view: OpView) -> Mode:
        op = view.op
        is_residual = op.kind == "add" and any(name in self._stream for name in op.inputs)
        if is_residual:
            self._stream.update(op.outputs)
        # what a dropout leaves goes to the stream: split alike, a rank draws masks for its own part only
        if is_residual or op.kind == "dropout":
            return WHOLE if self._rule.stream is None else split(self._rule.stream)
        mode = self._of_experts(op) if op.kind in ("dispatch", "combine") else None
        return mode or self._by_param(op) or self._by_activation(view)

    def _of_experts(self, op: Op) -> Mode | None:
        """Where experts are split, tokens stay split until they travel; where each expert's ffn is, all are needed."""
        claim = next((name for name in self._rule.params if name in (_EXPERTS, _EXPERT_FFN)), None)
        if claim is None:
            return None
        if claim == _EXPERT_FFN:
            return REPLICATED_MODE if op.kind == "dispatch" else sum_of(0)
        routed = self.values[str(op.inputs[1])]  # ids, gates: they were never anywhere but with their tokens
        return split(str(routed.dim) if routed.kind is Kind.SHARD else "seq")

    def _by_param(self, op: Op) -> Mode | None:
        """Raises PlanError if the op cannot work on what its parameters are split on."""
        claims = {n: self._rule.of_param(self._program.param_by_name[n]) for n in op.params if n is not None}
        found = list(dict.fromkeys(claim for claim in claims.values() if claim is not None))
        if not found:
            return None
        name = next(n for n, claim in claims.items() if claim == found[0])
        where = f"{self._program.name}: op {op.name} ({op.kind}) on axis {self._rule.axis}: {name} is S({found[0]})"
        if found[0] in op.signature.local:
            raise PlanError(f"{where}, and the op needs {found[0]} whole; do not split it on this axis.")
        if len(found) > 1:
            other = next(n for n, claim in claims.items() if claim == found[1])
            raise PlanError(f"{where} and {other} is S({found[1]}); split all of its parameters on one.")
        return split(found[0])

    def _by_activation(self, view: OpView) -> Mode:
        differentiated = self._program.differentiated
        states = {i: self.values[name] for i, name in enumerate(view.op.inputs) if name is not None}
        partial = {i for i, s in states.items() if s == PARTIAL and view.op.inputs[i] in differentiated}
        wanted = list(self._along_activations(view, states))
        if partial and not wanted:
            passing = self._passing(view, partial, states)
            if passing is not None:
                return passing
            stream = self._rule.stream
            if stream is not None and view.can_split(stream) and all(stream in axes for axes in view.outputs):
                return split(stream)
        if wanted:
            return wanted[0]
        is_replicated = any(s == REPLICATED and view.op.inputs[i] in differentiated for i, s in states.items())
        return REPLICATED_MODE if is_replicated else WHOLE

    @staticmethod
    def _along_activations(view: OpView, states: Mapping[int, State]) -> Iterable[Mode]:
        for i, state in states.items():
            seen, own = view.seen[i], view.own[i]
            if state.kind is Kind.SHARD and seen is not None and own is not None:
                name = seen[own.index(str(state.dim))]
                if view.can_split(name):
                    yield split(name)

    @staticmethod
    def _passing(view: OpView, partial: set[int], states: Mapping[int, State]) -> Mode | None:
        """A sum passes an op that is linear in just the operands that are partial."""
        for group in range(len(view.kind.linear)):
            if {i for i in view.members(group) if i in states} == partial:
                return sum_of(group)
        return None


def type_program(program: Program, rule: AxisRule, inputs: Mapping[str, State]) -> ProgramStates:
    """Types one program, given the states of its inputs."""
    typer = _Typer(program, rule, inputs)
    typed = [typer.type_op(op) for op in program.ops]
    outputs = {}
    for name, value in program.outputs:
        state = typer.values[value]
        if name == _STREAM:
            state = rule.state(rule.stream)
        elif not program.values[value].axes:
            state = INVARIANT  # a term of the loss that is replicated would scale its gradients by the axis size
        outputs[name] = state
    return ProgramStates(tuple(mode for mode, _ in typed), tuple(states for _, states in typed), typer.values, outputs)


def type_model(model: ModelProgram, rule: AxisRule, size: int) -> dict[str, ProgramStates]:
    """Every distinct program by name, typed on one axis of the given size.

    Raises PlanError if a dim that the rule splits is no multiple of the size and cannot be padded.
    """
    _check_sizes(model, rule, size)
    # what no program makes comes with the batch
    stream = {
        value.name: rule.state(rule.data if rule.data in axis_names(value.axes) else None)
        for program in model.distinct
        for value in program.inputs
    }
    out: dict[str, ProgramStates] = {}
    for program in model.distinct:
        out[program.name] = type_program(program, rule, stream)
        stream |= out[program.name].outputs
    return out


def _check_sizes(model: ModelProgram, rule: AxisRule, size: int) -> None:
    for name, param in model.params.items():
        claim = rule.of_param(param)
        for axis in (axis for group in param.groups for axis in group):
            if axis.name == claim and axis.name not in PADDED and axis.size is not None and axis.size % size:
                raise PlanError(
                    f"{name}: {axis.name}={axis.size} cannot be split over {rule.axis}={size}. "
                    f"Use {rule.axis} in {', '.join(str(n) for n in range(1, axis.size + 1) if axis.size % n == 0)}."
                )


def param_state(split_on: str | None, asked: Iterable[State]) -> State:
    """The state in which a parameter enters all of its uses on an axis, from the states that they ask for.

    Split if the axis splits it. Else invariant if every use asks for it whole or partial, and replicated otherwise;
    its gradient is summed over exactly the axes on which it is replicated.
    """
    if split_on is not None:
        return shard(split_on)
    return INVARIANT if set(asked) <= {INVARIANT, PARTIAL} else REPLICATED
