"""What the ranks of a torch plan run in tests, and the model and batches that they run it on. Imports no jax."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from adamw import adamw_steps
from sharding_cases import NORM, WIDE, Array, batches, params_of
from spec_cases import attention, model

from duomesh.backends.torch.debug import CollectiveRecorder, LargestTensor, check_invariants
from duomesh.backends.torch.session import TorchSession
from duomesh.core.batch import Batch
from duomesh.core.dropout import DropoutKey
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.session import AdamW
from duomesh.core.sharding.collectives import StepShape, step_trace
from duomesh.core.spec.model import ModelSpec
from duomesh.kernels.reference.model import ReferenceModel

CONFIG = AdamW(max_grad_norm=0.25)
LR, STEPS, SEQ, VOCAB = 0.01, 3, 16, 37
# what a session is doing when a phase of the sharded program runs
STAGES = {"recompute": "backward"}


def plan_model(*, ties: bool = False, dropout: bool = False, over: str = "head") -> ModelSpec:
    """Everything that a plan can get wrong: two kv heads (copies at tp=4), biases, q/k norms, post norms, caps, an odd
    vocabulary; and a plain layer."""
    heads: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2}
    rich = replace(
        attention(**heads, q_bias=True, k_bias=True, v_bias=True, o_bias=True, qk_norm=NORM, qk_norm_over=over),
        mlp=replace(WIDE, ffn_size=24, up_bias=True, down_bias=True),
        attention_post_norm=NORM,
    )
    plain = replace(attention(**heads, window=5), mlp=replace(WIDE, ffn_size=24))
    return model(
        rich,
        plain,
        vocab_size=VOCAB,
        hidden_size=16,
        tie_embeddings=ties,
        dropout=0.1 if dropout else 0.0,
        logit_softcap=4.0,
        embedding_scale=3.0,
    )


def plan_batches(micro_batches: int) -> list[Batch]:
    """4 samples in each, with unequal numbers of targets, and one without any."""
    made = batches(VOCAB, SEQ)[:micro_batches]
    return [replace(batch, sample_ids=np.arange(4, dtype=np.int64) + 4 * i) for i, batch in enumerate(made)]


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
    data = plan_batches(made.micro_batches)
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
    shape = StepShape(4, SEQ, session.plan.micro_batches)
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
    record: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        session.model(**session._device_inputs(plan_batches(1)[0]), record=record)
    check_invariants(session.storage.sharded, session.groups, record)
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


def reference_steps(spec: ModelSpec, micro_batches: int) -> tuple[float, dict[str, Array], list[Any], dict[str, Array]]:
    """Loss and gradients of a step, (loss, norm) of three updates and parameters after them, of one rank in numpy."""
    program, data = build_program(spec), plan_batches(micro_batches)
    params = params_of(program)

    def pull(now: dict[str, Array], step: int) -> tuple[float, dict[str, Array]]:
        key = DropoutKey(7, step) if spec.dropout else None
        return ReferenceModel(program, now).loss_and_grads(data, key)

    after, history = adamw_steps(program, params, pull, CONFIG, LR, STEPS)
    return *pull(params, 0), history, after
