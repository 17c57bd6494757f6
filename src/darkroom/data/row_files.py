"""Rows read from a store, kept as files on a local disk and mapped from there the next time.

For a store at an address, which is then downloaded once and not in every epoch, and for one that is larger
than what the loader keeps in memory: mapped rows lie in the system's file cache, which the processes of a
machine share. A file holds a block of rows, or one large row, as an Arrow stream and the CRC-32 of its bytes.
Its name is a hash of what was read: rows that change have another name, and stale ones are never found.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from darkroom.hardware.system import atomic_replace, remove_file, sync_file

FOLDER = "darkroom-rows"
"""What the files lie in, in the folder that the user named: nothing else there is ever looked at."""
NAME = re.compile(r"[0-9a-f]{64}\.rows(\.[0-9a-f]+)?")
UNREAD_DAYS = 30
"""Files that no run has read for so long are removed when the next one starts."""
FREE_SHARE = 0.1
"""Of the disk, left free."""
SUM_BYTES = 8
MAPPED_BYTES = 1 << 20
"""Smaller files are read: a system maps some 65,000 files for a process."""


class RowFiles:
    """A folder of rows, which processes may share; threads may call it.

    Where it is full (about `limit_bytes`, and a tenth of the disk stays free), or no longer takes files,
    further rows are read from the store each time; `say` hears it. OSError where the folder cannot be made or
    written to at first.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        limit_bytes: int | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.folder = Path(folder) / FOLDER
        self._full, self._say = False, say
        self._limit_bytes = limit_bytes
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.folder))
        self.used_bytes = self._count(remove_after_s=UNREAD_DAYS * 86400)
        self._uncounted_bytes = self._writing_bytes = 0

    def get(self, name: str) -> pa.Table | None:
        """The table of that name (64 hex digits), large ones in mapped memory; None where it is not kept, or
        its file is damaged.
        """
        path = self._path(name)
        try:
            data = _content(path)
            if name not in self._checked:
                if not _is_whole(data):
                    del data  # on Windows what is mapped cannot be removed
                    remove_file(path)
                    return None
                self._checked.add(name)
                with suppress(OSError):  # it is another user's
                    os.utime(path)
            return pa.ipc.open_stream(data).read_all()
        except (OSError, pa.ArrowInvalid):  # gone, or not to be read: the store has the rows
            return None

    def keep(self, name: str, table: pa.Table) -> None:
        """Write a table's file, unless the folder is full."""
        if not self._full:
            self._write(self._path(name), table)

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}.rows"

    def _write(self, path: Path, table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        data = sink.getvalue()
        size = data.size + SUM_BYTES
        with self._lock:
            self._writing_bytes += size
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._fits(size):
                _write_whole(path, data)
            else:
                self._stop("is full")
        except OSError as error:
            self._stop(f"takes no more files ({error.strerror})")
        finally:
            with self._lock:
                self._writing_bytes -= size

    def _stop(self, why: str) -> None:
        with self._lock:
            first, self._full = not self._full, True
        if first and self._say is not None:
            self._say(f"{self.folder} {why}: the rows that it lacks are read from the store each time")

    def _fits(self, size: int) -> bool:
        """Whether a file of so many bytes still has its place; other processes' are counted now and then."""
        with self._lock:
            self.used_bytes += size
            self._uncounted_bytes += size
            if self._limit_bytes is not None:
                if self._uncounted_bytes > self._limit_bytes / 100:
                    self.used_bytes, self._uncounted_bytes = self._count() + self._writing_bytes, 0
                if self.used_bytes > self._limit_bytes:
                    return False
        disk = shutil.disk_usage(self.folder)
        return disk.free - size > FREE_SHARE * disk.total

    def _count(self, *, remove_after_s: float | None = None) -> int:
        """Bytes of the files; those not read for so long are removed first."""
        total, now = 0, time.time()
        for entry in self._files():
            with suppress(OSError):  # another process was quicker, or it is another user's
                found = entry.stat()
                if remove_after_s is not None and now - found.st_mtime > remove_after_s:
                    remove_file(entry.path)
                else:
                    total += found.st_size
        return total

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for part in os.scandir(self.folder):
            with suppress(OSError), os.scandir(part.path) as entries:
                yield from (entry for entry in entries if NAME.fullmatch(entry.name))


def _write_whole(path: Path, data: pa.Buffer) -> None:
    """Write a stream and its sum, so that no reader finds half of the file."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.write(_sum(data).to_bytes(SUM_BYTES, "little"))
        sync_file(temporary)  # else a power cut may leave the name without all of the bytes
        atomic_replace(temporary, path)
    except OSError as error:
        remove_file(temporary)
        # On Windows where another process has it mapped: it is the same.
        if not (isinstance(error, PermissionError) and path.exists()):
            raise


def _content(path: Path) -> pa.Buffer:
    """A file's bytes: mapped, where few such files would be open at once."""
    if path.stat().st_size < MAPPED_BYTES:
        return pa.py_buffer(path.read_bytes())
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


def _sum(data: pa.Buffer) -> int:
    return zlib.crc32(data)


def _is_whole(data: pa.Buffer) -> bool:
    end = data.size - SUM_BYTES
    return bool(end > 0 and _sum(data.slice(0, end)) == int.from_bytes(data.slice(end), "little"))
