"""Several models on one server: chosen by name in every dialect, kept by memory, each as on its own."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

import warm
from darkroom import models, sample
from darkroom.errors import InputError
from darkroom.serve.api.a1111_server import ChosenModels
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import PictureRequest, Refused
from darkroom.serve.settings import models_in
from serve.conftest import DARKROOM, SMALL, Released, Server, difference

ASKED: dict[str, Any] = {"seed": 5, "steps": 2, "guidance": 3.0, "solver": "euler"}
REQUEST = PictureRequest(prompt="a horse", **ASKED)
NAMES = ("small", "other")


@pytest.fixture(scope="module")
def other() -> models.Model:
    """A model of the same shape with other weights."""
    return models.create("tiny", seed=2, overrides=SMALL)


@pytest.fixture(scope="module")
def other_folder(other, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("others") / "other"
    models.save(other, folder)
    return folder


@pytest.fixture(scope="module")
def lone(small, other) -> dict[str, Image.Image]:
    """What each model draws alone."""
    told = {**ASKED, "optimise": "none", "notice": lambda _: None}
    return {
        name: sample.generate(model, "a horse", **told)[0].image
        for name, model in (("small", small), ("other", other))
    }


@pytest.fixture(scope="module")
def one_fits(small) -> int:
    """Memory in which one of them fits and not two."""
    return int(1.5 * 4 * sum(small.num_parameters.values()))


def check(pictures: dict[str, Image.Image], lone: dict[str, Image.Image]) -> None:
    """Each is its own model's, and not the other's."""
    for name, picture in pictures.items():
        away = lone["other" if name == "small" else "small"]
        assert difference(picture, lone[name]) <= 1, name
        assert difference(picture, away) >= 8, name


def opened(content: bytes | str) -> Image.Image:
    content = base64.b64decode(content) if isinstance(content, str) else content
    return Image.open(io.BytesIO(content)).convert("RGB")


async def drawn(core: Core, job_id: str) -> Image.Image:
    """A job's picture, once it is done."""
    job = await core.finished(job_id, key="a")
    assert job.state == "done", job.error
    return opened((await core.pictures(job_id, key="a"))[0].png)


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def native(http: httpx.AsyncClient, name: str) -> Image.Image:
    job = (await http.post("/jobs", json={"prompt": "a horse", "model": name, **ASKED})).json()
    job = (await http.get(f"/jobs/{job['id']}", params={"wait_s": 60})).json()
    assert job["pictures"][0]["model"] == name
    return opened((await http.get(f"/jobs/{job['id']}/pictures/0")).content)


async def openai(http: httpx.AsyncClient, name: str) -> Image.Image:
    told = {"prompt": "a horse", "seed": 5, "num_inference_steps": 2, "guidance_scale": 3.0}
    answer = await http.post("/v1/images/generations", json={**told, "solver": "euler", "model": name})
    return opened(answer.json()["data"][0]["b64_json"])


A1111 = {"prompt": "a horse", "seed": 5, "steps": 2, "cfg_scale": 3.0, "sampler_name": "Euler"}


async def a1111(http: httpx.AsyncClient, name: str) -> Image.Image:
    """By `override_settings`, in A1111's way of writing a name."""
    listed = {one["model_name"]: one["hash"] for one in (await http.get("/sdapi/v1/sd-models")).json()}
    told = {"override_settings": {"sd_model_checkpoint": f"{name} [{listed[name]}]"}}
    answer = (await http.post("/sdapi/v1/txt2img", json={**A1111, **told})).json()
    assert f'"sd_model_name": "{name}"' in answer["info"]
    return opened(answer["images"][0])


async def a1111_options(http: httpx.AsyncClient, name: str) -> Image.Image:
    """By `options`."""
    set_to = await http.post("/sdapi/v1/options", json={"sd_model_checkpoint": name})
    assert set_to.status_code == 200
    assert (await http.get("/sdapi/v1/options")).json()["sd_model_checkpoint"] == name
    return opened((await http.post("/sdapi/v1/txt2img", json=A1111)).json()["images"][0])


async def kserve(http: httpx.AsyncClient, name: str) -> Image.Image:
    """By its versioned route."""
    prompt = {"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["a horse"]}
    told = {"seed": 5, "steps": 2, "guidance_scale": 3.0, "solver": "euler"}
    path = f"/v2/models/{name}/versions/1"
    assert (await http.get(path)).json()["versions"] == ["1"]
    assert (await http.get(f"{path}/ready")).json() == {"name": name, "ready": True}
    answer = (await http.post(f"{path}/infer", json={"inputs": [prompt], "parameters": told})).json()
    assert answer["model_name"] == name
    return opened(answer["outputs"][0]["data"][0])


async def huggingface(http: httpx.AsyncClient, name: str) -> Image.Image:
    told = {"seed": 5, "num_inference_steps": 2, "guidance_scale": 3.0, "scheduler": "euler"}
    body = {"inputs": "a horse", "parameters": told}
    return opened((await http.post(f"/models/{name}", json=body)).content)


DIALECTS = (native, openai, a1111, a1111_options, kserve, huggingface)


def test_each_dialect_chooses_a_model_by_name_and_lists_all(run_http, other_folder, lone):
    async def scenario(core: Core, http: httpx.AsyncClient) -> Any:
        made = {(ask.__name__, name): await ask(http, name) for ask in DIALECTS for name in NAMES}
        lists = (
            [one["id"] for one in (await http.get("/v1/models")).json()["data"]],
            [one["model_name"] for one in (await http.get("/sdapi/v1/sd-models")).json()],
            [one["name"] for one in (await http.post("/v2/repository/index")).json()],
            (await http.get("/model")).json()["models"],
            [one["name"] for one in (await http.get("/status")).json()["models"]],
        )
        refused = [
            await http.post("/jobs", json={"prompt": "x", "model": "third"}),
            await http.post("/v1/images/generations", json={"prompt": "x", "model": "third"}),
            await http.get("/v1/models/third"),
            await http.post("/sdapi/v1/options", json={"sd_model_checkpoint": "third"}),
            await http.get("/v2/models/third"),
            await http.get("/v2/models/other/versions/2/ready"),
            await http.post("/models/third", json={"inputs": "x"}),
            await http.get("/model", params={"name": "third"}),
        ]
        told = (await http.get("/model", params={"name": "other"})).json()["name"]
        return made, lists, [one.status_code for one in refused], refused[0].json(), told

    made, lists, refused, first, told = run_http(scenario, more_models=(str(other_folder),))
    for ask in DIALECTS:
        check({name: made[ask.__name__, name] for name in NAMES}, lone)
    assert lists == (list(NAMES),) * 5
    assert refused == [404, 404, 404, 422, 404, 404, 404, 404]
    assert first["error"]["message"] == "model: this server has 'small', 'other'"
    assert told == "other"


def test_vertex_chooses_a_model(run_http, other_folder, lone):
    from darkroom.serve.settings import VertexRoutes

    routes = VertexRoutes(health="/health", predict="/predict", port=8080)

    async def scenario(core: Core, http: httpx.AsyncClient) -> Any:
        told = {"seed": 5, "num_inference_steps": 2, "guidance_scale": 3.0, "solver": "euler"}
        made = {}
        for name in NAMES:
            body = {"instances": [{"prompt": "a horse"}], "parameters": {**told, "model": name}}
            answer = (await http.post("/predict", json=body)).json()
            made[name] = opened(answer["predictions"][0]["bytesBase64Encoded"])
        return made

    made = run_http(scenario, more_models=(str(other_folder),), vertex=routes)
    # JPEG: nearer to its own than to the other's.
    far = {
        name: [float(np.abs(_values(made[name]) - _values(lone[one])).mean()) for one in NAMES]
        for name in NAMES
    }
    assert far["small"][0] < far["small"][1]
    assert far["other"][1] < far["other"][0]


def _values(image: Image.Image) -> Any:
    return np.asarray(image.convert("RGB")).astype(float)


def test_where_one_fits_both_take_turns_and_a_released_one_is_gone(run_core, other_folder, lone, one_fits):
    """Requests for both at once never wait for each other for ever, and never are two in memory."""
    most_at_once = 0

    async def scenario(core: Core) -> Any:
        nonlocal most_at_once
        first = weakref.ref(core.pool.first.opened.model.unet)

        async def count() -> None:
            nonlocal most_at_once
            while True:
                most_at_once = max(most_at_once, len(core.pool.opened))
                await asyncio.sleep(0.002)

        counting = asyncio.create_task(count())
        names = [name for _ in range(3) for name in NAMES]
        told = [REQUEST.model_copy(update={"model": name}) for name in names]
        jobs = await asyncio.gather(
            *(core.submit(one, key="a", job_id=f"j{i}") for i, one in enumerate(told))
        )
        made = await asyncio.gather(*(drawn(core, job.id) for job in jobs))
        counting.cancel()
        await until(lambda: not any(one.busy for one in core.pool.served))
        gc.collect()
        loaded = {one.name for one in core.pool.served if one.opened is not None}
        return names, made, loaded, first() is None, core.metrics.text().decode(), core.status()

    told = {"more_models": (str(other_folder),), "model_memory": one_fits}
    names, made, loaded, gone, metrics, status = run_core(scenario, **told)
    for name, picture in zip(names, made, strict=True):
        check({name: picture}, lone)
    assert most_at_once == 1
    assert len(loaded) == 1
    assert gone or "small" in loaded
    assert 'darkroom_model_loads_total{model="other"} 1.0' in metrics
    assert 'darkroom_model_releases_total{model="small"} 1.0' in metrics
    assert {one["name"]: one["state"] for one in status.models}[loaded.pop()] == "loaded"


def test_newer_jobs_of_a_model_wait_for_one_that_was_asked_for_before(run_core, other_folder, one_fits):
    """Jobs of one model without end do not keep the other away; what it was given before is drawn first."""

    async def scenario(core: Core) -> Any:
        held = core.engine.unet = Released()
        a, b = REQUEST, REQUEST.model_copy(update={"model": "other"})
        order: list[str] = []

        async def follow(job_id: str) -> None:
            await core.finished(job_id, key="a")
            order.append(job_id)

        asked = (("before", a), ("b", b), ("after", a), ("gone", b))
        for job_id, request in asked:
            await core.submit(request, key="a", job_id=job_id)
            await asyncio.sleep(0.02)
        following = [asyncio.create_task(follow(job_id)) for job_id, _ in asked[:3]]
        states = {one["name"]: (one["state"], one["jobs"]) for one in core.status().models}
        place = (await core.get("gone", key="a")).place
        await core.cancel("gone", key="a")
        held.steps.release(100)
        await asyncio.gather(*following)
        return order, states, place, (await core.get("gone", key="a")).state

    told = {"more_models": (str(other_folder),), "model_memory": one_fits}
    order, states, place, gone = run_core(scenario, **told)
    assert order == ["before", "b", "after"]
    assert states == {"small": ("loaded", 2), "other": ("waiting", 2)}
    assert (place, gone) == (1, "cancelled")


def test_a_model_is_loaded_while_another_draws_and_both_stay_where_they_fit(run_core, other_folder):
    async def scenario(core: Core) -> Any:
        held = core.engine.unet = Released()
        await core.submit(REQUEST, key="a", job_id="held")
        await drawn(core, (await core.submit(REQUEST.model_copy(update={"model": "other"}), key="a")).id)
        still = (await core.get("held", key="a")).state
        held.steps.release(100)
        await core.finished("held", key="a")
        return still, len(core.pool.opened)

    assert run_core(scenario, more_models=(str(other_folder),)) == ("running", 2)


def test_jobs_of_both_are_drawn_after_a_kill(model_folder, other_folder, lone, one_fits, tmp_path):
    """Through the command: a real process, a bound that holds one, SIGKILL, and the same command again."""
    more = (str(other_folder), "--model-memory", str(one_fits))
    server = Server(model_folder, tmp_path / "state", *more).ready()
    try:
        names = [name for _ in range(2) for name in NAMES]
        for i, name in enumerate(names):
            body = {"prompt": "a horse", "model": name, **ASKED}
            assert server.http.put(f"/jobs/j{i}", json=body).status_code == 202
        server.kill()
        server = Server(model_folder, tmp_path / "state", *more).ready()
        for i, name in enumerate(names):
            assert server.finished(f"j{i}")["state"] == "done"
            check({name: opened(server.http.get(f"/jobs/j{i}/pictures/0").content)}, lone)
        assert server.stop() == 0
    finally:
        server.kill()


def test_a_job_of_a_model_that_is_no_longer_there_is_not_drawn_by_another(run_core, other_folder, lone):
    async def accept(core: Core) -> None:
        core.engine.unet = Released()
        for name in NAMES:
            await core.submit(REQUEST.model_copy(update={"model": name}), key="a", job_id=name)
        core._defer_all()

    async def later(core: Core) -> Any:
        picture = await drawn(core, "small")
        with pytest.raises(Refused) as refused:
            await core.submit(REQUEST.model_copy(update={"model": "other"}), key="a")
        job = await core.get("other", key="a")
        return picture, job.state, job.error, refused.value.status

    run_core(accept, more_models=(str(other_folder),))
    picture, state, error, status = run_core(later)
    check({"small": picture}, lone)
    assert (state, error["code"], status) == ("failed", "not_possible_any_more", 404)


def test_one_model_has_the_metrics_and_digests_that_it_had(run_core):
    async def scenario(core: Core) -> Any:
        job = await core.submit(REQUEST, key="a", job_id="j")
        same = await core.submit(REQUEST.model_copy(update={"model": "small"}), key="a", job_id="j")
        await core.finished("j", key="a")
        return core.metrics.text().decode(), job.request.model, same.uid == job.uid

    metrics, model, same = run_core(scenario)
    assert "darkroom_model_" not in metrics
    assert (model, same) == (None, True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_memory": 1000}, "--model-memory"),
        ({"more_models": ("twin/small",)}, "two models are named 'small'"),
        ({"more_models": ("damaged",)}, "is damaged"),
        ({"more_models": ("no-json",)}, "config.json"),
        ({"more_models": ("lacking",)}, "lacks the tensor"),
    ],
)
def test_a_server_does_not_begin_with_a_model_that_it_cannot_serve(
    run_core, model_folder, other_folder, tmp_path, settings, said, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("twin/small", "damaged", "no-json", "lacking"):
        shutil.copytree(model_folder, tmp_path / name)
    weights = tmp_path / "damaged" / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (tmp_path / "no-json" / "vae" / "config.json").write_text("{")
    weights = tmp_path / "lacking" / "unet" / "diffusion_pytorch_model.safetensors"
    save_file(dict(list(load_file(weights).items())[1:]), weights)

    async def scenario(core: Core) -> Any:
        return core.state, core.error, len(core.pool.opened)

    told = {"more_models": (str(other_folder),), **settings}
    state, error, loaded = run_core(scenario, **told)
    assert (state, loaded) == ("broken", 0)
    assert isinstance(error, InputError) or "ModelError" in type(error).__name__
    assert said in str(error)


def test_the_command_ends_in_one_line_for_one_bad_model(model_folder, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "good").symlink_to(model_folder)
    (tmp_path / "models" / "bad").mkdir()
    (tmp_path / "models" / "bad" / "model_index.json").write_text("{}")
    told = ["--port", "0", "--state", str(tmp_path / "state")]
    done = warm.run(
        [*DARKROOM, "serve", str(tmp_path / "models"), *told], capture_output=True, text=True, timeout=100
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("darkroom: ")]
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert "bad" in lines[0]


def test_a_folder_of_models_is_its_models(model_folder, tmp_path):
    (tmp_path / "b.safetensors").touch()
    (tmp_path / "a").symlink_to(model_folder)
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden.safetensors").touch()
    found = [str(tmp_path / "a"), str(tmp_path / "b.safetensors")]
    assert models_in([str(tmp_path)]) == found
    assert models_in([str(model_folder), str(tmp_path), "tiny"]) == [str(model_folder), *found, "tiny"]
    assert models_in([str(tmp_path / "notes")]) == [str(tmp_path / "notes")]
    with pytest.raises(InputError, match="twice"):
        models_in(["tiny", "tiny"])


def test_a_choice_of_model_is_each_keys_own_and_survives(tmp_path):
    chosen = ChosenModels(tmp_path / "chosen.json")
    chosen.choose("ann", "other")
    again = ChosenModels(tmp_path / "chosen.json")
    assert (again.of("ann"), again.of("bob")) == ("other", None)


def test_what_only_the_loaded_model_can_tell_ends_the_job_then(run_core, other_folder):
    large = REQUEST.model_copy(update={"width": 256, "height": 256})

    async def scenario(core: Core) -> Any:
        with pytest.raises(Refused) as refused:
            await core.submit(large, key="a")
        job = await core.submit(large.model_copy(update={"model": "other"}), key="a", job_id="j")
        over = await core.finished(job.id, key="a")
        return refused.value.code, over.state, over.error

    code, state, error = run_core(scenario, more_models=(str(other_folder),))
    assert (code, state, error["code"]) == ("over_limit", "failed", "over_limit")
    assert "too large" in error["message"]


def test_a_model_that_cannot_be_loaded_fails_its_jobs_and_no_others(run_core, other_folder, lone, tmp_path):
    shutil.copytree(other_folder, tmp_path / "other")
    weights = tmp_path / "other" / "unet" / "diffusion_pytorch_model.safetensors"

    async def scenario(core: Core) -> Any:
        weights.rename(tmp_path / "away")
        b = REQUEST.model_copy(update={"model": "other"})
        failed = await core.finished((await core.submit(b, key="a", job_id="b0")).id, key="a")
        a = await drawn(core, (await core.submit(REQUEST, key="a")).id)
        (tmp_path / "away").rename(weights)
        return failed, a, await drawn(core, (await core.submit(b, key="a", job_id="b1")).id)

    failed, a, b = run_core(scenario, more_models=(str(tmp_path / "other"),))
    assert (failed.state, failed.error["message"][:33]) == ("failed", "model 'other' cannot be loaded: t")
    check({"small": a, "other": b}, lone)
