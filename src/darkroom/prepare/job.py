"""The prepare job: adds columns of latents and text states to a store, fragment by fragment.

A column starts as null in all rows. Each fragment's values are encoded into one file, which is noted when
it is complete and then committed to the fragment; the rest of the store is never rewritten, and several
resolutions and encoders stand side by side. Which rows share an encoder's batch depends on the fragment
alone, so a column is the same to the bit however often the job was killed. When the store has moved on
meanwhile (rows appended or deleted, fragments joined), the commit is made anew on what is there now; rows
that arrived are encoded before the job ends.

Not Lance's own `add_columns`: its checkpoint knows nothing of encoders and its commit fails when rows were
appended. Not `merge_columns` and `update_columns` either, although this does what they do: a file written
directly streams at any fragment size, and can be finished, noted and committed in three separate steps.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import lance
import numpy as np
import pyarrow as pa
import torch
from lance.file import LanceFileWriter
from PIL import Image

from darkroom import models
from darkroom.data.pictures import PictureError, decode, nearest_bucket, resize_crop, to_tensor
from darkroom.data.pictures import buckets as bucket_sizes
from darkroom.data.store import Store
from darkroom.errors import InputError, StoreError
from darkroom.prepare.columns import (
    Layout,
    check_made_alike,
    latents_field,
    text_field,
)
from darkroom.prepare.encoders import TextEncoder, VaeEncoder
from darkroom.prepare.notes import Note, Notes

COMMIT_TRIES = 40
COMMIT_EVERY_S = 20.0
DECODE_THREADS = 4
READ_BUFFER_BYTES = 64 * 1024**2
TOMBSTONE = -2  # Lance's mark for a field that a file no longer answers for

Progress = Callable[[int, int | None], None]
Value = dict[str, Any] | None
T = TypeVar("T")


@dataclass
class PrepareReport:
    """What a prepare did: rows encoded and rows found done by column, pictures that could not be decoded."""

    columns: list[str] = field(default_factory=list)
    encoded: dict[str, int] = field(default_factory=dict)
    done_before: dict[str, int] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    rows_per_s: float = 0.0

    def lines(self) -> list[str]:
        """The report for people."""
        said = [
            f"{name}: {self.encoded[name]:,} rows encoded, {self.done_before[name]:,} were done before"
            for name in self.columns
        ]
        if self.unreadable:
            said.append(
                f"{len(self.unreadable):,} pictures could not be decoded and have no latents; training "
                f"refuses them until they are deleted: {', '.join(self.unreadable[:5])}"
            )
        return [*said, f"{self.wall_s:,.1f} s, {self.rows_per_s:,.1f} rows/s"]


class Encode(Protocol):
    """Turns the values of a source column into those of a prepared one; None where that cannot be done."""

    def __call__(self, values: Sequence[Any]) -> list[Value]:
        """One value for each, in the same order."""
        ...


@dataclass(frozen=True)
class Column:
    """A column to make: its field, what it is made from, how, and how many rows share an encoder's batch."""

    field: pa.Field
    source: str
    encode: Encode
    batch_rows: int

    @property
    def name(self) -> str:
        """The column's name in the store."""
        return str(self.field.name)


def prepare(
    store: Store | str | Path,
    model: models.Model | str | Path,
    *,
    resolution: int = 512,
    text: bool = False,
    latents: bool = True,
    precision: str = "float32",
    bucket_step: int = 0,
    batch_rows: int = 16,
    device: str = "auto",
    progress: Progress | None = None,
) -> PrepareReport:
    """Encode what the store's columns of this model lack; a second call encodes only what is new.

    `bucket_step` above 0 keeps aspect ratios: pictures are encoded at the nearest bucket's size instead of a
    square. Raises ColumnError when the column there was made with other settings, StoreError when another
    process is at it, InputError for a precision that the device does not do.
    """
    began = time.perf_counter()
    opened = store if isinstance(store, Store) else Store.open(store)
    place = models.device(device)
    report = PrepareReport()
    for column in _columns(
        model,
        resolution,
        latents,
        text,
        bucket_step,
        precision=precision,
        device=place,
        batch_rows=batch_rows,
    ):
        _Job(opened, column, report, progress or (lambda done, total: None)).run()
    report.wall_s = time.perf_counter() - began
    report.rows_per_s = sum(report.encoded.values()) / report.wall_s
    return report


def _columns(
    model: models.Model | str | Path,
    resolution: int,
    latents: bool,
    text: bool,
    bucket_step: int,
    *,
    precision: str,
    device: torch.device,
    batch_rows: int,
) -> Iterator[Column]:
    parts = (["vae"] if latents else []) + (["text_encoder", "tokenizer"] if text else [])
    made = model if isinstance(model, models.Model) else models.load(model, parts=parts)
    if latents:
        if made.vae is None:
            raise StoreError("the model has no VAE to make latents with")
        vae = VaeEncoder(made.vae, precision=precision, device=device)
        yield latents_job(vae, resolution, bucket_step=bucket_step, batch_rows=batch_rows)
    if text:
        encoder = TextEncoder(made.text_encoders, made.tokenizers, precision=precision, device=device)
        yield text_job(encoder, batch_rows=batch_rows)


def latents_job(vae: VaeEncoder, resolution: int, *, bucket_step: int = 0, batch_rows: int = 16) -> Column:
    """The column of this VAE's latents at a resolution."""
    odd = next((side for side in (bucket_step, resolution) if side % vae.factor), None)
    if odd is not None:
        name = "resolution" if odd == resolution else "buckets"
        raise InputError(f"{name} {odd}", allowed=f"multiples of {vae.factor}, the side of a latent pixel")
    sizes = bucket_sizes(resolution, step=bucket_step) if bucket_step else [(resolution, resolution)]
    crop = f"buckets-{bucket_step}" if bucket_step else "centre"
    made = latents_field(resolution, vae.identity, scale=vae.scale, crop=crop, precision=vae.precision)
    return Column(made, "picture", partial(_encode_pictures, vae, sizes), batch_rows)


def text_job(text: TextEncoder, *, batch_rows: int = 16) -> Column:
    """The column of this text encoder's states."""
    made = text_field(text.identity, empty=text.empty(), precision=text.precision)
    return Column(made, "caption", partial(_encode_captions, text), batch_rows)


def _encode_pictures(
    vae: VaeEncoder, sizes: list[tuple[int, int]], values: Sequence[bytes | Image.Image | None]
) -> list[Value]:
    """Latents of decoded pictures; those of one size share a call."""
    out: list[Value] = [None] * len(values)
    by_size: dict[tuple[int, int], list[int]] = {}
    for i, picture in enumerate(values):
        if isinstance(picture, Image.Image):
            by_size.setdefault(nearest_bucket(picture.width, picture.height, sizes), []).append(i)
    for size, members in sorted(by_size.items()):
        cut = [to_tensor(resize_crop(values[i], size)) for i in members]  # type: ignore[arg-type]
        moments = vae.encode(torch.stack(cut)).cpu().numpy()
        for i, row in zip(members, moments, strict=True):
            out[i] = {"moments": row.tobytes(), "height": row.shape[2], "width": row.shape[3]}
    return out


def _encode_captions(text: TextEncoder, values: Sequence[str]) -> list[Value]:
    states, pooled = text.encode(list(values))
    pools = [None] * len(values) if pooled is None else [row.tobytes() for row in pooled.cpu().numpy()]
    return [
        {"states": row.tobytes(), "length": row.shape[0], "width": row.shape[1], "pooled": pool}
        for row, pool in zip(states.cpu().numpy(), pools, strict=True)
    ]


def _decoded(picture: bytes) -> Image.Image | None:
    try:
        return decode(picture)
    except PictureError:
        return None


@dataclass(frozen=True)
class _Piece:
    """Rows that are read together: offsets in the fragment, ids, source values, values kept as they are."""

    offsets: list[int]
    ids: list[str]
    values: list[Any]
    kept: list[Value]


class _Job:
    """One column of one store, until no row lacks it."""

    def __init__(self, store: Store, column: Column, report: PrepareReport, progress: Progress) -> None:
        self._store, self._column, self._report, self._progress = store, column, report, progress
        self._done_rows = 0
        self._unreadable: dict[int, int] = {}

    def run(self) -> None:
        """Encode fragment after fragment; whatever arrives meanwhile is encoded too."""
        name = self._column.name
        self._report.columns.append(name)
        self._report.encoded[name] = self._report.done_before[name] = 0
        with Notes(self._store.path, name) as notes:
            _patiently(self._add_column)
            _patiently(partial(self._commit, notes))  # what a killed job had finished
            missing = sum(count for _, count in _patiently(self._pending))
            self._done_rows = self._report.done_before[name] = self._store.num_rows - missing
            while _patiently(partial(self._pass, notes)):
                pass

    def _pass(self, notes: Notes) -> bool:
        """Encode what is pending now; False when nothing is."""
        self._report.encoded[self._column.name] += self._commit(notes)
        pending = self._pending()
        if pending:
            self._encode_all(notes, [number for number, _ in pending])
        return bool(pending)

    def _add_column(self) -> None:
        self._store.refresh()
        if self._column.name not in self._store.columns():
            self._store.add_columns([self._column.field])
        check_made_alike(self._store, self._column.field)

    # ---- which fragments

    def _pending(self) -> list[tuple[int, int]]:
        """Fragments with rows to encode, and how many, in the store as it is now."""
        self._store.refresh()
        layout = self._layout()
        counts = [(f.fragment_id, self._missing(f, layout)) for f in self._store.dataset.get_fragments()]
        return [(number, count) for number, count in counts if count]

    def _layout(self) -> Layout:
        return Layout.of(self._store.dataset, self._column.name, self._column.source)

    def _missing(self, fragment: lance.LanceFragment, layout: Layout) -> int:
        """Live rows without a value, but for those that this job has found to be unreadable."""
        if layout.file(fragment.metadata) is None:
            return int(fragment.metadata.num_rows)
        unreadable = self._unreadable.get(fragment.fragment_id, 0)
        return max(0, int(fragment.count_rows(f"{self._column.name} IS NULL")) - unreadable)

    # ---- encoding

    def _encode_all(self, notes: Notes, numbers: list[int]) -> None:
        name = self._column.name
        last_commit = time.monotonic()
        for number in numbers:
            fragment = self._store.dataset.get_fragment(number)
            if fragment is not None:
                self._finish(notes, fragment)
            if time.monotonic() - last_commit > COMMIT_EVERY_S:
                self._report.encoded[name] += self._commit(notes)
                last_commit = time.monotonic()
        self._report.encoded[name] += self._commit(notes)

    def _finish(self, notes: Notes, fragment: lance.LanceFragment) -> None:
        """Encode a fragment and note it, unless nothing of it could be."""
        note = self._encode_fragment(notes, fragment)
        self._report.unreadable += note.unreadable
        self._unreadable[note.fragment] = len(note.unreadable)
        if note.rows:
            notes.add(note)
        else:
            notes.drop(note)

    def _encode_fragment(self, notes: Notes, fragment: lance.LanceFragment) -> Note:
        """Write one file with a value for every row of a fragment, null where rows were deleted."""
        layout, metadata = self._layout(), fragment.metadata
        note = Note(
            fragment=metadata.id,
            physical_rows=metadata.physical_rows,
            base=layout.base(metadata),
            file=f"{self._column.name}-{metadata.id}-{uuid.uuid4().hex}.lance",
            rows=0,
            unreadable=[],
        )
        schema = pa.schema([self._column.field])
        version = self._store.dataset.data_storage_version
        writer = LanceFileWriter(str(notes.folder / note.file), schema, version=version)
        next_offset = 0
        for piece in self._pieces(fragment, keep=layout.file(metadata) is not None):
            encoded = self._encode_piece(piece)
            note = _counted(note, piece, encoded)
            values: list[Value] = []
            for offset, value in zip(piece.offsets, encoded, strict=True):
                values += [None] * (offset - next_offset) + [value]
                next_offset = offset + 1
            writer.write_batch(self._batch(values, schema))
            self._done_rows += sum(kept is None for kept in piece.kept)
            self._progress(self._done_rows, self._store.num_rows)
        writer.write_batch(self._batch([None] * (metadata.physical_rows - next_offset), schema))
        writer.close()
        return note

    def _batch(self, values: list[Value], schema: pa.Schema) -> pa.RecordBatch:
        return pa.record_batch([pa.array(values, self._column.field.type)], schema=schema)

    def _encode_piece(self, piece: _Piece) -> list[Value]:
        todo = [i for i, kept in enumerate(piece.kept) if kept is None]
        out = list(piece.kept)
        if todo:
            encoded = self._column.encode([piece.values[i] for i in todo])
            for i, value in zip(todo, encoded, strict=True):
                out[i] = value
        return out

    def _pieces(self, fragment: lance.LanceFragment, *, keep: bool) -> Iterator[_Piece]:
        """A fragment's live rows, so many at a time, pictures decoded one piece ahead."""
        with ThreadPoolExecutor(DECODE_THREADS) as pool:
            ahead: _Piece | None = None
            for piece in self._read(fragment, keep=keep):
                if self._column.source == "picture":
                    piece = replace(piece, values=[pool.submit(_decoded, value) for value in piece.values])
                if ahead is not None:
                    yield _awaited(ahead)
                ahead = piece
            if ahead is not None:
                yield _awaited(ahead)

    def _read(self, fragment: lance.LanceFragment, *, keep: bool) -> Iterator[_Piece]:
        name, source = self._column.name, self._column.source
        scanner = fragment.scanner(
            columns=["id", source] + ([name] if keep else []),
            with_row_address=True,
            batch_size=self._column.batch_rows,
            strict_batch_size=True,
            batch_readahead=2,
            io_buffer_size=READ_BUFFER_BYTES,
        )
        for batch in scanner.to_batches():
            offsets = batch.column("_rowaddr").to_numpy() & np.uint64(0xFFFFFFFF)
            yield _Piece(
                offsets.astype(np.int64).tolist(),
                batch.column("id").to_pylist(),
                batch.column(source).to_pylist(),
                batch.column(name).to_pylist() if keep else [None] * len(batch),
            )

    # ---- committing

    def _commit(self, notes: Notes) -> int:
        """Add finished files to the fragments of the store as it is now; returns the rows that they
        encode."""
        for attempt in range(COMMIT_TRIES):
            self._store.refresh()
            usable = [note for note in notes.all() if self._still_fits(notes, note)]
            if not usable:
                return 0
            for note in usable:
                notes.place(note)
            try:
                lance.LanceDataset.commit(
                    self._store.dataset, self._operation(usable), read_version=self._store.version
                )
            except OSError as error:
                if "conflict" not in str(error).lower() or attempt == COMMIT_TRIES - 1:
                    raise
                time.sleep(random.uniform(0.02, 0.1) * min(attempt + 1, 10))
                continue
            self._store.refresh()
            for note in usable:
                notes.drop(note)
            return sum(note.rows for note in usable)
        return 0

    def _still_fits(self, notes: Notes, note: Note) -> bool:
        """Whether a file belongs to the fragment of that number; a joined or already served one is
        dropped."""
        layout = self._layout()
        fragment = self._store.dataset.get_fragment(note.fragment)
        if fragment is not None:
            metadata = fragment.metadata
            same = (metadata.physical_rows, layout.base(metadata)) == (note.physical_rows, note.base)
            if same and layout.file(metadata) != note.file:
                return True
        notes.drop(note)
        return False

    def _operation(self, notes: list[Note]) -> Any:
        """The fragments as they are, with our files answering for the column."""
        layout = self._layout()
        updated = []
        for note in notes:
            metadata = self._store.dataset.get_fragment(note.fragment).metadata
            for file in metadata.files:
                file.fields = [TOMBSTONE if leaf in layout.leaves else leaf for leaf in file.fields]
            kept = [file for file in metadata.files if set(file.fields) != {TOMBSTONE}]
            metadata.files = [*kept, lance.fragment.DataFile.create(self._store.dataset, note.file)]
            updated.append(metadata)
        return lance.LanceOperation.Update(updated_fragments=updated, fields_modified=sorted(layout.leaves))


def _patiently(call: Callable[[], T]) -> T:
    """Call again when files vanish under it: another process joined fragments and dropped the old ones."""
    for _ in range(COMMIT_TRIES):
        try:
            return call()
        except (OSError, ValueError) as error:
            if "not found" not in str(error).lower():
                raise
            time.sleep(random.uniform(0.02, 0.1))
    return call()


def _counted(note: Note, piece: _Piece, encoded: list[Value]) -> Note:
    new = [i for i, kept in enumerate(piece.kept) if kept is None]
    lost = [piece.ids[i] for i in new if encoded[i] is None]
    return replace(note, rows=note.rows + len(new) - len(lost), unreadable=note.unreadable + lost)


def _awaited(piece: _Piece) -> _Piece:
    if piece.values and hasattr(piece.values[0], "result"):
        return replace(piece, values=[value.result() for value in piece.values])
    return piece
