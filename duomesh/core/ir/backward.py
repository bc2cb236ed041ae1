"""What a backward pass reads of a forward one, from what ops are linear in."""

from __future__ import annotations

from collections.abc import Iterator

from duomesh.core.ir.ops import KINDS
from duomesh.core.ir.program import Program
from duomesh.core.ir.values import Op

__all__ = ["read_in_backward", "recomputed_values"]

# operands that are only added, although their op is linear in nothing that it says
_ADDED = {"norm": "bias?"}


def read_in_backward(program: Program, op: Op) -> set[str]:
    """Operands, values and parameters by local name, on whose numbers the op's cotangents depend.

    A cotangent of what an op is linear in does not depend on anything that it is linear in together with it.
    """
    roles = dict(_roles(op))
    varied = [name for name in roles if name in op.params or name in program.differentiated]
    if not any(name in program.differentiated for name in roles):
        varied = [name for name in varied if name in op.params]
    read: set[str] = set()
    for name in varied:
        together = {role for group in KINDS[op.kind].linear if roles[name] in group for role in group}
        read |= {other for other, role in roles.items() if role not in together}
    return {name for name in read if roles[name] != _ADDED.get(op.kind)}


def _roles(op: Op) -> Iterator[tuple[str, str]]:
    """Operands that are there, with the kind's names for them."""
    kind = KINDS[op.kind]
    for operands, names in ((op.inputs, kind.inputs), (op.params, kind.params)):
        each = len(operands) // len(names) if any(name.endswith("*") for name in names) else 1
        for i, operand in enumerate(operands):
            if operand is not None:
                yield operand, names[i // each]


def recomputed_values(program: Program) -> set[str]:
    """Values and parameters that a backward pass needs again if only the program's inputs were kept."""
    needed: set[str] = set()
    for op in reversed(program.ops):
        needed |= read_in_backward(program, op)
        if needed.intersection(op.outputs):
            needed.update(name for name in (*op.inputs, *op.params) if name is not None)
    return needed
