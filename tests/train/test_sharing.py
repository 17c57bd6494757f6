"""What a run is given away with: kohya's metadata, a model card, and the hub."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from subjects import recipe_for
from typer.testing import CliRunner

from darkroom.cli import app
from darkroom.errors import DarkroomError, InputError
from darkroom.train.exports import push
from darkroom.train.run import export, train


@pytest.fixture(scope="module")
def run(base: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of five photographs whose captions are tags."""
    folder = tmp_path_factory.mktemp("private") / "7_sks dog"
    folder.mkdir()
    for i, path in enumerate(sorted(photos.iterdir())):
        (folder / path.name).write_bytes(path.read_bytes())
        (folder / path.name).with_suffix(".txt").write_text("sks dog, grass" if i else "sks dog, snow")
    overrides = (
        "train.steps=1",
        "data.repeats=folders",
        "sample.prompts=[a dog]",
        "sample.steps=1",
        "optim.unet_lr=2e-3",
        "data.clip_skip=1",
        "adapter.trigger=sks dog",
    )
    recipe = recipe_for("lora", base, folder.parent, *overrides)
    return train(recipe, out=tmp_path_factory.mktemp("run") / "mine", console=lambda _: None).run


def test_the_file_says_how_it_was_trained_and_no_path(run: Path, base: Path) -> None:
    with safe_open(run / "adapter.safetensors", framework="pt") as file:
        told = file.metadata()
    expected = {
        "ss_learning_rate": "0.01",
        "ss_unet_lr": "0.002",
        "ss_clip_skip": "2",  # as kohya counts
        "ss_optimizer": "adamw",
        "ss_max_train_steps": "1",
        "ss_total_batch_size": "2",
        "ss_num_train_images": "35",
        "ss_num_batches_per_epoch": "18",
        "ss_network_dim": "8",
        "ss_loss_type": "mse",
    }
    assert {key: told.get(key) for key in expected} == expected
    assert json.loads(told["ss_dataset_dirs"]) == {"7_sks dog": {"n_repeats": 7, "img_count": 5}}
    assert json.loads(told["ss_tag_frequency"]) == {"7_sks dog": {"sks dog": 5, "grass": 4, "snow": 1}}
    private = [str(base.parent), str(run), "private", str(Path.home())]
    assert not [value for value in told.values() for path in private if path in value]
    assert "ss_text_encoder_lr" not in told


def test_an_export_after_the_pictures_are_gone_leaves_them_out(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    shutil.rmtree(copy / "data")
    with safe_open(export(copy, tmp_path / "it.safetensors"), framework="pt") as file:
        told = file.metadata()
    assert "ss_tag_frequency" not in told
    assert told["ss_learning_rate"] == "0.01"


class Hub(ThreadingHTTPServer):
    """As much of the hub's API as an upload needs."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.refuses = False
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _say(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        status = 403 if self.server.refuses else 404
        self._say({"error": "no such user, hf_secretsecret"}, status)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuses:
            return self._say({"error": "no such user, hf_secretsecret"}, 403)
        if self.path.endswith("/repos/create"):
            self.server.asked.append((self.path, json.loads(body)))
            return self._say({"url": f"{self.server.address}/me/dog", "name": "dog"})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            told = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            return self._say({"files": told})
        if "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            address = f"{self.server.address}/me/dog/commit/1"
            return self._say({"commitUrl": address, "commitOid": "1" * 40, "pullRequestUrl": None})
        return self._say({"errors": [], "warnings": []})


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("token")
def test_a_run_is_pushed_with_its_card_and_samples(run: Path, hub: Hub) -> None:
    arguments = ["push", str(run), "me/dog", "--hub", hub.address, "--private", "--license", "openrail++"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"repository: {hub.address}/me/dog" in result.output
    assert set(hub.files) == {"dog.safetensors", "README.md", "samples.png"}
    assert hub.files["dog.safetensors"] == (run / "adapter.safetensors").read_bytes()
    assert hub.asked[0][1]["name"] == "dog"
    card = hub.files["README.md"].decode()
    head = card.split("---")[1]
    for line in ('license: "openrail++"', 'instance_prompt: "sks dog"', 'library_name: "diffusers"'):
        assert line in head
    assert '"lora"' in head
    assert 'load_lora_weights("dog.safetensors")' in card
    assert "| pictures.lance | private0 | 5 | unknown |" in card  # a folder's pictures, by its last name
    assert "| unknown | 5 |" in card
    assert str(run.parent) not in card
    assert str(run.parent.parent) not in card
    assert "base_model" not in head  # it is a folder's, which nobody else has


@pytest.mark.usefixtures("token")
def test_what_the_hub_refuses_is_told_without_the_token(run: Path, hub: Hub, tmp_path: Path) -> None:
    hub.refuses = True
    with pytest.raises(DarkroomError, match="the hub did not take 'me/dog'") as caught:
        push(run, "me/dog", hub=hub.address)
    assert "hf_secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="the repository 'dog'; allowed: OWNER/NAME"):
        push(run, "dog", hub=hub.address)
    assert not hub.files


@pytest.mark.usefixtures("token")
def test_a_card_without_the_pictures_says_how_many_there_were(run: Path, hub: Hub, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    shutil.rmtree(copy / "data")
    push(copy, "me/dog", hub=hub.address)
    card = hub.files["README.md"].decode()
    assert "| private0 | not at hand when this was written | 5 | unknown |" in card
    assert "pictures.lance" not in card
