"""Seconds from counts: a roofline by class of operation, with few physical efficiencies (efficiency.csv); and
of many devices: who shares what, what goes over which wire, and how long that takes.

A kernel takes its arithmetic (at a share of the card's peak), its traffic, and a fixed start; on a CPU, whose
cores are at different points of their work, the longer of the first two. As much of a kernel's traffic as the
card's last cache holds was just written there and moves at the cache's rate, the rest at a share of the
memory's bandwidth; nothing moves faster than these. The host hands kernels out one by one: where that takes
longer than the kernels, it is the launch that is waited for. Rows of two tables or more tell each constant
that is fitted.

A ring all-reduce moves 2 (n - 1) / n of the gradients past each of its n devices (Patarasuk & Yuan 2009).
NCCL lays its rings through all devices of all nodes and shares them out over a node's network cards, so that
a node sends as much into the network as a device into its link, and the slower of the two sets the pace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from darkroom.hardware.cards import Card, machines, networks, read_rows
from darkroom.plan.counts import Floats, KernelColumns, Profile

HERE = Path(__file__).parent
ARITHMETIC = ("conv", "matmul", "attention")
MOST = 0.8  # of its peak: what the best matrix products reach
GRAPHICS = ("Ampere", "Ada", "Blackwell", "RDNA 3")  # of the first three there are chips of both kinds
OLD_SERVER = 2021  # until then servers had Skylake to Rome processors


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


FITTED = sum(row["source"] == "fitted" for row in read_rows(HERE / "efficiency.csv"))


@dataclass(frozen=True)
class Software:
    """How the kernels are run. `precision` is of the weights and activations."""

    precision: str = "bf16"
    engine: str = "eager"  # compile: fused element-wise kernels; graphs, tensorrt: fused, launched as one
    channels_last: bool = True
    attention: str = "fused"  # plain: scores in memory
    matmul_tf32: bool = False  # float32 products on tensor cores
    conv_tf32: bool = True  # cuDNN's default
    host_factor: float = 1.0  # a slower or faster host
    quantised: str = ""  # fp8 or int8: what matrix products take (with TensorRT convolutions too)
    name: str = "darkroom"  # whose program it is

    @property
    def untried(self) -> bool:
        """Whether few published rows tell of it."""
        return bool(self.quantised) or self.engine == "tensorrt"


@dataclass(frozen=True)
class TimeBreakdown:
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

    def __add__(self, other: TimeBreakdown) -> TimeBreakdown:
        kinds = {**self.by_class, **other.by_class}
        return TimeBreakdown(
            self.compute + other.compute,
            self.memory_bound + other.memory_bound,
            self.launch + other.launch,
            self.communication + other.communication,
            self.data + other.data,
            {kind: self.by_class.get(kind, 0.0) + other.by_class.get(kind, 0.0) for kind in kinds},
        )

    def times(self, number: float) -> TimeBreakdown:
        """So many of them one after another."""
        return TimeBreakdown(
            self.compute * number,
            self.memory_bound * number,
            self.launch * number,
            self.communication * number,
            self.data * number,
            {kind: seconds * number for kind, seconds in self.by_class.items()},
        )


def graphics(card: Card) -> bool:
    """Whether a card's chip is of the kind that draws too: fewer tensor units for each float32 unit, half
    of which are shared with integers; of RDNA 3 they work where two instructions can be issued as one (VOPD).
    """
    return card.flops.get("fp16", 0.0) < 10 * card.flops["float32"] and card.architecture in GRAPHICS


def units_rate(card: Card, precision: str) -> float:
    """FLOP/s that the tensor units could start, whatever they accumulate in: GeForce cards halve the rate of
    float32 sums, which convolutions hardly notice, since something else bounds them before.
    """
    half = max(card.flops.get("fp16", 0.0), card.flops.get("fp16_acc16", 0.0))
    if precision == "tf32":
        return max(card.flops["tf32"], half / 2)
    return max(card.flops.get(precision, card.flops["float32"]), half)


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
        # Between the kernels of one step; a calibrated card's own bandwidth is of memory too.
        self.cache_bandwidth = card.bandwidth_bytes_s * self._known.of("cache", self._where) * self._units
        self._kernel_s = self._known.of("kernel_s", card.name, self._where)
        self._tile_s = self._known.of("tile_s", card.name, self._where)
        self._speed = self._known.of("speed", card.name, self._where)

    def peak(self, kind: str = "matmul") -> tuple[float, bool]:
        """Peak FLOP/s of a class of kernels, and whether they run on tensor cores."""
        rates, used = self.card.flops, self.number_format(kind)
        # A card without bf16 units computes in float32, which is what PyTorch does on them.
        rate = rates.get(used, rates["float32"]) * self._units
        return rate, rate > rates["float32"] * self._units or (used == "tf32")

    def number_format(self, kind: str) -> str:
        """What a class of kernels computes in: as the software says, as far as the device can."""
        software, rates = self.software, self.card.flops
        if self._cpu and kind == "attention":
            return "float32"  # as a CPU attends, whatever the rest computes in
        # TensorRT, and OpenVINO on a CPU, quantise convolutions too.
        quantised = ("matmul", "conv") if software.engine == "tensorrt" or self._cpu else ("matmul",)
        if software.quantised in rates and kind in quantised:
            return software.quantised
        if software.precision == "float32" and not self._cpu:
            allowed = software.conv_tf32 if kind == "conv" else software.matmul_tf32
            return "tf32" if allowed and "tf32" in rates else "float32"
        return software.precision

    def _rate(self, kind: str) -> float:
        """FLOP/s that a class of kernels reaches."""
        known, card = self._known, self.card
        peak, tensor_cores = self.peak(kind)
        if self._cpu:
            precision = "float32" if kind == "attention" else self.software.precision
            return peak * known.of(kind, f"{card.name} {precision}", "CPU")
        if not tensor_cores:
            return peak * known.of("plain_cores", card.name, "graphics" if graphics(card) else "GPU")
        units = units_rate(card, self.number_format(kind)) / peak
        share = known.of("conv", card.name, "GPU") * units
        if kind != "conv":
            own = known.values.get(("attention", f"{card.name} {self.software.attention}"))  # measured
            products = known.of("matmul", card.name, "GPU")
            share *= own if kind == "attention" and own is not None else products
        return peak * min(share, MOST)

    def stage(self, profile: Profile, stage: str, rows: float, *, share: float = 1.0) -> TimeBreakdown:
        """Seconds of one stage on `rows` pictures, launches included; `share` of the work, where others do
        the rest.
        """
        in_float32 = stage == "decode" and profile.facts.get("decodes_in_float32")
        if in_float32 and self.software.precision == "fp16":
            return self._rounded.stage(profile, stage, rows, share=share)
        work = profile.work(stage)
        if not work.names:
            return TimeBreakdown()
        calls, traffic, turned = self._traffic(work, rows)
        arithmetic = np.maximum(work.flops[0] + work.flops[1] * rows, 0.0) * self._seconds_a_flop(work)
        both = (np.maximum(arithmetic, traffic) if self._cpu else arithmetic + traffic) + turned
        start = np.where(work.holds(*ARITHMETIC), self._tile_s, self._kernel_s)
        seconds = share * (calls * start + work.calls * both) / self._speed
        computes = arithmetic >= traffic
        compute, memory = float(seconds[computes].sum()), float(seconds[~computes].sum())
        launch = self._host_seconds(work, calls, stage == "backward") - compute - memory
        sums = np.bincount(work.kinds, seconds, len(work.names))
        by_class = dict(zip(work.names, sums.tolist(), strict=True))
        return TimeBreakdown(compute, memory, max(0.0, launch), by_class=by_class)

    @cached_property
    def _rounded(self) -> Roofline:
        """The same device where it computes in float32 with rounded factors."""
        software = replace(self.software, precision="float32", matmul_tf32=True, conv_tf32=True)
        return Roofline(self.card, software, cores=self._units, known=self._known)

    def _seconds_a_flop(self, work: KernelColumns) -> Floats:
        rates = [1 / self._rate(name if name in ARITHMETIC else "matmul") for name in work.names]
        return np.array(rates)[work.kinds]

    def _traffic(self, work: KernelColumns, rows: float) -> tuple[Floats, Floats, Floats]:
        """Kernels that are started, seconds of what one of them moves, and of turning its tensors: tensor
        cores want channels last.
        """
        calls = work.calls
        moved = np.maximum(work.bytes[0] + work.bytes[1] * rows, 0.0)
        held = np.minimum(moved, self.card.cache_bytes * self._units)
        traffic = held / self.cache_bandwidth + (moved - held) / self.bandwidth
        if self.software.engine != "eager":
            fused = work.holds("norm", "elementwise")
            known = self._known
            calls = np.where(fused, calls * known.of("fusion_kernels", "compile"), calls)
            traffic = np.where(fused, traffic * known.of("fusion_bytes", "compile"), traffic)
        turns = not self._cpu and not self.software.channels_last and self.peak("conv")[1]
        return calls, traffic, 2.0 * turns * traffic * work.holds("conv")

    def _host_seconds(self, work: KernelColumns, calls: Floats, backward: bool) -> float:
        """Seconds in which the host hands the kernels out. Python launches a forward pass, the autograd
        engine a backward pass, and autocast the casts of weights, whose size is not the batch's.
        """
        if self._cpu or self.software.engine in ("graphs", "tensorrt"):
            return 0.0
        casts = work.holds("elementwise") & (work.bytes[1] == 0)
        inside = float(calls.sum() if backward else calls[casts].sum())
        python = float(calls.sum()) - inside
        known = self._known
        seconds = python * known.of("host_s", "forward") + inside * known.of("host_s", "backward")
        server = "old server" if self.card.year <= OLD_SERVER else "new server"
        return seconds * known.of("host_factor", self.card.name, server) * self.software.host_factor


NODE_DEVICES = 8


@dataclass(frozen=True)
class ClusterSpec:
    """`count` devices in nodes of `node_devices`, and the wires between."""

    count: int = 1
    node_devices: int = NODE_DEVICES
    network: str = "EFA 400 Gbit"
    mode: str = "ddp"  # or fsdp: gradients, optimiser and average in shards (ZeRO-2)
    shard: str = "grads"  # of fsdp; full: the weights too; hybrid: the same, inside each node
    machine: str = ""  # what the devices stand in, by name

    @property
    def nodes(self) -> int:
        """Machines, the last perhaps not full."""
        return -(-self.count // self.node_devices)

    def describe(self, card: Card) -> str:
        """Machines, links and network in one line."""
        inside = f"{min(self.count, self.node_devices)} on {card.link}"
        between = f", {self.nodes} machines on {self.network}" if self.nodes > 1 else ""
        return f"{self.machine or 'machine'}: {inside}{between}"

    @property
    def shards(self) -> int:
        """Devices that share what is sharded."""
        if self.mode != "fsdp":
            return 1
        return min(self.count, self.node_devices) if self.shard == "hybrid" else self.count

    @property
    def sharded(self) -> bool:
        """Whether weights' masters are cut among devices; one device alone has nothing to cut."""
        return self.mode == "fsdp" and self.count > 1

    @property
    def gathers(self) -> bool:
        """Whether the weights are cut too, and gathered block by block, forward and backward."""
        return self.mode == "fsdp" and self.shard != "grads"

    @property
    def sharing(self) -> ClusterSpec:
        """The devices that hold one copy of the weights between them."""
        return replace(self, count=self.shards) if self.mode == "fsdp" else self


def default_cluster(
    card: Card,
    count: int,
    mode: str = "ddp",
    network: str | None = None,
    *,
    machine: str | None = None,
    node_devices: int | None = None,
    shard: str = "grads",
) -> ClusterSpec:
    """What such a card usually stands in (machines.csv), as far as nothing else is said."""
    name = machine or card.machine
    usual = machines().get(name)
    each = node_devices or (usual.devices if usual else NODE_DEVICES)
    between = network or (usual.network if usual else "TCP 100 Gbit")
    return ClusterSpec(count, each, between, mode, shard, name)


def all_reduce_s(card: Card, cluster: ClusterSpec, size_bytes: float, known: Efficiency) -> float:
    """Seconds in which all devices have the sum of what each holds (so many bytes)."""
    if cluster.count == 1:
        return 0.0
    table = networks()
    link = table.get(card.link, table["PCIe 4.0 x16"])
    pace = known.values.get(("link_bytes_s", card.name))  # measured on this machine
    if pace is None:
        pace = link.bandwidth_bytes_s * known.of("network", "fast")
    inside = min(cluster.count, cluster.node_devices)
    latency_s = (cluster.count - cluster.nodes) * link.latency_s
    if cluster.nodes > 1:
        wire = table[cluster.network]
        kind = next((name for name in ("TCP", "EFA") if cluster.network.startswith(name)), "fast")
        between = wire.bandwidth_bytes_s * known.of("network", kind)
        pace = min(pace, between * (inside if wire.per in ("gpu", "port") else 1))
        latency_s += cluster.nodes * wire.latency_s
    return 2 * ((cluster.count - 1) / cluster.count * size_bytes / pace + latency_s)


def host_copy_bytes_s(card: Card, known: Efficiency) -> tuple[float, bool]:
    """Bytes a second from pinned main memory to a card, and whether that was measured; else it is PCIe's, of
    its fourth generation where the card's own link is between cards.
    """
    measured = known.values.get(("copy_bytes_s", card.name))
    if measured is not None:
        return measured, True
    table = networks()
    link = table[card.link if card.link.startswith("PCIe") else "PCIe 4.0 x16"]
    return link.bandwidth_bytes_s * known.of("network", "fast"), False


def exposed_s(communication_s: float, backward_s: float, known: Efficiency) -> float:
    """What communication adds to a step: what does not hide behind the backward pass, and by how much the
    rest slows that, since its kernels take cores and bandwidth.
    """
    hidden = min(communication_s, known.of("overlap", "ddp") * backward_s)
    return communication_s - hidden + known.of("contention", "ddp") * hidden
