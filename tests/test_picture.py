"""Pictures of sharded programs: everything is in them, nothing is on top of anything else, and they are plain SVG."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_cases import BLOCK, MLP, RMS, attention, model
from spec_cases import CASES as SPECS

from duomesh.core.ir.build import build_program
from duomesh.core.ir.program import ProgramBuilder
from duomesh.core.ir.values import Axis, Value
from duomesh.core.sharding.collectives import StepShape, step_collectives
from duomesh.core.sharding.mesh import Mesh, MeshAxis
from duomesh.core.sharding.picture import draw_program, scene_of_program
from duomesh.core.sharding.picture.graph import Arrangement, Node, Wire
from duomesh.core.sharding.picture.labels import COLOURS
from duomesh.core.sharding.picture.order import arrange_rows
from duomesh.core.sharding.picture.parts import lane_name
from duomesh.core.sharding.picture.place import place
from duomesh.core.sharding.picture.scene import Box, Line, Scene, Text, text_width
from duomesh.core.sharding.program import Reshard, ShardedCall, ShardedModelProgram, ShardedProgram, shard_model
from duomesh.core.sharding.storage import Storage
from duomesh.core.sharding.transitions import PARTIAL, Kind
from duomesh.core.sharding.typing import AxisRule
from duomesh.core.spec.model import ModelSpec, MoeSpec

SPLIT = ("kv_heads", "ffn", "vocab")
TP = AxisRule("tp", SPLIT)
SP = replace(TP, stream="seq", regathers=True)
COPY = AxisRule("copy", ("q_per_kv", "ffn", "vocab"), stream="seq", regathers=True)
DP = AxisRule("dp", data="batch", stream="batch", shares=True)
ZIGZAG = AxisRule("cp", data="seq", stream="seq", order="zigzag", shares=True)
EP = AxisRule("dp.ep", ("experts",), data="batch", stream="batch", shares=True)
ETP = replace(SP, axis="tp.etp", params=(*SPLIT, "expert_ffn"))

WIDE = replace(MLP, ffn_size=36)
PLAIN = model(replace(BLOCK, mlp=WIDE))
BIASED = model(
    replace(
        attention(q_bias=True, k_bias=True, v_bias=True, o_bias=True), mlp=replace(WIDE, up_bias=True, down_bias=True)
    )
)
EXPERTS = MoeSpec(
    num_experts=4,
    top_k=2,
    ffn_size=12,
    activation="silu",
    is_gated=True,
    renormalize=True,
    balance_coefficient=0.1,
    z_coefficient=0.05,
)
HEAD_NORMS = model(replace(attention(qk_norm=RMS), mlp=WIDE))
FULL_NORMS = model(replace(attention(qk_norm=RMS, qk_norm_over="all"), mlp=WIDE))
MIXTURE = model(replace(BLOCK, mlp=replace(MLP, ffn_size=24), moe=EXPERTS))

CASES: dict[str, tuple[ModelSpec, tuple[tuple[AxisRule, int], ...]]] = {
    "one rank": (PLAIN, ()),
    "tensor": (PLAIN, ((DP, 2), (TP, 2))),
    "sequence": (PLAIN, ((DP, 2), (SP, 2))),
    "context, biases": (BIASED, ((DP, 2), (ZIGZAG, 2), (SP, 2))),
    "copies, head norms": (HEAD_NORMS, ((DP, 2), (SP, 2), (COPY, 3))),
    "copies, full norms": (FULL_NORMS, ((DP, 2), (SP, 2), (COPY, 3))),
    "experts": (MIXTURE, ((EP, 2), (ETP, 2))),
    "experts, context": (MIXTURE, ((EP, 2), (ZIGZAG, 2), (ETP, 2))),
    "axes of size 1": (BIASED, ((DP, 1), (SP, 1), (ZIGZAG, 2))),
    "no rotation": (SPECS["no_rope"], ((DP, 2), (TP, 2))),
    "post norms": (SPECS["post_norms"], ((DP, 2), (SP, 2))),
}
SOLID = ("op", "movement", "local", "input", "output", "value")


@cache
def sharded_of(case: str) -> ShardedModelProgram:
    spec, axes = CASES[case]
    mesh = Mesh(tuple(MeshAxis(rule.axis, size) for rule, size in axes))
    return shard_model(build_program(spec), mesh, [rule for rule, _ in axes])


def drawings() -> Iterator[tuple[str, str]]:
    return ((case, name) for case in CASES for name in ("embed", "tables", "block0", "head", "loss"))


EVERY = pytest.mark.parametrize(("case", "name"), list(drawings()))


@cache
def drawn(case: str, name: str) -> tuple[ShardedProgram, Mesh, Scene]:
    sharded = sharded_of(case)
    program = sharded.programs[name]
    return program, sharded.mesh, scene_of_program(program, sharded.mesh)


def contains(box: Box, part: Box | Text) -> bool:
    (left, top, right, bottom), inner = box.extent, part.extent
    return left <= inner[0] and top <= inner[1] and inner[2] <= right and inner[3] <= bottom


def texts_in(scene: Scene, box: Box) -> list[str]:
    """From top to bottom, and from left to right."""
    return [text.content for text in sorted(scene.texts(), key=lambda t: (t.y, t.x)) if contains(box, text)]


def the_box(scene: Scene, of: str, *roles: str) -> Box:
    (box,) = [box for box in scene.boxes(*roles) if box.of == of]
    return box


# What is in a picture


@EVERY
def test_ops_and_movements_are_drawn_once(case: str, name: str) -> None:
    program, _, scene = drawn(case, name)
    ops = [f"{made.call.op.kind} {made.call.op.name}" for made in program.calls()]
    assert sorted(box.of for box in scene.boxes("op")) == sorted(ops)
    for made in program.calls():
        texts = texts_in(scene, the_box(scene, f"{made.call.op.kind} {made.call.op.name}", "op"))
        assert texts[:2] == [made.call.op.kind, made.call.op.name]
    moves = [f"{made.source} -> {made.result}" for made in program.reshards()]
    assert sorted(box.of for box in scene.boxes("movement", "local")) == sorted(moves)
    assert sorted(box.of for box in scene.boxes("output")) == sorted(outside for outside, _ in program.outputs)
    for box in scene.boxes("output"):
        assert texts_in(scene, box) == ["output", box.of]


@EVERY
def test_every_layout_is_drawn_in_its_colour(case: str, name: str) -> None:
    program, mesh, scene = drawn(case, name)
    axes = [axis for axis in mesh.names if mesh.size(axis) > 1]
    found: dict[str, list[Box]] = {}
    for badge in scene.boxes("badge"):
        found.setdefault(badge.of, []).append(badge)
    expected = set()
    for value in program.layouts if axes else ():
        for axis in axes:
            state = program.layouts[value][axis]
            expected.add(f"{value} {axis} {state}")
            for badge in found[f"{value} {axis} {state}"]:
                assert badge.fill == COLOURS[state.kind][0]
                assert texts_in(scene, badge) == [str(state)]
                (before,) = [
                    box for box in scene.boxes("axis") if box.y == badge.y and box.x < badge.x <= box.extent[2]
                ]
                assert axis in texts_in(scene, before)
    assert {of for of in found if not of.startswith("key ")} == expected


@EVERY
def test_every_operand_reaches_its_op(case: str, name: str) -> None:
    """Along a line from the label of that name, or named inside the box; differentiated values along a line."""
    program, _, scene = drawn(case, name)
    expected: Counter[tuple[str, str]] = Counter()
    for made in program.instructions:
        if isinstance(made, Reshard):
            expected[made.source, f"{made.source} -> {made.result}"] += 1
        else:
            box = f"{made.call.op.kind} {made.call.op.name}"
            expected.update({(operand, box) for operand in made.operands if operand is not None})
    expected.update((inside, outside) for outside, inside in program.outputs)
    along = Counter((line.of, end_box(scene, line).of) for line in scene.lines() if line.of)
    named: Counter[tuple[str, str]] = Counter()
    for value, of in expected - along:
        assert program.origin[value] not in program.program.differentiated
        named[value, of] = texts_in(scene, the_box(scene, of, "op")).count(value)
    assert along + named == expected


def end_box(scene: Scene, line: Line) -> Box:
    """The box on whose upper edge a line ends; it begins at the lower edge of the label, or pill, of its value."""
    (x0, y0), (x1, y1) = line.points[0], line.points[-1]
    starts = [
        box
        for box in scene.boxes("value", "input")
        if box.of == line.of and box.x < x0 < box.extent[2] and abs(box.extent[3] - y0) < 1
    ]
    assert len(starts) == 1, line
    assert y0 < y1 and line.has_arrow
    (end,) = [b for b in scene.boxes(*SOLID) if b.role != "value" and b.x < x1 < b.extent[2] and abs(b.y - y1) < 1]
    return end


@EVERY
def test_movements_say_what_ranks_do(case: str, name: str) -> None:
    program, _, scene = drawn(case, name)
    for made in program.reshards():
        box = the_box(scene, f"{made.source} -> {made.result}", "movement", "local")
        is_collective = any(step.action.is_collective for step in (*made.ahead, *made.back))
        assert (box.role, box.form) == (("movement", "hexagon") if is_collective else ("local", "rectangle"))
        forms = [mark.form for mark in scene.boxes("direction") if contains(box, mark)]
        again = [step for step in made.ahead if made.regathers and step.action.is_collective]
        ahead, back = max(1, len(made.ahead)), max(1, len(again) + len(made.back))
        assert forms == ["down"] * ahead + ["up"] * back
        texts = texts_in(scene, box)
        for step, content in zip((*made.ahead, *again, *made.back), texts, strict=False):
            assert step.action.value.startswith(content.split()[0])
            assert all(axis in content.split() for axis in step.axes if content != "nothing")
        assert [content.endswith(" again") for content in texts].count(True) == len(again)


def test_movements_of_a_block_with_sequence_parallelism() -> None:
    program, _, scene = drawn("sequence", "block0")
    gather = ["all-gather tp", "all-gather tp again", "reduce-scatter tp"]
    scatter = ["reduce-scatter tp", "all-gather tp"]
    names = ["attention_norm", "attention.o", "mlp_norm", "mlp.down"]
    boxes = [the_box(scene, f"{value} -> {value}@1", "movement") for value in names]
    assert [texts_in(scene, box) for box in boxes] == [gather, scatter, gather, scatter]
    assert len(list(program.reshards())) == 4


def test_local_movements_are_small_and_grey() -> None:
    _, _, scene = drawn("context, biases", "block0")
    box = the_box(scene, "mlp.down.bias -> mlp.down.bias@1", "local")
    assert texts_in(scene, box) == ["keep first tp", "nothing"]
    gather = the_box(scene, "segment_ids -> segment_ids@1", "movement")
    assert texts_in(scene, gather) == ["all-gather cp", "no gradient"]
    assert box.height < gather.height and box.fill != gather.fill
    _, _, ones = drawn("axes of size 1", "block0")
    assert texts_in(ones, the_box(ones, "mlp.down -> mlp.down@1", "local")) == ["nothing", "nothing"]


@pytest.mark.parametrize(
    ("case", "name", "expected"),
    [
        (
            "copies, full norms",
            "block0",
            {
                "attention.q_norm": ["all-reduce tp copy", "sum of squares", "sum of products"],
                "attention.k_norm": ["all-reduce tp", "sum of squares", "sum of products"],
            },
        ),
        ("copies, head norms", "block0", {}),
        ("sequence", "loss", {"token_loss": ["all-reduce tp", "maximum", "sum of exponentials", "label's logit"]}),
        ("axes of size 1", "loss", {}),
    ],
)
def test_collectives_of_ops_are_named_in_their_boxes(case: str, name: str, expected: dict[str, list[str]]) -> None:
    _, _, scene = drawn(case, name)
    assert {box.of: texts_in(scene, box) for box in scene.boxes("own")} == expected
    for inner in scene.boxes("own"):
        assert sum(contains(box, inner) and box.of.endswith(inner.of) for box in scene.boxes("op")) == 1


@pytest.mark.parametrize("case", ["sequence", "copies, full norms", "experts, context"])
def test_amounts_are_those_of_the_listed_collectives(case: str) -> None:
    sharded = sharded_of(case)
    listed = step_collectives(Storage(sharded, 0), StepShape(4, 12, has_segments=True))
    for name, program in sharded.programs.items():
        scene = scene_of_program(program, sharded.mesh, collectives=listed)
        boxes = scene.boxes("movement", "own")
        shown = Counter(text for box in boxes for text in texts_in(scene, box) if re.fullmatch(r"[\d,]+", text))
        wanted = Counter(
            f"{made.elements:,}"
            for made in listed
            if made.op.startswith(f"{name}.") and made.phase in ("forward", "backward", "recompute")
        )
        assert shown == wanted, name
        assert wanted or name == "tables"


def test_the_residual_stream_is_one_thick_line() -> None:
    _, _, scene = drawn("experts", "block0")
    thick = [line for line in scene.lines() if line.of and line.width > 2]
    assert [(line.of, end_box(scene, line).of) for line in sorted(thick, key=lambda line: line.points[0][1])] == [
        ("x", "add attention_residual"),
        ("attention_residual", "add mlp_residual"),
        ("mlp_residual", "x"),
    ]


def test_lines_without_gradient_are_dashed() -> None:
    _, _, scene = drawn("experts", "block0")
    dashed = {line.of for line in scene.lines() if line.is_dashed and line.of}
    assert dashed == {"moe.ids", "moe.ids@1", "moe.counts", "moe.counts@1"}


def test_a_shared_movement_is_one_box_with_several_lines() -> None:
    _, _, scene = drawn("experts", "block0")
    ends = [end_box(scene, line).of for line in scene.lines() if line.of == "mlp_norm@1"]
    assert sorted(ends) == ["dispatch moe.dispatch", "linear mlp.gate_up"]


def test_a_long_line_is_named_along_its_way() -> None:
    _, _, scene = drawn("experts", "block0")
    turned = {text.content for text in scene.texts() if text.is_turned}
    assert turned >= {"x", "attention.v", "attention_residual", "moe.gates", "moe.ids@1", "mlp_norm@1"}
    ground, name = lane_name("attention.v", 40.0, 100.0, 200.0)
    assert isinstance(ground, Box) and isinstance(name, Text) and contains(ground, name)
    assert ground.y > 100 and ground.extent[3] < 200
    assert lane_name("attention.v", 40.0, 100.0, 160.0) == []


def test_a_value_that_comes_in_is_a_line_to_every_op() -> None:
    """Also where it is not the first operand, or both."""
    x = Value("x", (Axis("batch"), Axis("seq"), Axis("embed", 20)))
    builder = ProgramBuilder("small")
    entered = builder.input(x)
    (doubled,) = builder.op("add", "doubled", [entered, entered])
    (out,) = builder.op("add", "out", [doubled, entered])
    program = builder.build({"x": out})
    calls = tuple(ShardedCall(call, call.op.inputs) for call in program.calls)
    layouts = {value: {"dp": PARTIAL} for value in program.values}
    scene = scene_of_program(ShardedProgram(program, calls, layouts, program.outputs), Mesh.of(dp=2))
    ends = Counter((line.of, end_box(scene, line).of) for line in scene.lines() if line.of)
    assert ends == Counter({("x", "add doubled"): 1, ("x", "add out"): 1, ("doubled", "add out"): 1, ("out", "x"): 1})


# Where it is


@EVERY
def test_nothing_overlaps(case: str, name: str) -> None:
    _, _, scene = drawn(case, name)
    boxes = scene.boxes(*SOLID, "lane")
    for a, b in combinations(boxes, 2):
        assert not overlap(a.extent, b.extent), (a, b)
    lines = [line for line in scene.lines() if line.of]
    for line in lines:
        for start, end in pairwise(line.points):
            assert start[0] == end[0] or start[1] == end[1], line
            for box in boxes:
                is_own = box.role == "lane" and box.of == line.of
                assert is_own or not overlap(segment(start, end), shrunk(box.extent)), (line, box)
    assert on_top_of_each_other([(line.of, line.points) for line in lines]) == []


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def segment(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, ...]:
    """As a box of half a pixel on either side."""
    (x0, x1), (y0, y1) = sorted((start[0], end[0])), sorted((start[1], end[1]))
    return x0 - 0.5, y0 - 0.5, x1 + 0.5, y1 + 0.5


def shrunk(extent: tuple[float, ...]) -> tuple[float, ...]:
    """Lines begin and end at the edges."""
    return extent[0] + 1, extent[1] + 1, extent[2] - 1, extent[3] - 1


def on_top_of_each_other(lines: list[tuple[object, tuple[tuple[float, float], ...]]]) -> list[tuple[object, object]]:
    """Pairs of lines of different values that share more than a crossing."""
    pieces = [(of, (a, b)) for of, points in lines for a, b in pairwise(points)]
    found = []
    for (of, (a, b)), (other, (c, d)) in combinations(pieces, 2):
        for along, across in ((0, 1), (1, 0)):
            is_parallel = a[across] == b[across] == c[across] == d[across]
            shared = min(max(a[along], b[along]), max(c[along], d[along]))
            shared -= max(min(a[along], b[along]), min(c[along], d[along]))
            found += [(of, other)] if of != other and is_parallel and shared > 0 else []
    return found


@pytest.mark.parametrize(
    ("case", "crossings", "width"), [("sequence", 0, 900), ("copies, full norms", 0, 900), ("experts", 2, 1100)]
)
def test_blocks_fit_a_page_and_lines_hardly_cross(case: str, crossings: int, width: float) -> None:
    _, _, scene = drawn(case, "block0")
    pieces = [(line.of, segment(*ends)) for line in scene.lines() if line.of for ends in pairwise(line.points)]
    crossed = {(a, b) for (a, one), (b, other) in combinations(pieces, 2) if a != b and overlap(one, other)}
    assert len(crossed) <= crossings
    assert scene.width <= width < scene.height


def test_the_main_column_is_straight() -> None:
    _, _, scene = drawn("sequence", "block0")
    ends = {line: end_box(scene, line) for line in scene.lines() if line.of}
    entered = Counter(ends.values())
    for line, box in ends.items():
        assert entered[box] > 1 or line.points[-1][0] == (box.x + box.extent[2]) / 2
    assert {(line.of, box.of) for line, box in ends.items() if len(line.points) > 2} == {
        ("x", "add attention_residual"),
        ("attention.q_rope", "attention attention.core"),
        ("attention.v", "attention attention.core"),
        ("attention_residual", "add mlp_residual"),
        ("mlp.gate", "glu mlp.glu"),
        ("mlp.up", "glu mlp.glu"),
    }


@EVERY
def test_texts_lie_within_their_boxes_and_all_within_the_canvas(case: str, name: str) -> None:
    _, _, scene = drawn(case, name)
    canvas = Box("canvas", 0, 0, scene.width, scene.height, "none")
    solid = scene.boxes(*SOLID, "lane", "badge", "own", "key")
    for part in scene.parts:
        if isinstance(part, Line):
            assert all(0 < x < scene.width and 0 < y < scene.height for x, y in part.points), part
            continue
        assert contains(canvas, part), part
        if isinstance(part, Text):
            around = [box for box in solid if overlap(box.extent, part.extent)]
            assert all(contains(box, part) for box in around if box.role != "badge" or box.of.endswith(part.content))
            # the axis of a badge touches its state by a rounded corner at most
            assert all(overlap_share(box, part) < 1 for box in around if not contains(box, part))
    texts = scene.texts()
    for a, b in combinations(texts, 2):
        assert not overlap(a.extent, b.extent), (a, b)


def overlap_share(box: Box, text: Text) -> float:
    """Pixels of a text's width that a box covers."""
    return min(box.extent[2], text.extent[2]) - max(box.extent[0], text.extent[0])


def test_texts_are_not_wider_than_thought() -> None:
    """Advance widths of common monospace fonts, in 2048ths of the size, as they are and rounded to whole pixels."""
    advances = {"DejaVu Sans Mono": 1233, "Menlo": 1233, "Liberation Mono": 1229, "Courier New": 1229, "Consolas": 1126}
    sizes = {text.size for case, name in drawings() for text in drawn(case, name)[2].texts()}
    assert sizes == {10, 11, 12, 17}
    for size in sizes:
        for font, advance in advances.items():
            one = size * advance / 2048
            assert max(one, round(one)) * 30 <= text_width("n" * 30, size), font
    assert text_width("日本", 10) == 2 * text_width("nn", 10)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Node], list[Wire], set[int]]:
    """Nodes of any width with up to three exits; every node but some first ones takes values of earlier ones."""
    count = draw(st.integers(1, 14))
    nodes, takers = [], {}
    for number in range(count):
        box = 2 * draw(st.integers(30, 150))
        width = box + 2 * draw(st.integers(0, 40))
        exits = draw(st.integers(0 if number == count - 1 else 1, 3))
        places = tuple((float(round(width * (i + 1) / (exits + 1))), 60.0 + 10 * i) for i in range(exits))
        nodes.append(Node(width, 100.0, box, places))
        earlier = [(n, i) for n in range(number) for i in range(len(nodes[n].exits))]
        for value in draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3)) if earlier else []:
            takers.setdefault(value, []).append(number)
    streams = draw(st.sets(st.sampled_from(sorted(takers)), max_size=2)) if takers else set()
    wires = [Wire(*value, tuple(targets), value in streams) for value, targets in takers.items()]
    return nodes, wires, draw(st.sets(st.integers(0, count - 1)))


@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_any_graph_has_a_place_for_everything(graph: tuple[list[Node], list[Wire], set[int]]) -> None:
    """Boxes apart, lines from exits to the upper edges of boxes, and through no box."""
    nodes, wires, late = graph
    for rows in arrange_rows(len(nodes), wires, late):
        made = place(rows, nodes, wires)
        boxes = [(x, y, x + node.width, y + node.height) for (x, y), node in zip(made.places, nodes, strict=True)]
        assert all(min(box) >= 0 and box[2] <= made.width and box[3] <= made.height for box in boxes)
        assert not any(overlap(a, b) for a, b in combinations(boxes, 2))
        assert Counter((path.wire, path.target) for path in made.paths) == Counter(
            (number, target) for number, wire in enumerate(wires) for target in wire.targets
        )
        check_paths(made, nodes, wires, boxes)
        assert on_top_of_each_other([(path.wire, path.points) for path in made.paths]) == []


def check_paths(made: Arrangement, nodes: list[Node], wires: list[Wire], boxes: list[tuple[float, ...]]) -> None:
    for path in made.paths:
        wire = wires[path.wire]
        exit_ = nodes[wire.source].exits[wire.exit]
        assert path.points[0] == tuple(made.places[wire.source][i] + exit_[i] for i in (0, 1))
        x, y = path.points[-1]
        middle = made.places[path.target][0] + nodes[path.target].width / 2
        assert y == boxes[path.target][1] and abs(x - middle) < nodes[path.target].box / 2
        for start, end in pairwise(path.points):
            assert start[1] <= end[1] and (start[0] == end[0] or start[1] == end[1])
            for number, box in enumerate(boxes):
                # what hangs below a box lies above its own exit
                own = (*box[:3], box[1] + exit_[1]) if number == wire.source else box
                assert not overlap(segment(start, end), shrunk(own))


# As SVG


@EVERY
def test_the_document_is_plain_and_says_what_the_scene_says(case: str, name: str) -> None:
    program, mesh, scene = drawn(case, name)
    source = draw_program(program, mesh)
    assert source == scene.svg()
    root = ElementTree.fromstring(source)
    space = "{http://www.w3.org/2000/svg}"
    elements = list(root.iter())
    assert {e.tag for e in elements} <= {space + tag for tag in ("svg", "title", "rect", "polygon", "path", "text")}
    attributes = {key for e in elements for key in e.attrib}
    assert not {a for a in attributes if a.startswith(("on", "{")) or a in ("href", "style", "class")}
    assert [e.get("font-family") for e in elements if e.get("font-family")] == ["monospace"]
    assert "url(" not in source and "nan" not in source.lower().split() and "inf" not in source.lower().split()
    assert root.get("viewBox") == f"0 0 {scene.width} {scene.height}"
    assert [e.text for e in root.iter(space + "text")] == [text.content for text in scene.texts()]
    ground, *rects = root.iter(space + "rect")
    assert (ground.get("width"), ground.get("fill")) == (str(scene.width), "#ffffff")
    drawn_boxes = [box for box in scene.parts if isinstance(box, Box) and box.form == "rectangle"]
    for rect, box in zip(rects, drawn_boxes, strict=True):
        given_ = [float(rect.get(key) or "nan") for key in ("x", "y", "width", "height")]
        assert [f"{number:.2f}" for number in given_] == [
            f"{number:.2f}" for number in (box.x, box.y, box.width, box.height)
        ]
    for path in root.iter(space + "path"):
        if path.get("fill") == "none":
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", path.get("d") or "")]
            assert max(numbers[::2]) < scene.width and max(numbers[1::2]) < scene.height and min(numbers) > 0


def test_titles_are_escaped_and_fit() -> None:
    program, mesh, _ = drawn("sequence", "loss")
    title = 'tp=2 <dp & "cp"> ' + "long " * 40 + "日本"
    scene = scene_of_program(program, mesh, title=title)
    root = ElementTree.fromstring(scene.svg())
    assert next(root.iter("{http://www.w3.org/2000/svg}text")).text == title
    assert scene.texts()[0].extent[2] <= scene.width
    assert scene_of_program(program, mesh).title == "loss"


def test_the_document_does_not_depend_on_the_process() -> None:
    here = Path(__file__).parent
    script = (
        "import sys; from test_picture import drawn; "
        "sys.stdout.write(drawn('experts', 'block0')[2].svg() + drawn('context, biases', 'block0')[2].svg())"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])},
            capture_output=True,
            check=True,
            cwd=here,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(made) == 1
    assert made.pop().decode() == "".join(drawn(case, "block0")[2].svg() for case in ("experts", "context, biases"))


def test_colours_stay_apart_without_hue_and_carry_their_text() -> None:
    """Ratios of contrast as of WCAG 2: 4.5 for text; fills of two kinds differ by half as much again in luminance."""
    assert set(COLOURS) == set(Kind)
    for fill, ink in COLOURS.values():
        assert contrast(fill, ink) >= 4.5
    for (a, _), (b, _) in combinations(COLOURS.values(), 2):
        assert contrast(a, b) >= 1.5


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    levels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in levels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
