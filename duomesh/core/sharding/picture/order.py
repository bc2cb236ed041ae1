"""Which row every box is in, and the order of boxes within a row.

A wire that passes rows has an item of its own in each of them, a *lane*, so that it has a place beside the boxes. Items
of a row are ordered so that few wires cross: row after row is sorted by the mean place of what it is linked with, down
and up a few times (Sugiyama, Tagawa and Toda 1981). Everything is deterministic.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

from duomesh.core.sharding.picture.graph import Wire

__all__ = ["Link", "Rows", "arrange_rows"]

_SWEEPS = 8


@dataclass(frozen=True)
class Link:
    """A wire from an item of one row to an item of the next. exit: which of the upper item's values it is."""

    upper: int
    exit: int
    lower: int
    wire: int


@dataclass(frozen=True)
class Rows:
    """Items by row, from left to right; nodes have their own numbers, lanes come after them.

    links: by gap, gap i being below row i; none below the last. lanes: the wire of every lane.
    """

    items: tuple[tuple[int, ...], ...]
    links: tuple[tuple[Link, ...], ...]
    lanes: dict[int, int]


def arrange_rows(num_nodes: int, wires: Sequence[Wire], late: Collection[int]) -> list[Rows]:
    """Rows from top to bottom; every wire leads down.

    Args:
        wires: each leads from a node to later ones. The main column ends in the last node.
        late: nodes that are as low as they can be where no wire gets longer from it; others are as high.

    Returns:
        The best that were found: the same rows, in different orders.
    """
    row_of = _rows(num_nodes, wires, late)
    items: list[list[int]] = [[] for _ in range(max(row_of) + 1)]
    for node, row in enumerate(row_of):
        items[row].append(node)
    links: list[list[Link]] = [[] for _ in items]
    lanes: dict[int, int] = {}
    for number, wire in enumerate(wires):
        at, exit_ = wire.source, wire.exit
        for row in range(row_of[wire.source], max((row_of[t] for t in wire.targets), default=0)):
            links[row] += [Link(at, exit_, target, number) for target in wire.targets if row_of[target] == row + 1]
            if any(row_of[target] > row + 1 for target in wire.targets):
                lane = num_nodes + len(lanes)
                lanes[lane] = number
                links[row].append(Link(at, exit_, lane, number))
                items[row + 1].append(lane)
                at, exit_ = lane, 0
    streams = {lane for lane, wire in lanes.items() if wires[wire].is_stream}
    orders = _Orderer(items, links, streams).best()
    return [Rows(order, tuple(map(tuple, links)), lanes) for order in orders]


def _rows(num_nodes: int, wires: Sequence[Wire], late: Collection[int]) -> list[int]:
    """The row of every node: first as high as it can be, then lower or higher where that makes wires shorter."""
    after: list[list[int]] = [[] for _ in range(num_nodes)]
    before: list[list[int]] = [[] for _ in range(num_nodes)]
    for wire in wires:
        for target in wire.targets:
            assert wire.source < target, "a wire leads to a later node"
            after[wire.source].append(target)
            before[target].append(wire.source)
    row = [0] * num_nodes
    for node in range(num_nodes):
        row[node] = max((row[b] + 1 for b in before[node]), default=0)
    leads = _ancestors(num_nodes - 1, before)
    for node in sorted(leads - {num_nodes - 1}, reverse=True):
        row[node] = min(row[a] for a in after[node] if a in leads) - 1
    for node in range(num_nodes):
        top = max((row[b] + 1 for b in before[node]), default=0)
        if node not in leads or (top < row[node] and before[node] and not _costs(node, top, row, wires, late)):
            row[node] = top
    for node in range(num_nodes):
        if not before[node] and after[node]:  # what comes from outside enters where it is used
            row[node] = min(row[a] for a in after[node]) - 1
    return row


def _ancestors(node: int, before: Sequence[Sequence[int]]) -> set[int]:
    found, waiting = {node}, [node]
    while waiting:
        new = set(before[waiting.pop()]) - found
        found |= new
        waiting += new
    return found


def _costs(node: int, top: int, row: Sequence[int], wires: Sequence[Wire], late: Collection[int]) -> bool:
    """Whether wires get longer if a node moves up to a row; if they stay the same, whether it had better be late."""
    change = 0
    for wire in wires:
        if wire.source == node:
            change += row[node] - top
        elif node in wire.targets:
            change -= row[node] - max([top, *(row[t] for t in wire.targets if t != node)])
    return change >= (0 if node in late else 1)


class _Orderer:
    """Tries orders and keeps those with the fewest crossings."""

    def __init__(self, items: list[list[int]], links: list[list[Link]], streams: set[int]) -> None:
        self._items, self._links, self._streams = items, links, streams

    def best(self) -> list[tuple[tuple[int, ...], ...]]:
        found: dict[tuple[tuple[int, ...], ...], int] = {}
        for start in (self._items, [row[::-1] for row in self._items]):
            self._items = [sorted(row, key=lambda item: item not in self._streams) for row in start]
            for sweep in range(2 * _SWEEPS):
                self._sweep(downwards=sweep % 2 == 0)
                found[tuple(map(tuple, self._items))] = sum(map(self._crossings, range(len(self._links))))
        return [order for order, crossings in found.items() if crossings == min(found.values())]

    def _sweep(self, *, downwards: bool) -> None:
        rows = range(1, len(self._items)) if downwards else range(len(self._items) - 2, -1, -1)
        for row in rows:
            wanted = self._wanted(row, downwards=downwards)
            at = {item: place for place, item in enumerate(self._items[row])}
            self._items[row].sort(key=lambda item: (item not in self._streams, wanted.get(item, at[item]), at[item]))

    def _wanted(self, row: int, *, downwards: bool) -> dict[int, float]:
        """For each item of a row the mean place, scaled to its own row, of those that it is linked with."""
        other, links = (row - 1, self._links[row - 1]) if downwards else (row + 1, self._links[row])
        scale = max(1, len(self._items[row]) - 1) / max(1, len(self._items[other]) - 1)
        place = {item: i * scale for i, item in enumerate(self._items[other])}
        found: dict[int, list[float]] = {}
        for link in links:
            if downwards:
                exits = 1 + max(k.exit for k in links if k.upper == link.upper)
                found.setdefault(link.lower, []).append(place[link.upper] + link.exit / exits)
            else:
                found.setdefault(link.upper, []).append(place[link.lower])
        return {item: sum(places) / len(places) for item, places in found.items()}

    def _crossings(self, gap: int) -> int:
        if not self._links[gap]:
            return 0
        above, below = ({item: i for i, item in enumerate(self._items[row])} for row in (gap, gap + 1))
        ends = [((above[link.upper], link.exit), below[link.lower]) for link in self._links[gap]]
        return sum((a[0] < b[0] and a[1] > b[1]) or (a[0] > b[0] and a[1] < b[1]) for a, b in combinations(ends, 2))
