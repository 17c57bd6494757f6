"""A job that is not over, as the core holds it, and what can be told of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from darkroom.serve.request import EventKind, Job, PictureRequest
from darkroom.serve.store import Record
from darkroom.serve.work import Ticket, Work


@dataclass(eq=False, repr=False)
class Live:
    """A job in memory: its row as accepted, and the work in the engine."""

    record: Record
    work: Work
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
    """A job in memory as doors see it."""
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
    """A job in the store as doors see it."""
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
    """What a watcher has not been told yet; `seen` is what it was."""
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


def _step(work: Work, done: int) -> dict[str, Any]:
    """How far a job is, by the picture that is furthest from its end and on its way."""
    total = work.steps_total
    each = total // len(work.tickets)
    moving: list[Ticket] = [ticket for ticket in work.tickets if 0 < ticket.step < each]
    ticket = moving[0] if moving else max(work.tickets, key=lambda one: one.step)
    return {"picture": ticket.index, "step": ticket.step, "of": each, "done": done, "total": total}
