"""What ranks say of themselves, and what follows: which of them ends the job, and the sentence that says so."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from duomesh.core.activity import UNTOLD, activity_of, blamed_rank
from duomesh.core.errors import DuomeshError

__all__ = ["STACK_CHARACTERS", "Failure", "Status", "absent", "judge", "raised", "silent"]

STACK_CHARACTERS = 8000  # the last of a stack that are kept
_NAMED_RANKS = 8  # of a list, before "and 1016 more"


@dataclass(frozen=True, kw_only=True)
class Status:
    """What a rank says of itself with beat number `beat`: its activity, and for how long, computing or waiting.

    is_overdue: for longer than allowed; then it adds its stack. waits: it is in a collective, or at its end.
    """

    beat: int
    doing: str
    number: int
    for_s: float
    is_overdue: bool = False
    waits: bool = False
    is_done: bool = False
    stack: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a job ends: `rank`, during `doing`, did what `sentence` says in full. stack: of that rank, if known.

    error: the class of what it raised.
    """

    kind: Literal["raised", "died", "hangs"]
    rank: int
    doing: str
    sentence: str
    stack: str = ""
    error: str = ""


def raised(rank: int, error: BaseException) -> Failure:
    """An error that a rank raised, or that repeats what another one raised. Its traceback is kept."""
    at, name = activity_of(error), type(error).__name__
    text = str(error) if isinstance(error, DuomeshError) else f"{name}: {error}".removesuffix(": ")
    origin = blamed_rank(error)
    if origin is not None:
        rank, text = origin, text.removeprefix(f"rank {origin}: ")
    trace = "".join(traceback.format_exception(error))[-STACK_CHARACTERS:]
    where = "" if at == UNTOLD else f', during "{at}"'
    sentence = f"rank {rank}{where}: {text}"
    return Failure(kind="raised", rank=rank, doing=at, sentence=sentence, stack=trace, error=name)


def silent(rank: int, status: Status, for_s: float) -> Failure:
    """A rank that has said nothing for so long; status: what it said last."""
    said = "" if status.doing == UNTOLD else f'; it last said "{status.doing}"'
    sentence = (
        f"rank {rank} has given no sign of life for {for_s:.1f} s{said}. It was killed, its host or the network is "
        "gone, or native code does not let go of Python's lock."
    )
    return Failure(kind="died", rank=rank, doing=status.doing, sentence=sentence)


def absent(rank: int, start_s: float) -> Failure:
    """A rank that has never said anything."""
    sentence = f"rank {rank} has not joined the others within {start_s:.0f} s. Look at its output, and at its host."
    return Failure(kind="died", rank=rank, doing="start", sentence=sentence)


def judge(statuses: Mapping[int, Status]) -> Failure | None:
    """Which rank holds the job up, if any does.

    A rank that computes for too long is to blame, unless another one that computes is behind it: what looks like work
    may be a wait for that one. Ranks that wait in a collective are not to blame, as long as another may get there. When
    each has waited for too long, they wait for each other, and the odd one out is named.
    """
    overdue = [rank for rank, status in sorted(statuses.items()) if status.is_overdue]
    stuck = [rank for rank in overdue if not statuses[rank].waits]
    if stuck:
        # the one that got least far holds the others up
        rank = min(stuck, key=lambda r: (statuses[r].number, -statuses[r].for_s, r))
        if any(not status.waits and status.number < statuses[rank].number for status in statuses.values()):
            return None
        what = f'hangs during "{statuses[rank].doing}": it has not got on for {statuses[rank].for_s:.0f} s'
    elif len(overdue) == len(statuses) and not all(status.is_done for status in statuses.values()):
        # one that is ahead of the others has left something out
        rank = min(statuses, key=lambda r: (_alike(statuses, r), -statuses[r].number, r))
        what = f'hangs during "{statuses[rank].doing}"'
        if statuses[rank].is_done:
            what = "has finished, while others wait in a collective"
        what += ": a rank left out a collective or met collectives in another order"
    else:
        return None
    status = statuses[rank]
    sentence = f"rank {rank} {what}{_others(statuses, rank)}."
    shown = rank if status.stack else overdue[0]
    stack = f"rank {shown} is here:\n{statuses[shown].stack}"
    return Failure(kind="hangs", rank=rank, doing=status.doing, sentence=sentence, stack=stack)


def _alike(statuses: Mapping[int, Status], rank: int) -> int:
    """How many ranks are at the same place as this one."""
    place = (statuses[rank].doing, statuses[rank].stack)
    return sum((status.doing, status.stack) == place for status in statuses.values())


def _others(statuses: Mapping[int, Status], rank: int) -> str:
    """Where the other ranks are: ' (ranks 0, 2: "step 3"; rank 3: "step 2")', or nothing."""
    places: dict[str, list[int]] = {}
    for other, status in sorted(statuses.items()):
        if other != rank:
            places.setdefault(status.doing, []).append(other)
    texts = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_NAMED_RANKS]))}"
        + (f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else "")
        + f': "{text}"'
        for text, ranks in places.items()
    ]
    return f" ({'; '.join(texts)})" if texts else ""
