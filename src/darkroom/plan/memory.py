"""A run's memory besides its steps: latents made before, samples drawn between, offloaded parts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from darkroom.counting import ROUND_BYTES, Counter
from darkroom.models.families import FAMILIES
from darkroom.models.model import Model
from darkroom.models.outline import text_configs
from darkroom.plan.counts import DECODED, KINDS, LATENTS, SAMPLES, Line, Moment
from darkroom.plan.generation import decoded, unet_call
from darkroom.plan.tracing import moments_of, size_bytes, tag_weights
from darkroom.prepare.encoders import encode_moments
from darkroom.recipe.sections import VAE_TASKS
from darkroom.sample.generate import pictures_a_call
from darkroom.sample.pictures import DECODE_PICTURES, DECODE_PIXELS
from darkroom.train.data.local_dataset import has_own_store
from darkroom.train.data.precomputed import PREPARED_PIXELS
from darkroom.train.memory import LEAST_BYTES
from darkroom.train.tasks.diffusion import ENCODED_PIXELS, Diffusion, Task

if TYPE_CHECKING:
    from darkroom.recipe.sections import DataSettings, ModelSettings


ROWS = (2, 3)


def chunks(resolution: int, *, before: bool, inline: bool) -> dict[str, int]:
    """Pictures that are encoded at once: `before` the first step, or at each one."""
    pixels = resolution**2
    if before:
        return {LATENTS: max(1, PREPARED_PIXELS // pixels)}
    return {"inputs": max(1, ENCODED_PIXELS // pixels)} if inline else {}


def reads_text(data: DataSettings, task: Task) -> bool:
    """Whether the text's states come from a column; 'auto' takes one where the latents are prepared too."""
    if not isinstance(task, Diffusion) or task.trains_text:
        return False
    return data.text == "stored" or (data.text == "auto" and data.encode == "stored")


# ---- before the first step


def makes_latents(task: str, data: DataSettings) -> bool:
    """Whether the run makes latents of its own pictures before it trains."""
    return task not in VAE_TASKS and has_own_store(data) and data.caches_latents


def own_latents(
    counter: Counter, side: int, model: Model, there: Collection[str], *, gpu: bool
) -> tuple[Moment, ...]:
    """What is alive while a run makes its own latents: nothing trains yet, and not all parts are `there`."""
    traces = []
    tag_weights(counter, model.modules.values())
    for rows in ROWS:
        counter.stage = LATENTS
        pixels = torch.empty(rows, 3, side, side, dtype=torch.uint8, device="meta")
        given = counter.fake_tensor(pixels)
        traces.append(counter.start_trace())
        encode_moments(model.vae, given)
        counter.stage, counter.trace = "", None
    absent = _held_bytes([module for name, module in model.modules.items() if name not in there])
    return _lighter(moments_of((traces[0], traces[1]), ROWS, cpu=not gpu), absent)


def there_early(settings: ModelSettings, model: Model, *, gpu: bool, cast: bool) -> set[str]:
    """The parts that hold memory while latents are made.

    A GPU gets the others afterwards. On a CPU a folder's weights lie in its files until they are used, while
    random ones, and the U-Net's where it was `cast`, are in memory from the start.
    """
    if gpu:
        return {"vae"}
    found = {"vae"}
    if settings.base in FAMILIES:
        found |= model.modules.keys() - (
            {"text_encoder"} if isinstance(settings.text_encoder, str) else set()
        )
    return found | ({"unet"} if settings.fresh_unet or cast else set())


# ---- between steps


def samples(
    counter: Counter, number: int, guidance: float | None, resolution: int, model: Model, *, gpu: bool
) -> tuple[Moment, ...]:
    """What is alive while a grid of samples is drawn, besides the optimiser's state and the average."""
    side = resolution // model.vae_factor
    together = min(number, pictures_a_call(side**2))
    rows = together if guidance is not None and guidance <= 1 else 2 * together
    at_once = max(1, min(together, DECODE_PICTURES, DECODE_PIXELS // resolution**2))
    call, x = unet_call(model.unet), torch.empty(rows, model.latent_channels, side, side)
    inputs = _told(model, rows, next(model.modules["unet"].parameters()).dtype)
    trace = counter.start_trace()
    with torch.no_grad():
        counter.stage = SAMPLES
        call(x, torch.zeros(()), inputs.pop("text"), inputs)
        counter.stage = DECODED
        decoded(model.vae, x[:at_once])
    counter.stage, counter.trace = "", None
    return moments_of((trace, trace), ROWS, cpu=not gpu)  # the same whatever the batch


def _told(model: Model, rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A U-Net's inputs other than latents: states of its texts, and SDXL's sizes and pooled states."""
    configs = text_configs(model)
    width, length = sum(c.hidden_size for c in configs), configs[0].max_position_embeddings
    found = {"text": torch.empty(rows, length, width, dtype=dtype)}
    if model.is_sdxl:
        pooled = torch.empty(rows, configs[-1].projection_dim, dtype=dtype)
        found |= {"text_embeds": pooled, "time_ids": torch.empty(rows, 6, dtype=dtype)}
    return found


# ---- meanwhile


def resting(model: Model, task: Task, *, text: bool, inline: bool) -> list[str]:
    """The parts that a CPU lays into a file while it trains, because no step runs them.

    `text`: its states come from a column; `inline`: pictures are encoded at each step.
    """
    if not isinstance(task, Diffusion):
        return []
    encoders = [name for name in model.modules if name.startswith("text_encoder")]
    idle = [name for name in encoders if name not in task.modules] if text else task.rested_text
    names = idle if inline else [*idle, "vae"]
    return names if _held_bytes([model.modules[name] for name in names]) >= LEAST_BYTES else []


def rested(
    moments: Collection[Moment], model: Model, names: Collection[str], *, random: bool
) -> tuple[Moment, ...]:
    """The moments of steps while these parts rest; random weights were all in memory before."""
    light = _lighter(moments, _held_bytes([model.modules[name] for name in names]))
    if not names or not random:
        return light
    whole = {kind: Line(0.0, 0.0) for kind in KINDS}
    whole["weights"] = Line(4.0 * sum(model.num_parameters.values()), 0.0)
    return (*light, Moment("opened", whole))


def _lighter(moments: Collection[Moment], weights: int) -> tuple[Moment, ...]:
    """The moments where so many bytes of weights are not in memory."""

    def without(moment: Moment) -> Moment:
        line = moment.bytes["weights"]
        return replace(moment, bytes={**moment.bytes, "weights": Line(line.fixed - weights, line.row)})

    return tuple(map(without, moments))


def _held_bytes(modules: Collection[nn.Module]) -> int:
    """What modules hold, each tensor in whole pieces of the allocator's, as it is counted."""
    sizes = [size_bytes(tensor) for m in modules for tensor in (*m.parameters(), *m.buffers())]
    return sum(-(-size // ROUND_BYTES) * ROUND_BYTES for size in sizes)
