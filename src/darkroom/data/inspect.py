"""What a store holds, in numbers and as a contact sheet; whether it is whole: files against the manifest,
pictures against their ids, what is left over; and which of its pictures are near-doubles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.file import LanceFileReader
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from darkroom.data.images import PictureError, decode, resize_crop
from darkroom.data.importers.job import picture_id, prefix
from darkroom.data.sidecars import SeenIds, Sidecars, by_day, short_id
from darkroom.data.store import DOUBLE_OF, Store, count_shapes
from darkroom.data.versions import (
    Journal,
    Purged,
    VersionFiles,
    dropping,
    sole_writer,
    stale_preparations,
    unnamed,
    with_deletions,
)
from darkroom.errors import InputError, StoreError
from darkroom.hardware.system import atomic_replace

LONGEST_CAPTION = 10_000
SHOWN_SIZES = 8
RATIOS = (
    (0.0, "under 1:2"),
    (0.5, "1:2 to 3:4"),
    (0.75, "3:4 to 1:1"),
    (0.999, "square"),
    (1.001, "1:1 to 4:3"),
    (4 / 3, "4:3 to 2:1"),
    (2.0, "over 2:1"),
)


@dataclass
class _Counts:
    """What one scan over the small columns counts; memory does not grow but for 8 bytes a row."""

    formats: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    shapes: Counter[tuple[int, int]] = field(default_factory=Counter)
    characters: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(LONGEST_CAPTION + 1, np.int64))
    words: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(LONGEST_CAPTION + 1, np.int64))
    captions: SeenIds = field(default_factory=SeenIds)
    hashes: SeenIds = field(default_factory=SeenIds)

    def add(self, batch: pa.RecordBatch) -> None:
        """Count a batch of rows: formats, sources, lengths in characters and words, captions by hash."""
        for name, counter in (("format", self.formats), ("source", self.sources)):
            for entry in batch.column(name).value_counts().to_pylist():
                counter[entry["values"]] += entry["counts"]
        captions = batch.column("caption")
        words = pc.list_value_length(pc.utf8_split_whitespace(pc.utf8_trim_whitespace(captions)))
        filled = pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(captions)), 0)
        self._lengths(self.characters, pc.utf8_length(captions))
        self._lengths(self.words, pc.if_else(filled, words, pa.scalar(0, words.type)))
        for caption in captions.to_pylist():
            self.captions.add(short_id(caption))
        for phash in batch.column("phash").to_pylist():
            self.hashes.add(phash & (2**64 - 1))

    @staticmethod
    def _lengths(counts: np.ndarray[Any, Any], lengths: pa.Array) -> None:
        clipped = np.minimum(np.asarray(lengths), LONGEST_CAPTION)
        counts += np.bincount(clipped, minlength=len(counts))


def describe(store: Store) -> dict[str, Any]:
    """A store in numbers: rows, columns with what made them, sizes, captions, duplicates, rejected."""
    counts = _Counts()
    for batch in store.scan(["format", "source", "caption", "phash"], batch_rows=16_384):
        counts.add(batch)
    counts.shapes = sum(store.shapes(), Counter())
    sidecars = Sidecars(store.path)
    return {
        "store": store.path,
        "version": store.version,
        "rows": store.num_rows,
        "fragments": len(store.fragments),
        "disk_bytes": _disk_bytes(store.path),
        "sources": dict(counts.sources.most_common()),
        "formats": dict(counts.formats.most_common()),
        "columns": {name: _made(store, name, noted) for name, noted in store.columns().items()},
        "sizes": _sizes(counts.shapes),
        "shortest_side_px": _spread(_bincount(counts.shapes, min)),
        "aspect_ratios": _ratios(counts.shapes),
        "captions": {
            "distinct": len(counts.captions),
            "empty": int(counts.characters[0]),
            "characters": _spread(counts.characters),
            "words": _spread(counts.words),
        },
        "doubles": _doubles(store, len(counts.hashes)),
        "set_aside": sidecars.rejected_counts(),
        "deleted_ids": len(store.deleted_ids()),
        "pinned_versions": store.pins(),
    }


def _doubles(store: Store, distinct: int) -> dict[str, Any]:
    counts: dict[str, Any] = {"of_one_hash": store.num_rows - distinct}
    if DOUBLE_OF in store.columns():
        marked = store.dataset.count_rows(filter=f"{DOUBLE_OF} IS NOT NULL")
        return {**counts, "marked": int(marked)}
    return counts


def _made(store: Store, name: str, noted: dict[str, str]) -> str:
    """A column's type; of a prepared one what made it and how far it is."""
    kind = noted.get("darkroom.kind")
    if kind not in ("latents", "text"):
        return str(store.dataset.schema.field(name).type).replace("list<item: string>", "list of string")
    done = store.dataset.count_rows(filter=f"`{name}`.width IS NOT NULL")
    at = f" at {noted['darkroom.resolution']} px" if "darkroom.resolution" in noted else ""
    encoder = noted.get("darkroom.encoder", "?")[:16]
    precision = noted.get("darkroom.precision", "?")
    return f"{kind}{at}, {done:,} of {store.num_rows:,} rows, by encoder {encoder} in {precision}"


def _sizes(shapes: Counter[tuple[int, int]]) -> dict[str, int]:
    counts = {f"{width} x {height}": number for (width, height), number in shapes.most_common(SHOWN_SIZES)}
    rest = len(shapes) - len(counts)
    return counts | ({f"{rest:,} others": shapes.total() - sum(counts.values())} if rest else {})


def _ratios(shapes: Counter[tuple[int, int]]) -> dict[str, int]:
    counts = dict.fromkeys((name for _, name in RATIOS), 0)
    for (width, height), number in shapes.items():
        counts[next(name for least, name in reversed(RATIOS) if width / height >= least)] += number
    return {name: number for name, number in counts.items() if number}


def _bincount(shapes: Counter[tuple[int, int]], side: Any) -> np.ndarray[Any, Any]:
    sides = np.array([side(shape) for shape in shapes], np.int64)
    return np.bincount(sides, weights=list(shapes.values())).astype(np.int64) if len(sides) else np.zeros(1)


def _spread(counts: np.ndarray[Any, Any]) -> dict[str, int]:
    """Least, median, 95th percentile and most of numbers given by how often each occurs."""
    if not counts.sum():
        return {}
    there = np.flatnonzero(counts)
    below = np.cumsum(counts) / counts.sum()
    middle, high = (int(np.searchsorted(below, share)) for share in (0.5, 0.95))
    return {"least": int(there[0]), "median": middle, "p95": high, "most": int(there[-1])}


def _disk_bytes(path: str) -> int:
    files = Path(path).rglob("*") if "://" not in path else ()
    return sum(file.stat().st_size for file in files if file.is_file())


# ---- the contact sheet, drawn at twice its size for sharp screens

SHEET_WIDTH, ROW_HEIGHT, GAP, MARGIN, CAPTION_LINES = 1600, 176, 20, 56, 2
HEADING, CAPTION, LINE = 40, 19, 26
PAPER, EDGE, INK, FADED = (246, 245, 242), (221, 218, 211), (34, 33, 31), (112, 108, 101)
WIDEST, TALLEST = 2.2, 0.6
ROUND = 10


class _Tile(NamedTuple):
    image: Image.Image
    caption: str

    @property
    def ratio(self) -> float:
        return min(WIDEST, max(TALLEST, self.image.width / self.image.height))


def contact_sheet(store: Store, path: str | Path, *, pictures: int = 64, filter: str | None = None) -> Path:
    """A PNG with pictures from all over the store and their captions, in rows of one height.

    The pictures are evenly spread over the positions (of the rows that a filter lets through), so the same
    store gives the same sheet. StoreError where there is none to show.
    """
    if Path(path).exists() and Path(path).suffix.lower() != ".png":
        raise StoreError(f"'{path}' is there already, and is no PNG", mend="choose another name")
    positions = store.select(filter)
    if not len(positions):
        raise StoreError(f"{store.path} has no pictures to show")
    chosen = positions[np.linspace(0, len(positions) - 1, min(pictures, len(positions))).astype(np.int64)]
    rows = list(_rows(list(_tiles(store, chosen))))
    height = MARGIN * 2 + HEADING + LINE * 2 + sum(_row_height(r) + GAP for r in rows)
    sheet = Image.new("RGB", (SHEET_WIDTH, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN - 8), Path(store.path).name, INK, _font(HEADING, bold=True))
    draw.text((MARGIN, MARGIN + HEADING + 6), _subtitle(store, len(chosen), filter), FADED, _font(CAPTION))
    top = MARGIN + HEADING + LINE * 2
    for row in rows:
        _draw_row(sheet, row, top)
        top += _row_height(row) + GAP
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}")
    sheet.save(temporary, "PNG")
    return atomic_replace(temporary, target)


def _subtitle(store: Store, shown: int, filter: str | None) -> str:
    sizes = sum(store.shapes(), Counter())
    (width, height), number = sizes.most_common(1)[0]
    size = f"{width} x {height}" if number == store.num_rows else f"{len(sizes):,} sizes"
    chosen = f", where {filter}" if filter else ""
    return f"{store.num_rows:,} pictures · {size} · version {store.version} · {shown} shown{chosen}"


def _tiles(store: Store, positions: Sequence[int] | np.ndarray[Any, Any]) -> Iterator[_Tile]:
    for start in range(0, len(positions), 16):
        for row in store.take(np.asarray(positions[start : start + 16]), ["picture", "caption"]).to_pylist():
            try:
                image = decode(row["picture"])
            except PictureError:
                image = Image.new("RGB", (1, 1), FADED)
            # Kept no larger than it is drawn.
            image.thumbnail((ROW_HEIGHT * 4, ROW_HEIGHT * 4))
            yield _Tile(image, row["caption"])


Placed = list[tuple[_Tile, int, int]]
"""A row's tiles, each with its left edge and width; the height follows from the row."""


def _rows(tiles: list[_Tile]) -> Iterator[Placed]:
    """Tiles in rows that fill the width, all of a row as high as each other."""
    width_left = SHEET_WIDTH - 2 * MARGIN
    row: list[_Tile] = []
    height = float(ROW_HEIGHT)
    for tile in tiles:
        row.append(tile)
        ratios, gaps = sum(t.ratio for t in row), GAP * (len(row) - 1)
        if ratios * ROW_HEIGHT + gaps >= width_left:
            height = (width_left - gaps) / ratios
            yield _placed(row, height)
            row = []
    if row:
        yield _placed(row, height)


def _placed(row: list[_Tile], height: float) -> Placed:
    placed, left = [], float(MARGIN)
    for tile in row:
        width = tile.ratio * height
        placed.append((tile, round(left), round(left + width) - round(left)))
        left += width + GAP
    return placed


def _picture_height(row: Placed) -> int:
    tile, _, width = row[0]
    return round(width / tile.ratio)


def _row_height(row: Placed) -> int:
    return _picture_height(row) + CAPTION_LINES * LINE + 8


def _draw_row(sheet: Image.Image, row: Placed, top: int) -> None:
    draw, font, height = ImageDraw.Draw(sheet), _font(CAPTION), _picture_height(row)
    for tile, left, width in row:
        image = resize_crop(tile.image, (width, height))
        sheet.paste(image, (left, top), _rounded((width, height)))
        draw.rounded_rectangle((left, top, left + width - 1, top + height - 1), ROUND, outline=EDGE, width=2)
        for number, line in zip(range(CAPTION_LINES), _wrapped(tile.caption, font, width), strict=False):
            draw.text((left + 2, top + height + 6 + number * LINE), line, FADED, font)


@cache
def _rounded(size: tuple[int, int]) -> Image.Image:
    large = Image.new("L", (size[0] * 4, size[1] * 4))
    ImageDraw.Draw(large).rounded_rectangle((0, 0, *(side - 1 for side in large.size)), ROUND * 4, fill=255)
    return large.resize(size, Image.Resampling.BOX)


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """A caption in as many lines as fit, the last with an ellipsis where it goes on."""
    words, lines = " ".join(text.split())[:400].split(" "), [""]
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    shown = lines[:CAPTION_LINES]
    if len(lines) > CAPTION_LINES:
        shown[-1] += "…"
    return [_fitted(line, font, width) for line in shown]


def _fitted(line: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    if font.getlength(line) <= width:
        return line
    bare = line.rstrip("…")
    while len(bare) > 1 and font.getlength(bare + "…") > width:
        bare = bare[:-1].rstrip()
    return bare + "…"


@cache
def _font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font that comes with matplotlib, which has most of the world's letters; else Pillow's own."""
    spec = find_spec("matplotlib")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / "mpl-data" / "fonts" / "ttf" / f"DejaVuSans{'-Bold' if bold else ''}.ttf"
        if file.is_file():
            return ImageFont.truetype(str(file), size)
    return ImageFont.load_default(size)


BATCH_ROWS = 64
LISTED = 5
UNREADABLE = (OSError, ValueError, RuntimeError)  # as Lance tells damage: by any of these
Progress = Callable[[int, int | None], None]


@dataclass
class Verification:
    """What was looked at in a store, and what is wrong with it: one line each, nothing where it is whole.

    `hashed` pictures were read and have the id that their bytes and caption make. `unreferenced` files are in
    no version. `pinned` versions, by name, still show deleted pictures; that is as it should be. `takedowns`
    say how many pictures of each source were deleted on which day (UTC); None where that was not noted.
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
    takedowns: list[dict[str, Any]] = field(default_factory=list)
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
        for one in self.takedowns:
            of = "before days were noted" if one["day"] is None else f"on {one['day']} of '{one['source']}'"
            lines.append(f"deleted {of}: {one['pictures']:,} pictures")
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
    try:
        _check_takedowns(store, found, there)
    except StoreError as error:
        found.problems.append(str(error))


def _check_takedowns(store: Store, found: Verification, still_there: int) -> None:
    """What was deleted when; a killed deletion counts by what it has deleted."""
    done = store.takedowns.done()
    for note in store.takedowns.pending():
        if note.is_done:
            continue
        gone = store.taken_down(note)
        done.append(replace(note, pictures=gone))
        if not note.by_id and not gone:
            found.problems += [
                f"{number:,} pictures of '{source}' were to be deleted; delete them again, it was stopped"
                for source, number in note.pictures.items()
            ]
    found.takedowns = by_day(done)
    before = 0 if store.takedowns.any else len(store.deleted_ids()) - still_there
    if before:
        found.takedowns.append({"day": None, "source": None, "pictures": before})


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


# ---- near-doubles: the same picture scaled, compressed anew or slightly changed, under any caption
#
# Candidates are found by their perceptual hashes, then compared by their pixels: a hash of grey differences
# alone takes a red circle for a green one, and all plain pictures for one.

FIELD = pa.field(DOUBLE_OF, pa.string(), metadata={"darkroom.kind": DOUBLE_OF})

MAX_DISTANCE = 7
THUMBNAIL = 16
MAX_MEAN, MAX_PATCH = 5.0, 24.0
DECODE_ROWS = 256

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]


def find_doubles(
    store: Store, *, max_distance: int = 3, progress: Callable[[int, int | None], None] | None = None
) -> dict[int, int]:
    """Each double's position and that of the first picture like it.

    Pictures are alike whose hashes differ in at most `max_distance` of 64 bits (up to 7), and whose
    thumbnails of 16x16 pixels differ by at most 5 levels of 255 on average and 24 in any patch. Only
    candidates are decoded. Takes 16 bytes of memory a row.
    """
    if not 0 <= max_distance <= MAX_DISTANCE:
        raise InputError(f"max_distance {max_distance}", allowed=f"0 to {MAX_DISTANCE}")
    hashes = np.concatenate(
        [np.zeros(0, np.uint64)]
        + [b.column("phash").to_numpy().view(np.uint64) for b in store.scan(["phash"], batch_rows=65_536)]
    )
    groups = candidates(hashes, max_distance)
    total, done, found = sum(map(len, groups)), 0, dict[int, int]()
    for group in groups:
        found |= _alike(store, group, hashes[group], max_distance)
        done += len(group)
        if progress is not None:
            progress(done, total)
    return found


def mark_doubles(
    store: Store, *, max_distance: int = 3, progress: Callable[[int, int | None], None] | None = None
) -> int:
    """Note in the column `double_of` which picture a row is a double of; returns the number of doubles.

    `double_of IS NULL` then selects one picture of each kind. Run it again after an import. Nothing but
    this column is written, and only in fragments where it changes.
    """
    store.refresh()
    store.add_columns([FIELD])
    found = find_doubles(store, max_distance=max_distance, progress=progress)
    doubles = np.array(sorted(found), np.int64)
    ids = dict(zip(doubles.tolist(), _ids(store, doubles), strict=True))
    originals = dict(zip(doubles.tolist(), _ids(store, [found[i] for i in doubles.tolist()]), strict=True))
    marks = {ids[position]: originals[position] for position in ids}
    store.set_by_id(DOUBLE_OF, marks)
    return len(marks)


def _ids(store: Store, positions: Sequence[int] | Ints) -> list[str]:
    ids: list[str] = store.take(np.asarray(positions, np.int64), ["id"])["id"].to_pylist()
    return ids


def candidates(hashes: Hashes, max_distance: int) -> list[Ints]:
    """Positions whose hashes hang together by steps of at most `max_distance` bits, in groups of two up.

    Two hashes that differ in d bits agree in at least one of d + 1 bands (pigeonholes), so only those that
    share a band are compared; equal hashes count once.
    """
    distinct, number_of = np.unique(hashes, return_inverse=True)
    root = np.arange(len(distinct))
    for a, b in _near_pairs(distinct, max_distance):
        _join(root, a, b)
    root_of = np.array([_root(root, i) for i in range(len(distinct))], np.int64)[number_of]
    order = np.argsort(root_of, kind="stable")
    cuts = np.flatnonzero(np.diff(root_of[order])) + 1
    groups = [group for group in np.split(order, cuts) if len(group) > 1]
    return sorted(groups, key=lambda group: int(group[0]))


def _root(root: Ints, i: int) -> int:
    while root[i] != i:
        root[i] = root[root[i]]
        i = int(root[i])
    return i


def _join(root: Ints, a: int, b: int) -> None:
    a, b = _root(root, a), _root(root, b)
    root[max(a, b)] = min(a, b)


def _near_pairs(distinct: Hashes, max_distance: int) -> Iterator[tuple[int, int]]:
    """Pairs that differ in few bits: sorted by a band, each hash meets its followers while they share it."""
    if max_distance == 0:
        return
    edges = np.linspace(0, 64, max_distance + 2).astype(int)
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        band = (distinct >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
        order = np.argsort(band, kind="stable")
        band, first, step = band[order], np.arange(len(order)), 1
        while len(first):
            first = first[first + step < len(order)]
            first = first[band[first] == band[first + step]]
            a, b = order[first], order[first + step]
            near = np.bitwise_count(distinct[a] ^ distinct[b]) <= max_distance
            yield from zip(a[near].tolist(), b[near].tolist(), strict=True)
            step += 1


def _alike(store: Store, group: Ints, hashes: Hashes, max_distance: int) -> dict[int, int]:
    """Within a group of candidates, each double and the first picture that it is like by its pixels."""
    found: dict[int, int] = {}
    first: list[int] = []
    first_hashes, first_thumbnails = (
        np.zeros(0, np.uint64),
        np.zeros((0, THUMBNAIL, THUMBNAIL, 3), np.float32),
    )
    for start in range(0, len(group), DECODE_ROWS):
        positions = group[start : start + DECODE_ROWS]
        pictures = store.take(positions, ["picture"])["picture"].to_pylist()
        for position, hash_, data in zip(
            positions.tolist(), hashes[start : start + DECODE_ROWS], pictures, strict=True
        ):
            thumbnail = _thumbnail(data)
            near = np.bitwise_count(first_hashes ^ hash_) <= max_distance
            alike = [i for i in np.flatnonzero(near) if _are_alike(thumbnail, first_thumbnails[i])]
            if alike:
                found[position] = first[alike[0]]
                continue
            first.append(position)
            first_hashes = np.append(first_hashes, hash_)
            first_thumbnails = np.concatenate([first_thumbnails, thumbnail[None]])
    return found


def _thumbnail(data: bytes) -> NDArray[np.float32]:
    """A picture as 16x16 RGB; one that does not decode is like nothing."""
    try:
        image = decode(data).resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    except PictureError:
        return np.full((THUMBNAIL, THUMBNAIL, 3), np.nan, np.float32)
    return np.asarray(image, np.float32)


def _are_alike(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    difference = np.abs(a - b).max(axis=-1)
    patches = difference.reshape(THUMBNAIL // 2, 2, THUMBNAIL // 2, 2).mean(axis=(1, 3))
    return bool(difference.mean() <= MAX_MEAN and patches.max() <= MAX_PATCH)
