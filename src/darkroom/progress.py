"""Progress of a long job: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int | None], None]
"""Told how much is done and how much there is, None where that is not known."""

LINE_EVERY_S = 10.0


@contextmanager
def progress(label: str) -> Iterator[Progress]:
    """Show how far a job is, on the error stream, so that what the job prints stays clean."""
    with _bar(label) if sys.stderr.isatty() else _lines(label) as advance:
        yield advance


@contextmanager
def _bar(label: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _lines(label: str) -> Iterator[Progress]:
    started = said = time.monotonic()

    def advance(done: int, total: int | None) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= LINE_EVERY_S:
            said = now
            of = f" of {total:,}" if total else ""
            print(f"{label}: {done:,}{of}, {done / (now - started):,.1f}/s", file=sys.stderr, flush=True)

    yield advance
