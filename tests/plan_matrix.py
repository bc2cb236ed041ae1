"""Plans of the torch backend that together show every pair of choices: a covering array over the axes of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product

__all__ = ["MATRIX", "PlanCase", "pairs_of"]

# zero "1/2" and "3/2" share state within groups of two data ranks, "3/1" keeps it whole on each of them
AXES: dict[str, tuple[object, ...]] = {
    "tp": (1, 2, 4),
    "sequence_parallel": (False, True),
    "dp": (1, 2, 4),
    "zero": ("0", "1", "2", "3", "1/2", "3/2", "3/1"),
    "dropout": (False, True),
    "ties": (False, True),
    "micro_batches": (1, 2),
}


@dataclass(frozen=True)
class PlanCase:
    """One plan, and what of the model and the step is varied with it."""

    tp: int
    sequence_parallel: bool
    dp: int
    zero: str
    dropout: bool
    ties: bool
    micro_batches: int

    @property
    def is_possible(self) -> bool:
        """At most 8 ranks; sequence parallelism needs tp, ZeRO dp, and groups of two more than one group."""
        shares = self.dp == 4 if self.zero.endswith("/2") else self.zero == "0" or self.dp > 1
        return self.tp * self.dp <= 8 and (self.tp > 1 or not self.sequence_parallel) and shares

    @property
    def world(self) -> int:
        return self.tp * self.dp

    @property
    def plan(self) -> str:
        words = [f"tp={self.tp}", f"dp={self.dp}", f"micro_batches={self.micro_batches}"]
        words += ["sequence_parallel"] if self.sequence_parallel else []
        zero, _, shard = self.zero.partition("/")
        words += [f"zero={zero}"] if zero != "0" else []
        words += [f"zero_shard={shard}"] if shard else []
        return ",".join(words)

    def __str__(self) -> str:
        extra = [name for name in ("dropout", "ties") if getattr(self, name)]
        return "-".join([self.plan.replace(",", "-"), *extra])


def pairs_of(case: PlanCase) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Every pair of choices that a case shows."""
    return set(combinations([(name, getattr(case, name)) for name in AXES], 2))


def _covering() -> tuple[PlanCase, ...]:
    """Greedily the case that shows most pairs not shown yet; ties go to the first, so the array is always the same."""
    every = [PlanCase(*values) for values in product(*AXES.values())]  # type: ignore[arg-type]
    possible = [case for case in every if case.is_possible]
    missing = set().union(*(pairs_of(case) for case in possible))
    chosen: list[PlanCase] = []
    while missing:
        best = max(possible, key=lambda case: (len(pairs_of(case) & missing), -case.world))
        chosen.append(best)
        missing -= pairs_of(best)
    return tuple(sorted(chosen, key=lambda case: (case.world, str(case))))


MATRIX = _covering()
