"""Parameters of a mesh as flat buckets, and the optimizer that updates the ranges that a rank owns.

Stored tensors are views of their bucket's buffer, so that one collective hands out all of a bucket's weights in place.
A pack whose members are summed over different axes lies in several buckets; it keeps a tensor of its own, with copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from duomesh.backends.torch.collectives import all_gather_into, wait
from duomesh.backends.torch.groups import Groups
from duomesh.backends.torch.optim import Optimizer
from duomesh.backends.torch.reduce import Leaf
from duomesh.core.session import AdamW
from duomesh.core.sharding.pieces import Span
from duomesh.core.sharding.storage import Bucket, Member, Storage

__all__ = ["FlatOptimizer", "FlatParams"]


class FlatParams:
    """The compute weights of a rank by bucket.

    Attributes:
        full: bucket -> buffer of all its elements, in the compute dtype; without memory while it is released.
    """

    def __init__(self, leaves: Sequence[Leaf], storage: Storage, groups: Groups) -> None:
        self.storage, self.groups = storage, groups
        first = leaves[0].parameter
        self.full = {b.name: torch.zeros(b.size, dtype=first.dtype, device=first.device) for b in storage.buckets}
        # rows of a tensor of its own, and their place in a bucket
        self._copies: list[tuple[Bucket, nn.Parameter, int, int, Member]] = []
        for leaf in leaves:
            self._place(leaf)
        self._owned: dict[str, Tensor] = {}  # of buckets that are released; the others always have all their memory
        self._works: dict[str, dist.Work] = {}
        self._is_full = {bucket.name: True for bucket in storage.buckets}

    def _place(self, leaf: Leaf) -> None:
        start = leaf.places[0][1].start
        if _is_one_run(leaf):
            size = sum(member.size for _, member, _, _ in leaf.places)
            buffer = self.full[leaf.places[0][0].name]
            leaf.parameter.data = buffer[start : start + size].view(leaf.parameter.shape)
            return
        for bucket, member, low, high in leaf.places:
            self._copies.append((bucket, leaf.parameter, low, high, member))

    def own(self, bucket: Bucket) -> Tensor:
        """This rank's range of a bucket's weights."""
        if bucket.name in self._owned:
            return self._owned[bucket.name]
        flat = bucket.flat(self.groups.place(bucket.shared))
        return self.full[bucket.name][flat.start : flat.stop]

    @torch.no_grad()
    def pull(self, bucket: Bucket) -> None:
        """Copies a gathered bucket to the stored tensors that are no views of it."""
        for place, parameter, low, high, member in self._copies:
            if place is bucket:
                _allocate(parameter.data)
                rows = parameter.data[low:high]
                rows.copy_(self.full[bucket.name][member.start : member.start + member.size].view(rows.shape))

    @torch.no_grad()
    def hand_out(self) -> None:
        """Every rank gets what owners have set of their ranges: now, or when a bucket is next gathered."""
        for bucket in self.storage.buckets:
            if bucket.name in self._owned:
                continue
            if bucket.shared:
                mine = self.own(bucket).clone()
                all_gather_into(self.full[bucket.name], mine, group=self.groups.of(bucket.shared))
            self.pull(bucket)

    # Storage that is shared: only ranges are kept, and buckets have memory while they are used

    def keep_ranges(self) -> None:
        """From now on this rank keeps its ranges of shared buckets, and releases those after use."""
        for bucket in self.storage.buckets:
            if bucket.shared:
                self._owned[bucket.name] = self.own(bucket).clone()
                self.release(bucket)

    def prefetch(self, bucket: Bucket) -> None:
        """Starts to gather a released bucket."""
        if self._is_full[bucket.name] or bucket.name in self._works:
            return
        full = self.full[bucket.name]
        _allocate(full)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(full):
            work = all_gather_into(full, self._owned[bucket.name], group=self.groups.of(bucket.shared), async_op=True)
        self._works[bucket.name] = work

    def acquire(self, bucket: Bucket) -> None:
        """Gathers a bucket, or waits until it is there."""
        self.prefetch(bucket)
        work = self._works.get(bucket.name)
        if work is not None:
            wait(work)
            self.pull(bucket)
            del self._works[bucket.name]
            self._is_full[bucket.name] = True

    def release_all(self) -> None:
        """Frees what is gathered or on its way, in whatever state an exception has left it."""
        for work in self._works.values():
            wait(work)  # nobody writes to the memory any more
        self._works.clear()
        for bucket in self.storage.buckets:
            self.release(bucket)

    def release(self, bucket: Bucket) -> None:
        """Frees a bucket's memory if it can be gathered again; tensors that are views of it keep their shapes."""
        if bucket.name not in self._owned:
            return
        self._is_full[bucket.name] = False
        self.full[bucket.name].untyped_storage().resize_(0)
        for place, parameter, *_ in self._copies:
            if place is bucket:
                parameter.data.untyped_storage().resize_(0)


def _allocate(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    size = tensor.numel() * tensor.element_size()
    if storage.size() < size:
        storage.resize_(size)


def _is_one_run(leaf: Leaf) -> bool:
    """Whether the tensor's rows lie in one bucket, one after another."""
    bucket, stop = leaf.places[0][0].name, leaf.places[0][1].start
    for place, member, _, _ in leaf.places:
        if place.name != bucket or member.start != stop:
            return False
        stop += member.size
    return True


@dataclass(frozen=True)
class _Segment:
    """Elements [start, stop) of what a rank owns of a bucket, all decayed or none."""

    bucket: Bucket
    start: int
    stop: int
    is_decayed: bool


class FlatOptimizer:
    """AdamW on the ranges that this rank owns.

    Args:
        flat: the weights.
        is_decayed: canonical name -> whether weight decay acts on it.
    """

    def __init__(self, flat: FlatParams, is_decayed: Mapping[str, bool], config: AdamW) -> None:
        self._flat = flat
        made = [s for b in flat.storage.buckets for s in _segments(flat, b, is_decayed)]
        self._segments = {f"{s.bucket.name}:{s.start}": s for s in made}
        params = {name: nn.Parameter(flat.own(s.bucket)[s.start : s.stop]) for name, s in self._segments.items()}
        decays = {name: s.is_decayed for name, s in self._segments.items()}
        self.inner = Optimizer(params, decays, config)
        self._loading: dict[tuple[str, str], Tensor] = {}

    def step(self, owned: Mapping[str, Tensor], lr: float, *, scale: float) -> None:
        """One update from sums of gradients by bucket, of this rank's ranges; then every rank has the new weights."""
        grads = {name: owned[s.bucket.name][s.start : s.stop] for name, s in self._segments.items()}
        self.inner.step(grads, lr, scale=scale)
        self._flat.hand_out()

    def state(self) -> Iterator[tuple[str, Bucket, Tensor]]:
        """(group, bucket, this rank's range of it), padding zero."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for group, name, tensor in self.inner.state():
            by_name.setdefault(group, {})[name] = tensor
        for group, tensors in by_name.items():
            for bucket in self._flat.storage.buckets:
                mine = [(s, tensors[name]) for name, s in self._segments.items() if s.bucket is bucket]
                made = torch.zeros(
                    bucket.size // bucket.parts, dtype=self.inner.dtype, device=self._flat.own(bucket).device
                )
                for segment, tensor in mine:
                    made[segment.start : segment.stop] = tensor
                yield group, bucket, made

    def begin_load(self, step_count: int) -> None:
        """Makes state for so many updates; then `fill`, and `finish_load`."""
        self._loading = self.inner.begin_load(step_count)

    @torch.no_grad()
    def fill(self, group: str, span: Span, values: Tensor) -> None:
        """Sets what this rank owns of one parameter in one group."""
        name, segment = next(
            (n, s) for n, s in self._segments.items() if s.bucket is span.bucket and s.start <= span.start < s.stop
        )
        self._loading[group, name][span.start - segment.start : span.stop - segment.start] = values

    def finish_load(self) -> None:
        """Rounds compute weights from their masters, and hands them out."""
        self._loading = {}
        self.inner.round_params()
        self._flat.hand_out()


def _segments(flat: FlatParams, bucket: Bucket, is_decayed: Mapping[str, bool]) -> list[_Segment]:
    """Runs of a rank's range that are decayed alike."""
    part = flat.groups.place(bucket.shared)
    first = bucket.flat(part).start
    made: list[_Segment] = []
    for member, low, high in bucket.slices(part):
        start, stop = member.start + low - first, member.start + high - first
        last = made[-1] if made else None
        if last is not None and last.stop == start and last.is_decayed == is_decayed[member.name]:
            made[-1] = _Segment(bucket, last.start, stop, last.is_decayed)
        else:
            made.append(_Segment(bucket, start, stop, is_decayed[member.name]))
    return made
