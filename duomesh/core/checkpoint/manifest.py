"""manifest.json: what a checkpoint holds, as frozen dataclasses and strict JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duomesh.core.boxes import Box
from duomesh.core.errors import CheckpointError
from duomesh.core.session import AdamW, ComputeDType
from duomesh.core.spec.codec import decode, encode
from duomesh.core.spec.model import ModelSpec
from duomesh.core.spec.serialize import spec_from_dict, spec_to_dict

__all__ = ["MANIFEST", "Manifest", "Shard", "StoredTensor", "TrainingState", "read_manifest"]

MANIFEST = "manifest.json"
_FORMAT = "duomesh-checkpoint"
_VERSION = 2  # 1 had no slices under keys of their own
_READABLE = (1, 2)


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The progress of a run; together with the tensors it is all that a resume needs.

    step: steps made, skipped ones included. optimizer_step_count: updates made (the t of AdamW).
    consumed_samples: place in the endless sequence of samples, which `data_fingerprint` identifies.
    """

    step: int
    optimizer_step_count: int
    num_skipped: int
    consumed_samples: int
    consumed_tokens: int
    data_fingerprint: str
    data_seed: int
    model_seed: int
    compute_dtype: ComputeDType
    optimizer: AdamW


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A slice of a tensor in one file: its place in the global tensor, its shape and the blake2b of its bytes.

    key: its name in the file; None for that of the tensor.
    """

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: str
    key: str | None = None

    @property
    def box(self) -> Box:
        return tuple((start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A global tensor and the slices that tile it."""

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file and its size, which tells a truncated copy from a whole one without reading it."""

    name: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything but the tensors' data.

    written_by: backend and library version, and plan: the plan that it ran, for people. training: None for weights
    without an optimizer.
    config: the effective configuration as JSON values, {} if there is none.
    """

    spec: ModelSpec
    written_by: str
    plan: str
    training: TrainingState | None
    config: dict[str, Any]
    files: tuple[StoredFile, ...]
    tensors: tuple[StoredTensor, ...]

    def to_json(self) -> str:
        """One line for each entry, and for each file and tensor: there may be many."""
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "written_by": self.written_by,
            "plan": self.plan,
            "training": encode(self.training),
            "config": self.config,
            "spec": spec_to_dict(self.spec),
            "files": encode(self.files),
            "tensors": encode(self.tensors),
        }
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in data.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError if the folder is no checkpoint of this format, or its manifest is damaged."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: cannot read {path}: {error.strerror}.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}. The checkpoint is damaged.") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise CheckpointError(f"{path} does not describe a duomesh checkpoint.")
    if data.get("version") not in _READABLE:
        known = " and ".join(map(str, _READABLE))
        raise CheckpointError(f"{path} has format version {data.get('version')!r}; this release reads {known}.")
    missing = [key for key in ("written_by", "training", "config", "spec", "files", "tensors") if key not in data]
    if missing or not isinstance(data["config"], dict):
        raise CheckpointError(f"{path} lacks a usable {(missing or ['config'])[0]!r}. The checkpoint is damaged.")
    training = data["training"]
    return Manifest(
        spec=spec_from_dict(data["spec"]),
        written_by=str(data["written_by"]),
        plan=str(data.get("plan", "")),
        training=None if training is None else _part(TrainingState, training, path, "training"),
        config=data["config"],
        files=_part(tuple[StoredFile, ...], data["files"], path, "files"),
        tensors=_part(tuple[StoredTensor, ...], data["tensors"], path, "tensors"),
    )


def _part(kind: Any, data: Any, path: Path, field: str) -> Any:
    return decode(kind, data, path=f"{path}: {field}", error=CheckpointError)
