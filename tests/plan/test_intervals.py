"""Every figure has its interval; it is wider where less is known, and is shown in the figure's own unit."""

from __future__ import annotations

import math

import pytest

from darkroom.hardware.cards import cards
from darkroom.plan.jobs import GenerateJob, Where, plan_generating
from darkroom.plan.roofline import Software
from darkroom.plan.show import (
    half_width,
    hours,
    lines,
    memory_width,
    spread,
    time_width,
    to_dict,
    usd,
    with_intervals,
)
from darkroom.proof import tables


def planned(card="A100-80", software=None, **where):
    device = Where(next(c for c in cards().values() if card in (c.name, *c.aliases)), **where)
    software = software or Software("fp16")
    profile = tables.picture_profile("bf16", "fused")
    plan = plan_generating(profile, GenerateJob("generate", 1000, 4, 30), device, software)
    return with_intervals(plan, device, software)


def test_time_and_money_are_as_wide_as_each_other():
    plan = planned()
    ratio = plan.intervals["hours"][1] / plan.hours
    assert 1.05 < ratio < 2
    assert plan.intervals["hours"][0] * ratio == pytest.approx(plan.hours)
    assert plan.intervals["usd"][1] / plan.cost.usd == pytest.approx(ratio)
    assert plan.intervals["step_s"][1] / plan.step_s["total"] == pytest.approx(ratio)
    assert plan.intervals["peak_bytes"][1] / plan.peak_bytes == pytest.approx(
        math.exp(spread()["memory gpu"])
    )
    told = to_dict(plan)["intervals"]["usd"]
    assert told == {"low": plan.intervals["usd"][0], "high": plan.intervals["usd"][1]}
    assert any(f"({plan.intervals['step_s'][0]:.2g} to" in line for line in lines(plan))


def test_less_evidence_is_a_wider_interval():
    known = planned()
    width = [
        one.intervals["hours"][1] / one.hours
        for one in (
            planned(calibrated=True),
            known,
            planned("MI300X"),
            planned("MI300X", Software("fp16", "tensorrt")),
        )
    ]
    assert width == sorted(width)
    assert len(set(width)) == 4
    card = cards()["A100-SXM4-80GB"]
    alone = {"compute": 1.0, "total": 1.0}
    talking = {"compute": 0.5, "communication": 0.5, "total": 1.0}
    where, software = Where(card), Software("fp16")
    assert time_width(talking, where, software) > time_width(alone, where, software)
    assert memory_width(Where(cards()["CPU AVX2"])) > memory_width(where)


def test_squares_add_up():
    widths = {"any": 0.3, "compute": 0.4}
    assert half_width(widths, {}) == pytest.approx(0.3)
    assert half_width(widths, {"compute": 1.0}) == pytest.approx(0.5)


def test_an_interval_is_told_in_the_unit_of_its_figure():
    assert hours(91.2, (76.8, 110.4)) == "3.8 days (3.2 to 4.6)"
    assert hours(1.5, (0.9, 2.0)) == "1.5 h (0.9 to 2)"
    assert hours(1.5) == "1.5 h"
    assert hours(73_123 * 24.0) == "73,123 days"
    assert usd(1234.0, (1010.0, 1500.0)) == "USD 1,234 (1,000 to 1,500)"


def test_memory_that_is_close_says_so():
    near = planned("RTX 2060")
    usable = near.usable_memory_bytes
    low, high = near.intervals["peak_bytes"]
    assert any("close" in note for note in near.notes) == (low < usable < high)
    close = planned(memory_bytes=1.04 * near.peak_bytes * 1.02 + 700e6)
    assert close.fits
    assert any(note.startswith("close: it may take more") for note in close.notes)
