"""The bill of a job over all its sessions: time, device-hours, dollars at a dated price, energy, memory."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from darkroom.hardware import machine
from darkroom.hardware.cards import find_card
from darkroom.hardware.machine import Machine
from darkroom.hardware.meters import JOULES_PER_KWH, EnergyMeter, PeakMemory, has_statistics
from darkroom.hardware.prices import STALE_DAYS, Price, price
from darkroom.hardware.system import atomic_replace, process_age_s

OTHER = "other"  # what no part was open for


class Bill(BaseModel):
    """What a job used. Dollars stand behind device-hours with their price's date: they age, hours do not."""

    model_config = ConfigDict(extra="forbid")

    wall_s: float = Field(
        default=0.0,
        ge=0,
        description="elapsed seconds, all sessions together; of a command from its process's start",
    )
    device_hours: float = Field(default=0.0, ge=0, description="elapsed hours times devices")
    device: str = Field(default="", description="what it ran on (in the last session)")
    num_devices: int = Field(default=1, ge=1, description="devices, a whole CPU counting as one")
    usd: float | None = Field(default=None, description="cost on demand; null where no price is known")
    usd_per_hour: float | None = Field(default=None, description="price of one device for an hour")
    price_source: str | None = Field(default=None, description="provider, instance and where it was read")
    price_as_of: date | None = Field(default=None, description="when the price was read")
    kwh: float | None = Field(
        default=None, description="energy; null where neither counter nor rating is known"
    )
    kwh_source: str | None = Field(default=None, description="counter, or estimate from rated power")
    peak_memory_bytes: int = Field(
        default=0, ge=0, description="resident set of the process (CPU) or allocator's peak (CUDA)"
    )
    host_memory_bytes: int = Field(
        default=0,
        ge=0,
        description="resident set of the process at its highest, on whatever device it computes",
    )
    images: int = Field(default=0, ge=0, description="pictures trained on, encoded or generated")
    parts: dict[str, float] = Field(
        default={},
        description="seconds by phase; together the wall time: start (the process and its imports), load, "
        "class pictures, latents, train, wait, evaluate, sample, checkpoint, other",
    )
    sessions: int = Field(default=0, ge=0, description="how often the job was started")

    @property
    def usd_per_image(self) -> float | None:
        """Cost of one picture; None without a price or pictures."""
        return self.usd / self.images if self.usd is not None and self.images else None

    def __add__(self, later: Bill) -> Bill:
        """Both together: a job's sessions, or a journey's jobs. What is unknown in one is left out."""
        newest = later.model_copy()
        newest.wall_s = self.wall_s + later.wall_s
        newest.device_hours = self.device_hours + later.device_hours
        newest.usd = _sum(self.usd, later.usd)
        newest.kwh = _sum(self.kwh, later.kwh)
        newest.kwh_source = _both(self.kwh_source, later.kwh_source)
        newest.peak_memory_bytes = max(self.peak_memory_bytes, later.peak_memory_bytes)
        newest.host_memory_bytes = max(self.host_memory_bytes, later.host_memory_bytes)
        newest.images = self.images + later.images
        kinds = [*self.parts, *(kind for kind in later.parts if kind not in self.parts)]
        newest.parts = {kind: self.parts.get(kind, 0.0) + later.parts.get(kind, 0.0) for kind in kinds}
        newest.sessions = self.sessions + later.sessions
        return newest

    @classmethod
    def load(cls, path: Path | str) -> Bill | None:
        """The bill saved at a path; None if there is none yet."""
        try:
            return cls.model_validate_json(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def save(self, path: Path | str) -> None:
        """Write as JSON; a reader sees the old bill or the new one, never half of one."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        atomic_replace(temporary, target)

    def line(self) -> str:
        """One line for the console."""
        parts = [
            f"{format_seconds(self.wall_s)} wall",
            f"{format_number(self.device_hours)} device-hours on {self.device}",
        ]
        if self.usd is not None:
            parts.append(f"{format_usd(self.usd)} ({self.price_note()})")
        if self.kwh is not None:
            estimated = "about " if "estimate" in (self.kwh_source or "") else ""
            parts.append(f"{estimated}{format_number(self.kwh)} kWh")
        parts.append(f"peak {format_bytes(self.peak_memory_bytes)}{self._on_host()}")
        if self.images:
            parts.append(f"{self.images:,} images")
        if self.sessions > 1:
            parts.append(f"{self.sessions} sessions")
        return ", ".join(parts)

    def _on_host(self) -> str:
        """What the process held besides, where its device has memory of its own."""
        apart = self.host_memory_bytes and self.host_memory_bytes != self.peak_memory_bytes
        return f" and {format_bytes(self.host_memory_bytes)} of the host" if apart else ""

    def price_note(self, today: date | None = None) -> str:
        """The price behind the dollars with its date, and a word when it is old; empty without a price."""
        if self.usd_per_hour is None or self.price_as_of is None:
            return ""
        age = ((today or date.today()) - self.price_as_of).days
        old = f", {age} days old" if age > STALE_DAYS else ""
        return f"{format_usd(self.usd_per_hour)} a device-hour as of {self.price_as_of}{old}"


class Meter:
    """Runs while a job runs and makes its bill. `prior` is the bill of the job's earlier sessions.

    >>> meter = Meter("cpu", Bill.load(path))
    >>> with meter.part("train"):
    ...     meter.images += 64
    >>> meter.bill().save(path)
    """

    def __init__(
        self,
        device: Any = "cpu",
        prior: Bill | None = None,
        *,
        num_devices: int = 1,
        usd_per_hour: float | None = None,
        whole_process: bool = False,
    ) -> None:
        """`device` as torch names it; `usd_per_hour` is the user's own price of one device.

        With `whole_process` the process is the job's: its time and its memory count from its start on.
        """
        self.images = 0
        self._prior = prior or Bill()
        self._num_devices = num_devices
        self._mark, before_s = time.perf_counter(), process_age_s() if whole_process else 0.0
        self._start = self._mark - before_s
        self._parts: dict[str, float] = {"start": before_s} if whole_process else {}
        self._open: list[str] = []
        name, units, self._device = _describe(str(device), machine())
        self._price = price(name, usd_per_hour=usd_per_hour)
        # The table's price is of one virtual CPU, a bill's device is the whole CPU.
        self._usd_per_hour = _hourly(self._price, units, given=usd_per_hour is not None)
        card = find_card(name)
        power_w = card.power_w * units if card else None
        self._energy = EnergyMeter(str(device), power_w=power_w, num_devices=num_devices, before_s=before_s)
        self._host = PeakMemory("cpu", whole_process=whole_process)
        self._memory = (
            PeakMemory(str(device), whole_process=whole_process)
            if has_statistics(str(device))
            else self._host
        )

    @contextmanager
    def part(self, kind: str) -> Iterator[None]:
        """Count the time inside as `kind`; a part inside a part is taken out of the outer one."""
        self._charge()
        self._open.append(kind)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def bill(self) -> Bill:
        """The bill so far, earlier sessions included; may be asked for at any time."""
        self._charge()
        wall_s = self._mark - self._start
        hours = wall_s / 3600 * self._num_devices
        known = self._energy.source != "unknown"
        session = Bill(
            wall_s=wall_s,
            device_hours=hours,
            device=self._device,
            num_devices=self._num_devices,
            usd=None if self._usd_per_hour is None else hours * self._usd_per_hour,
            usd_per_hour=self._usd_per_hour,
            price_source=None if self._price is None else self._price.origin,
            price_as_of=None if self._price is None else self._price.as_of,
            kwh=self._energy.joules() / JOULES_PER_KWH if known else None,
            kwh_source=self._energy.source if known else None,
            peak_memory_bytes=self._memory.bytes(),
            host_memory_bytes=self._host.bytes(),
            images=self.images,
            parts=dict(self._parts),
            sessions=1,
        )
        return self._prior + session

    def _charge(self) -> None:
        now = time.perf_counter()
        kind = self._open[-1] if self._open else OTHER
        self._parts[kind] = self._parts.get(kind, 0.0) + now - self._mark
        self._mark = now


def _describe(device: str, here: Machine) -> tuple[str, float, str]:
    """Name to look up, how many of its units a device is (cores of a CPU class), name to show."""
    if device.partition(":")[0] != "cpu" and here.devices:
        found = here.devices[int(device.partition(":")[2] or 0)]
        return found.name, 1, found.name
    return here.cpu_class, here.usable_cores, f"{here.cpu} ({here.usable_cores:g} cores)"


def _hourly(found: Price | None, units: float, *, given: bool) -> float | None:
    if found is None:
        return None
    return found.usd_per_device_hour * (1 if given else units)


def _sum(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else a + b


def _both(a: str | None, b: str | None) -> str | None:
    return b if a is None or a == b else a if b is None else f"{a}; {b}" if b not in a else a


def format_number(value: float, digits: int = 3) -> str:
    """So many significant digits, large numbers whole: '0.0123', '12.3', '1,235'; never '1e+02'."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def format_seconds(seconds: float) -> str:
    """'48 s', '3 min 05 s', '2 h 10 min'."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_usd(usd: float) -> str:
    """'USD 12.30', and small sums with two digits that count: 'USD 0.0034'."""
    if usd >= 1 or usd == 0:
        return f"USD {usd:,.2f}"
    if usd >= 0.01:
        return f"USD {usd:.3f}"
    return f"USD {usd:.{1 - math.floor(math.log10(usd))}f}" if usd >= 1e-6 else f"USD {usd:.1e}"


def format_bytes(size: float) -> str:
    """'1.4 GiB', '380 MiB'."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
