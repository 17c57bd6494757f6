"""The sections on tables of measurements: one plot and one tidy table a benchmark. And the pages on two of
them: precisions, with pictures and what differs between them; and servers under load, with its goals.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import darkroom
from darkroom.bill import format_bytes, format_number
from darkroom.hardware.meters import has_statistics
from darkroom.hardware.system import write_atomically
from darkroom.measure.optimisations import APART, INTERMEDIATES, RUNS, PicturePair, Precisions
from darkroom.measure.serving import DARKROOM, ONE, SAME_KEY
from darkroom.measure.timing import Measurement, read_csv
from darkroom.measure.training import PARTS, IterationProfile, shares
from darkroom.report import html
from darkroom.report.html import Bar, Curve
from darkroom.sample.likeness import difference_picture

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
"""What settings hold besides what a case was run with."""
_SAME = ("machine", "device", "num_devices", "commit", "date", "note")


def measurement_sections(path: Path) -> Iterator[str]:
    """A section for each benchmark of a table."""
    rows = read_csv(path)
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        group = [row for row in rows if row.benchmark == benchmark]
        yield html.section(
            f"{benchmark} · {path.name}",
            html.grid([*_plots(group), *_drawing_plots(group)]),
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
            html.bars(
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
        svg = html.bars(bars, label=f"Images a second {rows[0].benchmark}")
        yield html.plot("Images a second", "median; the line spans p10 to p90 of the repeats", svg)
        return
    timed = [(name, row) for name, row in zip(names, rows, strict=True) if row.median_s]
    if timed:
        bars = [
            Bar(name, row.median_s or 0.0, row.p10_s, row.p90_s, seconds(row.median_s or 0.0))
            for name, row in timed
        ]
        svg = html.bars(bars, label=f"Seconds {rows[0].benchmark}", xlabel="seconds")
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


Rows = Sequence[Measurement]


def _drawing_plots(rows: Rows) -> Iterator[str]:
    """What is drawn besides the plots that every table has; nothing for other benchmarks."""
    draw = PLOTS.get(rows[0].benchmark)
    if draw is not None:
        yield from draw(rows)


def _memory(rows: Rows) -> Iterator[str]:
    weighed = [row for row in rows if row.peak_memory_bytes]
    if weighed:
        bars = [
            Bar(row.case, (row.peak_memory_bytes or 0) / 1e9, text=format_bytes(row.peak_memory_bytes or 0))
            for row in weighed
        ]
        svg = html.bars(bars, label="Peak memory by optimisation", xlabel="GB")
        yield html.plot("Peak memory", "of the whole process on a CPU, of the allocator on a card", svg)
    compared = [row for row in rows if "ssim" in row.settings]
    if compared:
        bars = [Bar(row.case, max(0.0, 1 - row.settings["ssim"]), text=_likeness(row)) for row in compared]
        svg = html.bars(bars, label="Difference to the plain picture", xlabel="1 - SSIM")
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


PLOTS = {
    "optimisations": _memory,
    "ladder": _memory,  # what rows of `bench optimisations` were called
    "batch": _batch,
    "precision": _precision,
}


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
    svg = html.curves(curves, label=title, xlabel=key)
    return html.plot(title, caption, svg, html.legend([curve.name for curve in curves]))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


COLOURS = dict(zip(PARTS, ("#8d99ae", "#2a9d8f", "#2f6690", "#d9822b", "#b5179e", "#6a994e"), strict=True))
GIB = 2**30
SHORT = 0.035  # of the width: below it a part is too narrow for its name


def draw_iteration(profile: IterationProfile, path: Path) -> Path:
    """Write a PNG (or what the file's ending says) of the iteration of median length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, middle, below) = plt.subplots(
        3, 1, figsize=(10, 5.6), height_ratios=(1.0, 1.5, 2.2), layout="constrained"
    )
    one = profile.typical
    _split(above, profile)
    for span in one.spans:
        row = len(PARTS) - 1 - PARTS.index(span.part)
        width = span.end_s - span.start_s
        middle.barh(row, width, left=span.start_s, color=COLOURS[span.part], height=0.8)
    middle.set(yticks=range(len(PARTS)), yticklabels=PARTS[::-1], xlim=(0, one.seconds))
    middle.set_title("one iteration, in order", loc="left", fontsize=9)
    seconds, used = zip(*one.memory, strict=True)
    below.fill_between(seconds, [value / GIB for value in used], color="#2f6690", alpha=0.18, linewidth=0)
    below.plot(seconds, [value / GIB for value in used], color="#2f6690", linewidth=1.2)
    for span in one.spans:
        below.axvspan(span.start_s, span.end_s, color=COLOURS[span.part], alpha=0.10, linewidth=0)
    kind = "allocated on the card" if has_statistics(profile.device) else "resident"
    below.set(xlim=(0, one.seconds), ylim=(0, None), xlabel="seconds", ylabel="GiB")
    below.set_title(f"memory, {kind}; peak {format_bytes(one.peak_bytes)}", loc="left", fontsize=9)
    figure.suptitle(f"{profile.name}: {profile.images} pictures in {one.seconds:.3g} s", x=0.01, ha="left")
    for axis in (above, middle, below):
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _split(axis: Any, profile: IterationProfile) -> None:
    """One bar of the parts' shares, each with its name and per cent where they fit."""
    left = 0.0
    for part, share in shares(profile):
        axis.barh(0, share, left=left, color=COLOURS[part], label=f"{part} {100 * share:.1f} %")
        if share > SHORT:
            text = f"{100 * share:.0f} %"
            axis.text(left + share / 2, 0, text, ha="center", va="center", color="white", fontsize=8)
        left += share
    axis.set(xlim=(0, 1), yticks=[], xticks=[])
    axis.set_title("share of the iteration, median", loc="left", fontsize=9)
    axis.legend(ncols=6, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.05))
    axis.spines[["left", "bottom"]].set_visible(False)


# ---- the page on two precisions: pictures, what differs between them, and likeness by steps

GAIN = 8.0
PSNR_OF_EQUALS = 100.0
"""Where equal pictures are drawn: no 8-bit pictures that differ come near it."""
METRICS = (
    ("psnr_db", "PSNR", "dB; higher is more alike, equal pictures at 100"),
    ("ssim", "SSIM", "1 is equal"),
    ("nrmse", "NRMSE", "root mean squared error by the reference's size; 0 is equal"),
    ("lpips", "LPIPS", "learned distance; 0 is equal"),
)
SHOWN_PX = 256


def write_precision_page(found: Precisions, out: Path | str) -> Path:
    """Write one HTML file: the pictures of both precisions with their differences, and plots by steps."""
    first, second = found.names
    names = (RUNS, INTERMEDIATES, APART)
    body = [
        html.section(
            "How alike, by steps",
            html.legend(names),
            html.grid(_plot(found, *metric) for metric in METRICS),
            _words(
                f"{RUNS}: a whole run of n steps in {first} and in {second}. {INTERMEDIATES}: what both have "
                f"after n steps of the longest run. {APART}: in {first} alone, the run of n steps against "
                "those intermediates; were they the same thing, that line would say equal all along."
            ),
        ),
        *(
            html.section(title, _strip(found.series(name), labels))
            for title, name, labels in (
                ("Whole runs", RUNS, (second, first)),
                ("Intermediates of the longest run", INTERMEDIATES, (second, first)),
                (f"Runs and intermediates are not the same ({first})", APART, ("run", "intermediate")),
            )
        ),
        html.section("In numbers", _likeness_table(found)),
    ]
    now = datetime.now(UTC)
    page = html.page(
        f"{first} and {second}",
        f"the same noise, prompt and solver through two precisions, {now.day} {now:%B %Y}",
        "\n".join(body),
        f"Written by darkroom {darkroom.__version__} on {now:%Y-%m-%d %H:%M} UTC. One file; nothing is "
        f"loaded from elsewhere. Differences are drawn {GAIN:g} times as bright.",
    )
    target = Path(out)
    write_atomically(target, page)
    return target


def _plot(found: Precisions, key: str, title: str, caption: str) -> str:
    if not all(key in pair.likeness for pair in found.pairs):
        return ""
    drawn = [_curve(name, found.series(name), key) for name in (RUNS, INTERMEDIATES, APART)]
    return html.plot(title, caption, html.curves(drawn, label=f"{title} by steps", held_out=()))


def _curve(name: str, pairs: Sequence[PicturePair], key: str) -> Curve:
    values = [min(pair.likeness[key], PSNR_OF_EQUALS) for pair in pairs]
    return Curve(name, np.array([pair.steps for pair in pairs], dtype=float), np.array(values))


def _strip(pairs: Sequence[PicturePair], labels: tuple[str, str]) -> str:
    """Both pictures and their difference, a row for each number of steps."""
    return html.grid(
        (
            frame
            for pair in pairs
            for frame in (
                _frame(pair.first, f"{pair.steps} steps, {labels[0]}"),
                _frame(pair.second, f"{pair.steps} steps, {labels[1]}"),
                _frame(difference_picture(pair.first, pair.second, gain=GAIN), f"difference: {_short(pair)}"),
            )
        ),
        "film three",
    )


def _frame(picture: Image.Image, caption: str) -> str:
    small = picture.copy()
    small.thumbnail((SHOWN_PX, SHOWN_PX))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    words = html.escape(caption)
    image = f'<img class="small" src="{source}" width="{small.width}" height="{small.height}" alt="{words}">'
    return f'<figure class="frame">{image}<figcaption>{words}</figcaption></figure>'


def _short(pair: PicturePair) -> str:
    psnr = pair.likeness["psnr_db"]
    return "none" if math.isinf(psnr) else f"{psnr:.1f} dB, SSIM {pair.likeness['ssim']:.3f}"


def _likeness_table(found: Precisions) -> str:
    keys = [key for key, *_ in METRICS if key in found.pairs[0].likeness] + ["max_diff"]
    rows = [
        [pair.series, pair.steps, *(f"{pair.likeness[key]:.4g}" for key in keys)]
        for name in (RUNS, INTERMEDIATES, APART)
        for pair in found.series(name)
    ]
    return html.table(["series", "steps", *keys], rows, frozenset(range(1, 2 + len(keys))))


def _words(text: str) -> str:
    return f'<p class="note" style="margin-top: 8px">{html.escape(text)}</p>'


# ---- the page on servers under load, with its goals
#
# Rates, latencies, and what overload and cancelling cost.

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
    drawn = [html.plot("Images a second", "longer is better", html.bars(rates, label=f"Rates: {title}"))]
    if waits:
        svg = html.bars(waits, label=f"Latencies: {title}", xlabel="seconds")
        drawn.append(html.plot("Median latency", "from due to done; shorter is better", svg))
    return html.section(title, html.grid(drawn), _serving_table(rows))


def _serving_table(rows: Sequence[Measurement]) -> str:
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
