"""How quickly batches of prepared latents are read, shuffled, against a plain scan of the same store; and how
quickly pictures come in, against only reading and decoding them.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from darkroom.data.importers.archives import ZipReader
from darkroom.data.importers.job import import_pictures
from darkroom.data.loader import Loader, ReadSettings
from darkroom.data.order import Order
from darkroom.data.store import SCHEMA, Store
from darkroom.errors import InputError
from darkroom.hardware.meters import PeakMemory, resident_bytes
from darkroom.hardware.system import allowed_cores, remove_tree
from darkroom.measure.timing import Measurement, interleave, measurement
from darkroom.models.model import LatentScaling
from darkroom.prepare.columns import latents_field

_T = TypeVar("_T")
IDENTITY = "0" * 64
COLUMN = latents_field(512, IDENTITY, scaling=LatentScaling(), crop="centre", precision="float32")
SHAPE = (2, 2, 64, 64)  # moments of 32 KB: as many bytes as one latent of 4x64x64 in float16
ROW_BYTES = 2 * int(np.prod(SHAPE))
CHUNK_ROWS = 4096
SCAN, WINDOWS, RESIDENT = "plain scan", "loader, from the store", "loader, all in memory"


def bench_loader(
    *,
    rows: int = 20_000,
    batch: int = 256,
    repeats: int = 7,
    workers: int = 2,
    memory_bytes: int = 1 << 30,
    folder: str | Path | None = None,
) -> list[Measurement]:
    """Rows for one shuffled epoch of float16 moments of 32 KB with captions, in turns with a sequential scan.

    The scan hands out Arrow batches of the same columns and makes no tensors of them. One loader starts anew
    at every repeat and reads windows of the store; its start-up counts. Another keeps the store in memory and
    was warmed by a whole epoch; it may begin a repeat with `ahead` batches ready. The file cache of the
    operating system is warm throughout: this times the software, not the disk. The store (32 KB a row) lies
    in `folder` meanwhile, or in the system's temporary folder.
    """
    if batch < 1 or rows < batch or repeats < 1:
        raise InputError(f"rows={rows}, batch={batch}, repeats={repeats}", allowed="rows >= batch >= 1")
    batches = rows // batch
    settings = {"rows": rows, "batch": batch, "row_bytes": ROW_BYTES, "workers": workers}
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        store = make_store(Path(place) / "pictures.lance", rows)
        order = Order(store.fragments, seed=0, global_batch=batch)
        read = ReadSettings(latents=COLUMN.name, caption=True)

        def from_the_store() -> int:
            with Loader(
                store, order, read=read, end=batches, workers=workers, memory_bytes=memory_bytes
            ) as fresh:
                return sum(len(one) for one in fresh)

        enough = max(memory_bytes, 3 * rows * ROW_BYTES)
        with Loader(store, order, read=read, workers=workers, memory_bytes=enough) as kept:
            cases: dict[str, Callable[[], int]] = {
                SCAN: lambda: sum(len(one) for one in store.scan(["caption", COLUMN.name], batch_rows=batch)),
                WINDOWS: from_the_store,
                RESIDENT: lambda: sum(len(one) for one in islice(kept, batches)),
            }
            cpu = {name: CpuTime(call) for name, call in cases.items()}
            timings = interleave(cpu, repeats=repeats)
    note = "file cache warm; the scan makes no tensors"
    return [
        measurement(
            "loader",
            timing,
            images=rows if name == SCAN else batches * batch,
            baseline=None if name == SCAN else timings[SCAN],
            settings=settings,
            note=f"{cpu[name].rate(repeats):.0f} samples per CPU-second; {note}",
        )
        for name, timing in timings.items()
    ]


class CpuTime:
    """A call that counts samples, and the CPU seconds that all threads of the process spend on each."""

    def __init__(self, call: Callable[[], int]) -> None:
        self._call, self._rates = call, list[float]()

    def __call__(self) -> int:
        began = time.process_time()
        samples = self._call()
        self._rates.append(samples / max(1e-9, time.process_time() - began))
        return samples

    def rate(self, repeats: int) -> float:
        """Samples per CPU-second: the median of the last calls."""
        return float(np.median(self._rates[-repeats:]))


def make_store(path: Path, rows: int) -> Store:
    """A store of random moments; the pictures are one byte each and are not read."""
    store = Store.create(path)
    store.add_columns([COLUMN])
    rng = np.random.default_rng(0)
    for chunk in _chunks(rng, rows):
        store.append(chunk)
    return store


def _chunks(rng: np.random.Generator, rows: int) -> Iterator[pa.Table]:
    for start in range(0, rows, CHUNK_ROWS):
        numbers = range(start, min(start + CHUNK_ROWS, rows))
        count = len(numbers)
        values = rng.integers(0, 256, count * ROW_BYTES, dtype=np.uint8)
        offsets = np.arange(count + 1, dtype=np.int64) * ROW_BYTES
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        moments = pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, buffers)
        side = pa.array(np.full(count, SHAPE[2], dtype=np.int16))
        content = {
            "id": [f"{i:032x}" for i in numbers],
            "picture": [b"-"] * count,
            "caption": [f"a red circle on a blue background, number {i}" for i in numbers],
            "width": [512] * count,
            "height": [512] * count,
            "format": ["PNG"] * count,
            "phash": list(numbers),
            "source": ["made"] * count,
            "key": [str(i) for i in numbers],
        }
        latents = pa.StructArray.from_arrays([moments, side, side], fields=list(COLUMN.type))
        yield pa.table(content, schema=SCHEMA).append_column(COLUMN, latents)


# ---- importing

DISTINCT = 512
CHUNK, SHARD = 128, 1000
SETTLE_PICTURES = 2_000


def bench_import(
    *,
    kind: str = "zip",
    pictures: int = 20_000,
    size: int = 64,
    format: str = "WEBP",
    repeats: int = 5,
    workers: int | None = None,
    folder: str | Path | None = None,
) -> list[Measurement]:
    """Rows for importing square pictures from one of `SOURCES`, and for reading and decoding them, in turns.

    The pictures are drawn first, a few hundred that differ under as many captions as there are pictures, so
    that none is a double. `peak_memory_bytes` is what the resident set grew by at its highest; a second
    import of four times as many pictures shows that it does not follow their number. `folder` is where the
    sources and the stores are put meanwhile (256 B plus the pictures' bytes each, twice); the system's own
    temporary folder otherwise.
    """
    if kind not in SOURCES:
        raise InputError(f"kind '{kind}'", allowed=", ".join(SOURCES))
    if min(pictures, size, repeats) < 1:
        raise InputError(f"pictures={pictures}, size={size}, repeats={repeats}", allowed="1 or more each")
    workers = workers or allowed_cores()
    settings = {"kind": kind, "pictures": pictures, "size": size, "format": format, "workers": workers}
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        source = make_source(Path(place) / "source", pictures, size, format, kind)
        larger = make_source(Path(place) / "larger", 4 * pictures, size, format, kind)
        runs = _Runs(Path(place), workers, kind)
        runs.imported(make_source(Path(place) / "first", min(pictures, SETTLE_PICTURES), size, format, kind))
        peaks = {"import": runs.growth(lambda: runs.imported(source))}
        peaks["import, 4 times as many"] = runs.growth(lambda: runs.imported(larger))
        cases: dict[str, Callable[[], int]] = {
            "read and decode only": lambda: runs.decoded(source),
            "import": lambda: runs.imported(source),
        }
        cpu = {name: CpuTime(call) for name, call in cases.items()}
        timings = interleave(cpu, repeats=repeats)
        cpu["import, 4 times as many"] = CpuTime(lambda: runs.imported(larger))
        more = {"import, 4 times as many": cpu["import, 4 times as many"]}
        timings |= interleave(more, repeats=1, warmup=0)
    rows = []
    for name, timing in timings.items():
        number = 4 * pictures if "4 times" in name else pictures
        baseline = timings["read and decode only"] if name == "import" else None
        row = measurement(
            "import", timing, images=number, baseline=baseline, settings=settings | {"pictures": number}
        )
        note = f"{row.note}; {cpu[name].rate(repeats):.0f} pictures per CPU-second; {NOTE}"
        rows.append(row.model_copy(update={"peak_memory_bytes": peaks.get(name), "note": note}))
    return rows


NOTE = "memory: growth of the resident set in one untimed run"


class _Runs:
    """The two sides of the comparison, each into a store or nowhere."""

    def __init__(self, place: Path, workers: int, kind: str) -> None:
        self._store, self._workers, self._kind = place / "pictures.lance", workers, kind

    def imported(self, source: Path) -> int:
        remove_tree(self._store)
        return import_pictures(source, self._store, workers=self._workers).added

    def decoded(self, source: Path) -> int:
        """Every picture of the source read and decoded in as many threads, and dropped."""
        with SOURCES[self._kind].parts(source) as parts, ThreadPoolExecutor(self._workers) as pool:
            return sum(pool.map(_decoded, parts))

    def growth(self, call: Callable[[], object]) -> int:
        """By how many bytes the resident set grew at its highest while something ran."""
        before, peak = resident_bytes(), PeakMemory()
        call()
        return max(0, peak.bytes() - before)


def _decoded(part: Part) -> int:
    """Read and decode the pictures of a part; returns how many."""
    count = 0
    for picture in part():
        Image.open(io.BytesIO(picture)).load()
        count += 1
    return count


def make_source(folder: Path, pictures: int, size: int, format: str, kind: str = "zip") -> Path:
    """A source of one of `SOURCES` with as many captions as pictures."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    files = [_picture(rng, size, format) for _ in range(min(DISTINCT, pictures))]
    made = (_Made(number, format.lower(), files[number % len(files)]) for number in range(pictures))
    SOURCES[kind].write(folder, made)
    return folder


@dataclass(frozen=True)
class _Made:
    """A picture of a source, with its caption and one more column."""

    number: int
    ending: str
    data: bytes

    @property
    def name(self) -> str:
        return f"{self.number:08d}.{self.ending}"

    @property
    def text(self) -> str:
        return f"picture number {self.number}"


Part: TypeAlias = Callable[[], Iterator[bytes]]
"""Reads some of a source's pictures; on any thread."""


@dataclass(frozen=True)
class _SourceKind:
    """How a kind of source is written, and how it is read without darkroom's reader of it."""

    write: Callable[[Path, Iterable[_Made]], None]
    parts: Callable[[Path], AbstractContextManager[Iterator[Part]]]


def _write_zip(folder: Path, pictures: Iterable[_Made]) -> None:
    """`images.zip` and `captions.jsonl`, laid out as the emoji set is."""
    with (
        zipfile.ZipFile(folder / "images.zip", "w") as archive,
        (folder / "captions.jsonl").open("w", encoding="utf-8") as lines,
    ):
        for one in pictures:
            archive.writestr(zipfile.ZipInfo(one.name), one.data)
            lines.write(json.dumps({"file_name": one.name, "text": one.text, "score": one.number}) + "\n")


@contextmanager
def _zip_parts(folder: Path) -> Iterator[Iterator[Part]]:
    reader = ZipReader(folder / "images.zip")

    def read(names: list[str]) -> Iterator[bytes]:
        return (reader.read(member) for name in names if (member := reader.find(name)) is not None)

    yield (partial(read, names) for names in _at_once(member.name for member in reader.members()))
    reader.close()


def _write_tars(folder: Path, pictures: Iterable[_Made]) -> None:
    """Tars of a thousand pictures, each with its text and JSON, as img2dataset writes them."""
    for shard, some in enumerate(_at_once(pictures, SHARD)):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for one in some:
                stem = one.name.removesuffix(f".{one.ending}")
                score = json.dumps({"score": one.number}).encode()
                for ending, data in ((one.ending, one.data), ("txt", one.text.encode()), ("json", score)):
                    member = tarfile.TarInfo(f"{stem}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


@contextmanager
def _tar_parts(folder: Path) -> Iterator[Iterator[Part]]:
    def read(file: Path) -> Iterator[bytes]:
        """The pictures of a tar, one after the other."""
        with tarfile.open(file) as archive:
            for member in archive:
                data = archive.extractfile(member)
                if data is not None and not member.name.endswith((".txt", ".json")):
                    yield data.read()

    yield (partial(read, file) for file in sorted(folder.glob("*.tar")))


def _write_parquet(folder: Path, pictures: Iterable[_Made]) -> None:
    """Files of a thousand pictures in ten row groups, the picture's bytes as Hugging Face's datasets have
    them."""
    for shard, some in enumerate(_at_once(pictures, SHARD)):
        images = [{"bytes": one.data, "path": one.name} for one in some]
        columns = {"image": images, "text": [o.text for o in some], "score": [o.number for o in some]}
        parquet.write_table(pa.table(columns), folder / f"{shard:05d}.parquet", row_group_size=SHARD // 10)


@contextmanager
def _parquet_parts(folder: Path) -> Iterator[Iterator[Part]]:
    def read(file: Path, group: int) -> Iterator[bytes]:
        with parquet.ParquetFile(file) as opened:
            column = opened.read_row_group(group, columns=["image"], use_threads=False)["image"]
        for picture in column.to_pylist():
            yield picture["bytes"]

    files = sorted(folder.glob("*.parquet"))
    groups = ((file, group) for file in files for group in range(parquet.read_metadata(file).num_row_groups))
    yield (partial(read, file, group) for file, group in groups)


SOURCES = {
    "zip": _SourceKind(_write_zip, _zip_parts),
    "webdataset": _SourceKind(_write_tars, _tar_parts),
    "parquet": _SourceKind(_write_parquet, _parquet_parts),
}


def _at_once(items: Iterable[_T], number: int = CHUNK) -> Iterator[list[_T]]:
    left = iter(items)
    while chunk := list(islice(left, number)):
        yield chunk


def _picture(rng: np.random.Generator, size: int, format: str) -> bytes:
    """Soft patches of colour with some grain: about as hard to decode as a drawing."""
    patches = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    pixels = np.asarray(patches.resize((size, size), Image.Resampling.BICUBIC)).astype(np.int16)
    grain = rng.integers(-3, 4, pixels.shape, dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8)).save(file, format)
    return file.getvalue()
