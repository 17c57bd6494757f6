"""Energy: counters where the machine lets them be read, an estimate from rated power where not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from darkroom.hardware import accelerator
from darkroom.hardware.system import RAPL

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
