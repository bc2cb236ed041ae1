"""Few batch shapes, and a word where there are many: JAX compiles a function again for every shape of its batches."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

import jax
import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.errors import BackendError, DuomeshWarning

__all__ = ["Buckets", "Compilations"]

_COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event, once for each module
_MANY_SHAPES = 3
_Result = TypeVar("_Result")


class Buckets:
    """The lengths that batches are padded to, at the end. A causal model cannot see what comes after a token.

    Args:
        lengths: positive, each once; none leaves batches as they are.

    Raises:
        BackendError: they are not.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(sorted(lengths))
        if len(set(lengths)) != len(lengths) or any(length < 1 for length in lengths):
            raise BackendError(f"length_buckets are {tuple(lengths)}; they must be positive, and each given once.")

    def fit(self, length: int) -> int:
        """The smallest bucket that holds a length. Raises BackendError beyond the largest."""
        if not self.lengths:
            return length
        for bucket in self.lengths:
            if length <= bucket:
                return bucket
        raise BackendError(
            f"a batch has {length} tokens a sample, and the largest of length_buckets is {self.lengths[-1]}. "
            "Cut the samples, or give a bucket that holds them."
        )

    def pad(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches of one step, all as long as the bucket of the longest. Padding is no target and has no weight."""
        if not self.lengths:
            return list(batches)
        length = self.fit(max((batch.tokens.shape[1] for batch in batches), default=0))
        return [self._padded(batch, length) for batch in batches]

    @staticmethod
    def _padded(batch: Batch, length: int) -> Batch:
        def longer(array: Array, value: int | None) -> Array:
            """value: of the padding; None goes on with each row's last."""
            sides = ((0, 0), (0, length - array.shape[1]))
            return np.pad(array, sides, "edge") if value is None else np.pad(array, sides, constant_values=value)

        return replace(
            batch,
            tokens=longer(batch.tokens, 0),
            labels=longer(batch.labels, IGNORE),
            loss_mask=None if batch.loss_mask is None else longer(batch.loss_mask, 0),
            positions=None if batch.positions is None else longer(batch.positions, None),
            segment_ids=None if batch.segment_ids is None else longer(batch.segment_ids, None),
        )


class Compilations:
    """What a session has compiled.

    Attributes:
        count: modules. seconds: that calls took in which one was compiled, tracing included.
    """

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self._shapes: dict[str, set[tuple[int, ...]]] = {}
        self._has_warned = False

    def call(
        self, name: str, function: Callable[..., _Result], *args: Any, shape: tuple[int, ...] | None = None
    ) -> _Result:
        """Calls a jitted function.

        Args:
            name: of the pass, for the warning.
            shape: of the batch; None if it is not to be counted.

        Warns:
            DuomeshWarning: once, after the third shape of a pass.
        """
        compiled, thread, start = 0, threading.get_ident(), perf_counter()

        def heard(event: str, duration: float, **_: Any) -> None:
            nonlocal compiled
            compiled += event == _COMPILED and threading.get_ident() == thread

        jax.monitoring.register_event_duration_secs_listener(heard)
        try:
            made = function(*args)
        finally:
            jax.monitoring.unregister_event_duration_listener(heard)
        if compiled:
            self.count, self.seconds = self.count + compiled, self.seconds + perf_counter() - start
        if shape is not None:
            self._met(name, shape)
        return made

    def _met(self, name: str, shape: tuple[int, ...]) -> None:
        shapes = self._shapes.setdefault(name, set())
        shapes.add(shape)
        if len(shapes) < _MANY_SHAPES or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{name} has met {len(shapes)} shapes of batches, the last {list(shape)}, and compiles for each: "
            f"{self.count} compilations so far took {self.seconds:.1f} s. Give the session length_buckets, such as "
            "(512, 1024), and batches are padded to the smallest that holds them.",
            DuomeshWarning,
            stacklevel=4,
        )
