"""AdamW of one rank in numpy, written out from its paper: what training steps on a mesh are held against."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
from sharding_cases import Array

from duomesh.core.ir.program import ModelProgram
from duomesh.core.session import AdamW

__all__ = ["adamw_steps"]

LossAndGrads = Callable[[dict[str, Array], int], tuple[float, dict[str, Array]]]


def adamw_steps(
    program: ModelProgram, params: dict[str, Array], pull: LossAndGrads, config: AdamW, lr: float, steps: int
) -> tuple[dict[str, Array], list[tuple[float, float]]]:
    """Parameters after some updates, and (loss, norm) of each: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2,
    with gradients scaled to the largest norm.

    pull: (parameters, number of the step from 1) -> loss and gradients.
    """
    params = dict(params)
    first, second = ({n: np.zeros_like(p) for n, p in params.items()} for _ in range(2))
    history = []
    for t in range(1, steps + 1):
        loss, grads = pull(params, t)
        norm = sqrt(sum(float(np.sum(g**2)) for g in grads.values()))
        history.append((loss, norm))
        for n, w in params.items():
            g = grads[n] * min(1.0, (config.max_grad_norm or norm) / norm)
            first[n] = config.beta1 * first[n] + (1 - config.beta1) * g
            second[n] = config.beta2 * second[n] + (1 - config.beta2) * g * g
            m, v = first[n] / (1 - config.beta1**t), second[n] / (1 - config.beta2**t)
            decay = config.weight_decay * program.params[n].is_decayed
            params[n] = w - lr * (m / (np.sqrt(v) + config.eps) + decay * w)
    return params, history
