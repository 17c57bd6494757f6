"""KServe's, Hugging Face's and Vertex's dialects."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.requests import Request

import warm
from darkroom import sample
from darkroom.errors import InputError
from darkroom.serve.api.platforms import model_of, routes_of, small_enough
from darkroom.serve.api.shared import all_made
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import Job, PictureRequest, Refused
from darkroom.serve.settings import VertexRoutes
from serve.api.conftest import base64_of, change, on_vertex, opened
from serve.conftest import DARKROOM, Server, difference


def tensor(name: str, datatype: str, *data: object) -> dict[str, object]:
    return {"name": name, "shape": [len(data)], "datatype": datatype, "data": list(data)}


def native(http: httpx.Client, server: Server, **request: object) -> Image.Image:
    """The same picture by the native API."""
    job = http.post("/jobs", json=request).json()["id"]
    server.finished(job)
    return opened(http.get(f"/jobs/{job}/pictures/0").content)


def test_kserve_health_and_metadata(http):
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"ready": True}
    assert http.get("/v2/models/small/ready").json()["ready"] is True
    assert http.get("/v2/models/other/ready").status_code == 404
    told = http.get("/v2/models/small").json()
    assert {"name": "prompt", "datatype": "BYTES", "shape": [-1]} in told["inputs"]


def test_kserve_infers_each_prompt_as_the_native_door_does(http, server):
    body = {
        "id": "x1",
        "inputs": [tensor("prompt", "BYTES", "a horse", "a cat"), tensor("seed", "INT64", 3, 9)],
        "parameters": {"steps": 4},
    }
    told = http.post("/v2/models/small/infer", json=body).json()
    assert (told["id"], told["parameters"]["seeds"]) == ("x1", [3, 9])
    [output] = told["outputs"]
    assert (output["shape"], output["datatype"]) == ([2], "BYTES")
    made = [opened(one) for one in output["data"]]
    for image, prompt, seed in zip(made, ("a horse", "a cat"), (3, 9), strict=True):
        assert difference(image, native(http, server, prompt=prompt, seed=seed, steps=4)) <= 1
    assert difference(*made) >= 10


async def nothing_to_say(*_: object, **__: object) -> None:
    return None


def test_where_one_of_several_is_refused_all_others_are_cancelled(run_core, monkeypatch):
    """Also where the first cancellation cannot be written down just then."""
    wanted = [PictureRequest(prompt=f"cat {i}", steps=50, width=32, height=32) for i in range(3)]
    request = Request({"type": "http", "headers": [], "state": {"key": "anna"}})

    async def scenario(core: Core) -> list[str]:
        cancel, asked = core.cancel, []

        async def cancelled(job_id: str, *, key: str) -> Job:
            asked.append(job_id)
            if len(asked) == 1:
                raise Refused(507, "storage", "not just now")
            return await cancel(job_id, key=key)

        monkeypatch.setattr(core, "cancel", cancelled)
        endless = wanted[2].model_copy(update={"steps": 10**6})
        monkeypatch.setattr(core, "check_together", nothing_to_say)  # which would refuse before any is let in
        with pytest.raises(Refused, match="steps"):
            await all_made(core, request, [*wanted[:2], endless])
        states = [(await core.get(name, key="anna")).state for name in asked]
        await cancel(asked[0], key="anna")
        return states

    first, second = run_core(scenario)
    assert first in ("queued", "running")
    assert second == "cancelled"


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"inputs": []}, 422, "inputs"),
        ({"inputs": [tensor("seed", "INT64", 1)]}, 422, "prompt"),
        ({"inputs": [tensor("prompt", "INT64", 1)]}, 422, "prompt"),
        ({"inputs": [{**tensor("prompt", "BYTES", "a"), "shape": [3]}]}, 422, "shape"),
        ({"inputs": [tensor("prompt", "BYTES", "a"), tensor("nonsense", "BYTES", "a")]}, 422, "nonsense"),
        ({"inputs": [tensor("prompt", "BYTES", "a"), tensor("steps", "INT32", 4, 5, 6)]}, 422, "steps"),
        ({"inputs": [tensor("prompt", "BYTES", *"a" * 40)]}, 422, "prompt"),
    ],
)
def test_kserve_refuses_in_its_own_shape(http, body, status, named):
    told = http.post("/v2/models/small/infer", json=body)
    assert told.status_code == status
    assert named in told.json()["error"]


def test_huggingface_answers_with_the_picture(http, server):
    body = {"inputs": "a horse", "parameters": {"seed": 7, "num_inference_steps": 4}}
    for path in ("/", "/models/small"):
        told = http.post(path, json=body)
        assert (told.headers["content-type"], told.headers["x-seed"]) == ("image/png", "7")
        assert difference(opened(told.content), native(http, server, prompt="a horse", seed=7, steps=4)) <= 1
    jpeg = http.post("/", json=body, headers={"Accept": "image/jpeg"})
    assert (jpeg.headers["content-type"], opened(jpeg.content).format) == ("image/jpeg", "JPEG")
    assert http.post("/models/other", json=body).status_code == 404
    refused = http.post("/", json={"inputs": "a", "parameters": {"seed": -1}})
    assert (refused.status_code, "seed" in refused.json()["error"]) == (422, True)
    assert http.post("/", content=b"[" * 100_000).status_code == 400


@pytest.mark.nightly
def test_only_reading_is_open_where_there_are_keys(model_folder, tmp_path):
    keys = tmp_path / "keys"
    made = [*DARKROOM, "serve", "--api-key-file", str(keys), "--make-key", "anna"]
    key = warm.run(made, capture_output=True, text=True, check=True).stdout.strip()
    server = Server(model_folder, tmp_path / "state", "--api-key-file", str(keys))
    try:
        server.ready()
        closed = (
            "/jobs",
            "/status",
            "/model",
            "/metrics",
            "/sdapi/v1/options",
            "/v2/models/small",
            "/openapi.json",
        )
        for path in ("/", "/server", "/docs", "/page/app.js", "/v2/health/ready"):
            assert server.http.get(path).status_code == 200
        for path in closed:
            assert server.http.get(path).status_code == 401
        body = {"inputs": "a", "parameters": {"num_inference_steps": 2}}
        assert server.http.post("/", json=body).status_code == 401
        assert server.http.post("/", json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    finally:
        server.kill()


PREDICT, HEALTH = "/v1/endpoints/7/deployedModels/9:predict", "/v1/endpoints/7/deployedModels/9"


@pytest.fixture(scope="module")
def vertex(model_folder, adapter_folder, tmp_path_factory):
    """A container as the platform runs it, and a client of the platform's."""
    state = tmp_path_factory.mktemp("vertex") / "state"
    adapters = ("--adapters", str(adapter_folder))
    started = on_vertex(model_folder, state, *adapters, health=HEALTH, predict=PREDICT)
    started.http.headers["Host"] = "vertex.internal"
    while started.http.get(HEALTH).status_code != 200:
        assert started.process.poll() is None, started.log.read_text()
    yield started.http
    started.kill()


def test_vertex_answers_both_forms(vertex):
    told = {"num_inference_steps": 4, "seed": 3, "guidance_scale": 5.0}
    first = vertex.post(PREDICT, json={"instances": [{"prompt": "a horse"}], "parameters": told}).json()
    [one] = first["predictions"]
    assert (one["mimeType"], one["seed"]) == ("image/jpeg", 3)
    plain = opened(one["bytesBase64Encoded"])
    assert plain.format == "JPEG"
    body = {"instances": [{"text": "a horse"}, {"text": "a cat"}], "parameters": told}
    both = vertex.post(PREDICT, json=body).json()["predictions"]
    assert [one["seed"] for one in both] == [3, 4]
    assert difference(opened(both[0]["output"]), plain) <= 1
    with_adapter = {**told, "lora_id": "style1"}
    other = vertex.post(PREDICT, json={**body, "parameters": with_adapter}).json()["predictions"]
    assert difference(opened(other[0]["output"]), plain) >= 10
    own = {**told, "adapters": [{"name": "style1"}], "hires": {"scale": 1.5}}
    larger = vertex.post(PREDICT, json={**body, "parameters": own}).json()["predictions"]
    assert opened(larger[0]["output"]).size == (48, 48)
    alike = {**own, "adapters": [], "lora_id": "style1"}
    named = vertex.post(PREDICT, json={**body, "parameters": alike}).json()["predictions"]
    without = vertex.post(PREDICT, json={**body, "parameters": {**own, "adapters": []}}).json()["predictions"]
    apart = [difference(opened(one[0]["output"]), opened(larger[0]["output"])) for one in (named, without)]
    assert apart[0] <= 4 <= 10 <= apart[1]  # JPEG makes more of the last bits


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"instances": []}, "instances"),
        ({"instances": [{"prompt": "a", "text": "b"}]}, "instances"),
        ({"instances": [{"prompt": "a"}], "parameters": {"lora_id": "../etc"}}, "adapters"),
        ({"instances": [{"prompt": "a"}] * 40}, "instances"),
    ],
)
def test_vertex_refuses(vertex, body, named):
    told = vertex.post(PREDICT, json=body)
    assert told.status_code == 422
    assert named in told.json()["error"]


def test_on_vertex_nothing_else_is_open(vertex):
    for host in ("vertex.internal", "localhost", "127.0.0.1"):
        told = {"headers": {"Host": host}}
        assert vertex.get("/jobs", **told).status_code == 403
        assert vertex.get("/metrics", **told).status_code == 403
        assert vertex.post("/v1/images/generations", json={"prompt": "a"}, **told).status_code == 403
        assert vertex.get("/live", **told).status_code == 200


def test_answers_stay_under_the_platform_s_bound():
    noise = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), dtype=np.uint8)
    png = base64.b64decode(base64_of(Image.fromarray(noise)))
    assert len(png) > 3_000_000
    [jpeg] = small_enough([png])
    assert 300_000 < len(jpeg) * 4 / 3 < 1_500_000
    assert sum(map(len, small_enough([png] * 8))) * 4 / 3 < 1_500_000
    with pytest.raises(Refused, match="ask for fewer"):
        small_enough([png] * 32)


def test_what_may_not_fit_into_an_answer_is_refused_before_it_is_drawn(run_http):
    """Of 1024 x 1024, 14 pictures of nothing but noise fit with their credentials."""
    routes = VertexRoutes(health="/health", predict="/predict", port=8080)

    async def scenario(core: Core, http: Any) -> Any:
        parameters = {"width": 1024, "height": 1024, "sampleCount": 5, "num_inference_steps": 1}
        body = {"instances": [{"prompt": "a"}, {"text": "b"}, {"text": "c"}], "parameters": parameters}
        told = await http.post("/predict", json=body)
        few = {"instances": body["instances"], "parameters": {**parameters, "width": 32, "height": 32}}
        larger = {**parameters, "width": 512, "height": 512, "hires": {"scale": 2}}
        grown = await http.post("/predict", json={**body, "parameters": larger})
        return told, grown, await http.post("/predict", json=few), await core.jobs(key="platform")

    told, grown, few, jobs = run_http(scenario, vertex=routes)
    assert grown.json() == told.json()
    assert (told.status_code, told.json()["code"]) == (422, "too_large")
    assert told.json()["error"].startswith("at most 14 pictures of 1024x1024 fit")
    assert (few.status_code, len(few.json()["predictions"])) == (200, 15)
    assert len(jobs) == 3, "none of the first request"


def test_vertex_s_environment(tmp_path):
    assert routes_of({"AIP_HTTP_PORT": "9000"}).port == 9000
    for told in ({"AIP_HTTP_PORT": "x"}, {"AIP_PREDICT_ROUTE": "/{a}"}, {"AIP_HEALTH_ROUTE": "health"}):
        with pytest.raises(InputError, match=next(iter(told))):
            routes_of(told)
    (tmp_path / "bucket" / "model").mkdir(parents=True)
    found = model_of({"AIP_STORAGE_URI": "gs://bucket/model"}, mounted=tmp_path)
    assert Path(found) == tmp_path / "bucket" / "model"
    for uri in ("gs://bucket/other", "gs://bucket/../bucket/model"):
        with pytest.raises(InputError, match="mount the bucket"):
            model_of({"AIP_STORAGE_URI": uri}, mounted=tmp_path)


def test_hugging_faces_own_client_draws(server, monkeypatch):
    import huggingface_hub
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import HfHubHTTPError

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # loopback is not the hub
    for client in (InferenceClient(model=server.url), InferenceClient(base_url=server.url)):
        told = {"num_inference_steps": 4, "seed": 3, "guidance_scale": 5.0, "negative_prompt": "fog"}
        image = client.text_to_image("a horse", width=32, height=24, **told)
        assert image.size == (32, 24)
        assert change(image, client.text_to_image("a horse", width=32, height=24, **told)) == 0
        other = client.text_to_image("a horse", width=32, height=24, **{**told, "seed": 4})
        assert change(image, other) > 1
        with pytest.raises(HfHubHTTPError, match="num_inference_steps"):
            client.text_to_image("a horse", num_inference_steps=100_000)


def test_hugging_faces_own_client_redoes_a_picture(server, small, tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import HfHubHTTPError

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # loopback is not the hub
    start = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
    start.save(tmp_path / "start.png")
    settings = {"seed": 3, "strength": 0.6, "optimise": "none", "notice": lambda _: None}
    lone = sample.generate(small, "a horse", image=start, steps=5, guidance=5.0, **settings)[0].image
    told = {"num_inference_steps": 5, "guidance_scale": 5.0, "seed": 3}
    for client in (InferenceClient(model=server.url), InferenceClient(base_url=server.url)):
        for given in (tmp_path / "start.png", (tmp_path / "start.png").read_bytes()):
            made = client.image_to_image(given, prompt="a horse", strength=0.6, **told)
            assert difference(made, lone) <= 1
        other = client.image_to_image(given, prompt="a horse", strength=0.9, **told)
        assert difference(other, lone) >= 3
    larger = client.image_to_image(given, prompt="a horse", target_size={"width": 48, "height": 40}, **told)
    assert larger.size == (48, 40)
    unsaid = sample.generate(small, "", image=start, steps=5, guidance=5.0, **{**settings, "strength": 0.75})
    assert difference(client.image_to_image(given, **told), unsaid[0].image) <= 1
    assert client.image_to_image(given).size == (32, 32)  # the bytes alone
    with pytest.raises(HfHubHTTPError, match="strength"):
        client.image_to_image(given, prompt="a horse", strength=3.0)
    with pytest.raises(HfHubHTTPError, match="image"):
        client.image_to_image(b"\x89PNG\r\n\x1a\nno more", prompt="a horse")
