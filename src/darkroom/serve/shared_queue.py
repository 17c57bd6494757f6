"""`Sharing`: several servers on one database draw from one queue, and each answers for every job.

A job that is accepted is drawn by the server that took it in if no other waits, that one has capacity and the
job's model and adapters at hand. Else a server with them and capacity takes it; where nobody has them, or
after `patience_s` (of another's model MODEL_PATIENCE_S), any with capacity: work goes to where its adapters
are, and does not wait long for a server that is busy. Leases (`leases`) say who has what.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite

from darkroom.errors import InputError
from darkroom.serve.jobs.active import ActiveJobs, Backlog
from darkroom.serve.jobs.events import job_of_record
from darkroom.serve.jobs.results import FILES, Files, PictureFiles, Results
from darkroom.serve.jobs.store import JOBS, LIVE, METADATA, JobStore, Record, StorageError, record_of
from darkroom.serve.request import EventKind, Job, too_late
from darkroom.serve.settings import ServeSettings

if TYPE_CHECKING:
    from darkroom.serve.engine.pool import ModelPool


LOG = logging.getLogger("darkroom.serve")
CLAIM_S = 0.1
RENEW_S = 0.5
"""So soon is a job released that was cancelled at another server."""
LOOK_S = 0.2
MODEL = "model/"
"""Begins a model's name among those of adapters, which hold no slash."""
MODEL_PATIENCE_S = 10.0
"""So long a job is left to a server that has its model in memory: to load one takes about that."""
AHEAD = 2
"""Pictures that a server takes beyond those on their way, so that a step never lacks rows."""


class Sharing:
    """One server's part in it. Belongs to the event loop's thread."""

    def __init__(self, leases: Leases, active_jobs: ActiveJobs, patience_s: float) -> None:
        self.leases, self._active, self._patience_s = leases, active_jobs, patience_s
        self.backlog = Backlog(Counter(), {}, 0)
        """What nobody works on, as of late."""
        self.claims = True
        """Whether more jobs are taken; not while the server is being stopped."""
        self._missed: set[str] = set()
        self._pool: ModelPool | None = None
        self._take_up: Callable[[Record], Any] | None = None
        self._release: Callable[[Any], None] | None = None

    def begin(
        self,
        pool: ModelPool,
        take_up: Callable[[Record], Any],
        release: Callable[[Any], None],
    ) -> None:
        """A model is there: `take_up` begins a claimed job, `release` drops one that is no longer ours."""
        self._pool, self._take_up, self._release = pool, take_up, release

    def takes(self, record: Record) -> bool:
        """Whether a new job is drawn here."""
        return not self.backlog.jobs and self._room() > 0 and _needs_of(record) <= self._at_hand()

    def waits(self, record: Record) -> None:
        """A new job waits for a server whose turn it is."""
        self.backlog.pictures[record.key] += record.num
        self.backlog.work[record.key] = self.backlog.work.get(record.key, 0.0) + record.work
        self.backlog = self.backlog._replace(jobs=self.backlog.jobs + 1)

    def backlog_age_s(self) -> float:
        """How long the oldest job that nobody works on has waited, by the database's time."""
        oldest_s = self.backlog.oldest_s
        return 0.0 if oldest_s is None else max(0.0, self.leases.now_s() - oldest_s)

    def _at_hand(self) -> set[str]:
        """Adapters and, of several, models; with those that jobs here are waiting for."""
        there = {name for active in self._active for name in active.work.adapters}
        if (pool := self._pool) is None:
            return there
        for opened in pool.opened:
            there |= set() if opened.library is None else opened.library.at_hand()
        if pool.several:
            there |= {MODEL + pool.find(active.work.request.model).name for active in self._active}
            there |= {MODEL + one.name for one in pool.served if one.opened is not None and not one.closing}
        return there

    def _room(self) -> int:
        return 0 if self._pool is None else AHEAD - self._pool.waiting()

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
        """Write how far our jobs are; release those that ended elsewhere, or that another server has now."""
        before = {active.record.uid: active for active in self._active}
        steps = {uid: (active.work.steps_done, active.work.steps_total) for uid, active in before.items()}
        ours = await asyncio.wrap_future(self.leases.renew(steps, self._at_hand()))
        gone = {uid: active for uid, active in before.items() if uid not in ours and active.state is None}
        for uid, active in gone.items():
            # One that is made may only be waiting for the note that it is done.
            if self._release is not None and (uid in self._missed or not active.work.over):
                self._release(active)
        self._missed = set(gone)
        self.backlog = await asyncio.wrap_future(self.leases.backlog())

    async def _claim(self) -> None:
        if not self.claims or (free := self._room()) < 1 or self._take_up is None:
            return
        for record in await asyncio.wrap_future(self.leases.claim(self._at_hand(), free, self._patience_s)):
            await self._take_up(record)

    async def release(self, uids: list[str] | None = None) -> None:
        """Let others draw these, or all that we have, at once; where that fails, once their leases end."""
        with suppress(StorageError, OSError):
            await asyncio.wrap_future(self.leases.release(uids))

    async def look(self, key: str, job_id: str) -> Job | None:
        """A job of any server."""
        found = await asyncio.wrap_future(self.leases.look(key, job_id))
        return None if found is None else _job(found)

    async def follow(self, key: str, job_id: str) -> AsyncIterator[tuple[EventKind, dict[str, Any]]]:
        """What happens to a job that another server draws; ends when it is over, gone, or ours."""
        last_sent: tuple[Any, ...] = ()
        while self._active.find(key, job_id) is None:
            job = await self.look(key, job_id)
            if job is None or job.over:
                return
            now = (job.state, job.place, job.steps_done)
            if now != last_sent and job.state == "queued" and job.place is not None:
                yield "queued", {"place": job.place}
            elif now != last_sent and job.steps_done:
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
            last_sent = now
            await asyncio.sleep(LOOK_S)

    async def over(self, key: str, job_id: str, *, within_s: float | None = None) -> None:
        """Until a job of another server is over, gone, or ours, or so long."""
        end_s = None if within_s is None else time.monotonic() + within_s
        while self._active.find(key, job_id) is None and (end_s is None or time.monotonic() < end_s):
            job = await self.look(key, job_id)
            if job is None or job.over:
                return
            await asyncio.sleep(LOOK_S)


def _job(found: RemoteJob) -> Job:
    job = job_of_record(found.record)
    if job.over:
        return job
    return replace(job, place=found.place, steps_done=found.steps_done, steps_total=found.steps_total)


LEASES = sql.Table(
    "darkroom_leases",
    METADATA,
    sql.Column("uid", sql.String(32), primary_key=True),
    sql.Column("owner", sql.String(100), nullable=False, index=True),
    sql.Column("until_s", sql.Double, nullable=False),
    sql.Column("steps_done", sql.Integer, nullable=False, default=0),
    sql.Column("steps_total", sql.Integer, nullable=False, default=0),
)
SERVERS = sql.Table(
    "darkroom_servers",
    METADATA,
    sql.Column("owner", sql.String(100), primary_key=True),
    sql.Column("server", sql.String(64), nullable=False, index=True),
    sql.Column("until_s", sql.Double, nullable=False),
    sql.Column("adapters", sql.Text, nullable=False),
)
"""Who is there, until when at least, and which adapters each has at hand."""
GONE_S = 3600.0
LOOKED_AT = 64
"""Jobs, the first of each key before the second of any, among which a server finds those that suit it."""
TURN = (
    sql.func.row_number()
    .over(partition_by=JOBS.c.key, order_by=(JOBS.c.priority.desc(), JOBS.c.created_s, JOBS.c.uid))
    .label("turn")
)
"""A job's place among those of its key."""


@dataclass(frozen=True)
class RemoteJob:
    """A job as the database has it: how far its owner has come, or how many are before it."""

    record: Record
    owner: str | None = None
    steps_done: int = 0
    steps_total: int = 0
    place: int | None = None


class Leases:
    """One server's leases in the store it shares."""

    def __init__(
        self, store: JobStore, owner: str, lease_s: float, shares: Mapping[str, int] | None = None
    ) -> None:
        self._store, self.owner, self._lease_s = store, owner, lease_s
        self._shares = Shares(shares)
        self._ahead_s = 0.0

    def now_s(self) -> float:
        """The database's time, as it was when last asked and has gone on since."""
        return time.time() + self._ahead_s

    def _now(self, connection: sql.Connection) -> float:
        now_s = _time_of(connection)
        self._ahead_s = now_s - time.time()
        return now_s

    def accept(self, record: Record, *, take: bool, per_day: int | None = None) -> Future[Record]:
        """Keep a new job as of the database's time, and with `take` be its owner from the first moment.

        OverQuota as in `JobStore.accept`.
        """

        def action(connection: sql.Connection) -> Record:
            """Keep a job, and lease it at once where this server draws it."""
            now_s = self._now(connection)
            kept = self._store.keep(connection, record.accepted(now_s), per_day)
            if take and kept.uid == record.uid:
                self._take(connection, [kept.uid], now_s)
            return kept

        return self._store.do(action)

    def _free(self, query: sql.Select[Any], now_s: float) -> sql.Select[Any]:
        """`query` on this server's jobs that are not over and that nobody works on."""
        nobodys = sql.or_(LEASES.c.uid.is_(None), LEASES.c.until_s < now_s)
        query = query.select_from(JOBS).outerjoin(LEASES, LEASES.c.uid == JOBS.c.uid)
        return query.where(JOBS.c.server == self._store.server, JOBS.c.state.in_(LIVE), nobodys)

    def claim(self, holds: Collection[str], most: int, patience_s: float) -> Future[list[Record]]:
        """Own jobs of about `most` pictures that nobody works on, those of all keys in turn.

        Those whose model and adapters all are among `holds` come first, and those that wait for longer than
        `patience_s`; for so long one whose adapters another server has is left to that one, and for
        MODEL_PATIENCE_S one whose model another server has and this one has not.
        """

        def action(connection: sql.Connection) -> list[Record]:
            """Lease the jobs whose turn it is, and those first whose adapters are at hand."""
            now_s = self._now(connection)
            lines = self._free(sql.select(JOBS, TURN), now_s).subquery()
            query = sql.select(lines).order_by(lines.c.turn, lines.c.created_s, lines.c.uid).limit(LOOKED_AT)
            found = [record_of(row) for row in connection.execute(query)]
            others = self._held_elsewhere(connection, now_s)
            found = [one for one in found if not _left_to_others(one, holds, others, now_s)]
            wanted = self._chosen(found, set(holds), others, now_s - patience_s, most)
            taken = self._take(connection, [record.uid for record in wanted], now_s)
            ours = [record for record in wanted if record.uid in taken]
            for record in ours:
                self._shares.give(record)
            if coming := set().union(*map(_needs_of, ours)) - set(holds):  # the others may count on it
                self._be_there(connection, now_s + self._lease_s, {*holds, *coming})
            return ours

        return self._store.do(action)

    def _chosen(
        self, found: list[Record], holds: set[str], others: list[set[str]], late_s: float, most: int
    ) -> list[Record]:
        suits = [one for one in found if _needs_of(one) <= holds or one.created_s < late_s]
        rest = [
            one for one in found if one not in suits and not any(_needs_of(one) <= held for held in others)
        ]
        self._shares.begin(record.key for record in found)
        wanted: list[Record] = []
        for record in (*self._shares.in_turn(suits), *self._shares.in_turn(rest)):
            if sum(one.num for one in wanted) >= most:
                break
            wanted.append(record)
        return wanted

    def _take(self, connection: sql.Connection, uids: list[str], now_s: float) -> set[str]:
        """Own jobs unless another server was quicker; those that it got."""
        if not uids:
            return set()
        values = {"owner": self.owner, "until_s": now_s + self._lease_s, "steps_done": 0, "steps_total": 0}
        # In one order everywhere, so that two servers do not wait for each other.
        rows = [{"uid": uid, **values} for uid in sorted(uids)]
        inserts = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
        insert = inserts(LEASES).values(rows)
        free = insert.on_conflict_do_update(
            index_elements=["uid"], set_=values, where=LEASES.c.until_s < now_s
        ).returning(LEASES.c.uid)
        return {row[0] for row in connection.execute(free)}

    def _held_elsewhere(self, connection: sql.Connection, now_s: float) -> list[set[str]]:
        """The adapters and models at hand of each other server that is there."""
        query = sql.select(SERVERS.c.adapters).where(
            SERVERS.c.server == self._store.server, SERVERS.c.owner != self.owner, SERVERS.c.until_s >= now_s
        )
        return [set(json.loads(row[0])) for row in connection.execute(query)]

    def _be_there(self, connection: sql.Connection, until_s: float, holds: Collection[str]) -> None:
        """Tell the others that this server is there, with these adapters and models at hand."""
        connection.execute(sql.delete(SERVERS).where(SERVERS.c.owner == self.owner))
        values = {"owner": self.owner, "server": self._store.server, "until_s": until_s}
        connection.execute(sql.insert(SERVERS).values({**values, "adapters": json.dumps(sorted(holds))}))
        connection.execute(sql.delete(SERVERS).where(SERVERS.c.until_s < until_s - GONE_S))

    def renew(self, steps: Mapping[str, tuple[int, int]], holds: Collection[str] = ()) -> Future[set[str]]:
        """Keep these jobs, with the steps done and in all, and tell what adapters are at hand.

        Gives those that still are this server's to do.
        """

        def action(connection: sql.Connection) -> set[str]:
            """Renew this server's leases with their steps; returns the ids that it still holds."""
            until_s = self._now(connection) + self._lease_s
            self._shorten(connection, until_s)
            self._be_there(connection, until_s, holds)
            for uid, (done, total) in sorted(steps.items()):
                connection.execute(
                    sql.update(LEASES)
                    .where(LEASES.c.uid == uid, LEASES.c.owner == self.owner)
                    .values(until_s=until_s, steps_done=done, steps_total=total)
                )
            query = sql.select(JOBS.c.uid).join(LEASES, LEASES.c.uid == JOBS.c.uid)
            query = query.where(LEASES.c.owner == self.owner, JOBS.c.state.in_(LIVE))
            return {row[0] for row in connection.execute(query)}

        return self._store.do(action)

    def _shorten(self, connection: sql.Connection, until_s: float) -> None:
        """No lease, and no server's word that it is there, lasts longer than one that begins now.

        It would where the database's clock was set back. Whoever is there says a new time before that.
        """
        for table, key in ((LEASES, LEASES.c.uid), (SERVERS, SERVERS.c.owner)):
            longer = sql.select(key).where(table.c.until_s > until_s).order_by(key)
            for (one,) in connection.execute(longer).all():
                connection.execute(sql.update(table).where(key == one).values(until_s=until_s))

    def release(self, uids: Collection[str] | None = None) -> Future[Any]:
        """Let others take these jobs, or all of this server's, at once."""
        mine = sql.delete(LEASES).where(LEASES.c.owner == self.owner)
        if uids is not None:
            mine = mine.where(LEASES.c.uid.in_(list(uids)))

        def action(connection: sql.Connection) -> None:
            connection.execute(mine)
            if uids is None:
                connection.execute(sql.delete(SERVERS).where(SERVERS.c.owner == self.owner))

        return self._store.do(action)

    def backlog(self) -> Future[Backlog]:
        """What nobody works on. Leases of jobs that are over go on the way, and overdue jobs fail."""

        def action(connection: sql.Connection) -> Backlog:
            """Pictures, work and the longest wait of what no server has leased, by key."""
            now_s = self._now(connection)
            self._fail_overdue(connection, now_s)
            live = sql.select(JOBS.c.uid).where(JOBS.c.state.in_(LIVE))
            connection.execute(
                sql.delete(LEASES).where(LEASES.c.owner == self.owner, LEASES.c.uid.not_in(live))
            )
            sums = (sql.func.sum(JOBS.c.num), sql.func.sum(JOBS.c.work))
            columns = (JOBS.c.key, *sums, sql.func.count(), sql.func.min(JOBS.c.created_s))
            rows = connection.execute(self._free(sql.select(*columns), now_s).group_by(JOBS.c.key)).all()
            return Backlog(
                Counter({key: int(num) for key, num, *_ in rows}),
                {key: work for key, _, work, *_ in rows},
                sum(jobs for *_, jobs, _ in rows),
                min((oldest_s for *_, oldest_s in rows), default=None),
                1 + len(self._held_elsewhere(connection, now_s)),
            )

        return self._store.do(action)

    def _fail_overdue(self, connection: sql.Connection, now_s: float) -> None:
        """Who works on a job watches its deadline; here are those that nobody has taken."""
        query = self._free(sql.select(JOBS.c.uid, JOBS.c.due_s - JOBS.c.created_s), now_s)
        for uid, within_s in connection.execute(query.where(JOBS.c.due_s < now_s)).all():
            result = json.dumps({"error": too_late(within_s)})
            values = {"state": "failed", "finished_s": now_s, "result": result}
            connection.execute(
                sql.update(JOBS).where(JOBS.c.uid == uid, JOBS.c.state.in_(LIVE)).values(values)
            )
            connection.execute(sql.delete(FILES).where(FILES.c.uid == uid))

    def look(self, key: str, job_id: str) -> Future[RemoteJob | None]:
        """A job that another server may be drawing."""

        def action(connection: sql.Connection) -> RemoteJob | None:
            """A job as any server sees it, with its place in the queue while it waits."""
            query = sql.select(JOBS, LEASES.c.owner, LEASES.c.steps_done, LEASES.c.steps_total)
            query = query.outerjoin(LEASES, LEASES.c.uid == JOBS.c.uid)
            row = connection.execute(query.where(*self._store.called(key, job_id))).first()
            if row is None:
                return None
            *_, owner, done, total = row
            record = record_of(row)
            place = self._place(connection, record) if owner is None and record.state == "queued" else None
            return RemoteJob(record, owner, done or 0, total or 0, place)

        return self._store.do(action)

    def _place(self, connection: sql.Connection, record: Record) -> int:
        """Pictures before a job's first, if the keys' jobs are taken in turn."""
        query = sql.select(JOBS.c.uid, JOBS.c.num, JOBS.c.created_s, TURN)
        lines = self._free(query, self._now(connection)).subquery()
        turn = sql.select(lines.c.turn).where(lines.c.uid == record.uid).scalar_subquery()
        in_its_turn = sql.and_(lines.c.turn == turn, lines.c.created_s < record.created_s)
        before = sql.select(sql.func.sum(lines.c.num)).where(sql.or_(lines.c.turn < turn, in_its_turn))
        return int(connection.execute(before).scalar() or 0)


def _needs_of(record: Record) -> set[str]:
    """The adapters that a job names, and its model where servers have several."""
    request = json.loads(record.request)
    model = request.get("model")
    return {choice["name"] for choice in request.get("adapters", ())} | ({MODEL + model} if model else set())


def _left_to_others(record: Record, holds: Collection[str], others: Sequence[set[str]], now_s: float) -> bool:
    """Whether another server has a job's model in memory, this one has not, and that one has time yet."""
    models = {name for name in _needs_of(record) if name.startswith(MODEL)}
    if models <= set(holds) or record.created_s < now_s - MODEL_PATIENCE_S:
        return False
    return any(models <= held for held in others)


def _time_of(connection: sql.Connection) -> float:
    if connection.dialect.name != "postgresql":
        return time.time()
    return float(connection.execute(sql.text("SELECT extract(epoch FROM clock_timestamp())")).scalar() or 0)


def open_stores(settings: ServeSettings) -> tuple[PictureFiles, JobStore]:
    """Pictures and jobs. InputError where they cannot be kept."""
    if not settings.shared:
        results = Results(settings.state)
        return results, JobStore(settings.jobs or f"sqlite:///{settings.state / 'jobs.db'}", settings.name)
    if settings.jobs is None:
        raise InputError(
            "jobs that are shared, without a database", mend="give --jobs postgresql+psycopg://..."
        )
    store = JobStore(settings.jobs, settings.name, shared=True)
    return Files(store), store


def open_sharing(settings: ServeSettings, store: JobStore, active_jobs: ActiveJobs) -> Sharing | None:
    """The server's part in a queue of several, None where it has one of its own."""
    if not settings.shared:
        return None
    owner = f"{settings.name}/{uuid.uuid4().hex}"
    leases = Leases(store, owner, settings.lease_s, settings.limits.shares)
    return Sharing(leases, active_jobs, settings.patience_s)


# ---- whose job is next


class Waits(Protocol):
    """A job that waits: whose it is, and its work."""

    @property
    def key(self) -> str: ...
    @property
    def work(self) -> float: ...


W = TypeVar("W", bound=Waits)


class Shares:
    """What `FairQueue` promises, of jobs that are looked up anew each time: whose key had least work is next.

    A key that comes to those that wait starts level with who had least of them (Goyal, Vin & Cheng 1996).
    """

    def __init__(self, shares: Mapping[str, int] | None = None) -> None:
        self._had: dict[str, float] = {}
        self._shares = shares or {}

    def begin(self, keys: Iterable[str]) -> None:
        """These are the keys that have jobs waiting now."""
        waiting = dict.fromkeys(keys)
        least = min((self._had[key] for key in waiting if key in self._had), default=0.0)
        self._had = {key: self._had.get(key, least) - least for key in waiting}

    def in_turn(self, items: Iterable[W]) -> list[W]:
        """Jobs in the order in which they are to be given; those of one key keep theirs."""
        lines: dict[str, deque[W]] = {}
        for item in items:
            lines.setdefault(item.key, deque()).append(item)
        had, order = {key: self._had.get(key, 0.0) for key in lines}, []
        while lines:
            key = min(lines, key=lambda key: had[key])
            item = lines[key].popleft()
            had[key] += _at_least_some(item) / self._shares.get(key, 1)
            order.append(item)
            if not lines[key]:
                del lines[key]
        return order

    def give(self, item: Waits) -> None:
        """A job was given."""
        share = self._shares.get(item.key, 1)
        self._had[item.key] = self._had.get(item.key, 0.0) + _at_least_some(item) / share


def _at_least_some(item: Waits) -> float:
    return max(1.0, item.work)
