"""`Core`: jobs from acceptance to stored pictures. All doors stand on it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from darkroom.errors import DarkroomError, InputError
from darkroom.serve import admission, cards, opening
from darkroom.serve.engine import Engine
from darkroom.serve.intake import Intake
from darkroom.serve.keeping import Keeper
from darkroom.serve.live import Live, job_of, job_of_record, news
from darkroom.serve.metrics import Metrics
from darkroom.serve.refused import Refused
from darkroom.serve.request import Event, Job, PictureRequest, StoredPicture, Uploads
from darkroom.serve.results import Results, picture_name
from darkroom.serve.settings import ServeSettings
from darkroom.serve.store import Record, StorageError, Store
from darkroom.serve.work import Shape, Work

LOG = logging.getLogger("darkroom.serve")
TICK_S = 0.03  # watchers are told at most so often
LOOK_S = 1.0  # and look by themselves so often
SWEEP_S = 15.0
UIDS_AT_ONCE = 500
LOADING_RETRY_S, DRAINING_RETRY_S, STORAGE_RETRY_S = 5.0, 10.0, 30.0


class Core:
    """One server's jobs. Its coroutines belong to the event loop that `start` was called in."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings, self.limits = settings, settings.limits
        self.metrics = Metrics()
        self.results = Results(settings.state)
        self.store = Store(settings.jobs or f"sqlite:///{settings.state / 'jobs.db'}", settings.name)
        self.state = "loading"
        """loading, ready, draining, or broken."""
        self.why = "the model is being loaded"
        self.engine: Engine | None = None
        self._opened: opening.Opened | None = None
        self._live: dict[str, Live] = {}
        self._by_id: dict[tuple[str, str], Live] = {}
        self._intake = Intake(self.limits)
        self._attended: set[str] = set()
        self._watching = 0
        self._tick: asyncio.Future[None] | None = None
        self._ticked_s = 0.0
        self._places: tuple[float, dict[Any, int]] = (0.0, {})
        self._tasks: set[asyncio.Task[Any]] = set()
        self._keeper = Keeper(self.results, self.store, self._over_soon, settings.usd_per_hour)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="darkroom-files")

    # ---- life

    async def start(self) -> None:
        """Begin to load the model; the core is of use meanwhile for all but new jobs."""
        self._loop = asyncio.get_running_loop()
        self._tick = self._loop.create_future()
        self._spawn(self._load())
        self._spawn(self._sweep())

    async def _load(self) -> None:
        hooks = opening.Hooks(self._on_tick, self._wake, lambda: self._soon(self._set_all_aside))
        try:
            opened = await asyncio.to_thread(opening.open_model, self.settings, self.metrics, hooks)
            self._opened, self.engine = opened, opened.engine
        except Exception as error:
            self._broken("the model cannot be loaded", error)
            return
        self.metrics.capacity.set(self.engine.capacity)
        self.engine.start()
        try:
            await self._tidy()
            for record in await asyncio.wrap_future(self.store.live()):
                await self._take_up(record)
        except Exception as error:
            self._broken("the jobs that were kept cannot be taken up", error)
            return
        if self.state == "loading":
            self.state, self.why = "ready", ""
            self.metrics.ready.set(1)

    def _broken(self, why: str, error: Exception) -> None:
        """No job will be taken by this process; the log says why, clients are told no more than `why`."""
        self.state, self.why = "broken", why
        told = str(error) if isinstance(error, InputError) else type(error).__name__
        LOG.error("%s: %s", why, told, exc_info=not isinstance(error, DarkroomError))

    async def _tidy(self) -> None:
        """Drop files without a job: a killed process had written them, and accepted no job for them yet."""
        there = await self._in_pool(self.results.uids)
        for start in range(0, len(there), UIDS_AT_ONCE):
            some = there[start : start + UIDS_AT_ONCE]
            known: set[str] = await asyncio.wrap_future(self.store.known(some))
            for uid in set(some) - known:
                await self._in_pool(self.results.delete, uid)

    async def _take_up(self, record: Record) -> None:
        """A job that an earlier process accepted and did not finish."""
        if record.attempts >= self.limits.attempts:
            await self._end_record(record, "gave_up", f"begun {record.attempts} times and never finished")
            return
        try:
            request = PictureRequest.model_validate_json(record.request)
            uploads = await self._in_pool(self._keeper.read_uploads, record.uid)
            shape = await self._shape(request, uploads, again=True)
        except (Refused, ValueError) as error:
            await self._end_record(record, "not_possible_any_more", str(error).splitlines()[0])
            return
        self._enlist(record, request, shape, uploads)

    async def _end_record(self, record: Record, code: str, message: str) -> None:
        result = {"error": {"code": code, "message": message}}
        await asyncio.wrap_future(self.store.end(record.uid, "failed", time.time(), result))

    async def drain(self, seconds: float) -> None:
        """Take no new jobs; finish what is on its way and what somebody waits for; keep the rest."""
        self.state, self.why = "draining", "the server is being stopped"
        self.metrics.ready.set(0)
        for live in list(self._live.values()):
            if live.work.started_s is None and live.work.uid not in self._attended:
                self._set_aside(live)
        end = time.monotonic() + seconds
        while self._live and time.monotonic() < end and self.engine is not None and not self.engine.trouble:
            await asyncio.sleep(0.02)
        self._set_all_aside()

    def _set_all_aside(self) -> None:
        """No more can be done here: whoever waits is told, and the next process takes the jobs up."""
        for live in list(self._live.values()):
            self._set_aside(live)

    def _set_aside(self, live: Live) -> None:
        """Leave a job for the next process: its row in the store stays as it is."""
        if self.engine is not None:
            self.engine.drop(live.work)
        live.kept = True
        self._forget(live)

    async def close(self) -> None:
        """Stop computing and let go of the store. Jobs that are not over stay in it."""
        for task in list(self._tasks):
            task.cancel()
        if self.engine is not None:
            await asyncio.to_thread(self.engine.stop)
        if self._opened is not None and self._opened.library is not None:
            self._opened.library.close()
        await asyncio.to_thread(self._keeper.close)
        self._pool.shutdown(wait=True)
        await asyncio.to_thread(self.store.close)
        self.results.close()

    # ---- what doors call

    async def submit(
        self,
        request: PictureRequest,
        *,
        key: str,
        job_id: str | None = None,
        uploads: Uploads | None = None,
    ) -> Job:
        """Accept a job for good: from here on it survives the process. `Refused` where it is not served.

        The same id with the same body gives the job that there is; with another body it is a conflict.
        """
        # A client that leaves meanwhile must not leave a job accepted in the store that nobody works on.
        return await asyncio.shield(self._spawn(self._submit(request, key, job_id, uploads)))

    async def _submit(
        self, request: PictureRequest, key: str, job_id: str | None, uploads: Uploads | None
    ) -> Job:
        digest = admission.digest_of(request, uploads)
        if job_id is not None:
            admission.check_job_id(job_id)
            if (there := await self._there(key, job_id)) is not None:
                return self._same(there, digest)
        self._check_open()
        shape = await self._shape(request, uploads)
        self._intake.check_room(self._engine, key, request.num)
        uid = uuid.uuid4().hex
        request = request.model_copy(update={"seed": _seed() if request.seed is None else request.seed})
        record = Record(
            uid=uid,
            server=self.settings.name,
            key=key,
            id=job_id or uid,
            digest=digest,
            state="queued",
            request=request.model_dump_json(),
            created_s=time.time(),
        )
        with self._intake.reserved(key, request.num):
            kept = await self._accept(record, uploads)
            if kept.uid != uid:
                return self._same(job_of_record(kept), digest, kept.digest)
            live = self._enlist(record, request, shape, uploads)
        self.metrics.accepted.inc()
        return job_of(live, self._place(live))

    async def _accept(self, record: Record, uploads: Uploads | None) -> Record:
        try:
            if uploads is not None:
                await self._in_pool(self._keeper.write_uploads, record.uid, uploads)
            return await asyncio.wrap_future(self.store.accept(record))
        except (StorageError, OSError) as error:
            raise self._no_storage() from error

    def _no_storage(self) -> Refused:
        return Refused(507, "storage", "jobs cannot be kept just now", retry_after_s=STORAGE_RETRY_S)

    async def _there(self, key: str, job_id: str) -> tuple[Job, str] | None:
        live = self._by_id.get((key, job_id))
        if live is not None:
            return job_of(live, self._place(live)), live.record.digest
        record = await self._stored(self.store.find(key, job_id))
        return None if record is None else (job_of_record(record), record.digest)

    def _same(self, there: tuple[Job, str] | Job, digest: str, other: str | None = None) -> Job:
        job, its = there if isinstance(there, tuple) else (there, other)
        if its != digest:
            raise Refused(409, "conflict", f"there is a job '{job.id}' with another body", param="job_id")
        return job

    def _check_open(self) -> None:
        trouble = self.trouble()
        if trouble is None:
            return
        code, message = trouble
        if code == "storage":
            raise self._no_storage()
        wait_s = LOADING_RETRY_S if code == "loading" else DRAINING_RETRY_S
        raise Refused(503, code, message, retry_after_s=wait_s)

    async def _shape(self, request: PictureRequest, uploads: Uploads | None, *, again: bool = False) -> Shape:
        """What a request costs; 422 where it cannot be. One accepted before is not held to limits again."""
        library = self._opened.library if self._opened is not None else None
        if not again:
            admission.check_limits(request, self.limits)
            admission.check_adapters(request, library)
        if uploads is None:
            image = admission.opened_image(request, None, self.limits)
        else:
            image = await self._in_pool(admission.opened_image, request, uploads, self.limits)
        return admission.check_shape(self._model, request, self.limits, image)

    def _enlist(self, record: Record, request: PictureRequest, shape: Shape, uploads: Uploads | None) -> Live:
        """Hand an accepted job to the engine."""
        live = Live(record, Work(record.uid, record.key, request, shape, self, uploads))
        if self.state == "draining":
            live.kept = True
            return live
        self._live[record.uid] = live
        self._by_id[record.key, record.id] = live
        if request.deadline_s is not None:
            left_s = max(0.0, record.created_s + request.deadline_s - time.time())
            live.deadline = self._loop.call_later(left_s, self._too_late, live)
        self._engine.submit(live.work)
        self.metrics.live_jobs.set(len(self._live))
        return live

    async def get(self, job_id: str, *, key: str, wait_s: float = 0.0) -> Job:
        """A job as it is now, or within `wait_s` once it is over; 404 where this key has none of that id."""
        live = self._by_id.get((key, job_id))
        if live is not None and wait_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(live.ended.wait(), wait_s)
        if live is not None:
            return job_of(live, self._place(live))
        return job_of_record(await self._record(job_id, key))

    async def _record(self, job_id: str, key: str) -> Record:
        record: Record | None = await self._stored(self.store.find(key, job_id))
        if record is None:
            raise Refused(404, "no_such_job", "no such job, or it is no longer kept", param="job_id")
        return record

    async def _stored(self, future: Any) -> Any:
        """What the store gives; 507 where it cannot."""
        try:
            return await asyncio.wrap_future(future)
        except (StorageError, OSError) as error:
            raise self._no_storage() from error

    async def jobs(
        self, *, key: str, state: str | None = None, limit: int = 100, before: float | None = None
    ) -> list[Job]:
        """A key's jobs, newest first; `before` is the `created_s` of the last one already seen."""
        found: list[Record] = await self._stored(
            self.store.find_all(key, state=state, limit=limit, before_s=before)
        )
        lives = [(record, self._live.get(record.uid)) for record in found]
        return [job_of(live, self._place(live)) if live else job_of_record(record) for record, live in lives]

    async def events(self, job_id: str, *, key: str, after: int = 0) -> AsyncIterator[Event]:
        """What happens to a job from now on, ending with its end; ids count on from `after`.

        Ends early, without a last word, where the server is being stopped and keeps the job for later.
        """
        await self.get(job_id, key=key)
        number = after
        live = self._by_id.get((key, job_id))
        if live is not None:
            with self._watched(live):
                seen: dict[str, Any] = {}
                while not live.ended.is_set():
                    for kind, data in news(live, seen, self._place(live)):
                        number += 1
                        yield Event(number, kind, data)
                    await self._next_tick()
                for kind, data in news(live, seen, None):
                    number += 1
                    yield Event(number, kind, data)
            if live.kept:
                return
        yield _last_event(await self.get(job_id, key=key), number + 1)

    @contextmanager
    def _watched(self, live: Live) -> Any:
        if self._watching >= self.limits.watchers:
            raise Refused(429, "too_many_streams", "too many event streams are open", retry_after_s=5)
        self._watching += 1
        if self.engine is not None:
            self.engine.watchers = self._watching
        try:
            yield
        finally:
            self._watching -= 1
            if self.engine is not None:
                self.engine.watchers = self._watching

    async def finished(self, job_id: str, *, key: str) -> Job:
        """The job once it is over; 503 where the server stops first and keeps it for later."""
        live = self._by_id.get((key, job_id))
        if live is not None:
            await live.ended.wait()
            if live.kept:
                raise Refused(503, "draining", "the server stops; the job is kept", retry_after_s=10)
            return job_of(live, None)
        return await self.get(job_id, key=key)

    @contextmanager
    def attended(self, job: Job) -> Any:
        """While a client waits on its connection; such jobs are finished before the server stops."""
        self._attended.add(job.uid)
        try:
            yield
        finally:
            self._attended.discard(job.uid)

    async def cancel(self, job_id: str, *, key: str) -> Job:
        """Have no more of a job computed. A job that is over stays as it is."""
        live = self._by_id.get((key, job_id))
        if live is None:
            return job_of_record(await self._record(job_id, key))
        await asyncio.shield(self._spawn(self._end(live, "cancelled", {})))
        return await self.get(job_id, key=key)

    async def pictures(self, job_id: str, *, key: str) -> list[StoredPicture]:
        """The pictures of a done job; 409 while it is not done, 410 where they are gone."""
        job = await self.get(job_id, key=key)
        return [await self.picture(job, i) for i in range(self._done_pictures(job))]

    def _done_pictures(self, job: Job) -> int:
        if job.state == "failed":
            told = (job.error or {}).get("message", "the job failed")
            raise Refused(409, "job_failed", told)
        if job.state != "done":
            raise Refused(409, "not_done", f"the job is {job.state}", retry_after_s=1)
        return len(job.pictures)

    async def picture(self, job: Job, index: int) -> StoredPicture:
        """One picture of a done job."""
        if not 0 <= index < self._done_pictures(job):
            raise Refused(404, "no_such_picture", "the job has no such picture", param="index")
        png = await self._in_pool(self.results.read, job.uid, picture_name(index))
        if png is None:
            raise Refused(410, "expired", "the picture is no longer kept")
        return StoredPicture(png, job.pictures[index])

    async def picture_by_uid(self, uid: str, index: int) -> StoredPicture:
        """One picture by what only a signed address knows."""
        record = await self._stored(self.store.find_uid(uid))
        if record is None:
            raise Refused(404, "no_such_job", "no such picture, or it is no longer kept")
        return await self.picture(job_of_record(record), index)

    @property
    def model(self) -> cards.ModelCard:
        """What the model is and can do."""
        return cards.model_card(self._model, self.settings)

    def adapters(self) -> list[cards.AdapterCard]:
        """The adapters that a request may name."""
        library = self._opened.library if self._opened is not None else None
        return [] if library is None else library.cards()

    def status(self) -> cards.Status:
        """The server as it is now."""
        trouble = self.trouble()
        return cards.status(self.engine, self.state, trouble[1] if trouble else "", len(self._live))

    def metrics_text(self) -> bytes:
        """The counters, with what is only looked up when asked for."""
        self.metrics.ready.set(self.trouble() is None)
        if self._opened is not None:
            device = self._opened.engine.studio.backend.device
            self.metrics.device_memory.set(opening.used_bytes(device))
        return self.metrics.text()

    def trouble(self) -> tuple[str, str] | None:
        """Why no new job is taken (code, message), None where they are."""
        if self.state != "ready":
            return self.state, self.why
        if self.engine is not None and self.engine.trouble is not None:
            return "broken", self.engine.trouble
        if self.store.trouble is not None or self._keeper.trouble is not None:
            return "storage", "jobs cannot be written to the disk or the database"
        return None

    # ---- how jobs end

    def began(self, work: Work) -> None:
        """Of `Listener`: on the engine's thread."""
        future = self.store.start(work.uid, time.time())
        future.add_done_callback(_note_failure)

    def made(self, work: Work) -> None:
        """Of `Listener`: on the engine's threads."""
        self._keeper.keep(work)

    def failed(self, work: Work, error: BaseException) -> None:
        """Of `Listener`: on the engine's threads."""
        told = {"code": "failed", "message": _told(error)}
        self._soon(lambda: self._fail_soon(work.uid, told))

    def _fail_soon(self, uid: str, told: dict[str, str]) -> None:
        if (live := self._live.get(uid)) is not None:
            self._spawn(self._end(live, "failed", {"error": told}))

    def _too_late(self, live: Live) -> None:
        told = {"code": "deadline", "message": f"not done within {live.work.request.deadline_s:g} s"}
        self._spawn(self._end(live, "failed", {"error": told}))

    async def _end(self, live: Live, state: str, result: dict[str, Any]) -> None:
        """Stop a job for good. Where its pictures were stored a moment before, it is done and stays so."""
        self._engine.drop(live.work)
        now_s = time.time()
        while True:
            try:
                moved = await asyncio.wrap_future(self.store.end(live.record.uid, state, now_s, result))
                break
            except (StorageError, OSError):
                await asyncio.sleep(1)  # it must be written down, or it would run again after a restart
        if moved:
            self._over(live.work, state, result)
            await self._in_pool(self.results.delete, live.record.uid)

    def _over_soon(self, work: Work, state: str, result: dict[str, Any]) -> None:
        self._soon(lambda: self._over(work, state, result))

    def _over(self, work: Work, state: str, result: dict[str, Any]) -> None:
        """A job's end is in the store: tell everybody."""
        live = self._live.get(work.uid)
        if live is None:
            return
        live.end(state, result)
        self._forget(live)
        self.metrics.over.labels(state).inc()
        if state == "done":
            self._count_done(work)

    def _count_done(self, work: Work) -> None:
        num = len(work.tickets)
        self.metrics.pictures.inc(num)
        self.metrics.pixels.inc(num * work.shape.pixels)
        self.metrics.job_seconds.observe(time.monotonic() - work.accepted_s)
        self.metrics.device_seconds.inc(work.device_s)
        self.metrics.usd.inc(work.device_s * (self.settings.usd_per_hour or 0) / 3600)

    def _forget(self, live: Live) -> None:
        self._live.pop(live.record.uid, None)
        self._by_id.pop((live.record.key, live.record.id), None)
        if live.deadline is not None:
            live.deadline.cancel()
        live.ended.set()
        self._tick_now()
        self.metrics.live_jobs.set(len(self._live))

    # ---- keeping house

    async def _sweep(self) -> None:
        """Now and then drop what was kept long enough, and see whether the disk takes writes."""
        while True:
            with suppress(StorageError, OSError):
                await self._sweep_once()
            await asyncio.sleep(SWEEP_S if self.trouble() is None else 1.0)

    async def _sweep_once(self) -> None:
        free_bytes = shutil.disk_usage(self.results.folder).free
        if free_bytes < self.settings.min_free_bytes:
            self._keeper.trouble = "the disk is full"
        else:
            await self._in_pool(self._keeper.probe)
        await asyncio.wrap_future(self.store.probe())
        gone = await asyncio.wrap_future(
            self.store.expired(time.time() - self.limits.keep_s, self.limits.keep_bytes)
        )
        if gone:
            await asyncio.wrap_future(self.store.forget(gone))
            for uid in gone:
                await self._in_pool(self.results.delete, uid)

    # ---- small things

    @property
    def _engine(self) -> Engine:
        if self.engine is None:
            raise Refused(503, self.state, self.why, retry_after_s=LOADING_RETRY_S)
        return self.engine

    @property
    def _model(self) -> Any:
        if self._opened is None:
            raise Refused(503, self.state, self.why, retry_after_s=LOADING_RETRY_S)
        return self._opened.model

    def _place(self, live: Live) -> int | None:
        """Pictures to be admitted before a job's first; looked up anew at most every tick."""
        if live.work.started_s is not None or self.engine is None:
            return None
        now = time.monotonic()
        if now - self._places[0] > TICK_S:
            self._places = now, self.engine.places()
        return self._places[1].get(live.work.tickets[0])

    def _on_tick(self) -> None:
        """On the engine's thread, after each step while somebody watches."""
        now = time.monotonic()
        if now - self._ticked_s > TICK_S:
            self._ticked_s = now
            self._soon(self._tick_now)

    def _wake(self) -> None:
        if self.engine is not None:
            self.engine.wake()

    def _tick_now(self) -> None:
        if self._tick is not None and not self._tick.done():
            self._tick.set_result(None)

    async def _next_tick(self) -> None:
        if self._tick is None or self._tick.done():
            self._tick = self._loop.create_future()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._tick), LOOK_S)

    def _soon(self, call: Callable[[], Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the job stays in the store
            self._loop.call_soon_threadsafe(call)

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_pool(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await self._loop.run_in_executor(self._pool, call, *arguments)


def _seed() -> int:
    return secrets.randbelow(2**32)


def _told(error: BaseException) -> str:
    """What a client may read of a failure: darkroom's own words, else only the kind."""
    return str(error) if isinstance(error, DarkroomError) else f"the picture failed: {type(error).__name__}"


def _note_failure(future: Any) -> None:
    if (error := future.exception()) is not None:
        LOG.warning("a job's start could not be noted: %s", error)


def _last_event(job: Job, number: int) -> Event:
    if job.state == "done":
        return Event(number, "done", {"pictures": list(job.pictures), "cost": job.cost})
    if job.state == "failed":
        return Event(number, "failed", dict(job.error or {}))
    return Event(number, "cancelled", {})
