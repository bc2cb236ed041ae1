"""The devices that a session runs on."""

from __future__ import annotations

from contextlib import suppress

import jax

from duomesh.core.errors import BackendError

__all__ = ["devices_of", "simulate"]


def simulate(count: int) -> None:
    """Lets the CPU stand for `count` devices of this process, if JAX has not been used in it yet.

    A plan can so be run anywhere, as torch's ranks can. GPUs are not touched.
    """
    if count == 1:
        return
    with suppress(RuntimeError):  # JAX runs, with as many devices as it was started with
        if count > jax.config.jax_num_cpu_devices:
            jax.config.update("jax_num_cpu_devices", count)


def devices_of(name: str | None, count: int) -> list[jax.Device]:
    """One device, or the `count` devices of a plan, over all processes in the order of ranks.

    Args:
        name: as "cpu" or "cuda:1"; None takes JAX's default.

    Raises:
        BackendError: JAX has no such device, or another number of them than the plan needs.
    """
    kind, _, index = (name or "").partition(":")
    if not jax.distributed.is_initialized():
        simulate(count)
    try:
        devices = jax.devices({"": None, "cuda": "gpu"}.get(kind, kind))
    except RuntimeError as error:
        raise BackendError(f"JAX has no device {name!r}: {error}. Use device='cpu'.") from None
    if count == 1:
        # of several processes each would take another one for its default
        mine = [device for device in devices if device.process_index == jax.process_index()]
        if not (index.isdecimal() or not index) or int(index or 0) >= len(mine):
            raise BackendError(f"device {name!r} was asked for, but JAX finds {len(mine)} of its kind.")
        return [mine[int(index or 0)]]
    if index:
        raise BackendError(f"device {name!r} is one device and the plan needs {count}; name their kind, {kind!r}.")
    if len(devices) < count or (jax.process_count() > 1 and len(devices) != count):
        raise BackendError(_wrong_number(devices, count))
    return list(devices[:count])


def _wrong_number(devices: list[jax.Device], count: int) -> str:
    text = f"the plan needs {count} devices and JAX has {len(devices)} of kind {devices[0].platform!r}"
    if jax.process_count() > 1:
        return f"{text} in {jax.process_count()} processes, which must all be used; change the plan or the processes."
    if devices[0].platform == "cpu":
        return (
            f"{text}; simulate more with jax.config.update('jax_num_cpu_devices', {count}) before JAX is first used, "
            f"or with JAX_NUM_CPU_DEVICES={count} in the environment."
        )
    return f"{text}; use a smaller plan or start more processes (jax.distributed)."
