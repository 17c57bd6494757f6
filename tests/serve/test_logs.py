"""One line a request and a job: ids, phases, hashes, why refused; never a key."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import socket
from typing import Any

import pytest

from darkroom.errors import InputError
from darkroom.serve import logs
from darkroom.serve.api.guard import make_key
from darkroom.serve.jobs.admission import OF_PROMPT
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
