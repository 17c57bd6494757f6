"""What a scrape finds: by route, phase and key; probes while loading are no refusals."""

from __future__ import annotations

import re
import time

import httpx

from darkroom.serve.api.guard import make_key
from darkroom.serve.metrics import Metrics

BODY = {"prompt": "a red circle", "steps": 3, "seed": 3}


def value(text: str, line: str) -> float:
    """A sample's value."""
    [found] = re.findall(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    return float(found)


def test_requests_by_route_phases_and_keys_are_counted(run_http, tmp_path):
    keys = tmp_path / "keys.txt"
    key = make_key(keys, "alice")

    async def scenario(core, http):
        known = {"Authorization": f"Bearer {key}"}
        answer = await http.post("/jobs", json=BODY, headers=known)
        await http.get(f"/jobs/{answer.json()['id']}?wait_s=30", headers=known)
        await http.get("/nothing/here", headers=known)
        return (await http.get("/metrics", headers=known)).text

    text = run_http(scenario, key_file=keys)
    assert value(text, 'darkroom_http_request_seconds_count{route="/jobs"}') == 1
    assert value(text, 'darkroom_http_request_seconds_count{route="/jobs/{job_id}"}') == 1
    assert value(text, 'darkroom_http_request_seconds_count{route="other"}') == 1
    for phase in ("queue", "text", "denoise", "decode", "write"):
        assert value(text, f'darkroom_phase_seconds_count{{phase="{phase}"}}') == 1
    assert value(text, 'darkroom_key_jobs_total{key="alice"}') == 1
    assert value(text, 'darkroom_key_pictures_total{key="alice"}') == 1
    assert value(text, "darkroom_queue_age_seconds") == 0
    assert re.search(r'^darkroom_build_info\{.*model="small".*version="', text, re.MULTILINE)
    assert value(text, "process_open_fds") > 0


def test_probes_before_the_model_is_there_are_no_refusals(run_http):
    async def scenario(core, http):
        core.state = "loading"
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/v2/health/ready")).status_code == 503
        assert (await http.post("/jobs", json=BODY)).status_code == 503
        core.state = "ready"
        return (await http.get("/metrics")).text

    text = run_http(scenario)
    assert value(text, 'darkroom_requests_refused_total{code="loading"}') == 1, "the job, not the probes"


def test_the_age_of_the_queue_is_of_the_oldest_job_that_waits(run_http):
    async def scenario(core, http):
        core.engine._admit = lambda: None  # the device is busy for ever
        await http.post("/jobs", json=BODY)
        time.sleep(0.05)
        await http.post("/jobs", json=BODY)
        return (await http.get("/metrics")).text

    assert value(run_http(scenario), "darkroom_queue_age_seconds") >= 0.05


def test_metrics_have_a_port_of_their_own_that_wants_no_key(serve, tmp_path):
    keys = tmp_path / "keys.txt"
    make_key(keys, "alice")
    server = serve("--api-key-file", str(keys), "--metrics-port", "0", "--metrics-host", "127.0.0.1")
    [url] = re.findall(r"metrics on (http://\S+)", server.log.read_text())
    assert "darkroom_ready" in httpx.get(url).text
    assert server.http.get("/metrics").status_code == 401
    base = url.removesuffix("/metrics")
    assert "darkroom_ready" in httpx.get(f"{base}/jobs").text, "nothing but metrics is there"


def test_two_servers_of_a_process_count_apart():
    one, other = Metrics(), Metrics()
    one.pictures.inc()
    assert value(other.text().decode(), "darkroom_pictures_total") == 0


def test_memory_is_told_on_whichever_port_it_is_asked_for(run_core):
    async def scenario(core):
        return (
            core.metrics.text().decode()
        )  # as the port of --metrics-port reads it, with nothing asked before

    text = run_core(scenario)
    assert value(text, "darkroom_device_memory_bytes") > 2**20


def test_a_key_sees_what_it_draws_itself_and_not_what_others_do(run_http, tmp_path):
    file = tmp_path / "keys.txt"
    keys = {name: make_key(file, name) for name in ("alice", "bob")}

    async def scenario(core, http):
        told = {}
        for key in keys.values():
            known = {"Authorization": f"Bearer {key}"}
            answer = await http.post("/jobs", json=BODY, headers=known)
            await http.get(f"/jobs/{answer.json()['id']}?wait_s=30", headers=known)
        for name, key in keys.items():
            told[name] = (await http.get("/metrics", headers={"Authorization": f"Bearer {key}"})).text
        return told, core.metrics.text().decode()

    told, whole = run_http(scenario, key_file=file)
    for name, other in (("alice", "bob"), ("bob", "alice")):
        assert value(told[name], f'darkroom_key_pictures_total{{key="{name}"}}') == 1
        assert other not in told[name]
        assert value(told[name], "darkroom_pictures_total") == 2
        assert value(whole, f'darkroom_key_pictures_total{{key="{name}"}}') == 1
