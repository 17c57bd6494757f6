"""Jobs as the API shows them, and what happens to one while somebody watches."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from darkroom.serve.engine.loop import Loop
from darkroom.serve.engine.tickets import EngineJob, Ticket
from darkroom.serve.jobs.active import ActiveJob, ActiveJobs
from darkroom.serve.jobs.store import Record
from darkroom.serve.request import Event, EventKind, Job, PictureRequest, Refused

if TYPE_CHECKING:
    from darkroom.serve.engine.pool import ModelPool


def job_of(active: ActiveJob, place: int | None) -> Job:
    """A job in memory as the API shows it."""
    work, record = active.work, active.record
    begun = work.started_s is not None
    started_s = None if work.started_s is None else time.time() - (time.monotonic() - work.started_s)
    return _job(
        record,
        active.state or ("running" if begun else "queued"),
        work.request,
        active.result,
        started_s=started_s,
        finished_s=active.finished_s,
        place=None if begun or active.state else place,
        steps_done=work.steps_done,
        steps_total=work.steps_total,
    )


def job_of_record(record: Record) -> Job:
    """A job in the store as the API shows it."""
    request = PictureRequest.model_validate_json(record.request)
    return _job(
        record,
        record.state,
        request,
        record.result,
        started_s=record.started_s,
        finished_s=record.finished_s,
    )


def _job(record: Record, state: Any, request: PictureRequest, result: dict[str, Any], **more: Any) -> Job:
    return Job(
        id=record.id,
        uid=record.uid,
        key=record.key,
        state=state,
        request=request,
        created_s=record.created_s,
        pictures=tuple(result.get("pictures", ())),
        error=result.get("error"),
        notes=tuple(result.get("notes", ())),
        cost=result.get("cost", {}),
        **more,
    )


def news(
    active: ActiveJob, seen: dict[str, Any], place: int | None
) -> Iterator[tuple[EventKind, dict[str, Any]]]:
    """What a watcher has not been sent yet; `seen` is what it was."""
    work = active.work
    if work.started_s is None:
        if place is not None and seen.get("place") != place:
            seen["place"] = place
            yield "queued", {"place": place}
        return
    if "begun" not in seen:
        seen["begun"] = True
        seen["steps"] = -1
    if (done := work.steps_done) != seen["steps"] and done:
        seen["steps"] = done
        yield "step", _step(work, done)
    while len(work.previews) > seen.get("previews", 0):
        preview = work.previews[seen.get("previews", 0)]
        seen["previews"] = seen.get("previews", 0) + 1
        yield (
            "preview",
            {"picture": preview.picture, "index": preview.index, "step": preview.step, "png": preview.png},
        )


def _step(work: EngineJob, done: int) -> dict[str, Any]:
    """How far a job is, by the picture that is furthest from its end and on its way."""
    total = work.steps_total
    each = total // len(work.tickets)
    moving: list[Ticket] = [ticket for ticket in work.tickets if 0 < ticket.step < each]
    ticket = moving[0] if moving else max(work.tickets, key=lambda one: one.step)
    return {"picture": ticket.index, "step": ticket.step, "of": each, "done": done, "total": total}


News = AsyncGenerator[tuple[EventKind, dict[str, Any]]]


class ElsewhereDrawn(Protocol):
    """Where jobs that other servers draw can be followed."""

    def follow(self, key: str, job_id: str) -> AsyncIterator[tuple[EventKind, dict[str, Any]]]:
        """What happens to one, until it is over."""


class Watchers:
    """Belongs to the event loop's thread. The engine ticks only while somebody watches."""

    def __init__(
        self, loop: Loop, active_jobs: ActiveJobs, pool: ModelPool, sharing: ElsewhereDrawn | None, most: int
    ) -> None:
        self._loop, self._active, self._pool = loop, active_jobs, pool
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
            active = self._active.find(key, job_id)
            async with aclosing(self._of(active, key, job_id)) as stream:
                async for kind, data in stream:
                    number += 1
                    yield Event(number, kind, data)
            if self._active.find(key, job_id) is not None:
                continue
            if (job := await get()).over:
                yield _last_event(job, number + 1)
                return
            if self._sharing is None:  # kept for the next process
                return

    async def _of(self, active: ActiveJob | None, key: str, job_id: str) -> News:
        if active is not None:
            with self._watched():
                async for one in self._here(active):
                    yield one
        elif self._sharing is not None:
            with self._watched():
                async for one in self._sharing.follow(key, job_id):
                    yield one

    async def _here(self, active: ActiveJob) -> News:
        """Of a job that is drawn here, until it is over."""
        seen: dict[str, Any] = {}
        while not active.ended.is_set():
            for one in news(active, seen, self._active.place(active, self._pool)):
                yield one
            await self._loop.next_tick()
        for one in news(active, seen, None):
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
