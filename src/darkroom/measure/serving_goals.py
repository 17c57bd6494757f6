"""What the rows of `bench serve` come to: a line for each thing that a server promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from darkroom.measure.serving import DARKROOM, ONE, SAME_KEY
from darkroom.measure.timing import Measurement


@dataclass(frozen=True)
class Goal:
    """A figure beside what it should be."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether it is as it should be."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        """For a console."""
        wanted = "at least" if self.at_least else "at most"
        mark = "yes" if self.met else "no"
        return f"{mark:>3}  {self.name}: {self.value:.4g} {self.unit} ({wanted} {self.limit:g})"


def goals(rows: Sequence[Measurement]) -> list[Goal]:
    """All that can be told from the rows there are."""
    return [*_throughput(rows), *_under_load(rows)]


def _throughput(rows: Sequence[Measurement]) -> Iterator[Goal]:
    rates = {row.case: row.images_per_s for row in rows if row.benchmark == "serve-saturation"}
    mine = rates.get(DARKROOM)
    for other, limit in ((ONE, 2.5), (SAME_KEY, 1.0)):
        if mine and (theirs := rates.get(other)):
            yield Goal(f"pictures a second, to {other}", mine / theirs, limit, "times", True)


def _under_load(rows: Sequence[Measurement]) -> Iterator[Goal]:
    loads = {row.settings["load"]: row for row in rows if row.benchmark == "serve-load"}
    if loads:
        least = loads[min(loads)].settings
        if {"admission_p99_s", "step_s"} <= least.keys():
            steps = least["admission_p99_s"] / least["step_s"]
            yield Goal(f"admission p99 at {min(loads):g}x capacity", steps, 2.0, "step times", False)
    if {1.0, 4.0} <= loads.keys() and (at_one := loads[1.0].images_per_s):
        share = (loads[4.0].images_per_s or 0.0) / at_one
        yield Goal("goodput at 4x capacity, to that at 1x", share, 0.95, "", True)
    own = [row.settings for row in rows if row.case.startswith(DARKROOM)]
    for column, name, limit, unit in (
        ("refusal_p99_s", "refusal p99", 0.05, "s"),
        ("steps_to_free_most", "from cancel to free row, most", 1.0, "steps"),
    ):
        if found := [settings[column] for settings in own if settings.get(column) is not None]:
            yield Goal(name, max(found), limit, unit, False)
    for column, name in (("http_5xx", "answers with 5xx"), ("lost", "lost jobs"), ("failed", "failed jobs")):
        if own:
            yield Goal(name, _sum(own, column), 0.0, "", False)


def _sum(settings: Sequence[dict[str, Any]], column: str) -> float:
    return float(sum(one.get(column) or 0 for one in settings))


def say_goals(rows: Sequence[Measurement], say: Callable[[str], None]) -> None:
    """Each on a line."""
    for goal in goals(rows):
        say(goal.line())
