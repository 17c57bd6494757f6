"""Files in a store's folder besides its rows: sizes by fragment, deleted ids, rejected pictures, and what was
taken out of it.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from darkroom.errors import StoreError
from darkroom.hardware.system import lock_file, remove_file, write_atomically

# ---- a set of ids that stays small: eight bytes an id, in sorted runs, the large ones on disk

PENDING = 65_536
RUN = 4 * 1024**2

Ids = NDArray[np.uint64]


def short_id(text: str) -> int:
    """64 bits of a text, as a member of the set; a file's name that is no UTF-8 is one too."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


class SeenIds:
    """Ids of 64 bits that were seen before.

    Of a hash that long, one in 2**64 / n new ids is mistaken for one of n old ones. New ids go into a
    plain set, from time to time into a sorted run; runs of like size are joined, and a run of four million
    is put into a file without a name, of which only what is looked up lies in memory. One thread adds, any
    may ask.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._pending: set[int] = set()
        self._runs: tuple[Ids, ...] = ()

    def __len__(self) -> int:
        return len(self._pending) + sum(len(run) for run in self._runs)

    def add(self, number: int) -> bool:
        """Add an id; False where it was there."""
        if number in self:
            return False
        self._pending.add(number)
        if len(self._pending) >= PENDING:
            self.add_all(np.fromiter(self._pending, np.uint64, len(self._pending)))
            self._pending = set()
        return True

    def __contains__(self, number: int) -> bool:
        # In this order: an id on its way from the plain set to a run is found in one of them.
        return number in self._pending or bool(self._in_runs(np.array([number], np.uint64))[0])

    def which(self, numbers: Iterable[int]) -> list[bool]:
        """For each id, whether it is there."""
        listed = list(numbers)
        pending = self._pending
        found = self._in_runs(np.array(listed, np.uint64))
        return [number in pending or bool(there) for number, there in zip(listed, found, strict=True)]

    def _in_runs(self, numbers: Ids) -> NDArray[np.bool_]:
        found = np.zeros(len(numbers), np.bool_)
        for run in self._runs:
            places = np.searchsorted(run, numbers)
            places[places == len(run)] = 0
            found |= run[places] == numbers
        return found

    def add_all(self, numbers: Ids) -> None:
        """Add many ids at once, which may hold some twice."""
        run = np.unique(numbers)
        runs = list(self._runs)
        while runs and len(runs[-1]) <= 2 * len(run) and len(runs[-1]) + len(run) <= RUN:
            run = np.union1d(runs.pop(), run)
        self._runs = (*runs, self._on_disk(run) if len(run) > RUN // 2 else run) if len(run) else tuple(runs)

    def _on_disk(self, run: Ids) -> Ids:
        # Removed by the system with the last process that has it open, also after a kill.
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        mapped: Ids = np.memmap(file, np.uint64, "w+", shape=run.shape)
        mapped[:] = run
        return mapped


# ---- the files

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


# ---- takedowns: of each deletion its day, its sources and how many pictures of each
#
# A note in `_takedowns/` outlives the pictures and holds nothing of them. It is made before the deletion
# commits (`*.pending`, with the ids of a deletion by id, to see after a kill what is gone) and put in its
# final form (`*.json`) when it is done, by the same call or by the next write to the store.

TAKEDOWNS, FIRST = "_takedowns", "before.json"


@dataclass(frozen=True)
class Takedown:
    """A deletion: its day (UTC), and how many pictures of which source. Of what was deleted by id before
    there were notes the day is None and the source empty.

    `ids` are the pictures' own with their sources, of a deletion by id that is not done yet.
    """

    path: Path
    day: str | None
    by_id: bool
    pictures: dict[str, int]
    ids: dict[str, str] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether its final note is there; of a pending one only the removal was stopped then."""
        return self.path.with_suffix(".json").is_file()


class Takedowns:
    """The notes in a store's `_takedowns/`; at an address (s3://) there are none."""

    def __init__(self, root: Path | None) -> None:
        self._folder = root / TAKEDOWNS if root is not None else None

    def begin(
        self, pictures: Mapping[str, int], ids: Mapping[str, str] | None = None, *, before: int
    ) -> Takedown | None:
        """Note that pictures are about to be deleted, `ids` with their sources; on the disk when it returns.
        `before` have been deleted by id so far, which the first note of all keeps.
        """
        if self._folder is None or not pictures:
            return None
        content: dict[str, Any]
        if not self.any:
            content = {"day": None, "by_id": True, "pictures": {"": before}}
            write_atomically(self._folder / FIRST, json.dumps(content), durable=True)
        path = self._folder / f"{uuid.uuid4().hex}.pending"
        day = f"{datetime.now(UTC):%Y-%m-%d}"
        note = Takedown(path, day, ids is not None, dict(pictures), dict(ids or {}))
        content = {"day": day, "by_id": note.by_id, "pictures": note.pictures, "ids": note.ids}
        write_atomically(path, json.dumps(content), durable=True)
        return note

    @property
    def any(self) -> bool:
        """Whether deletions have been noted in this store."""
        return self._folder is not None and (self._folder / FIRST).is_file()

    def finish(self, note: Takedown, gone: Mapping[str, int]) -> None:
        """Note for good how many pictures of each source are gone; where none is, nothing stays."""
        if any(gone.values()):
            content = {"day": note.day, "by_id": note.by_id, "pictures": dict(gone)}
            write_atomically(note.path.with_suffix(".json"), json.dumps(content), durable=True)
        remove_file(note.path)

    def pending(self) -> list[Takedown]:
        """Deletions that were begun and not finished."""
        return self._read("*.pending")

    def done(self) -> list[Takedown]:
        """Deletions by their days. StoreError for a note that cannot be read."""
        return sorted(self._read("*.json"), key=lambda note: note.day or "")

    def _read(self, pattern: str) -> list[Takedown]:
        if self._folder is None or not self._folder.is_dir():
            return []
        notes = []
        for path in sorted(self._folder.glob(pattern)):
            try:
                content: dict[str, Any] = json.loads(path.read_text("utf-8"))
                pictures = {str(source): int(count) for source, count in content["pictures"].items()}
                notes.append(
                    Takedown(path, content["day"], content["by_id"], pictures, content.get("ids") or {})
                )
            except FileNotFoundError:  # another process has finished it
                continue
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise StoreError(f"'{path}' is damaged: it is no note of a deletion") from error
        return notes


def by_day(notes: Iterable[Takedown]) -> list[dict[str, Any]]:
    """Day, source and number of pictures, in this order, each day's deletions of a source taken together."""
    counts: Counter[tuple[str, str]] = Counter()
    for note in notes:
        for source, number in note.pictures.items():
            counts[note.day or "", source] += number
    return [
        {"day": day or None, "source": source or None, "pictures": number}
        for (day, source), number in sorted(counts.items())
        if number
    ]
