"""Memory that is known before it is taken: what `generate` needs, how to stay under a limit, and what a job
will take, said before its model is opened.

The model's own modules run on fake tensors (`count`), so the numbers are those of the code. Three phases
never overlap: text encoders, U-Net steps, VAE. Each has its weights and activations; the peak is the largest
phase. On a CPU the limit is on the process's resident memory, on CUDA on what the allocator has handed out.

Shapes: B rows, C H W latents, L tokens, D text width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from darkroom.bill import format_number
from darkroom.counting import counting
from darkroom.errors import InputError
from darkroom.hardware import accelerator
from darkroom.hardware.accelerator import kind_of
from darkroom.hardware.cards import peak_flops
from darkroom.hardware.machine import GIB, cgroup_memory_limit
from darkroom.hardware.meters import file_mappings, resident_bytes, return_freed
from darkroom.models.adapters.bank import ROWS
from darkroom.models.checked import read_json
from darkroom.models.families import FAMILIES
from darkroom.models.model import NAMES, are_mapped, is_mapped, let_go
from darkroom.options import parse_bytes
from darkroom.sample.choice import Pass, second_pass, table_for, with_lcm
from darkroom.sample.inputs import checked_size
from darkroom.sample.optimisations.applied import Applied, VaeFront, look_alike
from darkroom.sample.optimisations.offload import READ, computed_in, staying_bytes
from darkroom.sample.optimisations.table import conflict, optimise, parse, place_of
from darkroom.sample.pictures import DECODE_PICTURES, DECODE_PIXELS

if TYPE_CHECKING:
    from darkroom.models.model import Model
    from darkroom.picture_settings import GenerateSettings


TILES = (512, 384, 256, 128, 64)
MARGIN, CPU_MARGIN = 1.12, 1.3
"""On activations: workspaces inside kernels and the allocator's rounding are not counted. Resident memory was
measured to grow by 1.22 of what is counted for a decode on a CPU."""
CPU_ALLOWANCE = 96 * 10**6
"""Libraries that are read in on the way, and what the interpreter makes besides."""
OFFLOADS = ("", "offload_model", "offload_group", "offload_sequential")
ON_CPU = ("", "offload_mmap")
IN_FLIGHT = {"offload_group": 2, "offload_sequential": 1, "offload_mmap": 3}
"""How many of the largest layers lie there at once; on a CPU the file's, the cast and the kernel's."""


@dataclass(frozen=True)
class Needs:
    """What the phases of one job need, in bytes: counted, without any margin."""

    weights: dict[str, int]
    """Of each part."""
    largest_layer: int
    text: int
    """Activations of encoding the prompts."""
    unet_fixed: int
    unet_row: int
    """Activations of a U-Net call: a fixed part and one a row (guidance makes two rows a picture)."""
    vae: dict[int | None, int]
    """Activations of decoding one picture, by the side of its tiles in pixels; None is without tiles."""
    picture: int
    """Bytes of a decoded picture in float32."""
    upcasts_vae: bool = False
    """Whether the VAE is turned to float32 for decoding."""
    staying: int = 0
    """Weights that stay on a card where each layer's wait in main memory."""
    unet_flops: int = 0
    """FLOPs of a U-Net call, one row."""

    def unet(self, rows: int) -> int:
        """Activations of a U-Net call of so many rows."""
        return self.unet_fixed + self.unet_row * rows


@dataclass(frozen=True)
class MemoryPlan:
    """How a job stays under a limit."""

    names: tuple[str, ...]
    """Optimisations to add."""
    pictures_a_call: int
    rows_a_call: int | None
    """U-Net rows in one call where even one picture's rows must be parted; None: all."""
    peak_bytes: int
    phases: dict[str, int] = field(default_factory=dict)
    """The peak of each phase."""
    price_s: float | None = None
    """Seconds that reading weights adds to each U-Net call, where they are read anew."""

    def says(self) -> str:
        """One line for a user."""
        how = ", ".join(self.names) or "everything at once"
        apart = "" if self.rows_a_call is None else ", guidance's two rows one after the other"
        most = max(self.phases, key=lambda name: self.phases[name])
        peak = f"{self.peak_bytes / 1e9:.2f} GB at most, in {most}"
        seconds = self.price_s
        read = (
            ""
            if seconds is None
            else f"; reading weights adds about {format_number(seconds, 2)} s a U-Net call"
        )
        return f"memory: {how}; {self.pictures_a_call} pictures a U-Net call{apart}; {peak}{read}"


SHARE_OF_FREE = 0.6
"""Of a card's free memory: kernels take some, and what else is on the card may grow."""


def count_needs(model: Model, size: tuple[int, int], *, prompts: int = 2) -> Needs:
    """Count what a model's phases need for pictures of `size` (width, height). Takes seconds; no memory."""
    width, height = size
    pixels = width * height
    sides = (height // model.vae_factor, width // model.vae_factor)
    (one, one_flops), (three, three_flops) = (_unet_call(model, rows, sides) for rows in (1, 3))
    tiles = [tile for tile in TILES if tile < max(size)]
    upcasts = bool(model.vae.config.get("force_upcast")) and _dtype(model.vae) == torch.float16  # type: ignore[union-attr]
    return Needs(
        weights={name: _weight_bytes(module) for name, module in model.modules.items()},
        largest_layer=max(_own_bytes(layer) for part in model.modules.values() for layer in part.modules()),
        text=max((_text_bytes(encoder, prompts) for encoder in model.text_encoders), default=0),
        unet_fixed=max(0, one - (three - one) // 2),
        unet_row=(three - one) // 2,
        vae={tile: _vae_bytes(model, sides, tile, upcasts) for tile in (None, *tiles)},
        picture=3 * 4 * pixels,
        upcasts_vae=upcasts,
        staying=sum(staying_bytes(module) for module in model.modules.values()),
        unet_flops=(three_flops - one_flops) // 2,
    )


def pictures_that_fit(needs: Needs, free_bytes: int, *, guided: bool, most: int) -> int:
    """How many pictures may share a U-Net call in free memory: `most`, its half and so on; at least one."""
    rows, usable = 2 if guided else 1, SHARE_OF_FREE * free_bytes
    return next(count for count in _halves(most) if count == 1 or MARGIN * needs.unet(count * rows) <= usable)


def _weight_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _own_bytes(layer: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters(recurse=False))


def _dtype(module: Any) -> torch.dtype:
    dtype: torch.dtype = next(module.parameters()).dtype
    return dtype


def _activations(modules: Sequence[Any], run: Callable[[Any], object]) -> int:
    """Peak bytes besides the weights while something runs on fake tensors."""
    return _counted(modules, run)[0]


def _counted(modules: Sequence[Any], run: Callable[[Any], object]) -> tuple[int, int]:
    """Peak bytes besides the weights, and FLOPs, of something that runs on fake tensors."""
    with counting(*modules) as counter, torch.no_grad():
        counter.reset()
        weights = counter.result().start_memory_bytes
        run(counter.fake)
        found = counter.result()
        return found.peak_memory_bytes - weights, found.flops


def _unet_call(model: Model, rows: int, sides: tuple[int, int]) -> tuple[int, int]:
    unet: Any = model.unet
    dtype, config = _dtype(unet), unet.config
    x = torch.empty(rows, int(config.in_channels), *sides, dtype=dtype, device="meta")
    text = torch.empty(rows, 77, int(config.cross_attention_dim), dtype=dtype, device="meta")
    added: dict[str, torch.Tensor] = {}
    if model.is_sdxl:
        pooled = int(config.projection_class_embeddings_input_dim) - 6 * int(config.addition_time_embed_dim)
        added["text_embeds"] = torch.empty(rows, pooled, dtype=dtype, device="meta")
        added["time_ids"] = torch.empty(rows, 6, device="meta")
    t = torch.empty(rows, device="meta")

    def run(fake: Callable[[Any], Any]) -> object:
        given = {name: fake(value) for name, value in added.items()} or None
        return unet(fake(x), fake(t), encoder_hidden_states=fake(text), added_cond_kwargs=given)

    return _counted([unet], run)


def _text_bytes(encoder: Any, prompts: int) -> int:
    length = int(encoder.config.max_position_embeddings)
    ids = torch.empty(prompts, length, dtype=torch.int64, device="meta")
    return _activations([encoder], lambda fake: encoder(fake(ids), output_hidden_states=True))


def _vae_bytes(model: Model, sides: tuple[int, int], tile: int | None, upcasts: bool) -> int:
    """Decoding one picture. A tile's activations are counted on one tile, the rest by its size."""
    vae: Any = model.vae
    factor = model.vae_factor
    inside = sides if tile is None else tuple(min(side, tile // factor) for side in sides)
    dtype = _dtype(vae)
    z = torch.empty(1, model.latent_channels, *inside, dtype=dtype, device="meta")
    taken = _activations([vae], lambda fake: VaeFront(vae, torch.device("cpu")).decode(fake(z)).sample)
    # Twice a picture in float32: the blended sum, and its levels on the way to 8 bits.
    return taken * (2 if upcasts else 1) + 2 * 3 * 4 * sides[0] * sides[1] * factor**2


def plan_memory(
    needs: Needs,
    limit_bytes: int,
    *,
    device: str,
    pictures: int = 1,
    most_a_call: int = 8,
    guided: bool = True,
    base_bytes: int = 0,
    streamed_base_bytes: int | None = None,
    pixels: int = 512 * 512,
    fixed: Sequence[str] = (),
) -> MemoryPlan:
    """The fastest way to stay under a limit; InputError with the smallest possible one where there is none.

    `base_bytes` is what a CPU process holds with all its weights, `streamed_base_bytes` without those that
    lie in files (None: they do not); on CUDA the weights count as they lie on the card. Offloading is not
    chosen with what excludes it: `fixed` names what is in place already.
    """
    smallest: list[int] = []
    for offload in _offloads(device, fixed, streamed_base_bytes is not None):
        held_bytes = base_bytes if offload != "offload_mmap" else streamed_base_bytes or 0
        bases = _bases(needs, offload, device, held_bytes)
        margin = MARGIN if kind_of(device).own_memory else CPU_MARGIN
        plan = _within(needs, limit_bytes, offload, min(pictures, most_a_call), guided, bases, pixels, margin)
        if plan.peak_bytes <= limit_bytes:
            return plan
        smallest.append(plan.peak_bytes)
    raise InputError(
        f"memory {limit_bytes / 1e9:.2f} GB for this model and size",
        allowed=f"{min(smallest) / 1e9 + 0.005:.2f} GB or more",
        mend=_less(device, streamed_base_bytes is not None),
    )


def _less(device: str, in_files: bool) -> str:
    if kind_of(device).own_memory or in_files:
        return "a smaller size takes less"
    return "a smaller size takes less, and so does a model in files: darkroom export MODEL --to FOLDER"


def _offloads(device: str, fixed: Sequence[str], in_files: bool) -> list[str]:
    """Ways of offloading to try, from the fastest; the one that was asked for alone."""
    ways = OFFLOADS if kind_of(device).own_memory else ON_CPU if in_files else ("",)
    asked = [name for name in fixed if name and name in ways]
    return asked or [way for way in ways if not way or not any(conflict(way, name) for name in fixed)]


def _bases(needs: Needs, offload: str, device: str, base_bytes: int) -> dict[str, int]:
    """What lies there in each phase before anything is computed."""
    text = sum(bytes_ for name, bytes_ in needs.weights.items() if name.startswith("text"))
    parts = {
        "text encoding": text,
        "denoising": needs.weights.get("unet", 0),
        "decoding": needs.weights.get("vae", 0),
    }
    more = {"decoding": parts["decoding"] if needs.upcasts_vae else 0}
    if not kind_of(device).own_memory:
        layers = IN_FLIGHT.get(offload, 0) * needs.largest_layer
        held = dict.fromkeys(parts, base_bytes + CPU_ALLOWANCE + layers)
    elif not offload:
        held = dict.fromkeys(parts, sum(parts.values()))
    elif offload == "offload_model":
        held = parts
    else:
        held = dict.fromkeys(parts, IN_FLIGHT[offload] * needs.largest_layer + needs.staying)
    return {name: held[name] + more.get(name, 0) for name in parts}


def _within(
    needs: Needs,
    limit: int,
    offload: str,
    pictures: int,
    guided: bool,
    bases: dict[str, int],
    pixels: int,
    margin: float,
) -> MemoryPlan:
    """The fastest choices that fit one way of offloading, or the smallest where none do."""
    a_picture = 2 if guided else 1
    calls = [(count, None) for count in _halves(pictures)] + ([(1, 1)] if guided else [])
    for count, apart in calls:
        denoising = bases["denoising"] + int(margin * needs.unet(apart or count * a_picture))
        if denoising <= limit:
            break
    at_once = max(1, min(count, DECODE_PICTURES, DECODE_PIXELS // pixels))
    ways = [(names, bases["decoding"] + int(margin * taken)) for names, taken in _decode_ways(needs, at_once)]
    names, decoding = next((way for way in ways if way[1] <= limit), min(ways, key=lambda way: way[1]))
    phases = {
        "text encoding": bases["text encoding"] + int(margin * needs.text),
        "denoising": denoising,
        "decoding": decoding,
    }
    chosen = (offload, *names) if offload else names
    return MemoryPlan(chosen, count, apart, max(phases.values()), phases)


def _halves(count: int) -> Iterator[int]:
    while count > 1:
        yield count
        count //= 2
    yield 1


def _decode_ways(needs: Needs, at_once: int) -> Iterator[tuple[tuple[str, ...], int]]:
    """Ways to decode, from the fastest to the smallest, with their bytes."""
    if at_once > 1:
        yield (), needs.vae[None] * at_once
    yield ("vae_slicing",) if at_once > 1 else (), needs.vae[None]
    for tile in needs.vae:
        if tile is not None:
            yield ("vae_slicing", f"vae_tiling:{tile}"), needs.vae[tile]


def optimise_within(
    model: Model,
    names: Sequence[str] | str,
    limit: str | int,
    *,
    device: torch.device | str | None = None,
    size: tuple[int, int],
    pictures: int = 1,
    guided: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Applied, MemoryPlan]:
    """Optimisations by name, and those that keep pictures of `size` under a limit ('3GB' or bytes).

    `pictures` is how many may share a U-Net call; `dtype` is what is computed in, where that is not the
    weights' own type: they may be opened as their files have them (`models.load` with dtype None). InputError
    where no way of working fits.
    """
    limit_bytes = parse_bytes(limit)
    place = place_of(model, device)
    on_cpu = place.device.type == "cpu"
    if on_cpu:
        return_freed(65536)
    choices = parse(names)
    waits = on_cpu and any(choice.name == "offload_mmap" for choice in choices)
    named = [str(choice) for choice in choices if not (waits and choice.name == "offload_mmap")]
    applied = optimise(model, named, device)  # whole, to be counted
    dtype = dtype or computed_in(applied) if on_cpu else None
    needs = count_needs(applied.model if dtype is None else _outlined(applied.model, dtype), size)
    base_bytes, streamed_base_bytes = held_bytes(applied.model, dtype) if dtype is not None else (0, None)
    plan = plan_memory(
        needs,
        limit_bytes,
        device=place.device.type,
        pictures=pictures,
        most_a_call=pictures,
        guided=guided,
        base_bytes=base_bytes,
        streamed_base_bytes=None if hasattr(applied.model.unet, ROWS) else streamed_base_bytes,
        pixels=size[0] * size[1],
        fixed=(*(choice.name for choice in applied.choices), *(["offload_mmap"] if waits else [])),
    )
    if plan.names or dtype is not None:
        taken = {name.partition(":")[0]: name for name in (*plan.names, *(["offload_mmap"] if waits else []))}
        kept = [choice for choice in applied.choices if choice.name not in taken]
        more = [text for name, text in taken.items() if not any(conflict(name, c.name) for c in kept)]
        applied = optimise(model, [*map(str, kept), *more], device, dtype)
    applied.rows_a_call = plan.rows_a_call
    applied.max_decode_pixels = applied.max_decode_pixels or DECODE_PIXELS  # as the plan has it
    return applied, replace(plan, price_s=applied.times_s.get(READ))


def held_bytes(model: Model, dtype: torch.dtype) -> tuple[int, int | None]:
    """What the process will hold with all weights in a type, and where they wait in files (else None)."""
    modules = model.modules.values()
    if not model.in_files:
        casts = sum(p.numel() for module in modules for p in module.parameters() if p.dtype != dtype)
        return resident_now(model) + casts * dtype.itemsize, None
    let_go(modules)
    resident = resident_bytes()
    files = file_mappings()
    weights = [p for module in modules for p in module.parameters()]
    to_come = sum(p.numel() * dtype.itemsize for p in weights if p.dtype != dtype or is_mapped(p, files))
    return resident + to_come, resident if are_mapped(modules) else None


def resident_now(model: Model) -> int:
    """The process's resident memory with every weight touched: some lie in files until they are read."""
    for module in model.modules.values():
        for tensor in module.parameters():
            if tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                torch.empty(0, dtype=torch.uint8).set_(storage)[::4096].sum()
    return resident_bytes()


def _outlined(model: Model, dtype: torch.dtype) -> Model:
    """The same modules without values, in a type, to be counted."""
    outlined = {name: nn.Module.to(look_alike(m), "meta", dtype) for name, m in model.modules.items()}
    texts = [module for name, module in outlined.items() if name.startswith("text")]
    return replace(model, unet=outlined.get("unet"), vae=outlined.get("vae"), text_encoders=texts)


# ---- a job before its model is opened: what cannot be is refused within seconds
#
# Counted on the model's outline (`models.outlined`), which has shapes and no weights.

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
    ways = [bytes_ for names, bytes_ in _decode_ways(needs, 1) if bool(names) == tiled] or [needs.vae[None]]
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
