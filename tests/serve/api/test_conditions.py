"""What steers pictures beside prompts, through HTTP: embeddings by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from serve.api.conftest import opened
from serve.conftest import Server, difference

QUICK: dict[str, Any] = {"steps": 4, "seed": 5}


@pytest.fixture(scope="module")
def http(small, model_folder, tmp_path_factory) -> Iterator[Any]:
    """A server with embeddings."""
    folder = tmp_path_factory.mktemp("conditions")
    width = small.text_encoders[0].config.hidden_size
    (folder / "embeddings").mkdir()
    draw = torch.Generator().manual_seed(0)
    for name, wide in (("zorp", width), ("foreign", width + 8)):
        vectors = 3 * torch.randn(2, wide, generator=draw)
        save_file({"emb_params": vectors}, str(folder / "embeddings" / f"{name}.safetensors"))
    server = Server(model_folder, folder / "state", "--embeddings", str(folder / "embeddings"))
    yield server.ready().http
    server.kill()


def drawn(http: Any, **body: Any) -> Image.Image:
    told = http.post("/sdapi/v1/txt2img", json={**QUICK, **body})
    assert told.status_code == 200, told.text
    return opened(told.json()["images"][0])


def test_embeddings_are_words_of_every_api_and_listed(http, small):
    listed = http.get("/sdapi/v1/embeddings").json()
    wide = small.text_encoders[0].config.hidden_size
    plain = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None, "vectors": 2}
    assert listed == {
        "loaded": {"zorp": {**plain, "shape": wide}},
        "skipped": {"foreign": {**plain, "shape": wide + 8}},
    }
    assert http.get("/model").json()["embeddings"] == ["zorp"]
    body = {"num_inference_steps": 4, "seed": 5, "response_format": "b64_json"}
    pictures = {
        word: opened(
            http.post("/v1/images/generations", json={**body, "prompt": f"a {word}"}).json()["data"][0][
                "b64_json"
            ]
        )
        for word in ("zorp", "ZORP", "zorb")
    }
    assert difference(pictures["zorp"], pictures["ZORP"]) == 0
    assert difference(pictures["zorp"], pictures["zorb"]) >= 3
    assert difference(drawn(http, prompt="a zorp"), pictures["zorp"]) <= 1
