"""What a source of pictures gives, whatever its format: samples, problems, and marks that a part is read. And
what samples become: rows, with a type for each of the source's own columns, and no value that does not fit.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import lance
import numpy as np
import pyarrow as pa

from darkroom.data.images import Facts, files_below
from darkroom.data.store import SCHEMA, Store
from darkroom.data.texts import TextError, readable
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


TEXT, WHOLE, FRACTION, TRUTH = pa.string(), pa.int64(), pa.float64(), pa.bool_()
NOTHING = pa.null()
LARGEST = 2**63
WIDENED = "_widened_"


class PassedPicture(NamedTuple):
    """A picture that passed, as it goes into the store."""

    id: str
    picture: bytes
    caption: str
    facts: Facts
    key: str
    extras: Mapping[str, Any]


def plain(value: Any) -> Any:
    """A value as a truth, number, text or list of these; what else there is becomes text, bytes nothing."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return value if -LARGEST <= value < LARGEST else str(value)
    if isinstance(value, (list, tuple)):
        entries = [plain(entry) for entry in value]
        nested = any(isinstance(entry, (list, dict)) for entry in value)
        return json.dumps(value, default=str, ensure_ascii=False) if nested else entries
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, bytes):
        return None
    return json.dumps(value, default=str, ensure_ascii=False)


def type_of(values: Iterable[Any]) -> pa.DataType:
    """The narrowest type that holds all values: numbers stay numbers, a mixture becomes text."""
    found = NOTHING
    for value in values:
        found = common(found, _type(value))
        if found == TEXT:
            break
    return found


def _type(value: Any) -> pa.DataType:
    if value is None:
        return NOTHING
    if isinstance(value, list):
        entries = type_of(value)
        return pa.list_(entries)
    return {bool: TRUTH, int: WHOLE, float: FRACTION}.get(type(value), TEXT)


def common(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """The narrowest type that holds what both hold."""
    if a == b or b == NOTHING:
        return a
    if a == NOTHING:
        return b
    if pa.types.is_list(a) and pa.types.is_list(b):
        return pa.list_(common(a.value_type, b.value_type))
    if _is_number(a) and _is_number(b):
        return WHOLE if pa.types.is_integer(a) and pa.types.is_integer(b) else FRACTION
    return TEXT


def _is_number(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_))


def settled(type_: pa.DataType) -> pa.DataType:
    """A list of which only empty ones were seen is a list of texts until one is seen that is not."""
    return pa.list_(TEXT) if pa.types.is_list(type_) and type_.value_type == NOTHING else type_


def column(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """Plain values as a column of a type that holds them."""
    if pa.types.is_string(type_):
        return pa.array([v if v is None else _text(v) for v in values], type_)
    if pa.types.is_list(type_) and pa.types.is_string(type_.value_type):
        return pa.array([v and [e if e is None else _text(e) for e in v] for v in values], type_)
    return pa.array(values, type_)


def _text(value: Any) -> str:
    return clean(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def widened(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """A column as another type that holds all of its values; text is JSON but for what is text already."""
    if not pa.types.is_string(type_) or pa.types.is_string(column.type):
        return column.cast(type_)
    return pa.array([None if v is None else json.dumps(v) for v in column.to_pylist()], type_)


def widen(store: Store, types: Mapping[str, pa.DataType]) -> None:
    """Change a store's columns to types that hold all they have: whole numbers to fractions, any to text."""
    finish_widening(store)
    for name, type_ in types.items():
        read, temporary = store.dataset.schema.field(name), WIDENED + name
        converted = lance.batch_udf(pa.schema([pa.field(temporary, type_, metadata=read.metadata)]))(
            lambda batch, name=name, type_=type_, to=temporary: pa.record_batch(
                [widened(batch.column(name), type_)], [to]
            )
        )
        store.change(methodcaller("add_columns", converted, read_columns=[name]))
        store.change(methodcaller("drop_columns", [name]))
        finish_widening(store)


def finish_widening(store: Store) -> None:
    """Finish what a kill in the middle of widening a column left."""
    for temporary in [n for n in store.dataset.schema.names if n.startswith(WIDENED)]:
        name = temporary.removeprefix(WIDENED)
        if name in store.dataset.schema.names:
            store.change(methodcaller("drop_columns", [temporary]))
        else:
            store.change(methodcaller("alter_columns", {"path": temporary, "name": name}))


class ExtraColumns:
    """The source's own columns, as the store has them."""

    def __init__(self, schema: pa.Schema) -> None:
        self.renamed: dict[str, str] = {}
        self.widened: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._reserved = {*SCHEMA.names}
        self._reserved |= {
            f.name for f in schema if any(k.startswith(b"darkroom.") for k in f.metadata or {})
        }
        self._types = {field.name: field.type for field in schema if field.name not in self._reserved}

    def columns(self, rows: Sequence[PassedPicture]) -> tuple[dict[str, pa.Array], dict[str, pa.DataType]]:
        """The extra columns of some rows, and the types that the store's columns must have to take them."""
        names = dict.fromkeys(name for row in rows for name in row.extras)
        arrays, needed = {}, {}
        for name in names:
            values = [plain(row.extras.get(name)) for row in rows]
            found = type_of(values)
            if found == NOTHING:
                continue
            target = self._name(name)
            has = self._types.get(target)
            wanted = settled(found if has is None else _held(has, found))
            if wanted != has:
                needed[target] = wanted
                self._types[target] = wanted
                if has is not None:
                    self.widened[target] = f"{has} to {wanted}"
            arrays[target] = _as(values, found, wanted)
        return arrays, needed

    def _name(self, name: str) -> str:
        """The store's name for a column: not one of its own, and without dots, which mean fields there."""
        if name not in self._names:
            target = clean(name).replace(".", "_").strip() or "unnamed"
            if target in self._reserved or target.startswith("_"):
                target = f"source_{target.lstrip('_')}"
            while target in self._names.values():
                target += "_2"
            if target != name:
                self.renamed[name] = target
            self._names[name] = target
        return self._names[name]


def _held(has: pa.DataType, found: pa.DataType) -> pa.DataType:
    """The type a store's column needs to hold new values too: its own where they fit."""
    both = common(has, found)
    if both == FRACTION and pa.types.is_floating(has):
        return has
    if both == WHOLE and pa.types.is_integer(has) and has != WHOLE:
        return WHOLE
    return both


def _as(values: Sequence[Any], found: pa.DataType, wanted: pa.DataType) -> pa.Array:
    return (
        widened(column(values, settled(found)), wanted)
        if not pa.types.is_list(wanted)
        else column(values, wanted)
    )


def table(rows: Sequence[PassedPicture], source: str, extras: Mapping[str, pa.Array]) -> pa.Table:
    """Rows as the store takes them."""
    own = {
        "id": [row.id for row in rows],
        "picture": [row.picture for row in rows],
        "caption": [row.caption for row in rows],
        "width": [row.facts.width for row in rows],
        "height": [row.facts.height for row in rows],
        "format": [row.facts.format for row in rows],
        "phash": [row.facts.phash for row in rows],
        "source": [source] * len(rows),
        "key": [readable(row.key) for row in rows],
    }
    made = pa.table(own, schema=SCHEMA)
    for name, array in extras.items():
        made = made.append_column(name, array)
    return made
