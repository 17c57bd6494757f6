"""Whether a store is whole: files against the manifest, pictures against their ids, what is left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.file import LanceFileReader

from darkroom.data.commit_retry import dropping, sole_writer
from darkroom.data.importers.job import picture_id, prefix
from darkroom.data.purging import Journal, Purged, VersionFiles, stale_preparations, unnamed, with_deletions
from darkroom.data.seen import SeenIds
from darkroom.data.store import Store, count_shapes
from darkroom.errors import StoreError

BATCH_ROWS = 64
LISTED = 5
UNREADABLE = (OSError, ValueError, RuntimeError)  # as Lance tells damage: by any of these
Progress = Callable[[int, int | None], None]


@dataclass
class Verification:
    """What was looked at in a store, and what is wrong with it: one line each, nothing where it is whole.

    `hashed` pictures were read and have the id that their bytes and caption make. `unreferenced` files are in
    no version. `pinned` versions, by name, still show deleted pictures; that is as it should be.
    """

    store: str
    version: int
    rows: int
    fragments: int
    versions: int
    hashed: int = 0
    unreferenced_files: int = 0
    unreferenced_bytes: int = 0
    others_writing: bool = False
    pinned: dict[str, int] = field(default_factory=dict)
    purged: Purged | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with `ok`."""
        purged = vars(self.purged) if self.purged else None
        return {"ok": self.ok, **vars(self), "purged": purged}

    def lines(self) -> list[str]:
        """For a reader."""
        lines = [
            f"{self.store}: version {self.version}, {self.rows:,} rows in {self.fragments:,} fragments, "
            f"{self.versions:,} versions",
            f"{self.hashed:,} of {self.rows:,} pictures have the hash of their bytes and caption",
        ]
        if self.purged is not None:
            lines.append(f"purged: {self.purged.files:,} files, {self.purged.bytes:,} bytes")
        if self.pinned:
            pins = ", ".join(f"version {version} by '{name}'" for name, version in self.pinned.items())
            lines.append(f"deleted pictures stay for what is pinned: {pins}")
        if self.others_writing:
            lines.append("others are writing: files that no version names were not judged")
        return lines + ([f"wrong: {problem}" for problem in self.problems] or ["nothing is wrong"])


def verify(
    store: Store | str | Path, *, purge: bool = False, progress: Progress | None = None
) -> Verification:
    """Read a whole store and say what is wrong with it; `purge` first removes what no version names.

    Looked at: that every file of every version is there, as long as the manifest says, with as many rows;
    that every row of the newest version can be read; that each picture's bytes and caption make its id, and
    no id comes twice; the sizes noted for aspect-ratio buckets; deletions whose bytes are still on the disk;
    files that are in no version. Prepared columns are read, but have no hash to compare. StoreError for what
    is no store, or one at an address.
    """
    opened = store if isinstance(store, Store) else Store.open(store)
    if opened.sidecars.root is None:
        raise StoreError(f"{opened.path} is at an address", mend="verify a store in a local folder")
    purged = opened.purge() if purge else None
    opened.refresh()
    found = Verification(
        opened.path,
        opened.version,
        opened.num_rows,
        len(opened.fragments),
        len(opened.dataset.versions()),
        purged=purged,
    )
    _check_files(opened, found)
    _check_rows(opened, found, progress)
    _check_left_over(opened, opened.sidecars.root, found)
    return found


def _check_files(store: Store, found: Verification) -> None:
    """Every version's files, each once."""
    looked_at: set[str] = set()
    for version in [entry["version"] for entry in store.dataset.versions()]:
        dataset = store.dataset if version == store.version else lance.dataset(store.path, version=version)
        for fragment in dataset.get_fragments():
            wanted = (fragment.metadata.physical_rows, fragment.metadata.num_deletions)
            for file in fragment.data_files():
                if file.path not in looked_at:
                    looked_at.add(file.path)
                    problem = _wrong_with(Path(store.path) / "data" / file.path, file, wanted[0])
                    if problem:
                        found.problems.append(f"data/{file.path} of version {version} {problem}")
            deletions = fragment.deletion_file()
            if deletions and not (Path(store.path) / deletions).is_file():
                found.problems.append(f"{deletions} of version {version} is missing")


def _wrong_with(path: Path, file: lance.fragment.DataFile, num_rows: int) -> str:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if file.file_size_bytes and size != file.file_size_bytes:
        return f"has {size:,} of {file.file_size_bytes:,} bytes"
    try:
        has = LanceFileReader(str(path)).metadata().num_rows
    except UNREADABLE as error:
        return f"cannot be read: {_first_line(error)}"
    return "" if has == num_rows else f"has {has:,} of {num_rows:,} rows"


def _check_rows(store: Store, found: Verification, progress: Progress | None) -> None:
    """Fragment by fragment, so that a damaged one hides no other."""
    seen, changed, twice = SeenIds(), list[str](), list[str]()
    done = 0
    for info in store.fragments:
        fragment = store.dataset.get_fragment(info.id)
        sizes: Counter[tuple[int, int]] = Counter()
        read = 0
        try:
            for batch in fragment.to_batches(batch_size=BATCH_ROWS):
                read += batch.num_rows
                sizes += count_shapes([batch])
                _check_ids(batch, seen, changed, twice)
                done += batch.num_rows
                if progress is not None:
                    progress(done, found.rows)
        except UNREADABLE as error:
            found.problems.append(
                f"fragment {info.id} cannot be read after {read:,} rows: {_first_line(error)}"
            )
            continue
        if read != info.num_rows:
            found.problems.append(f"fragment {info.id} has {read:,} of {info.num_rows:,} rows")
        noted = store.sidecars.read_shapes(fragment.data_files()[0].path, info.num_rows)
        if noted is not None and noted != sizes:
            found.problems.append(f"fragment {info.id}: other sizes are noted for buckets than its rows have")
    found.hashed = done - len(changed)
    found.problems += _listed(changed, "pictures do not have the hash of their bytes and caption")
    found.problems += _listed(twice, "ids come more than once")


def _check_ids(batch: pa.RecordBatch, seen: SeenIds, changed: list[str], twice: list[str]) -> None:
    columns = (batch.column(name).to_pylist() for name in ("id", "picture", "caption"))
    for id_, picture, caption in zip(*columns, strict=True):
        if picture_id(picture, caption) != id_:
            changed.append(id_)
        elif not seen.add(prefix(id_)):
            twice.append(id_)


def _check_left_over(store: Store, root: Path, found: Verification) -> None:
    with sole_writer(root) as alone, dropping(root):
        files = VersionFiles.of(lance.dataset(store.path))
        over = [*(unnamed(root, files.all) if alone else ()), *stale_preparations(root, files.newest)]
    found.others_writing = not alone
    found.unreferenced_files = len(over)
    found.unreferenced_bytes = sum(path.stat().st_size for path in over if path.is_file())
    mend = f"run: darkroom verify {store.path} --purge"
    if over:
        message = f"files that belong to no version: {len(over):,} of {found.unreferenced_bytes:,} bytes"
        found.problems.append(f"{message}, such as {over[0].relative_to(root)}; {mend}")
    notes = Journal(root).notes()
    found.pinned = {name: version for note in notes for name, version in note.pins.items()}
    waiting = {file for note in notes if not note.pins for file in note.files} - files.newest
    if with_deletions(store.dataset) or any((root / file).is_file() for file in waiting):
        found.problems.append(f"deleted pictures are still on the disk; {mend}")
    there = _still_there(store)
    if there:
        found.problems.append(
            f"{there:,} pictures that were to be deleted are still there; delete them again, it was stopped"
        )


def _still_there(store: Store) -> int:
    deleted = store.deleted_ids()
    if not deleted:
        return 0
    return sum(id_ in deleted for batch in store.scan(["id"]) for id_ in batch.column("id").to_pylist())


def _listed(ids: list[str], what: str) -> list[str]:
    if not ids:
        return []
    more = ", …" if len(ids) > LISTED else ""
    return [f"{len(ids):,} {what}: {', '.join(ids[:LISTED])}{more}"]


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
