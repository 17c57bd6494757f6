"""Who is refused is told when there will be room for this very client; the queue is bounded by time too."""

from __future__ import annotations

import asyncio

import pytest

from darkroom.serve.errors import Refused
from darkroom.serve.request import PictureRequest
from darkroom.serve.settings import Limits
from serve.conftest import Released

QUICK = PictureRequest(prompt="a red circle", steps=3, seed=5, guidance=1.0)
LONG = QUICK.model_copy(update={"steps": 100, "num": 4})


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

    told, more, speed, first = run_core(scenario, limits=limits, capacity=4)
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

    a_job_s, waiting, error = run_core(scenario, capacity=4)
    assert waiting == LONG.num + 1
    assert (error.status, error.code) == (429, "queue_full")
    assert f"at most {1.5 * a_job_s:.4g} s may wait" in error.message
    assert error.retry_after_s >= a_job_s, "those on their way have all of their steps before them"


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

    assert run_core(scenario, limits=limits, capacity=4) >= 12
