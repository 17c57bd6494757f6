"""Drawing the pictures that are scored: kept in a folder as they come, and drawn once.

A picture's file is named by its seed and prompt and holds its parameters, so a folder that was interrupted is
filled up, more pictures of a prompt join those there are, and a folder of other settings is refused.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from PIL import Image, PngImagePlugin

from darkroom.errors import InputError
from darkroom.evaluate.pictures import FolderPictures, in_batches
from darkroom.hardware.system import atomic_replace, remove_file
from darkroom.models.model import Model

NOTE_FILE = "drawn.json"
TEXT_KEY = "darkroom"
PICTURES_A_CALL = 16  # what a kill costs at most
Progress = Callable[[int, int], None]


class Generate(Protocol):
    """What draws pictures: `darkroom.sample.generate`, handed in by a package above both."""

    def __call__(
        self, model: Model, prompts: Sequence[str], *, seed: int, num: int, **settings: Any
    ) -> Sequence[Any]:
        """`num` pictures of each prompt, with `image` and `parameters`; picture i has seed + i."""
        ...


def draw(
    generate: Generate,
    model: Model,
    prompts: Sequence[str],
    *,
    folder: Path,
    model_sha256: str,
    num: int = 1,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> FolderPictures:
    """`num` pictures of each prompt in a folder, picture i with seed + i, prompt by prompt.

    Pictures that are there already are taken as they are. InputError where the folder's pictures are another
    model's or were drawn with other settings.
    """
    recorded = {"model_sha256": model_sha256, **(settings or {})}
    _claim(folder, json.loads(json.dumps(recorded, default=str)))
    wanted = [(seed + i, prompts[i // num]) for i in range(len(prompts) * num)]
    files = [folder / file_name(one_seed, prompt) for one_seed, prompt in wanted]
    missing = [i for i, file in enumerate(files) if not file.is_file()]
    done = len(wanted) - len(missing)
    for run in _runs(missing):
        for part in in_batches(run, PICTURES_A_CALL):
            made = generate(
                model,
                [wanted[i][1] for i in part],
                seed=wanted[part[0]][0],
                num=1,
                **(settings or {}),
            )
            for i, picture in zip(part, made, strict=True):
                _save(picture, files[i])
            done += len(part)
            if progress is not None:
                progress(done, len(wanted))
    return FolderPictures(str(folder), tuple(files))


def file_name(seed: int, prompt: str) -> str:
    """`000007-a-red-dog-1a2b3c4d.png`: seed, the prompt's beginning, and a hash of all of it."""
    slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40].strip("-")
    return f"{seed:06d}-{slug or 'empty'}-{sha256(prompt.encode()).hexdigest()[:8]}.png"


def _runs(indices: Sequence[int]) -> Iterator[list[int]]:
    """Neighbouring numbers together: their seeds follow each other."""
    run: list[int] = []
    for i in indices:
        if run and i != run[-1] + 1:
            yield run
            run = []
        run.append(i)
    if run:
        yield run


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Note in the folder what its pictures are drawn with; refuse one that says something else."""
    note = folder / NOTE_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if note.is_file():
            _compare(folder, json.loads(note.read_text(encoding="utf-8")), settings)
        else:
            if any(folder.iterdir()):
                raise InputError(f"'{folder}' holds something else", mend="choose another --keep-pictures")
            note.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"pictures cannot be kept in '{folder}': {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"'{note}' cannot be read", mend="choose another --keep-pictures") from error


def _compare(folder: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    odd = [name for name in sorted(before.keys() | settings.keys()) if before.get(name) != settings.get(name)]
    if odd:
        changes = ", ".join(
            f"{name} {_short(before.get(name))}, not {_short(settings.get(name))}" for name in odd
        )
        raise InputError(
            f"'{folder}' holds pictures drawn with {changes}",
            mend="choose another --keep-pictures, or delete the folder",
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:12] + "..."


def _save(picture: Any, file: Path) -> None:
    """A PNG with the picture's parameters, written atomically."""
    info = PngImagePlugin.PngInfo()
    info.add_text(TEXT_KEY, json.dumps(picture.parameters, ensure_ascii=True, default=str))
    temporary = file.with_name(f".{uuid.uuid4().hex}.png")
    try:
        image: Image.Image = picture.image
        image.save(temporary, "PNG", pnginfo=info)
        atomic_replace(temporary, file)
    finally:
        remove_file(temporary)
