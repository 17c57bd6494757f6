"""Making pictures as others published it: Lambda's first edition, diffusers' pages, other projects' rates,
and Google's Vertex Model Garden report (LoRA files, memory, speed, cost and serving of SD 1.5).
"""

from __future__ import annotations

from collections.abc import Iterator

from darkroom.plan.counts import Profile
from darkroom.plan.jobs import Where, batch_seconds, largest_rows, step_seconds
from darkroom.plan.roofline import Efficiency, Software
from darkroom.proof import tables as t
from darkroom.proof.peers import OthersStep, others_profile, picture_profile, pictures_of_2022
from darkroom.proof.tables import Predict, PublishedValue, card, constant, power_of_two

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
