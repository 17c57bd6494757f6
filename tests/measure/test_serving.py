"""`darkroom bench serve`: the trace, the plain servers, and the whole at toy size."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import warm
from darkroom import models
from darkroom.errors import InputError
from darkroom.measure import serving
from darkroom.measure.pipeline_server import TraceRequest, draw_trace, make_adapters, sizes_for
from darkroom.measure.serving import (
    DARKROOM,
    ONE,
    SAME_KEY,
    Client,
    Outcome,
    ServeBench,
    ServerProcess,
    Trial,
    _ask,
    bench_serve,
    figures,
    most_between,
)
from darkroom.models.adapters.read import read_adapter
from darkroom.report.measurements import write_serving_page

SMALL: dict[str, dict[str, Any]] = {
    "unet": {"block_out_channels": [16, 32], "norm_num_groups": 4},
    "vae": {"block_out_channels": [8, 16, 16], "norm_num_groups": 4},
}


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and plain pipelines are forked instead of importing everything anew."""

    def run(command: list[str], *, encoding: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return warm.run(command, text=True, **more)

    started = SimpleNamespace(Popen=warm.Popen, run=run)
    monkeypatch.setattr(serving, "subprocess", started)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    models.save(models.create("tiny", seed=1, overrides=SMALL), folder)
    return folder


def test_a_trace_is_mixed_seeded_and_poisson() -> None:
    names = [f"style{i}" for i in range(20)]
    trace = draw_trace(4000, seed=3, sizes=[(32, 32), (32, 24), (24, 32)], adapters=names)
    assert trace == draw_trace(4000, seed=3, sizes=[(32, 32), (32, 24), (24, 32)], adapters=names)
    assert trace != draw_trace(4000, seed=4, sizes=[(32, 32), (32, 24), (24, 32)], adapters=names)
    assert {asked.steps for asked in trace} == {10, 15, 20, 25, 30, 40, 50}
    given_up = [asked for asked in trace if asked.cancel_step is not None]
    assert 0.08 < len(given_up) / len(trace) < 0.12
    assert all(0 <= (asked.cancel_step or 0) < asked.steps for asked in given_up)
    by_name = [sum(asked.adapter == name for asked in trace) for name in names]
    assert by_name[0] / by_name[1] == pytest.approx(2, rel=0.2)
    assert by_name[0] / by_name[9] == pytest.approx(10, rel=0.4)
    gaps = torch.tensor([asked.at for asked in trace]).diff()
    assert float(gaps.mean()) == pytest.approx(1, rel=0.05)
    assert float(gaps.std()) == pytest.approx(1, rel=0.08), "exponential gaps spread as far as their mean"


def test_adapters_differ_and_change_something(tmp_path: Path) -> None:
    model = models.create("tiny", seed=1, overrides=SMALL)
    names = make_adapters(model, tmp_path, 2, seed=0)
    first, second = (read_adapter(tmp_path / f"{name}.safetensors") for name in names)
    assert first.rank == 8
    assert all(float(layer.up.abs().max()) > 0 for layer in first.layers.values())
    path = next(iter(first.layers))
    assert not torch.equal(first.layers[path].up, second.layers[path].up)
    assert sizes_for(model) == [(32, 32), (32, 24), (24, 32)]


def outcome(number: int, state: str, due_s: float, finished_s: float | None, **more: Any) -> Outcome:
    return Outcome(TraceRequest(number, 0, "a", 8, 8, 1, 1.0, 0), state, due_s, finished_s=finished_s, **more)


def test_figures_count_and_goodput_leaves_the_start_out() -> None:
    outcomes = [outcome(i, "done", i, i + 0.5 + i / 100) for i in range(101)]
    outcomes[7] = outcome(7, "refused", 7, None, refused_after_s=0.02)
    outcomes[8] = outcome(8, "lost", 8, None)
    told = figures(Trial(outcomes, 0.0, 101.5))
    assert (told["done"], told["refused"], told["lost"]) == (99, 1, 1)
    assert told["latency_p50_s"] == pytest.approx(1.01, abs=0.02)
    assert told["latency_p99_s"] == pytest.approx(1.49, abs=0.011)
    assert told["refusal_p99_s"] == 0.02
    assert (told["http_5xx"], "http_5xx_statuses" in told) == (0, False)
    failed = figures(Trial(outcomes, 0.0, 101.5, errors={503: 2, 507: 1}))
    assert (failed["http_5xx"], failed["http_5xx_statuses"]) == (3, {"503": 2, "507": 1})
    assert Trial(outcomes, 0.0, 101.5).goodput() == pytest.approx(1, rel=0.03)


def test_retry_after_is_held_against_what_came_of_it_while_requests_came() -> None:
    outcomes = [outcome(i, "done", i, i + 0.5) for i in range(11)]
    assert Trial(outcomes, 0.0, 11.0).retry_true() is None
    for number, tried_s, taken in ((2, 5.0, True), (3, 6.0, False), (4, 12.0, True)):
        state, end_s = ("done", tried_s + 1) if taken else ("refused", None)
        outcomes[number] = outcome(number, state, number, end_s, tried_again_s=tried_s, taken_again=taken)
    trial = Trial(outcomes, 0.0, 11.0)
    told = figures(trial)
    assert (told["done"], told["refused"], told["taken_again"]) == (10, 3, 2)
    assert told["latency_p99_s"] == 0.5, "who was let in later was not late for the server"
    assert trial.goodput() == pytest.approx(6 / 7.5), "what was drawn of it counts"
    assert trial.retry_true() == 0.5, "the third one asked when nobody else did"
    assert figures(trial)["retry_after_true"] == 0.5


@pytest.mark.nightly
def test_who_is_refused_waits_as_told_and_asks_again(small: Path, tmp_path: Path) -> None:
    async def scenario() -> list[Outcome]:
        with ServerProcess(str(small), tmp_path / "state", "--queue", "1", threads=1) as server:
            client = Client(server.port)
            await server.ready(client)
            asked = [TraceRequest(5 * i, 0.0, "a", 32, 32, 20, 1.0, i) for i in range(60)]
            return await asyncio.gather(*(_ask(client, f"j{one.number}", one, 0.0) for one in asked))

    found = asyncio.run(scenario())
    refused = [one for one in found if one.refused_after_s is not None]
    assert refused
    assert all(one.tried_again_s for one in refused)
    again = [one for one in refused if one.taken_again]
    assert again
    assert {one.state for one in again} == {"done"}


def test_the_highest_bucket_that_something_fell_into() -> None:
    def counters(zero: int, one: int, all_: int) -> dict[str, float]:
        names = ('x_bucket{le="0.0"}', 'x_bucket{le="1.0"}', 'x_bucket{le="+Inf"}', "x_count")
        return dict(zip(names, (zero, one, all_, all_), strict=True))

    assert most_between(counters(0, 1, 1), counters(2, 5, 5), "x") == 1
    assert most_between(counters(0, 1, 1), counters(1, 2, 3), "x") == float("inf")
    assert most_between(counters(0, 1, 1), counters(0, 1, 1), "x") is None


def test_the_plain_server_draws_batches_and_stops_what_is_given_up(small: Path, tmp_path: Path) -> None:
    names = make_adapters(models.load(str(small)), tmp_path, 2, seed=0)
    alike = {"prompt": "a", "width": 32, "height": 32, "steps": 4, "guidance": 7.5, "adapter": names[0]}
    trace = [TraceRequest(i, 0.0, seed=i, **alike) for i in range(3)]  # type: ignore[arg-type]
    trace += [
        TraceRequest(3, 0.0, seed=3, cancel_step=2, **{**alike, "adapter": names[1]}),  # type: ignore[arg-type]
        TraceRequest(4, 0.0, seed=4, cancel_step=0, **alike),  # type: ignore[arg-type]
    ]
    task = {
        "model": str(small),
        "adapters": {name: str(tmp_path / f"{name}.safetensors") for name in names},
        "device": "cpu", "threads": 1, "rate": None, "most_rows": 16, "limit_s": None,
        "trace": [asked.plain() for asked in trace],
    }  # fmt: skip
    command = [sys.executable, "-m", "darkroom.measure.pipeline_server"]
    done = warm.run(command, input=json.dumps(task), capture_output=True, text=True, check=True)
    told = {one["number"]: one for one in json.loads(done.stdout.splitlines()[-1])["outcomes"]}
    assert [told[i]["state"] for i in range(5)] == ["done"] * 3 + ["cancelled"] * 2
    assert told[0]["finished_s"] == told[2]["finished_s"], "three of a key in one call"
    assert told[3]["finished_s"] > told[0]["finished_s"]


def test_who_gives_up_looks_when_it_should_be_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """33 looks a second at each job to be given up were half of the requests at four times the capacity."""
    now_s, looks, cancelled_at = [1000.0], list[int](), list[int]()

    class Drawn:
        """A job that waits for 5 s, then takes 10 steps a second."""

        async def json(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
            steps = max(0, int((now_s[0] - 1005) * 10))
            looks.append(steps)
            drawn = {"state": "running", "place": None, "started_s": 1005.0, "steps_done": steps}
            waits = {"state": "queued", "place": 30, "started_s": None, "steps_done": 0}
            return 200, drawn if now_s[0] >= 1005 else waits

        async def ask(self, method: str, path: str) -> None:
            cancelled_at.append(int((now_s[0] - 1005) * 10))

    async def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(serving, "time", SimpleNamespace(time=lambda: now_s[0]))
    monkeypatch.setattr(serving, "asyncio", SimpleNamespace(sleep=sleep))
    asyncio.run(serving._give_up(Drawn(), "x", 40))  # type: ignore[arg-type]
    assert 40 <= cancelled_at[0] <= 41
    assert len([steps for steps in looks if steps]) <= 10, "it was 120"
    monkeypatch.setattr(serving, "LOOK_SHARE", 0.0)  # the control: a look every 30 ms
    now_s[0], before = 1000.0, len(looks)
    asyncio.run(serving._give_up(Drawn(), "x", 40))  # type: ignore[arg-type]
    assert len(looks) - before > 100


@pytest.mark.nightly
def test_a_cancelled_job_frees_its_row_by_the_next_step(small: Path, tmp_path: Path) -> None:
    async def scenario() -> tuple[dict[str, Any], dict[str, float]]:
        with ServerProcess(str(small), tmp_path / "state", threads=1) as server:
            client = Client(server.port)
            await server.ready(client)
            await client.ask("PUT", "/jobs/x", {"prompt": "a", "steps": 150, "num": 4})
            while (await client.json("GET", "/jobs/x"))[1]["steps_done"] < 4:
                await asyncio.sleep(0.005)
            await client.ask("DELETE", "/jobs/x")
            await client.ask("PUT", "/jobs/y", {"prompt": "a", "steps": 3})
            _, job = await client.json("GET", "/jobs/y?wait_s=30")
            return job, await client.metrics()

    job, metrics = asyncio.run(scenario())
    assert job["state"] == "done", "the answer waited for the end"
    assert metrics["darkroom_cancel_steps_count"] == 4
    assert metrics['darkroom_cancel_steps_bucket{le="1.0"}'] == 4


@pytest.mark.nightly
def test_rows_and_page_of_a_small_bench(small: Path, tmp_path: Path) -> None:
    bench = ServeBench(str(small), adapters=2, seconds=1.0, rounds=1, loads=(1.0,), threads=1, device="cpu")
    rows = bench_serve(bench)
    told = {(row.benchmark, row.case): row for row in rows}
    servers = (ONE, SAME_KEY, DARKROOM)
    assert set(told) == {
        *(("serve-saturation", name) for name in servers),
        *(("serve-poisson", name) for name in servers),
        ("serve-load", "darkroom at 1x"),
    }
    for row in rows:
        assert row.settings["http_5xx"] == row.settings["lost"] == row.settings["failed"] == 0
        assert sum(row.settings[state] for state in ("done", "cancelled", "refused")) > 0
    assert told["serve-saturation", DARKROOM].ratio_to == ONE
    assert told["serve-saturation", DARKROOM].settings["evaluations_a_step"] >= 1
    page = write_serving_page(rows, tmp_path / "serve.html").read_text()
    assert "same key together" in page
    assert "admission p50" in page


@pytest.mark.nightly
def test_overload_alone_runs_no_other_server(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving._ServingRun, "_pipeline", None)
    bench = ServeBench(
        str(small), adapters=0, seconds=2.0, loads=(1.0, 4.0), tables=("load",), threads=1, device="cpu"
    )
    rows = bench_serve(bench)
    assert [row.case for row in rows] == ["darkroom at 1x", "darkroom at 4x"]
    assert all(row.settings["http_5xx"] == row.settings["lost"] == 0 for row in rows)
    assert rows[1].settings["requests_per_s"] == pytest.approx(
        4 * rows[0].settings["requests_per_s"], rel=1e-3
    )


def test_what_cannot_be_is_refused() -> None:
    for tables in ((), ("loads",), ("poisson", "load")):
        with pytest.raises(InputError, match="table"):
            bench_serve(ServeBench("tiny", tables=tables))
    with pytest.raises(InputError, match="loads"):
        bench_serve(ServeBench("tiny", loads=(0.0,)))
    with pytest.raises(InputError, match="rounds=0"):
        bench_serve(ServeBench("tiny", rounds=0))
