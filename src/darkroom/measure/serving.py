"""`darkroom bench serve`: a mixed trace through darkroom's server and through plain servers around diffusers.

Three tables. `serve-saturation`: all requests as fast as they are taken, the same ones for each server, in
turns. `serve-poisson`: arrivals at 0.8 of what one request at a time can do, the same for each server.
`serve-load`: darkroom alone at 0.25 to 4 times its own capacity, which is measured first where the other
tables are left out.

Latency runs from when a request was due, sent late or not, to when its picture was on disk (darkroom) or
encoded in memory (the others). Darkroom pays for HTTP, durable jobs and this client; the others do not.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from darkroom import models
from darkroom.errors import DarkroomError, InputError
from darkroom.hardware.system import load_average
from darkroom.measure.pipeline_server import (
    RANK,
    TraceRequest,
    description_of,
    draw_trace,
    make_adapters,
    sizes_for,
)
from darkroom.measure.timing import Measurement, Timing, measurement

DARKROOM, ONE, SAME_KEY = "darkroom", "one at a time", "same key together"
LOADS = (0.5, 1.0, 4.0)
TABLES = ("saturation", "poisson", "load")
POISSON_SHARE = 0.8
CLIENTS = 64
"""That ask darkroom at saturation; also the queue's length."""
REPEAT = 3
"""How often darkroom is asked for the trace at saturation, so that it takes about as long as the others."""
WARM = 12
WAITS_OUT = 5
"""Of the refused, one in so many waits `Retry-After` out and asks again: all would be another load."""
LONGEST_TRACE = 4000
WAIT_S, LOOK_S, LOOK_QUEUED_S, GIVE_UP_S = 30.0, 0.03, 0.25, 300.0
LOOK_PLACES, LOOK_SHARE = 8, 0.8


@dataclass(frozen=True)
class Outcome:
    """What became of one request. Times are seconds since 1970."""

    asked: TraceRequest
    state: str
    """done, cancelled, failed, refused, or lost."""
    due_s: float
    answered_s: float | None = None
    """When it was accepted or refused."""
    refused_after_s: float | None = None
    tried_again_s: float | None = None
    """When it was tried again, after what `Retry-After` said."""
    taken_again: bool = False
    """Whether it was accepted then."""
    admitted_after_s: float | None = None
    """From acceptance to being begun."""
    finished_s: float | None = None

    @property
    def latency_s(self) -> float | None:
        """From being due to being done, of one that was accepted at once."""
        if self.state != "done" or not self.finished_s or self.taken_again:
            return None
        return self.finished_s - self.due_s


@dataclass(frozen=True)
class Trial:
    """One server, one trace."""

    outcomes: list[Outcome]
    start_s: float
    end_s: float
    rate: float | None = None
    """Requests a second; None for all at once."""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    errors: Mapping[int, int] = field(default_factory=dict)
    """Answers with 5xx, by status."""

    @property
    def wall_s(self) -> float:
        """Seconds from the first arrival to the last end."""
        return self.end_s - self.start_s

    @property
    def done(self) -> int:
        """Pictures."""
        return sum(outcome.state == "done" for outcome in self.outcomes)

    @property
    def requests_per_s(self) -> float:
        """Requests a second, whatever became of them."""
        return len(self.outcomes) / self.wall_s

    def retry_true(self) -> float | None:
        """Of the refused who waited `Retry-After` out while requests still came, the share that was accepted;
        None where nobody did."""
        last_s = max(outcome.due_s for outcome in self.outcomes)
        waited = [o.taken_again for o in self.outcomes if o.tried_again_s and o.tried_again_s <= last_s]
        return sum(waited) / len(waited) if waited else None

    def goodput(self) -> float:
        """Pictures a second while requests came, without the first quarter of that time."""
        last_s = max(outcome.due_s for outcome in self.outcomes)
        first_s = self.start_s + (last_s - self.start_s) / 4
        within = [o for o in self.outcomes if o.state == "done" and first_s <= (o.finished_s or 0) <= last_s]
        return len(within) / (last_s - first_s) if last_s > first_s else 0.0


@dataclass(frozen=True)
class ServeBench:
    """What is compared, and how long."""

    model: str
    adapters: int = 20
    seconds: float = 15.0
    rounds: int = 2
    loads: tuple[float, ...] = LOADS
    tables: tuple[str, ...] = TABLES
    """`saturation` with or without `poisson`, `load`, or all; `load` alone runs no other server."""
    seed: int = 0
    threads: int = 0
    """Of torch, in every server; 0 leaves it to torch."""
    device: str = "auto"
    most_rows: int = 16
    """U-Net evaluations that a same-key batch may hold; darkroom's own capacity is as it finds it."""
    options: tuple[str, ...] = ()
    """Further ones for `darkroom serve`."""

    def check(self) -> None:
        """InputError for what cannot be measured."""
        if self.adapters < 0 or self.seconds <= 0 or self.rounds < 1 or self.most_rows < 1:
            raise InputError(
                f"adapters={self.adapters}, seconds={self.seconds:g}, rounds={self.rounds}",
                allowed="0 or more, above 0, 1 or more",
            )
        if any(not 0 < load <= 16 for load in self.loads):
            raise InputError(f"loads {self.loads}", allowed="above 0, at most 16")
        if not self.tables or not set(self.tables) <= set(TABLES):
            raise InputError(f"tables '{','.join(self.tables)}'", allowed=", ".join(TABLES))
        if "poisson" in self.tables and "saturation" not in self.tables:
            raise InputError("table 'poisson' without 'saturation', which says how fast requests come")


def bench_serve(bench: ServeBench, say: Callable[[str], None] = lambda _: None) -> list[Measurement]:
    """Rows of all three tables. The model goes through a folder; adapters are made for it."""
    bench.check()
    with tempfile.TemporaryDirectory(prefix="darkroom-bench-", ignore_cleanup_errors=True) as work:
        return asyncio.run(_ServingRun(bench, Path(work), say).rows())


class _ServingRun:
    def __init__(self, bench: ServeBench, work: Path, say: Callable[[str], None]) -> None:
        self.bench, self.work, self.say = bench, work, say
        model = models.load(bench.model)
        if len(model.text_encoders) > 1:
            raise InputError(f"model '{bench.model}'", allowed="models of Stable Diffusion 1 and 2's kind")
        self.family, self.folder = model.family, work / "model"
        models.save(model, self.folder)
        (work / "adapters").mkdir()
        self.names = make_adapters(model, work / "adapters", bench.adapters, seed=bench.seed)
        self.trace = draw_trace(LONGEST_TRACE, seed=bench.seed, sizes=sizes_for(model), adapters=self.names)
        self._sent = 0

    async def rows(self) -> list[Measurement]:
        """Run all rounds and return the table's rows. Starts the server and the plain pipelines."""
        with self._server() as server:
            client = Client(server.port)
            await server.ready(client)
            self.say("serve: a first few requests, untimed")
            await self._darkroom(client, self.trace[:WARM], None)
            rows: list[Measurement] = []
            if "saturation" in self.bench.tables:
                found = await self._saturation(client)
                rows += _saturation_rows(found, self._settings(self.trace[: len(found[ONE][0].outcomes)]))
                capacity = statistics.median(t.requests_per_s for t in found[DARKROOM])
            else:
                capacity = (await self._alone(client)).requests_per_s
            if "poisson" in self.bench.tables:
                rows += await self._poisson(client, statistics.median(t.requests_per_s for t in found[ONE]))
            if "load" in self.bench.tables:
                rows += await self._loads(client, capacity)
            client.close()
        return rows

    async def _saturation(self, client: Client) -> dict[str, list[Trial]]:
        """The trials of each server, in turns; the first sets how much of the trace all of them draw."""
        found = {name: [] for name in (ONE, SAME_KEY, DARKROOM)}  # type: dict[str, list[Trial]]
        trace = self.trace
        for i in range(self.bench.rounds):
            self.say(f"serve: saturation, round {i + 1} of {self.bench.rounds}")
            found[ONE].append(self._pipeline(trace, None, 1, None if i else self.bench.seconds))
            trace = self.trace[: len(found[ONE][0].outcomes)]
            found[SAME_KEY].append(self._pipeline(trace, None, self.bench.most_rows))
            found[DARKROOM].append(await self._darkroom(client, trace * REPEAT, None))
        return found

    async def _alone(self, client: Client) -> Trial:
        """How fast darkroom is with as many clients as it has places, for half of a trial's time."""
        self.say("serve: darkroom's capacity")
        return await self._darkroom(client, self.trace, None, self.bench.seconds / 2)

    def _server(self) -> ServerProcess:
        options = ["--queue", str(CLIENTS), "--rate", "1000000", "--device", self.bench.device]
        if self.names:
            slots = str(len(self.names))
            options += ["--adapters", str(self.work / "adapters")]
            options += ["--max-loras", slots, "--max-rank", str(RANK)]
        state = self.work / "state"
        options += self.bench.options
        return ServerProcess(str(self.folder), state, *options, threads=self.bench.threads)

    def _settings(self, trace: Sequence[TraceRequest]) -> dict[str, Any]:
        return {
            "model": self.family,
            "adapters": self.bench.adapters,
            "threads": self.bench.threads or "torch's own",
            **description_of(trace),
        }

    def _cut(self, rate: float) -> list[TraceRequest]:
        """As much of the trace as comes within the time at this rate."""
        return [asked for asked in self.trace if asked.at <= rate * self.bench.seconds] or self.trace[:1]

    def _pipeline(
        self, trace: Sequence[TraceRequest], rate: float | None, most_rows: int, limit_s: float | None = None
    ) -> Trial:
        """A process of its own that does nothing but draw."""
        folder = self.work / "adapters"
        task = {
            "model": str(self.folder),
            "adapters": {name: str(folder / f"{name}.safetensors") for name in self.names},
            "device": str(models.device(self.bench.device)),
            "threads": self.bench.threads,
            "rate": rate,
            "most_rows": most_rows,
            "limit_s": limit_s,
            "trace": [asked.plain() for asked in trace],
        }
        command = [sys.executable, "-m", "darkroom.measure.pipeline_server"]
        done = subprocess.run(
            command, input=json.dumps(task), capture_output=True, encoding="utf-8", check=False
        )
        if done.returncode:
            raise DarkroomError(f"the plain pipeline failed: {done.stderr.strip().splitlines()[-1:]}")
        report = json.loads(done.stdout.splitlines()[-1])
        by_number = {asked.number: asked for asked in trace}
        outcomes = [
            Outcome(
                by_number[one["number"]],
                one["state"],
                one["due_s"],
                admitted_after_s=max(0.0, one["started_s"] - one["due_s"]),
                finished_s=one["finished_s"],
            )
            for one in report["outcomes"]
        ]
        return Trial(outcomes, report["start_s"], report["end_s"], rate)

    async def _darkroom(
        self,
        client: Client,
        trace: Sequence[TraceRequest],
        rate: float | None,
        limit_s: float = math.inf,
    ) -> Trial:
        """The same trace over HTTP; without a rate, each of `CLIENTS` asks anew once it is served, until the
        time is over."""
        self._sent += 1
        numbered = [(f"t{self._sent}-{i}", asked) for i, asked in enumerate(trace)]
        before, start_s = await client.metrics(), time.time()
        errors = _server_errors(client)
        if rate is None:
            left = itertools.takewhile(lambda _: time.time() - start_s < limit_s, numbered)
            by_client = await asyncio.gather(*(_in_turn(client, left) for _ in range(CLIENTS)))
            outcomes = [outcome for some in by_client for outcome in some]
        else:
            last_s = start_s + trace[-1].at / rate
            outcomes = await asyncio.gather(
                *(_ask(client, name, asked, start_s + asked.at / rate, last_s) for name, asked in numbered)
            )
        after, end_s = await client.metrics(), max(o.finished_s or o.due_s for o in outcomes)
        return Trial(outcomes, start_s, end_s, rate, before, after, _server_errors(client) - errors)

    async def _poisson(self, client: Client, one_at_a_time: float) -> list[Measurement]:
        rate = POISSON_SHARE * one_at_a_time
        trace = self._cut(rate)
        self.say(f"serve: Poisson arrivals, {rate:.3g} requests/s")
        trials = {
            ONE: self._pipeline(trace, rate, 1),
            SAME_KEY: self._pipeline(trace, rate, self.bench.most_rows),
            DARKROOM: await self._darkroom(client, trace, rate),
        }
        settings = self._settings(trace) | {"requests_per_s": round(rate, 4)}
        return [_row("serve-poisson", name, trial, settings) for name, trial in trials.items()]

    async def _loads(self, client: Client, capacity: float) -> list[Measurement]:
        rows = []
        for load in self.bench.loads:
            rate = load * capacity
            self.say(f"serve: darkroom at {load:g} times its capacity, {rate:.3g} requests/s")
            trace = self._cut(rate)
            trial = await self._darkroom(client, trace, rate)
            settings = self._settings(trace) | {"load": load, "requests_per_s": round(rate, 4)}
            rows.append(_row("serve-load", f"{DARKROOM} at {load:g}x", trial, settings))
        return rows


def _server_errors(client: Client) -> Counter[int]:
    return Counter({status: count for status, count in client.statuses.items() if status >= 500})


async def _in_turn(client: Client, left: Iterator[tuple[str, TraceRequest]]) -> list[Outcome]:
    return [await _ask(client, name, asked, time.time()) for name, asked in left]


async def _ask(
    client: Client, name: str, asked: TraceRequest, due_s: float, last_s: float = math.inf
) -> Outcome:
    """One request from its due time to its end, given up on the way where the trace says so.

    Nobody waits `Retry-After` out beyond `last_s`, when the last request comes: the load is over then.
    """
    await asyncio.sleep(max(0.0, due_s - time.time()))
    sent_s = time.time()
    status, head, _ = await client.whole("PUT", f"/jobs/{name}", asked.body())
    outcome = Outcome(asked, "failed", due_s, answered_s=time.time())
    if status == 429:
        outcome = replace(outcome, state="refused", refused_after_s=time.time() - sent_s)
        if asked.number % WAITS_OUT or (after_s := _retry_after(head)) is None:
            return outcome
        if time.time() + after_s > last_s:
            return outcome
        await asyncio.sleep(after_s)
        name = f"{name}-again"
        status, _ = await client.ask("PUT", f"/jobs/{name}", asked.body())
        outcome = replace(outcome, tried_again_s=time.time(), taken_again=status == 202)
    if status != 202:
        return outcome
    if asked.cancel_step is not None:
        await _give_up(client, name, asked.cancel_step)
    job = await _over(client, name)
    if job is None:
        return replace(outcome, state="lost")
    if job["state"] == "done":
        await client.ask("GET", f"/jobs/{name}/pictures/0")
    begun_s, accepted_s = job["started_s"], job["created_s"]
    return replace(
        outcome,
        state=job["state"],
        admitted_after_s=None if begun_s is None else max(0.0, begun_s - accepted_s),
        finished_s=job["finished_s"],
    )


def _retry_after(head: str) -> float | None:
    found = re.search(r"(?i)\r\nretry-after: *(\d+)", head)
    return None if found is None else float(found[1])


async def _give_up(client: Client, name: str, step: int) -> None:
    """Cancel a job once it has taken so many steps. Look seldom while others are to be drawn before it, and
    then when it should be there by its speed: the looks would be load of their own."""
    while step:
        _, job = await client.json("GET", f"/jobs/{name}")
        if job.get("state") not in ("queued", "running") or job["steps_done"] >= step:
            break
        before = job["place"] or 0
        queued_s = LOOK_QUEUED_S * (1 + before / LOOK_PLACES)
        await asyncio.sleep(queued_s if job["state"] == "queued" else _until_step_s(job, step))
    await client.ask("DELETE", f"/jobs/{name}")


def _until_step_s(job: dict[str, Any], step: int) -> float:
    """Most of the time until a job that is drawn has taken so many steps, by those that it took."""
    if not job["steps_done"] or job["started_s"] is None:
        return LOOK_S
    a_step_s = (time.time() - job["started_s"]) / job["steps_done"]
    return float(max(LOOK_S, LOOK_SHARE * a_step_s * (step - job["steps_done"])))


async def _over(client: Client, name: str) -> dict[str, Any] | None:
    """A job at its end; None where it is not there or never ends."""
    give_up_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < give_up_s:
        status, job = await client.json("GET", f"/jobs/{name}?wait_s={WAIT_S:g}")
        if status == 404:
            return None
        if status == 200 and job["state"] in ("done", "failed", "cancelled"):
            return job
    return None


def _saturation_rows(trials: dict[str, list[Trial]], settings: dict[str, Any]) -> Iterator[Measurement]:
    load = load_average()
    timings = {
        name: Timing(name, tuple(t.wall_s / max(1, t.done) for t in some), 0.0, load)
        for name, some in trials.items()
    }
    for name, timing in timings.items():
        yield measurement(
            "serve-saturation",
            timing,
            baseline=timings[ONE] if name != ONE else None,
            images=1,
            settings=settings | figures(trials[name][-1]),
            note="time is that of one picture; latencies are those of the last round",
        )


def _row(benchmark: str, name: str, trial: Trial, settings: dict[str, Any]) -> Measurement:
    load = load_average()
    rate = trial.goodput()
    timing = Timing(name, (1 / rate if rate else trial.wall_s,), 0.0, load)
    row_settings = settings | figures(trial)
    return measurement(
        benchmark, timing, images=1 if rate else None, settings=row_settings, note="images/s is goodput"
    )


def figures(trial: Trial) -> dict[str, Any]:
    """What is said of a trial besides its pictures a second."""
    states = [outcome.state for outcome in trial.outcomes]
    settings: dict[str, Any] = {"http_5xx": sum(trial.errors.values())}
    if trial.errors:
        settings["http_5xx_statuses"] = {str(status): count for status, count in trial.errors.items()}
    for state in ("done", "cancelled", "refused", "failed", "lost"):
        settings[state] = states.count(state)
    settings["refused"] = sum(o.state == "refused" or o.taken_again for o in trial.outcomes)
    settings["taken_again"] = sum(o.taken_again for o in trial.outcomes)
    settings |= _spread("latency", [o.latency_s for o in trial.outcomes])
    settings |= _spread("admission", [o.admitted_after_s for o in trial.outcomes])
    settings |= _spread("refusal", [o.refused_after_s for o in trial.outcomes])
    if (true := trial.retry_true()) is not None:
        settings["retry_after_true"] = true
    if trial.after:
        settings["step_s"] = _mean_between(trial.before, trial.after, "darkroom_step_seconds")
        settings["evaluations_a_step"] = _mean_between(trial.before, trial.after, "darkroom_step_evaluations")
        settings["steps_to_free_most"] = most_between(trial.before, trial.after, "darkroom_cancel_steps")
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in settings.items()}


def _spread(name: str, values: Sequence[float | None]) -> dict[str, float]:
    there = sorted(value for value in values if value is not None)
    if not there:
        return {}
    return {
        f"{name}_p{share}_s": there[min(len(there) - 1, math.ceil(share / 100 * len(there)) - 1)]
        for share in (50, 95, 99)
    }


READY_S = 300.0


class ServerProcess:
    """`darkroom serve` with a state folder, on a free port of loopback. Ended with the `with` block."""

    def __init__(self, model: str, state: Path, *options: str, threads: int = 0) -> None:
        state.mkdir(parents=True, exist_ok=True)
        self.log = state / "server.log"
        already = _addresses(self.log)
        command = [sys.executable, "-m", "darkroom", "serve", model, "--port", "0", "--state", str(state)]
        environment = dict(os.environ)
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen([*command, *options], stdout=log, stderr=log, env=environment)
        self.port = self._port(len(already))

    def _port(self, already: int) -> int:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if len(found := _addresses(self.log)) > already:
                return found[-1]
            self._check()
            time.sleep(0.02)
        raise DarkroomError(f"the server did not listen within {READY_S:g} s: {self.last_words()}")

    def _check(self) -> None:
        if self.process.poll() is not None:
            raise DarkroomError(f"the server has ended: {self.last_words()}")

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-3:])

    async def ready(self, client: Client) -> None:
        """Wait until it takes jobs."""
        end = time.monotonic() + READY_S
        while (answer := await client.ask("GET", "/ready"))[0] != 200:
            self._check()
            if b'"broken"' in answer[1] or time.monotonic() > end:
                raise DarkroomError(f"the server does not get ready: {self.last_words()}")
            await asyncio.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, as when the power goes."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _addresses(log: Path) -> list[int]:
    if not log.exists():
        return []
    return [
        int(port)
        for port in re.findall(r"listening on http://[^\s:]+:(\d+)", log.read_text(encoding="utf-8"))
    ]


class Client:
    """Requests to one port, each on a connection that is free; counts the answers by status."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.statuses: Counter[int] = Counter()
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """The status and the body of an answer; a dropped connection is tried once more."""
        status, _, received = await self.whole(method, path, body)
        return status, received

    async def whole(self, method: str, path: str, body: Any = None) -> tuple[int, str, bytes]:
        """The same with the answer's head."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
        if content:
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        while True:
            kept = bool(self._free)
            at = self._free.pop() if kept else await asyncio.open_connection("127.0.0.1", self.port)
            try:
                status, answer, received = await _exchange(at, head.encode() + b"\r\n" + content)
            except (ConnectionError, asyncio.IncompleteReadError):
                at[1].close()
                if kept:
                    continue
                raise
            self._free.append(at)
            self.statuses[status] += 1
            return status, answer, received

    async def json(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        """The same, of an answer in JSON."""
        status, received = await self.ask(method, path, body)
        found: dict[str, Any] = json.loads(received)
        return status, found

    async def metrics(self) -> dict[str, float]:
        """The server's counters by name and labels."""
        _, received = await self.ask("GET", "/metrics")
        lines = [line.rsplit(" ", 1) for line in received.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def close(self) -> None:
        """Let go of all connections."""
        for _, writer in self._free:
            writer.close()
        self._free.clear()


async def _exchange(
    at: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes
) -> tuple[int, str, bytes]:
    reader, writer = at
    writer.write(request)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status = int(head.split(" ", 2)[1])
    length = re.search(r"(?i)\r\ncontent-length: *(\d+)", head)
    return status, head, await reader.readexactly(int(length[1]) if length else 0)


def _mean_between(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    """The mean of what a histogram has seen between two looks at the counters."""
    count = after[f"{name}_count"] - before[f"{name}_count"]
    return (after[f"{name}_sum"] - before[f"{name}_sum"]) / count if count else None


def most_between(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    """The bound of the highest bucket that something fell into between two looks; None where nothing did."""
    count = after[f"{name}_count"] - before[f"{name}_count"]
    bounds: Sequence[tuple[float, str]] = sorted(
        (float(found[1]), key)
        for key in after
        if (found := re.fullmatch(rf'{name}_bucket{{le="([^"]+)"}}', key))
    )
    if not count:
        return None
    return next(bound for bound, key in bounds if after[key] - before[key] >= count)
