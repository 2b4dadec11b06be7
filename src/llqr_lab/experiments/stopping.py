"""Ctrl-C, and the signal by which machines ask a process to end: a run is saved after its step, and then ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StoppedError(Exception):
    """A run was asked to stop, and has saved where it was."""

    def __init__(self, step: int, steps: int, number: int) -> None:
        super().__init__(f"stopped after step {step:,} of {steps:,}, which is saved")
        self.number = number
        """Of the signal."""


@contextmanager
def listening() -> Iterator[Callable[[], int]]:
    """Gives the number of the signal that came, 0 without one. A second Ctrl-C ends at once, as if nobody listened."""
    came = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came = number

    if threading.current_thread() is not threading.main_thread():  # only that one may listen
        yield lambda: 0
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
