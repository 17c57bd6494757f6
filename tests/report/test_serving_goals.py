"""What rows of servers under load come to."""

from __future__ import annotations

from typing import Any

from darkroom.measure.serving import DARKROOM, ONE, SAME_KEY
from darkroom.measure.timing import Measurement
from darkroom.report.measurements import goals, say_goals, write_serving_page

FINE: dict[str, Any] = {"http_5xx": 0, "lost": 0, "failed": 0, "steps_to_free_most": 1.0}


def rows(
    *,
    mine: float = 6.0,
    at_four: float = 5.8,
    admission_s: float = 0.03,
    lost: int = 0,
    retry_true: float = 1.0,
) -> list[Measurement]:
    told = {"model": "tiny", "adapters": 2, **FINE}
    load = {**told, "step_s": 0.02, "admission_p99_s": admission_s}
    return [
        Measurement(benchmark="serve-saturation", case=ONE, images_per_s=2.0, settings=told),
        Measurement(benchmark="serve-saturation", case=SAME_KEY, images_per_s=2.5, settings=told),
        Measurement(benchmark="serve-saturation", case=DARKROOM, images_per_s=mine, settings=told),
        Measurement(
            benchmark="serve-load", case="darkroom at 0.5x", images_per_s=3.0, settings={**load, "load": 0.5}
        ),
        Measurement(
            benchmark="serve-load", case="darkroom at 1x", images_per_s=6.0, settings={**load, "load": 1.0}
        ),
        Measurement(
            benchmark="serve-load",
            case="darkroom at 4x",
            images_per_s=at_four,
            settings={**load, "load": 4.0, "admission_p99_s": 9.0, "refusal_p99_s": 0.01, "lost": lost}
            | {"retry_after_true": retry_true},
        ),
    ]


def missed(*given: Measurement) -> list[str]:
    return [goal.name for goal in goals(given) if not goal.met]


def test_each_promise_is_held_against_its_figure():
    found = {goal.name: goal.value for goal in goals(rows())}
    assert found["pictures a second, to one at a time"] == 3.0
    assert found["admission p99 at 0.5x capacity"] == 1.5
    assert found["refusal p99"] == 0.01
    assert missed(*rows()) == []
    assert missed(*rows(mine=4.9)) == ["pictures a second, to one at a time"]
    assert missed(*rows(at_four=5.6)) == ["goodput at 4x capacity, to that at 1x"]
    assert missed(*rows(admission_s=0.05)) == ["admission p99 at 0.5x capacity"]
    assert missed(*rows(lost=1)) == ["lost jobs"]
    assert missed(*rows(retry_true=0.8)) == ["Retry-After true, of those who waited it out at 4x"]


def test_loads_in_turns_count_together():
    """The mean of the pictures, the worst of the promises; not what came last alone."""
    slow, quick = rows(at_four=5.6, retry_true=0.8)[-1], rows(at_four=6.0)[-1]
    assert missed(*rows()[:-1], slow, quick) == ["Retry-After true, of those who waited it out at 4x"]
    assert missed(*rows()[:-1], slow, rows(at_four=5.6)[-1])[0] == "goodput at 4x capacity, to that at 1x"


def test_who_waits_for_admission_is_looked_at_below_the_capacity_alone():
    """At the capacity itself a queue grows, so that no bound on its waits could be met."""
    at_capacity = [row for row in rows(admission_s=5.0) if row.settings.get("load") != 0.5]
    assert not [goal.name for goal in goals(at_capacity) if goal.name.startswith("admission")]
    assert missed(*at_capacity) == []


def test_the_console_and_the_page_say_so(tmp_path):
    lines: list[str] = []
    say_goals(rows(mine=4.0), lines.append)
    assert " no  pictures a second, to one at a time: 2 times (at least 2.5)" in lines
    assert "yes  refusal p99: 0.01 s (at most 0.05)" in lines
    page = write_serving_page(rows(mine=4.0), tmp_path / "page.html").read_text()
    assert "In short" in page
    assert "at least 2.5" in page
