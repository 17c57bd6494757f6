"""Where steps are taken, and the other work (text encoding, decoding).

On a CPU both run in `Lanes`: threads that share the cores among them, so that several sizes step at once and
nothing takes more threads than there are cores. On an accelerator steps are taken by the engine's own thread,
and the rest runs in another, on a stream of its own, so that steps go on meanwhile. Two streams share memory:
what one makes is handed on when it is made (`settle`), its memory when both are through with it (`taken`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from darkroom.hardware import accelerator

Task = Callable[[], None]
AHEAD = 2
"""Steps on their way to a card: one that it computes, one to go on with."""


class DeviceEvent(Protocol):
    """A mark in a device's stream of work."""

    def record(self) -> None:
        """Set it behind what has been launched."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""


class Aside(Protocol):
    """Runs tasks one after the other. A task must not raise."""

    @property
    def busy(self) -> bool:
        """Whether a task is waiting or under way."""

    def put(self, task: Task) -> None:
        """Run it, now or soon."""

    def settle(self) -> None:
        """Called by a task before others may take what it made: returns when the device has made it."""

    def taken(self, tensors: Iterable[torch.Tensor]) -> None:
        """Called by the thread of the steps when it takes over tensors that a task made."""

    def close(self, within_s: float = 10.0) -> bool:
        """Run nothing more; whether what was under way has ended."""


class Steps(Protocol):
    """Runs steps, several at once if it can. A task must not raise."""

    on_free: Callable[[], None]
    """Called when one that was not run at once is over."""

    @property
    def free(self) -> int:
        """How many more could run now."""

    def put(self, task: Task) -> None:
        """Run it, now or soon."""

    def pace(self) -> None:
        """Called by a step once it is launched: returns when so much is done that it may be counted."""

    def close(self, within_s: float = 10.0) -> bool:
        """Run nothing more; whether what was under way has ended."""


class Between:
    """At once, in the thread that asks."""

    busy = False
    free = 1
    on_free: Callable[[], None] = staticmethod(lambda: None)

    def put(self, task: Task) -> None:
        """Run it now."""
        task()

    def pace(self) -> None:
        """A step is over when its call returns."""

    def settle(self) -> None:
        """What follows comes after it."""

    def taken(self, tensors: Iterable[torch.Tensor]) -> None:
        """There is one stream."""

    def close(self, within_s: float = 10.0) -> bool:
        """Nothing is held."""
        return True


class Paced(Between):
    """At once, with at most `AHEAD` steps launched that the device has not finished.

    Without it a thread launches a job's steps long before they are computed: what a step takes and costs, how
    long others wait and how soon a cancelled job leaves would all rest on the time of launching. Only the
    thread that launches waits, and the device always has a step to go on with.
    """

    def __init__(self, event: Callable[[], DeviceEvent]) -> None:
        self._event = event
        self._ahead: deque[DeviceEvent] = deque()

    def pace(self) -> None:
        """Wait until all but the latest steps are done: from one call to the next passes a step's time."""
        event = self._event()
        event.record()
        self._ahead.append(event)
        while len(self._ahead) >= AHEAD:
            self._ahead.popleft().synchronize()


class Lanes:
    """Threads for steps, each with so many threads of its own within an operation."""

    def __init__(self, count: int, threads: int) -> None:
        self.count = count
        self.on_free: Callable[[], None] = lambda: None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._taken = 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(threads,), name=f"darkroom-lane-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def free(self) -> int:
        """How many more could run now."""
        return max(0, self.count - self._taken)

    def pace(self) -> None:
        """A step is over when its call returns."""

    def put(self, task: Task) -> None:
        """Run it in the next lane that is free."""
        with self._lock:
            self._taken += 1
        self._tasks.put(task)

    def close(self, within_s: float = 10.0) -> bool:
        """Run nothing more; whether what was under way has ended."""
        end_s = time.monotonic() + within_s
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(timeout=max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        while (task := self._tasks.get()) is not None:
            try:
                task()
            finally:
                with self._lock:
                    self._taken -= 1
            self.on_free()


class Among:
    """In the lanes, one task after the other: each before the steps that are not yet begun."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._tasks: deque[Task] = deque()
        self._running = False
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a task is waiting or under way."""
        return self._running

    def put(self, task: Task) -> None:
        """Run it after those before it."""
        with self._lock:
            self._tasks.append(task)
            if self._running:
                return
            self._running = True
        self._lanes.put(self._next)

    def settle(self) -> None:
        """What a CPU has returned is made."""

    def taken(self, tensors: Iterable[torch.Tensor]) -> None:
        """Main memory knows no streams."""

    def close(self, within_s: float = 10.0) -> bool:
        """The lanes end it."""
        return True

    def _next(self) -> None:
        try:
            self._tasks.popleft()()
        finally:
            with self._lock:
                self._running = bool(self._tasks)
            if self._running:
                self._lanes.put(self._next)


class Beside:
    """In a thread, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = accelerator.new_stream(device)
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

    def settle(self) -> None:
        """Steps run on another stream: without this they would read a text that is still being encoded."""
        if self._stream is not None:
            self._stream.synchronize()

    def taken(self, tensors: Iterable[torch.Tensor]) -> None:
        """They are of this stream's memory, and steps that read them are launched ahead."""
        accelerator.used_here(*tensors)

    def close(self, within_s: float = 10.0) -> bool:
        """Run nothing more; whether what was under way has ended."""
        self._tasks.put(None)
        self._thread.join(timeout=within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            with accelerator.on_stream(self._stream):
                task()
            with self._lock:
                self._waiting -= 1


def places_for(device: torch.device, lanes: int, threads: int, *, apart: bool = True) -> tuple[Steps, Aside]:
    """Where to take steps, and where to do the other work; `lanes` and `threads` are of a CPU.

    Unless `apart`, the engine's thread does both: where one part's weights are released for another's. And on
    accelerators of one stream: Metal ends a process whose threads both call it (pytorch issue 197805).
    """
    if device.type == "cpu":
        steps = Lanes(lanes, threads)
        return steps, Among(steps)
    if not accelerator.kind_of(device).streams:
        return Between(), Between()
    return Paced(lambda: accelerator.new_event(device)), Beside(device) if apart else Between()
