"""Keys: who may come in. A file of lines `name:salt:sha256`, made by `darkroom serve --make-key NAME`.

A key is 32 random bytes, so that one round of SHA-256 over salt and key is enough: there is no dictionary to
try. The file holds no key, only what proves one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from pathlib import Path

from darkroom.errors import InputError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,63}):([0-9a-f]{32}):([0-9a-f]{64})")
PREFIX = "dk-"
LOOK_S = 2.0


def make_key(path: Path, name: str) -> str:
    """Add a key of a name to a file and give it: it is shown this once."""
    if not NAME.fullmatch(name):
        raise InputError(f"key name '{name}'", allowed="1 to 64 letters, digits, '.', '-' or '_'")
    if path.exists() and any(line[0] == name for line in _read(path)):
        raise InputError(f"'{path}' has a key named '{name}' already", mend="take its line out first")
    key, salt = PREFIX + secrets.token_urlsafe(32), secrets.token_hex(16)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(f"{name}:{salt}:{_hash(salt, key)}\n")
        file.flush()
        os.fsync(file.fileno())
    return key


class Keys:
    """The keys of a file, read again when it changes; a file that has gone bad leaves the last good ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._looked_s, self._stamp = 0.0, self._stat()
        self._lines = _read(path)
        if not self._lines:
            raise InputError(
                f"'{path}' holds no key", mend="darkroom serve --make-key NAME --api-key-file FILE"
            )

    def name_of(self, given: str) -> str | None:
        """The name of a key, None if it is none. Takes the same time whichever it is."""
        self._look_again()
        found = None
        for name, salt, digest in self._lines:
            if hmac.compare_digest(_hash(salt, given), digest):
                found = name
        return found

    def _look_again(self) -> None:
        with self._lock:
            if time.monotonic() - self._looked_s < LOOK_S:
                return
            self._looked_s = time.monotonic()
            stamp = self._stat()
            if stamp != self._stamp:
                try:
                    self._lines, self._stamp = _read(self.path), stamp
                except InputError:
                    return

    def _stat(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size


def _hash(salt: str, key: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + key.encode("utf-8", "surrogateescape")).hexdigest()


def _read(path: Path) -> list[tuple[str, str, str]]:
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"key file '{path}' cannot be read", mend="make one with --make-key NAME") from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = LINE.fullmatch(stripped)
        if match is None:
            raise InputError(f"'{path}', line {number}", allowed="name:salt:sha256, as --make-key writes it")
        lines.append((match[1], match[2], match[3]))
    return lines
