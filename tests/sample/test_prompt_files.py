"""Files of prompts, wildcards and alternatives, X/Y grids, and formats of pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from darkroom.cli import app, main
from darkroom.errors import InputError
from darkroom.sample import expand, read_parameters, read_prompts


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["generate", "tiny", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return [Path(path) for path in json.loads(done.stdout)["pictures"]]


def test_a_file_holds_a_prompt_and_its_settings_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(
        '\ufeffa red circle\n\n# a note\n--prompt "a blue square" --steps 3 --seed 7 --cfg_scale 2.5 '
        '--width 32 --negative_prompt "dull, grey"\n',
        encoding="utf-8",
    )
    assert read_prompts(file) == [
        {"prompt": "a red circle"},
        {
            "prompt": "a blue square",
            "steps": 3,
            "seed": 7,
            "guidance": 2.5,
            "size": (32, 32),
            "negative": "dull, grey",
        },
    ]
    first, second, _ = run("--prompts", str(file), "--steps", "2", "--out", str(tmp_path / "out"))
    assert read_parameters(first)["prompt"] == "a red circle"
    told = read_parameters(second)
    assert (told["prompt"], told["steps"], told["seed"], told["guidance"]) == ("a blue square", 3, 7, 2.5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--steps 3", "no --prompt"),
        ("--prompt", "without a value"),
        ("--prompt x --steps many", "a number"),
        ("--prompt x --model y", "--model"),
        ('--prompt "x', "no closing quotation"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "p.txt").write_text(f"a circle\n{line}\n")
    with pytest.raises(InputError, match=f"p.txt:2.*{message}"):
        read_prompts(tmp_path / "p.txt")


def test_wildcards_are_drawn_by_the_seed(tmp_path: Path) -> None:
    (tmp_path / "animal.txt").write_text("fox\nowl\n# no\n{red|grey} cat\n")
    (tmp_path / "loop.txt").write_text("__loop__ again\n")
    drawn = {expand("a __animal__ in {oil|ink}", seed, tmp_path) for seed in range(300)}
    animals = ("fox", "owl", "red cat", "grey cat")
    assert drawn == {f"a {animal} in {way}" for animal in animals for way in ("oil", "ink")}
    assert expand("a __animal__", 3, tmp_path) == expand("a __animal__", 3, tmp_path)
    assert expand("{a fox}", 1, tmp_path) == "{a fox}"
    for prompt, message in (
        ("__loop__", "holds itself"),
        ("__cat__", "allowed: animal, loop"),
        ("__../x__", "wildcard"),
    ):
        with pytest.raises(InputError, match=message):
            expand(prompt, 0, tmp_path)


def test_each_picture_has_a_prompt_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "animal.txt").write_text("fox\nowl\ncat\ndog\n")
    made = run(
        "a __animal__",
        "--wildcards",
        str(tmp_path),
        "--num",
        "4",
        "--steps",
        "1",
        "--seed",
        "5",
        "--out",
        str(tmp_path / "out"),
    )
    told = [read_parameters(path) for path in made[:4]]
    assert [one["seed"] for one in told] == [5, 6, 7, 8]
    assert [one["prompt"] for one in told] == [expand("a __animal__", 5 + i, tmp_path) for i in range(4)]


def test_a_grid_shows_every_pair(tmp_path: Path) -> None:
    *made, sheet = run("a circle", "--grid", "steps=1,2,3", "--grid", "guidance=1,4", "--out", str(tmp_path))
    told = [(one["guidance"], one["steps"]) for one in map(read_parameters, made)]
    assert told == [(guidance, steps) for guidance in (1.0, 4.0) for steps in (1, 2, 3)]
    assert sheet.name == "grid-00000.png"
    pixels = np.asarray(Image.open(sheet).convert("RGB"))
    [alone] = run("a circle", "--steps", "2", "--guidance", "4", "--out", str(tmp_path / "alone"))
    cell = np.asarray(Image.open(alone).convert("RGB"))
    views = np.lib.stride_tricks.sliding_window_view(pixels, cell.shape)[:, :, 0]
    assert (views == cell).all((2, 3, 4)).any()  # the very picture is on the sheet
    assert not (views == 255 - cell).all((2, 3, 4)).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "colour=1,2"], "NAME=A,B,C"),
        (["--grid", "steps=a"], "numbers for steps"),
        (["--grid", "steps=1", "--grid", "steps=2"], "one or two"),
        (["--grid", "steps=1", "--num", "2"], "one prompt"),
        (["--prompts", "none.txt"], "and --prompts"),
        (["--format", "gif"], "allowed: png, jpeg, webp"),
        (["--hires-upscaler", "lanczos"], "--hires-upscaler without --hires"),
        (["--image-encoder", "clip"], "--image-encoder without --control"),
        (["--variation-seed", "3"], "--variation-seed without --variation-strength"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    told = ["generate", "tiny", "a circle", "--steps", "1", *arguments, "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as left:
        main(told)
    assert left.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
    assert len([line for line in error if not line.startswith("note:")]) == 1


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_other_formats_keep_the_parameters(tmp_path: Path, kind: str) -> None:
    [file] = run("a červený circle, 圓", "--steps", "2", "--format", kind, "--out", str(tmp_path))
    assert file.suffix == {"jpeg": ".jpg", "webp": ".webp"}[kind]
    told = read_parameters(file)
    assert (told["prompt"], told["steps"], told["model"]) == ("a červený circle, 圓", 2, "tiny")
    with Image.open(file) as image:
        assert image.format == kind.upper()
        comment = image.getexif().get_ifd(0x8769)[0x9286]  # as A1111 reads it
    assert comment.removeprefix(b"UNICODE\0").decode("utf-16-be").startswith("a červený circle, 圓\n")


def test_lines_end_at_line_breaks_alone_and_are_utf8(tmp_path: Path) -> None:
    (tmp_path / "hat.txt").write_text("red\u2028hat\nred\u2028hat\n")
    assert expand("a __hat__", 0, tmp_path) == "a red\u2028hat"
    assert [line["prompt"] for line in read_prompts(tmp_path / "hat.txt")] == ["red\u2028hat"] * 2
    (tmp_path / "hat.txt").write_bytes("шляпа".encode("cp1251"))
    with pytest.raises(InputError, match=r"hat.txt' is not UTF-8 at byte 0; save it as UTF-8"):
        expand("a __hat__", 0, tmp_path)
