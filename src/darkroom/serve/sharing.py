"""`Sharing`: several servers on one database draw from one queue, and each answers for every job.

A job that is accepted is drawn by the server that took it in if no other waits, that one has room and the
job's adapters at hand. Else whoever has the adapters and room takes it; where nobody has them, or after
`patience_s`, whoever has room: work goes to where its adapters are, and does not wait long for a server that
is busy. Leases (`leases`) say who has what.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from darkroom.serve.leases import Backlog, Elsewhere, Leases, adapters_of
from darkroom.serve.live import job_of_record
from darkroom.serve.lives import Lives
from darkroom.serve.request import EventKind, Job
from darkroom.serve.store import Record, StorageError

if TYPE_CHECKING:
    from darkroom.serve.engine import Engine
    from darkroom.serve.library import Library

LOG = logging.getLogger("darkroom.serve")
CLAIM_S = 0.1
RENEW_S = 0.5
"""So soon is a job that was cancelled at another server let go of."""
LOOK_S = 0.2
AHEAD = 2
"""Pictures that a server takes beyond those on their way, so that a step never lacks rows."""


class Sharing:
    """One server's part in it. Belongs to the event loop's thread."""

    def __init__(self, leases: Leases, lives: Lives, patience_s: float) -> None:
        self.leases, self._lives, self._patience_s = leases, lives, patience_s
        self.backlog = Backlog(Counter(), 0)
        """What nobody works on, as of late."""
        self.claims = True
        """Whether more jobs are taken; not while the server is being stopped."""
        self._missed: set[str] = set()
        self._engine: Engine | None = None
        self._library: Library | None = None
        self._take_up: Callable[[Record], Any] | None = None
        self._let_go: Callable[[Any], None] | None = None

    def begin(
        self,
        engine: Engine,
        library: Library | None,
        take_up: Callable[[Record], Any],
        let_go: Callable[[Any], None],
    ) -> None:
        """The model is there: `take_up` begins a claimed job, `let_go` drops one that is no longer ours."""
        self._engine, self._library, self._take_up, self._let_go = engine, library, take_up, let_go

    def takes(self, record: Record) -> bool:
        """Whether a new job is drawn here."""
        return not self.backlog.jobs and self._room() > 0 and adapters_of(record) <= self._at_hand()

    def waits(self, record: Record) -> None:
        """A new job waits for whoever has its turn."""
        self.backlog.pictures[record.key] += record.num
        self.backlog = Backlog(self.backlog.pictures, self.backlog.jobs + 1)

    def _at_hand(self) -> set[str]:
        """With those that jobs here are waiting for."""
        coming = {name for live in self._lives for name in live.work.adapters}
        return coming if self._library is None else coming | self._library.at_hand()

    def _room(self) -> int:
        return 0 if self._engine is None else AHEAD - self._engine.waiting()

    async def run(self) -> None:
        """Renew and claim, for as long as the server takes jobs."""
        renewed_s = 0.0
        while True:
            try:
                if time.monotonic() - renewed_s > RENEW_S:
                    renewed_s = time.monotonic()
                    await self.renew()
                await self._claim()
            except (StorageError, OSError) as error:
                LOG.warning("jobs cannot be shared just now: %s", error)
            await asyncio.sleep(CLAIM_S)

    async def renew(self) -> None:
        """Tell how far our jobs are; let go of those that ended elsewhere, or that another server has now."""
        before = {live.record.uid: live for live in self._lives}
        steps = {uid: (live.work.steps_done, live.work.steps_total) for uid, live in before.items()}
        ours = await asyncio.wrap_future(self.leases.renew(steps, self._at_hand()))
        gone = {uid: live for uid, live in before.items() if uid not in ours and live.state is None}
        for uid, live in gone.items():
            # One that is made may only be waiting to be told that it is done.
            if self._let_go is not None and (uid in self._missed or not live.work.over):
                self._let_go(live)
        self._missed = set(gone)
        self.backlog = await asyncio.wrap_future(self.leases.backlog())

    async def _claim(self) -> None:
        if not self.claims or (room := self._room()) < 1 or self._take_up is None:
            return
        for record in await asyncio.wrap_future(self.leases.claim(self._at_hand(), room, self._patience_s)):
            await self._take_up(record)

    async def release(self, uids: list[str] | None = None) -> None:
        """Let others draw these, or all that we have, at once."""
        await asyncio.wrap_future(self.leases.release(uids))

    async def look(self, key: str, job_id: str) -> Job | None:
        """A job of any server."""
        found = await asyncio.wrap_future(self.leases.look(key, job_id))
        return None if found is None else _job(found)

    async def follow(self, key: str, job_id: str) -> AsyncIterator[tuple[EventKind, dict[str, Any]]]:
        """What happens to a job that another server draws; ends when it is over, gone, or ours."""
        told: tuple[Any, ...] = ()
        while self._lives.find(key, job_id) is None:
            job = await self.look(key, job_id)
            if job is None or job.over:
                return
            now = (job.state, job.place, job.steps_done)
            if now != told and job.state == "queued" and job.place is not None:
                yield "queued", {"place": job.place}
            elif now != told and job.steps_done:
                each = job.steps_total // job.request.num
                step = min(job.steps_done, each)
                yield (
                    "step",
                    {
                        "picture": 0,
                        "step": step,
                        "of": each,
                        "done": job.steps_done,
                        "total": job.steps_total,
                    },
                )
            told = now
            await asyncio.sleep(LOOK_S)

    async def over(self, key: str, job_id: str, *, within_s: float | None = None) -> None:
        """Until a job of another server is over, gone, or ours, or so long."""
        end_s = None if within_s is None else time.monotonic() + within_s
        while self._lives.find(key, job_id) is None and (end_s is None or time.monotonic() < end_s):
            job = await self.look(key, job_id)
            if job is None or job.over:
                return
            await asyncio.sleep(LOOK_S)


def _job(found: Elsewhere) -> Job:
    job = job_of_record(found.record)
    if job.over:
        return job
    return replace(job, place=found.place, steps_done=found.steps_done, steps_total=found.steps_total)
