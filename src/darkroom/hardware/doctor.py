"""What is in order on this machine and what is not, each with the line that mends it."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from darkroom.errors import install_extra
from darkroom.hardware import accelerator, system
from darkroom.hardware.machine import GIB, Machine, machine
from darkroom.hardware.system import allows_long_paths, has_nvidia_driver, set_variable

DISTRIBUTION = "darkroom-sd"
"""What pip calls the package that is imported as darkroom."""

SYSTEMS = {
    "Linux x86_64": accelerator.RUN,
    "Windows x86_64": accelerator.SUBSTITUTED,
    "Darwin arm64": accelerator.SUBSTITUTED,
}
"""How darkroom is known to work on a system; docs/installation.md says it in detail. Others: believed."""

_MIN_DISK_BYTES = 10 * GIB


@dataclass(frozen=True)
class Check:
    """One finding. `mend` is a line to type, empty where nothing need be done. A check that is `optional`
    keeps nothing from working where it is not `ok`.
    """

    name: str
    ok: bool
    detail: str
    mend: str = ""
    optional: bool = False

    def lines(self) -> list[str]:
        """For the console: ok, -- (a lack that keeps nothing from working) or !!, and how to mend it."""
        mark = "ok" if self.ok else "--" if self.optional else "!!"
        return [
            f"{mark}  {self.name:<16} {self.detail}",
            *([f"    {'':<16} {self.mend}"] if self.mend else []),
        ]


def doctor() -> list[Check]:
    """Look at this machine and installation; takes a second or two."""
    here = machine()
    basics = [
        _system(here),
        _python(),
        _torch(here),
        *_devices(here),
        _memory(here),
        *_cpu(here),
        _disk(here),
        *_paths(),
        *_spin(here),
    ]
    return [*basics, *_extras(), _tokenizer()]


def _system(here: Machine) -> Check:
    kind = here.system.replace("AMD64", "x86_64").replace("aarch64", "arm64")
    return Check("system", True, f"{here.system}: {SYSTEMS.get(kind, accelerator.BELIEVED)}")


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    mend = "" if ok else "install Python 3.11 or newer and make a new virtual environment with it"
    return Check("python", ok, platform.python_version(), mend)


def _torch(here: Machine) -> Check:
    import torch

    threads = f"{torch.get_num_threads()} threads"
    ok = tuple(int(part) for part in here.torch.split("+")[0].split(".")[:2]) >= (2, 11)
    return Check("torch", ok, f"{here.torch}, {threads}", "" if ok else "pip install 'torch>=2.11'")


def _devices(here: Machine) -> Iterator[Check]:
    for device in here.devices:
        proof = accelerator.kind_of(device.torch_name).proof
        memory = "" if device.memory_bytes is None else f", {device.memory_bytes / GIB:.0f} GiB"
        detail = f"{device.name}{memory}; {device.kind}: {proof}"
        yield Check(f"device {device.torch_name}", True, detail)
    if not here.devices:
        cuda = has_nvidia_driver()
        mend = set_variable("TORCH", "cuda", "python make.py setup") if cuda else ""
        detail = "a driver but no CUDA build of torch" if cuda else "none: darkroom runs on the CPU"
        yield Check("accelerator", not cuda, detail, mend, optional=True)


def _memory(here: Machine) -> Check:
    total, free = here.memory_bytes / GIB, here.memory_available_bytes / GIB
    ok = here.memory_bytes >= 4 * GIB
    return Check("memory", ok, f"{total:.1f} GiB, {free:.1f} free", "" if ok else "4 GiB or more are needed")


def _cpu(here: Machine) -> Iterator[Check]:
    limits = f"; limited by {', '.join(system.limits())}" if system.limits() else ""
    yield Check(
        "processor",
        True,
        f"{here.cpu}, {here.usable_cores:g} of {here.logical_cores} cores, "
        f"{', '.join(here.instructions) or 'no known instructions'}{limits}",
    )
    found, speedup = system.bf16_instructions(), bf16_speedup()
    measured = f"a matrix product runs {speedup:.2g} times as fast as float32"
    if found is None:
        detail = f"emulated, {measured}: use precision float32 (auto does); backend openvino refuses bf16"
        yield Check("bf16", False, detail, optional=True)
        return
    fast = speedup > 1.2
    advice = "use precision bf16 (auto does)" if fast else "compare it with float32"
    yield Check("bf16", fast, f"{found}, {measured}: {advice}", optional=True)


def bf16_speedup(size: int = 768, repeats: int = 5) -> float:
    """How much faster a square matrix product is in bf16 than in float32 on the CPU (best of a few)."""
    import torch

    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        torch.mm(a, b)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - start)
        best[dtype] = min(times)
    return best[torch.float32] / best[torch.bfloat16]


def _disk(here: Machine) -> Check:
    ok = here.disk_free_bytes >= _MIN_DISK_BYTES
    detail = f"{here.disk_free_bytes / GIB:.0f} GiB free in the working directory"
    return Check("disk", ok, detail, "" if ok else "free at least 10 GiB for stores and checkpoints")


def _paths() -> Iterator[Check]:
    """On Windows alone: a run in a deep folder fails where paths may not be longer than 260 characters."""
    if not allows_long_paths():
        detail = "at most 260 characters: stores and checkpoints in deep folders cannot be written"
        mend = (
            "as administrator: Set-ItemProperty HKLM:\\SYSTEM\\CurrentControlSet\\Control\\FileSystem "
            "LongPathsEnabled 1"
        )
        yield Check("long paths", False, detail, mend, optional=True)


def _spin(here: Machine) -> Iterator[Check]:
    """Of GNU's OpenMP, which torch has on Linux alone."""
    if not here.system.startswith("Linux"):
        return
    value = os.environ.get("GOMP_SPINCOUNT", "")
    if value.isdigit() and int(value) <= 100_000:
        yield Check("openmp spin", True, f"GOMP_SPINCOUNT={value}")
        return
    detail = f"GOMP_SPINCOUNT={value or 'unset'}: on a busy machine threads may spin for long"
    yield Check("openmp spin", False, detail, set_variable("GOMP_SPINCOUNT", "10000"), optional=True)


def _extras() -> Iterator[Check]:
    """Every optional extra that the installed package declares: complete, or what is missing."""
    if not _installed(DISTRIBUTION):
        detail = f"unknown: {DISTRIBUTION} is not installed, this runs from its source"
        yield Check("extras", False, detail, "pip install .", optional=True)
        return
    absent = _absent_packages()
    for extra, packages in sorted(declared_extras().items()):
        missing = [name for name in packages if not _installed(name)]
        left_out = [f"{name} has no wheel for this system" for name in absent.get(extra, ())]
        found = [f"missing {', '.join(missing)}"] if missing else [", ".join(packages)] if packages else []
        mend = install_extra(extra) if missing else ""
        ok = not missing and not left_out
        yield Check(f"extra {extra}", ok, "; ".join([*found, *left_out]), mend, optional=True)


def declared_extras() -> dict[str, list[str]]:
    """The optional extras in darkroom's own package metadata and the packages that each one brings here."""
    return _extras_of(here=True)


def _absent_packages() -> dict[str, list[str]]:
    """The packages that an extra brings on other systems alone, by extra."""
    return {extra: names for extra, names in _extras_of(here=False).items() if names}


def _extras_of(here: bool) -> dict[str, list[str]]:
    from packaging.requirements import Requirement

    extras: dict[str, list[str]] = {}
    for need in map(Requirement, metadata.requires(DISTRIBUTION) or []):
        found = re.search(r"extra == \"([\w-]+)\"", str(need.marker))
        if found and need.name != DISTRIBUTION:
            names = extras.setdefault(found[1], [])
            if need.marker is not None and need.marker.evaluate({"extra": found[1]}) == here:
                names.append(need.name)
    return {extra: names for extra, names in extras.items() if extra not in ("all", "dev")}


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _tokenizer() -> Check:
    given = os.environ.get("DARKROOM_CLIP_TOKENIZER", "")
    if given and any((Path(given) / name).is_file() for name in ("vocab.json", "tokenizer.json")):
        return Check("clip tokenizer", True, "found through DARKROOM_CLIP_TOKENIZER", optional=True)
    detail = f"DARKROOM_CLIP_TOKENIZER names no tokenizer folder: {given!r}" if given else "none given"
    said = set_variable("DARKROOM_CLIP_TOKENIZER", "FOLDER")
    mend = f"{said} (with vocab.json and merges.txt) to create sd15, sd2 or sdxl"
    return Check("clip tokenizer", False, detail, mend, optional=True)
