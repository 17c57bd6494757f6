"""Replicas under Ray Serve: one queue, any replica answers, adapters lie in one place, none is missed."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import sqlalchemy as sql
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

import warm
from darkroom import models, sample
from darkroom.cli.application import app as cli
from darkroom.cluster.serve import ByQueue, OnRay, Replicas, application, run, shared, stop_gently
from darkroom.errors import InputError
from darkroom.models.adapters.adapter import Adapter, Layer
from darkroom.models.adapters.read import adaptable, write_adapter
from darkroom.serve.settings import ServeSettings

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"unet": {"block_out_channels": [16, 32]}, "vae": {"block_out_channels": [8, 16, 16]}}
pytestmark = pytest.mark.xdist_group("ray")
START_S, JOBS_S = 240, 240
STYLES = ("style0", "style1")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> SimpleNamespace:
    """A small model and two adapters, on disk and at hand."""
    folder = tmp_path_factory.mktemp("served")
    model = models.create("tiny", seed=1, overrides=SMALL)
    models.save(model, folder / "model")
    (folder / "adapters").mkdir()
    for i, name in enumerate(STYLES):
        draw = torch.Generator().manual_seed(i)
        layers = {}
        for path, layer in adaptable(model).items():
            if path.startswith("unet.") and path.endswith(("to_q", "to_v")):
                out, into = layer.weight.shape
                layers[path] = Layer(
                    torch.randn(2, into, generator=draw) / into**0.5, torch.randn(out, 2, generator=draw)
                )
        write_adapter(Adapter(name, layers), folder / "adapters" / f"{name}.safetensors")
    return SimpleNamespace(model=model, folder=folder)


class OnOneMachine:
    """`darkroom serve --engine ray` as a process."""

    def __init__(self, small: SimpleNamespace, url: str, log: Path) -> None:
        self.log, self.jobs = log, url
        command = [sys.executable, "-m", "darkroom", "serve", str(small.folder / "model"), "--port", "0"]
        command += ["--adapters", str(small.folder / "adapters"), "--jobs", url, "--name", "on-ray"]
        command += ["--engine", "ray", "--replicas", "2", "--ray-address", "local", "--replica-cpus", "0.5"]
        command += ["--adapter-affinity-timeout", "60", "--lease", "3", "--drain", "5", "--capacity", "4"]
        with log.open("w") as to:
            self.process = warm.Popen(
                command, stdout=to, stderr=to, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        start = time.monotonic()
        while "listening on" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() - start < START_S, self.log.read_text()
            time.sleep(0.2)
        self.http = httpx.Client(
            base_url=self.log.read_text().split("listening on ")[1].split()[0], timeout=90
        )

    def put(self, name: str, **body: Any) -> None:
        answer = self.http.put(f"/jobs/{name}", json={"prompt": "a red circle", "steps": 4, **body})
        assert answer.status_code == 202, answer.text

    def done(self, name: str) -> dict[str, Any]:
        start = time.monotonic()
        while time.monotonic() - start < JOBS_S:
            answer = self.http.get(f"/jobs/{name}?wait_s=20")
            if answer.status_code == 200 and answer.json()["state"] in ("done", "failed", "cancelled"):
                return dict(answer.json())
        raise AssertionError(self.http.get(f"/jobs/{name}").text)

    def picture(self, name: str) -> np.ndarray:
        png = self.http.get(f"/jobs/{name}/pictures/0").content
        return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)

    def rows(self) -> dict[str, Any]:
        """What the database has of each job: state, attempts, and who drew it."""
        engine = sql.create_engine(self.jobs)
        with engine.connect() as connection:
            found = connection.execute(
                sql.text("SELECT id, state, attempts, result FROM darkroom_jobs")
            ).all()
        engine.dispose()
        return {job: (state, tries, json.loads(result).get("server")) for job, state, tries, result in found}

    def replicas(self) -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in below if "ServeReplica" in " ".join(one.cmdline())]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


@pytest.fixture(scope="module")
def on_ray(small, postgres, tmp_path_factory) -> Iterator[OnOneMachine]:
    server = OnOneMachine(small, postgres, tmp_path_factory.mktemp("logs") / "serve.log")
    yield server
    if server.process.poll() is None:
        server.stop()


def test_a_first_signal_drains_and_a_second_leaves_at_once(monkeypatch):
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    stop = threading.Event()
    stop_gently(stop)
    assert stop.is_set()
    assert left == []
    stop_gently(stop)
    assert left == [0]


def test_one_replica_serves_what_generate_draws(laptop, small, postgres, caplog):
    """On the Ray that is there, until SIGTERM; each job by the model that it names."""
    second = models.create("tiny", seed=2, overrides=SMALL)
    models.save(second, small.folder / "second")
    settings = ServeSettings(
        model=str(small.folder / "model"),
        more_models=(str(small.folder / "second"),),
        jobs=postgres,
        name="one",
        port=0,
        drain_s=1,
        capacity=2,
        lease_s=5,
    )
    drawn: list[np.ndarray] = []

    def draw() -> None:
        try:
            until = time.monotonic() + START_S
            while "listening on" not in caplog.text:
                assert time.monotonic() < until
                time.sleep(0.05)
            address = caplog.text.split("listening on ")[1].split()[0]
            with httpx.Client(base_url=address, timeout=90) as http:
                body = {"prompt": "a red circle", "steps": 2, "seed": 3}
                for name, more in (("first", {}), ("other", {"model": "second"})):
                    assert http.put(f"/jobs/{name}", json={**body, **more}).status_code == 202
                    while http.get(f"/jobs/{name}?wait_s=20").json()["state"] != "done":
                        assert time.monotonic() < until
                    png = http.get(f"/jobs/{name}/pictures/0").content
                    drawn.append(np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with caplog.at_level("INFO", logger="darkroom.serve"), ThreadPoolExecutor(1) as pool:
            asked = pool.submit(draw)
            run(settings, Replicas(), laptop.address)
            asked.result()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "stopping: every replica finishes" in caplog.text
    wanted = [
        np.asarray(sample.generate(model, "a red circle", steps=2, seed=3)[0].image.convert("RGB"))
        for model in (small.model, second)
    ]
    for i in range(2):
        assert np.abs(drawn[i] - wanted[i].astype(int)).max() <= 1
        assert np.abs(drawn[i] - wanted[1 - i].astype(int)).max() >= 10


@pytest.mark.nightly
def test_two_replicas_serve_as_one(on_ray, small):
    for i in range(3):
        on_ray.put(f"plain{i}", seed=i)
    assert {on_ray.done(f"plain{i}")["state"] for i in range(3)} == {"done"}
    alone = [sample.generate(small.model, "a red circle", steps=4, seed=i)[0].image for i in range(3)]
    for i in range(3):
        wanted = np.asarray(alone[i].convert("RGB")).astype(int)
        assert np.abs(on_ray.picture(f"plain{i}") - wanted).max() <= 1
        assert np.abs(on_ray.picture(f"plain{(i + 1) % 3}") - wanted).max() >= 10
    # Adapters: where the first job of a style was drawn, all others are, whichever replica took them in.
    for style in STYLES:
        on_ray.put(f"{style}-first", adapters=[{"name": style}])
    for style in STYLES:
        assert on_ray.done(f"{style}-first")["state"] == "done"
    for i in range(5):
        for style in STYLES:
            on_ray.put(f"{style}-{i}", seed=i, adapters=[{"name": style}])
            assert on_ray.done(f"{style}-{i}")["state"] == "done"
    rows = on_ray.rows()
    for style in STYLES:
        first = rows[f"{style}-first"][2]
        assert [rows[f"{style}-{i}"][2] for i in range(5)] == [first] * 5
    _kill_one(on_ray)
    assert on_ray.stop() == 0


def _kill_one(server: OnOneMachine) -> None:
    """A replica is killed while both draw: every job that was accepted is done, once."""
    names = [f"long{i}" for i in range(8)]
    for i, name in enumerate(names):
        server.put(name, seed=i, steps=120)
    start = time.monotonic()
    while len(owners := _owners(server)) < 2:
        assert time.monotonic() - start < JOBS_S, "only one replica draws"
        time.sleep(0.05)
    [victim, _] = server.replicas()
    victim.kill()
    jobs = [server.done(name) for name in names]
    assert [job["state"] for job in jobs] == ["done"] * len(names)
    rows = server.rows()
    again = [name for name in names if rows[name][1] > 1]
    assert again, "no job was drawn again"
    assert len({rows[name][2] for name in again} & owners) <= 1  # the one that was left, or a new one


def _owners(server: OnOneMachine) -> set[str]:
    engine = sql.create_engine(server.jobs)
    query = "SELECT DISTINCT owner FROM darkroom_leases WHERE steps_done > 0"
    with engine.connect() as connection:
        found = {row[0] for row in connection.execute(sql.text(query))}
    engine.dispose()
    return found


def test_the_queue_says_how_many_replicas():
    def context(waiting: list[float], drawn: list[float]) -> Any:
        told = {
            "waiting": dict(enumerate(waiting)),
            "drawn": dict(enumerate(drawn)),
        }
        return SimpleNamespace(aggregated_metrics=told if waiting else {}, target_num_replicas=3)

    policy = ByQueue(jobs_per_replica=8.0)
    assert policy(context([], []))[0] == 3  # nothing told yet: as it is
    assert policy(context([0, 0], [0, 0]))[0] == 0
    assert policy(context([20, 20], [2, 3]))[0] == 4  # 20 wait, told by both; 5 are drawn
    assert policy(context([0, 0], [8, 9]))[0] == 3


def test_what_ray_cannot_share_is_refused():
    with pytest.raises(InputError, match="postgresql"):
        shared(ServeSettings(model="x"))
    with pytest.raises(InputError, match="postgresql"):
        shared(ServeSettings(model="x", jobs="sqlite:///x.db"))
    with pytest.raises(ValueError, match="at least 3 and at most 2"):
        Replicas(least=3, most=2)


def test_the_deployment_file_makes_an_application():
    from ray.serve.schema import ServeDeploySchema

    told = yaml.safe_load((ROOT / "deploy" / "ray-serve.yaml").read_text())
    schema = ServeDeploySchema.model_validate(told)
    [described] = schema.applications
    assert described.import_path == "darkroom.cluster.serve:app"
    args = OnRay.model_validate(described.args)
    made = application(args.settings, args.replicas)
    bound = made._bound_deployment
    assert bound._deployment_config.autoscaling_config.max_replicas == args.replicas.most
    assert bound.init_args[0]["shared"] is True
    config = bound._deployment_config
    assert bound.init_args[0]["limits"]["watchers"] <= config.max_ongoing_requests / 2
    assert 0 < config.max_queued_requests <= config.max_ongoing_requests
    with pytest.raises(ValueError, match="replica_count"):
        OnRay.model_validate({**described.args, "replica_count": 2})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--replicas", "2"], "--replicas with --engine local"),
        (["--engine", "spark"], "--engine spark"),
        (["--engine", "ray", "--replicas", "3:2", "--jobs", "postgresql+psycopg://x"], "--replicas 3:2"),
        (["--engine", "ray", "--replicas", "many", "--jobs", "postgresql+psycopg://x"], "--replicas many"),
        (["--engine", "ray", "--replica-cpus", "0", "--jobs", "postgresql+psycopg://x"], "--replica-cpus"),
        (["--engine", "ray"], "--engine ray without a database"),
        (["--engine", "ray", "--jobs", "postgresql+psycopg://x", "--host", "0.0.0.0"], "--host 0.0.0.0"),
    ],
)
def test_the_command_line_refuses_by_name(given, told):
    result = CliRunner().invoke(cli, ["serve", "model", *given])
    assert isinstance(result.exception, InputError)
    assert told in str(result.exception)
