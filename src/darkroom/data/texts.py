"""Text from files of any age: UTF-8, else what its mark says, else the encoding that the user names, counted.

What is none of these is no text and is rejected. No encoding of 8 bits is guessed: any bytes are some letters
in each of them, and wrong letters are noticed by nobody.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from darkroom.errors import InputError, is_system_failure

MAX_CAPTION_BYTES = 1024**2
MAX_LINE_BYTES = 64 * 1024**2
NOT_UTF8 = "not UTF-8: save it as UTF-8, or name its encoding: --caption-encoding cp1252, cp1251, ..."
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


MIXED = re.compile(
    rb"[\xc2\xc3][\x80-\xbf]|\xe2\x80[\x80-\xbf]|\xf0\x9f[\x80-\xbf]{2}|(?:[\xe3-\xed][\x80-\xbf]{2}){2}"
)
"""Letters, quotes, pictograms and East Asian signs in UTF-8, which no Western text of 8 bits spells. Read as
one, they would be spoiled."""
WESTERN = ("cp1252", "iso8859-1", "iso8859-15")


class TextError(ValueError):
    """Bytes that are no text, with the reason."""


def _encoding_of(start: bytes) -> tuple[str, int]:
    """The encoding that a text's first bytes tell, and the length of its mark; UTF-8 where they tell none."""
    for mark, encoding in MARKS:
        if start.startswith(mark):
            return encoding, len(mark)
    # Without a mark, Latin letters in UTF-16 have a NUL for every other byte.
    even, odd = start[0::2], start[1::2]
    if odd and odd.count(0) * 2 > len(odd) and not even.count(0):
        return "utf-16-le", 0
    if odd and even.count(0) * 2 > len(even) and not odd.count(0):
        return "utf-16-be", 0
    return "utf-8", 0


def checked_encoding(name: str) -> str:
    """An encoding by Python's name for it; InputError for what is none, or spells ASCII in another way."""
    try:
        if b"plain text".decode(name) == "plain text":
            return codecs.lookup(name).name
    except (LookupError, ValueError):
        pass
    raise InputError(f"caption encoding '{name}'", allowed="cp1252, cp1251, shift_jis, gb18030, ...")


def decode_text(data: bytes, recoded: Counter[str] | None = None, fallback: str | None = None) -> str:
    """A text's bytes as text; `recoded` counts those that were not UTF-8, by encoding. Raises TextError.

    `fallback` is the encoding of what is not UTF-8 and has no mark; without one that is no text.
    """
    encoding, mark = _encoding_of(data)
    try:
        text = data[mark:].decode(encoding)
    except UnicodeDecodeError as error:
        if encoding != "utf-8":
            raise TextError(f"no whole {encoding.upper()} ({error.reason})") from None
        if fallback is None:
            raise TextError(NOT_UTF8) from None
        if fallback in WESTERN and MIXED.search(data):
            raise TextError("UTF-8 with bytes of another encoding in it") from None
        encoding = fallback
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            raise TextError(f"neither UTF-8 nor UTF-16 nor {fallback}") from None
    if recoded is not None and encoding != "utf-8":
        recoded[encoding.removesuffix("-le").removesuffix("-be")] += 1
    return text


def flaw_of(caption: str) -> str:
    """Why a caption cannot be stored as it is; empty where it can."""
    if "\0" in caption:
        return "the caption holds NUL characters"
    try:
        length = len(caption.encode())
    except UnicodeEncodeError:
        return "the caption holds half of a surrogate pair"
    if length > MAX_CAPTION_BYTES:
        return f"a caption of {length:,} bytes, the most is {MAX_CAPTION_BYTES:,}"
    return ""


def readable(name: str) -> str:
    """A file's name as text that can be stored: bytes that are no UTF-8 are written as \\xNN."""
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return name.encode("utf-8", "backslashreplace").decode()


class TextLines:
    """The lines of a text file that is read piece by piece.

    A line that is no text raises TextError; the next call goes on behind it.
    """

    def __init__(self, pieces: Iterable[bytes], recoded: Counter[str], fallback: str | None = None) -> None:
        self._lines = _split(_as_utf8(iter(pieces), recoded))
        self._recoded, self._fallback = recoded, fallback

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            line = next(self._lines)
        except TextError:
            raise
        except (OSError, ValueError) as error:
            if is_system_failure(error):
                raise
            raise TextError(f"cannot be read on: {error}") from error
        if line is None:
            raise TextError(f"a line of more than {MAX_LINE_BYTES:,} bytes")
        try:
            return line.decode()
        except UnicodeDecodeError:
            return decode_text(line, self._recoded, self._fallback)


def _as_utf8(pieces: Iterator[bytes], recoded: Counter[str]) -> Iterator[bytes]:
    first = next(pieces, b"")
    while len(first) < 4 and (more := next(pieces, b"")):
        first += more
    encoding, mark = _encoding_of(first[:4096])
    if encoding == "utf-8":
        yield first[mark:]
        yield from pieces
        return
    recoded[encoding.removesuffix("-le").removesuffix("-be")] += 1
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        yield decoder.decode(first[mark:]).encode()
        for piece in pieces:
            yield decoder.decode(piece).encode()
        decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise TextError(f"no whole {encoding.upper()}: {error}") from None


def _split(pieces: Iterator[bytes]) -> Iterator[bytes | None]:
    """Lines with their ends; None for one that is too long."""
    rest, end, skipping = b"", b"", False
    for piece in pieces:
        if not end and piece:
            end = b"\r" if b"\r" in piece and b"\n" not in piece else b"\n"
        *whole, rest = (rest + piece).split(end) if end else [rest + piece]
        for line in whole:
            if not skipping:
                yield line + end
            skipping = False
        if len(rest) > MAX_LINE_BYTES:
            if not skipping:
                yield None
            rest, skipping = b"", True
    if rest and not skipping:
        yield rest
