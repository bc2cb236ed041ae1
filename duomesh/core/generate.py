"""Greedy decoding through any session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from duomesh.core.errors import DataError
from duomesh.core.session import Session

__all__ = ["context_length", "greedy"]

_SHORTEST = 64


def context_length(length: int) -> int:
    """What a context is padded to on the right: the power of two that holds it, at least 64.

    A causal model cannot see the padding. A backend that compiles for every shape so compiles a few times only, and no
    pass takes much more than twice what it must.
    """
    return max(_SHORTEST, 1 << (length - 1).bit_length())


def greedy(session: Session, prompt: Sequence[int], *, max_new_tokens: int, stop: Iterable[int] = ()) -> Iterator[int]:
    """Yields the most probable next id, again and again, until a stop id or `max_new_tokens`.

    The whole context is computed for every token: simple and exact, not fast. Ties go to the lowest id.
    """
    ids = list(prompt)
    if not ids:
        raise DataError("the prompt is empty; give at least one token.")
    stops = set(stop)
    # a session with lengths of its own pads to those
    pads_itself = bool(getattr(session, "length_buckets", ()))
    for _ in range(max_new_tokens):
        padded = np.zeros((1, len(ids) if pads_itself else context_length(len(ids))), np.int32)
        padded[0, : len(ids)] = ids
        chosen = int(session.logits(padded)[0, len(ids) - 1].argmax())
        if chosen in stops:
            return
        ids.append(chosen)
        yield chosen
