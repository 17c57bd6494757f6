"""Keeping house: files that no job has, pictures kept long enough, a disk that takes no writes."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import suppress

from darkroom.serve.jobs.results import PictureFiles, ResultWriter
from darkroom.serve.jobs.store import JobStore, StorageError
from darkroom.serve.loop import Loop
from darkroom.serve.settings import Limits


class House:
    """Of one server's results and store."""

    def __init__(self, loop: Loop, results: PictureFiles, store: JobStore, keeper: ResultWriter) -> None:
        self._loop = loop
        self._results, self._store, self._keeper = results, store, keeper

    async def tidy(self) -> None:
        """Drop files without a job: a killed process had written them, and accepted no job for them yet."""
        there = list(await self._loop.in_thread(self._results.uids))
        known: set[str] = await asyncio.wrap_future(self._store.known(there))
        for uid in set(there) - known:
            await self._loop.in_thread(self._results.delete, uid)

    async def sweep(self, limits: Limits, min_free_bytes: int) -> None:
        """Drop what was kept long enough, and see whether disk and database take writes."""
        folder = self._results.folder
        if folder is not None and shutil.disk_usage(folder).free < min_free_bytes:
            self._keeper.trouble = "the disk is full"
        else:
            await self._loop.in_thread(self._keeper.probe)
        await asyncio.wrap_future(self._store.probe())
        gone = await asyncio.wrap_future(self._store.expired(time.time() - limits.keep_s, limits.keep_bytes))
        deleted = []
        for uid in gone:  # files first: a job that is forgotten leaves none that nobody looks for
            with suppress(StorageError, OSError):
                await self._loop.in_thread(self._results.delete, uid)
                deleted.append(uid)
        if deleted:
            await asyncio.wrap_future(self._store.forget(deleted))
