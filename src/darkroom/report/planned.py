"""A run's plan and what was measured: time, speed, memory and dollars, each with the plan's error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from darkroom.bill import Bill, format_bytes, format_seconds, format_usd
from darkroom.errors import DarkroomError
from darkroom.hardware import machine
from darkroom.hardware.machine import Machine
from darkroom.report import html
from darkroom.report.plots import Curve, as_curve
from darkroom.run import Run

HEADER = ("", "planned", "measured", "plan's error")
CPU_MEMORY = (
    "memory on a CPU is of the whole process: what its allocator keeps of freed blocks is planned as a fifth "
    "of a step's activations, or 85 % with an adapter, a new word or checkpointing"
)


@dataclass(frozen=True)
class PlannedMeasured:
    """One quantity, as planned and as measured."""

    name: str
    planned: float
    measured: float
    text: Any  # of a number

    @property
    def error(self) -> float:
        """Planned over measured, less one."""
        return self.planned / self.measured - 1

    def line(self) -> list[str]:
        """A row of the table."""
        return [self.name, self.text(self.planned), self.text(self.measured), f"{self.error:+.0%}"]


def plans_of(runs: Sequence[Run], *, make: bool) -> dict[Path, Mapping[str, Any]]:
    """The plans that runs kept, by their folders; with `make` also what the plan says now of the others."""
    found = {run.path: run.plan() or (_planned_now(run) if make else None) for run in runs}
    return {path: plan for path, plan in found.items() if plan is not None}


def _planned_now(run: Run) -> dict[str, Any] | None:
    """The plan of a run for the machine it ran on; None where its files do not say enough."""
    from darkroom.plan.ask import estimate_run

    bill = run.bill()
    with suppress(DarkroomError, ValueError, TypeError, KeyError, OSError):
        there = Machine.from_dict(run.environment["machine"])
        on = None if there.name == machine().name else there
        found = estimate_run(run, bill.num_devices if bill else 1, count=True, on=on)
        return None if found is None else {**found, "made_for_report": True}
    return None


def planned_table(one: RunData, *, titled: bool) -> str:
    """The table of one run; nothing without a plan or a bill."""
    if one.plan is None or one.bill is None or not one.rows:
        return ""
    found = list(pairs(one.plan, one.bill, one.rows, one.recipe, one.environment))
    if not found:
        return ""
    title = f"<h3>{html.escape(one.name)}</h3>" if titled else ""
    table = html.table(HEADER, [pair.line() for pair in found], frozenset((1, 2, 3)))
    return (
        f'{title}{table}<p class="note" style="margin-top: 8px">{html.escape(_note(one.plan, one.bill))}</p>'
    )


def pairs(
    plan: Mapping[str, Any],
    bill: Bill,
    rows: Sequence[Mapping[str, Any]],
    recipe: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> Iterator[PlannedMeasured]:
    """What was planned and measured of a run so far; the plan's hours and dollars are of the steps made."""
    rates = [row["images_per_s"] for row in rows if row.get("images_per_s")]
    batch = recipe.get("train", {}).get("global_batch") or plan["batch"]["global"]
    if rates:
        rate = median(rates)
        yield PlannedMeasured("step time", plan["step_s"]["total"], batch / rate, format_seconds)
        yield PlannedMeasured("images/s", plan["images_per_s"], rate, lambda number: f"{number:,.3g}")
    if bill.peak_memory_bytes:
        whole = _on_gpu(plan) or "process" in plan.get("memory_bytes", {})
        held = 0 if whole else environment.get("resident_bytes") or 0  # of a plan made before 0.1.0
        grown = bill.peak_memory_bytes - held
        if grown > 0:
            yield PlannedMeasured("peak memory", plan["peak_bytes"], grown, format_bytes)
    made = (rows[-1].get("step") or 0) / plan["steps"]
    if made and bill.wall_s:
        phases, share = plan.get("phases_s") or {}, made
        if phases:
            share = 1 - phases["train"] * (1 - made) / sum(phases.values())
        yield PlannedMeasured("time", plan["hours"] * share * 3600, bill.wall_s, format_seconds)
        if bill.usd and plan["cost"]["usd"]:
            yield PlannedMeasured("cost", plan["cost"]["usd"] * share, bill.usd, format_usd)


def _on_gpu(plan: Mapping[str, Any]) -> bool:
    return not str(plan["device"]).startswith("CPU")


def _note(plan: Mapping[str, Any], bill: Bill) -> str:
    when = "made for this report" if plan.get("made_for_report") else "made as the run began"
    batch = ", ".join(f"{name} {number}" for name, number in plan["batch"].items())
    parts = [
        f"The plan is of {plan['count']} x {plan['device']} in {plan['precision']}, batch: {batch}; {when}",
        "measured time and cost include start-up, checkpoints, samples and held-out losses"
        + (f" ({bill.parts['train'] / bill.wall_s:.0%} was training)" if bill.parts.get("train") else ""),
    ]
    return "; ".join([*parts, *([] if _on_gpu(plan) else [CPU_MEMORY])]) + "."


@dataclass(frozen=True)
class RunData:
    """A run as the report needs it, read once."""

    name: str
    run: Run
    rows: list[dict[str, Any]]
    recipe: dict[str, Any]
    environment: dict[str, Any]
    bill: Bill | None
    plan: Mapping[str, Any] | None
    samples: list[tuple[int, Path]] = field(repr=False)

    def curve(self, key: str) -> Curve:
        """Steps and values of one key of the metrics."""
        return as_curve(self.name, self.rows, key)

    def held_out(self) -> Curve:
        """Mean held-out loss by step: as logged, or the mean over the timesteps."""
        logged = self.curve("heldout_loss")
        if len(logged.x):
            return logged
        parts = list(self.by_timestep().values())
        if not parts:
            return logged
        return Curve(self.name, parts[0].x, np.mean([part.y for part in parts], axis=0))

    def by_timestep(self) -> dict[int, Curve]:
        """Held-out loss by step for each of the fixed timesteps."""
        found: dict[int, list[tuple[float, float]]] = {}
        for row in self.rows:
            for timestep, loss in _timestep_losses(row):
                found.setdefault(timestep, []).append((row["step"], loss))
        return {t: Curve(f"t {t}", *np.array(pairs, dtype=float).T) for t, pairs in sorted(found.items())}


def _timestep_losses(row: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    for key, value in row.items():
        if key.startswith("heldout") and isinstance(value, Mapping):
            for timestep, loss in value.items():
                if isinstance(loss, (int, float)):
                    yield int(re.sub(r"\D", "", str(timestep)) or 0), float(loss)
