"""The record of a run: one JSON object a line, appended as things happen.

A run that resumes goes on in the same file: rows after the step that it resumes from are dropped first, so that
the file always holds one curve. Numbers that are not finite are written as null, because JSON has none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from duomesh.core.errors import OutputError
from duomesh.core.publish import publish_file

__all__ = ["CheckpointRow", "Metrics", "Row", "RunRow", "StepRow", "ValidationRow", "read_rows"]


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A command took up the run after `step` steps. plan: as `str(Plan)` writes it; empty for one device."""

    kind: ClassVar[str] = "run"
    step: int
    time: float  # seconds since 1970, as in every row
    backend: str
    dtype: str
    plan: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One optimizer step. loss is before its update, grad_norm before clipping; tokens are input tokens."""

    kind: ClassVar[str] = "step"
    step: int
    time: float
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    step_s: float
    backend: str
    is_skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class ValidationRow:
    """Mean loss over the targets of `samples` validation samples, after `step` steps.

    targets: their weight. Without any the loss is 0, which says nothing.
    """

    kind: ClassVar[str] = "validation"
    step: int
    time: float
    loss: float
    samples: int
    tokens: int
    targets: float


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """A checkpoint was published."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    time: float
    path: str
    seconds: float


Row = RunRow | StepRow | ValidationRow | CheckpointRow


class Metrics:
    """Appends rows to a file.

    Args:
        path: the file.
        resume_step: rows of later steps are dropped; 0 starts the file anew.

    Raises:
        OutputError: the file cannot be written.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = [row for row in read_rows(path) if row["step"] <= resume_step] if resume_step else []
        publish_file(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._path = path

    def write(self, row: Row) -> None:
        data = {"kind": row.kind, **vars(row)}
        data = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(data) + "\n")
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error.strerror}.") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that may not exist yet; a last line that was cut off by a kill is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
