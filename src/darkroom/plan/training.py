"""The profile of a recipe's training step: the very `train.step`, built without weights or a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import nn

from darkroom import models
from darkroom.counting import ROUND_BYTES, Counter
from darkroom.models.compiling import blocks_in_order
from darkroom.models.families import FAMILIES
from darkroom.models.model import Model
from darkroom.models.outline import text_configs
from darkroom.plan.counts import DECODED, KINDS, LATENTS, SAMPLES, Kernels, Line, Moment, Profile, cached
from darkroom.plan.targets import encodes
from darkroom.plan.tracing import (
    as_on_gpu,
    decoded,
    fakes,
    grouped,
    moments_of,
    outline,
    profile_of,
    size_bytes,
    tag_weights,
    tensors,
    trace_training,
    unet_call,
)
from darkroom.prepare.columns import encode_moments
from darkroom.recipe.recipe import Recipe
from darkroom.recipe.sections import VAE_TASKS, AdapterSettings, AlignSettings
from darkroom.sample.choice import pictures_a_call
from darkroom.sample.pictures import DECODE_PICTURES, DECODE_PIXELS
from darkroom.train import setup as job
from darkroom.train.block_swap import swap_of
from darkroom.train.ddp_fsdp import blocks_of
from darkroom.train.local_dataset import PREPARED_PIXELS, has_own_store
from darkroom.train.memory import LEAST_BYTES, packed_weights
from darkroom.train.precision import cast
from darkroom.train.tasks.diffusion import ENCODED_PIXELS, SIZES, Diffusion, Task
from darkroom.train.tasks.distill import FewSteps
from darkroom.train.tasks.dmd2 import DistributionMatching

if TYPE_CHECKING:
    from pydantic import BaseModel

    from darkroom.recipe.sections import DataSettings, ModelSettings, TrainSettings


CPU = torch.device("cpu")
HEAP_BYTES = 2**25  # glibc gives larger blocks back to the system


def profile_recipe(dumped: str, precision: str, *, gpu: bool) -> Profile:
    """Count a recipe's step in a precision (float32, bf16, fp16), as a GPU or a CPU computes it.

    `dumped` is what the counts are kept under: the resolved recipe (`Recipe.dump`), as a rule without what
    they do not depend on (`as_counted`). Of a step that is compiled what it is compiled from is counted.
    """
    recipe = Recipe.model_validate(yaml.safe_load(dumped))
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": "none"})})
    data, side = recipe.data, recipe.data.resolution
    model = outline(recipe.task, recipe.model, recipe.objective, side)
    if recipe.model.word is not None:
        _fill_tokenizers(model)
    dtype = models.precision(precision)
    inline, before = encodes(recipe.task, data), _makes_latents(recipe.task, data)
    with fakes(*model.modules.values()) as counter:
        if recipe.frozen_unet and model.unet is not None:
            cast(model.unet, dtype)
        moments: list[Moment] = []
        kernels: list[Kernels] = []  # of making latents beforehand
        if before:
            early = recipe.frozen_unet and dtype != torch.float32
            there = _there_early(recipe.model, model, gpu=gpu, cast=early)
            if data.class_prompt is not None:
                there = set(model.modules)  # they have drawn the pictures of the class
            kernels, moments = _own_latents(counter, side, model, there, gpu=gpu)
        # The store is never looked into where everything is encoded inline.
        changes = _without_files(data, recipe.train, recipe.model, recipe.adapter)
        bare = recipe.model_copy(update=changes)
        task = job.make_task(bare, model, _NoStore(), CPU)  # type: ignore[arg-type]
        if not inline and recipe.task not in VAE_TASKS and hasattr(task, "_encode"):
            task._encode = None
        if gpu and recipe.frozen_text:
            job.halve_text(model, dtype)
        held = {**model.modules, **task.modules}  # the job keeps all its parts on the device
        step = job.bare_step(task, train=recipe.train, optim=recipe.optim, micro_batch=1, dtype=dtype)
        if gpu:
            as_on_gpu([*held.values(), *task.frozen])
        tag_weights(counter, [*held.values(), *task.frozen])
        text = reads_text(data, task)
        columns = _columns(side, model, task, inline=inline, text=text)
        task.inputs(counter.fake(columns(1)), CPU)  # captions whose states are kept are encoded once
        turns = _turns(task, step)
        traces, *others = (trace_training(counter, step, task, columns, rows=(2, 3), k=k) for k in turns)
        prompts = recipe.sample_prompts
        number = recipe.sample.num if prompts is None else len(prompts)
        if number and recipe.task not in VAE_TASKS:
            moments += samples(counter, number, recipe.sample.guidance, side, model, gpu=gpu)
        parameters = {
            name: sum(p.numel() for p in module.parameters()) + packed_weights(module)
            for name, module in held.items()
        }
        counted = profile_of(
            traces,
            (2, 3),
            cpu=not gpu,
            parameters=parameters,
            trained=sum(master.numel() for master in step.weights.masters.values()),
            chunks=chunks(side, before=before, inline=inline),
            facts={
                **_cut_besides(task),
                **_facts(side, model, task.modules.values(), step, averages=recipe.train.ema.enabled),
                "encodes_inline": inline,
                "frees_in_forward": recipe.frees_in_forward,
                **({"adapter_bytes": _adapter_bytes(step.weights.masters)} if recipe.adapts else {}),
                **(_swapped(model.unet) if model.unet is not None else {}),
            },
        )
        if others:
            other = profile_of(others[0], (2, 3), cpu=not gpu, parameters=parameters, trained=0)
            counted = _in_turns(counted, other, turns.values())
        idle = [] if gpu else offloaded(model, task, text=text, inline=inline)
        steps = _with_offload(counted.moments, model, idle, random=recipe.model.base in FAMILIES)
    return replace(counted, kernels=(*counted.kernels, *kernels), moments=(*steps, *moments))


def _cut_besides(task: Any) -> dict[str, Any]:
    """What is cut among ranks besides the trained weights: a student's teacher and target."""
    if not isinstance(task, FewSteps):
        return {}
    return {
        "frozen_cut_bytes": sum(p.nbytes for module in task.frozen for p in module.parameters()),
    }


def _turns(task: Any, step: Any) -> dict[int, float]:
    """Steps of each kind that a task has, with their shares: of one kind it is any that averages."""
    first = step.ema._settings.start_step + 1
    if not isinstance(task, DistributionMatching):
        return {first: 1.0}
    every = round(1 / task.turns[0])
    start = -(-first // every) * every
    return {start + k: share for k, share in task.turns.items()}


def _in_turns(one: Profile, other: Profile, shares: Collection[float]) -> Profile:
    """The mean step of two kinds, with the memory of the higher one."""
    both = zip((one, other), shares, strict=True)
    kernels = tuple(replace(k, calls=k.calls * share) for profile, share in both for k in profile.kernels)
    return replace(one, kernels=kernels, moments=(*one.moments, *other.moments))


def _fill_tokenizers(model: Model) -> None:
    """As many words as the text encoders have: a new one takes the row after the last."""
    for tokenizer, config in zip(model.tokenizers, text_configs(model), strict=True):
        tokenizer.add_tokens([f"<filled-{i}>" for i in range(len(tokenizer), config.vocab_size)])


class _NoStore:
    """A store without prepared columns."""

    def columns(self) -> dict[str, Any]:
        return {}


def _without_files(
    data: DataSettings, train: TrainSettings, model: ModelSettings, adapter: AdapterSettings | None
) -> dict[str, BaseModel]:
    """The sections that name a file or read the store, without that."""
    inline = {"encode": "inline", "text": "inline", "buckets": False, "mask": None}
    changes: dict[str, BaseModel] = {
        "data": data.model_copy(update=inline),
        "train": train.model_copy(update={"align": AlignSettings()}),  # its extractor is not opened
    }
    if adapter is not None:  # what it starts from is as large as what it is
        changes["adapter"] = adapter.model_copy(update={"start": None, "init_lora_weights": "default"})
    if model.word is not None:  # one token of any tokenizer, also of the stand-in
        plain = model.word.model_copy(update={"initial": "a"})
        changes["model"] = model.model_copy(update={"word": plain})
    return changes


def _facts(
    resolution: int, model: Model, modules: Collection[Any], step: Any, *, averages: bool
) -> dict[str, Any]:
    masters = step.weights.masters
    trained = sum(master.numel() for master in masters.values())
    averaged = trained if averages else 0
    states = [tensor for inner in step.optimiser.inner for tensor in tensors(inner.state)]
    factor, channels = model.vae_factor, model.latent_channels
    side = resolution // factor
    text = [(c.max_position_embeddings, c.hidden_size) for c in text_configs(model)]
    return {
        "resolution": resolution,
        "masters_apart": _masters_apart(step.weights),
        "small_gradient_bytes": sum(m.nbytes for m in masters.values() if m.nbytes < HEAP_BYTES),
        "computing_bytes": sum(_trained_bytes(module) for module in modules),
        "block_bytes": max(
            (_trained_bytes(block) for module in modules for block in blocks_of(module)), default=0
        ),
        # weights and average in float32, and the optimiser's own state
        "checkpoint_bytes": 4 * (trained + averaged) + sum(map(size_bytes, states)),
        "latent_bytes_a_row": 2 * 2 * channels * side * side,
        "text_bytes_a_row": sum(2 * length * width for length, width in text),
    }


def _swapped(unet: nn.Module) -> dict[str, float]:
    """What of a U-Net rests in main memory where a device has memory of its own, and what that costs; of one
    of which nothing rests, of how many blocks it is.
    """
    swap = swap_of(unet)
    if swap is None:
        return {"blocks": len(blocks_in_order(unet))}
    resting = sum(swap.block_bytes)
    return {
        "resting_bytes": resting,
        "saved_by_swap_bytes": swap.saved_bytes,
        "swapped_bytes": swap.copied_bytes,
        "swapped_share": resting / sum(size_bytes(t) for t in (*unet.parameters(), *unet.buffers())),
    }


def _trained_bytes(module: Any) -> int:
    return sum(size_bytes(param) for param in module.parameters() if param.requires_grad)


def _adapter_bytes(masters: Mapping[str, Any]) -> int:
    """Size of the file that an adapter's weights are written to."""
    return _safetensors_bytes(
        {name.replace(".default", ""): tuple(master.shape) for name, master in masters.items()}
    )


def _masters_apart(weights: Any) -> bool:
    """Whether the step computes with weights of their own, besides the float32 ones that it trains."""
    computing = {id(param) for param in weights.computing.values()}
    return not any(id(master) in computing for master in weights.masters.values())


def _columns(
    side: int, model: Model, task: Any, *, inline: bool, text: bool
) -> Callable[[int], Mapping[str, Any]]:
    """What the loader would give of so many pictures."""
    latent = (model.latent_channels, side // model.vae_factor, side // model.vae_factor)
    draws = {"u": (), "offset": (model.latent_channels, 1, 1), "further": (task.read.further, *latent)}

    def columns(pictures: int) -> dict[str, Any]:
        """A batch of rows as the task reads it, on the meta device: shapes and types without values."""
        rows = pictures * task.rows_a_picture
        given: dict[str, Any] = {
            name: torch.empty(rows, *draws.get(name, latent), device="meta") for name in task.read.draws
        }
        given["pixels"] = torch.empty(rows, 3, side, side, dtype=torch.uint8, device="meta")
        if not inline:
            given["moments"] = torch.empty(rows, 2, *latent, dtype=torch.float16, device="meta")
        given["caption"] = ["a picture"] * rows
        if task.rows_a_picture > 1:
            given["is_prior"] = torch.empty(rows, device="meta")
        if model.is_sdxl:
            given |= {name: torch.empty(rows, dtype=torch.int32, device="meta") for name in SIZES}
        if text:
            given |= _text_columns(model, rows)
        return given

    return columns


def _text_columns(model: Model, rows: int) -> dict[str, Any]:
    configs = text_configs(model)
    width, length = sum(c.hidden_size for c in configs), configs[0].max_position_embeddings
    states = {"text": torch.empty(rows, length, width, dtype=torch.float16, device="meta")}
    if model.is_sdxl:
        states["pooled"] = torch.empty(rows, configs[-1].projection_dim, dtype=torch.float16, device="meta")
    return states


def adapter_facts(base: str, rank: int, targets: str = "qv") -> dict[str, int]:
    """Trained and total parameters of the U-Net, and bytes of the float32 safetensors file; kept."""
    key = {"job": "adapter", "base": base, "rank": rank, "targets": targets}
    return cached(key, lambda: _adapter_facts(base, rank, targets))


def _adapter_facts(base: str, rank: int, targets: str) -> dict[str, int]:
    from darkroom.models.outline import outlined
    from darkroom.train.tasks.lora import add_adapters, parameter_table

    model = outlined(base, ("unet",))
    parts = add_adapters(model, AdapterSettings(targets=targets, rank=rank))
    trained, total = parameter_table(parts)
    shapes = {
        f"unet.{name.replace('.default', '')}": tuple(param.shape)
        for name, param in parts["unet"].named_parameters()
        if param.requires_grad
    }
    return {"trained": trained, "total": total, "file_bytes": _safetensors_bytes(shapes)}


def _safetensors_bytes(shapes: dict[str, tuple[int, ...]], item_bytes: int = 4) -> int:
    """Size of a safetensors file: eight bytes, a JSON header padded to eight, the tensors."""
    header, offset = {}, 0
    for name, shape in sorted(shapes.items()):
        size = item_bytes
        for side in shape:
            size *= side
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-length // 8) * 8 + offset


# ---- a run's memory besides its steps: latents made before, samples drawn between, offloaded parts

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


def _makes_latents(task: str, data: DataSettings) -> bool:
    """Whether the run makes latents of its own pictures before it trains."""
    return task not in VAE_TASKS and has_own_store(data) and data.caches_latents


def _own_latents(
    counter: Counter, side: int, model: Model, there: Collection[str], *, gpu: bool
) -> tuple[list[Kernels], list[Moment]]:
    """What is computed and alive while a run makes its own latents: nothing trains yet, and not all parts are
    `there`.
    """
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
    both = (traces[0], traces[1])
    return list(grouped(*both, ROWS)), list(_lighter(moments_of(both, ROWS, cpu=not gpu), absent))


def _there_early(settings: ModelSettings, model: Model, *, gpu: bool, cast: bool) -> set[str]:
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
    inputs = _conditioning(model, rows, next(model.modules["unet"].parameters()).dtype)
    trace = counter.start_trace()
    with torch.no_grad():
        counter.stage = SAMPLES
        call(x, torch.zeros(()), inputs.pop("text"), inputs)
        counter.stage = DECODED
        decoded(model.vae, x[:at_once])
    counter.stage, counter.trace = "", None
    return moments_of((trace, trace), ROWS, cpu=not gpu)  # the same whatever the batch


def _conditioning(model: Model, rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A U-Net's inputs other than latents: states of its texts, and SDXL's sizes and pooled states."""
    configs = text_configs(model)
    width, length = sum(c.hidden_size for c in configs), configs[0].max_position_embeddings
    found = {"text": torch.empty(rows, length, width, dtype=dtype)}
    if model.is_sdxl:
        pooled = torch.empty(rows, configs[-1].projection_dim, dtype=dtype)
        found |= {"text_embeds": pooled, "time_ids": torch.empty(rows, 6, dtype=dtype)}
    return found


# ---- meanwhile


def offloaded(model: Model, task: Task, *, text: bool, inline: bool) -> list[str]:
    """The parts that a CPU lays into a file while it trains, because no step runs them.

    `text`: its states come from a column; `inline`: pictures are encoded at each step.
    """
    if not isinstance(task, Diffusion):
        return []
    encoders = [name for name in model.modules if name.startswith("text_encoder")]
    idle = [name for name in encoders if name not in task.modules] if text else task.rested_text
    names = idle if inline else [*idle, "vae"]
    return names if _held_bytes([model.modules[name] for name in names]) >= LEAST_BYTES else []


def _with_offload(
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
