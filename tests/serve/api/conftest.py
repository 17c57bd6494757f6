"""A server for a file's tests, and what they ask it with."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from darkroom import models
from needs import missing
from serve.browser import CHROMIUM, Browser
from serve.conftest import SMALL, Server, free_port
from serve.nets import write_nets, write_network
from serve.studio import reopened


@pytest.fixture(scope="module")
def server(model_folder, adapter_folder, tmp_path_factory) -> Iterator[Server]:
    """A real server with adapters, without keys."""
    state = tmp_path_factory.mktemp("api") / "state"
    started = Server(model_folder, state, "--adapters", str(adapter_folder))
    yield started.ready()
    started.kill()


@pytest.fixture(scope="module")
def studio_server(small, model_folder, adapter_folder, tmp_path_factory) -> Iterator[Server]:
    """A real server with all that the page has a field for: two models, adapters, nets, an upscaler."""
    folder = tmp_path_factory.mktemp("studio")
    models.save(models.create("tiny", seed=2, overrides=SMALL), folder / "other")
    (folder / "nets").mkdir()
    write_nets(folder / "nets", small, small)
    (folder / "upscalers").mkdir()
    write_network(folder / "upscalers" / "4x_soft.safetensors")
    told = ("--adapters", adapter_folder, "--controls", folder / "nets", "--upscalers", folder / "upscalers")
    started = Server(model_folder, folder / "state", str(folder / "other"), *map(str, told))
    yield started.ready()
    started.kill()


@pytest.fixture(scope="module")
def http(server) -> httpx.Client:
    return server.http


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Browser]:
    """One browser for the file; what its scripts complained of fails the test that sees it."""
    if CHROMIUM is None:
        missing("no chromium here: apt-get install chromium")
    started = Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture
def page(chromium, server) -> Iterator[Browser]:
    """The page, opened anew, with nothing kept."""
    chromium.look(1280, 900)
    chromium.open("about:blank")
    chromium.call("Storage.clearDataForOrigin", origin=server.url, storageTypes="all")
    earlier = server.http.get("/jobs?limit=1000").json()["jobs"]
    for job in earlier:
        server.http.delete(f"/jobs/{job['id']}")
    removed = [f"{job['id']}/{i}" for job in earlier for i in range(job["request"]["num"])]
    chromium.open(f"{server.url}/page/icon.svg")
    chromium.js(f"localStorage.setItem('removed', {json.dumps(json.dumps(removed))})")
    chromium.errors.clear()
    reopened(chromium, server)
    yield chromium
    assert chromium.errors == []


def on_vertex(
    model: Path, state: Path, *options: str, health: str = "/health", predict: str = "/predict"
) -> Server:
    """The command that Vertex AI's container runs, with the platform's environment, asked on loopback."""
    told = {
        "AIP_HTTP_PORT": str(free_port()),
        "AIP_HEALTH_ROUTE": health,
        "AIP_PREDICT_ROUTE": predict,
        "AIP_STORAGE_URI": str(model),
    }
    with pytest.MonkeyPatch.context() as patched:
        for name, value in told.items():
            patched.setenv(name, value)
        started = Server(model, state, "--vertex", *options)
    started.url = f"http://127.0.0.1:{told['AIP_HTTP_PORT']}"
    started.http = httpx.Client(base_url=started.url, timeout=60)
    return started


def opened(content: bytes | str) -> Image.Image:
    """A picture from its bytes or their base64."""
    return Image.open(io.BytesIO(base64.b64decode(content) if isinstance(content, str) else content))


def base64_of(image: Image.Image) -> str:
    """A picture as PNG in base64."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def change(one: Image.Image, other: Image.Image) -> float:
    """The mean difference of a value, in 1/255."""
    pair = [np.asarray(image.convert("RGB")).astype(float) for image in (one, other)]
    return float(np.abs(pair[0] - pair[1]).mean())
