"""On an NVIDIA GPU: both backends against the CPU in fp32 and bf16, and a compiled step against an eager one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from duomesh.api import new_session
from duomesh.core.bounds import bound
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.session import AdamW
from duomesh.core.spec.presets import preset
from duomesh.core.verify.run import random_batch
from duomesh.sides import verify

pytestmark = pytest.mark.gpu
TINY = ("tiny-llama3", "tiny-mistral", "tiny-qwen2", "tiny-qwen3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", TINY)
def test_both_backends_agree_with_the_cpu(name: str, dtype: str) -> None:
    sides = ["torch:device=cpu", "torch:device=cuda", "jax:device=cuda"]
    for comparison in verify(name, sides, dtype=dtype, seq=64).comparisons:
        assert comparison.passed, (comparison.side, comparison.first_difference)


@pytest.mark.parametrize("name", TINY)
def test_a_compiled_step_learns_as_an_eager_one(name: str) -> None:
    """bf16 losses of ten steps: fusion changes roundings, never more than bf16's own."""
    spec = preset(name)
    program = build_program(spec)
    batch = random_batch(spec.vocab_size, batch=2, seq=64, seed=1)

    def losses(**options: Any) -> list[float]:
        session = new_session(spec, backend="torch", device="cuda", **options)
        session.load_params(initial_params(program, 0))
        session.init_optimizer(AdamW())
        return [session.train_step([batch], 1e-3).loss for _ in range(10)]

    wide, eager = losses(dtype="float32"), losses(dtype="bfloat16")
    compiled = losses(dtype="bfloat16", compile=True)
    own = float(np.abs(np.array(eager) - wide).max() / np.abs(wide).max())
    assert np.abs(np.array(compiled) - wide).max() / np.abs(wide).max() <= bound("loss", "bfloat16", own_error=2 * own)
    assert compiled[-1] < compiled[0]
