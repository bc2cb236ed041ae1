"""Whether ranks hold the same bits where a layout says that they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from duomesh.core.errors import BackendError
from duomesh.core.sharding.mesh import Mesh

__all__ = ["check_digests"]


def check_digests(mesh: Mesh, what: str, axes: Iterable[str], digests: Mapping[int, str]) -> None:
    """Compares what the ranks of each group of some axes have of one thing.

    Args:
        what: the thing is, in words.
        axes: mesh axes on which it is equal.
        digests: by rank, of those that have it.

    Raises:
        BackendError: naming the thing, the first axis on which it differs, and the ranks.
    """
    for axis in axes:
        for ranks in mesh.groups(axis):
            having = {rank: digests[rank] for rank in ranks if rank in digests}
            most = Counter(having.values()).most_common(1)
            odd = [rank for rank, made in having.items() if made != most[0][0]]  # of two, the second
            if odd:
                raise BackendError(_explain(what, axis, list(having), odd))


def _explain(what: str, axis: str, ranks: Sequence[int], odd: Sequence[int]) -> str:
    others = [rank for rank in ranks if rank not in odd]
    return (
        f"the {what} should be equal on the ranks of {axis}, and {'rank' if len(odd) == 1 else 'ranks'} "
        f"{', '.join(map(str, odd))} {'has' if len(odd) == 1 else 'have'} other bits than "
        f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}. A reduction is missing, ranks were "
        "fed differently, or memory is damaged. Go on from an earlier checkpoint."
    )
