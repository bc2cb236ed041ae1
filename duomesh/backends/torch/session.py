"""The torch side of `core.session.Session`, one device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from duomesh.backends.torch.arrays import TORCH_DTYPES, to_array, to_tensor
from duomesh.backends.torch.lower import LoweredModel
from duomesh.backends.torch.optim import Optimizer
from duomesh.core.arrays import Array
from duomesh.core.batch import Batch, denominator, num_targets
from duomesh.core.errors import BackendError
from duomesh.core.ir.program import ModelProgram
from duomesh.core.session import AdamW, ComputeDType, StateLoader, StepResult, Trace, check_learning_rate

__all__ = ["TorchSession"]

# Fastest first on the GPUs measured so far; torch takes the first that supports a call.
_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


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


def _lower(program: ModelProgram, dtype: torch.dtype, device: torch.device) -> LoweredModel:
    try:
        return LoweredModel(program, dtype, device)
    except RuntimeError as error:  # torch's way to say that memory is out
        reason = str(error).splitlines()[0]
        raise BackendError(f"{device} cannot hold {program.num_params:,} parameters of {dtype}: {reason}") from error


class TorchSession:
    """A lowered model on one device.

    Args:
        program: what to run.
        compute_dtype: of parameters and activations; bfloat16 keeps an fp32 master in the optimizer.
        device: such as "cpu" or "cuda"; None takes a GPU if there is one.
        compile: compile each block kind, the head and the loss with `torch.compile`.
    """

    def __init__(
        self,
        program: ModelProgram,
        *,
        compute_dtype: ComputeDType = "float32",
        device: str | None = None,
        compile: bool = False,
    ) -> None:
        self.program = program
        self.compute_dtype = compute_dtype
        self.device = _device(device)
        self.model = _lower(program, TORCH_DTYPES[compute_dtype], self.device)
        self._has_params = False
        self._wide = torch.float64 if compute_dtype == "float64" else torch.float32
        self._optimizer: Optimizer | None = None
        if compile:
            for _, module in self.model.steps:
                # the first length is compiled as it is, a second one for any: evaluation and generation use others
                module.compile(fullgraph=True)

    # Parameters

    def _storage(self, *, filled: bool = True) -> dict[str, nn.Parameter]:
        """Storage tensors by name, tied ones once. Raises BackendError if they hold no weights yet."""
        if filled and not self._has_params:
            raise BackendError("this session has no parameters yet; call load_params first.")
        return dict(self.model.named_parameters())

    def _rows(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        """The rows of a storage tensor that hold one canonical parameter, as a view."""
        place = self.program.placements[name]
        return tensors[place.storage][place.start : place.stop]

    def _canonical(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name in self.program.placements:
            yield name, self._rows(tensors, name)

    def load_params(self, params: Iterable[tuple[str, Array]]) -> None:
        self._fill({"params": self._storage(filled=False)}, (("params", name, array) for name, array in params))
        self._optimizer = None

    def params(self) -> Iterator[tuple[str, Array]]:
        for name, tensor in self._canonical(self._storage()):
            yield name, to_array(tensor)

    # Forward and backward

    def _device_inputs(self, batch: Batch) -> dict[str, Tensor | None]:
        batch.check_vocabulary(self.program.spec.vocab_size)

        def put(array: Array | None, dtype: torch.dtype) -> Tensor | None:
            return None if array is None else to_tensor(array).to(self.device, dtype)

        return {
            "tokens": put(batch.tokens, torch.int32),
            "positions": put(batch.resolved_positions, torch.int32),
            "segment_ids": put(batch.segment_ids, torch.int32),
            "labels": put(batch.labels, torch.int32),
            "loss_mask": put(batch.weights, self._wide),
        }

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

    def _loss_sum(self, batch: Batch, record: dict[str, Tensor] | None = None) -> Tensor:
        self._storage()  # refuses a session without weights
        return self.model(**self._device_inputs(batch), record=record)

    def _backward(self, batches: Sequence[Batch], divisor: float) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Gradients of the step's objective, summed over micro-batches in at least fp32 when there are several.

        Returns the loss terms (scalars on the device, whose sum is the loss) and gradients by storage name.
        """
        storage = self._storage()
        terms: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        for batch in batches:
            with self._forward(grads=True):
                term = self._loss_sum(batch) / divisor
                term.backward()
            terms.append(term.detach())
            for name, parameter in storage.items():
                grad, parameter.grad = parameter.grad, None
                assert grad is not None, name
                if name in sums:
                    sums[name].add_(grad)
                else:
                    sums[name] = grad if len(batches) == 1 else grad.to(self._wide)
        return terms, sums

    def loss_and_grads(self, batches: Sequence[Batch]) -> tuple[float, dict[str, Array]]:
        terms, grads = self._backward(batches, denominator(batches))
        loss = torch.stack(terms).double().sum().item()
        return loss, {name: to_array(tensor) for name, tensor in self._canonical(grads)}

    def trace(self, batch: Batch, *, grads: bool) -> Trace:
        record: dict[str, Tensor] = {}
        with self._forward(grads=grads):
            loss = self._loss_sum(batch, record) / denominator([batch])
            found: dict[str, Array] = {}
            if grads:
                storage = self._storage()
                made = torch.autograd.grad(loss, list(storage.values()))
                found = {n: to_array(t) for n, t in self._canonical(dict(zip(storage, made, strict=True)))}
        return Trace({name: to_array(value) for name, value in record.items()}, loss.item(), found)

    def eval_loss(self, batch: Batch) -> tuple[float, float]:
        with self._forward(grads=False):
            return self._loss_sum(batch).item(), num_targets([batch])

    def logits(self, tokens: Array) -> Array:
        self._storage()
        inputs = self._device_inputs(Batch(tokens=tokens, labels=tokens))
        with self._forward(grads=False):
            out = self.model(inputs["tokens"], inputs["positions"])
        return to_array(out.to(self._wide))

    # Training

    def init_optimizer(self, config: AdamW, params: Iterable[tuple[str, Array]] | None = None) -> None:
        slots, storage = self.program.slots, self._storage(filled=params is None)
        self._optimizer = Optimizer(storage, {name: slots[name].is_decayed for name in storage}, config)
        if params is not None:
            self._fill({"params": self._optimizer.masters}, (("params", name, array) for name, array in params))
            self._optimizer.round_params()

    def _trained(self) -> Optimizer:
        if self._optimizer is None:
            raise BackendError("this session has no optimizer; call init_optimizer or load_optimizer_state first.")
        return self._optimizer

    def train_step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        optimizer = self._trained()
        check_learning_rate(lr)
        targets = num_targets(batches)
        if targets == 0:
            return StepResult(0.0, 0.0, 0.0, is_skipped=True)
        terms, grads = self._backward(batches, targets)
        norms = torch._foreach_norm(list(grads.values()), 2, dtype=self._wide)
        norm_on_device = torch.linalg.vector_norm(torch.stack(norms))
        # the step's only wait for the device: both numbers in one transfer
        loss, norm = torch.stack([torch.stack(terms).sum(), norm_on_device]).double().tolist()
        if not (abs(loss) < float("inf") and norm < float("inf")):
            return StepResult(loss, norm, targets, is_skipped=True)
        limit = optimizer.config.max_grad_norm
        optimizer.step(grads, lr, scale=limit / norm if limit is not None and norm > limit else 1.0)
        return StepResult(loss, norm, targets)

    def optimizer_step_count(self) -> int:
        return self._trained().step_count

    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]:
        by_group: dict[str, dict[str, Tensor]] = {}
        for group, name, tensor in self._trained().state():
            by_group.setdefault(group, {})[name] = tensor
        for group, tensors in by_group.items():
            for name, tensor in self._canonical(tensors):
                yield group, name, to_array(tensor)

    def load_optimizer_state(self, config: AdamW, step_count: int, state: Iterable[tuple[str, str, Array]]) -> None:
        slots, storage = self.program.slots, self._storage(filled=False)
        optimizer = Optimizer(storage, {name: slots[name].is_decayed for name in storage}, config)
        by_group: dict[str, dict[str, Tensor]] = {}
        for (group, name), tensor in optimizer.begin_load(step_count).items():
            by_group.setdefault(group, {})[name] = tensor
        self._optimizer = None
        self._fill(by_group, state)
        optimizer.round_params()
        self._optimizer = optimizer

    @torch.no_grad()
    def _fill(self, groups: Mapping[str, Mapping[str, Tensor]], state: Iterable[tuple[str, str, Array]]) -> None:
        """Copies named arrays into storage tensors by group."""
        loader = StateLoader(self.program, groups=tuple(groups))
        self._has_params = False  # until all have come: a stream that stops half-way leaves no usable weights
        for group, name, array in state:
            loader.check(group, name, array.shape)
            self._rows(groups[group], name).copy_(to_tensor(array))
        loader.finish()
        self._has_params = True
