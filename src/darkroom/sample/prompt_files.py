"""Many prompts: files with settings on each line, wildcards, and alternatives in braces."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from darkroom.errors import InputError

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
}
"""What a line may say, in darkroom's words or those of A1111's 'Prompts from file'."""


def read_prompts(file: str | Path) -> list[dict[str, Any]]:
    """A file's lines, each with its prompt and settings: a plain prompt, or `--prompt "..." --steps 20 ...`.

    Empty lines and those that begin with # are passed over. InputError names the line that cannot be read.
    """
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"'{file}' cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"'{file}' is not UTF-8 at byte {error.start}", mend="save it as UTF-8") from error
    lines = [(i, line.strip()) for i, line in enumerate(text.splitlines(), start=1)]
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
    if width or height:
        settings["size"] = (width or height, height or width)
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
    lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise InputError(f"wildcard '__{name}__': '{file}' is empty")
    return found
