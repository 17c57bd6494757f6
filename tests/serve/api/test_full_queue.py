"""While the queue is full, requests are refused before they are parsed; a job that is there is given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import httpx
import pytest

from serve.conftest import Server

LONG = {"prompt": "a red circle", "steps": 150, "num": 4, "seed": 1}
WRONG = {"prompt": "a red circle", "steps": "many"}


@pytest.fixture
def http(model_folder, tmp_path) -> Iterator[httpx.Client]:
    """A real server whose queue has few places, where one job is done."""
    started = Server(model_folder, tmp_path / "state", "--queue", "4", "--rate", "1000000").ready()
    put(started.http, "first", {"prompt": "a", "steps": 2})
    assert started.http.get("/jobs/first?wait_s=60").json()["state"] == "done"
    yield started.http
    started.kill()


def put(http: httpx.Client, job_id: str, body: object) -> httpx.Response:
    return http.put(f"/jobs/{job_id}", json=body)


def fill(http: httpx.Client) -> None:
    """Long jobs until two in a row find no place."""
    refused = 0
    for i in itertools.count():
        refused = refused + 1 if put(http, f"long{i}", LONG).status_code == 429 else 0
        if refused == 2:
            return
        assert i < 200


def test_a_full_queue_refuses_before_it_reads_and_gives_what_is_there(http):
    assert put(http, "wrong", WRONG).status_code == 422
    fill(http)
    for answer in (
        put(http, "wrong", WRONG),
        http.post("/sdapi/v1/txt2img", json={"prompt": "a", "steps": "many"}),
        http.post("/v1/images/generations", json={"prompt": 7}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers.get("connection") != "close", "the body was read: the next request may use it"
    done, running = put(http, "first", {"prompt": "a", "steps": 2}), put(http, "long0", LONG)
    assert (done.status_code, done.json()["state"]) == (202, "done")
    assert (running.status_code, running.json()["state"]) == (202, "running")
    assert put(http, "first", {"prompt": "b", "steps": 2}).status_code == 409
    assert http.get("/jobs/first").status_code == 200
