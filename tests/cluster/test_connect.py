"""Joining a cluster, and what is said where there is none that fits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from darkroom.cluster.connect import Cluster, _refused, _too_slow, worker_environment
from darkroom.errors import DarkroomError, InputError

SCRIPT = """
import sys
from darkroom.cluster.connect import connected
from darkroom.errors import DarkroomError
try:
    with connected({address!r}, accelerator={accelerator!r}, num_cpus=1) as cluster:
        import ray
        seen = ray.get(ray.remote(num_cpus=1)(lambda: __import__("os").environ["GOMP_SPINCOUNT"]).remote())
        print("told", cluster.local, cluster.nodes, cluster.cpus, seen)
except DarkroomError as error:
    print("refused", error.exit_code, error)
"""


def told_by(address: str | None, accelerator: str | None = None, **environment: str) -> str:
    """What a process of its own prints when it connects."""
    code = SCRIPT.format(address=address, accelerator=accelerator)
    clean = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=clean | environment
    )
    assert made.returncode == 0, made.stderr
    assert len(made.stdout.splitlines()) == 1, made.stdout
    return made.stdout.strip()


def clusters_here() -> int:
    """How many clusters' head processes run on this machine, those of other tests included."""
    return sum("gcs_server" in process.info["name"] for process in psutil.process_iter(["name"]))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("auto", "there is no Ray cluster on this machine"),
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("ray://127.0.0.1:10001", "allowed: auto, local, HOST:PORT"),
        ("nonsense", "allowed: auto, local, HOST:PORT"),
    ],
)
def test_a_missing_cluster_is_one_clear_line(address, said, tmp_path):
    others = clusters_here()
    told = told_by(address, RAY_TMPDIR=str(tmp_path))
    if address == "auto" and (others or clusters_here()):
        pytest.skip("another Ray cluster runs on this machine: 'auto' may find it")
    assert told.startswith("refused 2 ")
    assert said in told


def test_the_address_in_the_environment_is_asked_first():
    assert "no Ray cluster answers at 127.0.0.1:1" in told_by(None, RAY_ADDRESS="127.0.0.1:1")


@pytest.mark.slow
def test_without_an_address_one_of_this_machine_is_started_and_missing_accelerators_are_named():
    assert told_by(None) == "told True 1 1.0 10000"
    told = told_by("local", "H100")
    assert told.startswith("refused 2 accelerator 'H100' is not in the cluster; allowed: none")


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


def test_sigterm_is_as_ctrl_c() -> None:
    """Ray's own answer, a dump of the stack and an abort, is nobody's one clear line."""
    code = """
import signal, time
from darkroom.cluster.connect import connected
try:
    with connected("local", num_cpus=1):
        print("up", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("stopped", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""
    clean = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=clean, **pipes) as process:
        assert process.stdout.readline() == "up\n"
        process.terminate()
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "stopped True\n")
    assert "SIGTERM received" not in errors
