"""Rotary frequencies of every scaling kind, computed once for both backends.

Frequencies are formed in float64 and rounded to float32 once. Checkpoints are run with float32 frequencies, and a
constant of the model, rather than of a backend, is what both backends can share. Angles are formed from these
numbers in fp32, or in float64 in a float64 run.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from duomesh.core.spec.model import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

__all__ = ["attention_factor", "inverse_frequencies"]


def inverse_frequencies(rope: RopeSpec) -> npt.NDArray[np.float32]:
    """[rotary_dim / 2] float32 radians per position, channel pair j in entry j."""
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain = rope.base**-exponent
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        plain = plain / scaling.factor
    elif isinstance(scaling, Llama3Scaling):
        plain = _llama3(plain, scaling)
    elif isinstance(scaling, YarnScaling):
        plain = _yarn(plain, scaling, rope)
    return plain.astype(np.float32)


def attention_factor(rope: RopeSpec) -> float:
    """The number that multiplies cos and sin: 1 except for yarn (arXiv:2309.00071, equation 22)."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, coefficient: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def _llama3(plain: npt.NDArray[np.float64], scaling: Llama3Scaling) -> npt.NDArray[np.float64]:
    """Wavelengths shorter than M0/high stay, longer than M0/low are divided, between them a linear blend."""
    turns = scaling.original_max_positions * plain / (2 * math.pi)  # full turns within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return np.asarray((1 - keep) * plain / scaling.factor + keep * plain)


def _yarn(plain: npt.NDArray[np.float64], scaling: YarnScaling, rope: RopeSpec) -> npt.NDArray[np.float64]:
    """A linear ramp over channel pairs between `beta_fast` and `beta_slow` turns in the original context."""

    def channel(turns: float) -> float:
        ratio = scaling.original_max_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.base))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    # A ramp of no width becomes a step. Ends in reverse (a context of less than one turn) stay so, as in the
    # published code: checkpoints were trained with what it gives.
    width = (high - low) or 1e-3
    interpolate = np.clip((np.arange(rope.rotary_dim // 2) - low) / width, 0.0, 1.0)
    return np.asarray(plain / scaling.factor * interpolate + plain * (1 - interpolate))
