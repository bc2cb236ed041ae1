"""A whole model in numpy, forward and backward: the float64 oracle that both backends are held against.

It walks the same programs as a backend, op by op, with `OPS`; its backward walks them in reverse with `ADJOINTS`
and adds up cotangents by the name of the value. No framework, no autodiff.
Not here: speed, optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.batch import Batch
from duomesh.core.dropout import DropoutKey, dropout_inputs
from duomesh.core.errors import BackendError
from duomesh.core.ir.program import ModelProgram, Program, run
from duomesh.core.objective import term_seeds
from duomesh.kernels.reference.adjoints import ADJOINTS
from duomesh.kernels.reference.arrays import wide
from duomesh.kernels.reference.ops import OPS

__all__ = ["ReferenceModel"]

Seeds = Mapping[tuple[str, str], float]  # of a micro-batch, by (program name, output name)


@dataclass(frozen=True)
class _Step:
    """One application of a program, with what its backward needs.

    values: every local value (inputs, constants, op outputs). weights: storage tensors by slot name.
    """

    prefix: str
    program: Program
    values: Mapping[str, Any]
    weights: Mapping[str, Array]


class ReferenceModel:
    """Runs a model program on host arrays.

    Args:
        program: from `build_program`.
        params: every parameter of `program.params` by canonical name. Their common dtype is the compute dtype:
            float64 makes this an oracle, float32 and bfloat16 follow the program's rounding conventions.

    Raises:
        BackendError: a parameter is missing, unknown, of another shape, or of another dtype than the rest.
    """

    def __init__(self, program: ModelProgram, params: Mapping[str, Array]) -> None:
        self.program = program
        self._params = dict(params)
        self._check()

    def forward(self, batch: Batch, dropout: DropoutKey | None = None) -> dict[str, Array]:
        """Every op's outputs by global name, such as "layers.0.attention.q", in order of execution.

        dropout: what masks are drawn for; None drops nothing.
        """
        values: dict[str, Array] = {}
        for step in self._run(batch, dropout):
            made = [name for op in step.program.ops for name in op.outputs]
            values |= {step.prefix + name: step.values[name] for name in made}
        return values

    def loss_and_grads(
        self, batches: Sequence[Batch], dropout: DropoutKey | None = None
    ) -> tuple[float, dict[str, Array]]:
        """The objective over all batches as one step (`core.objective`), and its gradients by canonical name.

        A step without any target has only the terms of the loss that need none. Gradients are float32, or float64 in
        a float64 run.
        """
        grads = {name: np.zeros_like(wide(value)) for name, value in self._params.items()}
        loss = 0.0
        for batch, seeds in zip(batches, term_seeds(self.program, batches), strict=True):
            steps = self._run(batch, dropout)
            loss += sum(seed * float(step.values[value]) for step in steps for value, seed in _seeded(step, seeds))
            self._backward(steps, seeds, grads)
        return loss, grads

    def _check(self) -> None:
        expected = self.program.params
        for name in sorted(set(self._params) ^ set(expected)):
            fault = "lacks" if name in expected else "has no"
            raise BackendError(f"the reference model {fault} parameter {name}; give exactly those of the program.")
        dtype = next(iter(self._params.values())).dtype
        for name, value in self._params.items():
            if value.shape != expected[name].shape:
                raise BackendError(
                    f"parameter {name} has shape {value.shape}; the program's is {expected[name].shape}."
                )
            if value.dtype != dtype:
                raise BackendError(f"parameter {name} is {value.dtype} and others are {dtype}; use one dtype for all.")

    def _canonical(self, name: str) -> str:
        return self.program.aliases.get(name, name)

    def _weights(self, prefix: str, program: Program) -> dict[str, Array]:
        """Storage tensors by slot name: packs are joined along dim 0."""
        return {
            slot.name: np.concatenate([self._params[self._canonical(prefix + m.param.name)] for m in slot.members])
            for slot in program.slots.values()
        }

    def _run(self, batch: Batch, dropout: DropoutKey | None) -> list[_Step]:
        """Forward through every program, keeping all values."""
        batch.check_vocabulary(self.program.spec.vocab_size)
        stream: dict[str, Any] = {
            "tokens": batch.tokens,
            "positions": batch.resolved_positions,
            "segment_ids": batch.segment_ids,
            "labels": batch.labels,
            "loss_mask": batch.weights,
            **dropout_inputs(self.program, batch, dropout),
        }
        keys = stream.pop("dropout_keys")
        wide_dtype = wide(next(iter(self._params.values()))).dtype
        steps = []
        for index, (prefix, program) in enumerate(self.program.steps):
            stream["dropout_key"] = None if keys is None else keys[index]
            values = {value.name: stream[value.name] for value in program.inputs}
            values |= {c.name: np.asarray(c.data, np.float32).astype(wide_dtype) for c in program.constants}
            weights = self._weights(prefix, program)
            stream |= run(program, OPS, dict(values), weights, values)
            steps.append(_Step(prefix, program, values, weights))
        return steps

    def _backward(self, steps: Sequence[_Step], seeds: Seeds, grads: dict[str, Array]) -> None:
        """Adds the gradients of the seeded scalars to `grads`."""
        stream: dict[str, Array] = {}
        for step in reversed(steps):
            cotangents = {value: np.asarray(seed, step.values[value].dtype) for value, seed in _seeded(step, seeds)}
            for name, value in step.program.outputs:
                if name in stream:
                    _accumulate(cotangents, value, stream.pop(name))
            d_weights = _pull_back(step, cotangents)
            # what is left belongs to the program's inputs, which earlier programs made
            for source in step.program.inputs:
                if source.name in cotangents:
                    _accumulate(stream, source.name, cotangents[source.name])
            for slot in step.program.slots.values():
                for member in slot.members:
                    name = self._canonical(step.prefix + member.param.name)
                    grads[name] += d_weights[slot.name][member.start : member.stop]


def _seeded(step: _Step, seeds: Seeds) -> list[tuple[str, float]]:
    """(value name, seed) of the program's scalars that enter the loss."""
    outputs = step.program.outputs
    return [(value, seeds[step.program.name, name]) for name, value in outputs if (step.program.name, name) in seeds]


def _accumulate(into: dict[str, Array], name: str, cotangent: Array) -> None:
    into[name] = into[name] + cotangent if name in into else cotangent


def _pull_back(step: _Step, cotangents: dict[str, Array]) -> dict[str, Array]:
    """Walks a program's ops in reverse.

    Args:
        cotangents: by local value name, those of the program's outputs; receives those of every other value.

    Returns:
        Cotangents of the storage tensors by slot name, zeros for one that nothing reached.
    """
    d_weights = {name: np.zeros_like(wide(weight)) for name, weight in step.weights.items()}
    for call in reversed(step.program.calls):
        op, slots = call.op, call.slots
        outputs = tuple(step.values[name] for name in op.outputs)
        if not any(name in cotangents for name in op.outputs):
            continue
        made = tuple(cotangents.get(name, np.zeros_like(out)) for name, out in zip(op.outputs, outputs, strict=True))
        inputs = tuple(None if name is None else step.values[name] for name in op.inputs)
        storage = tuple(None if slot is None else step.weights[slot] for slot in slots)
        pulled = ADJOINTS[op.kind](made, inputs, storage, **call.kwargs)
        for name, cotangent in zip(op.inputs, pulled, strict=False):
            if name is not None and cotangent is not None:
                _accumulate(cotangents, name, cotangent)
        for slot, cotangent in zip(slots, pulled[len(inputs) :], strict=True):
            if slot is not None and cotangent is not None:
                d_weights[slot] += cotangent
    return d_weights
