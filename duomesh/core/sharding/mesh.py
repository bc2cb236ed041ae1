"""The device mesh: named axes with sizes, ranks and their coordinates, and the atoms of two views of the same ranks.

Ranks are numbered with the last axis fastest. A *view* is one way to cut a stage's ranks into axes; the dense layers of
a model have one (dp, cp, tp) and its experts may have another (edp, ep, etp). Both are products of common *atoms*:
smaller axes that each view merges in its own way. Layouts are over atoms, so a value can pass between the views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from duomesh.core.errors import PlanError

__all__ = ["Mesh", "MeshAxis", "atoms"]


@dataclass(frozen=True)
class MeshAxis:
    """A named axis of the mesh; never called a dim, as a tensor's dims are never called axes."""

    name: str
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PlanError(f"mesh axis {self.name} has size {self.size}; it must be at least 1.")


@dataclass(frozen=True)
class Mesh:
    """Axes from the slowest to the fastest."""

    axes: tuple[MeshAxis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PlanError(f"mesh axis {twice[0]} occurs twice in {', '.join(names)}.")

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """`Mesh.of(dp=2, tp=4)`: axes in the order given."""
        return cls(tuple(MeshAxis(name, size) for name, size in sizes.items()))

    @property
    def world_size(self) -> int:
        return prod(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def size(self, name: str) -> int:
        return self.axes[self.index(name)].size

    def index(self, name: str) -> int:
        """Position of an axis. Raises PlanError if the mesh has none of that name."""
        if name not in self.names:
            raise PlanError(f"the mesh has no axis {name!r}; its axes are {', '.join(self.names)}.")
        return self.names.index(name)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Coordinates of ranks 0, 1, 2, ..., the last axis fastest."""
        return product(*(range(axis.size) for axis in self.axes))

    def rank(self, coordinate: Sequence[int]) -> int:
        rank = 0
        for axis, position in zip(self.axes, coordinate, strict=True):
            rank = rank * axis.size + position
        return rank

    def groups(self, *names: str) -> list[list[int]]:
        """Ranks that differ in these axes only, one list for each place in the others, by coordinate on these."""
        at = {self.index(name) for name in names}
        out: dict[tuple[int, ...], list[int]] = {}
        for coordinate in self.coordinates():
            elsewhere = tuple(place for i, place in enumerate(coordinate) if i not in at)
            out.setdefault(elsewhere, []).append(self.rank(coordinate))
        return list(out.values())


def atoms(
    first: Sequence[MeshAxis], second: Sequence[MeshAxis]
) -> tuple[tuple[MeshAxis, ...], dict[str, tuple[str, ...]]]:
    """The common refinement of two views of the same ranks, both from the slowest axis to the fastest.

    Each view cuts the ranks at the cumulative products of its sizes from the fastest axis. The union of cuts must form
    a chain in which each divides the next; the quotients are the atoms.

    Returns:
        The atoms from slowest to fastest, and for each axis of either view the names of the atoms that it merges, from
        major to minor; an axis of size 1 merges none. An atom is named `<axis of first>.<axis of second>`.

    Raises:
        PlanError: the views have different numbers of ranks, or two cuts of which neither divides the other.
    """
    totals = [prod(axis.size for axis in view) for view in (first, second)]
    if totals[0] != totals[1]:
        raise PlanError(
            f"{_show(first)} is {totals[0]} ranks, {_show(second)} is {totals[1]}; both must cut the same ranks."
        )
    cuts = sorted({1, *_cuts(first), *_cuts(second)})
    for small, large in pairwise(cuts):
        if large % small:
            raise PlanError(
                f"{_show(first)} and {_show(second)} cut the ranks at {small} and at {large}, which is no multiple: "
                "they have no common atoms. Choose sizes whose products from the fastest axis divide each other."
            )
    made: list[MeshAxis] = []
    members: dict[str, tuple[str, ...]] = {axis.name: () for axis in (*first, *second)}
    for small, large in reversed(list(pairwise(cuts))):
        owners = [_owner(view, small) for view in (first, second)]
        name = owners[0] if owners[0] == owners[1] else ".".join(owners)
        made.append(MeshAxis(name, large // small))
        for owner in dict.fromkeys(owners):
            members[owner] += (name,)
    return tuple(made), members


def _show(view: Sequence[MeshAxis]) -> str:
    return ",".join(f"{axis.name}={axis.size}" for axis in view)


def _cuts(view: Sequence[MeshAxis]) -> list[int]:
    """Cumulative products from the fastest axis."""
    out, total = [], 1
    for axis in reversed(view):
        total *= axis.size
        out.append(total)
    return out


def _owner(view: Sequence[MeshAxis], cut: int) -> str:
    """The axis of the view that the ranks between this cut and the next belong to."""
    total = 1
    for axis in reversed(view):
        total *= axis.size
        if cut < total:
            return axis.name
    raise AssertionError("a cut beyond the last rank")
