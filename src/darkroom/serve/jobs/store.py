"""Jobs that outlive the process: one table, in SQLite next to the pictures or in PostgreSQL by URL.

All statements run on one writer thread, which puts what is waiting into one transaction: jobs accepted in the
same moment share one flush to the disk. A job is accepted when its row is committed, and done when its row
says so; a row moves on from `queued` and `running` only, so that a job ends once whatever happens.
"""

from __future__ import annotations

import json
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.schema import CreateColumn, DropTable

from darkroom.errors import DarkroomError, InputError, first_line
from darkroom.serve.request import FINAL, PRIORITIES

LOG = logging.getLogger("darkroom.serve")
T = TypeVar("T")
Action = Callable[[sql.Connection], Any]
MOST_AT_ONCE = 64
UIDS_AT_ONCE = 500
"""In one statement: databases bound what it may hold."""

METADATA = sql.MetaData()
JOBS = sql.Table(
    "darkroom_jobs",
    METADATA,
    sql.Column("uid", sql.String(32), primary_key=True),
    sql.Column("server", sql.String(64), nullable=False),
    sql.Column("key", sql.String(100), nullable=False),
    sql.Column("id", sql.String(64), nullable=False),
    sql.Column("digest", sql.String(64), nullable=False),
    sql.Column("state", sql.String(12), nullable=False, index=True),
    sql.Column("request", sql.Text, nullable=False),
    sql.Column("created_s", sql.Double, nullable=False),
    sql.Column("started_s", sql.Double),
    sql.Column("finished_s", sql.Double),
    sql.Column("attempts", sql.Integer, nullable=False, default=0),
    sql.Column("bytes", sql.BigInteger, nullable=False, default=0),
    sql.Column("result", sql.Text, nullable=False, default="{}"),
    sql.Column("num", sql.Integer, nullable=False, server_default="1"),
    sql.Column("priority", sql.Integer, nullable=False, server_default="1"),
    sql.Column("work", sql.Double, nullable=False, server_default="0"),
    sql.Column("due_s", sql.Double),
)
USAGE = sql.Table(
    "darkroom_usage",
    METADATA,
    sql.Column("key", sql.String(100), primary_key=True),
    sql.Column("day", sql.String(10), primary_key=True),
    sql.Column("pictures", sql.BigInteger, nullable=False),
)
"""Pictures accepted of each key on each day (UTC); kept for `USAGE_DAYS`."""
USAGE_DAYS = 40
INDICES = (
    # Each for a query of its own: a job by what its client calls it, which is one of its server and key; a
    # key's jobs, newest first; the same in one state; a server's jobs that are not over, oldest first; what
    # is kept, with its bytes, by age.
    sql.Index("darkroom_jobs_called", JOBS.c.server, JOBS.c.key, JOBS.c.id, unique=True),
    sql.Index("darkroom_jobs_newest", JOBS.c.server, JOBS.c.key, JOBS.c.created_s.desc(), JOBS.c.uid),
    sql.Index(
        "darkroom_jobs_newest_in_state",
        JOBS.c.server,
        JOBS.c.key,
        JOBS.c.state,
        JOBS.c.created_s.desc(),
        JOBS.c.uid,
    ),
    sql.Index("darkroom_jobs_live", JOBS.c.server, JOBS.c.state, JOBS.c.created_s, JOBS.c.uid),
    sql.Index("darkroom_jobs_kept", JOBS.c.server, JOBS.c.finished_s, JOBS.c.bytes, JOBS.c.uid),
)
FORMER_INDICES = (
    "ix_darkroom_jobs_server",
    "ix_darkroom_jobs_created_s",
    "ix_darkroom_jobs_finished_s",
    "darkroom_jobs_of_key",
    "darkroom_jobs_in_state",
)
"""Of databases made before: each is a worse choice than one of `INDICES`, which planners may take."""
ADDED = ("num", "priority", "work", "due_s")
"""Columns that databases made before do not have; they get them when they are opened."""
LIVE = ("queued", "running")
CALLED = sql.select(JOBS).where(
    *(column == sql.bindparam(column.name) for column in (JOBS.c.server, JOBS.c.key, JOBS.c.id))
)
"""The one job that a key of a server calls so. Made once: to make it takes longer than to look."""


MOST_CALLED = 200_000
"""Jobs whose names are held in memory, some 100 bytes each; of more the database is asked."""


class StorageError(DarkroomError):
    """The database or the disk does not take what must be kept."""


class OverQuota(DarkroomError):
    """A key has had its pictures of the day."""

    def __init__(self, per_day: int, used: int) -> None:
        self.per_day, self.used = per_day, used
        super().__init__(f"{used} of {per_day} pictures of this day are used")


@dataclass(frozen=True)
class Record:
    """A job's row. `result` holds pictures, notes, cost or error of a job that is over.

    `num`, `priority` and `work` (pixels x steps x evaluations of all its pictures) say what waits and who is
    next; `due_s` is its deadline.
    """

    uid: str
    server: str
    key: str
    id: str
    digest: str
    state: str
    request: str
    created_s: float
    started_s: float | None = None
    finished_s: float | None = None
    attempts: int = 0
    bytes: int = 0
    result: dict[str, Any] = field(default_factory=dict)
    num: int = 1
    priority: int = 1
    work: float = 0.0
    due_s: float | None = None

    def accepted(self, at_s: float) -> Record:
        """The same, accepted at another time."""
        due_s = None if self.due_s is None else self.due_s - self.created_s + at_s
        return replace(self, created_s=at_s, due_s=due_s)


class JobStore:
    """Jobs by key and id. `server` names whose jobs are taken up again after a restart.

    A `shared` one is that of several servers of this name, which agree by leases (`leases`).
    """

    def __init__(self, url: str, server: str = "darkroom", *, shared: bool = False) -> None:
        self.server = server
        self.trouble: str | None = None
        """What the disk or the database last complained of; None once it works again."""
        self._engine = _open(url)
        self._actions: queue.SimpleQueue[tuple[Action, Future[Any]] | None] = queue.SimpleQueue()
        self._lock_connection = None if shared else _lock(self._engine, server)
        _create_tables(self._engine, [*METADATA.tables.values()] if shared else [JOBS, USAGE])
        self._erases = False  # in the transaction at hand
        self._called: set[int] | None = None if shared else set()
        self._called_is_read = False
        self._thread = threading.Thread(target=self._run, name="darkroom-store", daemon=True)
        self._thread.start()
        if not shared:
            self.do(self._read_called)

    def close(self) -> None:
        """Finish what is waiting and close the database."""
        self._actions.put(None)
        self._thread.join(timeout=30)
        if self._lock_connection is not None:
            self._lock_connection.close()
        self._engine.dispose()

    # ---- what can be done; each gives a future

    def accept(self, record: Record, per_day: int | None = None) -> Future[Record]:
        """Keep a new job; gives the one already there of the same key and id, if any.

        OverQuota where the key would have more than `per_day` pictures on this day.
        """

        if self._called is not None:
            self._called.add(hash((record.key, record.id)))
            if len(self._called) > MOST_CALLED:
                self._called = None
        return self.do(lambda connection: self.keep(connection, record, per_day))

    def keep(self, connection: sql.Connection, record: Record, per_day: int | None = None) -> Record:
        """`accept`, within a transaction."""
        there = self._find(connection, record.key, record.id)
        if there is not None:
            return there
        _use(connection, record.key, record.num, record.created_s, per_day)
        values = {**record.__dict__, "result": json.dumps(record.result)}
        try:
            with connection.begin_nested():
                connection.execute(sql.insert(JOBS).values(values))
        except IntegrityError:  # another server was quicker
            there = self._find(connection, record.key, record.id)
            if there is None:
                raise
            _use(connection, record.key, -record.num, record.created_s, None)
            return there
        return record

    def may_have(self, key: str, job_id: str) -> bool:
        """False where a key has surely no job of that id; said without the database, from the thread that
        accepts jobs."""
        called = self._called
        return called is None or not self._called_is_read or hash((key, job_id)) in called

    def _read_called(self, connection: sql.Connection) -> None:
        """Note what the jobs are called that were here before."""
        mine = sql.select(JOBS.c.key, JOBS.c.id).where(JOBS.c.server == self.server).limit(MOST_CALLED + 1)
        there = {hash((key, job_id)) for key, job_id in connection.execute(mine)}
        called = self._called
        if called is None or len(there) > MOST_CALLED:
            self._called = None
            return
        called |= there
        self._called_is_read = True

    def find(self, key: str, job_id: str) -> Future[Record | None]:
        """A job of a key."""
        return self.do(lambda connection: self._find(connection, key, job_id))

    def _find(self, connection: sql.Connection, key: str, job_id: str) -> Record | None:
        row = connection.execute(CALLED, {"server": self.server, "key": key, "id": job_id}).first()
        return None if row is None else record_of(row)

    def called(self, key: str, job_id: str) -> tuple[sql.ColumnElement[bool], ...]:
        """What is true of the one job that a key of this server calls so: other servers of the database may
        have another."""
        return JOBS.c.server == self.server, JOBS.c.key == key, JOBS.c.id == job_id

    def find_uid(self, uid: str) -> Future[Record | None]:
        """A job by what is unique to it."""
        return self.do(lambda connection: _first(connection, JOBS.c.uid == uid))

    def find_all(
        self, key: str, *, state: str | None = None, limit: int = 100, before_s: float | None = None
    ) -> Future[list[Record]]:
        """A key's jobs at this server, newest first."""
        wanted = [JOBS.c.server == self.server, JOBS.c.key == key]
        if state is not None:
            wanted.append(JOBS.c.state == state)
        if before_s is not None:
            wanted.append(JOBS.c.created_s < before_s)
        query = sql.select(JOBS).where(*wanted).order_by(JOBS.c.created_s.desc(), JOBS.c.uid).limit(limit)
        return self.do(lambda connection: [record_of(row) for row in connection.execute(query)])

    def start(self, uid: str, at_s: float) -> Future[None]:
        """Note that work on a job has begun."""
        values = {"state": "running", "started_s": at_s, "attempts": JOBS.c.attempts + 1}
        return self.do(lambda c: _move(c, uid, values))

    def end(
        self, uid: str, state: str, at_s: float, result: dict[str, Any], num_bytes: int = 0
    ) -> Future[bool]:
        """A job is over; False where it was already."""
        assert state in FINAL
        values = {"state": state, "finished_s": at_s, "result": json.dumps(result), "bytes": num_bytes}
        return self.do(lambda c: _move(c, uid, values))

    def live(self) -> Future[list[Record]]:
        """This server's jobs that are not over, in the order in which they were accepted."""
        query = sql.select(JOBS).where(JOBS.c.server == self.server, JOBS.c.state.in_(LIVE))
        query = query.order_by(JOBS.c.created_s, JOBS.c.uid)
        return self.do(lambda connection: [record_of(row) for row in connection.execute(query)])

    def expired(self, before_s: float, keep_bytes: int) -> Future[list[str]]:
        """Uids of this server's finished jobs that are too old, and of the oldest beyond so many bytes."""
        mine = JOBS.c.server == self.server
        too_old = sql.select(JOBS.c.uid).where(mine, JOBS.c.finished_s < before_s)
        kept = (mine, JOBS.c.finished_s >= before_s)
        oldest = sql.select(JOBS.c.uid, JOBS.c.bytes).where(*kept).order_by(JOBS.c.finished_s)

        def action(connection: sql.Connection) -> list[str]:
            """The ids of jobs that are too old, then of the oldest until the rest fits in `keep_bytes`."""
            found = [uid for (uid,) in connection.execute(too_old)]
            total = connection.execute(sql.select(sql.func.sum(JOBS.c.bytes)).where(*kept)).scalar() or 0
            if total > keep_bytes:
                for uid, num_bytes in connection.execute(oldest).yield_per(UIDS_AT_ONCE):
                    if total <= keep_bytes:
                        break
                    found.append(uid)
                    total -= num_bytes
            return found

        return self.do(action)

    def known(self, uids: Sequence[str]) -> Future[set[str]]:
        """Which of these uids have a row."""

        def action(connection: sql.Connection) -> set[str]:
            """Which of these ids there are, asked in parts."""
            found: set[str] = set()
            for start in range(0, len(uids), UIDS_AT_ONCE):
                query = sql.select(JOBS.c.uid).where(JOBS.c.uid.in_(uids[start : start + UIDS_AT_ONCE]))
                found |= {row[0] for row in connection.execute(query)}
            return found

        return self.do(action)

    def forget(self, uids: Sequence[str]) -> Future[None]:
        """Take jobs out for good."""

        def action(connection: sql.Connection) -> None:
            for start in range(0, len(uids), UIDS_AT_ONCE):
                some = uids[start : start + UIDS_AT_ONCE]
                connection.execute(sql.delete(JOBS).where(JOBS.c.uid.in_(some)))
            self._erases = True

        return self.do(action)

    def usage(self, key: str) -> Future[int]:
        """Pictures of a key accepted today (UTC)."""
        return self.do(lambda connection: _used(connection, key, _day_of(time.time())))

    def use(self, key: str, num: int, at_s: float, per_day: int | None = None) -> Future[None]:
        """Count pictures that no job makes among a key's of that day; fewer than none takes them back.

        OverQuota as in `accept`.
        """
        return self.do(lambda connection: _use(connection, key, num, at_s, per_day))

    def probe(self) -> Future[None]:
        """Write something, to see whether writing works."""
        return self.do(lambda c: c.execute(sql.update(JOBS).where(JOBS.c.uid == "").values(attempts=0)))

    # ---- the writer thread

    def do(self, action: Action) -> Future[Any]:
        """Run something on the writer thread, in a transaction that it may share."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # the caller may leave: what was asked is done all the same
        self._actions.put((action, future))
        return future

    def _run(self) -> None:
        while (first := self._actions.get()) is not None:
            self._erases = False
            some = [first]
            last = False
            while len(some) < MOST_AT_ONCE and not self._actions.empty():
                more = self._actions.get()
                if more is None:
                    last = True
                    break
                some.append(more)
            self._commit(some)
            if self._erases:
                self._empty_log()
            if last:
                return

    def _empty_log(self) -> None:
        """What was deleted is in SQLite's write-ahead log still: copy that over, and cut it off."""
        if self._engine.dialect.name != "sqlite":
            return
        try:
            connection = self._engine.raw_connection()
            try:
                connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection.close()
        except (SQLAlchemyError, sqlite3.Error) as error:
            LOG.warning("the log of the jobs' database is not emptied: %s", _message(error))

    def _commit(self, some: list[tuple[Action, Future[Any]]]) -> None:
        """All in one transaction; where it fails, each in its own."""
        try:
            with self._engine.begin() as connection:
                results = [action(connection) for action, _ in some]
        except Exception as error:
            if len(some) == 1:
                self._fail(some[0][1], error)
                return
            for one in some:
                self._commit([one])
            return
        self.trouble = None
        for (_, future), result in zip(some, results, strict=True):
            future.set_result(result)

    def _fail(self, future: Future[Any], error: Exception) -> None:
        if isinstance(error, (OperationalError, OSError)):
            self.trouble = _message(error)
            LOG.error("the jobs' database: %s", self.trouble)
        future.set_exception(StorageError(_message(error)) if isinstance(error, SQLAlchemyError) else error)


def _day_of(at_s: float) -> str:
    """The day of a time, in UTC, such as 2026-11-23."""
    return time.strftime("%Y-%m-%d", time.gmtime(at_s))


def _used(connection: sql.Connection, key: str, day: str) -> int:
    query = sql.select(USAGE.c.pictures).where(USAGE.c.key == key, USAGE.c.day == day)
    return int(connection.execute(query).scalar() or 0)


def _use(connection: sql.Connection, key: str, num: int, at_s: float, per_day: int | None) -> None:
    """Count pictures among a key's of the day; of a job's in the transaction that accepts it."""
    day = _day_of(at_s)
    of_day = sql.and_(USAGE.c.key == key, USAGE.c.day == day)
    more = sql.update(USAGE).where(of_day).values(pictures=USAGE.c.pictures + num)
    if not connection.execute(more).rowcount:
        try:
            with connection.begin_nested():
                row = {"key": key, "day": day, "pictures": num}
                connection.execute(sql.insert(USAGE).values(row))
                old = _day_of(at_s - USAGE_DAYS * 86400)
                connection.execute(sql.delete(USAGE).where(USAGE.c.day < old))
        except IntegrityError:  # another server was quicker
            connection.execute(more)
    used = _used(connection, key, day)
    if per_day is not None and used > per_day:
        raise OverQuota(per_day, used - num)


def _open(url: str) -> sql.Engine:
    try:
        engine = sql.create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
    except (SQLAlchemyError, ModuleNotFoundError) as error:
        raise InputError(
            "--jobs is no database that can be opened",
            allowed="sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME",
        ) from error
    if engine.dialect.name == "sqlite":
        sql.event.listen(engine, "connect", _set_up_sqlite)
        sql.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def _create_tables(engine: sql.Engine, tables: list[sql.Table]) -> None:
    """Create what is not there. Of two servers that begin together one comes too late, and finds it there."""
    for more_tries in (2, 1, 0):
        try:
            METADATA.create_all(engine, tables=tables)
            _add_columns(engine)
            _drop_constraint(engine)
            _add_indices(engine)
            return
        except SQLAlchemyError as error:
            if not more_tries:
                raise InputError(f"the jobs' database cannot be used: {_message(error)}") from error
            time.sleep(0.1)


def _add_columns(engine: sql.Engine) -> None:
    """Bring a table of an earlier version up to date, and its waiting jobs with it."""
    there = {column["name"] for column in sql.inspect(engine).get_columns(JOBS.name)}
    missing = [JOBS.c[name] for name in ADDED if name not in there]
    if not missing:
        return
    with engine.begin() as connection:
        for column in missing:
            definition = CreateColumn(column).compile(dialect=engine.dialect)
            connection.execute(sql.text(f"ALTER TABLE {JOBS.name} ADD COLUMN {definition}"))
        live = sql.select(JOBS.c.uid, JOBS.c.request, JOBS.c.created_s).where(JOBS.c.state.in_(LIVE))
        for uid, request, created_s in connection.execute(live).all():
            found = _read_again(request, created_s)
            connection.execute(sql.update(JOBS).where(JOBS.c.uid == uid).values(found))


def _drop_constraint(engine: sql.Engine) -> None:
    """In a table of an earlier version a key's job ids were one for all servers of the database."""
    with engine.begin() as connection:
        every = sql.inspect(connection).get_unique_constraints(JOBS.name)
        former = [one["name"] for one in every if one["column_names"] == ["key", "id"]]
        if connection.dialect.name == "postgresql":
            for name in former:
                text = f'ALTER TABLE {JOBS.name} DROP CONSTRAINT IF EXISTS "{name}"'
                connection.execute(sql.text(text))
            return
        if not former:
            return
        # SQLite cannot drop one: a new table takes the old one's rows and name. Its indices come after this.
        new = JOBS.to_metadata(sql.MetaData(), name=f"{JOBS.name}_new")
        new.indexes.clear()
        new.create(connection)
        names = [column.name for column in JOBS.columns]
        connection.execute(sql.insert(new).from_select(names, sql.select(JOBS)))
        connection.execute(DropTable(JOBS))
        connection.execute(sql.text(f"ALTER TABLE {new.name} RENAME TO {JOBS.name}"))


def _add_indices(engine: sql.Engine) -> None:
    """Give a table of an earlier version the indices of this one."""
    there = {index["name"] for index in sql.inspect(engine).get_indexes(JOBS.name)}
    with engine.begin() as connection:
        for index in JOBS.indexes:
            if index.name not in there:
                index.create(connection, checkfirst=True)
        for name in there.intersection(FORMER_INDICES):
            connection.execute(sql.text(f"DROP INDEX IF EXISTS {name}"))


def _read_again(request: str, created_s: float) -> dict[str, Any]:
    values = json.loads(request)
    due_s = None if values.get("deadline_s") is None else created_s + values["deadline_s"]
    priority = PRIORITIES.get(values.get("priority"), 1)
    return {"num": values.get("num", 1), "priority": priority, "due_s": due_s}


def _set_up_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # SQLAlchemy begins its transactions itself
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "secure_delete=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _lock(engine: sql.Engine, server: str) -> sql.Connection | None:
    """PostgreSQL: two servers of one name would take up the same jobs. SQLite's folder has a lock file."""
    if engine.dialect.name != "postgresql":
        return None
    try:
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        got = connection.execute(
            sql.text("SELECT pg_try_advisory_lock(hashtext(:name))"), {"name": f"darkroom/{server}"}
        ).scalar()
    except SQLAlchemyError as error:
        raise InputError(f"the jobs' database cannot be used: {_message(error)}") from error
    if not got:
        raise InputError(f"a server named '{server}' runs on this database", mend="give --name another")
    return connection


def _message(error: Exception) -> str:
    """The first line of what went wrong, without SQL."""
    return first_line(getattr(error, "orig", None) or error)


def _first(connection: sql.Connection, *wanted: sql.ColumnElement[bool]) -> Record | None:
    row = connection.execute(sql.select(JOBS).where(*wanted)).first()
    return None if row is None else record_of(row)


def record_of(row: sql.Row[Any]) -> Record:
    """A row of the jobs' table, whatever else was selected with it."""
    values = {column.name: row._mapping[column.name] for column in JOBS.columns}
    return Record(**{**values, "result": json.loads(values["result"])})


def _move(connection: sql.Connection, uid: str, values: dict[str, Any]) -> bool:
    """Change a job that is not over; whether there was one."""
    changed = connection.execute(
        sql.update(JOBS).where(JOBS.c.uid == uid, JOBS.c.state.in_(LIVE)).values(values)
    )
    return changed.rowcount > 0
