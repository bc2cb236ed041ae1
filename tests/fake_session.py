"""A session without a framework: a bigram model in numpy, exact enough to ask for bit equality.

logits[t] = head.weight @ embed.weight[t]; the model's other parameters exist, get zero gradients and decay. AdamW is
written from its formula, in the run's wide dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from duomesh.core.arrays import DTYPES, Array
from duomesh.core.batch import Batch, num_targets
from duomesh.core.boxes import Box, Sliceable, whole
from duomesh.core.dropout import DropoutKey
from duomesh.core.errors import BackendError
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.session import STATE_GROUPS, AdamW, ComputeDType, StateLoader, StepResult, Trace, whole_boxes
from duomesh.core.spec.model import AttentionSpec, BlockSpec, MlpSpec, ModelSpec, NormSpec

__all__ = ["FakeSession", "tiny_spec"]


def tiny_spec(vocab_size: int = 259, hidden_size: int = 6, num_layers: int = 1) -> ModelSpec:
    """A model small enough to write a checkpoint of in a millisecond."""
    norm = NormSpec(eps=1e-6)
    block = BlockSpec(
        attention=AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, rope=None),
        mlp=MlpSpec(ffn_size=4, activation="silu", is_gated=True),
        attention_norm=norm,
        mlp_norm=norm,
    )
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        blocks=(block,) * num_layers,
        final_norm=norm,
        tie_embeddings=False,
        max_positions=64,
    )


class FakeSession:
    """A bigram model under the names of a real one.

    Args:
        nan_in: canonical name of a parameter whose gradient is spoiled, in the steps of `nan_at`.
        nan_at: calls of `train_step`, counted from 1, that are spoiled.
        nan_tokens: a batch with one of these tokens has a loss that is not finite.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        compute_dtype: ComputeDType = "float64",
        seed: int = 0,
        nan_in: str = "embed.weight",
        nan_at: Sequence[int] = (),
        nan_tokens: Sequence[int] = (),
    ) -> None:
        self.program, self.plan = build_program(spec), Plan()
        self.compute_dtype = compute_dtype
        self.wide = DTYPES["float64" if compute_dtype == "float64" else "float32"]
        self.master = {n: a.astype(self.wide) for n, a in initial_params(self.program, seed)}
        self.moments: tuple[dict[str, Array], dict[str, Array]] = ({}, {})
        self.config: AdamW | None = None
        self.count = self.calls = 0
        self.nan_in, self.nan_at, self.nan_tokens = nan_in, tuple(nan_at), tuple(nan_tokens)
        self.seen: list[list[Batch]] = []  # the batches of every train_step
        self.keys: list[DropoutKey | None] = []  # and what it was to draw masks for

    def _rounded(self, name: str) -> Array:
        return self.master[name].astype(DTYPES[self.compute_dtype])

    def params(self) -> Iterator[tuple[str, Array]]:
        yield from ((name, self._rounded(name)) for name in self.program.params)

    def load_params(self, params: Iterable[tuple[str, Sliceable]]) -> None:
        loader = StateLoader(self.program, ("params",))
        for name, tensor in params:
            loader.check("params", name, tensor.shape)
            array = whole(tensor)
            self.master[name] = array.astype(DTYPES[self.compute_dtype]).astype(self.wide)
        loader.finish()
        self.config = None

    def _loss_sum(self, batch: Batch, grads: dict[str, Array] | None) -> float:
        """Weighted sum of target losses; its gradients are added to `grads`."""
        batch.check_vocabulary(self.program.spec.vocab_size)
        embed, head = (self._rounded(n).astype(np.float64) for n in ("embed.weight", "head.weight"))
        tokens, weights = batch.tokens.reshape(-1), batch.weights.reshape(-1).astype(np.float64)
        labels = np.where(batch.labels < 0, 0, batch.labels).reshape(-1)
        logits = embed[tokens] @ head.T
        logits -= logits.max(-1, keepdims=True)
        probs = np.exp(logits)
        sums = probs.sum(-1, keepdims=True)
        rows = np.arange(len(tokens))
        loss = float(((np.log(sums[:, 0]) - logits[rows, labels]) * weights).sum())
        if grads is not None:
            delta = probs / sums
            delta[rows, labels] -= 1
            delta *= weights[:, None]
            np.add.at(grads["embed.weight"], tokens, delta @ head)
            grads["head.weight"] += delta.T @ embed[tokens]
        return math.nan if np.isin(batch.tokens, self.nan_tokens).any() else loss

    def loss_and_grads(
        self, batches: Sequence[Batch], *, dropout: DropoutKey | None = None
    ) -> tuple[float, dict[str, Array]]:
        grads = {name: np.zeros(param.shape) for name, param in self.program.params.items()}
        denominator = num_targets(batches)
        loss = sum(self._loss_sum(batch, grads) for batch in batches) / denominator
        if self.calls in self.nan_at or not math.isfinite(loss):
            grads[self.nan_in].reshape(-1)[1] = math.nan
        return loss, {name: (grad / denominator).astype(self.wide) for name, grad in grads.items()}

    def trace(self, batch: Batch, *, grads: bool) -> Trace:
        loss, found = self.loss_and_grads([batch])
        return Trace({}, loss, found if grads else {})

    def eval_loss(self, batch: Batch) -> tuple[float, float]:
        return self._loss_sum(batch, None), num_targets([batch])

    def check_invariants(self, batch: Batch) -> None:
        """Nothing to compare."""

    def logits(self, tokens: Array) -> Array:
        return np.asarray(self._rounded("embed.weight")[tokens] @ self._rounded("head.weight").T)

    def init_optimizer(self, config: AdamW, params: Iterable[tuple[str, Sliceable]] | None = None) -> None:
        if params is not None:
            loader = StateLoader(self.program, ("params",))
            for name, tensor in params:
                loader.check("params", name, tensor.shape)
                self.master[name] = whole(tensor).astype(self.wide)
            loader.finish()
        self.config, self.count = config, 0
        self.moments = tuple({n: np.zeros_like(a) for n, a in self.master.items()} for _ in range(2))  # type: ignore

    def train_step(self, batches: Sequence[Batch], lr: float, *, dropout: DropoutKey | None = None) -> StepResult:
        self.calls += 1
        self.seen.append(list(batches))
        self.keys.append(dropout)
        assert self.config is not None
        c, denominator = self.config, num_targets(batches)
        if denominator == 0:
            return StepResult(0.0, 0.0, 0.0, is_skipped=True)
        loss, grads = self.loss_and_grads(batches)
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values()))
        if not math.isfinite(loss + norm):
            return StepResult(loss, norm, denominator, is_skipped=True)
        scale = 1.0 if c.max_grad_norm is None else min(1.0, c.max_grad_norm / norm)
        self.count += 1
        m, v = self.moments
        for name, param in self.program.params.items():
            g, w = grads[name] * self.wide.type(scale), self.master[name]
            m[name] = c.beta1 * m[name] + (1 - c.beta1) * g
            v[name] = c.beta2 * v[name] + (1 - c.beta2) * g * g
            update = m[name] / (1 - c.beta1**self.count)
            update = update / (np.sqrt(v[name] / (1 - c.beta2**self.count)) + c.eps)
            self.master[name] = w - lr * (update + (c.weight_decay * w if param.is_decayed else 0))
        return StepResult(loss, norm, denominator)

    def optimizer_step_count(self) -> int:
        return self.count

    def optimizer_state(self) -> Iterator[tuple[str, str, Array]]:
        if self.config is None:
            raise BackendError("no optimizer")
        for group, arrays in zip(STATE_GROUPS, (self.master, *self.moments), strict=True):
            yield from ((group, name, arrays[name]) for name in self.program.params)

    def owned_boxes(self) -> Mapping[str, Sequence[Box]]:
        return whole_boxes(self.program)

    def owned_state(self) -> Iterator[tuple[str, str, Array]]:
        return self.optimizer_state()

    def load_optimizer_state(self, config: AdamW, step_count: int, state: Iterable[tuple[str, str, Sliceable]]) -> None:
        self.init_optimizer(config)
        self.count = step_count
        groups = dict(zip(STATE_GROUPS, (self.master, *self.moments), strict=True))
        loader = StateLoader(self.program)
        for group, name, tensor in state:
            loader.check(group, name, tensor.shape)
            array = whole(tensor)
            assert array.dtype == self.wide, (group, name, array.dtype)
            groups[group][name] = array
        loader.finish()
