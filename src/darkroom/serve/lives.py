"""`Lives`: the jobs that are not over, as this process holds them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from darkroom.serve.live import Live
from darkroom.serve.loop import TICK_S, Loop
from darkroom.serve.metrics import Metrics

if TYPE_CHECKING:
    from darkroom.serve.engine import Engine
    from darkroom.serve.request import Job


class Lives:
    """By uid, and by key and id. Belongs to the event loop's thread."""

    def __init__(self, loop: Loop, metrics: Metrics) -> None:
        self._loop, self._metrics = loop, metrics
        self._by_uid: dict[str, Live] = {}
        self._by_id: dict[tuple[str, str], Live] = {}
        self._places: tuple[float, dict[Any, int]] = (0.0, {})
        self._attended: set[str] = set()

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

    def add(self, live: Live) -> None:
        """A job to be worked on here."""
        self._by_uid[live.record.uid] = live
        self._by_id[live.record.key, live.record.id] = live
        self._metrics.live_jobs.set(len(self))

    def forget(self, live: Live) -> None:
        """A job that this process has no more to do with; whoever waits is told."""
        self._by_uid.pop(live.record.uid, None)
        self._by_id.pop((live.record.key, live.record.id), None)
        if live.deadline is not None:
            live.deadline.cancel()
        live.ended.set()
        self._loop.tick()
        self._metrics.live_jobs.set(len(self))

    def place(self, live: Live, engine: Engine | None) -> int | None:
        """Pictures to be admitted before a job's first; looked up anew at most every tick."""
        if live.work.started_s is not None or engine is None:
            return None
        now = time.monotonic()
        if now - self._places[0] > TICK_S:
            self._places = now, engine.places()
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
