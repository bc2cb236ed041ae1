"""On an NVIDIA GPU: both backends against the CPU in fp32 and bf16, and a compiled step against an eager one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from duomesh.api import new_session
from duomesh.core.bounds import bound
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
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


def _kernels(session: Any, batch: Any) -> int:
    """Kernels and copies of one training step on the GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        session.train_step([batch], 1e-3)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        session.train_step([batch], 1e-3)
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(event.count for event in trace.key_averages() if event.device_type == on_device)


@pytest.mark.parametrize("compile", [False, True])
def test_plan_axes_of_size_one_cost_nothing(compile: bool) -> None:
    """As many kernels and copies a step under a plan whose axes all have size 1 as without one."""
    spec = preset("tiny-llama3")
    program = build_program(spec)
    batch = random_batch(spec.vocab_size, batch=2, seq=64, seed=1)
    counts = []
    for plan in (None, Plan(tp=1, dp=1, cp=1, pp=1, precision="bfloat16")):
        session = new_session(spec, backend="torch", device="cuda", dtype="bfloat16", compile=compile, plan=plan)
        session.load_params(initial_params(program, 0))
        session.init_optimizer(AdamW())
        counts.append(_kernels(session, batch))
    assert counts[0] == counts[1] > 0
    print(f"kernels and copies of a step, compile={compile}: {counts}")


def test_a_rank_of_nccl_moves_nothing(tmp_path: Any) -> None:
    """A job of one rank over NCCL: the same losses as without a job, and no collective in a step."""
    import torch
    import torch.distributed as dist

    from duomesh.backends.torch.debug import CollectiveRecorder
    from duomesh.backends.torch.session import TorchSession

    spec = preset("tiny-llama3")
    program = build_program(spec)
    batch = random_batch(spec.vocab_size, batch=2, seq=64, seed=1)

    def losses() -> tuple[list[float], int]:
        session = TorchSession(program, plan=Plan(), compute_dtype="bfloat16", device="cuda")
        session.load_params(initial_params(program, 0))
        session.init_optimizer(AdamW())
        with CollectiveRecorder(session.groups) as recorder:
            made = [session.train_step([batch], 1e-3).loss for _ in range(3)]
        return made, len(recorder.recorded)

    alone = losses()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        assert losses() == alone and alone[1] == 0
    finally:
        dist.destroy_process_group()
