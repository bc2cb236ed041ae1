"""Programs -> `nn.Module`s.

Each program becomes one class whose `forward` is generated, straight-line source: one line an op, every line a call
of that op's function. A stack trace names the op, a profiler sees plain calls, and `torch.compile` meets neither a
loop nor a dictionary. Layers of one kind are instances of one class and so share one compiled graph.

`print(module.source)` shows what runs.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from duomesh.backends.torch import ops
from duomesh.core.ir.program import ModelProgram, Program, check_kinds

__all__ = ["LoweredModel", "LoweredProgram"]


def _local(name: str) -> str:
    """A value's name as a Python variable."""
    return name.replace(".", "_")


def _source(program: Program, *, records: bool) -> str:
    """Python source of the program's forward; with `records`, one that also stores every op output by name."""
    variables = {name: _local(name) for name in program.values}
    assert len(set(variables.values())) == len(variables), "two value names collide as variables"
    arguments = ", ".join(["self", *(["record"] if records else []), *(variables[v.name] for v in program.inputs)])
    lines = [f"def forward({arguments}):"]
    lines += [f"    {variables[c.name]} = self.constant({c.name!r})" for c in program.constants]
    for call in program.calls:
        op = call.op
        operands = ["None" if n is None else variables[n] for n in op.inputs]
        operands += ["None" if s is None else f"self.{s}" for s in call.slots]
        operands += [f"{key}={value!r}" for key, value in call.kwargs.items()]
        targets = ", ".join(variables[n] for n in op.outputs)
        comma = "," if op.kind == "linear" and len(op.outputs) == 1 else ""  # linear always returns a tuple
        lines.append(f"    {targets}{comma} = ops.{op.kind}({', '.join(operands)})")
        if records:
            lines += [f"    record[{n!r}] = {variables[n]}" for n in op.outputs]
    outputs = "".join(f"{variables[value]}, " for _, value in program.outputs)
    lines.append(f"    return ({outputs})")
    return "\n".join(lines) + "\n"


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
    """Base of the generated classes: holds the program's storage tensors under their dotted names.

    Parameters are made empty on `device`; the session fills them.
    """

    program: Program
    source: str

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        for slot in self.program.slots.values():
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


def lowered_class(program: Program) -> type[LoweredProgram]:
    """A new class that runs this program."""
    source = _source(program, records=False)
    namespace = {
        "__doc__": f"Generated from the program {program.name!r}.",
        "program": program,
        "source": source,
        "forward": _compile_source(source, program.name),
        "forward_recorded": _compile_source(_source(program, records=True), program.name),
    }
    return type(f"Lowered_{program.name}", (LoweredProgram,), namespace)


class LoweredModel(nn.Module):
    """embed, tables, layers, head and loss as submodules.

    Args:
        program: the model.
        dtype: of every parameter and activation.
        device: where parameters are made.

    A tied head holds the embedding's own Parameter object. Raises BackendError for a model with ops that `ops` lacks.
    """

    def __init__(self, program: ModelProgram, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        check_kinds(program, ops.OPS, "torch")
        self.program = program
        self.dtype = dtype
        classes = {p.name: lowered_class(p) for p in program.distinct}
        self.embed = classes["embed"](dtype, device)
        self.tables = classes["tables"](dtype, device)
        self.layers = nn.ModuleList(classes[program.blocks[kind].name](dtype, device) for kind in program.layers)
        self.head = classes["head"](dtype, device)
        self.loss = classes["loss"](dtype, device)
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
        record: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """[B, S] int ids -> [B, S, V] logits; with labels, the weighted **sum** of token losses (a scalar).

        record: receives every op output under its global name.
        """
        values: dict[str, Tensor | None] = {
            "tokens": tokens,
            "positions": positions,
            "segment_ids": segment_ids,
            "labels": labels,
            "loss_mask": loss_mask,
        }
        steps = self.steps if labels is not None else self.steps[:-1]
        for prefix, module in steps:
            local: dict[str, Tensor] | None = None if record is None else {}
            values.update(module.run(values, local))
            if record is not None and local is not None:
                record.update({prefix + name: tensor for name, tensor in local.items()})
        result = values["logits" if labels is None else "loss_sum"]
        assert result is not None
        return result
