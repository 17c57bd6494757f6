"""What this machine is: processor, memory it may use, devices, disk, and the versions of what runs on it; and
what is in order on it and what is not, each with the line that mends it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from darkroom.errors import install_extra
from darkroom.hardware import accelerator, system
from darkroom.hardware.system import (
    CGROUP,
    CGROUP_MEMBERSHIP,
    CPUINFO,
    allowed_cores,
    allows_long_paths,
    has_nvidia_driver,
    processor_name,
    set_variable,
)

GIB = 1024**3
CUDA_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_PACKAGES = (
    *(
        "torch",
        "diffusers",
        "transformers",
        "tokenizers",
        "peft",
        "accelerate",
        "safetensors",
        "huggingface-hub",
    ),
    *("pylance", "pyarrow", "numpy", "pillow", "pydantic", "matplotlib", "tensorboard", "nvidia-ml-py"),
    *("ray", "lance-ray", "onnxruntime", "openvino", "fastapi"),
)


@dataclass(frozen=True)
class Device:
    """An accelerator."""

    kind: str  # as in accelerator.KINDS, or what torch calls another
    index: int
    name: str
    memory_bytes: int | None  # None: its backend does not say

    @property
    def torch_name(self) -> str:
        """As torch.device takes it (ROCm's devices are called cuda there)."""
        return "mps" if self.kind == "mps" else f"{'cuda' if self.kind == 'rocm' else self.kind}:{self.index}"


@dataclass(frozen=True)
class Machine:
    """The machine as far as darkroom's work depends on it. Memory and cores are what this process may use."""

    cpu: str
    physical_cores: int
    logical_cores: int
    usable_cores: float
    memory_bytes: int
    memory_available_bytes: int
    instructions: tuple[str, ...]
    devices: tuple[Device, ...]
    disk_free_bytes: int
    system: str
    python: str
    torch: str

    @property
    def cores(self) -> float:
        """Physical cores that this process may use: threads that share one count as one."""
        return self.usable_cores * self.physical_cores / self.logical_cores

    @property
    def cpu_class(self) -> str:
        """The row of hardware.csv that stands for this processor."""
        have = set(self.instructions)
        if "Apple" in self.cpu:
            return "CPU Apple"
        for needed, name in (
            ("amx_bf16", "CPU AMX"),
            ("avx512_bf16", "CPU AVX-512 BF16"),
            ("avx512f", "CPU AVX-512"),
            ("sve", "CPU SVE"),
        ):
            if needed in have:
                return name
        return "CPU AVX2"

    @property
    def name(self) -> str:
        """Short, for a column of a table: 'AMD EPYC, 2 cores, 23 GiB, 1x NVIDIA H200'."""
        cards = [f"{len(self.devices)}x {self.devices[0].name}"] if self.devices else []
        parts = [self.cpu, f"{self.usable_cores:g} cores", f"{self.memory_bytes / GIB:.0f} GiB", *cards]
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "cpu_class": self.cpu_class, "name": self.name}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Machine:
        """A machine as `to_dict` gave it, perhaps of another day; TypeError or KeyError where it is none."""
        known = {field.name: content[field.name] for field in fields(cls)}
        known["devices"] = tuple(Device(**device) for device in content["devices"])
        return cls(**known | {"instructions": tuple(content["instructions"])})


def machine() -> Machine:
    """Look at this machine. Takes a second where torch has to be imported to ask it for devices."""
    limit = cgroup_memory_limit()
    memory = psutil.virtual_memory()
    total = min(memory.total, limit or memory.total)
    return Machine(
        cpu=_cpu_name(),
        physical_cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        logical_cores=psutil.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=total,
        memory_available_bytes=min(memory.available, total),
        instructions=system.instructions(),
        devices=_devices(),
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch_build()["__version__"]),
    )


def torch_build() -> dict[str, Any]:
    """What the installed torch was built for, without importing it: `__version__`, and `cuda`, `hip` and
    `xpu`, each a version or None.
    """
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return runpy.run_path(str(Path(found.origin).with_name("version.py")))


def may_find_accelerator(build: Mapping[str, Any], cuda_driver: str = CUDA_DRIVER) -> bool:
    """Whether such a torch may have an accelerator here. No is sure, and known without importing torch."""
    if sys.platform == "darwin" or build.get("hip") or build.get("xpu"):
        return True
    if build.get("cuda"):
        with suppress(OSError):
            ctypes.CDLL(cuda_driver)
            return True
    return bool(metadata.entry_points(group="torch.backends"))  # of other makers, as torch loads them


def environment() -> dict[str, Any]:
    """What a run should remember of where it ran: machine, versions, threads, the working directory's commit.

    No environment variables, host or user names, and no paths.
    """
    import torch

    import darkroom

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "darkroom": darkroom.__version__,
        "machine": machine().to_dict(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "versions": versions(),
        "git": git_commit(),
    }


def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Installed versions of the packages that results depend on; those not installed are left out."""
    found = {name: version for name in packages if (version := _version(name))}
    return {"python": platform.python_version(), **found}


@functools.cache  # a millisecond each, and what is imported stays as it is
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the (working) directory and whether tracked files differ from it; None outside git."""
    commit = _git(["rev-parse", "HEAD"], folder)
    if commit is None:
        return None
    return {"commit": commit, "changed": bool(_git(["status", "--porcelain", "-uno"], folder))}


def cgroup_memory_limit(root: Path = CGROUP, membership: Path = CGROUP_MEMBERSHIP) -> int | None:
    """The smallest memory limit of this process's control groups (v1 and v2), in bytes; None if unlimited."""
    files = [*_cgroup_files(root, membership, "memory.max", "memory", "memory.limit_in_bytes")]
    limits = [int(text) for text in map(_read, files) if text.isdigit()]
    # v1 says "no limit" with a number near 2**63.
    return min((limit for limit in limits if limit < 2**60), default=None)


def usable_cores(root: Path = CGROUP, membership: Path = CGROUP_MEMBERSHIP) -> float:
    """Cores that this process may use: its affinity, cut by the control groups' CPU quotas."""
    cores = float(allowed_cores())
    for path in _cgroup_files(root, membership, "cpu.max", "cpu", "cpu.cfs_quota_us"):
        quota, _, period = _read(path).partition(" ")
        period = period or _read(path.with_name("cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, int(quota) / int(period))
    return cores


def _cgroup_files(root: Path, membership: Path, v2_name: str, v1_kind: str, v1_name: str) -> list[Path]:
    """A control file of every group from the process's own up to the root, in both hierarchies."""
    files = []
    for line in _read(membership).splitlines():
        _, kinds, group = line.split(":", 2)
        v1 = v1_kind in kinds.split(",")
        if kinds and not v1:
            continue
        base, name = (root / v1_kind, v1_name) if v1 else (root, v2_name)
        inside = Path(group.strip("/"))
        files += [base / folder / name for folder in (inside, *inside.parents)]
    return files


def _cpu_name() -> str:
    for line in _read(CPUINFO).splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    if platform.system() == "Darwin":
        return _run(["sysctl", "-n", "machdep.cpu.brand_string"]) or "Apple"
    return processor_name() or platform.processor() or platform.machine()


def _devices() -> tuple[Device, ...]:
    if "torch" not in sys.modules and not may_find_accelerator(torch_build()):
        return ()
    import torch

    here = accelerator.current()
    if here is None:
        return ()
    kind = accelerator.kind_of(here).name
    if kind == "mps":
        return (Device(kind, 0, _cpu_name(), accelerator.total_bytes(here)),)
    places = [torch.device(here.type, i) for i in range(accelerator.count())]
    return tuple(
        Device(kind, i, accelerator.name_of(place), accelerator.total_bytes(place))
        for i, place in enumerate(places)
    )


def _git(arguments: list[str], folder: Path | None) -> str | None:
    return _run(["git", *(["-C", str(folder)] if folder else []), *arguments])


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# ---- the doctor

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
        *_devices_in_order(here),
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


def _devices_in_order(here: Machine) -> Iterator[Check]:
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
    found = system.bf16_instructions()
    speedup = bf16_speedup(768 if found else 192)  # emulated, the larger one takes seconds
    measured = f"a matrix product runs {speedup:.2g} times as fast as float32"
    if found is None:
        detail = f"emulated, {measured}: use precision float32 (auto does); backend openvino refuses bf16"
        yield Check("bf16", False, detail, optional=True)
        return
    fast = speedup > 1.2
    advice = "use precision bf16 (auto does)" if fast else "compare it with float32"
    yield Check("bf16", fast, f"{found}, {measured}: {advice}", optional=True)


def bf16_speedup(size: int, repeats: int = 5) -> float:
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
