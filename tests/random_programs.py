"""Random block programs, random rules for mesh axes, and random modes for every op: what hypothesis draws from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from spec_cases import BLOCK, model

from duomesh.core.ir.build import build_program
from duomesh.core.ir.kind import axis_names
from duomesh.core.ir.program import ModelProgram, Program, ProgramBuilder, Term
from duomesh.core.ir.values import Axis, Init, Param, Value
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.modes import Mode, OpStates, OpView
from duomesh.core.sharding.transitions import INVARIANT, State
from duomesh.core.sharding.typing import AxisRule, ProgramStates

BATCH, SEQ, EMBED, FFN = Axis("batch"), Axis("seq"), Axis("embed", 24), Axis("ffn", 12)
KV, Q, DIM = Axis("kv_heads", 4), Axis("q_per_kv", 2), Axis("head_dim", 4)
EXPERTS, SCORES, EXPERT_FFN = Axis("experts", 4), Axis("scores", 4), Axis("expert_ffn", 12)
STREAM, WIDE, KEYS, HEADS = (BATCH, SEQ, EMBED), (BATCH, SEQ, FFN), (BATCH, SEQ, KV, DIM), (BATCH, SEQ, KV, Q, DIM)
NUM_SAMPLES, LENGTH = 12, 24  # cut by meshes of up to 12 ranks, positions twice for zigzag
ACTIVATIONS = ("silu", "gelu", "tanh", "sigmoid", "relu2")
BASE = model(BLOCK, vocab_size=11, hidden_size=24, max_positions=64, dropout=0.2)


class _Block:
    """A block of random ops, each of which fits what is there: `x` in, `x` out, terms of the loss beside it."""

    def __init__(self, rng: Random, name: str) -> None:
        self._rng, self._b = rng, ProgramBuilder(name)
        self._values = [self._b.input(Value("x", STREAM))]
        counted = (("samples", BATCH), ("places", SEQ), ("dropout_key", Axis("key", 2)))
        self._counted = [self._b.input(Value(source, (axis,), "int")) for source, axis in counted]
        self._count = 0
        self._terms: dict[str, Value] = {}

    def build(self) -> Program:
        x = self._values[0]
        for _ in range(self._rng.randint(1, 6)):
            self._rng.choice(
                [
                    self._norm,
                    self._linear,
                    self._pack,
                    self._elementwise,
                    self._add,
                    self._glu,
                    self._attention,
                    self._dropout,
                    self._moe,
                ]
            )()
        h = self._latest(STREAM)
        (out,) = self._b.op("add", self._name("residual"), [x, h])
        return self._b.build({"x": out, **self._terms})

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def _param(self, name: str, *groups: tuple[Axis, ...]) -> Param:
        return self._b.param(name, groups, Init("normal", 0.15))

    def _some(self, *shapes: tuple[Axis, ...]) -> Value:
        """Any value of one of the shapes; the latest are likelier, so that programs are deep."""
        fitting = [v for v in self._values if not shapes or v.axes in shapes]
        return self._rng.choice(fitting[-3:])

    def _has(self, axes: tuple[Axis, ...]) -> bool:
        return any(v.axes == axes for v in self._values)

    def _latest(self, axes: tuple[Axis, ...]) -> Value:
        """The last value, brought to a shape by a linear."""
        source = self._values[-1]
        if source.axes == axes:
            return source
        return self._project(source, [axes[2:]])[0]

    def _project(self, x: Value, outs: list[tuple[Axis, ...]]) -> tuple[Value, ...]:
        name = self._name("linear")
        contract = x.axes[2:]
        weights: list[Param | None] = [self._param(f"{name}.w{i}", out, contract) for i, out in enumerate(outs)]
        biases = [self._param(f"{name}.b{i}", out) if self._rng.random() < 0.5 else None for i, out in enumerate(outs)]
        made = self._b.op("linear", name, [x], [*weights, *biases], [f"{name}.{i}" for i in range(len(outs))])
        self._values += made
        return made

    def _norm(self) -> None:
        x, name = self._some(), self._name("norm")
        count = self._rng.randint(1, len(x.axes) - 2)
        centered = count == 1 and self._rng.random() < 0.3
        weight = self._param(f"{name}.weight", x.axes[-count:])
        bias = self._param(f"{name}.bias", x.axes[-count:]) if self._rng.random() < 0.3 else None
        attrs: dict[str, Any] = {"centered": centered, "eps": 0.1, "weight_offset": 1.0, "cast": "after_weight"}
        self._values += self._b.op("norm", name, [x], [weight, bias], **attrs)

    def _linear(self) -> None:
        self._project(self._some(), [self._rng.choice([STREAM, WIDE, KEYS, HEADS])[2:]])

    def _pack(self) -> None:
        """q, k and v, or gate and up."""
        outs = self._rng.choice([[HEADS, KEYS, KEYS], [WIDE, WIDE], [STREAM, WIDE]])
        self._project(self._some(STREAM), [axes[2:] for axes in outs])

    def _elementwise(self) -> None:
        kind = self._rng.choice(["scale", "softcap", "activation"])
        numbers = {"scale": ("factor", 1.5), "softcap": ("cap", 2.0)}
        name, value = numbers.get(kind, ("activation", self._rng.choice(ACTIVATIONS)))
        attrs: dict[str, Any] = {name: value}
        self._values += self._b.op(kind, self._name(kind), [self._some()], **attrs)

    def _add(self) -> None:
        x = self._some()
        self._values += self._b.op("add", self._name("add"), [x, self._some(x.axes)])

    def _glu(self) -> None:
        gate = self._some()
        attrs: dict[str, Any] = {"activation": self._rng.choice(ACTIVATIONS)}
        self._values += self._b.op("glu", self._name("glu"), [gate, self._some(gate.axes)], **attrs)

    def _attention(self) -> None:
        if not (self._has(HEADS) and self._has(KEYS)):
            self._project(self._some(STREAM), [HEADS[2:], KEYS[2:]])
        operands = [self._some(HEADS), self._some(KEYS), self._some(KEYS), None]
        attrs: dict[str, Any] = {"scale": 0.5, "window": self._rng.choice([None, 5]), "softcap": None}
        self._values += self._b.op("attention", self._name("attention"), operands, **attrs)

    def _dropout(self) -> None:
        attrs: dict[str, Any] = {"rate": self._rng.choice([0.1, 0.5]), "site": self._count}
        self._values += self._b.op("dropout", self._name("dropout"), [self._some(), *self._counted], **attrs)

    def _moe(self) -> None:
        """Router, dispatch, experts, combine; the losses of the router once in a block."""
        b, name, x = self._b, self._name("moe"), self._latest(STREAM)
        (scores,) = b.op("router", f"{name}.router", [x], [self._param(f"{name}.router.w", (SCORES,), (EMBED,))])
        outputs = [f"{name}.{what}" for what in ("probs", "gates", "ids")]
        attrs: dict[str, Any] = {"top_k": 2, "renormalize": self._rng.random() < 0.5}
        probs, gates, ids = b.op("route", f"{name}.route", [scores], [], outputs, **attrs)
        if not self._terms:
            (counts,) = b.op("count_choices", f"{name}.counts", [ids], num_experts=4)
            (self._terms["balance"],) = b.op("balance_sum", f"{name}.balance", [probs, counts])
            (self._terms["z"],) = b.op("z_sum", f"{name}.z", [scores])
        (rows,) = b.op("dispatch", f"{name}.dispatch", [x, ids], num_experts=4)
        up, down = ((EXPERTS,), (EXPERT_FFN,), (EMBED,)), ((EXPERTS,), (EMBED,), (EXPERT_FFN,))
        bias = self._param(f"{name}.up.b", (EXPERTS,), (EXPERT_FFN,)) if self._rng.random() < 0.5 else None
        (h,) = b.op("expert_linear", f"{name}.up", [rows], [self._param(f"{name}.up.w", *up), bias])
        (h,) = b.op("activation", f"{name}.act", [h], activation=self._rng.choice(ACTIVATIONS))
        (h,) = b.op("expert_linear", f"{name}.down", [h], [self._param(f"{name}.down.w", *down), None])
        self._values += b.op("combine", f"{name}.combine", [h, gates, ids])


def random_model(rng: Random) -> ModelProgram:
    """A model with one or two kinds of random blocks between an embedding and a head, tied or not."""
    base = build_program(replace(BASE, tie_embeddings=rng.random() < 0.3))
    blocks = tuple(_Block(rng, f"block{i}").build() for i in range(rng.randint(1, 2)))
    terms = tuple(
        Term(program=block.name, output=name, coefficient=0.1, power=2 if name == "balance" else 1)
        for block in blocks
        for name, _ in block.outputs
        if name != "x"
    )
    layers = tuple(rng.randrange(len(blocks)) for _ in range(rng.randint(1, 2)))
    used = sorted(set(layers))
    terms = tuple(term for term in terms if term.program in {blocks[i].name for i in used})
    return replace(
        base, blocks=tuple(blocks[i] for i in used), layers=tuple(used.index(i) for i in layers), terms=terms
    )


def random_mesh(rng: Random) -> Mesh:
    """Up to three axes of sizes 1 to 4, up to 12 ranks."""
    while True:
        mesh = Mesh.of(**{f"a{i}": rng.choice([1, 2, 2, 3, 4]) for i in range(rng.randint(1, 3))})
        if mesh.world_size <= 12:
            return mesh


def random_rule(rng: Random, axis: str, *, claims: bool) -> AxisRule:
    """What data and stream are split on, and what parameters are, if it claims any."""
    data = rng.choice([None, "batch", "seq"])
    stream = data if data is not None and rng.random() < 0.7 else rng.choice([None, "batch", "seq"])
    names = ["kv_heads", "q_per_kv", "ffn", "vocab", "experts", "expert_ffn"]
    params = tuple(rng.sample(names, rng.randint(1, 4))) if claims else ()
    return AxisRule(axis, params, data, stream, rng.choice(["contiguous", "zigzag"]), regathers=rng.random() < 0.5)


def random_states(rng: Random, model: ModelProgram, rule: AxisRule, size: int) -> dict[str, ProgramStates]:
    """Every op in a mode that it has, chosen at random: right, and rarely what anyone would want."""
    stream = {
        value.name: rule.state(rule.data if rule.data in axis_names(value.axes) else None)
        for program in model.distinct
        for value in program.inputs
    }
    out: dict[str, ProgramStates] = {}
    for program in model.distinct:
        values = {v.name: stream[v.name] for v in program.inputs}
        values |= {constant.name: INVARIANT for constant in program.constants}
        modes, ops = [], []
        for op in program.ops:
            view = OpView(program, op)
            mode = rng.choice([mode for mode in view.modes() if _divides(view, mode, size)])
            states = _ordered(view.states(mode), rule)
            values.update(zip(op.outputs, states.outputs, strict=True))
            modes.append(mode)
            ops.append(states)
        outputs = {name: _leaving(name, program.values[value], values[value], rule) for name, value in program.outputs}
        out[program.name] = ProgramStates(tuple(modes), tuple(ops), values, outputs)
        stream |= outputs
    return out


def _leaving(name: str, value: Value, made: State, rule: AxisRule) -> State:
    if name == "x":
        return rule.state(rule.stream)
    return made if value.axes else INVARIANT


def _ordered(states: OpStates, rule: AxisRule) -> OpStates:
    def ordered(state: State | None) -> State | None:
        return rule.state("seq") if state is not None and state.dim == "seq" else state

    outputs = tuple(state for state in map(ordered, states.outputs) if state is not None)
    return OpStates(tuple(map(ordered, states.operands)), outputs)


def _divides(view: OpView, mode: Mode, size: int) -> bool:
    """Whether every dim that the mode splits can be cut in so many parts."""
    if mode.kind != "split":
        return True
    return all(count % size == 0 for count in _sizes(view, str(mode.axis)))


def _sizes(view: OpView, axis: str) -> Iterator[int]:
    program = view.program
    owners = [*(program.values[n].axes for n in view.op.inputs if n is not None)]
    owners += [tuple(a for g in program.param_by_name[n].groups for a in g) for n in view.op.params if n is not None]
    owners += [program.values[n].axes for n in view.op.outputs]
    for a in (a for axes in owners for a in axes if a.name == axis):
        yield {"batch": NUM_SAMPLES, "seq": LENGTH // 2, "vocab": 12}.get(a.name, a.size or 0)
