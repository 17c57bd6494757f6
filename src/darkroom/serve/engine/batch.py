"""Rows of one size in one U-Net call: packed anew when one comes or goes, apart when a step fails; and where
steps are taken, and the other work (text encoding, decoding).

On a CPU both run in `Lanes`: threads that share the cores among them, so that several sizes step at once and
nothing takes more threads than there are cores. On an accelerator steps are taken by the engine's own thread,
and the rest runs in another, on a stream of its own, so that steps go on meanwhile. Two streams share memory:
what one makes is handed on when it is made (`settle`), its memory when both are through with it (`taken`).
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from traceback import clear_frames
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from darkroom import sample
from darkroom.errors import is_out_of_memory
from darkroom.hardware import accelerator
from darkroom.models.adapters.bank import take_rows
from darkroom.sample.denoise import Unet
from darkroom.serve.engine.tickets import GLANCE, Ticket

if TYPE_CHECKING:
    from collections.abc import Hashable

# A device that answers with this is lost to the process.
DEVICE_LOST: type[BaseException] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)


@dataclass(repr=False)
class Stepped:
    """What a step did."""

    wall_s: float
    evaluations: float
    """Of the U-Net, with those of nets."""
    finished: list[Ticket] = field(default_factory=list)
    failed: list[tuple[Ticket, BaseException]] = field(default_factory=list)
    previews: list[tuple[Ticket, int, torch.Tensor]] = field(default_factory=list)
    """Ticket, which preview, and its latents as predicted [C, H, W]."""
    out_of_memory: bool = False
    rows: int = 0
    """That took it."""


def bucket_of(row: sample.Row) -> Hashable:
    """Rows of one bucket fit in one U-Net call."""
    return tuple(row.latents_CHW.shape), row.extra_CHW is None, tuple(sorted(row.positive.added))


LONG_STEP_S = 4.0
"""No more rows share a step than take so long: what is so slow gains little by it, and other sizes wait."""
RESTS = 4
"""Steps in a row that rows with nets or adapters sit out: whenever the rows change, they are packed anew."""
PAID = 1.25
"""So many times what they cost: plain rows also wait while something is prepared for them."""
LATEST = 16
"""Steps of one number of evaluations, and such numbers, that are remembered."""


class PlainTimes:
    """How long a step of plain rows of one size takes, by its evaluations, as measured lately."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}  # those of the number measured longest ago first

    def note(self, evaluations: int, wall_s: float) -> None:
        """A step without nets and adapters has taken so long."""
        some = self._seconds.pop(evaluations, None) or deque(maxlen=LATEST)
        some.append(wall_s)
        self._seconds[evaluations] = some
        while len(self._seconds) > LATEST:
            del self._seconds[next(iter(self._seconds))]

    def of(self, evaluations: int) -> float | None:
        """Seconds of a step, on a line through what was measured; None before the first."""
        if not self._seconds:
            return None
        known = list(self._seconds.items())
        counts, medians = [count for count, _ in known], [median(some) for _, some in known]
        slope, least = 0.0, 0.0
        if len(known) > 1:
            slope, least = np.polyfit(counts, medians, 1, w=[len(some) ** 0.5 for _, some in known])
        if slope <= 0 or least < 0:  # too few, or too different: in proportion
            slope, least = sum(medians) / sum(counts), 0.0
        return float(least + slope * evaluations)


class Toll:
    """Has rows with nets or adapters sit out as many steps as make up for what these cost the plain rows.

    A step takes longer for everyone by what nets and adapters of some compute. On a CPU, where a step takes
    less time with fewer rows, those rows pay for it: plain ones get on as if all were plain.
    """

    def __init__(self, times: PlainTimes) -> None:
        self.times = times
        self._owed_s = 0.0
        self._resting = False

    def stepped(self, tickets: list[Ticket]) -> list[Ticket]:
        """Those of the rows that take the next step: all of them, or the plain ones."""
        plain = [ticket for ticket in tickets if not _has_more(ticket)]
        if not plain or len(plain) == len(tickets):
            self._owed_s, self._resting = 0.0, False
            return tickets
        all_s, plain_s = (self.times.of(_evaluations(some)) for some in (tickets, plain))
        if all_s is None or plain_s is None:
            return plain
        spared_s = all_s - plain_s
        # A step that took long for another reason keeps nobody out for longer.
        self._owed_s = min(self._owed_s, 2 * RESTS * spared_s)
        # They pay in advance: plain rows may be through at any step.
        self._resting = self._owed_s > (-(RESTS - 1) * spared_s if self._resting else 0.0)
        return plain if self._resting else tickets

    def note(self, tickets: list[Ticket], now: list[Ticket], wall_s: float) -> None:
        """Of all these rows some took a step, together in so many seconds."""
        if not any(map(_has_more, now)):
            self.times.note(_evaluations(now), wall_s)
        all_s = self.times.of(_evaluations(tickets))
        if all_s is None:
            return
        if self._resting:
            self._owed_s -= max(0.0, all_s - wall_s)
        elif len(now) == len(tickets):
            self._owed_s += PAID * max(0.0, wall_s - all_s)

    def split(self) -> Toll:
        """That of half of the rows, with half of what is owed."""
        other = Toll(self.times)
        self._owed_s /= 2
        other._owed_s, other._resting = self._owed_s, self._resting
        return other

    def take(self, other: Toll) -> None:
        """Owe for another's rows too."""
        self._owed_s += other._owed_s


def _has_more(ticket: Ticket) -> bool:
    return ticket.row is not None and bool(ticket.row.adapters or ticket.row.controls)


def _evaluations(tickets: Iterable[Ticket]) -> int:
    return sum(ticket.shape.evaluations for ticket in tickets)


class Bucket:
    """The rows of one size on their way."""

    def __init__(
        self, had_s: float = 0.0, evaluation_s: float = 0.0, times: PlainTimes | None = None
    ) -> None:
        self.evaluation_s = evaluation_s
        """Of the U-Net for a row, by the latest step; before the first an estimate."""
        self.had_s = had_s
        """Seconds of steps that a row has had, from those of the size that had least when this one came. Who
        had least is next, so that a large size takes no more of the device than a small one."""
        self._toll = None if times is None else Toll(times)
        self.tickets: list[Ticket] = []
        self._batch: sample.RunningBatch | None = None
        self._packed: list[Ticket] = []
        self.meter_s = 0.0
        """Seconds that one evaluation a step has cost since the bucket was made."""

    def add(self, ticket: Ticket) -> None:
        """Add a prepared row to the running batch, for the next step."""
        self._unpack()
        ticket.meter_s = self.meter_s
        self.tickets.append(ticket)

    def drop_over(self) -> list[Ticket]:
        """Let go of the rows whose work is over."""
        gone = [ticket for ticket in self.tickets if ticket.work.over]
        if gone:
            self._leave(gone)
        return gone

    def split(self) -> Bucket:
        """Another bucket with half of the rows, for a step at the same time."""
        other = type(self)(self.had_s, self.evaluation_s)
        other._toll = None if self._toll is None else self._toll.split()
        moved = self.tickets[1::2]
        self._leave(moved)
        for ticket in moved:
            other.add(ticket)
        return other

    def take(self, other: Bucket) -> None:
        """Take over all rows of another bucket of this size."""
        self.had_s = max(self.had_s, other.had_s)
        if self._toll is not None and other._toll is not None:
            self._toll.take(other._toll)
        moved = list(other.tickets)
        other._leave(moved)
        for ticket in moved:
            self.add(ticket)

    def _leave(self, gone: Sequence[Ticket]) -> None:
        self._unpack()
        for ticket in gone:
            assert ticket.row is not None
            self.tickets.remove(ticket)
            ticket.work.device_s += (self.meter_s - ticket.meter_s) * ticket.work.shape.row_cost

    def _unpack(self) -> None:
        if self._batch is not None:
            self._batch.unpack()
        self._batch, self._packed = None, []

    def _next(self) -> list[Ticket]:
        """The tickets whose rows take the next step; those with adapters last (`RunningBatch`)."""
        now = list(self.tickets)
        if self._toll is not None:
            now = self._toll.stepped(now)
        costs_s = itertools.accumulate(ticket.shape.row_cost * self.evaluation_s for ticket in now)
        fits = max(1, sum(cost_s <= LONG_STEP_S for cost_s in costs_s))
        if fits < len(now):  # those left out are first next time
            now = now[:fits]
            self.tickets = [*(ticket for ticket in self.tickets if ticket not in now), *now]
        return sorted(now, key=lambda ticket: ticket.row is not None and bool(ticket.row.adapters))

    def step(self, unet: Unet, pace: Callable[[], None] = lambda: None) -> Stepped:
        """One step of the rows whose turn it is; `pace` waits for what is to be counted as its time. A
        failure is traced to its row by stepping each alone.
        """
        start = time.perf_counter()
        now = self._next()
        if now != self._packed:
            self._unpack()
        stepped = Stepped(0.0, sum(ticket.work.shape.row_cost for ticket in now), rows=len(now))
        failed = False
        try:
            self._together(unet, now, stepped)
            pace()
        except DEVICE_LOST as error:
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            failed = stepped.out_of_memory = True
        except Exception as error:
            failed, stepped.out_of_memory = True, is_out_of_memory(error)
        if failed:  # here, where the error no longer holds the step's tensors
            self._apart(unet, now, stepped)
        stepped.wall_s = time.perf_counter() - start
        if self._toll is not None and not failed:
            self._toll.note(self.tickets, now, stepped.wall_s)
        cost_s = stepped.wall_s / stepped.evaluations
        self.meter_s += cost_s
        self.evaluation_s = cost_s
        if len(now) < len(self.tickets):
            for ticket in self.tickets:
                if ticket not in now:
                    ticket.meter_s += cost_s
        done = [ticket for ticket in self.tickets if ticket.row is not None and ticket.row.done]
        stepped.finished = done
        if done or stepped.failed:
            self._leave([*done, *(ticket for ticket, _ in stepped.failed)])
        return stepped

    def _together(self, unet: Unet, now: list[Ticket], stepped: Stepped) -> None:
        if self._batch is None:
            self._batch = sample.RunningBatch([ticket.row for ticket in now if ticket.row is not None])
            self._packed = now
        _, x0_BCHW = self._batch.advance(unet)
        for i, ticket in enumerate(now):
            if ticket.preview_at and ticket.step in ticket.preview_at:
                stepped.previews.append((ticket, ticket.preview_at[ticket.step], x0_BCHW[i]))
            if ticket.glance:
                ticket.glance = False
                stepped.previews.append((ticket, GLANCE, x0_BCHW[i]))

    def _apart(self, unet: Unet, now: Sequence[Ticket], stepped: Stepped) -> None:
        """Each row by itself: those that fail alone too are to blame."""
        self._unpack()
        for ticket in now:
            assert ticket.row is not None
            try:
                sample.advance(unet, [ticket.row])
            except Exception as alone:
                clear_frames(alone.__traceback__)  # what it holds of memory the next row needs
                stepped.failed.append((ticket, alone))


@dataclass(frozen=True, repr=False)
class _Filled:
    """The conditions of a call, filled up: the same tensors at each step, by which matrices are kept."""

    text_BLD: torch.Tensor
    added: dict[str, torch.Tensor]
    index: torch.Tensor
    text: torch.Tensor
    more: dict[str, torch.Tensor]

    @classmethod
    def of(cls, text_BLD: torch.Tensor, added: dict[str, torch.Tensor], size: int) -> _Filled:
        """The conditions of fewer rows than `size`, filled up with copies of the first."""
        count = len(text_BLD)
        with torch.inference_mode(False), torch.no_grad():
            index = torch.zeros(size, dtype=torch.int64, device=text_BLD.device)
            index[:count] = torch.arange(count, device=text_BLD.device)
            more = take_rows(added, index, [i if i < count else 0 for i in range(size)])
            return cls(text_BLD, added, index, text_BLD[index], more)


MOST_FILLED = 4  # texts of several lengths have calls of their own


def padded(unet: Unet, sizes: Sequence[int]) -> Unet:
    """A U-Net that is only called with these numbers of rows (and beyond the largest as it comes).

    What is compiled or captured for a few batch sizes is then used again. The rows added repeat the first.
    """
    rising = sorted(sizes)
    laid: list[_Filled] = []

    def call(
        x_BCHW: torch.Tensor, t_B: torch.Tensor, text_BLD: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The U-Net's call filled up to one of the compiled sizes with copies of the first row."""
        count = len(x_BCHW)
        size = next((size for size in rising if size >= count), count)
        if size == count:
            return unet(x_BCHW, t_B, text_BLD, added)
        filled = next((one for one in laid if one.text_BLD is text_BLD and one.added is added), None)
        if filled is None:
            filled = _Filled.of(text_BLD, added, size)
            laid[:] = [filled, *laid[: MOST_FILLED - 1]]  # of the next steps too, until others join or leave
        index = filled.index
        return unet(x_BCHW[index], t_B[index], filled.text, filled.more)[:count]

    return call


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

    count: int
    """How many it can run at once."""
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
    count, free = 1, 1
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
