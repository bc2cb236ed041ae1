"""States of a value on one mesh axis, and what moving between them costs, forward and backward.

| state | meaning on the ranks of the axis | cotangent |
|---|---|---|
| `S(d)` | slices of dim d | the slices' cotangents |
| `I` | equal, used equally | the true cotangent, equal on all |
| `P` | summands of the value | the true cotangent, equal on all |
| `R` | equal, used differently | summands of the true cotangent |

The forward of every transition is a table. The backward is not: **the backward of A -> B is the forward of
dual(B) -> dual(A)**, with S and I their own duals and P and R each other's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

__all__ = [
    "INVARIANT",
    "PARTIAL",
    "REPLICATED",
    "Action",
    "Kind",
    "Order",
    "State",
    "backward",
    "dual",
    "forward",
    "shard",
]


Order = Literal["contiguous", "zigzag"]


class Kind(Enum):
    SHARD = "S"
    INVARIANT = "I"
    PARTIAL = "P"
    REPLICATED = "R"


@dataclass(frozen=True)
class State:
    """A state on one axis; `dim` is what is split, for SHARD only: a tensor dim, or a logical axis by name.

    order: which parts a rank of n has. "contiguous": rank r the r-th of n. "zigzag": the r-th and the r-th last of 2n,
    which gives every rank of a causal attention the same work.
    """

    kind: Kind
    dim: int | str | None = None
    order: Order = "contiguous"

    def __post_init__(self) -> None:
        assert (self.kind is Kind.SHARD) == (self.dim is not None), self

    def __str__(self) -> str:
        if self.dim is None:
            return self.kind.value
        return f"S({self.dim})" if self.order == "contiguous" else f"S({self.dim}, {self.order})"


INVARIANT, PARTIAL, REPLICATED = State(Kind.INVARIANT), State(Kind.PARTIAL), State(Kind.REPLICATED)


def shard(dim: int | str, order: Order = "contiguous") -> State:
    """`S(dim)`."""
    return State(Kind.SHARD, dim, order)


def dual(state: State) -> State:
    """The state of a value's cotangent: a sum's is seen whole by every summand, and the other way round."""
    return {Kind.PARTIAL: REPLICATED, Kind.REPLICATED: PARTIAL}.get(state.kind, state)


class Action(Enum):
    """What ranks do. The first five move data; the others are local."""

    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    NOTHING = "nothing"
    SLICE = "slice"
    PAD = "pad with zeros"
    KEEP_FIRST = "keep on coordinate 0, zero elsewhere"

    @property
    def is_collective(self) -> bool:
        return self in (Action.ALL_GATHER, Action.ALL_REDUCE, Action.REDUCE_SCATTER, Action.ALL_TO_ALL)


_S, _I, _P, _R = Kind.SHARD, Kind.INVARIANT, Kind.PARTIAL, Kind.REPLICATED
_FORWARD: dict[tuple[Kind, Kind], Action] = {
    (_S, _R): Action.ALL_GATHER,
    (_S, _I): Action.ALL_GATHER,
    (_S, _P): Action.PAD,
    (_I, _R): Action.NOTHING,
    (_I, _S): Action.SLICE,
    (_I, _P): Action.KEEP_FIRST,
    (_P, _I): Action.ALL_REDUCE,
    (_P, _R): Action.ALL_REDUCE,
    (_P, _S): Action.REDUCE_SCATTER,
    (_R, _S): Action.SLICE,
    (_R, _I): Action.NOTHING,
    (_R, _P): Action.KEEP_FIRST,
}


def forward(before: State, after: State) -> Action:
    """What the ranks of the axis do to move a value from one state to another."""
    if before == after:
        return Action.NOTHING
    if before.kind is after.kind:
        return Action.ALL_TO_ALL  # another dim, or another order of the same
    return _FORWARD[before.kind, after.kind]


def backward(before: State, after: State) -> Action:
    """What they do to the cotangent, which moves from dual(after) to dual(before)."""
    return forward(dual(after), dual(before))
