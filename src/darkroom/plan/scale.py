"""Many devices: who shares what, what goes over which wire, and how long that takes.

A ring all-reduce moves 2 (n - 1) / n of the gradients past each of its n devices (Patarasuk & Yuan 2009).
NCCL lays its rings through all devices of all nodes and shares them out over a node's network cards, so that
a node sends as much into the network as a device into its link, and the slower of the two sets the pace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from darkroom.hardware.cards import Card, machines, networks
from darkroom.plan.roofline import Efficiency

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


def exposed_s(communication_s: float, backward_s: float, known: Efficiency) -> float:
    """What communication adds to a step: what does not hide behind the backward pass, and by how much the
    rest slows that, since its kernels take cores and bandwidth.
    """
    hidden = min(communication_s, known.of("overlap", "ddp") * backward_s)
    return communication_s - hidden + known.of("contention", "ddp") * hidden
