"""`Endings`: how jobs begin and end. Reported by the engine's threads, written to the store, then sent on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from darkroom.errors import DarkroomError, InputError
from darkroom.sample.provenance import Provenance, how_to_sign
from darkroom.serve import logs
from darkroom.serve.engine.tickets import EngineJob
from darkroom.serve.errors import Refused, say
from darkroom.serve.hooks import Hooks
from darkroom.serve.jobs.active import Live, Lives, news
from darkroom.serve.jobs.results import RETRY_S, PictureFiles, ResultWriter
from darkroom.serve.jobs.store import JobStore, Record, StorageError
from darkroom.serve.loop import Loop
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import Event, EventKind, Job, too_late
from darkroom.serve.settings import ServeSettings
from darkroom.serve.shared_queue import Sharing
from darkroom.serve.traces import Traces

if TYPE_CHECKING:
    from darkroom.serve.engine.pool import ModelPool


LOG = logging.getLogger("darkroom.serve")


def _opened_provenance(settings: ServeSettings) -> Provenance | None:
    """What marks and signs the server's pictures: with the operator's certificate, else with one of its own
    in the state folder."""
    if not settings.provenance:
        if settings.sign is not None:
            raise InputError("--sign with --no-provenance", mend="leave one of them out")
        return None
    made = Provenance.opened(settings.sign, settings.state / "certificate.pem", say=settings.credentials)
    if not made.signs:
        LOG.info("pictures get a watermark and no credentials: %s", how_to_sign())
    return made


class Endings:
    """The `Listener` of all works; `began`, `made` and `failed` come on the engine's threads."""

    def __init__(
        self,
        loop: Loop,
        lives: Lives,
        pool: ModelPool,
        store: JobStore,
        results: PictureFiles,
        metrics: Metrics,
        settings: ServeSettings,
        traces: Traces | None = None,
    ) -> None:
        self._traces = traces
        self._loop, self._lives, self._pool = loop, lives, pool
        self._store, self._results = store, results
        self._metrics, self._usd_per_hour = metrics, settings.usd_per_hour or 0.0
        self.provenance = _opened_provenance(settings)
        hooks = Hooks.named(settings.hooks, self.provenance)
        self.keeper = ResultWriter(results, store, self._over_soon, settings.usd_per_hour, hooks)

    def began(self, work: EngineJob) -> None:
        """Of `Listener`."""
        future = self._store.start(work.uid, time.time())
        future.add_done_callback(_note_failure)

    def drawn(self, work: EngineJob, index: int) -> None:
        """Of `Listener`."""
        self.keeper.check(work, index)

    def made(self, work: EngineJob) -> None:
        """Of `Listener`."""
        self.keeper.keep(work)

    def failed(self, work: EngineJob, error: BaseException) -> None:
        """Of `Listener`."""
        reason = {"code": _code(error), "message": _told(error)}
        self._loop.soon(lambda: self._fail_soon(work.uid, reason))

    def _fail_soon(self, uid: str, reason: dict[str, str]) -> None:
        if (live := self._lives.get(uid)) is not None:
            self._loop.spawn(self.end(live, "failed", {"error": reason}))

    def overdue(self, live: Live) -> None:
        """Its deadline has passed."""
        reason = too_late(live.work.request.deadline_s or 0.0)
        self._loop.spawn(self.end(live, "failed", {"error": reason}))

    async def end(self, live: Live, state: str, result: dict[str, Any]) -> None:
        """Stop a job for good. Where it was over a moment before, that is how it ended."""
        self._pool.drop(live.work)
        state, result = await self.end_row(live.record.uid, state, result)
        self._over(live.work, state, result)

    async def end_row(self, uid: str, state: str, result: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Write down how a job ended, however long that takes, and drop its files unless it is done.

        Gives how it ended in truth: it may have been over before.
        """
        now_s = time.time()
        if not await self._until_it_works(lambda: self._store.end(uid, state, now_s, result)):
            record: Record | None = await self._until_it_works(lambda: self._store.find_uid(uid))
            if record is not None:
                state, result = record.state, record.result
        if state != "done":
            with suppress(StorageError, OSError):  # they go with the job, when it was kept long enough
                await self._loop.in_thread(self._results.delete, uid)
        return state, result

    async def _until_it_works(self, write: Callable[[], Future[Any]]) -> Any:
        """What the store gives; an end must be written down, or the job would run again after a restart."""
        while True:
            try:
                return await asyncio.wrap_future(write())
            except (StorageError, OSError):
                await asyncio.sleep(RETRY_S)

    def _over_soon(self, work: EngineJob, state: str, result: dict[str, Any]) -> None:
        self._loop.soon(lambda: self._over(work, state, result))

    def _over(self, work: EngineJob, state: str, result: dict[str, Any]) -> None:
        """A job's end is in the store: tell everybody."""
        live = self._lives.get(work.uid)
        if live is None:
            return
        if not work.over:  # withheld while more of it was being drawn
            self._pool.drop(work)
        live.end(state, result)
        self._lives.forget(live)
        self._metrics.over.labels(state).inc()
        if state == "done":
            self._count_done(work)
        self._tell_over(live)

    def _tell_over(self, live: Live) -> None:
        """A job's line in the log, and its spans."""
        fields = _fields_of(live)
        trace = None if self._traces is None else self._traces.job(live.work, live.state, fields)
        phases = {phase: round(seconds, 6) for phase, seconds in live.work.phases().items()}
        logs.event("job", **fields, phases=phases, trace_id=trace)

    def _count_done(self, work: EngineJob) -> None:
        num, metrics = len(work.tickets), self._metrics
        metrics.pictures.inc(num)
        metrics.pixels.inc(num * work.shape.pixels)
        metrics.job_seconds.observe(time.monotonic() - work.accepted_s)
        metrics.device_seconds.inc(work.device_s)
        metrics.key_pictures.labels(work.key).inc(num)
        metrics.key_device_seconds.labels(work.key).inc(work.device_s)
        for phase, seconds in work.phases().items():
            metrics.phase_seconds.labels(phase).observe(seconds)
        metrics.usd.inc(work.device_s * self._usd_per_hour / 3600)


def _fields_of(live: Live) -> dict[str, Any]:
    """What is said of a job that is over, besides its phases."""
    work, shape, error = live.work, live.work.shape, live.result.get("error", {})
    return {
        "job": work.uid,
        "id": live.record.id if live.record.id != work.uid else None,
        "request_id": work.request_id,
        "key": work.key,
        "state": live.state,
        "pictures": len(work.tickets),
        "size": f"{shape.width}x{shape.height}",
        "steps": shape.steps,
        "adapters": list(work.adapters) or None,
        "controls": [choice.net for choice in work.request.controls] or None,
        "device_s": round(work.device_s, 6),
        "sha256": work.hashes or None,
        "error": error.get("code"),
        "why": error.get("message"),
    }


def _code(error: BaseException) -> str:
    """A client's mistake that only drawing brought to light is one all the same."""
    return "invalid_value" if isinstance(error, InputError) else "failed"


def _told(error: BaseException) -> str:
    """What a client may read of a failure: darkroom's own words, else only the kind."""
    if isinstance(error, InputError):
        return say(error)
    return str(error) if isinstance(error, DarkroomError) else f"the picture failed: {type(error).__name__}"


def _note_failure(future: Any) -> None:
    if (error := future.exception()) is not None:
        LOG.warning("a job's start could not be noted: %s", error)


News = AsyncGenerator[tuple[EventKind, dict[str, Any]]]


class Watchers:
    """Belongs to the event loop's thread. The engine ticks only while somebody watches."""

    def __init__(self, loop: Loop, lives: Lives, pool: ModelPool, sharing: Sharing | None, most: int) -> None:
        self._loop, self._lives, self._pool = loop, lives, pool
        self._sharing, self._most = sharing, most
        self._count = 0

    def check_room(self) -> None:
        """429 where too many clients watch already: before the answer to one more begins."""
        if self._count >= self._most:
            raise Refused(429, "too_many_streams", "too many event streams are open", retry_after_s=5)

    async def events(
        self, get: Callable[[], Awaitable[Job]], key: str, job_id: str, after: int
    ) -> AsyncIterator[Event]:
        """A job's events from now on, numbered on from `after`; `get` gives the job as it is, or raises."""
        await get()
        number = after
        while True:
            live = self._lives.find(key, job_id)
            async with aclosing(self._of(live, key, job_id)) as stream:
                async for kind, data in stream:
                    number += 1
                    yield Event(number, kind, data)
            if self._lives.find(key, job_id) is not None:
                continue
            if (job := await get()).over:
                yield _last_event(job, number + 1)
                return
            if self._sharing is None:  # kept for the next process
                return

    async def _of(self, live: Live | None, key: str, job_id: str) -> News:
        if live is not None:
            with self._watched():
                async for one in self._here(live):
                    yield one
        elif self._sharing is not None:
            with self._watched():
                async for one in self._sharing.follow(key, job_id):
                    yield one

    async def _here(self, live: Live) -> News:
        """Of a job that is drawn here, until it is over."""
        seen: dict[str, Any] = {}
        while not live.ended.is_set():
            for one in news(live, seen, self._lives.place(live, self._pool)):
                yield one
            await self._loop.next_tick()
        for one in news(live, seen, None):
            yield one

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._set(self._count + 1)
        try:
            yield
        finally:
            self._set(self._count - 1)

    def _set(self, count: int) -> None:
        self._count = count
        self._pool.watch(count)


def _last_event(job: Job, number: int) -> Event:
    if job.state == "done":
        return Event(number, "done", {"pictures": list(job.pictures), "cost": job.cost})
    if job.state == "failed":
        return Event(number, "failed", dict(job.error or {}))
    return Event(number, "cancelled", {})
