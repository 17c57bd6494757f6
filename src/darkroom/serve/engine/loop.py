"""The engine: a thread that packs whatever rows are on their way and has them stepped, again and again.

Between two steps of a size it removes rows that are done, cancelled or failed, and adds what came;
pictures that wait are admitted while their load fits: load is U-Net evaluations a call, counted in pictures
of the model's own size. Each size has its own calls, and so its own capacity. On a CPU the steps are taken in
lanes, several sizes at once, or halves of one size where no other waits, and the engine's thread is free
meanwhile; on an accelerator it takes them itself. Text encoding and decoding are done aside (`aside`). A
picture does not depend on who shares its steps. What the engine's threads report goes through `Loop`, the
event loop as they and the core's coroutines use it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch

from darkroom.errors import DarkroomError
from darkroom.hardware import accelerator
from darkroom.sample.backends.backend import Backend
from darkroom.sample.control import ControlledUnet
from darkroom.sample.denoise import Unet, tensors_in
from darkroom.serve.engine.batch import Aside, Between, Bucket, PlainTimes, Stepped, Steps, bucket_of, padded
from darkroom.serve.engine.fixed_shapes import FixedDecode, FixedRows, FixedShapes
from darkroom.serve.engine.runner import Studio
from darkroom.serve.engine.tickets import (
    GLANCE,
    Admits,
    EngineJob,
    Entry,
    FairQueue,
    LoadLimit,
    PendingPicture,
    Preview,
    Shape,
    Ticket,
    admitted_after,
    png_of,
)
from darkroom.serve.metrics import Metrics

if TYPE_CHECKING:
    from darkroom.models.model import Model
    from darkroom.serve.engine.adapters import Library
    from darkroom.serve.engine.nets import Nets


T = TypeVar("T")
LOG = logging.getLogger("darkroom.serve")
# How much older measurements weigh in the speed that waits are estimated from.
MEMORY = 0.98
IDLE_S = 1.0
# Every size may fill a call of its own, up to so many full calls a round: more would make steps too rare.
FULL_CALLS = 3
# A guided picture of twice the model's own side is served whatever the capacity.
LEAST_LARGEST = 8.0
# What encoding and decoding add to the time of the steps, for the estimate of waits.
BESIDE_STEPS = 1.25
FORECAST_S = 0.25
# So long the end of the process waits for a step that is under way.
STOP_S = 5.0
ALONE_PRIORITY = 1 << 30  # above all that a request may have


BucketKey: TypeAlias = tuple[Hashable, int]
"""A size, and which of its buckets: it has several where its rows are shared out among the lanes."""


class Admission(NamedTuple):
    """When a picture that waits will be admitted."""

    key: str
    cost: float
    after_s: float


class Engine:
    """Made by `Core` once the model is loaded. Its public methods may be called from any thread."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        *,
        capacity: int,
        metrics: Metrics,
        on_tick: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
        library: Library | None = None,
        pad_to: Sequence[int] = (),
        places: tuple[Steps, Aside] | None = None,
        shares: Mapping[str, int] | None = None,
        fixed_rows: FixedRows | None = None,
        nets: Nets | None = None,
    ) -> None:
        self.capacity = float(capacity)
        self.metrics, self.on_tick, self.on_stop = metrics, on_tick, on_stop
        self.library, self.nets = library, nets
        self.own_pixels = model.sample_size**2
        decode: FixedDecode | None = None
        if fixed_rows is not None:
            decode = FixedDecode(
                backend.decode, model.vae.decoder if fixed_rows.tries and model.vae else None
            )
        self.studio = Studio(model, backend, one_by_one=fixed_rows is not None, decode=decode)
        self.unet: Unet = padded(backend.unet, pad_to) if pad_to else backend.unet
        if fixed_rows is not None:
            most = 0 if library is None else library.bank.most_a_row
            if library is not None:
                library.bank.take_whole_calls()
            self.unet = FixedShapes(backend.unet, fixed_rows, most)
        if nets is not None:
            self.unet = ControlledUnet(self.unet, nets.in_attention)
        self._fixed_rows = fixed_rows
        self.steps, self.aside = places or (Between(), Between())
        self.steps.on_free = self.wake
        self.trouble: str | None = None
        """Why the device answers no more; then every job is kept as it stands."""
        self.watchers = 0
        self.step_s = 0.0
        """The latest step of a size."""
        self._work_done, self._work_s = 0.0, 0.0
        self._condition = threading.Condition()
        self._queue = FairQueue(shares)
        self._unprepared: list[Ticket] = []  # admitted, with their adapters
        self._arrived: list[Ticket] = []  # prepared, to join the batch
        self._failed: list[tuple[EngineJob, BaseException]] = []
        self._parked: list[Ticket] = []  # admitted, waiting for adapters
        self._finished: list[Ticket] = []  # denoised, to be decoded
        self._through: list[Ticket] = []  # the first of two passes, to be upscaled
        self._suspects: list[EngineJob] = []  # to be computed alone, one after the other, before all else
        self._between: set[Ticket] = set()  # being upscaled or waiting for it, with their adapters held
        self._previews: list[tuple[Ticket, int, torch.Tensor]] = []
        self._buckets: dict[BucketKey, Bucket] = {}  # of equal times those stepped longest ago first
        self._stepping: set[BucketKey] = set()  # buckets that a lane has; nobody else touches them
        self._stepped: list[tuple[BucketKey, Stepped | Exception]] = []
        self._loads: defaultdict[Hashable, float] = defaultdict(float)
        self._admitted: set[Ticket] = set()  # all that take capacity
        self._forecast: tuple[float, list[Admission]] = (0.0, [])
        self._prune, self._stopping, self._called = False, False, False
        self._alone = accelerator.alone(backend.device)
        charges = backend.device.type == "cpu"
        self._plain_times: dict[Hashable, PlainTimes] | None = {} if charges else None
        self._thread = threading.Thread(target=self._run, name="darkroom-engine", daemon=True)

    # ---- from other threads

    def start(self) -> None:
        """Begin to take steps."""
        self._thread.start()

    def stop(self, within_s: float = STOP_S) -> bool:
        """Take no more steps; what is on its way stays as it is. False where a step goes on all the same:
        nothing ends one from outside, so the process has to be left."""
        end_s = time.monotonic() + within_s
        with self._condition:
            self._stopping = self.studio.stopping = True
            self._call()
        if self._thread.is_alive():
            self._thread.join(timeout=within_s)
        ended = [one.close(max(0.1, end_s - time.monotonic())) for one in (self.aside, self.steps)]
        return all(ended) and not self._thread.is_alive()

    def submit(self, work: EngineJob) -> None:
        """Put a work's pictures in the queue."""
        if self.nets is not None and work.request.controls:
            self.nets.fetch(choice.net for choice in work.request.controls)
        if self.library is not None and work.adapters:
            self.library.fetch_for(work)
        with self._condition:
            if work.alone:
                self._suspects.append(work)
            for ticket in work.tickets:
                if work.alone:  # behind an entry that waits for it, neither would begin
                    ticket.entry.priority = ALONE_PRIORITY
                self._queue.push(ticket.entry)
            self._call()

    def drop(self, work: EngineJob) -> None:
        """Have no more of a work computed: out of the queue now, its rows free at the next step."""
        with self._condition:
            work.over = True
            for ticket in work.tickets:
                ticket.dropped_at = ticket.step
                self._queue.remove(ticket.entry)
            self._prune = True
            self._call()

    def wake(self) -> None:
        """Look again: adapters have arrived, or a lane is free."""
        with self._condition:
            self._call()

    def waiting(self, key: str | None = None) -> int:
        """Pictures in the queue, of one key or of all."""
        return len(self._queue) if key is None else self._queue.count(key)

    def places(self) -> dict[Ticket, int]:
        """The place of every waiting picture: how many are to be admitted before it."""
        with self._condition:
            order = self._queue.in_order()
        return {entry.item: place for place, entry in enumerate(order)}

    def rows(self) -> list[dict[str, Any]]:
        """What is on its way now: a line for each picture."""
        return [
            {
                "job": ticket.work.uid,
                "key": ticket.work.key,
                "picture": ticket.index,
                "size": f"{ticket.shape.width}x{ticket.shape.height}",
                "step": ticket.step,
                "of": ticket.work.steps_total // len(ticket.work.tickets),
            }
            for bucket in list(self._buckets.values())
            for ticket in list(bucket.tickets)
        ]

    @property
    def largest_load(self) -> float:
        """The most that one picture may take: with more its steps would hold up everybody else's."""
        return max(self.capacity, LEAST_LARGEST)

    @property
    def load(self) -> float:
        """Load of what is admitted, all sizes together; each takes up to `capacity` in each lane."""
        return float(sum(list(self._loads.values())))

    def seconds_for(self, cost: float) -> float | None:
        """How long so much work takes, by what was measured lately; None before the first step."""
        return cost * self._work_s / self._work_done if self._work_done else None

    def waiting_work(self) -> dict[str, float]:
        """Work in the queue, by key."""
        return self._queue.costs()

    def admissions(self) -> list[Admission]:
        """Of all that waits, in order: whose it is, its work, and when it is admitted at the speed measured.

        Empty before the first step. Looked up anew at most every `FORECAST_S`.
        """
        now_s = time.monotonic()
        if not self._work_done:
            return []
        if now_s - self._forecast[0] > FORECAST_S:
            with self._condition:
                order = self._queue.in_order()
            drawn = [self._drawing(ticket) for ticket in list(self._admitted)]
            waiting = [self._drawing(entry.item) for entry in order]
            speed = self._work_done / self._work_s / BESIDE_STEPS
            times = admitted_after(drawn, waiting, self.capacity, FULL_CALLS, speed, self.steps.count)
            admitted = [Admission(e.key, e.cost, s) for e, s in zip(order, times, strict=True)]
            self._forecast = now_s, admitted
        return self._forecast[1]

    def _drawing(self, ticket: Ticket) -> PendingPicture:
        shape = ticket.shape
        steps = max(1, shape.steps - (ticket.step - ticket.earlier_steps))
        work = shape.pixels * shape.evaluations
        return PendingPicture(ticket.entry.size, steps, float(work), shape.load(self.own_pixels))

    # ---- the engine's own thread

    def _run(self) -> None:
        try:
            if (index := self.studio.backend.device.index) is not None:
                accelerator.use(index)  # a thread begins on the first device, whatever others chose
            while not self._stopping:
                self._round()
        except Exception as error:
            LOG.exception("the engine has stopped")
            self.trouble = f"the device answers no more: {type(error).__name__}"
            self.on_stop()

    def _call(self) -> None:
        """Something has come for the engine's thread to see; the condition is held."""
        self._called = True
        self._condition.notify()

    def _round(self) -> None:
        with self._alone:
            self._work()
        with self._condition:
            steps_on = self.steps.free and self._buckets.keys() - self._stepping
            if not (self._called or self._stopping or steps_on):
                self._condition.wait(IDLE_S)
            self._called = False

    def _work(self) -> None:
        """Take a step of each size, and do what stands around the steps."""
        self._collect()
        self._admit()
        self._board()
        self._let_go()
        self._share_lanes()
        begun: set[BucketKey] = set()
        while self.steps.free and (waiting := self._buckets.keys() - self._stepping - begun):
            key = min((key for key in self._buckets if key in waiting), key=self._had_s)
            begun.add(key)
            self._stepping.add(key)
            self.steps.put(partial(self._step_aside, key, self._buckets[key]))
            self._collect()
            self._let_go()  # what was cancelled during the step that has just ended takes no other
            self._admit()  # who came meanwhile waits neither for the other sizes nor for what is developed
        self._develop()
        self._tell()

    def _had_s(self, key: BucketKey) -> float:
        return self._buckets[key].had_s

    def _load_in(self, key: BucketKey) -> float:
        return sum(ticket.load for ticket in self._buckets[key].tickets)

    def _share_lanes(self) -> None:
        """Split a size's rows over lanes that no other size wants; put them together where one does."""
        while self.steps.free > len(waiting := self._buckets.keys() - self._stepping):
            fullest = max(waiting, key=self._load_in, default=None)
            if fullest is None or not self._divides(self._buckets[fullest]):
                return
            self._buckets[self._unused_key(fullest[0])] = self._buckets[fullest].split()
        if self.steps.free < len(waiting):
            for one, other in itertools.combinations(sorted(waiting, key=self._had_s), 2):
                if one[0] == other[0] and self._load_in(one) + self._load_in(other) <= self.capacity:
                    self._buckets[one].take(self._buckets.pop(other))
                    return

    def _divides(self, bucket: Bucket) -> bool:
        """Whether two calls of half its rows cost no more: not if they are filled up to a defined number."""
        if len(bucket.tickets) < 2:
            return False
        row = bucket.tickets[0].row
        if self._fixed_rows is None or row is None:
            return True
        least = self._fixed_rows.of(row.latents_CHW.shape[-2] * row.latents_CHW.shape[-1])
        return sum(ticket.shape.evaluations for ticket in bucket.tickets) >= 2 * least

    def _key_for(self, size: Hashable, load: float) -> BucketKey:
        """Where a row joins: the least full bucket of its size, or a new one where none can take it."""
        with_room = [
            key for key in self._buckets if key[0] == size and self._load_in(key) + load <= self.capacity
        ]
        return min(with_room, key=self._load_in) if with_room else self._unused_key(size)

    def _unused_key(self, size: Hashable) -> BucketKey:
        return next((size, i) for i in itertools.count() if (size, i) not in self._buckets)

    def _step_aside(self, key: BucketKey, bucket: Bucket) -> None:
        stepped: Stepped | Exception
        try:
            stepped = bucket.step(self.unet, self.steps.pace)
        except Exception as error:
            stepped = error
        with self._condition:
            self._stepped.append((key, stepped))

    def _collect(self) -> None:
        """Take the buckets back whose step is over."""
        with self._condition:
            back, self._stepped = self._stepped, []
        for key, stepped in back:
            if isinstance(stepped, Exception):
                raise stepped
            at_once = len(self._stepping)
            self._stepping.discard(key)
            bucket = self._buckets.pop(key)
            self._account(stepped, bucket, at_once)
            if bucket.tickets:
                self._buckets[key] = bucket

    def _room(self) -> Admits:
        """Tells which pictures fit, and for as long as a job is under suspicion, of that job alone."""
        limit = LoadLimit(self._loads, self.capacity, FULL_CALLS, self.steps.count)
        self._suspects = [work for work in self._suspects if not work.over]
        suspect = self._suspects[0] if self._suspects else None

        def admits(entry: Entry) -> bool:
            """Whether an entry may start now, for the queue's choice."""
            if suspect is not None:
                mine = entry.item.work is suspect
                if not mine or (suspect.started_s is None and self.load > 0):
                    return False
            return limit.admits(entry.size, _load_of(entry, self.own_pixels))

        return admits

    def _admit(self) -> None:
        admitted = self._parked
        self._parked = []
        with self._condition:
            admits = self._room()
            while self._queue.head(admits) is not None:
                entry = self._queue.take(admits)
                entry.item.load = _load_of(entry, self.own_pixels)
                self._loads[entry.size] += entry.item.load
                self._admitted.add(entry.item)
                self._between.discard(entry.item)
                admitted.append(entry.item)
        if admitted:
            self._prepare([ticket for ticket in admitted if self._has_files(ticket)])

    def _has_files(self, ticket: Ticket) -> bool:
        """Whether its nets and adapters are in memory, held there; else it waits, or fails with its work."""
        work = ticket.work
        if work.over:
            return True
        try:
            # Nets first: who holds adapters waits for nothing more, or two could wait for each other.
            if self.nets is not None and work.request.controls and not self.nets.hold(ticket):
                self._parked.append(ticket)
                return False
            if self.library is None or not work.adapters or self.library.hold(ticket):
                return True
        except Exception as error:
            self._fail(work, error)
            return True
        self._parked.append(ticket)
        return False

    def _prepare(self, tickets: list[Ticket]) -> None:
        for work in dict.fromkeys(ticket.work for ticket in tickets):
            if work.started_s is None and not work.over:
                work.started_s = time.monotonic()
                self.metrics.queue_seconds.observe(work.started_s - work.accepted_s)
                work.listener.began(work)
        if tickets:
            with self._condition:
                self._unprepared += tickets
            self.aside.put(self._prepare_aside)

    def _prepare_aside(self) -> None:
        """Prepare all that waits for it: who came while this waited for its turn is taken along.

        Those with nets after the others, who need not wait until pictures have been through the nets.
        """
        with self._condition:
            tickets, self._unprepared = self._unprepared, []
        plain = [ticket for ticket in tickets if not ticket.work.request.controls]
        rest = [ticket for ticket in tickets if ticket.work.request.controls]
        self._prepare_these(plain or rest)
        if plain and rest:
            self.aside.put(partial(self._prepare_these, rest))

    def _prepare_these(self, tickets: list[Ticket]) -> None:
        works = [work for work in dict.fromkeys(ticket.work for ticket in tickets) if not work.over]
        failed = self.studio.prepare(works, self.library, self.nets)
        self.aside.settle()
        with self._condition:
            self._failed += failed
            if not self._stopping:  # then some were left half prepared
                self._arrived += tickets
            self._call()

    def _board(self) -> None:
        """Rows that are ready join the running batch; works that could not be prepared fail."""
        with self._condition:
            arrived, self._arrived = self._arrived, []
            failed, self._failed = self._failed, []
        for work, error in failed:
            self._fail(work, error)
        early = []
        for ticket in arrived:
            if ticket.work.over:
                self._release(ticket)
                continue
            try:
                self.studio.start(ticket)
            except Exception as error:
                self._release(ticket)
                self._fail(ticket.work, error)
                continue
            assert ticket.row is not None
            self.aside.taken(tensors_in(ticket.row))
            ticket.work.prepared_s = ticket.work.prepared_s or time.monotonic()
            if (key := self._key_for(bucket_of(ticket.row), ticket.load)) in self._stepping:
                early.append(ticket)
            else:
                if key not in self._buckets:
                    least_s = min(map(self._had_s, self._buckets), default=0.0)
                    estimate_s = self.seconds_for(float(ticket.shape.pixels)) or 0.0
                    times = None
                    if self._plain_times is not None:
                        times = self._plain_times.setdefault(key[0], PlainTimes())
                    self._buckets = {key: Bucket(least_s, estimate_s, times), **self._buckets}
                self._buckets[key].add(ticket)
        with self._condition:
            self._arrived = early + self._arrived

    def _let_go(self) -> None:
        """The rows of works that are over leave."""
        if not self._prune:
            return
        self._prune = bool(self._stepping)
        for key, bucket in list(self._buckets.items()):
            if key in self._stepping:
                continue
            gone = bucket.drop_over()
            for ticket in gone:
                self.metrics.cancel_steps.observe(ticket.step - ticket.dropped_at)
            self._release(*gone)
            if not bucket.tickets:
                del self._buckets[key]
        self._release(*(ticket for ticket in self._parked if ticket.work.over))
        gone_between = [ticket for ticket in self._between if ticket.work.over]
        self._release(*gone_between)
        self._between.difference_update(gone_between)
        self._parked = [ticket for ticket in self._parked if not ticket.work.over]

    def _release(self, *tickets: Ticket) -> None:
        """Give back the load, the nets and the adapters of rows that left."""
        for ticket in tickets:
            self._unload(ticket)
            for shelf in (self.nets, self.library):
                if shelf is not None:
                    shelf.let_go(ticket)

    def _unload(self, ticket: Ticket) -> None:
        size = ticket.entry.size
        self._loads[size] -= ticket.load
        self._admitted.discard(ticket)
        ticket.load = 0.0
        if self._loads[size] < 1e-6:
            del self._loads[size]

    def _account(self, stepped: Stepped, bucket: Bucket, at_once: int) -> None:
        """Note what a step cost, one of so `at_once`, and pass on what it finished."""
        gone = [*stepped.finished, *(ticket for ticket, _ in stepped.failed)]
        first = (gone or bucket.tickets)[0].shape
        bucket.had_s += stepped.wall_s / max(1, len(bucket.tickets) + len(gone))
        self._work_done = MEMORY * self._work_done + stepped.evaluations * first.pixels
        self._work_s = MEMORY * self._work_s + stepped.wall_s / at_once
        self.step_s = stepped.wall_s
        self.metrics.step_seconds.observe(stepped.wall_s)
        self.metrics.evaluations.observe(stepped.evaluations)
        self.metrics.steps.inc(stepped.rows)
        self._part(gone)
        self._previews += stepped.previews
        for ticket, error in stepped.failed:
            self._fail(ticket.work, error)
        if stepped.out_of_memory:
            self.capacity = max(1.0, self.capacity / 2)
            LOG.warning("out of memory: capacity is now %g rows", self.capacity)

    def _part(self, gone: list[Ticket]) -> None:
        """Rows leave: to be decoded, to a second pass, or for good."""
        for ticket in gone:
            if ticket.row is not None and ticket.row.done and ticket.has_another_pass:
                self._unload(ticket)
                self._through.append(ticket)
                self._between.add(ticket)
                continue
            self._release(ticket)
            if ticket.row is not None and ticket.row.done:
                ticket.work.denoised_s = time.monotonic()
                self._finished.append(ticket)

    def _enlarge_aside(self, tickets: list[Ticket]) -> None:
        failed = self.studio.enlarge([ticket for ticket in tickets if not ticket.work.over])
        self.aside.settle()
        with self._condition:
            self._failed += failed
            for ticket in tickets:
                if ticket.earlier_steps and not ticket.work.over:
                    self._queue.push(ticket.entry)
            self._call()

    def _develop(self) -> None:
        """Decode what is finished, all of it together, unless the last lot is still under way."""
        if self.aside.busy or not (self._finished or self._previews or self._through):
            return
        if self._through:
            larger, self._through = self._through, []
            self.aside.put(lambda: self._enlarge_aside(larger))
        tickets, self._finished = self._finished, []
        previews, self._previews = self._previews, []
        self.aside.put(lambda: self._develop_aside(tickets, previews))

    def _develop_aside(self, tickets: list[Ticket], previews: list[tuple[Ticket, int, torch.Tensor]]) -> None:
        failed = self.studio.finish([ticket for ticket in tickets if not ticket.work.over])
        with self._condition:
            self._failed += failed
        for ticket in tickets:
            if ticket.done and not ticket.work.over:
                ticket.work.listener.drawn(ticket.work, ticket.index)
        for work in dict.fromkeys(ticket.work for ticket in tickets):
            if not work.over and len(work.pictures) == len(work.tickets):
                work.over, work.decoded_s = True, time.monotonic()
                work.listener.made(work)
        for ticket, index, image in self.studio.preview([p for p in previews if not p[0].work.over]):
            if index == GLANCE:
                ticket.work.glance = png_of(image)
            else:
                ticket.work.previews.append(Preview(ticket.index, index, ticket.step, png_of(image)))
        with self._condition:
            self._call()

    def _fail(self, work: EngineJob, error: BaseException) -> None:
        if work.over:
            return
        self.drop(work)
        LOG.warning("job %s failed: %s", work.uid, error, exc_info=not isinstance(error, DarkroomError))
        work.listener.failed(work, error)

    def _tell(self) -> None:
        self.metrics.rows.set(sum(len(bucket.tickets) for bucket in self._buckets.values()))
        self.metrics.waiting.set(len(self._queue))
        if self.watchers:
            self.on_tick()


def _load_of(entry: Entry, own_pixels: int) -> float:
    shape: Shape = entry.item.shape
    return shape.load(own_pixels)


TICK_S = 0.03  # watchers get an event at most so often
LOOK_S = 1.0  # and look by themselves so often


class Loop:
    """The event loop: tasks, calls from other threads, ticks for those who watch, and work that blocks in
    threads; of use from `begin` on.
    """

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
