"""The page of checkpoints side by side: every picture in its row and column."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from darkroom.cli import app
from darkroom.errors import InputError
from darkroom.report.checkpoints import MOST_STEPS, write_checkpoints_page
from darkroom.run import Run
from darkroom.sample.pictures import make_grid

SIDE = 16
PROMPTS = ["a <red> dog", {"prompt": "a cat", "seed": 7, "steps": None}, "a bird"]


def colour(i: int, step: int) -> tuple[int, int, int]:
    return 80 * i, step % 256, 128


def run_of(folder: Path, steps: list[int], *, task: str = "lora", noted: bool = True) -> Run:
    recipe = f"task: {task}\ndata: {{resolution: {SIDE}}}\nsample: {{prompts: [one, two]}}\n"
    run = Run.create(folder, recipe, {})
    for step in steps:
        cells = [Image.new("RGB", (SIDE, SIDE), colour(i, step)) for i in range(3)]
        make_grid(cells).save(run.samples / f"step-{step:08d}.png")
    run.log(*({"step": step, "heldout_loss": abs(step - 200) / 1000 + 0.1} for step in steps))
    if noted:
        (run.path / "prompts.json").write_text(json.dumps(PROMPTS))
    (run.checkpoints / "step-00000300").mkdir()
    return run


def table_of(page: Path) -> tuple[list[str], dict[str, list[tuple[int, int, int]]]]:
    """The heads of the columns, and the colours of each row's pictures."""
    text = page.read_text(encoding="utf-8")
    heads = [re.sub("<br>", " | ", head) for head in re.findall(r"<th>(.*?)</th>", text) if head]
    rows = {}
    for row in re.findall(r'<tr><th scope="row">(.*?)</tr>', text):
        name, _, pictures = row.partition("</th>")
        found = [base64.b64decode(data) for data in re.findall(r"base64,([^\"]+)", pictures)]
        middle = [Image.open(io.BytesIO(one)).convert("RGB").getpixel((8, 8)) for one in found]
        rows[html.unescape(name)] = middle
    return heads, rows


def test_each_picture_stands_at_its_prompt_and_step(tmp_path: Path) -> None:
    run = run_of(tmp_path / "mine", [100, 200, 300])
    page = write_checkpoints_page([run.path], tmp_path / "page.html")
    heads, rows = table_of(page)
    assert heads == [
        "step 100 | held out 0.2",
        "step 200 | held out 0.1, best",
        "step 300 | held out 0.2 | checkpoint kept",
    ]
    assert list(rows) == ["a <red> dog", "a cat · seed 7", "a bird"]
    for i, pictures in enumerate(rows.values()):
        for step, found in zip([100, 200, 300], pictures, strict=True):
            assert np.abs(np.subtract(found, colour(i, step))).max() < 12, (i, step)
    text = page.read_text()
    assert 'src="http' not in text
    assert str(tmp_path) not in text


def test_without_notes_the_recipe_says_what_was_drawn_and_many_steps_are_thinned_out(tmp_path: Path) -> None:
    run = run_of(tmp_path / "mine", list(range(10, 1010, 10)), noted=False)
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(run.path), "--checkpoints", "--out", str(page)])
    assert result.exit_code == 0, result.output
    heads, rows = table_of(page)
    assert list(rows) == ["one", "two"]
    assert len(heads) == MOST_STEPS
    assert heads[0].startswith("step 10 ")
    assert heads[-1].startswith("step 1,000 ")
    assert "76 steps between are left out" in page.read_text()


def test_what_has_no_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no samples; train with sample.every"):
        write_checkpoints_page([run_of(tmp_path / "a", []).path], tmp_path / "page.html")
    with pytest.raises(InputError, match="an autoencoder's, whose samples have no prompts"):
        write_checkpoints_page([run_of(tmp_path / "b", [1], task="autoencoder").path], tmp_path / "page.html")
    with pytest.raises(InputError, match="nothing to show"):
        write_checkpoints_page([], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
