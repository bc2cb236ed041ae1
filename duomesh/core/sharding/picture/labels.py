"""Texts and badges, and groups of them beside and below each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from duomesh.core.sharding.picture.scene import Box, Group, Part, Text, text_width
from duomesh.core.sharding.transitions import Kind, State

__all__ = [
    "COLOURS",
    "HEIGHT",
    "INK",
    "MUTED",
    "OUTLINE",
    "PAPER",
    "SIZE",
    "SMALL",
    "Row",
    "badge",
    "badges",
    "below",
    "beside",
    "name_and_badges",
    "padded",
    "text",
    "wrapped",
]

PAPER, INK, MUTED, OUTLINE = "#ffffff", "#17212b", "#54616e", "#7d8b99"
_AXIS = "#dfe5ea"

# Fill and text by kind, apart in brightness as well as in hue: without colour vision and in grey they stay apart.
COLOURS: dict[Kind, tuple[str, str]] = {
    Kind.SHARD: ("#0b4f9c", "#ffffff"),
    Kind.REPLICATED: ("#2fa58f", "#000000"),
    Kind.PARTIAL: ("#fdc23e", "#000000"),
    Kind.INVARIANT: ("#f7f8fa", INK),
}

SIZE, SMALL = 12.0, 11.0
HEIGHT = 16.0  # of a badge, and of a line of text


@dataclass(frozen=True)
class Row:
    """A name with its layout, by mesh axis. is_weight: a parameter of the model."""

    name: str
    layout: tuple[tuple[str, State], ...] = ()
    is_weight: bool = False


def text(content: str, *, size: float = SIZE, fill: str = INK, is_bold: bool = False, is_italic: bool = False) -> Group:
    line = Text(0, HEIGHT - 4, content, size, fill, is_bold=is_bold, is_italic=is_italic)
    return Group((line,), text_width(content, size), HEIGHT)


def badges(row: Row) -> list[Group]:
    """The layout of a name, a badge for each axis."""
    return [badge(row.name, axis, state) for axis, state in row.layout]


def badge(name: str, axis: str, state: State) -> Group:
    """The axis in grey, then the state in its colour."""
    first, second = (text_width(content, SMALL) + 9 for content in (axis, str(state)))
    fill, ink = COLOURS[state.kind]
    base = HEIGHT - 4.5
    parts: tuple[Part, ...] = (
        Box("axis", 0, 0, first + 6, HEIGHT, _AXIS, radius=4),
        Box("badge", first, 0, second, HEIGHT, fill, OUTLINE, radius=4, of=f"{name} {axis} {state}"),
        Text(first / 2, base, axis, SMALL, INK, anchor="middle"),
        Text(first + second / 2, base, str(state), SMALL, ink, anchor="middle", is_bold=True),
    )
    return Group(parts, first + second, HEIGHT)


def beside(groups: Iterable[Group], gap: float = 6.0) -> Group:
    parts: list[Part] = []
    x, height = 0.0, 0.0
    for group in groups:
        parts += group.at(x, 0)
        x += group.width + gap
        height = max(height, group.height)
    return Group(tuple(parts), max(0.0, x - gap), height)


def below(groups: Sequence[Group], gap: float = 3.0, *, is_centred: bool = True) -> Group:
    parts: list[Part] = []
    width, y = max(group.width for group in groups), 0.0
    for group in groups:
        parts += group.at((width - group.width) / 2 if is_centred else 0.0, y)
        y += group.height + gap
    return Group(tuple(parts), width, y - gap)


def padded(group: Group, x: float, y: float) -> Group:
    return Group(tuple(group.at(x, y)), group.width + 2 * x, group.height + 2 * y)


def wrapped(groups: Iterable[Group], width: float, gap: float = 6.0) -> list[Group]:
    """Lines of groups, each as full as it can be."""
    lines: list[list[Group]] = []
    for group in groups:
        if not lines or beside([*lines[-1], group], gap).width > width:
            lines.append([])
        lines[-1].append(group)
    return [beside(line, gap) for line in lines]


def name_and_badges(name: Group, layout: Sequence[Group], limit: float) -> Group:
    """A name and its layout in one line if that is not too wide, else the layout below the name."""
    line = beside([name, *layout])
    return line if line.width <= limit else below([name, *wrapped(layout, limit)])
