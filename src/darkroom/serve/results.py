"""Pictures on disk, a folder for each job. A file is there whole or not at all, flushed before it counts."""

from __future__ import annotations

import fcntl
import io
import os
import re
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from PIL.PngImagePlugin import PngInfo

from darkroom import sample
from darkroom.errors import InputError
from darkroom.sample.pictures import png_text

XMP = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about="" '
    'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" Iptc4xmpExt:DigitalSourceType='
    '"http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"/></rdf:RDF></x:xmpmeta>'
    '<?xpacket end="r"?>'
)
"""What every picture says of itself, in IPTC's words: made by a trained model."""
UID = re.compile(r"[0-9a-f]{32}")
PROBE_UID = "0" * 32
"""Of no job: written and dropped now and then, to see whether writing works."""


class PictureFiles(Protocol):
    """Where the files of jobs are kept: a folder (`Results`), or a database (`files`)."""

    @property
    def folder(self) -> Path | None:
        """On the disk."""

    @property
    def secret(self) -> bytes:
        """Signs the addresses of pictures."""

    def write(self, uid: str, files: dict[str, bytes]) -> int:
        """Keep a job's files, by name; returns their bytes."""

    def read(self, uid: str, name: str) -> bytes | None:
        """One file of a job, None where it is gone."""

    def delete(self, uid: str, names: Collection[str] | None = None) -> None:
        """Drop all files of a job, or those of these names."""

    def uids(self) -> Collection[str]:
        """Jobs that have files, to see whether they are jobs still."""

    def close(self) -> None:
        """Let go of it."""


class Results:
    """The pictures of jobs, by uid, under one folder which is locked for one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "pictures"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another server runs on '{folder}'", mend="give --state another folder"
            ) from error
        except OSError as error:
            raise InputError(f"'{folder}' cannot be written: {error.strerror}") from error
        self.secret = _secret(folder / ".secret")
        """Signs the addresses of pictures."""

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.close()

    def write(self, uid: str, files: dict[str, bytes]) -> int:
        """Keep a job's files, by name; returns their bytes. On return they outlast a power cut."""
        folder = self._folder(uid)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write_flushed(folder / name, content)
        _flush_folder(folder)
        _flush_folder(folder.parent)
        return sum(len(content) for content in files.values())

    def read(self, uid: str, name: str) -> bytes | None:
        """One file of a job, None where it is gone."""
        try:
            return (self._folder(uid) / name).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, uid: str, names: Collection[str] | None = None) -> None:
        """Drop all files of a job, or those of these names."""
        if names is None:
            shutil.rmtree(self._folder(uid), ignore_errors=True)
        for name in names or ():
            (self._folder(uid) / name).unlink(missing_ok=True)

    def uids(self) -> list[str]:
        """All jobs that have files."""
        names = (path.name for path in self.folder.glob("*/*"))
        return [name for name in names if UID.fullmatch(name) and name != PROBE_UID]

    def _folder(self, uid: str) -> Path:
        assert UID.fullmatch(uid)
        return self.folder / uid[:2] / uid


def png_bytes(picture: sample.Picture) -> bytes:
    """A picture as a PNG file with its parameters inside."""
    buffer = io.BytesIO()
    told = png_text(picture) or PngInfo()
    told.add_itxt("XML:com.adobe.xmp", XMP)
    # Fast compression: a photograph-like picture gains little from more, and the server has other work.
    picture.image.save(buffer, "PNG", pnginfo=told, compress_level=1)
    return buffer.getvalue()


def picture_name(index: int) -> str:
    """The file of a job's picture."""
    return f"{index}.png"


def _write_flushed(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.part")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _secret(path: Path) -> bytes:
    """Random bytes kept for the server's eyes alone, so that signed addresses hold across restarts."""
    try:
        found = path.read_bytes()
        if len(found) == 32:
            return found
    except FileNotFoundError:
        pass
    made = secrets.token_bytes(32)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(made)
    return made
