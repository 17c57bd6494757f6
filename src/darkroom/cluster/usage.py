"""How busy the stages of a job on a cluster are, what holds it up, and what to change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

BUSY = 0.85  # of its time: a stage that is busier holds up the others
WAITS = 0.1  # of its time that training may stand still for batches
FEW = 3  # blocks that tell nothing
WAITING = 3  # times as long as it works a CPU task has its place where it waits for a CPU most of the time


@dataclass
class BlockTimes:
    """What one block took, as the worker that made it measured."""

    read_s: float = 0.0
    ready_s: float = 0.0
    encode_s: float = 0.0
    write_s: float = 0.0

    def __add__(self, other: BlockTimes) -> BlockTimes:
        return BlockTimes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class SettingNames:
    """What the settings are called, and what is said where no stage is full."""

    cpu: str = "--cpu-workers"
    encoders: str = "--encoders"
    fraction: str = "--fraction"
    idle: str = "neither is full: larger blocks, or fewer machines, would do"


PREPARE = SettingNames()
ONLINE = SettingNames(
    "data.online.cpu_workers",
    "data.online.encoders",
    "data.online.fraction",
    "training is the limit, encoders keep up with it",
)


@dataclass
class Use:
    """How busy the stages were, counted from the first finished block on: what starts up is not at work."""

    cpu_workers: int
    cpus: float = math.inf  # that the cluster has for the CPU stage
    words: SettingNames = PREPARE
    wall_s: float = 0.0
    busy: BlockTimes = field(default_factory=BlockTimes)
    rows: int = 0
    blocks: int = 0
    encoder_s: float = 0.0  # summed over the encoders while they were up
    place_s: float = 0.0  # summed over the places of the CPU stage, where their number changed
    slot_s: float = 0.0  # summed over CPU tasks, from when they were asked for
    waited_s: float = 0.0  # that training stood still for batches
    repeated: int = 0  # blocks made again because somebody died
    begun: bool = False

    def tick(self, seconds: float, encoders: int, on_cpu: int) -> None:
        """Time went by with so many encoders up and CPU tasks asked for."""
        if self.begun:
            self.wall_s += seconds
            self.encoder_s += seconds * encoders
            self.place_s += seconds * self.cpu_workers
            self.slot_s += seconds * on_cpu

    def add(self, part: BlockTimes) -> None:
        """Count what a worker did."""
        if self.begun:
            self.busy += part

    def made(self, rows: int) -> None:
        """Count a finished block."""
        if self.begun:
            self.rows, self.blocks = self.rows + rows, self.blocks + 1
        self.begun = True

    def shares(self) -> dict[str, float]:
        """The share of its time that each stage was busy, from 0 to 1."""
        cpu = (self.busy.read_s + self.busy.ready_s) / self._places()
        encode = (self.busy.encode_s + self.busy.write_s) / max(self.encoder_s, 1e-9)
        return {"cpu": min(cpu, 1.0), "encode": min(encode, 1.0)}

    def rows_per_s(self) -> float:
        """Rows a second."""
        return self.rows / max(self.wall_s, 1e-9)

    def bottleneck(self) -> str:
        """One line: what holds the job up, and what to change."""
        if self.blocks < FEW:
            return "too few blocks yet to say what holds it up" if self.begun else "nothing was encoded yet"
        shares, words = self.shares(), self.words
        message = f"cpu stage {shares['cpu']:.0%} busy, encoders {shares['encode']:.0%}"
        if shares["encode"] >= BUSY:
            if self.busy.write_s > self.busy.encode_s:
                return f"{message}: writing encoded values is the limit: take faster storage"
            up = max(1, round(self.encoder_s / self.wall_s))
            return f"{message}: encoding is the limit: raise {words.encoders} above {up}, or {words.fraction}"
        if max(shares["cpu"], self._slots()) >= BUSY:
            return f"{message}: {self._starving(shares)}"
        waits = self.waited_s / self.wall_s
        if waits > WAITS:
            waited = f"training waits {waits:.0%} of its time"
            return f"{message}: neither is full, and {waited}: raise data.prefetch_batches"
        return f"{message}: {words.idle}"

    def _slots(self) -> float:
        return self.slot_s / self._places()

    def _places(self) -> float:
        return max(self.place_s or self.wall_s * self.cpu_workers, 1e-9)

    def _starving(self, shares: dict[str, float]) -> str:
        if shares["cpu"] < self._slots() / WAITING:
            return f"encoders starve: {self.cpu_workers} CPU tasks wait for a free CPU: add nodes with CPUs"
        wanted = math.ceil(self.cpu_workers * 0.95 / max(shares["encode"], 0.05))
        more = f"raise {self.words.cpu} from {self.cpu_workers} to {wanted}"
        if wanted > self.cpus:
            more += f", which takes {math.ceil(wanted - self.cpus)} more CPUs in the cluster"
        if self.busy.read_s > 2 * self.busy.ready_s:
            return f"encoders starve for reading the store: take faster storage, or {more}"
        return f"encoders starve: {more}"


def together(uses: Sequence[Use]) -> Use:
    """The use of encoders that several ranks share, each of which counted its own blocks."""
    first = uses[0]
    whole = Use(sum(use.cpu_workers for use in uses), first.cpus, first.words, begun=first.begun)
    whole.wall_s = sum(use.wall_s for use in uses) / len(uses)
    whole.encoder_s = sum(use.encoder_s for use in uses) / len(uses)
    whole.waited_s = sum(use.waited_s for use in uses) / len(uses)
    for use in uses:
        whole.busy += use.busy
        whole.slot_s += use.slot_s
        whole.place_s += use.place_s
        whole.rows += use.rows
        whole.blocks += use.blocks
        whole.repeated += use.repeated
    return whole
