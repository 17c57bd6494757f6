"""What lies beside the rows in a store's folder: sizes by fragment, deleted ids, pictures set aside."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

REJECTED = "rejected.jsonl"


class Sidecars:
    """Small files of a store in a local folder; at an address such as s3:// nothing is noted or found."""

    def __init__(self, store_path: str) -> None:
        self.root = None if "://" in store_path else Path(store_path)

    def read_shapes(self, data_file: str, num_rows: int) -> Counter[tuple[int, int]] | None:
        """The sizes noted for a fragment, None where its rows are not those that were counted."""
        if self.root is None or not (path := self._shapes_path(data_file)).is_file():
            return None
        counts = Counter({(width, height): number for width, height, number in json.loads(path.read_text())})
        return counts if counts.total() == num_rows else None

    def write_shapes(self, data_file: str, counts: Counter[tuple[int, int]]) -> None:
        """Note the sizes of a fragment under the name of its data file, which is never used again."""
        if self.root is not None:
            rows = [[*shape, number] for shape, number in sorted(counts.items())]
            write_atomically(self._shapes_path(data_file), json.dumps(rows, separators=(",", ":")))

    def _shapes_path(self, data_file: str) -> Path:
        assert self.root is not None
        return self.root / "_shapes" / (Path(data_file).stem + ".json")

    def note_deleted(self, ids: Iterable[str]) -> None:
        """Remember ids that were deleted, so that they stay out."""
        if self.root is not None:
            new = sorted(set(ids) - self.deleted_ids())
            append_lines(self.root / "deleted.txt", new)

    def deleted_ids(self) -> set[str]:
        path = self.root / "deleted.txt" if self.root is not None else None
        return set(path.read_text().split()) if path is not None and path.is_file() else set()


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append whole lines; a line torn by a kill is closed off first, so that it spoils no other."""
    text = "".join(line + "\n" for line in lines)
    if text:
        with path.open("ab+") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END) or True) and file.read(1) != b"\n":
                text = "\n" + text
            file.write(text.encode())
