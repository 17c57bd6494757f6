"""What was taken out of a store: of each deletion its day, its sources and how many pictures of each.

A note in `_takedowns/` outlives the pictures and holds nothing of them. It is made before the deletion
commits (`*.pending`, with the ids of a deletion by id, to see after a kill what is gone) and put in its final
form (`*.json`) when it is done, by the same call or by the next write to the store.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from darkroom.errors import StoreError
from darkroom.hardware.system import remove_file, write_atomically

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
