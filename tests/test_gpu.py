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
from duomesh.kernels.reference import ADJOINTS, OPS
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


@pytest.mark.parametrize("how", ["eager", "compiled", "jax"])
def test_dropout_draws_the_bits_of_the_reference(how: str) -> None:
    """Forward and backward, also where a compiler writes the integer arithmetic; features that four does not divide."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((3, 129, 514)).astype(np.float32)
    counted = [rng.integers(-(2**31), 2**31, n).astype(np.int32) for n in (3, 129, 2)]
    attrs: dict[str, Any] = {"rate": 0.1, "site": 1}
    want = OPS["dropout"](x, *counted, **attrs)
    d_want = ADJOINTS["dropout"]((x,), (x, *counted), (), **attrs)[0]
    if how == "jax":
        import jax

        from duomesh.backends.jax.ops import dropout as of_jax

        made, pull = jax.vjp(jax.jit(lambda x: of_jax(x, *counted, **attrs)), jax.device_put(x, jax.devices("gpu")[0]))
        got, d_got = np.asarray(made), np.asarray(pull(made * 0 + x)[0])
    else:
        import torch

        from duomesh.backends.torch.ops import dropout as of_torch

        tensor = torch.from_numpy(x).cuda().requires_grad_()
        given = [torch.from_numpy(one).cuda() for one in counted]
        function = torch.compile(of_torch, fullgraph=True) if how == "compiled" else of_torch
        out = function(tensor, *given, **attrs)
        out.backward(tensor.detach())
        assert tensor.grad is not None
        got, d_got = out.detach().cpu().numpy(), tensor.grad.cpu().numpy()
    assert np.array_equal(got, want) and np.array_equal(d_got, d_want)
