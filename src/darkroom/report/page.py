"""The report: what was given is sorted into runs, tables and pictures, and set on one page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import darkroom
from darkroom.errors import InputError
from darkroom.report import html
from darkroom.report.measurements import measurement_sections
from darkroom.report.planned import plans_of
from darkroom.report.runs import run_sections
from darkroom.run import Run

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
    A run's plan stands beside what was measured; with `plan` that of a run which kept none is made now, which
    may take 20 s.
    What a run has not is left out. Raises InputError for a path that is none of these.
    """
    given = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    if not given:
        raise InputError("nothing to report on", mend="give run folders, CSVs of measurements or pictures")
    runs = [Run.open(path) for path in given if (path / "recipe.yaml").is_file()]
    tables = [path for path in given if path.suffix.lower() == ".csv" and path.is_file()]
    taken = {run.path for run in runs} | set(tables)
    pictures = [found for path in given if path not in taken for found in _pictures(path)]
    body = [
        *run_sections(runs, highlights or {}, plans_of(runs, make=plan)),
        html.section(
            "Pictures", html.grid((html.frame(path, path.stem) for path in pictures[:_MOST_PICTURES]), "film")
        ),
        *(part for path in tables for part in measurement_sections(path)),
    ]
    now = datetime.now(UTC)
    content = html.page(
        title or _title(given),
        f"{_what(runs, tables, pictures)}, {now:%-d %B %Y}",
        "\n".join(part for part in body if part),
        f"Written by darkroom {darkroom.__version__} on {now:%Y-%m-%d %H:%M} UTC. "
        "One file; nothing is loaded from elsewhere.",
    )
    return _write(Path(out), content)


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


def _write(target: Path, content: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.write_text(content, encoding="utf-8")
    beside.replace(target)
    return target
