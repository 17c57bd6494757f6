"""What goes between the event loop and the engine's threads: `EngineJob`, a job on its way through the
engine, with a `Ticket` for each of its pictures; and `Loop`, the event loop as those threads and the core's
coroutines use it, with its ticks.
"""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from PIL import Image

from darkroom.serve.engine.fairness import Entry
from darkroom.serve.metrics import PHASES
from darkroom.serve.request import PRIORITIES, PictureRequest, Uploads

if TYPE_CHECKING:
    from darkroom import sample
    from darkroom.models.adapters.bank import Staged
    from darkroom.models.control import Net

T = TypeVar("T")
TICK_S = 0.03  # watchers get an event at most so often
LOOK_S = 1.0  # and look by themselves so often


class Loop:
    """Tasks, calls from other threads, and work that blocks in threads; of use from `begin` on."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tick: asyncio.Future[None] | None = None
        self._ticked_s = 0.0
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="darkroom-files")

    def begin(self) -> None:
        """In the event loop that all of this belongs to."""
        self._loop = asyncio.get_running_loop()
        self._tick = self._loop.create_future()

    def end_tasks(self) -> None:
        """Cancel what still runs."""
        for task in list(self._tasks):
            task.cancel()

    def close(self) -> None:
        """Wait for the threads."""
        self._pool.shutdown(wait=True)

    def soon(self, call: Callable[[], Any]) -> None:
        """Call it in the loop, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: the job stays in the store
            self._loop.call_soon_threadsafe(call)

    def later(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> asyncio.TimerHandle:
        """Call it in the loop after so long."""
        return self._loop.call_later(seconds, call, *arguments)

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine as a task that is held on to."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What blocks, in a thread."""
        return await self._loop.run_in_executor(self._pool, call, *arguments)

    async def in_daemon_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """What may take minutes, in a thread of its own that the end of the process does not wait for."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # who waits may leave: the thread goes on until it is through

        def run() -> None:
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="darkroom-daemon", daemon=True).start()
        return await asyncio.wrap_future(future)

    # ---- ticks

    def on_tick(self) -> None:
        """On the engine's thread, after each step while somebody watches."""
        now = time.monotonic()
        if now - self._ticked_s > TICK_S:
            self._ticked_s = now
            self.soon(self.tick)

    def tick(self) -> None:
        """Something has changed: watchers look."""
        if self._tick is not None and not self._tick.done():
            self._tick.set_result(None)

    async def next_tick(self, at_most_s: float = LOOK_S) -> None:
        """Until something changes, or so long."""
        if self._tick is None or self._tick.done():
            self._tick = self._loop.create_future()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._tick), at_most_s)


@dataclass(frozen=True)
class AdapterCard:
    """An adapter that a request may name. `trouble` says why one cannot be used, once that was found out."""

    name: str
    bytes: int
    loaded: bool = False
    trouble: str | None = None


@dataclass(frozen=True)
class File:
    """An adapter's file as it lies in the folder. A file of another stamp is another adapter."""

    name: str
    path: Path
    bytes: int
    stamp: tuple[int, int]
    blocks: tuple[float, ...] = ()
    """How much of an adapter each block takes: with other weights it is another adapter."""


@dataclass(frozen=True, eq=False, repr=False)
class ReadAdapter:
    """An adapter read and checked, and what pictures say of it."""

    staged: Staged | None
    sha256: str
    notes: tuple[str, ...]
    dense_bytes: int = 0
    """Of differences as large as layers."""


@dataclass(frozen=True, repr=False)
class Loan:
    """The slot where a work finds an adapter."""

    slot: int
    read: ReadAdapter


NET_COST = 0.5
ENLARGE_COST = 13.0
"""Of an upscaling network in evaluations a pixel that it reads: an RRDBNet of 23 blocks has 17 million
multiplications a pixel, Stable Diffusion 1's U-Net 1.3 million."""


@dataclass(frozen=True)
class Shape:
    """What a request costs, as far as the engine needs to know beforehand."""

    width: int
    height: int
    steps: int
    evaluations: int
    """U-Net rows a step: 2 with guidance."""
    larger: Shape | None = None
    """Of the second pass."""
    nets: int = 0
    """That steer it."""
    enlarged_pixels: int = 0
    """That a network reads before this pass."""
    calls_a_step: int = 1
    """U-Net calls of one of the solver's steps; `steps` counts the calls."""

    @property
    def row_cost(self) -> float:
        """Evaluations a step, with its nets': each is about half a U-Net."""
        return self.evaluations * (1 + NET_COST * self.nets)

    @property
    def solver_steps(self) -> int:
        """Steps as a user counts them; the last of a solver of two calls a step is one call."""
        return -(-self.steps // self.calls_a_step)

    @property
    def pixels(self) -> int:
        """Of one picture."""
        return self.width * self.height

    def load(self, own_pixels: int) -> float:
        """Evaluations of a picture's step, counted in pictures of the model's own size."""
        return self.row_cost * self.pixels / own_pixels

    @property
    def cost(self) -> float:
        """Work of one picture's first pass: pixels x steps x evaluations."""
        return self.pixels * self.steps * self.row_cost + self.enlarged_pixels * ENLARGE_COST

    @property
    def whole_cost(self) -> float:
        """Work of one picture."""
        return self.cost + (self.larger.cost if self.larger is not None else 0.0)


class Listener(Protocol):
    """Callbacks on how a work goes, called on the engine's threads."""

    def began(self, work: EngineJob) -> None:
        """Its first picture was admitted."""

    def drawn(self, work: EngineJob, index: int) -> None:
        """One of its pictures is decoded."""

    def made(self, work: EngineJob) -> None:
        """All its pictures are decoded."""

    def failed(self, work: EngineJob, error: BaseException) -> None:
        """One of its pictures cannot be made; its rows are gone."""


@dataclass(frozen=True, eq=False, repr=False)
class Preview:
    """A picture as far as it had come, as a PNG file: made meanwhile, not by the thread that sends it."""

    picture: int
    index: int
    step: int
    png: bytes


GLANCE = -1
"""In place of a preview's index: of no event, but for who asks."""


FORMATS = ("PNG", "JPEG", "WEBP")
"""Of uploads."""


def opened(content: bytes) -> Image.Image:
    """An upload that admission has let in."""
    return Image.open(io.BytesIO(content), formats=FORMATS)


def png_of(image: Image.Image) -> bytes:
    """A picture as a PNG file without parameters."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


@dataclass(eq=False, repr=False)
class Ticket:
    """One picture of a work: waiting (`entry`), on its way (`row`), or done.

    One with a second pass waits twice.
    """

    work: EngineJob
    index: int
    entry: Entry = field(init=False)
    row: sample.Row | None = None
    preview_at: dict[int, int] = field(default_factory=dict)
    """After which step which preview is due."""
    glance: bool = False
    """Somebody asks what it looks like: so it does after the next step."""
    meter_s: float = 0.0
    """The bucket's meter when it joined the batch."""
    done: bool = False
    load: float = 0.0
    """What it takes of the capacity of its size; 0 while it waits."""
    earlier_steps: int = 0
    """Of the first pass, once it is in the second."""
    dropped_at: int = 0
    """Steps taken when its work was stopped."""

    def __post_init__(self) -> None:
        self._enter()

    def _enter(self) -> None:
        size: Hashable = (self.shape.width, self.shape.height)
        priority = PRIORITIES[self.work.request.priority]
        self.entry = Entry(self, self.work.key, size, self.shape.cost, priority)

    @property
    def shape(self) -> Shape:
        """What the pass that it is in, or waits for, costs."""
        larger = self.work.shape.larger
        return larger if self.earlier_steps and larger is not None else self.work.shape

    @property
    def has_another_pass(self) -> bool:
        """Whether a picture that is through its steps is still to be upscaled."""
        return self.work.shape.larger is not None and not self.earlier_steps

    def enlarge(self, row: sample.Row) -> None:
        """Wait anew, for the second pass."""
        self.earlier_steps, self.row = self.step, row
        self._enter()

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.earlier_steps + (self.row.step if self.row is not None else 0)


@dataclass(eq=False, repr=False)
class EngineJob:
    """A job as the engine sees it."""

    uid: str
    key: str
    request: PictureRequest
    shape: Shape
    listener: Listener
    uploads: Uploads | None = None
    alone: bool = False
    """It was begun again and again and never finished: nothing else is computed with it."""
    accepted_s: float = field(default_factory=lambda: time.monotonic())
    started_s: float | None = None
    prepared_s: float | None = None
    """When its first row joined the batch, with its texts encoded."""
    denoised_s: float | None = None
    """When its last row was through its steps, so far."""
    decoded_s: float | None = None
    request_id: str | None = None
    """Of the request that brought it to this process."""
    trace: Any = None
    """Its span, where there are traces."""
    hashes: list[str] = field(default_factory=list)
    """SHA-256 of its pictures' files, once they are written."""
    prepared: sample.Generation | None = None
    lent: dict[str, Loan] = field(default_factory=dict)
    """Where its adapters are, by name."""
    nets: dict[str, Net] = field(default_factory=dict)
    """Its nets in memory, by name."""
    tickets: list[Ticket] = field(default_factory=list)
    pictures: dict[int, sample.Picture] = field(default_factory=dict)
    files: dict[int, Future[bytes]] = field(default_factory=dict)
    """Of its pictures, once they have gone through the hooks."""
    previews: list[Preview] = field(default_factory=list)
    glance: bytes | None = None
    """What a picture of it looked like when somebody asked last, as PNG."""
    watchers: int = 0
    device_s: float = 0.0
    over: bool = False
    """Cancelled, failed or finished: nothing of it is to be computed any more."""

    def __post_init__(self) -> None:
        self.tickets = [Ticket(self, i) for i in range(self.request.num)]

    def phases(self) -> dict[str, float]:
        """Seconds of each phase that is over, and of the one it is in."""
        ends = (self.started_s, self.prepared_s, self.denoised_s, self.decoded_s, None)
        begun_s, found = self.accepted_s, {}
        for phase, end_s in zip(PHASES, ends, strict=True):
            found[phase] = max(0.0, (time.monotonic() if end_s is None else end_s) - begun_s)
            if end_s is None:
                break
            begun_s = end_s
        return found

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters."""
        return tuple(choice.name for choice in self.request.adapters)

    @property
    def steps_done(self) -> int:
        """Of all its pictures."""
        return sum(ticket.step for ticket in self.tickets)

    @property
    def steps_total(self) -> int:
        """Of all its pictures; known exactly once they are prepared (PNDM takes one more)."""
        if (job := self.prepared) is not None:
            steps = len(job.table) + (len(job.hires.table) if job.hires is not None else 0)
        else:
            steps = self.shape.steps + (self.shape.larger.steps if self.shape.larger is not None else 0)
        return steps * len(self.tickets)


def preview_steps(count: int, steps: int) -> dict[int, int]:
    """After which steps `count` previews are due, evenly spread; the last step is the picture itself."""
    at = {round((i + 1) * steps / (count + 1)): i for i in range(count)}
    return {step: index for step, index in at.items() if 0 < step < steps}
