"""One page on servers under load, with its goals: rates, latencies, and what overload and cancelling cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import darkroom
from darkroom.hardware.system import write_atomically
from darkroom.measure.serving import DARKROOM, ONE, SAME_KEY
from darkroom.measure.timing import Measurement
from darkroom.report import html, plots
from darkroom.report.measurements import rate, seconds
from darkroom.report.plots import Bar

TABLES = {
    "serve-saturation": "As fast as they are taken",
    "serve-poisson": "Poisson arrivals at 0.8 of what one at a time can do",
    "serve-load": "Darkroom at multiples of its own capacity",
}
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "latency_p50_s": ("latency p50", seconds),
    "latency_p95_s": ("p95", seconds),
    "latency_p99_s": ("p99", seconds),
    "admission_p50_s": ("admission p50", seconds),
    "admission_p99_s": ("p99", seconds),
    "step_s": ("step", seconds),
    "evaluations_a_step": ("evaluations a step", lambda value: f"{value:.3g}"),
    "steps_to_free_most": ("steps to free, most", lambda value: f"{value:g}"),
    "refusal_p99_s": ("refusal p99", seconds),
    "done": ("done", str),
    "cancelled": ("cancelled", str),
    "refused": ("refused", str),
    "failed": ("failed", str),
    "lost": ("lost", str),
    "http_5xx": ("5xx", str),
}


def write_serving_page(rows: Sequence[Measurement], out: Path | str) -> Path:
    """Write one HTML file from the rows of `bench serve`."""
    body = [_goals(rows)]
    body += [
        _section(title, [row for row in rows if row.benchmark == name]) for name, title in TABLES.items()
    ]
    now = datetime.now(UTC)
    settings = rows[0].settings
    page = html.page(
        "Servers under load",
        f"{settings['model']}, {settings['adapters']} adapters, mixed sizes, steps and guidance, "
        f"{now.day} {now:%B %Y}",
        "\n".join([*body, html.section("The trace", html.pairs(_trace(rows[0])))]),
        f"Written by darkroom {darkroom.__version__} on {now:%Y-%m-%d %H:%M} UTC. One file; nothing is "
        "loaded from elsewhere.",
    )
    target = Path(out)
    write_atomically(target, page)
    return target


def _goals(rows: Sequence[Measurement]) -> str:
    """What the server promises, and what was measured."""
    found = [
        [
            goal.name,
            f"{goal.value:.3g} {goal.unit}".strip(),
            f"{'at least' if goal.at_least else 'at most'} {goal.limit:g}",
            "yes" if goal.met else "no",
        ]
        for goal in goals(rows)
    ]
    if not found:
        return ""
    return html.section(
        "In short", html.table(["", "measured", "wanted", "met"], found, frozenset({1, 2, 3}))
    )


def _section(title: str, rows: Sequence[Measurement]) -> str:
    if not rows:
        return ""
    rates = [Bar(row.case, row.images_per_s or 0.0, text=rate(row.images_per_s or 0.0)) for row in rows]
    waits = [
        Bar(row.case, row.settings["latency_p50_s"], text=seconds(row.settings["latency_p50_s"]))
        for row in rows
        if "latency_p50_s" in row.settings
    ]
    drawn = [html.plot("Images a second", "longer is better", plots.bars(rates, label=f"Rates: {title}"))]
    if waits:
        svg = plots.bars(waits, label=f"Latencies: {title}", xlabel="seconds")
        drawn.append(html.plot("Median latency", "from due to done; shorter is better", svg))
    return html.section(title, html.grid(drawn), _table(rows))


def _table(rows: Sequence[Measurement]) -> str:
    shown = [name for name in COLUMNS if any(row.settings.get(name) is not None for row in rows)]
    header = ["", "images/s", *(COLUMNS[name][0] for name in shown)]
    body = [[row.case, rate(row.images_per_s or 0.0), *(_cell(row, name) for name in shown)] for row in rows]
    return html.table(header, body, frozenset(range(1, len(header))))


def _trace(row: Measurement) -> dict[str, str]:
    """What was asked for, and where."""
    settings = {
        name: str(value) for name, value in row.settings.items() if name not in COLUMNS and "_p" not in name
    }
    return settings | {"machine": row.machine, "device": row.device, "commit": row.commit, "note": row.note}


def _cell(row: Measurement, name: str) -> str:
    value = row.settings.get(name)
    return "" if value is None else COLUMNS[name][1](value)


@dataclass(frozen=True)
class Goal:
    """A figure with its target."""

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
    """All that can be concluded from the rows there are."""
    return [*_throughput(rows), *_under_load(rows)]


def _throughput(rows: Sequence[Measurement]) -> Iterator[Goal]:
    rates = {row.case: row.images_per_s for row in rows if row.benchmark == "serve-saturation"}
    mine = rates.get(DARKROOM)
    for other, limit in ((ONE, 2.5), (SAME_KEY, 1.0)):
        if mine and (theirs := rates.get(other)):
            yield Goal(f"pictures a second, to {other}", mine / theirs, limit, "times", True)


def _under_load(rows: Sequence[Measurement]) -> Iterator[Goal]:
    """Loads given several times, in turns, count with their mean pictures a second and their worst else."""
    loads: dict[float, list[Measurement]] = {}
    for row in rows:
        if row.benchmark == "serve-load":
            loads.setdefault(row.settings["load"], []).append(row)
    if loads and (low := min(loads)) < 1:  # at all of its capacity or more a queue grows, however it is kept
        least = [row.settings for row in loads[low] if {"admission_p99_s", "step_s"} <= row.settings.keys()]
        if least:
            steps = max(one["admission_p99_s"] / one["step_s"] for one in least)
            yield Goal(f"admission p99 at {low:g}x capacity", steps, 2.0, "step times", False)
    if {1.0, 4.0} <= loads.keys() and (at_one := _mean_rate(loads[1.0])):
        share = _mean_rate(loads[4.0]) / at_one
        yield Goal("goodput at 4x capacity, to that at 1x", share, 0.95, "", True)
    if true := [
        row.settings["retry_after_true"] for row in loads.get(4.0, []) if "retry_after_true" in row.settings
    ]:
        yield Goal("Retry-After true, of those who waited it out at 4x", min(true), 0.9, "", True)
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


def _mean_rate(rows: Sequence[Measurement]) -> float:
    return sum(row.images_per_s or 0.0 for row in rows) / len(rows)


def _sum(settings: Sequence[dict[str, Any]], column: str) -> float:
    return float(sum(one.get(column) or 0 for one in settings))


def say_goals(rows: Sequence[Measurement], say: Callable[[str], None]) -> None:
    """Each on a line."""
    for goal in goals(rows):
        say(goal.line())
