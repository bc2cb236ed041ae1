"""Initial weights of a whole model, one canonical parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator

from duomesh.core.arrays import Array
from duomesh.core.boxes import Deferred, whole
from duomesh.core.ir.program import ModelProgram
from duomesh.core.ir.values import Param
from duomesh.core.random import draw

__all__ = ["deferred_initial_params", "initial_params"]


def deferred_initial_params(
    program: ModelProgram, seed: int, *, perturb: float = 0.0
) -> Iterator[tuple[str, Deferred]]:
    """(canonical name, float32 tensor) of every distinct parameter, of which only the part that is used is drawn.

    perturb: standard deviation of noise on norm weights and biases, for checks (see `random.draw`).
    """

    def deferred(param: Param) -> Deferred:
        return Deferred(param.shape, lambda box: draw(param, seed, box=box, perturb=perturb))

    return ((name, deferred(param)) for name, param in program.params.items())


def initial_params(program: ModelProgram, seed: int, *, perturb: float = 0.0) -> Iterator[tuple[str, Array]]:
    """(canonical name, float32 array) of every distinct parameter; the same bits on every backend and host.

    perturb: as of `deferred_initial_params`.
    """
    return ((name, whole(tensor)) for name, tensor in deferred_initial_params(program, seed, perturb=perturb))
