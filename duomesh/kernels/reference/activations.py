"""Pointwise activations and their derivatives, on float32 or float64 arrays of any shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from duomesh.core.arrays import Array

__all__ = ["ACTIVATIONS", "Pointwise"]

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715  # Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2
_QUICK = 1.702  # the same paper's sigmoid form


@dataclass(frozen=True)
class Pointwise:
    """A function of one variable and its derivative."""

    value: Callable[[Array], Array]
    derivative: Callable[[Array], Array]


def _sigmoid(x: Array) -> Array:
    # exp of a negative number only: no overflow, and small values keep their relative accuracy
    z = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1.0, z) / (1.0 + z))


def _normal_cdf(x: Array) -> Array:
    # erfc, because 1 + erf cancels for negative x; numpy has neither
    flat = [0.5 * math.erfc(-v / math.sqrt(2.0)) for v in np.ravel(x).tolist()]
    return np.asarray(flat, x.dtype).reshape(x.shape)


def _silu_derivative(x: Array) -> Array:
    s = _sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _gelu_derivative(x: Array) -> Array:
    density = np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return _normal_cdf(x) + x * density


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1.0 + np.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBIC * x**3))))


def _gelu_tanh_derivative(x: Array) -> Array:
    t = np.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBIC * x**3))
    inner = _SQRT_2_OVER_PI * (1.0 + 3.0 * _GELU_CUBIC * x * x)
    return np.asarray(0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)


def _quick_gelu_derivative(x: Array) -> Array:
    s = _sigmoid(_QUICK * x)
    return s * (1.0 + _QUICK * x * (1.0 - s))


def _sigmoid_derivative(x: Array) -> Array:
    s = _sigmoid(x)
    return s * (1.0 - s)


def _relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


# The derivative of relu at 0 is 0, as in both frameworks.
ACTIVATIONS: dict[str, Pointwise] = {
    "silu": Pointwise(lambda x: x * _sigmoid(x), _silu_derivative),
    "gelu": Pointwise(lambda x: x * _normal_cdf(x), _gelu_derivative),
    "gelu_tanh": Pointwise(_gelu_tanh, _gelu_tanh_derivative),
    "quick_gelu": Pointwise(lambda x: x * _sigmoid(_QUICK * x), _quick_gelu_derivative),
    "relu": Pointwise(_relu, lambda x: (x > 0).astype(x.dtype)),
    "relu2": Pointwise(lambda x: _relu(x) ** 2, lambda x: 2.0 * _relu(x)),
    "sigmoid": Pointwise(_sigmoid, _sigmoid_derivative),
    "tanh": Pointwise(np.tanh, lambda x: 1.0 - np.tanh(x) ** 2),
}
