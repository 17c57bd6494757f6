"""From settings to an engine: load the model, open its backend, find the capacity, take a first step."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from PIL import Image

from darkroom import count_cache, models, options, sample
from darkroom.errors import InputError
from darkroom.hardware import accelerator
from darkroom.hardware.machine import usable_cores
from darkroom.sample.backends import open_backend
from darkroom.sample.backends.backend import Backend
from darkroom.sample.inputs import repaints
from darkroom.serve.engine.batch import places_for
from darkroom.serve.engine.fixed_shapes import FixedRows, steady
from darkroom.serve.engine.loop import Engine
from darkroom.serve.metrics import Metrics
from darkroom.serve.settings import ServeSettings

if TYPE_CHECKING:
    from darkroom.models.embeddings import Embedding
    from darkroom.models.model import Model
    from darkroom.serve.engine.adapters import Library
    from darkroom.serve.engine.nets import Nets


LOG = logging.getLogger("darkroom.serve")
# More rows than these make steps longer and gain little; a user may still ask for more.
MOST_ROWS = {"cpu": 16, "cuda": 32}
# On a CPU, where a row's activations are so small, a call costs more than its rows: twice as many pay.
SMALL_ROW_BYTES = 2**20
# What the rows' activations may take of the memory that is free once the model is there.
SHARE = 0.6
# On a CPU a large model's rows gain nothing from each other, and a cancelled one is removed, or a new one
# joins, only between two steps: so long a full one may take.
STEP_S = 15.0
# What nets may take of it, by default.
CONTROL_SHARE = 0.25
# Optimisations that keep nothing from one call to the next that calls of other threads could mix up.
PLAIN = {"none", "auto", "lean", "fused_attention"}
# With bits that do not depend on who shares a call: the most rows of one, and the latent pixels that fill one
# on a CPU. A small model's call costs more than its rows. A large one's row of 32 x 32 latent pixels takes
# far longer than reading the weights: it has a call of its own, and nothing is filled up.
FIXED_ROWS, FIXED_PIXELS, FIXED_SMALL_PIXELS = 8, 32 * 32, 64 * 64
PAD_TO = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model ready to be served."""

    model: Model
    engine: Engine
    library: Library | None
    nets: Nets | None = None
    embeddings: Embeddings = field(default_factory=lambda: Embeddings())


@dataclass(frozen=True, repr=False)
class Embeddings:
    """The textual inversions of the server's folder: those that prompts may name, and others'."""

    loaded: tuple[Embedding, ...] = ()
    skipped: tuple[Embedding, ...] = ()


@dataclass(frozen=True)
class EngineCallbacks:
    """What the engine's threads call: after a step, when adapters have arrived, when the device is lost."""

    on_tick: Callable[[], None]
    wake: Callable[[], None]
    on_stop: Callable[[], None]


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a device; None where it does not say."""
    if accelerator.kind_of(device).own_memory:
        return accelerator.free_bytes(device)
    from darkroom.hardware.machine import cgroup_memory_limit
    from darkroom.hardware.meters import resident_bytes

    free = int(psutil.virtual_memory().available)
    limit = cgroup_memory_limit()
    return free if limit is None else min(free, max(0, limit - resident_bytes()))


FreeBytes = Callable[[torch.device], int | None]


def open_model(
    settings: ServeSettings, metrics: Metrics, hooks: EngineCallbacks, free: FreeBytes = free_bytes
) -> LoadedModel:
    """Everything that takes long before the first job. InputError for what cannot be.

    `free` is the memory that rows, nets and adapters may share, once the model is there.
    """
    device = models.device(settings.device)
    with accelerator.alone(device):  # while another model takes no step
        return _opened(settings, device, metrics, hooks, free)


def _opened(
    settings: ServeSettings,
    device: torch.device,
    metrics: Metrics,
    hooks: EngineCallbacks,
    free: FreeBytes,
) -> LoadedModel:
    precision, why = models.choose_precision(settings.precision, device)
    options.check_pair(settings.backend, precision, device.type)
    model = models.load(
        settings.model,
        dtype=models.precision(precision),
        device=device,
        variant=settings.variant,
        revision=settings.revision,
    )
    embeddings = _embeddings(settings, model)
    optimise = _optimisations(settings, model)
    backend = open_backend(settings.backend, model, optimise=optimise, notice=LOG.info)
    model = backend.model or model  # where optimisations changed it, a look-alike does the work
    _name_hash(model)
    first_job(model, backend)  # refuses what cannot be
    LOG.info("precision %s: %s", precision, why)
    per_row = row_bytes(model, backend)
    lanes = _lanes(settings, backend, optimise, per_row)
    by_memory = rows_for_memory(backend, per_row, lanes, free)
    part = int(CONTROL_SHARE * (free(backend.device) or 0))
    library = _open_library(settings, model, metrics, hooks.wake, lanes, part)
    nets = _open_nets(settings, model, backend, hooks.wake, part)
    two_rows_s = _first_step(model, backend)
    capacity = settings.capacity or rows_for_time(backend, by_memory, two_rows_s)
    engine = Engine(
        model,
        backend,
        capacity=capacity,
        metrics=metrics,
        on_tick=hooks.on_tick,
        on_stop=hooks.on_stop,
        library=library,
        nets=nets,
        pad_to=PAD_TO if settings.pad else (),
        places=places_for(backend.device, lanes, _threads_each(lanes), apart=not _offloads(backend)),
        shares=settings.limits.shares,
        fixed_rows=fixed_rows(model, backend, per_row) if settings.deterministic else None,
    )
    engine.studio.upscalers = models.Upscalers(settings.upscalers, backend.device)
    engine.studio.get_ready()
    if settings.deterministic:
        row = first_job(model, backend, guidance=2.0).row(0)
        _in_a_lane(engine, lambda: sample.advance(engine.unet, [row]))  # finds its shapes
    _warm_sizes(settings, model, backend, engine)
    LOG.info("capacity: %d rows of %d px a step", capacity, model.sample_size)
    if lanes > 1:
        LOG.info("lanes: %d sizes at once, %d threads each", lanes, _threads_each(lanes))
    return LoadedModel(model, engine, library, nets, embeddings)


def _in_a_lane(engine: Engine, call: Callable[[], object]) -> None:
    """Where steps are taken: on a CPU a lane's threads choose the kernels."""
    done: Future[None] = Future()

    def run() -> None:
        """The call, and what came of it for who waits."""
        try:
            call()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    engine.steps.put(run)
    done.result()


def _offloads(backend: Backend) -> bool:
    """Whether a part that is called sends another one to main memory, which a step may be computing with."""
    return any(name.startswith("offload_") for name in backend.optimised)


def _embeddings(settings: ServeSettings, model: Model) -> Embeddings:
    """What the folder has, added to the model; InputError for no folder, ModelError for two of one name."""
    if settings.embeddings is None:
        return Embeddings()
    loaded, skipped = models.add_fitting(model, settings.embeddings)
    LOG.info("embeddings: %s", ", ".join(one.name for one in loaded) or "none that are for this model")
    if skipped:
        LOG.warning("embeddings of other models, not used: %s", ", ".join(one.name for one in skipped))
    return Embeddings(tuple(loaded), tuple(skipped))


def _name_hash(model: Model) -> None:
    """The hash that pictures name their model by; of large files it comes while the first are generated."""
    if models.has_quick_digest(model):
        model.digest = models.file_digest(model)
        return

    def hash_file() -> None:
        try:
            model.digest = models.file_digest(model)
        except OSError as error:
            LOG.warning("pictures say no model hash: %s", error)

    LOG.info("hashing the model's file: pictures made meanwhile say no model hash")
    threading.Thread(target=hash_file, name="model-hash", daemon=True).start()


def fixed_rows(model: Model, backend: Backend, row_bytes: int | None) -> FixedRows:
    """The rows of calls where bits are not to depend on who shares them; a small model's layers are made
    steady."""
    if backend.device.type != "cpu":
        return FixedRows(FIXED_ROWS)
    small = row_bytes is not None and row_bytes <= SMALL_ROW_BYTES
    if small and backend.name == "torch":
        for part in filter(None, (model.unet, model.vae)):
            steady(part)
    pixels = FIXED_SMALL_PIXELS if small else FIXED_PIXELS
    return FixedRows(FIXED_ROWS, pixels, tries=backend.name == "torch")


def _optimisations(settings: ServeSettings, model: Model) -> str:
    """Attention with fused projections leaves no layers for adapters, and no place for IP-Adapters."""
    if settings.optimise is not None:
        return settings.optimise
    if settings.backend not in ("torch", "compile"):
        return "none"
    if settings.adapters is None and settings.controls is None:
        return "auto"
    return "fused_attention" if settings.backend == "compile" or model.is_dit else "fused_attention,lean"


def _lanes(settings: ServeSettings, backend: Backend, optimise: str, row_bytes: int | None) -> int:
    """How many sizes are stepped at once. Calls of a small model gain little from a second core."""
    plain = settings.backend == "torch" and set(optimise.split(",")) <= PLAIN
    shares = plain and backend.device.type == "cpu"
    if settings.lanes is not None:
        if settings.lanes > 1 and not shares:
            allowed = "1; more with backend torch on a CPU, without lossy optimisations"
            raise InputError(f"--lanes {settings.lanes}", allowed=allowed)
        return settings.lanes
    small = row_bytes is not None and row_bytes <= SMALL_ROW_BYTES
    return 2 if shares and small and usable_cores() >= 2 else 1


def _threads_each(lanes: int) -> int:
    """Threads within an operation: the lanes share the cores."""
    return max(1, min(torch.get_num_threads(), int(usable_cores() // lanes)))


def _open_library(
    settings: ServeSettings,
    model: Model,
    metrics: Metrics,
    wake: Callable[[], None],
    lanes: int,
    most_bytes: int,
) -> Library | None:
    if settings.adapters is None:
        if settings.adapter_memory is not None:
            raise InputError("--adapter-memory without --adapters", mend="leave it out, or name the folder")
        return None
    from darkroom.models.adapters.bank import Bank
    from darkroom.serve.engine.adapters import Library

    bank = Bank(
        model,
        slots=settings.slots,
        max_rank=settings.max_rank,
        most_a_row=settings.limits.adapters,
        threads=lanes > 1,
    )
    return Library(settings.adapters, bank, metrics, wake, settings.adapter_memory or most_bytes)


def _open_nets(
    settings: ServeSettings, model: Model, backend: Backend, wake: Callable[[], None], most_bytes: int
) -> Nets | None:
    """InputError for a model or backend that nets cannot steer."""
    if settings.controls is None:
        if settings.control_memory is not None:
            raise InputError("--control-memory without --controls", mend="leave it out, or name the folder")
        return None
    from darkroom.sample.control import check_backend
    from darkroom.serve.engine.nets import Nets

    if settings.deterministic:
        raise InputError("--controls with --deterministic", mend="leave one of them out")
    model.needs_unet("--controls")
    check_backend(backend)
    most = settings.control_memory or most_bytes
    if not most:
        raise InputError(
            f"{backend.device.type} does not say how much memory is free", mend="give --control-memory"
        )
    nets = Nets(settings.controls, model, backend.device, backend.dtype, most, wake, backend.optimised)
    LOG.info("nets: %d in the folder, at most %d MiB in memory", len(nets.names()), most // 2**20)
    return nets


def first_job(model: Model, backend: Backend, **settings: Any) -> sample.Generation:
    """One step of a picture of the model's own size; a U-Net that repaints is given one to repaint."""
    image = mask = None
    if repaints(model):
        size = (model.sample_size, model.sample_size)
        image, mask = Image.new("RGB", size), Image.new("L", size, 255)
    settings_drawn = sample.GenerateSettings(steps=1, **settings)
    return sample.Generation(model, ["a first step"], settings_drawn, backend, image=image, mask=mask)


def _first_step(model: Model, backend: Backend) -> float:
    """Take the slow first call of everything (allocators, kernels, threads) before the first job.

    Seconds of a step of two rows, a guided picture's; on a CPU of a second step.
    """
    job = first_job(model, backend, guidance=2.0)
    for note in job.notes:
        LOG.info("%s", note)
    row = job.row(0)
    sample.advance(backend.unet, [row])
    begun = time.perf_counter()
    if backend.device.type == "cpu":
        sample.advance(backend.unet, [job.row(0)])
    step_s = time.perf_counter() - begun
    job.finish(0, [row])
    return step_s


def _warm_sizes(settings: ServeSettings, model: Model, backend: Backend, engine: Engine) -> None:
    """A step of each size that was declared, in each batch that it will be called with."""
    for text in settings.warm_sizes:
        size = options.parse_size(text)
        share = size[0] * size[1] / model.sample_size**2
        most = max(2, int(engine.capacity / share))
        guided, alone = (first_job(model, backend, guidance=scale, size=size) for scale in (2.0, 1.0))
        for rows in [rows for rows in PAD_TO if rows <= most] if settings.pad else [2]:
            start = time.perf_counter()
            # A guided picture is two rows.
            pictures = [alone.row(0)] if rows == 1 else [guided.row(0) for _ in range(rows // 2)]
            sample.advance(engine.unet, pictures)
            LOG.info("ready for %s, %d rows: %.1f s", text, rows, time.perf_counter() - start)


def row_bytes(model: Model, backend: Backend) -> int | None:
    """What one more U-Net evaluation takes at the model's own size, counted on fake tensors; once for models
    that are built alike, and kept for later starts.
    """
    try:
        key = {"job": "row", "code": _own_code(), "build": _build_hash(model, backend)}
        before = count_cache.kept(key) or {}
        if "row_bytes" not in before:
            before = {"row_bytes": max(1, _call_bytes(model, backend, ROWS_COUNTED) // ROWS_COUNTED)}
            count_cache.keep(key, before)
        return int(before["row_bytes"])
    except Exception as error:  # a backend that cannot be counted
        LOG.warning("capacity is not counted: %s: %s", type(error).__name__, error)
        return None


ROWS_COUNTED = 2  # as a guided picture has; what does not grow with them, some casts, is small


@cache
def _own_code() -> str:
    """This file counts too, and is not among those that all counts are known by."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _build_hash(model: Model, backend: Backend) -> str:
    """Of all that the bytes of a call depend on but the number of rows."""
    unet: Any = model.unet
    parts = [
        {name: str(value) for name, value in unet.config.items() if not name.startswith("_")},
        [(ids.model_max_length, encoder.config.max_position_embeddings) for ids, encoder in _texts(model)],
        [(type(module).__qualname__, module.training) for module in unet.modules()],
        [(tuple(weight.shape), str(weight.dtype)) for weight in unet.parameters()],
        *(str(value) for value in (backend.name, backend.optimised, backend.device.type, backend.dtype)),
        accelerator.name_of(backend.device) if backend.device.type != "cpu" else "",  # chooses its kernels
        *(str(value) for value in (model.sample_size, model.is_sdxl, repaints(model))),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _texts(model: Model) -> zip[tuple[Any, Any]]:
    return zip(model.tokenizers, model.text_encoders, strict=True)


def rows_for_memory(
    backend: Backend, row_bytes: int | None, lanes: int = 1, free: FreeBytes = free_bytes
) -> int:
    """U-Net evaluations that fit in a call, at the model's own size."""
    most = MOST_ROWS.get(backend.device.type, 8)
    if row_bytes is None:
        return most
    if backend.device.type == "cpu" and row_bytes <= SMALL_ROW_BYTES:
        most *= 2
    there = free(backend.device)
    return 2 if there is None else max(2, min(most, int(SHARE * there) // (row_bytes * lanes)))


def rows_for_time(backend: Backend, rows: int, two_rows_s: float) -> int:
    """U-Net evaluations of a step: on a CPU so many that it takes `STEP_S` at most, but two at least."""
    if backend.device.type != "cpu":
        return rows
    return max(2, min(rows, int(2 * STEP_S / max(two_rows_s, 1e-6))))


def _call_bytes(model: Model, backend: Backend, rows: int) -> int:
    """What the U-Net's inputs and all that it makes of them take at the most, besides its weights."""
    from darkroom.counting import count

    row = first_job(model, backend).row(0)
    conditions = [row.positive] * rows
    seen = [row.latents_CHW] if row.extra_CHW is None else [row.latents_CHW, row.extra_CHW]
    x_BCHW = torch.stack([torch.cat(seen).to(backend.dtype)] * rows)
    text_BLD = torch.stack([condition.text_LD for condition in conditions])
    added = {name: torch.stack([c.added[name] for c in conditions]) for name in row.positive.added}
    t_B = torch.ones(rows, device=backend.device)
    with torch.no_grad():
        counted = count(model.unet, x_BCHW, t_B, text_BLD, added_cond_kwargs=added or None)  # type: ignore[arg-type]
    given = (x_BCHW, t_B, text_BLD, *added.values())
    return counted.peak_memory_bytes - counted.start_memory_bytes + sum(tensor.nbytes for tensor in given)


def used_bytes(device: torch.device) -> int:
    """Memory in use on a device: allocated on a card that tells it, else resident."""
    if accelerator.kind_of(device).own_memory and accelerator.free_bytes(device) is not None:
        return accelerator.allocated_bytes(device)
    from darkroom.hardware.meters import resident_bytes

    return resident_bytes()
