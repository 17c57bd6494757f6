"""The capacity of a cluster's nodes, and the message of a job that waits for more."""

from __future__ import annotations

from dataclasses import dataclass

from darkroom.cluster.connect import TYPE, Cluster
from darkroom.cluster.private_ray import private

WAIT_SAID_S = 15.0  # how often it is said that a job waits


@dataclass(frozen=True)
class Capacity:
    """What the nodes that workers may go to have: (CPUs, GPUs) of each."""

    nodes: tuple[tuple[float, float], ...]
    grows: bool = False  # more nodes come when they are asked for
    local: bool = False  # of a Ray that was started here and ends with the job

    @property
    def cpus(self) -> float:
        """Of all nodes."""
        return sum(cpus for cpus, _ in self.nodes)

    @property
    def gpus(self) -> float:
        """Of all nodes."""
        return sum(gpus for _, gpus in self.nodes)

    def holds(self, cpus: float, gpus: float) -> int:
        """How many workers of so many CPUs and GPUs fit, each whole on one node."""
        return sum(int(min(has[0] // cpus, has[1] // gpus if gpus else has[0] // cpus)) for has in self.nodes)

    @property
    def largest(self) -> str:
        """The node with the most GPUs, then CPUs, as words."""
        cpus, gpus = max(self.nodes, key=lambda has: has[::-1], default=(0.0, 0.0))
        return f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")


def resources_of_nodes() -> list[dict[str, float]]:
    """What each node that lives has."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def capacity_of(cluster: Cluster, accelerator: str | None) -> Capacity:
    """The nodes that live, of a type where one is asked for."""
    fit = [has for has in resources_of_nodes() if accelerator is None or f"{TYPE}{accelerator}" in has]
    return Capacity(
        tuple((has.get("CPU", 0.0), has.get("GPU", 0.0)) for has in fit), cluster.may_grow, cluster.local
    )


def waiting(what: str, cpus: float, gpus: float, accelerator: str | None) -> str:
    """That a job waits for workers or encoders: what each needs, and what is free on nodes of the type."""
    import ray

    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    fit = {node: has for node, has in nodes.items() if accelerator is None or f"{TYPE}{accelerator}" in has}
    left = private("free_by_node")()
    asked = {kind: amount for kind, amount in (("GPU", gpus), ("CPU", cpus)) if amount}
    needs = [f"{amount:g} {kind}s" for kind, amount in asked.items()]
    free = [
        f"{sum(left.get(node, {}).get(kind, 0) for node in fit):g} of "
        f"{sum(has.get(kind, 0) for has in fit.values()):g} {kind}s"
        for kind in asked
    ]
    if not asked:
        return f"waiting for {what} to start, which share this machine's CPUs with all else"
    of = f" on a node of type {accelerator} ({len(fit)} up)" if accelerator is not None else ""
    return f"waiting for {what} to start: each needs {' and '.join(needs)}{of}; free: {', '.join(free)}"
