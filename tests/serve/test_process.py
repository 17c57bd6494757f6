"""Real servers on loopback: killed, restarted, drained, left; and what they answer to strangers."""

from __future__ import annotations

import io
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

import warm
from darkroom import sample
from serve.conftest import DARKROOM, Server, difference, free_port

BODY = {"prompt": "a red circle", "steps": 12, "seed": 3}


def png(server: Server, job_id: str, index: int = 0) -> Image.Image:
    answer = server.http.get(f"/jobs/{job_id}/pictures/{index}")
    assert answer.status_code == 200
    return Image.open(io.BytesIO(answer.content))


@pytest.mark.nightly
def test_accepted_jobs_survive_being_killed_again_and_again(serve, small, tmp_path):
    draw = random.Random(3)
    accepted: dict[str, int] = {}
    for round_ in range(5):
        server = serve().ready()
        for i in range(4):
            name = f"job{round_}-{i}"
            body = {"prompt": "a red circle", "steps": draw.choice([3, 10, 40]), "seed": 10 * round_ + i}
            assert server.http.put(f"/jobs/{name}", json=body).status_code == 202
            accepted[name] = body["seed"]
        time.sleep(draw.uniform(0, 0.3))
        server.kill()
    server = serve().ready()
    jobs = {name: server.finished(name) for name in accepted}
    assert {job["state"] for job in jobs.values()} == {"done"}
    assert {name: job["pictures"][0]["seed"] for name, job in jobs.items()} == accepted
    listed = server.http.get("/jobs", params={"limit": 1000}).json()["jobs"]
    assert sorted(job["id"] for job in listed) == sorted(accepted)
    files = list((tmp_path / "state" / "pictures").glob("*/*/*"))
    assert len(files) == len(accepted), "one picture each, and nothing half-written"
    for name in ("job0-0", "job3-2"):
        body = jobs[name]["request"]
        lone = sample.generate(
            small,
            body["prompt"],
            steps=body["steps"],
            seed=body["seed"],
            optimise="none",
            notice=lambda _: None,
        )
        assert difference(png(server, name), lone[0].image) <= 1
    assert server.stop() == 0


def test_sigterm_drains_and_what_was_left_runs_next_time(serve):
    server = serve("--drain", "30", "--capacity", "2").ready()
    server.http.put("/jobs/on-its-way", json={**BODY, "steps": 60})
    while server.http.get("/jobs/on-its-way").json()["state"] != "running":
        time.sleep(0.01)
    server.http.put("/jobs/waiting", json=BODY)
    answers = []
    client = threading.Thread(
        target=lambda: answers.append(server.http.post("/v1/images/generations", json={"prompt": "a"}))
    )
    client.start()
    while len(server.http.get("/jobs").json()["jobs"]) < 3:
        time.sleep(0.01)
    time.sleep(0.2)  # its row is there before the server knows that somebody waits for it
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert server.http.get("/ready").json()["error"]["code"] == "draining"
    assert server.http.put("/jobs/late", json=BODY).status_code == 503
    assert server.process.wait(60) == 0
    client.join()
    assert answers[0].status_code == 200, "whoever waits on a connection is served first"
    again = serve().ready()
    assert again.http.get("/jobs/on-its-way").json()["state"] == "done"
    assert again.finished("waiting")["state"] == "done"
    assert again.http.get("/jobs/late").status_code == 404


def test_sigterm_ends_a_server_that_still_loads(serve):
    server = serve("--drain", "1", "--port", str(free_port()))
    assert server.first_answer("/ready").json()["error"]["code"] == "loading"
    assert server.stop(60) == 0


def test_a_second_signal_leaves_at_once_with_jobs_kept(serve):
    server = serve("--drain", "600").ready()
    server.http.put("/jobs/long", json={**BODY, "steps": 150, "num": 4})
    while server.http.get("/jobs/long").json()["state"] != "running":
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    again = serve().ready()
    assert again.http.get("/jobs/long").json()["state"] in ("queued", "running")
    assert again.http.delete("/jobs/long").json()["state"] == "cancelled"


def test_a_client_that_leaves_frees_its_rows(serve):
    server = serve().ready()
    with pytest.raises(Exception, match="timed out"):
        server.http.post(
            "/v1/images/generations", json={"prompt": "a", "num_inference_steps": 150, "n": 8}, timeout=0.7
        )
    start = time.monotonic()
    while server.http.get("/status").json()["jobs"]:
        assert time.monotonic() - start < 10
        time.sleep(0.02)
    assert [job["state"] for job in server.http.get("/jobs").json()["jobs"]] == ["cancelled"]


def test_events_are_streamed_and_a_lost_stream_goes_on(serve):
    server = serve().ready()
    server.http.put("/jobs/x", json={**BODY, "steps": 40})
    with server.http.stream("GET", "/jobs/x/events", headers={"Last-Event-ID": "41"}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = list(stream.iter_lines())
    ids = [int(line[4:]) for line in lines if line.startswith("id: ")]
    assert ids == list(range(42, 42 + len(ids)))
    assert [line for line in lines if line.startswith("event: ")][-1] == "event: done"
    again = server.http.get("/jobs/x/events").text
    assert again.startswith("id: 1\nevent: done\n")


def test_keys_open_everything_but_health_and_signed_pictures(serve, tmp_path):
    keys = tmp_path / "keys"
    command = [*DARKROOM, "serve", "--api-key-file", str(keys), "--make-key"]
    alice, bob = (
        warm.run([*command, name], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("alice", "bob")
    )
    assert alice not in keys.read_text()
    server = serve("--api-key-file", str(keys)).ready()
    for method, path in (
        ("GET", "/jobs"), ("PUT", "/jobs/x"), ("DELETE", "/jobs/x"), ("GET", "/metrics"), ("POST", "/maps"),
        ("GET", "/openapi.json"), ("GET", "/v1/models"), ("GET", "/nowhere"),
        ("GET", "/live/"),
    ):  # fmt: skip
        assert server.http.request(method, path).status_code == 401, path
    assert server.http.get("/jobs", headers={"Authorization": f"Bearer {alice}x"}).status_code == 401
    assert server.http.get("/live").status_code == 200
    as_alice, as_bob = {"Authorization": f"Bearer {alice}"}, {"X-API-Key": bob}
    assert server.http.put("/jobs/x", json=BODY, headers=as_alice).status_code == 202
    assert server.http.get("/jobs/x", headers=as_bob).status_code == 404
    assert server.http.delete("/jobs/x", headers=as_bob).status_code == 404
    body = {"prompt": "a", "num_inference_steps": 3, "response_format": "url"}
    url = server.http.post("/v1/images/generations", json=body, headers=as_alice).json()["data"][0]["url"]
    assert server.http.get(url).headers["content-type"] == "image/png"
    assert server.http.get(url[:-1] + ("0" if url[-1] != "0" else "1")).status_code == 403
    assert server.http.get(url.replace("until=", "until=9")).status_code == 403
    assert server.http.get(url.partition("signature=")[0] + "signature=%F3%90%99%B4n").status_code == 422


def test_foreign_pages_names_and_bodies_are_refused(serve):
    server = serve().ready()
    for origin in ("https://evil.example", "null", server.url.replace("127.0.0.1", "evil.example")):
        assert server.http.delete("/jobs/x", headers={"Origin": origin}).status_code == 403
    assert server.http.get("/jobs", headers={"Origin": server.url}).status_code == 200
    assert server.http.get("/jobs", headers={"Host": "evil.example"}).status_code == 403
    assert server.http.put("/jobs/x", content=b" " * (17 * 2**20)).status_code == 413
    for content, status in (
        (b"{", 400),
        (b'{"prompt": "a", "steps": NaN}', 422),
        (b'{"prompt": "a", "guidance": Infinity}', 422),
        (b'{"prompt": "a", "guidance": 1e999}', 422),
        (b'{"prompt": "a", "steps": "20"}', 422),
        (b'{"prompt": "a", "steps": true}', 422),
        (b'{"prompt": "a", "path": "/etc/passwd"}', 422),
        (b'{"prompt": "a\\u0000b"}', 422),
        (b'{"prompt": "\\ud800"}', 422),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": 3}', 422),
        (b"", 422),
    ):
        answer = server.http.put("/jobs/x", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == status, (content[:40], answer.text)
        told = answer.json()["error"]
        assert told["message"]
        assert "Traceback" not in answer.text
        assert "0x" not in answer.text
    unknown = server.http.put("/jobs/x", json={**BODY, "path": "/etc/passwd"}).json()["error"]
    assert (unknown["code"], unknown["param"]) == ("unknown_field", "path")
    for path in ("/jobs/..%2f..%2fetc", "/jobs/%2e%2e", "/jobs/" + "x" * 65, "/signed/../x/0.png"):
        assert server.http.get(path).status_code in (403, 404, 422), path
    assert "darkroom_requests_refused_total" in server.http.get("/metrics").text


def test_a_public_address_without_keys_is_refused(model_folder, tmp_path):
    command = [*DARKROOM, "serve", str(model_folder), "--host", "0.0.0.0"]
    done = warm.run(
        [*command, "--state", str(tmp_path / "s")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "--make-key" in done.stderr


def test_two_servers_do_not_share_a_folder(serve, model_folder, tmp_path):
    serve().ready()
    command = [*DARKROOM, "serve", str(model_folder), "--port", "0"]
    done = warm.run(
        [*command, "--state", str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "another server" in done.stderr


LOOKED_AT = """
import contextlib, gc, os, signal, sys, threading, time, httpx
from darkroom.serve.api.app import run
from darkroom.serve.settings import ServeSettings

def look():
    while True:
        time.sleep(0.2)
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{sys.argv[3]}/ready").status_code == 200:
                break
    until = time.monotonic() + 60
    while not gc.get_freeze_count() and time.monotonic() < until:
        time.sleep(0.02)
    print(gc.get_freeze_count(), len(gc.get_objects()))
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=look, daemon=True).start()
run(ServeSettings(model=sys.argv[1], state=sys.argv[2], port=int(sys.argv[3])))
"""


def test_a_search_for_garbage_has_little_to_look_at(model_folder, tmp_path):
    """All modules and weights stay for good: to look at them took all threads 0.4 s on two slow cores."""
    asked = [sys.executable, "-c", LOOKED_AT, str(model_folder), str(tmp_path / "state"), str(free_port())]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True).stdout
    kept, looked_at = map(int, told.split())
    assert kept > 100_000 > 2 * looked_at


def spoiled(model_folder: Path, folder: Path, how: str) -> Path:
    """A copy of the model with one thing wrong."""
    shutil.copytree(model_folder, folder)
    weights = next((folder / "unet").glob("*.safetensors"))
    if how == "truncated weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif how == "no weights":
        weights.unlink()
    elif how == "a config that is no JSON":
        (folder / "unet" / "config.json").write_text("{")
    elif how == "no vae":
        shutil.rmtree(folder / "vae")
    return folder


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("truncated weights", "unet"),
        ("no weights", "unet"),
        ("a config that is no JSON", "config.json"),
        ("no vae", "vae"),
        ("not there", "no model at"),
        ("empty", "no model folder"),
        ("no folder of adapters", "--adapters"),
        ("a file for adapters", "--adapters"),
        ("no folder of embeddings", "--embeddings"),
    ],
)
def test_a_wrong_model_or_folder_ends_the_command_in_one_line(model_folder, tmp_path, how, said):
    more: list[str] = []
    model = tmp_path / "model"
    if said.startswith("--"):
        model = model_folder
        (tmp_path / "a file for adapters").touch()
        more = [said, str(tmp_path / how)]
    elif how == "empty":
        model.mkdir()
    elif how != "not there":
        spoiled(model_folder, model, how)
    command = [*DARKROOM, "serve", str(model), "--port", "0", "--state", str(tmp_path / "state"), *more]
    done = warm.run(command, capture_output=True, text=True, timeout=100)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert lines[0].startswith("darkroom: ")
    assert said in lines[0]


def test_a_long_step_holds_up_nobody_and_the_server_ends_in_good_order_in_its_midst(serve):
    """It is one picture of 144 times the model's own pixels, where the operator allows for that."""
    server = serve("--capacity", "4096", "--drain", "0.5", "--lanes", "2").ready()
    large = {**BODY, "steps": 150, "width": 384, "height": 384}
    for name in ("cancelled", "kept"):
        assert server.http.put(f"/jobs/{name}", json=large).status_code == 202
    while len(server.http.get("/status").json()["rows"]) < 2:
        time.sleep(0.02)
    assert server.http.put("/jobs/small", json=BODY).status_code == 202
    assert server.finished("small")["state"] == "done"
    assert server.http.delete("/jobs/cancelled").json()["state"] == "cancelled"
    assert server.http.get("/live").status_code == 200
    assert server.http.get("/jobs/kept").json()["steps_done"] < 150
    assert server.stop() == 0
    assert "terminate" not in server.log.read_text()
    assert "Traceback" not in server.log.read_text()
