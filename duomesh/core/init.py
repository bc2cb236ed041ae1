"""Initial weights of a whole model, one canonical parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator

from duomesh.core.arrays import Array
from duomesh.core.ir.program import ModelProgram
from duomesh.core.random import draw

__all__ = ["initial_params"]


def initial_params(program: ModelProgram, seed: int, *, perturb: float = 0.0) -> Iterator[tuple[str, Array]]:
    """(canonical name, float32 array) of every distinct parameter; the same bits on every backend and host.

    perturb: standard deviation of noise on norm weights and biases, for checks (see `random.draw`).
    """
    for name, param in program.params.items():
        yield name, draw(param, seed, perturb=perturb)
