"""A server for a file's tests, and what they ask it with."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from serve.conftest import Server, free_port


@pytest.fixture(scope="module")
def server(model_folder, adapter_folder, tmp_path_factory) -> Iterator[Server]:
    """A real server with adapters, without keys."""
    state = tmp_path_factory.mktemp("doors") / "state"
    started = Server(model_folder, state, "--adapters", str(adapter_folder))
    yield started.ready()
    started.kill()


@pytest.fixture(scope="module")
def http(server) -> httpx.Client:
    return server.http


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
