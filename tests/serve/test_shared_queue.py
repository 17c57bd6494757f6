"""Servers that share a database: one queue, one owner a job, any of them answers, none is missed."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import sqlalchemy as sql
from PIL import Image

from darkroom import models, sample
from darkroom.errors import InputError
from darkroom.sample.generate import GenerateSettings
from darkroom.serve.jobs.core import Core
from darkroom.serve.jobs.results import PROBE_START, Files, ResultWriter
from darkroom.serve.jobs.store import METADATA, JobStore, Record
from darkroom.serve.request import AdapterChoice, PictureRequest, Refused
from darkroom.serve.settings import Limits, ServeSettings
from darkroom.serve.shared_queue import Leases, Shares
from serve.conftest import SMALL, difference

QUICK = PictureRequest(prompt="a red circle", steps=3, seed=5)
LONG = PictureRequest(prompt="a red circle", steps=150, seed=5)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    found = str(request.getfixturevalue("postgres"))
    engine = sql.create_engine(found)
    METADATA.drop_all(engine)  # the database is that of all tests
    engine.dispose()
    return found


@pytest.fixture
def two_stores(url) -> Iterator[tuple[JobStore, JobStore]]:
    name = f"group-{time.monotonic_ns()}"
    stores = JobStore(url, name, shared=True), JobStore(url, name, shared=True)
    yield stores
    for store in stores:
        store.close()


def record(server: str, number: int, adapters: tuple[str, ...] = (), key: str = "key", **more: Any) -> Record:
    request = QUICK.model_copy(update={"adapters": tuple(AdapterChoice(name=name) for name in adapters)})
    uid = f"{time.monotonic_ns():032x}"
    return Record(
        uid,
        server,
        key,
        f"job-{uid}",
        "digest",
        "queued",
        request.model_dump_json(),
        time.time() + number / 1000,
        **more,
    )


def test_a_job_has_one_owner_until_its_lease_runs_out(two_stores):
    one, other = (Leases(store, name, 1.0) for store, name in zip(two_stores, "ab", strict=True))
    job = one.accept(record(two_stores[0].server, 0), take=True).result()
    assert other.claim((), 10, 0.0).result() == []
    assert other.backlog().result().jobs == 0
    time.sleep(0.6)
    assert one.renew({job.uid: (3, 9)}).result() == {job.uid}
    time.sleep(0.6)
    assert other.claim((), 10, 0.0).result() == []
    found = other.look("key", job.id).result()
    assert found is not None
    assert (found.owner, found.steps_done, found.steps_total) == ("a", 3, 9)
    time.sleep(0.6)
    assert [taken.uid for taken in other.claim((), 10, 0.0).result()] == [job.uid]
    assert one.renew({job.uid: (4, 9)}).result() == set()
    assert other.renew({job.uid: (1, 9)}).result() == {job.uid}


def test_a_lease_lasts_no_longer_where_the_databases_clock_is_set_back(two_stores, monkeypatch):
    offset_s = [0.0]
    monkeypatch.setattr("darkroom.serve.shared_queue._time_of", lambda connection: time.time() + offset_s[0])
    dead, other = (Leases(store, name, 1.0) for store, name in zip(two_stores, "ab", strict=True))
    job = dead.accept(record(two_stores[0].server, 0), take=True).result()
    styled = other.accept(record(two_stores[0].server, 0, ("style0",)), take=False).result()
    dead.renew({job.uid: (1, 9)}, {"style0"}).result()
    offset_s[0] = -3600.0
    other.renew({}).result()
    assert other.claim((), 10, 60.0).result() == []  # it may be there still
    time.sleep(1.1)
    other.renew({}).result()
    assert {taken.uid for taken in other.claim((), 10, 60.0).result()} == {job.uid, styled.uid}


@pytest.mark.parametrize("apart", [True, False])
def test_servers_that_look_at_once_whether_writing_works_find_that_it_does(two_stores, apart):
    """With one key for all (the control) who came second was refused, and took no job for a second."""
    writers = [ResultWriter(Files(store), store, lambda *_: None) for store in two_stores]
    if not apart:
        for writer in writers:
            writer._probe_uid = PROBE_START + "0" * 8
    troubles: list[str | None] = []

    def look(writer: ResultWriter) -> None:
        for _ in range(150):
            writer.probe()
            troubles.append(writer.trouble)

    threads = [threading.Thread(target=look, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [one for one in troubles if one is not None]
    if apart:
        assert found == []
    elif two_stores[0]._engine.dialect.name == "postgresql":  # SQLite has one writer at a time
        assert found


def test_servers_that_claim_at_once_share_the_jobs_out(two_stores):
    leases = [Leases(store, name, 30.0) for store, name in zip(two_stores, "ab", strict=True)]
    made = [leases[0].accept(record(two_stores[0].server, i), take=False).result() for i in range(40)]
    taken: list[str] = []
    for _ in range(20):
        futures = [some.claim((), 3, 0.0) for some in leases]
        taken += [claimed.uid for future in futures for claimed in future.result()]
    assert sorted(taken) == sorted(job.uid for job in made)
    leases[1].release().result()
    again = leases[0].claim((), 100, 0.0).result()
    assert again
    assert {job.uid for job in again} < set(taken)


def test_a_job_waits_for_the_server_that_has_its_adapters_but_not_for_ever(two_stores):
    one, other = (Leases(store, name, 30.0) for store, name in zip(two_stores, "ab", strict=True))
    server = two_stores[0].server
    other.renew({}, {"style0", "style1"}).result()
    new = one.accept(record(server, -1, ("style5",)), take=False).result()
    assert [job.uid for job in one.claim((), 5, 60.0).result()] == [new.uid]  # nobody has it
    styled = one.accept(record(server, 0, ("style0",)), take=False).result()
    plain = one.accept(record(server, 1), take=False).result()
    assert [job.uid for job in one.claim((), 1, 60.0).result()] == [plain.uid]
    assert one.claim((), 5, 60.0).result() == []
    assert [job.uid for job in other.claim({"style0"}, 5, 60.0).result()] == [styled.uid]
    late = two_stores[0].accept(record(server, -2000, ("style1",))).result()
    assert [job.uid for job in one.claim((), 5, 1.0).result()] == [late.uid]


def test_a_job_waits_longer_for_the_server_that_has_its_model(two_stores):
    """A model takes seconds to load: after `patience_s` others take a job's adapters, not yet its model."""
    one, other = (Leases(store, name, 30.0) for store, name in zip(two_stores, "ab", strict=True))
    server = two_stores[0].server
    one.renew({}, {"model/first"}).result()
    other.renew({}, {"model/second"}).result()

    def asked(number: int, model: str, adapters: tuple[str, ...] = ()) -> str:
        made = record(server, number, adapters)
        request = PictureRequest.model_validate_json(made.request).model_copy(update={"model": model})
        return two_stores[0].accept(replace(made, request=request.model_dump_json())).result().uid

    theirs = asked(-2000, "second", ("style0",))
    assert one.claim({"model/first"}, 5, 1.0).result() == []
    nobodys, own = asked(0, "third"), asked(1, "first")
    assert [job.uid for job in one.claim({"model/first"}, 1, 1.0).result()] == [own]
    assert [job.uid for job in one.claim({"model/first"}, 5, 1.0).result()] == [nobodys]
    assert [job.uid for job in other.claim({"model/second"}, 5, 1.0).result()] == [theirs]
    late = asked(-11_000, "second")
    assert [job.uid for job in one.claim({"model/first"}, 5, 1.0).result()] == [late]


def test_keys_take_turns_by_work_and_a_keys_own_jobs_go_by_priority(two_stores):
    leases, server = Leases(two_stores[0], "a", 30.0), two_stores[0].server
    wanted = [("many", 1, 1.0)] * 4 + [("large", 1, 3.0)] * 2 + [("many", 2, 1.0), ("many", 0, 1.0)]
    jobs = [
        leases.accept(record(server, 0, key=key, priority=priority, work=work), take=False).result()
        for key, priority, work in wanted
    ]
    number = {job.uid: i for i, job in enumerate(jobs)}
    taken = [number[leases.claim((), 1, 0.0).result()[0].uid] for _ in jobs]
    assert taken == [4, 6, 0, 1, 2, 5, 3, 7]


def test_waiting_pictures_are_counted_and_claimed_not_jobs(two_stores):
    leases, server = Leases(two_stores[0], "a", 30.0), two_stores[0].server
    jobs = [leases.accept(record(server, i, num=16, work=2.5), take=False).result() for i in range(3)]
    oldest_s = min(job.created_s for job in jobs)
    assert leases.backlog().result() == ({"key": 48}, {"key": 7.5}, 3, oldest_s, 1)
    assert leases.look("key", jobs[2].id).result().place == 32
    assert [job.uid for job in leases.claim((), 2, 0.0).result()] == [jobs[0].uid]


def test_time_is_the_databases_and_what_nobody_took_in_time_fails(two_stores):
    leases, server = Leases(two_stores[0], "a", 30.0), two_stores[0].server
    ahead = record(server, 3_600_000)  # of a server whose clock is an hour fast
    job = leases.accept(replace(ahead, due_s=ahead.created_s + 0.05), take=False).result()
    assert job.created_s == pytest.approx(time.time(), abs=5)
    assert leases.now_s() == pytest.approx(time.time(), abs=5)
    taken = leases.accept(record(server, 0, due_s=1.0), take=True).result()  # its owner watches it
    time.sleep(0.1)
    assert leases.backlog().result().jobs == 0
    late = two_stores[1].find_uid(job.uid).result()
    assert (late.state, late.result["error"]["code"]) == ("failed", "deadline")
    assert late.result["error"]["message"] == "not done within 0.05 s"
    assert two_stores[1].find_uid(taken.uid).result().state == "queued"


@pytest.fixture
def run_two(model_folder, adapter_folder, tmp_path, url) -> Callable[..., Any]:
    """Calls a coroutine with two cores that share a database; returns what it returns."""

    def run(scenario: Callable[[Core, Core], Awaitable[Any]], **settings: Any) -> Any:
        told = {
            "model": str(model_folder),
            "adapters": adapter_folder,
            "state": tmp_path / "state",
            "capacity": 8,
            "jobs": url,
            "name": f"group-{time.monotonic_ns()}",
            "shared": True,
            "lease_s": 1.0,
            **settings,
        }

        async def whole() -> Any:
            cores = [Core(ServeSettings(**told)) for _ in range(2)]
            try:
                for core in cores:  # one after the other: two models cannot be opened at once in a process
                    await core.start()
                    await core.loaded()
                return await asyncio.wait_for(scenario(*cores), 60)
            finally:
                for core in cores:
                    await core.close()

        return asyncio.run(whole())

    return run


def alone(model: Any, request: PictureRequest) -> Image.Image:
    settings = GenerateSettings(steps=request.steps, seed=request.seed)
    return sample.generate(model, request.prompt, **settings.model_dump(exclude_unset=True))[0].image


def test_any_server_answers_for_a_job(small, run_two):
    async def scenario(one: Core, other: Core) -> Any:
        await one.submit(QUICK, key="a", job_id="x")
        events = [event async for event in other.events("x", key="a")]
        job = await other.finished("x", key="a")
        [picture] = await other.pictures("x", key="a")
        same = await other.submit(QUICK, key="a", job_id="x")
        with pytest.raises(Refused) as missing:
            await other.get("x", key="another")
        return events, job, picture, same, missing.value, one.results.secret == other.results.secret

    events, job, picture, same, missing, one_secret = run_two(scenario)
    assert events[-1].kind == "done"
    assert job.state == same.state == "done"
    assert same.uid == job.uid
    assert missing.status == 404
    assert one_secret
    image = Image.open(io.BytesIO(picture.png)).convert("RGB")
    assert difference(image, alone(small, QUICK)) <= 1
    assert difference(image, alone(small, QUICK.model_copy(update={"seed": 6}))) >= 10


def test_a_job_that_no_server_has_room_for_is_given_up_in_time(run_two):
    async def scenario(one: Core, other: Core) -> Any:
        for core in (one, other):
            assert core.sharing is not None
            core.sharing._room = lambda: 0  # type: ignore[method-assign]
        await one.submit(QUICK.model_copy(update={"deadline_s": 0.2}), key="a", job_id="x")
        with pytest.raises(Refused) as full:
            await one.submit(QUICK.model_copy(update={"num": 4}), key="a")
        return await other.finished("x", key="a"), full.value.code

    job, code = run_two(scenario, limits=Limits(queue_per_key=4))
    assert (job.state, job.error["code"]) == ("failed", "deadline")
    assert code == "queue_full"


def test_a_shared_queue_is_bounded_by_seconds_of_work(run_two):
    """Jobs that no server had taken yet did not count."""

    async def scenario(one: Core, other: Core) -> Any:
        for core in (one, other):  # the speed is known, and from here on neither takes a job
            await core.finished((await core.submit(QUICK, key="a")).id, key="a")
            core.sharing.claims = False
            core.sharing._room = lambda: 0
        await one.sharing.renew()
        accepted = [await one.submit(LONG, key="a")]
        work = (await asyncio.wrap_future(one.store.find_uid(accepted[0].uid))).work
        codes = []
        for core in (one, other):
            await core.sharing.renew()
            a_job_s = core.engine.seconds_for(work)
            core._intake._limits = Limits(queue_s=1.4 * a_job_s, queue_per_key=256)
            with pytest.raises(Refused) as caught:
                await core.submit(LONG, key="a")
            codes.append((caught.value.status, caught.value.code))
            assert caught.value.retry_after_s > 0
        servers = one.sharing.backlog.servers
        one._intake._limits = Limits(queue_s=1.6 * one.engine.seconds_for(work), queue_per_key=256)
        accepted.append(await one.submit(LONG, key="a"))  # half a job's time waits, for there are two servers
        there = [(await other.get(job.id, key="a")).state for job in accepted]
        for job in accepted:
            await one.cancel(job.id, key="a")
        return codes, servers, there

    codes, servers, there = run_two(scenario)
    assert codes == [(429, "queue_full")] * 2
    assert servers == 2
    assert there == ["queued", "queued"]


def test_a_job_cancelled_at_another_server_stops(run_two):
    async def scenario(one: Core, other: Core) -> Any:
        await one.submit(LONG, key="a", job_id="x")
        while not (await other.get("x", key="a")).steps_done:
            await asyncio.sleep(0.02)
        cancelled = await other.cancel("x", key="a")
        events = [event async for event in one.events("x", key="a")]
        while one.status().rows:
            await asyncio.sleep(0.02)
        return cancelled, events[-1], await one.get("x", key="a"), one.status().jobs

    cancelled, last, here, jobs = run_two(scenario)
    assert cancelled.state == here.state == last.kind == "cancelled"
    assert here.pictures == ()
    assert jobs == 0


def test_jobs_of_a_server_that_fell_silent_are_taken_over(run_two):
    async def scenario(one: Core, other: Core) -> Any:
        assert one.sharing is not None
        assert one.engine is not None
        one.sharing.takes = lambda record: True  # type: ignore[method-assign]
        for i in range(4):
            await one.submit(LONG.model_copy(update={"seed": i}), key="a", job_id=f"x{i}")
        while not one.status().rows:
            await asyncio.sleep(0.01)
        one._loop.end_tasks()  # as if it were killed: it neither renews nor claims, nor steps
        await asyncio.to_thread(one.engine.stop)
        return [await other.finished(f"x{i}", key="a") for i in range(4)], other.metrics.pictures._value.get()

    jobs, drawn = run_two(scenario)
    assert [job.state for job in jobs] == ["done"] * 4
    assert drawn == 4


def test_pictures_stay_when_another_server_was_quicker(run_two):
    """One is cut off for longer than its lease while it stores; it comes back when the other is done."""

    async def scenario(one: Core, other: Core) -> Any:
        assert one.sharing is not None
        one.sharing.takes = lambda record: True  # type: ignore[method-assign]
        back, stores = threading.Event(), one.results.write
        one.results.write = lambda *given: back.wait(30) and stores(*given)  # type: ignore[method-assign]
        job = await one.submit(QUICK, key="a", job_id="x")
        waits = asyncio.ensure_future(one.finished("x", key="a"))
        one._loop.end_tasks()  # it neither renews nor claims
        await other.finished("x", key="a")
        back.set()
        here = await waits
        one._keeper.close()  # whatever it had in mind to do is done
        return job.uid, here, await other.pictures("x", key="a"), await one.pictures("x", key="a")

    uid, here, there, same = run_two(scenario)
    assert (here.state, here.uid) == ("done", uid)
    assert len(there) == 1
    assert there[0].png == same[0].png


def test_a_server_that_stops_hands_its_jobs_on_at_once(run_two):
    async def scenario(one: Core, other: Core) -> Any:
        await one.submit(LONG, key="a", job_id="x")
        await one.drain(0.0)
        while other.status().jobs == 0:
            await asyncio.sleep(0.01)
        with pytest.raises(Refused):
            await one.submit(QUICK, key="a")
        return (await one.finished("x", key="a")).state

    assert run_two(scenario, lease_s=600.0) == "done"


def test_work_goes_to_the_server_that_has_the_adapter(run_two):
    styled = QUICK.model_copy(update={"adapters": (AdapterChoice(name="style0"),)})

    async def scenario(one: Core, other: Core) -> Any:
        await one.submit(styled, key="a", job_id="first")
        await one.finished("first", key="a")
        has, lacks = (one, other) if "style0" in _at_hand(one) else (other, one)
        for i in range(6):
            await lacks.submit(styled.model_copy(update={"seed": i}), key="a", job_id=f"x{i}")
            await lacks.finished(f"x{i}", key="a")
        return _at_hand(has), _at_hand(lacks), has.metrics.pictures._value.get()

    has, lacks, drawn = run_two(scenario)
    assert has == {"style0"}
    assert lacks == set()
    assert drawn == 7


def _at_hand(core: Core) -> set[str]:
    assert core.pool.first.opened is not None
    assert core.pool.first.opened.library is not None
    return core.pool.first.opened.library.at_hand()


def test_sharing_needs_a_database(model_folder, tmp_path):
    with pytest.raises(InputError, match="--jobs"):
        Core(ServeSettings(model=str(model_folder), state=tmp_path, shared=True))


def test_uploads_of_a_server_that_was_killed_before_it_accepted_their_job_go(run_core, url, monkeypatch):
    async def scenario(core: Core) -> list[bytes | None]:
        core.results.write("a" * 32, {"image.upload": b"nobody's"})
        job = await core.submit(QUICK, key="a")
        await core.finished(job.id, key="a")

        def there() -> list[bytes | None]:
            return [core.results.read("a" * 32, "image.upload"), core.results.read(job.uid, "0.png")]

        await core._retention.sweep(core.limits, 0)
        found = there()
        monkeypatch.setattr("darkroom.serve.jobs.results.OWNERLESS_S", 0.0)
        await core._retention.sweep(core.limits, 0)
        return [*found, *there()]

    first, png, then, still = run_core(scenario, shared=True, jobs=url)
    assert first == b"nobody's", "another server may be about to accept it"
    assert then is None
    assert png is not None
    assert png == still


def test_servers_of_several_models_draw_from_one_queue(run_two, small, tmp_path):
    """Each job by its own model, whichever server took it in; the work goes to where its model is loaded."""
    other = models.create("tiny", seed=2, overrides=SMALL)
    models.save(other, tmp_path / "other")
    wanted = {
        name: sample.generate(model, QUICK.prompt, steps=3, seed=5, optimise="none", notice=lambda _: None)[0]
        for name, model in (("small", small), ("other", other))
    }

    async def scenario(one: Core, two: Core) -> Any:
        asked = {
            name: [
                await core.submit(QUICK.model_copy(update={"model": name}), key="a")
                for core in (one, two)
                for _ in range(3)
            ]
            for name in wanted
        }
        found: dict[str, list[Image.Image]] = {}
        for name, jobs in asked.items():
            found[name] = []
            for job in jobs:
                done = await two.finished(job.id, key="a")
                assert (done.state, done.request.model) == ("done", name)
                [picture] = await one.pictures(job.id, key="a")
                found[name].append(Image.open(io.BytesIO(picture.png)).convert("RGB"))
        with pytest.raises(Refused, match="this server has 'small', 'other'"):
            await two.submit(QUICK.model_copy(update={"model": "nobody"}), key="a")
        return found

    made = run_two(scenario, more_models=(str(tmp_path / "other"),), adapters=None)
    for name, pictures in made.items():
        away = wanted["other" if name == "small" else "small"].image
        for picture in pictures:
            assert difference(picture, wanted[name].image) <= 1
            assert difference(picture, away) >= 8


def test_a_model_that_a_key_chooses_is_said_with_each_picture(run_http, url, tmp_path):
    """The next request may go to another of the servers, which has not heard of the choice."""
    models.save(models.create("tiny", seed=2, overrides=SMALL), tmp_path / "other")
    told = {"more_models": (str(tmp_path / "other"),), "jobs": url, "name": f"g-{time.monotonic_ns()}"}

    async def scenario(core: Core, http: Any) -> Any:
        same = await http.post("/sdapi/v1/options", json={"sd_model_checkpoint": "small"})
        set_once = await http.post("/sdapi/v1/options", json={"sd_model_checkpoint": "other"})
        body = {"prompt": "a", "steps": 2, "override_settings": {"sd_model_checkpoint": "other"}}
        return same, set_once, await http.post("/sdapi/v1/txt2img", json=body)

    same, set_once, made = run_http(scenario, shared=True, **told)
    assert (same.status_code, set_once.status_code, made.status_code) == (200, 422, 200)
    assert "override_settings" in set_once.json()["detail"]
    assert json.loads(made.json()["info"])["sd_model_name"] == "other"


def test_shares_start_a_new_key_level_and_count_every_job():
    """The twin of the queue for several servers: who had the least work is next."""

    @dataclass
    class Job:
        key: str
        work: float

    shares = Shares()
    shares.begin(["old", "other"])
    for _ in range(5):
        shares.give(Job("old", 4.0))
        shares.give(Job("other", 3.0))
    shares.begin(["old", "other", "new"])  # new comes level with other, who had 15 to old's 20
    jobs = [Job(key, 2.0) for key in ("old", "other", "new") for _ in range(4)]
    assert [job.key for job in shares.in_turn(jobs)][:6] == ["other", "new", "other", "new", "other", "new"]
    # Jobs without work count as one, or one key's would all go first.
    shares = Shares()
    free = [Job(key, 0.0) for key in ("a", "a", "a", "b", "b", "b")]
    assert [job.key for job in shares.in_turn(free)] == ["a", "b", "a", "b", "a", "b"]
    for job in free[:3]:
        shares.give(job)
    assert [job.key for job in shares.in_turn([Job("a", 1.0), Job("b", 1.0)])] == ["b", "a"]


def test_a_keys_share_counts_its_jobs_so_many_times():
    @dataclass
    class Job:
        key: str
        work: float

    shares = Shares({"paying": 3})
    jobs = [Job(key, 6.0) for key in ("paying", "other") for _ in range(8)]
    assert [job.key for job in shares.in_turn(jobs)][:8].count("paying") == 6
    for job in (jobs[0], jobs[1], jobs[2], jobs[-1]):
        shares.give(job)
    shares.begin(["paying", "other"])  # level again: three of one for one of the other
    assert [job.key for job in shares.in_turn(jobs)][:4] == ["paying", "other", "paying", "paying"]
