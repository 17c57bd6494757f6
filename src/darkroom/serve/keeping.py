"""`Keeper`: finished pictures to the disk, and then their job to `done` in the store; never the other way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from darkroom.serve.hooks import Hooks, Withheld
from darkroom.serve.request import FINAL, Uploads
from darkroom.serve.results import PROBE_UID, PictureFiles, picture_name
from darkroom.serve.store import StorageError, Store
from darkroom.serve.work import Work

LOG = logging.getLogger("darkroom.serve")
RETRY_S = 1.0
UPLOADS = ("image.upload", "mask.upload")


class _ClosedError(Exception):
    """The server ends before the disk takes what is to be kept: the job runs again."""


class Keeper:
    """Writes in threads of its own. While the disk is full it holds finished pictures and tries again."""

    def __init__(
        self,
        results: PictureFiles,
        store: Store,
        over: Callable[[Work, str, dict[str, Any]], None],
        usd_per_hour: float | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self._results, self._store, self._over = results, store, over
        self.usd_per_hour = usd_per_hour
        self.hooks = hooks or Hooks()
        self.server: str | None = None
        """Whose pictures these are, where several servers share a database."""
        self.trouble: str | None = None
        """What the disk last complained of; None once it works again."""
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="darkroom-keeper")

    def close(self) -> None:
        """Write what is finished, but try no longer where it cannot be written: such jobs run again."""
        self._closing.set()
        self._pool.shutdown(wait=True)

    def check(self, work: Work, index: int) -> None:
        """Have the hooks see a finished picture, while others of its work may still be drawn."""
        work.files[index] = self._pool.submit(self.hooks.png, work.pictures[index])
        work.files[index].add_done_callback(lambda file: self._checked(work, file))

    def _checked(self, work: Work, file: Future[bytes]) -> None:
        """A picture that is withheld ends its job: what is left of it need not be drawn."""
        if not file.cancelled() and isinstance(error := file.exception(), Withheld) and not work.over:
            with suppress(RuntimeError):  # the pool is closed: the job runs again
                self._pool.submit(self._fail, work, "withheld", str(error))

    def keep(self, work: Work) -> None:
        """Write a work's pictures and end its job."""
        self._pool.submit(self._keep, work)

    def _keep(self, work: Work) -> None:
        with suppress(_ClosedError):
            try:
                self._store_pictures(work)
            except _ClosedError:
                raise
            except Withheld as error:
                self._fail(work, "withheld", str(error))
            except Exception:
                LOG.exception("job %s could not be stored", work.uid)
                self._fail(work, "failed", "the pictures could not be stored")

    def _store_pictures(self, work: Work) -> None:
        # Those were asked for before this was, so a thread has them already.
        files = {picture_name(i): file.result() for i, file in work.files.items()}
        num_bytes = self._until_it_works(lambda: self._results.write(work.uid, files))
        self._end(work, "done", self._result(work), num_bytes)

    def _fail(self, work: Work, code: str, message: str) -> None:
        self._end(work, "failed", {"error": {"code": code, "message": message}})

    def _end(self, work: Work, state: str, result: dict[str, Any], num_bytes: int = 0) -> None:
        """Write down how a job ended, unless it is over already; tell, and drop files that belong to none."""
        end = partial(self._store.end, work.uid, state, time.time(), result, num_bytes)
        if not self._until_it_works(lambda: end().result()):
            # Cancelled a moment before; or done: by another server, or by a write whose answer was lost.
            record = self._until_it_works(lambda: self._store.find_uid(work.uid).result())
            state, result = ("gone", {}) if record is None else (record.state, record.result)
        if state != "done":
            self._drop(work.uid)
        elif work.uploads is not None:  # they were there to begin again with
            self._drop(work.uid, UPLOADS)
        if state in FINAL:
            self._over(work, state, result)

    def _drop(self, uid: str, names: Collection[str] | None = None) -> None:
        try:
            self._results.delete(uid, names)
        except (OSError, StorageError) as error:
            LOG.warning("files of job %s stay until it is forgotten: %s", uid, error)

    def _result(self, work: Work) -> dict[str, Any]:
        assert work.prepared is not None
        cost = {"device_s": round(work.device_s, 6)}
        if self.usd_per_hour is not None:
            cost["usd"] = work.device_s * self.usd_per_hour / 3600
        pictures = [work.pictures[i].parameters for i in sorted(work.pictures)]
        result = {"pictures": pictures, "notes": list(work.prepared.notes), "cost": cost}
        return result if self.server is None else {**result, "server": self.server}

    def _until_it_works(self, write: Callable[[], Any]) -> Any:
        """The write's result. `_ClosedError` where the server is closed before it works."""
        while True:
            try:
                written = write()
                self.trouble = None
                return written
            except (OSError, StorageError) as error:
                self.trouble = getattr(error, "strerror", None) or str(error)
                LOG.error("pictures cannot be written: %s", self.trouble)
                if self._closing.wait(RETRY_S):
                    raise _ClosedError from error

    def probe(self) -> None:
        """Write and drop a small file, to see whether writing works."""
        try:
            self._results.write(PROBE_UID, {"probe": b"\0" * 4096})
            self._results.delete(PROBE_UID)
            self.trouble = None
        except (OSError, StorageError) as error:
            self.trouble = getattr(error, "strerror", None) or "the disk takes no writes"

    def write_uploads(self, uid: str, uploads: Uploads) -> None:
        """Keep the pictures that came with a job."""
        parts = zip(UPLOADS, (uploads.image, uploads.mask), strict=True)
        self._results.write(uid, {name: part for name, part in parts if part is not None})

    def read_uploads(self, uid: str) -> Uploads | None:
        """The pictures that came with a job."""
        image, mask = (self._results.read(uid, name) for name in UPLOADS)
        return None if image is None else Uploads(image, mask)
