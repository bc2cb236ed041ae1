"""What a layout means, as data and as text: `duomesh explain MODEL --plan ...`.

For each op the layouts of its results and the movements before it; each collective with axes, kind, phase, dtype, bytes
and count; for each parameter its three layouts and the axes over which its gradient is summed; and what one rank holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from duomesh.core.arrays import DTYPES
from duomesh.core.sharding.collectives import Collective, StepShape, inner_axes, step_collectives
from duomesh.core.sharding.layouts import Layout
from duomesh.core.sharding.program import Reshard, ShardedProgram
from duomesh.core.sharding.storage import Bucket, Storage

__all__ = ["LayoutListing", "list_collectives", "list_layout"]


@dataclass(frozen=True)
class LayoutListing:
    """JSON values. Bytes of a collective are those of the larger buffer on one rank, padding included.

    Attributes:
        mesh: axis -> size, slowest first.
        ops: of every distinct program, in order: `program`, how often it runs in a pass (`count`), name of the result
            (`op`), `kind`, `states` by axis, and `moves` of operands (`value`, `axis`, `before`, `after`, `forward`,
            `backward`).
        collectives: `op`, `kind`, `axis`, `phase`, `dtype`, `bytes`, `count` in a step. Several axes that are one group
            are joined by +.
        parameters: of one layer of each kind: `name`, `shape`, `compute`, `storage` and `optimizer` layout by axis,
            `reduction_axes`, `local_elements` of the compute layout.
        totals: bytes and calls by axis, kind and phase.
        per_rank: bytes that one rank holds.
    """

    mesh: dict[str, int]
    ops: list[dict[str, Any]]
    collectives: list[dict[str, Any]]
    parameters: list[dict[str, Any]]
    totals: dict[str, Any]
    per_rank: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """The same for a person: programs with layouts, then collectives, then parameters by layout."""
        axes = "  ".join(f"{name}={size}" for name, size in self.mesh.items()) or "of one rank"
        lines = [f"mesh {axes} (slowest first), {prod(self.mesh.values()):,} ranks"]
        lines += [*self._ops_text(), *self._collectives_text(), *self._parameters_text()]
        lines += ["", "one rank holds, in bytes"]
        return "\n".join(lines + [f"  {name:24} {size:>19,}" for name, size in self.per_rank.items()])

    def _ops_text(self) -> list[str]:
        lines = []
        program = ""
        for op in self.ops:
            if op["program"] != program:
                program = op["program"]
                lines += ["", f"{program}  x{op['count']}"]
            for move in op["moves"]:
                what = f"{move['before']} -> {move['after']} on {move['axis']}"
                ways = f"{move['forward']} / {move['backward']}" if move["backward"] else move["forward"]
                lines.append(f"    {move['value']:24} {what:34} {ways}")
            lines.append(f"  {op['op']:26} {op['kind']:14} {_states(op['states'])}")
        return lines

    def _collectives_text(self) -> list[str]:
        head = f"{'collectives of a step':50} {'axis':13} {'phase':9} {'dtype':9} {'count':>7} {'bytes each':>15}"
        lines = ["", f"{head} {'total':>19}"]
        for c in self.collectives:
            size, total = f"{c['bytes']:,}", f"{c['bytes'] * c['count']:,}"
            line = f"  {c['kind'] + ' ' + c['op']:48} {c['axis']:13} {c['phase']:9} {c['dtype']:9} {c['count']:7,}"
            lines.append(f"{line} {size:>15} {total:>19}")
        return lines

    def _parameters_text(self) -> list[str]:
        lines = ["", "parameters, one layer of each kind"]
        for p in self.parameters:
            summed = ", ".join(p["reduction_axes"]) or "no axis"
            lines.append(f"  {p['name']:38} {_states(p['compute'])}")
            others = [f"{what} {_states(p[what])}" for what in ("storage", "optimizer") if p[what] != p["compute"]]
            lines.append(f"      summed over {summed}; {p['local_elements']:,} elements a rank; {'; '.join(others)}")
            lines[-1] = lines[-1].rstrip("; ")
        return lines


def _states(states: Mapping[str, str]) -> str:
    return "  ".join(f"{axis}:{state}" for axis, state in states.items())


def list_layout(
    storage: Storage, shape: StepShape, *, compute: str = "bfloat16", grads: str = "float32"
) -> LayoutListing:
    """Lists what a sharded model and its storage mean for a step.

    Args:
        compute, grads: dtypes of activations and weights, and of gradients and their sums.
    """
    wide = "float64" if compute == "float64" else "float32"
    collectives = list_collectives(step_collectives(storage, shape), compute=compute, grads=grads)
    sharded = storage.sharded
    applied = Counter(program.program.name for _, _, program in sharded.steps)
    return LayoutListing(
        mesh={axis.name: axis.size for axis in sharded.mesh.axes},
        ops=[op for program in sharded.programs.values() for op in _ops(program, applied[program.program.name])],
        collectives=collectives,
        parameters=_parameters(storage),
        totals=_totals(collectives),
        per_rank=_per_rank(storage, DTYPES[compute].itemsize, DTYPES[grads].itemsize, DTYPES[wide].itemsize),
    )


def list_collectives(
    collectives: Iterable[Collective], *, compute: str = "bfloat16", grads: str = "float32"
) -> list[dict[str, Any]]:
    """Collectives as JSON values, with dtypes and bytes."""
    wide = "float64" if compute == "float64" else "float32"
    dtypes = {"compute": compute, "wide": wide, "int": "int32", "grad": grads}
    return [_collective(c, dtypes) for c in collectives]


def _collective(c: Collective, dtypes: Mapping[str, str]) -> dict[str, Any]:
    dtype = dtypes[c.dtype]
    size = c.elements * DTYPES[dtype].itemsize
    axis = "+".join(c.axes)
    return {"op": c.op, "kind": c.kind, "axis": axis, "phase": c.phase, "dtype": dtype, "bytes": size, "count": c.count}


def _totals(collectives: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes and calls by axis, kind and phase."""
    out: dict[str, Any] = {}
    for c in collectives:
        entry = out.setdefault(f"{c['axis']} {c['kind']} {c['phase']}", {"count": 0, "bytes": 0})
        entry["count"] += c["count"]
        entry["bytes"] += c["bytes"] * c["count"]
    return out


def _shown(layout: Layout) -> dict[str, str]:
    return {axis: str(state) for axis, state in layout.items()}


def _ops(program: ShardedProgram, count: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    moves: list[dict[str, str]] = []
    name = program.program.name
    for made in program.instructions:
        if isinstance(made, Reshard):
            moves += _moves(program, made)
            continue
        op = made.call.op
        axes = "+".join(inner_axes(program, made))
        moves += [
            {"value": op.name, "axis": axes, "before": "", "after": what, "forward": "all-reduce", "backward": ""}
            for phase, what in made.own
            if axes and phase == "forward"
        ]
        for result in op.outputs:
            entry = {"program": name, "count": count, "op": result, "kind": op.kind}
            out.append({**entry, "states": _shown(program.layouts[result]), "moves": moves})
            moves = []
    for outside, inside in program.outputs:
        entry = {"program": name, "count": count, "op": outside, "kind": "output"}
        own = [m for m in moves if m["value"] == program.origin[inside]]
        out.append({**entry, "states": _shown(program.layouts[inside]), "moves": own})
    return out


def _moves(program: ShardedProgram, made: Reshard) -> list[dict[str, str]]:
    """A reshard's steps, each with its action and that of its dual."""
    back = [step.action.value for step in reversed(made.back)] or [""] * len(made.ahead)
    return [
        {
            "value": program.origin[made.source],
            "axis": "+".join(step.axes),
            "before": str(step.before),
            "after": str(step.after),
            "forward": step.action.value + (", again in backward" if made.regathers else ""),
            "backward": action,
        }
        for step, action in zip(made.ahead, back, strict=True)
    ]


def _parameters(storage: Storage) -> list[dict[str, Any]]:
    """Of each distinct program the parameters of its first application."""
    sharded = storage.sharded
    out = []
    seen: set[str] = set()
    for prefix, stage, program in sharded.steps:
        if program.program.name in seen:
            continue
        seen.add(program.program.name)
        for param in program.program.params:
            name = sharded.canonical(prefix, param.name)
            bucket = storage.by_param[name, stage]
            if bucket.name.startswith(prefix):  # a tied parameter is listed with its first use
                out.append(_parameter(storage, name, bucket))
    return out


def _parameter(storage: Storage, name: str, bucket: Bucket) -> dict[str, Any]:
    compute = _shown(storage.sharded.params[name, bucket.stage])
    flat = {**compute, **dict.fromkeys(bucket.shared, f"Flat({bucket.name.rpartition('.')[2]})")}
    return {
        "name": name,
        "shape": list(storage.sharded.model.params[name].shape),
        "compute": compute,
        "storage": flat if storage.zero == 3 else compute,
        "optimizer": flat,
        "reduction_axes": list(bucket.summed),
        "local_elements": storage.local_elements(name, bucket.stage),
    }


def _per_rank(storage: Storage, compute: int, grads: int, wide: int) -> dict[str, int]:
    """Bytes of a rank of the first stage; itemsizes as given."""
    buckets = [bucket for bucket in storage.buckets if bucket.stage == storage.sharded.stages[0]]
    whole = sum(member.size for bucket in buckets for member in bucket.members)
    owned = sum(bucket.size // bucket.parts for bucket in buckets)
    held = {
        "parameters": compute * (owned if storage.zero == 3 else whole),
        "gradients": grads * (owned if storage.zero >= 2 else whole),
        # AdamW: two moments, and a wide master where weights are narrower
        "optimizer state": wide * owned * (2 + (compute < wide)),
    }
    if storage.zero == 3:
        steps = range(len(storage.sharded.steps))
        largest = max(sum(b.size for b in storage.used(index) if b.shared) for index in steps)
        held["parameters gathered at once"] = compute * largest
    return held
