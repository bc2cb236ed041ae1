"""Ctrl-C and SIGTERM as requests that a loop honours where its state is consistent."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupt"]


class Interrupt:
    """While entered, the first SIGINT or SIGTERM only sets `signal`; a second one acts as it would without us.

    In a thread other than the main one nothing is caught, because Python delivers signals to the main one.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        print("\nstopping after this step, then saving; once more to stop at once", file=sys.stderr)
