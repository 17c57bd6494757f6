"""Lines of progress: a rate where there is one a second, else seconds each and what is left."""

from __future__ import annotations

import time

import pytest

from darkroom.cli import application
from darkroom.cli.application import progress_bar


@pytest.mark.parametrize(
    ("done", "total", "seconds", "line"),
    [
        (1, 3, 64.0, "denoise: 1 of 3, 64 s each, 2 min left"),
        (2, 10, 5.0, "denoise: 2 of 10, 2.5 s each, 20 s left"),
        (500, 2000, 10.0, "denoise: 500 of 2,000, 50.0/s, 30 s left"),
        (3, None, 1800.0, "denoise: 3, 600 s each"),
        (1, 30, 600.0, "denoise: 1 of 30, 600 s each, 4.8 h left"),
        (0, 3, 11.0, "denoise: 0 of 3, 11 s so far"),
    ],
)
def test_slow_jobs_say_seconds_each_and_what_is_left(done, total, seconds, line, monkeypatch, capsys):
    clock = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(application, "LINE_EVERY_S", 0.0)
    with progress_bar("denoise", quiet=False) as advance:
        advance(done, total)
    assert capsys.readouterr().err == line + "\n"
