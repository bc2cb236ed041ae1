"""The sharding IR carried out: every rank of a mesh in one process, in numpy, forward and backward.

Each rank runs the reference ops and their adjoints on its local arrays. Between ops, values move as the sharded
program's instructions say, and cotangents move back by their duals. Nothing else crosses ranks, but for the collectives
that an op declares as its own. It is the oracle of layouts, as `ReferenceModel` is that of programs.

Arrays of parameters have one dim for each logical axis here; an op sees them merged, as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.batch import Batch
from duomesh.core.dropout import DropoutKey, dropout_inputs
from duomesh.core.ir.values import Axes
from duomesh.core.objective import term_seeds
from duomesh.core.sharding.collectives import inner_axes
from duomesh.core.sharding.layouts import Extents, Layout, dual_layout
from duomesh.core.sharding.program import Reshard, ShardedCall, ShardedModelProgram, ShardedProgram, param_axes
from duomesh.core.sharding.transitions import INVARIANT
from duomesh.kernels.reference.experts import is_chosen
from duomesh.kernels.reference.local_ops import LocalCall
from duomesh.kernels.reference.ranks import Local, Ranks

__all__ = ["Applied", "ShardedModel"]


@dataclass
class Applied:
    """One application of a program that ran.

    index: of the model's steps. values: arrays by name; what is gathered again in backward is left out.
    chosen: [experts, B, S], which rows of dispatched values exist.
    """

    index: int
    prefix: str
    stage: int
    program: ShardedProgram
    values: dict[str, Local]
    chosen: Array | None = None


class ShardedModel:
    """Runs a sharded model.

    Args:
        sharded: from `shard_model`.
        params: whole parameters, float64, by canonical name.

    Attributes:
        ranks: the ranks, with the collectives that they have issued.
    """

    def __init__(self, sharded: ShardedModelProgram, params: Mapping[str, Array]) -> None:
        self.sharded = sharded
        self.ranks = Ranks(Extents(sharded.mesh, 1, 1, sharded.multiples))
        self._run_time: dict[str, int] = {}
        self.params = {
            (name, stage): self._spread(_unmerged(params[name], sharded, name), self._param_axes(name), layout)
            for (name, stage), layout in sharded.params.items()
        }

    # Axes and sizes

    def _param_axes(self, name: str) -> Axes:
        return param_axes(self.sharded.model.params[name])

    def _sizes(self, axes: Axes) -> tuple[int, ...]:
        return tuple(self._run_time[axis.name] if axis.size is None else axis.size for axis in axes)

    def _spread(self, whole: Array, axes: Axes, layout: Layout) -> Local:
        return self.ranks.spread(whole, _names(axes), layout)

    def whole(self, local: Local, axes: Axes, layout: Layout) -> Array:
        """The value that the ranks' arrays stand for; ranks that must be equal are checked to be."""
        return self.ranks.whole(local, _names(axes), self._sizes(axes), layout)

    # Forward

    def run(self, batch: Batch, dropout: DropoutKey | None = None) -> list[Applied]:
        """Every program in order. dropout: what masks are drawn for; None drops nothing."""
        self._run_time = {"batch": batch.tokens.shape[0], "seq": batch.tokens.shape[1]}
        counted = dropout_inputs(self.sharded.model, batch, dropout)
        keys = counted.pop("dropout_keys")
        stream = self._data(batch, counted)
        applied = []
        for index, (prefix, stage, program) in enumerate(self.sharded.steps):
            if keys is not None:
                stream["dropout_key"] = [keys[index]] * self.sharded.mesh.world_size
            values = {v.name: stream[v.name] for v in program.program.inputs if v.name in stream}
            for constant in program.program.constants:
                whole = np.asarray(constant.data, np.float32).astype(np.float64)
                values[constant.name] = [whole] * self.sharded.mesh.world_size
            step = Applied(index, prefix, stage, program, values)
            self.forward(step)
            stream |= {outside: values[name] for outside, name in program.outputs}
            applied.append(step)
        return applied

    def _data(self, batch: Batch, counted: Mapping[str, Array | None]) -> dict[str, Local]:
        """Each rank's part of the batch: of samples, of positions, or of both."""
        data = {
            "tokens": batch.tokens,
            "positions": batch.resolved_positions,
            "segment_ids": batch.segment_ids,
            "labels": batch.labels,
            "loss_mask": batch.weights.astype(np.float64),
            **counted,
        }
        axes = {"samples": ("batch",), "places": ("seq",)}
        out: dict[str, Local] = {}
        for name, array in data.items():
            if array is not None:
                names = axes.get(name, ("batch", "seq"))
                rules = self.sharded.rules.items()
                layout = {axis: rule.state(rule.data if rule.data in names else None) for axis, rule in rules}
                out[name] = self.ranks.spread(array, names, layout)
        return out

    def forward(self, step: Applied) -> None:
        """Runs one program's instructions in order."""
        regathered = []
        for made in step.program.instructions:
            if isinstance(made, Reshard):
                if made.source in step.values or made.source in step.program.program.param_by_name:
                    step.values[made.result] = self._move(step, made, "forward")
                if made.regathers:
                    regathered.append(made.result)
                continue
            results = self._call(step, made).forward(self.ranks)
            step.values.update(zip(made.call.op.outputs, results, strict=True))
            if made.call.op.kind == "route":
                step.chosen = self._chosen(step, made)
        for name in regathered:
            del step.values[name]

    def _value(self, step: Applied, name: str) -> Local | None:
        """A value or a parameter by local name; None for an optional input that is absent."""
        if name in step.program.program.param_by_name:
            return self.params[self.sharded.canonical(step.prefix, name), step.stage]
        return step.values.get(name)

    def _move(self, step: Applied, made: Reshard, phase: str) -> Local:
        source = self._value(step, made.source)
        assert source is not None
        return self._moved(step, made, source, phase, backward=False)

    def _moved(self, step: Applied, made: Reshard, local: Local, phase: str, *, backward: bool) -> Local:
        program = step.program
        axes = program.axes(made.source)
        layout = dual_layout(program.layouts[made.result]) if backward else program.layouts[made.source]
        value = program.program.values.get(program.origin[made.source])
        rows = step.chosen if value is not None and value.live is not None else None
        path = made.back if backward else made.ahead
        return self.ranks.move(local, _names(axes), self._sizes(axes), layout, path, phase, rows)

    def _chosen(self, step: Applied, made: ShardedCall) -> Array:
        """Which experts each token has chosen, from the whole ids."""
        program, name = step.program, made.call.op.outputs[2]
        scores = program.program.values[str(made.call.op.inputs[0])]
        layout = {a: s if s.dim is not None else INVARIANT for a, s in program.layouts[name].items()}
        ids = self.whole(step.values[name], program.axes(name), layout)
        chosen = np.asarray(is_chosen(ids, scores.axes[-1].size or 0).any(axis=2))
        return np.moveaxis(chosen, -1, 0)

    def _call(self, step: Applied, made: ShardedCall) -> LocalCall:
        program = step.program
        operands = [None if name is None else self._value(step, name) for name in made.operands]
        present = [None if held is None else name for name, held in zip(made.operands, operands, strict=True)]
        axes = [() if name is None else program.axes(name) for name in present]
        every = [*axes, *(program.axes(name) for name in made.call.op.outputs)]
        return LocalCall(
            call=made.call,
            operands=operands,
            layouts=[None if name is None else program.layouts[name] for name in present],
            made=program.layouts[made.call.op.outputs[0]],
            names=[_names(operand) for operand in axes],
            axes=inner_axes(program, made),
            sizes={a.name: s for value in every for a, s in zip(value, self._sizes(value), strict=True)},
        )

    # Backward

    def loss_and_grads(
        self, batches: Sequence[Batch], dropout: DropoutKey | None = None
    ) -> tuple[float, dict[str, Array]]:
        """The step's objective and whole gradients by canonical name."""
        loss, totals = self.local_grads(batches, dropout)
        grads: dict[str, Array] = {}
        for (name, stage), local in totals.items():
            layout = dual_layout(self.sharded.params[name, stage])
            made = self.whole(local, self._param_axes(name), layout).reshape(self.sharded.model.params[name].shape)
            grads[name] = grads[name] + made if name in grads else made
        return loss, grads

    def local_grads(
        self, batches: Sequence[Batch], dropout: DropoutKey | None = None
    ) -> tuple[float, dict[tuple[str, int], Local]]:
        """The objective, and what each rank has of the gradients before any sum over ranks, by (name, stage).

        They are in the duals of the parameters' layouts.
        """
        totals = {key: [np.zeros_like(x) for x in local] for key, local in self.params.items()}
        loss = 0.0
        for batch, seeds in zip(batches, term_seeds(self.sharded.model, batches), strict=True):
            loss += self.add_grads(batch, seeds, totals, dropout)
        return loss, totals

    def add_grads(
        self,
        batch: Batch,
        seeds: Mapping[tuple[str, str], float],
        totals: dict[tuple[str, int], Local],
        dropout: DropoutKey | None = None,
    ) -> float:
        """One micro-batch: adds its gradients, and returns its part of the objective."""
        loss = 0.0
        stream: dict[str, Local] = {}
        for step in reversed(self.run(batch, dropout)):
            loss += self.backward(step, seeds, stream, totals)
        return loss

    def backward(
        self,
        step: Applied,
        seeds: Mapping[tuple[str, str], float],
        stream: dict[str, Local],
        totals: dict[tuple[str, int], Local],
    ) -> float:
        """Takes cotangents of a step's outputs from `stream`, leaves those of its inputs there.

        Returns the step's terms of the objective. A term is invariant, so its cotangent is the same on every rank.
        """
        cotangents: dict[str, Local] = {}
        loss = 0.0
        for outside, name in step.program.outputs:
            seed = seeds.get((step.program.program.name, outside))
            if seed is not None:
                loss += seed * float(self.whole(step.values[name], (), step.program.layouts[name]))
                cotangents[name] = [np.asarray(seed)] * self.sharded.mesh.world_size
            elif outside in stream:
                _add(cotangents, name, stream.pop(outside))
        self._pull_back(step, cotangents)
        for value in step.program.program.inputs:
            if value.name in cotangents:
                _add(stream, value.name, cotangents[value.name])
        for param in step.program.program.params:
            if param.name in cotangents:
                key = (self.sharded.canonical(step.prefix, param.name), step.stage)
                totals[key] = [a + b for a, b in zip(totals[key], cotangents[param.name], strict=True)]
        return loss

    def _pull_back(self, step: Applied, cotangents: dict[str, Local]) -> None:
        """Walks a program's instructions in reverse."""
        again = {made.result: made for made in step.program.reshards() if made.regathers}
        for made in reversed(step.program.instructions):
            if isinstance(made, Reshard):
                if made.result in cotangents:
                    back = self._moved(step, made, cotangents[made.result], "backward", backward=True)
                    _add(cotangents, made.source, back)
                continue
            outputs = made.call.op.outputs
            if not any(name in cotangents for name in outputs):
                continue
            for name in made.operands:
                if name in again:
                    step.values[name] = self._move(step, again.pop(name), "recompute")
            given = [cotangents.get(name) or [np.zeros_like(x) for x in step.values[name]] for name in outputs]
            for operand, pulled in zip(made.operands, self._call(step, made).backward(self.ranks, given), strict=True):
                if operand is not None and pulled is not None:
                    _add(cotangents, operand, pulled)


def _add(into: dict[str, Local], name: str, cotangent: Local) -> None:
    old = into.get(name)
    into[name] = cotangent if old is None else [a + b for a, b in zip(old, cotangent, strict=True)]


def _names(axes: Axes) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes)


def _unmerged(whole: Array, sharded: ShardedModelProgram, name: str) -> Array:
    """A stored parameter with one dim for each logical axis."""
    return whole.reshape([axis.size or 0 for axis in param_axes(sharded.model.params[name])])
