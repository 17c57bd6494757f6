"""A cluster that has nothing yet of what is asked for: with --wait-for-autoscaler a job uses what comes."""

from __future__ import annotations

import signal

import pytest
from test_cluster_train import recipe, trained
from test_elastic import NODE as STEADY_NODE
from test_elastic import Driver

__all__ = ["recipe"]  # the fixture

pytestmark = pytest.mark.xdist_group("ray")
LATE = "LATE"
NODE = {**STEADY_NODE, "num_cpus": 2, "resources": {f"accelerator_type:{LATE}": 1}}


@pytest.mark.nightly
def test_a_job_waits_for_a_type_of_nodes_that_comes_later(head, recipe, tmp_path):
    asked = ("--engine", "ray", "--ray-address", head.address, "--accelerator", LATE)
    refused = trained(recipe, tmp_path / "run", *asked, code=2)
    assert f"accelerator '{LATE}' is not in the cluster" in refused
    assert "or say --wait-for-autoscaler" in refused

    asked += ("--wait-for-autoscaler", "train.device=cpu")
    waits = rf"waiting for 2 workers to start: each needs 1 CPUs on a node of type {LATE} \(0 up\); free: "
    stopped = Driver(recipe, tmp_path / "run", *asked, out=tmp_path / "run")
    stopped.wait_for(f"waits for nodes of type {LATE}")
    stopped.wait_for(waits)
    assert stopped.end(signal.SIGTERM) == 1
    assert "stopped while no worker ran; the same command goes on" in "".join(stopped.said)

    driver = Driver(recipe, tmp_path / "run", *asked, out=tmp_path / "run")
    driver.wait_for(waits)
    node = head.add_node(**NODE)
    try:
        driver.wait_for("step 12/12")
        assert driver.end() == 0
    finally:
        head.remove_node(node)
