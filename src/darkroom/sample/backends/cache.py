"""The cache of exported modules: a folder for each export, named by all that it depends on.

An export is written to a temporary name and renamed, so what lies under its name is complete. Two
processes that want the same export do not both make it: the second waits for the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from darkroom.errors import DarkroomError, InputError, is_disk_full
from darkroom.hardware.system import atomic_replace, lock_file, remove_tree

ABOUT = "export.json"
LIMIT = "DARKROOM_CACHE_GB"
LIMIT_GB = 40.0
FORM = 1
"""How exports are made; a change in this code that makes other files out of the same weights adds one."""


@dataclass(frozen=True)
class CacheKey:
    """What an export depends on."""

    engine: str
    part: str
    identity: str
    """SHA-256 of the weights."""
    config: str
    """What the module was built from: weights alone do not say how many heads there are."""
    precision: str
    shape: str
    """What is fixed in it and what is open."""
    versions: tuple[tuple[str, str], ...]
    form: int = FORM

    @property
    def name(self) -> str:
        """The folder's name: readable first, unique as a whole."""
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{self.engine}-{self.part}-{self.precision}-{self.identity[:8]}-{digest}"


def cache_folder() -> Path:
    """Where exports are kept: `backends` in $DARKROOM_CACHE or in ~/.cache/darkroom."""
    base = os.environ.get("DARKROOM_CACHE")
    return (Path(base) if base else Path.home() / ".cache" / "darkroom") / "backends"


def exported(key: CacheKey, make: Callable[[Path], None]) -> Path:
    """The folder of an export; `make(folder)` fills it first where it is not there yet. Then those used
    longest ago go, until all of them fit into $DARKROOM_CACHE_GB (40) or this one is alone.

    Raises InputError where the cache cannot be written, DarkroomError where an export fails.
    """
    base, limit_bytes = cache_folder(), _limit_bytes()
    place = base / key.name
    if _is_whole(place, key):
        with contextlib.suppress(OSError):  # a cache that may only be read
            os.utime(place)
        return place
    try:
        base.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(base / f".{key.name}.lock"):
            if not _is_whole(place, key):
                _make(place, key, make)
                _let_go(base, place, limit_bytes)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise InputError(
            f"the cache of exports '{base}' cannot be written: {error.strerror}", mend="set DARKROOM_CACHE"
        ) from error
    return place


def _limit_bytes() -> float:
    text = os.environ.get(LIMIT, str(LIMIT_GB))
    try:
        limit_gb = float(text)
    except ValueError:
        limit_gb = -1.0
    if not limit_gb > 0:
        raise InputError(f"{LIMIT}='{text}'", allowed="gigabytes above 0")
    return limit_gb * 1e9


def _let_go(base: Path, keep: Path, limit_bytes: float) -> None:
    """Delete exports used longest ago until the rest fits. Whoever has one open goes on with it."""
    found = {about.parent: about.parent.stat().st_mtime for about in base.glob(f"[!.]*/{ABOUT}")}
    sizes = {place: sum(file.stat().st_size for file in place.iterdir()) for place in found}
    for place in sorted(found, key=lambda place: found[place]):
        if sum(sizes.values()) <= limit_bytes:
            return
        if place != keep:
            remove_tree(place)
            sizes.pop(place)


def _is_whole(place: Path, key: CacheKey) -> bool:
    try:
        record = json.loads((place / ABOUT).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(record, dict) or record.get("key") != _plain(key):
        return False
    sizes = record.get("bytes", {})
    return bool(sizes) and all(
        (place / name).is_file() and (place / name).stat().st_size == size for name, size in sizes.items()
    )


def _plain(key: CacheKey) -> object:
    return json.loads(json.dumps(asdict(key)))


def _make(place: Path, key: CacheKey, make: Callable[[Path], None]) -> None:
    for left in place.parent.glob(f".{key.name}-*"):  # of exports that were killed; the lock is ours
        remove_tree(left)
    temporary = Path(tempfile.mkdtemp(prefix=f".{key.name}-", dir=place.parent))
    try:
        make(temporary)
        sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        about = {"key": asdict(key), "bytes": sizes}
        (temporary / ABOUT).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
        temporary.chmod(0o755)
        if place.exists():  # not whole, or another key's
            remove_tree(place, must=True)
        atomic_replace(temporary, place)
    except BaseException as error:
        remove_tree(temporary)
        if is_disk_full(error):
            raise DarkroomError(
                f"no space left in '{place.parent}' for the export of the {key.part}"
            ) from error
        raise


@contextlib.contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    """Hold a lock that the operating system lets go of when its holder dies."""
    with open(file, "a", encoding="utf-8") as held:
        lock_file(held, wait=True)
        yield
