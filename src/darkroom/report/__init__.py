"""One self-contained HTML page from runs, tables of measurements and pictures.

Everything is inlined: no script, no font, no request to anywhere. Plots are SVG that takes its colours from
the page, so that one drawing serves light and dark.
"""

from __future__ import annotations

from darkroom.report.runs import write_report

__all__ = ["write_report"]
