"""Parquet files with pictures in them: bytes, the hub's `image: {bytes, path}`, or paths of files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from darkroom.data.importers.source import (
    CAPTION_NAMES,
    IMAGE_NAMES,
    MAX_PICTURE_BYTES,
    Columns,
    Item,
    PartRead,
    Problem,
    Sample,
    captions_of,
    find_name,
    no_column,
    no_files_below,
    part_key,
    part_name,
    paths_below,
)
from darkroom.data.texts import NOT_UTF8, TextError, decode_text
from darkroom.errors import InputError, is_system_failure

BATCH_ROWS = 64
READ_BYTES = 1024**2


def parquets_in(path: Path) -> list[Path]:
    """The Parquet files below a folder, in order."""
    return paths_below(path, (".parquet",))


@dataclass(frozen=True)
class _Unread:
    """A value of a row that cannot be read, and why."""

    why: str


class ParquetSource:
    """One Parquet file or all below a folder, read a few rows at a time.

    Binary columns other than the picture are left out, and `left_out` names them.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        self._root, self._columns = path, columns
        self._files = [path] if path.is_file() else parquets_in(path)
        self.left_out: set[str] = set()
        self.recoded: Counter[str] = Counter()
        self.same_name = 0
        self.total: int | None = 0
        if not self._files:
            raise InputError(f"no .parquet file in {path}")
        self._names(_opened(self._files[0]).schema_arrow, self._files[0])
        for file in self._files:
            self.total += _opened(file).metadata.num_rows

    def items(self, finished: Collection[str]) -> Iterator[Item]:
        """Rows of all files that are not `finished`."""
        yield from no_files_below(self._root, (".parquet",))
        for file in self._files:
            part = part_name(file, self._root if self._root.is_dir() else file)
            if part not in finished:
                yield from self._rows(file)
            yield PartRead(part)

    def _names(self, schema: pa.Schema, file: Path) -> tuple[str, str]:
        """Which columns hold the picture and the caption."""
        given, with_bytes = self._columns.image, [f.name for f in schema if _holds_bytes(f.type)]
        paths = [f.name for f in schema if _is_text(f.type)]
        image = (
            find_name(given, IMAGE_NAMES, schema.names if given else with_bytes, "image")
            or find_name(None, IMAGE_NAMES, paths, "image")
            or (with_bytes[0] if len(with_bytes) == 1 else None)
        )
        caption = find_name(self._columns.caption, CAPTION_NAMES, schema.names, "caption")
        if image is None or caption is None:
            raise no_column("caption" if image else "image", file.name, schema.names)
        return image, caption

    def _rows(self, file: Path) -> Iterator[Item]:
        prefix = part_key(file, self._root)
        try:
            parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES)
            image, caption = self._names(parquet.schema_arrow, file)
            columns = self._kept(parquet.schema_arrow, image, caption)
            number = 0
            for batch in parquet.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
                for row in self._decoded(batch):
                    yield from self._row(f"{prefix}{number}", row, image, caption, file)
                    number += 1
        except (pa.ArrowException, OSError) as error:
            if is_system_failure(error):
                raise
            yield Problem(prefix or file.name, "torn-part", " ".join(str(error).split()))

    def _decoded(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        """Rows of a batch. Where Parquet holds what Python does not (text that is no UTF-8, the year 10,000)
        that value alone is an `_Unread`.
        """
        batch = _in_microseconds(batch)
        try:
            rows: list[dict[str, Any]] = batch.to_pylist()
            return rows
        except (ValueError, OverflowError):
            columns = [[self._value(scalar) for scalar in column] for column in batch.columns]
            return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _value(self, scalar: pa.Scalar) -> Any:
        try:
            if _is_text(scalar.type) and scalar.is_valid:
                return self._text(scalar.as_buffer().to_pybytes())
            return scalar.as_py()
        except (ValueError, OverflowError) as error:
            return _Unread(NOT_UTF8 if isinstance(error, UnicodeDecodeError) else str(error))

    def _text(self, value: bytes) -> str:
        return decode_text(value, self.recoded, self._columns.encoding)

    def _kept(self, schema: pa.Schema, image: str, caption: str) -> list[str]:
        out = {f.name for f in schema if _holds_bytes(f.type) and f.name not in (image, caption)}
        self.left_out |= out
        return [name for name in schema.names if name not in out]

    def _row(self, key: str, row: dict[str, Any], image: str, caption: str, file: Path) -> Iterator[Item]:
        value = row.pop(image)
        if isinstance(value, _Unread):
            yield Problem(key, "no-picture", f"column '{image}': {value.why}")
            return
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if isinstance(data, str):
            data, path = None, data
        if data is None:
            data = self._read(path, file)
        if isinstance(data, str):
            yield Problem(key, "no-picture", data)
        elif len(data) > MAX_PICTURE_BYTES:
            yield Problem(key, "bomb", f"more than {MAX_PICTURE_BYTES} bytes")
        else:
            content = row.pop(caption)
            if isinstance(content, _Unread):
                yield Problem(key, "bad-caption", content.why)
                return
            if unread := next((name for name, value in row.items() if isinstance(value, _Unread)), None):
                yield Problem(key, "bad-metadata", f"column '{unread}': {row[unread].why}")
                return
            try:
                content = self._text(content) if isinstance(content, bytes) else content
                captions = captions_of(content)
            except TextError as error:
                yield Problem(key, "bad-caption", str(error))
                return
            for text in captions:
                yield Sample(key, data, text, row)

    def _read(self, path: str | None, file: Path) -> bytes | str:
        """The picture at a path relative to the Parquet file, or why not; never outside the source."""
        root = self._root if self._root.is_dir() else self._root.parent
        if not path:
            return "neither bytes nor a path"
        for folder in (file.parent, root):
            place = (folder / path).resolve()
            if place.is_relative_to(root.resolve()) and place.is_file():
                return place.read_bytes()
        return f"no file '{path}' in {root.name}"


def _opened(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        if is_system_failure(error):
            raise
        raise InputError(f"{file} is no Parquet file: {' '.join(str(error).split())}") from error


def _in_microseconds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Times to the nanosecond, which Python has no type for, to the microsecond."""
    columns = [
        column.cast(coarser, safe=False) if (coarser := _coarser(column.type)) is not None else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _coarser(type_: pa.DataType) -> pa.DataType | None:
    if pa.types.is_timestamp(type_) and type_.unit == "ns":
        return pa.timestamp("us", type_.tz)
    if pa.types.is_time64(type_) and type_.unit == "ns":
        return pa.time64("us")
    return pa.duration("us") if pa.types.is_duration(type_) and type_.unit == "ns" else None


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _holds_bytes(type_: pa.DataType) -> bool:
    if pa.types.is_struct(type_):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in type_)
    return bool(
        pa.types.is_binary(type_) or pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_)
    )
