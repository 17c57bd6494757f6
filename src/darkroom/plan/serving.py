"""Requests and the devices that serve them: a simulation by the server's own rules.

One queue, and every device takes its share of what waits at each of its steps; requests of one size share a
step. Devices may start late, be taken away and follow the queue, as replicas of `serve --engine ray` do.
"""

from __future__ import annotations

import heapq
import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from darkroom.errors import InputError
from darkroom.plan.counts import Profile
from darkroom.plan.jobs import Where, largest_rows
from darkroom.plan.roofline import Software

MOST_AT_ONCE = 64  # pictures of a device
MOST_DEVICES = 4096
SIMULATED = 16  # devices; of more than twice as many a part
DRAWS, FEWEST_REQUESTS, MOST_REQUESTS = 4, 200, 1000
KEYS = ("at", "width", "height", "steps", "guidance")

Size = tuple[int, int]


@dataclass(frozen=True)
class Request:
    """One picture asked for; `at` in seconds."""

    at: float
    width: int
    height: int
    steps: int
    guidance: float

    @property
    def size(self) -> Size:
        """Width and height in pixels."""
        return self.width, self.height

    @property
    def rows(self) -> int:
        """U-Net rows a step."""
        return 2 if self.guidance > 1 else 1


def read_trace(path: Path, rate: float = 1.0) -> tuple[Request, ...]:
    """The requests of a file in the order they come, at a rate a second. InputError names a wrong line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise InputError(f"--trace {path}", mend="give a file of one JSON object a line") from None
    found = [_request(path, i, line, rate) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"--trace {path}: no requests", allowed=f"lines with {', '.join(KEYS)}")
    return tuple(sorted(found, key=lambda request: request.at))


def _request(path: Path, number: int, line: str, rate: float) -> Request:
    try:
        record = json.loads(line)
        at, guidance = float(record["at"]) / rate, float(record["guidance"])
        whole = [int(record[key]) for key in ("width", "height", "steps")]
        if not (at >= 0 and math.isfinite(at + guidance) and min(whole) >= 1):
            raise ValueError
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise InputError(
            f"--trace {path}, line {number}: {line.strip()[:60]}",
            allowed='{"at": 0.5, "width": 512, "height": 512, "steps": 30, "guidance": 7.5}',
        ) from None
    return Request(at, whole[0], whole[1], whole[2], guidance)


@dataclass(frozen=True)
class Fleet:
    """What becomes of devices while they serve: how many there are at least, how long one takes to start, how
    often one is taken away. As it is, all serve from the beginning to the end.
    """

    start_s: float = 0.0  # until a device that is asked for serves: its machine, loading, warming up
    losses_per_hour: float = 0.0  # of each device: a spot machine's
    least: int | None = None  # fewer than all: the number follows the queue, as `serve --engine ray` has it
    jobs_each: int = 16  # jobs a device that are wanted at once
    up_s: float = 10.0  # a longer queue is waited on for so long, a shorter one so long
    down_s: float = 300.0


@dataclass(frozen=True)
class Served:
    """What became of a trace on so many devices."""

    devices: int
    p95_s: float
    busy: float
    most_at_once: int
    p50_s: float = 0.0
    p99_s: float = 0.0
    on: float = 0.0  # devices that were paid for, on average
    losses: int = 0
    simulated: int = 0  # devices of the part that was simulated


class Server:
    """A card that takes steps of many requests at once: those of one size share a step. `slower` by a
    factor.
    """

    def __init__(
        self, profiles: dict[Size, Profile], where: Where, software: Software, *, slower: float = 1.0
    ) -> None:
        self._profiles, self._roofline, self._slower = profiles, where.roofline(software), slower
        fits = min(largest_rows(profile, where, most=2 * MOST_AT_ONCE) for profile in profiles.values())
        self.most = min(MOST_AT_ONCE, fits // 2)  # pictures, each of two rows with guidance
        self.seconds: Callable[[str, Size, int], float] = cache(self._seconds)

    def _seconds(self, stage: str, size: Size, rows: int) -> float:
        if not rows:
            return 0.0
        return self._slower * self._roofline.stage(self._profiles[size], stage, rows).total


def serve(requests: Sequence[Request], server: Server, devices: int, fleet: Fleet | None = None) -> Served:
    """Serve a trace: one queue, and every device takes its share of what waits at each of its steps."""
    return _SimulatedFleet(requests, server, devices, fleet or Fleet()).run()


class _SimulatedFleet:
    """The devices, the queue before them, and what is under way."""

    def __init__(self, requests: Sequence[Request], server: Server, devices: int, fleet: Fleet) -> None:
        self._requests, self._server, self._fleet = requests, server, fleet
        self._arrivals = [request.at for request in requests]
        rng = np.random.default_rng([2026, devices])
        rate = fleet.losses_per_hour / 3600
        self._life: Callable[[], float] = lambda: rng.exponential(1 / rate) if rate else math.inf
        self._devices = [_Device() for _ in range(devices)]
        self._started = devices if fleet.least is None else min(fleet.least, devices)
        self._serving = self._started  # or starting
        self._times = [(0.0, number) for number in range(self._started)]
        for _, number in self._times:
            self._devices[number].begins(0.0, self._life())
        self._begun, self._under_way, self._again = 0, 0, list[Request]()
        self._latencies, self._busy_s, self._end_s, self._most, self._losses = list[float](), 0.0, 0.0, 0, 0

    def run(self) -> Served:
        """Until every request is done."""
        while self._times:
            self._turn(*heapq.heappop(self._times))
        self._latencies.sort()
        on = sum(device.on_s(self._end_s) for device in self._devices) / self._end_s
        p50, p95, p99 = (
            self._latencies[math.ceil(share * len(self._latencies)) - 1] for share in (0.5, 0.95, 0.99)
        )
        return Served(
            len(self._devices), p95, self._busy_s / on / self._end_s, self._most, p50, p99, on,
            self._losses, len(self._devices),
        )  # fmt: skip

    def _turn(self, now: float, number: int) -> None:
        """One device at the end of its step, or of its waiting."""
        device, server = self._devices[number], self._server
        if device.lost_at <= now:
            self._lose(device, number, device.held_requests())
            return
        waiting = bisect_right(self._arrivals, now) - self._begun + len(self._again)
        self._grow(now, waiting)
        share = -(-(waiting + self._under_way) // max(1, self._serving))
        free = max(0, min(waiting, min(server.most, share) - device.held))
        begun = self._take(free)
        device.begin(begun, now)
        if not device.held:
            self._rest(device, number, now)
            return
        self._most = max(self._most, device.held)
        took, ready = device.step(server, begun, now)
        if device.lost_at < now + took:
            self._lose(device, number, [*ready, *device.held_requests()])
            return
        self._under_way -= len(ready)
        self._busy_s, self._end_s = self._busy_s + took, max(self._end_s, now + took)
        self._latencies += [now + took - request.at for request in ready]
        heapq.heappush(self._times, (now + took, number))

    def _take(self, number: int) -> list[Request]:
        """The next requests: first those whose device was lost."""
        again, self._again = self._again[:number], self._again[number:]
        fresh = self._requests[self._begun : self._begun + number - len(again)]
        self._begun += len(fresh)
        self._under_way += number
        return [*again, *fresh]

    def _rest(self, device: _Device, number: int, now: float) -> None:
        """Nothing to do: until the next request comes, or for good."""
        left = self._begun < len(self._requests)
        if not left and not (self._fleet.losses_per_hour and self._under_way and self._times):
            return
        then = self._arrivals[self._begun] if left else self._times[0][0] + 1e-6
        least = self._fleet.least
        if least is not None and self._started > least and then > now + self._fleet.down_s:
            device.ends(now + self._fleet.down_s)
            self._started, self._serving = self._started - 1, self._serving - 1
            return
        heapq.heappush(self._times, (then, number))

    def _grow(self, now: float, waiting: int) -> None:
        """Start devices where the queue wants more, as the replicas of `serve --engine ray` do."""
        fleet = self._fleet
        if fleet.least is None:
            return
        wanted = min(-(-(waiting + self._under_way) // fleet.jobs_each), len(self._devices))
        idle = [i for i, one in enumerate(self._devices) if one.since is None]
        for number in idle[: max(0, wanted - self._started)]:
            begins = now + fleet.up_s + fleet.start_s
            self._devices[number].begins(begins, self._life(), paid_from=now + fleet.up_s)
            heapq.heappush(self._times, (begins, number))
            self._started, self._serving = self._started + 1, self._serving + 1

    def _lose(self, device: _Device, number: int, held: Sequence[Request]) -> None:
        """A device is taken away: what it held begins again elsewhere, and another comes in its place."""
        self._again += held
        self._under_way -= len(held)
        self._losses += 1
        lost_at = device.lost_at
        device.ends(lost_at)
        self._serving -= 1
        if self._begun < len(self._requests) or self._again or self._under_way:
            begins = lost_at + self._fleet.start_s
            device.begins(begins, self._life(), paid_from=lost_at)
            self._serving += 1
            heapq.heappush(self._times, (begins, number))


@dataclass
class _Group:
    """The requests of one size under way on a device: they take their steps together."""

    stepped: float  # when they last took a step
    steps: int = 0  # taken since the group began
    rows: int = 0
    due: list[tuple[int, float, int, Request]] = field(default_factory=list)  # at which step; came at; serial


class _Device:
    """What is under way on one device, and since when it is there."""

    def __init__(self) -> None:
        self._groups: dict[Size, _Group] = {}
        self.held, self._serial = 0, 0
        self.since: float | None = None  # serving
        self.lost_at = math.inf
        self._paid: list[tuple[float, float]] = []
        self._paid_from = 0.0

    def begins(self, at: float, life_s: float, *, paid_from: float | None = None) -> None:
        """It serves from a time on, and is paid for from before."""
        self.since, self.lost_at = at, at + life_s
        self._paid_from = at if paid_from is None else paid_from

    def ends(self, at: float) -> None:
        """It is taken away or stopped, with all it holds."""
        self._paid.append((self._paid_from, at))
        self.since, self.lost_at, self.held = None, math.inf, 0
        self._groups = {}

    def on_s(self, end_s: float) -> float:
        """Seconds that are paid for."""
        paid = sum(min(end, end_s) - start for start, end in self._paid if start < end_s)
        return paid + (max(0.0, end_s - self._paid_from) if self.since is not None else 0.0)

    def held_requests(self) -> list[Request]:
        """All that is under way."""
        return [request for group in self._groups.values() for *_, request in group.due]

    def begin(self, requests: Sequence[Request], now: float) -> None:
        """Take more requests."""
        self.held += len(requests)
        for request in requests:
            group = self._groups.setdefault(request.size, _Group(now))
            group.rows += request.rows
            self._serial += 1
            heapq.heappush(group.due, (group.steps + request.steps, request.at, self._serial, request))

    def step(self, server: Server, begun: Sequence[Request], now: float) -> tuple[float, list[Request]]:
        """Let the size that has waited longest take a step: seconds of it, of new texts and of ready
        pictures, and the requests of those.
        """
        size = min(self._groups, key=lambda one: self._groups[one].stepped)
        group, ready = self._groups[size], list[Request]()
        seconds = server.seconds("denoise", size, group.rows)
        group.steps, group.stepped = group.steps + 1, now
        for text_size in {request.size for request in begun}:
            seconds += server.seconds("text", text_size, sum(r.size == text_size for r in begun) + 1)
        while group.due and group.due[0][0] <= group.steps:
            *_, request = heapq.heappop(group.due)
            group.rows -= request.rows
            ready.append(request)
        self.held -= len(ready)
        if not group.due:
            del self._groups[size]
        return seconds + server.seconds("decode", size, len(ready)), ready


def fewest_devices(
    requests: Sequence[Request],
    server: Server,
    latency_s: float,
    *,
    least: int = 1,
    fleet: Fleet | None = None,
) -> Served:
    """The fewest devices, `least` or more, that keep the goal; where none does, of one device a request."""
    most = max(least, min(MOST_DEVICES, len(requests)))
    few, enough, more = least - 1, least, 1
    while (found := serve(requests, server, enough, fleet)).p95_s > latency_s and enough < most:
        few, enough, more = enough, min(most, enough + more), 2 * more
    while enough - few > 1 and found.p95_s <= latency_s:
        middle = (few + enough) // 2
        tried = serve(requests, server, middle, fleet)
        if tried.p95_s <= latency_s:
            enough, found = middle, tried
        else:
            few = middle
    return found


@dataclass(frozen=True)
class Drawn:
    """What several draws of requests at one rate need."""

    devices: int  # with which every draw keeps the goal
    served: tuple[Served, ...]  # each draw on so many, or on a part of them
    needed: tuple[int, ...]  # each draw's own fewest
    kept: bool
    traces: tuple[tuple[Request, ...], ...]

    @property
    def simulated(self) -> int:
        """Devices of the part that was simulated."""
        return self.served[0].devices

    @property
    def middle(self) -> Served:
        """Of the draws the figures in the middle."""
        figures = {
            name: median(getattr(one, name) for one in self.served)
            for name in ("p50_s", "p95_s", "p99_s", "busy", "on")
        }
        return Served(
            self.devices,
            most_at_once=max(one.most_at_once for one in self.served),
            losses=round(median(one.losses for one in self.served)),
            simulated=self.simulated,
            **figures,
        )


def draw(request: Request, rate: float, number: int, seed: int) -> tuple[Request, ...]:
    """So many requests that come at random at a rate a second (Poisson)."""
    gaps = np.random.default_rng([2026, seed]).exponential(1 / rate, number)
    return tuple(replace(request, at=float(at)) for at in np.cumsum(gaps))


def fewest_at_rate(
    request: Request,
    rate: float,
    latency_s: float,
    server: Server,
    *,
    fleet: Fleet | None = None,
    draws: int = DRAWS,
) -> Drawn:
    """The fewest devices for requests like this one at a rate, from several draws.

    Of more than SIMULATED devices a part is simulated with its part of the requests: large pools wait less.
    """
    alone = serve([replace(request, at=0.0)], server, 1).p95_s
    parts = max(1, fewest_going_on([request], rate, server) // SIMULATED)
    rate = rate / parts
    least = fewest_going_on([request], rate, server)
    lasts = max(30 * alone, 5 * min(latency_s, 20 * alone))
    number = round(min(max(rate * lasts, FEWEST_REQUESTS), MOST_REQUESTS))
    drawn_traces = [draw(request, rate, number, seed) for seed in range(draws)]
    if alone > latency_s:  # no number of devices helps
        devices = max(least, math.ceil(rate * alone))
        served = tuple(serve(drawn, server, devices, fleet) for drawn in drawn_traces)
        return _whole(served, (served[0].devices,), parts, False, drawn_traces)
    needed: list[int] = []
    for drawn in drawn_traces:
        needed.append(fewest_devices(drawn, server, latency_s, least=least, fleet=fleet).devices)
    served = tuple(serve(drawn, server, max(needed), fleet) for drawn in drawn_traces)
    kept = all(one.p95_s <= latency_s for one in served)
    return _whole(served, tuple(needed), parts, kept, drawn_traces)


def _whole(
    served: tuple[Served, ...],
    needed: tuple[int, ...],
    parts: int,
    kept: bool,
    traces: Sequence[tuple[Request, ...]],
) -> Drawn:
    return Drawn(max(needed) * parts, served, tuple(number * parts for number in needed), kept, tuple(traces))


def fewest_going_on(requests: Sequence[Request], rate: float, server: Server) -> int:
    """The fewest devices that can do as much as requests like these ask for at a rate: on fewer the queue
    grows without end, however many a short trace of them leaves in time.
    """
    alike = Counter(replace(request, at=0.0) for request in requests)
    seconds = sum(number * _seconds_each(request, server) for request, number in alike.items())
    return math.floor(rate * seconds / len(requests)) + 1


def _seconds_each(request: Request, server: Server) -> float:
    """Seconds a picture where a device is as full as it goes."""
    size, most = request.size, server.most
    seconds = request.steps * server.seconds("denoise", size, most * request.rows)
    return (seconds + server.seconds("text", size, most + 1) + server.seconds("decode", size, most)) / most
