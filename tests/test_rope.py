"""Rotary frequencies and factors against transformers' formulas, and the table op at long positions."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from duomesh.core.rope import attention_factor, inverse_frequencies
from duomesh.core.spec.model import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling
from duomesh.kernels.reference import OPS

LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
LLAMA3_HF = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def yarn(**fields: Any) -> tuple[YarnScaling, dict[str, Any]]:
    """Our scaling and transformers' fields for it."""
    ours = {"factor": 4.0, "original_max_positions": 4096} | fields
    theirs = {"rope_type": "yarn", **ours}
    theirs["original_max_position_embeddings"] = theirs.pop("original_max_positions")
    return YarnScaling(**ours), theirs


SCALINGS: dict[str, tuple[RopeScaling | None, dict[str, Any]]] = {
    "default": (None, {"rope_type": "default"}),
    "linear": (LinearScaling(factor=3.0), {"rope_type": "linear", "factor": 3.0}),
    "llama3": (LLAMA3, LLAMA3_HF),
    "llama3-32": (
        Llama3Scaling(factor=32.0, low_freq_factor=1.5, high_freq_factor=6.0, original_max_positions=2048),
        LLAMA3_HF
        | {"factor": 32.0, "low_freq_factor": 1.5, "high_freq_factor": 6.0, "original_max_position_embeddings": 2048},
    ),
    "yarn": yarn(),
    "yarn-betas": yarn(factor=40.0, beta_fast=20.0, beta_slow=2.0),
    "yarn-not-truncated": yarn(truncate=False),
    "yarn-explicit-factor": yarn(attention_factor=1.37),
    "yarn-mscales": yarn(factor=40.0, mscale=1.0, mscale_all_dim=0.7),
    "yarn-one-mscale": yarn(mscale=0.7),
    "yarn-no-extension": yarn(factor=1.0),
    "yarn-short-context": yarn(original_max_positions=4),  # both ends of the ramp fall on channel 0
}


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("dim", [16, 80, 128])
@pytest.mark.parametrize(("ours", "theirs"), SCALINGS.values(), ids=SCALINGS.keys())
def test_frequencies_match_transformers(
    ours: RopeScaling | None, theirs: dict[str, Any], dim: int, base: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its formulas evaluated in float64 and rounded once, within one unit in the last place of float32.

    It evaluates them in float32, where the rounding of the exponent alone costs up to 14 units (dim 80): that is
    noise, so the test lets it compute wider.
    """
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": base, **theirs},
    )
    function = ROPE_INIT_FUNCTIONS.get(theirs["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        frequencies, factor = function(config)
    assert frequencies.dtype == torch.float64
    rope = RopeSpec(base=base, rotary_dim=dim, scaling=ours)
    got = inverse_frequencies(rope)
    assert got.shape == (dim // 2,) and got.dtype == np.float32
    np.testing.assert_array_max_ulp(got, frequencies.numpy().astype(np.float32), maxulp=1)
    assert attention_factor(rope) == factor


def test_llama3_has_its_three_regions() -> None:
    """Short wavelengths untouched, long ones divided, a blend strictly between."""
    plain = inverse_frequencies(RopeSpec(base=5e5, rotary_dim=128))
    scaled = inverse_frequencies(RopeSpec(base=5e5, rotary_dim=128, scaling=LLAMA3))
    ratio = plain / scaled
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
    assert short.any() and long.any() and (~short & ~long).any()
    assert (ratio[short] == 1).all() and (ratio[long] == 8).all()
    assert ((ratio[~short & ~long] > 1) & (ratio[~short & ~long] < 8)).all()


def test_partial_rotation_counts_channels_of_the_rotated_part() -> None:
    np.testing.assert_array_equal(
        inverse_frequencies(RopeSpec(base=100.0, rotary_dim=4)), np.array([1.0, 0.1], np.float32)
    )


POSITIONS = np.array([[0, 511, 2047, 4095, 131071]], np.int32)


@pytest.mark.parametrize("compute", ["float32", "float64"])
def test_c088_tables_are_right_at_long_positions(compute: str) -> None:
    """head_dim 128, base 10000. The frequency is rounded to float32 and so is its product with the position: the
    angle is off by at most 2 u angle, which is 5e-4 at 4095 and 1.6e-2 at 131071. With bf16 frequencies the error
    exceeds 1 at 2047. In float64 only the frequency is rounded."""
    rope = RopeSpec(base=10000.0, rotary_dim=128)
    exact = POSITIONS[..., None] * 10000.0 ** (-np.arange(0, 128, 2) / 128)
    unit = 2.0**-24
    roundings = 2 if compute == "float32" else 1
    limit = roundings * unit * (exact + 1)

    def error(frequencies: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        cos, sin = OPS["rope_table"](POSITIONS, frequencies, attention_factor=1.0)
        assert cos.dtype == sin.dtype == np.dtype(compute)
        return np.asarray(np.maximum(np.abs(cos - np.cos(exact)), np.abs(sin - np.sin(exact))))

    frequencies = inverse_frequencies(rope)
    assert (error(frequencies.astype(compute)) <= limit).all()
    assert error(frequencies.astype(ml_dtypes.bfloat16).astype(compute))[0, 2].max() > 1


def test_table_of_a_bfloat16_constant_is_still_wide() -> None:
    """Whatever casts the constant, angles are formed in float32."""
    cos, sin = OPS["rope_table"](POSITIONS, np.ones(2, ml_dtypes.bfloat16), attention_factor=1.0)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_array_equal(cos[0, :, 0], np.cos(POSITIONS[0].astype(np.float32)))


def test_the_factor_multiplies_cos_and_sin() -> None:
    plain, scaled = (OPS["rope_table"](POSITIONS, np.array([0.1, 0.2]), attention_factor=f) for f in (1.0, 1.25))
    for one, other in zip(plain, scaled, strict=True):
        np.testing.assert_array_equal(other, 1.25 * one)
