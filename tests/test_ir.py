"""Invariants of the programs that the builder makes, over many specs, and the mistakes that the builder finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_cases import ALL_CASES, BLOCK, CASES, attention, model, rope, specs

from duomesh.core.errors import SpecError
from duomesh.core.ir.build import build_program
from duomesh.core.ir.ops import KINDS
from duomesh.core.ir.program import ModelProgram, Program, ProgramBuilder, run
from duomesh.core.ir.storage import segments
from duomesh.core.ir.values import Axis, Init, Op, Value
from duomesh.core.spec.model import ModelSpec

# ------------------------------------------------------------------------------------------------------ invariants


def check_program(program: Program) -> None:
    """Straight-line and closed: everything is defined once, before its use, and used."""
    defined = {v.name for v in program.inputs} | {c.name for c in program.constants}
    used: Counter[str] = Counter()
    for op in program.ops:
        for name in op.inputs:
            assert name is None or name in defined, f"{op.name} reads {name} before it is defined"
        for name in op.outputs:
            assert name not in defined, f"{name} is defined twice"
        defined |= set(op.outputs)
        used.update(name for name in op.inputs if name is not None)
        check_op(program, op)
    assert defined == set(program.values)
    results = [value for _, value in program.outputs]
    assert len({name for name, _ in program.outputs}) == len(program.outputs)
    assert set(results) <= defined
    read = set(used) | set(results)
    for op in program.ops:
        # of an op with several results some may be read by nobody: probabilities, where nothing balances experts
        assert read & set(op.outputs), f"nothing reads {op.name}"
    unread = {v.name for v in program.inputs} | {c.name for c in program.constants}
    assert unread <= read, f"nothing reads {unread - read}"
    params = Counter(name for op in program.ops for name in op.params if name is not None)
    assert params == Counter(param.name for param in program.params)
    assert len({op.name for op in program.ops}) == len(program.ops)


def check_op(program: Program, op: Op) -> None:
    """The op fits its kind, and its signature names the axes that its operands have."""
    kind = KINDS[op.kind]
    assert {name for name, _ in op.attrs} == set(kind.attrs)
    hash(op)  # attributes are frozen all the way down
    inputs = [None if name is None else program.values[name] for name in op.inputs]
    for operand, names in zip(inputs, op.signature.inputs, strict=False):
        if operand is not None:
            # attention sees the sequence of its keys under another name
            assert tuple(n.replace("kv_seq", "seq") for n in names) == tuple(a.name for a in operand.axes), op.name
    for name, names in zip(op.params, op.signature.params, strict=False):
        groups = () if name is None else program.param_by_name[name].groups
        assert names == tuple(axis.name for group in groups for axis in group), op.name
    for name, names in zip(op.outputs, op.signature.outputs, strict=True):
        assert names == tuple(axis.name for axis in program.values[name].axes), op.name
    taken = {n for operand in (*op.signature.inputs, *op.signature.params) for n in operand}
    made = {n for out in op.signature.outputs for n in out}
    assert {*op.signature.local, *op.signature.inner} <= taken | made
    assert set(op.signature.contracted) == taken - made
    assert not set(op.signature.local) & set(op.signature.inner)
    created = {"route": {"choice"}, "dispatch": {"experts"}, "count_choices": {"scores"}}
    assert made - taken == created.get(op.kind, set())
    assert {name for group in kind.linear for name in group} <= {*kind.inputs, *kind.params}


def check_slots(program: Program) -> None:
    """Slots hold each parameter once, their members lie one after another, and the rows are the op's outputs."""
    held = [member.param.name for slot in program.slots.values() for member in slot.members]
    assert sorted(held) == sorted(param.name for param in program.params)
    for slot in program.slots.values():
        stop = 0
        for member in slot.members:
            assert member.start == stop and member.stop - member.start == member.param.shape[0]
            stop = member.stop
        assert slot.shape[0] == stop
        assert len({member.param.shape[1:] for member in slot.members}) == 1
        assert len({member.param.is_decayed for member in slot.members}) == 1
    for call in program.calls:
        kind = KINDS[call.op.kind]
        assert set(call.kwargs) == {*kind.attrs, *kind.derived}
        if call.op.kind == "linear":
            outs, biased = call.kwargs["outs"], call.kwargs["biased"]
            assert isinstance(outs, tuple) and isinstance(biased, tuple)
            rows = [prod(out) for out in outs]  # type: ignore[arg-type]
            weight, bias = call.slots
            assert weight is not None and program.slots[weight].shape[0] == sum(rows)
            biased_rows = sum(n for n, has in zip(rows, biased, strict=True) if has)
            assert biased_rows == (0 if bias is None else program.slots[bias].shape[0])


def check_model(program: ModelProgram) -> None:
    spec = program.spec
    for part in (program.embed, *program.blocks, program.head, program.loss):
        check_program(part)
        check_slots(part)
    assert len(program.layers) == spec.num_layers
    assert len(program.blocks) == len(set(spec.blocks)) == len(set(program.layers))
    # what each program reads is what an earlier one made, under the same axes, or the batch
    batch = {"tokens", "positions", "segment_ids", "labels", "loss_mask", "samples", "places", "dropout_key"}
    made: dict[str, Value] = {}
    for prefix, part in program.steps:
        for value in part.inputs:
            assert value.name in batch or made[value.name].axes == value.axes, prefix + value.name
        made |= {outside: part.values[inside] for outside, inside in part.outputs}
    assert made["loss_sum"].axes == ()
    # every stored row belongs to one canonical parameter
    assert list(program.placements) == list(program.params)
    for name, place in program.placements.items():
        assert place.stop - place.start == program.params[name].shape[0]
    assert program.num_params == sum(prod(param.shape) for param in program.params.values())


@pytest.mark.parametrize("spec", ALL_CASES.values(), ids=ALL_CASES.keys())
def test_invariants_of_the_table(spec: ModelSpec) -> None:
    check_model(build_program(spec))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(specs())
def test_invariants_of_any_spec(spec: ModelSpec) -> None:
    check_model(build_program(spec))


def test_canonical_names_and_shapes() -> None:
    spec = CASES["some_biases"]
    params = {name: param.shape for name, param in build_program(spec).params.items()}
    layer = {
        "attention_norm.weight": (20,),
        "attention.q.weight": (48, 20),
        "attention.q.bias": (48,),
        "attention.k.weight": (16, 20),
        "attention.v.weight": (16, 20),
        "attention.v.bias": (16,),
        "attention.o.weight": (20, 48),
        "attention.o.bias": (20,),
        "mlp_norm.weight": (20,),
        "mlp.gate.weight": (28, 20),
        "mlp.gate.bias": (28,),
        "mlp.up.weight": (28, 20),
        "mlp.up.bias": (28,),
        "mlp.down.weight": (20, 28),
        "mlp.down.bias": (20,),
    }
    want = {"embed.weight": (37, 20), "head.norm.weight": (20,), "head.weight": (37, 20)}
    want |= {f"layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    assert params == want


def test_a_norm_over_all_heads_has_one_weight_of_their_width() -> None:
    program = build_program(CASES["qk_norm_over_all"])
    ops = {op.name: op for op in program.blocks[0].ops}
    q, k = ops["attention.q_norm"], ops["attention.k_norm"]
    assert program.params["layers.0.attention.q_norm.weight"].shape == (48,)
    assert program.params["layers.0.attention.k_norm.weight"].shape == (16,)
    assert not program.params["layers.0.attention.q_norm.weight"].is_decayed
    assert (q.signature.inner, q.signature.local) == (("kv_heads", "q_per_kv"), ("head_dim",))
    assert (k.signature.inner, k.signature.local) == (("kv_heads",), ("head_dim",))
    by_head = {op.name: op for op in build_program(CASES["qk_norm"]).blocks[0].ops}["attention.q_norm"]
    assert (by_head.signature.inner, by_head.signature.local) == ((), ("head_dim",))


def test_tied_head_is_an_alias() -> None:
    tied, untied = build_program(model(tie_embeddings=True)), build_program(model())
    assert tied.aliases == {"head.weight": "embed.weight"} and untied.aliases == {}
    assert set(untied.params) - set(tied.params) == {"head.weight"}
    assert untied.num_params - tied.num_params == 37 * 20
    assert "head.weight" not in tied.placements


@pytest.mark.parametrize("num_layers", [1, 2, 7, 30, 126])
def test_c063_the_number_of_layers_built_is_that_asked_for(num_layers: int) -> None:
    kinds = (BLOCK, attention(window=3))
    program = build_program(model(*(kinds[n % 2] for n in range(num_layers)), vocab_size=30 + num_layers))
    wanted = num_layers if num_layers > 1 else 2  # `model` doubles a single block
    prefixes = [prefix for prefix, _ in program.steps]
    assert prefixes == ["embed.", "tables.", *(f"layers.{n}." for n in range(wanted)), "head.", "loss."]
    assert {name.split(".")[1] for name in program.params if name.startswith("layers.")} == {
        str(n) for n in range(wanted)
    }
    assert len(program.blocks) == min(num_layers, 2)


def test_each_layer_keeps_its_own_attributes() -> None:
    """A window or a rotary base of one layer never becomes another's."""
    blocks = (attention(window=4), BLOCK, attention(window=4), rope(base=77.0))
    program = build_program(model(*blocks))
    assert program.layers == (0, 1, 0, 2)
    windows, tables = [], []
    for kind in program.layers:
        ops = {op.name: op for op in program.blocks[kind].ops}
        windows.append(dict(ops["attention.core"].attrs)["window"])
        tables.append(ops["attention.q_rope"].inputs[1])
    assert windows == [4, None, 4, None]
    assert tables == ["rope0.cos", "rope0.cos", "rope0.cos", "rope1.cos"]
    second = next(c for c in program.tables.constants if c.name == "rope1.inv_freq")
    np.testing.assert_array_equal(second.data, np.float32(77.0 ** (-np.arange(0, 8, 2) / 8)))


def test_equal_specs_are_built_once() -> None:
    assert build_program(model()) is build_program(model())
    deeper, shallower = (build_program(model(*[BLOCK] * n)).blocks for n in (3, 2))
    assert [block.ops for block in deeper] == [block.ops for block in shallower]


def test_initialisers() -> None:
    """Output matrices are drawn narrower by sqrt(2 layers); a stored gain and its offset make 1."""
    spec = replace(CASES["offset_norm"], init_std=0.02, init_scaled_output=True)
    inits = {name: param.init for name, param in build_program(spec).params.items()}
    for name in ("embed.weight", "head.weight", "layers.0.attention.q.weight", "layers.1.mlp.up.weight"):
        assert inits[name] == Init("normal", 0.02)
    for name in ("layers.0.attention.o.weight", "layers.1.mlp.down.weight"):
        assert inits[name] == Init("normal", 0.02 / 4**0.5)
    assert inits["layers.0.attention_norm.weight"] == Init("fill", 0.0)
    assert build_program(CASES["gqa"]).params["head.norm.weight"].init == Init("fill", 1.0)


# -------------------------------------------------------------------------------------------------------- segments


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8))
def test_segments_expand_to_the_list(layers: list[int], longest: int) -> None:
    out = segments(layers, longest_pattern=longest)
    assert [kind for s in out for kind in s.pattern * s.repeats] == layers
    start = 0
    for segment in out:
        assert segment.start == start and segment.repeats >= 1 and len(segment.pattern) <= longest
        start = segment.stop
        for position, kind in enumerate(segment.pattern):
            assert len(segment.layers(position)) == segment.repeats
            assert all(layers[n] == kind for n in segment.layers(position))
    assert start == len(layers)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(2, 9))
def test_a_repeated_pattern_is_one_segment_of_it(pattern: list[int], repeats: int) -> None:
    """The body that a scan compiles is never longer than the pattern."""
    (segment,) = segments(pattern * repeats)
    assert len(segment.pattern) <= len(pattern)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("", []),
        ("A", [("A", 1)]),
        ("AAAA", [("A", 4)]),
        ("LLLLLGLLLLLG", [("LLLLLG", 2)]),
        ("ABABA", [("AB", 2), ("A", 1)]),
        ("AAAB", [("A", 3), ("B", 1)]),
        ("ABBB", [("A", 1), ("B", 3)]),
    ],
)
def test_segments_of_usual_models(layers: str, expected: list[tuple[str, int]]) -> None:
    out = segments([ord(c) for c in layers])
    assert [("".join(map(chr, s.pattern)), s.repeats) for s in out] == expected


# ---------------------------------------------------------------------------------------------------------- errors

BATCH, SEQ, EMBED, FFN = Axis("batch"), Axis("seq"), Axis("embed", 6), Axis("ffn", 10)
HEADS, GROUP, DIM = Axis("kv_heads", 2), Axis("q_per_kv", 3), Axis("head_dim", 4)
STREAM = (BATCH, SEQ, EMBED)
NORM = {"centered": False, "eps": 1e-5, "weight_offset": 0.0, "cast": "after_weight"}
ROPE = {"pairing": "half", "compute": "fp32"}
ATTENTION = {"scale": 1.0, "window": None, "softcap": None}


def _twice(b: ProgramBuilder) -> Any:
    x = b.input(Value("x", STREAM))
    b.op("add", "sum", [x, x])
    return b.op("add", "sum", [x, x])


def _missing_attribute(b: ProgramBuilder) -> Any:
    return b.op("scale", "s", [b.input(Value("x", STREAM))])


def _unknown_attribute(b: ProgramBuilder) -> Any:
    return b.op("add", "s", [b.input(Value("x", STREAM))] * 2, factor=1.0)


def _too_few_operands(b: ProgramBuilder) -> Any:
    return b.op("add", "s", [b.input(Value("x", STREAM))])


def _too_many_operands(b: ProgramBuilder) -> Any:
    return b.op("softcap", "s", [b.input(Value("x", STREAM))] * 3, cap=1.0)


def _odd_packs(b: ProgramBuilder) -> Any:
    weight = b.param("up.weight", ((FFN,), (EMBED,)), Init("normal", 1.0))
    return b.op("linear", "up", [b.input(Value("x", STREAM))], [weight, None, None])


def _missing_operand(b: ProgramBuilder) -> Any:
    return b.op("scale", "s", [None], factor=1.0)


def _norm_width(b: ProgramBuilder) -> Any:
    weight = b.param("n.weight", ((FFN,),), Init("fill", 1.0))
    return b.op("norm", "n", [b.input(Value("x", STREAM))], [weight, None], **NORM)


def _norm_of_other_axes(b: ProgramBuilder) -> Any:
    """A weight for heads of another number, but of the same width."""
    weight = b.param("n.weight", ((Axis("kv_heads", 4), Axis("head_dim", 2)),), Init("fill", 1.0))
    return b.op("norm", "n", [b.input(Value("k", (BATCH, SEQ, HEADS, DIM)))], [weight, None], **NORM)


def _centered_norm_of_heads(b: ProgramBuilder) -> Any:
    weight = b.param("n.weight", ((HEADS, DIM),), Init("fill", 1.0))
    k = b.input(Value("k", (BATCH, SEQ, HEADS, DIM)))
    return b.op("norm", "n", [k], [weight, None], **{**NORM, "centered": True})


def _linear_width(b: ProgramBuilder) -> Any:
    weight = b.param("up.weight", ((EMBED,), (FFN,)), Init("normal", 1.0))
    return b.op("linear", "up", [b.input(Value("x", STREAM))], [weight, None])


def _bias_width(b: ProgramBuilder) -> Any:
    weight = b.param("up.weight", ((FFN,), (EMBED,)), Init("normal", 1.0))
    bias = b.param("up.bias", ((EMBED,),), Init("fill", 0.0))
    return b.op("linear", "up", [b.input(Value("x", STREAM))], [weight, bias])


def _rope_width(b: ProgramBuilder) -> Any:
    table = (BATCH, SEQ, Axis("rotary", 3))
    operands = [b.input(Value("k", (BATCH, SEQ, HEADS, DIM)))]
    operands += [b.input(Value(name, table)) for name in ("cos", "sin")]
    return b.op("rope", "r", operands, **ROPE)


def _attention_heads(b: ProgramBuilder) -> Any:
    q = b.input(Value("q", (BATCH, SEQ, HEADS, GROUP, DIM)))
    k = b.input(Value("k", (BATCH, SEQ, Axis("kv_heads", 3), DIM)))
    return b.op("attention", "a", [q, k, k, None], **ATTENTION)


def _added_widths(b: ProgramBuilder) -> Any:
    return b.op("add", "s", [b.input(Value("x", STREAM)), b.input(Value("y", (BATCH, SEQ, FFN)))])


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (_twice, "value sum is defined twice"),
        (_missing_attribute, r"program p, op s: takes the attributes \('factor',\), got \(\)"),
        (_unknown_attribute, r"program p, op s: takes the attributes \(\), got \('factor',\)"),
        (_too_few_operands, r"program p, op s: takes \('x', 'y'\), got 1 operands"),
        (_too_many_operands, r"program p, op s: takes \('x',\), got 3 operands"),
        (_odd_packs, r"program p, op up: takes equally many weights\* and biases\*, got 3 in all"),
        (_missing_operand, "program p, op s: operand 'x' is required"),
        (_norm_width, r"program p, op n: norm weight n.weight has shape \(10,\); its input ends in embed=6"),
        (_norm_of_other_axes, r"norm weight n.weight has shape \(8,\); its input ends in kv_heads=2, head_dim=4"),
        (_centered_norm_of_heads, "a centered norm is over one axis; weight n.weight has kv_heads=2, head_dim=4"),
        (_linear_width, "program p, op up: linear weight up.weight contracts ffn=10"),
        (_bias_width, r"program p, op up: bias up.bias has shape \(6,\)"),
        (_rope_width, "program p, op r: a rotary table for 6 channels cannot rotate heads of 4"),
        (_attention_heads, "program p, op a: attention over q"),
        (_added_widths, "program p, op s: operands .* must have the same axes"),
    ],
)
def test_builder_names_the_mistake(mistake: Callable[[ProgramBuilder], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        mistake(ProgramBuilder("p"))


# ------------------------------------------------------------------------------------------------------------- run


def test_run_records_scopes_and_hands_over_by_name() -> None:
    program = build_program(CASES["embedding_scale"])
    entered: list[str] = []

    class Scope:
        def __init__(self, name: str) -> None:
            entered.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    functions: dict[str, Callable[..., Any]] = {
        "embedding": lambda ids, weight: weight[ids],
        "scale": lambda x, factor: x * factor,
        "rope_table": lambda positions, inv_freq, attention_factor: ("cos", "sin"),
    }
    record: dict[str, Any] = {}
    table = np.arange(6.0).reshape(3, 2)
    out = run(program.embed, functions, {"tokens": np.array([[2]])}, {"weight": table}, record, Scope)
    inputs = {"positions": np.array([[0]]), "rope0.inv_freq": np.ones(4)}
    out |= run(program.tables, functions, inputs, {}, record, Scope)
    assert entered == ["lookup", "scale", "rope0"]
    np.testing.assert_array_equal(out["x"], [[table[2] * 20**0.5]])
    assert (out["rope0.cos"], out["rope0.sin"]) == ("cos", "sin")
    assert list(record) == ["lookup", "scale", "rope0.cos", "rope0.sin"]
