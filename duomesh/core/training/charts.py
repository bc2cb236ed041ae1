"""Line charts as inline SVG: no script, no network, colours from the page's style sheet.

A chart is a string of SVG. Coordinates are those of its viewBox; the page scales it to its column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Chart", "Point", "Series", "moving_mean", "number"]

Point = tuple[float, float | None]  # None breaks the line

_TOP, _BOTTOM, _LEFT = 26.0, 30.0, 48.0
_NAME_ROW, _NAME_CHARACTER = 15.0, 7.4  # height and width of a region's name, about
_MAX_POINTS = 1500  # more are thinned to the lowest and highest of each stretch


@dataclass(frozen=True)
class Series:
    """A line. css: class that colours it. label: written at its end with the last value; "" for none."""

    css: str
    points: Sequence[Point]
    label: str = ""
    has_dots: bool = False


@dataclass(frozen=True)
class Chart:
    """What to draw.

    regions: (first x, name) of stretches along x, such as backends; parted by a line and named at the top, in a row
        below where names would overlap.
    ticks: x positions marked on the axis, such as skipped steps.
    """

    series: Sequence[Series]
    width: int
    height: int
    title: str
    regions: Sequence[tuple[float, str]] = ()
    ticks: Sequence[float] = ()
    right: int = 16
    has_zero: bool = False

    def svg(self) -> str:
        found = [(x, y) for series in self.series for x, y in series.points if y is not None]
        if not found:
            return f'<p class="empty">no values for {escape(self.title)}</p>'
        x_low, x_high = min(x for x, _ in found), max(x for x, _ in found)
        y_ticks = _nice_ticks(0 if self.has_zero else min(y for _, y in found), max(y for _, y in found), 5)
        x_of = _scale(x_low, x_high, _LEFT, self.width - self.right)
        names = self._names(x_of)
        rows = 1 + max((row for _, row, _ in names), default=0)
        y_of = _scale(y_ticks[0], y_ticks[-1], self.height - _BOTTOM, _TOP + (rows - 1) * _NAME_ROW)
        parts = [*self._axes(x_low, x_high, y_ticks, x_of, y_of), *self._regions(x_of, names)]
        for series in self.series:
            parts += _line(series, x_of, y_of)
        parts += self._end_labels(x_of, y_of)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}">'
            + "".join(parts)
            + "</svg>"
        )

    def _axes(self, x_low: float, x_high: float, y_ticks: list[float], x_of: _Scale, y_of: _Scale) -> list[str]:
        left, right, bottom = _LEFT, self.width - self.right, self.height - _BOTTOM
        parts = []
        for tick in y_ticks:
            y = y_of(tick)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{left - 8}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>')
        steps = [t for t in _nice_ticks(x_low, x_high, max(2, int(right - left) // 110)) if x_low <= t <= x_high]
        for tick in steps:
            if tick == int(tick):
                x = x_of(tick)
                parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
                text = f"{int(tick):,}"
                parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{text}</text>')
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        parts += [
            f'<line class="skip" x1="{x_of(x):.1f}" x2="{x_of(x):.1f}" y1="{bottom - 7}" y2="{bottom}"/>'
            for x in self.ticks
        ]
        return parts

    def _names(self, x_of: _Scale) -> list[tuple[float, int, str]]:
        """(x, row, name) of each region; a name goes to the first row in which it has room."""
        out: list[tuple[float, int, str]] = []
        ends: list[float] = []
        for i, (first, name) in enumerate(self.regions):
            length = len(name) * _NAME_CHARACTER
            x = max(_LEFT, min(x_of(first) + (6 if i else 0), self.width - length))
            row = next((row for row, end in enumerate(ends) if end < x), len(ends))
            ends[row : row + 1] = [x + length + 2 * _NAME_CHARACTER]
            out.append((x, row, name))
        return [entry for entry in out if entry[2]]

    def _regions(self, x_of: _Scale, names: Sequence[tuple[float, int, str]]) -> list[str]:
        top, bottom = _TOP - 14, self.height - _BOTTOM
        places = [max(x_of(first), _LEFT) for first, _ in self.regions[1:]]
        return [
            *(f'<line class="switch" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>' for x in places),
            *(
                f'<text class="region" x="{x:.1f}" y="{_TOP - 8 + row * _NAME_ROW:.1f}">{escape(name)}</text>'
                for x, row, name in names
            ),
        ]

    def _end_labels(self, x_of: _Scale, y_of: _Scale) -> list[str]:
        """The last value of each labelled series, moved apart where they would overlap."""
        ends = []
        for series in self.series:
            known = [(x, y) for x, y in series.points if y is not None]
            if series.label and known:
                ends.append((y_of(known[-1][1]), f"{series.label} {known[-1][1]:.4g}", series.css))
        parts, last = [], -math.inf
        for y, text, css in sorted(ends):
            last = max(y, last + 16)
            parts.append(
                f'<text class="end {css}" x="{self.width - self.right + 8}" y="{last + 4:.1f}">{escape(text)}</text>'
            )
        return parts


_Scale = Callable[[float], float]


def _scale(low: float, high: float, start: float, stop: float) -> _Scale:
    span = high - low
    return lambda value: (start + stop) / 2 if span == 0 else start + (value - low) / span * (stop - start)


def _nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten that enclose [low, high]."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad if low else 0.0, high + pad
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _line(series: Series, x_of: _Scale, y_of: _Scale) -> list[str]:
    commands, pen_down = [], False
    for x, y in _thin(series.points):
        if y is not None:
            commands.append(f"{'L' if pen_down else 'M'}{x_of(x):.1f} {y_of(y):.1f}")
        pen_down = y is not None
    parts = [f'<path class="line {series.css}" d="{"".join(commands)}"/>']
    if series.has_dots or len(commands) == 1:
        parts += [
            f'<circle class="dot {series.css}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3"/>'
            for x, y in series.points
            if y is not None
        ]
    return parts


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    """At most `_MAX_POINTS`, keeping every stretch's extremes so that no spike is hidden."""
    if len(points) <= _MAX_POINTS:
        return points
    size = -(-2 * len(points) // _MAX_POINTS)
    out: list[Point] = []
    for i in range(0, len(points), size):
        known = [p for p in points[i : i + size] if p[1] is not None]
        if not known:
            out.append(points[i])
            continue
        ends = (min(known, key=lambda p: p[1] or 0.0), max(known, key=lambda p: p[1] or 0.0))
        out += sorted(set(ends))
    return out


def moving_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Each value's mean with its neighbours within `window // 2` places; fewer at the ends, so nothing lags."""
    sums, counts = [0.0], [0]
    for _, y in points:
        sums.append(sums[-1] + (y or 0.0))
        counts.append(counts[-1] + (y is not None))
    out: list[Point] = []
    for i, (x, y) in enumerate(points):
        half = min(window // 2, i, len(points) - 1 - i)
        low, high = i - half, i + half + 1
        out.append((x, None if y is None else (sums[high] - sums[low]) / (counts[high] - counts[low])))
    return out


def number(value: float) -> str:
    """Short: 0, 0.25, 1,500, 12k, 3.4M, 3e-4."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    if size < 1e-3:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(exponent)}"
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
