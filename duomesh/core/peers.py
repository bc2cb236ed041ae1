"""The ranks of one job, as what has no framework sees them: who we are, and short texts that all of them get.

What is done on every rank goes through `share` or `together`: then an error that a user can act on ends the work of
all ranks alike, and none waits for one that has stopped. What is passed to them talks to no other rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol, TypeVar

from duomesh.core import errors
from duomesh.core.activity import activity_of, blame
from duomesh.core.errors import DuomeshError

__all__ = ["ALONE", "Alone", "Peers", "share", "together"]

T = TypeVar("T")


class Peers(Protocol):
    """rank: ours, from 0 to world_size - 1."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def exchange(self, text: str) -> list[str]:
        """The texts of all ranks in order of rank. Every rank calls it, and it returns when all have."""


class Alone:
    """A job of one process."""

    rank, world_size = 0, 1

    def exchange(self, text: str) -> list[str]:
        return [text]


ALONE = Alone()


def share(peers: Peers, make: Callable[[], str]) -> list[str]:
    """make() on every rank; each gets the results of all, in order of rank.

    Raises:
        DuomeshError: what one of them raised; the message names its rank. Each rank raises its own, if it has one.
    """
    failure: DuomeshError | None = None
    try:
        said = {"value": make()}
    except DuomeshError as error:
        failure, said = error, {"error": type(error).__name__, "text": str(error), "doing": activity_of(error)}
    heard = [json.loads(text) for text in peers.exchange(json.dumps(said))]
    if failure is not None:
        raise failure
    for rank, answer in enumerate(heard):
        if "error" in answer:
            kind: type[DuomeshError] = getattr(errors, answer["error"], DuomeshError)
            repeated = kind(f"rank {rank}: {answer['text']}")
            blame(repeated, rank, answer["doing"])
            raise repeated
    return [answer["value"] for answer in heard]


def together(peers: Peers, action: Callable[[], T]) -> T:
    """action() on every rank; its result on this one. Raises as `share`."""
    made: list[T] = []

    def act() -> str:
        made.append(action())
        return ""

    share(peers, act)
    return made[0]
