"""Who is refused is told when there will be room for this very client; the queue is bounded by time too."""

from __future__ import annotations

import asyncio
import heapq
import io
import math
import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from darkroom.serve import logs
from darkroom.serve.engine.loop import Admission
from darkroom.serve.jobs import active as jobs_intake
from darkroom.serve.jobs.active import Intake
from darkroom.serve.request import PictureRequest, Refused, Uploads
from darkroom.serve.settings import Limits
from serve.conftest import Released

QUICK = PictureRequest(prompt="a red circle", steps=3, seed=5, guidance=1.0)
LONG = QUICK.model_copy(update={"steps": 100, "num": 4})


def picture(shade: int) -> bytes:
    """A PNG of noise, as large for each shade."""
    values = np.random.default_rng(shade).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


async def full(core, limits: Limits) -> None:
    """One job is on its way, and the queue is full; the speed is known."""
    await core.finished((await core.submit(QUICK, key="a")).id, key="a")
    await core.submit(LONG, key="a")
    while core.engine.waiting():
        await asyncio.sleep(0.005)
    for _ in range(limits.queue // LONG.num):
        await core.submit(LONG, key="a")


async def after_s(core, request: PictureRequest, key: str = "a") -> float:
    with pytest.raises(Refused) as caught:
        await core.submit(request, key=key)
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert "Retry-After" in caught.value.headers
    assert "x-should-retry" not in caught.value.headers
    return caught.value.retry_after_s


def test_those_refused_one_after_the_other_are_told_one_time_after_the_other(run_core):
    """All had been told the same 2 s, came back together, and were refused again."""
    limits = Limits(queue=8, queue_per_key=8)

    async def scenario(core):
        unet = core.engine.unet
        await full(core, limits)
        held = core.engine.unet = Released()  # all stands still from here on
        told = [await after_s(core, QUICK) for _ in range(6)]
        more = await after_s(core, QUICK.model_copy(update={"num": 4}))
        speed = core.engine.seconds_for(1.0)
        first = core.engine.admissions()[0].after_s
        core.engine.unet = unet
        held.steps.release(100)
        return told, more, speed, first

    told, more, speed, first = run_core(scenario, limits=limits, capacity=4, lanes=1)
    assert told == sorted(told)
    assert told[4] > told[3], "four are admitted together: the fifth has to wait for the next four"
    assert more > told[-1], "and four pictures for more than one"
    assert told[0] == pytest.approx(first, rel=0.3)
    assert speed > 0


def test_a_job_larger_than_the_queue_is_a_mistake_and_no_reason_to_wait(run_core):
    async def scenario(core):
        with pytest.raises(Refused) as caught:
            await core.submit(LONG, key="a")
        return caught.value

    error = run_core(scenario, limits=Limits(queue=3, queue_per_key=3))
    assert (error.status, error.param, error.message) == (422, "num", "num: at most 3 pictures")


def test_the_queue_is_bounded_by_seconds_of_work_and_one_job_may_always_wait(run_core):
    async def scenario(core):
        await core.finished((await core.submit(QUICK, key="a")).id, key="a")
        plain, held = core.engine.unet, Released()
        core.engine.unet = held  # the speed is known, and from here on all stands still
        a_job_s = core.engine.seconds_for(LONG.num * 32 * 32 * LONG.steps)
        core._intake._limits = Limits(queue_s=1.5 * a_job_s, queue_per_key=256)
        await core.submit(LONG, key="a")
        while core.engine.waiting():
            await asyncio.sleep(0.005)
        await core.submit(LONG, key="a")
        with pytest.raises(Refused) as caught:
            await core.submit(LONG, key="a")
        await core.submit(QUICK, key="a")  # less work finds room
        waiting = core.engine.waiting()
        core.engine.unet = plain
        held.steps.release(100)
        return a_job_s, waiting, caught.value

    a_job_s, waiting, error = run_core(scenario, capacity=4, lanes=1)
    assert waiting == LONG.num + 1
    assert (error.status, error.code) == (429, "queue_full")
    assert f"at most {1.5 * a_job_s:.4g} s may wait" in error.message
    assert error.retry_after_s >= a_job_s, "those on their way have all of their steps before them"


def test_a_full_queue_refuses_a_new_name_without_the_database(run_core):
    """Each refusal waited for the database's thread, which took a good part of its CPU time."""
    limits, asked = Limits(queue=8, queue_per_key=8), list[str]()

    async def scenario(core):
        await full(core, limits)
        find = core.store.find
        core.store.find = lambda key, job_id: asked.append(job_id) or find(key, job_id)
        done = (await core.jobs(key="a", state="done"))[0].id
        with pytest.raises(Refused):
            await core.check_place("a", "its body", "new")
        await core.check_place("a", "its body", done)  # it is there, so it is given
        return done

    done = run_core(scenario, limits=limits, capacity=4, lanes=1)
    assert asked == [done]


@pytest.mark.parametrize("again", ["its body", None])
def test_who_was_refused_unread_is_told_again_by_the_body(run_core, again):
    """The promise made before the request was parsed is the one that its parsed form takes up."""
    limits = Limits(queue=8, queue_per_key=8)

    async def scenario(core):
        await full(core, limits)
        with pytest.raises(Refused) as caught:
            await core.check_place("a", "its body", None)
        for job in await core.jobs(key="a"):
            await core.cancel(job.id, key="a")
        await asyncio.sleep(max(0.0, caught.value.retry_after_s))
        await core.check_place("a", "its body", None)  # there is room again
        token = logs.NOTES.set(logs.RequestNotes("r", again=again))
        await core.finished((await core.submit(QUICK, key="a")).id, key="a")
        logs.NOTES.reset(token)
        return [one.digest for one in core._intake._reservations.late(math.inf)]

    assert run_core(scenario, limits=limits, capacity=4, lanes=1) == ([] if again else ["its body"])


def test_pictures_that_came_with_jobs_are_bounded_together(run_core):
    """Nothing but the number of jobs had bounded what lay in memory."""
    redo = QUICK.model_copy(update={"strength": 1.0})
    pictures = [Uploads(picture(shade)) for shade in range(4)]
    a_picture = pictures[0].num_bytes

    async def scenario(core):
        await core.finished((await core.submit(QUICK, key="a")).id, key="a")
        plain, held = core.engine.unet, Released()
        core.engine.unet = held
        jobs = [await core.submit(redo, key="a", uploads=one) for one in pictures[:2]]
        there = core.status().uploads_bytes
        told = []
        for key in "ab":
            with pytest.raises(Refused) as caught:
                await core.submit(redo, key=key, uploads=pictures[2])
            told.append((caught.value.status, caught.value.code, caught.value.retry_after_s > 0))
        await core.submit(redo, key="b", uploads=pictures[0])  # what lies there already
        await core.submit(QUICK, key="b")  # it brings none
        core.engine.unet = plain
        held.steps.release(100)
        done = [(await core.finished(job.id, key="a")).state for job in jobs]
        for job in await core.jobs(key="b"):
            await core.finished(job.id, key="b")
        after = core.status().uploads_bytes
        fits = await core.submit(redo, key="a", uploads=pictures[2])
        return there, told, done, after, (await core.finished(fits.id, key="a")).state

    limits = Limits(uploads_bytes=max(1024, 2 * a_picture + a_picture // 2))
    there, told, done, after, state = run_core(scenario, limits=limits)
    assert there == 2 * a_picture
    assert told == [(429, "queue_full", True)] * 2
    assert done == ["done", "done"]
    assert (after, state) == (0, "done")


class Pool:
    """So many pictures wait, of one key, and a second's work each."""

    def __init__(self, waits: int) -> None:
        self.waits = waits
        self.by_key: dict[str, float] | None = None

    def waiting(self, key: str | None = None) -> int:
        return self.waits

    def waiting_work(self) -> dict[str, float]:
        if self.by_key is not None:
            return dict(self.by_key)
        return {"a": float(self.waits)} if self.waits else {}

    def seconds_for(self, cost: float) -> float:
        return cost

    def admissions(self) -> list[Admission]:
        return [Admission("a", 1.0, i + 1.0) for i in range(self.waits)]


def test_a_long_job_that_came_alone_shuts_nobody_out():
    """Another key's picture of 8 s was refused for an hour behind work that it did not have to wait for."""
    intake = Intake(Limits(queue_s=3600.0, queue=256, queue_per_key=64))
    pool = Pool(4876)  # of the key a, let in while nothing waited
    intake.check_work(pool, "b", 1, 8.0)
    with pytest.raises(Refused, match="work of 4,876 s waits already"):
        intake.check_work(pool, "a", 1, 8.0)
    pool.by_key = dict.fromkeys("acde", 4876.0)  # each counts with its share, and together they fill it
    with pytest.raises(Refused, match="work of 3,600 s waits already"):
        intake.check_work(pool, "b", 1, 8.0)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(jobs_intake.time, "monotonic", lambda: now[0])
    return now


def let_in(intake: Intake, pool: Pool, digest: str | None, num: int = 1) -> float | None:
    """None, or when to come again."""
    try:
        intake.check_room(pool, "a", num, None, digest)
        intake.check_work(pool, "a", num, float(num), None, digest)
    except Refused as refused:
        return refused.retry_after_s
    intake.kept("a", digest)
    return None


@pytest.mark.parametrize("limits", [Limits(queue=8, queue_per_key=8), Limits(queue_s=8.0, queue_per_key=256)])
def test_a_newcomer_takes_no_place_that_was_promised(clock, limits):
    """At four times the load each place was gone before who had waited for it came back."""
    intake, pool = Intake(limits), Pool(8)
    after_s = let_in(intake, pool, "first")
    assert after_s == 1.0
    pool.waits = 7
    assert let_in(intake, pool, "newcomer") is None, "the control: before that time it is anybody's"
    clock[0] += after_s
    assert let_in(intake, pool, "newcomer") is not None
    assert let_in(intake, pool, None) is not None
    assert let_in(intake, pool, "first") is None
    assert let_in(intake, pool, "first") is None, "its place is no longer held: now it is anybody's again"
    assert let_in(intake, pool, "newcomer") is None


def test_a_promised_place_is_not_held_for_ever(clock):
    intake, pool = Intake(Limits(queue=8, queue_per_key=8)), Pool(8)
    clock[0] += let_in(intake, pool, "first")
    pool.waits = 7
    assert let_in(intake, pool, "newcomer") is not None
    clock[0] += 5.1
    assert let_in(intake, pool, "newcomer") is None


def test_at_most_a_third_of_the_queue_is_held(clock):
    intake, pool = Intake(Limits(queue=8, queue_per_key=8)), Pool(8)
    for digest in "abcdefgh":
        assert let_in(intake, pool, digest) is not None
    clock[0] += 4.6  # four are due
    for waits, refused in ((6, True), (5, False)):
        pool.waits = waits
        assert (let_in(intake, pool, "newcomer") is not None) == refused


def overload(clock, share: float, seconds: float = 40.0, per_s: float = 5.0) -> tuple[int, int]:
    """How many who waited `Retry-After` out were let in, and how many were not, at four times the load.

    So many pictures a second are drawn, eight at a time; a share of the refused comes back.
    """
    draw, pool = random.Random(3), Pool(0)
    intake = Intake(Limits(queue=64, queue_per_key=64))
    pool.admissions = lambda: [Admission("a", 1.0, (i // 8 + 1) * 8 / per_s) for i in range(pool.waits)]
    start_s = clock[0]
    events = [(start_s + i * 8 / per_s, "drawn", "") for i in range(int(seconds * per_s / 8))]
    events += [(start_s + i / (4 * per_s), "new", str(i)) for i in range(int(seconds * 4 * per_s))]
    heapq.heapify(events)
    came = Counter()
    while events and events[0][0] < start_s + seconds:
        clock[0], kind, digest = heapq.heappop(events)
        if kind == "drawn":
            pool.waits -= min(8, pool.waits)
            continue
        try:
            intake.check_room(pool, "a", 1, None, digest)
        except Refused as refused:
            came[kind, False] += 1
            if kind == "new" and draw.random() < share:
                after_s = int(refused.headers["Retry-After"])
                heapq.heappush(events, (clock[0] + after_s, "again", digest))
        else:
            intake.kept("a", digest)
            came[kind, True] += 1
            pool.waits += 1
    return came["again", True], came["again", False]


def test_retry_after_is_true_at_four_times_the_load(clock):
    """26 of 100 had been let in: newcomers took each place that freed up."""
    true, false = overload(clock, 0.2)
    assert true > 50
    assert true >= 0.95 * (true + false)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_retry_after_stays_true_however_many_come_again(clock, share):
    """For two minutes; where half or all come again, each is told a later time than the one before.

    31 and 20 of 100 had been let in: beyond 1,024 promises those due next were forgotten, and beyond eight
    queues all were told the same time.
    """
    true, false = overload(clock, share, 120.0, 14.0)
    assert true > 500
    assert true >= {0.2: 0.95, 0.5: 0.9, 1.0: 0.75}[share] * (true + false)


def test_what_is_promised_beyond_all_that_is_kept_in_mind_costs_those_before_nothing(clock, monkeypatch):
    """The first had been forgotten for the last."""
    monkeypatch.setattr(jobs_intake, "MOST_PROMISES", 4)
    intake, pool = Intake(Limits(queue=8, queue_per_key=8)), Keyed(other=8)
    after_s = refused_of(intake, pool, "mine", "first")
    for i in range(8):
        assert refused_of(intake, pool, "mine", str(i)) is not None
    clock[0] += after_s
    pool.of["other"] = 7
    assert refused_of(intake, pool, "newcomer", "x") is not None
    assert refused_of(intake, pool, "mine", "first") is None


def test_a_client_that_asks_in_vain_delays_others_by_a_few_queues_at_most(clock):
    intake, pool = Intake(Limits(queue=64, queue_per_key=8)), Pool(64)
    pool.admissions = lambda: [Admission("a", 1.0, i + 1.0) for i in range(64)]
    for i in range(3000):
        assert let_in(intake, pool, str(i)) is not None
    assert len(intake._reservations) <= jobs_intake.MOST_PROMISES
    with pytest.raises(Refused) as caught:
        intake.check_room(pool, "another", 1, None, "x")
    assert 64 < caught.value.retry_after_s <= 64 + 8 * 8 + 1


def refused_of(intake: Intake, pool: Pool, key: str, digest: str, num: int = 1) -> float | None:
    """As `let_in`, of any key, and without looking at the seconds of work."""
    try:
        intake.check_room(pool, key, num, None, digest)
    except Refused as refused:
        return refused.retry_after_s
    intake.kept(key, digest)
    return None


class Keyed(Pool):
    """So many pictures wait of each key."""

    def __init__(self, **of: int) -> None:
        super().__init__(sum(of.values()))
        self.of = of

    def waiting(self, key: str | None = None) -> int:
        return sum(self.of.values()) if key is None else self.of.get(key, 0)


def test_a_key_that_asks_in_vain_takes_no_promise_from_another(clock, monkeypatch):
    """1,024 requests of one key pushed out what others had been promised."""
    monkeypatch.setattr(jobs_intake, "MOST_PROMISES", 1024)
    intake, pool = Intake(Limits(queue=8, queue_per_key=8)), Keyed(other=8)
    after_s = refused_of(intake, pool, "mine", "first")
    for i in range(2000):
        assert refused_of(intake, pool, "flood", str(i)) is not None
    assert len(intake._reservations) == jobs_intake.MOST_PROMISES
    clock[0] += after_s
    pool.of["other"] = 7
    assert refused_of(intake, pool, "newcomer", "x") is not None
    assert refused_of(intake, pool, "mine", "first") is None


def test_a_key_that_never_comes_again_makes_no_promise_of_anothers_earlier(clock):
    """The share of promises that were taken up was one for all keys: those of others counted less."""
    intake, pool = Intake(Limits(queue=8, queue_per_key=8)), Keyed(other=8)
    for i in range(100):
        refused_of(intake, pool, "flood", str(i))
        clock[0] += 30.0
    times = [refused_of(intake, pool, "mine", str(i)) for i in range(4)]
    assert times == [1.0, 2.0, 3.0, 4.0]
    assert refused_of(intake, pool, "flood", "x") == 5.0
    assert refused_of(intake, pool, "flood", "y") == pytest.approx(5.0, abs=1.0), "its own count for little"


def test_no_place_is_held_for_a_key_that_cannot_use_it_or_never_comes(clock):
    intake, pool = Intake(Limits(queue=8, queue_per_key=4)), Keyed(full=4, other=4)
    pool.admissions = lambda: [Admission("full", 1.0, i + 1.0) for i in range(8)]
    assert refused_of(intake, pool, "full", "a") is not None
    assert refused_of(intake, pool, "third", "b") is not None
    clock[0] += 2.0
    pool.of["other"] = 2
    assert intake._held(pool, None) == 1, "of the two that are due, one has its queue full"
    assert refused_of(intake, pool, "newcomer", "x") is None
    clock[0] += 30.0
    for i in range(70):
        pool.of["other"] = 4
        assert refused_of(intake, pool, "never", str(i)) is not None
        clock[0] += 30.0
    refused_of(intake, pool, "never", "last")
    clock[0] += 1.0
    pool.of["other"] = 3
    assert [one.key for one in intake._reservations.due(clock[0])] == ["never"]
    assert refused_of(intake, pool, "newcomer", "y") is None


@pytest.mark.nightly
def test_who_waits_as_long_as_told_is_let_in(run_core):
    """14 of 14 had been refused again."""
    limits = Limits(queue=8, queue_per_key=8)

    async def scenario(core):
        await full(core, limits)

        async def client() -> bool:
            try:
                await core.submit(QUICK, key="a")
            except Refused as refused:
                await asyncio.sleep(float(refused.headers["Retry-After"]))
            try:
                await core.submit(QUICK, key="a")
            except Refused:
                return False
            return True

        let_in = sum(await asyncio.gather(*(client() for _ in range(14))))
        for job in await core.jobs(key="a"):
            await core.cancel(job.id, key="a")
        return let_in

    assert run_core(scenario, limits=limits, capacity=4, lanes=1) >= 12


def infer(num: int) -> dict:
    """KServe's request for a picture of each of so many prompts."""
    tensors = {
        "prompt": ("BYTES", [f"circle {i}" for i in range(num)]),
        "num_inference_steps": ("INT64", [1]),
    }
    inputs = [
        {"name": name, "datatype": kind, "shape": [len(data)], "data": data}
        for name, (kind, data) in tensors.items()
    ]
    return {"inputs": inputs}


def test_several_that_never_fit_together_are_no_matter_of_waiting(run_http):
    """The fifth of five had been refused with 429 at each try, in a queue of four that was empty."""

    async def scenario(core, http):
        route = f"/v2/models/{core.catalogue.model.name}/infer"
        return [await http.post(route, json=infer(num)) for num in (5, 4)]

    over, fits = run_http(scenario, limits=Limits(queue=4, queue_per_key=4))
    assert (over.status_code, over.json()["code"]) == (422, "over_limit")
    assert "at most 4 pictures" in over.json()["error"]
    assert fits.status_code == 200
    assert len(fits.json()["outputs"][0]["data"]) == 4


def test_several_are_counted_once_and_refused_before_the_first_is_accepted(run_http):
    """Those of a refused request had been accepted, cancelled, and taken from the day's quota."""
    limits = Limits(pictures_per_day=7, rate_per_minute=12.0)

    async def scenario(core, http):
        route = f"/v2/models/{core.catalogue.model.name}/infer"
        first = await http.post(route, json=infer(4))  # two lie ready: two more are lent
        soon = await http.post(route, json=infer(2))
        core._intake._rates._buckets.clear()
        quota = await http.post(route, json=infer(4))
        rest = await http.post(route, json=infer(3))
        return first, soon, quota, rest, await core.used_today("")

    first, soon, quota, rest, _ = run_http(scenario, limits=limits)
    assert (first.status_code, rest.status_code) == (200, 200)
    assert (soon.status_code, soon.json()["code"]) == (429, "rate_limited")
    assert 15 <= int(soon.headers["Retry-After"]) <= 20  # four seconds of two that are owed, and two more
    assert (quota.status_code, quota.json()["code"]) == (429, "quota")
    assert "4 of today are used" in quota.json()["error"]


def test_one_job_of_more_than_a_days_pictures_is_no_matter_of_waiting(run_core):
    async def scenario(core):
        with pytest.raises(Refused) as caught:
            await core.submit(QUICK.model_copy(update={"num": 3}), key="a")
        return caught.value

    refused = run_core(scenario, limits=Limits(pictures_per_day=2))
    assert (refused.status, refused.param, refused.retry_after_s) == (422, "num", None)
