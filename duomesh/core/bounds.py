"""How far two results may differ: the one place where tolerances live (design.md section 7).

Errors are per tensor, e(x) = max|x - ref| / max|ref|. A bound follows from the dtype, the number of summed terms and
the error that the reference itself makes in that dtype; it is never a number chosen to make a comparison pass.
"""

from __future__ import annotations

from math import sqrt
from typing import Literal

__all__ = ["TINY_PARAMS", "Quantity", "bound"]

Quantity = Literal["value", "logits", "loss", "gradient", "global_norm", "updated_parameter", "loss_curve"]

# float64 against float64: both sides compute the same sums in other orders.
_FLOAT64 = {
    "value": 1e-12,
    "logits": 1e-12,
    "loss": 1e-12,
    "gradient": 1e-10,
    "global_norm": 1e-12,
    "updated_parameter": 1e-9,
    "loss_curve": 1e-10,
}
# fp32 caps that no formula lifts, for models small enough that only a fault reaches them.
_CAPS_FP32 = {"logits": 1e-5, "loss": 1e-6, "gradient": 1e-5}
_CAP_FP32_GRADIENT_ACROSS = 1e-4
_CAP_BF16 = 5e-2
# Losses of a whole fp32 run: rounding that feeds back through dozens of updates, which no formula follows.
_FP32_LOSS_CURVE = 1e-4
TINY_PARAMS = 50_000_000


def bound(
    quantity: Quantity,
    dtype: str,
    *,
    terms: int = 1,
    own_error: float = 0.0,
    across_frameworks: bool = False,
    num_params: int = 0,
) -> float:
    """The largest error that passes.

    Args:
        quantity: what is compared; "loss_curve" is the loss at each step of a run of some dozens of steps.
        dtype: the compute dtype: "float64", "float32" or "bfloat16".
        terms: K, the longest chain of summed terms behind the quantity.
        own_error: error of the reference in this dtype against itself in a wider one (e_one).
        across_frameworks: the two sides are different frameworks.
        num_params: size of the model; the fp32 caps hold up to TINY_PARAMS.

    Returns:
        float64: a fixed small number. float32: max(4 e_one, 8 u sqrt(K)) with u = 2^-24, capped for tiny models.
        bfloat16: 2 e_one, capped.
    """
    if dtype == "float64":
        return _FLOAT64[quantity]
    if dtype == "bfloat16":
        return min(2 * own_error, _CAP_BF16)
    if quantity == "loss_curve":
        return _FP32_LOSS_CURVE
    limit = max(4 * own_error, 8 * 2.0**-24 * sqrt(terms))
    cap = _CAPS_FP32.get(quantity)
    if quantity == "gradient" and across_frameworks:
        cap = _CAP_FP32_GRADIENT_ACROSS
    return limit if cap is None or num_params > TINY_PARAMS else min(limit, cap)
