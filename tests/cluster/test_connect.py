"""Joining a cluster, and what is said where there is none that fits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from darkroom.cluster.connect import Cluster, _refused, _too_slow, worker_environment
from darkroom.errors import DarkroomError, InputError

pytestmark = pytest.mark.xdist_group("ray")
SCRIPT = """
import os, sys, time
import ray
from darkroom.cluster.connect import connected
from darkroom.errors import DarkroomError
if {blind!r}:  # a machine on which no process runs
    ray._private.services.psutil.PROCFS_PATH = {blind!r}
for address in {addresses!r}:
    try:
        with connected(address, num_cpus=1 if address == "local" else None) as cluster:
            spins = ray.remote(num_cpus=0)(lambda: os.environ["GOMP_SPINCOUNT"]).remote()
            mode = os.environ.get("RAY_AUTH_MODE")
            print("told", cluster.local, cluster.nodes, cluster.cpus, ray.get(spins), mode, flush=True)
            if {waits!r}:
                time.sleep(60)
    except DarkroomError as error:
        print("refused", error.exit_code, error)
    except KeyboardInterrupt:
        print("stopped", os.environ.get("RAY_AUTH_MODE"), flush=True)
"""


def asking(*addresses: str | None, blind: Path | str = "", waits: bool = False, **given: str) -> Any:
    """A process of its own that connects to one after the other, in an environment that names no cluster."""
    code = SCRIPT.format(addresses=addresses, blind=str(blind), waits=waits)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_AD", "RAY_AUTH"))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=clean | given, **pipes)


def told_by(*addresses: str | None, **given: Any) -> list[str]:
    """What such a process prints: one line an address."""
    with asking(*addresses, **given) as process:
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert len(said.splitlines()) == len(addresses), said
    return said.splitlines()


def test_a_missing_cluster_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()  # a process that is gone
    addresses = ("auto", "127.0.0.1:1", "ray://127.0.0.1:10001", "nonsense")
    told = told_by(*addresses, blind=tmp_path, RAY_TMPDIR=str(tmp_path))
    assert all(line.startswith("refused 2 ") for line in told)
    assert "there is no Ray cluster on this machine; start one with 'ray start --head'" in told[0]
    assert "no Ray cluster answers at 127.0.0.1:1" in told[1]
    assert "allowed: auto, local, HOST:PORT" in told[2]
    assert "allowed: auto, local, HOST:PORT" in told[3]


def test_a_running_cluster_is_joined_by_its_address_and_by_that_of_the_environment(laptop) -> None:
    assert told_by(laptop.address) == ["told False 1 2.0 10000 None"]
    [missing] = told_by(None, RAY_ADDRESS="127.0.0.1:1")
    assert "no Ray cluster answers at 127.0.0.1:1" in missing


def test_a_ray_of_this_machine_leaves_nothing_in_the_home_and_sigterm_is_as_ctrl_c(tmp_path: Path) -> None:
    """Ray's own would leave a token that all later clusters want, and dump its stack on SIGTERM."""
    with asking("local", waits=True, HOME=str(tmp_path)) as process:
        assert process.stdout.readline() == "told True 1 1.0 10000 token\n"
        process.terminate()
        said, errors = process.communicate(timeout=240)
    assert (process.returncode, said) == (0, "stopped None\n")
    assert "SIGTERM received" not in errors
    assert list(tmp_path.iterdir()) == []


def noted_address(folder: Path) -> str:
    """Where Ray notes the cluster's address, just after it has printed that it runs."""
    until = time.monotonic() + 30
    while not (address := "".join(file.read_text().strip() for file in folder.rglob("ray_current_cluster"))):
        assert time.monotonic() < until
        time.sleep(0.05)
    return address


@pytest.mark.nightly
def test_a_cluster_with_a_token_is_joined_with_the_users(tmp_path: Path) -> None:
    """Also after a Ray of this machine, which has another token; each time the environment is as before."""
    token, home = "ab" * 32, tmp_path / "home"
    (home / ".ray").mkdir(parents=True)
    place = {"HOME": str(home), "RAY_TMPDIR": tempfile.mkdtemp(prefix="ray-")}
    start = [Path(sys.executable).with_name("ray"), "start", "--head", "--port", "0", "--num-cpus", "1"]
    start += ["--include-dashboard", "false", "--block"]
    given = os.environ | place | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with subprocess.Popen(start, env=given, stdout=subprocess.PIPE, text=True) as head:
        try:
            next(line for line in head.stdout if "Ray runtime started" in line)
            address = noted_address(Path(place["RAY_TMPDIR"]))
            [refused] = told_by(address, **place)
            told = f"refused 2 the Ray cluster at {address} wants a token, and there is none here"
            assert refused.startswith(told)
            (home / ".ray" / "auth_token").write_text(token)
            told = told_by(address, "local", address, **place)
            joined = "told False 1 1.0 10000 token"
            assert told == [joined, "told True 1 1.0 10000 token", joined]
            (home / ".ray" / "auth_token").write_text("cd" * 32)
            [other] = told_by(address, **place)
            assert f"the Ray cluster at {address} refuses the token from ~/.ray/auth_token" in other
        finally:
            head.terminate()
            head.stdout.close()
    shutil.rmtree(place["RAY_TMPDIR"])


def test_accelerators_that_a_machine_lacks_are_named() -> None:
    with pytest.raises(InputError, match="accelerator 'H100' is not in the cluster; allowed: none"):
        Cluster("a:1", 1, 1, 0).require("H100")


def test_a_cluster_of_another_version_is_named_with_both():
    import ray

    error = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.40.0\n    Python: 3.9.2\n"
        "This process on node was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    told = str(_refused(ray, "head:6379", error))
    assert "runs Ray 2.40.0 and Python 3.9.2, this machine Ray " + ray.__version__ in told
    assert "\n" not in told


def test_ray_itself_tells_of_another_version_in_the_words_that_are_read():
    """The reader of Ray's message against the message as this Ray makes it."""
    import ray
    from ray._private.utils import check_version_info

    with pytest.raises(RuntimeError) as caught:
        check_version_info({"ray_version": "1.2.3", "python_version": "3.8.0"}, "this process")
    assert "runs Ray 1.2.3 and Python 3.8.0" in str(_refused(ray, "head:6379", caught.value))


def test_an_accelerator_must_be_there_or_be_planned():
    cluster = Cluster("a:1", 2, 8, 1, {"T4": 1}, frozenset({"H100"}))
    cluster.require(None)
    cluster.require("T4")
    cluster.require("H100")
    with pytest.raises(InputError, match="'A100' is not in the cluster; allowed: H100, T4"):
        cluster.require("A100")
    growing = replace(cluster, planned=frozenset(), grows=True)
    growing.require("A100")
    assert growing.waits_for("A100") == "waits for nodes of type A100: none is up"
    assert growing.waits_for("T4") == growing.waits_for(None) == ""


def test_workers_get_settings_and_no_secrets(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    made = worker_environment()
    assert made["NCCL_DEBUG"] == "INFO"
    assert made["GOMP_SPINCOUNT"] == "7"
    assert "hidden" not in made.values()


def test_a_start_that_takes_too_long_is_one_line():
    """The words are those of this Ray's own source."""
    import inspect

    from ray._private import node

    source = " ".join(inspect.getsource(node).replace('"', " ").split())
    words = "The current node timed out during startup."
    assert words in source
    told = _too_slow(Exception(f"{words} This could happen because some of the raylet failed to startup"))
    assert type(told) is DarkroomError
    assert str(told).startswith("Ray did not start on this machine within the time that it allows")
    assert "\n" not in str(told)
    assert _too_slow(ValueError("another mistake")) is None


@pytest.mark.nightly
def test_the_driver_imports_no_models_that_only_its_workers_need(tmp_path):
    """It had imported all of diffusers and transformers before it looked whether there is a cluster."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task: pretrain\nmodel: {base: tiny}\ndata: {store: none.lance, resolution: 32}\n")
    words = ["darkroom", "train", str(recipe), "--engine", "ray", "--ray-address", "127.0.0.1:1"]
    code = f"""
import sys
from darkroom.cli.application import app
from darkroom.errors import InputError
sys.argv = {words!r}
try:
    app(standalone_mode=False)
except InputError as error:
    print(str(error)[:36], [name for name in ("ray", "diffusers", "transformers") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout.strip() == "no Ray cluster answers at 127.0.0.1:1"[:36] + " ['ray']", ran.stderr
