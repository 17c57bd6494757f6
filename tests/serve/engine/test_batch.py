"""Where a step fails its rows are tried one by one, with all of the memory that it took."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from darkroom.models.adapters.bank import SLOTS
from darkroom.sample.choice import make_table
from darkroom.sample.denoise import Condition, Row
from darkroom.serve.engine import batch
from darkroom.serve.engine.batch import Bucket, PlainTimes
from darkroom.serve.engine.tickets import EngineJob, Shape, Ticket
from darkroom.serve.request import PictureRequest

DDIM = {
    "_class_name": "DDIMScheduler",
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
}


def tickets(count: int, steps: int = 3, value: float = 0.0) -> list[Ticket]:
    request = PictureRequest(prompt="a horse", num=count, steps=steps)
    work = EngineJob("a", "key", request, Shape(16, 16, steps, 1), None)  # type: ignore[arg-type]
    for ticket in work.tickets:
        latents_CHW = torch.full((4, 2, 2), value)
        ticket.row = Row(make_table("ddim", DDIM, steps), latents_CHW, Condition(torch.zeros(7, 8)))
    return work.tickets


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, ValueError])
def test_rows_are_tried_alone_when_nothing_of_the_failed_call_is_held(kind: type[Exception]) -> None:
    taken: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def unet(x: torch.Tensor, *given: Any) -> torch.Tensor:
        held.append(sum(one() is not None for one in taken))
        activations = torch.zeros(1000)
        taken.append(weakref.ref(activations))
        if len(x) > 1 or len(taken) == 2:  # together, and the first alone
            raise kind("CUDA out of memory")
        return x * activations[0]

    bucket = Bucket()
    for ticket in tickets(3):
        bucket.add(ticket)
    stepped = bucket.step(unet)
    assert stepped.out_of_memory == (kind is torch.OutOfMemoryError)
    assert [(ticket.index, type(why)) for ticket, why in stepped.failed] == [(0, kind)]
    assert [ticket.step for ticket in bucket.tickets] == [1, 1]
    assert held == [0] * 4
    assert taken[-1]() is None


def halves(x: torch.Tensor, *given: Any) -> torch.Tensor:
    return x / 2


def test_rows_of_long_steps_take_turns_and_each_ends_as_alone() -> None:
    sizes: list[int] = []

    def unet(x: torch.Tensor, *given: Any) -> torch.Tensor:
        sizes.append(len(x))
        return halves(x)

    def drawn(evaluation_s: float) -> list[torch.Tensor]:
        bucket = Bucket(0.0, evaluation_s)
        rows = [ticket for i in range(3) for ticket in tickets(1, steps=4, value=1.0 + i)]
        for ticket in rows:
            bucket.add(ticket)
        counts = []
        while bucket.tickets:
            bucket.step(unet)
            bucket.evaluation_s = evaluation_s  # as if the step had been so slow
            counts.append([ticket.step for ticket in rows])
        assert all(max(steps) - min(steps) <= 1 for steps in counts)
        return [ticket.row.latents_CHW for ticket in rows if ticket.row is not None]

    together, apart, pairs = drawn(0.01), drawn(5.0), drawn(2.0)
    assert sizes == [3] * 4 + [1] * 12 + [2] * 6
    assert all(map(torch.equal, together, apart))
    assert all(map(torch.equal, together, pairs))
    assert not torch.equal(together[0], together[1])


PLAIN, ADAPTED = 6, 2


@pytest.mark.parametrize("extra", [0.5, 2.0])
def test_plain_rows_do_not_wait_for_what_adapters_cost(monkeypatch: pytest.MonkeyPatch, extra: float) -> None:
    """On a clock that goes by rows, of which those with adapters take more: plain rows are through as
    soon as if all were plain. Without the charge they wait for all of it."""
    now_s = [0.0]
    monkeypatch.setattr(batch.time, "perf_counter", lambda: now_s[0])

    def unet(x: torch.Tensor, t: Any, text: Any, added: dict[str, torch.Tensor]) -> torch.Tensor:
        adapted = int(added[SLOTS].any(1).sum()) if SLOTS in added else 0
        now_s[0] += 0.01 * (len(x) + extra * adapted)
        return halves(x)

    def drawn(*, charges: bool) -> tuple[float, list[torch.Tensor]]:
        """When the plain rows are through, in steps as long as if all were plain; and all that is drawn."""
        bucket, began_s = Bucket(times=PlainTimes() if charges else None), now_s[0]
        rows = [*tickets(PLAIN, steps=60, value=1.0), *tickets(ADAPTED, steps=60, value=2.0)]
        for i, ticket in enumerate(rows):
            assert ticket.row is not None
            ticket.row.adapters = ((1, 1.0),) if i >= PLAIN else ()
            bucket.add(ticket)
        while any(not ticket.row.done for ticket in rows[:PLAIN] if ticket.row is not None):
            bucket.step(unet)
        through = (now_s[0] - began_s) / (0.01 * len(rows))
        while bucket.tickets:
            stepped = bucket.step(unet)
            assert stepped.rows == ADAPTED  # nobody is left to rest for
        return through, [ticket.row.latents_CHW for ticket in rows if ticket.row is not None]

    (charged, same), (shared, plain) = drawn(charges=True), drawn(charges=False)
    assert charged <= 60 * 1.05
    assert shared == pytest.approx(60 * (1 + extra * ADAPTED / (PLAIN + ADAPTED)))
    assert all(map(torch.equal, same, plain))


def test_a_step_that_took_long_keeps_no_row_out_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine stood still for a minute: for that, those with adapters would sit out hundreds of steps."""
    now_s, pause_s = [0.0], [60.0]
    monkeypatch.setattr(batch.time, "perf_counter", lambda: now_s[0])

    def unet(x: torch.Tensor, t: Any, text: Any, added: dict[str, torch.Tensor]) -> torch.Tensor:
        now_s[0] += 0.1 * len(x) + (pause_s.pop() if SLOTS in added and pause_s else 0.0)
        return halves(x)

    bucket, rows = Bucket(times=PlainTimes()), tickets(3, steps=400, value=1.0)
    assert rows[2].row is not None
    rows[2].row.adapters = ((1, 1.0),)
    for ticket in rows:
        bucket.add(ticket)
    for _ in range(40):
        bucket.step(unet)
    assert not pause_s
    assert rows[2].step > 20
    assert rows[0].step == 40


def test_what_a_plain_step_takes_is_told_from_steps_of_other_numbers_of_rows() -> None:
    times = PlainTimes()
    assert times.of(8) is None
    times.note(4, 0.5)  # the first is slow
    assert times.of(8) == pytest.approx(1.0)  # of one number alone in proportion
    for _ in range(20):
        times.note(4, 0.030)
        times.note(8, 0.050)
    assert times.of(16) == pytest.approx(
        0.090, rel=0.01
    )  # and not twice that of 8, as calls cost by themselves
    for _ in range(20):
        times.note(12, 0.010)  # a machine that has become quicker: no line
    assert times.of(24) == pytest.approx(24 * (0.030 + 0.050 + 0.010) / 24)


def test_halves_of_a_bucket_owe_what_the_whole_one_owed() -> None:
    bucket = Bucket(times=PlainTimes())
    for ticket in tickets(4, steps=9, value=1.0):
        bucket.add(ticket)
    assert bucket._toll is not None
    bucket._toll._owed_s = 3.0
    other = bucket.split()
    assert other._toll is not None
    assert (bucket._toll._owed_s, other._toll._owed_s) == (1.5, 1.5)
    assert other._toll.times is bucket._toll.times
    bucket.take(other)
    assert bucket._toll._owed_s == 3.0
    assert (len(bucket.tickets), len(other.tickets)) == (4, 0)
