"""A home of their own for all tests of a run, so that none touches the user's settings and caches.

Importing it moves HOME.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "DARKROOM_TESTS_HOME"
POINTING = (
    "DARKROOM_CACHE",
    "HF_HOME",
    *(f"XDG_{kind}_HOME" for kind in ("CACHE", "CONFIG", "DATA", "STATE")),
)
WATCHED = (
    "",
    ".ray",
    ".netrc",
    ".cache/darkroom",
    ".cache/huggingface",
    ".cache/matplotlib",
    ".cache/torch",
    ".config/matplotlib",
    ".config/ray",
    ".config/wandb",
    ".local/share/wandb",
    ".triton",
)
"""Places below a home that darkroom and the libraries under it would write to."""
OTHERS = {".cache", ".config", ".local", ".bash_history", ".python_history"}
"""What the user's own programs may make there meanwhile."""

_real = Path.home()
_before: dict[str, set[str]] = {}


def move() -> None:
    """Point HOME to a temporary folder; workers of the same run share it."""
    if VARIABLE in os.environ:
        return
    _before.update(_listed())
    folder = tempfile.mkdtemp(prefix="darkroom-home-")
    os.environ[VARIABLE] = os.environ["HOME"] = os.environ["USERPROFILE"] = folder
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
        Path(folder) / "inductor"
    )  # else in /tmp, for all of a user's runs
    for name in POINTING:
        os.environ.pop(name, None)


def is_mine() -> bool:
    """Whether this process made the folder, and so is the one that looks and cleans up."""
    return bool(_before)


def written() -> list[str]:
    """Files that appeared in the user's own home meanwhile, below the places that tests could touch."""
    return sorted(
        str(Path("~", place, name))
        for place, names in _listed().items()
        for name in names - _before.get(place, set()) - (OTHERS if not place else set())
    )


def remove() -> None:
    if is_mine():
        shutil.rmtree(os.environ[VARIABLE], ignore_errors=True)


def _listed() -> dict[str, set[str]]:
    return {place: _names(_real / place) for place in WATCHED}


def _names(folder: Path) -> set[str]:
    if folder.is_file():
        return {f"{folder.name} of {folder.stat().st_mtime_ns}"}
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


move()
