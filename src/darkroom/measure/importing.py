"""How quickly pictures come in, against only reading and decoding them, and what memory that takes."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from darkroom.data.importers.job import import_pictures
from darkroom.data.importers.zip import ZipReader
from darkroom.errors import InputError
from darkroom.hardware.memory import PeakMemory, resident_bytes
from darkroom.hardware.system import allowed_cores, remove_tree
from darkroom.measure.timing import Measurement, interleave, measurement

DISTINCT = 512
CHUNK = 128
SETTLE_PICTURES = 2_000


def bench_import(
    *,
    pictures: int = 20_000,
    size: int = 64,
    format: str = "WEBP",
    repeats: int = 5,
    workers: int | None = None,
    folder: str | Path | None = None,
) -> list[Measurement]:
    """Rows for importing a zip of square pictures, and for reading and decoding the same, in turns.

    The pictures are drawn first, a few hundred that differ under as many captions as there are pictures, so
    that none is a double. `peak_memory_bytes` is what the resident set grew by at its highest; a second
    import of four times as many pictures shows that it does not follow their number. `folder` is where the
    zip and the stores are put meanwhile (256 B plus the pictures' bytes each, twice); the system's own
    temporary folder otherwise.
    """
    if min(pictures, size, repeats) < 1:
        raise InputError(f"pictures={pictures}, size={size}, repeats={repeats}", allowed="1 or more each")
    workers = workers or allowed_cores()
    settings = {"pictures": pictures, "size": size, "format": format, "workers": workers}
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        source = make_source(Path(place) / "source", pictures, size, format)
        larger = make_source(Path(place) / "larger", 4 * pictures, size, format)
        runs = _Runs(Path(place), workers)
        runs.imported(make_source(Path(place) / "first", min(pictures, SETTLE_PICTURES), size, format))
        peaks = {"import": runs.growth(lambda: runs.imported(source))}
        peaks["import, 4 times as many"] = runs.growth(lambda: runs.imported(larger))
        cases: dict[str, Callable[[], object]] = {
            "read and decode only": lambda: runs.decoded(source),
            "import": lambda: runs.imported(source),
        }
        timings = interleave(cases, repeats=repeats)
        timings |= interleave({"import, 4 times as many": lambda: runs.imported(larger)}, repeats=1, warmup=0)
    rows = []
    for name, timing in timings.items():
        number = 4 * pictures if "4 times" in name else pictures
        baseline = timings["read and decode only"] if name == "import" else None
        row = measurement(
            "import", timing, images=number, baseline=baseline, settings=settings | {"pictures": number}
        )
        rows.append(
            row.model_copy(update={"peak_memory_bytes": peaks.get(name), "note": f"{row.note}; {NOTE}"})
        )
    return rows


NOTE = "memory: growth of the resident set in one untimed run"


class _Runs:
    """The two sides of the comparison, each into a store or nowhere."""

    def __init__(self, place: Path, workers: int) -> None:
        self._store, self._workers = place / "pictures.lance", workers

    def imported(self, source: Path) -> int:
        remove_tree(self._store)
        return import_pictures(source, self._store, workers=self._workers).added

    def decoded(self, source: Path) -> int:
        """Every picture of the zip read and decoded in as many threads, and dropped."""
        reader = ZipReader(source / "images.zip")
        names = (member.name for member in reader.members())

        def decode(chunk: list[str]) -> int:
            """Read and decode the members of a chunk; returns how many."""
            for name in chunk:
                member = reader.find(name)
                if member is not None:
                    Image.open(io.BytesIO(reader.read(member))).load()
            return len(chunk)

        with ThreadPoolExecutor(self._workers) as pool:
            done = sum(pool.map(decode, _chunks(names)))
        reader.close()
        return done

    def growth(self, call: Callable[[], object]) -> int:
        """By how many bytes the resident set grew at its highest while something ran."""
        before, peak = resident_bytes(), PeakMemory()
        call()
        return max(0, peak.bytes() - before)


def _chunks(names: Iterator[str]) -> Iterator[list[str]]:
    while chunk := list(islice(names, CHUNK)):
        yield chunk


def make_source(folder: Path, pictures: int, size: int, format: str) -> Path:
    """A folder with `images.zip` and `captions.jsonl`, laid out as the emoji set is."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    files = [_picture(rng, size, format) for _ in range(min(DISTINCT, pictures))]
    with (
        zipfile.ZipFile(folder / "images.zip", "w") as archive,
        (folder / "captions.jsonl").open("w", encoding="utf-8") as lines,
    ):
        for number in range(pictures):
            name = f"{number:08d}.{format.lower()}"
            archive.writestr(zipfile.ZipInfo(name), files[number % len(files)])
            entry = {"file_name": name, "text": f"picture number {number}", "score": number / pictures}
            lines.write(json.dumps(entry) + "\n")
    return folder


def _picture(rng: np.random.Generator, size: int, format: str) -> bytes:
    """Soft patches of colour with some grain: about as hard to decode as a drawing."""
    patches = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    pixels = np.asarray(patches.resize((size, size), Image.Resampling.BICUBIC)).astype(np.int16)
    grain = rng.integers(-3, 4, pixels.shape, dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8)).save(file, format)
    return file.getvalue()
