"""`python tests/other_system.py VERB ...` is `darkroom VERB ...` on a system that is not POSIX.

Taken away: what of `os` and `signal` only POSIX has; signals in event loops; uvloop; forking. Files go by
Windows' habits: what this process has open or mapped can be neither renamed, renamed over nor deleted; a
folder with such a file cannot be renamed, and names that Windows refuses cannot be made. Text without a said
encoding is cp1252, also on the console. `hardware.system`, the one file that knows systems, takes its Windows
branches, with flock in the place of LockFileEx. Clocks tick 64 times a second. `quickstart` is the toy one.

Not so: libraries' own code stays Linux's (Lance, torch, Python's standard library).
"""

from __future__ import annotations

import asyncio
import builtins
import io
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OF_OS = ("fork", "forkpty", "sched_getaffinity", "sched_setaffinity", "getloadavg", "uname", "posix_fadvise")
OF_OS += ("pread", "pwrite", "killpg", "getpgid", "setsid", "getuid", "geteuid", "mkfifo", "nice")
OF_SIGNAL = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "alarm", "setitimer", "pause")
REFUSED = re.compile(r'[<>:"|?*\x00-\x1f]|[. ]$|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.IGNORECASE)
HERE = Path(__file__).parents[1]


def open_files() -> set[str]:
    """What this process has open or mapped, by path."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread has closed it meanwhile
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    with REAL_OPEN("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found |= {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    return {path for path in found if os.path.isfile(path)}


REAL_OPEN = io.open


def at(path: Any, folder: int | None) -> str:
    name = os.fsdecode(path)
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name) if folder is not None else name


def in_use(path: str) -> PermissionError | None:
    """Windows' error where a file, or one in a folder, is open."""
    whole = os.path.realpath(path)
    held = [file for file in open_files() if file == whole or file.startswith(whole + os.sep)]
    return PermissionError(13, f"in use: {held[0]}", path) if held else None


def refused(path: str) -> OSError | None:
    """Windows' error for a name that it does not take."""
    bad = [part for part in Path(path).parts[1:] if REFUSED.search(part)]
    return OSError(22, f"Windows refuses the name {bad[0]!r}", path) if bad else None


def check(*errors: OSError | None) -> None:
    for error in errors:
        if error is not None:
            raise error


def file_habits() -> None:
    """Renames, deletes and names as on Windows."""

    def renaming(real: Callable[..., Any]) -> Callable[..., Any]:
        def rename(
            source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
        ) -> Any:
            one, other = at(source, src_dir_fd), at(target, dst_dir_fd)
            check(in_use(one), in_use(other), refused(other))
            return real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        return rename

    def deleting(real: Callable[..., Any]) -> Callable[..., Any]:
        def delete(path: Any, *, dir_fd: int | None = None) -> Any:
            check(in_use(at(path, dir_fd)))
            return real(path, dir_fd=dir_fd)

        return delete

    os.rename, os.replace = renaming(os.rename), renaming(os.replace)
    os.unlink, os.remove = deleting(os.unlink), deleting(os.remove)
    real_mkdir = os.mkdir

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        check(refused(at(path, dir_fd)))
        real_mkdir(path, mode, dir_fd=dir_fd)

    os.mkdir = mkdir


def encodings() -> None:
    """Text files whose encoding nobody says are cp1252; names that Windows refuses are not made."""

    def opened(
        file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, *more: Any, **named: Any
    ) -> Any:
        if isinstance(file, str | os.PathLike) and set(mode) & set("wxa"):
            check(refused(os.path.abspath(os.fspath(file))))
        if "b" not in mode and encoding in (None, "locale"):
            encoding = "cp1252"
        return REAL_OPEN(file, mode, buffering, encoding, *more, **named)

    builtins.open = io.open = opened  # type: ignore[assignment]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="cp1252", errors="strict")


def events() -> None:
    """No signals in event loops, and no uvloop."""

    def without(*_: Any) -> None:
        raise NotImplementedError

    asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler = without  # type: ignore[attr-defined]
    sys.modules["uvloop"] = None  # type: ignore[assignment]


def clocks() -> None:
    """Clocks that stand still for 16 ms, as before Python 3.13."""

    def coarse(real: Callable[[], float]) -> Callable[[], float]:
        return lambda: math.floor(real() * 64) / 64

    time.time, time.monotonic = coarse(time.time), coarse(time.monotonic)


def windows_branches() -> None:
    from darkroom.hardware import system

    flock = system.lock_file

    def lock(handle: int, shared: bool, wait: bool) -> None:
        system.sys = sys
        try:
            flock(handle, shared=shared, wait=wait)
        finally:
            system.sys = windows

    def no_key(*_: Any) -> None:
        raise FileNotFoundError("no such key")

    registry: Any = SimpleNamespace(HKEY_LOCAL_MACHINE=0, OpenKey=no_key)
    windows: Any = SimpleNamespace(platform="win32")
    system._lock_on_windows = lock  # type: ignore[attr-defined]
    sys.modules["winreg"] = registry
    system.sys = windows


def take_away() -> None:
    """All of it, in this process, which stays so."""
    # Libraries that ask for what POSIX has when they are imported on Linux.
    import platformdirs  # noqa: F401
    import torch.distributed.elastic.multiprocessing  # noqa: F401

    multiprocessing.set_start_method("spawn", force=True)
    windows_branches()
    events()
    for name in OF_OS:
        if hasattr(os, name):
            delattr(os, name)
    for name in OF_SIGNAL:
        delattr(signal, name)
    encodings()
    file_habits()
    clocks()


if __name__ == "__main__":
    take_away()
    if sys.argv[1] == "quickstart":
        from darkroom.quickstart.journey import TOY, quickstart

        quickstart(sys.argv[2], scale=TOY)
    else:
        from darkroom.cli import main

        main(sys.argv[1:])
