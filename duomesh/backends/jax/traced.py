"""The collectives of a manual program as JAX traced it: exact in order, dtype and size.

`jax.jit(f).trace(...).jaxpr` has one equation for each collective that the program's `shard_map` bodies make, before
XLA combines, moves or widens any (`compiled.py` says what it does). It can therefore be compared one by one with
`core.sharding.collectives.step_trace`. Results that nobody uses are removed first, as every compilation does.

An equation with several operands gives one entry for each. Of branches of a `cond`, equal collectives count as often as
in the branch that has most of them.

Not seen: collectives that the partitioner adds to code outside of a `shard_map`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, repeat
from math import prod
from typing import Any

from jax.interpreters import partial_eval

from duomesh.core.arrays import dtype_name
from duomesh.core.errors import BackendError
from duomesh.core.sharding.compare import Issued, at_most
from duomesh.core.sharding.mesh import Mesh

__all__ = ["traced_collectives", "traced_steps"]

# primitive -> kind, and whether the result is the larger buffer
_KINDS = {
    "psum": ("all-reduce", False),
    "psum_invariant": ("all-reduce", False),
    "unreduced_psum": ("all-reduce", False),
    "pmax": ("all-reduce", False),
    "pmin": ("all-reduce", False),
    "all_gather": ("all-gather", True),
    "all_gather_invariant": ("all-gather", True),
    "all_gather_reduced": ("all-gather", True),
    "reduce_scatter": ("reduce-scatter", False),
    "unreduced_reduce_scatter": ("reduce-scatter", False),
    "all_to_all": ("all-to-all", False),
    "ppermute": ("collective-permute", False),
}
_UNKNOWN = {"ragged_all_to_all", "pbroadcast", "psend", "precv", *(f"{name}_start" for name in _KINDS)}


@dataclass(frozen=True)
class _Loop:
    length: int
    body: list[Issued | _Loop]


def traced_collectives(closed: Any, mesh: Mesh) -> list[Issued]:
    """Every collective of a traced program in program order, one entry for each place, scans multiplied out.

    Args:
        closed: a ClosedJaxpr: `jax.jit(f).trace(...).jaxpr` or `jax.make_jaxpr(f)(...)`.
        mesh: has the axes that the collectives name.

    Raises:
        BackendError: a `while` around collectives; a `reshard`, which leaves the choice of collectives to XLA;
            collectives of other kinds or over parts of an axis.
        PlanError: an axis that the mesh does not have.
    """
    return list(_multiplied(_live(closed, mesh), 1))


def traced_steps(closed: Any, mesh: Mesh) -> Iterator[Issued]:
    """The same one by one, in the order of execution: a scan's body once for each of its steps, every count 1."""
    return _unrolled(_live(closed, mesh))


def _live(closed: Any, mesh: Mesh) -> list[Issued | _Loop]:
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return list(_walk(jaxpr, mesh))


def _multiplied(items: Iterable[Issued | _Loop], times: int) -> Iterator[Issued]:
    for item in items:
        if isinstance(item, _Loop):
            yield from _multiplied(item.body, times * item.length)
        elif times:
            yield replace(item, count=item.count * times)


def _unrolled(items: Iterable[Issued | _Loop]) -> Iterator[Issued]:
    for item in items:
        if isinstance(item, _Loop):
            yield from chain.from_iterable(_unrolled(item.body) for _ in range(item.length))
        else:
            yield from repeat(replace(item, count=1), item.count)


def _walk(jaxpr: Any, mesh: Mesh) -> Iterator[Issued | _Loop]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inside = [list(_walk(inner, mesh)) for inner in _inner(equation.params)]
        if name in _KINDS:
            yield from _issued(equation, mesh)
        elif name in _UNKNOWN:
            raise BackendError(f"the traced program has a {name}, which cannot be listed yet.")
        elif name == "reshard":
            raise BackendError(
                "the traced program has a reshard, whose collectives XLA chooses. Read the compiled module instead."
            )
        elif name == "scan" and any(inside):
            yield _Loop(equation.params["length"], inside[0])
        elif name == "while" and any(inside):
            raise BackendError(
                "a while loop of the traced program has collectives and runs for a number of times that is not "
                "known beforehand, so they cannot be counted. Use jax.lax.scan, or fori_loop with static bounds."
            )
        elif name == "cond" and any(inside):
            yield from inside[0] if _all_equal(inside) else at_most(_multiplied(branch, 1) for branch in inside)
        else:
            yield from chain.from_iterable(inside)


def _all_equal(branches: list[list[Issued | _Loop]]) -> bool:
    return all(branch == branches[0] for branch in branches)


def _inner(params: Mapping[str, Any]) -> Iterator[Any]:
    """Jaxprs among an equation's parameters, closed or not, alone or in tuples."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr = getattr(one, "jaxpr", one)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _issued(equation: Any, mesh: Mesh) -> Iterator[Issued]:
    params = equation.params
    kind, is_result = _KINDS[equation.primitive.name]
    names = params["axes"] if "axes" in params else params["axis_name"]
    names = names if isinstance(names, (tuple, list)) else (names,)
    if params.get("axis_index_groups") is not None:
        raise BackendError(f"a {kind} over parts of the axes {names} cannot be listed. Give the mesh an axis for it.")
    # integers are dims of a batched value, which stay on the device
    axes = tuple(name for name in names if isinstance(name, str) and mesh.size(name) > 1)
    for value in (equation.outvars if is_result else equation.invars) if axes else ():
        yield Issued(kind, axes, dtype_name(value.aval.dtype), prod(value.aval.shape))
