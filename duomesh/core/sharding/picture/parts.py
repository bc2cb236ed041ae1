"""The pieces of a picture: badges for layouts, boxes for ops, movements, inputs and outputs, and the legend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from duomesh.core.sharding.picture.graph import Node, Point
from duomesh.core.sharding.picture.scene import Box, Group, Line, Part, Text, text_width
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, Kind, State, shard

__all__ = [
    "COLOURS",
    "INK",
    "PAPER",
    "RULE",
    "WIRE",
    "Act",
    "Row",
    "Unit",
    "lane_name",
    "legend",
    "moved_source",
    "movement",
    "op",
    "sink",
    "source",
]

PAPER, INK, MUTED, WIRE, RULE = "#ffffff", "#17212b", "#54616e", "#6b7885", "#d5dbe1"
_OP_FILL, _OP_STROKE, _AXIS_FILL = "#f3f6f9", "#7d8b99", "#dfe5ea"
_MOVE_FILL, _LOCAL_FILL, _LOCAL_STROKE = "#22303d", "#eceff2", "#b4bec8"

# Fill and text by kind: apart in brightness as well as in hue, so that they stay apart without colour vision and in grey.
COLOURS: dict[Kind, tuple[str, str]] = {
    Kind.SHARD: ("#0b4f9c", "#ffffff"),
    Kind.REPLICATED: ("#2fa58f", "#000000"),
    Kind.PARTIAL: ("#fdc23e", "#000000"),
    Kind.INVARIANT: ("#f7f8fa", INK),
}

_SIZE, _SMALL, _TINY = 12.0, 11.0, 10.0
_HEIGHT = 16.0  # of a badge, and of a line of text
_STUB = 7.0  # of line between a box and the label of what leaves it
_DROP = 18.0  # of line between what comes from outside and what moves it
_ALONE, _NARROW, _NARROWEST = 480.0, 230.0, 130.0  # widest rows: of a box alone in its row, beside others, of a label
_BETWEEN_LABELS = 14.0


@dataclass(frozen=True)
class Row:
    """A name with its layout, by mesh axis. is_weight: a parameter of the model."""

    name: str
    layout: tuple[tuple[str, State], ...]
    is_weight: bool = False


@dataclass(frozen=True)
class Act:
    """One line of what ranks do. is_forward: None for a heading. amount: elements of a rank's larger buffer, or nothing."""

    is_forward: bool | None
    content: str
    amount: str = ""


@dataclass(frozen=True)
class Unit:
    """A box with the labels of what leaves it below."""

    group: Group
    box: float
    exits: tuple[Point, ...] = ()

    @property
    def node(self) -> Node:
        return Node(self.group.width, self.group.height, self.box, self.exits)


# Rows of names and badges


def _text(
    content: str, *, size: float = _SIZE, fill: str = INK, is_bold: bool = False, is_italic: bool = False
) -> Group:
    text = Text(0, _HEIGHT - 4, content, size, fill, is_bold=is_bold, is_italic=is_italic)
    return Group((text,), text_width(content, size), _HEIGHT)


def _badges(row: Row) -> list[Group]:
    return [_badge(row.name, axis, state) for axis, state in row.layout]


def _badge(name: str, axis: str, state: State) -> Group:
    """The axis in grey, then the state in its colour."""
    first, second = (text_width(content, _SMALL) + 9 for content in (axis, str(state)))
    fill, ink = COLOURS[state.kind]
    parts: tuple[Part, ...] = (
        Box("axis", 0, 0, first + 6, _HEIGHT, _AXIS_FILL, radius=4),
        Box("badge", first, 0, second, _HEIGHT, fill, _OP_STROKE, radius=4, of=f"{name} {axis} {state}"),
        Text(first / 2, _HEIGHT - 4.5, axis, _SMALL, INK, anchor="middle"),
        Text(first + second / 2, _HEIGHT - 4.5, str(state), _SMALL, ink, anchor="middle", is_bold=True),
    )
    return Group(parts, first + second, _HEIGHT)


def _beside(groups: Iterable[Group], gap: float = 6.0) -> Group:
    parts: list[Part] = []
    x, height = 0.0, 0.0
    for group in groups:
        parts += group.at(x, 0)
        x += group.width + gap
        height = max(height, group.height)
    return Group(tuple(parts), max(0.0, x - gap), height)


def _below(groups: Sequence[Group], gap: float = 3.0, *, is_centred: bool = True) -> Group:
    parts: list[Part] = []
    width, y = max(group.width for group in groups), 0.0
    for group in groups:
        parts += group.at((width - group.width) / 2 if is_centred else 0.0, y)
        y += group.height + gap
    return Group(tuple(parts), width, y - gap)


def _padded(group: Group, x: float, y: float) -> Group:
    return Group(tuple(group.at(x, y)), group.width + 2 * x, group.height + 2 * y)


def _wrapped(groups: Iterable[Group], width: float, gap: float = 6.0) -> list[Group]:
    """Lines of groups, each as full as it can be."""
    lines: list[list[Group]] = []
    for group in groups:
        if not lines or _beside([*lines[-1], group], gap).width > width:
            lines.append([])
        lines[-1].append(group)
    return [_beside(line, gap) for line in lines]


def _named(name: Group, badges: Sequence[Group], limit: float) -> Group:
    """A name and its layout in one line if that is not too wide, else the layout below the name."""
    line = _beside([name, *badges])
    return line if line.width <= limit else _below([name, *_wrapped(badges, limit)])


# Boxes


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
    """An op: its kind and name, operands that are no edges, collectives of its own, and below it its results.

    Args:
        is_alone: whether nothing is beside it, so that rows may be long.
        pitch: the least distance of labels, given by the boxes below them.
    """
    lines = [_beside([_text(kind, is_bold=True), _text(name)], 8)]
    limit = _ALONE if is_alone else _NARROW
    rows = [(_text(row.name, is_italic=not row.is_weight), _badges(row)) for row in operands]
    column = max((title.width for title, _ in rows), default=0.0)
    if all(column + 6 + _beside(badges).width <= limit for _, badges in rows):
        lines += [_beside([replace(title, width=column), *badges]) for title, badges in rows]
    else:
        lines += [_named(title, badges, limit) for title, badges in rows]
    if own:
        lines.append(_acts(own, Box("own", 0, 0, 0, 0, _MOVE_FILL, radius=4), PAPER, pad=8))
    frame = Box("op", 0, 0, 0, 0, _OP_FILL, _OP_STROKE, radius=8, of=f"{kind} {name}")
    return _with_labels(_padded(_below(lines, 4), 10, 6), frame, values, is_alone=is_alone, pitch=pitch)


def movement(
    of: str, acts: Sequence[Act], value: Row, *, is_local: bool, is_alone: bool = True, pitch: float = 0.0
) -> Unit:
    """A reshard: dark and six-sided if ranks talk to each other, forward or backward; else small and grey."""
    if is_local:
        frame = Box("local", 0, 0, 0, 0, _LOCAL_FILL, _LOCAL_STROKE, radius=8, of=of)
        inner = _acts(acts, frame, MUTED, size=_TINY, pad=8)
    else:
        frame = Box("movement", 0, 0, 0, 0, _MOVE_FILL, form="hexagon", of=of)
        inner = _acts(acts, frame, PAPER, pad=16)
    content = Group(inner.parts[1:], inner.width, inner.height)
    return _with_labels(content, frame, [value], is_alone=is_alone, pitch=pitch)


def source(row: Row, *, is_alone: bool = True, pitch: float = 0.0) -> Unit:
    """A pill: what comes from outside."""
    group = _pill("parameter" if row.is_weight else "input", row, "input", _ALONE if is_alone else _NARROW)
    return Unit(group, group.width, ((group.width / 2, group.height),))


def sink(name: str, *, is_alone: bool = True, pitch: float = 0.0) -> Unit:
    """A pill: what goes outside, under its name there."""
    group = _pill("output", Row(name, ()), "output", _ALONE)
    return Unit(group, group.width)


def _pill(word: str, row: Row, role: str, limit: float) -> Group:
    title = _beside([_text(word, size=_SMALL, fill=MUTED), _text(row.name, is_bold=True)])
    inner = _padded(_named(title, _badges(row), limit), 14, 4)
    width = _even(inner.width)
    frame = Box(role, 0, 0, width, inner.height, PAPER, INK, radius=12, of=row.name)
    return Group((frame, *inner.at((width - inner.width) / 2, 0)), width, inner.height)


def moved_source(row: Row, below: Unit) -> Unit:
    """What comes from outside, directly above the only movement that takes it."""
    pill = _pill("parameter" if row.is_weight else "input", row, "input", _NARROW)
    width, height = max(pill.width, below.group.width), below.group.height + pill.height + _DROP
    left, right = (width - pill.width) / 2, (width - below.group.width) / 2
    line = Line(((width / 2, pill.height), (width / 2, pill.height + _DROP)), WIRE, has_arrow=True)
    parts = (line, *pill.at(left, 0), *below.group.at(right, pill.height + _DROP))
    exits = tuple((x + right, y + pill.height + _DROP) for x, y in below.exits)
    return Unit(Group(parts, width, height), below.box, exits)


def _with_labels(content: Group, frame: Box, values: Sequence[Row], *, is_alone: bool, pitch: float) -> Unit:
    """A box, and below it a label for each value that leaves it; several labels stretch the box."""
    limit = (_ALONE if is_alone else _NARROW) if len(values) == 1 else max(_NARROWEST, pitch - 2 * _BETWEEN_LABELS)
    labels = [_label(value, limit) for value in values]
    slots = [max(label.width + _BETWEEN_LABELS, pitch if len(values) > 1 else 0.0) for label in labels]
    box = _even(max(content.width, sum(slots) if len(values) > 1 else 0.0))
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
    inner = _padded(_named(_text(value.name, is_bold=True), _badges(value), limit), 4, 2)
    return Group(
        (Box("value", 0, 0, inner.width, inner.height, PAPER, of=value.name), *inner.parts), inner.width, inner.height
    )


def _even(width: float) -> float:
    return 2.0 * ceil(width / 2)


def _acts(acts: Sequence[Act], frame: Box, ink: str, *, size: float = _SMALL, pad: float) -> Group:
    """The frame, and in it lines of what ranks do, each with a triangle that says in which direction."""
    parts: list[Part] = []
    column = max(text_width(act.content, size) for act in acts)
    amounts = max(text_width(act.amount, size) for act in acts)
    width = 2 * pad + 13 + column + (10 + amounts if amounts else 0)
    for i, act in enumerate(acts):
        y = 4 + i * (size + 5)
        base = y + 0.8 * size + 1
        if act.is_forward is not None:
            parts.append(Box("direction", pad, y + 3, 8, 7, ink, form="down" if act.is_forward else "up"))
        parts.append(Text(pad + 13, base, act.content, size, ink))
        if act.amount:
            parts.append(Text(width - pad - text_width(act.amount, size), base, act.amount, size, ink))
    height = len(acts) * (size + 5) + 6
    return Group((replace(frame, width=width, height=height), *parts), width, height)


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

    def words(content: str) -> Group:
        return _text(content, size=_SMALL, fill=MUTED)

    def stroke(thickness: float, *, is_dashed: bool = False) -> Group:
        line = Line(((0, _HEIGHT / 2), (26, _HEIGHT / 2)), WIRE, thickness, is_dashed=is_dashed)
        return Group((line,), 26, _HEIGHT)

    def key(frame: Box, content: str, ink: str, *, is_forward: bool = True) -> Group:
        group = _acts([Act(is_forward, content)], frame, ink, size=_TINY, pad=12)
        return Group(tuple(group.at(0, (_HEIGHT - group.height) / 2)), group.width, _HEIGHT)

    states = [
        (shard("dim"), "a slice"),
        (PARTIAL, "a summand"),
        (REPLICATED, "equal, used differently"),
        (INVARIANT, "equal, used equally"),
    ]
    first = [_beside([_badge("key", "axis", state), words(meaning)]) for state, meaning in states]
    move = Box("key", 0, 0, 0, 0, _MOVE_FILL, form="hexagon")
    second = [
        _beside([key(move, "forward", PAPER), key(move, "backward", PAPER, is_forward=False), words("communication")]),
        _beside([key(Box("key", 0, 0, 0, 0, _LOCAL_FILL, _LOCAL_STROKE, radius=8), "local", MUTED), words("none")]),
        _beside([stroke(3.5), words("residual stream")]),
        _beside([stroke(1.5, is_dashed=True), words("no gradient")]),
    ]
    if has_amounts:
        second.append(words("numbers: elements of a rank's larger buffer"))
    return _below([*_wrapped(first, width, 18), *_wrapped(second, width, 18)], 8, is_centred=False)
