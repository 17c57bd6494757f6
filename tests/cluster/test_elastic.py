"""Workers come and go: the same order, the same loss to a stated bound, and no pause is a failure."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cluster_train import command, content, environment, recipe, trained, weights, workers_of

import warm
from darkroom.cluster.connect import Capacity
from darkroom.cluster.train import Placement, _workers
from darkroom.cluster.worker import (
    PLACING,
    PLACING_S,
    WATCHER,
    Mail,
    WorkerRange,
    allowed_counts,
    job_trainer,
    rounded_down,
)
from darkroom.errors import InputError, RecipeError
from darkroom.recipe import make_recipe
from darkroom.train.run import train

__all__ = ["recipe"]  # the fixture

pytestmark = pytest.mark.xdist_group("ray")
STEADY = "STEADY"
NODE: dict[str, Any] = {
    "num_cpus": 1,
    "num_gpus": 0,
    "object_store_memory": 80 * 1024**2,
    "include_log_monitor": False,
    "resources": {f"accelerator_type:{STEADY}": 1},
}
BOUND = 1e-6  # of the loss, in the steps right after a change


def losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines) if "loss" in entry}


class Driver:
    """A training command on a cluster, whose lines can be waited for."""

    def __init__(self, *arguments: Any, out: Path) -> None:
        self.said: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self.process = warm.Popen(
            command(*arguments), stdout=warm.PIPE, stderr=warm.STDOUT, text=True, env=environment(out)
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_for(self, words: str, timeout_s: float = 600) -> str:
        """The line that matches, once it came after all that were waited for before."""
        until = time.monotonic() + timeout_s
        with suppress(queue.Empty):
            while line := self._lines.get(timeout=max(0.0, until - time.monotonic())):
                self.said.append(line)
                if re.search(words, line):
                    return line
        raise AssertionError(f"'{words}' was not said: " + "".join(self.said[-30:]))

    def end(self, number: int | None = None) -> int:
        """The exit code; `said` holds all lines then."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=600)
        self._reader.join(10)
        while not self._lines.empty():
            self.said.append(self._lines.get())
        return code


@pytest.mark.nightly
def test_a_lost_node_leaves_fewer_workers_and_an_added_one_is_used(head, recipe, tmp_path):
    nodes = [head.add_node(**NODE) for _ in range(2)]
    head.wait_for_nodes()
    out, many = tmp_path / "run", "train.steps=100000"
    asked = ["--engine", "ray", "--ray-address", head.address, "--accelerator", STEADY, "--workers", "1:4"]
    driver = Driver(recipe, out, *asked, many, "checkpoint.every=5", "train.log_every=1", out=out)
    try:
        driver.wait_for("2 processes .ddp")
        driver.wait_for("step +20/")
        busy = nodes_of(workers_of(out), nodes)
        head.remove_node(busy[0], allow_graceful=False)
        driver.wait_for("workers were lost and are started again .1 of at most 3")
        went_on = driver.wait_for("going on after step ")
        driver.wait_for(r"step +\d+/")
        assert len(workers_of(out)) == 1
        nodes += [head.add_node(**NODE) for _ in range(4)]  # five now, but five do not divide eight
        driver.wait_for(r"the cluster now fits 4 workers instead of [12]: saving, then going on")
        driver.wait_for("4 processes .ddp")
        driver.wait_for(r"step +\d+/")
        assert len(workers_of(out)) == 4
        assert driver.end(signal.SIGTERM) == 1
    finally:
        driver.process.kill()
        for node in nodes:
            if node in head.worker_nodes:
                head.remove_node(node)
    assert "saved; the same command goes on" in "".join(driver.said)
    lost_at = int(went_on.split("going on after step ")[1].split()[0].rstrip(",;:."))
    last = min(lost_at + 20, max(losses(out)))
    trained(recipe, tmp_path / "calm", f"train.steps={last}", "train.log_every=1")
    mine, calm = losses(out), losses(tmp_path / "calm")
    steps = range(1, last + 1)
    assert [mine[k] for k in steps] == pytest.approx([calm[k] for k in steps], abs=BOUND)
    alone = ["parallel.mode=none", "parallel.devices=auto", f"train.steps={last}", "train.log_every=1"]
    other = make_recipe(yaml.safe_load(recipe.read_text()), [*alone, "train.seed=1"])
    train(other, out=tmp_path / "other", console=lambda _: None)
    assert losses(tmp_path / "other")[last] != pytest.approx(calm[last], abs=BOUND)


@pytest.mark.nightly
def test_a_drained_node_is_left_before_it_goes(head, recipe, tmp_path):
    nodes = [head.add_node(**NODE) for _ in range(2)]
    head.wait_for_nodes()
    out, longer = tmp_path / "run", "train.steps=100000"
    asked = ["--engine", "ray", "--ray-address", head.address, "--accelerator", STEADY, "--workers", "1:2"]
    driver = Driver(recipe, out, *asked, "--max-failures", "0", longer, "checkpoint.every=1000", out=out)
    try:
        driver.wait_for("2 processes .ddp")
        driver.wait_for(r"step +\d+/")
        going = nodes_of(workers_of(out), nodes)[0]
        drain(head.address, going.node_id)
        driver.wait_for("a machine is about to be taken away: saving, then going on")
        step = int(driver.wait_for("going on after step ").split("after step ")[1].split()[0].rstrip(",;:."))
        assert 0 < step < 1000  # no checkpoint was due before
        driver.wait_for(r"step +\d+/")
        assert len(workers_of(out)) == 1
        assert going not in nodes_of(workers_of(out), nodes)
        head.remove_node(going, allow_graceful=False)  # nobody is there any more
        for _ in range(4):
            driver.wait_for(r"step +\d+/")
        assert driver.end(signal.SIGTERM) == 1, driver.said
    finally:
        driver.process.kill()
        for node in nodes:
            if node in head.worker_nodes:
                head.remove_node(node)
    assert "workers were lost" not in "".join(driver.said)
    told = "".join(driver.said).partition("about to be taken away")[2]
    # Where the drained node is counted, Ray waits for room on it and leaves the other's free meanwhile.
    assert not re.search(r"waiting for 1 workers .* free: [1-9]", told), told
    trained(recipe, tmp_path / "calm", f"train.steps={step + 20}", "train.log_every=1")
    mine, calm = losses(out), losses(tmp_path / "calm")
    logged = [k for k in mine if k <= step + 20]
    assert max(logged) > step
    assert [mine[k] for k in logged] == pytest.approx([calm[k] for k in logged], abs=BOUND)


def drain(address: str, node_id: str) -> None:
    """As a cloud's notice or an autoscaler would: this node goes in ten minutes."""
    told = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--node-id", node_id]
    minutes = ["--deadline-remaining-seconds", "600"]
    ray = Path(sys.executable).with_name("ray")
    subprocess.run([ray, "drain-node", "--address", address, *told, *minutes], check=True, timeout=240)


def nodes_of(pids: list[int], nodes: list[Any]) -> list[Any]:
    """The raylets that these workers belong to."""
    found = []
    for pid in pids:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        found += [node for node in nodes if parent in pids_of(node)]
    assert found
    return found


def pids_of(node: Any) -> list[int]:
    return [info.process.pid for infos in node.all_processes.values() for info in infos]


@pytest.mark.nightly
def test_a_worker_that_is_told_to_end_saves_first(recipe, tmp_path):
    out, longer = tmp_path / "run", "train.steps=120"
    asked = ["--engine", "ray", "--ray-address", "local", "--workers", "1:2", "--max-failures", "0"]
    driver = Driver(recipe, out, *asked, longer, "checkpoint.every=1000", out=out)
    driver.wait_for("step +20/")
    os.kill(workers_of(out)[-1], signal.SIGTERM)
    driver.wait_for("was asked to stop: saving, then going on")
    step = int(driver.wait_for("going on after step ").split("after step ")[1].split()[0].rstrip(",;:."))
    assert step >= 20  # no checkpoint was due before the end
    assert driver.end() == 0, driver.said
    assert "workers were lost" not in "".join(driver.said)
    trained(recipe, tmp_path / "calm", longer)
    assert weights(out) == weights(tmp_path / "calm")
    bill = json.loads((out / "bill.json").read_text())
    assert bill["sessions"] == 2


def test_room_is_not_waited_for_a_minute_where_fewer_workers_would_do(monkeypatch) -> None:
    """A machine that was lost is counted until Ray notices; only choosing anew helps."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    monkeypatch.delenv(PLACING, raising=False)
    seen = []

    def run(self: Any, **controlled: Any) -> None:
        seen.append(os.environ.get(PLACING))

    monkeypatch.setattr(TorchTrainer, "_initialize_and_run_controller", run)
    for counts, span in (([1, 2], (1, 2)), ([2], 2)):
        job = {"train_loop_per_worker": print, "scaling_config": ScalingConfig(num_workers=span)}
        job_trainer(counts, None, local=False, **job)._initialize_and_run_controller()
    assert seen == [PLACING_S, None]  # a fixed number has nothing else to choose
    assert PLACING not in os.environ


def test_a_span_is_read_and_told() -> None:
    assert WorkerRange.parsed("4") == WorkerRange(4, 4)
    assert WorkerRange.parsed("2:8") == WorkerRange(2, 8)
    assert (str(WorkerRange(4, 4)), str(WorkerRange(2, 8))) == ("4", "2:8")
    for given in ("0", "8:2", "x", "2:", ":2", "-1", "1.5", "0:2"):
        with pytest.raises(InputError, match=r"allowed: N, or MIN:MAX, 1 or more: 4, 2:8"):
            WorkerRange.parsed(given)


def test_only_counts_that_divide_the_batch_are_taken() -> None:
    eight = make_recipe(content(Path("x.lance")), ["train.micro_batch=auto"])
    assert allowed_counts([eight.train], WorkerRange(1, 8)) == [1, 2, 4, 8]
    in_twos = make_recipe(content(Path("x.lance"))).train
    assert allowed_counts([in_twos], WorkerRange(1, 8)) == [1, 2, 4]  # micro-batches of 2
    with pytest.raises(RecipeError, match="8 .micro_batch auto. over 5:7 processes"):
        allowed_counts([eight.train], WorkerRange(5, 7))
    assert [rounded_down(n, [2, 4, 8]) for n in (1, 2, 3, 7, 100)] == [0, 2, 2, 4, 8]
    room = Capacity(((3, 0),))
    assert _workers([eight.train], eight.parallel, Placement(workers=WorkerRange(2, 8)), room) == [2, 4, 8]
    with pytest.raises(InputError, match="4 workers of 1 CPUs each: the cluster's nodes fit 3"):
        _workers([eight.train], eight.parallel, Placement(workers=WorkerRange(3, 8)), room)


def test_counts_share_the_batch_of_every_phase() -> None:
    told = "phases=[{resolution: 16, samples: 80}, {resolution: 32, samples: 60, global_batch: 6}]"
    two = make_recipe(content(Path("x.lance")), ["train.micro_batch=auto", told])
    phases = [one.train for _, one in two.in_phases(Path())]
    assert allowed_counts(phases, WorkerRange(1, 8)) == [1, 2]  # 4 and 8 do not share 6
    with pytest.raises(RecipeError, match="6 over 4 processes"):
        allowed_counts(phases, WorkerRange(4, 4))
    with pytest.raises(RecipeError, match="train.global_batch: 8 and 6"):
        allowed_counts(phases, WorkerRange(4, 8))


def test_a_pause_is_no_failure_and_is_over_when_the_next_begin() -> None:
    mail = Mail()
    assert mail.begin() == (1, 0)
    assert (mail.stops(), mail.leave(), mail.end_pause()) == (False, False, False)
    mail.ask_pause("there is room")
    mail.ask_pause("told to end")
    assert mail.take() == ["there is room: saving, then going on"]
    assert (mail.stops(), mail.leave()) == (True, True)
    assert mail.end_pause()
    assert (mail.stops(), mail.begin()) == (False, (2, 1))
    assert mail.newly_lost() == 0
    assert not mail.end_pause()  # a worker that is lost now is lost
    assert mail.begin() == (3, 1)
    assert (mail.newly_lost(), mail.newly_lost()) == (1, 0)
    mail.ask_pause("again")
    mail.ask_stop()
    assert not mail.leave()  # the user's stop is for good


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("given", [None, "1"])
def test_ray_train_starts_what_the_job_has_a_use_for(monkeypatch, local: bool, given: str | None) -> None:
    """A Ray that ends with the job needs nobody who looks for nodes that go, unless the user says so."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.execution.scaling_policy import create_scaling_policy

    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    monkeypatch.delenv(WATCHER, raising=False)
    if given is not None:
        monkeypatch.setenv(WATCHER, given)
    seen, policies = [], []

    def run(self: Any, **controlled: Any) -> None:
        seen.append(os.environ.get(WATCHER))
        policies.append(controlled["scaling_policy"])

    monkeypatch.setattr(TorchTrainer, "_initialize_and_run_controller", run)
    job = {"train_loop_per_worker": print, "scaling_config": ScalingConfig(num_workers=1)}
    trainer = job_trainer([1], None, local=local, **job)
    kinds = {type(one).__name__ for one in trainer._create_default_callbacks()}
    plain = {type(one).__name__ for one in TorchTrainer(**job)._create_default_callbacks()}
    assert plain - kinds == {"DatasetsCallback", *(["PlacementGroupCleanerCallback"] if local else [])}
    assert kinds < plain
    rays = create_scaling_policy(ScalingConfig(num_workers=1))
    trainer._initialize_and_run_controller(scaling_policy=rays)
    assert seen == [given or ("0" if local else None)]
    assert os.environ.get(WATCHER) == given  # the next job may be on a cluster
    assert (policies[0] is rays) is not local
    if local:  # nobody is asked for nodes, and the decision is the same
        policies[0].after_controller_start(None)
        assert policies[0]._coordinator_client is None
        decision = policies[0].make_decision_for_non_running_worker_group()
        assert (decision.num_workers, decision.resources_per_worker) == (1, {"CPU": 1})
        policies[0].before_controller_abort()
