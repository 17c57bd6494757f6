"""Files in a store's folder besides its rows: sizes by fragment, deleted ids, rejected pictures."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from darkroom.data.seen import SeenIds, short_id
from darkroom.errors import StoreError
from darkroom.hardware.system import lock_file, remove_file, write_atomically

REJECTED = "rejected.jsonl"
PARTS = "_parts.jsonl"
UNJOINED = "_unjoined.json"
PREPARING = "_prepare"
"""The folder of files that a prepare has finished and not yet committed, a folder a column."""


@dataclass
class Finished:
    """What an import counted in a part of a source that it read to the end."""

    added: int = 0
    doubles: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


class Sidecars:
    """Small files of a store in a local folder; at an address (s3://) only tables are noted."""

    def __init__(self, store_path: str) -> None:
        self._address = store_path.rstrip("/")
        self.root = None if "://" in store_path else Path(store_path)

    def read_shapes(self, data_file: str, num_rows: int) -> Counter[tuple[int, int]] | None:
        """The sizes noted for a fragment, None where its rows are not those that were counted."""
        if self.root is None or not (path := self._shapes_path(data_file)).is_file():
            return None
        counts = Counter(
            {(width, height): number for width, height, number in json.loads(path.read_text("utf-8"))}
        )
        return counts if counts.total() == num_rows else None

    def shape_rows(self, data_file: str) -> NDArray[np.int64] | None:
        """The sizes noted for a fragment as rows of (width, height, how many), parsed as one."""
        if self.root is None or not (path := self._shapes_path(data_file)).is_file():
            return None
        plain = path.read_text("utf-8").replace("[", "").replace("]", "")
        return np.fromstring(plain, dtype=np.int64, sep=",").reshape(-1, 3)

    def write_shapes(self, data_file: str, counts: Counter[tuple[int, int]]) -> None:
        """Note the sizes of a fragment under the name of its data file, which is never used again."""
        if self.root is not None:
            rows = [[*shape, number] for shape, number in sorted(counts.items())]
            write_atomically(self._shapes_path(data_file), json.dumps(rows, separators=(",", ":")))

    def read_table(self, name: str) -> pa.Table | None:
        """A table noted under a name, also at an address; None where there is none."""
        try:
            if self.root is not None:
                return pa.ipc.open_file(pa.py_buffer(self._table_path(name).read_bytes())).read_all()
            with _opened(f"{self._address}/_shapes/{name}.arrow", "rb") as file:
                return pa.ipc.open_file(pa.py_buffer(file.read())).read_all()
        except Exception:  # of every kind, as object stores have them: without the table it takes longer
            return None

    def write_table(self, name: str, table: pa.Table) -> None:
        """Note a table; as it only saves time, nothing is said where the store cannot be written to."""
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_file(buffer, table.schema) as writer:
            writer.write_table(table)
        with suppress(Exception):
            if self.root is not None:
                write_atomically(self._table_path(name), buffer.getvalue().to_pybytes())
            else:
                with _opened(f"{self._address}/_shapes/{name}.arrow", "wb") as file:
                    file.write(buffer.getvalue())

    def _table_path(self, name: str) -> Path:
        assert self.root is not None
        return self.root / "_shapes" / f"{name}.arrow"

    def _shapes_path(self, data_file: str) -> Path:
        assert self.root is not None
        return self.root / "_shapes" / (Path(data_file).stem + ".json")

    def note_deleted(self, ids: Iterable[str]) -> None:
        """Remember ids that were deleted, so that they stay out."""
        if self.root is not None:
            new = sorted(set(ids) - self.deleted_ids())
            _append_lines(self.root / "deleted.txt", new)

    @property
    def rejected_path(self) -> str:
        """Where `rejected.jsonl` is, or would be; empty for a store without sidecars."""
        return str(self.root / REJECTED) if self.root is not None else ""

    def rejected_before(self) -> SeenIds:
        """What stands in `rejected.jsonl`, so that it is listed once however often it is imported."""
        seen = SeenIds(self.root)
        for record in self._lines(REJECTED):
            place = {"source": record.get("source"), "key": record.get("key")}
            seen.add(short_id(f"{record.get('reason')}|{record.get('id') or place}"))
        return seen

    def rejected_counts(self) -> dict[str, int]:
        """How many entries of `rejected.jsonl` there are of each reason."""
        return dict(Counter(str(record.get("reason")) for record in self._lines(REJECTED)).most_common())

    def add_rejected(self, lines: Iterable[str]) -> None:
        """Append lines of JSON to `rejected.jsonl`."""
        if self.root is not None:
            _append_lines(self.root / REJECTED, lines)

    def finished(self, source: str, settings: str) -> dict[str, Finished]:
        """The parts of a source that were read to the end with the same settings."""
        return {
            record["part"]: Finished(record["added"], record["doubles"], Counter(record["rejected"]))
            for record in self._lines(PARTS)
            if record.get("source") == source and record.get("settings") == settings
        }

    def add_finished(self, source: str, settings: str, parts: Mapping[str, Finished]) -> None:
        """Note parts as read, once all of their rows are committed."""
        lines = [
            json.dumps({"source": source, "part": name, "settings": settings, **vars(part)})
            for name, part in parts.items()
        ]
        if self.root is not None:
            _append_lines(self.root / PARTS, lines)

    def forget_finished(self, source: str) -> None:
        """Have a source read anew from its start, and parts of others with pictures that it may have had too:
        those were not added, and go with it.
        """
        lines = [
            json.dumps(record) + "\n"
            for record in self._lines(PARTS)
            if record.get("source") != source and not record.get("doubles")
        ]
        if self.root is not None and (self.root / PARTS).is_file():
            write_atomically(self.root / PARTS, "".join(lines))

    def unjoined(self) -> list[list[str]]:
        """Groups of small fragments that an import left, each by its data file."""
        if self.root is None or not (self.root / UNJOINED).is_file():
            return []
        groups: list[list[str]] = json.loads((self.root / UNJOINED).read_text("utf-8"))
        return groups

    def note_unjoined(self, groups: list[list[str]]) -> None:
        """Note which small fragments are to be joined."""
        if self.root is not None and any(groups):
            write_atomically(self.root / UNJOINED, json.dumps(groups))
        elif self.root is not None:
            remove_file(self.root / UNJOINED)

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The entries of a file of JSON lines; one torn by a kill is no entry."""
        if self.root is None or not (self.root / name).is_file():
            return
        with (self.root / name).open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if isinstance(entry, dict):
                    yield entry

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, no other import writes to the store; the system ends the claim with its process."""
        if self.root is None:
            raise StoreError("an import into a store that is not in a local folder", mend="import, then copy")
        with (self.root / "_import.lock").open("wb") as file:
            try:
                lock_file(file)
            except BlockingIOError:
                raise StoreError(
                    f"another import into {self.root} is running", mend="wait until it is done"
                ) from None
            except OSError as error:
                raise StoreError(
                    f"the file system of {self.root} has no file locks ({error.strerror})",
                    mend="mount it with them (Lustre: -o flock), or keep the store on another",
                ) from None
            yield

    def deleted_ids(self) -> set[str]:
        """Ids of the rows that were deleted by id."""
        path = self.root / "deleted.txt" if self.root is not None else None
        return set(path.read_text("utf-8").split()) if path is not None and path.is_file() else set()


def _opened(address: str, mode: str) -> Any:
    """A file at an address; ImportError without the package that knows it."""
    import fsspec

    return fsspec.open(address, mode)


def _append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append whole lines; a line torn by a kill is closed off first, so that it spoils no other."""
    text = "".join(line + "\n" for line in lines)
    if text:
        with path.open("ab+") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END) or True) and file.read(1) != b"\n":
                text = "\n" + text
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
