"""AdamW over stored arrays by optax, with the clipping and skip rules of `core.session.AdamW`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from duomesh.backends.jax.lower import Params
from duomesh.core.session import AdamW

__all__ = ["State", "init_state", "update"]


class State(NamedTuple):
    """Everything that training changes. Arrays are wide; compute weights are rounded from `master` in each step."""

    count: jax.Array
    master: Params
    exp_avg: Params
    exp_avg_sq: Params


def init_state(master: Params) -> State:
    return State(
        count=jnp.zeros((), jnp.int32),
        master=master,
        exp_avg=jax.tree.map(jnp.zeros_like, master),
        exp_avg_sq=jax.tree.map(jnp.zeros_like, master),
    )


def update(
    state: State,
    grads: Params,
    loss: jax.Array,
    norm: jax.Array,
    lr: jax.Array,
    *,
    config: AdamW,
    is_decayed: Mapping[str, bool],
) -> tuple[State, jax.Array]:
    """One update of whatever part of the arrays a device has, from wide gradients in the same layout.

    Args:
        norm: the global norm of all gradients.

    Returns:
        The new state, and whether the step was skipped because loss or norm is not finite; the state is then the old
        one.
    """
    if config.max_grad_norm is not None:
        factor = jnp.where(norm > config.max_grad_norm, config.max_grad_norm / norm, 1.0)
        grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
    transform = optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=dict(is_decayed)),
    )
    moments = optax.ScaleByAdamState(count=state.count, mu=state.exp_avg, nu=state.exp_avg_sq)
    _, decay = transform.init(state.master)  # the decay's own state is empty
    updates, (adam, _) = transform.update(grads, (moments, decay), state.master)
    assert isinstance(adam, optax.ScaleByAdamState)
    master = jax.tree.map(lambda w, u: w - lr.astype(w.dtype) * u, state.master, updates)
    new = State(adam.count, master, adam.mu, adam.nu)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, state), ~is_finite
