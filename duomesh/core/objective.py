"""The loss of a step: a sum of terms, each over micro-batches and with a denominator of its own.

    loss = sum over micro-batches m, terms t and the layers that make t of seed[m][t] * (the term's scalar in m)

What a scalar is multiplied by, its *seed*, is known before the first forward pass, and is the cotangent with which the
scalar starts the backward pass. So gradients of micro-batches are summed and never averaged.

- `loss_sum`, the weighted sum of token losses: 1 / the weight of all targets of the step. However a step is cut, a
  target weighs the same.
- a term of `ModelProgram.terms`: coefficient / (T_m^(power - 1) * T), with T_m the tokens of the micro-batch and T
  those of the step. Of power 1 it is a mean over all tokens of the step. Of power 2 it is not linear in the batch: it
  is the mean of the micro-batches' own values, each weighing as many tokens as it has, so that it depends on how a
  step is cut.

All tokens count here, with a target or without: routers see all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from duomesh.core.batch import Batch, num_targets
from duomesh.core.ir.program import ModelProgram

__all__ = ["LOSS", "term_seeds"]

LOSS = ("loss", "loss_sum")


def term_seeds(program: ModelProgram, batches: Sequence[Batch]) -> list[dict[tuple[str, str], float]]:
    """The seed of every scalar of the loss, by (program name, output name), for each micro-batch of a step.

    A step without targets has a seed of 0 for `LOSS`, and its other terms still count.

    Raises DataError if there is no batch.
    """
    targets = num_targets(batches)
    tokens = sum(batch.tokens.size for batch in batches)
    out = []
    for batch in batches:
        seeds = {LOSS: 1.0 / targets if targets else 0.0}
        for term in program.terms:
            seeds[term.program, term.output] = term.coefficient / (batch.tokens.size ** (term.power - 1) * tokens)
        out.append(seeds)
    return out
