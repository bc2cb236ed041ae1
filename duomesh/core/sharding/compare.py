"""Collectives that a compiled program issues, beside those that the sharded program lists.

`Issued` is what a backend's own reading of its program gives; the listing is `LayoutListing.collectives`. Both count
bytes in the larger buffer on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from duomesh.core.arrays import DTYPES

__all__ = ["CompiledTable", "Issued", "TableRow", "at_most", "compiled_table"]


@dataclass(frozen=True)
class Issued:
    """One collective of a program, as a backend's own text or trace of it has it.

    Attributes:
        kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or "collective-permute".
        axes: mesh axes, from major to minor; together they are the group. Axes of size 1 are in no group.
        dtype: of the wire, as `core.arrays.DTYPES` names it.
        elements: of the larger buffer on one rank: the result of an all-gather, the input of a reduce-scatter.
        count: how often in one call of the program.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    elements: int
    count: int = 1

    @property
    def bytes(self) -> int:
        """Of that buffer, once."""
        return self.elements * DTYPES[self.dtype].itemsize


def at_most(branches: Iterable[Iterable[Issued]]) -> list[Issued]:
    """What one of several branches issues at most: of equal collectives as many as the branch with most of them has.

    Branches that issue the same give just that, in the first one's order.
    """
    most: Counter[Issued] = Counter()
    for branch in branches:
        counts: Counter[Issued] = Counter()
        for one in branch:
            counts[replace(one, count=1)] += one.count
        most |= counts
    return [replace(one, count=count) for one, count in most.items()]


@dataclass(frozen=True)
class TableRow:
    """Collectives of one kind over one group. Bytes are those of all of them together, on one rank."""

    kind: str
    axis: str
    listed_count: int = 0
    listed_bytes: int = 0
    issued_count: int = 0
    issued_bytes: int = 0

    @property
    def note(self) -> str:
        """How the two sides differ; empty if they agree."""
        if self.listed_count and not self.issued_count:
            return "not issued"
        if self.issued_count and not self.listed_count:
            return "not listed"
        if self.issued_bytes != self.listed_bytes:
            ratio = f"{self.issued_bytes / self.listed_bytes:.4g} x the bytes" if self.listed_bytes else "other bytes"
            return ratio if self.issued_count == self.listed_count else f"other count, {ratio}"
        return "" if self.issued_count == self.listed_count else "same bytes in another count"


@dataclass(frozen=True)
class CompiledTable:
    """Rows in order of first occurrence in the listing, then those that only the compiled program has."""

    rows: tuple[TableRow, ...]

    @property
    def agrees(self) -> bool:
        """Whether counts and bytes are equal in every row."""
        return not any(row.note for row in self.rows)

    def to_dict(self) -> list[dict[str, Any]]:
        """JSON values: a row's fields and its `note`."""
        return [{**asdict(row), "note": row.note} for row in self.rows]

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """The same for a person."""
        head = f"{'collectives of a step':22} {'axis':13} {'listed':>7} {'bytes':>19} {'issued':>7} {'bytes':>19}"
        lines = [head]
        for row in self.rows:
            listed, issued = (
                f"{count:7,} {size:19,}"
                for count, size in ((row.listed_count, row.listed_bytes), (row.issued_count, row.issued_bytes))
            )
            lines.append(f"  {row.kind:20} {row.axis:13} {listed} {issued}  {row.note}".rstrip())
        return "\n".join(lines)


def compiled_table(listed: Sequence[Mapping[str, Any]], issued: Sequence[Issued]) -> CompiledTable:
    """Sums of both lists by kind and group.

    The order of axes in an all-reduce's group changes nothing, so groups that differ only in it share a row.

    Args:
        listed: entries with `kind`, `axis`, `bytes` and `count`, as in `LayoutListing.collectives`.
        issued: of one step too.
    """
    rows: dict[tuple[str, tuple[str, ...]], TableRow] = {}

    def add(kind: str, axes: tuple[str, ...], **more: int) -> None:
        key = (kind, tuple(sorted(axes)) if kind == "all-reduce" else axes)
        row = rows.get(key) or TableRow(kind, "+".join(axes))
        rows[key] = replace(row, **{name: getattr(row, name) + value for name, value in more.items()})

    for entry in listed:
        count = int(entry["count"])
        add(entry["kind"], tuple(entry["axis"].split("+")), listed_count=count, listed_bytes=count * entry["bytes"])
    for one in issued:
        add(one.kind, one.axes, issued_count=one.count, issued_bytes=one.count * one.bytes)
    return CompiledTable(tuple(rows.values()))
