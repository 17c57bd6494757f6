"""The page of `bench finetune`: plots as PNGs for anywhere, pictures over the steps, and one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from PIL import Image, ImageOps

from darkroom.data.images import pictures_below
from darkroom.measure.finetuning import BEST, FIDELITY, LARGEST, PLANNED, RATES, STEP, Finetuning
from darkroom.measure.timing import Measurement
from darkroom.report.runs import write_report

Rows = Sequence[Measurement]
Pictures = Mapping[tuple[str, int], Sequence[Path]]
Line = tuple[str, list[Image.Image], list[str]]
Value = tuple[str, Callable[[Measurement], float | None]]
"""The style of a line, and what it shows of a row."""
COLOURS = {"full": "#b3402e", "lora": "#2f6f9f", "dreambooth": "#c98a1b", "dreambooth-lora": "#3d8a5f"}
OTHERS = ("#2f6f9f", "#b3402e", "#3d8a5f", "#c98a1b", "#6b5b95", "#444444")
TILE, MOST_STEPS = 96, 7


def write_finetuning(rows: Rows, pictures: Pictures, bench: Finetuning, out: Path) -> tuple[list[Path], Path]:
    """Write the PNGs and `report.html` next to `measurements.csv`; returns them."""
    draws: dict[str, Callable[[Path], bool]] = {
        "fidelity": lambda file: _fidelity(_of(rows, FIDELITY), _of(rows, BEST), file),
        "rates": lambda file: _fidelity(_of(rows, RATES), (), file),
        "memory": lambda file: _memory(rows, file),
        "memory-by": lambda file: _memory_by(rows, file),
        "speed": lambda file: _speed(rows, file),
        "largest-batch": lambda file: _largest(rows, file),
        "cost": lambda file: _cost(rows, file),
        "pictures": lambda file: _sheet(pictures, bench, file, _of(rows, FIDELITY)),
        "best": lambda file: _best_sheet(_of(rows, BEST), pictures, bench, file),
    }
    out.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False}):
        made = [out / f"{name}.png" for name, draw in draws.items() if draw(out / f"{name}.png")]
    page = write_report(
        [out / "measurements.csv", *made], out / "report.html", title=f"Fine-tuning on {bench.photos.name}"
    )
    return made, page


def _of(rows: Rows, benchmark: str) -> list[Measurement]:
    """A benchmark's rows, without those that only say why there is nothing."""
    return [row for row in rows if row.benchmark == benchmark and not _failed(row)]


def _failed(row: Measurement) -> bool:
    if row.benchmark in (FIDELITY, RATES):
        return "step" not in row.settings
    return row.benchmark == STEP and row.images_per_s is None


def _colour(series: str, i: int) -> str:
    return COLOURS.get(series, OTHERS[i % len(OTHERS)])


# ---- plots


def _fidelity(rows: Rows, best: Rows, file: Path) -> bool:
    """Both fidelities over the steps with their intervals, and one against the other."""
    if not rows:
        return False
    figure = Figure(figsize=(10.5, 3.3))
    left, middle, right = figure.subplots(1, 3)
    chosen = {row.settings["series"]: row.settings["step"] for row in best}
    for i, series in enumerate(dict.fromkeys(row.settings["series"] for row in rows)):
        points = [row.settings for row in rows if row.settings["series"] == series]
        colour, steps = _colour(series, i), [one["step"] for one in points]
        for axes, name in ((left, "subject"), (middle, "prompt")):
            _with_interval(axes, steps, points, name, series, colour)
        x, y = [one["prompt_fidelity"] for one in points], [one["subject_fidelity"] for one in points]
        right.plot(x, y, "-o", ms=3, color=colour, lw=1.2)
        for one in points:
            if one["step"] == chosen.get(series):
                right.plot(
                    one["prompt_fidelity"], one["subject_fidelity"], "*", ms=13, color=colour, mec="white"
                )
                right.annotate(
                    f"{one['step']}",
                    (one["prompt_fidelity"], one["subject_fidelity"]),
                    xytext=(6, 4),
                    textcoords="offset points",
                    color=colour,
                )
    own = rows[0].settings.get("photographs_with_each_other")
    if own is not None:
        line = left.axhline(own, color="#888888", ls=":", lw=1)
        left.legend([line], ["photographs with each other"], frameon=False, fontsize=7.5, loc="lower right")
    left.set(title="Subject fidelity (dino)", xlabel="step")
    middle.set(title="Prompt fidelity (clip-t)", xlabel="step")
    star = "; star: chosen" if chosen else ""
    right.set(title=f"One against the other{star}", xlabel="prompt fidelity", ylabel="subject fidelity")
    middle.legend(frameon=False, fontsize=7.5)
    return _save(figure, file)


def _with_interval(
    axes: Axes, steps: list[int], points: list[dict[str, Any]], name: str, series: str, colour: str
) -> None:
    axes.plot(
        steps, [one[f"{name}_fidelity"] for one in points], "-o", ms=3, color=colour, label=series, lw=1.4
    )
    low, high = [one[f"{name}_low"] for one in points], [one[f"{name}_high"] for one in points]
    axes.fill_between(steps, low, high, color=colour, alpha=0.12, lw=0)


def _memory(rows: Rows, file: Path) -> bool:
    """Bars by method: what training holds, and the whole peak; measured and planned side by side."""
    groups = [
        (title, _one_a_method(_of(rows, name)))
        for name, title in ((STEP, "Measured here"), (PLANNED, "Planned"))
    ]
    groups = [(title, group) for title, group in groups if group]
    if not groups:
        return False
    figure = Figure(figsize=(5.2 * len(groups), 2.9))
    for axes, (title, group) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        unit, scale = _unit(row.peak_memory_bytes or 0 for row in group)
        for i, row in enumerate(group):
            peak, state = (row.peak_memory_bytes or 0) / scale, row.settings["trained_state_bytes"] / scale
            axes.barh(i, peak, color="#cfd6dc", height=0.66, label="peak" if i == 0 else "")
            colour = COLOURS[row.settings["method"]]
            axes.barh(i, state, color=colour, height=0.34, label="")
            axes.text(peak, i, f" {_short(peak)}, of it {_short(state)}", va="center", fontsize=8)
        axes.set_yticks(range(len(group)), [row.settings["method"] for row in group])
        axes.invert_yaxis()
        axes.set_xlim(0, axes.get_xlim()[1] * 1.4)
        settings = group[0].settings
        where = f"{settings['model']}, batch {settings['batch']}, {settings['resolution']} px"
        axes.set_title(f"{title}: {where}", fontsize=9)
        axes.set_xlabel(f"{unit}; grey: whole peak, colour: state of what is trained")
    return _save(figure, file)


def _short(value: float) -> str:
    """`2,483`, `341`, `14.9`, `0.6`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _one_a_method(rows: Rows) -> list[Measurement]:
    """Of each method the row with the settings that most rows share."""
    if not rows:
        return []
    rows = [row for row in rows if "steps" not in row.settings]
    common = {name: _commonest([r.settings[name] for r in rows if name in r.settings]) for name in
              ("batch", "resolution", "rank")}  # fmt: skip
    fits = [row for row in rows if all(row.settings.get(n, v) == v for n, v in common.items())]
    return list({row.settings["method"]: row for row in fits}.values())


def _commonest(values: Sequence[Any]) -> Any:
    return max(dict.fromkeys(values), key=list(values).count, default=None)


def _speed(rows: Rows, file: Path) -> bool:
    """Pictures a second by batch, by resolution and by rank."""
    return _by_all(rows, file, lambda group: ("pictures/s", [("-", lambda row: row.images_per_s)]))


def _memory_by(rows: Rows, file: Path) -> bool:
    """Peak memory by batch, by resolution and by rank; of a card's rows the host's as well, dashed."""

    def of(group: Rows) -> tuple[str, list[Value]]:
        """The axis' label and the curves of a group: the device's peak, and the host's where it differs."""
        unit, scale = _unit(row.peak_memory_bytes or 0 for row in group)
        lines: list[Value] = [("-", lambda row: row.peak_memory_bytes and row.peak_memory_bytes / scale)]
        apart = any(row.settings.get("host_peak_bytes", row.peak_memory_bytes) != row.peak_memory_bytes
                    for row in group)  # fmt: skip
        if apart:
            lines.append(("--", lambda row: row.settings.get("host_peak_bytes", 0) / scale or None))
        return f"peak, {unit}{'; dashed: of the host' if apart else ''}", lines

    return _by_all(rows, file, of)


def _unit(values: Iterable[float]) -> tuple[str, float]:
    return ("GB", 1e9) if max(values, default=0) > 3e9 else ("MB", 1e6)


def _by_all(rows: Rows, file: Path, of: Callable[[Rows], tuple[str, list[Value]]]) -> bool:
    """By batch, resolution and rank; above as measured, below as planned. A cross: it found no memory."""
    found = [(STEP, "measured"), (PLANNED, "planned")]
    groups = [(title, [r for r in rows if r.benchmark == name and "steps" not in r.settings])
              for name, title in found]  # fmt: skip
    groups = [(title, group) for title, group in groups if any(not _failed(row) for row in group)]
    if not groups:
        return False
    figure = Figure(figsize=(10.5, 2.7 * len(groups)))
    grid = figure.subplots(len(groups), 3, squeeze=False)
    for line, (title, group) in zip(grid, groups, strict=True):
        label, lines = of(group)
        cross = "; x: out of memory" if any(_failed(row) for row in group) else ""
        for axes, by in zip(line, ("batch", "resolution", "rank"), strict=True):
            for style, value in lines:
                _by(axes, group, by, value, style=style)
            axes.set_title(
                f"{group[0].settings['model']}, {title}{cross}" if by == "batch" else "", fontsize=9
            )
            axes.set(
                xlabel="resolution, px" if by == "resolution" else by, ylim=(0, axes.get_ylim()[1] * 1.08)
            )
        line[0].set_ylabel(label)
    drawn = [one for axes in grid[:, 0] for one in axes.get_lines()]
    handles = {one.get_label(): one for one in drawn if one.get_label() in COLOURS}
    figure.legend(handles.values(), handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=8)
    return _save(figure, file)


def _by(
    axes: Axes,
    rows: Rows,
    by: str,
    value: Callable[[Measurement], float | None],
    style: str = "-",
) -> None:
    """One line a method over a setting, the others as most rows have them."""
    names = {"batch", "resolution", "rank"} - {by}
    common = {n: _commonest([r.settings[n] for r in rows if n in r.settings]) for n in names}
    methods = list(dict.fromkeys(row.settings["method"] for row in rows))
    for i, method in enumerate(methods):
        own = [r for r in rows if r.settings["method"] == method and by in r.settings]
        own = [r for r in own if all(r.settings.get(n, v) == v for n, v in common.items())]
        found = sorted((r.settings[by], value(r)) for r in own if value(r) is not None)
        colour, label = _colour(method, 0), method if style == "-" else ""
        if found:
            axes.plot(*zip(*found, strict=True), f"{style}o", ms=3.5, lw=1.4, color=colour, label=label)
        none = [r.settings[by] for r in own if _failed(r)]
        across = axes.get_xaxis_transform()
        axes.plot(none, [0.97 - 0.05 * i] * len(none), "x", ms=5, color=colour, transform=across)
    _ticks(axes, sorted({r.settings[by] for r in rows if by in r.settings}), doubling=by != "resolution")


def _ticks(axes: Axes, values: list[int], *, doubling: bool) -> None:
    """A tick at each value; evenly spaced where values double, as batches and ranks do."""
    if doubling and values:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    axes.set_xticks(values, [str(value) for value in values])
    if len(values) == 1:
        axes.set_xlim(values[0] * 0.5, values[0] * 2)


def _largest(rows: Rows, file: Path) -> bool:
    found, planned = _of(rows, LARGEST), [r for r in _of(rows, PLANNED) if "steps" not in r.settings]
    groups = [("measured", found, "batch"), ("planned, on each card", planned, "largest_batch")]
    groups = [group for group in groups if group[1]]
    if not groups:
        return False
    figure = Figure(figsize=(5.2 * len(groups), 2.9))
    for axes, (title, group, key) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True
    ):
        if key == "batch":
            for method in dict.fromkeys(r.settings["method"] for r in group):
                own = sorted((r.settings["resolution"], r.settings["batch"]) for r in group
                             if r.settings["method"] == method)  # fmt: skip
                axes.plot(*zip(*own, strict=True), "-o", ms=3.5, color=_colour(method, 0), label=method)
            axes.set_xticks(sorted({r.settings["resolution"] for r in group}))
        else:
            _by(axes, group, "resolution", lambda row: row.settings["largest_batch"])
        limit = group[0].settings.get("budget_bytes")
        under = f", under {limit / 1e9:.3g} GB" if limit else ""
        axes.set_title(f"Largest batch, {group[0].settings['model']}, {title}{under}", fontsize=9)
        if any(row.settings[key] for row in group):
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("resolution, px")
        axes.legend(frameon=False, fontsize=7.5)
    return _save(figure, file)


def _cost(rows: Rows, file: Path) -> bool:
    """USD by steps, and by method and batch for the same number of pictures, as planned."""
    planned = [row for row in _of(rows, PLANNED) if row.settings.get("usd") is not None]
    if not planned:
        return False
    figure = Figure(figsize=(10.5, 3.0))
    left, right = figure.subplots(1, 2)
    by_steps = [row for row in planned if "steps" in row.settings]
    for method in dict.fromkeys(row.settings["method"] for row in by_steps):
        own = [(r.settings["steps"], r.settings["usd"]) for r in by_steps if r.settings["method"] == method]
        left.plot(*zip(*sorted(own), strict=True), "-o", ms=3.5, color=_colour(method, 0), label=method)
    one = planned[0]
    batch = by_steps[0].settings["batch"] if by_steps else ""
    left.set(
        title=f"Cost by steps of {batch}, {one.num_devices} x {one.device}", xlabel="steps", ylabel="USD"
    )
    left.legend(frameon=False, fontsize=7.5)
    fixed = [row for row in planned if "steps" not in row.settings]
    _by(right, fixed, "batch", lambda row: row.settings["usd"])
    right.set(title=f"Cost of {fixed[0].settings['samples']:,} pictures", xlabel="batch", ylabel="USD")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    return _save(figure, file)


def _save(figure: Figure, file: Path) -> bool:
    figure.tight_layout()
    figure.savefig(file, dpi=110, facecolor="white")
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(128).save(file, optimize=True)
    return True


# ---- pictures


def _photos(bench: Finetuning) -> list[Image.Image]:
    return [_tile(file) for file in pictures_below(bench.photos)]


def _tile(file: Path) -> Image.Image:
    with Image.open(file) as picture:
        return ImageOps.fit(picture.convert("RGB"), (TILE, TILE), Image.Resampling.LANCZOS)


def _sheet(pictures: Pictures, bench: Finetuning, file: Path, rows: Rows) -> bool:
    """Photographs above; then of each method, over the steps, the same seed of three prompts."""
    series = list(dict.fromkeys(row.settings["series"] for row in rows))
    if not series or not pictures:
        return False
    steps_of = {name: sorted(step for one, step in pictures if one == name) for name in series}
    own = {name: _spread(steps, MOST_STEPS) for name, steps in steps_of.items()}
    width = max(len(steps) for steps in own.values())
    lines: list[Line] = [("photographs", _photos(bench)[:width], [])]
    for name, steps in own.items():
        shown = _by_prompt(pictures[name, steps[0]])[:3]
        for i, first in enumerate(shown):
            tiles = [_tile(pictures[name, step][first]) for step in steps]
            lines.append(
                (name if i == 0 else "", tiles, [f"step {step}" for step in steps] if i == 0 else [])
            )
    return _draw_lines(lines, width, file)


def _spread(steps: list[int], most: int) -> list[int]:
    """At most so many of the steps, evenly, the first and the last among them."""
    count = min(most, len(steps))
    return [steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count)]


def _by_prompt(files: Sequence[Path]) -> list[int]:
    """Places of one picture of each prompt: the names hold seed and prompt."""
    seen: dict[str, int] = {}
    for i, path in enumerate(files):
        seen.setdefault(path.stem.split("-", 1)[1], i)
    return list(seen.values())


def _best_sheet(best: Rows, pictures: Pictures, bench: Finetuning, file: Path) -> bool:
    """A line for each best recipe: a photograph, then a picture of each prompt."""
    if not best or not pictures:
        return False
    lines = []
    photo = _photos(bench)[0]
    for row in best:
        settings = row.settings
        files = pictures[settings["series"], settings["step"]]
        tiles = [photo, *(_tile(files[i]) for i in _by_prompt(files)[:6])]
        words = [f"subject {settings['subject_fidelity']:.2f}  prompt {settings['prompt_fidelity']:.2f}"]
        lines.append((f"{settings['series']}\n{settings['step']} steps", tiles, ["photograph", *words]))
    return _draw_lines(lines, 7, file)


def _draw_lines(lines: Sequence[Line], width: int, file: Path) -> bool:
    figure = Figure(figsize=(1.3 + width * 0.95, sum(1.15 if heads else 0.97 for _, _, heads in lines)))
    grid = figure.subplots(
        len(lines), width, squeeze=False, height_ratios=[1.15 if heads else 0.97 for _, _, heads in lines]
    )
    for line, (name, tiles, heads) in zip(grid, lines, strict=True):
        for i, axes in enumerate(line):
            axes.axis("off")
            if i < len(tiles):
                axes.imshow(tiles[i], interpolation="nearest")
            if i < len(heads):
                axes.set_title(heads[i], fontsize=7, pad=2, loc="left")
        line[0].text(-0.12, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    figure.subplots_adjust(1.3 / (1.3 + width * 0.95), 0.005, 0.995, 0.985, wspace=0.05, hspace=0.05)
    figure.savefig(file, dpi=100, facecolor="white")
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(255).save(file, optimize=True)
    return True
