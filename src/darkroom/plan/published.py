"""Every row of the published tables with what the plan says of it.

A prediction is a function of the efficiencies, so that the fit (benchmarks/plan/fit.py) and the proof use the
same code. `fitted` rows are those whose value the fit has seen; the proof counts the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from darkroom.hardware.cards import Card, find_card
from darkroom.plan import tables as t
from darkroom.plan.jobs import Where, batch_seconds, encode_seconds, largest_rows, step_seconds
from darkroom.plan.others import OthersStep
from darkroom.plan.profile import Profile
from darkroom.plan.roofline import Efficiency, Software
from darkroom.plan.scale import Cluster
from darkroom.plan.shipped import others_profile, picture_profile, pictures_of_2022, preparing_profile

Predict = Callable[[Efficiency], float]
PRIOR = 2  # reading B of the Vertex report: prior preservation doubles each batch
TRACED_HOST = 0.6  # torch.jit.trace takes the Python out of a forward pass, the dispatcher stays


@dataclass(frozen=True)
class Row:
    """One published value. `limit`: its own tolerance, where it is not the table's."""

    case: str
    published: float
    predict: Predict
    fitted: bool = False
    limit: float | None = None
    at_least: float | None = None  # a ceiling of the card: the prediction is to be at least this
    plain: Predict | None = None  # the plain reading, shown beside
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """A published table: all rows within `limit`, or their median where `by_median`."""

    name: str
    limit: float
    rows: tuple[Row, ...]
    by_median: bool = True
    reading: str = ""
    source: str = ""


def card(name: str) -> Card:
    """A card that the tables name."""
    found = find_card(name)
    assert found is not None, name
    return found


def constant(value: float) -> Predict:
    """What no efficiency changes."""
    return lambda _: value


# ---- memory


def _script(rank: int | None, checkpointing: bool, side: int, encoders: str = "float32") -> Profile:
    return others_profile(OthersStep("sd15", side, rank, checkpointing, encoders=encoders))


def vertex_memory() -> Iterator[Row]:
    """Peak VRAM by method, batch and resolution."""
    for rank, recompute, batch, side, published, chart in t.VERTEX_MEMORY:
        profile = _script(rank, recompute, side)
        held = sum(profile.memory(PRIOR * batch).values()) / 1e9
        ceiling = published >= t.VERTEX_CEILING_GB
        method = f"LoRA {rank}" if rank else "full"
        yield Row(
            f"{method}{' checkpointed' if recompute else ''}, batch {batch}, {side} px",
            published,
            constant(held),
            limit=0.20 if chart else 0.15,
            at_least=t.VERTEX_AT_LEAST_GB if ceiling else None,
            plain=constant(sum(profile.memory(batch).values()) / 1e9),
            unit="GB",
        )


def vertex_largest() -> Iterator[Row]:
    """The largest batch of LoRA with checkpointing; as powers of two, one apart is allowed."""
    for name, by_side in t.VERTEX_LARGEST.items():
        for side, published in by_side.items():
            rows = largest_rows(_script(8, True, side), Where(card(name)))
            yield Row(
                f"{name}, {side} px", published, constant(_power_of_two(rows // PRIOR)), unit="pictures"
            )


def _power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number else 0


# ---- Vertex: speed, cost, serving


def vertex_step_s(
    known: Efficiency, name: str, batch: int, side: int, rank: int | None = 8, *, traced: bool = True
) -> float:
    """Seconds of a step of the report's script; `traced`: with its thread that polls memory without pause.

    Speed was measured on captioned flowers, where no class pictures double the batch.
    """
    software = Software("fp16", channels_last=False)
    profile = _script(rank, rank is not None, side)
    where = Where(card(name), known=known)
    step = step_seconds(profile, where, software, micro=batch, rows=batch)
    return step.total + known.of("script_s", "Vertex traced" if traced else "Vertex")


def vertex_speed() -> Iterator[Row]:
    """Steps/s of LoRA with checkpointing, and what the job cost by steps and batch."""
    a100 = "A100-SXM4-40GB"
    for i, (batch, side, rate) in enumerate(t.VERTEX_SPEED):
        yield Row(
            f"batch {batch}, {side} px",
            rate,
            lambda known, b=batch, s=side: 1 / vertex_step_s(known, a100, b, s),  # type: ignore[misc]
            fitted=i % 2 == 0,
            unit="steps/s",
        )
    for steps, dollars in t.VERTEX_STEPS_COST.items():
        yield Row(
            f"{steps} steps of batch 4, USD",
            dollars,
            _vertex_usd(a100, 4, steps, 8),
            fitted=steps == 10,
            unit="USD",
        )
    for (method, name), by_batch in t.VERTEX_BATCH_COST.items():
        for batch, dollars in by_batch.items():
            rank = 8 if method == "LoRA" else None
            yield Row(
                f"{method}, {name}, 800 pictures in batches of {batch}, USD",
                dollars,
                _vertex_usd(name, batch, 800 // batch, rank),
                fitted=method == "LoRA" and name.startswith("A100") and batch in (1, 4, 16),
                unit="USD",
            )


def _vertex_usd(name: str, batch: int, steps: int, rank: int | None) -> Predict:
    def usd(known: Efficiency) -> float:
        seconds = known.of("start_s", "Vertex") + steps * vertex_step_s(
            known, name, batch, 512, rank, traced=False
        )
        return seconds / 3600 * t.VERTEX_USD_PER_HOUR[name]

    return usd


def vertex_serving() -> Iterator[Row]:
    """Seconds of four pictures in both containers, and dollars of one."""
    profile = picture_profile("bf16", "fused")
    software = Software("fp16", channels_last=False)
    for name, published in t.VERTEX_SERVING.items():
        for container, steps, seconds in zip(("plain", "optimised"), (50, 25), published, strict=True):
            predict = _pictures_s(profile, name, software, 4, steps)
            fitted = container == "optimised"
            yield Row(f"{name}, {container} ({steps} steps)", seconds, predict, fitted=fitted, unit="s")
            price = t.VERTEX_USD_PER_HOUR[name] / 3600 / 4
            yield Row(
                f"{name}, {container}, USD an image",
                seconds * price,
                lambda known, p=predict, usd=price: p(known) * usd,  # type: ignore[misc]
                fitted=fitted,
                unit="USD",
            )


def _pictures_s(profile: Profile, name: str, software: Software, batch: int, steps: int) -> Predict:
    def seconds(known: Efficiency) -> float:
        return batch_seconds(
            profile, Where(card(name), known=known), software, batch=batch, steps=steps
        ).total

    return seconds


# ---- pre-training


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
    cluster = Cluster(run.count, network=run.network, mode=run.mode)
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
        bandwidth = where.card.bandwidth_bytes_s * known.of("bandwidth", "GPU")
        seconds += 3 * 4 * profile.trained / bandwidth / cluster.shards
    return run.global_batch / seconds


def _micro_that_fits(name: str, side: int, mode: str, count: int) -> int:
    profile = others_profile(OthersStep("sd2", side, encodes=False))
    return max(1, _power_of_two(largest_rows(profile, Where(card(name), Cluster(count, mode=mode)))))


def anyscale_run(name: str, count: int, side: int, rung: str) -> Pretraining:
    """A rung of Anyscale's ladder. Lightning sums gradients after every micro-batch under DDP and FSDP."""
    mode = "fsdp" if rung.startswith("FSDP") else "ddp"
    return Pretraining(
        name,
        count,
        side,
        t.ANYSCALE_MICRO[side] if count == 32 else _micro_that_fits(name, side, mode, count),
        4096,
        "TCP 100 Gbit" if rung == "DDP TCP" else "EFA 400 Gbit",
        mode,
        "compile" if rung.endswith("compile") else "eager",
        sync_each=True,
    )


def anyscale_rates() -> Iterator[Row]:
    """Images/s inline and pre-encoded, and the ladder."""
    for side, (inline, _) in t.ANYSCALE_INLINE.items():
        run = replace(anyscale_run("A100-SXM4-80GB", 32, side, "DDP fast"), inline=True)
        yield Row(
            f"32 A100-80, {side} px, encoders inline",
            inline,
            lambda known, r=run: images_s(r, known),  # type: ignore[misc]
            unit="images/s",
        )
    for (name, count, side), rates in t.ANYSCALE_LADDER.items():
        for rung, rate in zip(t.ANYSCALE_RUNGS, rates, strict=True):
            run = anyscale_run(name, count, side, rung)
            yield Row(
                f"{count} {name}, {side} px, {rung}",
                rate,
                lambda known, r=run: images_s(r, known),  # type: ignore[misc]
                fitted=count == 32 and side == 256,
                unit="images/s",
            )


def anyscale_costs() -> Iterator[Row]:
    """Costs of phase 1 and the total, from their own rates."""
    samples = t.ANYSCALE_SAMPLES[256]
    for kind, (rate, hours, usd, small) in t.ANYSCALE_PHASE_1.items():
        took = samples / rate / 3600
        hourly = t.ANYSCALE_MACHINES * t.ANYSCALE_MACHINE_USD + small * t.ANYSCALE_A10G_USD
        more = t.ANYSCALE_ENCODING_USD if kind == "offline" else 0
        yield Row(f"phase 1 {kind}, hours, from their rate", hours, constant(took), unit="h")
        yield Row(
            f"phase 1 {kind}, USD, from their rate", usd + more, constant(took * hourly + more), unit="USD"
        )
    best = {side: t.ANYSCALE_LADDER["A100-SXM4-80GB", 32, side][3] for side in (256, 512)}
    total = 32 * sum(t.ANYSCALE_SAMPLES[side] / best[side] for side in best) / 3600
    yield Row("total A100-hours, from their rates", t.ANYSCALE_TOTAL_A100_HOURS, constant(total), unit="h")


def anyscale_total() -> Iterator[Row]:
    """The whole run from first principles."""

    def hours(known: Efficiency) -> float:
        runs = {side: anyscale_run("A100-SXM4-80GB", 32, side, "FSDP compile") for side in (256, 512)}
        return 32 * sum(t.ANYSCALE_SAMPLES[side] / images_s(run, known) for side, run in runs.items()) / 3600

    hourly = t.ANYSCALE_TOTAL_USD / t.ANYSCALE_TOTAL_A100_HOURS
    yield Row("total A100-hours, from counts", t.ANYSCALE_TOTAL_A100_HOURS, hours, unit="h")
    yield Row("total USD, from counts", t.ANYSCALE_TOTAL_USD, lambda known: hours(known) * hourly, unit="USD")


def mosaic_run(count: int, side: int, *, inline: bool) -> Pretraining:
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


def mosaic_rates() -> Iterator[Row]:
    """Images/s on 8 to 256 A100."""
    for count, (rate, *_) in t.MOSAIC_INLINE.items():
        run = mosaic_run(count, 512, inline=True)
        yield Row(
            f"{count} A100, 512 px, encoders inline",
            rate,
            lambda known, r=run: images_s(r, known),  # type: ignore[misc]
            fitted=count == 8,
            unit="images/s",
        )
    for count, (*rates, _, _) in t.MOSAIC_STORED.items():
        for side, rate in zip((256, 512), rates, strict=True):
            run = mosaic_run(count, side, inline=False)
            yield Row(
                f"{count} A100, {side} px, pre-encoded",
                rate,
                lambda known, r=run: images_s(r, known),  # type: ignore[misc]
                fitted=count == 8,
                unit="images/s",
            )


def mosaic_days() -> Iterator[Row]:
    """Days from their rates; what they round or cut off is allowed."""
    for count, (rate, days, hours, _) in t.MOSAIC_INLINE.items():
        took = t.MOSAIC_SAMPLES / rate / 3600 * count
        yield Row(f"{count} A100, inline, A100-hours", hours, constant(took), limit=1e-4, unit="h")
        yield Row(f"{count} A100, inline, days", days, constant(took / count / 24), limit=0.0012, unit="days")
    for count, (small, large, days, _) in t.MOSAIC_STORED.items():
        took = t.ANYSCALE_SAMPLES[256] / small + t.ANYSCALE_SAMPLES[512] / large
        yield Row(f"{count} A100, pre-encoded, days", days, constant(took / 86400), limit=0.001, unit="days")


def mosaic_costs() -> Iterator[Row]:
    """Dollars from their rates."""
    for count, (rate, _, _, usd) in t.MOSAIC_INLINE.items():
        hours = t.MOSAIC_SAMPLES / rate / 3600 * count
        yield Row(f"{count} A100, inline, USD", usd, constant(hours * t.MOSAIC_USD_PER_HOUR), unit="USD")
    for count, (small, large, _, usd) in t.MOSAIC_STORED.items():
        seconds = t.ANYSCALE_SAMPLES[256] / small + t.ANYSCALE_SAMPLES[512] / large
        spent = seconds / 3600 * count * t.MOSAIC_USD_PER_HOUR
        yield Row(f"{count} A100, pre-encoded, USD", usd, constant(spent), unit="USD")


def mlperf() -> Iterator[Row]:
    """Images/s of eight cards: half precision throughout, CUDA graphs, prepared moments and text."""
    for name, (device, batch, rate) in t.MLPERF.items():
        run = Pretraining(
            device,
            8,
            512,
            batch // 8,
            batch,
            "EFA 400 Gbit",
            engine="graphs",
            channels_last=True,
            pure_half=True,
        )
        yield Row(
            f"{name}: 8 {device}, batch {batch}",
            rate,
            lambda known, r=run: images_s(r, known),  # type: ignore[misc]
            fitted=name in ("v4.1 Eos", "v4.1 NVIDIA", "v5.0 NVIDIA"),
            unit="images/s",
        )


# ---- pictures


def lambda_latency() -> Iterator[Row]:
    """Seconds of a batch, 50 steps."""
    for (name, precision), by_batch in t.LAMBDA.items():
        profile = pictures_of_2022("float32" if precision == "single" else "bf16")
        software = Software(
            "float32" if precision == "single" else "fp16", channels_last=False, attention="plain"
        )
        for batch, (seconds, _) in by_batch.items():
            yield Row(
                f"{name}, {precision}, batch {batch}",
                seconds,
                _pictures_s(profile, name, software, batch, 50),
                fitted=name in ("RTX 3090", "RTX 8000") and batch in (1, 4),
                unit="s",
            )


def lambda_memory() -> Iterator[Row]:
    """Gigabytes reserved after a batch."""
    for (name, precision), by_batch in t.LAMBDA.items():
        profile = pictures_of_2022("float32" if precision == "single" else "bf16")
        for batch, (_, held) in by_batch.items():
            predicted = sum(profile.memory(batch).values()) / 1e9
            yield Row(f"{name}, {precision}, batch {batch}", held, constant(predicted), unit="GB")


def diffusers_ladder() -> Iterator[Row]:
    """The TITAN RTX ladder, and steps/s before and after memory-efficient attention."""
    for rung, (seconds, precision, channels_last, attention, engine) in t.DIFFUSERS_LADDER.items():
        profile = picture_profile("float32" if precision == "float32" else "bf16", attention)
        host = TRACED_HOST if engine == "traced" else 1.0
        software = Software(precision, channels_last=channels_last, attention=attention, host_factor=host)
        yield Row(rung, seconds, _pictures_s(profile, "TITAN RTX", software, 1, 50), unit="s")
    for name, rates in t.DIFFUSERS_STEPS.items():
        for attention, rate in zip(("plain", "fused"), rates, strict=True):
            yield Row(
                f"{name}, {attention} attention",
                rate,
                _steps_s(name, attention, 1, channels_last=False),
                fitted=name in ("T4", "A10G", "A100-SXM4-40GB"),
                unit="steps/s",
            )


def torch2() -> Iterator[Row]:
    """diffusers' page on torch 2: steps/s by card and batch, eager and compiled with CUDA graphs."""
    for name, by_batch in t.DIFFUSERS_TORCH2.items():
        for batch, rates in by_batch.items():
            for engine, rate in zip(("eager", "graphs"), rates, strict=True):
                yield Row(
                    f"{name}, batch {batch}, {engine}",
                    rate,
                    _steps_s(name, "fused", batch, engine=engine),
                    fitted=batch == 4,
                    unit="steps/s",
                )


def _steps_s(
    name: str, attention: str, batch: int, *, engine: str = "eager", channels_last: bool = True
) -> Predict:
    profile = picture_profile("bf16", attention)
    software = Software("fp16", engine, channels_last, attention)

    def rate(known: Efficiency) -> float:
        where = Where(card(name), known=known)
        one = batch_seconds(profile, where, software, batch=batch, steps=1).total
        two = batch_seconds(profile, where, software, batch=batch, steps=2).total
        return 1 / (two - one)

    return rate


# ---- LoRA


def vertex_lora() -> Iterator[Row]:
    """Parameters and file sizes of LoRA on queries and values."""
    from darkroom.plan.adapter import adapter_facts

    for rank, (trained, total, mib) in t.VERTEX_LORA.items():
        facts = adapter_facts("sd15", rank)
        yield Row(f"rank {rank}, trained", trained, constant(facts["trained"]), limit=0.0, unit="parameters")
        yield Row(f"rank {rank}, total", total, constant(facts["total"]), limit=0.0, unit="parameters")
        share, published = 100 * facts["trained"] / facts["total"], round(100 * trained / total, 2)
        yield Row(f"rank {rank}, share", published, constant(round(share, 2)), limit=0.0, unit="%")
        yield Row(f"rank {rank}, file", mib, constant(facts["file_bytes"] / 2**20), limit=0.03, unit="MiB")


B_READING = (
    "reading B for every row: prior preservation doubles the batch, VAE and text encoder in float32, AdamW "
    "of torch 2.0"
)
SPEED_READING = (
    "captioned flowers, so no prior preservation; float32 VAE and text encoder at each step; steps/s with "
    "the script's memory tracing, costs without"
)

TABLES: dict[str, tuple[float, bool, Callable[[], Iterator[Row]], str]] = {
    "LoRA parameters and files (Vertex)": (0.03, False, vertex_lora, "queries and values of the U-Net"),
    "peak VRAM (Vertex)": (0.20, False, vertex_memory, B_READING),
    "largest batch (Vertex)": (1.0, False, vertex_largest, B_READING),
    "training speed and cost (Vertex)": (0.15, True, vertex_speed, SPEED_READING),
    "serving (Vertex)": (
        0.15,
        True,
        vertex_serving,
        "fp16, sliced attention as fused: a slice's scores stay in the cache; four pictures at once",
    ),
    "images/s (Anyscale)": (
        0.15,
        True,
        anyscale_rates,
        "micro-batches 128 and 32 on 80 GB, else the largest power of two that fits; summed each time",
    ),
    "costs from their rates (Anyscale)": (0.10, False, anyscale_costs, ""),
    "total from first principles (Anyscale)": (0.20, False, anyscale_total, "FSDP and compile, 32 A100-80"),
    "days (MosaicML)": (0.0012, False, mosaic_days, "their rates, which they printed rounded"),
    "costs (MosaicML)": (0.03, False, mosaic_costs, "USD 2 an A100-hour"),
    "images/s (MosaicML)": (
        0.15,
        True,
        mosaic_rates,
        "micro-batch 4 inline with float32 encoders, and 16 pre-encoded",
    ),
    "latency (Lambda)": (0.20, True, lambda_latency, "attention of 2022; half under autocast"),
    "memory (Lambda)": (0.15, True, lambda_memory, "attention of 2022; half under autocast"),
    "ladder and steps/s (diffusers)": (0.25, True, diffusers_ladder, "one picture of 512 px"),
    "torch 2 steps/s (diffusers)": (
        0.25,
        True,
        torch2,
        "channels last; graphs are compile's reduce-overhead",
    ),
    "MLPerf SD 2, eight cards": (0.20, True, mlperf, "half throughout, CUDA graphs, channels last"),
}


def table(name: str) -> Table:
    """One table, its rows counted."""
    limit, by_median, rows, reading = TABLES[name]
    return Table(name, limit, tuple(rows()), by_median, reading)


def error(row: Row, known: Efficiency) -> float:
    """How far the prediction is off, as a share of what was published."""
    predicted = row.predict(known)
    if row.at_least is not None:
        return min(0.0, predicted / row.at_least - 1)
    return predicted / row.published - 1 if row.published else float(predicted != 0)


def holds(found: Table, known: Efficiency) -> bool:
    """Whether a table's predicted rows are within its tolerance."""
    if found.name.startswith("largest batch"):
        return all(_near(row, known) for row in found.rows)
    left = [row for row in found.rows if not row.fitted]
    if found.by_median:
        return median(abs(error(row, known)) for row in left) <= found.limit
    return all(abs(error(row, known)) <= _limit(row, found) + 1e-12 for row in left)


def _limit(row: Row, found: Table) -> float:
    return found.limit if row.limit is None else row.limit


def _near(row: Row, known: Efficiency) -> bool:
    """The same power of two or its neighbour; none is none."""
    predicted = row.predict(known)
    if not row.published or not predicted:
        return predicted <= 1 and row.published <= 1
    return 0.5 <= predicted / row.published <= 2


def as_dict(row: Row, known: Efficiency) -> dict[str, Any]:
    """A row as `--json` gives it."""
    told: dict[str, Any] = {
        "case": row.case,
        "published": row.published,
        "predicted": row.predict(known),
        "error": error(row, known),
        "fitted": row.fitted,
        "unit": row.unit,
    }
    if row.plain is not None:
        told["plain_reading"] = row.plain(known)
    if row.at_least is not None:
        told["at_least"] = row.at_least
    return told
