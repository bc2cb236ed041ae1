"""A drawing as data, boxes, texts and lines, and its SVG.

All text is in the generic monospace font, so that its width is known without a font: characters of common ones are
0.55 to 0.62 of the size wide, and up to 0.64 where they are rounded to whole pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal
from unicodedata import east_asian_width
from xml.sax.saxutils import escape

__all__ = ["CHARACTER", "Box", "Form", "Group", "Line", "Part", "Scene", "Text", "text_width"]

CHARACTER = 0.64  # width over size
Form = Literal["rectangle", "hexagon", "down", "up"]


def text_width(content: str, size: float) -> float:
    """An upper bound in pixels."""
    cells = sum(2 if east_asian_width(character) in "WF" else 1 for character in content)
    return cells * size * CHARACTER


@dataclass(frozen=True)
class Box:
    """A filled shape. role: what it stands for; of: the name of that, shown when a pointer rests on it."""

    role: str
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = "none"
    radius: float = 0.0
    form: Form = "rectangle"
    of: str = ""

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom."""
        return self.x, self.y, self.x + self.width, self.y + self.height

    def moved(self, dx: float, dy: float) -> Box:
        return replace(self, x=self.x + dx, y=self.y + dy)

    def svg(self) -> str:
        paint = f'fill="{self.fill}" stroke="{self.stroke}"'
        if self.form == "rectangle":
            body = f'<rect x="{_n(self.x)}" y="{_n(self.y)}" width="{_n(self.width)}" height="{_n(self.height)}"'
            body += f' rx="{_n(self.radius)}" {paint}'
        else:
            body = f'<polygon points="{" ".join(f"{_n(x)},{_n(y)}" for x, y in self._corners())}" {paint}'
            body += ' stroke-linejoin="round"'
        return f"{body}><title>{escape(self.of)}</title></{body[1:].split()[0]}>" if self.of else f"{body}/>"

    def _corners(self) -> tuple[tuple[float, float], ...]:
        left, top, right, bottom = self.extent
        middle, centre = (top + bottom) / 2, (left + right) / 2
        if self.form == "hexagon":
            inset = min(10.0, self.height / 2)
            upper, lower = (left + inset, top), (left + inset, bottom)
            return upper, (right - inset, top), (right, middle), (right - inset, bottom), lower, (left, middle)
        if self.form == "down":
            return (left, top), (right, top), (centre, bottom)
        return (left, bottom), (right, bottom), (centre, top)


@dataclass(frozen=True)
class Text:
    """One line of text. x, y: the start of its base line, or its middle. is_turned: runs downwards."""

    x: float
    y: float
    content: str
    size: float
    fill: str
    anchor: Literal["start", "middle"] = "start"
    is_bold: bool = False
    is_italic: bool = False
    is_turned: bool = False

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom; letters rise at most 0.8 of the size above the base line and fall 0.25 below."""
        length = text_width(self.content, self.size)
        start = -length / 2 if self.anchor == "middle" else 0.0
        if self.is_turned:
            return self.x - 0.25 * self.size, self.y + start, self.x + 0.8 * self.size, self.y + start + length
        return self.x + start, self.y - 0.8 * self.size, self.x + start + length, self.y + 0.25 * self.size

    def moved(self, dx: float, dy: float) -> Text:
        return replace(self, x=self.x + dx, y=self.y + dy)

    def svg(self) -> str:
        style = ' font-weight="bold"' * self.is_bold + ' font-style="italic"' * self.is_italic
        style += ' text-anchor="middle"' * (self.anchor == "middle")
        style += f' transform="rotate(90 {_n(self.x)} {_n(self.y)})"' * self.is_turned
        place = f'x="{_n(self.x)}" y="{_n(self.y)}" font-size="{_n(self.size)}" fill="{self.fill}"'
        return f"<text {place}{style}>{escape(self.content)}</text>"


@dataclass(frozen=True)
class Line:
    """A line through points, with rounded corners. of: the name of what runs along it."""

    points: tuple[tuple[float, float], ...]
    stroke: str
    width: float = 1.5
    has_arrow: bool = False
    is_dashed: bool = False
    of: str = ""

    def moved(self, dx: float, dy: float) -> Line:
        return replace(self, points=tuple((x + dx, y + dy) for x, y in self.points))

    def svg(self) -> str:
        points = list(self.points)
        head = ""
        if self.has_arrow:  # the line ends where the head begins
            x, y = points[-1]
            points[-1] = (x, y - 6)
            head = f'<path d="M{_n(x - 4)} {_n(y - 7)}h8l-4 7z" fill="{self.stroke}"/>'
        dashes = ' stroke-dasharray="5 4"' if self.is_dashed else ""
        path = (
            f'<path d="{_rounded(points)}" fill="none" stroke="{self.stroke}" stroke-width="{_n(self.width)}"{dashes}/>'
        )
        return path + head


Part = Box | Text | Line


def _rounded(points: list[tuple[float, float]]) -> str:
    """Path data; each corner is a curve from shortly before it to shortly after it."""
    out = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for before, at, after in zip(points, points[1:], points[2:], strict=False):
        radius = min(7.0, *(max(abs(at[0] - end[0]), abs(at[1] - end[1])) / 2 for end in (before, after)))
        (x0, y0), (x1, y1) = _towards(at, before, radius), _towards(at, after, radius)
        out.append(f"L{_n(x0)} {_n(y0)}Q{_n(at[0])} {_n(at[1])} {_n(x1)} {_n(y1)}")
    return "".join([*out, f"L{_n(points[-1][0])} {_n(points[-1][1])}"])


def _towards(point: tuple[float, float], end: tuple[float, float], length: float) -> tuple[float, float]:
    whole = max(abs(end[0] - point[0]), abs(end[1] - point[1]))
    return point[0] + (end[0] - point[0]) * length / whole, point[1] + (end[1] - point[1]) * length / whole


def _n(number: float) -> str:
    """At most two digits behind the point, so that the text does not depend on rounding."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Group:
    """Parts that stay together, within [0, width] and [0, height]."""

    parts: tuple[Part, ...]
    width: float
    height: float

    def at(self, x: float, y: float) -> Iterator[Part]:
        return (part.moved(x, y) for part in self.parts)


@dataclass(frozen=True)
class Scene:
    """A drawing: parts in the order in which they are painted."""

    title: str
    width: float
    height: float
    background: str
    parts: tuple[Part, ...]

    def boxes(self, *roles: str) -> list[Box]:
        return [part for part in self.parts if isinstance(part, Box) and part.role in roles]

    def texts(self) -> list[Text]:
        return [part for part in self.parts if isinstance(part, Text)]

    def lines(self) -> list[Line]:
        return [part for part in self.parts if isinstance(part, Line)]

    def svg(self) -> str:
        """A document of its own: no script, no style sheet, no font from elsewhere."""
        width, height = _n(self.width), _n(self.height)
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="monospace">'
        ground = f'<rect width="{width}" height="{height}" rx="10" fill="{self.background}"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", ground, *_svgs(self.parts), "</svg>"]) + "\n"


def _svgs(parts: Iterable[Part]) -> Iterator[str]:
    return (part.svg() for part in parts)
