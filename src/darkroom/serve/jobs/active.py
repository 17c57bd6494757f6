"""A job that is not over, as the core holds it, and what can be reported of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from darkroom.serve.engine.tickets import TICK_S, EngineJob, Loop, Ticket
from darkroom.serve.jobs.store import Record
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import EventKind, Job, PictureRequest

if TYPE_CHECKING:
    from darkroom.serve.engine.pool import ModelPool


@dataclass(eq=False, repr=False)
class Live:
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


def job_of(live: Live, place: int | None) -> Job:
    """A job in memory as the API shows it."""
    work, record = live.work, live.record
    begun = work.started_s is not None
    started_s = None if work.started_s is None else time.time() - (time.monotonic() - work.started_s)
    return _job(
        record,
        live.state or ("running" if begun else "queued"),
        work.request,
        live.result,
        started_s=started_s,
        finished_s=live.finished_s,
        place=None if begun or live.state else place,
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


def news(live: Live, seen: dict[str, Any], place: int | None) -> Iterator[tuple[EventKind, dict[str, Any]]]:
    """What a watcher has not been sent yet; `seen` is what it was."""
    work = live.work
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


class Lives:
    """By uid, and by key and id. Belongs to the event loop's thread."""

    def __init__(self, loop: Loop, metrics: Metrics) -> None:
        self._loop, self._metrics = loop, metrics
        self._by_uid: dict[str, Live] = {}
        self._by_id: dict[tuple[str, str], Live] = {}
        self._places: tuple[float, dict[Any, int]] = (0.0, {})
        self._attended: set[str] = set()
        self.forgotten: Callable[[EngineJob], None] = lambda _: None
        """Told of each job that leaves."""

    def __len__(self) -> int:
        return len(self._by_uid)

    def __iter__(self) -> Iterator[Live]:
        return iter(list(self._by_uid.values()))

    def get(self, uid: str) -> Live | None:
        """By what is unique in the store."""
        return self._by_uid.get(uid)

    def find(self, key: str, job_id: str) -> Live | None:
        """By what its client calls it."""
        return self._by_id.get((key, job_id))

    def uploads(self) -> dict[int, int]:
        """Bytes of the pictures that came with each, by `id`: jobs that were sent together share theirs."""
        held = (live.work.uploads for live in self._by_uid.values())
        return {id(uploads): uploads.num_bytes for uploads in held if uploads is not None}

    def add(self, live: Live) -> None:
        """A job to be worked on here."""
        self._by_uid[live.record.uid] = live
        self._by_id[live.record.key, live.record.id] = live
        self._metrics.live_jobs.set(len(self))

    def forget(self, live: Live) -> None:
        """A job that this process has no more to do with; its waiting clients get an answer."""
        self._by_uid.pop(live.record.uid, None)
        self._by_id.pop((live.record.key, live.record.id), None)
        if live.deadline is not None:
            live.deadline.cancel()
        self._places = 0.0, {}  # with its tickets, which have hold of the model
        self.forgotten(live.work)
        live.ended.set()
        self._loop.tick()
        self._metrics.live_jobs.set(len(self))

    def place(self, live: Live, pool: ModelPool) -> int | None:
        """Pictures to be admitted before a job's first; looked up anew at most every tick."""
        if live.work.started_s is not None:
            return None
        now = time.monotonic()
        if now - self._places[0] > TICK_S:
            self._places = now, pool.places()
        return self._places[1].get(live.work.tickets[0])

    @contextmanager
    def attended(self, job: Job) -> Iterator[None]:
        """While a client waits on its connection; such jobs are finished before the server stops."""
        self._attended.add(job.uid)
        try:
            yield
        finally:
            self._attended.discard(job.uid)

    def may_wait(self, live: Live) -> bool:
        """Whether it has not begun and nobody waits for it on a connection."""
        return live.work.started_s is None and live.work.uid not in self._attended
