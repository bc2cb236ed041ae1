"""The compiled functions of a session: forward, gradients, one training step.

Each is jitted once a session, whatever is called in which order. Stored arrays go in and come out split as their stacks
say; batches are split over samples and positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from duomesh.backends.jax.lower import LoweredModel, Params
from duomesh.backends.jax.modes import Mode, spec_of, stack_spec
from duomesh.backends.jax.optim import State, update
from duomesh.core.session import AdamW
from duomesh.core.sharding.stacks import Stacks
from duomesh.core.sharding.transitions import INVARIANT

__all__ = ["Functions", "input_spec"]

_WHOLE = PartitionSpec()
_INPUT_DIMS = {"samples": ("batch",), "places": ("seq",), "dropout_keys": ()}


def input_spec(stacks: Stacks, name: str, *, is_stacked: bool) -> PartitionSpec:
    """How an input of a pass is split; with a first dim of micro-batches if `is_stacked`."""
    rules, mesh = stacks.sharded.rules, stacks.sharded.mesh
    dims = _INPUT_DIMS.get(name, ("batch", "seq"))
    cuts = [tuple(a for a in mesh.names if rules[a].data == dim and mesh.size(a) > 1) or None for dim in dims]
    return PartitionSpec(*[None] * is_stacked, *cuts)


class Functions:
    """What a session calls.

    Args:
        dtypes: of compute weights, of statistics and state, and of gradients.
    """

    def __init__(self, model: LoweredModel, mode: Mode, *, compute: Any, wide: Any, grad: Any) -> None:
        self._model, self._mode, self.stacks = model, mode, model.stacks
        self._compute, self._wide, self._grad = compute, wide, grad
        self._steps: dict[AdamW, jax.stages.Wrapped] = {}

    # Specs

    @cached_property
    def stored(self) -> dict[str, PartitionSpec]:
        return {name: stack_spec(stack, is_shared=True) for name, stack in self.stacks.stacks.items()}

    def _inputs(self, inputs: Mapping[str, Any], *, is_stacked: bool = False) -> dict[str, PartitionSpec]:
        return {name: input_spec(self.stacks, name, is_stacked=is_stacked) for name in inputs}

    @cached_property
    def _values(self) -> dict[str, PartitionSpec]:
        """Of every recorded value, by global name."""
        sharded = self.stacks.sharded
        extents = sharded.extents(batch=1, seq=1)
        found = {}
        for prefix, _, program in sharded.steps:
            for made in program.calls():
                for name in made.call.op.outputs:
                    layout = {a: INVARIANT if s.dim is None else s for a, s in program.layouts[name].items()}
                    found[prefix + name] = spec_of(program.axes(name), layout, extents)
        return found

    @cached_property
    def _logits(self) -> PartitionSpec:
        head = self.stacks.sharded.programs["head"]
        name = dict(head.outputs)["logits"]
        return spec_of(head.axes(name), head.layouts[name], self.stacks.sharded.extents(batch=1, seq=1))

    # Weights

    def _entered(self, stored: Params) -> Params:
        """Stored arrays of any dtype -> what the model takes, and what gradients are taken of."""
        stacks = self.stacks.stacks
        if self.stacks.zero == 3:  # gathered where they are used, and their gradients summed in the wide dtype
            return {name: self._mode.parts(stacks[name], x.astype(self._grad)) for name, x in stored.items()}
        return {name: self._mode.weights(stacks[name], x, self._compute) for name, x in stored.items()}

    @cached_property
    def cast(self) -> Callable[..., Params]:
        """Masters -> weights in the compute dtype, stored in the same way."""

        def local(stored: Params) -> Params:
            return {name: x.astype(self._compute) for name, x in stored.items()}

        return jax.jit(lambda stored: self._mode.apply(local, (stored,), (self.stored,), self.stored))

    # Passes over one micro-batch

    @cached_property
    def loss_sum(self) -> Callable[..., jax.Array]:
        def local(stored: Params, inputs: Any) -> jax.Array:
            return self._model(self._entered(stored), inputs)

        return jax.jit(lambda p, x: self._mode.apply(local, (p, x), (self.stored, self._inputs(x)), _WHOLE))

    @cached_property
    def logits(self) -> Callable[..., jax.Array]:
        def local(stored: Params, inputs: Any) -> jax.Array:
            return self._model(self._entered(stored), inputs).astype(self._wide)

        return jax.jit(lambda p, x: self._mode.apply(local, (p, x), (self.stored, self._inputs(x)), self._logits))

    def _term(self, params: Params, inputs: Any, divisor: Any) -> jax.Array:
        return self._model(params, inputs) / divisor

    @cached_property
    def grads(self) -> Callable[..., tuple[jax.Array, Params]]:
        """(loss, wide gradients as they are stored) of one micro-batch."""

        def local(stored: Params, inputs: Any, divisor: Any) -> tuple[jax.Array, Params]:
            loss, made = jax.value_and_grad(self._term)(self._entered(stored), inputs, divisor)
            return loss, self._summed(made, is_shared=self.stacks.zero == 3)

        return jax.jit(lambda *args: self._on_batch(local, args, (_WHOLE, self.stored)))

    @cached_property
    def trace(self) -> Callable[..., tuple[jax.Array, Params]]:
        """(loss, every op's output)."""

        def local(stored: Params, inputs: Any, divisor: Any) -> tuple[jax.Array, Params]:
            return self._recorded(self._entered(stored), inputs, divisor)

        return jax.jit(lambda *args: self._on_batch(local, args, (_WHOLE, self._values)))

    @cached_property
    def trace_grads(self) -> Callable[..., tuple[jax.Array, Params, Params]]:
        """(loss, every op's output, gradients)."""

        def local(stored: Params, inputs: Any, divisor: Any) -> tuple[jax.Array, Params, Params]:
            pull = jax.value_and_grad(self._recorded, has_aux=True)
            (loss, records), made = pull(self._entered(stored), inputs, divisor)
            return loss, records, self._summed(made, is_shared=self.stacks.zero == 3)

        return jax.jit(lambda *args: self._on_batch(local, args, (_WHOLE, self._values, self.stored)))

    def _recorded(self, params: Params, inputs: Any, divisor: Any) -> tuple[jax.Array, Params]:
        records: dict[str, jax.Array] = {}
        return self._model(params, inputs, records) / divisor, records

    def _on_batch(self, local: Callable[..., Any], args: Any, out_specs: Any) -> Any:
        stored, inputs, divisor = args
        return self._mode.apply(
            local, (stored, inputs, divisor), (self.stored, self._inputs(inputs), _WHOLE), out_specs
        )

    # Gradients of a step

    def _summed(self, grads: Params, *, is_shared: bool) -> Params:
        """Gradients as ops left them -> wide sums over all ranks, as they are stored."""
        stacks = self.stacks.stacks
        made = {name: g.astype(self._grad) for name, g in grads.items()}
        if not is_shared:
            made = {name: self._mode.share(stacks[name], g) for name, g in made.items()}
        return {name: self._mode.total(stacks[name], g).astype(self._wide) for name, g in made.items()}

    def _accumulated(self, params: Params, inputs: Any, divisor: Any) -> tuple[jax.Array, Params, bool]:
        """Loss and gradients over micro-batches stacked along a first dim, and whether they are shared."""
        stacks, zero = self.stacks.stacks, self.stacks.zero
        pull = jax.value_and_grad(self._term)
        if inputs["tokens"].shape[0] == 1:
            loss, grads = pull(params, jax.tree.map(lambda x: x[0], inputs), divisor)
            return loss, grads, zero == 3

        def body(carry: Any, micro: Any) -> tuple[Any, None]:
            loss, sums = carry
            term, made = pull(params, micro, divisor)
            made = {name: g.astype(self._grad) for name, g in made.items()}
            if zero == 2:
                made = {name: self._mode.share(stacks[name], g) for name, g in made.items()}
            return (loss + term, jax.tree.map(jnp.add, sums, made)), None

        zeros = {n: self._mode.zeros(stack, self._grad, is_shared=zero >= 2) for n, stack in stacks.items()}
        (loss, grads), _ = jax.lax.scan(body, (jnp.zeros((), self._wide), zeros), inputs)
        return loss, grads, zero >= 2

    def step(self, config: AdamW) -> jax.stages.Wrapped:
        """(state, stacked inputs, divisor, learning rate) -> (state, loss, gradient norm, is skipped).

        The state is donated.
        """
        if config not in self._steps:
            self._steps[config] = jax.jit(self._step_of(config), donate_argnums=0)
        return self._steps[config]

    def _step_of(self, config: AdamW) -> Callable[..., Any]:
        is_decayed = {name: stack.param.is_decayed for name, stack in self.stacks.stacks.items()}

        def local(state: State, inputs: Any, divisor: Any, lr: Any) -> Any:
            loss, made, is_shared = self._accumulated(self._entered(state.master), inputs, divisor)
            grads = self._summed(made, is_shared=is_shared)
            norm = self._mode.norm(grads)
            state, is_skipped = update(state, grads, loss, norm, lr, config=config, is_decayed=is_decayed)
            return state, loss, norm, is_skipped

        specs = State(_WHOLE, self.stored, self.stored, self.stored)

        def step(state: State, inputs: Any, divisor: Any, lr: Any) -> Any:
            args = (specs, self._inputs(inputs, is_stacked=True), _WHOLE, _WHOLE)
            return self._mode.apply(local, (state, inputs, divisor, lr), args, (specs, _WHOLE, _WHOLE, _WHOLE))

        return step
