"""From a profile and a card to a plan: what fits, how long, how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from darkroom.errors import InputError
from darkroom.hardware.cards import Card
from darkroom.hardware.meters import maps_large_folios
from darkroom.hardware.prices import Cost, Price, Storage, cost, offer_for
from darkroom.options import COPIED_BYTES
from darkroom.plan.counts import KINDS, LATENTS, Profile
from darkroom.plan.roofline import (
    ClusterSpec,
    Efficiency,
    Roofline,
    Software,
    TimeBreakdown,
    all_reduce_s,
    efficiency,
    exposed_s,
    host_copy_bytes_s,
)

CONTEXT_BYTES = 700e6  # CUDA context and library workspaces (field: hundreds of MB)
FRAGMENTATION = 1.04  # of the caching allocator


class ProcessBytes(NamedTuple):
    """What a process on a CPU holds besides tensors: libraries, threads, buffers; and where whole folios of
    the libraries' files are mapped (see `hardware.meters.maps_large_folios`)."""

    usual: float
    in_folios: float


DRAWING = ProcessBytes(425e6, 480e6)  # of `generate`, which needs no library of stores: 430 with 7 of tensors
TRAINING = ProcessBytes(650e6, 800e6)  # runs of 25 and 44 MB of tensors took 680 and 682
MOST_ROWS = 4096
START_S = 10.0  # a process and its imports: bills of runs on two cores say 8 to 12 s
LOAD_BYTES_S = 1e9  # weights from a disk, hashed: guessed, a disk gives 0.5 to 5 GB/s and SHA-256 takes 1.5
SAVE_BYTES_S = 0.5e9  # a checkpoint or a model, written, flushed and hashed: guessed


@dataclass(frozen=True)
class Where:
    """The device a plan is for. `cores` of a CPU class count as one device."""

    card: Card
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    cores: int = 1
    known: Efficiency = field(default_factory=efficiency)
    memory_bytes: float | None = None  # what is there; None: what the card has
    calibrated: bool = False  # whether `known` was measured on it

    @property
    def units(self) -> int:
        """Rows of hardware.csv that the device is made of: cores of a CPU class."""
        return self.cores if self.card.unit == "core" else 1

    @property
    def total_bytes(self) -> float | None:
        """All memory of the device; a CPU class has some by the core."""
        own = self.card.memory_bytes
        return self.memory_bytes or (None if own is None else own * self.units)

    @property
    def usable_bytes(self) -> float | None:
        """Memory for tensors, on a CPU with what its allocator keeps of them; None where none is known."""
        total = self.total_bytes
        if total is None:
            return None
        if self.card.kind == "cpu":
            return total - TRAINING.usual  # the system takes back pages of files
        return (total - CONTEXT_BYTES) / FRAGMENTATION

    def held(self, tensors: dict[str, float], process: ProcessBytes = TRAINING) -> dict[str, float]:
        """What a job holds: of a GPU its tensors; of a CPU the process too, as it is on this machine."""
        if self.card.kind != "cpu":
            return tensors
        return {**tensors, "process": process.in_folios if maps_large_folios() else process.usual}

    def memory(self, profile: Profile, rows: int, **more: Any) -> dict[str, float]:
        """Bytes by kind of a job's tensors here, at most `rows` at once; see `Profile.memory`."""
        return profile.memory(
            rows,
            shards=self.cluster.shards,
            gathers=self.cluster.gathers,
            keeps=self.card.kind == "cpu",
            rests=self.card.own_memory,
            **more,
        )

    def roofline(self, software: Software) -> Roofline:
        """The device with a software on it."""
        return Roofline(self.card, software, cores=self.cores, known=self.known)


@dataclass(frozen=True)
class Plan:
    """What a job needs on one kind of device."""

    job: str
    device: str
    count: int
    fits: bool
    precision: str
    batch: dict[str, int]
    parameters: dict[str, int]
    flops_an_image: float
    flops_a_step: float
    memory_bytes: dict[str, float]
    device_memory_bytes: float | None
    usable_memory_bytes: float | None  # for tensors: less the CUDA context and what lies between blocks
    largest_micro_batch: int | None
    step_s: dict[str, float]
    images_per_s: float
    mfu: float
    hours: float
    cost: Cost
    sizes_bytes: dict[str, float]
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    storage: Storage | None = None
    machine: str = ""  # what several devices stand in
    offers: tuple[dict[str, Any], ...] = ()  # what the same costs elsewhere, the cheapest first
    over: tuple[str, ...] = ()  # the limits that it breaks, or that nobody can vouch for
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # 80 %, of each figure
    phases_s: dict[str, float] = field(default_factory=dict)  # of a training, as its bill has them

    @property
    def kept(self) -> bool:
        """Whether it fits and keeps deadline and budget."""
        return self.fits and not self.over

    @property
    def peak_bytes(self) -> float:
        """Bytes at the peak: of tensors, and on a CPU of the whole process."""
        return sum(self.memory_bytes.values())


@dataclass(frozen=True)
class TrainJob:
    """What a recipe says of length and batch."""

    name: str
    steps: int
    global_batch: int
    micro_batch: int | None  # None: the largest that fits
    rows: int | None = None  # pictures in the store
    reads: Sequence[str] = ()  # of the store at each step: latents, text
    mends: Sequence[str] = ()  # settings that take less memory and are not set already
    gradient_bytes: int = 4  # of a number as processes send it to each other
    pictures: int | None = None  # of a folder of its own, whose latents it makes before it trains
    saves: int = 1  # checkpoints that training waits for
    swaps: bool = False  # whether train.blocks_to_swap may be set and is not
    every_save: int | None = None  # so many on a CPU where their state is large
    class_s: float = 0.0  # seconds of drawing pictures of a class before


def largest_rows(profile: Profile, where: Where, *, accumulate: bool = False, most: int = MOST_ROWS) -> int:
    """The most pictures a micro-batch can have; 0 where not one fits."""
    limit_bytes = where.usable_bytes
    if limit_bytes is None:
        return most

    def fits(rows: int) -> bool:
        return sum(where.memory(profile, rows, accumulate=accumulate).values()) <= limit_bytes

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plan_training(
    profile: Profile,
    job: TrainJob,
    where: Where,
    software: Software,
    *,
    usd_per_hour: float | None = None,
    prices: Sequence[Price] | None = None,
) -> Plan:
    """A training job on a kind of device."""
    rows = _rows_a_device(job, where.cluster)
    largest = largest_rows(profile, where)
    micro, fits = _micro_batch(profile, job, where, rows)
    step = step_seconds(profile, where, software, micro=micro, rows=rows, gradient_bytes=job.gradient_bytes)
    reading = _data_seconds(profile, job, where, rows)
    step += TimeBreakdown(data=max(0.0, reading - step.total))  # threads read ahead
    phases = _phases(profile, job, where, software, job.steps * step.total)
    plan = _plan(
        profile,
        where,
        software,
        offer_for(where.card, usd_per_hour, prices, number=where.cluster.count),
        job=job.name,
        fits=fits,
        phases_s=phases,
        batch={"global": job.global_batch, "micro": micro, "accumulation": -(-rows // micro)},
        flops_an_image=profile.flops(1, "forward", "backward"),
        flops_a_step=profile.flops(1, "forward", "backward") * job.global_batch,
        memory_bytes=where.memory(profile, micro, accumulate=micro < rows, step_rows=rows),
        largest_micro_batch=largest,
        seconds=step,
        images_per_s=job.global_batch / step.total,
        hours=sum(phases.values()) / 3600,
        sizes_bytes=_sizes(profile, job),
        notes=(
            *_notes(_mends(profile, job, where), fits, largest, micro, rows),
            *_swap_notes(profile, where),
        ),
    )
    return replace(plan, extra={"data_hidden_s": reading - step.data} if reading else {})


def _phases(
    profile: Profile, job: TrainJob, where: Where, software: Software, train_s: float
) -> dict[str, float]:
    """Seconds of a training's phases, named as in its bill; those that it has not are left out."""
    facts, weights = profile.facts, 4.0 * profile.total_parameters
    state, saves = float(facts.get("checkpoint_bytes", 0)), job.saves
    if where.card.kind == "cpu" and state > COPIED_BYTES:
        saves = job.every_save or saves
    result = float(facts.get("adapter_bytes", weights))
    found = {
        "start": START_S,
        "load": weights / LOAD_BYTES_S,
        "class pictures": job.class_s,
        "latents": _latents_s(profile, job, where, software),
        "train": train_s,
        "checkpoint": (saves * state + result) / SAVE_BYTES_S,
    }
    return {name: seconds for name, seconds in found.items() if seconds}


def _latents_s(profile: Profile, job: TrainJob, where: Where, software: Software) -> float:
    """Seconds in which the first device makes the latents of a run's own pictures, in float32."""
    if not job.pictures or LATENTS not in profile.chunks:
        return 0.0
    at_once = min(profile.chunks[LATENTS], job.pictures)
    each = where.roofline(replace(software, precision="float32")).stage(profile, LATENTS, at_once)
    return each.total * job.pictures / at_once


def _data_seconds(profile: Profile, job: TrainJob, where: Where, rows: int) -> float:
    """Seconds in which a process reads a step's rows of latents and text; 0 where pictures are encoded."""
    if not job.reads:
        return 0.0
    facts, known = profile.facts, where.known
    size = sum(
        facts[{"latents": "latent_bytes_a_row", "text": "text_bytes_a_row"}[name]] for name in job.reads
    )
    copied = known.values.get(("copy_bytes_s", where.card.name))  # measured: from host to device
    each = known.of("loader_row_s", "store") + size / known.of("loader_bytes_s", "store")
    return float(rows * (each + (size / copied if copied else 0.0)))


def _plan(
    profile: Profile,
    where: Where,
    software: Software,
    offer: Price | None,
    *,
    seconds: TimeBreakdown,
    **known: Any,
) -> Plan:
    """What every plan says alike: the device, parameters, MFU, money; `known` is what the job says."""
    roofline = where.roofline(software)
    # In float32 convolutions may run as tf32: then its rate is the one that nothing can pass.
    peak = max(roofline.peak(kind)[0] for kind in ("conv", "matmul")) * where.cluster.count
    device_hours = known["hours"] * where.cluster.count
    memory = where.held(known.pop("memory_bytes"), known.pop("process", TRAINING))
    return Plan(
        device=where.card.name,
        count=where.cluster.count,
        precision=software.precision,
        parameters={**profile.parameters, "total": profile.total_parameters, "trained": profile.trained},
        memory_bytes=memory,
        device_memory_bytes=where.total_bytes,
        usable_memory_bytes=where.usable_bytes,
        machine=where.cluster.describe(where.card) if where.cluster.count > 1 else "",
        step_s=_split(seconds),
        mfu=known["flops_an_image"] * known["images_per_s"] / peak,
        cost=cost(where.card, device_hours, cores=where.cores, offer=offer, number=where.cluster.count),
        **known,
    )


def _rows_a_device(job: TrainJob, cluster: ClusterSpec) -> int:
    if cluster.count > job.global_batch:
        raise InputError(
            f"{cluster.count} devices for a global batch of {job.global_batch}",
            allowed=f"at most {job.global_batch} devices",
            mend="raise train.global_batch",
        )
    if job.global_batch % cluster.count:  # as `darkroom train` refuses it
        raise InputError(
            f"{cluster.count} devices for a global batch of {job.global_batch}",
            allowed="a number that divides it, so that each has as many pictures",
        )
    return job.global_batch // cluster.count


def _micro_batch(profile: Profile, job: TrainJob, where: Where, rows: int) -> tuple[int, bool]:
    """Pictures in a micro-batch and whether they fit; the largest divisor that fits unless it is said."""
    if job.micro_batch is not None:
        micro = min(job.micro_batch, rows)
        return micro, micro <= largest_rows(profile, where, accumulate=micro < rows)
    if largest_rows(profile, where) >= rows:
        return rows, True
    most = largest_rows(profile, where, accumulate=True)
    fitting = [size for size in range(1, most + 1) if rows % size == 0]
    return (max(fitting), True) if fitting else (1, False)


def step_seconds(
    profile: Profile,
    where: Where,
    software: Software,
    *,
    micro: int,
    rows: int,
    sync_each: bool = False,
    gradient_bytes: int = 4,
    encoders: str = "float32",
) -> TimeBreakdown:
    """Seconds of an optimiser step on each device: micro-batches, update, communication.

    `sync_each`: gradients are summed over devices after every micro-batch, not once a step. `encoders`: the
    precision of the frozen ones.
    """
    roofline, frozen = where.roofline(software), where.roofline(replace(software, precision=encoders))
    number = rows / micro
    backward = roofline.stage(profile, "backward", micro)
    both = roofline.stage(profile, "forward", micro) + backward
    seconds = frozen.stage(profile, "inputs", rows)
    seconds += (both + TimeBreakdown(communication=_awaited_s(profile, where, both.total))).times(number)
    seconds += roofline.stage(profile, "update", 1, share=1 / where.cluster.shards)
    if where.cluster.count > 1:
        times = number if sync_each else 1
        whole = all_reduce_s(where.card, where.cluster, gradient_bytes * profile.trained, where.known)
        if where.cluster.gathers:  # once more than where weights stay whole after the forward pass
            held = profile.facts.get("computing_bytes", 2 * profile.trained)
            whole += 0.5 * all_reduce_s(where.card, where.cluster.sharing, held, where.known)
        shown = exposed_s(whole, backward.total, where.known)
        seconds += TimeBreakdown(communication=shown).times(times)
        if where.cluster.shards > 1:  # a student's teacher and target are gathered in each forward pass
            frozen_bytes = profile.facts.get("frozen_cut_bytes", 0)
            whole = 0.5 * all_reduce_s(where.card, where.cluster.sharing, frozen_bytes, where.known)
            shown = exposed_s(whole, both.total - backward.total, where.known) if frozen_bytes else 0.0
            seconds += TimeBreakdown(communication=shown).times(number)
    return seconds


def _awaited_s(profile: Profile, where: Where, passes_s: float) -> float:
    """Seconds in which a forward and a backward pass wait for blocks that rest in main memory: what their
    copies take beyond what is computed meanwhile, which is as much of the passes as is swapped of the U-Net.
    """
    copied = profile.facts.get("swapped_bytes")
    if not copied or not where.card.own_memory:
        return 0.0
    copies_s = copied / host_copy_bytes_s(where.card, where.known)[0]
    return float(max(0.0, copies_s - profile.facts["swapped_share"] * passes_s))


def _swap_notes(profile: Profile, where: Where) -> tuple[str, ...]:
    """What rests in main memory, and what is known of its way."""
    facts = profile.facts
    if not facts.get("swapped_bytes"):
        return ()
    if not where.card.own_memory:
        return ("train.blocks_to_swap saves nothing here: the device's memory is the machine's",)
    rate, measured = host_copy_bytes_s(where.card, where.known)
    source = "measured" if measured else "by its link's data sheet: nobody has measured it"
    resting, copied = facts["resting_bytes"] / 1e9, facts["swapped_bytes"] / 1e9
    return (
        f"{resting:.2f} GB of weights rest in pinned main memory; {copied:.2f} GB are copied in a forward "
        f"and a backward pass, at {rate / 1e9:.0f} GB/s ({source})",
    )


def _split(step: TimeBreakdown) -> dict[str, float]:
    return {
        "compute": step.compute,
        "memory_bound": step.memory_bound,
        "launch": step.launch,
        "communication": step.communication,
        "data": step.data,
        "total": step.total,
    }


def _sizes(profile: Profile, job: TrainJob) -> dict[str, float]:
    facts = profile.facts
    sizes = {"checkpoint": float(facts.get("checkpoint_bytes", 0))}
    if job.rows:
        sizes["latents"] = float(facts["latent_bytes_a_row"] * job.rows)
        sizes["text"] = float(facts["text_bytes_a_row"] * job.rows)
    if "adapter_bytes" in facts:
        sizes["adapter"] = float(facts["adapter_bytes"])
    return sizes


def _mends(profile: Profile, job: TrainJob, where: Where) -> list[str]:
    """What takes less memory there, each with a value that can be given."""
    blocks = profile.facts.get("blocks") if job.swaps and where.card.own_memory else None
    return [*job.mends, *([f"train.blocks_to_swap={blocks}"] if blocks else []), "a larger card"]


def _notes(mends: Sequence[str], fits: bool, largest: int, micro: int, rows: int) -> tuple[str, ...]:
    notes = []
    if not fits:
        notes.append(
            f"does not fit: at most {largest} pictures a micro-batch"
            if largest
            else f"does not fit, not even one picture: try {', '.join(mends)}"
        )
    elif micro < rows:
        notes.append(f"{rows} pictures a device in {-(-rows // micro)} micro-batches of {micro}")
    return tuple(notes)


# ---- pictures


@dataclass(frozen=True)
class GenerateJob:
    """So many pictures, so many at once."""

    name: str
    pictures: int
    batch: int
    steps: int


def plan_generating(
    profile: Profile,
    job: GenerateJob,
    where: Where,
    software: Software,
    *,
    usd_per_hour: float | None = None,
    prices: Sequence[Price] | None = None,
) -> Plan:
    """Making pictures on a kind of device; several devices share the pictures."""
    seconds = batch_seconds(profile, where, software, batch=job.batch, steps=job.steps)
    rate = job.batch / seconds.total * where.cluster.count
    largest = largest_rows(profile, where)
    fits = job.batch <= largest
    plan = _plan(
        profile,
        where,
        software,
        offer_for(where.card, usd_per_hour, prices, number=where.cluster.count),
        job=job.name,
        fits=fits,
        batch={"batch": job.batch},
        flops_an_image=profile.flops(1, "text", "decode") + job.steps * profile.flops(1, "denoise"),
        flops_a_step=job.batch * profile.flops(1, "denoise"),
        memory_bytes=where.memory(profile, job.batch),
        process=DRAWING,
        largest_micro_batch=largest,
        seconds=seconds,
        images_per_s=rate,
        hours=max(job.pictures / rate, seconds.total) / 3600,  # nothing is done before a whole batch
        sizes_bytes={},
        notes=() if fits else (f"does not fit: at most {largest} pictures at once",),
    )
    figures = {
        "latency_s": seconds.total,
        "usd_per_image": None if plan.cost.usd is None else plan.cost.usd / job.pictures,
        "steps_per_s": 1 / where.roofline(software).stage(profile, "denoise", job.batch).total,
    }
    return replace(plan, extra=figures)


def batch_seconds(
    profile: Profile, where: Where, software: Software, *, batch: int, steps: int
) -> TimeBreakdown:
    """Seconds of one call: text, every denoising step, decoding."""
    roofline = where.roofline(software)
    seconds = roofline.stage(profile, "text", batch) + roofline.stage(profile, "denoise", batch).times(steps)
    return seconds + roofline.stage(profile, "decode", batch)


@dataclass(frozen=True)
class PrepareJob:
    """So many pictures, encoded once."""

    name: str
    pictures: int
    batch: int = 32


def plan_preparing(
    profile: Profile,
    job: PrepareJob,
    where: Where,
    software: Software,
    *,
    usd_per_hour: float | None = None,
    prices: Sequence[Price] | None = None,
) -> Plan:
    """Encoding a store, and what its columns take on disk."""
    largest = largest_rows(profile, where)
    batch = max(1, min(job.batch, largest))
    seconds = encode_seconds(profile, where, software, batch)
    rate = batch / seconds.total * where.cluster.count
    facts = profile.facts
    return _plan(
        profile,
        where,
        software,
        offer_for(where.card, usd_per_hour, prices, number=where.cluster.count),
        job=job.name,
        fits=largest > 0,
        batch={"batch": batch},
        flops_an_image=profile.flops(1),
        flops_a_step=batch * profile.flops(1),
        memory_bytes=where.memory(profile, batch),
        largest_micro_batch=largest,
        seconds=seconds,
        images_per_s=rate,
        hours=max(job.pictures / rate, seconds.total) / 3600,  # nothing is done before a whole batch
        sizes_bytes={
            "latents": float(facts["latent_bytes_a_row"] * job.pictures),
            "text": float(facts["text_bytes_a_row"] * job.pictures),
        },
    )


def encode_seconds(profile: Profile, where: Where, software: Software, batch: int) -> TimeBreakdown:
    """Seconds of encoding a batch of pictures (and captions, where they were counted)."""
    roofline = where.roofline(software)
    return roofline.stage(profile, "encode", batch) + roofline.stage(profile, "text", batch)


__all__ = [
    "KINDS",
    "GenerateJob",
    "Plan",
    "PrepareJob",
    "TrainJob",
    "Where",
    "batch_seconds",
    "encode_seconds",
    "largest_rows",
    "plan_generating",
    "plan_preparing",
    "plan_training",
    "step_seconds",
]
