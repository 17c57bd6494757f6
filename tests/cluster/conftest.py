"""One real Ray for all tests of this folder: a head of 2 CPUs, and nodes where a test adds them.

Tests that use it are one group (`pytestmark = pytest.mark.xdist_group("ray")`, with `--dist loadgroup`), so
that it is started once. `cluster` adds two nodes of 3 CPUs, tagged as the accelerator type SMALL, which CPU
encoders run on. Object stores are small, so that a stage that piles up is noticed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",  # as Ray sets it for the workers: bits depend on it
    "RAY_prestart_worker_first_driver": "0",  # no interpreter that no test asks for
    "REPORTER_UPDATE_INTERVAL_MS": "3600000",  # for a dashboard that nobody looks at
    "RAY_worker_niceness": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "600000",  # idle workers are used again
}
for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)

STORE_BYTES = 200 * 1024**2
SMALL = "SMALL"
NODE: dict[str, Any] = {
    "num_cpus": 3,
    "num_gpus": 0,
    "object_store_memory": STORE_BYTES,
    "include_log_monitor": False,
    "resources": {f"accelerator_type:{SMALL}": 1},
}
"""What `head.add_node(**NODE)` adds."""


CLOSING: list[Callable[[], None]] = []


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A worker of xdist has all tests of the group in a row: Ray goes after the last of them. Else it would
    take memory and time of the thousands that follow, and its driver, the worker, would end where it does.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and "@ray" not in getattr(nextitem, "nodeid", ""):
        while CLOSING:
            CLOSING.pop()()


@pytest.fixture(scope="session")
def head() -> Iterator[Any]:
    """`ray.cluster_utils.Cluster` of a head alone, connected to."""
    import ray
    from ray.cluster_utils import Cluster

    node = {
        "num_cpus": 2,
        "num_gpus": 0,
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
        "include_log_monitor": False,
        "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 3},
    }
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the paths of sockets are
    os.environ["RAY_TMPDIR"] = folder  # also the note of which cluster 'auto' is
    made = Cluster(initialize_head=True, head_node_args=node)

    def close() -> None:
        ray.shutdown()
        made.shutdown()
        del os.environ["RAY_TMPDIR"]
        shutil.rmtree(folder, ignore_errors=True)

    CLOSING.append(close)
    try:
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        while CLOSING:
            CLOSING.pop()()


@pytest.fixture
def laptop(head: Any) -> Any:
    """The head with no other node: one machine of 2 CPUs."""
    import ray

    until = time.monotonic() + 30
    while sum(node["Alive"] for node in ray.nodes()) > 1:
        assert time.monotonic() < until, "a test has left its nodes behind"
        time.sleep(0.1)
    return head


@pytest.fixture(scope="module")
def cluster(head: Any) -> Iterator[Any]:
    """The head and two nodes of SMALL, which are gone after the module's tests."""
    for _ in range(2):
        head.add_node(**NODE)
    head.wait_for_nodes()
    yield head
    for node in list(head.worker_nodes):
        head.remove_node(node)
