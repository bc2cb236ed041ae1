"""Ops on local arrays: the reference functions, told where on the mesh a rank's arrays lie.

Most ops do on their local arrays what they do on whole ones. A few must know which positions, rows or experts they hold
(attention, look-ups, dispatch and combine), and two reduce over ranks themselves (a cross entropy over a split
vocabulary, a norm over split heads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.batch import IGNORE
from duomesh.core.ir.program import Call
from duomesh.core.sharding.layouts import Layout
from duomesh.kernels.reference.adjoints import ADJOINTS
from duomesh.kernels.reference.ops import OPS
from duomesh.kernels.reference.ranks import Local, Ranks

__all__ = ["LocalCall"]

Operand = Local | None
_Pulled = list[Array | None]


@dataclass(frozen=True)
class LocalCall:
    """One op on every rank.

    Attributes:
        call: the op.
        operands: arrays by rank, inputs then parameters, one dim for each logical axis; None for an absent one.
        layouts: of the operands, None where absent. made: layout of the first result.
        names: logical axes of the operands.
        axes: mesh axes that split an inner axis of the op.
        sizes: true sizes of logical axes.
    """

    call: Call
    operands: Sequence[Operand]
    layouts: Sequence[Layout | None]
    made: Layout
    names: Sequence[tuple[str, ...]]
    axes: tuple[str, ...]
    sizes: dict[str, int]

    def forward(self, ranks: Ranks) -> list[Local]:
        """Results by output and rank."""
        if self.axes:
            return [_INNER[self.call.op.kind][0](self, ranks)]
        rows = []
        for rank in range(ranks.mesh.world_size):
            inputs, storage, kwargs = self._arguments(ranks, rank)
            made = OPS[self.call.op.kind](*inputs, *storage, **kwargs)
            made = made if isinstance(made, tuple) else (made,)
            rows.append(tuple(self._kept(ranks, rank, array) for array in made))
        return [list(column) for column in zip(*rows, strict=True)]

    def backward(self, ranks: Ranks, cotangents: Sequence[Local]) -> list[Operand]:
        """Cotangents by operand and rank; None for an operand that has none."""
        if self.axes:
            return _INNER[self.call.op.kind][1](self, ranks, cotangents[0])
        rows = [self._pulled(ranks, rank, [c[rank] for c in cotangents]) for rank in range(ranks.mesh.world_size)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        return [None if any(x is None for x in column) else column for column in columns]

    def positions(self, ranks: Ranks, operand: int, name: str) -> Local:
        """By rank the positions along a dim of an operand that it holds."""
        layout = self.layouts[operand]
        assert layout is not None
        return ranks.places(name, self.sizes[name], layout)

    def local(self, operand: int) -> Local:
        held = self.operands[operand]
        assert held is not None
        return held

    def _count(self) -> int:
        return len(self.call.op.inputs)

    def _arguments(self, ranks: Ranks, rank: int) -> tuple[_Pulled, _Pulled, dict[str, Any]]:
        """What a rank calls the reference op with: inputs, storage as it is stored, keyword arguments."""
        kind, count = self.call.op.kind, self._count()
        local = [None if held is None else held[rank] for held in self.operands]
        inputs, params, kwargs = local[:count], local[count:], dict(self.call.kwargs)
        if kind == "linear":
            return inputs, *_packed(self.call, params)
        if kind == "norm":
            params = [None if p is None else p.reshape(-1) for p in params]
        elif kind == "embedding":
            inputs, params = self._looked_up(ranks, rank)
        elif kind == "attention":
            inputs[0] = self._at_home(ranks, rank, self.local(0)[rank])
        elif kind == "dispatch":
            kwargs["num_experts"], inputs[1] = self._of_its_own(ranks, rank, "experts", self.made, 1)
        elif kind == "count_choices":
            kwargs["num_experts"], inputs[0] = self._of_its_own(ranks, rank, "scores", self.made, 0)
        elif kind == "combine":
            held = self.layouts[0]
            assert held is not None
            _, inputs[2] = self._of_its_own(ranks, rank, "experts", held, 2)
        return inputs, params, kwargs

    def _at_home(self, ranks: Ranks, rank: int, q: Array) -> Array:
        """Queries that are split by position, where they belong in a whole sequence of zeros."""
        whole = np.zeros((q.shape[0], self.sizes["seq"], *q.shape[2:]), q.dtype)
        whole[:, self.positions(ranks, 0, "seq")[rank]] = q
        return whole

    def _kept(self, ranks: Ranks, rank: int, made: Array) -> Array:
        return made[:, self.positions(ranks, 0, "seq")[rank]] if self.call.op.kind == "attention" else made

    def _looked_up(self, ranks: Ranks, rank: int) -> tuple[_Pulled, _Pulled]:
        """A table split by rows: ids of other ranks' rows find a row of zeros."""
        weight = self.local(1)[rank]
        local = self.local(0)[rank].astype(np.int64) - self.positions(ranks, 1, "vocab")[rank][0]
        rows = np.where((local >= 0) & (local < len(weight)), local, len(weight))
        return [rows], [np.concatenate([weight, np.zeros_like(weight[:1])])]

    def _of_its_own(self, ranks: Ranks, rank: int, name: str, layout: Layout, ids: int) -> tuple[int, Array]:
        """How many experts a rank works for, and ids counted from its first: those of others are outside."""
        held = ranks.places(name, self.sizes[name], layout)[rank]
        return len(held), self.local(ids)[rank] - held[0]

    def _pulled(self, ranks: Ranks, rank: int, given: Local) -> _Pulled:
        kind = self.call.op.kind
        inputs, storage, kwargs = self._arguments(ranks, rank)
        if kind == "attention":
            given = [self._at_home(ranks, rank, given[0])]
        pulled: _Pulled = list(ADJOINTS[kind](tuple(given), tuple(inputs), tuple(storage), **kwargs))
        count = self._count()
        if kind == "attention" and pulled[0] is not None:
            pulled[0] = pulled[0][:, self.positions(ranks, 0, "seq")[rank]]
        elif kind == "embedding" and pulled[1] is not None:
            pulled[1] = pulled[1][:-1]
        elif kind == "linear":
            shapes = [None if held is None else held[rank].shape for held in self.operands[count:]]
            half = len(shapes) // 2
            pulled = [pulled[0], *_unpacked(pulled[1], shapes[:half]), *_unpacked(pulled[2], shapes[half:])]
        elif kind == "norm":
            shapes = [None if held is None else held[rank].shape for held in self.operands[count:]]
            pairs = zip(pulled[1:], shapes, strict=True)
            pulled = [pulled[0], *(None if p is None or s is None else p.reshape(s) for p, s in pairs)]
        return pulled


def _packed(call: Call, params: _Pulled) -> tuple[_Pulled, dict[str, Any]]:
    """A linear's local weights and biases, each joined along rows, and its keyword arguments for local shapes."""
    half, in_dims = len(params) // 2, call.kwargs["in_dims"]
    assert isinstance(in_dims, int)
    outs, weights, biases = [], [], []
    for weight, bias in zip(params[:half], params[half:], strict=True):
        assert weight is not None
        out = weight.shape[: weight.ndim - in_dims]
        outs.append(out)
        weights.append(weight.reshape(int(np.prod(out)), -1))
        if bias is not None:
            biases.append(bias.reshape(-1))
    storage: _Pulled = [np.concatenate(weights), np.concatenate(biases) if biases else None]
    return storage, {**call.kwargs, "outs": tuple(outs)}


def _unpacked(packed: Array | None, shapes: Sequence[tuple[int, ...] | None]) -> _Pulled:
    """Members of a pack by their own shapes; None for one that is absent."""
    out: _Pulled = []
    start = 0
    for shape in shapes:
        if shape is None or packed is None:
            out.append(None)
            continue
        size = int(np.prod(shape))
        out.append(packed.reshape(-1)[start : start + size].reshape(shape))
        start += size
    return out


# Cross entropy over a split vocabulary: a maximum and two sums cross the ranks


def _softmax(call: LocalCall, ranks: Ranks, phase: str | None) -> tuple[Local, Local, Local]:
    """By rank: probabilities of its columns, the log of the sum of exponentials, one-hot labels in its columns.

    phase: None in backward, which reads what forward has saved.
    """
    vocab = call.names[0][-1]
    columns = call.positions(ranks, 0, vocab)
    # padding columns are in no softmax
    logits = [np.where(c < call.sizes[vocab], z, -np.inf) for z, c in zip(call.local(0), columns, strict=True)]
    top = ranks.reduce(call.axes, [z.max(-1, keepdims=True) for z in logits], np.maximum.reduce, phase)
    exps = [np.exp(z - m) for z, m in zip(logits, top, strict=True)]
    total = ranks.reduce(call.axes, [e.sum(-1, keepdims=True) for e in exps], np.add.reduce, phase)
    hots = [c == y[..., None] for c, y in zip(columns, call.local(1), strict=True)]
    log_sums = [(np.log(t) + m)[..., 0] for t, m in zip(total, top, strict=True)]
    return [e / t for e, t in zip(exps, total, strict=True)], log_sums, hots


def _cross_entropy(call: LocalCall, ranks: Ranks) -> Local:
    _, log_sums, hots = _softmax(call, ranks, "forward")
    picked = [np.where(hot, z, 0.0).sum(-1) for hot, z in zip(hots, call.local(0), strict=True)]
    picked = ranks.reduce(call.axes, picked, np.add.reduce, "forward")
    parts = zip(call.local(1), log_sums, picked, strict=True)
    return [np.where(y == IGNORE, 0.0, log_sum - p) for y, log_sum, p in parts]


def _pull_cross_entropy(call: LocalCall, ranks: Ranks, given: Local) -> list[Operand]:
    """(softmax - one-hot) c in the rank's columns, 0 where the label is IGNORE."""
    probs, _, hots = _softmax(call, ranks, None)
    parts = zip(probs, hots, given, call.local(1), strict=True)
    return [[(p - hot) * np.where(y == IGNORE, 0.0, c)[..., None] for p, hot, c, y in parts], None]


# A norm over split heads: a sum of squares crosses the ranks forward, a sum of products backward


def _normalised(call: LocalCall, ranks: Ranks, phase: str | None) -> tuple[Local, Local, tuple[int, ...]]:
    """x over its root mean square, 1 / that root, and the dims that are normed."""
    dims = tuple(range(-len(call.names[1]), 0))
    count = int(np.prod([call.sizes[name] for name in call.names[1]]))
    squares = [np.sum(x * x, axis=dims, keepdims=True) for x in call.local(0)]
    sums = ranks.reduce(call.axes, squares, np.add.reduce, phase)
    eps = float(call.call.kwargs["eps"])  # type: ignore[arg-type]
    inverse = [1.0 / np.sqrt(s / count + eps) for s in sums]
    return [x * r for x, r in zip(call.local(0), inverse, strict=True)], inverse, dims


def _gains(call: LocalCall) -> Local:
    offset = float(call.call.kwargs["weight_offset"])  # type: ignore[arg-type]
    return [weight + offset for weight in call.local(1)]


def _norm(call: LocalCall, ranks: Ranks) -> Local:
    normed, _, _ = _normalised(call, ranks, "forward")
    biases = call.operands[2] or [np.zeros(())] * len(normed)
    return [n * gain + bias for n, gain, bias in zip(normed, _gains(call), biases, strict=True)]


def _pull_norm(call: LocalCall, ranks: Ranks, given: Local) -> list[Operand]:
    normed, inverse, dims = _normalised(call, ranks, None)
    count = int(np.prod([call.sizes[name] for name in call.names[1]]))
    g = [c * gain for c, gain in zip(given, _gains(call), strict=True)]
    products = [np.sum(a * n, axis=dims, keepdims=True) for a, n in zip(g, normed, strict=True)]
    sums = ranks.reduce(call.axes, products, np.add.reduce, "backward")
    d_x = [r * (a - n * s / count) for r, a, n, s in zip(inverse, g, normed, sums, strict=True)]
    rows = tuple(range(given[0].ndim - len(dims)))
    d_weight = [np.sum(c * n, axis=rows) for c, n in zip(given, normed, strict=True)]
    d_bias = None if call.operands[2] is None else [np.sum(c, axis=rows) for c in given]
    return [d_x, d_weight, d_bias]


_INNER: dict[str, tuple[Callable[..., Local], Callable[..., list[Operand]]]] = {
    "cross_entropy": (_cross_entropy, _pull_cross_entropy),
    "norm": (_norm, _pull_norm),
}
