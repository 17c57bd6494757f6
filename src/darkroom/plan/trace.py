"""Serving requests as they came (a trace), or at random at so many a second: both by the same rule.

The rule is the server's: one queue, and every device takes its share of what waits at each of its steps. A
rate is answered by several drawn traces, whose spread says how sure the answer is.

A trace is a file of one JSON object a line, with the names of `bench serve`'s requests: `at` (in mean gaps
between requests; seconds at a rate of 1), `width`, `height`, `steps`, `guidance`. What else a line says is
ignored.
"""

from __future__ import annotations

import heapq
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from darkroom.bill import format_number
from darkroom.errors import InputError
from darkroom.hardware.prices import Price
from darkroom.options import parse_size
from darkroom.plan.ask import USUAL_PRECISION
from darkroom.plan.cost import cost, offer_for
from darkroom.plan.counts import Profile
from darkroom.plan.generation import PictureSettings, own_guidance, picture_profile
from darkroom.plan.jobs import GenerateJob, Plan, Where, largest_rows, plan_generating
from darkroom.plan.roofline import Software
from darkroom.plan.scale import Cluster
from darkroom.plan.targets import Asked, layout_of

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
        said = json.loads(line)
        at, guidance = float(said["at"]) / rate, float(said["guidance"])
        whole = [int(said[key]) for key in ("width", "height", "steps")]
        if not (at >= 0 and math.isfinite(at + guidance) and min(whole) >= 1):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise InputError(
            f"--trace {path}, line {number}: {line.strip()[:60]}",
            allowed='{"at": 0.5, "width": 512, "height": 512, "steps": 30, "guidance": 7.5}',
        ) from None
    return Request(at, whole[0], whole[1], whole[2], guidance)


@dataclass(frozen=True)
class Served:
    """What became of a trace on so many devices."""

    devices: int
    p95_s: float
    busy: float
    most_at_once: int


class Server:
    """A card that takes steps of many requests at once: those of one size share a step."""

    def __init__(self, profiles: dict[Size, Profile], where: Where, software: Software) -> None:
        self._profiles, self._roofline = profiles, where.roofline(software)
        fits = min(largest_rows(profile, where, most=2 * MOST_AT_ONCE) for profile in profiles.values())
        self.most = min(MOST_AT_ONCE, fits // 2)  # pictures, each of two rows with guidance
        self.seconds: Callable[[str, Size, int], float] = cache(self._seconds)

    def _seconds(self, stage: str, size: Size, rows: int) -> float:
        return self._roofline.stage(self._profiles[size], stage, rows).total if rows else 0.0


def serve(requests: Sequence[Request], server: Server, devices: int) -> Served:
    """Serve a trace: one queue, and every device takes its share of what waits at each of its steps."""
    found = [_Device() for _ in range(devices)]
    times = [(0.0, device) for device in range(devices)]
    latencies: list[float] = []
    arrivals = [request.at for request in requests]
    begun_so_far, under_way, busy_s, end_s, most = 0, 0, 0.0, 0.0, 0
    while times:
        now, number = heapq.heappop(times)
        device = found[number]
        waiting = bisect_right(arrivals, now) - begun_so_far
        share = -(-(waiting + under_way) // devices)
        room = max(0, min(waiting, min(server.most, share) - device.held))
        begun = requests[begun_so_far : begun_so_far + room]
        begun_so_far += room
        under_way += room
        device.begin(begun, now)
        if not device.held:
            if begun_so_far < len(requests):
                heapq.heappush(times, (arrivals[begun_so_far], number))
            continue
        most = max(most, device.held)
        took, ready = device.step(server, begun, now)
        under_way -= len(ready)
        busy_s, end_s = busy_s + took, max(end_s, now + took)
        latencies += [now + took - at for at in ready]
        heapq.heappush(times, (now + took, number))
    latencies.sort()
    late = latencies[math.ceil(0.95 * len(latencies)) - 1]
    return Served(devices, late, busy_s / devices / end_s, most)


@dataclass
class _Group:
    """The requests of one size under way on a device: they take their steps together."""

    stepped: float  # when they last took a step
    steps: int = 0  # taken since the group began
    rows: int = 0
    due: list[tuple[int, float, int]] = field(default_factory=list)  # at which step; came at; rows


class _Device:
    """What is under way on one device."""

    def __init__(self) -> None:
        self._groups: dict[Size, _Group] = {}
        self.held = 0

    def begin(self, requests: Sequence[Request], now: float) -> None:
        """Take more requests."""
        self.held += len(requests)
        for request in requests:
            group = self._groups.setdefault(request.size, _Group(now))
            group.rows += request.rows
            heapq.heappush(group.due, (group.steps + request.steps, request.at, request.rows))

    def step(self, server: Server, begun: Sequence[Request], now: float) -> tuple[float, list[float]]:
        """Let the size that has waited longest take a step: seconds of it, of new texts and of ready
        pictures, and when the requests of those came.
        """
        size = min(self._groups, key=lambda one: self._groups[one].stepped)
        group, ready = self._groups[size], list[float]()
        seconds = server.seconds("denoise", size, group.rows)
        group.steps, group.stepped = group.steps + 1, now
        for text_size in {request.size for request in begun}:
            seconds += server.seconds("text", text_size, sum(r.size == text_size for r in begun) + 1)
        while group.due and group.due[0][0] <= group.steps:
            _, at, rows = heapq.heappop(group.due)
            group.rows -= rows
            ready.append(at)
        self.held -= len(ready)
        if not group.due:
            del self._groups[size]
        return seconds + server.seconds("decode", size, len(ready)), ready


def fewest_devices(
    requests: Sequence[Request], server: Server, latency_s: float, *, least: int = 1
) -> Served:
    """The fewest devices, `least` or more, that keep the goal; where none does, of one device a request."""
    most = max(least, min(MOST_DEVICES, len(requests)))
    few, enough, more = least - 1, least, 1
    while (found := serve(requests, server, enough)).p95_s > latency_s and enough < most:
        few, enough, more = enough, min(most, enough + more), 2 * more
    while enough - few > 1 and found.p95_s <= latency_s:
        middle = (few + enough) // 2
        tried = serve(requests, server, middle)
        if tried.p95_s <= latency_s:
            enough, found = middle, tried
        else:
            few = middle
    return found


@dataclass(frozen=True)
class Drawn:
    """What several draws of requests at one rate need."""

    devices: int  # with which every draw keeps the goal
    served: tuple[Served, ...]  # each draw on so many
    needed: tuple[int, ...]  # each draw's own fewest
    kept: bool

    @property
    def p95_s(self) -> float:
        """Of the middle draw."""
        return median(one.p95_s for one in self.served)

    @property
    def busy(self) -> float:
        """Of the middle draw."""
        return median(one.busy for one in self.served)


def draw(request: Request, rate: float, number: int, seed: int) -> tuple[Request, ...]:
    """So many requests that come at random at a rate a second (Poisson)."""
    gaps = np.random.default_rng([2026, seed]).exponential(1 / rate, number)
    return tuple(replace(request, at=float(at)) for at in np.cumsum(gaps))


def fewest_at_rate(request: Request, rate: float, latency_s: float, server: Server) -> Drawn:
    """The fewest devices for requests like this one at a rate, from several draws.

    Of more than SIMULATED devices a part is simulated with its part of the requests: large pools wait less.
    """
    alone = serve([replace(request, at=0.0)], server, 1).p95_s
    each = _seconds_each(request, server)
    least = math.floor(rate * each) + 1  # with fewer the queue grows without end
    parts = max(1, least // SIMULATED)
    rate, least = rate / parts, math.floor(rate / parts * each) + 1
    lasts = max(30 * alone, 5 * min(latency_s, 20 * alone))
    number = round(min(max(rate * lasts, FEWEST_REQUESTS), MOST_REQUESTS))
    draws = [draw(request, rate, number, seed) for seed in range(DRAWS)]
    if alone > latency_s:  # no number of devices helps
        served = tuple(serve(drawn, server, max(least, math.ceil(rate * alone))) for drawn in draws)
        return _whole(served, (served[0].devices,), parts, False)
    needed: list[int] = []
    for drawn in draws:
        needed.append(fewest_devices(drawn, server, latency_s, least=least).devices)
    served = tuple(serve(drawn, server, max(needed)) for drawn in draws)
    return _whole(served, tuple(needed), parts, all(one.p95_s <= latency_s for one in served))


def _whole(served: tuple[Served, ...], needed: tuple[int, ...], parts: int, kept: bool) -> Drawn:
    return Drawn(max(needed) * parts, served, tuple(number * parts for number in needed), kept)


def _seconds_each(request: Request, server: Server) -> float:
    """Seconds a picture where a device is as full as it goes."""
    size, most = request.size, server.most
    seconds = request.steps * server.seconds("denoise", size, most * request.rows)
    return (seconds + server.seconds("text", size, most + 1) + server.seconds("decode", size, most)) / most


def ask_rate(settings: PictureSettings, rate: float, latency_s: float) -> Asked:
    """Serving so many pictures a second that are asked for at random, each within a time."""
    if not (rate > 0 and latency_s > 0):
        raise InputError(f"--rate {rate} --latency {latency_s}", allowed="numbers above 0")
    width, height = parse_size(settings.size)
    guidance = own_guidance(settings.model) if settings.guidance is None else settings.guidance
    request = Request(0.0, width, height, settings.steps, guidance)

    def plan(
        profile: Profile, where: Where, software: Software, usd: float | None, prices: Sequence[Price] | None
    ) -> Plan:
        return plan_rate(request, rate, latency_s, profile, where, software, usd_per_hour=usd, prices=prices)

    # Rows with guidance and without are rows of one U-Net: the profile has one a picture.
    return Asked(
        "serve",
        lambda precision, _: picture_profile(
            settings.model, width, height, False, precision, settings.attention
        ),
        plan,
        precision=USUAL_PRECISION,
        attention=settings.attention,
        channels_last=layout_of(settings.channels_last),
    )


def plan_rate(
    request: Request,
    rate: float,
    latency_s: float,
    profile: Profile,
    where: Where,
    software: Software,
    *,
    usd_per_hour: float | None = None,
    prices: Sequence[Price] | None = None,
) -> Plan:
    """The fewest devices that serve requests at a rate within a goal, and what they cost in an hour."""
    server = Server({request.size: profile}, where, software)
    if server.most < 1:
        return _too_large(profile, where, software, usd_per_hour, prices)
    found = fewest_at_rate(request, rate, latency_s, server)
    most = max(one.most_at_once for one in found.served)
    plan = _plan_served(
        [request], rate, found.devices, most, found.busy, found.p95_s, found.kept,
        {request.size: profile}, where, software, usd_per_hour, prices,
    )  # fmt: skip
    p95 = [one.p95_s for one in found.served]
    spread = {
        "devices_low": min(found.needed),
        "devices_high": max(found.needed),
        "latency_p95_low_s": min(p95),
        "latency_p95_high_s": max(p95),
        "draws": len(p95),
    }
    notes = [f"{len(p95)} draws of requests at random need {_range(found.needed)} devices"]
    if not found.kept:
        notes.append(_out_of_reach(latency_s, found.p95_s))
    return replace(
        plan,
        largest_micro_batch=server.most,
        notes=(*plan.notes, *notes),
        extra={**plan.extra, **spread},
    )


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def ask_trace(settings: PictureSettings, requests: Sequence[Request], latency_s: float) -> Asked:
    """Serving a trace, each picture within a time; its sizes, steps and guidance stand for the settings'."""
    if latency_s <= 0:
        raise InputError(f"--latency {latency_s}", allowed="a number above 0")
    sizes = sorted({request.size for request in requests}, key=lambda size: size[0] * size[1])

    def profile(size: Size, precision: str) -> Profile:
        return picture_profile(settings.model, *size, False, precision, settings.attention)

    def plan(
        widest: Profile, where: Where, software: Software, usd: float | None, prices: Sequence[Price] | None
    ) -> Plan:
        half = where.card.kind == "gpu" and software.precision == "fp16"  # the same bytes: one count serves
        precision = "bf16" if half else software.precision
        profiles = {size: profile(size, precision) for size in sizes[:-1]} | {sizes[-1]: widest}
        return plan_trace(requests, latency_s, profiles, where, software, usd_per_hour=usd, prices=prices)

    return Asked(
        "serve",
        lambda precision, _: profile(sizes[-1], precision),
        plan,
        precision=USUAL_PRECISION,
        attention=settings.attention,
        channels_last=layout_of(settings.channels_last),
    )


def plan_trace(
    requests: Sequence[Request],
    latency_s: float,
    profiles: dict[Size, Profile],
    where: Where,
    software: Software,
    *,
    usd_per_hour: float | None = None,
    prices: Sequence[Price] | None = None,
) -> Plan:
    """The fewest devices that serve a trace within a goal, and what they cost in an hour like it."""
    widest = _widest(profiles)
    server = Server(profiles, where, software)
    if server.most < 1:
        return _too_large(widest, where, software, usd_per_hour, prices)
    found = fewest_devices(requests, server, latency_s)
    rate = len(requests) / max(requests[-1].at, 1e-9)
    kept = found.p95_s <= latency_s
    plan = _plan_served(
        requests, rate, found.devices, found.most_at_once, found.busy, found.p95_s, kept,
        profiles, where, software, usd_per_hour, prices,
    )  # fmt: skip
    notes = (*plan.notes, *_notes(requests, found, kept, latency_s))
    return replace(plan, largest_micro_batch=server.most, notes=notes)


def _widest(profiles: dict[Size, Profile]) -> Profile:
    return profiles[max(profiles, key=lambda size: size[0] * size[1])]


def _too_large(
    profile: Profile,
    where: Where,
    software: Software,
    usd_per_hour: float | None,
    prices: Sequence[Price] | None,
) -> Plan:
    one = GenerateJob("serve", 1, 2, 1)  # says that it does not fit
    return plan_generating(profile, one, where, software, usd_per_hour=usd_per_hour, prices=prices)


def _plan_served(
    requests: Sequence[Request],
    rate: float,
    devices: int,
    most_at_once: int,
    busy: float,
    p95_s: float,
    kept: bool,
    profiles: dict[Size, Profile],
    where: Where,
    software: Software,
    usd_per_hour: float | None,
    prices: Sequence[Price] | None,
) -> Plan:
    """An hour of so many devices that serve requests like these."""
    steps = round(sum(request.steps for request in requests) / len(requests))
    job = GenerateJob("serve", max(1, round(rate * 3600)), 2 * most_at_once, steps)
    whole, widest = replace(where, cluster=Cluster(devices)), _widest(profiles)
    plan = plan_generating(widest, job, whole, software, usd_per_hour=usd_per_hour, prices=prices)
    flops = sum(_flops(request, profiles[request.size]) for request in requests) / len(requests)
    worth = flops * rate / (plan.flops_an_image * plan.images_per_s)
    offer = offer_for(where.card, usd_per_hour, prices)
    hour = cost(where.card, devices, cores=where.cores, offer=offer)
    return replace(
        plan,
        batch={"pictures at once": most_at_once},
        fits=plan.fits and kept,
        flops_an_image=flops,
        images_per_s=rate,
        mfu=plan.mfu * worth,
        hours=1.0,
        cost=hour,
        machine="",  # a server's devices send each other nothing
        extra={
            "devices": devices,
            "latency_p95_s": p95_s,
            "capacity_images_per_s": rate / busy,
            "busy": busy,
            "usd_per_image": None if hour.usd is None else hour.usd / (rate * 3600),
        },
    )


def _flops(request: Request, profile: Profile) -> float:
    each = request.rows * (request.steps * profile.flops(1, "denoise") + profile.flops(1, "text"))
    return each + profile.flops(1, "decode")


def _notes(requests: Sequence[Request], found: Served, kept: bool, latency_s: float) -> Iterator[str]:
    sizes = ", ".join(f"{width}x{height}" for width, height in sorted({r.size for r in requests}))
    steps = sorted(request.steps for request in requests)
    wall = format_number(requests[-1].at)
    yield f"{len(requests)} requests in {wall} s: {sizes}, {steps[0]} to {steps[-1]} steps"
    if not kept:
        yield _out_of_reach(latency_s, found.p95_s)


def _out_of_reach(latency_s: float, p95_s: float) -> str:
    return f"the goal of {latency_s:g} s is out of reach: {format_number(p95_s, 2)} s"
