"""Sharded programs -> `nn.Module`s.

Each program becomes one class whose `forward` is generated, straight-line source: one line an op or a movement, every
line a call of that op's function. A stack trace names the op, a profiler sees plain calls, and `torch.compile` meets
no loop. Layers of one kind are instances of one class and so share one compiled graph. On a mesh of one rank nothing
moves, and the source has no line more than the program has ops.

`print(module.source)` shows what runs.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Iterator, Mapping
from math import prod
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from duomesh.backends.torch import ops
from duomesh.backends.torch.groups import Groups
from duomesh.backends.torch.moves import Move
from duomesh.backends.torch.ops.split import Split
from duomesh.core.ir.program import Program, check_kinds
from duomesh.core.ir.storage import Slot
from duomesh.core.sharding.collectives import inner_axes
from duomesh.core.sharding.layouts import Extents
from duomesh.core.sharding.local import local_kwargs, local_slots
from duomesh.core.sharding.program import Reshard, ShardedCall, ShardedModelProgram, ShardedProgram

if TYPE_CHECKING:
    from duomesh.backends.torch.units import Units

__all__ = ["LoweredModel", "LoweredProgram"]

_OPTIONAL = ("segment_ids", "samples", "places")  # inputs that may be None


class _Source:
    """Writes the forward of one program for one rank."""

    def __init__(self, sharded: ShardedProgram, extents: Extents, groups: Groups) -> None:
        self._sharded, self._extents, self._groups = sharded, extents, groups
        self._program = sharded.program
        self.moves: dict[str, Move] = {}
        self.splits: dict[str, Split] = {}
        self._variables = {name: _local(name) for name in self._program.values}
        assert len(set(self._variables.values())) == len(self._variables), "two value names collide as variables"
        self._params = {param: f"self.{param}" for param in self._program.param_by_name}
        # what an op gathers for itself: its source and its movement
        self._gathered: dict[str, Reshard] = {}

    def write(self, *, records: bool) -> str:
        """Python source; with `records`, one that also stores every op output by name."""
        program, names = self._program, self._variables
        arguments = ", ".join(["self", *(["record"] if records else []), *(names[v.name] for v in program.inputs)])
        lines = [f"def forward({arguments}):"]
        lines += [f"    {names[c.name]} = self.constant({c.name!r})" for c in program.constants]
        for made in self._sharded.instructions:
            if isinstance(made, Reshard):
                lines += self._reshard(made)
                continue
            lines.append(self._call(made))
            if records:
                lines += [f"    record[{n!r}] = {names[n]}" for n in made.call.op.outputs]
        outputs = "".join(f"{self._variables[value]}, " for _, value in self._sharded.outputs)
        lines.append(f"    return ({outputs})")
        return "\n".join(lines) + "\n"

    def _reshard(self, made: Reshard) -> Iterator[str]:
        """No line for a reshard that this mesh makes no step of."""
        is_param = made.source in self._program.param_by_name
        source = self._params[made.source] if is_param else self._variables[made.source]
        move = Move.of(self._sharded, made, self._extents, self._groups)
        if not move.ahead and not move.back:
            (self._params if is_param else self._variables)[made.result] = source
            return
        self.moves[made.result] = move
        target = _local(made.result.replace("@", ".at"))
        (self._params if is_param else self._variables)[made.result] = target
        if made.regathers:
            self._gathered[made.result] = made
        elif made.source in _OPTIONAL:
            yield f"    {target} = None if {source} is None else ops.reshard({source}, self.moves[{made.result!r}])"
        else:
            yield f"    {target} = ops.reshard({source}, self.moves[{made.result!r}])"

    def _call(self, made: ShardedCall) -> str:
        op, count = made.call.op, len(made.call.op.inputs)
        kwargs: dict[str, Any] = local_kwargs(self._sharded, made, self._extents)
        function, extra, split = op.kind, "", self._split(made)
        if split is not None:
            self.splits[op.name] = split
            function, extra = f"split_{op.kind}", f"split=self.splits[{op.name!r}]"
        inputs = ["None" if n is None else self._variables[n] for n in made.operands[:count]]
        gathered = self._gathered.get(made.operands[0] or "")
        if gathered is not None:
            inputs[0] = self._variables[gathered.source]
            function, extra = "gathered_linear", f"move=self.moves[{gathered.result!r}]"
        operands = [*inputs, *self._storage(made), *(f"{key}={value!r}" for key, value in kwargs.items())]
        operands += [extra] if extra else []
        targets = ", ".join(self._variables[n] for n in op.outputs)
        comma = "," if op.kind == "linear" and len(op.outputs) == 1 else ""  # linear always returns a tuple
        return f"    {targets}{comma} = ops.{function}({', '.join(operands)})"

    def _storage(self, made: ShardedCall) -> Iterator[str]:
        """Storage tensors of an op; one that holds a single parameter may have been moved."""
        by_slot = self._program.slots
        moved = {self._sharded.origin[n]: n for n in made.operands[len(made.call.op.inputs) :] if n is not None}
        for slot in made.call.slots:
            if slot is None:
                yield "None"
                continue
            members = [member.param.name for member in by_slot[slot].members]
            if len(members) == 1:
                yield self._params[moved[members[0]]]
                continue
            assert all(moved[name] == name for name in members), "a member of a pack cannot move alone"
            yield f"self.{slot}"

    def _split(self, made: ShardedCall) -> Split | None:
        """Where an op has a part of a dim that it cannot treat as a smaller whole one."""
        op = made.call.op
        axes = self._real(inner_axes(self._sharded, made))
        if axes:
            value = self._program.values[str(op.inputs[0])]
            names = op.signature.inner + op.signature.local if op.kind == "norm" else op.signature.inner
            size = prod(axis.size or 1 for axis in value.axes if axis.name in names)
            first = self._first(made.operands[0], op.signature.inner[0])
            return Split(self._groups.of(axes).group_name, first, size)
        if op.kind == "embedding":
            table = str(made.operands[1])
            if self._extents.splitting("vocab", self._sharded.layouts[table]):
                size = self._sharded.axes(table)[0].size or 0
                return Split("", self._first(table, "vocab"), size)
        return None

    def _real(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self._extents.mesh.size(axis) > 1)

    def _first(self, name: str | None, dim: str) -> int:
        """Position along a dim of the first element that this rank has."""
        assert name is not None
        axes, layout = self._sharded.axes(name), self._sharded.layouts[name]
        shape = self._extents.shape(axes, layout)
        length = shape[[axis.name for axis in axes].index(dim)]
        return self._groups.place(self._extents.splitting(dim, layout)) * length


def _local(name: str) -> str:
    """A value's name as a Python variable."""
    return name.replace(".", "_")


def _compile_source(source: str, program: str) -> FunctionType:
    """The function that the source defines; tracebacks and debuggers show its lines."""
    digest = hashlib.blake2b(source.encode(), digest_size=4).hexdigest()
    filename = f"<duomesh {program} {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"ops": ops}
    exec(compile(source, filename, "exec"), namespace)
    function = namespace["forward"]
    assert isinstance(function, FunctionType)
    return function


class LoweredProgram(nn.Module):
    """Base of the generated classes: holds the rank's storage tensors under their dotted names.

    Parameters are made empty on `device`; the session fills them.

    Attributes:
        moves, splits: movements, and parts of dims, that the source refers to.
        slots: storage tensors by local name, with the rows that this rank has.
    """

    program: Program
    source: str
    moves: Mapping[str, Move]
    splits: Mapping[str, Split]
    slots: Mapping[str, Slot]

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        for slot in self.slots.values():
            *path, leaf = slot.name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(leaf, nn.Parameter(torch.empty(slot.shape, dtype=dtype, device=device)))
        for constant in self.program.constants:
            # Kept as the int32 bits of its float32 values, so that `module.bfloat16()` cannot round it.
            bits = torch.from_numpy(np.asarray(constant.data, np.float32).view(np.int32)).to(device)
            self.register_buffer(_local(constant.name), bits, persistent=False)

    def constant(self, name: str) -> Tensor:
        """A constant's values in the wide dtype."""
        bits: Tensor = getattr(self, _local(name))
        return bits.view(torch.float32).to(self._wide)

    def run(self, values: Mapping[str, Tensor | None], record: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Calls the program with inputs by name; returns its outputs by their outside names."""
        arguments = [values[v.name] for v in self.program.inputs]
        result = self(*arguments) if record is None else self.forward_recorded(record, *arguments)
        return {name: tensor for (name, _), tensor in zip(self.program.outputs, result, strict=True)}

    def forward_recorded(self, record: dict[str, Tensor], *arguments: Tensor | None) -> Any:
        """`forward` that also stores every op output; replaced by generated code."""
        raise AssertionError("generated classes define this")


def lowered_class(sharded: ShardedProgram, extents: Extents, groups: Groups) -> type[LoweredProgram]:
    """A new class that runs this program on this rank."""
    written = _Source(sharded, extents, groups)
    source, name = written.write(records=False), sharded.program.name
    namespace = {
        "__doc__": f"Generated from the program {name!r}.",
        "program": sharded.program,
        "source": source,
        "moves": written.moves,
        "splits": written.splits,
        "slots": local_slots(sharded, extents),
        "forward": _compile_source(source, name),
        "forward_recorded": _compile_source(_Source(sharded, extents, groups).write(records=True), name),
    }
    return type(f"Lowered_{name}", (LoweredProgram,), namespace)


class LoweredModel(nn.Module):
    """embed, tables, layers, head and loss as submodules.

    Args:
        sharded: the model on its mesh.
        groups: this rank's place on the mesh.
        dtype: of every parameter and activation.
        device: where parameters are made.

        separate_ties: give a tied head a Parameter of its own; otherwise it holds the embedding's.

    Attributes:
        units: gathers weights around each step, where only parts of them are kept.

    Raises BackendError for a model with ops that `ops` lacks.
    """

    def __init__(
        self,
        sharded: ShardedModelProgram,
        groups: Groups,
        dtype: torch.dtype,
        device: torch.device,
        *,
        separate_ties: bool = False,
    ) -> None:
        super().__init__()
        program = sharded.model
        check_kinds(program, ops.OPS, "torch")
        self.program = program
        self.sharded = sharded
        self.dtype = dtype
        extents = sharded.extents(batch=1, seq=1)  # no parameter depends on them
        classes = {name: lowered_class(made, extents, groups) for name, made in sharded.programs.items()}
        self.embed = classes["embed"](dtype, device)
        self.tables = classes["tables"](dtype, device)
        self.layers = nn.ModuleList(classes[program.blocks[kind].name](dtype, device) for kind in program.layers)
        self.head = classes["head"](dtype, device)
        self.loss = classes["loss"](dtype, device)
        self.units: Units | None = None
        if not separate_ties:
            for alias, name in program.aliases.items():
                self._set_parameter(alias, self.get_parameter(name))

    def _set_parameter(self, name: str, parameter: nn.Parameter) -> None:
        path, _, leaf = name.rpartition(".")
        self.get_submodule(path).register_parameter(leaf, parameter)

    @property
    def steps(self) -> list[tuple[str, LoweredProgram]]:
        """(prefix, module) in the order of `ModelProgram.steps`."""
        layers = [(f"layers.{i}.", layer) for i, layer in enumerate(self.layers)]
        first = [("embed.", self.embed), ("tables.", self.tables)]
        return [*first, *layers, ("head.", self.head), ("loss.", self.loss)]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segment_ids: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        samples: Tensor | None = None,
        places: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        record: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """[B, S] int ids of this rank -> [B, S, V] logits, in the layout of the head's output; with labels, the
        weighted **sum** of token losses over all ranks (a scalar).

        samples, places, dropout_keys: as `core.dropout` makes them, or None for a pass that drops nothing.
        record: receives every op output under its global name.
        """
        values: dict[str, Tensor | None] = {
            "tokens": tokens,
            "positions": positions,
            "segment_ids": segment_ids,
            "labels": labels,
            "loss_mask": loss_mask,
            "samples": samples,
            "places": places,
        }
        steps = self.steps if labels is not None else self.steps[:-1]
        for index, (prefix, module) in enumerate(steps):
            local: dict[str, Tensor] | None = None if record is None else {}
            values["dropout_key"] = None if dropout_keys is None else dropout_keys[index]
            if self.units is None:
                values.update(module.run(values, local))
            else:
                self.units.before(index)
                values.update(self.units.after(index, module.run(values, local)))
            if record is not None and local is not None:
                record.update({prefix + name: tensor for name, tensor in local.items()})
        result = values["logits" if labels is None else "loss_sum"]
        assert result is not None
        return result
