"""One page on two precisions: pictures, what differs between them, and likeness by steps."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from PIL import Image

import darkroom
from darkroom.hardware.system import write_atomically
from darkroom.measure.optimisations import APART, INTERMEDIATES, RUNS, PicturePair, Precisions
from darkroom.report import html, plots
from darkroom.report.plots import Curve
from darkroom.sample.likeness import difference_picture

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
        html.section("In numbers", _table(found)),
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
    return html.plot(title, caption, plots.curves(drawn, label=f"{title} by steps", held_out=()))


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


def _table(found: Precisions) -> str:
    keys = [key for key, *_ in METRICS if key in found.pairs[0].likeness] + ["max_diff"]
    rows = [
        [pair.series, pair.steps, *(f"{pair.likeness[key]:.4g}" for key in keys)]
        for name in (RUNS, INTERMEDIATES, APART)
        for pair in found.series(name)
    ]
    return html.table(["series", "steps", *keys], rows, frozenset(range(1, 2 + len(keys))))


def _words(text: str) -> str:
    return f'<p class="note" style="margin-top: 8px">{html.escape(text)}</p>'
