"""Verbs for the machine: doctor."""

from __future__ import annotations

from darkroom.cli.door import Json, app, show


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine has and lacks, each lack with the line that mends it.

    Example: darkroom doctor
    """
    from darkroom.hardware import doctor as checks

    found = checks()
    show(found, as_json, lambda: (line for check in found for line in check.lines()))
