"""Profiles kept between calls, by what was counted and by the code and versions that counted it.

A profile is good for as long as darkroom's own source, torch, diffusers, transformers and peft are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import darkroom
from darkroom.plan.profile import Profile

COUNTING = ("adapter", "beside", "counting", "training", "generation", "outline", "others", "profile")
ROOMS = (
    *("train", "sample", "models", "prepare", "count.py", "recipe.py"),
    *(f"plan/{name}.py" for name in COUNTING),
)
PACKAGES = ("torch", "diffusers", "transformers", "peft")


def cached_profile(key: dict[str, Any], make: Callable[[], Profile]) -> Profile:
    """The profile that `make` counts, or the one it counted before."""
    return Profile.from_dict(cached(key, lambda: make().to_dict()))


def cached(key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gives, or what it gave before."""
    file = cache_folder() / "plans" / f"{_digest(key)}.json"
    with suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content
    made = make()
    with suppress(OSError):  # a home that cannot be written to only costs the next call its time
        _write(file, json.dumps(made))
    return made


def cache_folder() -> Path:
    """Where darkroom keeps what can be made again: $DARKROOM_CACHE, or `darkroom` in the user's cache."""
    if asked := os.environ.get("DARKROOM_CACHE"):
        return Path(asked)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "darkroom"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def _digest(key: dict[str, Any]) -> str:
    told = json.dumps([key, _code()], sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """The source that counting runs through, and the packages below it."""
    root = Path(darkroom.__file__).parent
    digest = hashlib.sha256()
    for room in ROOMS:
        place = root / room
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.read_bytes())
    digest.update(repr([(name, _version(name)) for name in PACKAGES]).encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
