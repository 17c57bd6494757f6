"""Checkpoints side by side: a page of a run's samples, prompts down and steps across."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import darkroom
from darkroom.data.images import PictureError, open_picture
from darkroom.errors import InputError
from darkroom.report import html
from darkroom.run import PROMPTS, Run

MOST_STEPS = 24  # of a run; more are thinned out evenly, the last one stays
LARGEST_SIDE = 512
QUALITY = 85
STEP = re.compile(r"step-0*(\d+)\.\w+")
SLIDER = (
    '<label class="note">size <input type="range" min="80" max="512" value="200" '
    "oninput=\"document.documentElement.style.setProperty('--cell', this.value + 'px')\"></label>"
)


@dataclass(frozen=True)
class SampledRun:
    """A run's grids by step, what is in a grid's cells, and what the metrics say of the steps."""

    name: str
    run: Run
    grids: dict[int, Path]
    prompts: list[str]
    side: int
    heldout: dict[int, float]

    @property
    def best(self) -> int | None:
        """The step of the lowest held-out loss, of those with samples."""
        known = {step: loss for step, loss in self.heldout.items() if step in self.grids}
        return min(known, key=lambda step: known[step], default=None)


def write_checkpoints_page(paths: Sequence[Path | str], out: Path | str) -> Path:
    """Write one HTML file with the samples of runs, prompts down and steps across.

    InputError for a run without samples of prompts, or a path that is no run.
    """
    from darkroom.report.runs import check_target, write_page

    check_target(Path(out))
    if not paths:
        raise InputError("nothing to show", mend="give a run's folder")
    runs = [_read(Path(path)) for path in paths]
    body = "\n".join(_table(one) for one in runs)
    now = datetime.now(UTC)
    pictures = sum(len(one.prompts) * len(_steps(one)) for one in runs)
    content = html.page(
        ", ".join(one.name for one in runs),
        f"checkpoints side by side, {pictures} pictures, {now.day} {now:%B %Y}",
        f'<p class="note">Each row has the same prompt, seed and settings.</p>{SLIDER}\n{body}',
        f"Written by darkroom {darkroom.__version__} on {now:%Y-%m-%d %H:%M} UTC. "
        "One file; nothing is loaded from elsewhere.",
    )
    return write_page(Path(out), content)


def _read(path: Path) -> SampledRun:
    run = Run.open(path)
    found = ((STEP.fullmatch(file.name), file) for file in run.samples.glob("step-*"))
    grids = {int(named[1]): file for named, file in found if named}
    if not grids:
        raise InputError(f"'{path}' has no samples", mend="train with sample.every=STEPS and sample.prompts")
    recipe = run.recipe
    if recipe.get("task") == "autoencoder":
        raise InputError(f"'{path}' is an autoencoder's, whose samples have no prompts", mend="report alone")
    side = int(recipe["data"]["resolution"])
    rows = [row for row in run.metrics() if isinstance(row.get("heldout_loss"), (int, float))]
    cells = _cells_of(next(iter(grids.values())), side)
    prompts = [_words(one) for one in _prompts(run, recipe)][:cells]
    prompts += [f"picture {i + 1}" for i in range(len(prompts), cells)] if not prompts else []
    heldout = {int(row["step"]): float(row["heldout_loss"]) for row in rows}
    return SampledRun(run.path.resolve().name, run, dict(sorted(grids.items())), prompts, side, heldout)


def _prompts(run: Run, recipe: dict[str, Any]) -> list[Any]:
    """What was drawn: as the run noted it, or as its recipe says."""
    with suppress(OSError, ValueError, RecursionError):
        noted = json.loads((run.path / PROMPTS).read_text(encoding="utf-8"))
        if isinstance(noted, list) and all(_is_prompt(one) for one in noted):
            return noted
    return list(recipe.get("sample", {}).get("prompts") or ())


def _is_prompt(one: Any) -> bool:
    return isinstance(one, str) or (isinstance(one, dict) and "prompt" in one)


def _words(prompt: Any) -> str:
    """A prompt with what it has of its own, as text."""
    if isinstance(prompt, str):
        return prompt
    own = [f"{key} {value}" for key, value in prompt.items() if key != "prompt" and value is not None]
    return " · ".join([str(prompt["prompt"]), *own])


def _cells_of(grid: Path, side: int) -> int:
    with Image.open(grid) as image:
        return max(1, image.width // side) * max(1, image.height // side)


def _steps(one: SampledRun) -> list[int]:
    steps = list(one.grids)
    if len(steps) <= MOST_STEPS:
        return steps
    return [steps[i] for i in np.linspace(0, len(steps) - 1, MOST_STEPS).round().astype(int).tolist()]


def _table(one: SampledRun) -> str:
    steps = _steps(one)
    columns = [list(_cells(one.grids[step], one.side, len(one.prompts))) for step in steps]
    head = "".join(f"<th>{_head(one, step)}</th>" for step in steps)
    rows = []
    for i, prompt in enumerate(one.prompts):
        pictures = "".join(
            f'<td><img src="{column[i]}" alt="{html.escape(f"{prompt}, step {step}")}" loading="lazy"></td>'
            for step, column in zip(steps, columns, strict=True)
        )
        rows.append(f'<tr><th scope="row">{html.escape(prompt)}</th>{pictures}</tr>')
    left_out = len(one.grids) - len(steps)
    note = f'<p class="note">{left_out} steps between are left out.</p>' if left_out else ""
    table = (
        f'<div class="side-by-side"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    return html.section(one.name, note, table)


def _head(one: SampledRun, step: int) -> str:
    """A step, its held-out loss, and whether its checkpoint can be exported."""
    words = [f"step {step:,}"]
    if (loss := one.heldout.get(step)) is not None:
        words.append(f"held out {loss:.4g}" + (", best" if step == one.best else ""))
    if (one.run.checkpoints / f"step-{step:08d}").is_dir():
        words.append("checkpoint kept")
    return "<br>".join(map(html.escape, words))


def _cells(grid: Path, side: int, number: int) -> Iterator[str]:
    """The pictures of a grid as data URLs, in reading order."""
    try:
        sheet = open_picture(grid.read_bytes())
    except PictureError as error:
        raise InputError(f"'{grid}' is no picture that can be read: {error}") from error
    columns = max(1, sheet.width // side)
    for i in range(number):
        left, top = i % columns * side, i // columns * side
        cell = sheet.crop((left, top, left + side, top + side)).convert("RGB")
        cell.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
        buffer = io.BytesIO()
        cell.save(buffer, "WEBP", quality=QUALITY)
        yield f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
