"""Archives of pictures, read member by member: zip files of any size, and webdataset's tars."""

from __future__ import annotations

import json
import os
import posixpath
import re
import struct
import tarfile
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from darkroom.data.images import is_picture, paths_below
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
    typed,
)
from darkroom.data.sidecars import short_id
from darkroom.data.texts import MAX_CAPTION_BYTES, TextError, decode_text
from darkroom.errors import InputError, is_system_failure
from darkroom.hardware.system import read_at

# ---- zip: its list of contents takes 40 bytes a member

STORED, DEFLATED = 0, 8
END = struct.Struct("<4s4H2IH")
END64_PLACE = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQ2H2I4Q")
ENTRY = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
READ_BYTES = 1024**2
WINDOW_BYTES = 256 * 1024
UTF8, ENCRYPTED = 0x800, 0x1
ENCRYPTED_METHOD = -1  # in the index: no archive can say so
EARLIER = re.compile(r"#(\d{1,9})(?=(\.[^./]*)?$)")
"""The number in the name of a member that a later one of the same name follows: `a#1.jpg`."""


class Member(NamedTuple):
    """A file in the archive, by what its entry in the list of contents says."""

    name: str
    method: int
    encrypted: bool
    crc: int
    packed: int
    size: int
    offset: int


class ZipReader:
    """The members of a zip archive, in the archive's order or by name, from several threads at once.

    Of several members with one name the last has it, as for every program that unpacks; those before it are
    called `a#1.jpg`, `a#2.jpg`, ... `num_earlier` is how many those are.

    Python's own reader holds about a kilobyte for every member, so a million pictures cost a gigabyte
    before the first is read. Understands zip64, stored and deflated members. InputError for what is no
    zip, ValueError for a member that is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        self._size = os.fstat(self._file.fileno()).st_size
        self._window: tuple[int, bytes] = (0, b"")
        try:
            self._start, self._length, self._shift = self._find_contents()
            self._index()
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            self._file.close()
            raise InputError(f"{path} is no whole zip archive: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_at(self, offset: int, length: int) -> bytes:
        """Bytes of the file; where they are asked for in order, a stretch at once.

        Each call to the system hands Python's lock to the threads that decode and waits to get it back.
        """
        start, window = self._window
        if start <= offset and offset + length <= start + len(window):
            return window[offset - start : offset - start + length]
        follows = 0 <= offset - start <= len(window)
        data = read_at(self._file, offset, max(length, WINDOW_BYTES) if follows else length)
        self._window = (offset, data)
        return data[:length]

    def _find_contents(self) -> tuple[int, int, int]:
        """Where the list of contents starts, its length, and how far the archive stands in the file."""
        tail_start = max(0, self._size - 65_557)
        tail = self._read_at(tail_start, self._size - tail_start)
        at = tail.rfind(b"PK\5\6")
        if at < 0:
            raise ValueError("its end is missing")
        _, _, _, _, _, length, start, _ = END.unpack_from(tail, at)
        end = tail_start + at
        if at >= END64_PLACE.size and tail[at - END64_PLACE.size : at].startswith(b"PK\6\7"):
            place = END64_PLACE.unpack_from(tail, at - END64_PLACE.size)[2]
            fields = END64.unpack(self._read_at(place, END64.size))
            length, start, end = fields[8], fields[9], place
        shift = end - length - start
        if shift < 0:
            raise ValueError("its list of contents is torn")
        return start + shift, length, shift

    def members(self) -> Iterator[Member]:
        """All files, in the archive's order."""
        if not self.num_earlier:
            yield from self._members()
            return
        seen: Counter[int] = Counter()
        for member in self._members():
            if (count := self._count(hashed := short_id(member.name))) > 1:
                seen[hashed] += 1
                if seen[hashed] < count:
                    stem, ending = posixpath.splitext(member.name)
                    member = member._replace(name=f"{stem}#{seen[hashed]}{ending}")
            yield member

    def called(self, name: str) -> str:
        """What the archive calls a member that goes by a name with a number."""
        plain = EARLIER.sub("", name) if "#" in name else name
        return plain if plain != name and self._count(short_id(plain)) > 1 else name

    def _count(self, hashed: int) -> int:
        return bisect_right(self._hashes, hashed) - bisect_left(self._hashes, hashed)

    def _members(self) -> Iterator[Member]:
        buffer, at, read = b"", 0, 0
        while True:
            if len(buffer) - at < 4 * 65_536 and read < self._length:
                more = self._read_at(self._start + read, min(READ_BYTES, self._length - read))
                if not more:
                    raise ValueError("its list of contents is torn")
                buffer, at, read = buffer[at:] + more, 0, read + len(more)
            if at >= len(buffer):
                return
            member, at = self._entry(buffer, at)
            if not member.name.endswith("/"):
                yield member

    def _entry(self, buffer: bytes, at: int) -> tuple[Member, int]:
        fields = ENTRY.unpack_from(buffer, at)
        if fields[0] != b"PK\1\2":
            raise ValueError("its list of contents is torn")
        flags, method, crc, packed, size = fields[3], fields[4], fields[7], fields[8], fields[9]
        name_end = at + ENTRY.size + fields[10]
        extra_end = name_end + fields[11]
        raw, extra = buffer[at + ENTRY.size : name_end], buffer[name_end:extra_end]
        size, packed, offset = _wide(extra, size, packed, fields[16])
        offset += self._shift
        if not 0 <= offset < 2**63:  # a file ends there
            raise ValueError("its list of contents is torn")
        name = _name(raw, bool(flags & UTF8)).replace("\\", "/")
        member = Member(name, method, bool(flags & ENCRYPTED), crc, packed, size, offset)
        return member, extra_end + fields[12]

    def _index(self) -> None:
        """Note each name's hash and where its entry can be read from, sorted by the hash."""
        columns = [array(code) for code in "QQQQIi"]
        for member in self._members():
            numbers = (
                short_id(member.name), member.offset, member.packed, member.size, member.crc,
                ENCRYPTED_METHOD if member.encrypted else member.method,
            )  # fmt: skip
            for column, number in zip(columns, numbers, strict=True):
                column.append(number)
        order = np.argsort(np.array(columns[0], np.uint64), kind="stable")
        for column in columns:
            sorted_ = np.frombuffer(column, column.typecode)[order] if column else np.zeros(0)
            column[:] = array(column.typecode, sorted_.tobytes())
        self._hashes, *self._fields = columns
        hashes = np.frombuffer(self._hashes, np.uint64) if self._hashes else np.zeros(0)
        self.num_earlier = int((hashes[1:] == hashes[:-1]).sum())

    def find(self, name: str) -> Member | None:
        """A member by its name."""
        at = bisect_right(self._hashes, wanted := short_id(name)) - 1  # the last of that name
        if at < 0 or self._hashes[at] != wanted:
            number = EARLIER.search(name)
            if number is None or (plain := self.called(name)) == name:
                return None
            at = bisect_left(self._hashes, wanted := short_id(plain)) + int(number[1]) - 1
            if int(number[1]) < 1 or int(number[1]) >= self._count(wanted):
                return None
        offset, packed, size, crc, method = (column[at] for column in self._fields)
        return Member(name, method, method == ENCRYPTED_METHOD, crc, packed, size, offset)

    def read(self, member: Member) -> bytes:
        """A member's content; ValueError where it is damaged, encrypted or packed in another way."""
        data = b"".join(self.chunks(member))
        if len(data) != member.size or zlib.crc32(data) != member.crc:
            raise ValueError("damaged in the archive")
        return data

    def chunks(self, member: Member) -> Iterator[bytes]:
        """A member's content piece by piece, never more than its entry says."""
        if member.encrypted or member.method not in (STORED, DEFLATED):
            raise ValueError("encrypted" if member.encrypted else f"packed by method {member.method}")
        header = self._read_at(member.offset, LOCAL.size)
        if len(header) < LOCAL.size or header[:4] != b"PK\3\4":
            raise ValueError("damaged in the archive")
        start = member.offset + LOCAL.size + sum(LOCAL.unpack(header)[-2:])
        pieces = self._pieces(start, member.packed)
        yield from pieces if member.method == STORED else _inflated(pieces, member.size)

    def _pieces(self, start: int, length: int) -> Iterator[bytes]:
        for at in range(0, length, READ_BYTES):
            if not (piece := self._read_at(start + at, min(READ_BYTES, length - at))):
                return  # the entry claims more than there is
            yield piece


def _name(raw: bytes, is_utf8: bool) -> str:
    """A member's name; one that says it is UTF-8 and is not is read as any other: no byte is lost."""
    if is_utf8:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            pass
    return raw.decode("cp437")


def _inflated(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
    unpacker, left = zlib.decompressobj(-zlib.MAX_WBITS), size
    for piece in pieces:
        while piece and left:
            try:
                unpacked = unpacker.decompress(piece, min(left, READ_BYTES))
            except zlib.error as error:
                raise ValueError("damaged in the archive") from error
            left -= len(unpacked)
            yield unpacked
            piece = unpacker.unconsumed_tail
    if left:
        yield unpacker.flush()[:left]


def _wide(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The sizes and offset, taken from the zip64 field where they do not fit into 32 bits."""
    numbers = [size, packed, offset]
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            place = at + 4
            for i, number in enumerate(numbers):
                if number == 0xFFFFFFFF:
                    numbers[i] = struct.unpack_from("<Q", extra, place)[0]
                    place += 8
        at += 4 + length
    return numbers[0], numbers[1], numbers[2]


# ---- webdataset tars: the files of a sample stand together and share a name up to the first dot

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
TEXTS = ("txt", "text", "caption")
LABELS = ("cls", "id", "url")
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
