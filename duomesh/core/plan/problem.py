"""What is wrong with a plan, as a sentence, and the numbers that such sentences offer instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Literal

from duomesh.core.errors import PlanError

__all__ = ["Problem", "Problems", "divisors", "multiples", "nearest", "refuse"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; the parts are phrases, `str` is the sentence."""

    given: str
    needed: str
    fix: str
    kind: Literal["impossible", "not_built"] = "impossible"

    def __str__(self) -> str:
        return f"{self.given}: {self.needed}; {self.fix}."


Problems = Iterator[Problem]


def refuse(problems: Iterable[Problem]) -> None:
    """Raises PlanError with every problem, one a line, if there is any."""
    lines = [str(problem) for problem in problems]
    if lines:
        raise PlanError("\n".join(lines))


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest(wanted: int, choices: Iterable[int]) -> str:
    """The choices on both sides of a number that is none; choices ascend."""
    choices = list(choices)
    below = [n for n in choices if n < wanted][-1:]
    above = [n for n in choices if n > wanted][:1]
    return " or ".join(map(str, below + above))


def multiples(number: int, of: int) -> str:
    """The multiples next to a number that is none."""
    below = number // of * of
    return " or ".join(str(n) for n in (below, below + of) if n)
