"""Writing rows as they come: fragment by fragment, in the background, with what the store needs noted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pyarrow as pa

from darkroom.data.store import ROWS_PER_FRAGMENT, Store

FRAGMENT_BYTES = 1024**3
WAITING_TABLES = 2
LOOK_S = 1.0


class FragmentWriter:
    """Appends tables to a store, committing after so many rows or bytes.

    While a fragment is open the store belongs to the writer's thread; a table with other columns closes it.
    `committed` is called after each commit, when all that was written before is safe.
    """

    def __init__(
        self, store: Store, committed: Callable[[], None], rows_per_fragment: int = ROWS_PER_FRAGMENT
    ) -> None:
        self._store, self._committed, self._limit = store, committed, rows_per_fragment
        self._fragment: _Fragment | None = None

    def write(self, rows: pa.Table) -> None:
        """Queue rows; waits where the disk is slower than the source."""
        while rows.num_rows:
            if self._fragment is not None and self._fragment.schema != rows.schema:
                self.close()
            if self._fragment is None:
                self._fragment = _Fragment(self._store, rows.schema)
            part = rows.slice(0, self._limit - self._fragment.rows)
            self._fragment.put(part)
            rows = rows.slice(part.num_rows)
            if self._fragment.rows >= self._limit or self._fragment.bytes >= FRAGMENT_BYTES:
                self.close()

    def close(self) -> None:
        """Commit what was written; raises what went wrong."""
        fragment, self._fragment = self._fragment, None
        if fragment is not None:
            fragment.close()
        self._committed()


class _Fragment:
    """One append, whose rows come through a queue."""

    def __init__(self, store: Store, schema: pa.Schema) -> None:
        self.schema, self.rows, self.bytes = schema, 0, 0
        self._queue: queue.Queue[pa.Table | None] = queue.Queue(WAITING_TABLES)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._append, args=(store,), name="fragment-writer", daemon=True
        )
        self._thread.start()

    def put(self, rows: pa.Table | None) -> None:
        while True:
            self._check()
            try:
                self._queue.put(rows, timeout=LOOK_S)
            except queue.Full:
                continue  # the writer may have died: look
            break
        if rows is not None:
            self.rows += rows.num_rows
            self.bytes += rows.nbytes

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
