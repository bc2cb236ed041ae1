"""The left edge of every box and lane: straight lines where there is room for them, in the least width.

Items are tied to each other one pair after another, each pair at the distance at which its wire runs straight, or a
fork or a join is symmetric. A tie holds if the row-wise order of all items can still be kept and the picture does not
get wider. Items that are tied make a *chain*, which moves as one; chains then move towards what they are linked with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from duomesh.core.sharding.picture.graph import Node, Wire
from duomesh.core.sharding.picture.order import Link, Rows

__all__ = ["LANE_WIDTH", "Columns"]

LANE_WIDTH = 22.0
_BETWEEN_NODES, _BESIDE_LANE = 24.0, 4.0
_SWEEPS = 16


class Columns:
    """After construction, `left` holds the left edge of each item, the least of them 0."""

    def __init__(self, rows: Rows, nodes: Sequence[Node], wires: Sequence[Wire]) -> None:
        self._rows, self._nodes, self._wires = rows, nodes, wires
        count = len(nodes) + len(rows.lanes)
        self._chain = list(range(count))
        self._offset = [0.0] * count
        self._neighbours = [(a, b, self._distance(a, b)) for row in rows.items for a, b in pairwise(row)]
        for upper, lower, offset in self._lane_ties():
            self._tie(upper, lower, offset, limit=None)
        limit = self._extent(self._pack())
        for gap in range(len(rows.links)):
            for upper, lower, offset in self._ties(gap):
                self._tie(upper, lower, offset, limit=limit)
        self.left = self._settle()

    def width(self, item: int) -> float:
        return LANE_WIDTH if item in self._rows.lanes else self._nodes[item].width

    def port(self, link: Link) -> float:
        """Where a link leaves its upper item, from that item's left edge."""
        if link.upper in self._rows.lanes:
            return LANE_WIDTH / 2
        return self._nodes[link.upper].exits[link.exit][0]

    def _distance(self, left: int, right: int) -> float:
        is_lane = left in self._rows.lanes or right in self._rows.lanes
        return self.width(left) + (_BESIDE_LANE if is_lane else _BETWEEN_NODES)

    # Ties

    def _lane_ties(self) -> Iterator[tuple[int, int, float]]:
        lanes = self._rows.lanes
        for links in self._rows.links:
            yield from ((k.upper, k.lower, 0.0) for k in links if k.upper in lanes and k.lower in lanes)

    def _ties(self, gap: int) -> Iterator[tuple[int, int, float]]:
        """Pairs of a gap in order of importance, with the distance between their left edges."""
        links, lanes = self._rows.links[gap], self._rows.lanes
        boxes = [k for k in links if k.lower not in lanes]
        for lower in dict.fromkeys(k.lower for k in boxes):
            into = [k for k in boxes if k.lower == lower and not self._is_aside(k)]
            if len({k.upper for k in into}) == 1:
                ports = [self.port(k) for k in into]
                yield into[0].upper, lower, sum(ports) / len(ports) - self.width(lower) / 2 + self._fork(gap, into[0])
        for lower in dict.fromkeys(k.lower for k in boxes):
            into = [k for k in boxes if k.lower == lower and not self._is_aside(k)]
            if len({self._chain[k.upper] for k in into}) == 1:
                ports = [self._offset[k.upper] + self.port(k) for k in into]
                middle = (min(ports) + max(ports)) / 2 - self._offset[into[0].upper]
                yield into[0].upper, lower, middle - self.width(lower) / 2
            elif into:  # straight below the largest of several chains
                main = max(into, key=lambda k: self._chain.count(self._chain[k.upper]))
                yield main.upper, lower, self.port(main) - self.width(lower) / 2
        for k in links:
            if k.lower in lanes:
                yield k.upper, k.lower, self.port(k) - LANE_WIDTH / 2

    def _is_aside(self, link: Link) -> bool:
        return link.upper in self._rows.lanes and self._wires[link.wire].is_stream

    def _fork(self, gap: int, link: Link) -> float:
        """How far from below the exit a box's middle is if the boxes that share the exit lie symmetrically."""
        sharing = [k.lower for k in self._rows.links[gap] if (k.upper, k.exit) == (link.upper, link.exit)]
        boxes = [item for item in self._rows.items[gap + 1] if item in sharing and item not in self._rows.lanes]
        middles, left = [], 0.0
        for item in boxes:
            middles.append(left + self.width(item) / 2)
            left += self.width(item) + _BETWEEN_NODES
        return middles[boxes.index(link.lower)] - (middles[0] + middles[-1]) / 2

    def _tie(self, upper: int, lower: int, offset: float, *, limit: float | None) -> None:
        """Joins two chains, unless the order cannot be kept or the picture gets wider than the limit."""
        old, new = self._chain[lower], self._chain[upper]
        if old == new:
            return
        shift = self._offset[upper] + round(offset) - self._offset[lower]  # whole pixels: equal means equal
        members = [item for item, chain in enumerate(self._chain) if chain == old]
        for item in members:
            self._chain[item], self._offset[item] = new, self._offset[item] + shift
        packed = self._pack()
        if packed is None or (limit is not None and self._extent(packed) > limit):
            for item in members:
                self._chain[item], self._offset[item] = old, self._offset[item] - shift

    # Positions

    def _pack(self) -> list[float] | None:
        """Everything as far left as it can be: by chain, the position of its offset 0. None if there is no way."""
        at = [
            -min((self._offset[i] for i, c in enumerate(self._chain) if c == chain), default=0.0)
            for chain in range(len(self._chain))
        ]
        for _ in range(len(at) + 1):
            is_settled = True
            for a, b, distance in self._neighbours:
                least = at[self._chain[a]] + self._offset[a] + distance - self._offset[b]
                if at[self._chain[b]] < least:
                    at[self._chain[b]], is_settled = least, False
            if is_settled:
                return at
        return None

    def _extent(self, at: list[float] | None) -> float:
        assert at is not None, "lanes alone can always be kept in order"
        return max(at[c] + self._offset[i] + self.width(i) for i, c in enumerate(self._chain))

    def _settle(self) -> list[float]:
        """Moves chains towards what they are linked with, within the room that their neighbours leave."""
        at = self._pack()
        total = self._extent(at)
        assert at is not None
        chains = sorted(set(self._chain), key=lambda c: at[c])
        for sweep in range(_SWEEPS):
            for chain in reversed(chains) if sweep % 2 == 0 else chains:
                wanted = self._wanted(chain, at)
                if wanted is not None:
                    low, high = self._room(chain, at, total)
                    at[chain] = min(max(wanted, low), high)
        left = [at[c] + self._offset[i] for i, c in enumerate(self._chain)]
        return [x - min(left) for x in left]

    def _wanted(self, chain: int, at: list[float]) -> float | None:
        moves: list[float] = []
        for links in self._rows.links:
            for k in links:
                ends = self._chain[k.upper], self._chain[k.lower]
                if ends[0] == ends[1] or chain not in ends or self._is_aside(k):
                    continue
                start = at[ends[0]] + self._offset[k.upper] + self.port(k)
                end = at[ends[1]] + self._offset[k.lower] + self.width(k.lower) / 2
                moves.append(end - start if ends[0] == chain else start - end)
        return at[chain] + round(sum(moves) / len(moves)) if moves else None

    def _room(self, chain: int, at: list[float], total: float) -> tuple[float, float]:
        mine = [i for i, c in enumerate(self._chain) if c == chain]
        low = max(-self._offset[i] for i in mine)
        high = min(total - self.width(i) - self._offset[i] for i in mine)
        for a, b, distance in self._neighbours:
            if self._chain[b] == chain != self._chain[a]:
                low = max(low, at[self._chain[a]] + self._offset[a] + distance - self._offset[b])
            if self._chain[a] == chain != self._chain[b]:
                high = min(high, at[self._chain[b]] + self._offset[b] - distance - self._offset[a])
        return low, high
