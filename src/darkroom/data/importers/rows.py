"""From samples to rows: which type a source's own column has, and what becomes of values that do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from operator import methodcaller
from typing import Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa

from darkroom.data.images import Facts
from darkroom.data.importers.source import clean
from darkroom.data.store import SCHEMA, Store
from darkroom.data.texts import readable

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
    """A list of which only empty ones were seen is a list of texts until told otherwise."""
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
