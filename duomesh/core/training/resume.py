"""What a run starts from, and what the settings of a checkpoint mean for the run that resumes from it.

The rule: a value given on the command line wins; a value that is given nowhere is taken from the checkpoint; a value
in the file that would change the course of the run is an error, because nobody can tell whether the change is meant.
The model can never change. The text may lie elsewhere, but must be the same text unless the command line says
otherwise. The length of the run may change, with a note of what it does to the learning rate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duomesh.core.checkpoint import Checkpoint, Found, TrainingState, find_latest
from duomesh.core.errors import CheckpointError
from duomesh.core.peers import ALONE, Peers, share, together
from duomesh.core.spec.codec import decode
from duomesh.core.training.config import TrainConfig
from duomesh.core.training.resolve import FIELDS, Resolved, Source, from_values, values_of
from duomesh.core.training.schedule import learning_rate

__all__ = ["Start", "check_data", "checkpoints_in", "find_start", "merge"]

# Belong to the place and the moment, not to the run: never taken from a checkpoint.
_LOCAL = {
    "train.output",
    "train.resume",
    "train.stop_step",
    "train.plan",
    "train.device",
    "train.stall_s",
    "train.log_every",
}

# May differ between the parts of one run without changing its course.
_FREE = _LOCAL | {
    "data.paths",  # what counts is the text, which `check_data` compares
    "data.patterns",
    "train.steps",
    "train.micro_batch_size",
    "train.eval_every",
    "train.eval_batches",
    "train.checkpoint_every",
    "train.keep",
    "train.check_invariants_every",
    "train.max_skipped",
    "train.backend",
    "train.compile",
    "train.remat",
}


@dataclass(frozen=True)
class Start:
    """What a run begins with: its settings, a checkpoint or None for a fresh start, and notes for the user."""

    resolved: Resolved
    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()


def checkpoints_in(output: Path | str) -> Path:
    """The folder of a run's checkpoints."""
    return Path(output) / "checkpoints"


def find_start(resolved: Resolved, peers: Peers = ALONE) -> Start:
    """Applies `train.resume`. A run never starts from scratch beside checkpoints, whole or broken.

    Rank 0 looks for the newest checkpoint; all ranks take that one.

    Raises:
        CheckpointError: there is nothing to resume from where there must be, or checkpoints where there must be none.
    """
    run = resolved.config.train
    root = checkpoints_in(run.output)
    found = _find_latest(root, peers)
    if found.latest is None and found.skipped:
        listed = "; ".join(f"{path.name}: {why}" for path, why in found.skipped)
        raise CheckpointError(
            f"{root} has only unfinished checkpoints ({listed}). Remove them to start anew, or choose another "
            "train.output."
        )
    if found.latest is None:
        if run.resume == "must":
            raise CheckpointError(
                f"train.resume is 'must', but {root} has no checkpoint. Check train.output, or use 'if_present'."
            )
        return Start(resolved)
    if run.resume == "never":
        raise CheckpointError(
            f"{root} has a checkpoint, {found.latest.name}. Go on from it with train.resume=must, or choose another "
            "train.output."
        )
    latest = found.latest
    checkpoint = together(peers, lambda: Checkpoint(latest))
    merged, notes = merge(resolved, checkpoint)
    skipped = [f"skipped {path.name}: {why}" for path, why in found.skipped]
    return Start(merged, checkpoint, (*skipped, *notes))


def _find_latest(root: Path, peers: Peers) -> Found:
    """What rank 0 finds; another rank might see a directory that is being published or removed."""

    def look() -> str:
        found = find_latest(root)
        return json.dumps([str(found.latest or ""), [(str(path), why) for path, why in found.skipped]])

    latest, skipped = json.loads(share(peers, str if peers.rank else look)[0])
    return Found(Path(latest) if latest else None, tuple((Path(path), why) for path, why in skipped))


def merge(resolved: Resolved, checkpoint: Checkpoint) -> tuple[Resolved, list[str]]:
    """The settings of a run that resumes, and notes about what changes.

    Raises:
        CheckpointError: the checkpoint cannot be resumed from; settings of the file differ from it, all listed.
    """
    state = checkpoint.training
    if state is None:
        raise CheckpointError(
            f"{checkpoint.path} holds weights without optimizer state. Start a new run with model.path instead."
        )
    values, sources = values_of(resolved.config), dict(resolved.sources)
    notes, conflicts = [], []
    saved = _saved_values(checkpoint)
    for name, old in saved.items():
        new = values[name]
        if new == old or name in _LOCAL or name.startswith("model."):
            continue  # the model is compared as a whole, see `run.py`
        if sources[name] == "default":
            values[name], sources[name] = old, "checkpoint"
        elif name in _FREE:
            continue
        elif sources[name] == "file" or name == "train.seed":
            conflicts.append(f"{name} is {_show(new)} in the {sources[name]} and {_show(old)} in the checkpoint")
        else:
            notes.append(f"{name} changes from {_show(old)} to {_show(new)}, as the command line says")
    if conflicts:
        raise CheckpointError(
            f"settings differ from those of {checkpoint.path}: {'; '.join(conflicts)}. Make the file agree, or give "
            "the new value on the command line to change it from here on (train.seed cannot change)."
        )
    _take_model(values, sources, saved)
    config = from_values(values)
    _check_dtype(config, state)
    notes += _rate_note(config, from_values({**values, **_only(saved, ("optimizer.", "train.steps"))}), state)
    return Resolved(config, sources), notes


def _saved_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Dotted name -> value; settings that this release does not have are left out."""
    tables = [(section, table) for section, table in checkpoint.config.items() if isinstance(table, dict)]
    raw = {f"{section}.{name}": value for section, table in tables for name, value in table.items()}
    where = f"{checkpoint.path}/manifest.json: config."
    return {
        name: decode(FIELDS[name], value, path=where + name, error=CheckpointError)
        for name, value in raw.items()
        if name in FIELDS
    }


def _take_model(values: dict[str, Any], sources: dict[str, Source], saved: Mapping[str, Any]) -> None:
    """A configuration that names no model means that of the checkpoint, whatever else it says of it."""
    if sources["model.preset"] == sources["model.path"] == "default":
        for name, value in saved.items():
            if name.startswith("model.") and sources[name] == "default" and value is not None:
                values[name], sources[name] = value, "checkpoint"


def _only(values: Mapping[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name.startswith(prefixes)}


def _check_dtype(config: TrainConfig, state: TrainingState) -> None:
    """bfloat16 and float32 runs have the same state; a float64 run has another."""
    if (config.train.dtype == "float64") != (state.compute_dtype == "float64"):
        raise CheckpointError(
            f"train.dtype={config.train.dtype} cannot resume a {state.compute_dtype} run: the optimizer state has "
            f"another width. Use train.dtype={state.compute_dtype}."
        )


def _rate_note(new: TrainConfig, old: TrainConfig, state: TrainingState) -> list[str]:
    step = state.step + 1
    rates = [learning_rate(step, config.train.steps, config.optimizer) for config in (old, new)]
    if new.train.steps == old.train.steps and rates[0] == rates[1]:
        return []
    length = f"train.steps changes from {old.train.steps} to {new.train.steps}: "
    return [
        f"{length if new.train.steps != old.train.steps else ''}the learning rate of step {step} is {rates[1]:.6g}, "
        f"with the old settings it would be {rates[0]:.6g}"
    ]


def check_data(start: Start, fingerprint: str) -> list[str]:
    """Compares the text with that of the checkpoint; a note if it was changed on the command line.

    Raises:
        CheckpointError: the text is another one, and the command line does not say so.
    """
    state = start.checkpoint.training if start.checkpoint else None
    if state is None or state.data_fingerprint == fingerprint:
        return []
    if any(source == "command line" for name, source in start.resolved.sources.items() if name.startswith("data.")):
        return ["the training text is not that of the checkpoint; the position in it is kept as a number of samples"]
    raise CheckpointError(
        "the training text has changed since the checkpoint was written, so its position means nothing. Restore the "
        "text, or give data.paths on the command line to go on with the new one."
    )


def _show(value: Any) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
