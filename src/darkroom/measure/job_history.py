"""What a long job history costs a server: accepting a job and listing a key's newest, in turns."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from darkroom.errors import InputError
from darkroom.measure.timing import Measurement, interleave, measurement
from darkroom.serve.jobs.store import JOBS, JobStore, Record

EMPTY = 0
ROWS_AT_ONCE = 10_000


def bench_job_history(
    *, jobs: int = 200_000, repeats: int = 50, folder: str | Path | None = None
) -> list[Measurement]:
    """Rows for accepting and for listing 100 jobs with a history of `jobs`, against an empty one.

    The history is one key's, in SQLite in `folder`, or in the system's temporary folder. Each time includes
    the writer thread and the flush to the disk.
    """
    if jobs < 1 or repeats < 1:
        raise InputError(f"jobs={jobs}, repeats={repeats}", allowed="at least 1 of each")
    cases: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        for count in (EMPTY, jobs):
            place = stack.enter_context(tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True))
            store = JobStore(f"sqlite:///{place}/jobs.db", "bench")
            stack.callback(store.close)
            fill(store, count)
            cases[f"accept, {count} jobs"] = _accepting(store)
            cases[f"list, {count} jobs"] = lambda store=store: store.find_all("key").result()  # type: ignore[misc]
        timings = interleave(cases, repeats=repeats)
    return [
        measurement(
            "job-history",
            timing,
            images=1,
            baseline=None if f", {EMPTY} jobs" in name else timings[f"{name.split(',')[0]}, {EMPTY} jobs"],
            settings={"jobs": jobs},
            note="SQLite, with the flush to the disk",
        )
        for name, timing in timings.items()
    ]


def fill(store: JobStore, count: int) -> None:
    """Finished jobs of one key."""
    start_s = time.time() - count
    rows = (
        {**record(i, start_s + i, "done").__dict__, "finished_s": start_s + i + 1, "result": "{}"}
        for i in range(count)
    )
    while some := list(itertools.islice(rows, ROWS_AT_ONCE)):
        store.do(lambda connection, some=some: connection.execute(JOBS.insert(), some)).result()  # type: ignore[misc]


def record(number: int, created_s: float, state: str = "queued") -> Record:
    """A job of the benchmark's key."""
    return Record(f"{number:032x}", "bench", "key", str(number), "0" * 64, state, "{}", created_s)


def _accepting(store: JobStore) -> Callable[[], object]:
    numbers = itertools.count(10**9)
    return lambda: store.accept(record(next(numbers), time.time())).result()
