"""What a backward pass reads of a forward one, as the IR says it.

That it is enough is shown where it is used: a JAX step that keeps no more traces just the listed collectives.
"""

from __future__ import annotations

import pytest
from plan_cases import plan_model

from duomesh.core.ir.backward import read_in_backward, recomputed_values
from duomesh.core.ir.build import build_program

PROGRAM = build_program(plan_model(dropout=True))
BLOCK = PROGRAM.blocks[0]
QKV = {f"attention.{name}.weight" for name in "qkv"}
DROPOUT = {"samples", "places", "dropout_key"}


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("attention.qkv", {"attention_norm", *QKV}),  # no bias
        ("attention_norm", {"x", "attention_norm.weight"}),
        ("attention_post_dropout", DROPOUT),  # the mask, not what it was laid on
        ("attention_residual", set()),
        ("attention.core", {"attention.q_rope", "attention.k_rope", "attention.v", "segment_ids"}),
        ("mlp.glu", {"mlp.gate", "mlp.up"}),
    ],
)
def test_operands_that_cotangents_depend_on(name: str, want: set[str]) -> None:
    assert read_in_backward(BLOCK, next(op for op in BLOCK.ops if op.name == name)) == want


def test_a_lookup_reads_its_ids_and_not_its_table() -> None:
    assert read_in_backward(PROGRAM.embed, PROGRAM.embed.ops[0]) == {"tokens"}


def test_a_layer_is_computed_again_up_to_its_last_linear() -> None:
    """Whose input and weight are read, and whose result is only added to the stream."""
    made = {name for op in BLOCK.ops for name in op.outputs}
    assert made - recomputed_values(BLOCK) == {"mlp.down", "mlp_post_dropout", "mlp_residual"}
    assert "mlp.down.bias" not in recomputed_values(BLOCK) and "mlp.up.bias" in recomputed_values(BLOCK)
