"""From boxes and the values between them to coordinates: rows, columns, and the tracks of lines between rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from duomesh.core.sharding.picture.columns import LANE_WIDTH, Columns
from duomesh.core.sharding.picture.graph import Arrangement, Lane, Node, Path, Point, Wire
from duomesh.core.sharding.picture.order import Link, Rows

__all__ = ["place"]

_TRACK, _ABOVE_TRACKS, _BELOW_TRACKS = 9.0, 9.0, 17.0
_CORNER, _APART = 18.0, 20.0  # entries stay away from the corners of a box, and from each other


def place(rows: Rows, nodes: Sequence[Node], wires: Sequence[Wire]) -> Arrangement:
    """Coordinates of nodes and wires that have their rows."""
    return _Router(rows, nodes, wires).arrangement()


@dataclass(frozen=True)
class _Turn:
    """A wire that runs sideways in a gap: from x = start to each of x = ends."""

    wire: int
    start: float
    ends: tuple[float, ...]

    @property
    def span(self) -> tuple[float, float]:
        return min(self.start, *self.ends), max(self.start, *self.ends)

    def covers(self, x: float) -> bool:
        return self.span[0] <= x <= self.span[1]

    def meets(self, other: _Turn) -> bool:
        return self.span[0] <= other.span[1] and other.span[0] <= self.span[1]

    def cost_above(self, other: _Turn) -> int:
        """Crossings if this one runs above the other; lines on top of each other count more."""
        crossed = self.covers(other.start) + sum(other.covers(x) for x in self.ends)
        return crossed + 4 * sum(x == other.start for x in self.ends)


def _inserted(turns: list[_Turn], new: _Turn) -> list[_Turn]:
    """Turns from above with one more among them, where it costs least."""
    costs = [
        sum(turn.cost_above(new) for turn in turns[:at]) + sum(new.cost_above(turn) for turn in turns[at:])
        for at in range(len(turns) + 1)
    ]
    at = costs.index(min(costs))
    return [*turns[:at], new, *turns[at:]]


class _Router:
    def __init__(self, rows: Rows, nodes: Sequence[Node], wires: Sequence[Wire]) -> None:
        self._rows, self._nodes, self._wires = rows, nodes, wires
        self._columns = Columns(rows, nodes, wires)
        self._left = self._columns.left
        self._entries = dict(self._all_entries())
        self._tracks = [self._gap_tracks(gap) for gap in range(len(rows.links))]
        self._tops, self._bottoms = self._heights()

    def arrangement(self) -> Arrangement:
        top_of = {item: self._tops[row] for row, items in enumerate(self._rows.items) for item in items}
        places = tuple((self._left[node], top_of[node]) for node in range(len(self._nodes)))
        lanes = tuple(
            Lane(self._rows.lanes[item], self._left[item] + LANE_WIDTH / 2, self._tops[row], self._bottoms[row])
            for row, items in enumerate(self._rows.items)
            for item in items
            if item in self._rows.lanes
        )
        width = max(self._left[i] + self._columns.width(i) for row in self._rows.items for i in row)
        return Arrangement(places, tuple(self._paths()), lanes, width, self._bottoms[-1])

    # Entries

    def _start(self, link: Link) -> float:
        return self._left[link.upper] + self._columns.port(link)

    def _all_entries(self) -> Iterator[tuple[Link, float]]:
        """Where each link enters its lower item: straight below its start if that is above the box."""
        into: dict[int, list[Link]] = {}
        for link in (k for links in self._rows.links for k in links):
            into.setdefault(link.lower, []).append(link)
        for lower, links in into.items():
            middle = self._left[lower] + self._columns.width(lower) / 2
            reach = 0.0 if lower in self._rows.lanes else self._nodes[lower].box / 2 - _CORNER
            low, high = middle - reach, middle + reach
            apart = min(_APART, 2 * reach // max(1, len(links) - 1))
            starts = sorted((self._start(k), i) for i, k in enumerate(links))
            if lower in self._rows.lanes or (len(links) == 1 and not low <= starts[0][0] <= high):
                yield links[0], middle
                continue
            at = [min(max(x, low), high) for x, _ in starts]
            for i in range(1, len(at)):
                at[i] = max(at[i], at[i - 1] + apart)
            at[-1] = min(at[-1], high)
            for i in reversed(range(len(at) - 1)):
                at[i] = min(at[i], at[i + 1] - apart)
            yield from ((links[i], x) for (_, i), x in zip(starts, at, strict=True))

    # Tracks

    def _gap_tracks(self, gap: int) -> dict[int, int]:
        """The track of each wire that turns in a gap, counted from above."""
        by_wire: dict[int, list[Link]] = {}
        for link in self._rows.links[gap]:
            by_wire.setdefault(link.wire, []).append(link)
        turns: list[_Turn] = []
        for wire, links in by_wire.items():
            turn = _Turn(wire, self._start(links[0]), tuple(self._entries[k] for k in links))
            turns += [turn] if any(x != turn.start for x in turn.ends) else []
        ordered: list[_Turn] = []
        for turn in (*turns, *turns):  # once more, now that the others have their places
            ordered = _inserted([other for other in ordered if other != turn], turn)
        tracks: dict[int, int] = {}
        for i, turn in enumerate(ordered):
            tracks[turn.wire] = max((tracks[t.wire] + 1 for t in ordered[:i] if t.meets(turn)), default=0)
        return tracks

    def _heights(self) -> tuple[list[float], list[float]]:
        """The top and the bottom of every row."""
        tops, bottoms, y = [], [], 0.0
        for row, items in enumerate(self._rows.items):
            tops.append(y)
            bottoms.append(y + max((self._nodes[i].height for i in items if i not in self._rows.lanes), default=0.0))
            count = max(self._tracks[row].values(), default=0)
            y = bottoms[-1] + _ABOVE_TRACKS + count * _TRACK + _BELOW_TRACKS
        return tops, bottoms

    # Paths

    def _paths(self) -> Iterator[Path]:
        into = {(k.wire, k.lower): (gap, k) for gap, links in enumerate(self._rows.links) for k in links}
        for number, wire in enumerate(self._wires):
            for target in wire.targets:
                chain = [into[number, target]]
                while chain[0][1].upper in self._rows.lanes:
                    chain.insert(0, into[number, chain[0][1].upper])
                yield Path(number, target, tuple(_straightened(self._points(number, chain))))

    def _points(self, number: int, chain: list[tuple[int, Link]]) -> Iterator[Point]:
        first_gap, first = chain[0]
        below = self._tops[first_gap] + self._nodes[first.upper].exits[first.exit][1]
        yield self._start(first), below
        for gap, link in chain:
            start, end = self._start(link), self._entries[link]
            if start != end:
                y = self._bottoms[gap] + _ABOVE_TRACKS + self._tracks[gap][number] * _TRACK
                yield start, y
                yield end, y
        yield end, self._tops[gap + 1]


def _straightened(points: Iterator[Point]) -> Iterator[Point]:
    """Without points between two others on one line."""
    kept: list[Point] = []
    for point in points:
        if len(kept) > 1 and any(kept[-2][i] == kept[-1][i] == point[i] for i in (0, 1)):
            kept.pop()
        kept.append(point)
    yield from kept
