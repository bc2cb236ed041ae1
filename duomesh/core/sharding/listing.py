"""What a layout means, as data and as text: `duomesh explain MODEL --plan ...`.

For each op the state of its results on every axis; each collective with axis, kind, phase, dtype, bytes and count; for
each parameter its layout and the axes over which its gradient is summed; and what one rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from duomesh.core.arrays import DTYPES
from duomesh.core.ir.program import ModelProgram
from duomesh.core.sharding.collectives import Collective, distinct_parameters, step_collectives
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.transitions import REPLICATED, Kind, State
from duomesh.core.sharding.typing import AxisRule, param_state, type_model

__all__ = ["LayoutListing", "list_layout"]


@dataclass(frozen=True)
class LayoutListing:
    """JSON values. Bytes of a collective are those of one rank's buffer that holds the axis whole."""

    mesh: dict[str, int]
    ops: list[dict[str, Any]]
    collectives: list[dict[str, Any]]
    parameters: list[dict[str, Any]]
    totals: dict[str, Any]
    per_rank: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "mesh": self.mesh,
            "ops": self.ops,
            "collectives": self.collectives,
            "parameters": self.parameters,
            "totals": self.totals,
            "per_rank": self.per_rank,
        }

    def to_text(self) -> str:
        """The same for a person: programs with layouts, then collectives, then parameters by layout."""
        axes = "  ".join(f"{name}={size}" for name, size in self.mesh.items()) or "of one rank"
        lines = [f"mesh {axes} (slowest first), {prod(self.mesh.values()):,} ranks"]
        program = ""
        for op in self.ops:
            if op["program"] != program:
                program = op["program"]
                lines += ["", f"{program}  x{op['count']}"]
            states = "  ".join(f"{axis}:{state}" for axis, state in op["states"].items())
            lines.append(f"  {op['op']:24} {op['kind']:14} {states}")
        lines += [
            "",
            f"{'collectives of a step':46} {'axis':9} {'phase':9} {'count':>7} {'bytes each':>15} {'total':>19}",
        ]
        for c in self.collectives:
            what = f"{c['kind']} {c['op']}"
            size, total = f"{c['bytes']:,}", f"{c['bytes'] * c['count']:,}"
            lines.append(f"  {what:44} {c['axis']:9} {c['phase']:9} {c['count']:7,} {size:>15} {total:>19}")
        lines += ["", "parameters, one layer of each kind"]
        for p in self.parameters:
            states = "  ".join(f"{axis}:{state}" for axis, state in p["layout"].items())
            summed = ", ".join(p["reduction_axes"]) or "no axis"
            lines.append(f"  {p['name']:38} {states}   summed over {summed}   {p['local_elements']:,} elements a rank")
        lines += ["", "one rank holds, in bytes"]
        lines += [f"  {name:24} {size:>18,}" for name, size in self.per_rank.items()]
        return "\n".join(lines)


def list_layout(
    model: ModelProgram,
    mesh: Mesh,
    rules: Sequence[AxisRule],
    *,
    batch: int,
    seq: int,
    micro_batches: int = 1,
    compute: str = "bfloat16",
    grads: str = "float32",
) -> LayoutListing:
    """Types the model on the mesh and lists what follows.

    Args:
        batch: samples of a micro-batch over all data ranks. seq: tokens of a sample.
        compute, grads: dtypes of activations and weights, and of gradients and their sums.
    """
    by_axis = {rule.axis: (rule, type_model(model, rule, mesh.size(rule.axis))) for rule in rules}
    wide = "float64" if compute == "float64" else "float32"
    dtypes = {"compute": compute, "wide": wide, "int": "int32", "grad": grads}
    found = step_collectives(model, mesh, rules, batch=batch, seq=seq, micro_batches=micro_batches)
    collectives = [_collective(c, dtypes) for c in found]
    repeats = dict(distinct_parameters(model).values())
    parameters = {
        name: {a: param_state(model, states, rule, name) for a, (rule, states) in by_axis.items()} for name in repeats
    }
    local = {name: _local(mesh, model.params[name].size, layout) for name, layout in parameters.items()}
    elements = sum(local[name] * count for name, count in repeats.items())
    return LayoutListing(
        mesh={axis.name: axis.size for axis in mesh.axes},
        ops=_ops(model, {a: states for a, (_, states) in by_axis.items()}),
        collectives=collectives,
        parameters=[
            {
                "name": name,
                "shape": list(model.params[name].shape),
                "layout": {a: str(s) for a, s in layout.items()},
                "reduction_axes": [a for a, s in layout.items() if s == REPLICATED],
                "local_elements": local[name],
            }
            for name, layout in parameters.items()
        ],
        totals=_totals(collectives),
        per_rank={
            "parameters": elements * DTYPES[compute].itemsize,
            "gradients": elements * DTYPES[grads].itemsize,
            # AdamW: two moments, and a wide master where weights are narrower
            "optimizer state": elements * DTYPES[wide].itemsize * (2 + (compute != wide)),
        },
    )


def _collective(c: Collective, dtypes: Mapping[str, str]) -> dict[str, Any]:
    dtype = dtypes[c.dtype]
    return {
        "op": c.op,
        "kind": c.kind,
        "axis": c.axis,
        "phase": c.phase,
        "dtype": dtype,
        "bytes": c.elements * DTYPES[dtype].itemsize,
        "count": c.count,
    }


def _totals(collectives: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes and calls by axis, kind and phase."""
    out: dict[str, Any] = {}
    for c in collectives:
        entry = out.setdefault(f"{c['axis']} {c['kind']} {c['phase']}", {"count": 0, "bytes": 0})
        entry["count"] += c["count"]
        entry["bytes"] += c["bytes"] * c["count"]
    return out


def _local(mesh: Mesh, size: int, layout: Mapping[str, State]) -> int:
    return size // prod(mesh.size(a) for a, state in layout.items() if state.kind is Kind.SHARD)


def _ops(model: ModelProgram, states: Mapping[str, Any]) -> list[dict[str, Any]]:
    applied = [program.name for _, program in model.steps]
    out = []
    for program in model.distinct:
        for index, op in enumerate(program.ops):
            for i, name in enumerate(op.outputs):
                made = {a: str(by_program[program.name].ops[index].outputs[i]) for a, by_program in states.items()}
                out.append(
                    {
                        "program": program.name,
                        "count": applied.count(program.name),
                        "op": name,
                        "kind": op.kind,
                        "states": made,
                    }
                )
    return out
