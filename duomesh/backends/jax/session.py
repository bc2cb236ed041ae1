"""The JAX side of `core.session.Session`, one device.

State is a dict of arrays; a step is one jitted function that donates it. Calls that need float64 run with 64-bit
types enabled for their duration only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from duomesh.backends.jax.lower import LoweredModel, Params
from duomesh.backends.jax.optim import State, init_state, update
from duomesh.core.arrays import DTYPES, Array
from duomesh.core.batch import Batch, denominator, num_targets
from duomesh.core.boxes import Box, Sliceable, whole
from duomesh.core.dropout import DropoutKey, check_dropout, dropout_inputs
from duomesh.core.errors import BackendError
from duomesh.core.ir.program import ModelProgram
from duomesh.core.plan.plan import Plan
from duomesh.core.session import (
    STATE_GROUPS,
    AdamW,
    ComputeDType,
    StateLoader,
    StepResult,
    Trace,
    check_learning_rate,
    whole_boxes,
)

if TYPE_CHECKING:
    from duomesh.backends.jax.module import FlaxModel

__all__ = ["JaxSession"]


def _device(name: str | None) -> jax.Device:
    """The device of that name, as "cpu" or "cuda:1"; None takes JAX's default. Raises BackendError."""
    kind, _, index = (name or "").partition(":")
    try:
        devices = jax.devices({"": None, "cuda": "gpu"}.get(kind, kind))
    except RuntimeError as error:
        raise BackendError(f"JAX has no device {name!r}: {error}. Use device='cpu'.") from None
    if not (index.isdecimal() or not index) or int(index or 0) >= len(devices):
        raise BackendError(f"device {name!r} was asked for, but JAX finds {len(devices)} of its kind.")
    return devices[int(index or 0)]


class JaxSession:
    """A lowered model on one device.

    Args:
        program: what to run.
        compute_dtype: of parameters and activations; bfloat16 keeps an fp32 master as state.
        device: such as "cpu" or "cuda"; None takes JAX's default.
        compile: accepted for symmetry with the torch session; JAX always compiles.
    """

    def __init__(
        self,
        program: ModelProgram,
        *,
        compute_dtype: ComputeDType = "float32",
        device: str | None = None,
        compile: bool = True,
    ) -> None:
        self.program = program
        self.plan = Plan()
        self.compute_dtype = compute_dtype
        self.device = _device(device)
        self._compute = DTYPES[compute_dtype]
        self._wide = DTYPES["float64" if compute_dtype == "float64" else "float32"]
        is_gpu = self.device.platform == "gpu"
        self.model = LoweredModel(program, wide_dtype=self._wide, allow_cudnn=is_gpu)
        self._params: Params | None = None
        self._state: State | None = None
        self._config: AdamW | None = None

    @contextmanager
    def _context(self) -> Iterator[None]:
        """64-bit types where the run needs them, and fp32 matmuls that are fp32 (a GPU's default is TF32)."""
        with ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.compute_dtype == "float64"))
            if self.compute_dtype != "bfloat16":
                stack.enter_context(jax.default_matmul_precision("highest"))
            yield

    def _put(self, arrays: dict[str, Array]) -> Params:
        return {name: jax.device_put(array, self.device) for name, array in arrays.items()}

    # Functions that are compiled once a session, whatever is called in which order

    @cached_property
    def _cast_jit(self) -> Callable[..., Params]:
        return jax.jit(self._cast)

    @cached_property
    def _forward_jit(self) -> Callable[..., jax.Array]:
        return jax.jit(self.model.__call__)

    @cached_property
    def _grad_jit(self) -> Callable[..., tuple[jax.Array, Params]]:
        return jax.jit(jax.value_and_grad(self._term))

    @cached_property
    def _trace_jit(self) -> Callable[..., Any]:
        return jax.jit(self._recorded)

    @cached_property
    def _trace_grad_jit(self) -> Callable[..., Any]:
        return jax.jit(jax.value_and_grad(self._recorded, has_aux=True))

    @cached_property
    def _step_jit(self) -> Callable[..., Any]:
        return jax.jit(self._step, static_argnames="config", donate_argnums=0)

    # Parameters

    def load_params(self, params: Iterable[tuple[str, Sliceable]]) -> None:
        stored = self._checked(params, self._compute)
        with self._context():
            self._params, self._state, self._config = self._put(stored), None, None

    def _checked(self, params: Iterable[tuple[str, Sliceable]], dtype: np.dtype[Any]) -> dict[str, Array]:
        """Every canonical parameter, as stored host arrays of one dtype."""
        loader = StateLoader(self.program, groups=("params",))

        def checked() -> Iterator[tuple[str, Array]]:
            for name, tensor in params:
                loader.check("params", name, tensor.shape)
                yield name, whole(tensor)

        stored = self.model.stack(checked(), dtype)
        loader.finish()
        return stored

    def _compute_params(self) -> Params:
        """Parameters in the compute dtype: as loaded, or rounded from the optimizer's masters and kept until a step."""
        if self._params is None and self._state is not None:
            self._params = self._cast_jit(self._state.master)
        if self._params is None:
            raise BackendError("this session has no parameters yet; call load_params first.")
        return self._params

    def _cast(self, master: Params) -> Params:
        return {name: array.astype(self._compute) for name, array in master.items()}

    def params(self) -> Iterator[tuple[str, Array]]:
        with self._context():
            stored = self._compute_params()
        yield from self.model.unstack(stored)

    def as_flax(self) -> FlaxModel:
        """The model with its current weights as an nnx module; training one does not change the other."""
        from duomesh.backends.jax.module import FlaxModel

        with self._context():
            return FlaxModel(self.model, {name: jnp.copy(array) for name, array in self._compute_params().items()})

    # Forward and backward

    def _inputs(self, batch: Batch, dropout: DropoutKey | None = None) -> dict[str, Array | None]:
        batch.check_vocabulary(self.program.spec.vocab_size)
        return {
            "tokens": batch.tokens.astype(np.int32),
            "positions": batch.resolved_positions,
            "segment_ids": None if batch.segment_ids is None else batch.segment_ids.astype(np.int32),
            "labels": batch.labels.astype(np.int32),
            "loss_mask": batch.weights.astype(self._wide),
            **dropout_inputs(self.program, batch, dropout),
        }

    def _term(self, params: Params, inputs: Any, divisor: Any) -> jax.Array:
        return self.model(params, inputs) / divisor

    def loss_and_grads(
        self, batches: Sequence[Batch], *, dropout: DropoutKey | None = None
    ) -> tuple[float, dict[str, Array]]:
        divisor = self._wide.type(denominator(batches))
        loss, total = 0.0, None
        with self._context():
            params = self._compute_params()
            for batch in batches:
                term, grads = self._grad_jit(params, self._inputs(batch, dropout), divisor)
                loss += float(term)
                if len(batches) > 1:
                    grads = jax.tree.map(lambda g: g.astype(self._wide), grads)
                total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        assert total is not None
        return loss, dict(self.model.unstack(total))

    def _recorded(self, params: Params, inputs: Any, divisor: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        records: dict[str, jax.Array] = {}
        return self.model(params, inputs, records) / divisor, records

    def trace(self, batch: Batch, *, grads: bool) -> Trace:
        divisor = self._wide.type(denominator([batch]))
        found: dict[str, Array] = {}
        with self._context():
            params, inputs = self._compute_params(), self._inputs(batch)
            if grads:
                (loss, records), made = self._trace_grad_jit(params, inputs, divisor)
                found = dict(self.model.unstack(made))
            else:
                loss, records = self._trace_jit(params, inputs, divisor)
        # jit returns dicts sorted by key; give them back in order of execution
        names = [prefix + name for prefix, program in self.program.steps for op in program.ops for name in op.outputs]
        return Trace({name: np.asarray(records[name]) for name in names}, float(loss), found)

    def eval_loss(self, batch: Batch) -> tuple[float, float]:
        with self._context():
            total = self._forward_jit(self._compute_params(), self._inputs(batch))
            return float(total), num_targets([batch])

    def logits(self, tokens: Array) -> Array:
        inputs = self._inputs(Batch(tokens=tokens, labels=tokens))
        del inputs["labels"], inputs["loss_mask"]
        with self._context():
            out = self._forward_jit(self._compute_params(), inputs)
            return np.asarray(out.astype(self._wide))

    # Training

    def init_optimizer(self, config: AdamW, params: Iterable[tuple[str, Sliceable]] | None = None) -> None:
        with self._context():
            if params is None:
                masters = {name: array.astype(self._wide) for name, array in self._compute_params().items()}
            else:
                masters = self._put(self._checked(params, self._wide))
            # placed like a step's results: an array that is not committed to a device would compile a second step
            self._state = jax.device_put(init_state(masters), self.device)
        self._params, self._config = None, config

    def _trained(self) -> tuple[State, AdamW]:
        if self._state is None or self._config is None:
            raise BackendError("this session has no optimizer; call init_optimizer or load_optimizer_state first.")
        return self._state, self._config

    def _step(
        self, state: State, inputs: Any, divisor: Any, lr: Any, *, config: AdamW
    ) -> tuple[State, jax.Array, jax.Array, jax.Array]:
        """One update over micro-batches stacked along a first dim. Returns (state, loss, gradient norm, is skipped)."""
        params = self._cast(state.master)
        grad = jax.value_and_grad(self._term)
        count = inputs["tokens"].shape[0]
        if count == 1:
            loss, grads = grad(params, jax.tree.map(lambda x: x[0], inputs), divisor)
        else:
            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, self._wide), params)

            def body(carry: Any, micro: Any) -> tuple[Any, None]:
                loss, sums = carry
                term, made = grad(params, micro, divisor)
                return (loss + term, jax.tree.map(lambda s, g: s + g.astype(self._wide), sums, made)), None

            (loss, grads), _ = jax.lax.scan(body, (jnp.zeros((), self._wide), zeros), inputs)
        return update(state, grads, loss, lr, config=config, is_decayed=self.model.is_decayed)

    def _stack_inputs(self, batches: Sequence[Batch], dropout: DropoutKey | None) -> dict[str, Array | None]:
        inputs = [self._inputs(batch, dropout) for batch in batches]
        shapes = {batch.tokens.shape for batch in batches}
        if len(shapes) > 1:
            raise BackendError(f"micro-batches of one step must have one shape, got {sorted(shapes)}.")
        if any(batch.segment_ids is not None for batch in batches):
            for one in inputs:  # a micro-batch without segments is one segment
                if one["segment_ids"] is None:
                    one["segment_ids"] = np.zeros_like(one["tokens"])
        return jax.tree.map(lambda *parts: np.stack(parts), *inputs)

    def train_step(self, batches: Sequence[Batch], lr: float, *, dropout: DropoutKey | None = None) -> StepResult:
        state, config = self._trained()
        check_learning_rate(lr)
        check_dropout(self.program, dropout)
        targets = num_targets(batches)
        if targets == 0:
            return StepResult(0.0, 0.0, 0.0, is_skipped=True)
        with self._context():
            inputs = self._stack_inputs(batches, dropout)
            self._params = None
            result = self._step_jit(state, inputs, self._wide.type(targets), self._wide.type(lr), config=config)
            self._state = result[0]
            loss, norm, is_skipped = jax.device_get(result[1:])
        return StepResult(float(loss), float(norm), targets, bool(is_skipped))

    def optimizer_step_count(self) -> int:
        return int(self._trained()[0].count)

    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]:
        state, _ = self._trained()
        for group in STATE_GROUPS:
            for name, array in self.model.unstack(getattr(state, group)):
                yield group, name, array

    def owned_boxes(self) -> Mapping[str, Sequence[Box]]:
        return whole_boxes(self.program)

    def owned_state(self) -> Iterator[tuple[str, str, Array]]:
        return self.optimizer_state()

    def load_optimizer_state(self, config: AdamW, step_count: int, state: Iterable[tuple[str, str, Sliceable]]) -> None:
        loader = StateLoader(self.program)
        groups: dict[str, list[tuple[str, Sliceable]]] = {group: [] for group in STATE_GROUPS}
        for group, name, tensor in state:
            loader.check(group, name, tensor.shape)
            groups[group].append((name, tensor))
        loader.finish()
        with self._context():
            stored = {
                group: self._put(self.model.stack(((n, whole(t)) for n, t in groups.pop(group)), self._wide))
                for group in STATE_GROUPS
            }
            count = jax.device_put(np.int32(step_count), self.device)
            self._state = State(count=count, **stored)
        self._params, self._config = None, config
