"""The learning rate as a pure function of the step and the settings: there is no state to restore or to lose."""

from __future__ import annotations

import math

from duomesh.core.training.config import OptimizerConfig

__all__ = ["learning_rate"]


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The rate of step 1, 2, ..., total_steps.

    It rises linearly from lr/W at step 1 to lr at step W = warmup_steps, and falls from there as half a cosine wave
    to min_lr at the last step, or stays ("constant"). Steps that are skipped count.
    """
    warmup = config.warmup_steps
    if step <= warmup:
        return config.lr * step / warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress))
