"""What is in a picture: boxes for ops, movements, inputs and outputs, names along lines, and the legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from duomesh.core.sharding.picture.graph import Node, Point
from duomesh.core.sharding.picture.labels import (
    HEIGHT,
    INK,
    MUTED,
    OUTLINE,
    PAPER,
    SMALL,
    Row,
    badge,
    badges,
    below,
    beside,
    name_and_badges,
    padded,
    text,
    wrapped,
)
from duomesh.core.sharding.picture.scene import Box, Group, Line, Part, Text, text_width
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, shard

__all__ = [
    "STREAM_WIDTH",
    "WIRE",
    "Act",
    "Unit",
    "lane_name",
    "legend",
    "moved_source",
    "movement",
    "op",
    "sink",
    "source",
]

WIRE, STREAM_WIDTH = "#6b7885", 3.5
_OP, _MOVE, _LOCAL, _LOCAL_OUTLINE = "#f3f6f9", "#22303d", "#eceff2", "#b4bec8"
_TINY = 10.0
_STUB = 7.0  # of line between a box and the label of what leaves it
_DROP = 18.0  # of line between what comes from outside and what moves it
_ALONE, _NARROW, _NARROWEST = 480.0, 230.0, 130.0  # widest line of a box alone in its row, beside others, of a label
_BETWEEN_LABELS = 14.0


@dataclass(frozen=True)
class Act:
    """One line of what ranks do. is_forward: None for a heading. amount: elements of a rank's larger buffer, or ""."""

    is_forward: bool | None
    content: str
    amount: str = ""


@dataclass(frozen=True)
class Unit:
    """A box with the labels of what leaves it below. box: its width. exits: below each label."""

    group: Group
    box: float
    exits: tuple[Point, ...] = ()

    @property
    def node(self) -> Node:
        return Node(self.group.width, self.group.height, self.box, self.exits)


# What functions for boxes have in common:
#     is_alone: whether nothing is beside the box, so that its lines may be long.
#     pitch: the least distance between labels, given by the boxes below them.


def op(
    kind: str,
    name: str,
    operands: Sequence[Row],
    own: Sequence[Act],
    values: Sequence[Row],
    *,
    is_alone: bool = True,
    pitch: float = 0.0,
) -> Unit:
    """An op: its kind and name, operands that are no edges, collectives of its own, and below it its results."""
    lines = [beside([text(kind, is_bold=True), text(name)], 8)]
    limit = _ALONE if is_alone else _NARROW
    rows = [(text(row.name, is_italic=not row.is_weight), badges(row)) for row in operands]
    column = max((title.width for title, _ in rows), default=0.0)
    if all(column + 6 + beside(layout).width <= limit for _, layout in rows):
        rows = [(replace(title, width=column), layout) for title, layout in rows]
    lines += [name_and_badges(title, layout, limit) for title, layout in rows]
    if own:
        lines.append(_acts(own, Box("own", 0, 0, 0, 0, _MOVE, radius=4, of=name), PAPER, pad=8))
    frame = Box("op", 0, 0, 0, 0, _OP, OUTLINE, radius=8, of=f"{kind} {name}")
    return _with_labels(padded(below(lines, 4), 10, 6), frame, values, is_alone=is_alone, pitch=pitch)


def movement(
    of: str, acts: Sequence[Act], value: Row, *, is_local: bool, is_alone: bool = True, pitch: float = 0.0
) -> Unit:
    """A reshard: dark and six-sided if ranks talk to each other, forward or backward; else small and grey."""
    if is_local:
        frame = Box("local", 0, 0, 0, 0, _LOCAL, _LOCAL_OUTLINE, radius=8, of=of)
        inner = _acts(acts, frame, MUTED, size=_TINY, pad=8)
    else:
        frame = Box("movement", 0, 0, 0, 0, _MOVE, form="hexagon", of=of)
        inner = _acts(acts, frame, PAPER, pad=16)
    content = replace(inner, parts=inner.parts[1:])
    return _with_labels(content, frame, [value], is_alone=is_alone, pitch=pitch)


def source(row: Row, *, is_alone: bool = True, pitch: float = 0.0) -> Unit:
    """A pill: what comes from outside."""
    group = _pill("parameter" if row.is_weight else "input", row, "input", _ALONE if is_alone else _NARROW)
    return Unit(group, group.width, ((group.width / 2, group.height),))


def moved_source(row: Row, moved: Unit) -> Unit:
    """What comes from outside, right above the one movement that takes it."""
    pill = _pill("parameter" if row.is_weight else "input", row, "input", _NARROW)
    top, width = pill.height + _DROP, max(pill.width, moved.group.width)
    left, right = (width - pill.width) / 2, (width - moved.group.width) / 2
    line = Line(
        ((width / 2, pill.height), (width / 2, top)), WIRE, has_arrow=True, is_dashed=not row.is_weight, of=row.name
    )
    parts = (line, *pill.at(left, 0), *moved.group.at(right, top))
    return Unit(
        Group(parts, width, top + moved.group.height), moved.box, tuple((x + right, y + top) for x, y in moved.exits)
    )


def sink(name: str, *, is_alone: bool = True, pitch: float = 0.0) -> Unit:
    """A pill: what goes outside, under its name there."""
    group = _pill("output", Row(name), "output", _ALONE)
    return Unit(group, group.width)


def _pill(word: str, row: Row, role: str, limit: float) -> Group:
    title = beside([text(word, size=SMALL, fill=MUTED), text(row.name, is_bold=True)])
    inner = padded(name_and_badges(title, badges(row), limit), 14, 4)
    width = _even(inner.width)
    frame = Box(role, 0, 0, width, inner.height, PAPER, INK, radius=12, of=row.name)
    return Group((frame, *inner.at((width - inner.width) / 2, 0)), width, inner.height)


def _with_labels(content: Group, frame: Box, values: Sequence[Row], *, is_alone: bool, pitch: float) -> Unit:
    """A box, and below it a label for each value that leaves it; several labels stretch the box."""
    is_pack = len(values) > 1
    limit = max(_NARROWEST, pitch - 2 * _BETWEEN_LABELS) if is_pack else _ALONE if is_alone else _NARROW
    labels = [_label(value, limit) for value in values]
    slots = [max(label.width + _BETWEEN_LABELS, pitch if is_pack else 0.0) for label in labels]
    box = _even(max(content.width, sum(slots) if is_pack else 0.0))
    width = _even(max(box, sum(slots)))
    left, x, top = (width - box) / 2, (width - sum(slots)) / 2, content.height + _STUB
    parts: list[Part] = [replace(frame, x=left, width=box, height=content.height)]
    parts += content.at(left + (box - content.width) / 2, 0)
    exits = []
    for label, slot in zip(labels, slots, strict=True):
        middle = round(x + slot / 2)
        parts.append(Line(((middle, content.height), (middle, top)), WIRE))
        parts += label.at(middle - label.width / 2, top)
        exits.append((float(middle), top + label.height))
        x += slot
    return Unit(Group(tuple(parts), width, max(y for _, y in exits)), box, tuple(exits))


def _label(value: Row, limit: float) -> Group:
    inner = padded(name_and_badges(text(value.name, is_bold=True), badges(value), limit), 4, 2)
    ground = Box("value", 0, 0, inner.width, inner.height, PAPER, of=value.name)
    return replace(inner, parts=(ground, *inner.parts))


def _even(width: float) -> float:
    return 2.0 * ceil(width / 2)


def _acts(acts: Sequence[Act], frame: Box, ink: str, *, size: float = SMALL, pad: float) -> Group:
    """The frame, and in it lines of what ranks do, each with a triangle that says in which direction."""
    column = max(text_width(act.content, size) for act in acts)
    amounts = max(text_width(act.amount, size) for act in acts)
    width, height = 2 * pad + 13 + column + (10 + amounts if amounts else 0), len(acts) * (size + 5) + 6
    parts: list[Part] = [replace(frame, width=width, height=height)]
    for i, act in enumerate(acts):
        y = 5 + i * (size + 5)
        base = y + 0.8 * size + 1
        if act.is_forward is not None:
            parts.append(Box("direction", pad, y + 3, 8, 7, ink, form="down" if act.is_forward else "up"))
        parts.append(Text(pad + 13, base, act.content, size, ink))
        if act.amount:
            parts.append(Text(width - pad - text_width(act.amount, size), base, act.amount, size, ink))
    return Group(tuple(parts), width, height)


def lane_name(name: str, x: float, top: float, bottom: float) -> list[Part]:
    """The name of a line along it, where it has room for that."""
    length = text_width(name, _TINY)
    if length + 12 > bottom - top:
        return []
    middle = (top + bottom) / 2
    ground = Box("lane", x - 7, middle - length / 2 - 3, 14, length + 6, PAPER, of=name)
    return [ground, Text(x - 0.28 * _TINY, middle, name, _TINY, MUTED, anchor="middle", is_turned=True)]


# Legend


def legend(width: float, *, has_amounts: bool) -> Group:
    """What colours, shapes and lines mean, wrapped to the width."""
    states = [
        (shard("dim"), "a slice"),
        (PARTIAL, "a summand"),
        (REPLICATED, "equal, used differently"),
        (INVARIANT, "equal, used equally"),
    ]
    first = [beside([badge("key", "axis", state), _words(meaning)]) for state, meaning in states]
    move, local = (
        Box("key", 0, 0, 0, 0, _MOVE, form="hexagon"),
        Box("key", 0, 0, 0, 0, _LOCAL, _LOCAL_OUTLINE, radius=8),
    )
    second = [
        beside(
            [
                _key(move, Act(True, "forward"), PAPER),
                _key(move, Act(False, "backward"), PAPER),
                _words("communication"),
            ]
        ),
        beside([_key(local, Act(True, "local"), MUTED), _words("no communication")]),
        beside([_stroke(STREAM_WIDTH), _words("residual stream")]),
        beside([_stroke(1.5, is_dashed=True), _words("no gradient")]),
    ]
    if has_amounts:
        second.append(_words("numbers: elements of a rank's larger buffer"))
    return below([*wrapped(first, width, 18), *wrapped(second, width, 18)], 8, is_centred=False)


def _words(content: str) -> Group:
    return text(content, size=SMALL, fill=MUTED)


def _key(frame: Box, act: Act, ink: str) -> Group:
    group = _acts([act], frame, ink, size=_TINY, pad=12)
    return Group(tuple(group.at(0, (HEIGHT - group.height) / 2)), group.width, HEIGHT)


def _stroke(thickness: float, *, is_dashed: bool = False) -> Group:
    line = Line(((0, HEIGHT / 2), (26, HEIGHT / 2)), WIRE, thickness, is_dashed=is_dashed)
    return Group((line,), 26, HEIGHT)
