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
    started = shown_at = time.monotonic()

    def advance(done: int, total: int | None) -> None:
        """Print how far the work is, at most every `LINE_EVERY_S` seconds."""
        nonlocal shown_at
        now = time.monotonic()
        if now - shown_at >= LINE_EVERY_S:
            shown_at = now
            print(f"{label}: {_so_far(done, total, now - started)}", file=sys.stderr, flush=True)

    yield advance


def _so_far(done: int, total: int | None, seconds: float) -> str:
    """'1 of 3, 64 s each, 2 min left': rates below one a second are shown as seconds each."""
    of = f" of {total:,}" if total else ""
    rate = done / seconds if seconds > 0 else 0.0
    if rate == 0:
        return f"{done:,}{of}, {seconds:.0f} s so far"
    each = 1 / rate
    speed = f"{rate:,.1f}/s" if rate >= 1 else f"{each:.1f} s each" if each < 10 else f"{each:.0f} s each"
    left = f", {_duration((total - done) / rate)} left" if total and total > done else ""
    return f"{done:,}{of}, {speed}{left}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
