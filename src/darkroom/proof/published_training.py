"""Pre-training as others published it: Anyscale's ladder and costs, MosaicML's scaling, MLPerf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from darkroom.plan.jobs import Where, encode_seconds, largest_rows, step_seconds
from darkroom.plan.roofline import Efficiency, Software
from darkroom.plan.scale import ClusterSpec
from darkroom.proof import tables as t
from darkroom.proof.peers import OthersStep, others_profile, preparing_profile
from darkroom.proof.tables import PublishedValue, card, constant, power_of_two


@dataclass(frozen=True)
class Pretraining:
    """A U-Net's training on many devices, as a published table ran it."""

    card: str
    count: int
    side: int
    micro: int
    global_batch: int
    network: str
    mode: str = "ddp"
    engine: str = "eager"
    channels_last: bool = False
    inline: bool = False
    sync_each: bool = False
    pure_half: bool = False
    ema: bool = False
    encoders: str = "fp16"
    family: str = "sd2"


def images_s(run: Pretraining, known: Efficiency) -> float:
    """Images a second of all devices."""
    profile = others_profile(OthersStep(run.family, run.side, encodes=False, pure_half=run.pure_half))
    cluster = ClusterSpec(run.count, network=run.network, mode=run.mode)
    where = Where(card(run.card), cluster, known=known)
    software = Software("fp16", run.engine, run.channels_last)
    rows = run.global_batch // run.count
    micro = min(run.micro, rows)
    gradient_bytes = 2 if run.mode == "fsdp" or run.pure_half else 4
    seconds = step_seconds(
        profile,
        where,
        software,
        micro=micro,
        rows=rows,
        sync_each=run.sync_each,
        gradient_bytes=gradient_bytes,
    ).total
    if run.inline:
        encoding = preparing_profile(run.family, run.side, "bf16")
        frozen = replace(software, engine="eager", precision=run.encoders)
        seconds += encode_seconds(encoding, where, frozen, micro).total * rows / micro
    if run.ema:  # reads the average and the weights, writes the average
        seconds += 3 * 4 * profile.trained / where.roofline(software).bandwidth / cluster.shards
    return run.global_batch / seconds


def micro_that_fits(name: str, side: int, mode: str, count: int) -> int:
    """The largest power of two of pictures that a card holds of SD 2's training step."""
    profile = others_profile(OthersStep("sd2", side, encodes=False))
    return max(1, power_of_two(largest_rows(profile, Where(card(name), ClusterSpec(count, mode=mode)))))


def _anyscale_run(name: str, count: int, side: int, rung: str) -> Pretraining:
    """A rung of Anyscale's ladder. Lightning sums gradients after every micro-batch under DDP and FSDP."""
    mode = "fsdp" if rung.startswith("FSDP") else "ddp"
    return Pretraining(
        name,
        count,
        side,
        t.ANYSCALE_MICRO[side] if count == 32 else micro_that_fits(name, side, mode, count),
        4096,
        "TCP 100 Gbit" if rung == "DDP TCP" else "EFA 400 Gbit",
        mode,
        "compile" if rung.endswith("compile") else "eager",
        sync_each=True,
    )


def anyscale_rates() -> Iterator[PublishedValue]:
    """Images/s inline and pre-encoded, and the ladder."""
    for side, (inline, _) in t.ANYSCALE_INLINE.items():
        run = replace(_anyscale_run("A100-SXM4-80GB", 32, side, "DDP fast"), inline=True)
        yield PublishedValue(
            f"32 A100-80, {side} px, encoders inline",
            inline,
            lambda known, r=run: images_s(r, known),  # type: ignore[misc]
            unit="images/s",
        )
    for (name, count, side), rates in t.ANYSCALE_LADDER.items():
        for rung, rate in zip(t.ANYSCALE_RUNGS, rates, strict=True):
            run = _anyscale_run(name, count, side, rung)
            yield PublishedValue(
                f"{count} {name}, {side} px, {rung}",
                rate,
                lambda known, r=run: images_s(r, known),  # type: ignore[misc]
                unit="images/s",
            )


def anyscale_costs() -> Iterator[PublishedValue]:
    """Costs of phase 1 and the total, from their own rates."""
    samples = t.ANYSCALE_SAMPLES[256]
    for kind, (rate, hours, usd, small) in t.ANYSCALE_PHASE_1.items():
        took = samples / rate / 3600
        hourly = t.ANYSCALE_MACHINES * t.ANYSCALE_MACHINE_USD + small * t.ANYSCALE_A10G_USD
        more = t.ANYSCALE_ENCODING_USD if kind == "offline" else 0
        yield PublishedValue(f"phase 1 {kind}, hours, from their rate", hours, constant(took), unit="h")
        yield PublishedValue(
            f"phase 1 {kind}, USD, from their rate", usd + more, constant(took * hourly + more), unit="USD"
        )
    best = {side: t.ANYSCALE_LADDER["A100-SXM4-80GB", 32, side][3] for side in (256, 512)}
    total = 32 * sum(t.ANYSCALE_SAMPLES[side] / best[side] for side in best) / 3600
    yield PublishedValue(
        "total A100-hours, from their rates", t.ANYSCALE_TOTAL_A100_HOURS, constant(total), unit="h"
    )


def anyscale_total() -> Iterator[PublishedValue]:
    """Phase 1 in its three ways and the whole run, from counts."""

    def hours(known: Efficiency) -> float:
        runs = {side: _anyscale_run("A100-SXM4-80GB", 32, side, "FSDP compile") for side in (256, 512)}
        return 32 * sum(t.ANYSCALE_SAMPLES[side] / images_s(run, known) for side, run in runs.items()) / 3600

    for kind, (_, took, usd, _) in t.ANYSCALE_PHASE_1.items():
        more = t.ANYSCALE_ENCODING_USD if kind == "offline" else 0
        yield PublishedValue(
            f"phase 1 {kind}, hours, from counts",
            took,
            lambda known, k=kind: _phase_1_hours(k, known),  # type: ignore[misc]
            unit="h",
        )
        yield PublishedValue(
            f"phase 1 {kind}, USD, from counts",
            usd + more,
            lambda known, k=kind: _phase_1_usd(k, known),  # type: ignore[misc]
            unit="USD",
        )
    hourly = t.ANYSCALE_TOTAL_USD / t.ANYSCALE_TOTAL_A100_HOURS
    yield PublishedValue("total A100-hours, from counts", t.ANYSCALE_TOTAL_A100_HOURS, hours, unit="h")
    yield PublishedValue(
        "total USD, from counts",
        t.ANYSCALE_TOTAL_USD,
        lambda known: hours(known) * hourly,
        derived=True,
        unit="USD",
    )


def _phase_1_hours(kind: str, known: Efficiency) -> float:
    """Hours at 256 px on 32 A100-80 and the fast network; small cards that encode meanwhile must keep up."""
    run = _anyscale_run("A100-SXM4-80GB", 32, 256, "DDP fast")
    rate = images_s(replace(run, inline=kind == "inline"), known)
    if kind == "online":
        rate = min(rate, t.ANYSCALE_PHASE_1[kind][3] * _encoded_s(known))
    return t.ANYSCALE_SAMPLES[256] / rate / 3600


def _phase_1_usd(kind: str, known: Efficiency) -> float:
    small = t.ANYSCALE_PHASE_1[kind][3]
    hourly = t.ANYSCALE_MACHINES * t.ANYSCALE_MACHINE_USD + small * t.ANYSCALE_A10G_USD
    usd = _phase_1_hours(kind, known) * hourly
    if kind == "offline":
        usd += t.ANYSCALE_SAMPLES[256] / _encoded_s(known) / 3600 * t.ANYSCALE_A10G_USD
    return usd


def _encoded_s(known: Efficiency) -> float:
    """Pictures of 256 px that an A10G encodes a second, captions too, in half precision."""
    profile = preparing_profile("sd2", 256, "bf16")
    where = Where(card("A10G"), known=known)
    return 32 / encode_seconds(profile, where, Software("fp16"), 32).total


def _mosaic_run(count: int, side: int, *, inline: bool) -> Pretraining:
    """MosaicML's trainer: the micro-batches its READMEs name, gradients summed once a step."""
    return Pretraining(
        "A100-SXM4-40GB",
        count,
        side,
        4 if inline else 16,
        2048,
        "RoCE 1600 Gbit",
        inline=inline,
        ema=inline,
        encoders="float32",
    )


def mosaic_rates() -> Iterator[PublishedValue]:
    """Images/s on 8 to 256 A100."""
    for count, (rate, *_) in t.MOSAIC_INLINE.items():
        run = _mosaic_run(count, 512, inline=True)
        yield PublishedValue(
            f"{count} A100, 512 px, encoders inline",
            rate,
            lambda known, r=run: images_s(r, known),  # type: ignore[misc]
            unit="images/s",
        )
    for count, (*rates, _, _) in t.MOSAIC_STORED.items():
        for side, rate in zip((256, 512), rates, strict=True):
            run = _mosaic_run(count, side, inline=False)
            yield PublishedValue(
                f"{count} A100, {side} px, pre-encoded",
                rate,
                lambda known, r=run: images_s(r, known),  # type: ignore[misc]
                unit="images/s",
            )


def mosaic_days() -> Iterator[PublishedValue]:
    """Days from their rates; what they round or cut off is allowed."""
    for count, (rate, days, hours, _) in t.MOSAIC_INLINE.items():
        took = t.MOSAIC_SAMPLES / rate / 3600 * count
        yield PublishedValue(f"{count} A100, inline, A100-hours", hours, constant(took), limit=1e-4, unit="h")
        yield PublishedValue(
            f"{count} A100, inline, days", days, constant(took / count / 24), limit=0.0012, unit="days"
        )
    for count, (small, large, days, _) in t.MOSAIC_STORED.items():
        took = t.ANYSCALE_SAMPLES[256] / small + t.ANYSCALE_SAMPLES[512] / large
        yield PublishedValue(
            f"{count} A100, pre-encoded, days", days, constant(took / 86400), limit=0.001, unit="days"
        )


def mosaic_costs() -> Iterator[PublishedValue]:
    """Dollars from their rates."""
    for count, (rate, _, _, usd) in t.MOSAIC_INLINE.items():
        hours = t.MOSAIC_SAMPLES / rate / 3600 * count
        yield PublishedValue(
            f"{count} A100, inline, USD", usd, constant(hours * t.MOSAIC_USD_PER_HOUR), unit="USD"
        )
    for count, (small, large, _, usd) in t.MOSAIC_STORED.items():
        seconds = t.ANYSCALE_SAMPLES[256] / small + t.ANYSCALE_SAMPLES[512] / large
        spent = seconds / 3600 * count * t.MOSAIC_USD_PER_HOUR
        yield PublishedValue(f"{count} A100, pre-encoded, USD", usd, constant(spent), unit="USD")


def mlperf() -> Iterator[PublishedValue]:
    """Images/s of eight cards: half precision throughout, prepared moments and text, CUDA graphs since
    v4.0.
    """
    for device, submitted in t.MLPERF.items():
        for name, batch, rate in submitted:
            run = Pretraining(
                device,
                8,
                512,
                batch // 8,
                batch,
                "EFA 400 Gbit",
                engine="eager" if name.startswith("v3.1") else "graphs",
                channels_last=True,
                pure_half=True,
            )
            yield PublishedValue(
                f"{name}: 8 {device}, batch {batch}",
                rate,
                lambda known, r=run: images_s(r, known),  # type: ignore[misc]
                unit="images/s",
            )
