"""An op on global arrays whose types are layouts: one `shard_map` forward and one backward around its body.

JAX never differentiates through a `shard_map` here: the forward one also hands out what the body's own backward needs,
and the backward one runs that. So an op means the same in both modes, and its cotangents have the dual layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from duomesh.backends.jax.bodies import Body
from duomesh.backends.jax.pullback import Pullback

__all__ = ["TypedOp"]


@dataclass(eq=False)
class TypedOp:
    """One application of an op.

    Attributes:
        places: which of the body's operands are there; what follows is for those, in order.
        is_differentiated: whether a cotangent comes back. specs, cotangents: their types, and those of cotangents.
        made, made_cotangents: of the results.
    """

    body: Body
    places: Sequence[int]
    is_differentiated: Sequence[bool]
    specs: Sequence[PartitionSpec]
    cotangents: Sequence[PartitionSpec]
    made: tuple[PartitionSpec, ...]
    made_cotangents: tuple[PartitionSpec, ...]
    mesh: jax.sharding.Mesh
    _pullback: Pullback = field(default_factory=Pullback)

    def __call__(self, operands: Sequence[Array]) -> tuple[Array, ...]:
        if not any(self.is_differentiated):
            return self._primal(*operands)
        run = jax.custom_vjp(self._primal)
        run.defvjp(self._forward, self._backward)
        made: tuple[Array, ...] = run(*operands)
        return made

    def _map(self, function: Callable[..., Any], specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

    @property
    def _stacked(self) -> PartitionSpec:
        """Of a residual: every device has its own, along a new first dim."""
        return PartitionSpec(self.mesh.axis_names)

    def _parts(self, operands: Sequence[Array]) -> tuple[list[Any], list[Any]]:
        """All inputs and all parameters of the body."""
        every: list[Any] = [None] * len(self.body.operands)
        for place, operand in zip(self.places, operands, strict=True):
            every[place] = operand
        return every[: self.body.inputs], every[self.body.inputs :]

    def _primal(self, *operands: Array) -> tuple[Array, ...]:
        def local(*operands: Array) -> tuple[Array, ...]:
            inputs, params = self._parts(operands)
            return self.body.apply(inputs, self.body.pack(params))

        made: tuple[Array, ...] = self._map(local, tuple(self.specs), self.made)(*operands)
        return made

    def _pull(self, operands: Sequence[Array]) -> tuple[tuple[Array, ...], Any, list[Any]]:
        """Results, the body's pullback to differentiated inputs and storage tensors, and what it was given."""
        inputs, params = self._parts(operands)
        storage = self.body.pack(params)
        pairs = zip(self.places, self.is_differentiated, strict=True)
        varied = [place for place, is_varied in pairs if is_varied and place < len(inputs)]

        def apply(chosen: list[Array], storage: list[Any]) -> tuple[Array, ...]:
            every = list(inputs)
            for i, x in zip(varied, chosen, strict=True):
                every[i] = x
            return self.body.apply(every, storage)

        made, pull = jax.vjp(apply, [inputs[i] for i in varied], storage)
        return made, pull, [*inputs, *storage]

    def _forward(self, *operands: Array) -> tuple[tuple[Array, ...], Any]:
        def local(*operands: Array) -> tuple[tuple[Array, ...], list[Array]]:
            made, pull, given = self._pull(operands)
            return made, [leaf[None] for leaf in self._pullback.kept(pull, given)]

        made, kept = self._map(local, tuple(self.specs), (self.made, self._stacked))(*operands)
        needed = [self._is_needed(place) for place in self.places]
        return made, ([x if is_needed else None for x, is_needed in zip(operands, needed, strict=True)], kept)

    def _is_needed(self, place: int) -> bool:
        """Whether backward takes an operand, itself or in a pack."""
        if place < self.body.inputs:
            return place in self._pullback.origins
        packs = enumerate(self.body.packs, self.body.inputs)
        return any(
            places is not None and place - self.body.inputs in places and i in self._pullback.origins
            for i, places in packs
        )

    def _backward(self, saved: Any, cotangents: tuple[Array, ...]) -> tuple[Any, ...]:
        operands, kept = saved

        def local(operands: list[Any], kept: list[Array], cotangents: tuple[Array, ...]) -> list[Array]:
            inputs, params = self._parts(operands)
            pull = self._pullback.restored([leaf[0] for leaf in kept], [*inputs, *self.body.pack(params)])
            d_inputs, d_storage = pull(cotangents)
            d_params = self.body.unpack(d_storage)
            return [*d_inputs, *(d_params[i - len(inputs)] for i in self.places if i >= len(inputs))]

        specs = [None if x is None else spec for x, spec in zip(operands, self.specs, strict=True)]
        out = [spec for spec, is_varied in zip(self.cotangents, self.is_differentiated, strict=True) if is_varied]
        found = iter(self._map(local, (specs, self._stacked, self.made_cotangents), out)(operands, kept, cotangents))
        return tuple(next(found) if is_varied else None for is_varied in self.is_differentiated)
