"""The jobs' table: SQLite, and PostgreSQL where Debian's is at hand."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest
import sqlalchemy as sql

from darkroom.errors import InputError
from darkroom.serve.jobs import store as jobs_store
from darkroom.serve.jobs.store import ADDED, FORMER_INDICES, INDICES, JOBS, JobStore, Record


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path) -> str:
    return (
        f"sqlite:///{tmp_path}/jobs.db" if request.param == "sqlite" else request.getfixturevalue("postgres")
    )


@pytest.fixture
def store(url, request) -> Iterator[JobStore]:
    made = JobStore(url, server=f"server-{time.monotonic_ns()}")
    yield made
    made.close()


def record(store: JobStore, name: str, **more) -> Record:
    told = {"uid": f"{abs(hash((store.server, name))):032x}"[:32], "key": store.server, "id": name}
    told |= {"digest": "d", "state": "queued", "request": "{}", "created_s": time.time()}
    return Record(**{**told, "server": store.server, **more})


def test_a_job_is_accepted_once(store):
    one = record(store, "x")
    assert store.accept(one).result() == one
    again = store.accept(record(store, "x", uid="f" * 32, digest="other")).result()
    assert (again.uid, again.digest) == (one.uid, "d")
    assert store.find(one.key, "x").result() == one
    assert store.find("another", "x").result() is None


def test_that_a_name_was_never_given_is_known_without_the_database(url, store, monkeypatch):
    store.find("k", "x").result()  # what was here before is read by now
    assert not store.may_have(store.server, "x")
    store.accept(record(store, "x"))
    assert store.may_have(store.server, "x"), "though it may not be written yet"
    assert not store.may_have("another", "x")
    store.forget([record(store, "x").uid]).result()
    assert store.may_have(store.server, "x"), "the control: what was taken out is looked up once more"
    store.accept(record(store, "y")).result()
    monkeypatch.setattr(jobs_store, "MOST_CALLED", 1)
    name = f"{store.server}-b"
    for num in range(3):
        later = JobStore(url, name)
        later.find("k", "x").result()
        assert later.may_have(name, "x") == (num > 0), f"{num} jobs of its own, and those of another server"
        assert later.may_have(name, "never") == (num > 1), "of more than are held in mind any may be there"
        later.accept(record(later, "xy"[num % 2])).result()
        later.close()


def test_of_jobs_that_several_servers_accept_any_may_be_there(url):
    shared = JobStore(url, f"shared-{time.monotonic_ns()}", shared=True)
    shared.find("k", "x").result()
    assert shared.may_have("k", "x")
    shared.close()


def test_a_job_that_another_server_accepted_first_counts_once_in_the_days_quota(store, monkeypatch):
    """Both had looked before either had written: the second's pictures were counted as well."""
    one = record(store, "x", num=3)
    store.accept(one, 5).result()
    sees, looks = store._find, []

    def looked_too_early(*given):
        looks.append(given)
        return None if len(looks) == 1 else sees(*given)

    monkeypatch.setattr(store, "_find", looked_too_early)
    again = store.accept(record(store, "x", uid="f" * 32, num=2), 5).result()
    assert (again.uid, len(looks)) == (one.uid, 2)
    assert store.usage(one.key).result() == 3


def test_servers_of_two_names_have_jobs_of_their_own(store, url):
    """The second had been given the first's job, whose pictures it does not have."""
    other = JobStore(url, f"{store.server}-2")
    one = record(store, "x", key="alice")
    another = record(store, "x", key="alice", uid="e" * 32, server=other.server, digest="other")
    assert store.accept(one).result() == one
    assert other.find("alice", "x").result() is None
    assert other.accept(another).result() == another
    assert other.find("alice", "x").result() == another
    for there, mine in ((store, one), (other, another)):
        assert there.find("alice", "x").result() == mine
        assert there.find_all("alice").result() == there.find_all("alice", state="queued").result() == [mine]
    store.forget([one.uid, another.uid]).result()
    other.close()


def test_a_job_ends_once(store):
    one = record(store, "x")
    store.accept(one).result()
    store.start(one.uid, 1.0).result()
    assert store.end(one.uid, "done", 2.0, {"pictures": [{"seed": 1}]}, 10).result() is True
    assert store.end(one.uid, "cancelled", 3.0, {}).result() is False
    found = store.find_uid(one.uid).result()
    assert (found.state, found.attempts, found.bytes, found.result["pictures"]) == (
        "done",
        1,
        10,
        [{"seed": 1}],
    )


def test_what_is_not_over_is_found_again_in_order(store):
    jobs = [record(store, str(i), created_s=100.0 + i) for i in (2, 0, 1, 3)]
    for job in jobs:
        store.accept(job)
    store.start(jobs[0].uid, 1.0)
    store.end(jobs[3].uid, "failed", 1.0, {})
    assert [job.id for job in store.live().result()] == ["0", "1", "2"]
    newest = store.find_all(store.server, limit=2).result()
    assert [job.id for job in newest] == ["3", "2"]
    older = store.find_all(store.server, before_s=newest[-1].created_s).result()
    assert [job.id for job in older] == ["1", "0"]
    assert [job.id for job in store.find_all(store.server, state="running").result()] == ["2"]


def test_many_at_once_share_commits_and_all_are_there(store):
    futures = [store.accept(record(store, f"job{i}")) for i in range(200)]
    assert [future.result().id for future in futures] == [f"job{i}" for i in range(200)]
    assert len(store.live().result()) == 200


def test_old_ones_and_those_beyond_the_bytes_are_named(store):
    for i in range(4):
        job = record(store, str(i))
        store.accept(job)
        store.end(job.uid, "done", 1000.0 + i, {}, 100)
    names = {record(store, str(i)).uid: str(i) for i in range(4)}
    assert {names[uid] for uid in store.expired(1001.5, 10**6).result()} == {"0", "1"}
    assert {names[uid] for uid in store.expired(0.0, 250).result()} == {"0", "1"}
    store.forget([uid for uid in names if names[uid] == "0"]).result()
    assert store.known(list(names)).result() == {uid for uid in names if names[uid] != "0"}


def test_any_number_of_jobs_is_forgotten_at_once(store):
    jobs = [store.accept(record(store, str(i))).result() for i in range(3)]
    uids = [job.uid for job in jobs] + [f"{i:032x}" for i in range(260_000)]
    assert store.known(uids).result() == {job.uid for job in jobs}
    store.forget(uids).result()
    assert store.live().result() == []
    assert store.trouble is None


def test_a_table_of_an_earlier_version_is_brought_up_to_date(url):
    name = f"server-{time.monotonic_ns()}"
    engine = sql.create_engine(url)
    JobStore(url, name).close()
    request = json.dumps({"prompt": "a", "num": 3, "priority": "high", "deadline_s": 60.0})
    old = {"uid": f"{time.monotonic_ns():032x}", "server": name, "key": name, "id": "x", "digest": "d"}
    old |= {"state": "queued", "request": request, "created_s": 100.0, "attempts": 0, "bytes": 0}
    with engine.begin() as connection:
        for column in ADDED:
            connection.execute(sql.text(f"ALTER TABLE darkroom_jobs DROP COLUMN {column}"))
        names, values = ", ".join(f'"{name}"' for name in old), ", ".join(f":{name}" for name in old)
        added = sql.text(f"INSERT INTO darkroom_jobs ({names}, result) VALUES ({values}, '{{}}')")
        connection.execute(added, old)
    engine.dispose()
    store = JobStore(url, name)
    [job] = store.live().result()
    assert (job.id, job.num, job.priority, job.work, job.due_s) == ("x", 3, 2, 0.0, 160.0)
    store.close()


def test_a_table_of_an_earlier_version_gets_ids_of_each_server(url):
    names = [f"server-{time.monotonic_ns()}-{i}" for i in range(2)]
    first = JobStore(url, names[0])
    kept = first.accept(record(first, "x", key=names[0], num=3, work=2.5)).result()
    first.close()
    engine = sql.create_engine(url)
    with engine.begin() as connection:
        was = f"CREATE TABLE old AS SELECT * FROM {JOBS.name}"
        for text in (was, f"DROP TABLE {JOBS.name}"):
            connection.execute(sql.text(text))
        former = sql.MetaData()
        table = JOBS.to_metadata(former)
        table.indexes.clear()
        table.append_constraint(sql.UniqueConstraint("key", "id"))
        table.create(connection)
        connection.execute(sql.text(f"INSERT INTO {JOBS.name} SELECT * FROM old"))
        connection.execute(sql.text("DROP TABLE old"))
    stores = [JobStore(url, name) for name in names]
    assert stores[0].find(names[0], "x").result() == kept
    other = record(stores[1], "x", key=names[0])
    assert stores[1].accept(other).result() == other
    again = record(stores[0], "x", key=names[0], uid="d" * 32)
    assert stores[0].accept(again).result() == kept
    for store in stores:
        store.close()
    assert not sql.inspect(engine).get_unique_constraints(JOBS.name)
    there = {index["name"] for index in sql.inspect(engine).get_indexes(JOBS.name)}
    assert {index.name for index in JOBS.indexes} <= there
    engine.dispose()


def test_a_failing_statement_takes_no_other_with_it(store):
    good = store.accept(record(store, "good"))
    bad = store.accept(record(store, "bad", state=None))
    also = store.accept(record(store, "also"))
    assert good.result().id == "good"
    assert also.result().id == "also"
    with pytest.raises(Exception, match=r"(?i)null"):
        bad.result()
    assert {job.id for job in store.live().result()} == {"good", "also"}


def test_two_servers_of_one_name_do_not_share_a_postgres(postgres):
    first = JobStore(postgres, "twin")
    try:
        with pytest.raises(InputError, match="twin"):
            JobStore(postgres, "twin")
        JobStore(postgres, "another").close()
    finally:
        first.close()
    JobStore(postgres, "twin").close()


def test_what_is_no_database_is_told_in_one_line(tmp_path):
    for url in ("nonsense", "oracle://x", f"sqlite:///{tmp_path}/no/such/folder/jobs.db"):
        with pytest.raises(InputError):
            JobStore(url).close()


def test_who_leaves_while_the_store_works_does_not_stop_it(store):
    """A task that is cancelled while it waits cancels its future; the store must go on for all others."""

    async def leave() -> None:
        slow = store.do(lambda _: time.sleep(0.2))
        waits = asyncio.ensure_future(asyncio.wrap_future(slow))
        await asyncio.sleep(0.05)
        waits.cancel()
        await asyncio.sleep(0.3)

    asyncio.run(leave())
    assert store.find("key", "nobody").result(timeout=10) is None


def fill(store: JobStore, count: int) -> None:
    """A history: jobs that are over, of the store's key and of others."""

    def action(connection: sql.Connection) -> None:
        rows = [
            {
                **record(store, str(i)).__dict__,
                "uid": f"{i:032x}",
                "key": store.server if i % 2 else "another",
                "state": "done",
                "created_s": float(i),
                "finished_s": i + 1.0,
                "bytes": 10,
                "result": "{}",
            }
            for i in range(count)
        ]
        connection.execute(sql.insert(JOBS), rows)

    store.do(action).result()


def plans(store: JobStore, seen: list[tuple[str, tuple]]) -> dict[str, str]:
    """Each statement's query plan, as SQLite explains it."""

    def action(connection: sql.Connection) -> dict[str, str]:
        return {
            text: "; ".join(
                row[-1] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", arguments)
            )
            for text, arguments in seen
        }

    return store.do(action).result()


def test_every_query_of_the_history_uses_an_index(tmp_path):
    """Whatever the store asks of its table; the control asks for what has none."""
    store = JobStore(f"sqlite:///{tmp_path}/jobs.db", "here")
    fill(store, 400)
    seen: list[tuple[str, tuple]] = []

    def keep(connection, cursor, statement, parameters, context, executemany):
        if JOBS.name in statement and not statement.startswith(("INSERT", "EXPLAIN")):
            seen.append((statement, parameters))

    sql.event.listen(store._engine, "before_cursor_execute", keep)
    new = record(store, "new")
    store.accept(new).result()
    store.start(new.uid, 1.0).result()
    store.end(new.uid, "done", 2000.0, {}, 10).result()
    store.find_uid(new.uid).result()
    assert [one.created_s for one in store.find_all("another", limit=2).result()] == [398.0, 396.0]
    assert [one.created_s for one in store.find_all("another", state="done", before_s=9).result()] == [
        8.0, 6.0, 4.0, 2.0, 0.0,
    ]  # fmt: skip
    store.live().result()
    assert len(store.expired(11.0, 10_000).result()) == 10
    assert len(store.expired(0.0, 1000).result()) == 301
    store.known([new.uid]).result()
    store.forget([new.uid]).result()
    store.probe().result()
    sql.event.remove(store._engine, "before_cursor_execute", keep)
    control = f"SELECT uid FROM {JOBS.name} WHERE digest = ?"
    told = plans(store, [*seen, (control, ("d",))])
    assert "SCAN darkroom_jobs" in told.pop(control)
    assert len(told) >= 11
    for text, plan in told.items():
        assert "SCAN" not in plan, (text, plan)
        assert " IN (" in text or "TEMP B-TREE" not in plan, (text, plan)  # the live ones are few
    store.close()


def test_a_database_made_before_gets_the_indices(url):
    name = f"server-{time.monotonic_ns()}"
    JobStore(url, name).close()
    engine = sql.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sql.text(f"DROP INDEX {INDICES[0].name}"))
        connection.execute(sql.text(f"CREATE INDEX {FORMER_INDICES[0]} ON {JOBS.name} (server)"))
    JobStore(url, name).close()
    there = {index["name"] for index in sql.inspect(engine).get_indexes(JOBS.name)}
    assert {index.name for index in INDICES} <= there
    assert not there.intersection(FORMER_INDICES)
    engine.dispose()
