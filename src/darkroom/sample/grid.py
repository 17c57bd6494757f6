"""X/Y grids: one picture for every pair of settings, on one sheet with its labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from darkroom.errors import InputError

NUMBERS = {
    "steps": int,
    "seed": int,
    "guidance": float,
    "guidance_rescale": float,
    "eta": float,
    "strength": float,
    "clip_skip": int,
}
WORDS = ("solver", "spacing", "negative", "prompt", "weighting")
MAX_CELLS = 400
LABEL_SIZE, GAP = 14, 6


def read_axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Axes such as `steps=4,8` and `guidance=3,7`: one or two. InputError for what is no setting or value.

    Words are parted by commas too, or by | where they hold commas themselves.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if not equals or (name not in NUMBERS and name not in WORDS):
            raise InputError(f"--grid {text}", allowed="NAME=A,B,C with " + ", ".join((*NUMBERS, *WORDS)))
        values = [value.strip() for value in rest.split("|" if "|" in rest else ",")]
        try:
            axes[name] = [NUMBERS[name](value) for value in values] if name in NUMBERS else values
        except ValueError as error:
            raise InputError(f"--grid {text}", allowed=f"numbers for {name}") from error
    if not 1 <= len(axes) <= 2 or len(axes) < len(texts):
        raise InputError(f"--grid with {len(texts)} axes", allowed="one or two, each of its own setting")
    cells = 1
    for values in axes.values():
        cells *= len(values)
    if cells > MAX_CELLS:
        raise InputError(f"--grid of {cells} pictures", allowed=f"up to {MAX_CELLS}")
    return axes


def cells(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The settings of each picture, row by row: the first axis runs to the right."""
    (x, across), *rest = axes.items()
    if not rest:
        return [{x: value} for value in across]
    [(y, down)] = rest
    return [{x: right, y: below} for below in down for right in across]


def sheet(images: Sequence[Image.Image], axes: Mapping[str, Sequence[Any]]) -> Image.Image:
    """Pictures in the order of `cells` on one sheet, with the settings above and to the left."""
    (x, across), *rest = axes.items()
    y, down = rest[0] if rest else ("", [""])
    font = ImageFont.load_default(LABEL_SIZE)
    tops, lefts = [f"{x} {value}" for value in across], [f"{y} {value}" if y else "" for value in down]
    width, height = max(image.width for image in images), max(image.height for image in images)
    cell = max(width, *(_wide(font, label) for label in tops))
    left = max(_wide(font, label) for label in lefts) + (2 * GAP if y else 0)
    top = LABEL_SIZE + 2 * GAP
    made = Image.new("RGB", (left + len(across) * (cell + GAP), top + len(down) * (height + GAP)), "white")
    draw = ImageDraw.Draw(made)
    for column, label in enumerate(tops):
        draw.text((left + column * (cell + GAP) + cell // 2, GAP), label, "black", font, anchor="ma")
    for row, label in enumerate(lefts):
        draw.text((GAP, top + row * (height + GAP) + height // 2), label, "black", font, anchor="lm")
    for i, image in enumerate(images):
        row, column = divmod(i, len(across))
        at = left + column * (cell + GAP) + (cell - image.width) // 2, top + row * (height + GAP)
        made.paste(image, at)
    return made


def save_sheet(images: Sequence[Image.Image], axes: Sequence[str], out_dir: str | Path) -> Path:
    """Write the sheet as `grid-00000.png`, under the first number that is free."""
    made, folder = sheet(images, read_axes(axes)), Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for number in count():
        path = folder / f"grid-{number:05d}.png"
        with suppress(FileExistsError), path.open("xb") as file:
            made.save(file, "PNG")
            return path
    raise AssertionError("numbers do not end")


def _wide(font: Any, text: str) -> int:
    return int(font.getlength(text)) + 1
