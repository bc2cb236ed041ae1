"""Plans against torch's own parallel modules on the same ranks: `parallelize_module` with `loss_parallel`, and
`fully_shard`, applied to a model that was written by hand.

Both sides are given the same weights and batches and share nothing else: neither the model, nor a layout, nor a
collective, nor the optimizer's loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from sharding_cases import WIDE, Array, batches, params_of
from spec_cases import attention, model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch_oracle import Llama, canonical

from duomesh.backends.torch.session import TorchSession
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.session import AdamW
from duomesh.core.verify.compare import gradient_floor, relative_error

BLOCK = replace(attention(num_heads=8, num_kv_heads=4), mlp=replace(WIDE, ffn_size=24))
SPEC = model(BLOCK, BLOCK, BLOCK, vocab_size=38, hidden_size=20)  # 38 rows are uneven over 4 ranks
CONFIG = AdamW(max_grad_norm=0.25)
LR, STEPS = 0.01, 3


@dataclass(frozen=True)
class Side:
    """What one side made of a step, and of three updates if it made any: (loss, norm) of each, parameters after.

    held: the elements of parameters that this rank keeps between steps, where torch says it.
    """

    loss: float
    grads: dict[str, Array]
    steps: list[tuple[float, float]]
    params: dict[str, Array]
    held: int = 0


def data_of(micro_batches: int) -> list[Batch]:
    """4 samples in each: unequal numbers of weighted targets, the last sample without any."""
    return batches(SPEC.vocab_size, 16)[:micro_batches]


# Torch's side


def apply_tp(made: Llama, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """The recipe of torch's own tutorial on tensor parallelism, with logits left split over the vocabulary."""
    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        plan[f"layers.*.{name}"] = ColwiseParallel()
    for name in ("attention.o", "mlp.down"):
        plan[f"layers.*.{name}"] = RowwiseParallel(output_layouts=stream)
    if sequence_parallel:
        for name in ("norm", "layers.*.attention_norm", "layers.*.mlp_norm"):
            plan[name] = SequenceParallel()
        for name in ("layers.*.attention", "layers.*.mlp"):
            plan[name] = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())
    parallelize_module(made, mesh, plan)


def apply_fsdp(made: Llama, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
    """Every layer and the rest; over a mesh of two axes, sharded on the second and copied on the first."""
    for layer in made.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(made, mesh=mesh, reshard_after_forward=reshard_after_forward)


@dataclass(frozen=True)
class Layout:
    """How torch's side is parallel: over tp ranks, and over `replicas` groups of `shards` data ranks."""

    tp: int = 1
    shards: int = 1
    replicas: int = 1
    sequence_parallel: bool = False
    reshard_after_forward: bool = True

    @property
    def dp(self) -> int:
        return self.shards * self.replicas

    def apply(self, made: Llama) -> int:
        """Parallelizes the model; returns this rank's place among the data ranks."""
        names = ("replicas", "shards", "tp")
        mesh = init_device_mesh("cpu", (self.replicas, self.shards, self.tp), mesh_dim_names=names)
        if self.tp > 1:
            apply_tp(made, mesh["tp"], sequence_parallel=self.sequence_parallel)
        if self.dp > 1:
            data = mesh["replicas", "shards"] if self.replicas > 1 else mesh["shards"]
            apply_fsdp(made, data, reshard_after_forward=self.reshard_after_forward)
        return dist.get_rank() // self.tp


def loss_sum(made: nn.Module, batch: Batch) -> Tensor:
    """The weighted sum of the token losses of this rank's samples."""
    logits = made(torch.from_numpy(batch.tokens).long())
    labels = torch.from_numpy(batch.labels).long().flatten()
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none", ignore_index=IGNORE)
    if isinstance(losses, DTensor):
        assert logits.placements == (Shard(2),), "the vocabulary is no longer split"
        losses = losses.to_local()
    return (losses * torch.from_numpy(batch.weights).flatten()).sum()


@contextmanager
def maybe_loss_parallel(is_on: bool) -> Iterator[None]:
    if is_on:
        with loss_parallel():
            yield
    else:
        yield


def backward(made: nn.Module, mine: Sequence[Batch], layout: Layout) -> float:
    """Gradients of the step, accumulated; its loss over all ranks.

    Each rank counts its own targets, and the sum over ranks divides. `fully_shard` takes the mean over data ranks,
    which their number undoes.
    """
    weight = torch.tensor(sum(float(batch.weights.sum(dtype=np.float64)) for batch in mine), dtype=torch.float64)
    dist.all_reduce(weight)
    weight /= layout.tp  # ranks of one tp group counted the same targets
    total = torch.zeros((), dtype=torch.float64)
    with maybe_loss_parallel(layout.tp > 1):
        for index, batch in enumerate(mine, 1):
            if isinstance(made, FSDPModule):
                made.set_requires_gradient_sync(index == len(mine))
            loss = loss_sum(made, batch) / weight
            (loss * layout.dp).backward()
            total += loss.detach()
    dist.all_reduce(total)
    return total.item() / layout.tp


def full(tensor: Tensor | None) -> Array:
    assert tensor is not None
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().numpy().copy()


def torch_side(layout: Layout, params: dict[str, Array], data: Sequence[Batch], *, steps: int) -> Side:
    made = Llama(SPEC, params)
    place = layout.apply(made)
    samples = len(data[0].tokens) // layout.dp
    cut = slice(place * samples, (place + 1) * samples)
    mine = [Batch(b.tokens[cut], b.labels[cut], None if b.loss_mask is None else b.loss_mask[cut]) for b in data]
    named = {canonical(name): parameter for name, parameter in made.named_parameters()}
    loss = backward(made, mine, layout)
    grads = {name: full(parameter.grad) for name, parameter in named.items()}
    decayed = {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": CONFIG.weight_decay}
    others = {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0}
    adamw = torch.optim.AdamW([decayed, others], lr=LR, betas=(CONFIG.beta1, CONFIG.beta2), eps=CONFIG.eps)
    history = []
    for _ in range(steps):
        made.zero_grad()
        step_loss = backward(made, mine, layout)
        history.append((step_loss, clip(list(named.values()))))
        adamw.step()
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in named.values())
    return Side(loss, grads, history, {name: full(parameter) for name, parameter in named.items()}, held)


def clip(parameters: list[nn.Parameter]) -> float:
    """torch's `clip_grad_norm_` in two halves, without the 1e-6 that it adds to the norm: our contract has none."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    torch.nn.utils.clip_grads_with_norm_(parameters, CONFIG.max_grad_norm or 0.0, norm - 1e-6)
    return norm.item()


# Ours


def our_side(plan: str, params: dict[str, Array], data: Sequence[Batch], *, steps: int) -> Side:
    session = TorchSession(build_program(SPEC), plan=Plan.parse(plan), compute_dtype="float64", device="cpu")
    session.load_params(params.items())
    loss, grads = session.loss_and_grads(data)
    session.init_optimizer(CONFIG)
    history = [(made.loss, made.grad_norm) for made in (session.train_step(data, LR) for _ in range(steps))]
    return Side(loss, grads, history, dict(session.params()))


def both_sides(rank: int, world: int, layout: Layout, plans: Sequence[str], steps: int) -> tuple[Side, list[Side]]:
    params = params_of(build_program(SPEC))
    data = data_of(Plan.parse(plans[0]).resolved_micro_batches)
    want = torch_side(layout, params, data, steps=steps)
    return want, [our_side(plan, params, data, steps=steps) for plan in plans]


def assert_same(got: Side, want: Side) -> None:
    assert abs(got.loss - want.loss) <= bound("loss", "float64") * want.loss
    assert set(got.grads) == set(want.grads)
    floor = gradient_floor(want.grads)
    for name, grad in want.grads.items():
        assert relative_error(grad, got.grads[name], floor=floor)[0] <= bound("gradient", "float64"), name
    for (want_loss, want_norm), (got_loss, got_norm) in zip(want.steps, got.steps, strict=True):
        assert abs(got_loss - want_loss) <= bound("loss", "float64") * want_loss
        assert abs(got_norm - want_norm) <= bound("global_norm", "float64") * want_norm
    for name, value in want.params.items():
        assert relative_error(value, got.params[name])[0] <= bound("updated_parameter", "float64"), name


def assert_ranks_agree(results: list[tuple[Side, list[Side]]], layout: Layout, *, is_trained: bool) -> None:
    """On every rank; and torch's side was as parallel as it claims."""
    elements = build_program(SPEC).num_params
    for want, sides in results:
        assert want.held * layout.tp * layout.shards < 1.2 * elements  # norms are whole, and uneven shards round up
        assert len(want.steps) == (STEPS if is_trained else 0)
        for got in sides:
            assert_same(got, want)


def test_the_oracle_is_the_same_model_on_one_device() -> None:
    params, data = params_of(build_program(SPEC)), data_of(2)
    made = Llama(SPEC, params)
    weight = sum(float(batch.weights.sum(dtype=np.float64)) for batch in data)
    loss = sum((loss_sum(made, batch) for batch in data), torch.zeros((), dtype=torch.float64)) / weight
    loss.backward()
    grads = {canonical(name): full(parameter.grad) for name, parameter in made.named_parameters()}
    got = our_side("", params, data, steps=0)
    assert_same(got, Side(loss.item(), grads, [], params))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_is_that_of_parallelize_module(ranks: RankPool, tp: int, sequence_parallel: bool) -> None:
    """Logits stay split over the vocabulary on both sides."""
    plan = f"tp={tp}" + ",sequence_parallel" * sequence_parallel
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel)
    assert_ranks_agree(ranks.run(tp, both_sides, layout, [plan], 0), layout, is_trained=False)


@pytest.mark.parametrize("dp", [2, 4])
def test_zero_is_fully_shard(ranks: RankPool, dp: int) -> None:
    """Three updates; at dp=4 one rank has no target at all."""
    plans = [f"dp={dp},zero={zero}" for zero in (3, 2)]
    layout = Layout(shards=dp)
    assert_ranks_agree(ranks.run(dp, both_sides, layout, plans, STEPS), layout, is_trained=True)


def test_micro_batches_are_accumulated_as_fully_shard_does(ranks: RankPool) -> None:
    plans = [f"dp=2,zero={zero},micro_batches=2" for zero in (3, 2)]
    layout = Layout(shards=2, reshard_after_forward=False)
    assert_ranks_agree(ranks.run(2, both_sides, layout, plans, STEPS), layout, is_trained=True)


def test_hybrid_shards_are_those_of_a_mesh_of_two_axes(ranks: RankPool) -> None:
    plans = ["dp=4,zero=3,zero_shard=2", "dp=4,zero=2,zero_shard=2"]
    layout = Layout(shards=2, replicas=2)
    assert_ranks_agree(ranks.run(4, both_sides, layout, plans, STEPS), layout, is_trained=True)


def test_tensor_and_data_parallelism_together(ranks: RankPool) -> None:
    """`fully_shard` over what `parallelize_module` has split."""
    plans = ["tp=2,dp=2,sequence_parallel,zero=3", "tp=2,dp=2,zero=2"]
    layout = Layout(tp=2, shards=2, sequence_parallel=True)
    assert_ranks_agree(ranks.run(4, both_sides, layout, plans, STEPS), layout, is_trained=True)
