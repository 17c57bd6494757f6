"""A small model and adapters on disk, a core to call, and real server processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import warm
from darkroom import models
from darkroom.models.adapters.adapter import Adapter, Layer
from darkroom.models.adapters.read import adaptable, write_adapter
from darkroom.serve.api.app import make_app
from darkroom.serve.api.guard import Keys
from darkroom.serve.jobs.core import Core
from darkroom.serve.settings import ServeSettings

DARKROOM = (sys.executable, "-c", "from darkroom.cli.application import main; main()")
SMALL = {"unet": {"block_out_channels": [16, 32]}, "vae": {"block_out_channels": [8, 16, 16]}}
NUM_ADAPTERS = 6
HANGS_S = 240.0
"""Nothing takes so long, on the slowest machine beside other work: what does has hung."""


@pytest.fixture(scope="session")
def small() -> models.Model:
    """The tiny family with half its channels: 32 px, a step in a few milliseconds."""
    return models.create("tiny", seed=1, overrides=SMALL)


@pytest.fixture(scope="session")
def model_folder(small, tmp_path_factory) -> Path:
    """The small model as a folder."""
    folder = tmp_path_factory.mktemp("models") / "small"
    models.save(small, folder)
    return folder


def make_adapter(model: models.Model, name: str, seed: int, rank: int = 2, strength: float = 0.4) -> Adapter:
    """An adapter that visibly changes attention and text encoder."""
    draw = torch.Generator().manual_seed(seed)
    layers = {}
    for path, layer in adaptable(model).items():
        if isinstance(layer, torch.nn.Linear) and path.endswith(("to_q", "to_v", "q_proj", "v_proj")):
            down = torch.randn(rank, layer.in_features, generator=draw) / layer.in_features**0.5
            up = torch.randn(layer.out_features, rank, generator=draw) * strength
            layers[path] = Layer(down, up)
    return Adapter(name, layers)


@pytest.fixture(scope="session")
def adapter_folder(small, tmp_path_factory) -> Path:
    """Adapters `style0` to `style5` of ranks 1 to 6."""
    folder = tmp_path_factory.mktemp("adapters")
    for i in range(NUM_ADAPTERS):
        write_adapter(make_adapter(small, f"style{i}", i, rank=1 + i), folder / f"style{i}.safetensors")
    return folder


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def difference(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of any value of any pixel, in 1/255."""
    return int(np.abs(pixels(one) - pixels(other)).max())


@pytest.fixture
def run_core(model_folder, tmp_path) -> Callable[..., Any]:
    """Calls a coroutine with a core that is ready, in a folder of its own; returns what it returns."""

    def run(scenario: Callable[[Core], Awaitable[Any]], *, wait: bool = True, **settings: Any) -> Any:
        told = {"model": str(model_folder), "state": tmp_path / "state", "capacity": 8, **settings}

        async def whole() -> Any:
            core = Core(ServeSettings(**told))
            await core.start()
            try:
                while wait and core.state == "loading":
                    await asyncio.sleep(0.01)
                return await asyncio.wait_for(scenario(core), HANGS_S)
            finally:
                await core.close()

        return asyncio.run(whole())

    return run


@pytest.fixture
def run_http(run_core) -> Callable[..., Any]:
    """Calls a coroutine with a core that is ready and a client of all its routes, in this process."""

    def run(scenario: Callable[[Core, httpx.AsyncClient], Awaitable[Any]], **settings: Any) -> Any:
        async def whole(core: Core) -> Any:
            keys = None if core.settings.key_file is None else Keys(core.settings.key_file)
            there = httpx.ASGITransport(make_app(core, keys))  # type: ignore[arg-type]
            url = "http://127.0.0.1:8000"
            async with httpx.AsyncClient(transport=there, base_url=url, timeout=HANGS_S) as http:
                return await scenario(core, http)

        return run_core(whole, **settings)

    return run


class Released:
    """A U-Net without weights whose calls wait to be let go one by one."""

    def __init__(self) -> None:
        self.steps, self.rows, self.calls = threading.Semaphore(0), 0, 0

    def __call__(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        self.rows, self.calls = len(x), self.calls + 1
        self.steps.acquire()
        return x * 0.1


def free_port() -> int:
    """One that nobody listens on just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """A real server process on loopback."""

    def __init__(self, model: Path, state: Path, *options: str) -> None:
        self.log = state.with_suffix(".log")
        command = [*DARKROOM, "serve", str(model), "--port", "0"]
        with self.log.open("a") as log:
            self._seen = self.log.read_text().count("listening on")
            self.process = warm.Popen(
                [*command, "--state", str(state), "--capacity", "8", *options],
                stderr=log,
                stdout=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        port = options[options.index("--port") + 1] if "--port" in options else None
        self.url = self._address() if port is None else f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=HANGS_S)

    def first_answer(self, path: str, timeout_s: float = HANGS_S) -> httpx.Response:
        """What a server of a port that was given answers as soon as it listens, long before it says so."""
        start = time.monotonic()
        while True:
            try:
                return self.http.get(path)
            except httpx.ConnectError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() - start < timeout_s, self.log.read_text()
                time.sleep(0.002)

    def _address(self) -> str:
        start = time.monotonic()
        while time.monotonic() - start < 60:
            found = re.findall(r"listening on (http://\S+)", self.log.read_text())
            if len(found) > self._seen:
                return str(found[-1])
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(self.log.read_text())

    def ready(self) -> Server:
        """Waits until it takes jobs."""
        start = time.monotonic()
        while self.http.get("/ready").status_code != 200:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() - start < 200, self.log.read_text()
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = HANGS_S) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def finished(self, job_id: str, timeout_s: float = HANGS_S) -> dict[str, Any]:
        """The job once it is over."""
        start = time.monotonic()
        while time.monotonic() - start < timeout_s:
            job = self.http.get(f"/jobs/{job_id}").json()
            if job["state"] in ("done", "failed", "cancelled"):
                return dict(job)
            time.sleep(0.02)
        raise AssertionError(f"{job_id}: {job}\n{self.log.read_text()}")


@pytest.fixture
def serve(model_folder, tmp_path) -> Iterator[Callable[..., Server]]:
    """Starts servers that are gone after the test."""
    servers: list[Server] = []

    def start(*options: str, state: Path | None = None) -> Server:
        servers.append(Server(model_folder, state or tmp_path / "state", *options))
        return servers[-1]

    yield start
    for server in servers:
        with contextlib.suppress(ProcessLookupError):
            server.process.kill()
        server.process.wait()
