"""Meters: peak memory, the resident set's high-water mark on a CPU and the allocator's peak on a card; and
energy, by counters where the machine lets them be read, else an estimate from rated power.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil

from darkroom.hardware import accelerator
from darkroom.hardware.system import MAPS, RAPL, SMAPS, peak_resident_bytes, reset_peak_resident

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_MOST = 2**31 - 1  # that it takes
_THRESHOLDS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_DONTNEED = 4  # of madvise: drop the pages; those of a mapped file stay in it
_watching: weakref.WeakSet[PeakMemory] = weakref.WeakSet()


class PeakMemory:
    """The highest memory use since it was made or last reset, or since the process began.

    The operating system and a card's allocator keep one high-water mark a process. Every reset first tells
    the others that watch it what it was, so a benchmark inside a metered job spoils neither.
    """

    def __init__(self, device: str = "cpu", *, whole_process: bool = False) -> None:
        """With `whole_process` since the process began, as far as nobody has reset it."""
        self.device = device
        self._seen = 0
        _watching.add(self)
        if not whole_process:
            self.reset()

    def reset(self) -> None:
        """Start again from what is in use now."""
        for watcher in _watching:
            if _kind(watcher.device) == _kind(self.device):
                watcher._seen = max(watcher._seen, _high_water(watcher.device))
        _reset_high_water(self.device)
        self._seen = 0

    def bytes(self) -> int:
        """The peak so far, in bytes."""
        return max(self._seen, _high_water(self.device))


def resident_bytes() -> int:
    """Memory that the process holds now (RSS)."""
    return int(psutil.Process().memory_info().rss)


def give_back() -> None:
    """Return freed memory to the system (glibc keeps small blocks otherwise)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no such call on this system
        ctypes.CDLL(None).malloc_trim(0)


def return_freed(least_bytes: int, *, keep_top: bool = False) -> bool:
    """Have glibc give freed blocks of so many bytes and more back at once: resident memory follows what is
    alive, where else blocks that are freed among others that live on leave holes.

    Costs some speed: each such block is zeroed anew. With `keep_top` what small blocks leave free at the end
    of the heap stays for the next ones: given back and asked for again many times a step it costs more, and
    saves nothing at the highest point. It is the process's from then on; where glibc's own variables have
    smaller blocks given back, they stay. False where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    given = [os.environ.get(name, "") for name in _THRESHOLDS]
    if all(value.isdigit() and int(value) <= least_bytes for value in given):
        return True
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        top_bytes = _MOST if keep_top else least_bytes
        limits = {_MMAP_THRESHOLD: least_bytes, _TRIM_THRESHOLD: top_bytes}
        taken = [library.mallopt(name, value) for name, value in limits.items()]  # all are set
        return all(taken)
    return False


def file_mappings() -> list[tuple[int, int]]:
    """Where this process has files mapped, as addresses; nothing on systems that do not tell."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = (line.split(maxsplit=5) for line in lines)
    spans = (words[0].split("-") for words in found if len(words) > 5 and words[4] != "0")
    return [(int(start, 16), int(end, 16)) for start, end in spans]


LARGE_FOLIO_BYTES = 2**18
_LOOKED_AT_BYTES, _LOOKS = 2**20, 64


@functools.cache
def maps_large_folios() -> bool:
    """Whether a touch of a library's page brings 256 KiB of it and more into a process, not the 64 around it.

    So does Linux from 6.18 on, of files that lie in large folios; resident memory holds more of them then.
    """
    found = importlib.util.find_spec("torch")
    places = [] if found is None else list(found.submodule_search_locations or ())
    libraries = (file for place in places for file in Path(place).glob("lib/libtorch_cpu.so"))
    return any(bytes_a_touch(file) >= LARGE_FOLIO_BYTES for file in libraries)


def bytes_a_touch(file: Path) -> float:
    """Bytes of a mapped file that one touch of it brings into memory; 0 where no system tells."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = _resident_of(file)
        touched = range(0, min(len(mapped), _LOOKS * _LOOKED_AT_BYTES), _LOOKED_AT_BYTES)
        for place in touched:
            mapped[place]
        return (_resident_of(file) - before) / len(touched)


def _resident_of(file: Path) -> int:
    """Bytes of a mapped file that are in memory, of all its mappings; 0 on systems that do not tell."""
    total, is_its, place = 0, False, str(file.resolve())  # the system tells links' targets
    try:
        lines = SMAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    for words in (line.split(maxsplit=5) for line in lines):
        if "-" in words[0]:
            is_its = words[-1] == place
        elif is_its and words[0] == "Rss:":
            total += int(words[1]) * 1024
    return total


def within_file(start: int, length: int, files: list[tuple[int, int]]) -> bool:
    """Whether memory is part of a mapped file, as `file_mappings` tells them."""
    return any(first <= start and start + length <= last for first, last in files)


def drop_file_pages(start: int, length: int) -> None:
    """Let go of the whole pages within memory that a file is mapped to: the file has them still.

    Never of other memory: its content would be lost.
    """
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= first:
        return
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no such call: they stay
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _DONTNEED)


def has_statistics(device: str) -> bool:
    """Whether memory is counted by the device's allocator, and not as what the process holds."""
    return _kind(device) != "cpu" and accelerator.kind_of(device).statistics


def _kind(device: str) -> str:
    return device.split(":")[0]


def _high_water(device: str) -> int:
    if has_statistics(device):
        return accelerator.peak_allocated_bytes(device)
    return peak_resident_bytes()


def _reset_high_water(device: str) -> None:
    if has_statistics(device):
        accelerator.reset_peak(device)
        return
    reset_peak_resident()


# ---- energy


JOULES_PER_KWH = 3.6e6

Reader = Callable[[], float]  # joules since some moment


class EnergyMeter:
    """Joules since it was made, and where they come from.

    `source` is 'RAPL (CPU packages)', 'NVML (GPU only)' or 'estimate: ... W rated power'. An estimate takes
    the rated power for the whole time: a ceiling for a busy device, too much for an idle one.
    """

    def __init__(
        self, device: str, *, power_w: float | None = None, num_devices: int = 1, before_s: float = 0.0
    ) -> None:
        """`before_s` are seconds before now that an estimate counts too; a counter was not read then."""
        self.source, self._read = _reader(device, power_w, num_devices)
        self._start = self._read()
        if power_w is not None and self.source.startswith("estimate"):
            self._start -= before_s * power_w * num_devices

    def joules(self) -> float:
        """Energy used so far; 0 where nothing is known (source is then 'unknown')."""
        return self._read() - self._start


def _reader(device: str, power_w: float | None, num_devices: int) -> tuple[str, Reader]:
    on_nvml = accelerator.kind_of(device).energy == "nvml" if device.startswith("cuda") else False
    counter = _nvml(device, num_devices) if on_nvml else rapl() if device == "cpu" else None
    if counter is not None:
        return ("NVML (GPU only)" if on_nvml else "RAPL (CPU packages)"), counter
    if power_w is None:
        return "unknown", lambda: 0.0
    total_w = power_w * num_devices
    return f"estimate: {total_w:g} W rated power", lambda: time.perf_counter() * total_w


def rapl(root: Path = RAPL) -> Reader | None:
    """A reader of the processors' running average power limit counters, summed; None if unreadable.

    The counters wrap around at `max_energy_range_uj`, within an hour on a big processor: a reader that is
    read more often follows that.
    """
    packages = [path for path in sorted(root.glob("intel-rapl:*")) if path.name.count(":") == 1]
    try:
        readers = [_package(path) for path in packages]
    except (OSError, ValueError):  # readable by root only on most systems
        return None
    return (lambda: sum(read() for read in readers)) if readers else None


def _package(path: Path) -> Reader:
    counter, span = path / "energy_uj", int((path / "max_energy_range_uj").read_text(encoding="utf-8"))
    state = [int(counter.read_text(encoding="utf-8")), 0]

    def joules() -> float:
        now = int(counter.read_text(encoding="utf-8"))
        state[1] += (now - state[0]) % span
        state[0] = now
        return state[1] / 1e6

    return joules


def _nvml(device: str, num_devices: int) -> Reader | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        first = int(device.partition(":")[2] or 0)
        # By their own names: NVML counts the machine's cards, torch those that CUDA_VISIBLE_DEVICES leaves.
        names = [f"GPU-{accelerator.uuid_of(f'cuda:{first + i}')}" for i in range(num_devices)]
        handles = [pynvml.nvmlDeviceGetHandleByUUID(name) for name in names]
        sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles)
    except Exception:  # not installed, no driver, or a card before Volta: each means no counter
        return None
    return lambda: sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1e3
