"""Programs -> one pure function over a dict of parameters.

Equal layers are stacked along a new first dim and scanned, so that compile time does not grow with depth; a repeated
pattern of different layers is one scan whose body holds the pattern. Ops are walked while JAX traces and leave
nothing behind but their names, as scopes, in the compiled module.

Stored arrays are canonical parameters, stacked. The pack that a linear takes is concatenated where it is used, inside
the compiled step: a global array of q, k and v rows could not be sharded by heads.

Not here: the optimizer and micro-batches (`session.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from duomesh.backends.jax.ops import OPS
from duomesh.core import arrays
from duomesh.core.ir.program import ModelProgram, Program, check_kinds, run
from duomesh.core.ir.storage import Segment, segments

__all__ = ["LoweredModel", "Params"]

Params = dict[str, jax.Array]


@dataclass(frozen=True)
class _Place:
    """Where a canonical parameter lies: entry `index` of a stack, or the whole array if None."""

    array: str
    index: int | None


class LoweredModel:
    """A model as pure functions.

    Args:
        program: the model.
        wide_dtype: dtype of statistics, tables and losses: float32, or float64 in a float64 run.
        allow_cudnn: whether attention may use cuDNN's kernel.

    Raises BackendError for a model with ops that `OPS` lacks.
    """

    def __init__(self, program: ModelProgram, *, wide_dtype: Any, allow_cudnn: bool) -> None:
        check_kinds(program, OPS, "jax")
        self.program = program
        self._wide = wide_dtype
        self._ops: dict[str, Any] = {**OPS, "attention": partial(OPS["attention"], allow_cudnn=allow_cudnn)}
        self.segments = segments(program.layers)
        # of `dropout_keys`
        self._rows = {prefix: row for row, (prefix, _) in enumerate(program.steps)}

    # Parameters

    @cached_property
    def _places(self) -> dict[str, _Place]:
        """Canonical name -> where it lies. Stacks are named `segments.<segment>.<position in pattern>.<local name>`."""
        out: dict[str, _Place] = {}
        for s, segment in enumerate(self.segments):
            for position, kind in enumerate(segment.pattern):
                for i, layer in enumerate(segment.layers(position)):
                    for param in self.program.blocks[kind].params:
                        stack = f"segments.{s}.{position}.{param.name}"
                        out[f"layers.{layer}.{param.name}"] = _Place(stack, i if segment.repeats > 1 else None)
        return {name: out.get(name, _Place(name, None)) for name in self.program.params}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every stored array by name."""
        out: dict[str, tuple[int, ...]] = {}
        for name, place in self._places.items():
            shape = self.program.params[name].shape
            out[place.array] = shape if place.index is None else (place.index + 1, *shape)
        return out

    @cached_property
    def is_decayed(self) -> dict[str, bool]:
        """Whether weight decay acts on each stored array."""
        return {place.array: self.program.params[name].is_decayed for name, place in self._places.items()}

    def stack(self, params: Iterable[tuple[str, arrays.Array]], dtype: Any) -> dict[str, arrays.Array]:
        """Canonical parameters -> stored host arrays of one dtype. The caller has checked names and shapes."""
        out = {name: np.empty(shape, dtype) for name, shape in self.shapes.items()}
        for name, array in params:
            place = self._places[name]
            out[place.array][... if place.index is None else place.index] = array
        return out

    def unstack(self, stored: Mapping[str, jax.Array]) -> Iterator[tuple[str, arrays.Array]]:
        """The inverse of `stack`, in the arrays' own dtypes."""
        host: dict[str, arrays.Array] = {}
        for name, place in self._places.items():
            if place.array not in host:
                host[place.array] = np.asarray(stored[place.array])
            yield name, host[place.array][... if place.index is None else place.index].copy()

    # Computation

    def _run(self, program: Program, values: Mapping[str, Any], params: Any, record: dict[str, Any]) -> dict[str, Any]:
        """One program on parameters by local name."""
        constants = {c.name: jnp.asarray(np.asarray(c.data, np.float32), self._wide) for c in program.constants}
        weights = {}
        for slot in program.slots.values():
            members = [params[member.param.name] for member in slot.members]
            weights[slot.name] = members[0] if len(members) == 1 else jnp.concatenate(members)
        return run(program, self._ops, {**values, **constants}, weights, record, jax.named_scope)

    def _local(self, prefix: str, program: Program, params: Params) -> dict[str, jax.Array]:
        """Parameters of a program that is no layer, by local name."""
        aliases = self.program.aliases
        return {p.name: params[aliases.get(prefix + p.name, prefix + p.name)] for p in program.params}

    def _segment(
        self, index: int, segment: Segment, values: dict[str, Any], params: Params, records: dict[str, Any] | None
    ) -> jax.Array:
        """Runs one segment's layers and returns the stream."""
        stacks = [
            {p.name: params[f"segments.{index}.{position}.{p.name}"] for p in self.program.blocks[kind].params}
            for position, kind in enumerate(segment.pattern)
        ]
        keys = [self._layer_keys(values["dropout_keys"], segment.layers(position)) for position in range(len(stacks))]

        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            made = []
            for kind, local, key in zip(segment.pattern, *layer, strict=True):
                record: dict[str, Any] = {}
                x = self._run(self.program.blocks[kind], {**values, "x": x, "dropout_key": key}, local, record)["x"]
                made.append(record)
            return x, made if records is not None else None

        if segment.repeats == 1:
            x, made = body(values["x"], (stacks, jax.tree.map(lambda rows: rows[0], keys)))
            made = jax.tree.map(lambda value: value[None], made)
        else:
            x, made = jax.lax.scan(body, values["x"], (stacks, keys))
        if records is not None:
            for position in range(len(segment.pattern)):
                for i, layer in enumerate(segment.layers(position)):
                    records |= {f"layers.{layer}.{name}": value[i] for name, value in made[position].items()}
        return x

    def _layer_keys(self, keys: jax.Array | None, layers: range) -> jax.Array | None:
        """[len(layers), 2]: the rows of some layers."""
        first = self._rows["layers.0."]
        return None if keys is None else keys[first + layers.start : first + layers.stop : layers.step]

    def __call__(self, params: Params, inputs: Mapping[str, Any], records: dict[str, Any] | None = None) -> jax.Array:
        """Logits [B, S, V]; with "labels" and "loss_mask" among the inputs, the weighted sum of token losses.

        Args:
            params: stored arrays in the compute dtype.
            inputs: tokens and positions [B, S] int32, segment_ids [B, S] or None, and optionally labels [B, S] int32
                and loss_mask [B, S] wide; to drop anything, also what `core.dropout.dropout_inputs` gives.
            records: receives every op output under its global name.
        """
        values: dict[str, Any] = {"samples": None, "places": None, "dropout_keys": None, **inputs}
        keys = values["dropout_keys"]

        def apply(prefix: str, program: Program) -> None:
            local: dict[str, Any] = {}
            values["dropout_key"] = None if keys is None else keys[self._rows[prefix]]
            values.update(self._run(program, values, self._local(prefix, program, params), local))
            if records is not None:
                records.update({prefix + name: value for name, value in local.items()})

        apply("embed.", self.program.embed)
        apply("tables.", self.program.tables)
        for i, segment in enumerate(self.segments):
            values["x"] = self._segment(i, segment, values, params, records)
        apply("head.", self.program.head)
        if "labels" not in inputs:
            return values["logits"]
        apply("loss.", self.program.loss)
        return values["loss_sum"]
