"""The sections on training runs: figures, curves, samples by step, settings, environment, bill."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np

import darkroom
from darkroom.bill import Bill, format_bytes, format_number, format_seconds, format_usd
from darkroom.errors import InputError
from darkroom.hardware.system import write_atomically
from darkroom.report import html, plots
from darkroom.report.measurements import measurement_sections
from darkroom.report.planned import RunData, planned_table, plans_of
from darkroom.report.plots import Curve
from darkroom.run import ENVIRONMENT, RECIPE, Run

_PICTURES = (".png", ".jpg", ".jpeg", ".webp")
_MOST_GRIDS = 13
_SHOUTED = ("psnr", "fid", "kid", "cmmd", "clip")
_NOTHING = "–"


def _run_sections(
    runs: Sequence[Run], highlights: Mapping[str, str], plans: Mapping[Path, Mapping[str, Any]]
) -> list[str]:
    """Everything about the runs, over each other where there are several; first what is to stand out.

    `plans` are by the runs' folders.
    """
    first = [(name, value, "") for name, value in highlights.items()]
    if not runs:
        return [html.cards([], first)]
    runs_read = [_read(run, name, plans) for run, name in zip(runs, _names(runs), strict=True)]
    alone = runs_read[0] if len(runs_read) == 1 else None
    return [
        html.legend([one.name for one in runs_read]) if not alone else "",
        html.cards(_figures(alone) if alone else [], first),
        "" if alone else _overview(runs_read),
        html.section("Course", html.grid(_curves(runs_read))),
        *(_samples(one, titled=alone is None) for one in runs_read),
        html.section(
            "Planned and measured", *(planned_table(one, titled=alone is None) for one in runs_read)
        ),
        html.section(
            "Bill", html.grid((_bill(one, titled=alone is None) for one in runs_read), "columns two")
        ),
        html.section("Settings", _settings(runs_read)),
        html.section("Environment", _environment(runs_read)),
    ]


def _read(run: Run, name: str, plans: Mapping[Path, Mapping[str, Any]]) -> RunData:
    recipe, environment = _try(run, "recipe"), _try(run, "environment")
    plan = plans.get(run.path)
    return RunData(name, run, run.metrics(), recipe, environment, run.bill(), plan, _grids(run))


def _try(run: Run, part: str) -> dict[str, Any]:
    """A part of a run, empty where its file is missing."""
    there = (run.path / {"recipe": RECIPE, "environment": ENVIRONMENT}[part]).exists()
    found: dict[str, Any] = getattr(run, part) if there else {}
    return found


def _names(runs: Sequence[Run]) -> list[str]:
    """Folder names, with as much of the path as tells them apart."""
    parts = [run.path.resolve().parts for run in runs]
    depth = 1
    while depth < min(map(len, parts)) and len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


# ---- figures first


def _figures(one: RunData) -> list[tuple[str, str, str]]:
    values = [
        ("steps", _count(_last(one.curve("step"))), _of_steps(one)),
        ("training loss", _loss(_smoothed_end(one.curve("loss"))), "smoothed, at the end"),
        (
            "held-out loss",
            _loss(_last(one.held_out())),
            "mean over fixed timesteps" if one.by_timestep() else "",
        ),
        ("images/s", _loss(_median(one.curve("images_per_s"))), "median"),
    ]
    if one.bill:
        values += _bill_figures(one.bill)
    return [value for value in values if value[1]]


def _bill_figures(bill: Bill) -> list[tuple[str, str, str]]:
    return [
        ("wall time", format_seconds(bill.wall_s), f"{bill.sessions} sessions" if bill.sessions > 1 else ""),
        ("device-hours", format_number(bill.device_hours), bill.device),
        ("cost", format_usd(bill.usd) if bill.usd is not None else "", bill.price_note()),
        ("peak memory", format_bytes(bill.peak_memory_bytes) if bill.peak_memory_bytes else "", ""),
    ]


def _overview(runs_read: Sequence[RunData]) -> str:
    header = [
        "run",
        "steps",
        "loss",
        "held-out loss",
        "images/s",
        "wall time",
        "device-hours",
        "cost",
        "peak memory",
    ]
    rows = []
    for one in runs_read:
        bill = {label: value for label, value, _ in _bill_figures(one.bill)} if one.bill else {}
        rows.append(
            [
                one.name,
                _count(_last(one.curve("step"))),
                _loss(_smoothed_end(one.curve("loss"))),
                _loss(_last(one.held_out())),
                _loss(_median(one.curve("images_per_s"))),
                *(bill.get(name, "") for name in ("wall time", "device-hours", "cost", "peak memory")),
            ]
        )
    return f'<div style="margin-top: 20px">{html.table(header, rows, frozenset(range(1, 9)))}</div>'


def _of_steps(one: RunData) -> str:
    planned = one.recipe.get("train", {}).get("steps") if isinstance(one.recipe.get("train"), dict) else None
    return f"of {planned:,}" if isinstance(planned, int) else ""


# ---- curves


def _curves(runs_read: Sequence[RunData]) -> Iterator[str]:
    losses, held = [one.curve("loss") for one in runs_read], [one.held_out() for one in runs_read]
    if any(len(curve.x) for curve in (*losses, *held)):
        dashed = "; dashed with dots: held out" if any(len(curve.x) for curve in held) else ""
        yield html.plot(
            "Loss",
            f"thin: each step; thick: smoothed{dashed}",
            plots.curves(losses, label="Loss by step", held_out=[curve for curve in held if len(curve.x)]),
        )
    for one in runs_read:
        found = one.by_timestep()
        if found:
            whose = f" · {one.name}" if len(runs_read) > 1 else ""
            yield html.plot(
                f"Held-out loss by timestep{whose}",
                "fixed pictures and noise; a high timestep is mostly noise",
                plots.by_timestep(found, label=f"Held-out loss by timestep {one.name}"),
            )
    rates, norms = [one.curve("lr") for one in runs_read], [one.curve("grad_norm") for one in runs_read]
    if any(len(curve.x) for curve in (*rates, *norms)):
        yield html.plot(
            "Learning rate and gradient norm",
            "the norm is taken before clipping",
            plots.two_rows(
                rates, norms, labels=("rate", "norm"), label="Learning rate and gradient norm by step"
            ),
        )
    for key in sorted(
        {key for one in runs_read for row in one.rows for key in row if _is_score(key, row[key])}
    ):
        scores = [one.curve(key) for one in runs_read]
        if max(len(curve.x) for curve in scores) < 2:
            continue
        name, _, unit = key.removeprefix("heldout_").partition("_")
        title = f"Held-out {name.upper() if name in _SHOUTED else name}"
        yield html.plot(
            title, unit.replace("_", " ").replace("db", "dB"), plots.curves([], label=title, held_out=scores)
        )
    speeds = [one.curve("images_per_s") for one in runs_read]
    if any(len(curve.x) for curve in speeds):
        yield html.plot(
            "Throughput", "images a second", plots.curves(speeds, label="Images a second by step")
        )


def _is_score(key: str, value: Any) -> bool:
    """Whether a metric is a held-out number besides the loss, such as `heldout_psnr_db`."""
    return key.startswith("heldout_") and key != "heldout_loss" and isinstance(value, (int, float))


# ---- samples


def _grids(run: Run) -> list[tuple[int, Path]]:
    """One picture a step: the grid where there is one, by the number in its name or its folder's."""
    found: dict[int, Path] = {}
    if not run.samples.is_dir():
        return []
    files = (path for path in run.samples.rglob("*") if path.suffix.lower() in _PICTURES)
    for path in sorted(files, key=lambda path: ("grid" not in path.stem, str(path))):
        numbers = re.findall(r"\d+", str(path.relative_to(run.samples).parent)) or re.findall(
            r"\d+", path.stem
        )
        if numbers:
            found.setdefault(int(numbers[0]), path)
    return sorted(found.items())


def _samples(one: RunData, *, titled: bool) -> str:
    if not one.samples:
        return ""
    *earlier, (last_step, last) = one.samples
    if len(earlier) > _MOST_GRIDS - 1:
        keep = np.linspace(0, len(earlier) - 1, _MOST_GRIDS - 1).round().astype(int)
        earlier = [earlier[i] for i in keep]
    frames = [html.frame(last, f"step {last_step:,}", first=True)]
    frames += [html.frame(path, f"step {step:,}") for step, path in reversed(earlier)]
    title = f"Samples by step · {one.name}" if titled else "Samples by step"
    prompts = (
        one.recipe.get("sample", {}).get("prompts") if isinstance(one.recipe.get("sample"), dict) else None
    )
    words = f'<p class="note">{html.escape(" · ".join(map(str, prompts[:16])))}</p>' if prompts else ""
    return html.section(title, words, html.grid(frames, "film"))


# ---- bill, settings, environment


def _bill(one: RunData, *, titled: bool) -> str:
    if one.bill is None:
        return ""
    bill = one.bill
    rows = {
        "device": f"{bill.num_devices} x {bill.device}" if bill.num_devices > 1 else bill.device,
        "wall time": format_seconds(bill.wall_s),
        "device-hours": f"{bill.device_hours:.4g}",
        "cost": f"{format_usd(bill.usd)} at {bill.price_note()}"
        if bill.usd is not None
        else "no price known",
        "price from": bill.price_source or "",
        "a thousand images": format_usd(bill.usd_per_image * 1000) if bill.usd_per_image else "",
        "energy": f"{format_number(bill.kwh)} kWh ({bill.kwh_source})" if bill.kwh is not None else "",
        "peak memory": format_bytes(bill.peak_memory_bytes),
        "peak of the host": format_bytes(bill.host_memory_bytes)
        if bill.host_memory_bytes not in (0, bill.peak_memory_bytes)
        else "",
        "images": f"{bill.images:,}",
        "sessions": str(bill.sessions),
    }
    box = html.pairs({key: value for key, value in rows.items() if value}, one.name if titled else "")
    parts = _parts(bill) if bill.parts else ""
    return f'<div class="stack">{box}{parts}</div>' if titled else box + parts


def _parts(bill: Bill) -> str:
    """Where the wall time went, what no part names as 'other'."""
    other = bill.wall_s - sum(bill.parts.values())
    parts = dict(bill.parts) | ({"other": other} if other > 0.005 * bill.wall_s else {})
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    whole = sum(parts.values()) or 1.0
    names = [f"{name} {format_seconds(value)} ({value / whole:.0%})" for name, value in ordered]
    svg = plots.shares(parts, label=f"Where the time went {bill.device} {bill.wall_s:.3f}")
    return html.plot("Where the time went", "", svg, html.legend(names, "key"))


def _settings(runs_read: Sequence[RunData]) -> str:
    if len(runs_read) > 1:
        return _compared([_flat(one.recipe) for one in runs_read], [one.name for one in runs_read])
    groups: dict[str, dict[str, str]] = {"recipe": {}}
    for key, value in runs_read[0].recipe.items():
        if isinstance(value, Mapping):
            flat = _flat(value).items()
            groups[key] = {name: _placeless(text) for name, text in flat if text != _NOTHING}
        else:
            groups["recipe"] |= _flat({key: value})
    return html.grid((html.pairs(rows, name) for name, rows in groups.items() if rows), "columns")


def _environment(runs_read: Sequence[RunData]) -> str:
    tables = [_environment_rows(one.environment) for one in runs_read]
    if len(runs_read) > 1:
        return _compared(tables, [one.name for one in runs_read])
    versions = runs_read[0].environment.get("versions")
    parts = [html.pairs(tables[0])]
    if isinstance(versions, Mapping):
        parts.append(html.pairs({name: str(version) for name, version in versions.items()}))
    return html.grid(parts, "columns two")


def _environment_rows(environment: Mapping[str, Any]) -> dict[str, str]:
    """Machine, threads, commit: what a reader wants first; versions stand apart."""
    here = environment.get("machine")
    rows: dict[str, str] = {}
    if isinstance(here, Mapping):
        rows = {
            "machine": str(here.get("name", "")),
            "processor class": str(here.get("cpu_class", "")),
            "system": str(here.get("system", "")),
            "memory": format_bytes(here["memory_bytes"]) if here.get("memory_bytes") else "",
        }
    git = environment.get("git")
    if isinstance(git, Mapping):
        rows["commit"] = f"{str(git.get('commit', ''))[:12]}{' + changes' if git.get('changed') else ''}"
    shown = ("machine", "git", "versions", "sessions", "resident_bytes", "fingerprints")
    rest = {k: v for k, v in environment.items() if k not in shown}
    if isinstance(store := rest.get("store"), Mapping):  # its hashes are for going on, not for readers
        rest["store"] = {k: v for k, v in store.items() if k not in ("contents", "chosen")}
    return {key: value for key, value in (rows | _flat(rest)).items() if value}


def _compared(tables: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """Side by side, what differs first and set off."""
    keys = list(dict.fromkeys(key for one in tables for key in one))
    differing = [key for key in keys if len({one.get(key) for one in tables}) > 1]
    cells = {key: _placeless_row([one.get(key, "") for one in tables]) for key in keys}
    rows = [[key, *map(html.Marked, cells[key])] for key in differing]
    rows += [[key, *cells[key]] for key in keys if key not in differing]
    return html.table(["", *names], rows) if rows else ""


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            flat |= _flat({str(i): one for i, one in enumerate(value)}, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _text(value)
    return flat


def _placeless(text: str) -> str:
    """A file's or folder's name without the path to it, which Windows' rules read on every system: a report
    is sent to others.
    """
    is_place = re.fullmatch(r"(/|~/|[A-Za-z]:[\\/])[^,\n]*[\\/].+", text)
    return PureWindowsPath(text).name or text if is_place else text


def _placeless_row(texts: Sequence[str]) -> list[str]:
    """Several runs' values likewise, unless others would then look the same."""
    short = [_placeless(text) for text in texts]
    return short if len(set(short)) == len(set(texts)) else list(texts)


def _text(value: Any) -> str:
    if value is None or value == {} or value == []:
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value[:12])) + (f" … ({len(value)})" if len(value) > 12 else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _last(curve: Curve) -> float | None:
    return float(curve.y[-1]) if len(curve.y) else None


def _smoothed_end(curve: Curve) -> float | None:
    return float(plots.smooth(curve.y, plots.smoothing(len(curve.y)))[-1]) if len(curve.y) else None


def _median(curve: Curve) -> float | None:
    return float(np.median(curve.y)) if len(curve.y) else None


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


PICTURES = (".png", ".jpg", ".jpeg", ".webp")
_MOST_PICTURES = 64


def write_report(
    paths: Sequence[Path | str] | Path | str,
    out: Path | str,
    *,
    title: str = "",
    highlights: Mapping[str, str] | None = None,
    plan: bool = False,
) -> Path:
    """Write one HTML file from run folders, CSVs of measurements, pictures and folders of pictures.

    Several runs are laid over each other. `highlights` are figures to show first, by name (a score, say).
    A run's plan stands by what was measured; with `plan` that of a run which kept none is made now, which
    may take 20 s.
    What a run has not is left out. Raises InputError for a path that is none of these.
    """
    given = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    check_target(Path(out))
    if not given:
        raise InputError("nothing to report on", mend="give run folders, CSVs of measurements or pictures")
    runs = [Run.open(path) for path in given if (path / "recipe.yaml").is_file()]
    tables = [path for path in given if path.suffix.lower() == ".csv" and path.is_file()]
    taken = {run.path for run in runs} | set(tables)
    pictures = [found for path in given if path not in taken for found in _pictures(path)]
    body = [
        *_run_sections(runs, highlights or {}, plans_of(runs, make=plan)),
        html.section(
            "Pictures", html.grid((html.frame(path, path.stem) for path in pictures[:_MOST_PICTURES]), "film")
        ),
        *(part for path in tables for part in measurement_sections(path)),
    ]
    now = datetime.now(UTC)
    content = html.page(
        title or _title(given),
        f"{_what(runs, tables, pictures)}, {now.day} {now:%B %Y}",
        "\n".join(part for part in body if part),
        f"Written by darkroom {darkroom.__version__} on {now:%Y-%m-%d %H:%M} UTC. "
        "One file; nothing is loaded from elsewhere.",
    )
    return write_page(Path(out), content)


def _pictures(path: Path) -> list[Path]:
    if path.is_file() and path.suffix.lower() in PICTURES:
        return [path]
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix.lower() in PICTURES)
        if found:
            return found
    what = "no such file or folder" if not path.exists() else "neither a run, a CSV nor pictures"
    raise InputError(
        f"'{path}': {what}", allowed="run folders, CSVs of measurements, pictures, folders of pictures"
    )


def _title(given: Sequence[Path]) -> str:
    names = [path.resolve().name.removesuffix(".csv") for path in given]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _what(runs: Sequence[Run], tables: Sequence[Path], pictures: Sequence[Path]) -> str:
    counts = ((len(runs), "run"), (len(tables), "table"), (len(pictures), "picture"))
    return ", ".join(f"{n} {name}{'s' if n > 1 else ''}" for n, name in counts if n)


def check_target(out: Path) -> None:
    """InputError where a report would overwrite something else."""
    if out.exists() and out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"'{out}' is there already, and is no report", mend="choose another name")


def write_page(target: Path, content: str) -> Path:
    """Write a page atomically."""
    write_atomically(target, content)
    return target
