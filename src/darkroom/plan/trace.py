"""Serving a trace: so many requests as they came, each with its size, steps and guidance.

A file of one JSON object a line, with the names of `bench serve`'s requests: `at` (in mean gaps between
requests; seconds at a rate of 1), `width`, `height`, `steps`, `guidance`. What else a line says is ignored.
"""

from __future__ import annotations

import heapq
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from darkroom.bill import format_number
from darkroom.errors import InputError
from darkroom.hardware.prices import Price
from darkroom.plan.ask import Asked, PictureSettings, layout_of, picture_profile
from darkroom.plan.jobs import GenerateJob, Plan, Where, largest_rows, plan_generating
from darkroom.plan.money import cost, offer_for
from darkroom.plan.profile import Profile
from darkroom.plan.roofline import Software
from darkroom.plan.scale import Cluster

MOST_AT_ONCE = 64  # pictures of a device
MOST_DEVICES = 4096
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
    active: list[list[_Active]] = [[] for _ in range(devices)]
    times = [(0.0, device) for device in range(devices)]
    latencies: list[float] = []
    arrivals = [request.at for request in requests]
    begun_so_far, busy_s, end_s, most = 0, 0.0, 0.0, 0
    while times:
        now, device = heapq.heappop(times)
        waiting = bisect_right(arrivals, now) - begun_so_far
        own = active[device]
        share = -(-(waiting + sum(map(len, active))) // devices)
        room = max(0, min(waiting, min(server.most, share) - len(own)))
        begun = requests[begun_so_far : begun_so_far + room]
        begun_so_far += room
        own += [_Active(request, request.steps, now) for request in begun]
        if not own:
            if begun_so_far < len(requests):
                heapq.heappush(times, (arrivals[begun_so_far], device))
            continue
        took = _step(own, server, begun, now)
        busy_s, end_s, most = busy_s + took, max(end_s, now + took), max(most, len(own))
        latencies += [now + took - one.request.at for one in own if one.left == 0]
        active[device] = [one for one in own if one.left]
        heapq.heappush(times, (now + took, device))
    latencies.sort()
    late = latencies[math.ceil(0.95 * len(latencies)) - 1]
    return Served(devices, late, busy_s / devices / end_s, most)


@dataclass
class _Active:
    request: Request
    left: int
    stepped: float  # when it last took a step


def _step(own: list[_Active], server: Server, begun: Sequence[Request], now: float) -> float:
    """Let the size that has waited longest take a step; seconds of it, of new texts and of ready pictures."""
    size = min(own, key=lambda one: one.stepped).request.size
    group = [one for one in own if one.request.size == size]
    seconds = server.seconds("denoise", size, sum(one.request.rows for one in group))
    for text_size in {request.size for request in begun}:
        seconds += server.seconds("text", text_size, sum(r.size == text_size for r in begun) + 1)
    for one in group:
        one.left, one.stepped = one.left - 1, now
    return seconds + server.seconds("decode", size, sum(one.left == 0 for one in group))


def fewest_devices(requests: Sequence[Request], server: Server, latency_s: float) -> Served:
    """The fewest devices that keep the goal; where none keeps it, of one device a request."""
    most = min(MOST_DEVICES, len(requests))
    few, enough = 0, 1
    while (found := serve(requests, server, enough)).p95_s > latency_s and enough < most:
        few, enough = enough, min(most, 2 * enough)
    while enough - few > 1 and found.p95_s <= latency_s:
        middle = (few + enough) // 2
        tried = serve(requests, server, middle)
        if tried.p95_s <= latency_s:
            enough, found = middle, tried
        else:
            few = middle
    return found


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
    widest = profiles[max(profiles, key=lambda size: size[0] * size[1])]
    server = Server(profiles, where, software)
    if server.most < 1:
        one = GenerateJob("serve", 1, 2, 1)  # says that it does not fit
        return plan_generating(widest, one, where, software, usd_per_hour=usd_per_hour, prices=prices)
    found = fewest_devices(requests, server, latency_s)
    rate = len(requests) / max(requests[-1].at, 1e-9)
    steps = round(sum(request.steps for request in requests) / len(requests))
    job = GenerateJob("serve", max(1, round(rate * 3600)), 2 * found.most_at_once, steps)
    whole = replace(where, cluster=Cluster(found.devices))
    plan = plan_generating(widest, job, whole, software, usd_per_hour=usd_per_hour, prices=prices)
    flops = sum(_flops(request, profiles[request.size]) for request in requests) / len(requests)
    worth = flops * rate / (plan.flops_an_image * plan.images_per_s)
    hour = cost(
        where.card, found.devices, cores=where.cores, offer=offer_for(where.card, usd_per_hour, prices)
    )
    kept = found.p95_s <= latency_s
    return replace(
        plan,
        batch={"pictures at once": found.most_at_once},
        largest_micro_batch=server.most,
        fits=plan.fits and kept,
        flops_an_image=flops,
        images_per_s=rate,
        mfu=plan.mfu * worth,
        hours=1.0,
        cost=hour,
        notes=(*plan.notes, *_notes(requests, found, kept, latency_s)),
        extra={
            "devices": found.devices,
            "latency_p95_s": found.p95_s,
            "capacity_images_per_s": rate / found.busy,
            "busy": found.busy,
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
        yield f"the goal of {latency_s:g} s is out of reach: {format_number(found.p95_s, 2)} s"
