"""Plots of the benchmarks of `generate`: what the ladder costs and saves, batches, precisions by steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from darkroom.bill import format_bytes
from darkroom.measure import Measurement
from darkroom.report import html, plots
from darkroom.report.plots import Bar, Curve

Rows = Sequence[Measurement]


def drawing_plots(rows: Rows) -> Iterator[str]:
    """What is drawn beside the plots that every table has; nothing for other benchmarks."""
    draw = {"ladder": _ladder, "batch": _batch, "precision": _precision}.get(rows[0].benchmark)
    if draw is not None:
        yield from draw(rows)


def _ladder(rows: Rows) -> Iterator[str]:
    weighed = [row for row in rows if row.peak_memory_bytes]
    if weighed:
        bars = [
            Bar(row.case, (row.peak_memory_bytes or 0) / 1e9, text=format_bytes(row.peak_memory_bytes or 0))
            for row in weighed
        ]
        svg = plots.bars(bars, label="Peak memory ladder", xlabel="GB")
        yield html.plot("Peak memory", "of the whole process on a CPU, of the allocator on a card", svg)
    compared = [row for row in rows if "ssim" in row.settings]
    if compared:
        bars = [Bar(row.case, max(0.0, 1 - row.settings["ssim"]), text=_likeness(row)) for row in compared]
        svg = plots.bars(bars, label="Difference to the plain picture", xlabel="1 - SSIM")
        yield html.plot("Difference to the plain picture", "none for equal pictures", svg)


def _likeness(row: Measurement) -> str:
    psnr = row.settings.get("psnr_db")
    return "equal" if psnr == "inf" else f"{float(psnr or 0):.1f} dB"


def _batch(rows: Rows) -> Iterator[str]:
    for title, caption, value in (
        ("Images a minute by batch", "end to end, median", lambda r: _times(r.images_per_s, 60)),
        ("Peak memory by batch", "GB", lambda r: _times(r.peak_memory_bytes, 1e-9)),
    ):
        yield _by(rows, "batch", title, caption, value)


def _precision(rows: Rows) -> Iterator[str]:
    series = [row for row in rows if row.settings.get("series")]
    named = [row.model_copy(update={"case": row.settings["series"]}) for row in series]
    for key, title, caption in (
        ("psnr_db", "PSNR by steps", "dB; higher is more alike, equal pictures left out"),
        ("ssim", "SSIM by steps", "1 is equal"),
    ):
        yield _by(named, "steps", title, caption, _setting(key))


def _setting(key: str) -> Callable[[Measurement], float | None]:
    def value(row: Measurement) -> float | None:
        found: Any = row.settings.get(key)
        return float(found) if isinstance(found, (int, float)) else None

    return value


def _by(rows: Rows, key: str, title: str, caption: str, value: Callable[[Measurement], float | None]) -> str:
    """One line a case over a setting, with the cases' colours named beneath."""
    curves = []
    for case in dict.fromkeys(row.case for row in rows):
        found = [(row.settings[key], value(row)) for row in rows if row.case == case and key in row.settings]
        known = sorted((x, y) for x, y in found if y is not None)
        if known:
            curves.append(Curve(case, *np.array(known, dtype=float).T))
    if not curves:
        return ""
    svg = plots.curves(curves, label=title, xlabel=key)
    return html.plot(title, caption, svg, html.legend([curve.name for curve in curves]))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
