"""Folders and zips of pictures, with captions in one metadata file or in a text file for each picture."""

from __future__ import annotations

import csv
import json
import os
import posixpath
import stat
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice, product
from pathlib import Path
from typing import Any, Protocol

from darkroom.data.images import EXTENSIONS, files_below, is_hidden, is_picture
from darkroom.data.importers.archives import EARLIER, ZipReader
from darkroom.data.importers.source import (
    CAPTION_NAMES,
    IMAGE_NAMES,
    KEYS_LOOKED_AT,
    MAX_PICTURE_BYTES,
    Columns,
    Item,
    Problem,
    Sample,
    captions_of,
    find_name,
    no_column,
    typed,
    why_no_file,
)
from darkroom.data.sidecars import SeenIds, short_id
from darkroom.data.texts import MAX_CAPTION_BYTES, TextError, TextLines, decode_text
from darkroom.errors import InputError, is_system_failure
from darkroom.hardware.system import folds_names

METADATA = ("metadata.jsonl", "captions.jsonl", "metadata.csv", "captions.csv")
BESIDE = (".txt", ".caption")
READ_BYTES = 1024**2
OUTSIDE = "its name leads out of the source"
Entry = tuple[str, dict[str, Any] | str]
"""Where it stands (file:line), and the entry itself or why it is none."""


class Tree(Protocol):
    """Files under names with slashes, in a folder or a zip."""

    label: str
    folds: bool
    """Whether names that differ in case alone are one file's."""
    skipped: dict[str, str]
    """The folders that are not read, and why; known once `names` was read to its end."""

    def names(self) -> Iterator[str]:
        """The names of all files, hidden ones and stores left out."""
        ...

    def find(self, name: str) -> TreeFile | None:
        """The file of a name; None where there is none."""
        ...

    def pieces(self, name: str) -> Iterator[bytes]:
        """A file's content, piece by piece; OSError or ValueError where it cannot be read."""
        ...

    def why_not(self, name: str) -> str:
        """Why `find` finds no file under one of the tree's own names."""
        ...

    def obstacle(self, name: str) -> str:
        """Why what has that name is no file; empty where nothing has it."""
        ...

    def called(self, name: str) -> str:
        """What the source calls a file; of an earlier one of the same name without its number."""
        ...


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A file of a tree: under which name, how large, and how to read it."""

    tree: Tree
    name: str
    size: int
    read: Callable[[], bytes]

    @property
    def key(self) -> str:
        """Its path from the source on, a zip's name before it."""
        return self.tree.label + self.name


class FolderTree:
    """The files below a folder; hidden ones and stores are left out."""

    label = ""

    def __init__(self, root: Path) -> None:
        self.root, self.folds = root, folds_names(root)
        self.skipped: dict[str, str] = {}

    def names(self) -> Iterator[str]:
        """Every file below the folder, by its path in it."""
        prefix = len(os.path.join(self.root, ""))  # of D:\, which ends in one, as long as it is

        def skipped(path: str, why: str) -> None:
            self.skipped[path[prefix:].replace(os.sep, "/")] = why

        return (
            posixpath.join(folder[prefix:].replace(os.sep, "/"), name)
            for folder, name in files_below(self.root, skipped)
        )

    def find(self, name: str) -> TreeFile | None:
        """The file of that name; None where there is none."""
        path = self.root / name
        try:
            status = path.stat()
        except OSError:
            return None
        return TreeFile(self, name, status.st_size, path.read_bytes) if stat.S_ISREG(status.st_mode) else None

    def pieces(self, name: str) -> Iterator[bytes]:
        """A file's content."""
        if self.find(name) is None:
            raise OSError(self.why_not(name))
        with (self.root / name).open("rb") as file:
            while piece := file.read(READ_BYTES):
                yield piece

    def why_not(self, name: str) -> str:
        """What it is instead of a file."""
        return why_no_file(self.root / name)

    def obstacle(self, name: str) -> str:
        """What has that name and is no file; empty where nothing has it."""
        return why_no_file(self.root / name) if os.path.lexists(self.root / name) else ""

    def called(self, name: str) -> str:
        """A folder has each name once."""
        return name


class ZipTree:
    """The files in a zip."""

    folds = False

    def __init__(self, path: Path, label: str = "") -> None:
        self.label, self.skipped = label, dict[str, str]()
        self._zip = ZipReader(path)

    def names(self) -> Iterator[str]:
        """Every member, by its path in the zip."""
        return (m.name for m in self._zip.members() if not any(is_hidden(p) for p in m.name.split("/")))

    def find(self, name: str) -> TreeFile | None:
        """The member of that name; None where there is none."""
        member = self._zip.find(name)
        return None if member is None else TreeFile(self, name, member.size, partial(self._zip.read, member))

    def pieces(self, name: str) -> Iterator[bytes]:
        """A member's content."""
        member = self._zip.find(name)
        yield from self._zip.chunks(member) if member else ()

    def why_not(self, name: str) -> str:
        """Every name has its member."""
        return f"{name} is not in the zip"

    def obstacle(self, name: str) -> str:
        """Every member can be read as a file."""
        return ""

    def called(self, name: str) -> str:
        """The name in the zip, which several members may have."""
        return self._zip.called(name)


Captioned = tuple[TreeFile, str | None, Mapping[str, Any]]
"""A picture's file, its caption, and what else its metadata say."""


class FolderSource:
    """A folder, a zip, or a folder with zips: first what metadata files list, then all other pictures.

    A metadata file names pictures relative to itself; where they are not next to it they are looked for in
    the zips. Pictures that no metadata file lists take their caption from a text of the same name.

    A zip may have several members of one name. All pictures are read; an earlier one goes with the earlier
    text or metadata file of its own number, and else with the last.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        self._columns = columns
        self._trees = _trees(path)
        self._metadata: list[tuple[Tree, str]] = []
        self.left_out: set[str] = set()
        self.recoded: Counter[str] = Counter()
        self.total: int | None = 0
        self.same_name = 0
        self._torn: list[tuple[Tree, str]] = []
        self._with_pictures: list[Tree] = []
        for tree in self._trees:
            before = self.total
            for name in tree.names():
                if is_picture(name):
                    self.total += 1
                    self.same_name += tree.called(name) != name
                elif posixpath.basename(tree.called(name)).lower() in METADATA or name == _only(path):
                    self._metadata.append((tree, name))
            if self.total > before:
                self._with_pictures.append(tree)
        # Of one name the last goes first: what it lists, an earlier one does not say otherwise.
        self._metadata.sort(key=lambda one: one[0].called(one[1]) != one[1])
        if not self.total:
            raise InputError(f"no pictures in {path}", allowed=", ".join(sorted(EXTENSIONS)))

    def items(self, finished: Collection[str]) -> Iterator[Item]:
        """Pictures with their captions: those that metadata list first, then the rest."""
        for entry in self._entries():
            yield entry if isinstance(entry, Problem) else _sample(*entry)

    def captions(self) -> Iterator[tuple[str, str | None]]:
        """The same without the pictures: keys and captions; InputError for what of them cannot be read."""
        for entry in self._entries():
            if not isinstance(entry, Problem):
                yield entry[0].key, entry[1]
            elif entry.reason in ("bad-metadata", "bad-caption"):
                raise InputError(f"{entry.key}: {entry.detail}")

    def _entries(self) -> Iterator[Problem | Captioned]:
        listed = SeenIds()
        for tree in self._trees:
            yield from (Problem(tree.label + name, "no-file", why) for name, why in tree.skipped.items())
        for tree, name in self._metadata:
            if _is_outside(name):
                yield Problem(tree.label + name, "unsafe-name", OUTSIDE)
            else:
                yield from self._listed(tree, name, listed)
        for tree in self._with_pictures:
            for name in tree.names():
                if is_picture(name) and self._id(tree, name) not in listed:
                    yield self._unlisted(tree, name)

    def _decode(self, data: bytes) -> str:
        return decode_text(data, self.recoded, self._columns.encoding)

    def _lines(self, tree: Tree, name: str) -> TextLines:
        return TextLines(tree.pieces(name), self.recoded, self._columns.encoding)

    def _id(self, tree: Tree, name: str) -> int:
        """A file's number; a folder and the one zip in it may have the same names."""
        one = unicodedata.normalize("NFC", name).casefold() if tree.folds else name
        return short_id(f"{self._trees.index(tree)}/{one}")

    def _unlisted(self, tree: Tree, name: str) -> Problem | Captioned:
        """A picture that no metadata file names, with its text file."""
        key = tree.label + name
        if _is_outside(name):
            return Problem(key, "unsafe-name", OUTSIDE)
        found = tree.find(name)
        if found is None:
            return Problem(key, "no-file", tree.why_not(name))
        try:
            caption = _caption_file(tree, name, self._decode)
        except TextError as error:
            return Problem(key, "bad-caption", str(error))
        torn = self._torn_above(tree, name) if caption is None else None
        if torn is not None:
            return Problem(key, "bad-metadata", f"{torn} has lines that cannot be read: one may be its own")
        return found, caption, {}

    def _torn_above(self, tree: Tree, name: str) -> str | None:
        """A metadata file with unread lines that may have named a picture: one of its folder or above."""
        return next(
            (
                metadata
                for own, metadata in self._torn
                if own is not tree
                or f"/{name}".startswith(posixpath.join("/", posixpath.dirname(metadata), ""))
            ),
            None,
        )

    def _listed(self, tree: Tree, metadata: str, listed: SeenIds) -> Iterator[Problem | Captioned]:
        entries = _read_entries(self._lines(tree, metadata), metadata)
        first = list(islice(entries, KEYS_LOOKED_AT))
        names = list(dict.fromkeys(name for _, entry in first if isinstance(entry, dict) for name in entry))
        is_csv = _is_csv(metadata)
        image = find_name(self._columns.image, IMAGE_NAMES, names, "image")
        if image is None and names:
            raise no_column("image", metadata, names)
        caption = find_name(self._columns.caption, CAPTION_NAMES, [n for n in names if n != image], "caption")
        if caption is None and names:
            raise no_column("caption", metadata, names)
        is_earlier = tree.called(metadata) != metadata
        known = listed if is_earlier else ()
        number = EARLIER.search(metadata) if is_earlier else None
        for place, entry in chain(first, entries):
            if isinstance(entry, str):
                yield Problem(place, "bad-metadata", entry)
                if (tree, metadata) not in self._torn:
                    self._torn.append((tree, metadata))
                continue
            named = str(entry.pop(str(image), None) or "")
            found = self._find(tree, metadata, named, number[0] if number else "")
            if is_earlier and (found is None or self._id(found.tree, found.name) in known):
                continue  # the last file of that name holds
            if found is None:
                yield Problem(named or place, "no-picture", f"{place} names '{named}', which is not there")
                continue
            listed.add(self._id(found.tree, found.name))
            try:
                texts = captions_of(entry.pop(str(caption), None))
            except TextError as error:
                yield Problem(found.key, "bad-caption", f"{place}: {error}")
                continue
            extras = {key: typed(value) for key, value in entry.items()} if is_csv else entry
            for text in texts:
                yield found, text, extras

    def _find(self, own: Tree, metadata: str, name: str, number: str) -> TreeFile | None:
        """The file that a metadata file means, first of its own number; never one outside of the source."""
        if not name or posixpath.isabs(name):
            return None
        folder = posixpath.dirname(metadata)
        plain = posixpath.normpath(name.replace("\\", "/"))
        relative = posixpath.normpath(posixpath.join(folder, plain))
        places = [place for place in dict.fromkeys((relative, plain)) if not place.startswith("../")]
        if number:
            splits = [posixpath.splitext(place) for place in places]
            places = [*(f"{stem}{number}{ending}" for stem, ending in splits), *places]
        trees = sorted(self._with_pictures, key=lambda tree: tree is not own)
        found = _first_of(trees, places)
        if found is None and not name.isascii():
            # macOS writes letters with their accents apart, as do the zips that it makes.
            forms = (unicodedata.normalize(form, place) for form in ("NFC", "NFD") for place in places)
            found = _first_of(trees, list(forms))
        return found


def _first_of(trees: Sequence[Tree], places: Sequence[str]) -> TreeFile | None:
    return next((found for t in trees for place in places if (found := t.find(place)) is not None), None)


def _sample(found: TreeFile, caption: str | None, extras: Mapping[str, Any]) -> Item:
    if found.size > MAX_PICTURE_BYTES:
        return Problem(found.key, "bomb", f"more than {MAX_PICTURE_BYTES} bytes")
    try:
        return Sample(found.key, found.read(), caption, extras)
    except (OSError, ValueError) as error:
        if is_system_failure(error):
            raise
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


def _is_outside(name: str) -> bool:
    return ".." in name.split("/")


def _caption_file(tree: Tree, name: str, decode: Callable[[bytes], str]) -> str | None:
    stems = dict.fromkeys(posixpath.splitext(one)[0] for one in (name, tree.called(name)))
    for stem, extension in product(stems, BESIDE):
        found = tree.find(stem + extension)
        what = posixpath.basename(stem + extension)
        if found is None:
            if why := tree.obstacle(stem + extension):
                raise TextError(f"{what}: {why}")
            continue
        if found.size > MAX_CAPTION_BYTES:
            raise TextError(f"{what}: a caption of {found.size:,} bytes, the most is {MAX_CAPTION_BYTES:,}")
        try:
            text = decode(found.read())
        except (OSError, ValueError) as error:
            if is_system_failure(error):
                raise
            raise TextError(f"{what}: {error}") from error
        return captions_of(" ".join(text.split()))[0]
    return None


def _read_entries(lines: TextLines, name: str) -> Iterator[Entry]:
    """The entries of a metadata file, line by line."""
    yield from _csv_entries(name, lines) if _is_csv(name) else _json_entries(name, lines)


def _is_csv(name: str) -> bool:
    return name.lower().endswith(".csv")


def _json_entries(name: str, lines: Iterator[str]) -> Iterator[Entry]:
    for number in count(1):
        try:
            line = next(lines)
            entry = json.loads(line) if line.strip() else None
        except StopIteration:
            return
        except TextError as error:
            yield f"{name}:{number}", str(error)
            continue
        except (ValueError, RecursionError) as error:
            yield f"{name}:{number}", f"no JSON: {error}"
            continue
        if line.strip():
            yield f"{name}:{number}", entry if isinstance(entry, dict) else "no JSON object"


def _csv_entries(name: str, lines: Iterator[str]) -> Iterator[Entry]:
    """Rows of text; strict, as a quote that is not closed would make one caption of all lines behind it."""
    reader = csv.DictReader(lines, strict=True)
    try:
        named = [column for column in reader.fieldnames or () if column]
    except (TextError, csv.Error) as error:
        yield f"{name}:1", f"the columns' names cannot be read: {error}"
        return
    if twice := next((column for column in named if named.count(column) > 1), None):
        raise InputError(f"{name} has two columns '{twice}'", mend="take one out, or name it otherwise")
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except TextError as error:
            yield f"{name}:{reader.line_num + 1}", str(error)
            continue
        except csv.Error as error:
            yield f"{name}:{reader.line_num}", f"no CSV: {error}"
            continue
        whole = None not in row and None not in row.values()
        yield f"{name}:{reader.line_num}", row if whole else "another number of cells"
