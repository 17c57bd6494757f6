"""A real Ray cluster of several raylets on this machine, each with resources of its own.

Head: 2 CPUs, for the driver and training. Two worker nodes of 3 CPUs each are tagged as the accelerator type
SMALL, which CPU encoders run on. Object stores are small, so that a stage that piles up is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as Ray sets it for the workers: bits depend on it

STORE_BYTES = 200 * 1024**2
SMALL = "SMALL"
NODE: dict[str, Any] = {
    "num_cpus": 3,
    "num_gpus": 0,
    "object_store_memory": STORE_BYTES,
    "resources": {f"accelerator_type:{SMALL}": 1},
}
"""What `cluster.add_node(**NODE)` adds."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """`ray.cluster_utils.Cluster` of a head and two nodes, connected to; gone after the module's tests."""
    import ray
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 2,
        "num_gpus": 0,
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
        "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 3},
    }
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.add_node(**NODE)
        made.add_node(**NODE)
        made.wait_for_nodes()
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
