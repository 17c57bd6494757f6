"""Making pictures as others published it: Lambda's first edition, diffusers' pages, other projects' rates."""

from __future__ import annotations

from collections.abc import Iterator

from darkroom.plan.counts import Profile
from darkroom.plan.jobs import Where, batch_seconds
from darkroom.plan.roofline import Efficiency, Software
from darkroom.proof import tables as t
from darkroom.proof.peers import picture_profile, pictures_of_2022
from darkroom.proof.rows import Predict, PublishedValue, card, constant

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
