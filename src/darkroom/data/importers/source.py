"""What a source of pictures gives, whatever its format: samples, problems, and marks that a part is read."""

from __future__ import annotations

import difflib
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from darkroom.data.images import EXTENSIONS, is_picture
from darkroom.data.texts import TextError
from darkroom.errors import InputError

IMAGE_NAMES = (
    "file_name", "filename", "image", "picture", "jpg", "jpeg", "png", "webp", "img", "bytes", "image_bytes",
    "content", "image_path", "file_path", "filepath", "path", "file",
)  # fmt: skip
CAPTION_NAMES = (
    "text", "caption", "captions", "prompt", "description", "sentence", "sentences", "alt_text", "txt",
)  # fmt: skip
MAX_PICTURE_BYTES = 256 * 1024**2
KEYS_LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture as the source has it. `key` is its name there; a missing or empty caption is None."""

    key: str
    picture: bytes
    caption: str | None
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the source that is no sample: a picture that is not there, a line that is torn."""

    key: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class PartRead:
    """All of a part (a tar, a Parquet file, a shard) was given; a later run may leave it out."""

    name: str


Item = Sample | Problem | PartRead


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the user says the picture and the caption are; None: found by the usual names.

    `encoding` is that of texts which are not UTF-8 and have no mark; None: they are rejected.
    """

    image: str | None = None
    caption: str | None = None
    encoding: str | None = None


class Source(Protocol):
    """A stream of samples in an order that is the same each time.

    `recoded` counts the texts read so far that were not UTF-8, by their encoding; `same_name` is how many
    pictures have the name of a later one.
    """

    total: int | None
    left_out: set[str]
    recoded: Counter[str]
    same_name: int

    def items(self, finished: Collection[str]) -> Iterator[Item]:
        """Everything in order, but for the parts (see `part_name`) that were finished before."""


def is_hidden(name: str) -> bool:
    """Whether a file or folder is the system's or an editor's business."""
    return name.startswith((".", "__MACOSX")) and name not in (".", "..")


def files_below(
    root: Path, skipped: Callable[[str, str], None] = lambda path, why: None
) -> Iterator[tuple[str, str]]:
    """All files as (folder, name) in a fixed order; hidden ones and stores are left out.

    `skipped` is called with the path of each folder that is not read, and the reason.
    """

    def failed(error: OSError) -> None:
        skipped(str(error.filename), f"cannot be read: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=failed):
        folders[:] = sorted(f for f in folders if not is_hidden(f) and not f.endswith(".lance"))
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                skipped(os.path.join(folder, name), "a link to a folder, which is not followed")
        yield from ((folder, file) for file in sorted(files) if not is_hidden(file))


def paths_below(root: Path, endings: tuple[str, ...]) -> list[Path]:
    """The files below a folder whose names end so, or the file that the path is."""
    if root.is_file():
        return [root] if root.name.lower().endswith(endings) else []
    paths = (Path(folder, name) for folder, name in files_below(root) if name.lower().endswith(endings))
    return [path for path in paths if path.is_file()]


def no_files_below(root: Path, endings: tuple[str, ...]) -> Iterator[Problem]:
    """What has the name of a file that is looked for and is none, and folders that are not read."""
    folders: list[tuple[str, str]] = []
    if root.is_file():
        return
    for folder, name in files_below(root, lambda path, why: folders.append((path, why))):
        path = os.path.join(folder, name)
        if name.lower().endswith(endings) and not os.path.isfile(path):
            yield Problem(_key_of(path, root), "no-file", why_no_file(path))
    yield from (Problem(_key_of(path, root), "no-file", why) for path, why in folders)


def _key_of(path: str, root: Path) -> str:
    """Its path from the source on, the same on all systems."""
    return os.path.relpath(path, root).replace(os.sep, "/")


def why_no_file(path: str | Path) -> str:
    """What it is that has a file's name and cannot be read as one."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return "a link that leads nowhere" if os.path.islink(path) else f"{error.strerror}"
    kinds = ((stat.S_ISFIFO, "a fifo"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder"))
    return next((f"{what}, no file" for test, what in kinds if test(mode)), "a device, no file")


def pictures_below(root: Path) -> list[Path]:
    """The pictures below a folder, as an import finds them; masks are none."""
    return [path for path in paths_below(root, tuple(EXTENSIONS)) if is_picture(path.name)]


def part_name(path: Path, root: Path) -> str:
    """A file as part of a source: its place, size and time of change, so that a new file is a new part."""
    stat = path.stat()
    return f"{path.relative_to(root).as_posix()}|{stat.st_size}|{stat.st_mtime_ns}"


def part_key(path: Path, root: Path) -> str:
    """How rows of a part are named; of a source that is one file, the part is not said."""
    return "" if path == root else path.relative_to(root).as_posix() + ":"


def find_name(given: str | None, usual: Iterable[str], names: Collection[str], what: str) -> str | None:
    """The column given, or the first usual one, upper and lower case alike. InputError for a wrong one."""
    lowered = {name.lower(): name for name in reversed(list(names))}
    if given is not None:
        if given in names:
            return given
        near = difflib.get_close_matches(given.lower(), lowered, 3, 0.5)
        mend = f"did you mean {' or '.join(lowered[name] for name in near)}?" if near else ""
        raise InputError(f"no {what} column '{given}'", allowed=", ".join(names), mend=mend)
    return next((lowered[name] for name in usual if name in lowered), None)


def no_column(what: str, where: str, names: Iterable[str]) -> InputError:
    """The error for a source in which no column looks like what is needed."""
    return InputError(
        f"no {what} column found in {where}, which has {', '.join(names)}",
        mend=f"say which it is with --{what}-column",
    )


def captions_of(value: Any) -> list[str | None]:
    """The captions in a field: none, one, or several in a list; white space around them goes.

    Not-a-number is none: tables write it where a cell is empty. TextError for what is neither text nor a
    number: a caption that cannot be read is not one that is missing.
    """
    if isinstance(value, (list, tuple)):
        found = [caption for entry in value for caption in captions_of(entry) if caption is not None]
        return list(found) or [None]
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return [None]
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise TextError(f"a caption that is no text: {type(value).__name__} {str(value)[:60]}")
    return [str(value).strip() or None]


def clean(text: str) -> str:
    """Text that can be stored: halves of surrogate pairs, which JSON lets through, are replaced."""
    return text.encode("utf-8", "replace").decode()


def typed(text: str | None) -> Any:
    """A cell of a CSV as what it says: a number, true or false, nothing, or text."""
    if text is None or text == "":
        return None
    if re.fullmatch(r"-?(0|[1-9]\d{0,17})", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text) and not re.match(r"[-+]?0\d", text):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)
