"""What a run shows while it goes on: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from duomesh.core.training.config import RunConfig
from duomesh.core.training.metrics import CheckpointRow, Row, RunRow, StepRow, ValidationRow

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Console", "duration"]

_RECENT = 20  # steps that speed and the remaining time are taken from


def duration(seconds: float) -> str:
    """Seconds as 8s, 3m 20s, 2h 05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


class Console:
    """Notes and progress on a stream.

    Args:
        stream: where to write; None for standard output.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live: tuple[Progress, TaskID] | None = None
        self._recent: deque[StepRow] = deque(maxlen=_RECENT)
        self._validation = ""
        self._log_every = self._last_step = 1

    def note(self, text: str) -> None:
        """One line, above the live one if there is one."""
        if self._live:
            self._live[0].console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    @contextmanager
    def running(self, first_step: int, run: RunConfig) -> Iterator[None]:
        """Shows the steps of a run that has made `first_step` of them."""
        self._log_every, self._last_step = run.log_every, run.stop_step or run.steps
        if not self._stream.isatty():
            yield
            return
        with _progress(self._stream) as live:
            self._live = live, live.add_task("", total=self._last_step, completed=first_step, text="", eta="")
            try:
                yield
            finally:
                self._live = None

    def row(self, row: Row) -> None:
        if isinstance(row, StepRow):
            self._step(row)
        elif isinstance(row, ValidationRow) and not row.targets:
            self.note(f"step {row.step}: no targets in {row.samples:,} validation samples")
        elif isinstance(row, ValidationRow):
            self._validation = f"  val {row.loss:.4f}"
            self.note(f"step {row.step}: validation loss {row.loss:.4f} over {row.samples:,} samples")
        elif isinstance(row, CheckpointRow):
            self.note(f"step {row.step}: saved {row.path} in {duration(row.seconds)}")
        elif isinstance(row, RunRow) and row.step:
            self.note(f"resumed after step {row.step} on {row.backend} {row.plan}".rstrip())

    def _step(self, row: StepRow) -> None:
        if row.is_skipped:
            self.note(f"step {row.step}: skipped (loss {row.loss:.4g}, gradient norm {row.grad_norm:.4g})")
        self._recent.append(row)
        seconds = sum(r.step_s for r in self._recent)
        speed = sum(r.tokens for r in self._recent) / max(seconds, 1e-9)
        eta = duration(seconds / len(self._recent) * (self._last_step - row.step))
        text = f"loss {row.loss:.4f}{self._validation}  {speed:,.0f} tokens/s"
        if self._live:
            live, task = self._live
            live.update(task, completed=row.step, text=text, eta=f"ETA {eta}")
        elif row.step % self._log_every == 0 or row.step == self._last_step or len(self._recent) == 1:
            norm = f"norm {row.grad_norm:.3g}"
            self.note(f"step {row.step}/{self._last_step}  {text}  lr {row.lr:.3g}  {norm}  ETA {eta}")


def _progress(stream: TextIO) -> Progress:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TextColumn("[dim]{task.fields[eta]}"),
        console=RichConsole(file=stream),
        refresh_per_second=4,
        get_time=time.monotonic,
    )
