"""Writing rows as they come: committed every few seconds, then joined to whole fragments."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import lance
import pyarrow as pa

from darkroom.data.purging import preparing
from darkroom.data.store import ROWS_PER_FRAGMENT, Store

FRAGMENT_BYTES = 1024**3
COMMIT_EVERY_S = 5.0
WAITING_TABLES = 2
LOOK_S = 1.0


class FragmentWriter:
    """Appends tables to a store, in fragments of so many rows or bytes, whatever the pace they come at.

    A commit is made after some seconds, so that a kill costs no more than those. Each makes a small fragment;
    a group of them that makes a whole one is joined, and so is the last group by `finish`. Groups that a kill
    left are continued. Fragments thus begin and end at the same rows however often an import was killed.
    While a fragment is open the store belongs to the writer's thread; a table with other columns closes it.
    `committed` is called after each commit, when all that was written before is safe.
    """

    def __init__(
        self, store: Store, committed: Callable[[], None], rows_per_fragment: int = ROWS_PER_FRAGMENT
    ) -> None:
        self._store, self._committed, self._limit = store, committed, rows_per_fragment
        self._fragment: _Fragment | None = None
        self._groups = store.sidecars.unjoined()
        self._rows, self._bytes = self._left_by_a_kill()

    def _left_by_a_kill(self) -> tuple[int, int]:
        """Rows and bytes of the group that a killed import had begun."""
        if not self._groups:
            self._groups.append([])
            return 0, 0
        there = {
            fragment.data_files()[0].path: (fragment.metadata.num_rows, _data_bytes(fragment))
            for fragment in self._store.dataset.get_fragments()
        }
        self._groups = [group for group in self._groups if group and there.keys() >= set(group)]
        open_group = [there[file] for file in self._groups[-1]] if self._groups else []
        rows, size = sum(n for n, _ in open_group), sum(b for _, b in open_group)
        if not rows or rows >= self._limit or size >= FRAGMENT_BYTES:
            self._groups.append([])
            return 0, 0
        return rows, size

    def write(self, rows: pa.Table) -> None:
        """Queue rows; waits where the disk is slower than the source."""
        while rows.num_rows:
            if self._fragment is not None and self._fragment.schema != rows.schema:
                self.close()
            if self._fragment is None:
                self._fragment = _Fragment(self._store, rows.schema)
            part = rows.slice(0, self._limit - self._rows)
            self._fragment.put(part)
            self._rows, self._bytes = self._rows + part.num_rows, self._bytes + part.nbytes
            rows = rows.slice(part.num_rows)
            if self._rows >= self._limit or self._bytes >= FRAGMENT_BYTES:
                self.close()
        if self._fragment is not None and time.monotonic() >= self._fragment.commit_at:
            self.close()

    def close(self) -> None:
        """Commit what was written; raises what went wrong."""
        fragment, self._fragment = self._fragment, None
        if fragment is not None:
            fragment.close()
            self._groups[-1].append(self._store.dataset.get_fragments()[-1].data_files()[0].path)
            whole = self._rows >= self._limit or self._bytes >= FRAGMENT_BYTES
            self._store.sidecars.note_unjoined(self._groups)
            if whole:
                self._join()
                self._groups.append([])
                self._rows = self._bytes = 0
        self._committed()

    def finish(self) -> None:
        """Commit, and join what is left of small fragments."""
        self.close()
        self._join()

    def _join(self) -> None:
        """Join each group; not during a running prepare, which would have to encode its fragment again."""
        root = self._store.sidecars.root
        if root is None or preparing(root):
            return
        several = [group for group in self._groups if len(group) > 1]
        for group in several:
            self._store.join(group)
        self._groups = []
        self._store.sidecars.note_unjoined([])
        if several:
            self._store.drop_old_versions()


def _data_bytes(fragment: lance.LanceFragment) -> int:
    return sum(file.file_size_bytes or 0 for file in fragment.data_files())


class _Fragment:
    """One append, whose rows come through a queue."""

    def __init__(self, store: Store, schema: pa.Schema) -> None:
        self.schema, self.commit_at = schema, time.monotonic() + COMMIT_EVERY_S
        self._queue: queue.Queue[pa.Table | None] = queue.Queue(WAITING_TABLES)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._append, args=(store,), name="fragment-writer", daemon=True
        )
        self._thread.start()

    def put(self, rows: pa.Table | None) -> None:
        """Queue rows for the writer, None at the end; waits while full. Raises the error of the writer."""
        while True:
            self._check()
            try:
                self._queue.put(rows, timeout=LOOK_S)
            except queue.Full:
                continue  # the writer may have died: look
            break

    def close(self) -> None:
        self.put(None)
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _append(self, store: Store) -> None:
        try:
            store.append(pa.RecordBatchReader.from_batches(self.schema, self._batches()))
        except BaseException as error:
            self._error = error

    def _batches(self) -> Iterator[pa.RecordBatch]:
        while (rows := self._queue.get()) is not None:
            yield from rows.to_batches()
