"""Webdataset tars: the files of a sample stand together and share a name up to the first dot."""

from __future__ import annotations

import json
import posixpath
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from darkroom.data.images import is_picture
from darkroom.data.importers.source import (
    CAPTION_NAMES,
    MAX_PICTURE_BYTES,
    Columns,
    Item,
    PartRead,
    Problem,
    Sample,
    captions_of,
    find_name,
    no_files_below,
    part_key,
    part_name,
    paths_below,
    typed,
)
from darkroom.data.texts import MAX_CAPTION_BYTES, TextError, decode_text
from darkroom.errors import InputError, is_system_failure

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
TEXTS = ("txt", "text", "caption")
LABELS = ("cls", "id", "url")
READ_BYTES = 1024**2
STREAM_BYTES = 8 * 1024
"""tarfile copies what is left of its buffer at each header and file: a large one costs more than it saves."""


class Unread(NamedTuple):
    """A member of a tar that is not read, and why."""

    reason: str
    detail: str


Content = bytes | Unread


def tars_in(path: Path) -> list[Path]:
    """The tars below a folder, in order, or the one that the path is."""
    return paths_below(path, TARS)


class WebdatasetSource:
    """Tars as img2dataset and webdataset write them: a picture, `.txt` and `.json` a sample.

    The caption is the text, or without one a field of the JSON; the JSON's other fields come along, and so
    do small texts such as `.cls`. What else lies in the folder (Parquet, statistics) is not read.
    """

    total: int | None = None

    def __init__(self, path: Path, columns: Columns) -> None:
        self._root, self._columns = path, columns
        self.left_out: set[str] = set()
        self.recoded: Counter[str] = Counter()
        self.same_name = 0
        self._tars = tars_in(path)
        if not self._tars:
            raise InputError(f"no tar in {path}", allowed=", ".join(TARS))

    def items(self, finished: Collection[str]) -> Iterator[Item]:
        """Samples of all tars that are not `finished`."""
        yield from no_files_below(self._root, TARS)
        for tar in self._tars:
            part = part_name(tar, self._root if self._root.is_dir() else tar)
            if part not in finished:
                yield from self._samples(tar)
            yield PartRead(part)

    def _samples(self, tar: Path) -> Iterator[Item]:
        prefix, key, files = part_key(tar, self._root), "", dict[str, Content]()
        try:
            for name, extension, content in _files(tar):
                if name != key or extension in files:
                    yield from self._sample(prefix + key, files)
                    key, files = name, {}
                files[extension] = content
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            if is_system_failure(error):
                raise
            yield Problem(prefix + key, "torn-part", f"{tar.name} ends early: {error}")
            return  # what was read of the last sample may not be all of it
        yield from self._sample(prefix + key, files)

    def _sample(self, key: str, files: dict[str, Content]) -> Iterator[Item]:
        wanted = self._columns.image
        name = wanted if wanted in files else next((e for e in files if is_picture(f".{e}")), None)
        if name is None:
            if files:
                yield Problem(key, "no-picture", f"only {', '.join(files)}")
            return
        picture = files.pop(name)
        if isinstance(picture, Unread):
            yield Problem(key, picture.reason, picture.detail)
            return
        try:
            extras = self._extras(files)
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, TextError) else f"no JSON: {error}"
            yield Problem(key, "bad-metadata", why)
            return
        try:
            captions = self._captions(files, extras)
        except TextError as error:
            yield Problem(key, "bad-caption", str(error))
            return
        for caption in captions:
            yield Sample(key, picture, caption, extras)

    def _extras(self, files: dict[str, Content]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        for extension, content in files.items():
            if isinstance(content, Unread) and (_ends_in(extension, (".json",)) or extension in LABELS):
                raise TextError(f"{extension}: {content.detail}")
            if isinstance(content, bytes) and _ends_in(extension, (".json",)):
                record = json.loads(decode_text(content, self.recoded, self._columns.encoding))
                extras |= record if isinstance(record, dict) else {extension: record}
            elif isinstance(content, bytes) and extension in LABELS:
                extras[extension] = typed(decode_text(content, self.recoded, self._columns.encoding).strip())
            elif extension not in TEXTS:
                self.left_out.add(extension)
        return extras

    def _captions(self, files: dict[str, Content], extras: dict[str, Any]) -> list[str | None]:
        wanted = self._columns.caption
        if wanted is not None and wanted in extras:
            return captions_of(extras.pop(wanted))
        text = next((files[e] for e in (wanted, *TEXTS) if e is not None and e in files), None)
        named = find_name(None, CAPTION_NAMES, extras, "caption")
        if text is None:
            return captions_of(extras.pop(named)) if named else [None]
        if isinstance(text, Unread) or len(text) > MAX_CAPTION_BYTES:
            raise TextError(text.detail if isinstance(text, Unread) else f"a caption of {len(text):,} bytes")
        captions = captions_of(decode_text(text, self.recoded, self._columns.encoding))
        if named and isinstance(extras[named], str) and captions_of(extras[named]) == captions:
            extras.pop(named)  # img2dataset writes it twice
        return captions


def _ends_in(extension: str, ends: Collection[str]) -> bool:
    return "." + extension.rpartition(".")[2] in ends


def _files(tar: Path) -> Iterator[tuple[str, str, Content]]:
    """The files of a tar: name up to the first dot, what follows the dot, content, or why there is none."""
    with (
        tar.open("rb", buffering=READ_BYTES) as file,
        tarfile.open(fileobj=file, mode="r|*", bufsize=STREAM_BYTES) as archive,
    ):
        while (member := archive.next()) is not None:
            # Without this a tar of any size is kept as a list of its members.
            cast(Any, archive).members = []
            folder, base = posixpath.split(member.name)
            stem, _, extension = base.partition(".")
            if member.isdir() or not stem or not extension:
                continue
            yield posixpath.join(folder, stem), extension.lower(), _content(archive, member)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Content:
    if not member.isfile():
        return Unread("no-file", "a link or a fifo in the tar, no file")
    if member.size > MAX_PICTURE_BYTES:
        return Unread("bomb", f"{member.size:,} bytes, the most is {MAX_PICTURE_BYTES:,}")
    file = archive.extractfile(member)
    assert file is not None
    return file.read()
