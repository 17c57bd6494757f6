"""Files of many samples with columns: Parquet, and MosaicML Streaming's MDS shards, without its package."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from darkroom.data.images import paths_below
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
)
from darkroom.data.texts import NOT_UTF8, TextError, decode_text
from darkroom.errors import InputError, first_fault, is_system_failure

# ---- Parquet: bytes, the hub's `image: {bytes, path}`, or paths of files

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


# ---- MDS
#
# A folder's `index.json` lists the shards, each with its columns and their encodings. A shard is: the number
# of samples n and n + 1 offsets (uint32, little-endian), the writer's settings as JSON, then the samples. A
# sample is the sizes of its columns of variable size (uint32), then the columns' bytes one after the other.

INDEX = "index.json"
COPY_BYTES = 1024**2
PICTURES = ("jpeg", "png", "pil", "bytes")
NUMBERS = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)) | {
    "float16", "float32", "float64",
}  # fmt: skip

TEXTS = NUMBERS | {"str", "bytes", "json", "int", "str_int", "str_float", "str_decimal"}
"""Encodings in which a caption can be."""

UNPACKERS: dict[str, Callable[[BinaryIO], IO[bytes]]] = {
    "zstd": lambda file: zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True),
    "gz": lambda file: cast(IO[bytes], gzip.GzipFile(fileobj=file)),
    "bz2": lambda file: cast(IO[bytes], bz2.BZ2File(file)),
}


class _File(BaseModel):
    basename: str
    bytes: int


class _Shard(BaseModel):
    """A shard as `index.json` has it; hashes and limits of the writer are of no use here."""

    model_config = ConfigDict(extra="ignore")

    version: int
    format: str
    samples: int = Field(ge=0)
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    compression: str | None = None
    raw_data: _File
    zip_data: _File | None = None

    @model_validator(mode="after")
    def _columns_agree(self) -> Self:
        if not len(self.column_names) == len(self.column_encodings) == len(self.column_sizes):
            raise ValueError("column_names, column_encodings and column_sizes are of different lengths")
        if len(set(self.column_names)) < len(self.column_names):
            raise ValueError("column_names has a name twice")
        return self


def indices_in(path: Path) -> list[Path]:
    """The folders below a path that hold MDS shards, in order."""
    found = paths_below(path, (INDEX,))
    return [index.parent for index in found if index.name == INDEX and _mentions_mds(index)]


def _mentions_mds(index: Path) -> bool:
    with index.open(encoding="utf-8", errors="replace") as file:
        return '"mds"' in file.read(65_536)


class MdsSource:
    """MDS shards below a folder, raw or packed with zstd, gz or bz2.

    Numbers, text and JSON come along; arrays, pickles and other binary columns are left out, and
    `left_out` names them.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        self._root, self._columns = path if path.is_dir() else path.parent, columns
        self.left_out: set[str] = set()
        self.recoded: Counter[str] = Counter()
        self.same_name = 0
        self._shards = [(folder, shard) for folder in indices_in(path) for shard in _shards(folder)]
        if not self._shards:
            raise InputError(f"no MDS shards in {path}", allowed=f"a folder with an {INDEX}")
        self._names(self._shards[0][1])
        self.total: int | None = sum(shard.samples for _, shard in self._shards)

    def items(self, finished: Collection[str]) -> Iterator[Item]:
        """Samples of all shards that are not `finished`."""
        for folder, shard in self._shards:
            name = (folder.relative_to(self._root) / shard.raw_data.basename).as_posix()
            try:
                place = _place(folder, shard)
            except ValueError as error:
                yield Problem(name, "torn-part", str(error))
                continue
            part = part_name(place, self._root)
            if part not in finished:
                yield from self._samples(name, place, shard)
            yield PartRead(part)

    def _names(self, shard: _Shard) -> tuple[str, str]:
        """Which columns hold the picture and the caption."""
        given, encodings = (
            self._columns.image,
            dict(zip(shard.column_names, shard.column_encodings, strict=True)),
        )
        fitting = sorted(
            (name for name, encoding in encodings.items() if encoding in PICTURES),
            key=lambda name: PICTURES.index(encodings[name]),
        )
        usual = [*(n for n in fitting if encodings[n] != "bytes"), *IMAGE_NAMES]
        image = find_name(given, usual, list(encodings) if given else fitting, "image")
        if image is None and len(fitting) == 1:
            image = fitting[0]
        readable = [name for name, encoding in encodings.items() if encoding in TEXTS]
        wanted = self._columns.caption
        caption = find_name(wanted, CAPTION_NAMES, list(encodings) if wanted else readable, "caption")
        if image is None or caption is None:
            raise no_column("caption" if image else "image", INDEX, encodings)
        if caption not in readable:
            raise InputError(
                f"the caption column '{caption}' is {encodings[caption]}", allowed=", ".join(sorted(TEXTS))
            )
        return image, caption

    def _samples(self, name: str, place: Path, shard: _Shard) -> Iterator[Item]:
        image, caption = self._names(shard)
        number = 0
        try:
            with _unpacked(place, shard) as file:
                for columns in _read(file, shard):
                    yield from self._sample(f"{name}:{number}", columns, shard, image, caption)
                    number += 1
        except (OSError, ValueError, EOFError, struct.error, zstandard.ZstdError) as error:
            if is_system_failure(error):
                raise
            yield Problem(f"{name}:{number}", "torn-part", f"damaged shard: {error}")

    def _sample(
        self, key: str, columns: dict[str, bytes], shard: _Shard, image: str, caption: str
    ) -> Iterator[Item]:
        encodings = dict(zip(shard.column_names, shard.column_encodings, strict=True))
        try:
            picture = _picture(encodings.pop(image), columns[image])
            values = {
                name: self._value(encodings[name], columns[name]) for name in encodings if name != caption
            }
        except (ValueError, RecursionError, struct.error) as error:
            yield Problem(key, "bad-metadata", f"a column does not decode: {error}")
            return
        self.left_out |= {name for name, value in values.items() if value is NotImplemented}
        kept = {name: value for name, value in values.items() if value is not NotImplemented}
        if len(picture) > MAX_PICTURE_BYTES:
            yield Problem(key, "bomb", f"more than {MAX_PICTURE_BYTES} bytes")
            return
        try:
            encoding = "str" if encodings[caption] == "bytes" else encodings[caption]
            texts = captions_of(self._value(encoding, columns[caption]))
        except (ValueError, RecursionError, struct.error) as error:
            yield Problem(key, "bad-caption", str(error))
            return
        for text in texts:
            yield Sample(key, picture, text, kept)

    def _value(self, encoding: str, data: bytes) -> Any:
        """A column's value; NotImplemented for what is neither number, text nor JSON."""
        return (
            decode_text(data, self.recoded, self._columns.encoding)
            if encoding == "str"
            else _value(encoding, data)
        )


def _shards(folder: Path) -> list[_Shard]:
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        shards = [_Shard.model_validate(shard) for shard in content["shards"]]
    except ValidationError as error:
        why = first_fault(error.errors())
        raise InputError(f"{folder / INDEX} is no index of MDS shards: {why}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{folder / INDEX} is no index of MDS shards: {error}") from error
    for shard in shards:
        if shard.format != "mds" or shard.version != 2:
            raise InputError(f"shards of {shard.format} {shard.version} in {folder}", allowed="mds 2")
        if _algorithm(shard) not in ("", *UNPACKERS) and not (folder / shard.raw_data.basename).is_file():
            raise InputError(
                f"shards packed with {shard.compression}", allowed=f"raw, {', '.join(UNPACKERS)}"
            )
    return shards


def _algorithm(shard: _Shard) -> str:
    return (shard.compression or "").partition(":")[0]


def _place(folder: Path, shard: _Shard) -> Path:
    """The shard's file, the raw one where both are there."""
    for file in (shard.raw_data, shard.zip_data):
        if file is not None and Path(file.basename).name == file.basename:
            place = folder / file.basename
            if place.is_file():
                if place.stat().st_size != file.bytes:
                    raise ValueError(f"{file.basename} has {place.stat().st_size} of {file.bytes} bytes")
                return place
    raise ValueError(f"{shard.raw_data.basename} is missing")


def _unpacked(place: Path, shard: _Shard) -> BinaryIO:
    """The shard open for reading; a packed one is unpacked into a file without a name, not into memory."""
    if place.name == shard.raw_data.basename:
        return place.open("rb")
    unpacked = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115
    with place.open("rb") as packed:
        stream = UNPACKERS[_algorithm(shard)](packed)
        left = shard.raw_data.bytes
        while left and (chunk := stream.read(min(COPY_BYTES, left))):
            unpacked.write(chunk)
            left -= len(chunk)
    if left:
        raise ValueError(f"{left} bytes are missing")
    unpacked.seek(0)
    return unpacked


def _read(file: BinaryIO, shard: _Shard) -> Iterator[dict[str, bytes]]:
    """The samples of a raw shard, each as the bytes of its columns."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    (samples,) = struct.unpack("<I", file.read(4))
    if 4 * (samples + 2) > size:  # before memory is asked for as many
        raise ValueError(f"{samples} samples in {size} bytes")
    offsets = np.frombuffer(file.read(4 * (samples + 1)), "<u4").astype(np.int64)
    if (np.diff(offsets) < 0).any() or offsets[-1] > size:
        raise ValueError("its offsets lead nowhere")
    file.seek(int(offsets[0]))
    for length in np.diff(offsets).tolist():
        yield _columns(file.read(length), shard)


def _columns(data: bytes, shard: _Shard) -> dict[str, bytes]:
    at, sizes = 0, []
    for size in shard.column_sizes:
        if not size:
            (size,) = struct.unpack_from("<I", data, at)
            at += 4
        sizes.append(size)
    if at + sum(sizes) != len(data):
        raise ValueError("a sample's sizes do not add up")
    columns = {}
    for name, size in zip(shard.column_names, sizes, strict=True):
        columns[name] = data[at : at + size]
        at += size
    return columns


def _picture(encoding: str, data: bytes) -> bytes:
    """A picture's file: as it stands, or for raw pixels a PNG of them."""
    if encoding != "pil":
        return data
    width, height, length = struct.unpack_from("<3I", data)
    if width * height * 4 > MAX_PICTURE_BYTES:
        raise ValueError(f"{width}x{height} raw pixels")
    mode = data[12 : 12 + length].decode()
    file = io.BytesIO()
    Image.frombytes(mode, (width, height), data[12 + length :]).save(file, "PNG")
    return file.getvalue()


def _value(encoding: str, data: bytes) -> Any:
    """A number or JSON, else NotImplemented."""
    if encoding in NUMBERS:
        if len(data) != np.dtype(encoding).itemsize:
            raise ValueError(f"{len(data)} bytes of {encoding}")
        return np.frombuffer(data, np.dtype(encoding).newbyteorder("<"))[0].item()
    if encoding == "int":
        return struct.unpack("<q", data)[0]
    if encoding == "json":
        return json.loads(decode_text(data))
    readers: dict[str, Callable[[str], Any]] = {"str_int": int, "str_float": float, "str_decimal": float}
    return readers[encoding](data.decode()) if encoding in readers else NotImplemented
