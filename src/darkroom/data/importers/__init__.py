"""Bringing pictures in: one file for each layout, the rows they become, and the job around them."""

from darkroom.data.importers.job import ImportReport, import_pictures

__all__ = ["ImportReport", "import_pictures"]
