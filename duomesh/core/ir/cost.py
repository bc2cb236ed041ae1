"""Counts that follow from a program alone: parameters, floating-point operations, lengths of sums."""

from __future__ import annotations

from math import prod

from duomesh.core.ir.program import ModelProgram, Program
from duomesh.core.ir.values import Op

__all__ = ["longest_sum", "matmul_params", "step_flops"]

_MATMULS = ("linear", "router", "expert_linear")


def _sizes(program: Program, op: Op, *, batch: int, seq: int) -> dict[str, int]:
    """Size of every axis that the op's signature names."""
    sizes = {"batch": batch, "seq": seq, "kv_seq": seq}
    for name in (*op.inputs, *op.outputs):
        if name is not None:
            sizes |= {axis.name: axis.size for axis in program.values[name].axes if axis.size is not None}
    for name in op.params:
        if name is not None:
            groups = program.param_by_name[name].groups
            sizes |= {axis.name: axis.size for group in groups for axis in group if axis.size is not None}
    return sizes


def longest_sum(model: ModelProgram, *, batch: int, seq: int) -> int:
    """K of the error bounds: the most terms that one sum of a forward or backward pass has."""
    longest = 1
    for program in model.distinct:
        for op in program.ops:
            sizes = _sizes(program, op, batch=batch, seq=seq)
            summed = {*op.signature.contracted, *op.signature.local}
            longest = max(longest, prod(sizes[name] for name in summed))
            # backward: an operand's cotangent is a sum over the axes that each output has and it lacks
            for operand in (*op.signature.inputs, *filter(None, op.signature.params)):
                spread = sum(prod(sizes[n] for n in set(out) - set(operand)) for out in op.signature.outputs)
                longest = max(longest, spread)
    return longest


def matmul_params(model: ModelProgram) -> int:
    """Parameters that multiply every token: all linears, the head tied or not; no embedding look-up.

    Of experts, as many as a token chooses.
    """
    total = 0
    for _, program in model.steps:
        for op in program.ops:
            if op.kind in _MATMULS:
                params = [program.param_by_name[name] for name in op.params if name is not None]
                choices, experts = program.values[op.outputs[0]].live or (1, 1)
                total += sum(param.size for param in params if param.is_decayed) * choices // experts
    return total


def step_flops(model: ModelProgram, *, batch: int, seq: int) -> float:
    """Forward and backward of one batch: 6 N T, and causal attention; h = heads * head_dim.

    T = batch * seq tokens, N = `matmul_params`. The attention term is 12 h T times the mean number of keys that a query
    sees: s / 2, or w - w^2 / 2s with a window w < s. Recomputation never counts.
    """
    tokens = batch * seq
    attention = 0.0
    for block in model.spec.blocks:
        spec = block.attention
        window = seq if spec.window is None else min(seq, spec.window)
        attention += window * (1 - window / (2 * seq)) * spec.num_heads * spec.head_dim
    return 6.0 * matmul_params(model) * tokens + 12.0 * attention * tokens
