"""What a run begins with: settings, the checkpoint that it goes on from, and the model, checked on all ranks alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from duomesh.core.activity import doing
from duomesh.core.errors import CheckpointError, ConfigError
from duomesh.core.peers import ALONE, Peers, together
from duomesh.core.plan.validate import check
from duomesh.core.publish import check_place
from duomesh.core.spec.codec import encode
from duomesh.core.spec.model import ModelSpec
from duomesh.core.spec.serialize import spec_differences
from duomesh.core.training.config import TrainConfig
from duomesh.core.training.model import Model
from duomesh.core.training.resolve import Resolved, values_of
from duomesh.core.training.resume import Start, find_start

__all__ = ["Beginning", "FindModel", "begin"]

FindModel = Callable[[TrainConfig], Model]

# Settings that may differ between ranks: what counts is the text, which is compared.
_OF_A_RANK = ("data.paths",)


@dataclass(frozen=True)
class Beginning:
    """What a run begins with: its settings, the checkpoint that it goes on from, if any, and its model."""

    start: Start
    model: Model


def begin(resolved: Resolved, find_model: FindModel, peers: Peers = ALONE) -> Beginning:
    """Finds and checks everything that can be known before text is read, and leaves nothing behind.

    Raises:
        DuomeshError: a setting, the checkpoint, the model or the plan cannot be used; on several ranks, on all alike.
        ConfigError: ranks have different settings or models.
    """
    with doing("checking the settings"):
        _check_same(peers, "setting", {name: repr(value) for name, value in values_of(resolved.config).items()})
        start = find_start(resolved, peers)

        def find() -> Model:
            model = _find_model(start, find_model)
            check_place(Path(start.resolved.config.train.output) / "metrics")
            check(model.spec, start.resolved.config.train.full_plan, seq=start.resolved.config.data.seq_len)
            return model

        model = together(peers, find)
        _check_same(peers, "model", {"description": _digest(model.spec)})
        return Beginning(start, model)


def _digest(spec: ModelSpec) -> str:
    return hashlib.blake2b(json.dumps(encode(spec), sort_keys=True).encode(), digest_size=8).hexdigest()


def _check_same(peers: Peers, what: str, values: Mapping[str, str]) -> None:
    """Raises ConfigError, on every rank alike, if ranks have different ones."""
    mine = {name: value for name, value in values.items() if name not in _OF_A_RANK}
    everyone = [json.loads(text) for text in peers.exchange(json.dumps(mine))]
    for rank, values_there in enumerate(everyone):
        for name, value in values_there.items():
            first = everyone[0].get(name)
            if value != first:
                raise ConfigError(
                    f"rank {rank} has another {what} than rank 0: {name} is {value} there, and {first} on rank 0. "
                    "Give every rank the same."
                )


def _find_model(start: Start, find_model: FindModel) -> Model:
    """The configured model; at resume it must be that of the checkpoint, whose weights then count."""
    config, checkpoint = start.resolved.config, start.checkpoint
    if checkpoint is None:
        if config.model.preset is None and config.model.path is None:
            raise ConfigError("no model is named; set model.preset or model.path.")
        return find_model(config)
    if encode(config.model) != checkpoint.config.get("model"):
        differences = spec_differences(find_model(config).spec, checkpoint.spec)
        if differences:
            raise CheckpointError(
                f"the configured model is not that of {checkpoint.path}: {'; '.join(differences[:8])} "
                "(configured, checkpoint). A model cannot change at resume: restore [model], or start in another "
                "train.output."
            )
    return Model(checkpoint.spec)
