"""Where a step fails its rows are tried one by one, with all of the memory that it took."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from darkroom.sample.choice import make_table
from darkroom.sample.denoise import Condition, Row
from darkroom.serve.engine.batch import Bucket
from darkroom.serve.engine.tickets import EngineJob, Shape, Ticket
from darkroom.serve.request import PictureRequest

DDIM = {
    "_class_name": "DDIMScheduler",
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
}


def tickets(count: int, steps: int = 3, nets: int = 0, value: float = 0.0) -> list[Ticket]:
    request = PictureRequest(prompt="a horse", num=count, steps=steps)
    work = EngineJob("a", "key", request, Shape(16, 16, steps, 1, nets=nets), None)  # type: ignore[arg-type]
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


@pytest.mark.parametrize(("nets", "share"), [(0, 1.0), (1, 2 / 3), (2, 1 / 2)])
def test_rows_with_nets_sit_out_steps_for_what_their_nets_cost(nets: int, share: float) -> None:
    plain, steered = tickets(2, steps=36, value=1.0), tickets(2, steps=36, nets=nets, value=3.0)
    sizes: list[int] = []

    def unet(x: torch.Tensor, *given: Any) -> torch.Tensor:
        sizes.append(len(x))
        return halves(x)

    bucket = Bucket()
    for ticket in [*plain, *steered]:
        bucket.add(ticket)
    stepped = [bucket.step(unet) for _ in range(24)]
    assert [ticket.step for ticket in plain] == [24, 24]
    assert [ticket.step for ticket in steered] == [round(24 * share)] * 2
    assert [one.rows for one in stepped] == sizes
    assert sizes[0] == 4  # a picture of few steps does not begin by waiting
    while bucket.tickets:
        stepped.append(bucket.step(unet))
    paid_s = plain[0].work.device_s + steered[0].work.device_s
    assert paid_s == pytest.approx(sum(one.wall_s for one in stepped))
    for ticket in (plain[0], steered[0]):
        [alone] = tickets(1, steps=36, value=1.0 if ticket is plain[0] else 3.0)
        lone = Bucket()
        lone.add(alone)
        for _ in range(35):
            lone.step(halves)
        assert ticket.row is not None
        assert alone.row is not None
        assert not torch.equal(alone.row.latents_CHW, ticket.row.latents_CHW)  # a step before its end
        lone.step(halves)
        assert torch.equal(alone.row.latents_CHW, ticket.row.latents_CHW)


def test_rows_that_cost_the_same_never_sit_out() -> None:
    bucket = Bucket()
    for ticket in tickets(3, steps=12, nets=1):
        bucket.add(ticket)
    assert [bucket.step(halves).rows for _ in range(12)] == [3] * 12
    assert bucket.tickets == []
