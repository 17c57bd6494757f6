"""Runs as others published them. Making pictures: Lambda's first edition, diffusers' pages, other projects'
rates, and Google's Vertex Model Garden report (LoRA files, memory, speed, cost and serving of SD 1.5).
Pre-training: Anyscale's ladder and costs, MosaicML's scaling, MLPerf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from darkroom.plan.counts import Profile
from darkroom.plan.jobs import Where, batch_seconds, encode_seconds, largest_rows, step_seconds
from darkroom.plan.roofline import ClusterSpec, Efficiency, Software
from darkroom.proof import tables as t
from darkroom.proof.tables import (
    OthersStep,
    Predict,
    PublishedValue,
    card,
    constant,
    others_profile,
    picture_profile,
    pictures_of_2022,
    power_of_two,
    preparing_profile,
)

TRACED_HOST = 0.6  # torch.jit.trace takes the Python out of a forward pass, the dispatcher stays


def pictures_s(profile: Profile, name: str, software: Software, batch: int, steps: int) -> Predict:
    """Seconds of one call on a card."""

    def seconds(known: Efficiency) -> float:
        return batch_seconds(
            profile, Where(card(name), known=known), software, batch=batch, steps=steps
        ).total

    return seconds


def lambda_latency() -> Iterator[PublishedValue]:
    """Seconds of a batch, 50 steps."""
    for (name, precision), by_batch in t.LAMBDA.items():
        single = precision == "single"
        profile = pictures_of_2022("float32") if single else pictures_of_2022("bf16", softmax="fused")
        software = Software("float32" if single else "fp16", channels_last=False, attention="plain")
        for batch, (seconds, _) in by_batch.items():
            yield PublishedValue(
                f"{name}, {precision}, batch {batch}",
                seconds,
                pictures_s(profile, name, software, batch, 50),
                unit="s",
            )
    for name, (kind, cores, seconds) in t.LAMBDA_CPU.items():
        yield PublishedValue(
            f"{name}, single, batch 1",
            seconds,
            _cpu_s(kind, cores),
            note="all cores taken as at work: how many were is not published",
            unit="s",
        )


def _cpu_s(kind: str, cores: int) -> Predict:
    """Seconds of one picture in float32 on so many cores of a class."""

    def seconds(known: Efficiency) -> float:
        where = Where(card(kind), cores=cores, known=known)
        software = Software("float32", channels_last=False, attention="plain")
        return batch_seconds(pictures_of_2022("float32"), where, software, batch=1, steps=50).total

    return seconds


def lambda_memory() -> Iterator[PublishedValue]:
    """Gigabytes reserved after a batch."""
    for (name, precision), by_batch in t.LAMBDA.items():
        profile = pictures_of_2022("float32" if precision == "single" else "bf16")
        for batch, (_, held) in by_batch.items():
            predicted = sum(profile.memory(batch).values()) / 1e9
            yield PublishedValue(f"{name}, {precision}, batch {batch}", held, constant(predicted), unit="GB")


def diffusers_ladder() -> Iterator[PublishedValue]:
    """The TITAN RTX ladder, and steps/s before and after memory-efficient attention."""
    for rung, (seconds, precision, channels_last, attention, engine) in t.DIFFUSERS_LADDER.items():
        profile = _of_2022("float32" if precision == "float32" else "bf16", attention)
        host = TRACED_HOST if engine == "traced" else 1.0
        software = Software(precision, channels_last=channels_last, attention=attention, host_factor=host)
        yield PublishedValue(rung, seconds, pictures_s(profile, "TITAN RTX", software, 1, 50), unit="s")
    for name, rates in t.DIFFUSERS_STEPS.items():
        for attention, rate in zip(("plain", "fused"), rates, strict=True):
            software = Software("fp16", channels_last=False, attention=attention)
            yield PublishedValue(
                f"{name}, {attention} attention",
                rate,
                steps_s(_of_2022("bf16", attention), name, software, 1),
                unit="steps/s",
            )


def _of_2022(precision: str, attention: str) -> Profile:
    """Plain attention as it was in 2022, in pure half precision."""
    if attention == "plain":
        return pictures_of_2022(precision, autocast=False)
    return picture_profile(precision, attention)


def torch2() -> Iterator[PublishedValue]:
    """diffusers' page on torch 2: steps/s by card and batch, eager and compiled with CUDA graphs."""
    for name, by_batch in t.DIFFUSERS_TORCH2.items():
        for batch, rates in by_batch.items():
            for engine, rate in zip(("eager", "graphs"), rates, strict=True):
                yield PublishedValue(
                    f"{name}, batch {batch}, {engine}",
                    rate,
                    steps_s(picture_profile("bf16", "fused"), name, Software("fp16", engine), batch),
                    unit="steps/s",
                )


def steps_s(profile: Profile, name: str, software: Software, batch: int) -> Predict:
    """Denoising steps a second on a card."""

    def rate(known: Efficiency) -> float:
        where = Where(card(name), known=known)
        one = batch_seconds(profile, where, software, batch=batch, steps=1).total
        two = batch_seconds(profile, where, software, batch=batch, steps=2).total
        return 1 / (two - one)

    return rate


def engines_elsewhere() -> Iterator[PublishedValue]:
    """What other projects and pages measured of plain PyTorch and of compile."""
    for (name, family, side, engine, channels_last), rate in t.ENGINE_STEPS.items():
        profile = picture_profile("bf16", "fused", family, side)
        software = Software("fp16", engine, channels_last)
        case = f"{name}, {family} {side} px, {engine}"
        yield PublishedValue(case, rate, steps_s(profile, name, software, 1), unit="steps/s")
    for (name, family, side, engine, channels_last, steps), seconds in t.ENGINE_SECONDS.items():
        profile = picture_profile("bf16", "fused", family, side)
        software = Software("fp16", engine, channels_last)
        layout = ", channels last" if channels_last else ""
        case = f"{name}, {family} {side} px, {steps} steps, {engine}{layout}"
        yield PublishedValue(case, seconds, pictures_s(profile, name, software, 1, steps), unit="s")


def tensorrt() -> Iterator[PublishedValue]:
    """TensorRT, also with fp8: taken as CUDA graphs of fused kernels. No constant has seen these rows."""
    for (name, family, side, batch, steps, format_), seconds in t.TENSORRT.items():
        profile = picture_profile("bf16", "fused", family, side)
        software = Software("fp16", "tensorrt", quantised=format_)
        case = f"{name}, {family} {side} px, batch {batch}, {steps} steps, {format_ or 'fp16'}"
        yield PublishedValue(case, seconds, pictures_s(profile, name, software, batch, steps), unit="s")
    for (name, family, side), rate in t.TENSORRT_STEPS.items():
        profile = picture_profile("bf16", "fused", family, side)
        predict = steps_s(profile, name, Software("fp16", "tensorrt"), 1)
        yield PublishedValue(f"{name}, {family} {side} px, fp16", rate, predict, unit="steps/s")


# ---- Google's Vertex Model Garden report

CONTAINERS = (("plain", 50), ("optimised", 25))  # and their denoising steps
# What the report's job and script add to the device's work, read of rows that are marked so and never
# counted: 10 steps cost USD 0.06, so the job starts in 45 s; 800 steps of one picture took 307 s, of which
# the device's launches fill the half of each; and the thread that polls memory without pause takes 0.3 s a
# step more.
START_S, SCRIPT_S, TRACED_S = 45.0, 0.2, 0.3
PRIOR = 2  # reading B of the Vertex report: prior preservation doubles each batch


def vertex_lora() -> Iterator[PublishedValue]:
    """Parameters and file sizes of LoRA on queries and values."""
    from darkroom.plan.training import adapter_facts

    for rank, (trained, total, mib) in t.VERTEX_LORA.items():
        facts = adapter_facts("sd15", rank)
        yield PublishedValue(
            f"rank {rank}, trained", trained, constant(facts["trained"]), limit=0.0, unit="parameters"
        )
        yield PublishedValue(
            f"rank {rank}, total", total, constant(facts["total"]), limit=0.0, unit="parameters"
        )
        share, published = 100 * facts["trained"] / facts["total"], round(100 * trained / total, 2)
        yield PublishedValue(f"rank {rank}, share", published, constant(round(share, 2)), limit=0.0, unit="%")
        yield PublishedValue(
            f"rank {rank}, file", mib, constant(facts["file_bytes"] / 2**20), limit=0.03, unit="MiB"
        )


# ---- memory


def _script(rank: int | None, checkpointing: bool, side: int, encoders: str = "float32") -> Profile:
    return others_profile(OthersStep("sd15", side, rank, checkpointing, encoders=encoders))


def vertex_memory() -> Iterator[PublishedValue]:
    """Peak VRAM by method, batch and resolution."""
    for rank, recompute, batch, side, published, chart in t.VERTEX_MEMORY:
        profile = _script(rank, recompute, side)
        held = sum(profile.memory(PRIOR * batch).values()) / 1e9
        ceiling = published >= t.VERTEX_CEILING_GB
        method = f"LoRA {rank}" if rank else "full"
        yield PublishedValue(
            f"{method}{' checkpointed' if recompute else ''}, batch {batch}, {side} px",
            published,
            constant(held),
            limit=0.0 if ceiling else 0.20 if chart else 0.15,
            at_least=t.VERTEX_AT_LEAST_GB if ceiling else None,
            plain=constant(sum(profile.memory(batch).values()) / 1e9),
            unit="GB",
        )


def vertex_largest() -> Iterator[PublishedValue]:
    """The largest batch of LoRA with checkpointing; as powers of two, one apart is allowed."""
    for name, by_side in t.VERTEX_LARGEST.items():
        for side, published in by_side.items():
            rows = largest_rows(_script(8, True, side), Where(card(name)))
            yield PublishedValue(
                f"{name}, {side} px",
                published,
                constant(power_of_two(rows // PRIOR)),
                plain=constant(power_of_two(rows)),
                unit="pictures",
            )


# ---- speed, cost, serving


def _vertex_step_s(
    known: Efficiency, name: str, batch: int, side: int, rank: int | None = 8, *, traced: bool = True
) -> float:
    """Seconds of a step of the report's script; `traced`: with its thread that polls memory without pause.

    Speed was measured on captioned flowers, where no class pictures double the batch.
    """
    software = Software("fp16", channels_last=False)
    profile = _script(rank, rank is not None, side)
    where = Where(card(name), known=known)
    step = step_seconds(profile, where, software, micro=batch, rows=batch)
    return step.total + SCRIPT_S + traced * TRACED_S


def vertex_speed() -> Iterator[PublishedValue]:
    """Steps/s of LoRA with checkpointing, and what the job cost by steps and batch."""
    a100 = "A100-SXM4-40GB"
    for i, (batch, side, rate) in enumerate(t.VERTEX_SPEED):
        yield PublishedValue(
            f"batch {batch}, {side} px",
            rate,
            lambda known, b=batch, s=side: 1 / _vertex_step_s(known, a100, b, s),  # type: ignore[misc]
            fitted=i == 0,
            unit="steps/s",
        )
    for tuned, rate in t.VERTEX_RANK_SPEED.items():
        yield PublishedValue(
            f"LoRA {tuned}, batch 4, 512 px",
            rate,
            lambda known, r=tuned: 1 / _vertex_step_s(known, a100, 4, 512, r),  # type: ignore[misc]
            derived=tuned == 8,  # the same run as above
            unit="steps/s",
        )
    for steps, dollars in t.VERTEX_STEPS_COST.items():
        yield PublishedValue(
            f"{steps} steps of batch 4, USD",
            dollars,
            _vertex_usd(a100, 4, steps, 8),
            fitted=steps == 10,
            unit="USD",
        )
    for (method, name), by_batch in t.VERTEX_BATCH_COST.items():
        for batch, dollars in by_batch.items():
            rank = 8 if method == "LoRA" else None
            yield PublishedValue(
                f"{method}, {name}, 800 pictures in batches of {batch}, USD",
                dollars,
                _vertex_usd(name, batch, 800 // batch, rank),
                fitted=method == "LoRA" and name.startswith("A100") and batch == 1,
                unit="USD",
            )


def _vertex_usd(name: str, batch: int, steps: int, rank: int | None) -> Predict:
    def usd(known: Efficiency) -> float:
        seconds = START_S + steps * _vertex_step_s(known, name, batch, 512, rank, traced=False)
        return seconds / 3600 * t.VERTEX_USD_PER_HOUR[name]

    return usd


def vertex_serving() -> Iterator[PublishedValue]:
    """Seconds of four pictures in both containers, and the dollars of one that follow from them."""
    profile = picture_profile("bf16", "fused")
    software = Software("fp16", channels_last=False)
    for name, published in t.VERTEX_SERVING.items():
        for (container, steps), (seconds, dollars) in zip(CONTAINERS, published, strict=True):
            predict = pictures_s(profile, name, software, 4, steps)
            yield PublishedValue(f"{name}, {container} ({steps} steps)", seconds, predict, unit="s")
            price = t.VERTEX_USD_PER_HOUR[name] / 3600 / 4
            yield PublishedValue(
                f"{name}, {container}, USD an image",
                dollars,
                lambda known, p=predict, usd=price: p(known) * usd,  # type: ignore[misc]
                derived=True,
                unit="USD",
            )


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
