"""The collectives of a compiled module: what really runs, with loops multiplied out.

`compiled_collectives` reads `compiled.as_text()`, after partitioning and optimisation, of a CPU or a GPU. It is not
what the program says, which `traced.py` lists one by one. What XLA makes of a manual `shard_map` program was found by
experiment, on jax 0.10.2 and 0.11.2, 8 devices:

| | CPU | GPU (compiled for 8 H200, 0.11.2) |
|---|---|---|
| dtype of the wire | bf16 travels as float32, float8 as float16 | as written |
| equal collectives of one value | made once | not tried |
| results that nobody uses | gone | gone |
| loop-invariant collective in a scan | moved out: all-gather and all-reduce run once | stays, runs in each step |
| independent all-reduces over one group and dtype | one of many operands | small ones: one, of concatenated operands |
| psum(a) + psum(b) | two operands of one | psum(a + b) |
| psum over one axis, then over the other | two | one over both |
| independent all-gathers, reduce-scatters | stay as they are | one instruction of many operands |
| all_gather over one axis, then over the other | two | two |
| psum_scatter | stays a reduce-scatter | stays a reduce-scatter |
| all_to_all | operands and results are tuples of pieces | one array |
| scan of length 1 | no loop is left | no loop is left |
| order of axes in a group | kept, of psum over (tp, dp) too | kept |
| a recomputed all_gather (`jax.checkpoint`) | stays | stays |

So a compiled module has at most the collectives of the trace, and often fewer. Bytes of one kind and group are the same
where nothing was equal, unused, loop-invariant or summed twice; on a CPU those of bf16 collectives are twice as many.
StableHLO (`lowered.as_text()`) says nothing that the trace does not say in a better form, and is not read.

How things are counted:

- An instruction with several operands gives one entry for each, because combining is a detail of its transport; an
  all-to-all of pieces gives one entry, of all pieces together.
- A pair of -start and -done is counted where it starts.
- Of a conditional's branches, equal collectives count as often as in the branch that has most of them. If branches
  differ, that is an upper bound on each device.
- A collective in a loop's condition runs once more than the body.
- Groups of one device move nothing and are left out.
- Entries come in the order of the text, which is the schedule's in a compiled module.

Not seen: communication inside custom calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from duomesh.backends.jax.hlo import Computation, HloModule, Instruction, called, leaves, parse_module, tuple_parts
from duomesh.core.arrays import Array
from duomesh.core.errors import BackendError
from duomesh.core.sharding.compare import Issued, at_most
from duomesh.core.sharding.mesh import Mesh

__all__ = ["compiled_collectives"]

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_UNKNOWN = ("collective-broadcast", "ragged-all-to-all", "send", "recv")
_DTYPES = {"bf16": "bfloat16", "pred": "bool", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
_DTYPES |= {f"f{bits}": f"float{bits}" for bits in (16, 32, 64)}
_DTYPES |= {f"{s}{bits}": f"{name}{bits}" for s, name in (("s", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)}
Groups = list[list[int]]


def compiled_collectives(text: str, mesh: Mesh) -> list[Issued]:
    """Every collective of a compiled module, with how often one call executes it.

    Args:
        text: `jax.jit(f).lower(...).compile().as_text()`.
        mesh: device i of the module has coordinates of rank i, as in a `jax.sharding.Mesh` with the same axes in the
            same order.

    Raises:
        BackendError: a loop around collectives whose trip count is unknown; a group that is no product of whole axes;
            a kind or dtype of collective that is not listed above; another number of devices than the mesh has.
    """
    module = parse_module(text)
    if not module.entry:
        raise BackendError("the text has no ENTRY computation. Pass what compiled.as_text() returns.")
    devices = module.replicas * module.partitions
    if devices != mesh.world_size:
        raise BackendError(f"the compiled module is for {devices} devices and the mesh has {mesh.world_size}.")
    return _Reader(module, mesh).listed(module.entry)


class _Reader:
    def __init__(self, module: HloModule, mesh: Mesh) -> None:
        self._module, self._mesh = module, mesh
        self._known: dict[str, list[Issued]] = {}

    def listed(self, name: str) -> list[Issued]:
        if name not in self._known:
            computation = self._module.computations[name]
            self._known[name] = [one for made in computation for one in self._of(made, computation)]
        return self._known[name]

    def _of(self, made: Instruction, within: Computation) -> list[Issued]:
        kind = made.opcode.removesuffix("-start")
        if made.opcode.endswith(("-done", "-update")):
            return []
        if kind in _UNKNOWN:
            raise BackendError(f"the compiled module has a {kind} ({made.name}), which cannot be listed yet.")
        if kind in _KINDS:
            return list(_issued(made, kind, self._module, self._mesh))
        if kind == "while":
            return self._loop(made, within)
        if kind == "conditional":
            branches = called(made, "branch_computations|true_computation|false_computation")
            return at_most(self.listed(name) for name in branches)
        return [one for name in called(made, "calls|to_apply|called_computations") for one in self.listed(name)]

    def _loop(self, made: Instruction, within: Computation) -> list[Issued]:
        condition, body = (self.listed(called(made, name)[0]) for name in ("condition", "body"))
        if not condition and not body:
            return []
        trips = self._module.trip_count(made, within)
        if trips is None:
            raise BackendError(
                f"the loop {made.name} of the compiled module has collectives and runs for a number of times that is "
                "not known beforehand, so they cannot be counted. Use jax.lax.scan, or fori_loop with static bounds."
            )
        inside = [replace(one, count=one.count * trips) for one in body if trips]
        return [replace(one, count=one.count * (trips + 1)) for one in condition] + inside


def _issued(made: Instruction, kind: str, module: HloModule, mesh: Mesh) -> Iterator[Issued]:
    if kind == "collective-permute":
        pairs = _explicit(made.attribute("source_target_pairs", r"(\{\{.*?\}\})") or "{{}}")
        axes, size = _permuted(_on_devices(pairs, made, kind, module), mesh), 1
    else:
        groups = _on_devices(_groups(made), made, kind, module)
        axes, size = _axes(groups, mesh, made), len(groups[0])
    if not axes:
        return
    arrays = leaves(_results(made))
    if kind == "all-to-all":
        arrays = [(arrays[0][0], sum(elements for _, elements in arrays))]
    for dtype, elements in arrays:
        if dtype not in _DTYPES:
            raise BackendError(
                f"the compiled module has a {kind} of dtype {dtype} ({made.name}), which has no name here."
            )
        yield Issued(kind, axes, _DTYPES[dtype], elements * (size if kind == "reduce-scatter" else 1))


def _results(made: Instruction) -> str:
    """The shape of what a collective gives.

    A -start has (operands, results, what the backend keeps); an all-reduce's had the results alone before jax 0.11.
    """
    parts = tuple_parts(made.shape)
    if not made.opcode.endswith("-start") or (made.opcode == "all-reduce-start" and not parts[0].startswith("(")):
        return made.shape
    return parts[1]


def _groups(made: Instruction) -> Groups:
    """Of the ids that the instruction means; empty for all of them.

    XLA writes `{{0,1},{2,3}}`; `[2,2]<=[4]` or `[2,2]<=[2,2]T(1,0)`: numbers of devices in order, reshaped, transposed
    and reshaped to groups; or `mesh['x'=2,'y'=2] {'y'}`: those that differ on these axes only (jax 0.11).
    """
    text = made.attribute(
        "replica_groups", r"(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\}(?=,|$))"
    )
    if text is None:
        if "replica_groups=" in made.attributes:
            raise BackendError(f"{made.name} of the compiled module has groups in an unknown form: {made.attributes}")
        return []
    if text.startswith("{"):
        return _explicit(text)
    if text.startswith("mesh"):
        return _of_mesh(text, made)
    numbers = [_numbers(part) for part in re.findall(r"[\[(]([\d,]+)[\])]", text)]
    shape, reshaped = numbers[:2]
    order = numbers[2] if len(numbers) > 2 else range(len(reshaped))
    out: Groups = np.arange(np.prod(shape)).reshape(reshaped).transpose(order).reshape(shape).tolist()
    return out


def _explicit(text: str) -> Groups:
    return [_numbers(group) for group in re.findall(r"\{([\d,\s]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _of_mesh(text: str, made: Instruction) -> Groups:
    """Devices lie in the mesh in order of their numbers, or as `device_ids=([2,2]T(1,0))` or `(0,2,1,3)` say."""
    devices = r"(?:, device_ids=\((?:\[([\d,]+)\]T\(([\d,]+)\)|([\d,]+))\))?"
    found = re.fullmatch(rf"mesh\[((?:'[^']*'=\d+,?)*)\]{devices} \{{((?:'[^']*',?\s*)*)\}}", text)
    if found is None:
        raise BackendError(f"{made.name} of the compiled module has groups over parts of a mesh's axes: {text}.")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
    shape, order, listed = found[2], found[3], found[4]
    ids = np.arange(np.prod(list(sizes.values()), dtype=int))
    if shape:
        ids = ids.reshape(_numbers(shape)).transpose(_numbers(order))
    if listed:
        ids = np.array(_numbers(listed))
    inner = [list(sizes).index(name) for name in re.findall(r"'([^']*)'", found[5])]
    return _differing(ids.reshape(list(sizes.values())), inner)


def _differing(mesh: Array, inner: Sequence[int]) -> Groups:
    """Groups of devices that differ in these positions of their coordinate only, in the order of the positions."""
    sizes = mesh.shape
    outer = [position for position in range(len(sizes)) if position not in inner]
    ids = mesh.transpose([*outer, *inner])
    out: Groups = ids.reshape(-1, int(np.prod([sizes[position] for position in inner], dtype=int))).tolist()
    return out


def _on_devices(groups: Groups, made: Instruction, kind: str, module: HloModule) -> Groups:
    """Groups of device numbers, from ids of what the instruction says they are of.

    Source: XLA's CollectiveOpGroupMode (xla/service/collective_ops_utils.h).
    """
    replicas, partitions = range(module.replicas), range(module.partitions)
    across = made.attribute("channel_id", r"(\d+)") is not None
    if made.attribute("use_global_device_ids", "(true)"):
        return groups or [list(range(len(replicas) * len(partitions)))]
    if across and kind in ("all-to-all", "collective-permute"):
        groups = groups or [list(partitions)]
        return [[replica * len(partitions) + i for i in group] for replica in replicas for group in groups]
    groups = groups or [list(replicas)]
    if across:
        return [[i * len(partitions) + p for i in group for p in partitions] for group in groups]
    return [[i * len(partitions) + p for i in group] for p in partitions for group in groups]


def _coordinates(devices: Sequence[int], mesh: Mesh) -> np.ndarray:
    """[axes, devices]"""
    return np.array(np.unravel_index(devices, [axis.size for axis in mesh.axes]))


def _axes(groups: Groups, mesh: Mesh, made: Instruction) -> tuple[str, ...]:
    """Axes on which a group's devices differ. In a group, a more major axis changes later for the first time."""
    places = _coordinates(groups[0], mesh)
    changed = {axis: np.flatnonzero(places[axis] != places[axis, 0]) for axis in range(len(places))}
    inner = sorted((a for a, at in changed.items() if len(at)), key=lambda a: changed[a][0], reverse=True)
    if sorted(_differing(np.arange(mesh.world_size).reshape([axis.size for axis in mesh.axes]), inner)) != sorted(
        groups
    ):
        raise BackendError(
            f"{made.name} of the compiled module is over groups of devices such as {groups[0]}, which are not those of "
            f"whole axes of the mesh {', '.join(f'{axis.name}={axis.size}' for axis in mesh.axes)}."
        )
    return tuple(mesh.names[axis] for axis in inner)


def _permuted(pairs: Groups, mesh: Mesh) -> tuple[str, ...]:
    """Axes along which some device sends, in the mesh's order."""
    sources, targets = (_coordinates(ends, mesh) for ends in zip(*pairs, strict=True))
    return tuple(name for name, moves in zip(mesh.names, (sources != targets).any(axis=1), strict=True) if moves)
