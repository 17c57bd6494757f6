"""What pages are made of: small pieces of HTML, in which every text that comes from a file is escaped; and
plots as inline SVG whose colours are the page's variables, so that light and dark share one drawing.
"""

from __future__ import annotations

import base64
import io
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from darkroom.data.images import PictureError, open_picture
from darkroom.errors import InputError

# ---- HTML

_MOST_BYTES = 400_000  # a picture larger than this is embedded as WebP


def section(title: str, *parts: str) -> str:
    """A titled section; nothing where it has no content."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def cards(values: Iterable[tuple[str, str, str]], first: Iterable[tuple[str, str, str]] = ()) -> str:
    """The figures that matter: label, value, and a word beneath; those of `first` are set off."""
    inside = "".join(_card("card mark", *value) for value in first)
    inside += "".join(_card("card", *value) for value in values)
    return f'<div class="cards">{inside}</div>' if inside else ""


def _card(kind: str, label: str, value: str, foot: str) -> str:
    words = f'<div class="foot">{escape(foot)}</div>' if foot else ""
    inside = f'<div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>{words}'
    return f'<div class="{kind}">{inside}</div>'


def plot(title: str, caption: str, svg: str, after: str = "") -> str:
    """A plot with its title above and, under it, one line that says how to read it."""
    head = f"<h3>{escape(title)}</h3><figcaption>{escape(caption)}</figcaption>"
    return f'<figure class="plot">{head}{svg}{after}</figure>'


def grid(items: Iterable[str], kind: str = "plots") -> str:
    """Plots, boxes or frames side by side as the width allows."""
    inside = "\n".join(item for item in items if item)
    return f'<div class="{kind}">\n{inside}\n</div>' if inside else ""


def frame(path: Path, caption: str, *, first: bool = False) -> str:
    """A picture, embedded."""
    source, (width, height) = embed(path)
    small = ' class="small"' if max(width, height) <= 400 else ""  # shown enlarged, pixel by pixel
    place = "frame first" if first else "frame"
    widest = f' style="max-width: {min(860, round(600 * width / height))}px"' if first else ""
    size = f'width="{width}" height="{height}" loading="lazy" alt="{escape(caption)}"'
    words = f"<figcaption>{escape(caption)}</figcaption>"
    return f'<figure class="{place}"><img{small}{widest} src="{source}" {size}>{words}</figure>'


def embed(path: Path) -> tuple[str, tuple[int, int]]:
    """A picture file as a data URL and its size; large ones are compressed."""
    data = path.read_bytes()
    try:
        image = open_picture(data)
    except PictureError as error:
        raise InputError(f"'{path}' is no picture that can be read: {error}") from error
    kind = (image.format or "png").lower()
    if len(data) > _MOST_BYTES or kind not in ("png", "jpeg", "webp", "gif"):
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "WEBP", quality=88, method=4)
        data, kind = buffer.getvalue(), "webp"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}", image.size


def pairs(rows: Mapping[str, str], title: str = "") -> str:
    """A two-column table in a box."""
    if not rows:
        return ""
    inside = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows.items()
    )
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<div class="box">{heading}<div class="scroll"><table class="pairs">{inside}</table></div></div>'


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], numbers: frozenset[int] = frozenset()) -> str:
    """A table that scrolls sideways where it is too wide; `numbers` are the columns set to the right."""
    head = "".join(f"<th{_side(i, numbers)}>{escape(text)}</th>" for i, text in enumerate(header))
    body = "".join(
        "<tr>"
        + "".join(f"<td{_side(i, numbers)}>{_cell(value)}</td>" for i, value in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="box scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


class Marked(str):
    """A cell that differs from its neighbours and is set off."""

    __slots__ = ()


def legend(names: Sequence[str], kind: str = "legend") -> str:
    """Names with the colours that stand for them in every plot."""
    inside = "".join(
        f'<li><span class="dot" style="background: var(--s{i % 6})"></span>{escape(name)}</li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="{kind}">{inside}</ul>'


def page(title: str, subtitle: str, body: str, footer: str) -> str:
    """The whole file."""
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<div class="name">darkroom</div>
<h1>{escape(title)}</h1>
<div class="sub">{escape(subtitle)}</div>
</header>
{body}
<footer>{escape(footer)}</footer>
</main>
</body>
</html>
"""


def _side(i: int, numbers: frozenset[int]) -> str:
    return ' class="n"' if i in numbers else ""


def _cell(value: Any) -> str:
    if isinstance(value, Marked):
        return f'<span style="color: var(--accent); font-weight: 600">{escape(value)}</span>'
    return escape(str(value))


# ---- plots

NUM_SERIES = 6
NUM_SHADES = 8
# Matplotlib wants colours; these stand for the page's variables and are replaced by them in the SVG.
INK, MUTED, LINE, PAPER = "#010203", "#020304", "#030405", "#040506"
SERIES = tuple(f"#0a0b{i:02x}" for i in range(NUM_SERIES))
SHADES = tuple(f"#0c0d{i:02x}" for i in range(NUM_SHADES))  # from the least noise to the most
_VARIABLES = (
    {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)", PAPER: "var(--card)"}
    | {colour: f"var(--s{i})" for i, colour in enumerate(SERIES)}
    | {colour: f"var(--t{i})" for i, colour in enumerate(SHADES)}
)
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "path.simplify_threshold": 0.3,
}
_MAX_POINTS = 1200


@dataclass(frozen=True)
class Curve:
    """Values of one run by step; `y` may hold NaN where nothing was measured."""

    name: str
    x: np.ndarray
    y: np.ndarray


def smooth(y: np.ndarray, width: float) -> np.ndarray:
    """Gaussian mean over `width` neighbours to each side (one sigma), normalised at the ends."""
    if width < 0.5 or len(y) < 4:
        return y
    reach = min(int(3 * width), len(y) - 1)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    weights = np.convolve(np.ones(len(y)), kernel, mode="full")[reach : reach + len(y)]
    return np.asarray(np.convolve(y, kernel, mode="full")[reach : reach + len(y)] / weights)


def smoothing(count: int) -> float:
    """The width to smooth so many values by: a sixtieth of them, of few values two or a quarter of them."""
    return max(count / 60, min(2.0, count / 4))


def thin(x: np.ndarray, y: np.ndarray, most: int = _MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points, lowest and highest of each stretch kept, so that a spike stays."""
    if len(x) <= most:
        return x, y
    edges = np.linspace(0, len(x), most // 2 + 1).astype(int)
    kept = {0, len(x) - 1}
    for low, high in itertools.pairwise(edges):
        kept |= {low + int(np.argmin(y[low:high])), low + int(np.argmax(y[low:high]))}
    index = np.array(sorted(kept))
    return x[index], y[index]


def curves(
    raw: Sequence[Curve],
    *,
    label: str,
    ylabel: str = "",
    held_out: Sequence[Curve] = (),
    xlabel: str = "step",
) -> str:
    """Each run's values, thin, under their smoothed course; held-out values as dots on a line."""

    def draw(axes: Axes) -> None:
        """Curves, faint points behind, and held-out values dashed."""
        for i, curve in enumerate(raw):
            _curve(axes, curve, SERIES[i % NUM_SERIES], faint=0.3 / len(raw) ** 0.5)
        names = list(dict.fromkeys(curve.name for curve in (*raw, *held_out)))
        for curve in held_out:
            colour = SERIES[names.index(curve.name) % NUM_SERIES]
            axes.plot(curve.x, curve.y, color=colour, lw=1.1, ls=(0, (3, 2)), zorder=4)
            axes.plot(
                curve.x, curve.y, "o", ms=4.2, color=colour, mec=PAPER, mew=0.8, zorder=5, clip_on=False
            )
        _scale(axes, [curve.y for curve in raw], whole=[curve.y for curve in held_out])
        _steps(axes, [*raw, *held_out])
        axes.set_xlabel(xlabel, labelpad=2)
        axes.set_ylabel(ylabel)

    return _svg(draw, label)


def by_timestep(curve_by_timestep: Mapping[int, Curve], *, label: str) -> str:
    """Held-out loss over the steps, one line a timestep, named at its end."""

    def draw(axes: Axes) -> None:
        """A curve for each timestep, from light to dark, named at its end."""
        timesteps = sorted(curve_by_timestep)
        many = len(timesteps) - 1 or 1
        for i, timestep in enumerate(timesteps):
            curve = curve_by_timestep[timestep]
            colour = SHADES[round(i / many * (NUM_SHADES - 1))]
            axes.plot(
                curve.x, curve.y, color=colour, lw=1.4, marker="o" if len(curve.x) < 12 else None, ms=2.5
            )
        ends = [(curve_by_timestep[t].y[-1], f"t {t}") for t in timesteps]
        shades = [SHADES[round(i / many * (NUM_SHADES - 1))] for i in range(len(timesteps))]
        _scale(axes, [curve.y for curve in curve_by_timestep.values()])
        _steps(axes, list(curve_by_timestep.values()))
        _name_ends(axes, ends, shades)

    return _svg(draw, label, right=0.86)


def two_rows(top: Sequence[Curve], bottom: Sequence[Curve], *, labels: tuple[str, str], label: str) -> str:
    """Two small plots over the same steps, such as learning rate over gradient norm."""
    figure, (upper, lower) = _figure(rows=2)
    for axes, group, name in ((upper, top, labels[0]), (lower, bottom, labels[1])):
        for i, curve in enumerate(group):
            _curve(axes, curve, SERIES[i % NUM_SERIES], faint=0.3 / len(group) ** 0.5 if axes is lower else 0)
        axes.set_ylabel(name)
        _scale(axes, [curve.y for curve in group], may_be_log=axes is lower)
        axes.yaxis.set_major_locator(MaxNLocator(3)) if axes.get_yscale() == "linear" else None
    figure.align_ylabels([upper, lower])
    _steps(lower, bottom or top)
    upper.tick_params(labelbottom=False)
    return _render(figure, label)


@dataclass(frozen=True)
class Bar:
    """One bar: what it is, how long, its spread, and the words at its end."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    text: str = ""
    strong: bool = True


def bars(rows: Sequence[Bar], *, label: str, xlabel: str = "", mark: float | None = None) -> str:
    """Horizontal bars from the top down; `mark` draws a line to compare with."""
    height = (0.58 if xlabel else 0.42) + 0.27 * len(rows)
    with matplotlib.rc_context(_STYLE):
        figure, (axes,) = _figure(height=height)
        places = np.arange(len(rows))[::-1]
        longest = max((row.high or row.value for row in rows), default=1.0) or 1.0
        for place, row in zip(places, rows, strict=True):
            axes.barh(place, row.value, height=0.62, color=SERIES[0] if row.strong else MUTED,
                      alpha=1 if row.strong else 0.45)  # fmt: skip
            if row.low is not None and row.high is not None:
                axes.plot([row.low, row.high], [place, place], color=INK, lw=1, alpha=0.7)
            axes.text((row.high or row.value) + longest * 0.015, place, row.text, va="center", fontsize=8)
        if mark is not None:
            axes.axvline(mark, color=INK, lw=0.9, ls=(0, (2, 2)))
        _bar_axes(axes, places, [row.name for row in rows], longest)
        return _finish_bars(figure, axes, [row.name for row in rows], xlabel, height, label)


@dataclass(frozen=True)
class Marks:
    """A name's three figures: published, the plan's retelling, one's own with its interval where there is
    one.
    """

    name: str
    published: float
    retold: float
    own: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def longest(self) -> float:
        """The largest of its figures."""
        return max(value for value in (self.published, self.retold, self.own, self.high) if value is not None)


def marked_bars(rows: Sequence[Marks], *, label: str, xlabel: str = "") -> str:
    """A faint bar of what was published with a diamond of its retelling, over a bar of one's own figure."""
    height = (0.58 if xlabel else 0.42) + 0.38 * len(rows)
    with matplotlib.rc_context(_STYLE):
        figure, (axes,) = _figure(height=height)
        longest = max((row.longest for row in rows), default=1.0) or 1.0
        for place, row in zip(np.arange(len(rows))[::-1], rows, strict=True):
            _marked(axes, float(place), row, longest)
        names = [row.name for row in rows]
        _bar_axes(axes, np.arange(len(rows))[::-1], names, longest)
        return _finish_bars(figure, axes, names, xlabel, height, label)


def _marked(axes: Axes, place: float, row: Marks, longest: float) -> None:
    up = 0.2 if row.own is not None else 0.0
    axes.barh(place + up, row.published, height=0.34, color=MUTED, alpha=0.45)
    axes.plot(row.retold, place + up, "D", ms=4.4, mfc=PAPER, mec=INK, mew=1.0, zorder=5)
    end = max(row.published, row.retold + longest * 0.015)
    _label(axes, end, place + up, row.published, longest)
    if row.own is None:
        return
    axes.barh(place - 0.2, row.own, height=0.34, color=SERIES[0])
    if row.low is not None and row.high is not None:
        axes.plot([row.low, row.high], [place - 0.2] * 2, color=INK, lw=1.1, zorder=5)
    _label(axes, row.high or row.own, place - 0.2, row.own, longest)


def _label(axes: Axes, x: float, y: float, value: float, longest: float) -> None:
    label = f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
    axes.text(x + longest * 0.02, y, label, va="center", fontsize=7.5)


def marked_curves(
    published: Sequence[Curve],
    retold: Sequence[Curve],
    own: Sequence[Curve],
    *,
    label: str,
    xlabel: str,
    bounds: Sequence[tuple[Curve, Curve]] = (),
) -> str:
    """Each name's published course (dashed, dots), its retelling (hollow diamonds), one's own (solid); bands
    lie between the pairs of `bounds`.
    """

    def draw(axes: Axes) -> None:
        """Published points, the plan's of the same runs, and own ones, on doubling axes."""
        names = list(dict.fromkeys(curve.name for curve in (*published, *retold, *own)))
        for group, style in ((published, "o"), (retold, "D"), (own, "")):
            for curve in group:
                _marked_curve(axes, curve, SERIES[names.index(curve.name) % NUM_SERIES], style)
        for low, high in bounds:
            colour = SERIES[names.index(low.name) % NUM_SERIES]
            axes.fill_between(low.x, low.y, high.y, color=colour, alpha=0.16, lw=0)
        every = [*published, *retold, *own, *(curve for pair in bounds for curve in pair)]
        _scale(axes, [], whole=[curve.y for curve in every])
        _doublings(axes, every)
        axes.set_xlabel(xlabel, labelpad=2)

    return _svg(draw, label)


def _marked_curve(axes: Axes, curve: Curve, colour: str, style: str) -> None:
    if not style:
        axes.plot(curve.x, curve.y, color=colour, lw=2.0)
        return
    if style == "o":
        axes.plot(curve.x, curve.y, color=colour, lw=1.1, ls=(0, (3, 2)), alpha=0.8)
    face = colour if style == "o" else PAPER
    axes.plot(curve.x, curve.y, style, ms=4.2, mfc=face, mec=colour, mew=1.0, zorder=5, clip_on=False)


def _bar_axes(axes: Axes, places: np.ndarray, names: Sequence[str], longest: float) -> None:
    axes.set_yticks(places, [_broken(name) for name in names], color=INK)
    axes.set_xlim(0, longest * 1.18)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.grid(axis="y", visible=False)


def _finish_bars(
    figure: Figure, axes: Axes, names: Sequence[str], xlabel: str, height: float, label: str
) -> str:
    """Room for the names and the axis, whatever the height."""
    axes.set_xlabel(xlabel)
    longest = max((len(line) for name in names for line in _broken(name).splitlines()), default=0)
    left = min(0.5, 0.04 + 0.0135 * longest)
    figure.subplots_adjust(
        left=left, right=0.985, top=1 - 0.08 / height, bottom=(0.42 if xlabel else 0.26) / height
    )
    return _to_svg(figure, label)


def shares(parts: Mapping[str, float], *, label: str) -> str:
    """One bar cut into parts that sum to a whole, widest first."""
    total = sum(parts.values()) or 1.0
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 0.34))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        start = 0.0
        for i, (_, value) in enumerate(sorted(parts.items(), key=lambda item: -item[1])):
            axes.barh(0, value / total, left=start, color=SERIES[i % NUM_SERIES], edgecolor=PAPER, lw=1.2)
            start += value / total
        axes.set_xlim(0, 1)
        return _to_svg(figure, label)


def _svg(draw: Callable[[Axes], None], label: str, *, right: float = 0.97) -> str:
    figure, (axes,) = _figure()
    with matplotlib.rc_context(_STYLE):
        draw(axes)
    return _render(figure, label, right=right)


def _figure(*, rows: int = 1, height: float = 2.75) -> tuple[Figure, Sequence[Axes]]:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6, height))
        FigureCanvasSVG(figure)
        grid = figure.subplots(rows, 1, sharex=True, squeeze=False)
        return figure, [axes for (axes,) in grid]


def _render(figure: Figure, label: str, *, right: float = 0.97) -> str:
    figure.subplots_adjust(left=0.125, right=right, top=0.965, bottom=0.15, hspace=0.16)
    return _to_svg(figure, label)


def _to_svg(figure: Figure, label: str) -> str:
    """The figure as an SVG element that scales with the page and follows its theme."""
    buffer = io.StringIO()
    # Ids must differ between the drawings of one page and be the same each time it is written.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg [^>]*?) width="[^"]*" height="[^"]*"', r"\1", text, count=1)  # as wide as its place
    text = text.replace("<svg ", f'<svg role="img" aria-label="{_attribute(label)}" ', 1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return re.sub(r"font: ([^;\"]*?)px [^;\"]*", r"font-size: \1px; font-family: inherit", text)


def _curve(axes: Axes, curve: Curve, colour: str, *, faint: float) -> None:
    """Smoothed, over the values themselves drawn `faint`; as it is where that is 0."""
    known = np.isfinite(curve.y)
    x, y = curve.x[known], curve.y[known]
    if not len(x):
        return
    width = smoothing(len(y)) if faint else 0
    if width >= 0.5:
        axes.plot(*thin(x, y), color=colour, lw=0.6, alpha=faint)
    axes.plot(*thin(x, smooth(y, width), 400), color=colour, lw=1.7)


def _scale(
    axes: Axes,
    values: Sequence[np.ndarray],
    *,
    whole: Sequence[np.ndarray] = (),
    may_be_log: bool = True,
) -> None:
    """Logarithmic where the values span more than a factor of 12; outliers do not squash the rest.

    Those of `whole` are never outliers: all of them are within the axis.
    """
    shown, marked = _finite(values), _finite(whole)
    known = np.concatenate([shown, marked])
    if not len(known):
        return
    low, high = float(known.min()), float(known.max())
    typical = np.concatenate([np.quantile(shown, [0.005, 0.995]) if len(shown) else shown, marked])
    typical = np.array([typical.min(), typical.max()])
    if may_be_log and low > 0 and typical[1] / typical[0] > 12:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif len(known) > 50:
        margin = 0.06 * (typical[1] - typical[0]) or abs(high) or 1.0
        axes.set_ylim(max(low, typical[0]) - margin, min(high, typical[1]) + margin)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))


def _finite(values: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.array([]), *(some[np.isfinite(some)] for some in values)])


def _steps(axes: Axes, group: Sequence[Curve]) -> None:
    axes.set_xlabel("step", labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    last = max((float(curve.x[-1]) for curve in group if len(curve.x)), default=1.0)
    axes.set_xlim(0, last * 1.01 or 1.0)


def _doublings(axes: Axes, group: Sequence[Curve]) -> None:
    """A logarithmic axis whose marks are the values themselves."""
    marks = sorted({float(x) for curve in group for x in curve.x})
    axes.set_xscale("log")
    axes.set_xticks(marks, [_number(mark) for mark in marks])
    axes.minorticks_off()


def _name_ends(axes: Axes, ends: Sequence[tuple[float, str]], colours: Sequence[str]) -> None:
    """Write names to the right of the last values, moved apart where they would touch."""
    to_axes = axes.transData + axes.transAxes.inverted()
    order = sorted(range(len(ends)), key=lambda i: ends[i][0])
    wanted = [float(to_axes.transform((0.0, ends[i][0]))[1]) for i in order]
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + 0.062) if places else place)
    # Pushed up only so far; all together they move half of that back.
    shift = float(np.mean(places) - np.mean(wanted)) if places else 0.0
    for place, i in zip(places, order, strict=True):
        axes.text(
            1.015,
            place - shift,
            ends[i][1],
            transform=axes.transAxes,
            va="center",
            color=colours[i],
            fontsize=8,
        )


def _number(value: float) -> str:
    """'12k', '0.05', '1e-4': short enough for an axis."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 1e-3:
        return f"{value:.4g}"
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")


def _broken(name: str, most: int = 30) -> str:
    """A long name over several lines, none of it cut off."""
    return "\n".join(textwrap.wrap(name, most)) or name


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def as_curve(name: str, rows: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """A metric by step from a run's rows; rows without it are left out."""
    found = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]
    pairs = np.array(found, dtype=float).reshape(-1, 2)
    return Curve(name, pairs[:, 0], pairs[:, 1])
