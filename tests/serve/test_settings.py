"""Every bound by file and option, quotas and shares by key, the path prefix, and Idempotency-Key."""

from __future__ import annotations

import asyncio
import base64
import io
import subprocess
import sys
from typing import Any

import pytest
import typer.testing
from PIL import Image

from darkroom.cli import serving
from darkroom.cli.application import app
from darkroom.errors import InputError
from darkroom.serve.api import app as serve_app
from darkroom.serve.api.guard import make_key
from darkroom.serve.engine.tickets import Entry, FairQueue
from darkroom.serve.settings import KeyLimits, Limits, ServeSettings, VertexRoutes

BODY = {"prompt": "a red circle", "steps": 3, "seed": 3}
NOTHING_SAID = dict.fromkeys(
    ("limits", "limit", "queue", "queue_s", "rate_per_minute", "keep_s", "keep_bytes", "key_file")
)


def said(**options):
    return serving._limits({**NOTHING_SAID, **options})


def test_bounds_come_from_the_file_then_limit_then_options_of_their_own(tmp_path):
    file = tmp_path / "limits.yaml"
    file.write_text("steps: 40\nqueue: 10\nkeys:\n  alice: {pictures_per_day: 5, share: 3}\n")
    assert said() == Limits(queue_per_key=256)
    told = said(limits=file, limit=["steps=50", "side_pixels=512"], queue=20)
    assert (told.steps, told.side_pixels, told.queue, told.queue_per_key) == (50, 512, 20, 20)
    assert told.keys == {"alice": KeyLimits(pictures_per_day=5, share=3)}
    assert told.of_key("alice").rate_per_minute == told.rate_per_minute
    assert told.of_key("bob").pictures_per_day is None
    assert said(limits=file, key_file=tmp_path).queue_per_key == 5
    # By --limit, whose values are text, the part of one key had stayed 128: all of a small queue.
    assert said(limit=["queue=8"], key_file=tmp_path).queue_per_key == 4
    assert said(limit=["queue=8", "queue_per_key=7"], key_file=tmp_path).queue_per_key == 7


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("steps: many", "limit steps"),
        ("colour: 3", "limit colour"),
        ("- 3", "NAME: VALUE"),
        ("a: [", "no YAML"),
        ("queeu: 8", "limit queeu: there is no such limit.*write queue"),
        ("keys: {a: {pictures_a_day: 1}}", "keys.a.pictures_a_day: there is no such limit.*pictures_per_day"),
        ("queue: 8\nqueue: 9", "given twice"),  # the last had won
        ("queue: yes", "limit queue: True was given"),  # it had been 1
        ("keys: {a: {share: on}}", "limit share: True was given"),
        ("queue: 010", "010"),  # it had been 8
        ("queue_s: .inf", "limit queue_s: must be a finite number"),
        ("head_s: 1e400", "limit head_s: must be a finite number"),
        ("{" * 3000, "nested deeper"),  # it had been a traceback
        ("steps: 40\nsteps: 400", "the key 'steps' is given twice"),
        ("steps: 010", "'010' is another number in other versions"),
        ("queue_s: 1:30", "'1:30' is another number"),
        ("[" * 50_000, "nested deeper than 32"),
        ('steps: "\\U00110000"', "no YAML"),
        ("a: &a [x, *a]", "stands inside of what it names"),
    ],
)
def test_a_limits_file_with_a_mistake_is_refused_in_one_line(tmp_path, text, why):
    file = tmp_path / "limits.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=why) as error:
        said(limits=file)
    assert "\n" not in str(error.value)


def test_limits_for_a_key_that_there_is_not_are_named_at_the_start(tmp_path, monkeypatch):
    """A name mistyped left a key without its quota, and nothing said so."""
    make_key(tmp_path / "keys.txt", "alice")
    bounds = Limits(keys={"alice": KeyLimits(share=2), "alcie": KeyLimits(pictures_per_day=3)})
    monkeypatch.setattr(serve_app, "_listen", lambda *_: pytest.exit("far enough"))
    lines = []
    monkeypatch.setattr(serve_app.LOG, "warning", lambda line, *of: lines.append(line % of))
    settings = {"model": "tiny", "state": tmp_path / "state", "key_file": tmp_path / "keys.txt"}
    with pytest.raises(pytest.exit.Exception, match="far enough"):
        serve_app.run(ServeSettings(**settings, limits=bounds))
    assert lines == ["limits for key 'alcie': there is no key of that name"]


def test_a_limit_that_there_is_not_is_refused_with_those_there_are():
    ran = typer.testing.CliRunner().invoke(app, ["serve", "model", "--limit", "colour=3"])
    assert isinstance(ran.exception, InputError)
    assert "side_pixels" in str(ran.exception)


def test_a_key_has_its_pictures_of_the_day_over_restarts_and_status_tells(run_http, tmp_path):
    keys = tmp_path / "keys.txt"
    alice, bob = ({"Authorization": f"Bearer {make_key(keys, name)}"} for name in ("alice", "bob"))
    limits = Limits(keys={"alice": KeyLimits(pictures_per_day=3)})

    async def first(core, http):
        assert (await http.put("/jobs/a", json={**BODY, "num": 2}, headers=alice)).status_code == 202
        assert (await http.put("/jobs/a", json={**BODY, "num": 2}, headers=alice)).status_code == 202, (
            "the same"
        )
        over = await http.put("/jobs/b", json={**BODY, "num": 2}, headers=alice)
        assert (over.status_code, over.json()["error"]["code"]) == (429, "quota")
        assert 0 < int(over.headers["retry-after"]) <= 86_400
        assert (await http.put("/jobs/c", json=BODY, headers=alice)).status_code == 202
        assert (await http.put("/jobs/b", json={**BODY, "num": 2}, headers=bob)).status_code == 202
        status = (await http.get("/status", headers=alice)).json()
        assert status["key"]["pictures_today"] == status["key"]["pictures_per_day"] == 3
        assert status["limits"]["steps"] == 150
        assert "keys" not in status["limits"], "other keys are nobody's business"

    async def again(core, http):
        assert (await http.put("/jobs/d", json=BODY, headers=alice)).status_code == 429

    run_http(first, key_file=keys, limits=limits)
    run_http(again, key_file=keys, limits=limits)


def test_pictures_made_larger_count_among_those_of_the_day(run_http, tmp_path):
    """They had been free, in any number."""
    headers = {"Authorization": f"Bearer {make_key(tmp_path / 'keys.txt', 'alice')}"}
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    image = base64.b64encode(file.getvalue()).decode()
    larger = {"upscaler_1": "Lanczos", "upscaling_resize": 2}

    async def scenario(core, http):
        async def post(path: str, **body: Any) -> tuple[int, int]:
            answer = await http.post(f"/sdapi/v1/{path}", json={**larger, **body}, headers=headers)
            status = (await http.get("/status", headers=headers)).json()
            return answer.status_code, status["key"]["pictures_today"]

        assert await post("extra-single-image", image=image) == (200, 1)
        assert await post("extra-single-image", image=image, upscaler_1="None") == (200, 1)
        assert await post("extra-single-image", image="none") == (422, 1)
        assert await post("extra-batch-images", imageList=[{"data": image}] * 3) == (429, 1)
        assert await post("extra-batch-images", imageList=[{"data": image}] * 4) == (422, 1)
        assert await post("extra-batch-images", imageList=[{"data": image}] * 2) == (200, 3)
        assert await post("extra-single-image", image=image) == (429, 3)
        job = await http.post("/jobs", json=BODY, headers=headers)
        assert (job.status_code, job.json()["error"]["code"]) == (429, "quota")

    run_http(scenario, key_file=tmp_path / "keys.txt", limits=Limits(pictures_per_day=3))


def test_a_key_of_three_shares_gets_three_times_the_work_while_others_wait():
    queue = FairQueue({"alice": 3})
    for i in range(30):
        for key in ("alice", "bob"):
            queue.push(Entry(i, key, "512", 1.0))
    first = [queue.take().key for _ in range(20)]
    assert first.count("alice") == 15
    assert [entry.key for entry in queue.in_order()[:4]].count("alice") == 3
    even = FairQueue()
    for i in range(30):
        for key in ("alice", "bob"):
            even.push(Entry(i, key, "512", 1.0))
    assert [even.take().key for _ in range(20)].count("alice") == 10


def test_a_request_sent_again_with_its_idempotency_key_is_drawn_once(run_http):
    async def scenario(core, http):
        told = {"Idempotency-Key": "order 66"}
        body = {"prompt": "a red circle", "num_inference_steps": 3}
        once = await http.post("/v1/images/generations", json=body, headers=told)
        again = await http.post("/v1/images/generations", json=body, headers=told)
        assert once.status_code == again.status_code == 200
        assert once.json()["data"] == again.json()["data"]
        other = await http.post("/v1/images/generations", json={**body, "seed": 4}, headers=told)
        assert other.status_code == 409
        first = await http.post("/jobs", json=BODY, headers=told)
        second = await http.post("/jobs", json=BODY, headers=told)
        assert first.json()["id"] == second.json()["id"]
        assert (await http.post("/jobs", json=BODY)).json()["id"] != first.json()["id"]
        assert (
            await http.post("/jobs", json=BODY, headers={"Idempotency-Key": "x" * 256})
        ).status_code == 422
        return len((await http.get("/jobs")).json()["jobs"])

    assert run_http(scenario) == 3


def test_page_and_api_answer_below_a_path_and_at_the_root(run_http):
    async def scenario(core, http):
        moved = await http.get("/studio/pictures")
        assert (moved.status_code, moved.headers["location"]) == (308, "/studio/pictures/")
        page = await http.get("/studio/pictures/")
        assert '"page/app.js"' in page.text
        assert (await http.get("/studio/pictures/page/app.js")).status_code == 200
        assert (await http.get("/studio/pictures/ready")).json() == {"state": "ready"}
        assert (await http.get("/ready")).status_code == 200
        assert (await http.get("/studio/picturesque/ready")).status_code == 404
        body = {"prompt": "a", "num_inference_steps": 2, "response_format": "url"}
        [picture] = (await http.post("/studio/pictures/v1/images/generations", json=body)).json()["data"]
        assert picture["url"].startswith("http://127.0.0.1:8000/studio/pictures/signed/")
        assert (await http.get(picture["url"])).content[:4] == b"\x89PNG"

    run_http(scenario, prefix="/studio/pictures")


def test_a_prefix_is_a_plain_path():
    assert serving._prefix("studio/") == "/studio"
    with pytest.raises(InputError, match="--path-prefix"):
        serving._prefix("/a b")


def test_a_client_that_left_finds_its_picture_when_it_asks_again(run_http):
    async def scenario(core, http):
        told, body = {"Idempotency-Key": "k"}, {"prompt": "a", "num_inference_steps": 40}
        asking = asyncio.create_task(http.post("/v1/images/generations", json=body, headers=told))
        while not len(core._active):
            await asyncio.sleep(0.005)
        asking.cancel()
        await asyncio.sleep(0.05)
        answer = await http.post("/v1/images/generations", json=body, headers=told)
        assert answer.status_code == 200
        return len((await http.get("/jobs")).json()["jobs"])

    assert run_http(scenario) == 1


def kserve(*prompts: str) -> dict[str, Any]:
    tensor = {"name": "prompt", "datatype": "BYTES", "shape": [len(prompts)], "data": prompts}
    return {"inputs": [tensor], "parameters": {"steps": 1, "seed": 5}}


def predict(*prompts: str) -> dict[str, Any]:
    instances = [{"prompt": prompt} for prompt in prompts]
    return {"instances": instances, "parameters": {"num_inference_steps": 1, "seed": 5}}


@pytest.mark.parametrize(
    ("path", "body", "routes"),
    [
        ("/v2/models/small/infer", kserve, None),
        ("/predict", predict, VertexRoutes(health="/health", predict="/predict", port=8080)),
    ],
)
def test_an_idempotency_key_with_more_or_fewer_prompts_is_a_conflict(run_http, path, body, routes):
    """Each prompt is a job: those of both bodies were found again, and the others drawn."""

    async def scenario(core, http):
        bodies = body("cat", "dog"), body("cat", "dog"), body("cat"), body("cat", "dog", "cow")
        told = {"Idempotency-Key": "order 66"}
        answers = [await http.post(path, json=one, headers=told) for one in bodies]
        key = "local" if routes is None else "platform"
        return answers, len(await core.jobs(key=key))

    (first, same, fewer, more), jobs = run_http(scenario, vertex=routes)
    assert first.status_code == 200
    assert same.json() == first.json()
    for other in (fewer, more):
        assert (other.status_code, other.json().get("code")) == (409, "conflict")
    assert jobs == 2


def test_an_idempotency_key_holds_in_a1111s_api_and_its_job_is_one_of_that_api(run_http):
    async def scenario(core, http):
        told, body = {"Idempotency-Key": "order 66"}, {"prompt": "a red circle", "steps": 3}
        once = await http.post("/sdapi/v1/txt2img", json=body, headers=told)
        again = await http.post("/sdapi/v1/txt2img", json=body, headers=told)
        assert once.status_code == again.status_code == 200
        assert once.json()["images"] == again.json()["images"]
        other = await http.post("/sdapi/v1/txt2img", json={**body, "seed": 4}, headers=told)
        assert other.status_code == 409
        jobs = (await http.get("/jobs")).json()["jobs"]
        assert (await http.post("/sdapi/v1/txt2img", json=body)).json()["images"] != once.json()["images"]
        return [job["id"][:6] for job in jobs]

    assert run_http(scenario) == ["sdapi-"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny", "--adapters", "./nowhere"], "--adapters 'nowhere' is no folder"),
        (["./nowhere"], "no model at './nowhere'"),
    ],
)
def test_a_folder_that_is_not_there_is_refused_before_anything_heavy_is_imported(arguments, said):
    """Importing the server takes eight seconds of a processor."""
    code = (
        "import sys; from darkroom.cli.application import main\n"
        f"try: main(['serve', *{arguments}])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'fastapi' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout.split(), ran.stderr.count("\n")) == (["2", "False", "False"], 1)
    assert said in ran.stderr
