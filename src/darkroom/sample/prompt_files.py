"""Many pictures from one command: files of prompts with settings, wildcards, and X/Y grids on one sheet."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from darkroom.errors import InputError
from darkroom.hardware.system import read_typed

MAX_LINES, MAX_DEPTH = 10_000, 20
WILDCARD = re.compile(r"__([\w./-]+?)__")
BRACES = re.compile(r"\{([^{}]*\|[^{}]*)\}")
OPTIONS: dict[str, tuple[str, Any]] = {
    "prompt": ("prompt", str),
    "negative": ("negative", str),
    "negative_prompt": ("negative", str),
    "seed": ("seed", int),
    "steps": ("steps", int),
    "guidance": ("guidance", float),
    "cfg_scale": ("guidance", float),
    "solver": ("solver", str),
    "sampler_name": ("solver", str),
    "width": ("width", int),
    "height": ("height", int),
    "num": ("num", int),
    "batch_size": ("num", int),
    "strength": ("strength", float),
    "denoising_strength": ("strength", float),
    "variation_seed": ("variation_seed", int),
    "subseed": ("variation_seed", int),
    "variation_strength": ("variation_strength", float),
    "subseed_strength": ("variation_strength", float),
}
"""What a line may say, in darkroom's words or those of A1111's 'Prompts from file'."""


def read_prompts(file: str | Path) -> list[dict[str, Any]]:
    """A file's lines, each with its prompt and settings: a plain prompt, or `--prompt "..." --steps 20 ...`.

    Empty lines and those that begin with # are passed over. InputError names the line that cannot be read.
    """
    try:
        text = read_typed(Path(file))
    except OSError as error:
        raise InputError(f"'{file}' cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"'{file}' is not UTF-8 at byte {error.start}", mend="save it as UTF-8") from error
    lines = [(i, line.strip()) for i, line in enumerate(text.split("\n"), start=1)]
    found = [_read_line(f"{file}:{i}", line) for i, line in lines if line and not line.startswith("#")]
    if not 0 < len(found) <= MAX_LINES:
        raise InputError(f"'{file}' has {len(found)} prompts", allowed=f"1 to {MAX_LINES}")
    return found


def _read_line(place: str, line: str) -> dict[str, Any]:
    if not line.startswith("--"):
        return {"prompt": line}
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InputError(f"{place}: {str(error).lower()}") from error
    settings: dict[str, Any] = {}
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        if name not in OPTIONS:
            raise InputError(f"{place}: --{name}", allowed=", ".join(f"--{option}" for option in OPTIONS))
        if not words:
            raise InputError(f"{place}: --{name} without a value")
        key, kind = OPTIONS[name]
        value = words.pop(0)
        try:
            settings[key] = kind(value)
        except ValueError as error:
            raise InputError(f"{place}: --{name} {value}", allowed=f"a number ({kind.__name__})") from error
    if "prompt" not in settings:
        raise InputError(f"{place}: no --prompt")
    width, height = settings.pop("width", None), settings.pop("height", None)
    if width is not None or height is not None:
        settings["size"] = (height if width is None else width, width if height is None else height)
    return settings


def expand(prompt: str, seed: int, folder: str | Path | None = None) -> str:
    """A prompt with each `__name__` replaced by a line of `name.txt` in the folder, and each `{a|b|c}` by one
    of its parts; both are drawn by the seed, and may hold each other.
    """
    draw = random.Random(seed)
    for _ in range(MAX_DEPTH):
        changed = BRACES.sub(lambda found: draw.choice(found[1].split("|")).strip(), prompt)
        if folder is not None:
            changed = WILDCARD.sub(lambda found: draw.choice(_lines(Path(folder), found[1])), changed)
        if changed == prompt:
            return prompt
        prompt = changed
    raise InputError(f"wildcards {MAX_DEPTH} deep in '{prompt[:60]}'", mend="one of them holds itself")


def _lines(folder: Path, name: str) -> Sequence[str]:
    file = folder / f"{name}.txt"
    if ".." in Path(name).parts or not file.is_file():
        known = sorted(str(one.relative_to(folder).with_suffix("")) for one in folder.rglob("*.txt"))[:20]
        raise InputError(f"wildcard '__{name}__'", allowed=", ".join(known) or f"none: no .txt in '{folder}'")
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise InputError(f"'{file}' is not UTF-8 at byte {error.start}", mend="save it as UTF-8") from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise InputError(f"wildcard '__{name}__': '{file}' is empty")
    return found


NUMBERS = {
    "steps": int,
    "seed": int,
    "guidance": float,
    "guidance_rescale": float,
    "eta": float,
    "strength": float,
    "clip_skip": int,
    "variation_seed": int,
    "variation_strength": float,
}
WORDS = ("solver", "sigmas", "spacing", "negative", "prompt", "weighting", "masked_content")
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


def _wide(font: Any, text: str) -> int:
    return int(font.getlength(text)) + 1
