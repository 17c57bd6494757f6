"""Users' mistakes in all dialects: one clear line with a 4xx, before anything is drawn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from darkroom.serve.api.guard import make_key
from darkroom.serve.jobs.core import Core
from darkroom.serve.settings import VertexRoutes
from serve.api.conftest import base64_of
from serve.conftest import Released

Asked = dict[str, Any]
LARGE = 10**400
"""As JSON knows no bounds."""


def tensors(asked: Asked) -> Asked:
    kinds = {"prompt": "BYTES", "negative": "BYTES", "solver": "BYTES", "guidance": "FP32"}
    names = {"guidance": "guidance_scale", "negative": "negative_prompt"}
    return {
        "inputs": [
            {
                "name": names.get(name, name),
                "datatype": kinds.get(name, "INT64"),
                "shape": [1],
                "data": [value],
            }
            for name, value in asked.items()
        ]
    }


def named(asked: Asked, **names: str) -> Asked:
    return {names.get(name, name): value for name, value in asked.items()}


DIFFUSERS = {"steps": "num_inference_steps", "guidance": "guidance_scale", "negative": "negative_prompt"}
DIALECTS: dict[str, tuple[str, Callable[[Asked], Asked]]] = {
    "native": ("/jobs", lambda asked: asked),
    "openai": (
        "/v1/images/generations",
        lambda asked: {
            **{k: v for k, v in named(asked, **DIFFUSERS).items() if k not in ("width", "height")},
            **({"size": f"{asked['width']}x{asked.get('height', 32)}"} if "width" in asked else {}),
        },
    ),
    "a1111": (
        "/sdapi/v1/txt2img",
        lambda asked: named(asked, guidance="cfg_scale", negative="negative_prompt", solver="sampler_name"),
    ),
    "kserve": ("/v2/models/small/infer", tensors),
    "huggingface": (
        "/",
        lambda asked: {
            "inputs": asked["prompt"],
            "parameters": {
                k: v for k, v in named(asked, **DIFFUSERS, solver="scheduler").items() if k != "prompt"
            },
        },
    ),
    "vertex": (
        "/predict",
        lambda asked: {
            "instances": [{"prompt": asked["prompt"]}],
            "parameters": {k: v for k, v in named(asked, **DIFFUSERS).items() if k != "prompt"},
        },
    ),
}
NUMBERS: tuple[Any, ...] = (0, -5, 2.5, "20", True, None, [], {}, 10**9, LARGE, float("nan"), float("inf"))
NONE_IS_A_DEFAULT = {"steps", "seed", "width", "guidance", "solver", "negative"}
MISTAKES: dict[str, tuple[Any, ...]] = {
    "steps": NUMBERS,
    "seed": (-5, 2.5, "5", True, [], 2**63, LARGE, float("nan")),
    "width": (*NUMBERS, 7, 33, 2048),
    "guidance": (-1, "7", True, [], LARGE, 51.0, float("nan"), float("inf"), float("-inf")),
    "solver": ("magic", 3, [], "x" * 100, "\ud800"),
    "negative": (3, [], "a\0b", "x" * 4001, "a b " * 1000),
    "prompt": (
        "",
        None,
        3,
        [],
        {},
        "a\0b",
        "x" * 4001,
        "a b " * 1000,
        "a <lora:unknown:1>",
        "a <lora:unknown>",
        "a <lora::1>",
        "a <lora:unknown:nan>",
        "a <lora:unknown:1e9>",
        "a <lora:unknown:1:2:3>",
    ),
}


def bodies() -> Iterator[tuple[str, str, Any, str, str]]:
    """Dialect, field, value, path, body."""
    for dialect, (path, body) in DIALECTS.items():
        for field, values in MISTAKES.items():
            for value in values:
                if (value is None and field in NONE_IS_A_DEFAULT) or (field, value, dialect) in FINE:
                    continue
                if dialect == "openai" and field == "width" and value is None:
                    continue
                yield dialect, field, value, path, json.dumps(body({"prompt": "a", field: value}))


FINE = tuple(("prompt", "", dialect) for dialect in ("native", "a1111", "kserve"))
"""There a picture of no words may be asked for."""


def complaint(answer: httpx.Response) -> str | None:
    """What is wrong with a refusal; None where it is one clear line with a 4xx."""
    if not 400 <= answer.status_code < 500 or answer.status_code in (408, 409, 429):
        return f"status {answer.status_code}"
    told = answer.json()
    message = told.get("detail") or (
        told["error"] if isinstance(told["error"], str) else told["error"]["message"]
    )
    if not 8 <= len(message) <= 600 or "\n" in message:
        return f"no clear line: {message!r}"
    for word in ("Value error", "Traceback", " 0x", " --", "darkroom ", "/work", "/tmp", ".py"):
        if word in message:
            return f"'{word}' in {message!r}"
    return None


def test_every_mistake_is_told_in_one_line_and_nothing_is_drawn(run_http, adapter_folder, tmp_path):
    key = make_key(tmp_path / "keys", "anna")

    async def scenario(core: Core, http: httpx.AsyncClient) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        wrong, count = [], 0
        for dialect, field, value, path, body in bodies():
            answer = await http.post(path, content=body, headers=headers)
            count += 1
            if (found := complaint(answer)) is not None:
                wrong.append((dialect, field, str(value)[:30], found))
        for dialect, (path, _) in DIALECTS.items():
            wide = json.dumps({f"k{i}": i for i in range(300_000)}).encode()
            many = json.dumps({"prompt": "a", "adapters": [1] * 1_000_000}).encode()
            for content in (
                b"",
                b"{",
                b"[" * 100_000,
                b'{"a":' * 50_000,
                b"null",
                b"[]",
                b"\xff",
                wide,
                many,
            ):
                answer = await http.post(path, content=content, headers=headers)
                if (found := complaint(answer)) is not None:
                    wrong.append((dialect, "body", content[:20], found))
        # A form may hold what it likes, but this route reads whatever comes as JSON.
        form = {**headers, "Content-Type": "multipart/form-data; boundary=x"}
        disguised = await http.post("/", content=wide, headers=form)
        accepted = core.metrics.accepted._value.get()
        good = [
            (
                await http.post(path, content=json.dumps(body({"prompt": "a", "steps": 1})), headers=headers)
            ).status_code
            for path, body in DIALECTS.values()
        ]
        return wrong, count, accepted, good, disguised.status_code

    wrong, count, accepted, good, disguised = run_http(
        scenario,
        adapters=adapter_folder,
        key_file=tmp_path / "keys",
        vertex=VertexRoutes(health="/health", predict="/predict", port=8080),
    )
    assert count > 300
    assert wrong == []
    assert (accepted, disguised) == (0, 413)
    assert good == [202, 200, 200, 200, 200, 200], "the control: what is no mistake is drawn"


async def first_job(http: httpx.AsyncClient) -> str:
    """The id of the only job that is not over, once there is one."""
    while True:
        for job in (await http.get("/jobs")).json()["jobs"]:
            if job["state"] in ("queued", "running"):
                return str(job["id"])
        await asyncio.sleep(0.01)


def test_a_cancelled_job_is_nobodys_failure_and_not_asked_for_again(run_http):
    async def scenario(core: Core, http: httpx.AsyncClient) -> Any:
        held = core.engine.unet = Released()
        answers = []
        for name in ("openai", "a1111", "kserve", "huggingface"):
            path, body = DIALECTS[name]
            asking = asyncio.create_task(http.post(path, json=body({"prompt": "a", "steps": 4})))
            assert (await http.delete(f"/jobs/{await first_job(http)}")).json()["state"] == "cancelled"
            answer = await asking
            answers.append((answer.status_code, complaint(answer)))
        held.steps.release(100)
        return answers

    assert run_http(scenario) == [(410, None)] * 4


def test_openais_client_does_not_ask_again_for_what_failed_or_was_cancelled(run_http):
    """It asks twice more by itself after 409 and from 500 on, unless told: a job was drawn each time."""

    async def scenario(core: Core, http: httpx.AsyncClient) -> Any:
        client = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", http_client=http)
        plain, held = core.engine.unet, Released()
        core.engine.unet = held
        asking = asyncio.create_task(client.images.generate(prompt="a", extra_body={"seed": 1}))
        await http.delete(f"/jobs/{await first_job(http)}")
        with pytest.raises(openai.APIStatusError) as cancelled:
            await asking
        held.steps.release(100)

        def broken(*_: object) -> Any:
            raise RuntimeError("a kernel fails")

        core.engine.unet = broken
        with pytest.raises(openai.InternalServerError) as failed:
            await client.images.generate(prompt="a", extra_body={"seed": 2})
        core.engine.unet = plain
        made = await client.images.generate(prompt="a", response_format="url", extra_body={"seed": 3})
        found = await http.get(made.data[0].url)
        states = [(job["request"]["seed"], job["state"]) for job in (await http.get("/jobs")).json()["jobs"]]
        return cancelled.value.status_code, failed.value.status_code, sorted(states), found.status_code, made

    cancelled, failed, states, found, made = run_http(scenario, public_url=None)
    assert (cancelled, failed, found) == (410, 500, 200)
    assert states == [(1, "cancelled"), (2, "failed"), (3, "done")]
    assert made.data[0].url.startswith("http://127.0.0.1:8000/signed/")


def test_an_address_begins_with_the_one_that_the_operator_says(run_http):
    async def scenario(core: Core, http: httpx.AsyncClient) -> str:
        body = {"prompt": "a", "response_format": "url", "num_inference_steps": 1}
        told = await http.post("/v1/images/generations", json=body, headers={"X-Forwarded-Proto": "https"})
        return str(told.json()["data"][0]["url"])

    assert run_http(scenario, public_url="https://own.example/a").startswith("https://own.example/a/signed/")
    assert run_http(scenario).startswith("https://127.0.0.1:8000/signed/")


def test_odd_pictures_are_drawn_from_or_refused_and_fail_no_job(run_http):
    """Whatever is let in has to be something that can be drawn from."""
    plain = Image.new("RGB", (32, 32), "red")
    odd = {
        "16 bits": Image.fromarray(np.zeros((32, 32), np.uint16)),
        "palette": Image.new("P", (32, 32)),
        "grey with alpha": Image.new("LA", (32, 32)),
        "one bit": Image.new("1", (32, 32)),
        "alpha": Image.new("RGBA", (32, 32)),
        "wide": Image.new("RGB", (4000, 2)),
        "tall": Image.new("RGB", (1, 4096)),
        "one pixel": Image.new("RGB", (1, 1)),
    }

    async def scenario(core: Core, http: httpx.AsyncClient) -> Any:
        ended = {}
        for name, image in odd.items():
            for image_b64, mask in ((base64_of(image), None), (base64_of(plain), base64_of(image))):
                body = {
                    "prompt": "a",
                    "steps": 2,
                    "width": 32,
                    "height": 32,
                    "image": image_b64,
                    "mask": mask,
                }
                told = await http.post("/jobs", json=body)
                if told.status_code == 202:
                    job = (await http.get(f"/jobs/{told.json()['id']}", params={"wait_s": 60})).json()
                    ended[name, mask is None] = job["state"], job["error"]
                else:
                    ended[name, mask is None] = told.status_code, complaint(told)
        return ended

    ended = run_http(scenario)
    assert set(ended.values()) <= {("done", None), (422, None)}
    assert ended["16 bits", True] == ("done", None)
    assert ended["wide", False] == (422, None), "a mask of another shape"
