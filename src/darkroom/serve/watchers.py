"""`Watchers`: clients that are told what happens to a job while it happens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

from darkroom.serve.live import Live, news
from darkroom.serve.lives import Lives
from darkroom.serve.loop import Loop
from darkroom.serve.refused import Refused
from darkroom.serve.request import Event, EventKind, Job
from darkroom.serve.sharing import Sharing

if TYPE_CHECKING:
    from darkroom.serve.engine import Engine

News = AsyncGenerator[tuple[EventKind, dict[str, Any]]]


class Watchers:
    """Belongs to the event loop's thread. The engine ticks only while somebody watches."""

    def __init__(self, loop: Loop, lives: Lives, sharing: Sharing | None, most: int) -> None:
        self._loop, self._lives, self._sharing, self._most = loop, lives, sharing, most
        self._count = 0
        self.engine: Engine | None = None

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
            async with aclosing(self._of(live, key, job_id)) as told:
                async for kind, data in told:
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
            for one in news(live, seen, self._lives.place(live, self.engine)):
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
        if self.engine is not None:
            self.engine.watchers = count


def _last_event(job: Job, number: int) -> Event:
    if job.state == "done":
        return Event(number, "done", {"pictures": list(job.pictures), "cost": job.cost})
    if job.state == "failed":
        return Event(number, "failed", dict(job.error or {}))
    return Event(number, "cancelled", {})
