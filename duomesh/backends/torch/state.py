"""Weights and optimizer state of one rank, as host arrays under canonical names: on one device, and on a mesh.

`OneDevice` keeps stored tensors as they are. `OnMesh` keeps them in flat buckets. Both answer the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from duomesh.backends.torch.arrays import to_array, to_tensor
from duomesh.backends.torch.collectives import all_gather_into
from duomesh.backends.torch.debug import equal_axes
from duomesh.backends.torch.flat import FlatOptimizer, FlatParams
from duomesh.backends.torch.groups import Groups
from duomesh.backends.torch.lower import LoweredModel
from duomesh.backends.torch.optim import Optimizer
from duomesh.backends.torch.reduce import GradientSums, leaves_of
from duomesh.backends.torch.units import Units
from duomesh.backends.torch.whole import whole_param
from duomesh.core.arrays import Array
from duomesh.core.boxes import Box, Sliceable, whole
from duomesh.core.session import AdamW, whole_boxes
from duomesh.core.sharding.pieces import spans
from duomesh.core.sharding.storage import Bucket, Member, Storage

__all__ = ["Held", "OnMesh", "OneDevice", "State"]


@dataclass(frozen=True)
class Held:
    """What a rank holds of a parameter or its optimizer state. axes: of the mesh, whose ranks hold the same bits."""

    group: str
    name: str
    tensor: Tensor
    axes: tuple[str, ...]


class State(Protocol):
    """What a session needs of its weights and optimizer.

    Tensors that come in, and arrays that go out, are whole parameters by canonical name; those of `owned_state` are the
    rectangles of `owned_boxes`.
    """

    optimizer: Any  # None until there is one

    @property
    def config(self) -> AdamW: ...
    def set_param(self, name: str, tensor: Sliceable) -> None: ...
    def end_of_params(self) -> None:
        """After the last `set_param`."""

    def params(self) -> Iterator[tuple[str, Array]]: ...
    def begin_step(self) -> None: ...
    def begin_micro_batch(self, *, is_last: bool) -> None: ...
    def end_micro_batch(self, *, is_only: bool) -> None: ...
    def end_step(self) -> None: ...
    def grads(self) -> Iterator[tuple[str, Array]]:
        """Whole gradients, after `end_step`."""

    def norm(self) -> Tensor:
        """Global norm of the gradients, a wide scalar."""

    def init_optimizer(self, config: AdamW) -> None: ...
    def update(self, lr: float, *, scale: float) -> None: ...
    def step_count(self) -> int: ...
    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]: ...
    def owned_boxes(self) -> Mapping[str, Sequence[Box]]: ...
    def owned_state(self) -> Iterator[tuple[str, str, Array]]: ...
    def held(self) -> Iterator[Held]: ...
    def begin_load(self, config: AdamW, step_count: int) -> None: ...
    def set_state(self, group: str, name: str, tensor: Sliceable) -> None: ...
    def end_load(self) -> None: ...


class OneDevice:
    """Stored tensors as autograd and the optimizer know them; nothing moves."""

    def __init__(self, model: LoweredModel, wide: torch.dtype) -> None:
        self._program, self._wide = model.program, wide
        self._stored = dict(model.named_parameters())
        self._sums: dict[str, Tensor] = {}
        self.optimizer: Optimizer | None = None
        self._loading: dict[tuple[str, str], Tensor] = {}

    def _rows(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        """The rows of a stored tensor that hold one canonical parameter, as a view."""
        place = self._program.placements[name]
        return tensors[place.storage][place.start : place.stop]

    def _canonical(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Array]]:
        for name in self._program.placements:
            yield name, to_array(self._rows(tensors, name))

    @torch.no_grad()
    def set_param(self, name: str, tensor: Sliceable) -> None:
        self._rows(self._stored, name).copy_(to_tensor(whole(tensor)))

    def end_of_params(self) -> None:
        """Nothing is derived from them."""

    def params(self) -> Iterator[tuple[str, Array]]:
        return self._canonical(self._stored)

    def begin_step(self) -> None:
        self._sums = {}
        for parameter in self._stored.values():
            parameter.grad = None  # an exception may have ended the step before this one in its backward

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Gradients need no preparation."""

    def end_micro_batch(self, *, is_only: bool) -> None:
        for name, parameter in self._stored.items():
            grad, parameter.grad = parameter.grad, None
            assert grad is not None, name
            if name in self._sums:
                self._sums[name].add_(grad)
            else:
                self._sums[name] = grad if is_only else grad.to(self._wide)

    def end_step(self) -> None:
        """Nothing to wait for."""

    def grads(self) -> Iterator[tuple[str, Array]]:
        return self._canonical(self._sums)

    def norm(self) -> Tensor:
        norms = torch._foreach_norm(list(self._sums.values()), 2, dtype=self._wide)
        return torch.linalg.vector_norm(torch.stack(norms))

    def init_optimizer(self, config: AdamW) -> None:
        slots = self._program.slots
        self.optimizer = Optimizer(self._stored, {name: slots[name].is_decayed for name in self._stored}, config)

    def _made(self) -> Optimizer:
        assert self.optimizer is not None
        return self.optimizer

    @property
    def config(self) -> AdamW:
        return self._made().config

    def update(self, lr: float, *, scale: float) -> None:
        self._made().step(self._sums, lr, scale=scale)

    def step_count(self) -> int:
        return self._made().step_count

    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]:
        by_group: dict[str, dict[str, Tensor]] = {}
        for group, name, tensor in self._made().state():
            by_group.setdefault(group, {})[name] = tensor
        for group, tensors in by_group.items():
            for name, array in self._canonical(tensors):
                yield group, name, array

    def owned_boxes(self) -> Mapping[str, Sequence[Box]]:
        return whole_boxes(self._program)

    def owned_state(self) -> Iterator[tuple[str, str, Array]]:
        return self.optimizer_state()

    def held(self) -> Iterator[Held]:
        """Nothing that another rank holds too."""
        return iter(())

    def begin_load(self, config: AdamW, step_count: int) -> None:
        self.init_optimizer(config)
        self._loading = self._made().begin_load(step_count)

    @torch.no_grad()
    def set_state(self, group: str, name: str, tensor: Sliceable) -> None:
        place = self._program.placements[name]
        self._loading[group, place.storage][place.start : place.stop].copy_(to_tensor(whole(tensor)))

    def end_load(self) -> None:
        self._loading = {}
        self._made().round_params()


class OnMesh:
    """Flat buckets; see `core.sharding.storage`."""

    def __init__(
        self, model: LoweredModel, storage: Storage, groups: Groups, grad_dtype: torch.dtype, wide: torch.dtype
    ) -> None:
        self._storage, self._groups, self._wide = storage, groups, wide
        self._model = model
        self._sharded = storage.sharded
        self._extents = storage.sharded.extents(batch=1, seq=1)
        self._program = model.program
        self._spans = {span.name: span for span in spans(storage, groups.coordinate)}
        self._leaves = leaves_of(model, storage)
        self._flat = FlatParams(self._leaves, storage, groups)
        self._units = Units(storage, self._flat) if storage.zero == 3 else None
        done = None if self._units is None else self._units.done
        self._sums = GradientSums(self._leaves, storage, groups, grad_dtype, done)
        if self._units is not None:
            model.units = self._units
            self._flat.keep_ranges()
        self.optimizer: FlatOptimizer | None = None

    # Parameters

    def _bucket(self, name: str) -> tuple[Bucket, Member]:
        bucket = self._storage.by_param[name, 0]
        return bucket, next(member for member in bucket.members if member.name == name)

    def _whole(self, name: str, local: Tensor) -> Array:
        layout = self._sharded.params[name, 0]
        return whole_param(local, self._program.params[name], layout, self._extents, self._groups)

    def _all(self, owned: Mapping[str, Tensor]) -> Iterator[tuple[str, Array]]:
        """Whole parameters from the ranges that ranks own of buckets, one bucket at a time."""
        full: tuple[str, Tensor] | None = None
        for name in self._program.params:
            bucket, member = self._bucket(name)
            if full is None or full[0] != bucket.name:
                full = bucket.name, self._full(bucket, owned)
            yield name, self._whole(name, full[1][member.start : member.start + member.size])

    @torch.no_grad()
    def set_param(self, name: str, tensor: Sliceable) -> None:
        span = self._spans.get(name)
        if span is not None:
            self._flat.own(span.bucket)[span.start : span.stop].copy_(to_tensor(span.fill(tensor)))

    def end_of_params(self) -> None:
        self._flat.hand_out()

    def params(self) -> Iterator[tuple[str, Array]]:
        owned = {bucket.name: self._flat.own(bucket) for bucket in self._storage.buckets}
        return self._all(owned)

    # Gradients

    def begin_step(self) -> None:
        self._sums.reset()

    def begin_micro_batch(self, *, is_last: bool) -> None:
        self._sums.start(is_last=is_last)

    def end_micro_batch(self, *, is_only: bool) -> None:
        self._sums.finish_micro_batch()

    def end_step(self) -> None:
        self._sums.finish()

    def grads(self) -> Iterator[tuple[str, Array]]:
        return self._all(self._sums.owned)

    def _full(self, bucket: Bucket, owned: Mapping[str, Tensor]) -> Tensor:
        """All of a bucket, from the ranges of its owners."""
        mine = owned[bucket.name]
        if not bucket.shared:
            return mine
        out = mine.new_empty(bucket.size)
        all_gather_into(out, mine, group=self._groups.of(bucket.shared))
        return out

    def norm(self) -> Tensor:
        return self._sums.norm(self._wide)

    # Optimizer

    def init_optimizer(self, config: AdamW) -> None:
        decayed = {name: param.is_decayed for name, param in self._program.params.items()}
        self.optimizer = FlatOptimizer(self._flat, decayed, config)

    def _made(self) -> FlatOptimizer:
        assert self.optimizer is not None
        return self.optimizer

    @property
    def config(self) -> AdamW:
        return self._made().inner.config

    def update(self, lr: float, *, scale: float) -> None:
        self._made().step(self._sums.owned, lr, scale=scale)

    def step_count(self) -> int:
        return self._made().inner.step_count

    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]:
        by_group: dict[str, dict[str, Tensor]] = {}
        for group, bucket, mine in self._made().state():
            by_group.setdefault(group, {})[bucket.name] = mine
        for group, owned in by_group.items():
            for name, array in self._all(owned):
                yield group, name, array

    def owned_boxes(self) -> Mapping[str, Sequence[Box]]:
        return {name: [piece.box for piece in span.pieces] for name, span in self._spans.items() if span.is_first}

    def owned_state(self) -> Iterator[tuple[str, str, Array]]:
        for group, bucket, mine in self._made().state():
            for name, span in self._spans.items():
                if span.bucket is bucket and span.is_first:
                    flat = to_array(mine[span.start : span.stop])
                    yield from ((group, name, piece.of(flat)) for piece in span.pieces)

    def held(self) -> Iterator[Held]:
        """Weights as ops meet them, or only this rank's ranges of them if no more is kept; then optimizer state."""
        if self._units is None:
            for leaf in self._leaves:
                for bucket, member, low, high in leaf.places:
                    yield Held("params", member.name, leaf.parameter[low:high], self._equal_axes(member, bucket))
        else:
            for bucket in self._storage.buckets:
                yield from self._ranges("params", bucket, self._flat.own(bucket))
        if self.optimizer is not None:
            for group, bucket, mine in self.optimizer.state():
                yield from self._ranges(group, bucket, mine)

    def _equal_axes(self, member: Member, bucket: Bucket) -> tuple[str, ...]:
        return equal_axes(self._sharded.params[member.name, bucket.stage], self._groups.mesh)

    def _ranges(self, group: str, bucket: Bucket, mine: Tensor) -> Iterator[Held]:
        part = self._groups.place(bucket.shared)
        first = bucket.flat(part).start
        for member, low, high in bucket.slices(part):
            axes = tuple(axis for axis in self._equal_axes(member, bucket) if axis not in bucket.shared)
            yield Held(group, member.name, mine[member.start + low - first : member.start + high - first], axes)

    def begin_load(self, config: AdamW, step_count: int) -> None:
        self.init_optimizer(config)
        self._made().begin_load(step_count)

    def set_state(self, group: str, name: str, tensor: Sliceable) -> None:
        span = self._spans.get(name)
        if span is not None:
            self._made().fill(group, span, to_tensor(span.fill(tensor)))

    def end_load(self) -> None:
        self._made().finish_load()
