"""What a job will take, said before its model is opened: what cannot be is refused within seconds.

Counted on the model's outline (`models.outlined`), which has shapes and no weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from darkroom.bill import format_number
from darkroom.errors import InputError
from darkroom.hardware import accelerator
from darkroom.hardware.cards import peak_flops
from darkroom.hardware.machine import GIB, cgroup_memory_limit
from darkroom.hardware.meters import resident_bytes
from darkroom.models.checked import read_json
from darkroom.models.families import FAMILIES
from darkroom.models.model import NAMES
from darkroom.sample.choice import Pass, second_pass, table_for, with_lcm
from darkroom.sample.inputs import checked_size
from darkroom.sample.memory import CPU_MARGIN, MARGIN, Needs, count_needs, decode_ways, plan_memory

if TYPE_CHECKING:
    from darkroom.models.model import Model
    from darkroom.picture_settings import GenerateSettings

MUCH = 4
"""A job of more pixels than this many of the model's own pictures is counted before it starts."""
LONG_S = 600.0
"""A job of which at least so much is foreseen is announced."""


@dataclass(frozen=True)
class Estimate:
    """A lower bound of a job: nothing computes faster than this device's matrix products."""

    peak_bytes: int
    phase: str
    flops: int

    def seconds(self, flops_per_s: float) -> float:
        """At least this long."""
        return self.flops / flops_per_s


def check_at_once(
    ref: str,
    size: tuple[int, int] | None,
    *,
    tiled: bool,
    device: torch.device,
    dtype: torch.dtype,
    limit_bytes: int | None = None,
) -> None:
    """InputError for what cannot fit by the model's settings alone: nothing is imported, built or counted.

    Lower bounds: random weights, which wait in no file; and two of the widest activations of a VAE's decoder,
    what a convolution reads and what it writes.
    """
    family = FAMILIES.get(ref)
    if limit_bytes is not None and family is not None and device.type == "cpu":
        least = family.num_parameters * dtype.itemsize
        if least > limit_bytes:
            raise InputError(
                f"memory {limit_bytes / 1e9:.2f} GB: the random weights of '{ref}' take {least / 1e9:.2f} GB",
                allowed=f"more than {least / 1e9:.2f} GB, or weights in files, which are read as needed",
                mend=f"darkroom export {ref} --to {ref}-model, then give that folder",
            )
    config = family.vae if family is not None else _vae_config(Path(ref))
    if size is None or tiled or limit_bytes is not None or config is None:
        return
    least = 2 * min(config["block_out_channels"]) * math.prod(size) * dtype.itemsize
    _refuse_too_much(Estimate(least, "decoding", 0), size, device, "at least")


def _vae_config(folder: Path) -> Mapping[str, Any] | None:
    """A folder's, where it tells how wide the VAE is; what is wrong in it is refused when it is opened."""
    file = folder / "vae" / "config.json"
    config: Mapping[str, Any] = read_json(file) if file.is_file() else {}
    widths = config.get("block_out_channels")
    return config if isinstance(widths, list) and widths and all(type(n) is int for n in widths) else None


def check_before(
    model: Model,
    settings: GenerateSettings,
    prompts: int,
    *,
    optimise: Sequence[str] | str,
    device: torch.device,
    dtype: torch.dtype,
    limit_bytes: int | None = None,
    in_files: bool = True,
    notice: Callable[[str], None],
) -> None:
    """InputError for settings that this model's outline cannot make, or not in the memory that there is.

    `limit_bytes` is the job's memory limit; `in_files` whether its weights will lie in files. A
    job much larger than the model's own pictures is counted, and announced where it takes long.
    """
    settings = with_lcm(settings, optimise)
    table = table_for(model, settings)
    size = checked_size(model, settings.size)
    resolved = settings.resolved(table.solver, model.guidance)
    assert resolved.guidance is not None
    guided = resolved.guidance > 1
    passes = [Pass(model, table, size), second_pass(model, resolved, size)]
    largest = max((one for one in passes if one is not None), key=lambda one: math.prod(one.size))
    if limit_bytes is not None:
        _check_limit(model, largest.size, limit_bytes, guided, device, dtype, in_files)
        return
    if math.prod(largest.size) <= MUCH * model.sample_size**2:
        return
    needs = count_needs(_in_type(model, dtype), largest.size)
    tiled = "vae_tiling" in (optimise if isinstance(optimise, str) else ",".join(optimise))
    found = estimated(needs, largest, prompts * settings.num, guided, tiled, device)
    _refuse_too_much(found, largest.size, device)
    seconds = found.seconds(_flops_a_second(device, dtype))
    if seconds > LONG_S:
        notice(
            f"{largest.size[0]}x{largest.size[1]} takes at least {_hours(seconds)} and "
            f"{format_number(found.peak_bytes / 1e9)} GB here"
        )


def estimated(
    needs: Needs, taken: Pass, pictures: int, guided: bool, tiled: bool, device: torch.device
) -> Estimate:
    """Memory and FLOPs of the larger pass of a job."""
    margin = MARGIN if accelerator.kind_of(device).own_memory else CPU_MARGIN
    weights = sum(needs.weights.values())
    rows = min(pictures, taken.rows_a_call) * (2 if guided else 1)
    ways = [bytes_ for names, bytes_ in decode_ways(needs, 1) if bool(names) == tiled] or [needs.vae[None]]
    phases = {"denoising": needs.unet(rows), "decoding": max(ways)}
    phase = max(phases, key=lambda name: phases[name])
    calls = len(taken.table) * pictures * (2 if guided else 1)
    return Estimate(weights + int(margin * phases[phase]), phase, needs.unet_flops * calls)


def _flops_a_second(device: torch.device, dtype: torch.dtype) -> float:
    """What this device can do at best: a card's rate by its data sheet, a CPU's by a measured product."""
    if accelerator.kind_of(device).own_memory:
        known = peak_flops(accelerator.name_of(device), NAMES[dtype])
        if known is not None:
            return known
    side, best = 1024, math.inf
    a = torch.ones(side, side, dtype=dtype, device=device)
    for _ in range(4):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # read back: a card's work is waited for
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


def _check_limit(
    model: Model,
    size: tuple[int, int],
    limit_bytes: int,
    guided: bool,
    device: torch.device,
    dtype: torch.dtype,
    in_files: bool,
) -> None:
    needs = count_needs(_in_type(model, dtype), size)
    held = resident_bytes() if device.type == "cpu" else 0
    plan_memory(
        needs,
        limit_bytes,
        device=device.type,
        guided=guided,
        base_bytes=held + sum(needs.weights.values()),
        streamed_base_bytes=held if in_files else None,
        pixels=math.prod(size),
    )


def _in_type(model: Model, dtype: torch.dtype) -> Model:
    for module in model.modules.values():
        torch.nn.Module.to(module, dtype)  # diffusers' own warns of nothing
    return model


def _refuse_too_much(
    found: Estimate, size: tuple[int, int], device: torch.device, how: str = "about"
) -> None:
    has = memory_of(device)
    if has is None or found.peak_bytes <= has:
        return
    tiles = " or --optimise auto,vae_tiling" if found.phase == "decoding" else ""
    raise InputError(
        f"size {size[0]}x{size[1]} needs {how} {format_number(found.peak_bytes / 1e9)} GB in {found.phase}",
        allowed=f"what fits into the {has / GIB:.3g} GiB of this {device.type}",
        mend=f"a smaller size{tiles}",
    )


def memory_of(device: torch.device) -> int | None:
    """All the memory that a job can have on a device; None where that is not known."""
    if device.type != "cpu":
        return accelerator.total_bytes(device)
    import psutil

    total = int(psutil.virtual_memory().total)
    return min(total, cgroup_memory_limit() or total)


def _hours(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
