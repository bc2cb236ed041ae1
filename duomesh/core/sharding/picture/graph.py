"""What is placed: boxes, the values between them, and the arrangement that comes out.

Coordinates are pixels, x to the right and y down.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Arrangement", "Lane", "Node", "Path", "Point", "Wire"]

Point = tuple[float, float]


@dataclass(frozen=True)
class Node:
    """A box with what hangs below it, the box in the middle.

    box: the width of the box itself. exits: where each of its values leaves, from the upper left corner. Widths are
    even numbers of pixels and exits are at whole ones, so that lines that should be straight are.
    """

    width: float
    height: float
    box: float
    exits: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Wire:
    """A value on its way from one node to all that use it.

    exit: which of the node's exits it leaves by. is_stream: whether it passes rows at their left end.
    """

    source: int
    exit: int
    targets: tuple[int, ...]
    is_stream: bool = False


@dataclass(frozen=True)
class Path:
    """The line of a wire to one target, from the exit to the target's upper edge."""

    wire: int
    target: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Lane:
    """Where a wire passes a row of boxes, straight down."""

    wire: int
    x: float
    top: float
    bottom: float


@dataclass(frozen=True)
class Arrangement:
    """places: upper left corners of the nodes. All coordinates lie within [0, width] and [0, height]."""

    places: tuple[Point, ...]
    paths: tuple[Path, ...]
    lanes: tuple[Lane, ...]
    width: float
    height: float
