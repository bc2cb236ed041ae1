"""Typing: which state every value of a program has on one mesh axis, and which state every op wants its operands in.

Axes are typed independently of each other. A declared rule says what the axis splits; everything else follows, op by
op, from signatures (docs/design.md, section 4):

1. all operands whole: so is the result;
2. otherwise the op works along one dim w: the declared dim of the residual stream, else a dim on which one of its
   parameters is split, else a dim on which an activation is split; never one that the op needs whole;
3. operands that have w are split on it, others are replicated; a result that has w is split on it, one that sums
   over w is partial; a bias of a partial result is partial, so that it counts once;
4. without w, a replicated activation makes everything replicated, and anything else is made whole first;
5. a sum passes through ops that are linear in it.

Not here: collectives and their bytes, which follow from these states by the table of transitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from duomesh.core.errors import PlanError
from duomesh.core.ir.ops import KINDS
from duomesh.core.ir.program import ModelProgram, Program
from duomesh.core.ir.values import Op, Param
from duomesh.core.sharding import transitions
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, Action, Kind, State, shard

__all__ = [
    "AxisRule",
    "Conversion",
    "OpStates",
    "ProgramStates",
    "at_home",
    "conversions",
    "param_state",
    "type_model",
    "type_program",
]

_PASSES_SUMS = ("scale",)  # linear in their one operand
_STREAM = "x"


@dataclass(frozen=True)
class AxisRule:
    """What one mesh axis splits.

    Attributes:
        axis: the mesh axis.
        params: logical axes of parameters; a parameter is split on the first of these that it has.
        data: logical axis of tokens, positions, labels and masks: "batch", "seq", or None for whole.
        stream: logical axis of the residual stream, or None for whole. Data parallel axes split both on "batch",
            sequence parallelism the stream alone on "seq".
    """

    axis: str
    params: tuple[str, ...] = ()
    data: str | None = None
    stream: str | None = None


@dataclass(frozen=True)
class OpStates:
    """States that operands are brought to, inputs then parameters (None for an absent one), and of the results."""

    operands: tuple[State | None, ...]
    outputs: tuple[State, ...]


@dataclass(frozen=True)
class ProgramStates:
    """One program on one axis.

    values: the state in which each value is made. outputs: the state in which one leaves. differentiated: values that
    carry a gradient.
    """

    ops: tuple[OpStates, ...]
    values: Mapping[str, State]
    outputs: Mapping[str, State]
    differentiated: frozenset[str]


def _split(axis: str | None) -> State:
    return INVARIANT if axis is None else shard(axis)


def _sharded_axis(param: Param, rule: AxisRule) -> str | None:
    names = {axis.name for group in param.groups for axis in group}
    return next((name for name in rule.params if name in names), None)


class _Typer:
    """Types the ops of one program in order."""

    def __init__(self, program: Program, rule: AxisRule, inputs: Mapping[str, State]) -> None:
        self._program, self._rule = program, rule
        self.values: dict[str, State] = {v.name: inputs[v.name] for v in program.inputs}
        self.values |= {constant.name: INVARIANT for constant in program.constants}
        self.differentiated = {v.name for v in program.inputs if v.name in (_STREAM, "logits")}

    def type_op(self, op: Op) -> OpStates:
        inputs = [None if name is None else self.values[name] for name in op.inputs]
        params = [None if name is None else self._program.param_by_name[name] for name in op.params]
        on_stream = op.kind == "add"
        w = self._work_axis(op, inputs, params, on_stream)
        if op.kind in _PASSES_SUMS and inputs[0] == PARTIAL:
            states = OpStates((PARTIAL,), (PARTIAL,))
        elif w is None:
            states = self._whole(op, inputs)
        else:
            states = self._split_on(op, w, params)
        self.values.update(zip(op.outputs, states.outputs, strict=True))
        sources = [name for name in op.inputs if name is not None]
        if op.params or any(name in self.differentiated for name in sources):
            self.differentiated.update(op.outputs)
        return states

    def _work_axis(self, op: Op, inputs: list[State | None], params: list[Param | None], on_stream: bool) -> str | None:
        """Rule 2. Names are those of the op's signature: attention's keys have `kv_seq`, which it needs whole."""
        if on_stream:
            return self._rule.stream
        for param in params:
            axis = None if param is None else _sharded_axis(param, self._rule)
            if axis is not None:
                return axis
        for name, state, seen in zip(op.inputs, inputs, self._seen(op), strict=True):
            if name is None or state is None or state.kind is not Kind.SHARD:
                continue
            position = [axis.name for axis in self._program.values[name].axes].index(str(state.dim))
            if seen[position] not in op.signature.local:
                return seen[position]
        return None

    @staticmethod
    def _seen(op: Op) -> list[tuple[str, ...]]:
        """The signature's axes of each input; an absent one has none."""
        given = iter(op.signature.inputs)
        return [() if name is None else next(given, ()) for name in op.inputs]

    def _whole(self, op: Op, inputs: list[State | None]) -> OpStates:
        """Rules 1 and 4."""
        is_replicated = any(
            state == REPLICATED and name in self.differentiated for name, state in zip(op.inputs, inputs, strict=True)
        )
        state = REPLICATED if is_replicated else INVARIANT
        operands = tuple(None if name is None else state for name in (*op.inputs, *op.params))
        return OpStates(operands, tuple(state for _ in op.outputs))

    def _split_on(self, op: Op, w: str, params: list[Param | None]) -> OpStates:
        """Rule 3."""
        signature = op.signature
        operands: list[State | None] = [
            None if name is None else (shard(w) if w in seen else REPLICATED)
            for name, seen in zip(op.inputs, self._seen(op), strict=True)
        ]
        if op.kind == "linear":
            made = self._linear(op, w, params)
            return OpStates((*operands, *made.operands), made.outputs)
        operands += [None if p is None else (shard(w) if _has(p, w) else REPLICATED) for p in params]
        if w in KINDS[op.kind].inner:
            return OpStates(tuple(operands), tuple(INVARIANT for _ in op.outputs))
        contracted = w in signature.contracted
        outputs = tuple(
            shard(w) if w in axes else (PARTIAL if contracted else REPLICATED) for axes in signature.outputs
        )
        return OpStates(tuple(operands), outputs)

    def _linear(self, op: Op, w: str, params: list[Param | None]) -> OpStates:
        """Each weight of a pack by itself: one that lacks w, beside one that has it, works on a replicated input."""
        half = len(params) // 2
        weights: list[State | None] = []
        biases: list[State | None] = []
        outputs: list[State] = []
        for weight, bias, axes in zip(params[:half], params[half:], op.signature.outputs, strict=True):
            assert weight is not None
            state = shard(w) if w in axes else (PARTIAL if _has(weight, w) else REPLICATED)
            weights.append(shard(w) if _has(weight, w) else REPLICATED)
            added = PARTIAL if state == PARTIAL else REPLICATED  # to a partial sum a bias is one more summand
            biases.append(None if bias is None else (shard(w) if _has(bias, w) else added))
            outputs.append(state)
        return OpStates((*weights, *biases), tuple(outputs))


def _has(param: Param, axis: str) -> bool:
    return any(a.name == axis for group in param.groups for a in group)


def type_program(program: Program, rule: AxisRule, inputs: Mapping[str, State]) -> ProgramStates:
    """Types one program, given the states of its inputs."""
    typer = _Typer(program, rule, inputs)
    ops = tuple(typer.type_op(op) for op in program.ops)
    outputs = {}
    for name, value in program.outputs:
        state = typer.values[value]
        if name == _STREAM:
            state = _split(rule.stream)
        elif name == "loss_sum":
            state = INVARIANT  # a loss that is replicated would scale its gradients by the axis size
        outputs[name] = state
    return ProgramStates(ops, typer.values, outputs, frozenset(typer.differentiated))


def type_model(model: ModelProgram, rule: AxisRule, size: int) -> dict[str, ProgramStates]:
    """Every distinct program by name, typed on one axis of the given size.

    Raises PlanError if a dim that the rule splits is no multiple of the size.
    """
    _check_sizes(model, rule, size)
    data = _split(rule.data)
    stream: dict[str, State] = dict.fromkeys(("tokens", "positions", "segment_ids", "labels", "loss_mask"), data)
    out: dict[str, ProgramStates] = {}
    for program in model.distinct:
        out[program.name] = type_program(program, rule, stream)
        stream |= out[program.name].outputs
    return out


def _check_sizes(model: ModelProgram, rule: AxisRule, size: int) -> None:
    for name, param in model.params.items():
        split = _sharded_axis(param, rule)
        for axis in (axis for group in param.groups for axis in group):
            if axis.name == split and axis.size is not None and axis.size % size:
                raise PlanError(
                    f"{name}: {axis.name}={axis.size} cannot be split over {rule.axis}={size}. "
                    f"Use {rule.axis} in {', '.join(str(n) for n in range(1, axis.size + 1) if axis.size % n == 0)}."
                )


def at_home(state: State | None) -> State:
    """An operand's state under the value's own axis names: attention calls its keys' sequence `kv_seq`."""
    assert state is not None
    return shard("seq") if state == shard("kv_seq") else state


@dataclass(frozen=True)
class Conversion:
    """A value that is made in one state and wanted in another."""

    value: str
    before: State
    after: State
    is_differentiated: bool

    @property
    def forward(self) -> Action:
        return transitions.forward(self.before, self.after)

    @property
    def backward(self) -> Action:
        return transitions.backward(self.before, self.after) if self.is_differentiated else Action.NOTHING


def conversions(program: Program, states: ProgramStates) -> list[Conversion]:
    """What the program's activations go through on the axis, each (value, state) once, in order of first use.

    For values that are not differentiated (ids, tables, masks) invariant and replicated are one.
    """
    wanted: dict[Conversion, None] = {}

    def want(value: str, state: State) -> None:
        is_differentiated = value in states.differentiated
        made = Conversion(value, states.values[value], state, is_differentiated)
        is_free = not is_differentiated and {made.before, made.after} <= {INVARIANT, REPLICATED}
        if made.before != made.after and not is_free:
            wanted[made] = None

    for op, typed in zip(program.ops, states.ops, strict=True):
        for name, state in zip(op.inputs, typed.operands, strict=False):
            if name is not None and state is not None:
                want(name, at_home(state))
    for name, value in program.outputs:
        want(value, states.outputs[name])
    return list(wanted)


def param_state(model: ModelProgram, states: Mapping[str, ProgramStates], rule: AxisRule, name: str) -> State:
    """The state in which a parameter enters all of its uses on the axis.

    Split if the rule splits it. Else invariant if every use asks for it whole or partial, and replicated otherwise;
    its gradient is summed over exactly the axes on which it is replicated.
    """
    split = _sharded_axis(model.params[name], rule)
    if split is not None:
        return shard(split)
    asked = set()
    for prefix, program in model.steps:
        for op, typed in zip(program.ops, states[program.name].ops, strict=True):
            for local, state in zip(op.params, typed.operands[len(op.inputs) :], strict=True):
                if local is not None and model.aliases.get(prefix + local, prefix + local) == name:
                    asked.add(state)
    return INVARIANT if asked <= {INVARIANT, PARTIAL} else REPLICATED
