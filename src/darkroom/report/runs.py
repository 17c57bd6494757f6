"""The sections on training runs: figures, curves, samples by step, settings, environment, bill, and what was
planned next to what was measured: time, speed, memory and dollars, each with the plan's error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PureWindowsPath
from statistics import median
from typing import Any

import numpy as np

import darkroom
from darkroom.bill import Bill, format_bytes, format_number, format_seconds, format_usd
from darkroom.errors import DarkroomError, InputError
from darkroom.hardware import machine
from darkroom.hardware.machine import Machine
from darkroom.hardware.system import write_atomically
from darkroom.report import html
from darkroom.report.html import Curve, as_curve
from darkroom.report.measurements import measurement_sections
from darkroom.run import ENVIRONMENT, RECIPE, Run

_PICTURES = (".png", ".jpg", ".jpeg", ".webp")
_MOST_GRIDS = 13
_SHOUTED = ("psnr", "fid", "kid", "cmmd", "clip")
_NOTHING = "–"
_HEADER = ("", "planned", "measured", "plan's error")
_CPU_MEMORY = (
    "memory on a CPU is of the whole process: what its allocator keeps of freed blocks is planned as a fifth "
    "of a step's activations, or 85 % with an adapter, a new word or checkpointing"
)


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
            "Planned and measured", *(_planned_table(one, titled=alone is None) for one in runs_read)
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
            html.curves(losses, label="Loss by step", held_out=[curve for curve in held if len(curve.x)]),
        )
    for one in runs_read:
        found = one.by_timestep()
        if found:
            whose = f" · {one.name}" if len(runs_read) > 1 else ""
            yield html.plot(
                f"Held-out loss by timestep{whose}",
                "fixed pictures and noise; a high timestep is mostly noise",
                html.by_timestep(found, label=f"Held-out loss by timestep {one.name}"),
            )
    rates, norms = [one.curve("lr") for one in runs_read], [one.curve("grad_norm") for one in runs_read]
    if any(len(curve.x) for curve in (*rates, *norms)):
        yield html.plot(
            "Learning rate and gradient norm",
            "the norm is taken before clipping",
            html.two_rows(
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
            title, unit.replace("_", " ").replace("db", "dB"), html.curves([], label=title, held_out=scores)
        )
    speeds = [one.curve("images_per_s") for one in runs_read]
    if any(len(curve.x) for curve in speeds):
        yield html.plot("Throughput", "images a second", html.curves(speeds, label="Images a second by step"))


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
    svg = html.shares(parts, label=f"Where the time went {bill.device} {bill.wall_s:.3f}")
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
    return float(html.smooth(curve.y, html.smoothing(len(curve.y)))[-1]) if len(curve.y) else None


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
        *_run_sections(runs, highlights or {}, _plans_of(runs, make=plan)),
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


# ---- planned and measured


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


def _plans_of(runs: Sequence[Run], *, make: bool) -> dict[Path, Mapping[str, Any]]:
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


def _planned_table(one: RunData, *, titled: bool) -> str:
    """The table of one run; nothing without a plan or a bill."""
    if one.plan is None or one.bill is None or not one.rows:
        return ""
    found = list(_pairs(one.plan, one.bill, one.rows, one.recipe, one.environment))
    if not found:
        return ""
    title = f"<h3>{html.escape(one.name)}</h3>" if titled else ""
    table = html.table(_HEADER, [pair.line() for pair in found], frozenset((1, 2, 3)))
    return (
        f'{title}{table}<p class="note" style="margin-top: 8px">{html.escape(_note(one.plan, one.bill))}</p>'
    )


def _pairs(
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
    return "; ".join([*parts, *([] if _on_gpu(plan) else [_CPU_MEMORY])]) + "."
