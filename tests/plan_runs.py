"""What the ranks of a torch plan run in tests. Imports no jax."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from plan_cases import CONFIG, LR, SEQ, STEPS, plan_batches
from sharding_cases import Array, params_of

from duomesh.backends.torch.debug import CollectiveRecorder, LargestTensor
from duomesh.backends.torch.session import TorchSession
from duomesh.core.batch import Batch
from duomesh.core.dropout import DropoutKey
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.sharding.collectives import StepShape, step_trace
from duomesh.core.spec.model import ModelSpec

# what a session is doing when a phase of the sharded program runs
STAGES = {"recompute": "backward"}


@dataclass(frozen=True)
class Outcome:
    """What a rank saw of a plan."""

    loss: float
    grads: dict[str, Array]
    steps: list[tuple[float, float]]
    params: dict[str, Array]
    state: dict[tuple[str, str], Array]
    local_elements: int
    differences: list[str]
    recorded: int


def run_plan(rank: int, world: int, plan: str, spec: ModelSpec, dtype: str) -> Outcome:
    """Loss and gradients of a step, three updates, and what differs between issued and listed collectives."""
    made = Plan.parse(plan)
    program = build_program(spec)
    session = TorchSession(program, plan=made, compute_dtype=dtype, device="cpu")  # type: ignore[arg-type]
    cast = np.float64 if dtype == "float64" else np.float32
    session.load_params((name, array.astype(cast)) for name, array in params_of(program).items())
    data = plan_batches(made.resolved_micro_batches)
    key = DropoutKey(7, 0) if spec.dropout else None
    loss, grads = session.loss_and_grads(data, dropout=key)
    session.init_optimizer(CONFIG)
    steps, differences, recorded = [], [], 0
    for step in range(STEPS):
        key = DropoutKey(7, step + 1) if spec.dropout else None
        with CollectiveRecorder(session.groups) as recorder:
            result = session.train_step(data, LR, dropout=key)
        steps.append((result.loss, result.grad_norm))
        differences += compare_collectives(session, recorder)
        recorded += len(recorder.recorded)
    local = sum(p.numel() for p in {id(p): p for p in session.model.parameters()}.values())
    state = {(group, name): array for group, name, array in session.optimizer_state()}
    return Outcome(loss, grads, steps, dict(session.params()), state, local, differences, recorded)


def compare_collectives(session: TorchSession, recorder: CollectiveRecorder) -> list[str]:
    """What was issued against what the sharded program lists: as a multiset, and in order within a group, a stage and a
    kind."""
    shape = StepShape(4, SEQ, session.plan.resolved_micro_batches)
    grads = torch.float64 if session.compute_dtype == "float64" else torch.float32
    dtypes = {"compute": grads, "wide": grads, "int": torch.int32, "grad": grads}
    listed = [
        (STAGES.get(c.phase, c.phase), c.kind, c.axes, dtypes[c.dtype], c.elements)
        for c in step_trace(session.storage, shape)
    ]
    issued = [(c.stage, c.kind, c.axes, c.dtype, c.elements) for c in recorder.recorded]
    missing, extra = Counter(listed) - Counter(issued), Counter(issued) - Counter(listed)
    out = [f"listed and not issued: {c} x{n}" for c, n in missing.items()]
    out += [f"issued and not listed: {c} x{n}" for c, n in extra.items()]
    for lane in {c[:3] for c in listed}:
        if [c for c in listed if c[:3] == lane] != [c for c in issued if c[:3] == lane]:
            out.append(f"another order in {lane}")
    return out


def run_trace(rank: int, world: int, plan: str, spec: ModelSpec) -> dict[str, Array]:
    """Every value of one pass, whole; equal values are compared across ranks."""
    program = build_program(spec)
    session = TorchSession(program, plan=Plan.parse(plan), compute_dtype="float64", device="cpu")
    session.load_params(params_of(program).items())
    session.check_invariants(plan_batches(1)[0])
    return dict(session.trace(plan_batches(1)[0], grads=False).values)


def run_largest(rank: int, world: int, plan: str, spec: ModelSpec, samples: int, seq: int) -> tuple[int, str, int]:
    """The largest tensor of a training step, by which op, and the elements of the largest bucket."""
    program = build_program(spec)
    session = TorchSession(program, plan=Plan.parse(plan), device="cpu")
    session.load_params((name, array.astype(np.float32)) for name, array in params_of(program).items())
    session.init_optimizer(CONFIG)
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, (samples, seq + 1)).astype(np.int32)
    batch = Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]))
    with LargestTensor() as largest:
        session.train_step([batch], LR)
    return largest.elements, largest.op, max(bucket.size for bucket in session.storage.buckets)
