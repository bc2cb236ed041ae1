"""Time of a full training step (forward, loss, backward, clipping, AdamW) of our lowerings on one GPU.

    python benchmarks/train_step.py torch-compiled L8B-8 --micro-batch 1 --seq 8192 --json out.json

bf16 compute, fp32 master and moments, fresh random tokens each step, no recomputation. A step is timed from its call
until the device is done. Floating-point operations: `core.ir.cost.step_flops`; MFU is against 989 TFLOP/s. Results
count only beside peers measured in the same run on the same card; `benchmarks/results/` keeps them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from duomesh.api import new_session
from duomesh.core.batch import Batch
from duomesh.core.ir.build import build_program
from duomesh.core.ir.cost import step_flops
from duomesh.core.session import AdamW
from duomesh.core.spec.model import AttentionSpec, BlockSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec

PEAK_BF16 = 989e12  # H200 SXM, dense bf16, data sheet


def shape(layers: int, hidden: int, ffn: int, heads: tuple[int, int, int], vocab: int, *, tied: bool) -> ModelSpec:
    """A LLaMA-3-shaped model; heads are (query heads, kv heads, head dim)."""
    norm = NormSpec(eps=1e-5)
    rope = RopeSpec(base=500000.0, rotary_dim=heads[2])
    block = BlockSpec(
        attention=AttentionSpec(num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], rope=rope),
        mlp=MlpSpec(ffn_size=ffn, activation="silu", is_gated=True),
        attention_norm=norm,
        mlp_norm=norm,
    )
    return ModelSpec(
        vocab_size=vocab,
        hidden_size=hidden,
        blocks=(block,) * layers,
        final_norm=norm,
        tie_embeddings=tied,
        max_positions=8192,
        init_scaled_output=False,
    )


SHAPES = {
    "L8B-8": shape(8, 4096, 14336, (32, 8, 128), 128256, tied=False),
    "L1B": shape(16, 2048, 8192, (32, 8, 64), 128256, tied=True),
    "tiny": shape(2, 256, 512, (4, 2, 64), 1024, tied=False),
}


def fill_torch(session: Any) -> None:
    """Normal weights drawn on the device: a benchmark needs no particular bits."""
    import torch

    with torch.no_grad():
        for name, parameter in session.model.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(0.0, 0.02)
    session._has_params = True  # past `load_params`, which would need host arrays


def fill_jax(session: Any) -> None:
    import jax
    import jax.numpy as jnp

    params = {}
    for i, (name, dims) in enumerate(session.model.shapes.items()):
        make = jax.jit(lambda key, dims=dims: 0.02 * jax.random.normal(key, dims, jnp.bfloat16))
        params[name] = jnp.ones(dims, jnp.bfloat16) if name.endswith("norm.weight") else make(jax.random.key(i))
    session._params = params


def peak_gib(kind: str, session: Any) -> float:
    if kind == "jax":
        stats = session.device.memory_stats() or {}
        return float(stats.get("peak_bytes_in_use", 0)) / 2**30
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


# device time is sorted into kinds by what a kernel's name holds; the first that fits counts
KINDS = (
    ("attention", ("sdpa", "flash", "fmha")),
    ("matmul", ("nvjet", "gemm", "cutlass", "cublas")),
    ("optimizer", ("adam", "multi_tensor")),
    ("compiled elementwise", ("triton",)),
    ("copies and casts", ("memcpy", "copy", "memset", "fill")),
)


def profile_torch(step: Any) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Device milliseconds of one step by kind, and its largest kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        step()
    kernels = [
        (e.key, e.self_device_time_total / 1e3)
        for e in prof.key_averages()
        if e.device_type == DeviceType.CUDA and "#" not in e.key
    ]
    by_kind: dict[str, float] = {}
    for name, ms in kernels:
        kind = next((k for k, words in KINDS if any(w in name.lower() for w in words)), "other")
        by_kind[kind] = by_kind.get(kind, 0.0) + ms
    return by_kind, sorted(kernels, key=lambda row: -row[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["torch-eager", "torch-compiled", "jax"])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()

    spec = SHAPES[args.shape]
    backend = args.kind.partition("-")[0]
    session: Any = new_session(spec, backend=backend, dtype="bfloat16", compile=args.kind == "torch-compiled")
    (fill_jax if backend == "jax" else fill_torch)(session)
    session.init_optimizer(AdamW())
    rng = np.random.default_rng(0)

    def batch() -> Batch:
        ids = rng.integers(0, spec.vocab_size, (args.micro_batch, args.seq + 1)).astype(np.int32)
        return Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]))

    fixed = batch()
    started = time.perf_counter()
    losses = [session.train_step([fixed], 1e-4).loss]
    first_s = time.perf_counter() - started
    losses += [session.train_step([fixed], 1e-4).loss for _ in range(3)]
    batches = [batch() for _ in range(args.steps)]
    times = []
    for one in batches:
        started = time.perf_counter()
        session.train_step([one], 1e-4)  # returns numbers, so the device is done
        times.append((time.perf_counter() - started) * 1e3)
    median = statistics.median(times)
    flops = step_flops(build_program(spec), batch=args.micro_batch, seq=args.seq)
    result: dict[str, Any] = {
        "peer": f"duomesh-{args.kind}",
        "shape": args.shape,
        "micro_batch": args.micro_batch,
        "seq": args.seq,
        "ms": round(median, 1),
        "min_ms": round(min(times), 1),
        "max_ms": round(max(times), 1),
        "tokens_per_s": round(args.micro_batch * args.seq / median * 1e3),
        "tflops": round(flops / median / 1e9, 1),
        "mfu": round(flops / median / 1e9 / (PEAK_BF16 / 1e12) * 100, 1),
        "peak_gib": round(peak_gib(backend, session), 1),
        "first_step_s": round(first_s, 1),
        "losses": [round(x, 3) for x in losses],
    }
    if args.profile and backend == "torch":
        by_kind, kernels = profile_torch(lambda: session.train_step([fixed], 1e-4))
        result["device_ms"] = {kind: round(ms, 1) for kind, ms in sorted(by_kind.items(), key=lambda row: -row[1])}
        result["kernels_ms"] = [(name[:60], round(ms, 2)) for name, ms in kernels[:12]]
    print(json.dumps(result))
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
