"""Seconds from counts: a roofline by class of operation, with few physical efficiencies (efficiency.csv).

A kernel takes the longer of its arithmetic (at a share of the card's peak) and its traffic (at a share of
its bandwidth), and a fixed start. The host hands kernels out one by one: where that takes longer than the
kernels, it is the launch that is waited for. No constant belongs to a single published row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from darkroom.hardware.cards import Card, read_rows
from darkroom.plan.profile import Kernels, Profile

HERE = Path(__file__).parent
ARITHMETIC = ("conv", "matmul", "attention")
LOW_POWER_W = 100.0  # a T4 or an L4 cannot keep its clock while all tensor cores work


@dataclass(frozen=True)
class Efficiency:
    """The fitted constants by name and what they apply to; a calibrated machine replaces some."""

    values: Mapping[tuple[str, str], float]

    def of(self, name: str, *applies_to: str) -> float:
        """The constant of the first of `applies_to` that there is."""
        for key in applies_to:
            if (name, key) in self.values:
                return self.values[name, key]
        raise KeyError(f"no efficiency '{name}' for {', '.join(applies_to)}")

    def with_values(self, changed: Mapping[tuple[str, str], float]) -> Efficiency:
        """The same with some replaced."""
        return replace(self, values={**self.values, **changed})


@cache
def efficiency() -> Efficiency:
    """The constants of efficiency.csv."""
    rows = read_rows(HERE / "efficiency.csv")
    return Efficiency({(row["name"], row["applies_to"]): float(row["value"]) for row in rows})


@dataclass(frozen=True)
class Software:
    """How the kernels are run. `precision` is of the weights and activations."""

    precision: str = "bf16"
    engine: str = "eager"  # compile: fused element-wise kernels; graphs: fused, and launched as one
    channels_last: bool = True
    attention: str = "fused"  # plain: scores in memory
    matmul_tf32: bool = False  # float32 products on tensor cores
    conv_tf32: bool = True  # cuDNN's default
    host_factor: float = 1.0  # a slower or faster host


@dataclass(frozen=True)
class Seconds:
    """Where the time goes. They add up: what hides behind something else is not counted twice."""

    compute: float = 0.0
    memory_bound: float = 0.0
    launch: float = 0.0
    communication: float = 0.0
    data: float = 0.0
    by_class: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All together."""
        return self.compute + self.memory_bound + self.launch + self.communication + self.data

    def __add__(self, other: Seconds) -> Seconds:
        kinds = {**self.by_class, **other.by_class}
        return Seconds(
            self.compute + other.compute,
            self.memory_bound + other.memory_bound,
            self.launch + other.launch,
            self.communication + other.communication,
            self.data + other.data,
            {kind: self.by_class.get(kind, 0.0) + other.by_class.get(kind, 0.0) for kind in kinds},
        )

    def times(self, number: float) -> Seconds:
        """So many of them one after another."""
        return Seconds(
            self.compute * number,
            self.memory_bound * number,
            self.launch * number,
            self.communication * number,
            self.data * number,
            {kind: seconds * number for kind, seconds in self.by_class.items()},
        )


def family(card: Card) -> str:
    """Cards with the same cores: Ampere's data-centre chip is not its other ones."""
    many = card.flops.get("fp16", 0.0) >= 10 * card.flops["float32"]
    return "Ampere HBM" if card.architecture == "Ampere" and many else card.architecture


class Roofline:
    """One device and the software on it. For a CPU class `cores` of it work together."""

    def __init__(
        self, card: Card, software: Software, *, cores: int = 1, known: Efficiency | None = None
    ) -> None:
        self.card, self.software = card, software
        self._known = known or efficiency()
        self._units = cores if card.unit == "core" else 1
        self._cpu = card.kind == "cpu"
        self._where = "CPU" if self._cpu else "GPU"
        self.bandwidth = (
            card.bandwidth_bytes_s * self._units * self._known.of("bandwidth", card.name, self._where)
        )
        self._kernel_s = self._known.of("kernel_s", card.name, self._where)

    def peak(self, kind: str = "matmul") -> tuple[float, bool]:
        """Peak FLOP/s of a class of kernels, and whether they run on tensor cores."""
        software, rates = self.software, self.card.flops
        precision = software.precision
        if precision == "float32" and not self._cpu:
            allowed = software.conv_tf32 if kind == "conv" else software.matmul_tf32
            precision = "tf32" if allowed and "tf32" in rates else "float32"
        # A card without bf16 units computes in float32, which is what PyTorch does on them.
        rate = rates.get(precision, rates["float32"]) * self._units
        return rate, rate > rates["float32"] * self._units or (precision == "tf32")

    def _rate(self, kind: str) -> float:
        """FLOP/s that a class of kernels reaches."""
        known, card = self._known, self.card
        peak, tensor_cores = self.peak(kind)
        if self._cpu:
            return peak * known.of(kind, card.name, "CPU")
        if not tensor_cores:
            return peak * known.of("plain_cores", card.name, "GPU")
        share = known.of("conv", card.name, family(card))
        if card.power_w < LOW_POWER_W and ("conv", card.name) not in known.values:
            share *= known.of("low_power", "GPU")
        if kind == "matmul":
            share *= known.of("matmul", card.name, "GPU")
        elif kind == "attention":
            share *= known.of("attention", card.name, self.software.attention)
        return peak * share

    def stage(self, profile: Profile, stage: str, rows: float, *, share: float = 1.0) -> Seconds:
        """Seconds of one stage on `rows` pictures; `share` of the work, where others do the rest."""
        groups = [group for group in profile.kernels if group.stage == stage]
        return self.kernels(groups, rows, backward=stage == "backward", share=share)

    def kernels(
        self, groups: Iterable[Kernels], rows: float, *, backward: bool = False, share: float = 1.0
    ) -> Seconds:
        """Seconds of kernels, launches included."""
        compute, memory, host = 0.0, 0.0, 0.0
        by_class: dict[str, float] = {}
        for group in groups:
            calls, moved = self._fused(group, rows)
            arithmetic, traffic = self._arithmetic(group, rows), moved / self.bandwidth
            seconds = share * (calls * self._kernel_s + group.calls * max(arithmetic, traffic))
            if arithmetic >= traffic:
                compute += seconds
            else:
                memory += seconds
            by_class[group.kind] = by_class.get(group.kind, 0.0) + seconds
            host += calls
        launch = self._host_seconds(host, backward) - compute - memory
        return Seconds(compute, memory, max(0.0, launch), by_class=by_class)

    def _arithmetic(self, group: Kernels, rows: float) -> float:
        flops = group.flops.at(rows)
        if not flops:
            return 0.0
        kind = group.kind if group.kind in ARITHMETIC else "matmul"
        return flops / self._rate(kind)

    def _fused(self, group: Kernels, rows: float) -> tuple[float, float]:
        """Kernels that are started, and bytes that one of them moves."""
        moved = group.bytes.at(rows)
        if group.kind == "conv" and not self._cpu and not self.software.channels_last:
            moved *= 3 if self.peak("conv")[1] else 1  # tensor cores want channels last: there and back
        if self.software.engine == "eager" or group.kind not in ("norm", "elementwise"):
            return group.calls, moved
        known = self._known
        return group.calls * known.of("fusion_kernels", "compile"), moved * known.of(
            "fusion_bytes", "compile"
        )

    def _host_seconds(self, kernels: float, backward: bool) -> float:
        if self._cpu or self.software.engine == "graphs":
            return 0.0
        stage = "backward" if backward else "forward"
        return kernels * self._known.of("host_s", stage) * self.software.host_factor
