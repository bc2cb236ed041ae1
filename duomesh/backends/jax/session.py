"""The JAX side of `core.session.Session`, on one device or on the devices of a plan.

State is a dict of arrays; a step is one jitted function that donates it. Calls run under the session's own mesh,
whatever mesh the caller has set, and those that need float64 with 64-bit types enabled, for their duration only. Where
devices belong to several processes, each calls the same methods in the same order with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import GEN_CLOSED, getgeneratorstate
from typing import TYPE_CHECKING, Any, TypeVar, get_args
from weakref import WeakSet

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from duomesh.backends.jax.agree import check_copies
from duomesh.backends.jax.buckets import Buckets, Compilations
from duomesh.backends.jax.compiled import compiled_collectives
from duomesh.backends.jax.devices import devices_of
from duomesh.backends.jax.explicit import Explicit
from duomesh.backends.jax.lower import LoweredModel, Params
from duomesh.backends.jax.manual import Manual
from duomesh.backends.jax.modes import Mode, jax_mesh
from duomesh.backends.jax.optim import State, init_state
from duomesh.backends.jax.step import Functions, input_spec
from duomesh.backends.jax.store import Filling, Store
from duomesh.core.arrays import DTYPES, Array
from duomesh.core.batch import Batch, denominator, num_targets
from duomesh.core.boxes import Box, Sliceable
from duomesh.core.dropout import DropoutKey, check_dropout, dropout_inputs
from duomesh.core.errors import BackendError, ConfigError
from duomesh.core.generate import context_length
from duomesh.core.ir.program import ModelProgram
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.shard import shard_for_session
from duomesh.core.plan.validate import check_step
from duomesh.core.session import (
    STATE_GROUPS,
    AdamW,
    ComputeDType,
    JaxMode,
    StateLoader,
    StepResult,
    Trace,
    check_learning_rate,
)
from duomesh.core.sharding.collectives import StepShape
from duomesh.core.sharding.compare import Issued
from duomesh.core.sharding.local import check_batch, fill_batch
from duomesh.core.sharding.stacks import Stacks

if TYPE_CHECKING:
    from duomesh.backends.jax.module import FlaxModel

__all__ = ["JaxSession"]

_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())
_Item = TypeVar("_Item")


class JaxSession:
    """A lowered model on one device or on a mesh of them.

    Args:
        program: what to run.
        plan: the layout; None for one device.
        compute_dtype: of parameters and activations; bfloat16 keeps an fp32 master as state.
        device: such as "cpu" or "cuda"; None takes JAX's default. With a plan, the kind of its devices.
        compile: accepted for symmetry with the torch session; JAX always compiles.
        mode: how a plan is run, see `modes`.
        remat: whether backward computes each layer again from its input, instead of keeping what the layer made.
        length_buckets: lengths to which batches of training and evaluation, and what `logits` is given, are padded at
            the end, so that there are no more shapes to compile for. None leaves them as they are, and one warning says
            so when a pass has met three shapes. A trace is never padded.

    Raises:
        ConfigError: there is no such mode. PlanError: the plan does not fit the model. BackendError: there are not as
            many devices as it needs; buckets that are not lengths; later, a batch that is longer than the largest one.
    """

    def __init__(
        self,
        program: ModelProgram,
        *,
        plan: Plan | None = None,
        compute_dtype: ComputeDType = "float32",
        device: str | None = None,
        compile: bool = True,
        mode: JaxMode = "manual",
        remat: bool = False,
        length_buckets: tuple[int, ...] = (),
    ) -> None:
        if mode not in get_args(JaxMode):
            raise ConfigError(f"mode {mode!r} is none of JAX's; use {' or '.join(get_args(JaxMode))}.")
        self.program = program
        self.plan = plan or Plan()
        self.compute_dtype = compute_dtype
        self._compute = DTYPES[compute_dtype]
        self._wide = DTYPES["float64" if compute_dtype == "float64" else "float32"]
        storage = shard_for_session(program, self.plan, compute_dtype)
        self.stacks = Stacks(storage.sharded, storage.zero)
        self.devices = devices_of(device, storage.sharded.mesh.world_size)
        self.mesh = jax_mesh(self.stacks, self.devices, mode) if len(self.devices) > 1 else None
        self._mode = self._made_mode(mode)
        is_gpu = self.devices[0].platform == "gpu"
        types = {"dtype": self._compute, "wide_dtype": self._wide}
        self.model = LoweredModel(self.stacks, self._mode, allow_cudnn=is_gpu, remat=remat, **types)
        grad = self._wide if self.plan.grad_dtype is None else DTYPES[self.plan.grad_dtype]
        self.functions = Functions(self.model, self._mode, compute=self._compute, wide=self._wide, grad=grad)
        shardings = {name: self._sharding(spec) for name, spec in self.functions.stored.items()}
        self._store = Store(self.stacks, shardings)
        self._buckets, self._compilations = Buckets(length_buckets), Compilations()
        self._readers: WeakSet[Generator[Any]] = WeakSet()
        self._params: Params | None = None
        self._state: State | None = None
        self._config: AdamW | None = None

    @property
    def length_buckets(self) -> tuple[int, ...]:
        """Sorted; empty if batches are not padded."""
        return self._buckets.lengths

    def _made_mode(self, name: JaxMode) -> Mode:
        if name == "explicit" and self.mesh is not None:
            return Explicit(self.stacks, self.mesh)
        return Manual(self.stacks, self.mesh)

    def _sharding(self, spec: PartitionSpec) -> jax.sharding.Sharding:
        """As what a compiled function gives back is placed: anything that is written in another way compiles again."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        entries = list(spec)
        while entries and entries[-1] is None and AxisType.Auto in self.mesh.axis_types:
            entries.pop()
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    @contextmanager
    def _context(self) -> Iterator[None]:
        """64-bit types where the run needs them, and fp32 matmuls that are fp32 (a GPU's default is TF32)."""
        with ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.compute_dtype == "float64"))
            if self.compute_dtype != "bfloat16":
                stack.enter_context(jax.default_matmul_precision("highest"))
            stack.enter_context(jax.set_mesh(_NO_MESH if self.mesh is None else self.mesh))
            yield

    def _call(self, name: str, function: Callable[..., _Item], *args: Any, shape: tuple[int, ...] | None) -> _Item:
        """A pass over a batch; shapes of a session without buckets are counted."""
        return self._compilations.call(name, function, *args, shape=None if self.length_buckets else shape)

    def _read(self, items: Generator[_Item]) -> Iterator[_Item]:
        """Reads arrays that it holds while it is asked for items; the next step leaves those in place."""
        self._readers.add(items)
        return items

    # Parameters

    def load_params(self, params: Iterable[tuple[str, Sliceable]]) -> None:
        with self._context():
            self._params, self._state, self._config = self._loaded(params, self._compute), None, None

    def _loaded(self, params: Iterable[tuple[str, Sliceable]], dtype: np.dtype[Any]) -> Params:
        """Every canonical parameter, as stored arrays of one dtype."""
        loader = StateLoader(self.program, groups=("params",))

        def checked() -> Iterator[tuple[str, Sliceable]]:
            for name, tensor in params:
                loader.check("params", name, tensor.shape)
                yield name, tensor
            loader.finish()

        return self._store.put(checked(), dtype)

    def _compute_params(self) -> Params:
        """Parameters in the compute dtype: as loaded, or rounded from the optimizer's masters and kept until a step."""
        if self._params is None and self._state is not None:
            self._params = self.functions.cast(self._state.master)
        if self._params is None:
            raise BackendError(
                "this session has no parameters yet, or a step was stopped while it overwrote them; "
                "call load_params first."
            )
        return self._params

    def params(self) -> Iterator[tuple[str, Array]]:
        with self._context():
            stored = self._compute_params()
        return self._read(pair for pair in self._store.take(stored))

    def as_flax(self) -> FlaxModel:
        """The model with its current weights as an nnx module; training one does not change the other.

        Raises BackendError for a session on several devices.
        """
        from duomesh.backends.jax.module import FlaxModel

        if self.mesh is not None:
            raise BackendError(f"as_flax gives a model on one device; this session has the plan {self.plan}.")
        with self._context():
            copies = {name: jnp.copy(array) for name, array in self._compute_params().items()}
            return FlaxModel(self.model, self._store, copies)

    # Forward and backward

    def _host_inputs(self, batch: Batch, dropout: DropoutKey | None = None) -> dict[str, Array | None]:
        batch.check_vocabulary(self.program.spec.vocab_size)
        check_batch(self.stacks.sharded, batch.tokens.shape)
        return {
            "tokens": batch.tokens.astype(np.int32),
            "positions": batch.resolved_positions,
            "segment_ids": None if batch.segment_ids is None else batch.segment_ids.astype(np.int32),
            "labels": batch.labels.astype(np.int32),
            "loss_mask": batch.weights.astype(self._wide),
            **dropout_inputs(self.program, batch, dropout),
        }

    def _put(self, inputs: Mapping[str, Array | None], *, is_stacked: bool = False) -> dict[str, jax.Array]:
        """Inputs that are there, on the devices that take them."""
        out = {}
        for name, array in inputs.items():
            if array is not None:
                sharding = self._sharding(input_spec(self.stacks, name, is_stacked=is_stacked))
                out[name] = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
        return out

    def _inputs(self, batch: Batch, dropout: DropoutKey | None = None) -> dict[str, jax.Array]:
        return self._put(self._host_inputs(batch, dropout))

    def _prepared(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches of a step, of which all have segments or none: one without them is one segment."""
        padded = list(self._buckets.pad(batches))
        if all(batch.segment_ids is None for batch in padded):
            return padded
        return [b if b.segment_ids is not None else replace(b, segment_ids=np.zeros_like(b.tokens)) for b in padded]

    def loss_and_grads(
        self, batches: Sequence[Batch], *, dropout: DropoutKey | None = None
    ) -> tuple[float, dict[str, Array]]:
        check_step(self.plan, [len(batch.tokens) for batch in batches])
        divisor = self._wide.type(denominator(batches))
        loss, total = 0.0, None
        with self._context():
            params = self._compute_params()
            for batch in self._prepared(batches):
                args = params, self._inputs(batch, dropout), divisor
                term, grads = self._call("loss_and_grads", self.functions.grads, *args, shape=batch.tokens.shape)
                loss += float(term)
                total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        assert total is not None
        return loss, dict(self._store.take(total))

    def trace(self, batch: Batch, *, grads: bool) -> Trace:
        divisor = self._wide.type(denominator([batch]))
        found: dict[str, Array] = {}
        with self._context():
            params, inputs = self._compute_params(), self._inputs(batch)
            if grads:
                loss, records, made = self.functions.trace_grads(params, inputs, divisor)
                found = dict(self._store.take(made))
            else:
                loss, records = self.functions.trace(params, inputs, divisor)
        return Trace(dict(self._whole_values(records)), float(loss), found)

    def _whole_values(self, records: Mapping[str, jax.Array]) -> Iterator[tuple[str, Array]]:
        """In order of execution: jit returns dicts sorted by key. Padding is left out."""
        for prefix, program in self.program.steps:
            for op in program.ops:
                for name in op.outputs:
                    yield prefix + name, self._store.whole(records[prefix + name], program.values[name].axes)

    def eval_loss(self, batch: Batch) -> tuple[float, float]:
        [padded] = self._buckets.pad([batch])
        with self._context():
            args = self._compute_params(), self._inputs(padded)
            total = self._call("eval_loss", self.functions.loss_sum, *args, shape=padded.tokens.shape)
            return float(total), num_targets([batch])

    def logits(self, tokens: Array) -> Array:
        [padded] = self._buckets.pad([Batch(tokens=tokens, labels=tokens)])
        filled = fill_batch(self.stacks.sharded, padded.tokens)
        inputs = self._host_inputs(Batch(tokens=filled, labels=filled))
        del inputs["labels"], inputs["loss_mask"]
        samples, length = tokens.shape
        with self._context():
            args = self._compute_params(), self._put(inputs)
            # contexts of generation have few lengths already
            shape = None if length == context_length(length) else tokens.shape
            out = self._call("logits", self.functions.logits, *args, shape=shape)
        head = self.program.head
        return self._store.whole(out, head.values[dict(head.outputs)["logits"]].axes)[:samples, :length]

    def check_invariants(self, batch: Batch) -> None:
        """As of `Session`. Every process calls it."""
        if self.mesh is None:
            return
        mesh = self.stacks.sharded.mesh
        [batch] = self._buckets.pad([batch])
        with self._context():
            stored = self._compute_params()
            groups = {} if self._state is None else {group: getattr(self._state, group) for group in STATE_GROUPS}
            for what, arrays in {"weight": stored, **groups}.items():
                check_copies(mesh, self.devices, what, arrays)
            _, values = self.functions.trace(stored, self._inputs(batch), self._wide.type(denominator([batch])))
            check_copies(mesh, self.devices, "value", values)

    # Training

    def init_optimizer(self, config: AdamW, params: Iterable[tuple[str, Sliceable]] | None = None) -> None:
        with self._context():
            if params is None:
                masters = {name: array.astype(self._wide) for name, array in self._compute_params().items()}
            else:
                masters = self._loaded(params, self._wide)
            self._state = init_state(masters)._replace(count=self._count(0))
        self._params, self._config = None, config

    def _count(self, count: int) -> jax.Array:
        """Placed like a step's results: an array that is not committed to devices would compile a second step."""
        return jax.make_array_from_callback(
            (), self._sharding(PartitionSpec()), np.asarray(count, np.int32).__getitem__
        )

    def _trained(self) -> tuple[State, AdamW]:
        if self._state is None or self._config is None:
            raise BackendError(
                "this session has no optimizer, or a step was stopped while it overwrote its state; "
                "call init_optimizer or load_optimizer_state first."
            )
        return self._state, self._config

    def _stack_inputs(self, batches: Sequence[Batch], dropout: DropoutKey | None) -> dict[str, jax.Array]:
        batches = self._prepared(batches)
        inputs = [self._host_inputs(batch, dropout) for batch in batches]
        shapes = {batch.tokens.shape for batch in batches}
        if len(shapes) > 1:
            raise BackendError(f"micro-batches of one step must have one shape, got {sorted(shapes)}.")
        return self._put(jax.tree.map(lambda *parts: np.stack(parts), *inputs), is_stacked=True)

    def train_step(self, batches: Sequence[Batch], lr: float, *, dropout: DropoutKey | None = None) -> StepResult:
        state, config = self._trained()
        check_learning_rate(lr)
        check_dropout(self.program, dropout)
        check_step(self.plan, [len(batch.tokens) for batch in batches])
        targets = num_targets(batches)
        if targets == 0:
            return StepResult(0.0, 0.0, 0.0, is_skipped=True)
        with self._context():
            inputs = self._stack_inputs(batches, dropout)
            self._params = None
            args = self._donated(state), inputs, self._wide.type(targets), self._wide.type(lr)
            shape = inputs["tokens"].shape
            try:
                self._state, *result = self._call("train_step", self.functions.step(config), *args, shape=shape)
            except BaseException:
                if any(array.is_deleted() for array in jax.tree.leaves(state)):
                    self._state = None
                raise
            del state, args  # and what arrays that are gone have cached on the host
            loss, norm, is_skipped = jax.device_get(result)
        return StepResult(float(loss), float(norm), targets, bool(is_skipped))

    def _donated(self, state: State) -> State:
        """What a step may overwrite: a copy if somebody has begun to read the state, as a save does."""
        if all(getgeneratorstate(reader) == GEN_CLOSED for reader in self._readers):
            return state
        self._readers.clear()  # they keep the state that they read
        return jax.tree.map(jnp.copy, state)

    def traced_step(self, shape: StepShape, config: AdamW | None = None) -> jax.stages.Traced:
        """A training step as JAX has traced it, without weights or data: what can be compiled and read.

        Its collectives are those of every step with batches of this shape.
        """
        check_batch(self.stacks.sharded, (shape.batch, shape.seq))
        sizes = {"samples": (shape.batch,), "places": (shape.seq,), "dropout_keys": (len(self.program.steps), 2)}
        names = ["tokens", "positions", "labels", "loss_mask"]
        names += ["segment_ids"] * shape.has_segments + [*sizes] * self.program.has_dropout
        with self._context():
            inputs = {}
            for name in names:
                dtype = self._wide if name == "loss_mask" else np.dtype(np.int32)
                spec = input_spec(self.stacks, name, is_stacked=True)
                dims = (shape.micro_batches, *sizes.get(name, (shape.batch, shape.seq)))
                inputs[name] = jax.ShapeDtypeStruct(dims, dtype, sharding=self._sharding(spec))
            stored = {
                name: jax.ShapeDtypeStruct(
                    stack.shape, self._wide, sharding=self._sharding(self.functions.stored[name])
                )
                for name, stack in self.stacks.stacks.items()
            }
            count = jax.ShapeDtypeStruct((), np.int32, sharding=self._sharding(PartitionSpec()))
            number = jax.ShapeDtypeStruct((), self._wide)
            made: jax.stages.Traced = self.functions.step(config or AdamW()).trace(
                State(count, stored, stored, stored), inputs, number, number
            )
            return made

    def compiled_collectives(self, shape: StepShape) -> list[Issued]:
        """What XLA has made of a training step's collectives, loops multiplied out."""
        with self._context():
            text = self.traced_step(shape).lower().compile().as_text()
        return compiled_collectives(str(text), self.stacks.sharded.mesh)

    def optimizer_step_count(self) -> int:
        return int(self._trained()[0].count)

    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]:
        return self._state_items(self._store.take)

    def owned_boxes(self) -> Mapping[str, Sequence[Box]]:
        return self._store.boxes()

    def owned_state(self) -> Iterator[tuple[str, str, Array]]:
        return self._state_items(self._store.pieces)

    def _state_items(self, arrays: Callable[[Params], Iterator[tuple[str, Array]]]) -> Iterator[tuple[str, str, Array]]:
        """(group, name, array) of the state as it is now, read one by one."""
        state, _ = self._trained()
        return self._read((group, *item) for group in STATE_GROUPS for item in arrays(getattr(state, group)))

    def load_optimizer_state(self, config: AdamW, step_count: int, state: Iterable[tuple[str, str, Sliceable]]) -> None:
        loader = StateLoader(self.program)
        filled = {group: Filling(self._store, self._wide) for group in STATE_GROUPS}
        for group, name, tensor in state:
            loader.check(group, name, tensor.shape)
            filled[group].add(name, tensor)
        loader.finish()
        with self._context():
            stored = {group: filled.pop(group).arrays() for group in STATE_GROUPS}
            self._state = State(count=self._count(step_count), **stored)
        self._params, self._config = None, config
