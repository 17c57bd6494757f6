"""Models from a hub: a small server that speaks its protocol, and one that says no and repeats the token."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import pytest

from darkroom import models
from darkroom.errors import ModelError
from darkroom.models.reference import is_hub_id
from darkroom.models.tokenizer import tokenizer_or_stand_in

TOKEN = "hf_neverSayThisAloud123"
COMMIT = "a" * 40


class Hub:
    """Serves one repository from a folder to those who bring the token; notes what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked, self.refuses = folder, [], False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        self.asked.append(request.path)
        given = request.headers.get("Authorization", "")
        if self.refuses or given != f"Bearer {TOKEN}":
            message = f"Access to model me/tiny is restricted, said {given}"
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": message}
            self.send(request, 403, headers, json.dumps({"error": message}).encode(), with_body=with_body)
        elif request.path.startswith("/api/models/me/tiny"):
            files = [file for file in sorted(self.folder.rglob("*")) if file.is_file()]
            names = [str(file.relative_to(self.folder)) for file in files]
            told: Any = {"id": "me/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            if "/tree/" in request.path:
                sizes = [file.stat().st_size for file in files]
                told = [
                    {"type": "file", "path": name, "size": size, "oid": "0" * 40}
                    for name, size in zip(names, sizes, strict=True)
                ]
            self.send(request, 200, {}, json.dumps(told).encode(), with_body=with_body)
        else:
            body = (self.folder / request.path.split(f"/resolve/{COMMIT}/")[1]).read_bytes()
            tag = hashlib.sha256(body).hexdigest()
            headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
            self.send(request, 200, headers, body, with_body=with_body)

    @staticmethod
    def send(request: Any, status: int, headers: dict[str, str], body: bytes, *, with_body: bool) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if with_body:
            request.wfile.write(body)

    @property
    def fetched(self) -> set[str]:
        return {path.split("/resolve/")[1].split("/", 1)[1] for path in self.asked if "/resolve/" in path}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    models.save(models.create("tiny", seed=1), folder)
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    for part in ("unet", "vae", "text_encoder"):
        (file,) = (folder / part).glob("*.safetensors")
        shutil.copy(file, file.with_name(file.name.replace(".safetensors", ".fp16.safetensors")))
    shutil.copy(weights, folder / "tiny-pruned.safetensors")
    (folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"pickled")
    served = Hub(folder)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", served.url)
    template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield served
    served.server.shutdown()


def test_a_gated_model_is_opened_with_the_token_and_nothing_more_is_fetched(hub: Hub) -> None:
    model = models.load("me/tiny", revision="release")
    assert models.identity(model.unet) == models.identity(models.create("tiny", seed=1).unet)
    assert (model.path, model.name) == ("me/tiny", "tiny")
    assert any(path.startswith("/api/models/me/tiny/revision/release") for path in hub.asked)
    assert "unet/diffusion_pytorch_model.safetensors" in hub.fetched
    assert not [name for name in hub.fetched if "fp16" in name or name.endswith(".bin") or "pruned" in name]


def test_a_variant_fetches_its_own_weights_only(hub: Hub) -> None:
    models.load("me/tiny", variant="fp16")
    weights = {name for name in hub.fetched if name.endswith(".safetensors")}
    assert weights == {
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors",
        "text_encoder/model.fp16.safetensors",
    }
    with pytest.raises(ModelError, match="no weights of variant 'bf16'"):
        models.load("me/tiny", variant="bf16")


def told(caught: Any, caplog: Any, capfd: Any) -> str:
    """Everything that a user or a log would see of an error."""
    out, err = capfd.readouterr()
    chain, error = [], caught.value
    while error is not None:
        chain.append(str(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join([*chain, caplog.text, out, err])


@pytest.mark.parametrize("trouble", ["refused", "offline", "bad-token", "unknown-name"])
def test_the_token_is_never_told(hub: Hub, trouble: str, monkeypatch: Any, caplog: Any, capfd: Any) -> None:
    name = "me/tiny"
    if trouble == "refused":
        hub.refuses = True
    elif trouble == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    elif trouble == "bad-token":  # the client quotes a header that it cannot send
        monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\x01x")
    else:
        name = f"me/{TOKEN}--x..y"
    with caplog.at_level(logging.DEBUG, logger="darkroom"), pytest.raises(ModelError) as caught:
        models.load(name)
    seen = told(caught, caplog, capfd)
    assert "could not be had from the hub" in str(caught.value)
    assert "$HF_TOKEN" in str(caught.value)
    assert "\n" not in str(caught.value)
    if trouble != "unknown-name":  # what the user typed is said back
        assert TOKEN not in seen
    if trouble == "refused":
        assert "restricted" in seen  # control: the hub's message, which repeats the token, is told


def test_the_hub_does_repeat_the_token(hub: Hub) -> None:
    """The control of the test above: without us the token is in the error."""
    hub.refuses = True
    with pytest.raises(huggingface_hub.errors.GatedRepoError) as caught:
        huggingface_hub.HfApi(endpoint=hub.url).model_info("me/tiny", token=TOKEN)
    assert TOKEN in str(caught.value)


def test_what_is_in_the_cache_is_opened_without_asking(hub: Hub) -> None:
    models.load("me/tiny")
    asked = len(hub.asked)
    assert asked > 0
    models.load("me/tiny")
    assert len(hub.asked) == asked
    hub.server.shutdown()
    assert models.load("me/tiny").unet is not None


def test_a_cache_that_lacks_a_part_is_completed(hub: Hub) -> None:
    models.outlined("me/tiny", ("unet", "vae"))
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
    assert models.load("me/tiny").vae is not None
    assert [name for name in hub.fetched if name.endswith(".safetensors")]


@pytest.mark.parametrize("kind", ["silent", "closed", "forbidden"])
def test_without_a_network_one_short_try_is_made(
    hub: Hub, kind: str, monkeypatch: Any, caplog: Any, tmp_path: Path
) -> None:
    """A proxy that takes the connection and says nothing is the slowest of them."""
    monkeypatch.setattr("darkroom.models.checked.ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if kind == "silent" else 9
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        if kind == "forbidden":
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        start = time.monotonic()
        with pytest.raises(
            ModelError, match=r"\.safetensors file, or random weights by name: sd15"
        ) as caught:
            models.load("me/tiny")
        monkeypatch.delenv("DARKROOM_CLIP_TOKENIZER", raising=False)
        with caplog.at_level(logging.WARNING, logger="darkroom"):
            tokenizer = tokenizer_or_stand_in()
        assert time.monotonic() - start < 2 * 8.0
    assert ("HF_HUB_OFFLINE is set" in str(caught.value)) == (kind == "forbidden")
    assert len(tokenizer) == 514
    (line,) = [record.getMessage() for record in caplog.records if "stands in" in record.getMessage()]
    assert "DARKROOM_CLIP_TOKENIZER" in line
    assert "\n" not in line


def test_a_drive_is_no_owner() -> None:
    assert is_hub_id("owner/name")
    for path in ("C:/model", r"C:\models/sd", "./model", "~/model", "a/b/c", "model"):
        assert not is_hub_id(path)
