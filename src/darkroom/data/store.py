"""The picture store: a Lance dataset with one row a picture and its caption.

A row's position is its place among the rows that are not deleted, in the order of the fragments; together
with the version it names a row for good. Versions that a run has pinned are kept whole, all others may be
compacted and dropped.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Self, TypeVar

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from darkroom.data.order import Chosen
from darkroom.data.sidecars import Sidecars, Takedown, Takedowns
from darkroom.data.texts import readable
from darkroom.data.versions import (
    Filtering,
    Journal,
    Purged,
    VersionFiles,
    affected,
    committing,
    conflicted,
    dropping,
    files_of,
    look,
    no_column,
    no_stray_folder,
    not_opened,
    plain,
    remove_counts,
    remove_files,
    sole_writer,
    unnamed,
    vanished,
    wait,
    with_deletions,
    writing,
)
from darkroom.errors import StoreError, is_system_failure
from darkroom.hardware.system import file_name

T = TypeVar("T")

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        # The pictures are compressed already: trying again only costs time.
        pa.field(
            "picture", pa.large_binary(), nullable=False, metadata={"lance-encoding:compression": "none"}
        ),
        pa.field("caption", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("format", pa.string(), nullable=False),
        pa.field("phash", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
    ]
)
"""What every row has; the source's own columns stand behind these, prepared columns behind those."""

ROWS_PER_FRAGMENT = 16_384
READ_BUFFER_BYTES = 64 * 1024**2
SELECT_ROWS = 65_536
COMMIT_TRIES = 40
COMMIT_S = 600.0
"""Longer than a commit takes: no version younger than this is dropped where commits cannot be locked out."""
IDS_PER_DELETE = 1_000
FIRST_FOLDERS = {"_transactions", "_versions"}
"""What Lance makes before a store's first version."""
COMPACT_BATCH_ROWS = 64
LICENCE_COLUMNS, MOST_LICENCE_CHARS = ("license", "licence"), 200
SOURCE_KEY, LICENCE_KEY = "darkroom.source.", "darkroom.licence."
DOUBLE_OF = "double_of"
"""The column that names the picture a row is a double of, once doubles were marked."""

Shapes = Counter[tuple[int, int]]
"""How many rows there are of each (width, height), in upright pixels."""


@dataclass(frozen=True)
class FragmentInfo:
    """A stretch of neighbouring rows: Lance's id, its live rows, and the position of its first row."""

    id: int
    num_rows: int
    offset: int


@dataclass(frozen=True)
class Deleted:
    """What a deletion did: how many rows, and what left the disk."""

    rows: int
    purged: Purged


class Store:
    """A picture store at one version; what changes the store moves on to the version that it made.

    `sidecars` are the small files next to its rows.
    """

    def __init__(self, dataset: lance.LanceDataset, path: str) -> None:
        self.path = path
        self.dataset = dataset
        self.sidecars = Sidecars(path)
        self._journal = Journal(self.sidecars.root)
        self.takedowns = Takedowns(self.sidecars.root)
        self._fragments: list[FragmentInfo] | None = None

    @classmethod
    def open(cls, path: str | Path, *, version: int | None = None) -> Self:
        """The store at its newest version, or at the one asked for; StoreError where there is none."""
        try:
            opened = partial(lance.dataset, str(path), version=version)
            dataset = look(opened) if version is None else opened()
        except (ValueError, OSError) as error:
            raise not_opened(str(path), version, error) from error
        missing = [name for name in SCHEMA.names if name not in dataset.schema.names]
        if missing:
            raise StoreError(
                f"{path} is a Lance dataset but no picture store", mend=f"lacks: {', '.join(missing)}"
            )
        return cls(dataset, str(path))

    @classmethod
    def create(cls, path: str | Path) -> Self:
        """A new store without rows; StoreError where something is there already."""
        if "://" not in str(path):
            _make_room(Path(path))
        try:
            dataset = lance.write_dataset(SCHEMA.empty_table(), str(path), data_storage_version="2.1")
        except (OSError, ValueError) as error:  # of Lance: without a number, and of many lines
            if is_system_failure(error):
                raise
            raise StoreError(f"no store can be made at {path}: {plain(error)}") from error
        return cls(dataset, str(path))

    @classmethod
    def open_or_create(cls, path: str | Path) -> Self:
        """The store, made first where there is none."""
        return cls.open(path) if exists(path) else cls.create(path)

    def refresh(self) -> None:
        """Move on to the newest version, which another process may have made."""
        self._move_to(look(lambda: lance.dataset(self.path)))

    def _move_to(self, dataset: lance.LanceDataset) -> None:
        self.dataset, self._fragments = dataset, None

    @property
    def version(self) -> int:
        """The number of the version that is open; every change makes the next."""
        return int(self.dataset.version)

    @property
    def num_rows(self) -> int:
        """Rows that are not deleted."""
        return sum(fragment.num_rows for fragment in self.fragments)

    @property
    def fragments(self) -> list[FragmentInfo]:
        """The fragments in order, from the manifest alone: nothing is read."""
        if self._fragments is None:
            self._fragments, offset = [], 0
            for fragment in self.dataset.get_fragments():
                num_rows = int(fragment.metadata.num_rows)
                self._fragments.append(FragmentInfo(fragment.fragment_id, num_rows, offset))
                offset += num_rows
        return self._fragments

    def columns(self) -> dict[str, dict[str, str]]:
        """Each column's name and what is noted with it; a prepared column notes `darkroom.kind`."""
        return {
            field.name: {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
            for field in self.dataset.schema
        }

    def schemas(self) -> list[lance.LanceSchema]:
        """Each fragment's schema, in which a column has a number that it keeps under another name."""
        return [self.dataset.lance_schema] * len(self.fragments)

    # ---- reading

    def take(self, positions: Sequence[int] | NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        """Rows by position, in the order asked, repeats included. IndexError beyond the last row."""
        wanted = np.asarray(positions, dtype=np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < self.num_rows:
            raise IndexError(f"positions {wanted.min()} to {wanted.max()} in a store of {self.num_rows} rows")
        self._check_columns(columns)
        return self.dataset.take(pa.array(wanted, pa.uint64()), columns=list(columns)).combine_chunks()

    def scan(
        self, columns: Sequence[str], *, filter: str | None = None, batch_rows: int = 1024
    ) -> Iterator[pa.RecordBatch]:
        """All rows in order, batch by batch; what is read ahead stays within 64 MiB."""
        self._check_columns(columns)
        with self._filtering(filter):
            yield from self.dataset.to_batches(
                columns=list(columns),
                filter=filter,
                batch_size=batch_rows,
                batch_readahead=2,
                fragment_readahead=1,
                io_buffer_size=READ_BUFFER_BYTES,
                scan_in_order=True,
            )

    def select(self, filter: str | None) -> NDArray[np.int64]:
        """Positions of the rows that match a filter in SQL, ascending; all rows where it is None.

        Names with spaces or capitals stand in backticks, lists answer to `array_has(tags, 'x')` and
        `array_length(tags) = 0`. StoreError names the nearest column.
        """
        if filter is None:
            return np.arange(self.num_rows, dtype=np.int64)
        with self._filtering(filter):
            found = self.dataset.to_table(columns=["_rowoffset"], filter=filter)["_rowoffset"]
        positions: NDArray[np.int64] = np.sort(found.to_numpy().astype(np.int64))
        return positions

    def choose(self, filter: str) -> Chosen:
        """The rows that `select` finds, held in a bit for each row of the store."""
        with self._filtering(filter):
            found = self.dataset.to_batches(
                columns=["_rowoffset"],
                filter=filter,
                batch_size=SELECT_ROWS,
                io_buffer_size=READ_BUFFER_BYTES,
            )
            return Chosen(self.num_rows, (batch.column(0).to_numpy().astype(np.int64) for batch in found))

    def shapes(self) -> list[Shapes]:
        """Fragment by fragment, how many rows have which upright size.

        Noted when rows are written, so that sorting pictures into buckets needs no scan; counted anew, and
        noted, where rows of a fragment were deleted or fragments were joined.
        """
        return [self._shapes_of(fragment) for fragment in self.dataset.get_fragments()]

    def shapes_of(self, fragment_id: int) -> NDArray[np.int64]:
        """The same of one fragment: rows of (width, height, how many), int64 [S, 3]."""
        fragment = self.dataset.get_fragment(fragment_id)
        noted = self.sidecars.shape_rows(fragment.data_files()[0].path)
        if noted is None or noted[:, 2].sum() != fragment.metadata.num_rows:
            noted = np.array([(*size, number) for size, number in self._shapes_of(fragment).items()])
        return noted

    def _shapes_of(self, fragment: lance.LanceFragment) -> Shapes:
        name, num_rows = fragment.data_files()[0].path, int(fragment.metadata.num_rows)
        noted = self.sidecars.read_shapes(name, num_rows)
        if noted is None:
            noted = count_shapes([fragment.to_table(columns=["width", "height"])])
            self.sidecars.write_shapes(name, noted)
        return noted

    def _check_columns(self, columns: Sequence[str]) -> None:
        for name in columns:
            if name not in self.dataset.schema.names and not name.startswith("_row"):
                raise no_column(name, self.dataset.schema.names, "column")

    def _filtering(self, filter: str | None) -> Filtering:
        return Filtering(filter, self.dataset.schema.names)

    # ---- changing

    def append(self, rows: pa.Table | pa.RecordBatchReader) -> int:
        """Add rows as one fragment; returns their number.

        Rows hold at least the columns of SCHEMA; columns that the store has and the rows lack are null. A
        version that another process made meanwhile is taken over, none of its changes are lost.
        """
        sizes: Shapes = Counter()
        reader = _counting(rows if isinstance(rows, pa.RecordBatchReader) else rows.to_reader(), sizes)
        self._finish_takedowns()
        with writing(self.sidecars.root):
            fragments = lance.fragment.write_fragments(
                reader, self.dataset, mode="append", max_rows_per_file=2**31, data_storage_version="2.1"
            )
            if not fragments or not sum(sizes.values()):
                return 0
            # Noted before the commit: a note without its fragment harms nobody, the other way costs a scan.
            self.sidecars.write_shapes(fragments[0].files[0].path, sizes)
            operation = lance.LanceOperation.Append(fragments)
            self._commit(
                lambda: lance.LanceDataset.commit(self.dataset, operation, read_version=self.version)
            )
        self.finish_purges()
        return sum(sizes.values())

    def patiently(self, call: Callable[[], T]) -> T:
        """What `call` returns, called again from the newest version where another writer was quicker.

        So it is when a commit conflicts with one that came before it, and when files vanish because another
        process joined fragments and dropped the version at hand. A file that the newest version lacks too is
        an error at once. StoreError where others are quicker 40 times, for some 20 s.
        """
        for attempt in range(COMMIT_TRIES):
            began = self.version
            try:
                return call()
            except (OSError, ValueError) as error:
                gone = vanished(error)
                if not gone and not conflicted(error):
                    raise
                wait(attempt)
                self.refresh()
                if gone and self.version == began:
                    raise
        raise StoreError(
            f"{self.path} is changed by others all the time", mend="run it again when they are done"
        )

    def commit(self, commit: Callable[[], lance.LanceDataset]) -> None:
        """Commit, trying again from the newest version where another process was quicker."""
        self._commit(commit)
        self.finish_purges()

    def _commit(self, commit: Callable[[], lance.LanceDataset]) -> None:
        self._move_to(self.patiently(lambda: self._committed(commit)))

    def change(self, change: Callable[[lance.LanceDataset], object]) -> None:
        """Change the newest version in place, trying again as `commit` does."""
        self.refresh()
        self.patiently(lambda: self._committed(lambda: change(self.dataset)))
        self.refresh()

    def _committed(self, commit: Callable[[], T]) -> T:
        with committing(self.sidecars.root):
            return commit()

    def set_by_id(self, column: str, values: Mapping[str, str]) -> None:
        """Have a column of text hold these values by id, and null in all other rows.

        Nothing but the column is written, and only in fragments where it changes.
        """
        self.commit(lambda: self._with_values(column, values))

    def _with_values(self, column: str, values: Mapping[str, str]) -> lance.LanceDataset:
        updated, fields = [], list[int]()
        for fragment in self.dataset.get_fragments():
            now = fragment.to_table(columns=["id", column])
            wanted = pa.array([values.get(id_) for id_ in now["id"].to_pylist()], pa.string())
            if not now[column].combine_chunks().equals(wanted):
                table = pa.table({"id": now["id"], column: wanted})
                metadata, fields = fragment.update_columns(table, left_on="id", right_on="id")
                updated.append(metadata)
        if not updated:
            return self.dataset
        operation = lance.LanceOperation.Update(updated_fragments=updated, fields_modified=fields)
        return lance.LanceDataset.commit(self.dataset, operation, read_version=self.version)

    def add_columns(self, fields: Iterable[pa.Field]) -> None:
        """Add columns that are null in all rows; nothing is rewritten."""
        wanted = list(fields)

        def add(dataset: lance.LanceDataset) -> None:
            new = [field for field in wanted if field.name not in dataset.schema.names]
            if new:
                dataset.add_columns(pa.schema(new))

        if wanted:
            self.change(add)
            self.finish_purges()

    def delete(self, *, ids: Iterable[str] | None = None, source: str | None = None) -> Deleted:
        """Delete rows by id or source for good, with all that was prepared from them.

        The rows' bytes leave the disk with every version that is not pinned (at an address ten minutes
        later, with the next deletion or compaction), and fragments that lost rows are written anew behind
        the others, so positions change. Killed at any moment, the same call goes on, and so does the next
        write of any kind. Pictures deleted by id stay out when their source is imported again; a source that
        was deleted whole may be imported anew. What stays is how many of which source were deleted on which
        day (`takedowns`). StoreError, with nothing deleted, for an id or a source that was never there.
        """
        if (ids is None) == (source is None):
            raise StoreError("delete without a choice, or with two", allowed="either ids or source")
        self.refresh()
        self._finish_takedowns()
        rows = self._delete_ids(list(ids)) if ids is not None else self._delete_source(str(source))
        self._forget_originals()
        return Deleted(rows, self.purge())

    def _forget_originals(self) -> None:
        """Of the doubles of a picture that is gone, the first is a double no more, the others are its own."""
        if DOUBLE_OF not in self.dataset.schema.names:
            return
        marks = {
            id_: original
            for batch in self.scan(["id", DOUBLE_OF], filter=f"{DOUBLE_OF} IS NOT NULL")
            for id_, original in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        }
        gone = set(marks.values()) - set(self._ids_among(sorted(set(marks.values()))))
        heirs: dict[str, str] = {}
        for id_, original in list(marks.items()):
            if original in gone and heirs.setdefault(original, id_) == id_:
                del marks[id_]
            elif original in gone:
                marks[id_] = heirs[original]
        if heirs:
            self.set_by_id(DOUBLE_OF, marks)

    def _ids_among(self, ids: Sequence[str]) -> dict[str, str]:
        """Those of some ids that rows have, each with its row's source."""
        return {
            id_: source
            for where in _id_filters(ids)
            for batch in self.scan(["id", "source"], filter=where)
            for id_, source in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        }

    def taken_down(self, note: Takedown) -> dict[str, int]:
        """How many pictures of which source a deletion that was begun has deleted, by what rows there are.

        A source is deleted in one commit, and notes are finished before rows are added: it has deleted all or
        nothing.
        """
        if note.by_id:
            there = self._ids_among(list(note.ids))
            return Counter(source for id_, source in note.ids.items() if id_ not in there)
        sources = self.sources()
        return {source: number for source, number in note.pictures.items() if source not in sources}

    def _finish_takedowns(self) -> None:
        """Note for good what killed deletions have deleted."""
        for note in self.takedowns.pending():
            self.refresh()
            gone = {} if note.is_done else self.patiently(partial(self.taken_down, note))
            self.takedowns.finish(note, gone)

    def _delete_ids(self, ids: list[str]) -> int:
        there = self._ids_among(ids)
        unknown = [id_ for id_ in ids if id_ not in there]
        if unknown and (unknown := sorted(set(unknown) - self.deleted_ids())):
            self.purge()
            more = f" and {len(unknown) - 3:,} others" if len(unknown) > 3 else ""
            raise StoreError(
                f"no picture with the id {', '.join(unknown[:3])}{more} in {self.path}",
                mend="nothing was deleted",
            )
        # Noted first: stopped in between, the rows are still there and the same call goes on.
        note = self.takedowns.begin(Counter(there.values()), there, before=len(self.deleted_ids()))
        self.sidecars.note_deleted(there)
        rows = sum(self._delete_where(where) for where in _id_filters(sorted(there)))
        if note is not None:
            self.takedowns.finish(note, note.pictures)
        return rows

    def _delete_source(self, source: str) -> int:
        sources = self.sources()
        if source in sources:
            note = self.takedowns.begin({source: sources[source]}, before=len(self.deleted_ids()))
            self.sidecars.forget_finished(source)
            rows = self._delete_where(f"source = {_quoted(source)}", source)
            if note is not None:
                self.takedowns.finish(note, {source: rows})
            return rows
        if source not in {note.source for note in self._journal.notes()}:
            self.purge()
            raise no_column(source, list(sources), "source")
        return 0

    def _delete_where(self, where: str, source: str | None = None) -> int:
        counted: list[int] = []

        def delete(dataset: lance.LanceDataset) -> None:
            self._journal.add(source, affected(dataset, where))
            counted.append(dataset.delete(where)["num_deleted_rows"])

        self.change(delete)
        return sum(counted)

    def name_source(self, path: Path) -> str:
        """The name under which rows of a source are kept: its own, with its parent's where that is taken.

        A path that is no longer there gives its name away: the source was moved.
        """
        place = path.resolve()
        known, location = self.dataset.config(), readable(str(place))
        name = readable(place.name)
        for parent in place.parents:
            noted = known.get(SOURCE_KEY + name)
            if noted is None or noted == location or not Path(noted).exists():
                break
            name = readable(f"{parent.name}/{name}")
        if known.get(SOURCE_KEY + name) != location:
            self.change(methodcaller("update_config", {SOURCE_KEY + name: location}))
        return name

    def note_licence(self, path: Path, licence: str) -> None:
        """Keep under what licence the pictures of a source are; a model card says it."""
        key = LICENCE_KEY + self.name_source(path)
        self.change(methodcaller("update_config", {key: licence}))

    def licences(self) -> dict[str, str]:
        """By the name of a source, the licence that was noted for it."""
        config = self.dataset.config()
        return {key[len(LICENCE_KEY) :]: text for key, text in config.items() if key.startswith(LICENCE_KEY)}

    def sources(self, filter: str | None = None) -> dict[str, int]:
        """The name of each source and how many rows came from it, of those that a filter in SQL finds."""
        counts: Counter[str] = Counter()
        for batch in self.scan(["source"], filter=filter, batch_rows=65_536):
            for entry in batch.column("source").value_counts().to_pylist():
                counts[entry["values"]] += entry["counts"]
        return dict(counts)

    def own_licences(self, filter: str | None = None) -> dict[tuple[str, str], int]:
        """By source and licence, how many rows say their licence themselves, in a column `license` or
        `licence` that came with them; none where there is no such column of text."""
        texts = (pa.string(), pa.large_string())
        named = [one for one in LICENCE_COLUMNS if one in self.dataset.schema.names]
        column = next((one for one in named if self.dataset.schema.field(one).type in texts), None)
        counts: Counter[tuple[str, str]] = Counter()
        if column is None:
            return counts
        for batch in self.scan(["source", column], filter=filter, batch_rows=65_536):
            found = pa.Table.from_batches([batch]).group_by(["source", column]).aggregate([([], "count_all")])
            for row in found.to_pylist():
                if licence := " ".join((row[column] or "").split())[:MOST_LICENCE_CHARS]:
                    counts[row["source"], licence] += row["count_all"]
        return counts

    def deleted_ids(self) -> set[str]:
        """Ids of rows that were deleted by id, and stay out."""
        return self.sidecars.deleted_ids()

    def purge(self) -> Purged:
        """Take off the disk what was deleted and what no version names, pinned versions excepted.

        Fragments that lost rows are written anew, those alone. Files that are in no version, such as those
        of a killed import, are removed unless somebody is writing.
        """
        self.refresh()
        self._finish_takedowns()
        if with_deletions(self.dataset):
            self._rewrite(max(ROWS_PER_FRAGMENT, *(f.num_rows for f in self.fragments)), only_deletions=True)
        freed = self.drop_old_versions()
        root = self.sidecars.root
        if root is None:
            return Purged(bytes=freed)
        with sole_writer(root) as alone, dropping(root) as locked:
            self.refresh()
            purged = remove_files(root, self.dataset, alone=alone and locked, pins=self.pins())
        purged.bytes += freed
        return purged

    def finish_purges(self) -> None:
        """Purge what a killed deletion left, or what a pin held that is gone."""
        notes = self._journal.notes()
        if notes and any(not note.pins or note.pins.items() - self.pins().items() for note in notes):
            self.purge()

    def sweep(self) -> None:
        """Remove what killed writers left, files that are in no version; not while somebody is writing."""
        if (root := self.sidecars.root) is None:
            return
        with sole_writer(root) as alone, dropping(root) as locked:
            self.refresh()
            left = alone and locked and unnamed(root, VersionFiles.of(self.dataset).all)
        if left:
            self.purge()

    def compact(self, *, rows_per_fragment: int = ROWS_PER_FRAGMENT) -> None:
        """Join small fragments and drop the versions that nobody has pinned.

        Positions and fragments are others afterwards; a run that must keep its order has pinned its version.
        """
        self._rewrite(rows_per_fragment)
        self.drop_old_versions()
        self.finish_purges()

    def join(self, files: Sequence[str]) -> None:
        """Join neighbouring fragments, each named by its first data file, into one; rows keep their order."""
        sizes: Shapes = Counter()

        def chosen(dataset: lance.LanceDataset) -> list[lance.LanceFragment]:
            return [f for f in dataset.get_fragments() if f.data_files()[0].path in files]

        def join(dataset: lance.LanceDataset) -> None:
            """Write the chosen fragments of a data set again as one."""
            several = chosen(dataset)
            sizes.clear()
            sizes.update(sum((self._shapes_of(fragment) for fragment in several), Counter()))
            dataset.optimize.compact_files(
                target_rows_per_fragment=max(sum(f.metadata.num_rows for f in several), 1),
                excluded_fragment_ids=[
                    f.fragment_id for f in dataset.get_fragments() if f.data_files()[0].path not in files
                ],
                batch_size=COMPACT_BATCH_ROWS,
                num_threads=1,
                compaction_mode="try_binary_copy",
            )

        before = {f.id for f in self.fragments}
        self.change(join)
        new = [f for f in self.fragments if f.id not in before]
        if len(new) == 1 and new[0].num_rows == sizes.total():
            self.sidecars.write_shapes(self.dataset.get_fragment(new[0].id).data_files()[0].path, sizes)

    def _rewrite(self, rows_per_fragment: int, *, only_deletions: bool = False) -> None:
        def rewrite(dataset: lance.LanceDataset) -> None:
            """Write fragments again without their deleted rows, or all of them at the wanted size."""
            lost_rows = with_deletions(dataset)
            if lost_rows:
                self._journal.add(None, set().union(*map(files_of, lost_rows)))
            kept = {f.fragment_id for f in dataset.get_fragments()} - {f.fragment_id for f in lost_rows}
            dataset.optimize.compact_files(
                target_rows_per_fragment=rows_per_fragment,
                materialize_deletions=True,
                materialize_deletions_threshold=0.0,
                excluded_fragment_ids=sorted(kept) if only_deletions else [],
                batch_size=COMPACT_BATCH_ROWS,
                num_threads=1,
            )

        self.change(rewrite)

    # ---- versions

    def pin(self, name: str) -> int:
        """Keep this version for good under a name, such as a run's; returns the version."""
        tag, root = _tag(name), self.sidecars.root
        with committing(root), nullcontext() if root is None else no_stray_folder(root):
            if tag in self.dataset.tags.list():
                self.dataset.tags.update(tag, self.version)
            else:
                self.dataset.tags.create(tag, self.version)
        return self.version

    def unpin(self, name: str) -> bool:
        """Let a pinned version go; False where nothing was pinned under the name."""
        if _tag(name) not in self.dataset.tags.list():
            return False
        self.dataset.tags.delete(_tag(name))
        self.finish_purges()
        return True

    def pins(self) -> dict[str, int]:
        """The pinned versions by name."""
        return {name: int(tag["version"]) for name, tag in self.dataset.tags.list().items()}

    def drop_old_versions(self, *, older_than_s: float = 0.0) -> int:
        """Drop versions older than given, the newest and pinned ones excepted; returns the bytes freed.

        At an address, and on a file system without locks, those of the last ten minutes stay too: another
        process may be committing at the same time.
        """
        with dropping(self.sidecars.root) as alone:
            age = timedelta(seconds=older_than_s if alone else max(older_than_s, COMMIT_S))
            stats = look(
                lambda: self.dataset.cleanup_old_versions(older_than=age, error_if_tagged_old_versions=False)
            )
            if self.sidecars.root is not None:
                remove_counts(self.sidecars.root)
        return int(stats.bytes_removed)


def exists(path: str | Path) -> bool:
    """Whether a store is at a path; at an address one is taken to be there."""
    return "://" in str(path) or any((Path(path) / "_versions").glob("*.manifest"))


def count_shapes(tables: Iterable[pa.Table | pa.RecordBatch]) -> Shapes:
    """Count the rows of each (width, height) in tables that have these columns."""
    counts: Shapes = Counter()
    for table in tables:
        width, height = (np.asarray(table.column(name)).astype(np.int64) for name in ("width", "height"))
        packed, numbers = np.unique(width << 32 | height, return_counts=True)
        for shape, number in zip(packed.tolist(), numbers.tolist(), strict=True):
            counts[(shape >> 32, shape & 0xFFFFFFFF)] += number
    return counts


def _counting(reader: pa.RecordBatchReader, sizes: Shapes) -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        for batch in reader:
            sizes.update(count_shapes([batch]))
            yield batch

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def _id_filters(ids: Sequence[str]) -> list[str]:
    """Filters that find rows by their ids, a thousand each."""
    parts = [ids[start : start + IDS_PER_DELETE] for start in range(0, len(ids), IDS_PER_DELETE)]
    return [f"id IN ({', '.join(map(_quoted, part))})" for part in parts]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _tag(name: str) -> str:
    """A name as Lance allows it: letters, digits, '.', '-' and '_'; two names never share one."""
    if re.fullmatch(r"[A-Za-z0-9_-]+", name) and file_name(name) == name:
        return name
    tag = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    if file_name(tag) != tag:  # a tag is a file: NUL.json is none on Windows
        tag = f"_{tag}"
    return tag + "." + hashlib.sha256(name.encode()).hexdigest()[:8]


def _make_room(path: Path) -> None:
    """Make sure that a store can be made at a path: nothing is there, or what a kill left of making one."""
    if path.exists() and (
        not path.is_dir() or exists(path) or {child.name for child in path.iterdir()} - FIRST_FOLDERS
    ):
        raise StoreError(f"{path} is there already", mend="choose another name, or import into it")
    path.parent.mkdir(parents=True, exist_ok=True)
