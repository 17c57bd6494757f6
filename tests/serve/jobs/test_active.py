"""Who is let in, to the picture, the byte and the second; jobs in memory as they come and go."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from typing import Any, cast

import pytest

from darkroom.serve.engine.loop import Admission, Loop
from darkroom.serve.engine.tickets import EngineJob, Listener, Shape, Ticket
from darkroom.serve.jobs import active
from darkroom.serve.jobs.active import (
    LATE_S,
    WORKED_ON,
    ActiveJob,
    ActiveJobs,
    Backlog,
    Bench,
    Intake,
    Rates,
    Reservation,
    Reservations,
    Returns,
    over_quota,
    owner,
)
from darkroom.serve.jobs.admission import new_record
from darkroom.serve.jobs.store import OverQuota
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import PictureRequest, Refused, Uploads
from darkroom.serve.settings import Limits


class Waiting:
    """Pictures that wait, by key: a second's work each, drawn one by one each `pace_s`."""

    def __init__(self, pace_s: float = 1.0, **of: int) -> None:
        self.pace_s, self.of = pace_s, of

    def waiting(self, key: str | None = None) -> int:
        return sum(self.of.values()) if key is None else self.of.get(key, 0)

    def waiting_work(self) -> dict[str, float]:
        return {key: float(num) for key, num in self.of.items() if num}

    def seconds_for(self, cost: float) -> float:
        return cost

    def admissions(self) -> list[Admission]:
        keys = [key for key, num in self.of.items() for _ in range(num)]
        return [Admission(key, 1.0, (i + 1) * self.pace_s) for i, key in enumerate(keys)]


def room(intake: Intake, pool: Any, key: str, num: int = 1, **more: Any) -> Refused | None:
    try:
        intake.check_room(pool, key, num, **more)
    except Refused as refused:
        return refused
    return None


def work(intake: Intake, pool: Any, key: str, cost: float, **more: Any) -> Refused | None:
    try:
        intake.check_work(pool, key, 1, cost, **more)
    except Refused as refused:
        return refused
    return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(active.time, "monotonic", lambda: now[0])
    return now


def test_a_rate_is_told_and_a_refusal_takes_nothing() -> None:
    rates = Rates(12.0, {"quick": 120.0})
    rates.take("a", 0.0, num=2)
    for at_s, left_s in ((0.0, 5.0), (1.0, 4.0), (4.5, 0.5)):
        with pytest.raises(Refused, match="at most 12 jobs a minute with key 'a'") as caught:
            rates.take("a", at_s)
        assert caught.value.retry_after_s == pytest.approx(left_s)
    rates.take("a", 5.0)
    with pytest.raises(Refused):
        rates.take("a", 5.0)
    for _ in range(20):
        rates.take("quick", 0.0)
    with pytest.raises(Refused, match="at most 120 jobs a minute") as caught:
        rates.take("quick", 0.0)
    assert caught.value.retry_after_s == pytest.approx(0.5)


def test_a_slow_key_has_one_ready() -> None:
    rates = Rates(3.0)
    rates.take("a", 0.0)
    with pytest.raises(Refused, match="at most 3 jobs a minute") as caught:
        rates.take("a", 0.0)
    assert caught.value.retry_after_s == pytest.approx(20.0)
    rates.take("a", 20.0)


def test_more_than_ever_lie_ready_are_lent_once() -> None:
    rates = Rates(12.0)
    rates.take("a", 0.0, num=5)  # two lie ready: three are owed
    with pytest.raises(Refused) as caught:
        rates.take("a", 0.0, num=5)
    assert caught.value.retry_after_s == pytest.approx((2 + 3) / 0.2)
    rates.take("a", 25.0, num=2)


def test_owners_are_named_where_there_are_keys() -> None:
    assert owner("mine") == " with key 'mine'"
    assert owner("") == owner(active.ANONYMOUS) == " in all"


def test_a_days_quota_is_over_at_midnight() -> None:
    refused = over_quota(OverQuota(5, 4), "mine")
    assert (refused.status, refused.code) == (429, "quota")
    assert "at most 5 pictures a day with key 'mine'; 4 of today are used" in str(refused)
    assert refused.retry_after_s is not None
    assert 0 < refused.retry_after_s <= 86_400
    off_s = (time.time() + refused.retry_after_s) % 86_400
    assert min(off_s, 86_400 - off_s) < 60


def test_what_is_written_down_and_what_other_servers_have_takes_places(clock: list[float]) -> None:
    intake, pool = Intake(Limits(queue=8, queue_per_key=8)), Waiting(c=2)
    backlog = Backlog(Counter(b=1), {}, 1)
    with intake.reserved("a", 3):
        assert room(intake, pool, "d", 2, backlog=backlog) is None
        assert intake.has_place(pool, "d", 2, backlog)
        assert not intake.has_place(pool, "d", 3, backlog)
        refused = room(intake, pool, "d", 3, backlog=backlog)
        assert "6 pictures wait already" in str(refused)
    assert room(intake, pool, "d", 5, backlog=backlog) is None
    assert room(intake, pool, "d", 6, backlog=backlog) is not None


def test_a_keys_own_places_are_counted_apart(clock: list[float]) -> None:
    intake, pool = Intake(Limits(queue=50, queue_per_key=6)), Waiting(a=2, b=1)
    backlog = Backlog(Counter(a=1), {}, 1)
    with intake.reserved("a", 2):
        assert intake.has_place(pool, "a", 1, backlog)
        assert "5 pictures wait already with key 'a'" in str(room(intake, pool, "a", 2, backlog=backlog))
        assert intake.has_place(pool, "b", 5, backlog)
        assert not intake.has_place(pool, "b", 6, backlog)


def test_no_place_is_held_for_a_key_whose_jobs_fill_its_queue(clock: list[float]) -> None:
    intake, pool = Intake(Limits(queue=8, queue_per_key=4)), Waiting(mine=4, other=4)
    refused = room(intake, pool, "mine", digest="first")
    assert refused is not None
    clock[0] += 1.0
    pool.of = {"mine": 2, "other": 3}
    with intake.reserved("mine", 2):
        assert intake.has_place(pool, "third", 1)
    pool.of = {"mine": 2, "other": 5}
    assert not intake.has_place(pool, "third", 1), "the control: one is held"
    assert intake.has_place(pool, "mine", 1, digest="first")


@pytest.mark.parametrize("queue", [8, 50])
def test_times_go_on_beyond_what_waits(clock: list[float], queue: int) -> None:
    """Two seconds a picture, and eight of them: the ninth who is refused comes after the queue has gone."""
    intake, pool = Intake(Limits(queue=queue, queue_per_key=8)), Waiting(2.0, mykey=8)
    key = "".join(("my", "key"))  # as from a request: no other's very string
    told = [room(intake, pool, key, digest=str(i)) for i in range(11)]
    assert [one and one.retry_after_s for one in told] == [2.0 * (i + 1) for i in range(11)]


@pytest.mark.parametrize("share", [1, 2])
def test_work_is_told_when_enough_of_it_is_gone(clock: list[float], share: int) -> None:
    limits = Limits(queue_s=8.0 * share, queue=256, queue_per_key=256 // share)
    intake, pool = Intake(limits), Waiting(2.0, mykey=8)
    key = "".join(("my", "key"))
    refused = work(intake, pool, key, 3.0, digest="a")
    whose = " with key 'mykey'" if share > 1 else ""
    assert f"work of 8 s waits already{whose}, and this is 3 s; at most 8 s may wait" in str(refused)
    assert refused is not None
    assert refused.retry_after_s == 6.0  # three of the eight seconds, two seconds each
    again = work(intake, pool, key, 3.0, digest="b")
    assert again is not None
    assert again.retry_after_s == 12.0
    beyond = work(intake, pool, key, 3.0, digest="c")
    assert beyond is not None
    assert beyond.retry_after_s == 16.0 + 1.0  # a second's work beyond what waits
    pool.of = {"mykey": 5}
    assert work(intake, pool, key, 3.0, digest="d") is None
    assert work(intake, pool, key, 3.5, digest="d") is not None


def test_a_third_of_the_seconds_is_held_for_who_is_due(clock: list[float]) -> None:
    intake, pool = Intake(Limits(queue_s=8.0, queue=256, queue_per_key=256)), Waiting(a=8)
    assert work(intake, pool, "a", 1.0, digest="first") is not None
    clock[0] += 1.0
    for waits, held in ((4, False), (5, True), (7, True)):
        pool.of = {"a": waits}
        assert (work(intake, pool, "b", 1.0) is not None) == held
        assert work(intake, pool, "a", 1.0, digest="first") is None, "its own place"


def test_other_servers_work_counts_by_how_many_draw_it(clock: list[float]) -> None:
    intake, pool = Intake(Limits(queue_s=8.0, queue=256, queue_per_key=256)), Waiting(a=2)
    for servers, fits in ((1, False), (2, False), (4, True)):
        backlog = Backlog(Counter(), {"a": 2.0, "b": 12.0}, 3, servers=servers)
        assert (work(intake, pool, "a", 2.0, backlog=backlog) is None) == fits


def test_a_key_waits_for_its_own_pictures_alone(clock: list[float]) -> None:
    intake, pool = Intake(Limits(queue=50, queue_per_key=2)), Waiting(a=2, b=2, c=2)
    told = [room(intake, pool, "b", digest=str(i)) for i in range(3)]
    assert [one and one.retry_after_s for one in told] == [3.0, 4.0, 6.0]
    assert [one and (one.status, one.code) for one in told] == [(429, "queue_full")] * 3
    long = Intake(Limits(queue_s=100.0, queue=50, queue_per_key=2))  # four seconds for one key
    pool = Waiting(a=4, b=4, c=4)
    refused = [work(long, pool, "b", 2.0, digest=str(i)) for i in range(3)]
    assert [one and (one.status, one.code) for one in refused] == [(429, "queue_full")] * 3
    assert [one and one.retry_after_s for one in refused] == [6.0, 8.0, 10.0]


def test_places_held_for_one_key_are_not_of_another_keys_queue(clock: list[float]) -> None:
    intake, pool = Intake(Limits(queue=50, queue_per_key=6)), Waiting(a=6)
    assert room(intake, pool, "a", digest="first") is not None
    clock[0] += 1.0
    pool.of = {"a": 2, "b": 4}
    assert intake.has_place(pool, "b", 2)
    assert not intake.has_place(pool, "b", 3)
    pool.of = {"a": 4}
    assert intake.has_place(pool, "a", 1)
    assert not intake.has_place(pool, "a", 2), "the control: one is held"


def test_a_third_of_the_places_is_held_at_most(clock: list[float]) -> None:
    intake, pool = Intake(Limits(queue=9, queue_per_key=9)), Waiting(a=9)
    for i in range(5):
        assert room(intake, pool, "a", digest=str(i)) is not None
    clock[0] += 5.0
    for waits, fits in ((5, True), (6, False)):
        pool.of = {"a": waits}
        assert intake.has_place(pool, "b", 1) == fits


def test_who_always_comes_back_keeps_its_places(clock: list[float]) -> None:
    intake, pool = Intake(Limits(queue=6, queue_per_key=6)), Waiting(a=6)
    for i in range(60):  # a key that never did would be known by now
        pool.of = {"a": 6}
        assert room(intake, pool, "mine", digest=str(i)) is not None
        clock[0] += 1.0
        pool.of = {"a": 5}
        assert not intake.has_place(pool, "b", 1), i
        assert intake.has_place(pool, "mine", 1, digest=str(i))
        intake.kept("mine", str(i))
        assert intake.has_place(pool, "b", 1), i


def test_promises_taken_up_are_averaged() -> None:
    """The mean of the first ones and of one that was kept before; later the latest count most."""
    returns, came = Returns(), [False, False, True, False]
    for i, one in enumerate(came, 1):
        returns.note(one)
        assert returns.share == pytest.approx((1 + sum(came[:i])) / (i + 1))
    for _ in range(500):
        returns.note(True)
    assert returns.share > 0.99
    returns.note(False)
    assert returns.share == pytest.approx(1 - active.RETURN_WEIGHT, abs=0.001)


def test_a_key_is_known_after_some_promises() -> None:
    returns = Returns()
    for _ in range(active.KNOWN):
        assert returns.queues == active.PROMISED
        returns.note(True)
    for _ in range(2):
        assert returns.queues == active.PROMISED_ONCE_KNOWN
        returns.note(True)


def test_seconds_of_work_follow_the_speed(clock: list[float]) -> None:
    """Two units of work a second: eight units are four seconds."""

    class Quick(Waiting):
        def seconds_for(self, cost: float) -> float:
            return cost / 2

    intake, pool = Intake(Limits(queue_s=4.0, queue=256, queue_per_key=256)), Quick(2.0, a=8)
    refused = work(intake, pool, "b", 2.0)
    assert "work of 4 s waits already, and this is 1 s; at most 4 s may wait" in str(refused)
    assert refused is not None
    assert refused.retry_after_s == 4.0  # a second's work is two pictures
    long = work(intake, pool, "c", 40.0)
    assert long is not None
    assert long.retry_after_s == 16.0 + 1.0, "all that waits, and what was promised to b"
    pool.of = {"a": 6}
    assert work(Intake(Limits(queue_s=4.0)), pool, "b", 2.0) is None


def test_a_place_that_is_promised_is_no_work(clock: list[float]) -> None:
    intake, pool = Intake(Limits(queue=8, queue_s=8.0, queue_per_key=256)), Waiting(2.0, a=8)
    assert room(intake, pool, "b", digest="b") is not None
    refused = work(intake, pool, "c", 3.0, digest="c")
    assert refused is not None
    assert refused.retry_after_s == 6.0


def active_of(name: str, cost: int = 1, uploads: Uploads | None = None, num: int = 1) -> ActiveJob:
    """A job, of one picture if not told otherwise."""
    request, shape = PictureRequest(prompt="a", num=num), Shape(cost, 1, 1, 1)
    job = EngineJob(name, "key", request, shape, cast(Listener, None), uploads)
    return ActiveJob(new_record(name, "s", "key", f"id-{name}", "d", request, shape), job)


def upload_of(num_bytes: int) -> Uploads:
    return Uploads(b"x" * num_bytes)


def uploads_refused(intake: Intake, pool: Any, jobs: ActiveJobs, uploads: Uploads | None) -> Refused | None:
    try:
        intake.check_uploads(pool, jobs, uploads)
    except Refused as refused:
        return refused
    return None


def test_who_may_still_come_is_found_by_time_as_by_looking_at_all() -> None:
    """Two requests of one key at one time, and one that is put back twice, among them."""
    draw, kept, reservations = random.Random(3), list[Reservation](), Reservations()
    for i in range(600):
        until_s = draw.choice((i / 20 + draw.random() * 8, 12.0))
        num, cost = draw.randrange(1, 5), draw.randrange(3) / 4
        one = Reservation(until_s, draw.choice("ab"), num, cost, draw.choice(("x", "y", "z", None)))
        kept.append(one)
        reservations.add(one)
        if i % 3 == 0:
            gone = draw.choice(kept)
            kept = [other for other in kept if other is not gone]
            reservations.remove(gone)
        now_s = i / 20
        assert len(reservations) == len(kept)
        for found, wanted in (
            (reservations.due(now_s), [one for one in kept if one.is_due(now_s)]),
            (reservations.late(now_s), [one for one in kept if one.until_s + LATE_S <= now_s]),
        ):
            assert sorted(map(id, found)) == sorted(map(id, wanted))
            assert [one.until_s for one in found] == sorted(one.until_s for one in wanted)
        to_come = [one for one in kept if one.until_s > now_s]
        assert reservations.to_come(now_s) == {
            key: (len(of), sum(one.num for one in of), sum(one.cost for one in of))
            for key in "ab"
            if (of := [one for one in to_come if one.key == key])
        }
        for key, digest in itertools.product("ab", ("x", None)):
            due = [one for one in kept if (one.key, one.digest) == (key, digest) and one.is_due(now_s)]
            one_due = reservations.due_of(key, digest, now_s)
            assert one_due in due if due else one_due is None
    most = max("ab", key=lambda key: sum(one.key == key for one in kept))
    assert reservations.last_of_most() is max(
        (one for one in kept if one.key == most), key=lambda one: one.until_s
    )


def test_bytes_of_pictures_that_came_with_jobs_are_counted_once() -> None:
    intake, pool, jobs = Intake(Limits(uploads_bytes=2000)), Waiting(), ActiveJobs(Loop(), Metrics())
    large = upload_of(5000)
    assert uploads_refused(intake, pool, jobs, large) is None, "one job's never are too many"
    with intake.reserved("a", 1):
        assert uploads_refused(intake, pool, jobs, large) is None, "one that brings none takes no bytes"
    first, second = upload_of(1200), upload_of(600)
    for name, cost, one in (("a", 4, first), ("b", 6, second), ("c", 8, None), ("d", 16, second)):
        jobs.add(active_of(name, cost, one, num=2))
    assert jobs.uploads() == {id(first): 1200, id(second): 600}
    costs = [2 * one.work.shape.whole_cost for one in jobs]
    assert uploads_refused(intake, pool, jobs, first) is None
    assert uploads_refused(intake, pool, jobs, None) is None
    assert uploads_refused(intake, pool, jobs, upload_of(200)) is None
    refused = uploads_refused(intake, pool, jobs, upload_of(201))
    assert "pictures of 1800 bytes that came with jobs wait already; at most 2000 may" in str(refused)
    assert refused is not None
    assert refused.retry_after_s == costs[0], "when the first job is over"
    more = uploads_refused(intake, pool, jobs, upload_of(1401))
    assert more is not None
    assert more.retry_after_s == sum(costs), "b's pictures are d's too: not before that is over"
    with intake.reserved("a", 1, upload_of(100)):
        assert uploads_refused(intake, pool, jobs, upload_of(100)) is None
        assert uploads_refused(intake, pool, jobs, upload_of(101)) is not None
    assert uploads_refused(intake, pool, jobs, upload_of(101)) is None
    jobs.add(active_of("e", 32, upload_of(1)))
    more = uploads_refused(intake, pool, jobs, upload_of(1402))
    assert more is not None
    assert more.retry_after_s == sum(costs), "the control: nobody waits for e"


def test_bytes_of_pictures_that_jobs_share_are_reserved_once() -> None:
    intake, pool, jobs = Intake(Limits(uploads_bytes=2000)), Waiting(), ActiveJobs(Loop(), Metrics())
    shared = upload_of(1200)
    with intake.reserved("a", 1, shared), intake.reserved("a", 1, shared):
        assert uploads_refused(intake, pool, jobs, shared) is None
        jobs.add(active_of("a", 4, shared))
        assert uploads_refused(intake, pool, jobs, upload_of(800)) is None
        assert "pictures of 1200 bytes" in str(uploads_refused(intake, pool, jobs, upload_of(801)))
    jobs.forget(next(iter(jobs)))
    assert uploads_refused(intake, pool, jobs, upload_of(2000)) is None


def test_jobs_are_found_until_they_are_forgotten() -> None:
    jobs, gone = ActiveJobs(Loop(), Metrics()), list[EngineJob]()
    jobs.forgotten = gone.append
    one, other = active_of("a"), active_of("b")
    jobs.add(one)
    jobs.add(other)
    assert (len(jobs), list(jobs)) == (2, [one, other])
    assert jobs.get("a") is jobs.find("key", "id-a") is one
    assert jobs.find("other", "id-a") is None
    jobs.forget(one)
    assert (len(jobs), gone, one.ended.is_set(), other.ended.is_set()) == (1, [one.work], True, False)
    assert jobs.get("a") is jobs.find("key", "id-a") is None


def test_places_are_looked_up_once_a_tick(clock: list[float]) -> None:
    class Places(Waiting):
        found: dict[Ticket, int]

        def places(self) -> dict[Ticket, int]:
            return dict(self.found)

    jobs, pool = ActiveJobs(Loop(), Metrics()), Places()
    one, begun = active_of("a"), active_of("b")
    begun.work.started_s = 1.0
    pool.found = {one.work.tickets[0]: 3, begun.work.tickets[0]: 0}
    assert (jobs.place(one, pool), jobs.place(begun, pool)) == (3, None)  # type: ignore[arg-type]
    pool.found[one.work.tickets[0]] = 2
    assert jobs.place(one, pool) == 3  # type: ignore[arg-type]
    clock[0] += active.TICK_S * 1.01
    assert jobs.place(one, pool) == 2  # type: ignore[arg-type]


def test_who_waits_on_a_connection_is_not_put_off() -> None:
    jobs, one, begun = ActiveJobs(Loop(), Metrics()), active_of("a"), active_of("b")
    begun.work.started_s = 1.0
    assert (jobs.may_wait(one), jobs.may_wait(begun)) == (True, False)
    with jobs.attended(one.record):  # type: ignore[arg-type]
        assert not jobs.may_wait(one)
    assert jobs.may_wait(one)


def test_a_key_has_so_many_requests_on_the_bench_and_no_more() -> None:
    async def scenario() -> None:
        bench, gate = Bench(Limits(rate_per_minute=1e6)), threading.Event()
        waiting = [asyncio.create_task(bench.do("a", gate.wait)) for _ in range(WORKED_ON)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match=f"{WORKED_ON} requests wait already .*with key 'a'"):
            await bench.do("a", gate.wait)
        other = asyncio.create_task(bench.do("b", lambda: "b"))
        gate.set()
        assert await other == "b"
        assert await asyncio.gather(*waiting) == [True] * WORKED_ON
        again = [bench.do("a", gate.wait) for _ in range(WORKED_ON)]  # those that are over do not count
        assert await asyncio.gather(*again) == [True] * WORKED_ON
        bench.close()
        with pytest.raises(RuntimeError, match="shutdown"):
            await bench.do("a", gate.wait)

    asyncio.run(scenario())
