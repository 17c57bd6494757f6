"""This machine, measured within a minute: what share of its rated peaks it reaches, by class of operation.

What is found replaces fitted constants (efficiency.csv) in plans of this machine from then on. It is kept in
the user's cache, by card.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from darkroom.hardware import accelerator, machine
from darkroom.hardware.cards import find_card
from darkroom.hardware.system import write_atomically
from darkroom.models.families import FAMILIES
from darkroom.options import parse_size
from darkroom.plan.jobs import GenerateJob, Where, plan_generating
from darkroom.plan.roofline import Software
from darkroom.plan.targets import Measured, calibration_file, picture_profile

if TYPE_CHECKING:
    import torch

    from darkroom.hardware.cards import Card
    from darkroom.plan.roofline import Efficiency


BUDGET_S = 2.0  # for each of the measurements
FEWEST = 5

Call = Callable[[], Any]
Say = Callable[[str], None]


def calibrate(say: Say = lambda _: None, rows: Sequence[MeasurementLike] = ()) -> list[Measured]:
    """Measure matrix products, convolution, attention, bandwidth, launches and links, and keep what is found.

    `rows`: of `bench batch`, whose pictures on this machine say how fast its device is as a whole.
    """
    import torch

    from darkroom.plan.roofline import efficiency
    from darkroom.plan.targets import Target, here

    where = here(Target())
    device = accelerator.current() or torch.device("cpu")
    found = [*_arithmetic(where, device, say), *_moving(where, device, say), *_links(where.card, device, say)]
    if device.type != "cpu":
        found.append(_launching(where.card, device, efficiency()))
    if rows:
        known = efficiency().with_values(_constants(found))
        found.append(_speed(replace(where, known=known), rows, say))
    _keep(where.card, found)
    return found


def _arithmetic(where: Where, device: torch.device, say: Say) -> Iterator[Measured]:
    """Classes of operation, in the precision a plan takes on this device; on a CPU in float32 too."""
    from darkroom.plan.targets import fast_precision

    card, fast = where.card, fast_precision(where.card)
    if device.type == "cpu":
        for precision in dict.fromkeys((fast, "float32")):
            for name, (call, work) in _products(device, precision).items():
                if name == "attention" and precision != "float32":
                    continue  # a CPU attends in float32, whatever the rest computes in
                one = _share(where, name, precision, call, work, device, say)
                yield _with(one, name, f"{card.name} {precision}", one.share or 0.0)
        return
    found = {
        name: _share(where, name, fast, call, work, device, say)
        for name, (call, work) in _products(device, fast).items()
    }
    yield from _relative(card, fast, found)
    (plain, work), name = _products(device, "float32")["matmul"], "plain_cores"
    one = _share(where, "matmul", "float32", plain, work, device, say)
    yield _with(one, name, card.name, one.share or 0.0)


def _relative(card: Card, precision: str, found: dict[str, Measured]) -> Iterator[Measured]:
    """A GPU's shares as plans want them: convolutions' of what the units could start, others' of those."""
    from darkroom.plan.roofline import units_rate

    conv = found["conv"]
    share = conv.share or 0.0
    yield _with(conv, "conv", card.name, conv.rate / units_rate(card, precision))
    yield _with(found["matmul"], "matmul", card.name, (found["matmul"].share or 0.0) / share)
    attention = found["attention"]
    yield _with(attention, "attention", f"{card.name} fused", (attention.share or 0.0) / share)


def _with(one: Measured, name: str, applies_to: str, value: float) -> Measured:
    return replace(one, constant=(name, applies_to, value))


def _share(
    where: Where, name: str, precision: str, call: Call, work: float, device: torch.device, say: Say
) -> Measured:
    from darkroom.plan.roofline import Roofline, Software

    rate = work / _seconds(call, device)
    say(f"{name}, {precision}: {rate:.3g} FLOP/s")
    peak = Roofline(where.card, Software(precision=precision), cores=where.cores).peak(name)[0]
    return Measured(name, rate, f"FLOP/s, {precision}", rate / peak)


def _products(device: torch.device, precision: str) -> dict[str, tuple[Call, float]]:
    """Calls of the size that SD 1.5 makes at 512 px, with their FLOPs."""
    import torch
    import torch.nn.functional as F

    from darkroom.models.model import precision as dtype_of

    dtype, batch = dtype_of(precision), 16 if device.type != "cpu" else 1
    a = torch.randn(4096 * batch, 320, device=device, dtype=dtype)
    b = torch.randn(2560, 320, device=device, dtype=dtype)
    x = torch.randn(batch, 640, 32, 32, device=device, dtype=dtype)
    w = torch.randn(640, 640, 3, 3, device=device, dtype=dtype)
    if device.type != "cpu":
        x, w = x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last)
    q = torch.randn(batch, 8, 1024, 80, device=device, dtype=dtype)
    return {
        "matmul": (lambda: F.linear(a, b), 2.0 * a.shape[0] * 320 * 2560),
        "conv": (lambda: F.conv2d(x, w, padding=1), 2.0 * batch * 640 * 640 * 9 * 32 * 32),
        "attention": (lambda: F.scaled_dot_product_attention(q, q, q), 4.0 * batch * 8 * 1024 * 1024 * 80),
    }


def _moving(where: Where, device: torch.device, say: Say) -> Iterator[Measured]:
    """Memory's bandwidth; on a CPU an operation's own overhead, on a GPU copies from the host."""
    import torch

    card = where.card
    big = torch.randn(2**26 if device.type != "cpu" else 2**24, device=device)
    rate = 8.0 * big.numel() / _seconds(lambda: big * 2.0, device)
    say(f"bandwidth: {rate:.3g} bytes/s")
    share = rate / (card.bandwidth_bytes_s * where.units)
    yield Measured("bandwidth", rate, "bytes/s", share, ("bandwidth", card.name, share))
    if accelerator.kind_of(device).streams:
        pinned = torch.empty(2**28, dtype=torch.uint8).pin_memory()
        rate = pinned.numel() / _seconds(lambda: pinned.to(device, non_blocking=True), device)
        say(f"host to device: {rate:.3g} bytes/s")
        yield Measured("host to device", rate, "bytes/s", None, ("copy_bytes_s", card.name, rate))
    else:
        small = torch.randn(16)
        each = _seconds(lambda: [small + 1 for _ in range(100)], device) / 100
        yield Measured("kernel", each, "s a kernel", None, ("kernel_s", card.name, each))


def _links(card: Card, device: torch.device, say: Say) -> Iterator[Measured]:
    """What processes of this machine send each other while they sum gradients."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    try:
        found = link_bytes_s(device.type, BUDGET_S)
    except (OSError, RuntimeError, ProcessExitedException, ProcessRaisedException) as error:
        # what keeps processes of this machine apart
        say(f"link: not measured ({str(error).strip().splitlines()[-1]})")
        return
    if found is not None:
        number, rate = found
        say(f"link between {number} processes: {rate:.3g} bytes/s")
        yield Measured(f"link, {number} processes", rate, "bytes/s", None, ("link_bytes_s", card.name, rate))


def _launching(card: Card, device: torch.device, known: Efficiency) -> Measured:
    """How long the host takes to hand out a small U-Net's kernels, against the fitted host."""
    taken, kernels = host_seconds(device)
    expected = sum(kernels[stage] * known.of("host_s", stage) for stage in kernels)
    factor = taken / expected
    number = sum(kernels.values())
    return Measured("launch", taken / number, "s a kernel", None, ("host_factor", card.name, factor))


def host_seconds(device: torch.device) -> tuple[float, dict[str, int]]:
    """Seconds in which Python and autograd launch a forward and a backward pass, and the kernels of each."""
    import torch

    from darkroom import models
    from darkroom.counting import counting

    unet: Any = models.create("tiny", parts=("unet",)).unet
    width, side = unet.config.cross_attention_dim, 8
    x, text = torch.zeros(1, unet.config.in_channels, side, side), torch.zeros(1, 77, width)

    def forward(x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = unet(x, 1, encoder_hidden_states=text, return_dict=False)[0]
        return out.square().mean()

    with counting(unet) as counter:
        trace = counter.start_trace()
        counter.stage = "forward"
        loss = forward(*counter.fake((x, text)))
        counter.stage = "backward"
        torch.autograd.backward(loss)
    stages = [kernel.stage for kernel in trace.kernels]
    unet.to(device)
    x, text = x.to(device), text.to(device)

    def both() -> None:
        unet.zero_grad()
        torch.autograd.backward(forward(x, text))

    return _seconds(both, device, wait=False), {name: stages.count(name) for name in ("forward", "backward")}


def _speed(where: Where, rows: Sequence[MeasurementLike], say: Say) -> Measured:
    """A device's speed as a whole: the median of what `bench batch` measured by what is planned."""
    from darkroom.errors import InputError

    found = factors(where, rows)
    if not found:
        raise InputError(
            f"--rows: none of {len(rows)} rows was measured by this machine's {where.card.name}",
            allowed="rows of bench batch with the backend torch, without autocast, of a family",
            mend="darkroom bench batch MODEL --out FILE",
        )
    say(f"{len(found)} rows: {min(found):.2f} to {max(found):.2f} of the planned speed")
    factor = median(found)
    return Measured(
        f"pictures, {len(found)} rows",
        factor,
        "of the planned speed",
        None,
        ("speed", where.card.name, factor),
    )


def _seconds(call: Call, device: torch.device, *, wait: bool = True) -> float:
    """The median of several calls, after two that are left out; `wait`: until the device is done."""

    def once() -> float:
        """Seconds that one call takes, on a device with its queue waited for."""
        accelerator.synchronize(device)
        start = time.perf_counter()
        call()
        if wait:
            accelerator.synchronize(device)
        return time.perf_counter() - start

    once()
    once()
    taken: list[float] = []
    start = time.perf_counter()
    while len(taken) < FEWEST or (time.perf_counter() - start < BUDGET_S and len(taken) < 200):
        taken.append(once())
    return median(taken)


def _constants(found: Sequence[Measured]) -> dict[tuple[str, str], float]:
    kept = [one.constant for one in found if one.constant is not None]
    return {(name, applies_to): value for name, applies_to, value in kept}


def _keep(card: Card, found: Sequence[Measured]) -> None:
    file = calibration_file()
    content: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        content = dict(json.loads(file.read_text(encoding="utf-8")))
    content[card.name] = [[*name, value] for name, value in _constants(found).items()]
    write_atomically(file, json.dumps(content, indent=2))


class MeasurementLike(Protocol):
    """What is read of a measurement (`darkroom.measure.Measurement`)."""

    @property
    def benchmark(self) -> str: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def median_s(self) -> float | None: ...
    @property
    def images_per_s(self) -> float | None: ...
    @property
    def machine(self) -> str: ...
    @property
    def device(self) -> str: ...


def factors(where: Where, rows: Iterable[MeasurementLike]) -> list[float]:
    """Measured by planned images/s of every row that this machine's device measured."""
    own = [row for row in _own(where, rows) if row.images_per_s]
    return [(row.images_per_s or 0.0) / _planned_rate(where, row) for row in own]


def _own(where: Where, rows: Iterable[MeasurementLike]) -> Iterator[MeasurementLike]:
    name = machine().name
    for row in rows:
        settings = row.settings
        plain = settings.get("backend", "torch") == "torch" and not settings.get("autocast")
        own = row.machine == name and find_card(row.device) == where.card
        if row.benchmark == "batch" and own and plain and settings.get("model") in FAMILIES:
            yield row


def _planned_rate(where: Where, row: MeasurementLike) -> float:
    """Images a second that the plan gives for a row's settings."""
    settings = row.settings
    width, height = parse_size(settings["size"])
    precision = settings["precision"]
    profile = picture_profile(settings["model"], width, height, settings["guidance"] > 1, precision, "fused")
    batch = max(1, round((row.images_per_s or 0.0) * (row.median_s or 0.0)))
    job = GenerateJob("bench", batch, batch, settings["steps"])
    # As `auto` picks it; float32 is not rounded.
    software = Software(precision, channels_last=False, conv_tf32=False)
    return plan_generating(profile, job, where, software).images_per_s


SIZE_BYTES = {"cpu": 2**26, "cuda": 2**28}


def link_bytes_s(kind: str, budget_s: float) -> tuple[int, float] | None:
    """How many processes there were, and the bytes a second over each one's wire in their ring all-reduce:
    gloo between two on a CPU, NCCL between all GPUs. None where there is only one GPU.
    """
    import torch

    number = 2 if kind == "cpu" else accelerator.count()
    if number < 2:
        return None
    with tempfile.TemporaryDirectory(prefix="darkroom-links-", ignore_cleanup_errors=True) as folder:
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(_rank, (number, folder, kind, budget_s), nprocs=number)
        seconds = float((Path(folder) / "seconds").read_text(encoding="utf-8"))
    return number, 2 * (number - 1) / number * SIZE_BYTES[kind] / seconds


def _rank(rank: int, number: int, folder: str, kind: str, budget_s: float) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        accelerator.collectives(kind),
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=number,
    )
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    held = torch.zeros(SIZE_BYTES[kind] // 4, device=device)
    taken = []
    for _ in range(2 + max(3, min(50, int(10 * budget_s)))):  # as many in all processes
        accelerator.synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(held)
        accelerator.synchronize(device)
        taken.append(time.perf_counter() - start)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(median(taken[2:])), encoding="utf-8")
    dist.destroy_process_group()
