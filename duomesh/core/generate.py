"""Greedy decoding through any session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from duomesh.core.errors import DataError
from duomesh.core.session import Session

__all__ = ["greedy"]

# The context is padded on the right to a multiple of this: a causal model cannot see the padding, and a backend that
# compiles per shape compiles once every so many tokens.
_PAD = 64


def greedy(session: Session, prompt: Sequence[int], *, max_new_tokens: int, stop: Iterable[int] = ()) -> Iterator[int]:
    """Yields the most probable next id, again and again, until a stop id or `max_new_tokens`.

    The whole context is computed for every token: simple and exact, not fast. Ties go to the lowest id.
    """
    ids = list(prompt)
    if not ids:
        raise DataError("the prompt is empty; give at least one token.")
    stops = set(stop)
    for _ in range(max_new_tokens):
        padded = np.zeros((1, -(-len(ids) // _PAD) * _PAD), np.int32)
        padded[0, : len(ids)] = ids
        chosen = int(session.logits(padded)[0, len(ids) - 1].argmax())
        if chosen in stops:
            return
        ids.append(chosen)
        yield chosen
