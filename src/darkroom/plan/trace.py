"""Serving requests as they came (a trace), or at random at so many a second: both by the same rule.

The rule is the server's (`plan.serving`). A rate is answered by several drawn traces, whose spread is part of
the interval.

A trace is a file of one JSON object a line, with the names of `bench serve`'s requests: `at` (in mean gaps
between requests; seconds at a rate of 1), `width`, `height`, `steps`, `guidance`. What else a line says is
ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from darkroom.bill import format_number
from darkroom.errors import InputError
from darkroom.hardware.prices import Price, cost, offer_for
from darkroom.options import parse_size
from darkroom.picture_settings import PictureSettings
from darkroom.plan.ask import USUAL_PRECISION
from darkroom.plan.counts import Profile
from darkroom.plan.jobs import GenerateJob, Plan, Where, plan_generating
from darkroom.plan.roofline import ClusterSpec, Software
from darkroom.plan.serving import (
    MOST_DEVICES,
    Drawn,
    Fleet,
    Request,
    Served,
    Server,
    Size,
    fewest_at_rate,
    fewest_devices,
    fewest_going_on,
    serve,
)
from darkroom.plan.show import time_width
from darkroom.plan.targets import PlanRequest, layout_of, own_guidance, picture_profile

HOURS_A_MONTH = 730


def ask_rate(
    settings: PictureSettings, rate: float, latency_s: float, fleet: Fleet | None = None
) -> PlanRequest:
    """Serving so many pictures a second that are asked for at random, each within a time."""
    if not (rate > 0 and latency_s > 0):
        raise InputError(f"--rate {rate} --latency {latency_s}", allowed="numbers above 0")
    width, height = parse_size(settings.size)
    guidance = own_guidance(settings.model) if settings.guidance is None else settings.guidance
    request = Request(0.0, width, height, settings.steps, guidance)
    goal = ServingTarget(latency_s, rate, fleet)

    def plan(
        profile: Profile, where: Where, software: Software, usd: float | None, prices: Sequence[Price] | None
    ) -> Plan:
        return plan_rate(request, goal, profile, where, software, usd_per_hour=usd, prices=prices)

    # Rows with guidance and without are rows of one U-Net: the profile has one a picture.
    return PlanRequest(
        "serve",
        lambda precision, _: picture_profile(
            settings.model, width, height, False, precision, settings.attention
        ),
        plan,
        precision=USUAL_PRECISION,
        attention=settings.attention,
        channels_last=layout_of(settings.channels_last),
    )


@dataclass(frozen=True)
class ServingTarget:
    """Seconds within which 95 of 100 are done, at how many a second, and what becomes of devices
    meanwhile.
    """

    latency_s: float
    rate: float = 0.0
    fleet: Fleet | None = None


def plan_rate(
    request: Request,
    goal: ServingTarget,
    profile: Profile,
    where: Where,
    software: Software,
    *,
    usd_per_hour: float | None = None,
    prices: Sequence[Price] | None = None,
) -> Plan:
    """The fewest devices that serve requests at a rate within a goal, and what they cost in an hour."""
    profiles = {request.size: profile}
    server = Server(profiles, where, software)
    if server.most < 1:
        return _too_large(profile, where, software, usd_per_hour, prices)
    found = fewest_at_rate(request, goal.rate, goal.latency_s, server, fleet=goal.fleet)
    served = found.middle
    plan = _plan_served(
        [request], goal.rate, served, found.kept, profiles, where, software, usd_per_hour, prices
    )
    notes = [f"{len(found.served)} draws of requests at random need {_range(found.needed)} devices"]
    if not found.kept:
        notes.append(_out_of_reach(goal.latency_s, served.p95_s))
    made = replace(
        plan, largest_micro_batch=server.most, notes=(*plan.notes, *notes, *_fleet(goal.fleet, served))
    )

    def at(slower: float) -> tuple[int, Served]:
        """One draw on a card that is slower by a factor: what it needs, and as it is on those planned."""
        other = Server(profiles, where, software, slower=slower)
        few = fewest_at_rate(request, goal.rate, goal.latency_s, other, fleet=goal.fleet, draws=1)
        return few.devices, serve(found.traces[0], other, found.simulated, goal.fleet)

    return _with_spread(made, where, software, at, found)


def _with_spread(
    plan: Plan,
    where: Where,
    software: Software,
    at: Callable[[float], tuple[int, Served]],
    found: Drawn | None = None,
) -> Plan:
    """The plan with intervals of its devices and latencies: the same on a card as slow and as quick as may
    be.
    """
    half = time_width(plan.step_s, where, software)
    (few, quick), (many, slow) = at(math.exp(-half)), at(math.exp(half))
    needed = [*(found.needed if found else (plan.extra["devices"],)), few, many]
    low, high = min(needed), max(needed)
    devices = plan.extra["devices"]
    intervals = {
        "devices": (float(low), float(high)),
        **{
            f"latency_{name}_s": tuple(sorted((getattr(quick, f"{name}_s"), getattr(slow, f"{name}_s"))))
            for name in ("p50", "p95", "p99")
        },
        "hours": (plan.hours, plan.hours),
        "images_per_s": (plan.images_per_s, plan.images_per_s),
    }
    priced = {"usd": plan.cost.usd, "usd_spot": plan.cost.usd_spot, "kwh": plan.cost.kwh,
              "device_hours": plan.cost.device_hours, "usd_per_image": plan.extra["usd_per_image"],
              "usd_per_month": plan.extra["usd_per_month"]}  # fmt: skip
    for name, value in priced.items():
        if value is not None:
            intervals[name] = (value * low / devices, value * high / devices)
    return replace(plan, intervals={**plan.intervals, **intervals})


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def ask_trace(
    settings: PictureSettings, requests: Sequence[Request], latency_s: float, fleet: Fleet | None = None
) -> PlanRequest:
    """Serving a trace, each picture within a time; its sizes, steps and guidance stand for the settings'."""
    if latency_s <= 0:
        raise InputError(f"--latency {latency_s}", allowed="a number above 0")
    sizes = sorted({request.size for request in requests}, key=lambda size: size[0] * size[1])

    def profile(size: Size, precision: str) -> Profile:
        return picture_profile(settings.model, *size, False, precision, settings.attention)

    def plan(
        widest: Profile, where: Where, software: Software, usd: float | None, prices: Sequence[Price] | None
    ) -> Plan:
        """The plan of a trace on one place."""
        profiles = {size: profile(size, software.precision) for size in sizes[:-1]} | {sizes[-1]: widest}
        goal = ServingTarget(latency_s, fleet=fleet)
        return plan_trace(requests, goal, profiles, where, software, usd_per_hour=usd, prices=prices)

    return PlanRequest(
        "serve",
        lambda precision, _: profile(sizes[-1], precision),
        plan,
        precision=USUAL_PRECISION,
        attention=settings.attention,
        channels_last=layout_of(settings.channels_last),
    )


def plan_trace(
    requests: Sequence[Request],
    goal: ServingTarget,
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
    rate = len(requests) / max(requests[-1].at, 1e-9)
    found = _fewest_of_trace(requests, goal, server)
    kept = found.p95_s <= goal.latency_s
    plan = _plan_served(requests, rate, found, kept, profiles, where, software, usd_per_hour, prices)
    notes = (
        *plan.notes,
        *_notes(requests, found, kept, goal.latency_s),
        *_ends_early(requests, goal, server, found),
        *_fleet(goal.fleet, found),
    )
    made = replace(plan, largest_micro_batch=server.most, notes=notes)

    def at(slower: float) -> tuple[int, Served]:
        other = Server(profiles, where, software, slower=slower)
        few = _fewest_of_trace(requests, goal, other)
        return few.devices, serve(requests, other, found.devices, goal.fleet)

    return _with_spread(made, where, software, at)


def _fewest_of_trace(requests: Sequence[Request], goal: ServingTarget, server: Server) -> Served:
    """The fewest devices for requests that go on as the trace has them, as for a rate: an hour is planned,
    and a trace that ends before its queue has grown would be done in time by devices that never keep up.

    Requests that all come at once have no rate: they are served as they are.
    """
    lasts = requests[-1].at
    rate = len(requests) / max(lasts, 1e-9)
    least = min(fewest_going_on(requests, rate, server), MOST_DEVICES) if lasts > 0 else 1
    return fewest_devices(requests, server, goal.latency_s, least=least, fleet=goal.fleet)


def _ends_early(
    requests: Sequence[Request], goal: ServingTarget, server: Server, found: Served
) -> Iterator[str]:
    """Where fewer devices would do for the trace alone, because it ends."""
    alone = fewest_devices(requests, server, goal.latency_s, fleet=goal.fleet)
    if alone.devices < found.devices and alone.p95_s <= goal.latency_s:
        yield (
            f"the trace alone is in time on {alone.devices}, for it ends before its queue has grown; "
            f"requests that go on like it need {found.devices}"
        )


def _fleet(fleet: Fleet | None, served: Served) -> Iterator[str]:
    """What was said of starting, losses and autoscaling, and what came of it."""
    if fleet is None:
        return
    if fleet.losses_per_hour:
        lost = f"{fleet.losses_per_hour:g} losses an hour and device: {served.losses} in the trace"
        yield f"{lost}; what a device held begins again, another takes {fleet.start_s:g} s"
    if fleet.least is not None:
        asked = (
            f"from {fleet.least} devices, one for {fleet.jobs_each} jobs, {fleet.start_s:g} s to start one"
        )
        yield f"autoscaling {asked}: {served.on:.3g} devices on average, which the cost is of"


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
    served: Served,
    kept: bool,
    profiles: dict[Size, Profile],
    where: Where,
    software: Software,
    usd_per_hour: float | None,
    prices: Sequence[Price] | None,
) -> Plan:
    """An hour of so many devices that serve requests like these, and a month of it."""
    steps = round(sum(request.steps for request in requests) / len(requests))
    job = GenerateJob("serve", max(1, round(rate * 3600)), 2 * served.most_at_once, steps)
    whole, widest = replace(where, cluster=ClusterSpec(served.devices)), _widest(profiles)
    plan = plan_generating(widest, job, whole, software, usd_per_hour=usd_per_hour, prices=prices)
    flops = sum(_flops(request, profiles[request.size]) for request in requests) / len(requests)
    worth = flops * rate / (plan.flops_an_image * plan.images_per_s)
    offer = offer_for(where.card, usd_per_hour, prices, number=served.devices)
    paid = served.devices * served.on / max(1, served.simulated)
    hour = cost(where.card, paid, cores=where.cores, offer=offer, number=served.devices)
    return replace(
        plan,
        batch={"pictures at once": served.most_at_once},
        fits=plan.fits and kept,
        flops_an_image=flops,
        images_per_s=rate,
        mfu=plan.mfu * worth,
        hours=1.0,
        cost=hour,
        machine="",  # a server's devices send each other nothing
        extra={
            "devices": served.devices,
            "latency_p50_s": served.p50_s,
            "latency_p95_s": served.p95_s,
            "latency_p99_s": served.p99_s,
            "capacity_images_per_s": rate / served.busy,
            "busy": served.busy,
            "usd_per_image": None if hour.usd is None else hour.usd / (rate * 3600),
            "usd_per_month": None if hour.usd is None else hour.usd * HOURS_A_MONTH,
        },
    )


def _flops(request: Request, profile: Profile) -> float:
    each = request.rows * (request.steps * profile.flops(1, "denoise") + profile.flops(1, "text"))
    return each + profile.flops(1, "decode")


def _notes(requests: Sequence[Request], found: Served, kept: bool, latency_s: float) -> Iterator[str]:
    sizes = ", ".join(f"{width}x{height}" for width, height in sorted({r.size for r in requests}))
    steps = sorted(request.steps for request in requests)
    duration = format_number(requests[-1].at)
    yield f"{len(requests)} requests in {duration} s: {sizes}, {steps[0]} to {steps[-1]} steps"
    if not kept:
        yield _out_of_reach(latency_s, found.p95_s)


def _out_of_reach(latency_s: float, p95_s: float) -> str:
    return f"the goal of {latency_s:g} s is out of reach: {format_number(p95_s, 2)} s"
