"""Keeping house: files that no job has, pictures kept long enough, a disk that takes no writes."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time

from darkroom.serve.jobs.results import PictureFiles, ResultWriter
from darkroom.serve.jobs.store import JobStore, StorageError
from darkroom.serve.loop import Loop
from darkroom.serve.settings import Limits

LOG = logging.getLogger("darkroom.serve")
OWNERLESS_S = 600.0
"""Far longer than any server takes from a job's uploads to its row."""


class House:
    """Of one server's results and store."""

    def __init__(self, loop: Loop, results: PictureFiles, store: JobStore, keeper: ResultWriter) -> None:
        self._loop = loop
        self._results, self._store, self._keeper = results, store, keeper
        self._ownerless: dict[str, float] = {}  # uids of files without a job, and since when that was seen

    async def tidy(self) -> None:
        """Drop files without a job: a killed process had written them, and accepted no job for them yet."""
        there = list(await self._loop.in_thread(self._results.uids))
        known: set[str] = await asyncio.wrap_future(self._store.known(there))
        for uid in set(there) - known:
            await self._delete(uid)

    async def _delete(self, uid: str) -> bool:
        """Drop a job's files; whether they are gone."""
        try:
            await self._loop.in_thread(self._results.delete, uid)
        except (StorageError, OSError) as error:
            LOG.warning("files of job %s cannot be deleted: %s", uid, error)
            return False
        return True

    async def sweep(self, limits: Limits, min_free_bytes: int) -> None:
        """Drop what was kept long enough, and see whether disk and database take writes."""
        folder = self._results.folder
        if folder is not None and shutil.disk_usage(folder).free < min_free_bytes:
            self._keeper.trouble = "the disk is full"
        else:
            await self._loop.in_thread(self._keeper.probe)
        await asyncio.wrap_future(self._store.probe())
        gone = await asyncio.wrap_future(self._store.expired(time.time() - limits.keep_s, limits.keep_bytes))
        # Files first: a job that is forgotten leaves none that nobody looks for.
        if deleted := [uid for uid in gone if await self._delete(uid)]:
            await asyncio.wrap_future(self._store.forget(deleted))
        if folder is None:
            await self._tidy_shared()

    async def _tidy_shared(self) -> None:
        """`tidy` where other servers write too: what has had no job for long, nobody will accept."""
        now_s, there = time.monotonic(), await self._loop.in_thread(self._results.uids)
        self._ownerless = {uid: self._ownerless.get(uid, now_s) for uid in there}
        for uid, since_s in self._ownerless.items():
            if now_s - since_s >= OWNERLESS_S:
                await self._delete(uid)
