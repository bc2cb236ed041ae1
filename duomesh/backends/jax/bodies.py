"""What one device runs of a sharded program's op: its function with everything static, on local arrays.

A parameter comes with one dim for each logical axis. `pack` merges them to the dims that its function takes, and joins
the weights of a packed linear; it is apart from the rest, so that nobody needs to keep what it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from duomesh.backends.jax import ops
from duomesh.backends.jax.moves import Move
from duomesh.core.sharding.collectives import inner_axes
from duomesh.core.sharding.layouts import Extents
from duomesh.core.sharding.local import local_kwargs, local_param
from duomesh.core.sharding.program import Reshard, ShardedCall, ShardedProgram

__all__ = ["Body"]


@dataclass(frozen=True, eq=False)
class Body:
    """An op on one device.

    Attributes:
        name: of the op.
        operands: names of inputs, then of parameters; None for one that is absent. An input that the op gathers for
            itself is named as it was before.
        results: names of what it makes.
        inputs: how many operands are inputs.
        sizes, shapes: local shape of each parameter, with a dim for each logical axis and merged.
        packs: for each storage tensor of the function the places of its parameters among the parameters.
    """

    name: str
    function: Callable[..., Any]
    operands: tuple[str | None, ...]
    results: tuple[str, ...]
    inputs: int
    sizes: tuple[tuple[int, ...] | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    packs: tuple[tuple[int, ...] | None, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        sharded: ShardedProgram,
        made: ShardedCall,
        extents: Extents,
        gathered: Mapping[str, Reshard],
        functions: Mapping[str, Callable[..., Any]],
    ) -> Body:
        """gathered: movements that the op makes itself, by result. functions: op kind -> function."""
        op = made.call.op
        function: Callable[..., Any] = functions[op.kind]
        kwargs: dict[str, Any] = dict(local_kwargs(sharded, made, extents))
        operands = list(made.operands)
        split = _split(sharded, made, extents)
        if split is not None:
            function, kwargs["split"] = getattr(ops, f"split_{op.kind}"), split
        move = gathered.get(operands[0] or "")
        if move is not None:
            operands[0] = move.source
            function, kwargs["move"] = ops.gathered_linear, Move.of(sharded, move, extents)
        params = made.operands[len(op.inputs) :]
        return cls(
            name=op.name,
            function=function,
            operands=tuple(operands),
            results=op.outputs,
            inputs=len(op.inputs),
            sizes=tuple(
                None if name is None else extents.shape(sharded.axes(name), sharded.layouts[name]) for name in params
            ),
            shapes=tuple(None if name is None else _stored(sharded, name, extents) for name in params),
            packs=tuple(_packs(sharded, made, params)),
            kwargs=kwargs,
        )

    def pack(self, params: Sequence[Array | None]) -> list[Array | None]:
        """The function's storage tensors; None for one of which a parameter is missing."""
        return [None if places is None else self._packed(params, places) for places in self.packs]

    def _packed(self, params: Sequence[Array | None], places: tuple[int, ...]) -> Array | None:
        merged = [x.reshape(self.shapes[i] or ()) for i in places if (x := params[i]) is not None]
        if len(merged) < len(places):
            return None
        return merged[0] if len(merged) == 1 else jnp.concatenate(merged)

    def unpack(self, storage: Sequence[Array | None]) -> list[Array | None]:
        """The inverse of `pack`."""
        found: list[Array | None] = [None] * len(self.shapes)
        for places, tensor in zip(self.packs, storage, strict=True):
            if places is None or tensor is None:
                continue
            rows = [(self.shapes[i] or (1,))[0] for i in places]
            parts = [tensor] if len(places) == 1 else jnp.split(tensor, np.cumsum(rows)[:-1])
            for i, part in zip(places, parts, strict=True):
                found[i] = part.reshape(self.sizes[i] or ())
        return found

    def apply(self, inputs: Sequence[Array | None], storage: Sequence[Array | None]) -> tuple[Array, ...]:
        made = self.function(*inputs, *storage, **self.kwargs)
        return made if isinstance(made, tuple) else (made,)


def _stored(sharded: ShardedProgram, name: str, extents: Extents) -> tuple[int, ...]:
    param = sharded.program.param_by_name[sharded.origin[name]]
    return local_param(param, sharded.layouts[name], extents).shape


def _packs(sharded: ShardedProgram, made: ShardedCall, params: Sequence[str | None]) -> list[tuple[int, ...] | None]:
    places = {sharded.origin[name]: i for i, name in enumerate(params) if name is not None}
    slots = [None if slot is None else sharded.program.slots[slot] for slot in made.call.slots]
    return [None if slot is None else tuple(places[member.param.name] for member in slot.members) for slot in slots]


def _split(sharded: ShardedProgram, made: ShardedCall, extents: Extents) -> ops.Split | None:
    """Where an op has a part of a dim that it cannot treat as a smaller whole one."""
    op = made.call.op
    axes = tuple(axis for axis in inner_axes(sharded, made) if extents.mesh.size(axis) > 1)
    if axes:
        value = sharded.program.values[str(op.inputs[0])]
        names = op.signature.inner + op.signature.local if op.kind == "norm" else op.signature.inner
        return ops.Split(axes, prod(axis.size or 1 for axis in value.axes if axis.name in names))
    if op.kind == "embedding":
        table = str(made.operands[1])
        rows = tuple(extents.splitting("vocab", sharded.layouts[table]))
        return ops.Split(rows, sharded.axes(table)[0].size or 0) if rows else None
    return None
