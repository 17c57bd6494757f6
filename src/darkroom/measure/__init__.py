"""How things are timed and weighed: interleaved timing, the tidy table of measurements, one file a benchmark.

This file hands out what every benchmark needs; a benchmark is imported from its own file with its package.
"""

from __future__ import annotations

from darkroom.measure.timing import (
    COLUMNS,
    Measurement,
    Timing,
    append_csv,
    interleave,
    measurement,
    peak_memory,
    read_csv,
    synchronise,
)

__all__ = [
    "COLUMNS",
    "Measurement",
    "Timing",
    "append_csv",
    "interleave",
    "measurement",
    "peak_memory",
    "read_csv",
    "synchronise",
]
