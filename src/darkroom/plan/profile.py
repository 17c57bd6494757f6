"""What a job computes, moves and holds, as straight lines in the number of pictures: counted at two batch
sizes, good for all. Plain numbers: no torch here, so a plan from the cache answers at once.

Time: kernels of one kind and size together, each with FLOPs and bytes `fixed + row * rows`. Memory: the
moments that can be the peak, each with its bytes by kind. Both come from one run of the real code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
KINDS = ("weights", "gradients", "optimiser", "ema", "activations", "temporary")
TRAIN_STAGES = ("inputs", "forward", "backward", "update")
GENERATE_STAGES = ("text", "denoise", "decode")
MAX_ROWS = 65536
# Stages of a run beside its steps.
LATENTS, SAMPLES, DECODED = "latents", "samples", "decoded samples"


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
    """`calls` kernels of one class that do the same amount of work each."""

    stage: str
    kind: str  # matmul, conv, attention, norm, elementwise, optimiser, view
    calls: int
    flops: Line
    bytes: Line


@dataclass(frozen=True)
class Work:
    """The kernels of one stage as columns: `flops` and `bytes` of one call are (fixed, a row)."""

    names: tuple[str, ...]  # classes of kernels
    kinds: NDArray[np.intp]  # of each, an index into names
    calls: Floats
    flops: tuple[Floats, Floats]
    bytes: tuple[Floats, Floats]

    def holds(self, *names: str) -> NDArray[np.bool_]:
        """Which kernels are of these classes."""
        return np.isin(self.kinds, [i for i, name in enumerate(self.names) if name in names])


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
        """FLOPs of the stages' kernels (of all unless said), 2 a multiply-add, attention included."""
        return sum(k.calls * k.flops.at(rows) for k in self.kernels if not stages or k.stage in stages)

    def work(self, stage: str) -> Work:
        """The kernels of a stage as columns, made once."""
        if stage not in self._work:
            found = [kernel for kernel in self.kernels if kernel.stage == stage]
            names = tuple(dict.fromkeys(kernel.kind for kernel in found))
            self._work[stage] = Work(
                names,
                np.array([names.index(kernel.kind) for kernel in found], dtype=np.intp),
                np.array([float(kernel.calls) for kernel in found]),
                (np.array([k.flops.fixed for k in found]), np.array([k.flops.row for k in found])),
                (np.array([k.bytes.fixed for k in found]), np.array([k.bytes.row for k in found])),
            )
        return self._work[stage]

    @cached_property
    def _work(self) -> dict[str, Work]:
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
    ) -> dict[str, float]:
        """Bytes by kind at the highest moment, of a micro-batch of `rows`.

        `accumulate`: the gradients of earlier micro-batches are alive too. `shards`: devices that share what
        is sharded (ZeRO-2: gradients, optimiser and averaged weights). `gathers`: the weights too, of which
        each device has whole only the block at work and the next one.
        """
        kinds = [
            self._held(moment, rows, accumulate, step_rows or rows, shards, gathers)
            for moment in self.moments
        ]
        return max(kinds, key=lambda held: sum(held.values()))

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


def highest(moments: list[Moment], max_rows: int = MAX_ROWS) -> tuple[Moment, ...]:
    """The moments of each stage that are the highest for some number of rows: the lines' upper envelope."""
    kept: list[Moment] = []
    for stage in dict.fromkeys(moment.stage for moment in moments):
        lines = [(_total(moment), moment) for moment in moments if moment.stage == stage]
        rows = 1.0
        while rows <= max_rows:
            line, moment = max(lines, key=lambda item: (item[0].at(rows), item[0].row))
            kept.append(moment)
            crossings = [
                (line.fixed - other.fixed) / (other.row - line.row)
                for other, _ in lines
                if other.row > line.row + 1e-9
            ]
            later = [at for at in crossings if at > rows]
            if not later:
                break
            rows = min(later) + 1e-6
    return tuple(kept)


def _total(moment: Moment) -> Line:
    return Line(
        sum(line.fixed for line in moment.bytes.values()), sum(line.row for line in moment.bytes.values())
    )
