"""The sections on tables of measurements: one plot and one tidy table a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from darkroom.bill import format_bytes, format_number
from darkroom.measure import Measurement, read_csv
from darkroom.report import html, plots
from darkroom.report.drawing import drawing_plots
from darkroom.report.plots import Bar

_SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "ratio": ("ratio", lambda v: f"{v:.3g}"),
    "ratio_to": ("to", str),
    "median_s": ("median", lambda v: seconds(v)),
    "p10_s": ("p10", lambda v: seconds(v)),
    "p90_s": ("p90", lambda v: seconds(v)),
    "repeats": ("repeats", str),
    "images_per_s": ("images/s", lambda v: rate(v)),
    "steps_per_s": ("steps/s", lambda v: rate(v)),
    "mfu": ("MFU", lambda v: f"{v:.1%}"),
    "peak_memory_bytes": ("peak memory", format_bytes),
    "energy_j": ("energy", lambda v: f"{format_number(v)} J"),
    "usd_per_image": ("USD/1000 images", lambda v: format_number(v * 1000, 2)),
    "warmup_s": ("warm-up", lambda v: seconds(v)),
}
_MEASURED = ("psnr_db", "ssim", "nrmse", "max_diff", "lpips", "in_place")
"""What settings hold beside what a case was run with."""
_SAME = ("machine", "device", "num_devices", "commit", "date", "note")


def measurement_sections(path: Path) -> Iterator[str]:
    """A section for each benchmark of a table."""
    rows = read_csv(path)
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        group = [row for row in rows if row.benchmark == benchmark]
        yield html.section(
            f"{benchmark} · {path.name}",
            html.grid([*_plots(group), *drawing_plots(group)]),
            _table(group),
            _said(group),
        )


def seconds(value: float) -> str:
    """'12.3 ms', '4.56 s', '2 min 03 s'."""
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{format_number(value)} s"


def rate(value: float) -> str:
    """'24,050', '12.3'."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plots(rows: Sequence[Measurement]) -> Iterator[str]:
    """Ratios where there are any, and images a second or times."""
    names = _names(rows)
    ratios = [(name, row) for name, row in zip(names, rows, strict=True) if row.ratio is not None]
    if ratios:
        references = " and ".join(sorted({row.ratio_to or "" for _, row in ratios}))
        yield html.plot(
            "Ratio of times",
            f"to {references}; shorter is faster, the dashed line is 1",
            plots.bars(
                [
                    Bar(name, row.ratio or 0.0, text=f"{row.ratio:.3g}x", strong=row.ratio_to != row.case)
                    for name, row in ratios
                ],
                label=f"Ratio of times {rows[0].benchmark}",
                mark=1.0,
            ),
        )
    rates = [(name, row) for name, row in zip(names, rows, strict=True) if row.images_per_s]
    if rates:
        bars = [
            Bar(
                name,
                row.images_per_s or 0.0,
                *_rate_spread(row),
                text=rate(row.images_per_s or 0.0),
                strong=row.ratio_to != row.case,
            )
            for name, row in rates
        ]
        svg = plots.bars(bars, label=f"Images a second {rows[0].benchmark}")
        yield html.plot("Images a second", "median; the line spans p10 to p90 of the repeats", svg)
        return
    timed = [(name, row) for name, row in zip(names, rows, strict=True) if row.median_s]
    if timed:
        bars = [
            Bar(name, row.median_s or 0.0, row.p10_s, row.p90_s, seconds(row.median_s or 0.0))
            for name, row in timed
        ]
        svg = plots.bars(bars, label=f"Seconds {rows[0].benchmark}", xlabel="seconds")
        yield html.plot("Time", "median; the line spans p10 to p90 of the repeats", svg)


def _rate_spread(row: Measurement) -> tuple[float | None, float | None]:
    """Images a second at p90 and p10 of the time."""
    if not (row.images_per_s and row.median_s and row.p10_s and row.p90_s):
        return None, None
    images = row.images_per_s * row.median_s
    return images / row.p90_s, images / row.p10_s


def _names(rows: Sequence[Measurement]) -> list[str]:
    """The case, and of its settings those that vary between rows of the same case."""
    varying = {
        key
        for row in rows
        for key in row.settings
        if key not in _MEASURED
        and len({str(other.settings.get(key)) for other in rows if other.case == row.case}) > 1
    }
    return [
        " ".join([row.case, *(f"{key}={row.settings[key]}" for key in row.settings if key in varying)])
        for row in rows
    ]


def _table(rows: Sequence[Measurement]) -> str:
    shown = [name for name in _SHOWN if any(getattr(row, name) is not None for row in rows)]
    apart = [name for name in _SAME if len({getattr(row, name) for row in rows}) > 1]
    settings = any(row.settings for row in rows)
    header = ["case", *(["settings"] if settings else []), *(_SHOWN[name][0] for name in shown), *apart]
    body = [
        [
            row.case,
            *([", ".join(f"{key}={value}" for key, value in row.settings.items())] if settings else []),
            *(_show(name, getattr(row, name)) for name in shown),
            *(getattr(row, name) for name in apart),
        ]
        for row in rows
    ]
    first = 2 if settings else 1
    numbers = frozenset(first + i for i, name in enumerate(shown) if name != "ratio_to")
    return f'<div style="margin-top: 14px">{html.table(header, body, numbers)}</div>'


def _show(name: str, value: Any) -> str:
    return "" if value is None else _SHOWN[name][1](value)


def _said(rows: Sequence[Measurement]) -> str:
    """What is the same in all rows, once, under the table."""
    same = [str(getattr(rows[0], name)) for name in _SAME if len({getattr(row, name) for row in rows}) == 1]
    versions = ", ".join(f"{name} {version}" for name, version in rows[0].versions.items())
    words = "; ".join(filter(None, [*(text for text in same if text != "1"), versions]))
    return f'<p class="note" style="margin-top: 8px">{html.escape(words)}</p>'
