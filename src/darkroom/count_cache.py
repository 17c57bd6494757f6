"""Counts of FLOPs and bytes as files of the user's cache, known by the code and libraries that made them."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import darkroom
from darkroom.hardware.system import cache_folder, write_atomically

CODE = (
    *("train", "sample", "models", "prepare", "recipe", "counting.py", "proof/tables.py"),
    *(f"plan/{name}.py" for name in ("counts", "targets", "tracing", "training")),
    "hardware/accelerator.py",
)
"""What a count depends on: these folders and files of darkroom. A test holds them to what a count runs."""
PACKAGES = ("torch", "diffusers", "transformers", "peft")


def kept(key: dict[str, Any]) -> dict[str, Any] | None:
    """What was counted for this key by this very code; None where nothing was, or cannot be read."""
    with suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(place(key).read_text(encoding="utf-8"))
        return content
    return None


def keep(key: dict[str, Any], content: dict[str, Any]) -> None:
    """Keep a count. A home that cannot be written to only costs the next call its time."""
    with suppress(OSError):
        write_atomically(place(key), json.dumps(content))


def place(key: dict[str, Any]) -> Path:
    """The file of a count."""
    return cache_folder() / "plans" / f"{_digest(key)}.json"


def _digest(key: dict[str, Any]) -> str:
    return _hashed(key, [(name, _version(name)) for name in PACKAGES])


def shipped_digest(key: dict[str, Any]) -> str:
    """What a shipped count is known by: as one that is kept here, but of libraries the release alone, since
    every patch and build (+cpu, +cu130) counts alike. After a change of the code all are counted anew.
    """
    return _hashed(key, [(name, ".".join(_version(name).split(".")[:2])) for name in PACKAGES])


def _hashed(key: dict[str, Any], libraries: list[tuple[str, str]]) -> str:
    text = json.dumps([key, _code(), libraries], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """The source that counting runs through."""
    root = Path(darkroom.__file__).parent
    digest = hashlib.sha256()
    for package in CODE:
        place = root / package
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
