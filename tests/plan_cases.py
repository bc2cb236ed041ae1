"""The model, the batches and the one-rank reference that plans are compared on. Imports no framework."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from adamw import adamw_steps
from sharding_cases import NORM, WIDE, Array, batches, params_of
from spec_cases import attention, model

from duomesh.core.batch import Batch
from duomesh.core.dropout import DropoutKey
from duomesh.core.ir.build import build_program
from duomesh.core.session import AdamW
from duomesh.core.spec.model import ModelSpec
from duomesh.kernels.reference.model import ReferenceModel

CONFIG = AdamW(max_grad_norm=0.25)
LR, STEPS, SEQ, VOCAB = 0.01, 3, 16, 37


def plan_model(*, ties: bool = False, dropout: bool = False, over: str = "head", repeats: int = 1) -> ModelSpec:
    """Everything that a plan can get wrong: two kv heads (copies at tp=4), biases, q/k norms, post norms, caps, an odd
    vocabulary; and a plain layer. repeats: of the two layers."""
    heads: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2}
    rich = replace(
        attention(**heads, q_bias=True, k_bias=True, v_bias=True, o_bias=True, qk_norm=NORM, qk_norm_over=over),
        mlp=replace(WIDE, ffn_size=24, up_bias=True, down_bias=True),
        attention_post_norm=NORM,
    )
    plain = replace(attention(**heads, window=5), mlp=replace(WIDE, ffn_size=24))
    return model(
        *[rich, plain] * repeats,
        vocab_size=VOCAB,
        hidden_size=16,
        tie_embeddings=ties,
        dropout=0.1 if dropout else 0.0,
        logit_softcap=4.0,
        embedding_scale=3.0,
    )


def plan_batches(micro_batches: int) -> list[Batch]:
    """4 samples in each, with unequal numbers of targets, and one without any."""
    made = batches(VOCAB, SEQ)[:micro_batches]
    return [replace(batch, sample_ids=np.arange(4, dtype=np.int64) + 4 * i) for i, batch in enumerate(made)]


def reference_steps(spec: ModelSpec, micro_batches: int) -> tuple[float, dict[str, Array], list[Any], dict[str, Array]]:
    """Loss and gradients of a step, (loss, norm) of three updates and parameters after them, of one rank in numpy."""
    program, data = build_program(spec), plan_batches(micro_batches)
    params = params_of(program)

    def pull(now: dict[str, Array], step: int) -> tuple[float, dict[str, Array]]:
        key = DropoutKey(7, step) if spec.dropout else None
        return ReferenceModel(program, now).loss_and_grads(data, key)

    after, history = adamw_steps(program, params, pull, CONFIG, LR, STEPS)
    return *pull(params, 0), history, after
