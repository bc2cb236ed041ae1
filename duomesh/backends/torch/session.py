"""The torch side of `core.session.Session`, on one device or on the ranks of a plan.

Every rank of a plan has a session of its own and calls the same methods in the same order with the same arguments:
whole batches and whole tensors, of which each takes its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from duomesh.backends.torch.arrays import TORCH_DTYPES, to_tensor
from duomesh.backends.torch.debug import Digests, check_invariants, digest, equal_values
from duomesh.backends.torch.groups import Groups, needed_groups
from duomesh.backends.torch.lower import LoweredModel
from duomesh.backends.torch.state import OneDevice, OnMesh, State
from duomesh.backends.torch.whole import gather_value
from duomesh.core.activity import doing, each
from duomesh.core.arrays import Array
from duomesh.core.batch import Batch, denominator, num_targets
from duomesh.core.boxes import Box, Sliceable
from duomesh.core.dropout import DropoutKey, check_dropout, dropout_inputs
from duomesh.core.errors import BackendError
from duomesh.core.ir.program import ModelProgram
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.shard import shard_for_session
from duomesh.core.plan.validate import check_step
from duomesh.core.session import AdamW, ComputeDType, StateLoader, StepResult, Trace, check_learning_rate
from duomesh.core.sharding.local import check_batch, fill_batch

__all__ = ["TorchSession"]

# Fastest first on the GPUs measured so far; torch takes the first that supports a call.
_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


_KINDS = {"params": "weight", "master": "master weight"}  # what messages call groups of state


@contextmanager
def _exact_matmul() -> Iterator[None]:
    """fp32 matmuls in fp32, whatever TF32 switch somebody set: the run's dtype says what is computed in."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _device(name: str | None) -> torch.device:
    """The device of that name; None takes a GPU if there is one. Raises BackendError."""
    gpus = torch.cuda.device_count()
    try:
        device = torch.device(name or ("cuda" if gpus else "cpu"))
    except RuntimeError:
        raise BackendError(f"device {name!r} is not a name that torch knows. Use 'cpu' or 'cuda'.") from None
    count = {"cpu": 1, "cuda": gpus}.get(device.type)
    if count is None:
        raise BackendError(f"device {name!r} is none that this backend runs on. Use 'cpu' or 'cuda'.")
    if (device.index or 0) >= count:
        raise BackendError(f"device {name!r} was asked for, but torch finds {count} of its kind. Use device='cpu'.")
    return device


class TorchSession:
    """A lowered model on one device, or this rank's part of one on the ranks of a plan.

    Args:
        program: what to run.
        plan: the layout; its ranks must have been started (see `launch`). None for one rank.
        compute_dtype: of parameters and activations; bfloat16 keeps an fp32 master in the optimizer.
        device: such as "cpu" or "cuda"; None takes a GPU if there is one.
        compile: compile each block kind, the head and the loss with `torch.compile`.

    Raises:
        PlanError: the plan does not fit the model. BackendError: it needs another number of ranks, or the device is not
            there.
    """

    def __init__(
        self,
        program: ModelProgram,
        *,
        plan: Plan | None = None,
        compute_dtype: ComputeDType = "float32",
        device: str | None = None,
        compile: bool = False,
    ) -> None:
        self.program = program
        self.plan = plan or Plan()
        self.compute_dtype = compute_dtype
        self.device = _device(device)
        self._wide = torch.float64 if compute_dtype == "float64" else torch.float32
        self.storage = shard_for_session(program, self.plan, compute_dtype)
        mesh = self.storage.sharded.mesh
        self.groups = Groups(mesh, needed_groups(self.storage), self.device)
        self.model = self._lower()
        self._state: State = (
            OneDevice(self.model, self._wide)
            if mesh.world_size == 1
            else OnMesh(self.model, self.storage, self.groups, self._grad_dtype(), self._wide)
        )
        self._has_params = False
        if compile:
            for _, module in self.model.steps:
                # the first length is compiled as it is, a second one for any: evaluation and generation use others
                module.compile(fullgraph=True)

    def _lower(self) -> LoweredModel:
        dtype = TORCH_DTYPES[self.compute_dtype]
        try:
            ties = self.storage.zero == 3  # each use is scattered by itself
            return LoweredModel(self.storage.sharded, self.groups, dtype, self.device, separate_ties=ties)
        except RuntimeError as error:  # torch's way to say that memory is out
            reason = str(error).splitlines()[0]
            raise BackendError(
                f"{self.device} cannot hold {self.program.num_params:,} parameters of {dtype}: {reason}"
            ) from error

    def _grad_dtype(self) -> torch.dtype:
        return self._wide if self.plan.grad_dtype is None else TORCH_DTYPES[self.plan.grad_dtype]

    # Parameters

    def _filled(self) -> State:
        """Raises BackendError if there are no weights yet."""
        if not self._has_params:
            raise BackendError(
                "this session has no parameters yet, or what set them was interrupted; call load_params first."
            )
        return self._state

    def load_params(self, params: Iterable[tuple[str, Sliceable]]) -> None:
        loader = StateLoader(self.program, groups=("params",))
        self._has_params = False  # until all have come: a stream that stops half-way leaves no usable weights
        self._state.optimizer = None
        with doing("loading weights"):
            for name, tensor in each("loading", params):
                loader.check("params", name, tensor.shape)
                self._state.set_param(name, tensor)
            loader.finish()
            self._state.end_of_params()
        self._has_params = True

    def params(self) -> Iterator[tuple[str, Array]]:
        return self._filled().params()

    # Forward and backward

    def _device_inputs(self, batch: Batch, dropout: DropoutKey | None = None) -> dict[str, Tensor | None]:
        """This rank's part of a batch, and what dropout masks are counted with."""
        batch.check_vocabulary(self.program.spec.vocab_size)
        self._filled()
        part = self._part_of_batch(batch.tokens.shape)
        counted = dropout_inputs(self.program, batch, dropout)

        def put(array: Array | None, dtype: torch.dtype, at: tuple[slice, ...] = part) -> Tensor | None:
            return None if array is None else to_tensor(array[at]).to(self.device, dtype)

        return {
            "samples": put(counted["samples"], torch.int32, part[:1]),
            "places": put(counted["places"], torch.int32, part[1:]),
            "dropout_keys": put(counted["dropout_keys"], torch.int32, ()),
            "tokens": put(batch.tokens, torch.int32),
            "positions": put(batch.resolved_positions, torch.int32),
            "segment_ids": put(batch.segment_ids, torch.int32),
            "labels": put(batch.labels, torch.int32),
            "loss_mask": put(batch.weights, self._wide),
        }

    def _part_of_batch(self, shape: tuple[int, int]) -> tuple[slice, ...]:
        """Raises BackendError if the ranks cannot share a batch of this shape."""
        rules, mesh = self.storage.sharded.rules, self.storage.sharded.mesh
        check_batch(self.storage.sharded, shape)
        out = []
        for name, size in zip(("batch", "seq"), shape, strict=True):
            axes = [axis for axis in mesh.names if rules[axis].data == name]
            length, place = size // self.groups.size(axes), self.groups.place(axes)
            out.append(slice(place * length, (place + 1) * length))
        return tuple(out)

    @contextmanager
    def _forward(self, *, grads: bool) -> Iterator[None]:
        """The state of torch that every pass runs in, whatever the caller's is."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(grads))
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            if self.compute_dtype == "float32":
                stack.enter_context(_exact_matmul())
            if self.device.type == "cuda":
                stack.enter_context(sdpa_kernel(_ATTENTION, set_priority=True))
            yield

    def _loss_sum(
        self, batch: Batch, dropout: DropoutKey | None = None, record: dict[str, Tensor] | None = None
    ) -> Tensor:
        return self.model(**self._device_inputs(batch, dropout), record=record)

    def _backward(self, batches: Sequence[Batch], divisor: float, dropout: DropoutKey | None) -> list[Tensor]:
        """Leaves the gradients of the step's objective in the state, summed over micro-batches in at least fp32.

        Returns the loss terms, scalars on the device whose sum is the loss.
        """
        state, stage = self._filled(), self.groups.stage
        terms: list[Tensor] = []
        state.begin_step()
        for index, batch in enumerate(batches, 1):
            with self._forward(grads=True):
                with stage("forward"):
                    term = self._loss_sum(batch, dropout) / divisor
                state.begin_micro_batch(is_last=index == len(batches))
                with stage("backward"):
                    term.backward()
            terms.append(term.detach())
            state.end_micro_batch(is_only=len(batches) == 1)
        state.end_step()
        return terms

    def loss_and_grads(
        self, batches: Sequence[Batch], *, dropout: DropoutKey | None = None
    ) -> tuple[float, dict[str, Array]]:
        check_step(self.plan, [len(batch.tokens) for batch in batches])
        terms = self._backward(batches, denominator(batches), dropout)
        with self.groups.stage("gathering gradients"):
            return torch.stack(terms).double().sum().item(), dict(self._state.grads())

    def trace(self, batch: Batch, *, grads: bool) -> Trace:
        record: dict[str, Tensor] = {}
        state, stage, found = self._filled(), self.groups.stage, {}
        with self._forward(grads=grads):
            with stage("forward"):
                loss = self._loss_sum(batch, record=record) / denominator([batch])
            if grads:
                state.begin_step()
                state.begin_micro_batch(is_last=True)
                with stage("backward"):
                    loss.backward()
                state.end_micro_batch(is_only=True)
                state.end_step()
                with stage("gathering gradients"):
                    found = dict(state.grads())
        with stage("gathering values"):
            return Trace(dict(self._whole_values(record, batch)), loss.item(), found)

    def _whole_values(self, record: Mapping[str, Tensor], batch: Batch) -> Iterator[tuple[str, Array]]:
        """Every recorded value from all ranks' parts of it."""
        samples, length = batch.tokens.shape
        extents = self.storage.sharded.extents(batch=samples, seq=length)
        for prefix, _, program in self.storage.sharded.steps:
            for made in program.calls():
                for name in made.call.op.outputs:
                    local, layout = record[prefix + name], program.layouts[name]
                    yield prefix + name, gather_value(local, program.axes(name), layout, extents, self.groups)

    def eval_loss(self, batch: Batch) -> tuple[float, float]:
        with self.groups.stage("evaluation"), self._forward(grads=False):
            return self._loss_sum(batch).item(), num_targets([batch])

    def logits(self, tokens: Array) -> Array:
        samples, length = Batch(tokens=tokens, labels=tokens).tokens.shape
        filled = fill_batch(self.storage.sharded, tokens)
        inputs = self._device_inputs(Batch(tokens=filled, labels=filled))
        with self._forward(grads=False):
            out = self.model(inputs["tokens"], inputs["positions"]).to(self._wide)
        head = self.storage.sharded.programs["head"]
        name = dict(head.outputs)["logits"]
        extents = self.storage.sharded.extents(batch=filled.shape[0], seq=filled.shape[1])
        whole = gather_value(out, head.axes(name), head.layouts[name], extents, self.groups)
        return whole[:samples, :length]

    def check_invariants(self, batch: Batch) -> None:
        """As of `Session`. Every rank calls it. Each value of the forward pass is dropped once its digest is taken."""
        groups, sharded = self.groups, self.storage.sharded
        if groups.mesh.world_size == 1:
            return
        with groups.stage("comparing ranks"):
            by_group: dict[str, list[tuple[str, tuple[str, ...], str]]] = {}
            for held in self._filled().held():
                by_group.setdefault(held.group, []).append((held.name, held.axes, digest(held.tensor)))
            for group, found in by_group.items():
                check_invariants(groups, _KINDS.get(group, group), found)
            record = Digests()
            with self._forward(grads=False):
                self._loss_sum(batch, record=record)
            check_invariants(groups, "value", [(n, axes, record.digests[n]) for n, axes in equal_values(sharded)])

    # Training

    def init_optimizer(self, config: AdamW, params: Iterable[tuple[str, Sliceable]] | None = None) -> None:
        if params is None:
            self._filled().init_optimizer(config)
            return
        loader = StateLoader(self.program, groups=("params",))
        self._has_params = False
        with doing("loading weights"):
            self._state.begin_load(config, 0)
            for name, tensor in each("loading", params):
                loader.check("params", name, tensor.shape)
                self._state.set_state("master", name, tensor)
            loader.finish()
            self._state.end_load()
        self._has_params = True

    def _trained(self) -> State:
        if self._state.optimizer is None:
            raise BackendError("this session has no optimizer; call init_optimizer or load_optimizer_state first.")
        return self._filled()

    def train_step(self, batches: Sequence[Batch], lr: float, *, dropout: DropoutKey | None = None) -> StepResult:
        state = self._trained()
        check_learning_rate(lr)
        check_dropout(self.program, dropout)
        check_step(self.plan, [len(batch.tokens) for batch in batches])
        targets = num_targets(batches)
        self.groups.stage.begin_step(None if dropout is None else dropout.step)
        if targets == 0:
            return StepResult(0.0, 0.0, 0.0, is_skipped=True)
        terms = self._backward(batches, targets, dropout)
        with self.groups.stage("norm"):
            # the step's only wait for the device: both numbers in one transfer
            loss, norm = torch.stack([torch.stack(terms).sum(), state.norm()]).double().tolist()
        if not (abs(loss) < float("inf") and norm < float("inf")):
            return StepResult(loss, norm, targets, is_skipped=True)
        limit = state.config.max_grad_norm
        with self.groups.stage("optimizer"):
            self._has_params = False  # until all are updated
            state.update(lr, scale=limit / norm if limit is not None and norm > limit else 1.0)
            self._has_params = True
        return StepResult(loss, norm, targets)

    def optimizer_step_count(self) -> int:
        return self._trained().step_count()

    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]:
        return self._trained().optimizer_state()

    def owned_boxes(self) -> Mapping[str, Sequence[Box]]:
        return self._state.owned_boxes()

    def owned_state(self) -> Iterator[tuple[str, str, Array]]:
        return self._trained().owned_state()

    def load_optimizer_state(self, config: AdamW, step_count: int, state: Iterable[tuple[str, str, Sliceable]]) -> None:
        loader = StateLoader(self.program)
        self._has_params = False
        with doing("loading optimizer state"):
            self._state.begin_load(config, step_count)
            for group, name, tensor in each("loading", state):
                loader.check(group, name, tensor.shape)
                self._state.set_state(group, name, tensor)
            loader.finish()
            self._state.end_load()
        self._has_params = True
