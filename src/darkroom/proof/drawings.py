"""The plots of the five systems' own reports with three marks: published then, retold, darkroom today. Cells
are picked by their case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from darkroom.report import html
from darkroom.report.html import Curve

Cells = Sequence[Mapping[str, Any]]
KEY = (
    '<ul class="legend marks" style="margin: 10px 0 18px">'
    '<li><span style="display: inline-block; width: 20px; height: 9px; background: var(--muted); '
    'opacity: .55; margin-right: 7px"></span>published then (in lines: dashed, with dots)</li>'
    '<li><span style="display: inline-block; width: 9px; height: 9px; border: 1.6px solid var(--ink); '
    "transform: rotate(45deg); margin: 0 9px 0 3px\"></span>the plan's retelling of that run</li>"
    '<li><span style="display: inline-block; width: 20px; height: 9px; background: var(--s0); '
    'margin-right: 7px"></span>darkroom today, with its interval (in lines: solid, in a band)</li></ul>'
)


@dataclass(frozen=True)
class PlotSpec:
    """One plot of a table: its cells' cases give a bar's `name`, or a line's `name` and its place `x`."""

    title: str
    table: str
    pattern: str
    unit: str
    xlabel: str = ""  # lines over this; bars where there is none
    note: str = ""
    series: str = ""  # what a line without a name is called
    per_s: bool = False  # a batch's seconds drawn as pictures a second


DRAWINGS: dict[str, tuple[PlotSpec, ...]] = {
    "Vertex": (
        PlotSpec(
            "Peak memory by method",
            "peak VRAM (Vertex)",
            r"(?P<name>full|LoRA 8(?: checkpointed)?), batch 4, 512 px",
            "GB",
            note="batch 4, 512 px",
        ),
        PlotSpec(
            "Peak memory by batch",
            "peak VRAM (Vertex)",
            r"(?P<name>.+), batch (?P<x>\d+), 512 px",
            "GB",
            "batch",
            note="GB; 39.4 is the published card's ceiling",
        ),
        PlotSpec(
            "Peak memory by resolution",
            "peak VRAM (Vertex)",
            r"(?P<name>.+), batch 4, (?P<x>\d+) px",
            "GB",
            "px",
            note="GB; 39.4 is the published card's ceiling",
        ),
        PlotSpec(
            "Peak memory by rank",
            "peak VRAM (Vertex)",
            r"(?P<name>LoRA \d+) checkpointed, batch 4, 512 px",
            "GB",
            note="checkpointed, batch 4, 512 px",
        ),
        PlotSpec(
            "Adapter file by rank",
            "LoRA parameters and files (Vertex)",
            r"rank (?P<x>\d+), file",
            "MiB",
            "rank",
            note="MiB; queries and values",
            series="queries and values",
        ),
        PlotSpec(
            "Speed by rank",
            "training speed and cost (Vertex)",
            r"(?P<name>LoRA \d+), batch 4, 512 px",
            "steps/s",
            note="checkpointed, batch 4, 512 px; darkroom on stored latents and text",
        ),
        PlotSpec(
            "Speed by batch",
            "training speed and cost (Vertex)",
            r"batch (?P<x>\d+), 512 px",
            "steps/s",
            "batch",
            note="steps/s; darkroom on stored latents and text",
            series="LoRA 8 checkpointed",
        ),
        PlotSpec(
            "Cost by steps",
            "training speed and cost (Vertex)",
            r"(?P<x>\d+) steps of batch 4, USD",
            "USD",
            "steps",
            note="USD at the published price",
            series="LoRA 8 checkpointed",
        ),
        PlotSpec(
            "Cost of 800 pictures by batch",
            "training speed and cost (Vertex)",
            r"(?P<name>.+), 800 pictures in batches of (?P<x>\d+), USD",
            "USD",
            "batch",
            note="USD at the published price",
        ),
        PlotSpec(
            "Latency by card",
            "serving (Vertex)",
            r"(?P<name>.+), (?:plain|optimised) \(\d+ steps\)",
            "s",
            note="seconds of four pictures",
        ),
        PlotSpec(
            "Cost of a picture by card",
            "serving (Vertex)",
            r"(?P<name>.+, (?:plain|optimised)), USD an image",
            "USD",
            note="USD at the published price",
        ),
    ),
    "Anyscale": (
        *(
            PlotSpec(
                f"{count} {card[:4]}, {side} px",
                "images/s (Anyscale)",
                rf"{count} {card}, {side} px, (?P<name>.+)",
                "images/s",
                note="images/s",
            )
            for count, card in ((16, "A100-SXM4-40GB"), (32, "A100-SXM4-80GB"))
            for side in (256, 512)
        ),
        PlotSpec(
            "Cost of phase 1, from their rates",
            "costs from their rates (Anyscale)",
            r"phase 1 (?P<name>.+), USD, from their rate",
            "USD",
            note="USD at the published price",
        ),
        PlotSpec(
            "Cost of phase 1, from counts",
            "phases and total from counts (Anyscale)",
            r"phase 1 (?P<name>.+), USD, from counts",
            "USD",
            note="USD at the published price",
        ),
    ),
    "Lambda": (
        PlotSpec(
            "Latency by card, half",
            "latency (Lambda)",
            r"(?P<name>.+), half, batch 1",
            "s",
            note="seconds of one picture, 50 steps",
        ),
        PlotSpec(
            "Latency by card, single",
            "latency (Lambda)",
            r"(?P<name>(?!CPU).+), single, batch 1",
            "s",
            note="seconds of one picture, 50 steps",
        ),
        PlotSpec(
            "CPU against GPU, single",
            "latency (Lambda)",
            r"(?P<name>CPU .+|RTX 3090|RTX 8000|A100-PCIE-80GB), single, batch 1",
            "s",
            note="seconds of one picture, 50 steps; a retold CPU has all its cores at work",
        ),
        PlotSpec(
            "Throughput by batch",
            "latency (Lambda)",
            r"A100-PCIE-80GB, (?P<name>\w+), batch (?P<x>\d+)",
            "s",
            "batch",
            note="images/s, A100 of 80 GB",
            per_s=True,
        ),
        PlotSpec(
            "Memory by batch",
            "memory (Lambda)",
            r"A100-PCIE-80GB, (?P<name>\w+), batch (?P<x>\d+)",
            "GB",
            "batch",
            note="GB, A100 of 80 GB",
        ),
    ),
    "MosaicML": (
        PlotSpec(
            "Speed by GPUs, 512 px",
            "images/s (MosaicML)",
            r"(?P<x>\d+) A100, 512 px, (?P<name>.+)",
            "images/s",
            "A100",
            note="images/s",
        ),
        PlotSpec(
            "Speed by GPUs, 256 px",
            "images/s (MosaicML)",
            r"(?P<x>\d+) A100, 256 px, (?P<name>.+)",
            "images/s",
            "A100",
            note="images/s",
        ),
        PlotSpec(
            "Cost by GPUs",
            "costs (MosaicML)",
            r"(?P<x>\d+) A100, (?P<name>.+), USD",
            "USD",
            "A100",
            note="USD of the whole run at 2 an hour, from their rates",
        ),
        PlotSpec(
            "Days by GPUs",
            "days (MosaicML)",
            r"(?P<x>\d+) A100, (?P<name>.+), days",
            "days",
            "A100",
            note="of the whole run, from their rates",
        ),
    ),
    "diffusers": (
        PlotSpec(
            "The ladder",
            "ladder and steps/s (diffusers)",
            r"(?P<name>.+)",
            "s",
            note="seconds of one picture on a TITAN RTX",
        ),
        *(
            PlotSpec(
                f"{kind} attention by card",
                "ladder and steps/s (diffusers)",
                rf"(?P<name>.+), {kind.lower()} attention",
                "steps/s",
                note="steps/s",
            )
            for kind in ("Plain", "Fused")
        ),
        *(
            PlotSpec(
                f"torch 2 {engine} by card",
                "torch 2 steps/s (diffusers)",
                rf"(?P<name>.+), batch 1, {engine}",
                "steps/s",
                note="steps/s of one picture",
            )
            for engine in ("eager", "graphs")
        ),
    ),
    "MLPerf": (
        *(
            PlotSpec(
                f"8 {cards}",
                "MLPerf SD 2, eight cards",
                rf"(?P<name>.+): 8 (?:{pattern}), .+",
                "images/s",
                note="images/s",
            )
            for cards, pattern in (
                ("H100", "H100-SXM"),
                ("H200", "H200"),
                ("B200, and GB200 (Tyche)", "G?B200"),
            )
        ),
    ),
}


def five_plots(system: str, cells: Cells) -> Iterator[str]:
    """The plots of one system from its cells (`table`, `case`, `unit`, `published`, `retold`, `today`)."""
    for drawing in DRAWINGS[system]:
        found = list(_picked(drawing, cells))
        if len(found) > 1:
            yield (_lines if drawing.xlabel else _bars)(drawing, found)


Picked = tuple[re.Match[str], Mapping[str, Any]]


def _picked(drawing: PlotSpec, cells: Cells) -> Iterator[Picked]:
    for cell in cells:
        match = re.fullmatch(drawing.pattern, cell["case"])
        if match and cell["table"] == drawing.table and cell["unit"] == drawing.unit:
            yield match, cell


def _bars(drawing: PlotSpec, found: Sequence[Picked]) -> str:
    rows = [
        html.Marks(
            _name(match, cell["case"]),
            cell["published"],
            cell["retold"],
            cell.get("today"),
            cell.get("today_low"),
            cell.get("today_high"),
        )
        for match, cell in found
    ]
    svg = html.marked_bars(rows, label=f"{drawing.title} {drawing.table}", xlabel=drawing.unit)
    return html.plot(drawing.title, drawing.note, svg)


def _name(match: re.Match[str], case: str) -> str:
    """A container's steps stay with its card's name, where the case has them."""
    return case if "steps)" in case else match["name"]


def _lines(drawing: PlotSpec, found: Sequence[Picked]) -> str:
    published, retold, own = (_curves(drawing, found, key) for key in ("published", "retold", "today"))
    lows, highs = (_curves(drawing, found, key) for key in ("today_low", "today_high"))
    svg = html.marked_curves(
        published,
        retold,
        own,
        label=f"{drawing.title} {drawing.table}",
        xlabel=drawing.xlabel,
        bounds=list(zip(lows, highs, strict=True)),
    )
    names = [curve.name for curve in published]
    return html.plot(drawing.title, drawing.note, svg, html.legend(names) if len(names) > 1 else "")


def _curves(drawing: PlotSpec, found: Sequence[Picked], key: str) -> list[Curve]:
    value: Callable[[float, float], float] = (lambda x, y: x / y) if drawing.per_s else (lambda _, y: y)
    points: dict[str, list[tuple[float, float]]] = {}
    for match, cell in found:
        x = float(match["x"])
        name = match.groupdict().get("name") or drawing.series
        if cell.get(key) not in (None, ""):
            points.setdefault(name, []).append((x, value(x, float(cell[key]))))
    return [Curve(name, *np.array(sorted(pairs)).T) for name, pairs in points.items() if len(pairs) > 1]
