"""Folders and zips of pictures, with captions in one metadata file or in a text beside each picture."""

from __future__ import annotations

import csv
import json
import os
import posixpath
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from darkroom.data.pictures import EXTENSIONS, is_picture
from darkroom.data.seen import Seen, short_id
from darkroom.data.source import (
    CAPTION_NAMES,
    IMAGE_NAMES,
    KEYS_LOOKED_AT,
    MAX_PICTURE_BYTES,
    Columns,
    Item,
    Problem,
    Sample,
    captions_of,
    files_below,
    find_name,
    is_hidden,
    no_column,
    typed,
)
from darkroom.data.zips import ZipReader
from darkroom.errors import InputError

METADATA = ("metadata.jsonl", "captions.jsonl", "metadata.csv", "captions.csv")
BESIDE = (".txt", ".caption")
Entry = tuple[str, dict[str, Any] | str]
"""Where it stands (file:line), and the entry itself or why it is none."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file of a tree: under which name, how large, and how to read it."""

    tree: Tree
    name: str
    size: int
    read: Callable[[], bytes]

    @property
    def key(self) -> str:
        """Its path from the source on, a zip's name before it."""
        return self.tree.label + self.name


class Tree(Protocol):
    """Files under names with slashes, in a folder or a zip."""

    label: str

    def names(self) -> Iterator[str]:
        """The names of all files, hidden ones and stores left out."""
        ...

    def find(self, name: str) -> Found | None:
        """The file of a name; None where there is none."""
        ...

    def lines(self, name: str) -> Iterator[str]:
        """The lines of a text file."""
        ...


class FolderTree:
    """The files below a folder; hidden ones and stores are left out."""

    label = ""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> Iterator[str]:
        """Every file below the folder, by its path in it."""
        prefix = len(str(self.root)) + 1
        return (
            posixpath.join(folder[prefix:].replace(os.sep, "/"), name)
            for folder, name in files_below(self.root)
        )

    def find(self, name: str) -> Found | None:
        """The file of that name; None where there is none."""
        path = self.root / name
        try:
            status = path.stat()
        except OSError:
            return None
        return Found(self, name, status.st_size, path.read_bytes) if stat.S_ISREG(status.st_mode) else None

    def lines(self, name: str) -> Iterator[str]:
        """A text file's lines."""
        with (self.root / name).open(encoding="utf-8-sig", errors="replace", newline="") as file:
            yield from file


class ZipTree:
    """The files in a zip."""

    def __init__(self, path: Path, label: str = "") -> None:
        self.label = label
        self._zip = ZipReader(path)

    def names(self) -> Iterator[str]:
        """Every member, by its path in the zip."""
        return (m.name for m in self._zip.members() if not any(is_hidden(p) for p in m.name.split("/")))

    def find(self, name: str) -> Found | None:
        """The member of that name; None where there is none."""
        member = self._zip.find(name)
        return None if member is None else Found(self, name, member.size, partial(self._zip.read, member))

    def lines(self, name: str) -> Iterator[str]:
        """A text member's lines."""
        member = self._zip.find(name)
        rest = b""
        for chunk in self._zip.chunks(member) if member else ():
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (line.decode("utf-8-sig", "replace") + "\n" for line in whole)
        if rest:
            yield rest.decode("utf-8-sig", "replace")


Captioned = tuple[Found, str | None, Mapping[str, Any]]
"""A picture's file, its caption, and what else its metadata say."""


class FolderSource:
    """A folder, a zip, or a folder with zips: first what metadata files list, then all other pictures.

    A metadata file names pictures relative to itself; where they are not beside it they are looked for in
    the zips. Pictures that no metadata file lists take their caption from a text of the same name.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        self._columns = columns
        self._trees = _trees(path)
        self._metadata: list[tuple[Tree, str]] = []
        self.left_out: set[str] = set()
        self.total: int | None = 0
        self._with_pictures: list[Tree] = []
        for tree in self._trees:
            before = self.total
            for name in tree.names():
                self.total += is_picture(name)
                if posixpath.basename(name).lower() in METADATA or name == _only(path):
                    self._metadata.append((tree, name))
            if self.total > before:
                self._with_pictures.append(tree)
        if not self.total:
            raise InputError(f"no pictures in {path}", allowed=", ".join(sorted(EXTENSIONS)))

    def items(self, finished: Collection[str]) -> Iterator[Item]:
        """Pictures with their captions: those that metadata list first, then the rest."""
        for entry in self._entries():
            yield entry if isinstance(entry, Problem) else _sample(*entry)

    def captions(self) -> Iterator[tuple[str, str | None]]:
        """The same without the pictures: keys and captions; InputError for metadata that cannot be read."""
        for entry in self._entries():
            if not isinstance(entry, Problem):
                yield entry[0].key, entry[1]
            elif entry.reason == "bad-metadata":
                raise InputError(f"{entry.key}: {entry.detail}")

    def _entries(self) -> Iterator[Problem | Captioned]:
        listed = Seen()
        for tree, name in self._metadata:
            yield from self._listed(tree, name, listed)
        for tree in self._with_pictures:
            for name in tree.names():
                if is_picture(name) and short_id(tree.label + name) not in listed:
                    found = tree.find(name)
                    if found is not None:
                        yield found, _caption_beside(tree, name), {}

    def _listed(self, tree: Tree, metadata: str, listed: Seen) -> Iterator[Problem | Captioned]:
        entries = read_entries(tree, metadata)
        first = list(islice(entries, KEYS_LOOKED_AT))
        names = list(dict.fromkeys(name for _, entry in first if isinstance(entry, dict) for name in entry))
        image = find_name(self._columns.image, IMAGE_NAMES, names, "image")
        if image is None and names:
            raise no_column("image", metadata, names)
        caption = find_name(self._columns.caption, CAPTION_NAMES, [n for n in names if n != image], "caption")
        if caption is None and names:
            raise no_column("caption", metadata, names)
        for place, entry in chain(first, entries):
            if isinstance(entry, str):
                yield Problem(place, "bad-metadata", entry)
                continue
            named = str(entry.pop(str(image), None) or "")
            found = self._find(tree, posixpath.dirname(metadata), named)
            if found is None:
                yield Problem(named or place, "no-picture", f"{place} names '{named}', which is not there")
                continue
            listed.add(short_id(found.key))
            for text in captions_of(entry.pop(str(caption), None)):
                yield found, text, entry

    def _find(self, own: Tree, folder: str, name: str) -> Found | None:
        """The file that a metadata file means; never one outside of the source."""
        if not name or posixpath.isabs(name):
            return None
        plain = posixpath.normpath(name.replace("\\", "/"))
        beside = posixpath.normpath(posixpath.join(folder, plain))
        places = [place for place in dict.fromkeys((beside, plain)) if not place.startswith("../")]
        trees = sorted(self._with_pictures, key=lambda tree: tree is not own)
        return next((found for t in trees for place in places if (found := t.find(place)) is not None), None)


def _sample(found: Found, caption: str | None, extras: Mapping[str, Any]) -> Item:
    if found.size > MAX_PICTURE_BYTES:
        return Problem(found.key, "bomb", f"more than {MAX_PICTURE_BYTES} bytes")
    try:
        return Sample(found.key, found.read(), caption, extras)
    except (OSError, ValueError) as error:
        return Problem(found.key, "undecodable", f"cannot be read: {error}")


def _only(path: Path) -> str | None:
    """The metadata file that is the source itself."""
    return path.name if path.suffix in (".jsonl", ".csv") else None


def _trees(path: Path) -> list[Tree]:
    if path.suffix.lower() == ".zip":
        return [ZipTree(path)]
    root = path if path.is_dir() else path.parent
    zips = sorted(file for file in root.glob("*.[zZ][iI][pP]") if not is_hidden(file.name))
    return [FolderTree(root), *(ZipTree(z, f"{z.name}/" if len(zips) > 1 else "") for z in zips)]


def _caption_beside(tree: Tree, name: str) -> str | None:
    stem = posixpath.splitext(name)[0]
    for extension in BESIDE:
        found = tree.find(stem + extension)
        if found is not None and found.size <= MAX_PICTURE_BYTES:
            text = found.read().decode("utf-8-sig", "replace")
            return captions_of(" ".join(text.split()))[0]
    return None


def read_entries(tree: Tree, name: str) -> Iterator[Entry]:
    """The entries of a metadata file, line by line."""
    lines = tree.lines(name)
    yield from _csv_entries(name, lines) if name.lower().endswith(".csv") else _json_entries(name, lines)


def _json_entries(name: str, lines: Iterator[str]) -> Iterator[Entry]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            yield f"{name}:{number}", f"no JSON: {error}"
            continue
        yield f"{name}:{number}", entry if isinstance(entry, dict) else "no JSON object"


def _csv_entries(name: str, lines: Iterator[str]) -> Iterator[Entry]:
    reader = csv.DictReader(lines, restkey="")
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"{name}:{reader.line_num}", f"no CSV: {error}"
            continue
        whole = "" not in row and None not in row.values()
        entry = {key: typed(value) for key, value in row.items()} if whole else "another number of cells"
        yield f"{name}:{reader.line_num}", entry
