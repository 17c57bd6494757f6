"""Work beside the steps (text encoding, decoding): between them on a CPU, in a thread of its own elsewhere.

On a CPU the cores are shared anyway: a second thread of tensor work makes both slower than one after the
other. On an accelerator it runs on a stream of its own, so that steps go on meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

Task = Callable[[], None]


class Aside(Protocol):
    """Runs tasks one after the other. A task must not raise."""

    @property
    def busy(self) -> bool:
        """Whether a task is waiting or under way."""

    def put(self, task: Task) -> None:
        """Run it, now or soon."""

    def close(self) -> None:
        """Run nothing more."""


class Between:
    """At once, in the thread that asks: between two steps."""

    busy = False

    def put(self, task: Task) -> None:
        """Run it now."""
        task()

    def close(self) -> None:
        """Nothing is held."""


class Beside:
    """In a thread and, on CUDA, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="darkroom-aside", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a task is waiting or under way."""
        return self._waiting > 0

    def put(self, task: Task) -> None:
        """Run it after those before it."""
        with self._lock:
            self._waiting += 1
        self._tasks.put(task)

    def close(self) -> None:
        """Run nothing more."""
        self._tasks.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        stream = _stream(self._device)
        while (task := self._tasks.get()) is not None:
            with _on(stream):
                task()
            with self._lock:
                self._waiting -= 1


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On a stream that has seen what the steps' stream did, and whose own work is done at the end."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.default_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def aside_for(device: torch.device) -> Aside:
    """What is best on a device."""
    return Between() if device.type == "cpu" else Beside(device)
