"""`Core`: jobs from acceptance to stored pictures. Every API uses it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from pydantic import ValidationError

import darkroom
from darkroom.errors import DarkroomError, InputError, first_fault, is_system_failure
from darkroom.serve import logs
from darkroom.serve.engine import loader as opening
from darkroom.serve.engine.loop import Engine, Loop
from darkroom.serve.engine.pool import ModelPool
from darkroom.serve.engine.tickets import EngineJob, Shape
from darkroom.serve.jobs import admission
from darkroom.serve.jobs.active import ActiveJob, ActiveJobs, Backlog, Bench, Intake, over_quota
from darkroom.serve.jobs.admission import new_record
from darkroom.serve.jobs.events import Watchers, job_of, job_of_record
from darkroom.serve.jobs.results import Completion, Retention, picture_name
from darkroom.serve.jobs.store import LIVE, OverQuota, Record, StorageError
from darkroom.serve.logs import Traces
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import Event, Job, PictureRequest, Refused, StoredPicture, Uploads
from darkroom.serve.settings import ServeSettings
from darkroom.serve.shared_queue import Sharing, open_sharing, open_stores
from darkroom.serve.status import Catalogue, Status, status_of

T = TypeVar("T")
LOG = logging.getLogger("darkroom.serve")
SWEEP_S = 15.0
SUSPECT = 3
"""A job that was begun so often and never finished is drawn alone: should it be what ends the process, the
others are not begun with it, and the kills of a bad day do not count against jobs that only stood by."""
LOADING_RETRY_S, DRAINING_RETRY_S, STORAGE_RETRY_S, TAKE_UP_RETRY_S = 5.0, 10.0, 30.0, 1.0
CANCEL_S = 5.0
"""So long a client waits until its cancellation is written down; it is tried on after that."""


class Core:
    """One server's jobs. Its coroutines belong to the event loop that `start` was called in."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings, self.limits = settings, settings.limits_in_force
        self.metrics = Metrics()
        self.metrics.look(
            ready=lambda: self.trouble() is None,
            queue_age_s=self.queue_age_s,
            device_bytes=lambda: self.catalogue.device_bytes(),
            net_bytes=lambda: self.catalogue.net_bytes(),
        )
        self.results, self.store = open_stores(settings)
        self.state = "loading"
        """loading, ready, draining, or broken."""
        self.why = "the model is being loaded"
        self.error: Exception | None = None
        """Why it is broken, for who runs it."""
        self._answered_kept: set[str] = set()
        """Jobs whose waiting clients got the answer that the next process draws them."""
        self._loop = Loop()
        hooks = opening.EngineCallbacks(
            self._loop.on_tick, self._wake, lambda: self._loop.soon(self._defer_all)
        )
        self.pool = ModelPool(
            settings, self.metrics, self._loop, hooks, self._still_possible, self._fail_unloaded
        )
        self.catalogue = Catalogue(settings, self.pool, self._loop, self._not_known)
        self._active = ActiveJobs(self._loop, self.metrics)
        self._active.forgotten = self.pool.forget
        self._intake, self.bench = Intake(self.limits), Bench(self.limits)
        self.traces = None if settings.traces is None else Traces(settings.traces)
        self._completion = Completion(
            self._loop, self._active, self.pool, self.store, self.results, self.metrics, settings, self.traces
        )
        self._keeper, self.provenance = self._completion.keeper, self._completion.provenance
        self._retention = Retention(self._loop, self.results, self.store, self._keeper)
        self.sharing = open_sharing(settings, self.store, self._active)
        self._keeper.server = None if self.sharing is None else self.sharing.leases.owner
        self._watchers = Watchers(self._loop, self._active, self.pool, self.sharing, self.limits.watchers)
        self.attended = self._active.attended

    # ---- life

    async def start(self) -> None:
        """Begin to load the model; the core is of use meanwhile for all but new jobs."""
        self._loop.begin()
        self._loading = self._loop.spawn(self._load())
        self._loop.spawn(self._sweep())

    async def loaded(self) -> None:
        """Until the model is there, or cannot be."""
        await asyncio.shield(self._loading)

    async def _load(self) -> None:
        try:
            opened = await self.pool.open()
        except Exception as error:
            self._broken("the model cannot be loaded", error)
            return
        self.metrics.capacity.set(opened.engine.capacity)
        fields = {"version": darkroom.__version__, "model": self.pool.first.name}
        self.metrics.build.info(
            {**fields, "precision": self.settings.precision, "backend": self.settings.backend}
        )
        try:
            await self._take_up_all()
        except Exception as error:
            self._broken("the jobs that were kept cannot be taken up", error)
            return
        if self.state == "loading":
            self.state, self.why = "ready", ""

    def _broken(self, why: str, error: Exception) -> None:
        """No job will be taken by this process; the log says why, clients see no more than `why`."""
        self.state, self.why, self.error = "broken", why, error
        if not isinstance(error, InputError):  # a mistake is shown by who runs this, in one line
            LOG.error("%s: %s", why, type(error).__name__, exc_info=not isinstance(error, DarkroomError))

    async def _take_up_all(self) -> None:
        """A database or disk that cannot be read just now is waited for."""
        while True:
            try:
                await self._begin_with_what_is_there()
                return
            except (StorageError, OSError) as error:
                LOG.warning("jobs that were kept cannot be read just now: %s", error)
                self.why = "the jobs that were kept cannot be read just now"
                await asyncio.sleep(TAKE_UP_RETRY_S)

    async def _begin_with_what_is_there(self) -> None:
        if self.sharing is not None:
            self.sharing.begin(self.pool, self._take_up, self._defer)
            self._loop.spawn(self.sharing.run())
            return
        await self._retention.tidy()
        for record in await asyncio.wrap_future(self.store.live()):
            if self._active.get(record.uid) is None:
                await self._take_up(record)

    async def _take_up(self, record: Record, failures: int = 0) -> None:
        """A job that was accepted and not finished. One that cannot be taken up just now is tried again, more
        and more seldom; in a shared queue its lease ends, and another server may."""
        try:
            await self._begin(record)
        except Exception as error:
            if not isinstance(error, (StorageError, OSError)) and not is_system_failure(error):
                LOG.exception("job %s cannot be taken up; it is kept", record.uid)  # a mistake of ours
                return
            LOG.warning("job %s cannot be taken up just now: %s", record.uid, error)
            if self.sharing is None:
                self._loop.spawn(self._take_up_later(record, failures + 1))

    async def _take_up_later(self, record: Record, failures: int) -> None:
        await asyncio.sleep(TAKE_UP_RETRY_S * 2 ** min(failures - 1, 5))
        await self._take_up(record, failures)

    async def _begin(self, record: Record) -> None:
        if record.attempts >= self.limits.attempts:
            await self._end_record(record, "gave_up", f"begun {record.attempts} times and never finished")
            return
        try:
            request = PictureRequest.model_validate_json(record.request)
            request = admission.with_tags_read(request)
            uploads = await self._loop.in_thread(self._keeper.read_uploads, record.uid)
            await self._loop.in_thread(admission.check_uploads, record, uploads)
            shape = await self._shape(request, uploads)
        except (Refused, ValidationError) as error:
            why = first_fault(error.errors()) if isinstance(error, ValidationError) else error.message
            await self._end_record(record, "not_possible_any_more", why)
            return
        now: Record | None = await asyncio.wrap_future(self.store.find_uid(record.uid))
        # It may have been cancelled meanwhile, or taken up at another try.
        if now is not None and now.state in LIVE and self._active.get(now.uid) is None:
            self._enlist(now, request, shape, uploads)

    async def _end_record(self, record: Record, code: str, message: str) -> None:
        result = {"error": {"code": code, "message": message}}
        await asyncio.wrap_future(self.store.end(record.uid, "failed", time.time(), result))
        self.metrics.over.labels("failed").inc()
        fields: dict[str, Any] = {"job": record.uid, "id": record.id, "key": record.key}
        logs.event("job", **fields, state="failed", error=code, why=message)

    async def drain(self, seconds: float) -> None:
        """Take no new jobs; finish what is on its way and what somebody waits for; keep the rest."""
        self.state, self.why = "draining", "the server is being stopped"
        if self.sharing is not None:
            self.sharing.claims = False
        for active in self._active:
            if self._active.may_wait(active):
                self._defer(active)
        end = time.monotonic() + seconds
        while len(self._active) and time.monotonic() < end and self.pool.known and not self.pool.trouble:
            await asyncio.sleep(0.02)
        self._defer_all()

    def _defer_all(self) -> None:
        """No more can be done here: waiting clients get an answer, and the next process takes the jobs up."""
        for active in self._active:
            self._defer(active)

    def _defer(self, active: ActiveJob) -> None:
        """Leave a job for the next process: its row in the store stays as it is."""
        self.pool.drop(active.work)
        active.kept = True
        self._active.forget(active)
        if self.sharing is not None:
            self._loop.spawn(self.sharing.release([active.record.uid]))

    async def close(self) -> None:
        """Stop computing and close the store. Jobs that are not over stay in it."""
        self._loop.end_tasks()
        self.bench.close()
        await self.pool.close()
        await asyncio.to_thread(self._keeper.close)
        if self.sharing is not None:
            await self.sharing.release()
        self._loop.close()
        await asyncio.to_thread(self.store.close)
        self.results.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)

    # ---- what the API calls

    async def submit(
        self,
        request: PictureRequest,
        *,
        key: str,
        job_id: str | None = None,
        uploads: Uploads | None = None,
        together: Sequence[PictureRequest] = (),
    ) -> Job:
        """Accept a job for good: from here on it survives the process. `Refused` where it is not served.

        The same id with the same body gives the job that there is; with another body it is a conflict.
        `together` are the requests that it was sent with, itself among them: where there are several,
        `check_together` let them in, and the body is all of them.
        """
        # A client that leaves meanwhile must not leave a job accepted in the store that nobody works on.
        return await asyncio.shield(self._loop.spawn(self._submit(request, key, job_id, uploads, together)))

    async def check_together(
        self, wanted: Sequence[PictureRequest], *, key: str, ids: Sequence[str] = ()
    ) -> None:
        """Whether the queue takes several jobs that are of use only together, before the first is accepted.

        One by one, the last would be refused with when it alone fits, the others cancelled, and all of them
        counted against the key's quota, at each try anew.
        """
        there = [await self._there(key, one) is not None for one in ids] or [False] * len(wanted)
        new = [request for request, known in zip(wanted, there, strict=True) if not known]
        num = sum(request.num for request in new)
        if not num:
            return
        self._check_open()
        per_day = self.limits.of_key(key).pictures_per_day
        most = admission.most_at_once(self.limits, key)
        most = min(most, per_day or most)
        if num > most:
            raise Refused(422, "over_limit", f"at most {most} pictures in one request, not {num}")
        if per_day is not None and (used := await self.used_today(key)) + num > per_day:
            raise over_quota(OverQuota(per_day, used), key)
        digest = logs.again(admission.digest_of(wanted[0], None, wanted))
        self._intake.check_room(self.pool, key, num, self._backlog(), digest)
        self._intake.check_rate(key, len(new))
        self._intake.kept(key, digest)

    async def check_place(self, key: str, again: str, job_id: str | None) -> None:
        """429 for a request that finds no place in the queue for a single picture, whatever else it asks for.

        A job that is there is given all the same, and what else is wrong is found once there are places.
        `again` tells the request when it comes again.
        """
        if self.trouble() is not None:
            return
        if job_id is not None and self.store.may_have(key, job_id):  # to look takes longer than to refuse
            if self._intake.has_place(self.pool, key, 1, self._backlog(), again):
                return
            if await self._there(key, job_id) is not None:
                return
        self._intake.check_room(self.pool, key, 1, self._backlog(), again)

    def _backlog(self) -> Backlog | None:
        """What waits for any server."""
        return None if self.sharing is None else self.sharing.backlog

    async def _submit(
        self,
        request: PictureRequest,
        key: str,
        job_id: str | None,
        uploads: Uploads | None,
        together: Sequence[PictureRequest],
    ) -> Job:
        request, chosen = self._with_model(request)
        if uploads is None:
            digest = admission.digest_of(request, None, together)
        else:
            digest = await self._loop.in_thread(admission.digest_of, request, uploads, together)
        if job_id is not None:
            admission.check_job_id(job_id)
            if (there := await self._there(key, job_id)) is not None:
                return self._same(there, digest)
        self._check_open()
        request = admission.with_tags_read(request)
        admission.check_limits(request, self.limits, key)
        self._check_adapters(request)
        backlog, let_in, again = self._backlog(), len(together) > 1, logs.again(digest)
        self._intake.check_room(self.pool, key, request.num, backlog, again, let_in=let_in)
        self._intake.check_uploads(self.pool, self._active, uploads)
        if not let_in:
            self._intake.check_rate(key)
        uid = uuid.uuid4().hex
        with self._intake.reserved(key, request.num, uploads):
            shape = await self._shape(request, uploads)
            cost = shape.whole_cost * request.num
            backlog = self._backlog()
            self._intake.check_work(self.pool, key, request.num, cost, backlog, again, let_in=let_in)
            self._intake.kept(key, again)
            seed = _seed() if request.seed is None else request.seed
            other = _seed() if request.variation_seed is None else request.variation_seed
            drawn = {"variation_seed": other} if request.variation_strength else {}
            request = request.model_copy(update={"seed": seed, "model": chosen, **drawn})
            if self.settings.hooks:  # they see finished pictures only: a preview would get past them
                request = request.model_copy(update={"previews": 0})
            arguments = (uid, self.settings.name, key, job_id or uid, digest, request, shape, uploads)
            record = await self._loop.in_thread(new_record, *arguments)
            takes = self.sharing is None or self.sharing.takes(record)
            kept = await self._accept(record, uploads, takes)
            if kept.uid != uid:
                with suppress(StorageError, OSError):  # its uploads were written for nothing
                    await self._loop.in_thread(self.results.delete, uid)
                return self._same(job_of_record(kept), digest, kept.digest)
            self.metrics.accepted.inc()
            self.metrics.key_jobs.labels(key).inc()
            logs.about(uid)
            if takes:
                active = self._enlist(kept, request, shape, uploads)
                return job_of(active, self._place(active))
            assert self.sharing is not None
            self.sharing.waits(kept)
        return job_of_record(kept)

    async def _accept(self, record: Record, uploads: Uploads | None, takes: bool) -> Record:
        per_day = self.limits.of_key(record.key).pictures_per_day
        try:
            if uploads is not None:
                await self._loop.in_thread(self._keeper.write_uploads, record.uid, uploads)
            if self.sharing is not None:
                return await asyncio.wrap_future(
                    self.sharing.leases.accept(record, take=takes, per_day=per_day)
                )
            return await asyncio.wrap_future(self.store.accept(record, per_day))
        except OverQuota as error:
            if uploads is not None:
                with suppress(StorageError, OSError):  # they were written for nothing
                    await self._loop.in_thread(self.results.delete, record.uid)
            raise over_quota(error, record.key) from error
        except (StorageError, OSError) as error:
            if self.sharing is None:
                self._loop.spawn(self._adopt(record.uid))
            raise self._no_storage() from error

    async def _adopt(self, uid: str) -> None:
        """Take a job up whose acceptance was not confirmed, should it be in the store all the same: only the
        answer was lost. Its client was asked to try again, and finds it there."""
        while True:
            try:
                record: Record | None = await asyncio.wrap_future(self.store.find_uid(uid))
                break
            except (StorageError, OSError):
                await asyncio.sleep(TAKE_UP_RETRY_S)
        if record is not None and record.state in LIVE:
            await self._take_up(record)

    def _no_storage(self, message: str = "jobs cannot be kept just now") -> Refused:
        return Refused(507, "storage", message, retry_after_s=STORAGE_RETRY_S)

    async def _there(self, key: str, job_id: str) -> tuple[Job, str] | None:
        active = self._active.find(key, job_id)
        if active is not None:
            return job_of(active, self._place(active)), active.record.digest
        record = await self._stored(self.store.find(key, job_id))
        return None if record is None else (job_of_record(record), record.digest)

    def _same(self, there: tuple[Job, str] | Job, digest: str, other: str | None = None) -> Job:
        job, its = there if isinstance(there, tuple) else (there, other)
        if its != digest:
            raise Refused(409, "conflict", f"there is a job '{job.id}' with another body", param="job_id")
        logs.about(job.uid)
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

    def _with_model(self, request: PictureRequest) -> tuple[PictureRequest, str | None]:
        """A request that names its model only where that is not the first, and the name to keep with the job:
        another model must not draw it after a restart. 404 where there is none of that name."""
        if not self.pool.known:
            if self.pool.several and request.model is not None:
                self._check_open()
            return request.model_copy(update={"model": None}), None
        served = self.pool.find(request.model)
        other = None if served is self.pool.first else served.name
        kept = served.name if self.pool.several else None
        return request.model_copy(update={"model": other}), kept

    def _check_adapters(self, request: PictureRequest) -> None:
        opened = self.pool.find(request.model).opened
        library = None if opened is None else opened.library
        names = self.pool.adapter_names() if library is None else library.names()
        admission.check_adapters(request, library, names)

    async def _shape(self, request: PictureRequest, uploads: Uploads | None) -> Shape:
        """What a request costs; 422 where it cannot be. Of a model that is not loaded some is looked at only
        when it is."""
        served = self.pool.find(request.model)
        opened, model, limits = served.opened, self.catalogue.model_of(served), self.limits

        def checked() -> Shape:
            """The shape of what a request makes, after all checks that open its pictures. Raises Refused."""
            image, mask = admission.opened_images(request, uploads, limits)
            shape = admission.check_shape(model, request, limits, image, mask=mask)
            if opened is not None or self.settings.controls is None:
                nets = None if opened is None else opened.nets
                admission.check_controls(request, uploads, limits, nets, shape)
            else:
                admission.check_net_names(request, self.pool.net_names())
            admission.check_upscaler(request, self.catalogue.upscalers)
            if served.largest_load is not None:
                admission.check_load(model, shape, served.largest_load)
            admission.check_texts(model, request)
            return shape

        shape: Shape = await self._loop.in_thread(checked)
        return shape

    async def _still_possible(self, work: EngineJob) -> bool:
        """Whether a job that waited for its model can be drawn by it; else it has ended."""
        try:
            self._check_adapters(work.request)
            await self._shape(work.request, work.uploads)
        except Refused as error:
            if (active := self._active.get(work.uid)) is not None:
                reason = {"code": error.code, "message": error.message}
                self._loop.spawn(self._completion.end(active, "failed", {"error": reason}))
            return False
        return True

    def _fail_unloaded(self, work: EngineJob, error: BaseException) -> None:
        self._completion.failed(work, error)

    def _enlist(
        self, record: Record, request: PictureRequest, shape: Shape, uploads: Uploads | None
    ) -> ActiveJob:
        """Hand an accepted job to the engine."""
        work = EngineJob(record.uid, record.key, request, shape, self._completion, uploads)
        work.alone = record.attempts >= SUSPECT
        if (notes := logs.NOTES.get()) is not None:
            work.request_id, work.trace = notes.id, notes.trace
        active = ActiveJob(record, work)
        if self.state == "draining":
            self._defer(active)
            return active
        self._active.add(active)
        if record.due_s is not None:
            now_s = time.time() if self.sharing is None else self.sharing.leases.now_s()
            active.deadline = self._loop.later(
                max(0.0, record.due_s - now_s), self._completion.overdue, active
            )
        self.pool.submit(active.work)
        return active

    async def get(self, job_id: str, *, key: str, wait_s: float = 0.0) -> Job:
        """A job as it is now, or within `wait_s` once it is over; 404 where this key has none of that id."""
        active = self._active.find(key, job_id)
        if active is None and self.sharing is not None:
            return await self._elsewhere(self.sharing, job_id, key, wait_s)
        if active is not None and wait_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(active.ended.wait(), wait_s)
        if active is not None:
            return job_of(active, self._place(active))
        return job_of_record(await self._record(job_id, key))

    async def _elsewhere(self, sharing: Sharing, job_id: str, key: str, wait_s: float) -> Job:
        """A job that another server draws, or that is over."""
        try:
            if wait_s:
                await sharing.over(key, job_id, within_s=wait_s)
            job = await sharing.look(key, job_id)
        except (StorageError, OSError) as error:
            raise self._no_storage() from error
        if job is None:
            raise _no_such_job()
        return job

    async def _record(self, job_id: str, key: str) -> Record:
        record: Record | None = await self._stored(self.store.find(key, job_id))
        if record is None:
            raise _no_such_job()
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
        rows = [(record, self._active.get(record.uid)) for record in found]
        return [
            job_of(active, self._place(active)) if active else job_of_record(record)
            for record, active in rows
        ]

    def events(self, job_id: str, *, key: str, after: int = 0) -> AsyncIterator[Event]:
        """What happens to a job from now on, ending with its end; ids count on from `after`.

        Ends early, without a last word, where the server is being stopped and keeps the job for later.
        429 at once where too many watch already.
        """
        self._watchers.check_room()
        return self._watchers.events(lambda: self.get(job_id, key=key), key, job_id, after)

    async def finished(self, job_id: str, *, key: str) -> Job:
        """The job once it is over; 503 where the server stops first and keeps it for later."""
        while True:
            active = self._active.find(key, job_id)
            if active is not None:
                await active.ended.wait()
                if not active.kept:
                    return job_of(active, None)
            elif self.sharing is not None:
                await self.sharing.over(key, job_id)
            job = await self.get(job_id, key=key)
            if job.over:
                return job
            if self.sharing is None:
                if self.state == "loading":
                    self._check_open()
                self._answered_kept.add(job.uid)
                message = "the server stops; the job is kept"
                raise Refused(503, "draining", message, retry_after_s=DRAINING_RETRY_S)

    async def cancel(self, job_id: str, *, key: str) -> Job:
        """Have no more of a job computed. A job that is over stays as it is."""
        job = await self.get(job_id, key=key)
        if job.over or job.uid in self._answered_kept:
            return job
        active = self._active.find(key, job_id)
        if active is None:
            await self._soon_written(self._completion.end_row(job.uid, "cancelled", {}))
            logs.event("job", job=job.uid, id=job.id, key=key, state="cancelled")
            active = self._active.find(key, job_id)  # it was taken up meanwhile
        if active is not None:
            await self._soon_written(self._completion.end(active, "cancelled", {}))
        return await self.get(job_id, key=key)

    async def _soon_written(self, ending: Any) -> None:
        """Until a cancellation is in the store; 507 where that takes too long, and then it is tried on."""
        task = self._loop.spawn(ending)
        try:
            await asyncio.wait_for(asyncio.shield(task), CANCEL_S)
        except TimeoutError as error:
            raise self._no_storage("the cancellation cannot be written down just now") from error

    async def pictures(self, job_id: str, *, key: str) -> list[StoredPicture]:
        """The pictures of a done job; 409 while it is not done, 410 where they are gone."""
        job = await self.get(job_id, key=key)
        return [await self.picture(job, i) for i in range(self._done_pictures(job))]

    def _done_pictures(self, job: Job) -> int:
        if job.state == "failed":
            message = (job.error or {}).get("message", "the job failed")
            raise Refused(409, "job_failed", message)
        if job.state != "done":
            raise Refused(409, "not_done", f"the job is {job.state}", retry_after_s=1)
        return len(job.pictures)

    async def picture(self, job: Job, index: int) -> StoredPicture:
        """One picture of a done job."""
        if not 0 <= index < self._done_pictures(job):
            raise Refused(404, "no_such_picture", "the job has no such picture", param="index")
        try:
            png = await self._loop.in_thread(self.results.read, job.uid, picture_name(index))
        except StorageError as error:
            raise self._no_storage() from error
        if png is None:
            raise Refused(410, "expired", "the picture is no longer kept")
        return StoredPicture(png, job.pictures[index])

    async def picture_by_uid(self, uid: str, index: int) -> StoredPicture:
        """One picture by what only a signed address knows."""
        record = await self._stored(self.store.find_uid(uid))
        if record is None:
            raise Refused(404, "no_such_job", "no such picture, or it is no longer kept")
        return await self.picture(job_of_record(record), index)

    def glance(self, job_id: str, *, key: str) -> bytes | None:
        """The latest sight of a running job, as PNG, and asks for a newer one; None where there is none yet.

        None with hooks: they see finished pictures only, and a sight would get past them.
        """
        active = self._active.find(key, job_id)
        if active is None or self.settings.hooks:
            return None
        ticket = next((one for one in active.work.tickets if one.row is not None and not one.done), None)
        if ticket is not None:
            ticket.glance = True
        return active.work.glance

    def status(self) -> Status:
        """The server as it is now."""
        trouble = self.trouble()
        uploads_bytes = sum(self._active.uploads().values())
        why = trouble[1] if trouble else ""
        return status_of(self.pool, self.state, why, len(self._active), uploads_bytes)

    async def used_today(self, key: str) -> int:
        """Pictures of a key accepted since 0:00 UTC."""
        used: int = await self._stored(self.store.usage(key))
        return used

    async def upscaled(self, key: str, work: Callable[[], T], pictures: int) -> T:
        """The result of work on the bench that makes pictures: they count as those of jobs do."""
        per_day = self.limits.of_key(key).pictures_per_day
        if per_day is not None and pictures > per_day:
            message = f"at most {per_day} pictures in one request, not {pictures}"
            raise Refused(422, "over_limit", message)
        return await self.bench.do(key, work, pictures, self._counted(key, pictures, per_day))

    @asynccontextmanager
    async def _counted(self, key: str, num: int, per_day: int | None) -> AsyncIterator[None]:
        """With so many more pictures used of the key's day; not where they are not made."""
        now_s = time.time()
        try:
            await self._stored(self.store.use(key, num, now_s, per_day))
        except OverQuota as error:
            raise over_quota(error, key) from error
        try:
            yield
        except Exception:
            with suppress(StorageError, OSError):
                await asyncio.wrap_future(self.store.use(key, -num, now_s))
            raise

    def queue_age_s(self) -> float:
        """How long the oldest job that waits has waited, here or for any server of a shared queue."""
        now_s = time.monotonic()
        ages = [now_s - one.work.accepted_s for one in self._active if one.work.started_s is None]
        if self.sharing is not None:
            ages.append(self.sharing.backlog_age_s())
        return max(ages, default=0.0)

    def trouble(self) -> tuple[str, str] | None:
        """Why no new job is taken (code, message), None where they are."""
        if self.state != "ready":
            return self.state, self.why
        if (trouble := self.pool.trouble) is not None:
            return "broken", trouble
        if self.store.trouble is not None or self._keeper.trouble is not None:
            return "storage", "jobs cannot be written to the disk or the database"
        return None

    # ---- housekeeping

    async def _sweep(self) -> None:
        """Now and then drop what was kept long enough, and see whether the disk takes writes."""
        while True:
            with suppress(StorageError, OSError):
                await self._retention.sweep(self.limits, self.settings.min_free_bytes)
            await asyncio.sleep(SWEEP_S if self.trouble() is None else 1.0)

    # ---- small things

    @property
    def engine(self) -> Engine | None:
        """Of the first model, while that is loaded."""
        return self.pool.first.engine

    def _not_known(self) -> Refused:
        return Refused(503, self.state, self.why, retry_after_s=LOADING_RETRY_S)

    def _place(self, active: ActiveJob) -> int | None:
        return self._active.place(active, self.pool)

    def _wake(self) -> None:
        for engine in self.pool.engines:
            engine.wake()


def _seed() -> int:
    return secrets.randbelow(2**32)


def _no_such_job() -> Refused:
    return Refused(404, "no_such_job", "no such job, or it is no longer kept", param="job_id")
