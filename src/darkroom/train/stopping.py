"""Asking a job to stop: Ctrl-C, SIGTERM, or an event where signals do not come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from darkroom.hardware.system import on_stop_signal

STOP = threading.Event()  # asks for a stop where signals do not come: training in a thread


class StopRequest:
    """Whether Ctrl-C or SIGTERM came. A second one ends the process; `kept` says what is left then."""

    def __init__(self, kept: Callable[[], str]) -> None:
        self._noted, self._kept = False, kept

    @property
    def asked(self) -> bool:
        """Whether one came, or `STOP` was set."""
        return self._noted or STOP.is_set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the signals instead of dying of them; in another thread than the main one nothing is done."""
        with on_stop_signal(self._note, once=True, kept=self._kept):
            yield

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
