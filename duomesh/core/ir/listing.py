"""A program as text that a person can read: `duomesh explain`."""

from __future__ import annotations

from duomesh.core.ir.cost import matmul_params, step_flops
from duomesh.core.ir.program import ModelProgram, Program
from duomesh.core.ir.values import Attr, Op, Value

__all__ = ["explain_program"]


def _value(value: Value) -> str:
    dims = ", ".join(str(axis) for axis in value.axes)
    kind = "" if value.dtype == "compute" else f" {value.dtype}"
    live = "" if value.live is None else f" live {value.live[0]}/{value.live[1]}"
    return f"{value.name} [{dims}]{kind}{live}"


def _attr(value: Attr) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _op(program: Program, op: Op) -> list[str]:
    outputs = ", ".join(_value(program.values[name]) for name in op.outputs)
    inputs = ", ".join(name for name in op.inputs if name is not None)
    attrs = "  ".join(f"{key}={_attr(value)}" for key, value in op.attrs if value is not None)
    lines = [f"  {outputs}", f"      = {op.kind}({inputs})  {attrs}".rstrip()]
    weights = []
    for name in op.params:
        if name is not None:
            param = program.param_by_name[name]
            weights.append(f"{name} {list(param.shape)}")
    if weights:
        lines.append("      weights  " + ", ".join(weights))
    lines.append(f"      axes     {op.signature}")
    if op.signature.contracted:
        lines[-1] += f"   sums {' '.join(op.signature.contracted)}"
    if op.signature.inner:
        lines[-1] += f"   reduces {' '.join(op.signature.inner)}"
    if op.signature.local:
        lines[-1] += f"   whole {' '.join(op.signature.local)}"
    return lines


def _program(program: Program, title: str) -> list[str]:
    inputs = ", ".join(_value(value) for value in program.inputs)
    lines = [title, f"  takes {inputs}"]
    for constant in program.constants:
        first = ", ".join(f"{x:.4g}" for x in constant.data[:4])
        lines.append(f"  constant {constant.name} [{len(constant.data)}] = {first}, ...")
    for op in program.ops:
        lines += _op(program, op)
    lines.append("  gives " + ", ".join(f"{name} = {value}" for name, value in program.outputs))
    return lines


def _ranges(layers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def explain_program(model: ModelProgram, *, seq: int | None = None) -> str:
    """Every program of a model: values with their logical axes, ops with weights and axis signatures.

    seq: sequence length of the operation count; None for the model's own context length.
    """
    spec = model.spec
    length = seq or spec.max_positions
    lines = [
        f"{model.num_params:,} parameters, {spec.num_layers} layers, {len(model.blocks)} distinct",
        f"{matmul_params(model):,} of them multiply every token; "
        f"{step_flops(model, batch=1, seq=length) / length / 1e9:,.3g} GFLOP a token to train at sequence {length:,}",
        "",
        *_program(model.embed, "embed"),
        "",
        *_program(model.tables, "tables"),
    ]
    for kind, block in enumerate(model.blocks):
        layers = [i for i, layer in enumerate(model.layers) if layer == kind]
        lines += ["", *_program(block, f"{block.name}: layers {_ranges(layers)}")]
    lines += ["", *_program(model.head, "head")]
    lines += [f"  {alias} is {name}: one tensor" for alias, name in model.aliases.items()]
    lines += ["", *_program(model.loss, "loss")]
    return "\n".join(lines)
