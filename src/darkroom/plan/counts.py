"""What a job computes, moves and holds, as straight lines in the number of pictures: counted at two batch
sizes, good for all. Plain numbers: no torch here, so a plan from the cache answers at once.

Time: kernels of one kind and size together, each with FLOPs and bytes `fixed + row * rows`. Memory: the
moments that can be the peak, each with its bytes by kind. Both come from one run of the real code.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from darkroom import count_cache

Floats = NDArray[np.float64]
KINDS = ("weights", "gradients", "optimiser", "ema", "activations", "temporary")
TRAIN_STAGES = ("inputs", "forward", "backward", "update")
MAX_ROWS = 65536
# Stages of a run besides its steps.
LATENTS, SAMPLES, DECODED = "latents", "samples", "decoded samples"
# What a CPU's process keeps of freed activations, as shares of those alive: glibc gives blocks from 32 MB on
# back, others lie between ones that live on. Medians of ordinary runs (memory-cpu.csv, memory-runs.csv).
KEPT_OF_LATENTS, KEPT_OF_PICTURES = 0.05, 0.5
MOST_KEPT_OF_PICTURES = 0.4e9  # of large pictures most blocks are from 32 MB on
KEPT_OF_GRADIENTS = 0.5  # of the last step's: a DiT's activations filled half of what they had left
KEPT_OF_STEP = 0.2  # 0.16 to 0.29: nearly all blocks live until the backward pass


@dataclass(frozen=True)
class Line:
    """A quantity of `rows` pictures: fixed + row * rows."""

    fixed: float
    row: float

    def at(self, rows: float) -> float:
        """Its value for a number of pictures, never below zero."""
        return max(0.0, self.fixed + self.row * rows)

    @classmethod
    def through(cls, rows: tuple[int, int], values: tuple[float, float]) -> Line:
        """The line through what was counted at two batch sizes."""
        row = (values[1] - values[0]) / (rows[1] - rows[0])
        return cls(values[0] - row * rows[0], row)


@dataclass(frozen=True)
class Kernels:
    """`calls` kernels of one class and size; of steps of several kinds the mean number."""

    stage: str
    kind: str  # matmul, conv, attention, norm, elementwise, optimiser, view
    calls: float
    flops: Line
    bytes: Line


@dataclass(frozen=True)
class KernelColumns:
    """The kernels of one stage as columns: `flops` and `bytes` of one call are (fixed, a row)."""

    names: tuple[str, ...]  # classes of kernels
    kinds: NDArray[np.intp]  # of each, an index into names
    calls: Floats
    flops: tuple[Floats, Floats]
    bytes: tuple[Floats, Floats]

    def holds(self, *names: str) -> NDArray[np.bool_]:
        """Which kernels are of these classes; not to be written to."""
        if names not in self._held_by:
            among = [i for i, name in enumerate(self.names) if name in names]
            self._held_by[names] = np.isin(self.kinds, among)
        return self._held_by[names]

    @cached_property
    def _held_by(self) -> dict[tuple[str, ...], NDArray[np.bool_]]:
        return {}


@dataclass(frozen=True)
class Moment:
    """A moment that can be the peak: bytes alive, by kind."""

    stage: str
    bytes: dict[str, Line]

    def at(self, rows: float) -> dict[str, float]:
        """Bytes by kind for a number of pictures."""
        return {kind: line.at(rows) for kind, line in self.bytes.items()}


@dataclass(frozen=True)
class Profile:
    """A job's counts. `rows` of the stage 'inputs' are those of the whole step, of the other stages those of
    a micro-batch; a stage in `chunks` takes at most so many rows at once.
    """

    kernels: tuple[Kernels, ...]
    moments: tuple[Moment, ...]
    parameters: dict[str, int]  # by part
    trained: int
    chunks: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # what else the job says: resolution, file sizes

    @property
    def total_parameters(self) -> int:
        """Parameters of all parts that are held."""
        return sum(self.parameters.values())

    def flops(self, rows: float, *stages: str) -> float:
        """FLOPs of the stages' kernels, 2 a multiply-add, attention included; unless said of all stages but
        latents made beforehand.
        """
        if (rows, stages) not in self._flops:
            wanted = [k for k in self.kernels if (k.stage in stages if stages else k.stage != LATENTS)]
            self._flops[rows, stages] = sum(k.calls * k.flops.at(rows) for k in wanted)
        return self._flops[rows, stages]

    def work(self, stage: str) -> KernelColumns:
        """The kernels of a stage as columns, made once."""
        if stage not in self._work:
            found = [kernel for kernel in self.kernels if kernel.stage == stage]
            names = tuple(dict.fromkeys(kernel.kind for kernel in found))
            self._work[stage] = KernelColumns(
                names,
                np.array([names.index(kernel.kind) for kernel in found], dtype=np.intp),
                np.array([float(kernel.calls) for kernel in found]),
                (np.array([k.flops.fixed for k in found]), np.array([k.flops.row for k in found])),
                (np.array([k.bytes.fixed for k in found]), np.array([k.bytes.row for k in found])),
            )
        return self._work[stage]

    @cached_property
    def _work(self) -> dict[str, KernelColumns]:
        return {}

    @cached_property
    def _flops(self) -> dict[tuple[float, tuple[str, ...]], float]:
        return {}

    @cached_property
    def _memory(self) -> dict[tuple[int, ...], dict[str, float]]:
        return {}

    def of_pictures(self, number: int) -> Profile:
        """The same of a run of so few pictures of its own: no more are encoded at once."""
        most = self.chunks.get(LATENTS, 0)
        return self if most <= number else replace(self, chunks={**self.chunks, LATENTS: number})

    def memory(
        self,
        rows: int,
        *,
        accumulate: bool = False,
        step_rows: int | None = None,
        shards: int = 1,
        gathers: bool = False,
        keeps: bool = False,
        rests: bool = False,
    ) -> dict[str, float]:
        """Bytes by kind at the highest moment, of a micro-batch of `rows`.

        `accumulate`: the gradients of earlier micro-batches are alive too. `shards`: devices that share what
        is sharded (ZeRO-2: gradients, optimiser and averaged weights). `gathers`: the weights too, of which
        each device has whole only the block at work and the next one. `keeps`: with what a CPU's process
        keeps of freed blocks, as 'allocator'. `rests`: without the weights that wait in main memory.
        """
        asked = (rows, accumulate, step_rows or rows, shards, gathers, keeps, rests)
        if asked not in self._memory:  # a plan of many cards asks for the same hundreds of times
            self._memory[asked] = self._highest(*asked)
        return dict(self._memory[asked])

    def _highest(
        self,
        rows: int,
        accumulate: bool,
        step_rows: int,
        shards: int,
        gathers: bool,
        keeps: bool,
        rests: bool,
    ) -> dict[str, float]:
        kinds = []
        for moment in self.moments:
            held = self._held(moment, rows, accumulate, step_rows, shards, gathers)
            if rests and moment.stage != LATENTS:
                held["weights"] -= self.facts.get("saved_by_swap_bytes", 0)
            if keeps:
                held["allocator"] = self._kept(moment.stage, held)
            kinds.append(held)
        return max(kinds, key=lambda held: sum(held.values()))

    def _kept(self, stage: str, held: Mapping[str, float]) -> float:
        """Bytes that a CPU's process keeps of freed blocks, besides what is alive."""
        if self.facts.get("frees_in_forward"):
            return 0.0  # train.setup has such a run give freed blocks back at once
        alive = held["activations"] + held["temporary"]
        if stage == LATENTS:
            return KEPT_OF_LATENTS * alive
        if stage not in TRAIN_STAGES:
            return min(KEPT_OF_PICTURES * alive, MOST_KEPT_OF_PICTURES)
        freed: float = max(0.0, self.facts.get("small_gradient_bytes", 0) - held["gradients"])
        return KEPT_OF_STEP * alive + KEPT_OF_GRADIENTS * min(freed, alive)

    def _held(
        self, moment: Moment, rows: int, accumulate: bool, step_rows: int, shards: int, gathers: bool
    ) -> dict[str, float]:
        if moment.stage == LATENTS:  # before training, on each device, whatever its batch will be
            return {kind: moment.bytes[kind].at(self.chunks[LATENTS]) for kind in KINDS}
        given = step_rows if moment.stage == "inputs" else rows
        held = moment.at(min(given, self.chunks.get(moment.stage, MAX_ROWS)))
        if accumulate and moment.stage in ("forward", "backward"):
            held["gradients"] = max(held.get("gradients", 0.0), self.gradient_bytes)
        for kind in ("gradients", "optimiser", "ema"):
            held[kind] = held.get(kind, 0.0) / shards
        if shards > 1 and "masters_apart" in self.facts:
            masters = 4.0 * self.trained
            # Beside its shard of the float32 masters a device holds the weights it computes with, whole.
            held["weights"] += masters / shards - (masters if self.facts["masters_apart"] else 0.0)
            # Of these a block at work and the next are whole.
            if frozen := self.facts.get("frozen_cut_bytes", 0):
                held["weights"] += frozen / shards - frozen
                held["weights"] += 0.0 if gathers else 2.0 * self.facts["block_bytes"]
            if gathers:
                held["weights"] += 2.0 * self.facts["block_bytes"] - self.facts["computing_bytes"]
        return {kind: held.get(kind, 0.0) for kind in KINDS}

    @property
    def gradient_bytes(self) -> float:
        """All gradients of a step together."""
        return max(moment.bytes["gradients"].at(1) for moment in self.moments)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a cache; see `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Profile:
        """A profile as `to_dict` gave it."""
        kernels = tuple(
            Kernels(k["stage"], k["kind"], k["calls"], Line(**k["flops"]), Line(**k["bytes"]))
            for k in content["kernels"]
        )
        moments = tuple(
            Moment(m["stage"], {kind: Line(**line) for kind, line in m["bytes"].items()})
            for m in content["moments"]
        )
        plain = {key: content[key] for key in ("parameters", "trained", "chunks", "facts")}
        return cls(kernels=kernels, moments=moments, **plain)


def highest(moments: Sequence[Moment], max_rows: int = MAX_ROWS) -> tuple[Moment, ...]:
    """The moments of each stage that are the highest for some number of rows: the lines' upper envelope."""
    totals = [
        (sum(line.fixed for line in moment.bytes.values()), sum(line.row for line in moment.bytes.values()))
        for moment in moments
    ]
    lines = np.array(totals, dtype=np.float64).reshape(-1, 2)
    kept = envelope([moment.stage for moment in moments], lines[:, 0], lines[:, 1], max_rows)
    return tuple(moments[i] for i in kept)


def envelope(stages: Sequence[str], fixed: Floats, row: Floats, max_rows: int = MAX_ROWS) -> list[int]:
    """Which lines of each stage are the highest somewhere from 1 to `max_rows` rows."""
    kept: list[int] = []
    names = np.array(stages)
    for stage in dict.fromkeys(stages):
        mine = np.flatnonzero(names == stage)
        start, slope, rows = fixed[mine], row[mine], 1.0
        while rows <= max_rows:
            height = np.maximum(0.0, start + slope * rows)
            among = np.flatnonzero(height == height.max())
            top = among[np.argmax(slope[among])]
            kept.append(int(mine[top]))
            steeper = slope > slope[top] + 1e-9
            crossings = (start[top] - start[steeper]) / (slope[steeper] - slope[top])
            later = crossings[crossings > rows]
            if not later.size:
                break
            rows = float(later.min()) + 1e-6
    return kept


SHIPPED = Path(__file__).with_name("common_counts.json.gz")
"""Counts of the families' common shapes, made by benchmarks/plan/common_counts.py."""


MOST_OPENED = 256
_OPENED: dict[Path, Profile] = {}
"""What this process has read: a plan of many cards asks for the same count hundreds of times."""


def cached_profile(key: dict[str, Any], make: Callable[[], Profile]) -> Profile:
    """The profile that `make` counts, or the one it counted before."""
    place = count_cache.place(key)
    if (profile := _OPENED.get(place)) is None:
        profile = Profile.from_dict(cached(key, lambda: make().to_dict()))
        if len(_OPENED) >= MOST_OPENED:
            _OPENED.clear()
        _OPENED[place] = profile
    return profile


def cached(key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gives, or what it gave before by this very code: here, or where darkroom was packed."""
    if (before := count_cache.kept(key)) is not None:
        return before
    if (shipped := _shipped(SHIPPED).get(count_cache.shipped_digest(key))) is not None:
        return shipped
    made = make()
    count_cache.keep(key, made)
    return made


@cache
def _shipped(file: Path) -> dict[str, dict[str, Any]]:
    """Counts by `shipped_digest`."""
    with suppress(OSError, ValueError):
        content: dict[str, dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))
        return content
    return {}
