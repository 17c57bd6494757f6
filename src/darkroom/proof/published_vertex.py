"""Google's Vertex Model Garden report: LoRA files, memory, speed, cost and serving of SD 1.5."""

from __future__ import annotations

from collections.abc import Iterator

from darkroom.plan.counts import Profile
from darkroom.plan.jobs import Where, largest_rows, step_seconds
from darkroom.plan.roofline import Efficiency, Software
from darkroom.proof import tables as t
from darkroom.proof.peers import OthersStep, others_profile, picture_profile
from darkroom.proof.published_pictures import pictures_s
from darkroom.proof.rows import Predict, PublishedValue, card, constant, power_of_two

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
