"""What this machine is: processor, memory it may use, devices, disk, and the versions of what runs on it."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from darkroom.hardware import accelerator, system
from darkroom.hardware.system import CGROUP, CGROUP_MEMBERSHIP, CPUINFO, allowed_cores, processor_name

GIB = 1024**3
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
    """Look at this machine. Takes a second where torch is not imported yet."""
    import torch

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
        torch=str(torch.__version__),
    )


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
