"""The sharding IR carried out: every rank of a mesh in one process, in numpy, forward and backward.

Each rank runs the reference ops and their adjoints on its local arrays. Between ops, values move by the transitions
that the types ask for, each (value, layout) once, and cotangents move back by their duals. Nothing else crosses ranks,
but for the collectives that an op declares as its own. It is the oracle of layouts, as `ReferenceModel` is that of
programs.

Arrays of parameters have one dim for each logical axis here; an op sees them merged, as they are stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.batch import IGNORE, Batch, denominator
from duomesh.core.ir.program import Call, ModelProgram, Program
from duomesh.core.ir.values import Axes, Param
from duomesh.core.sharding import simulate
from duomesh.core.sharding.collectives import move_order
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.transitions import INVARIANT, REPLICATED, Action, Kind, State, dual, forward, shard
from duomesh.core.sharding.typing import AxisRule, at_home, param_state, type_model
from duomesh.kernels.reference.adjoints import ADJOINTS
from duomesh.kernels.reference.ops import OPS

__all__ = ["ShardedModel"]

Layout = dict[str, State]  # mesh axis -> state, S by position of the dim
Local = list[Array]  # one array a rank
_Reduction = Callable[[Sequence[str], Local, Callable[[Local], Array]], Local]


@dataclass(eq=False)
class _Held:
    """A value on all ranks, in one layout."""

    local: Local
    layout: Layout


@dataclass
class _Conversion:
    source: _Held
    result: _Held


@dataclass
class _Applied:
    """One call that ran: operands in role order (inputs, then parameters), and its results."""

    call: Call
    operands: list[_Held | None]
    results: list[_Held]


class _Tape:
    """Everything that happened, in order."""

    def __init__(self) -> None:
        self.events: list[_Conversion | _Applied] = []
        self._converted: dict[tuple[int, tuple[tuple[str, State], ...]], _Held] = {}

    def convert(self, held: _Held, layout: Layout, move: Callable[[_Held, Layout], _Held]) -> _Held:
        """A value in another layout; each (value, layout) is converted once and shared by all that want it."""
        if layout == held.layout:
            return held
        key = (id(held), tuple(layout.items()))
        if key not in self._converted:
            self._converted[key] = move(held, layout)
            self.events.append(_Conversion(held, self._converted[key]))
        return self._converted[key]


class ShardedModel:
    """Runs a model on a simulated mesh.

    Args:
        program: the model.
        mesh: its axes, slowest first.
        rules: what each axis splits, one for each axis of the mesh.
        params: whole parameters, float64, by canonical name.

    Attributes:
        issued: collectives so far, by (phase, kind, axis, elements of the buffer that holds the axis whole).
    """

    def __init__(
        self, program: ModelProgram, mesh: Mesh, rules: Sequence[AxisRule], params: Mapping[str, Array]
    ) -> None:
        self.program, self.mesh = program, mesh
        self._rules = {rule.axis: rule for rule in rules}
        assert set(self._rules) == set(mesh.names), "every mesh axis needs one rule"
        self._coordinates = list(mesh.coordinates())
        self.issued: Counter[tuple[str, str, str, int]] = Counter()
        self.states = {name: type_model(program, self._rules[name], mesh.size(name)) for name in mesh.names}
        self._params = {
            name: self._spread(params[name].reshape([a.size or 0 for a in _axes(param)]), self.param_layout(name))
            for name, param in program.params.items()
        }

    # Layouts

    def param_layout(self, name: str) -> Layout:
        """The layout in which a parameter enters its uses, S by position among its logical axes."""
        states = {a: param_state(self.program, self.states[a], self._rules[a], name) for a in self.mesh.names}
        return _positions(_axes(self.program.params[name]), states)

    def reduction_axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes over which a parameter's gradient is summed."""
        return tuple(a for a, state in self.param_layout(name).items() if state == REPLICATED)

    def _offset(self, rank: int, layout: Layout, dim: int, length: int) -> int:
        """Where a rank's slice of a dim starts, `length` being the slice's."""
        position = 0
        for name, place in zip(self.mesh.names, self._coordinates[rank], strict=True):
            if layout[name] == shard(dim):
                position = position * self.mesh.size(name) + place
        return position * length

    # Movement

    def _along(self, axis: str, local: Local, move: Callable[[Local], Local]) -> Local:
        """Applies a move of the ranks of one axis, for every place in the other axes."""
        out = list(local)
        for group in self.mesh.groups(axis):
            for rank, array in zip(group, move([local[rank] for rank in group]), strict=True):
                out[rank] = array
        return out

    def _over(self, axes: Sequence[str], local: Local, reduce: Callable[[Local], Array]) -> Local:
        """A reduction over several axes that leaves its result on every rank."""
        for axis in axes:
            local = self._along(axis, local, lambda group: [reduce(group)] * len(group))
        return local

    def _own(self, axes: Sequence[str], local: Local, reduce: Callable[[Local], Array]) -> Local:
        """A collective that an op declares as its own."""
        for axis in axes:
            if self.mesh.size(axis) > 1:
                self.issued["forward", Action.ALL_REDUCE.value, axis, local[0].size] += 1
        return self._over(axes, local, reduce)

    def _move(self, held: _Held, layout: Layout, phase: str = "forward") -> _Held:
        """Transitions axis by axis."""
        local = held.local
        for axis in move_order(self.mesh.names, layout):
            before, after = held.layout[axis], layout[axis]
            sizes = [local[0].size]
            local = self._along(axis, local, partial(simulate.reshard, before=before, after=after))
            action = forward(before, after)
            if action.is_collective and self.mesh.size(axis) > 1:
                # the buffer that holds the axis whole is the larger side
                self.issued[phase, action.value, axis, max(*sizes, local[0].size)] += 1
        return _Held(local, layout)

    def _spread(self, whole: Array, layout: Layout) -> _Held:
        """A whole array -> every rank's part of it."""
        everywhere = _Held([whole] * self.mesh.world_size, dict.fromkeys(self.mesh.names, INVARIANT))
        return self._move(everywhere, layout)

    def whole(self, held: _Held) -> Array:
        """The value that all ranks' arrays stand for."""
        local = held.local
        for axis in reversed(self.mesh.names):
            state = held.layout[axis]
            local = self._over([axis], local, partial(simulate.meaning, state=state))
        return local[0]

    # Forward

    def _run(self, batch: Batch) -> tuple[_Tape, dict[str, _Held]]:
        """Every program in order. Returns what happened and the values that were handed over last."""
        tape = _Tape()
        layout = {a: _named(rule.data, ("batch", "seq")) for a, rule in self._rules.items()}
        data = {
            "tokens": batch.tokens,
            "positions": batch.resolved_positions,
            "segment_ids": batch.segment_ids,
            "labels": batch.labels,
            "loss_mask": batch.weights.astype(np.float64),
        }
        stream = {name: self._spread(array, layout) for name, array in data.items() if array is not None}
        for prefix, program in self.program.steps:
            env = {value.name: stream[value.name] for value in program.inputs if value.name in stream}
            for constant in program.constants:
                whole = np.asarray(constant.data, np.float32).astype(np.float64)
                env[constant.name] = self._spread(whole, dict.fromkeys(self.mesh.names, INVARIANT))
            for index, call in enumerate(program.calls):
                self._apply(tape, prefix, program, index, call, env)
            for name, value in program.outputs:
                states = {a: self.states[a][program.name].outputs[name] for a in self.mesh.names}
                stream[name] = tape.convert(env[value], _positions(program.values[value].axes, states), self._move)
        return tape, stream

    def _apply(self, tape: _Tape, prefix: str, program: Program, index: int, call: Call, env: dict[str, _Held]) -> None:
        """One call on every rank, its operands brought to the layouts that its types ask for."""
        op = call.op
        typed = {a: self.states[a][program.name].ops[index] for a in self.mesh.names}
        operands: list[_Held | None] = []
        for i, name in enumerate((*op.inputs, *op.params)):
            if name is None or (i < len(op.inputs) and name not in env):
                operands.append(None)
                continue
            is_param = i >= len(op.inputs)
            axes = _axes(program.param_by_name[name]) if is_param else program.values[name].axes
            states = {a: at_home(t.operands[i]) for a, t in typed.items()}
            held = self._params[self.program.aliases.get(prefix + name, prefix + name)] if is_param else env[name]
            operands.append(tape.convert(held, _positions(axes, states), self._move))
        applied = _Applied(call, operands, [])
        local = self._compute(applied)
        for i, name in enumerate(op.outputs):
            states = {a: t.outputs[i] for a, t in typed.items()}
            layout = _positions(program.values[name].axes, states)
            applied.results.append(_Held([made[i] for made in local], layout))
        env.update(zip(op.outputs, applied.results, strict=True))
        tape.events.append(applied)

    def _compute(self, applied: _Applied) -> list[tuple[Array, ...]]:
        """The results of a call by rank."""
        kind = applied.call.op.kind
        if kind == "cross_entropy":
            return [(loss,) for loss in self._cross_entropy(applied)]
        out = []
        for rank in range(self.mesh.world_size):
            inputs, storage, kwargs = self._arguments(applied, rank)
            result = OPS[kind](*inputs, *storage, **kwargs)
            made = result if isinstance(result, tuple) else (result,)
            out.append((made[0][:, self._rows(applied, rank)],) if kind == "attention" else made)
        return out

    def _arguments(self, applied: _Applied, rank: int) -> tuple[list[Array | None], list[Array | None], dict[str, Any]]:
        """What a rank calls the reference op with: inputs, packed storage, keyword arguments for its local shapes."""
        call, count = applied.call, len(applied.call.op.inputs)
        inputs = [None if held is None else held.local[rank] for held in applied.operands[:count]]
        params = [None if held is None else held.local[rank] for held in applied.operands[count:]]
        if call.op.kind == "linear":
            return inputs, *_packed(call, params)
        if call.op.kind == "embedding":
            return *self._looked_up(applied, rank), dict(call.kwargs)
        if call.op.kind == "attention":
            q, k = inputs[:2]
            assert q is not None and k is not None
            # queries that are split by position stand where they belong in a whole sequence of zeros
            whole = np.zeros((q.shape[0], k.shape[1], *q.shape[2:]), q.dtype)
            whole[:, self._rows(applied, rank)] = q
            inputs[0] = whole
        return inputs, params, dict(call.kwargs)

    def _rows(self, applied: _Applied, rank: int) -> slice:
        """The positions of a rank's queries."""
        q = applied.operands[0]
        assert q is not None
        length = q.local[rank].shape[1]
        start = self._offset(rank, q.layout, 1, length)
        return slice(start, start + length)

    def _looked_up(self, applied: _Applied, rank: int) -> tuple[list[Array | None], list[Array | None]]:
        """A table split by rows: ids of other ranks' rows find a row of zeros."""
        ids, table = applied.operands
        assert ids is not None and table is not None
        weight = table.local[rank]
        local = ids.local[rank].astype(np.int64) - self._offset(rank, table.layout, 0, len(weight))
        rows = np.where((local >= 0) & (local < len(weight)), local, len(weight))
        return [rows], [np.concatenate([weight, np.zeros_like(weight[:1])])]

    # Cross entropy over a split vocabulary: a maximum and two sums cross the ranks

    def _softmax(self, applied: _Applied, reduce: _Reduction) -> tuple[Local, Local, Local]:
        """By rank: probabilities of its columns, the log of the sum of exponentials, one-hot labels in its columns.

        reduce: `_own` where the ranks talk; `_over` where a backward pass reads what the forward pass has saved.
        """
        logits, labels = applied.operands
        assert logits is not None and labels is not None
        split = [a for a in self.mesh.names if logits.layout[a] == shard(2)]
        top = reduce(split, [z.max(-1, keepdims=True) for z in logits.local], np.maximum.reduce)
        exps = [np.exp(z - m) for z, m in zip(logits.local, top, strict=True)]
        total = reduce(split, [e.sum(-1, keepdims=True) for e in exps], np.add.reduce)
        hots = []
        for rank, (z, y) in enumerate(zip(logits.local, labels.local, strict=True)):
            columns = np.arange(z.shape[2]) + self._offset(rank, logits.layout, 2, z.shape[2])
            hots.append((columns == y[..., None]).astype(z.dtype))
        log_sums = [(np.log(t) + m)[..., 0] for t, m in zip(total, top, strict=True)]
        return [e / t for e, t in zip(exps, total, strict=True)], log_sums, hots

    def _cross_entropy(self, applied: _Applied) -> Local:
        logits, labels = applied.operands
        assert logits is not None and labels is not None
        _, log_sums, hots = self._softmax(applied, self._own)
        split = [a for a in self.mesh.names if logits.layout[a] == shard(2)]
        picked = [(hot * z).sum(-1) for hot, z in zip(hots, logits.local, strict=True)]
        picked = self._own(split, picked, np.add.reduce)
        pairs = zip(labels.local, log_sums, picked, strict=True)
        return [np.where(y == IGNORE, 0.0, log_sum - p) for y, log_sum, p in pairs]

    # Backward

    def loss_and_grads(self, batches: Sequence[Batch]) -> tuple[float, dict[str, Array]]:
        """The step's loss and whole gradients by canonical name. Sums over ranks run once, after the last batch."""
        divisor = denominator(batches)
        totals = {name: [np.zeros_like(x) for x in held.local] for name, held in self._params.items()}
        loss = 0.0
        for batch in batches:
            tape, stream = self._run(batch)
            loss += float(self.whole(stream["loss_sum"])) / divisor
            cotangents = self._backward(tape, stream["loss_sum"], 1.0 / divisor)
            for name, held in self._params.items():
                made = cotangents.get(id(held))
                if made is not None:
                    totals[name] = [a + b for a, b in zip(totals[name], made, strict=True)]
        return loss, {name: self._summed(name, local) for name, local in totals.items()}

    def _summed(self, name: str, local: Local) -> Array:
        """A gradient is in the dual of its parameter's layout; its meaning is the sum over the replicated axes."""
        for axis in self.reduction_axes(name):
            if self.mesh.size(axis) > 1:
                self.issued["sync", Action.ALL_REDUCE.value, axis, local[0].size] += 1
        layout = {a: dual(state) for a, state in self.param_layout(name).items()}
        return self.whole(_Held(local, layout)).reshape(self.program.params[name].shape)

    def _backward(self, tape: _Tape, loss: _Held, seed: float) -> dict[int, Local]:
        """Cotangents by id of the value; the seed is the same on every rank, since the loss is invariant."""
        cotangents: dict[int, Local] = {id(loss): [np.asarray(seed)] * self.mesh.world_size}

        def add(held: _Held, made: Local) -> None:
            old = cotangents.get(id(held))
            cotangents[id(held)] = made if old is None else [a + b for a, b in zip(old, made, strict=True)]

        for event in reversed(tape.events):
            if isinstance(event, _Conversion):
                made = cotangents.get(id(event.result))
                if made is not None:
                    duals = [{a: dual(s) for a, s in h.layout.items()} for h in (event.result, event.source)]
                    add(event.source, self._move(_Held(made, duals[0]), duals[1], "backward").local)
            elif any(id(result) in cotangents for result in event.results):
                for held, pulled in zip(event.operands, self._pull(event, cotangents), strict=True):
                    if held is not None and pulled is not None:
                        add(held, pulled)
        return cotangents

    def _pull(self, applied: _Applied, cotangents: Mapping[int, Local]) -> list[Local | None]:
        """Cotangents of a call's operands, by operand and rank."""
        by_rank: list[list[Array | None]] = []
        zeros = [[np.zeros_like(x) for x in result.local] for result in applied.results]
        given = [cotangents.get(id(result), zero) for result, zero in zip(applied.results, zeros, strict=True)]
        if applied.call.op.kind == "cross_entropy":
            return [self._pull_cross_entropy(applied, given[0]), None]
        for rank in range(self.mesh.world_size):
            by_rank.append(self._pull_rank(applied, rank, [c[rank] for c in given]))
        return [
            None if any(row[i] is None for row in by_rank) else [row[i] for row in by_rank]  # type: ignore[misc]
            for i in range(len(applied.operands))
        ]

    def _pull_rank(self, applied: _Applied, rank: int, given: Local) -> list[Array | None]:
        kind = applied.call.op.kind
        inputs, storage, kwargs = self._arguments(applied, rank)
        if kind == "attention":
            assert inputs[0] is not None
            whole = np.zeros_like(inputs[0])
            whole[:, self._rows(applied, rank)] = given[0]
            given = [whole]
        pulled = list(ADJOINTS[kind](tuple(given), tuple(inputs), tuple(storage), **kwargs))
        if kind == "attention" and pulled[0] is not None:
            pulled[0] = pulled[0][:, self._rows(applied, rank)]
        elif kind == "embedding" and pulled[1] is not None:
            pulled[1] = pulled[1][:-1]
        elif kind == "linear":
            shapes = [None if held is None else held.local[rank].shape for held in applied.operands[1:]]
            pulled = [pulled[0], *_unpacked(pulled[1], shapes[: len(shapes) // 2])]
            pulled += _unpacked(_of_biases(applied, rank, given), shapes[len(shapes) // 2 :])
        return pulled

    def _pull_cross_entropy(self, applied: _Applied, given: Local) -> Local:
        """(softmax - one-hot) c in the rank's columns, 0 where the label is IGNORE."""
        labels = applied.operands[1]
        assert labels is not None
        probs, _, hots = self._softmax(applied, self._over)
        parts = zip(probs, hots, given, labels.local, strict=True)
        return [(p - hot) * np.where(y == IGNORE, 0.0, c)[..., None] for p, hot, c, y in parts]


def _axes(param: Param) -> Axes:
    return tuple(axis for group in param.groups for axis in group)


def _named(axis: str | None, names: Sequence[str]) -> State:
    return INVARIANT if axis is None else shard(names.index(axis))


def _positions(axes: Axes, states: Mapping[str, State]) -> Layout:
    """States by logical axis -> states by position of the dim."""
    names = [axis.name for axis in axes]
    return {a: s if s.kind is not Kind.SHARD else shard(names.index(str(s.dim))) for a, s in states.items()}


def _packed(call: Call, params: list[Array | None]) -> tuple[list[Array | None], dict[str, Any]]:
    """A linear's local weights and biases, each joined along rows, and its keyword arguments for local shapes."""
    half, in_dims = len(params) // 2, call.kwargs["in_dims"]
    assert isinstance(in_dims, int)
    outs, weights, biases = [], [], []
    for weight, bias in zip(params[:half], params[half:], strict=True):
        assert weight is not None
        out = weight.shape[: weight.ndim - in_dims]
        outs.append(out)
        weights.append(weight.reshape(int(np.prod(out)), -1))
        if bias is not None:
            biases.append(bias.reshape(-1))
    storage: list[Array | None] = [np.concatenate(weights), np.concatenate(biases) if biases else None]
    return storage, {**call.kwargs, "outs": tuple(outs)}


def _unpacked(packed: Array | None, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
    """Members of a pack by their own shapes; None for one that is absent."""
    out: list[Array | None] = []
    start = 0
    for shape in shapes:
        if shape is None or packed is None:
            out.append(None)
            continue
        size = int(np.prod(shape))
        flat = packed.reshape(-1)
        out.append(flat[start : start + size].reshape(shape))
        start += size
    return out


def _of_biases(applied: _Applied, rank: int, given: Local) -> Array | None:
    """Cotangents of a linear's biases, joined: sums of its outputs' over all but the output's own dims."""
    biases = applied.operands[1 + len(given) :]
    sums = []
    for held, cotangent in zip(biases, given, strict=True):
        if held is not None:
            rows = held.local[rank].ndim
            sums.append(cotangent.sum(axis=tuple(range(cotangent.ndim - rows))).reshape(-1))
    return np.concatenate(sums) if sums else None
