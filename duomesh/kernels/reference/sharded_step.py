"""Training steps on every rank of a mesh: sums of gradients in buckets, the global norm, AdamW on owned ranges.

It carries out what `core.sharding.storage` describes, for every level of ZeRO. Weights that a rank does not own and has
not gathered are NaN, so that a use without its gather shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.batch import Batch
from duomesh.core.session import AdamW
from duomesh.core.sharding.layouts import Step
from duomesh.core.sharding.storage import Bucket, Member, Storage
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, Action, State, shard
from duomesh.kernels.reference.ranks import Issued, Local
from duomesh.kernels.reference.sharded import Applied, ShardedModel

__all__ = ["ShardedTraining"]

_FLAT = ("flat",)
Grads = dict[tuple[str, int], Local]


class ShardedTraining(ShardedModel):
    """A sharded model with its optimizer.

    Args:
        storage: where state lives.
        params: whole parameters, float64, by canonical name.
        config: the optimizer.
    """

    def __init__(self, storage: Storage, params: Mapping[str, Array], config: AdamW) -> None:
        super().__init__(storage.sharded, params)
        self.storage, self._config, self._count = storage, config, 0
        self._shapes = {key: local[0].shape for key, local in self.params.items()}
        self.owned = {b.name: self._own_ranges(b, self._flattened(b, self.params)) for b in storage.buckets}
        self._moments = {
            name: ([np.zeros_like(x) for x in local], [np.zeros_like(x) for x in local])
            for name, local in self.owned.items()
        }
        self._sums = {name: [np.zeros_like(x) for x in local] for name, local in self.owned.items()}
        if storage.zero == 3:
            self._release(storage.buckets)

    def step(self, batches: Sequence[Batch], lr: float) -> tuple[float, float]:
        """One update. Returns the objective before it and the global norm of the gradients before clipping."""
        self._sums = {b.name: [np.zeros_like(x) for x in self.owned[b.name]] for b in self.storage.buckets}
        loss, grads = self.local_grads(batches)
        self._finish_sums(grads)
        norm = self._norm()
        limit = self._config.max_grad_norm
        scale = 1.0 if limit is None or norm <= limit else limit / norm
        self._count += 1
        for bucket in self.storage.buckets:
            self._update(bucket, scale, lr)
        if self.storage.zero in (1, 2):
            self._gather(self.storage.buckets, "optimizer", INVARIANT)
        elif self.storage.zero == 0:
            for bucket in self.storage.buckets:
                self._unflatten(bucket, self.owned[bucket.name])
        return loss, norm

    def whole_params(self) -> dict[str, Array]:
        """Whole parameters by canonical name, as every owner has them."""
        if self.storage.zero == 3:
            issued = len(self.ranks.issued)
            self._gather(self.storage.buckets, "optimizer", INVARIANT)
            del self.ranks.issued[issued:]  # looking is no part of a step
        out: dict[str, Array] = {}
        for (name, stage), local in self.params.items():
            layout = {a: INVARIANT if s == REPLICATED else s for a, s in self.sharded.params[name, stage].items()}
            whole = self.whole(local, self._param_axes(name), layout).reshape(self.sharded.model.params[name].shape)
            assert name not in out or np.array_equal(out[name], whole), f"owners of {name} differ"
            out[name] = whole
        if self.storage.zero == 3:
            self._release(self.storage.buckets)
        return out

    # Uses of storage

    def forward(self, step: Applied) -> None:
        if self.storage.zero != 3:
            return super().forward(step)
        used = self.storage.used(step.index)
        self._gather(used, "forward", REPLICATED)
        super().forward(step)
        return self._release(used)

    def backward(
        self, step: Applied, seeds: Mapping[tuple[str, str], float], stream: dict[str, Local], totals: Grads
    ) -> float:
        zero = self.storage.zero
        used = self.storage.used(step.index, in_backward=True) if zero == 3 else []
        self._gather(used, "recompute", REPLICATED)
        loss = super().backward(step, seeds, stream, totals)
        self._release(used)
        ready = self.storage.used(step.index) if zero == 3 else self._of_step(step.index) if zero == 2 else []
        for bucket in reversed(ready):
            self._scatter(bucket, totals, "backward" if zero == 3 else "sync")
        return loss

    def _of_step(self, index: int) -> list[Bucket]:
        return [bucket for bucket in self.storage.buckets if bucket.step == index]

    def _flattened(self, bucket: Bucket, arrays: Mapping[tuple[str, int], Local]) -> Local:
        """Members one after another, padded, by rank."""
        rows = zip(*(arrays[member.name, bucket.stage] for member in bucket.members), strict=True)
        flat = [np.concatenate([array.reshape(-1) for array in row]) for row in rows]
        return [np.pad(x, (0, bucket.size - x.size)) for x in flat]

    def _unflatten(self, bucket: Bucket, flat: Local) -> None:
        for m in bucket.members:
            key = (m.name, bucket.stage)
            self.params[key] = [x[m.start : m.start + m.size].reshape(self._shapes[key]) for x in flat]

    def _shift(
        self, local: Local, bucket: Bucket, axes: tuple[str, ...], states: tuple[State, State], phase: str
    ) -> Local:
        """A bucket, or a range of it, through one transition over some axes together."""
        if not axes:
            return local
        layout = {**dict.fromkeys(self.sharded.mesh.names, INVARIANT), **dict.fromkeys(axes, states[0])}
        return self.ranks.move(local, _FLAT, (bucket.size,), layout, [Step(axes, *states)], phase)

    def _own_ranges(self, bucket: Bucket, flat: Local) -> Local:
        return self._shift(flat, bucket, bucket.shared, (REPLICATED, shard("flat")), "")

    def _gather(self, buckets: Iterable[Bucket], phase: str, after: State) -> None:
        for bucket in buckets:
            flat = self._shift(self.owned[bucket.name], bucket, bucket.shared, (shard("flat"), after), phase)
            self._unflatten(bucket, flat)

    def _release(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            for member in bucket.members:
                key = (member.name, bucket.stage)
                self.params[key] = [np.full(self._shapes[key], np.nan)] * self.sharded.mesh.world_size

    # Gradients

    def _scatter(self, bucket: Bucket, grads: Grads, phase: str) -> None:
        """Adds a bucket's gradients to the ranges that ranks own, and empties them."""
        flat = self._flattened(bucket, grads)
        made = self._shift(flat, bucket, bucket.shared, (PARTIAL, shard("flat")), phase)
        self._sums[bucket.name] = [a + b for a, b in zip(self._sums[bucket.name], made, strict=True)]
        for member in bucket.members:
            key = (member.name, bucket.stage)
            grads[key] = [np.zeros_like(x) for x in grads[key]]

    def _finish_sums(self, grads: Grads) -> None:
        for bucket in reversed(self.storage.buckets):
            if self.storage.zero < 2:
                self._scatter(bucket, grads, "sync")
            local = self._sums[bucket.name]
            self._sums[bucket.name] = self._shift(local, bucket, bucket.rest, (PARTIAL, INVARIANT), "sync")
        self._sum_over_owners()

    def _sum_over_owners(self) -> None:
        """A parameter that several stages own has the sum of their gradients, on each of them."""
        by_members: dict[tuple[str, ...], list[Bucket]] = {}
        for bucket in reversed(self.storage.buckets):
            if len(self.sharded.owners[bucket.members[0].name]) > 1:
                by_members.setdefault(tuple(m.name for m in bucket.members), []).append(bucket)
                size = self._sums[bucket.name][0].size
                self.ranks.issued.append(Issued("sync", Action.ALL_REDUCE.value, ("pp",), size))
        for owners in by_members.values():
            total = [np.asarray(sum(parts)) for parts in zip(*(self._sums[b.name] for b in owners), strict=True)]
            self._sums.update({bucket.name: total for bucket in owners})

    def _norm(self) -> float:
        """The global norm, the same on every rank."""
        squares = [np.zeros(1) for _ in range(self.sharded.mesh.world_size)]
        for bucket in self.storage.buckets:
            for rank, place in enumerate(self.sharded.mesh.coordinates()):
                coordinate = dict(zip(self.sharded.mesh.names, place, strict=True))
                mine = self._sums[bucket.name][rank]
                for member, span in self._spans(bucket, coordinate):
                    if self.storage.counts(bucket, member, coordinate):
                        squares[rank] = squares[rank] + np.sum(mine[span] ** 2)
        axes = self.storage.norm_axes
        is_piped = len(set(self.sharded.stages)) > 1
        if axes or is_piped:
            self.ranks.issued.append(Issued("norm", Action.ALL_REDUCE.value, axes + ("pp",) * is_piped, 1))
        totals = self.ranks.reduce(axes, squares, np.add.reduce, None)
        assert all(np.array_equal(total, totals[0]) for total in totals)
        return float(np.sqrt(totals[0][0]))

    def _spans(self, bucket: Bucket, coordinate: Mapping[str, int]) -> Iterable[tuple[Member, slice]]:
        """(member, where its elements lie in the range of a rank)."""
        part = 0
        for axis in bucket.shared:
            part = part * self.sharded.mesh.size(axis) + coordinate[axis]
        first = bucket.flat(part).start
        for member, start, stop in bucket.slices(part):
            yield member, slice(member.start + start - first, member.start + stop - first)

    def _update(self, bucket: Bucket, scale: float, lr: float) -> None:
        """AdamW on each rank's range; only matrices decay."""
        c = self._config
        first, second = self._moments[bucket.name]
        for rank, place in enumerate(self.sharded.mesh.coordinates()):
            coordinate = dict(zip(self.sharded.mesh.names, place, strict=True))
            decay = np.zeros_like(self.owned[bucket.name][rank])
            for member, span in self._spans(bucket, coordinate):
                decay[span] = c.weight_decay * self.sharded.model.params[member.name].is_decayed
            g = self._sums[bucket.name][rank] * scale
            first[rank] = c.beta1 * first[rank] + (1 - c.beta1) * g
            second[rank] = c.beta2 * second[rank] + (1 - c.beta2) * g * g
            m, v = first[rank] / (1 - c.beta1**self._count), second[rank] / (1 - c.beta2**self._count)
            w = self.owned[bucket.name][rank]
            self.owned[bucket.name][rank] = w - lr * (m / (np.sqrt(v) + c.eps) + decay * w)
