"""The jobs of this process that are not over: who is let in now, and those that were, with what can be
reported of them.

Letting in goes by the rates of each key, the queue's places and seconds, and to whom they were promised.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left, bisect_right, insort_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from darkroom.bill import format_number
from darkroom.serve.api.guard import ANONYMOUS
from darkroom.serve.engine.loop import TICK_S, Loop
from darkroom.serve.engine.tickets import EngineJob
from darkroom.serve.jobs.store import OverQuota, Record
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import Job, Refused, Uploads
from darkroom.serve.settings import Limits

if TYPE_CHECKING:
    from darkroom.serve.engine.pool import ModelPool

T = TypeVar("T")
MOST_KEYS = 10_000
UNMEASURED_S = 5.0
"""When to come again, before the first step has been measured."""
HELD = 3
"""Of the queue, one part in so many is held for those whose `Retry-After` is over: newcomers would have taken
each place that frees up before them."""
MOST_PROMISES = 16_384
"""Promises kept in mind: some minutes of a few hundred refusals a second."""
PROMISED, PROMISED_ONCE_KNOWN = 8, 64
"""Of each key, how many of its queues count in the `Retry-After` of others; and from `KNOWN` promises on of
which it is known whether they were taken up."""
KNOWN = 50
RETURN_WEIGHT = 1 / KNOWN
"""Of the latest promise in the share of those of its key that were taken up, once so many are known."""
LEAST_RETURNS = 0.02
"""For a key that takes up a smaller share of its promises no places are held: some 50 in a row in vain."""
EARLY_S, LATE_S = 0.5, 3.0
"""How long before and after the time that they were given."""


class Rates:
    """How often each key may come: a bucket that fills evenly and holds ten seconds' worth."""

    def __init__(self, per_minute: float, by_key: Mapping[str, float] | None = None) -> None:
        self._usual, self._by_key = per_minute, by_key or {}
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, now_s: float | None = None, num: int = 1) -> None:
        """Take one, or several that are of use only together; 429 with when they are there.

        More than ever lie ready are lent, and the key waits for them afterwards.
        """
        now = time.monotonic() if now_s is None else now_s
        per_s = self._by_key.get(key, self._usual) / 60
        most = max(1.0, per_s * 10)
        left, at = self._buckets.pop(key, (most, now))
        left = min(most, left + (now - at) * per_s)
        needed = min(num, most)
        self._buckets[key] = (left - num if left >= needed else left, now)
        while len(self._buckets) > MOST_KEYS:
            self._buckets.popitem(last=False)
        if left < needed:
            raise Refused(
                429,
                "rate_limited",
                f"at most {per_s * 60:g} jobs a minute{owner(key)}",
                retry_after_s=(needed - left) / per_s,
            )


WORKED_ON = 32
"""Requests of a key whose pictures are worked on, or wait for that."""


NOTHING: AbstractAsyncContextManager[None] = nullcontext()


class Bench:
    """What is done to pictures outside of jobs: maps, upscaling, reading.

    One request at a time in a thread of its own, so that it holds up neither jobs nor other requests; keys
    take turns. Belongs to the event loop's thread.
    """

    def __init__(self, limits: Limits) -> None:
        self._rates = _rates_of(limits)
        self._here: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Lock] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="darkroom-bench")

    async def do(
        self,
        key: str,
        work: Callable[[], T],
        pictures: int = 1,
        within: AbstractAsyncContextManager[None] = NOTHING,
    ) -> T:
        """Its result; 429 where the key comes too often, or has too many here already. What was let in is
        done `within` that."""
        self._rates.take(key, num=pictures)
        if self._here[key] >= WORKED_ON:
            message = f"{WORKED_ON} requests wait already for work on their pictures{owner(key)}"
            raise Refused(429, "queue_full", message, retry_after_s=UNMEASURED_S)
        self._here[key] += 1
        try:
            async with within, self._turns.setdefault(key, asyncio.Lock()):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._here[key] -= 1
            if not self._here[key]:
                del self._here[key]
                self._turns.pop(key, None)

    def close(self) -> None:
        """Begin nothing more; what goes on nothing ends."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _rates_of(limits: Limits) -> Rates:
    """How often each key may come, by a server's limits."""
    by_key = {name: own.rate_per_minute for name, own in limits.keys.items()}
    return Rates(limits.rate_per_minute, {name: rate for name, rate in by_key.items() if rate is not None})


def owner(key: str) -> str:
    """Whose they are, where there are keys; their names are no secret to who has one."""
    return f" with key '{key}'" if key not in ("", ANONYMOUS) else " in all"


def over_quota(error: OverQuota, key: str) -> Refused:
    """429 until the next day begins."""
    left_s = 86_400 - time.time() % 86_400
    message = f"at most {error.per_day} pictures a day{owner(key)}; {error.used} of today are used"
    return Refused(429, "quota", message, retry_after_s=left_s)


class Reservation(NamedTuple):
    """Who was refused with a `Retry-After`: places that free up until then are promised to them."""

    until_s: float
    key: str
    num: int
    cost: float
    digest: str | None = None
    """Of the request that was refused: the same one is let in."""
    share: float = 1.0
    """Of its key's promises, those that had been taken up when it was made: what it counts for. A share that
    changes later moves no time that was given before."""

    def is_due(self, now_s: float) -> bool:
        """Whether its time has come."""
        return now_s - LATE_S <= self.until_s <= now_s + EARLY_S


class Promised(NamedTuple):
    """Of one key: requests; by what each counts for, their pictures, and the work of those that `check_work`
    refused."""

    requests: int = 0
    pictures: float = 0.0
    cost: float = 0.0


def _add(of_key: dict[str, Promised], one: Reservation) -> None:
    there = of_key.get(one.key, Promised())
    of_key[one.key] = Promised(
        there.requests + 1, there.pictures + one.share * one.num, there.cost + one.share * one.cost
    )


def _take_away(of_key: dict[str, Promised], one: Reservation) -> None:
    there = of_key.pop(one.key)
    if there.requests > 1:
        of_key[one.key] = Promised(
            there.requests - 1, there.pictures - one.share * one.num, there.cost - one.share * one.cost
        )


class Reservations:
    """Those who may still come, by time: each refusal asks several times who is due, and looks at few."""

    def __init__(self) -> None:
        self._by_time: list[Reservation] = []
        self._by_request: dict[tuple[str, str | None], list[Reservation]] = {}
        self._of_key: dict[str, Promised] = {}

    def __len__(self) -> int:
        return len(self._by_time)

    def add(self, one: Reservation) -> None:
        """Keep it in mind."""
        insort_right(self._by_time, one, key=_until_s)
        self._by_request.setdefault((one.key, one.digest), []).append(one)
        _add(self._of_key, one)

    def remove(self, one: Reservation) -> None:
        """Forget it."""
        place = bisect_left(self._by_time, one.until_s, key=_until_s)
        while self._by_time[place] is not one:
            place += 1
        del self._by_time[place]
        same = self._by_request[one.key, one.digest]
        del same[next(i for i, other in enumerate(same) if other is one)]
        if not same:
            del self._by_request[one.key, one.digest]
        _take_away(self._of_key, one)

    def due_of(self, key: str, digest: str | None, now_s: float) -> Reservation | None:
        """The one of a request whose time has come."""
        return next((one for one in self._by_request.get((key, digest), ()) if one.is_due(now_s)), None)

    def due(self, now_s: float) -> list[Reservation]:
        """All whose time has come."""
        first = bisect_left(self._by_time, now_s - LATE_S, key=_until_s)
        return self._by_time[first : bisect_right(self._by_time, now_s + EARLY_S, key=_until_s)]

    def to_come(self, now_s: float) -> dict[str, Promised]:
        """What is promised to those whose time is later, by key."""
        found = dict(self._of_key)
        for one in self._by_time[: bisect_right(self._by_time, now_s, key=_until_s)]:  # the fewest
            _take_away(found, one)
        return found

    def late(self, now_s: float) -> list[Reservation]:
        """All whose time is over."""
        return self._by_time[: bisect_right(self._by_time, now_s - LATE_S, key=_until_s)]

    def last_of_most(self) -> Reservation:
        """Of the key that has the most, the one whose time comes last: those before it can still be kept."""
        most = max(self._of_key, key=lambda key: self._of_key[key].requests)
        return next(one for one in reversed(self._by_time) if one.key == most)


_until_s = attrgetter("until_s")


class Returns:
    """Of one key: which share of its promises was taken up of late; all, as long as none is known."""

    def __init__(self) -> None:
        self.share, self._num = 1.0, 0

    def note(self, came: bool) -> None:
        """Count one more: the mean of the first ones, later of the latest ones."""
        self._num += 1
        self.share += max(RETURN_WEIGHT, 1 / (self._num + 1)) * (came - self.share)

    @property
    def queues(self) -> int:
        """Of the key's, that count as promised at most: who asks in vain delays others by no more."""
        return PROMISED if self._num < KNOWN else PROMISED_ONCE_KNOWN


UNKNOWN = Returns()
"""Of a key of whose promises none is over."""


class Intake:
    """Belongs to the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rates = _rates_of(limits)
        self._reserved: Counter[str] = Counter()
        self._reserved_uploads: dict[object, Uploads] = {}
        self._reservations = Reservations()
        self._returns: dict[str, Returns] = {}

    def check_rate(self, key: str, jobs: int = 1) -> None:
        """429 where the key comes too often."""
        self._rates.take(key, num=jobs)

    def check_room(
        self,
        pool: ModelPool,
        key: str,
        num: int,
        backlog: Backlog | None = None,
        digest: str | None = None,
        *,
        let_in: bool = False,
    ) -> None:
        """429 where the queue is full, with what waits for any server.

        `digest` tells the request again that was refused before; `let_in`: it was checked with others.
        """
        full = self._full(pool, key, num, backlog, digest, let_in=let_in)
        if full is None:
            return
        there, most, whose = full
        after_s = self._places_free_s(pool, there + num - most, whose)
        self._promise(Reservation(time.monotonic() + after_s, key, num, 0.0, digest))
        message = f"{there} pictures wait already{owner(key) if whose else ''}"
        raise Refused(429, "queue_full", message, retry_after_s=after_s)

    def has_place(
        self, pool: ModelPool, key: str, num: int, backlog: Backlog | None = None, digest: str | None = None
    ) -> bool:
        """Whether `check_room` would let them in."""
        return self._full(pool, key, num, backlog, digest, let_in=False) is None

    def _full(
        self,
        pool: ModelPool,
        key: str,
        num: int,
        backlog: Backlog | None,
        digest: str | None,
        *,
        let_in: bool,
    ) -> tuple[int, int, str | None] | None:
        """Of the queue that has no places for them, the whole one (None) or the key's: pictures there, and
        the most that may be; None where both have."""
        others: Counter[str] = Counter() if backlog is None else backlog.pictures
        waiting = pool.waiting() + self._reserved.total() + others.total()
        mine = pool.waiting(key) + self._reserved[key] + others[key]
        is_awaited = let_in or self._is_due(key, digest)
        for there, most, whose in (
            (waiting, self._limits.queue, None),
            (mine, self._queue_of(key), key),
        ):
            if not is_awaited:
                most -= min(most // HELD, self._held(pool, whose))
            if there + num > most:
                return there, most, whose
        return None

    def check_uploads(self, pool: ModelPool, active_jobs: ActiveJobs, uploads: Uploads | None) -> None:
        """429 where the pictures that came with jobs would be too many bytes; those of one job never are."""
        held = active_jobs.uploads() | {id(one): one.num_bytes for one in self._reserved_uploads.values()}
        there = sum(held.values())
        if uploads is None or id(uploads) in held or not there:
            return
        too_many = there + uploads.num_bytes - self._limits.uploads_bytes
        if too_many > 0:
            cost, jobs_of = 0.0, Counter(id(active.work.uploads) for active in active_jobs)
            for work in (active.work for active in active_jobs):
                if too_many <= 0:
                    break
                cost += work.shape.whole_cost * len(work.tickets)
                jobs_of[id(work.uploads)] -= 1
                if work.uploads is not None and not jobs_of[id(work.uploads)]:  # the last that shares them
                    too_many -= work.uploads.num_bytes
            message = f"pictures of {there} bytes that came with jobs wait already"
            message += f"; at most {self._limits.uploads_bytes} may"
            raise Refused(429, "queue_full", message, retry_after_s=pool.seconds_for(cost) or UNMEASURED_S)

    def check_work(
        self,
        pool: ModelPool,
        key: str,
        num: int,
        cost: float,
        backlog: Backlog | None = None,
        digest: str | None = None,
        *,
        let_in: bool = False,
    ) -> None:
        """429 where the work that waits would take too long with this job's `cost` on top; alone it may.

        A key's job that came alone may be longer than the key's share of the queue. What is above the share
        counts against that key: turns go round the keys, so nobody else waits for it. What waits for any
        server is drawn by all that are there, each taken to be as fast as this one.
        """
        limits, work, own_s = self._limits, pool.waiting_work(), pool.seconds_for(cost)
        if not own_s:
            return  # no speed is known yet
        if backlog is not None:
            for name, more in backlog.work.items():
                work[name] = work.get(name, 0.0) + more / backlog.servers
        per_s, share_s = (
            cost / own_s,
            {name: limits.queue_s * limits.queue_share_of(name) for name in {key, *work}},
        )
        work = {
            name: there if name == key else min(there, per_s * share_s[name]) for name, there in work.items()
        }
        for whose, most_s in ((None, limits.queue_s), (key, share_s[key])):
            waiting = sum(work.values()) if whose is None else work.get(whose, 0.0)
            waiting_s = waiting / per_s
            if not let_in and self._held(pool, whose) and not self._is_due(key, digest):
                most_s *= 1 - 1 / HELD
            if not waiting or waiting_s + own_s <= most_s:
                continue
            too_much = waiting * (1 - max(0.0, most_s - own_s) / waiting_s)
            after_s = self._work_gone_s(pool, too_much, whose)
            self._promise(Reservation(time.monotonic() + after_s, key, num, cost, digest))
            whole = f"work of {format_number(waiting_s)} s waits already{owner(key) if whose else ''}"
            message = f"{whole}, and this is {format_number(own_s)} s; "
            message += f"at most {format_number(most_s, 4)} s may wait"
            raise Refused(429, "queue_full", message, retry_after_s=after_s)

    def _queue_of(self, key: str) -> int:
        """Pictures of a key that may wait."""
        return self._limits.of_key(key).queue or self._limits.queue_per_key

    def _promise(self, reservation: Reservation) -> None:
        self.kept(reservation.key, reservation.digest)  # it came, though in vain
        self._reservations.add(reservation._replace(share=self._returns_of(reservation.key).share))
        self._forget()

    def kept(self, key: str, digest: str | None) -> None:
        """A request that was refused before has come again: its place is no longer held."""
        one = self._reservations.due_of(key, digest, time.monotonic())
        if one is not None:
            self._reservations.remove(one)
            self._note_return(key, True)

    def _forget(self) -> None:
        """Those who did not come, and where they are too many, the last of the key with the most."""
        for one in self._reservations.late(time.monotonic()):
            self._reservations.remove(one)
            self._note_return(one.key, False)
        while len(self._reservations) > MOST_PROMISES:
            self._reservations.remove(self._reservations.last_of_most())

    def _note_return(self, key: str, came: bool) -> None:
        """Count a promise among those of its key that were taken up or not."""
        returns = self._returns.pop(key, None) or Returns()
        returns.note(came)
        self._returns[key] = returns
        while len(self._returns) > MOST_KEYS:
            del self._returns[next(iter(self._returns))]

    def _promised(self, amount: Callable[[Promised], float], key: str | None) -> float:
        """What is promised to those still to come, each by its share; of each key at most so many of its
        queues as `Returns` has it."""
        self._forget()
        counted = 0.0
        for of, one in self._reservations.to_come(time.monotonic()).items():
            if key is None or of == key:
                most = self._returns_of(of).queues * self._queue_of(of)
                counted += amount(one) * most / max(most, one.pictures)
        return counted

    def _returns_of(self, key: str) -> Returns:
        return self._returns.get(key) or UNKNOWN

    def _held(self, pool: ModelPool, key: str | None) -> int:
        """Pictures that places are held for: of each key no more than it may have in the queue.

        For a key that asks and never comes again nothing is held.
        """
        due: Counter[str] = Counter()
        for one in self._reservations.due(time.monotonic()):
            if key is None or one.key == key:
                due[one.key] += one.num
        return sum(
            min(num, max(0, self._queue_of(of) - pool.waiting(of) - self._reserved[of]))
            for of, num in due.items()
            if self._returns_of(of).share >= LEAST_RETURNS
        )

    def _is_due(self, key: str, digest: str | None) -> bool:
        return digest is not None and self._reservations.due_of(key, digest, time.monotonic()) is not None

    def _places_free_s(self, pool: ModelPool, num: int, key: str | None) -> float:
        """When so many pictures, of a key or of all, will have left the queue, and those promised before."""
        times = [one.after_s for one in pool.admissions() if key is None or one.key == key]
        if not times:
            return UNMEASURED_S
        num += math.ceil(self._promised(lambda one: one.pictures, key))
        beyond = max(0, num - len(times))  # who was promised a place will wait as well
        return times[min(num, len(times)) - 1] + beyond * times[-1] / len(times)

    def _work_gone_s(self, pool: ModelPool, work: float, key: str | None) -> float:
        """When so much of the waiting work will have been admitted, and what was promised before."""
        admissions = [one for one in pool.admissions() if key is None or one.key == key]
        work += self._promised(lambda one: one.cost, key)
        for one in admissions:
            work -= one.cost
            if work <= 0:
                return one.after_s
        last_s = admissions[-1].after_s if admissions else UNMEASURED_S
        return last_s + (pool.seconds_for(work) or 0.0)

    @contextmanager
    def reserved(self, key: str, num: int, uploads: Uploads | None = None) -> Iterator[None]:
        """Room in the queue for a job that is being written down."""
        this = object()
        self._reserved[key] += num
        if uploads is not None:
            self._reserved_uploads[this] = uploads
        try:
            yield
        finally:
            self._reserved_uploads.pop(this, None)
            self._reserved[key] -= num
            if not self._reserved[key]:
                del self._reserved[key]


class Backlog(NamedTuple):
    """What waits for any server."""

    pictures: Counter[str]
    """By key."""
    work: dict[str, float]
    """By key: pixels x steps x evaluations."""
    jobs: int
    oldest_s: float | None = None
    """When the oldest of them was accepted."""
    servers: int = 1
    """That are there to draw it."""


@dataclass(eq=False, repr=False)
class ActiveJob:
    """A job in memory: its row as accepted, and the work in the engine."""

    record: Record
    work: EngineJob
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    kept: bool = False
    """Ended in this process only: the next one takes it up."""
    deadline: asyncio.TimerHandle | None = None
    state: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    finished_s: float | None = None

    def end(self, state: str, result: dict[str, Any]) -> None:
        """Note how it ended; the store knows already."""
        self.state, self.result, self.finished_s = state, result, time.time()


class ActiveJobs:
    """By uid, and by key and id. Belongs to the event loop's thread."""

    def __init__(self, loop: Loop, metrics: Metrics) -> None:
        self._loop, self._metrics = loop, metrics
        self._by_uid: dict[str, ActiveJob] = {}
        self._by_id: dict[tuple[str, str], ActiveJob] = {}
        self._places: tuple[float, dict[Any, int]] = (0.0, {})
        self._attended: set[str] = set()
        self.forgotten: Callable[[EngineJob], None] = lambda _: None
        """Told of each job that leaves."""

    def __len__(self) -> int:
        return len(self._by_uid)

    def __iter__(self) -> Iterator[ActiveJob]:
        return iter(list(self._by_uid.values()))

    def get(self, uid: str) -> ActiveJob | None:
        """By what is unique in the store."""
        return self._by_uid.get(uid)

    def find(self, key: str, job_id: str) -> ActiveJob | None:
        """By what its client calls it."""
        return self._by_id.get((key, job_id))

    def uploads(self) -> dict[int, int]:
        """Bytes of the pictures that came with each, by `id`: jobs that were sent together share theirs."""
        held = (active.work.uploads for active in self._by_uid.values())
        return {id(uploads): uploads.num_bytes for uploads in held if uploads is not None}

    def add(self, active: ActiveJob) -> None:
        """A job to be worked on here."""
        self._by_uid[active.record.uid] = active
        self._by_id[active.record.key, active.record.id] = active
        self._metrics.live_jobs.set(len(self))

    def forget(self, active: ActiveJob) -> None:
        """A job that this process has no more to do with; its waiting clients get an answer."""
        self._by_uid.pop(active.record.uid, None)
        self._by_id.pop((active.record.key, active.record.id), None)
        if active.deadline is not None:
            active.deadline.cancel()
        self._places = 0.0, {}  # with its tickets, which have hold of the model
        self.forgotten(active.work)
        active.ended.set()
        self._loop.tick()
        self._metrics.live_jobs.set(len(self))

    def place(self, active: ActiveJob, pool: ModelPool) -> int | None:
        """Pictures to be admitted before a job's first; looked up anew at most every tick."""
        if active.work.started_s is not None:
            return None
        now = time.monotonic()
        if now - self._places[0] > TICK_S:
            self._places = now, pool.places()
        return self._places[1].get(active.work.tickets[0])

    @contextmanager
    def attended(self, job: Job) -> Iterator[None]:
        """While a client waits on its connection; such jobs are finished before the server stops."""
        self._attended.add(job.uid)
        try:
            yield
        finally:
            self._attended.discard(job.uid)

    def may_wait(self, active: ActiveJob) -> bool:
        """Whether it has not begun and nobody waits for it on a connection."""
        return active.work.started_s is None and active.work.uid not in self._attended
