"""How jobs begin and end, and their pictures on disk, a folder for each job, and how long they stay.

Reported by the engine's threads, written to the store, then sent on. Writes are atomic and flushed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import sqlalchemy as sql

from darkroom.certificates import how_to_sign
from darkroom.errors import DarkroomError, InputError, is_system_failure
from darkroom.hardware.system import atomic_replace, lock_file, remove_file, remove_tree, sync_folder
from darkroom.sample.provenance import Origin, Provenance
from darkroom.serve import logs
from darkroom.serve.engine.loop import Loop
from darkroom.serve.engine.tickets import EngineJob
from darkroom.serve.hooks import Hooks, Withheld
from darkroom.serve.jobs.active import ActiveJob, ActiveJobs
from darkroom.serve.jobs.store import JOBS, METADATA, JobStore, Record, StorageError
from darkroom.serve.logs import Traces
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import FINAL, Uploads, say, too_late
from darkroom.serve.settings import Limits, ServeSettings

if TYPE_CHECKING:
    from darkroom.serve.engine.pool import ModelPool

UID = re.compile(r"[0-9a-f]{32}")
PROBE_START = "0" * 24
"""Of no job: written and dropped now and then, to see whether writing works."""
OWNERLESS_S = 600.0
"""Far longer than any server takes from a job's uploads to its row."""


class PictureFiles(Protocol):
    """Where the files of jobs are kept: a folder (`Results`), or a database (`files`)."""

    @property
    def folder(self) -> Path | None:
        """On the disk."""

    @property
    def secret(self) -> bytes:
        """Signs the addresses of pictures."""

    def write(self, uid: str, files: dict[str, bytes]) -> int:
        """Keep a job's files, by name; returns their bytes."""

    def read(self, uid: str, name: str) -> bytes | None:
        """One file of a job, None where it is gone."""

    def delete(self, uid: str, names: Collection[str] | None = None) -> None:
        """Drop all files of a job, or those of these names."""

    def uids(self) -> Collection[str]:
        """Of files that may be without a job."""

    def close(self) -> None:
        """Let go of it."""


class Results:
    """The pictures of jobs, by uid, under one folder which is locked for one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "pictures"
        try:
            _make_own(folder)
            self.folder.mkdir(exist_ok=True)
            self._lock = (folder / ".lock").open("w", encoding="utf-8")
            lock_file(self._lock)
        except BlockingIOError as error:
            raise InputError(
                f"another server runs on '{folder}'", mend="give --state another folder"
            ) from error
        except OSError as error:
            if is_system_failure(error):
                raise
            raise InputError(f"'{folder}' cannot be written: {error.strerror}") from error
        self.secret = _secret(folder / ".secret")
        """Signs the addresses of pictures."""

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.close()

    def write(self, uid: str, files: dict[str, bytes]) -> int:
        """Keep a job's files, by name; returns their bytes. On return they outlast a power cut."""
        folder = self._folder(uid)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write_flushed(folder / name, content)
        sync_folder(folder)
        sync_folder(folder.parent)
        return sum(len(content) for content in files.values())

    def read(self, uid: str, name: str) -> bytes | None:
        """One file of a job, None where it is gone."""
        try:
            return (self._folder(uid) / name).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, uid: str, names: Collection[str] | None = None) -> None:
        """Drop all files of a job, or those of these names."""
        if names is None and self._folder(uid).exists():
            remove_tree(self._folder(uid), must=True)
        for name in names or ():
            remove_file(self._folder(uid) / name)

    def uids(self) -> list[str]:
        """All jobs that have files."""
        names = (path.name for path in self.folder.glob("*/*"))
        return [name for name in names if UID.fullmatch(name) and not name.startswith(PROBE_START)]

    def _folder(self, uid: str) -> Path:
        assert UID.fullmatch(uid)
        return self.folder / uid[:2] / uid


def _make_own(folder: Path) -> None:
    """A folder that only who runs the server may look into: prompts and pictures are in it. One that is there
    keeps its mode."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def picture_name(index: int) -> str:
    """The file of a job's picture."""
    return f"{index}.png"


def _write_flushed(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    atomic_replace(temporary, path)


def _secret(path: Path) -> bytes:
    """Random bytes kept for the server's eyes alone, so that signed addresses hold across restarts."""
    try:
        found = path.read_bytes()
        if len(found) == 32:
            return found
    except FileNotFoundError:
        pass
    made = secrets.token_bytes(32)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(made)
    return made


FILES = sql.Table(
    "darkroom_files",
    METADATA,
    sql.Column("uid", sql.String(32), primary_key=True),
    sql.Column("name", sql.String(64), primary_key=True),
    sql.Column("content", sql.LargeBinary, nullable=False),
)
SECRET_UID = "secret"


class Files:
    """What `Results` is on a disk: the files of jobs by uid. StorageError where the database takes none."""

    folder = None

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self.secret: bytes = store.do(_shared_secret).result()
        """Signs the addresses of pictures, the same in every server."""

    def close(self) -> None:
        """Nothing is held."""

    def write(self, uid: str, files: dict[str, bytes]) -> int:
        """Keep a job's files, by name; returns their bytes."""

        def action(connection: sql.Connection) -> None:
            """Replace a job's files of these names."""
            of_job = FILES.c.uid == uid
            connection.execute(sql.delete(FILES).where(of_job, FILES.c.name.in_(list(files))))
            if files:
                rows = [{"uid": uid, "name": name, "content": content} for name, content in files.items()]
                connection.execute(sql.insert(FILES), rows)

        self._store.do(action).result()
        return sum(len(content) for content in files.values())

    def read(self, uid: str, name: str) -> bytes | None:
        """One file of a job, None where it is gone."""
        query = sql.select(FILES.c.content).where(FILES.c.uid == uid, FILES.c.name == name)
        future: Future[Any] = self._store.do(lambda connection: connection.execute(query).scalar())
        content = future.result()
        return None if content is None else bytes(content)

    def delete(self, uid: str, names: Collection[str] | None = None) -> None:
        """Drop all files of a job, or those of these names."""
        gone = sql.delete(FILES).where(FILES.c.uid == uid)
        if names is not None:
            gone = gone.where(FILES.c.name.in_(list(names)))
        self._store.do(lambda connection: connection.execute(gone)).result()

    def uids(self) -> Collection[str]:
        """Those that have files and no job: another server may be about to accept one."""
        query = sql.select(FILES.c.uid).distinct().outerjoin(JOBS, JOBS.c.uid == FILES.c.uid)
        query = query.where(JOBS.c.uid.is_(None), FILES.c.uid != SECRET_UID)
        future: Future[list[str]] = self._store.do(lambda c: [row[0] for row in c.execute(query)])
        return future.result()


def _shared_secret(connection: sql.Connection) -> bytes:
    query = sql.select(FILES.c.content).where(FILES.c.uid == SECRET_UID)
    found = connection.execute(query).scalar()
    if found is None:
        try:
            with connection.begin_nested():
                made = {"uid": SECRET_UID, "name": "signing", "content": secrets.token_bytes(32)}
                connection.execute(sql.insert(FILES).values(made))
        except sql.exc.IntegrityError:  # another server was quicker
            pass
        found = connection.execute(query).scalar()
    assert found is not None
    return bytes(found)


LOG = logging.getLogger("darkroom.serve")
RETRY_S = 1.0


class _ClosedError(Exception):
    """The server ends before the disk takes what is to be kept: the job runs again."""


class ResultWriter:
    """Writes in threads of its own. While the disk is full it holds finished pictures and tries again."""

    def __init__(
        self,
        results: PictureFiles,
        store: JobStore,
        over: Callable[[EngineJob, str, dict[str, Any]], None],
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
        self._probe_uid = PROBE_START + secrets.token_hex(4)  # its own: servers share a database
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="darkroom-keeper")

    def close(self) -> None:
        """Write what is finished, but try no longer where it cannot be written: such jobs run again."""
        self._closing.set()
        self._pool.shutdown(wait=True)

    def check(self, work: EngineJob, index: int) -> None:
        """Have the hooks see a finished picture, while others of its work may still be drawn."""
        uploads = work.uploads or Uploads()
        given = tuple(one for one in (uploads.image, uploads.mask) if one is not None)
        steering = tuple(one for pair in uploads.controls for one in pair if one is not None)
        origin = Origin(int(work.uid[:8], 16), given, steering)
        work.files[index] = self._pool.submit(self.hooks.png, work.pictures[index], origin)
        work.files[index].add_done_callback(lambda file: self._checked(work, file))

    def _checked(self, work: EngineJob, file: Future[bytes]) -> None:
        """A picture that is withheld, or that a hook fails at, ends its job: the rest need not be drawn."""
        if not file.cancelled() and (error := file.exception()) is not None and not work.over:
            with suppress(RuntimeError):  # the pool is closed: the job runs again
                self._pool.submit(self._fail_by, work, error)

    def keep(self, work: EngineJob) -> None:
        """Write a work's pictures and end its job."""
        self._pool.submit(self._keep, work)

    def _keep(self, work: EngineJob) -> None:
        with suppress(_ClosedError):
            try:
                self._store_pictures(work)
            except _ClosedError:
                raise
            except Exception as error:
                self._fail_by(work, error)

    def _fail_by(self, work: EngineJob, error: BaseException) -> None:
        """End a job whose pictures nobody gets; why is for the log alone, but what a hook withholds."""
        with suppress(_ClosedError):
            if isinstance(error, Withheld):
                self._fail(work, "withheld", str(error))
                return
            LOG.error("job %s could not be finished", work.uid, exc_info=error)
            self._fail(work, "failed", "the pictures could not be finished")

    def _store_pictures(self, work: EngineJob) -> None:
        # Those were asked for before this was, so a thread has them already.
        files = {picture_name(i): file.result() for i, file in work.files.items()}
        work.hashes = [hashlib.sha256(content).hexdigest() for content in files.values()]
        num_bytes = self._until_it_works(lambda: self._results.write(work.uid, files))
        self._end(work, "done", self._result(work), num_bytes)

    def _fail(self, work: EngineJob, code: str, message: str) -> None:
        self._end(work, "failed", {"error": {"code": code, "message": message}})

    def _end(self, work: EngineJob, state: str, result: dict[str, Any], num_bytes: int = 0) -> None:
        """Write down how a job ended, unless it is over already; tell, and drop files that belong to none."""
        end = partial(self._store.end, work.uid, state, time.time(), result, num_bytes)
        if not self._until_it_works(lambda: end().result()):
            # Cancelled a moment before; or done: by another server, or by a write whose answer was lost.
            record = self._until_it_works(lambda: self._store.find_uid(work.uid).result())
            state, result = ("gone", {}) if record is None else (record.state, record.result)
        if state != "done":
            self._drop(work.uid)
        elif work.uploads is not None:  # they were there to begin again with
            self._drop(work.uid, work.uploads.files())
        if state in FINAL:
            self._over(work, state, result)

    def _drop(self, uid: str, names: Collection[str] | None = None) -> None:
        try:
            self._results.delete(uid, names)
        except (OSError, StorageError) as error:
            LOG.warning("files of job %s stay until it is forgotten: %s", uid, error)

    def _result(self, work: EngineJob) -> dict[str, Any]:
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
            self._results.write(self._probe_uid, {"probe": b"\0" * 4096})
            self._results.delete(self._probe_uid)
            self.trouble = None
        except (OSError, StorageError) as error:
            self.trouble = getattr(error, "strerror", None) or "the disk takes no writes"
            LOG.error("pictures cannot be written: %s", error)

    def write_uploads(self, uid: str, uploads: Uploads) -> None:
        """Keep the pictures that came with a job."""
        self._results.write(uid, uploads.files())

    def read_uploads(self, uid: str) -> Uploads | None:
        """The pictures that came with a job."""
        return Uploads.read(lambda name: self._results.read(uid, name))


# ---- how long they stay


class Retention:
    """Deletes files of one server that no job has, and jobs that were kept long enough; sees a full disk."""

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


def _opened_provenance(settings: ServeSettings) -> Provenance | None:
    """What marks and signs the server's pictures: with the operator's certificate, else with one of its own
    in the state folder."""
    if not settings.provenance:
        if settings.sign is not None:
            raise InputError("--sign with --no-provenance", mend="leave one of them out")
        return None
    made = Provenance.opened(settings.sign, settings.state / "certificate.pem", say=settings.credentials)
    if not made.signs:
        LOG.info("pictures get a watermark and no credentials: %s", how_to_sign())
    return made


class Completion:
    """The `Listener` of all works; `began`, `made` and `failed` come on the engine's threads."""

    def __init__(
        self,
        loop: Loop,
        active_jobs: ActiveJobs,
        pool: ModelPool,
        store: JobStore,
        results: PictureFiles,
        metrics: Metrics,
        settings: ServeSettings,
        traces: Traces | None = None,
    ) -> None:
        self._traces = traces
        self._loop, self._active, self._pool = loop, active_jobs, pool
        self._store, self._results = store, results
        self._metrics, self._usd_per_hour = metrics, settings.usd_per_hour or 0.0
        self.provenance = _opened_provenance(settings)
        hooks = Hooks.named(settings.hooks, self.provenance)
        self.keeper = ResultWriter(results, store, self._over_soon, settings.usd_per_hour, hooks)

    def began(self, work: EngineJob) -> None:
        """Of `Listener`."""
        future = self._store.start(work.uid, time.time())
        future.add_done_callback(_note_failure)

    def drawn(self, work: EngineJob, index: int) -> None:
        """Of `Listener`."""
        self.keeper.check(work, index)

    def made(self, work: EngineJob) -> None:
        """Of `Listener`."""
        self.keeper.keep(work)

    def failed(self, work: EngineJob, error: BaseException) -> None:
        """Of `Listener`."""
        reason = {"code": _code(error), "message": _public_message(error)}
        self._loop.soon(lambda: self._fail_soon(work.uid, reason))

    def _fail_soon(self, uid: str, reason: dict[str, str]) -> None:
        if (active := self._active.get(uid)) is not None:
            self._loop.spawn(self.end(active, "failed", {"error": reason}))

    def overdue(self, active: ActiveJob) -> None:
        """Its deadline has passed."""
        reason = too_late(active.work.request.deadline_s or 0.0)
        self._loop.spawn(self.end(active, "failed", {"error": reason}))

    async def end(self, active: ActiveJob, state: str, result: dict[str, Any]) -> None:
        """Stop a job for good. Where it was over a moment before, that is how it ended."""
        self._pool.drop(active.work)
        state, result = await self.end_row(active.record.uid, state, result)
        self._over(active.work, state, result)

    async def end_row(self, uid: str, state: str, result: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Write down how a job ended, however long that takes, and drop its files unless it is done.

        Gives how it ended in truth: it may have been over before.
        """
        now_s = time.time()
        if not await self._until_it_works(lambda: self._store.end(uid, state, now_s, result)):
            record: Record | None = await self._until_it_works(lambda: self._store.find_uid(uid))
            if record is not None:
                state, result = record.state, record.result
        if state != "done":
            with suppress(StorageError, OSError):  # they go with the job, when it was kept long enough
                await self._loop.in_thread(self._results.delete, uid)
        return state, result

    async def _until_it_works(self, write: Callable[[], Future[Any]]) -> Any:
        """What the store gives; an end must be written down, or the job would run again after a restart."""
        while True:
            try:
                return await asyncio.wrap_future(write())
            except (StorageError, OSError):
                await asyncio.sleep(RETRY_S)

    def _over_soon(self, work: EngineJob, state: str, result: dict[str, Any]) -> None:
        self._loop.soon(lambda: self._over(work, state, result))

    def _over(self, work: EngineJob, state: str, result: dict[str, Any]) -> None:
        """A job's end is in the store: tell everybody."""
        active = self._active.get(work.uid)
        if active is None:
            return
        if not work.over:  # withheld while more of it was being drawn
            self._pool.drop(work)
        active.end(state, result)
        self._active.forget(active)
        self._metrics.over.labels(state).inc()
        if state == "done":
            self._count_done(work)
        self._notify_over(active)

    def _notify_over(self, active: ActiveJob) -> None:
        """A job's line in the log, and its spans."""
        fields = _fields_of(active)
        trace = None if self._traces is None else self._traces.job(active.work, active.state, fields)
        phases = {phase: round(seconds, 6) for phase, seconds in active.work.phases().items()}
        logs.event("job", **fields, phases=phases, trace_id=trace)

    def _count_done(self, work: EngineJob) -> None:
        num, metrics = len(work.tickets), self._metrics
        metrics.pictures.inc(num)
        metrics.pixels.inc(num * work.shape.pixels)
        metrics.job_seconds.observe(time.monotonic() - work.accepted_s)
        metrics.device_seconds.inc(work.device_s)
        metrics.key_pictures.labels(work.key).inc(num)
        metrics.key_device_seconds.labels(work.key).inc(work.device_s)
        for phase, seconds in work.phases().items():
            metrics.phase_seconds.labels(phase).observe(seconds)
        metrics.usd.inc(work.device_s * self._usd_per_hour / 3600)


def _fields_of(active: ActiveJob) -> dict[str, Any]:
    """What is said of a job that is over, besides its phases."""
    work, shape, error = active.work, active.work.shape, active.result.get("error", {})
    return {
        "job": work.uid,
        "id": active.record.id if active.record.id != work.uid else None,
        "request_id": work.request_id,
        "key": work.key,
        "state": active.state,
        "pictures": len(work.tickets),
        "size": f"{shape.width}x{shape.height}",
        "steps": shape.steps,
        "adapters": list(work.adapters) or None,
        "controls": [choice.net for choice in work.request.controls] or None,
        "device_s": round(work.device_s, 6),
        "sha256": work.hashes or None,
        "error": error.get("code"),
        "why": error.get("message"),
    }


def _code(error: BaseException) -> str:
    """A client's mistake that only drawing brought to light is one all the same."""
    return "invalid_value" if isinstance(error, InputError) else "failed"


def _public_message(error: BaseException) -> str:
    """What a client may read of a failure: darkroom's own words, else only the kind."""
    if isinstance(error, InputError):
        return say(error)
    return str(error) if isinstance(error, DarkroomError) else f"the picture failed: {type(error).__name__}"


def _note_failure(future: Any) -> None:
    if (error := future.exception()) is not None:
        LOG.warning("a job's start could not be noted: %s", error)
