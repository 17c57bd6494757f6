"""A cluster's findings: what is there is measured, and what is wrong is named with what mends it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import warm
from darkroom import cli
from darkroom.cluster import doctor as room
from darkroom.cluster.doctor import About, Node, doctor
from darkroom.errors import InputError
from darkroom.hardware.machine import Check

pytestmark = pytest.mark.xdist_group("ray")
nightly = pytest.mark.nightly


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def node(name: str, resources: dict[str, float] | None = None, probe: Any = None, **about: Any) -> Node:
    plain = About(name, {"ray": "2.60.0", "torch": "2.13.0"}, (), True)
    return Node(name, f"10.0.0.{name[-1]}", resources or {"CPU": 4.0}, probe, replace(plain, **about))


def test_one_machine_is_looked_at(laptop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Through the command line, on a node that does not import torch to say that it has no GPU."""
    monkeypatch.setattr(room, "FILE_BYTES", 2**20)
    asked = ["doctor", "--engine", "ray", "--ray-address", laptop.address, "--json", "--storage"]
    with pytest.raises(SystemExit) as left:
        cli.main([*asked, str(tmp_path)])
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert not left.value.code
    assert "1 node, 2 CPUs (Ray 2.60.0)" in found["cluster"]["detail"]
    assert found["authentication"]["detail"].startswith("off: anyone who reaches")
    assert "torch 2." in found["versions"]["detail"]
    assert found["network"]["detail"] == "one node: nothing goes over a network"
    rate = found["storage read"]["detail"].removeprefix(f"{tmp_path}: ").split()[0]
    assert float(rate.replace(",", "")) > 0.1
    assert all(check["ok"] or check["optional"] for check in found.values())
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        cli.main([*asked, str(tmp_path / "nowhere")])  # the control
    [bad] = [check for check in json.loads(capsys.readouterr().out) if check["name"].startswith("storage")]
    assert not bad["ok"]
    assert "nowhere: cannot be written by" in bad["detail"]


@nightly
def test_a_cluster_that_is_well_is_measured(cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FILE_BYTES", 2**20)
    monkeypatch.setattr(room, "NETWORK_S", 0.3)
    found = by_name(doctor(cluster.address, accelerator="SMALL", storage=str(tmp_path)))
    assert "3 nodes, 8 CPUs, accelerators by node: 2 x SMALL (Ray 2.60.0)" in found["cluster"].detail
    assert found["versions"].ok
    assert "the same on all 3 nodes: python 3." in found["versions"].detail
    assert found["accelerators"].detail == "2 nodes of type SMALL without GPUs"
    assert found["clocks"].ok
    apart_ms = float(found["clocks"].detail.split()[2].replace(",", ""))
    assert apart_ms < 500  # the same clock, asked over a busy machine
    assert "the slowest of 3 pairs" in found["network"].detail
    assert float(found["network"].detail.split()[0]) > 0.01
    assert found["folder"].ok
    for verb in ("write", "read"):
        check = found[f"storage {verb}"]
        assert check.ok
        assert float(check.detail.removeprefix(f"{tmp_path}: ").split()[0].replace(",", "")) > 0.1
        assert check.detail.endswith("(3 nodes at once)")
    assert not list(tmp_path.iterdir())
    assert not found["authentication"].ok
    assert found["authentication"].optional
    assert found["authentication"].detail.startswith("off: anyone who reaches")
    missing = by_name(doctor(cluster.address, storage=str(tmp_path / "nowhere")))
    assert not missing["storage"].ok
    assert "nowhere: cannot be written by" in missing["storage"].detail
    assert "No such file or directory" in missing["storage"].detail
    assert "mount one folder on all nodes" in missing["storage"].mend
    with pytest.raises(InputError, match="accelerator 'H100' is not in the cluster; allowed: SMALL"):
        doctor(cluster.address, accelerator="H100")


@nightly
def test_the_command_line_tells_it_in_json_and_in_one_line_what_is_missing(cluster, tmp_path: Path) -> None:
    def told(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "darkroom", "doctor", *flags]
        return warm.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    done = told("--engine", "ray", "--ray-address", cluster.address, "--json")
    assert done.returncode == 0, done.stderr
    names = [check["name"] for check in json.loads(done.stdout)]
    assert names[:4] == ["cluster", "authentication", "versions", "accelerators"]
    assert names[-2:] == ["storage write", "storage read"]
    gone = told("--engine", "ray", "--ray-address", "127.0.0.1:1")
    assert gone.returncode == 2
    assert gone.stderr.startswith("darkroom: no Ray cluster answers at 127.0.0.1:1")
    assert len(gone.stderr.splitlines()) == 1
    wrong = told("--storage", "x")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "darkroom: --storage with --engine local; allowed: with --engine ray\n",
    )


def test_actors_beside_the_work_do_not_import_torch() -> None:
    code = """
import sys
from darkroom.cluster import connect, doctor, encoders, worker
print(len(doctor.Probe().about(".", 0).versions), "torch" in sys.modules, "lance" in sys.modules)
import darkroom.cluster.feed
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "9 False False\nTrue\n", done.stderr


def test_nodes_that_differ_are_named() -> None:
    usual = {"ray": "2.60.0", "torch": "2.13.0"}
    nodes = [node("a1"), node("b2"), node("c3", versions=usual | {"torch": "2.11.0"})]
    check = room._versions(nodes)
    assert not check.ok
    assert check.detail == "c3 (10.0.0.3) has torch 2.11.0, most have 2.13.0"
    assert "make.py setup ray" in check.mend
    assert room._versions(nodes[:2]).ok


def test_gpus_that_ray_does_not_count_and_those_that_torch_does_not_see() -> None:
    well = node("a1", {"GPU": 1.0, "accelerator_type:A10G": 1.0}, gpus=("NVIDIA A10G",))
    assert [check.detail for check in room._accelerators([well])] == ["1 x NVIDIA A10G (type A10G)"]
    uncounted, unseen = node("b2", gpus=("NVIDIA A10G",)), node("c3", {"GPU": 2.0})
    first, second, _ = room._accelerators([uncounted, unseen])
    assert (first.ok, first.detail) == (False, "b2 (10.0.0.2): torch sees 1, Ray counts 0")
    assert "--num-gpus 1" in first.mend
    assert "CUDA build of torch" in second.mend


def test_a_folder_that_is_not_everywhere_and_a_node_that_is_silent() -> None:
    check = room._folder([node("a1"), node("b2", cwd_seen=False)])
    assert not check.ok
    assert "is not there on b2 (10.0.0.2)" in check.detail
    silent = Node("d", "10.0.0.4", {}, None, None, "No module named 'darkroom'")
    [check] = room._silent([node("a1"), silent])
    assert check.detail == "10.0.0.4 does not answer: No module named 'darkroom'"


@nightly
def test_clocks_that_differ_and_streams_that_do_not_arrive(cluster) -> None:
    import ray

    from darkroom.cluster.doctor import Probe

    class Ahead(Probe):
        def now(self) -> float:
            return super().now() + 60

        def listen(self, streams: int, token: bytes) -> int:
            return super().listen(streams, b"another" + token[7:])

    plain, ahead = (ray.remote(num_cpus=0)(one).remote() for one in (Probe, Ahead))
    nodes = [node("a1", probe=plain), node("b2", probe=ahead)]
    check = room._clock(nodes)
    assert not check.ok
    assert check.detail.endswith(": b2 (10.0.0.2) is ahead of a1 (10.0.0.1)")
    assert 59e3 < float(check.detail.split()[2].replace(",", "")) < 61e3
    here = ray.util.get_node_ip_address()
    for one in nodes:
        one.ip = here
    assert room._rate(nodes[1], nodes[0])[1] == ""
    assert room._rate(nodes[0], nodes[1])[1] == "what was sent did not arrive"


def test_an_address_that_nobody_knows() -> None:
    with pytest.raises(InputError, match=r"--storage nosuch://x .*allowed: a folder, or an address"):
        doctor("local", storage="nosuch://x")
