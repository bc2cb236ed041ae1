"""Sums of gradients over ranks: buckets that fill behind the backward pass and move as soon as they are full.

Each bucket of `core.sharding.storage` has one flat buffer of main gradients in the plan's gradient dtype. A parameter's
gradient is added to its place as soon as autograd has made it, and freed. When the last one of a bucket has come, the
bucket's collective starts, asynchronously, while backward goes on; buckets start in the order of the sharded program,
so that all ranks agree. From ZeRO-2 on, what was scattered is added up while backward goes on too, so that few steps of
the model have more than their ranges at any time.

A step may end anywhere in an exception that the caller catches; the next one begins with nothing of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from duomesh.backends.torch.collectives import reduce_scatter_into, wait
from duomesh.backends.torch.groups import Groups
from duomesh.backends.torch.lower import LoweredModel
from duomesh.core.sharding.storage import Bucket, Member, Storage

__all__ = ["GradientSums", "Leaf", "leaves_of"]


@dataclass(frozen=True)
class Leaf:
    """A stored tensor of one step of the model, and where its rows lie in buckets.

    step: position of the step. places: bucket, member, first row, last row + 1.
    """

    parameter: nn.Parameter
    step: int
    places: tuple[tuple[Bucket, Member, int, int], ...]


def leaves_of(model: LoweredModel, storage: Storage) -> list[Leaf]:
    """Every stored tensor once, in the order of the model's steps."""
    found: dict[int, Leaf] = {}
    for index, (prefix, module) in enumerate(model.steps):
        stage = storage.sharded.stages[index]
        for slot in module.slots.values():
            parameter = module.get_parameter(slot.name)
            places = []
            for row in slot.members:
                name = storage.sharded.canonical(prefix, row.param.name)
                bucket = storage.by_param[name, stage]
                member = next(m for m in bucket.members if m.name == name)
                places.append((bucket, member, row.start, row.stop))
            found.setdefault(id(parameter), Leaf(parameter, index, tuple(places)))
    return list(found.values())


@dataclass(frozen=True)
class _Use:
    """A bucket whose gradients are summed: once a micro-batch, or after each step of the model that gathers it."""

    bucket: Bucket
    step: int


@dataclass(frozen=True)
class _Sum:
    """A collective that is under way, and where its result will be."""

    work: dist.Work
    use: _Use
    result: Tensor


class GradientSums:
    """Collects the gradients of one step.

    Args:
        leaves: of `leaves_of`.
        dtype: of main gradients.
        done: called with a bucket and a step of the model when all gradients of its weights there have come.

    `start` before each micro-batch's backward, `finish_micro_batch` after it, `finish` after the last one; then `owned`
    has what this rank owns of each bucket's sum: all of it without ZeRO, its range with it.
    """

    def __init__(
        self,
        leaves: list[Leaf],
        storage: Storage,
        groups: Groups,
        dtype: torch.dtype,
        done: Callable[[Bucket, int], None] | None = None,
    ) -> None:
        self._storage, self._groups, self._dtype, self._done = storage, groups, dtype, done
        self._parameters = [leaf.parameter for leaf in leaves]
        self._device = leaves[0].parameter.device
        self._expected: dict[_Use, int] = {}
        for leaf in leaves:
            for use in self._uses(leaf):
                self._expected[use] = self._expected.get(use, 0) + 1
            leaf.parameter.register_post_accumulate_grad_hook(self._hook(leaf))
        self._order = self._in_order()
        self._flat: dict[_Use, Tensor] = {}
        self.owned: dict[str, Tensor] = {}
        self._missing: dict[_Use, int] = {}
        self._queue: list[_Use] = []
        self._sums: deque[_Sum] = deque()  # the first one started is the first
        self._is_last = False
        self.is_on = False

    def _uses(self, leaf: Leaf) -> set[_Use]:
        return {_Use(b, leaf.step if self._per_step(b) else b.step) for b, *_ in leaf.places}

    def _per_step(self, bucket: Bucket) -> bool:
        """Whether the bucket's sum is the dual of a gather, of which each step of the model that reads it has one."""
        return self._storage.zero == 3 and bool(bucket.shared)

    def _in_order(self) -> list[_Use]:
        """As the sharded program lists their collectives: what backward makes first comes first."""
        if self._storage.zero < 3:
            return [_Use(bucket, bucket.step) for bucket in reversed(self._storage.buckets)]
        return [
            _Use(bucket, index)
            for index in reversed(range(len(self._storage.sharded.steps)))
            for bucket in reversed(self._storage.used(index))
            if self._per_step(bucket) or bucket.step == index
        ]

    def reset(self) -> None:
        """Begins a step."""
        if self.is_on:
            self._forget()
        self.is_on = True
        for parameter in self._parameters:
            parameter.grad = None
        self.owned.clear()
        for flat in self._flat.values():
            flat.zero_()

    def _forget(self) -> None:
        """Drops what a step that an exception has ended left behind."""
        for made in self._sums:
            wait(made.work)  # nobody writes to its buffers any more
        self._sums.clear()
        self._flat.clear()

    def start(self, *, is_last: bool) -> None:
        """Begins a micro-batch."""
        self._is_last = is_last
        self._missing = dict(self._expected)
        self._queue = list(self._order)

    def _hook(self, leaf: Leaf) -> Callable[[Tensor], None]:
        uses = {use.bucket.name: use for use in self._uses(leaf)}

        def take(parameter: Tensor) -> None:
            if not self.is_on:
                return
            grad, parameter.grad = parameter.grad, None
            assert grad is not None
            for bucket, member, first, stop in leaf.places:
                flat = self._buffer(uses[bucket.name])
                flat[member.start : member.start + member.size].add_(grad[first:stop].reshape(-1))
            for use in uses.values():
                self._missing[use] -= 1
                if self._missing[use] == 0 and self._done is not None:
                    self._done(use.bucket, use.step)
            self._launch()

        return take

    def _buffer(self, use: _Use) -> Tensor:
        if use not in self._flat:
            self._flat[use] = torch.zeros(use.bucket.size, dtype=self._dtype, device=self._device)
        return self._flat[use]

    def _launch(self) -> None:
        """Starts the collectives of buckets that are full, in their order."""
        while self._queue and self._missing[self._queue[0]] == 0:
            use = self._queue.pop(0)
            if self._is_last or self._storage.zero >= 2:
                self._reduce(use)

    def _reduce(self, use: _Use) -> None:
        with self._groups.stage("backward" if self._per_step(use.bucket) else "sync"):
            if self._storage.zero >= 2:
                # a sum has one more step of the model to hide behind
                while self._sums and self._sums[0].use.step > use.step + 1:
                    self._land()
            self._start(use)

    def _start(self, use: _Use) -> None:
        flat, bucket = self._flat[use], use.bucket
        if bucket.shared:
            part = flat.new_empty(bucket.size // bucket.parts)
            group = self._groups.of(bucket.shared)
            work = reduce_scatter_into(part, flat, group=group, async_op=True)
            self._sums.append(_Sum(work, use, part))
            if self._storage.zero >= 2:
                del self._flat[use]  # kept by the work until it is done
        elif bucket.rest and self._is_last:
            work = dist.all_reduce(flat, group=self._groups.of(bucket.rest), async_op=True)
            self._sums.append(_Sum(work, use, flat))

    def _land(self) -> None:
        """Waits for the sum that was started first. A scattered range is added to what this rank owns."""
        made = self._sums[0]
        wait(made.work)
        bucket = made.use.bucket
        if bucket.shared:
            if bucket.name in self.owned:
                self.owned[bucket.name].add_(made.result)
            else:
                self.owned[bucket.name] = made.result
        self._sums.popleft()

    def finish_micro_batch(self) -> None:
        """Waits for the sums that are still under way."""
        assert not self._queue, f"no gradient came for {self._queue[0].bucket.name}"
        while self._sums:
            self._land()

    def finish(self) -> None:
        """Makes `owned` complete: the sums over all axes."""
        for use, flat in self._flat.items():
            if not use.bucket.shared:
                self.owned[use.bucket.name] = flat
        with self._groups.stage("sync"):
            for bucket in reversed(self._storage.buckets):
                if bucket.shared and bucket.rest:
                    dist.all_reduce(self.owned[bucket.name], group=self._groups.of(bucket.rest))
        self.is_on = False

    def norm(self, wide: torch.dtype) -> Tensor:
        """The global norm of the sums, a scalar on the device, the same on every rank."""
        norms = [
            torch.linalg.vector_norm(self.owned[bucket.name][start:stop], 2, dtype=wide)
            for bucket in self._storage.buckets
            for start, stop in self._counted(bucket)
        ]
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=wide, device=self._device)
        if self._storage.norm_axes:
            dist.all_reduce(square, group=self._groups.of(self._storage.norm_axes))
        return square.sqrt()

    def _counted(self, bucket: Bucket) -> Iterator[tuple[int, int]]:
        """Ranges of what this rank owns whose elements count here and on no other rank, neighbours joined."""
        part = self._groups.place(bucket.shared)
        first = bucket.flat(part).start
        joined: list[list[int]] = []
        for member, start, stop in bucket.slices(part):
            if not self._storage.counts(bucket, member, self._groups.coordinate):
                continue
            span = [member.start + start - first, member.start + stop - first]
            if joined and joined[-1][1] == span[0]:
                joined[-1][1] = span[1]
            else:
                joined.append(span)
        yield from ((a, b) for a, b in joined)
