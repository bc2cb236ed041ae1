"""The training loop. It drives any backend through `core.session.Session` and knows nothing else of it.

On several ranks all run it, and go through the same steps.

Progress is counted in samples and steps. A step is one call of the optimizer over `global_batch_size` samples,
however many micro-batches they are cut into. A skipped step (no target, or a gradient that is not finite) changes
no weight and no moment; it does consume its samples and its place in the learning-rate schedule.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from duomesh.core.activity import doing, each
from duomesh.core.batch import Batch
from duomesh.core.checkpoint import TrainingState, checkpoint_path, find_fault, keep_last, write_checkpoint
from duomesh.core.data.sampler import Sampler
from duomesh.core.dropout import DropoutKey
from duomesh.core.errors import DuomeshWarning, TrainingError
from duomesh.core.peers import ALONE, Peers, together
from duomesh.core.session import Session, StepResult
from duomesh.core.spec.codec import encode
from duomesh.core.training.config import TrainConfig
from duomesh.core.training.interrupt import Interrupt
from duomesh.core.training.metrics import CheckpointRow, Row, StepRow, ValidationRow
from duomesh.core.training.resume import checkpoints_in
from duomesh.core.training.schedule import learning_rate

__all__ = ["Progress", "TrainingData", "evaluate", "train"]

_REMOVING_S = 300.0  # a limit on the removal of old checkpoints, however large they are


@dataclass(frozen=True)
class TrainingData:
    """Samples to train on, samples to validate on if there are any, and which text they are."""

    train: Sampler
    validation: Sampler | None
    fingerprint: str


@dataclass(frozen=True)
class Progress:
    """How far a run is. Skipped steps are part of `step`."""

    step: int = 0
    num_skipped: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0

    def after(self, result: StepResult, batches: Sequence[Batch]) -> Progress:
        return Progress(
            self.step + 1,
            self.num_skipped + result.is_skipped,
            self.consumed_samples + sum(len(batch.tokens) for batch in batches),
            self.consumed_tokens + sum(batch.tokens.size for batch in batches),
        )


def train(
    session: Session,
    data: TrainingData,
    config: TrainConfig,
    progress: Progress,
    log: Callable[[Row], None],
    interrupt: Interrupt,
    peers: Peers = ALONE,
) -> Progress:
    """Trains until the last step, `train.stop_step`, or an interrupt, and leaves a checkpoint of where it ended.

    Args:
        session: holds weights and optimizer state that belong to `progress`.
        log: receives every row of the record.
        interrupt: of this rank; an interrupt of any rank stops all.
        peers: the ranks that train.

    Returns:
        The progress made.

    Raises:
        TrainingError: `train.max_skipped` steps were skipped in a row.
        OutputError: a checkpoint cannot be written.
        BackendError: ranks hold different values where the plan has equal ones (`train.check_invariants_every`).
    """
    run = config.train
    last_step = run.stop_step or run.steps
    saved_step, skipped_in_a_row = progress.step, 0

    while progress.step < last_step and not _is_interrupted(interrupt, peers):
        step = progress.step + 1
        is_last = step == last_step
        with doing(f"step {step}"):
            batches, result = _step(session, data, config, progress, log)
            skipped_in_a_row = skipped_in_a_row + 1 if result.is_skipped else 0
            if skipped_in_a_row == run.max_skipped:
                ids = data.train.sample_ids(progress.consumed_samples, run.global_batch_size)
                raise TrainingError(
                    _explain_skips(session, batches, ids.tolist(), DropoutKey(run.seed, step), skipped_in_a_row)
                )
            progress = progress.after(result, batches)
            if _is_due(step, run.check_invariants_every):
                session.check_invariants(batches[0])
            if data.validation is not None and (is_last or _is_due(step, run.eval_every)):
                log(evaluate(session, data.validation, run.evaluated_samples, run.samples_of_a_pass, step))
            if is_last or _is_due(step, run.checkpoint_every):
                log(_save(session, data, config, progress, peers))
                saved_step = step

    if progress.step > saved_step:
        log(_save(session, data, config, progress, peers))
    return progress


def _step(
    session: Session, data: TrainingData, config: TrainConfig, progress: Progress, log: Callable[[Row], None]
) -> tuple[list[Batch], StepResult]:
    """The next step, from its data to its row of the record."""
    began = time.perf_counter()
    run, step = config.train, progress.step + 1
    with doing(f"step {step}, data"):
        batches = data.train.batches(progress.consumed_samples, run.global_batch_size, run.samples_of_a_pass)
    rate = learning_rate(step, run.steps, config.optimizer)
    result = session.train_step(batches, rate, dropout=DropoutKey(run.seed, step))
    log(_step_row(step, rate, result, batches, time.perf_counter() - began, run.backend))
    return batches, result


def _is_interrupted(interrupt: Interrupt, peers: Peers) -> bool:
    """Whether any rank was; each then has the signal. Signals reach ranks at different steps, if at all."""
    signals = [int(text) for text in peers.exchange(str(interrupt.signal or "")) if text]
    if signals:
        interrupt.signal = signals[0]
    return bool(signals)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _step_row(
    step: int, rate: float, result: StepResult, batches: Sequence[Batch], seconds: float, backend: str
) -> StepRow:
    tokens = sum(batch.tokens.size for batch in batches)
    return StepRow(
        step=step,
        time=time.time(),
        loss=result.loss,
        lr=rate,
        grad_norm=result.grad_norm,
        tokens=tokens,
        tokens_per_s=tokens / max(seconds, 1e-9),
        step_s=seconds,
        backend=backend,
        is_skipped=result.is_skipped,
    )


def evaluate(
    session: Session, samples: Sampler, num_samples: int | None, samples_of_a_pass: int, step: int = 0
) -> ValidationRow:
    """The mean loss over all targets of the first `num_samples` samples, None for the whole set.

    Sums and counts are added up before dividing, so a ragged last pass weighs what it holds. It is filled up with
    rows without targets: a shape that occurs once would be compiled for one use.

    Warns:
        DuomeshWarning: there is no target; the loss is 0.
    """
    count = samples.num_samples if num_samples is None else min(samples.num_samples, num_samples)
    loss_sum = weight_sum = 0.0
    for first in range(0, count, samples_of_a_pass):
        ids = samples.sample_ids(first, min(samples_of_a_pass, count - first))
        batch_loss, weight = session.eval_loss(samples.batch(ids, rows=samples_of_a_pass))
        loss_sum, weight_sum = loss_sum + batch_loss, weight_sum + weight
    if weight_sum == 0:
        warnings.warn(
            f"validation after step {step} has no targets: no token of its {count} samples counts.",
            DuomeshWarning,
            stacklevel=2,
        )
    return ValidationRow(
        step=step,
        time=time.time(),
        loss=loss_sum / (weight_sum or 1.0),
        samples=count,
        tokens=count * samples.seq_len,
        targets=weight_sum,
    )


def _save(session: Session, data: TrainingData, config: TrainConfig, progress: Progress, peers: Peers) -> CheckpointRow:
    """Publishes a checkpoint, then removes those beyond `train.keep`."""
    began = time.perf_counter()
    root = checkpoints_in(config.train.output)
    target = checkpoint_path(root, progress.step)
    state = TrainingState(
        step=progress.step,
        optimizer_step_count=session.optimizer_step_count(),
        num_skipped=progress.num_skipped,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_tokens,
        data_fingerprint=data.fingerprint,
        data_seed=config.data.seed,
        model_seed=config.train.seed,
        compute_dtype=session.compute_dtype,
        optimizer=config.optimizer.adamw,
    )
    saving = f"step {progress.step}, saving"
    with doing(saving):
        write_checkpoint(
            target,
            session.program.spec,
            each(saving, session.owned_state()),
            boxes=session.owned_boxes(),
            peers=peers,
            training=state,
            config=encode(config),
            written_by=config.train.backend,
            plan=str(session.plan),
            # a damaged one of the same step, which the resume passed over, is replaced
            overwrite=peers.rank == 0 and target.exists() and find_fault(target) is not None,
        )
    with doing(f"step {progress.step}, removing old checkpoints", stall_s=_REMOVING_S):
        together(peers, lambda: keep_last(root, config.train.keep) if peers.rank == 0 else [])
    return CheckpointRow(step=progress.step, time=time.time(), path=str(target), seconds=time.perf_counter() - began)


def _explain_skips(
    session: Session, batches: Sequence[Batch], sample_ids: list[int], key: DropoutKey, count: int
) -> str:
    """Looks for the culprit: the samples whose loss is not finite, and the first parameter whose gradient is not."""
    rows = len(batches[0].tokens)
    bad = [
        sample_ids[i * rows : (i + 1) * rows]
        for i, batch in enumerate(batches)
        if not math.isfinite(session.eval_loss(batch)[0])
    ]
    ids = [i for group in bad for i in group] or sample_ids
    if not any(batch.weights.any() for batch in batches):
        reason = "no sample has a target"
    else:
        _, grads = session.loss_and_grads(batches, dropout=key)
        names = [name for name, grad in grads.items() if not math.isfinite(float(abs(grad.astype("float64")).max()))]
        what = f"the gradient of {names[0]} and of {len(names) - 1} more" if names else "the gradient's global norm"
        reason = f"{what} is not finite" + (", nor is the loss of these samples" if bad else "")
    return (
        f"{count} steps in a row were skipped, up to step {key.step}: {reason} (samples {', '.join(map(str, ids))}). "
        "Weights are as they were before. Lower optimizer.lr, lengthen the warm-up, or look at these samples."
    )
