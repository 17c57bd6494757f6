"""One line a request and a job: ids, phases, hashes, why refused; never a key."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import logging
import re
import socket
from typing import Any

import pytest

from darkroom.errors import InputError
from darkroom.serve import logs
from darkroom.serve.api.guard import make_key
from darkroom.serve.jobs.admission import OF_PROMPT
from darkroom.serve.settings import VertexRoutes
from serve.conftest import free_port

BODY = {"prompt": "a red circle", "steps": 3, "seed": 3}


def lines_of(run: Any, form: str = "json") -> list[Any]:
    """What is written while `run` runs."""
    stream = io.StringIO()
    logs.set_up(form, "info", stream)
    run()
    written = stream.getvalue().splitlines()
    return [json.loads(line) for line in written] if form == "json" else written


def test_a_request_and_its_job_have_a_line_each_and_the_picture_is_found_by_its_hash(run_http, tmp_path):
    keys = tmp_path / "keys.txt"
    key = make_key(keys, "alice")
    seen: dict[str, Any] = {}

    async def scenario(core, http):
        known = {"Authorization": f"Bearer {key}"}
        answer = await http.post("/jobs", json=BODY, headers={**known, "X-Request-Id": "trace-17"})
        seen["id"] = answer.headers["x-request-id"]
        job = (await http.get(f"/jobs/{answer.json()['id']}?wait_s=30", headers=known)).json()
        assert job["state"] == "done"
        seen["png"] = (await http.get(f"/jobs/{job['id']}/pictures/0", headers=known)).content
        await http.post("/jobs", json={**BODY, "steps": 999}, headers={**known, "X-Request-Id": "bad id\t"})
        await http.get("/ready")

    lines = lines_of(lambda: run_http(scenario, key_file=keys))
    assert seen["id"] == "trace-17"
    [job] = [line for line in lines if line["message"] == "job"]
    [accepted] = [
        line for line in lines if line.get("request_id") == "trace-17" and line["message"] == "request"
    ]
    assert accepted["route"] == "/jobs"
    assert accepted["status"] == 202
    assert accepted["key"] == "alice"
    assert accepted["jobs"] == [job["job"]]
    assert job["request_id"] == "trace-17"
    assert job["state"] == "done"
    assert set(job["phases"]) == {"queue", "text", "denoise", "decode", "write"}
    assert all(seconds >= 0 for seconds in job["phases"].values())
    assert job["sha256"] == [hashlib.sha256(seen["png"]).hexdigest()]
    [refused] = [line for line in lines if line.get("refused")]
    assert refused["refused"] == "over_limit"
    assert "steps: at most 150" in refused["why"]
    assert refused["request_id"] != "bad id\t"
    assert not [line for line in lines if line.get("path") == "/ready"], "probes that go well are not told"
    assert key not in json.dumps(lines), "a key is written down nowhere"


def pictures_in(answer: Any) -> list[bytes]:
    """The files of an answer in any dialect."""
    if answer.headers["content-type"].startswith("image/"):
        return [answer.content]
    found = []
    for line in (
        answer.text.splitlines() if "event-stream" in answer.headers["content-type"] else [answer.text]
    ):
        found += re.findall(r'"(?:b64_json|image|bytesBase64Encoded|data|images)": *\[?"([^"]{99,})"', line)
    return [base64.b64decode(one) for one in found]


def test_a_picture_is_found_by_its_hash_whatever_the_dialect_and_the_format(run_http, tmp_path):
    """The hash of a JPEG, a WebP or an upscaled picture stood nowhere: the job has that of its PNG."""
    few = {"num_inference_steps": 2, "guidance_scale": 1.0}
    openai = {"prompt": "a", "size": "32x32", "response_format": "b64_json"}
    tensor = {"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    sent: dict[str, list[bytes]] = {}
    known = {"Authorization": f"Bearer {make_key(tmp_path / 'keys.txt', 'alice')}"}

    async def scenario(core, http):
        async def ask(name: str, route: str, body: dict, **headers: str) -> list[bytes]:
            answer = await http.post(route, json=body, headers={"X-Request-Id": name, **known, **headers})
            assert answer.status_code == 200, answer.text
            sent[name] = pictures_in(answer)
            return sent[name]

        for kind in ("png", "jpeg", "webp"):
            await ask(f"openai-{kind}", "/v1/images/generations", {**openai, "output_format": kind})
            await ask(f"hf-{kind}", "/", {"inputs": "a", "parameters": few}, Accept=f"image/{kind}")
            wanted = {"name": "image", "parameters": {"format": kind}}
            body = {"inputs": [tensor], "outputs": [wanted], "parameters": few}
            await ask(f"kserve-{kind}", f"/v2/models/{core.catalogue.model.name}/infer", body)
        more = {"output_format": "jpeg", "stream": True}
        await ask("openai-stream", "/v1/images/generations", {**openai, **more})
        await ask("vertex", "/predict", {"instances": [{"prompt": "a"}], "parameters": few})
        [png] = await ask(
            "a1111", "/sdapi/v1/txt2img", {"prompt": "a", "steps": 2, "width": 32, "height": 32}
        )
        image = base64.b64encode(png).decode()
        await ask("upscaled", "/sdapi/v1/extra-single-image", {"image": image, "upscaler_1": "Lanczos"})
        again = {"Idempotency-Key": "one", "Accept": "image/jpeg"}
        first = await ask("once", "/", {"inputs": "a", "parameters": few}, **again)
        assert await ask("again", "/", {"inputs": "a", "parameters": few}, **again) == first

    vertex = VertexRoutes(health="/health-vertex", predict="/predict", port=8080)
    lines = lines_of(lambda: run_http(scenario, vertex=vertex, key_file=tmp_path / "keys.txt"))
    jobs = {line["job"]: line for line in lines if line["message"] == "job"}
    requests = {line["request_id"]: line for line in lines if line["message"] == "request"}
    for name, pictures in sent.items():
        assert pictures, name
        line = requests[name]
        hashes = [
            *line.get("sha256", ()),
            *(one for job in line.get("jobs", ()) for one in jobs[job]["sha256"]),
        ]
        assert {hashlib.sha256(one).hexdigest() for one in pictures} <= set(hashes), name
        assert ("jobs" in line) == (name != "upscaled")
    assert requests["once"]["jobs"] == requests["again"]["jobs"]


def test_text_lines_have_the_same_fields_and_levels_and_formats_are_checked(run_http):
    async def scenario(core, http):
        await http.post("/jobs", json={**BODY, "steps": 999})
        await http.get("/%1b[2Jnothing")

    lines = lines_of(lambda: run_http(scenario), "text")
    assert [line for line in lines if r'path="/\u001b[2Jnothing"' in line], "no path steers a terminal"
    [line] = [line for line in lines if " request " in line and "/jobs" in line]
    assert "route=/jobs status=422" in line
    assert 'why="steps: at most 150 steps"' in line
    with pytest.raises(InputError, match="text, json"):
        logs.set_up("xml")
    with pytest.raises(InputError, match="debug, info"):
        logs.set_up("json", "loud")


def test_a_failed_job_says_why(run_http):
    async def scenario(core, http):
        answer = await http.put("/jobs/late", json={**BODY, "steps": 150, "num": 8, "deadline_s": 0.001})
        assert answer.status_code == 202
        while (await http.get("/jobs/late")).json()["state"] != "failed":
            await asyncio.sleep(0.01)

    lines = lines_of(lambda: run_http(scenario))
    [job] = [line for line in lines if line["message"] == "job"]
    assert (job["state"], job["error"], job["id"]) == ("failed", "deadline", "late")


def test_a_traceback_is_part_of_its_line():
    def run() -> None:
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("darkroom.serve").exception("failed")

    [line] = lines_of(run)
    assert line["level"] == "error"
    assert "ValueError: no" in line["traceback"]


def test_a_message_that_quotes_a_client_stays_on_its_line_and_in_order():
    """`job ... failed: ...` had brought an error's text as it was, and fields came after the traceback."""

    def run() -> None:
        try:
            raise ValueError("a\n2026-01-01 00:00:00,000 INFO request status=200 \x1b[2J")
        except ValueError as error:
            logs.LOG.warning("job %s failed: %s", "7", error, exc_info=True, extra={"fields": {"job": "7"}})

    first, *rest = lines_of(run, "text")
    assert first.endswith(r"failed: a\n2026-01-01 00:00:00,000 INFO request status=200 \x1b[2J job=7")
    assert rest[0] == "Traceback (most recent call last):"


def test_every_line_is_json_also_for_what_is_no_http_and_what_others_warn_of(serve):
    port = str(free_port())
    server = serve("--log-format", "json", "--port", port)
    server.first_answer("/live")
    server.ready()
    with socket.create_connection(("127.0.0.1", int(port))) as there:
        there.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert b"400" in there.recv(1000)
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert [line for line in lines if line["message"].startswith("Invalid HTTP")]


def test_no_prompt_is_written_down_where_the_answer_quotes_it(run_http):
    changing = "".join(f"[Sibylle{i}:b:{i}]" for i in range(120))
    asked = (
        {"prompt": changing, "weighting": "a1111", "steps": 140},
        {"prompt": "Sibylle " + "x1 " * 1300, "weighting": "none"},
        {"prompt": "a <lora:Sibylle:much>"},
    )

    async def scenario(core, http):
        return [await http.post("/jobs", json={**BODY, **one}) for one in asked]

    answers: list[Any] = []
    lines = lines_of(lambda: answers.extend(run_http(scenario)))
    assert [answer.status_code for answer in answers] == [422] * 3
    assert all("Sibylle" in answer.json()["error"]["message"] for answer in answers)
    assert [line["why"] for line in lines if line.get("refused")] == [OF_PROMPT] * 3
    assert "Sibylle" not in json.dumps(lines)
