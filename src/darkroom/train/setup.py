"""From a recipe to a job that can be trained: everything is checked here, before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from darkroom import models
from darkroom.bill import Meter, format_number
from darkroom.data.images import ColourChange
from darkroom.data.loader import ReadSettings
from darkroom.data.mixing import versions_of
from darkroom.data.order import Rows, SampleOrder
from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.hardware import accelerator
from darkroom.hardware.meters import return_freed
from darkroom.models.compiling import compile_blocks, compile_whole
from darkroom.models.model import Model, cast_opened
from darkroom.prepare.columns import VaeEncoder
from darkroom.recipe.fine_tuning import FINE_TUNING, SUBJECT_TASKS
from darkroom.recipe.rules import channels_last
from darkroom.recipe.sections import (
    AdapterSettings,
    DataSettings,
    DistillSettings,
    ModelSettings,
    OptimSettings,
    ParallelSettings,
    SamplePrompt,
    TrainSettings,
)
from darkroom.train.block_swap import swap_blocks, swap_notes, swap_of
from darkroom.train.checkpoint_storage import exactness
from darkroom.train.contents import (
    base_of,
    check_base,
    chosen_of,
    columns_read,
    contents_of,
    others_of,
    places_of,
)
from darkroom.train.ddp_fsdp import shard_frozen, share_weights
from darkroom.train.feed import (
    LOSS_WEIGHT,
    PROMPT,
    Feed,
    OpenFeed,
    bucket_step,
    make_feed,
    make_order,
    make_row_files,
    read_once,
    rows_an_epoch,
    rows_of_one_size,
    select_rows,
)
from darkroom.train.jobs import (
    Pinned,
    Say,
    TrainingSetup,
    chosen_layout,
    flops_per_image,
    lay_out,
    set_kernels,
)
from darkroom.train.local_dataset import (
    class_store_path,
    gather,
    gather_class,
    has_own_store,
    open_pinned,
    prepare_own,
    stored_latents,
    stored_masks,
    stored_text,
)
from darkroom.train.memory import (
    ESTIMATED,
    choose_micro_batch,
    forget_inputs,
    offload_mmap,
    pack_layers,
    try_micro_batches,
)
from darkroom.train.model import build_model
from darkroom.train.objective import FlowObjective, Objective, make_objective
from darkroom.train.precision import DTYPES, choose_precision
from darkroom.train.ranks import ALONE, Ranks
from darkroom.train.scores import Scores
from darkroom.train.step import Step, make_weights, micro_batches
from darkroom.train.tasks.diffusion import SIZES, Columns, Diffusion, Preference, Reading, Task
from darkroom.train.tasks.distill import Distillation, FewSteps
from darkroom.train.tasks.dmd2 import Discriminator, DistributionMatching, make_discriminator
from darkroom.train.tasks.encoders import (
    Autoencoder,
    ExtractorModel,
    LearnExtractor,
    LearnTinyVae,
    TinyVaeModel,
    build_extractor,
)
from darkroom.train.tasks.lora import (
    EVA_BATCHES,
    add_adapters,
    add_word,
    find_eva_start,
    limit_norms,
    parameter_table,
)
from darkroom.train.tasks.repa import make_extras

if TYPE_CHECKING:
    from darkroom.recipe.recipe import Recipe

Fed = tuple[TrainSettings, DataSettings, Task, Sequence[Store], SampleOrder, torch.device, Ranks]
"""What a feed is made of, in the order of `make_feed`."""
CALIBRATION_ROWS = 512
CALIBRATION_VALUES = 2**26


@dataclass(frozen=True)
class _Site:
    """Where a job is put together: on which device, by which processes, after what, the log and the bill."""

    device: torch.device
    precision: str
    pinned: Pinned
    ranks: Ranks
    say: Say
    part: Callable[[str], AbstractContextManager[None]]  # of the bill

    @property
    def dtype(self) -> torch.dtype:
        return models.precision(self.precision)


FREED_BYTES = 2**20
"""On a CPU a run that frees in its forward pass gives blocks of this size back at once."""


def make_job(
    recipe: Recipe,
    pinned: Pinned,
    feed: Feed | OpenFeed | None = None,
    say: Say = lambda _: None,
    ranks: Ranks = ALONE,
    meter: Meter | None = None,
) -> TrainingSetup:
    """Check a recipe against store, model and machine, and put together what trains it.

    Only what a run gathers into its own `data` folder is written: pictures, latents, class pictures; `meter`
    counts these apart. Raises RecipeError, StoreError, ColumnError or ModelError for what cannot be.
    """
    recipe.check(ranks.size)
    data, train, optim, side = recipe.data, recipe.train, recipe.optim, recipe.data.resolution
    files = make_row_files(data, say)
    store = _opened_store(recipe.task, data, pinned, feed, say, ranks)
    train_rows, held_rows = select_rows(store, data)
    contents = ranks.broadcast(lambda: contents_of(store, pinned.contents, columns_read(data)))
    chosen = chosen_of((train_rows, held_rows), data, pinned.chosen)
    device = own_device(train.device, ranks)
    _set_process(train, device, recipe.frees_in_forward)
    precision, why = choose_precision(train.precision, device)
    notes = [f"precision {precision}: {why}"]
    site = _Site(device, precision, pinned, ranks, say, meter.part if meter else lambda _: nullcontext())
    model: Model
    if recipe.task == "extractor":
        model = build_extractor(recipe.model, recipe.objective.extractor, side, store, train_rows)
    else:
        captions = partial(_captions, store, train_rows)
        model = build_model(recipe.task, recipe.model, recipe.objective, side, captions, pinned.run)
    base = base_of(recipe.task, recipe.model, model)
    places = places_of(recipe.model, data, recipe.adapter, train.align.extractor, pinned.run)
    check_base(base, pinned.base, recipe.model, places)
    if recipe.frozen_unet and model.unet is not None:
        cast_opened(model.unet, site.dtype)  # never trained: no float32 copy is needed
    stores = _made_ready(recipe.task, data, recipe.model.base, model, store, site)
    _move(model, device, but=model.unet if recipe.model.base_precision or train.blocks_to_swap else None)
    task = make_task(recipe, model, store, device, pinned.run)
    base |= others_of(task, recipe.adapter, stores, ranks)
    check_base(base, pinned.base, recipe.model, places)
    if device.type != "cpu" and recipe.frozen_text:
        halve_text(model, site.dtype)
    offload_mmap(_seldom_run(model, task), pinned.run)
    notes += [*_trained_share(recipe.task, task), *swap_notes(train.blocks_to_swap, device)]
    heldout, held_notes = _heldout(task, data, store, held_rows, recipe.evaluate.rows, device)
    calibration = _calibration(task, store, train_rows, side, device)
    one_row = partial(_one_row, task, store, train_rows, device)
    step, size_notes, measured = _sized_step(task, train, optim, recipe.parallel, one_row, site)
    notes += [*held_notes, *size_notes]
    order = make_order(train, data, task, store, train_rows)
    foreign = feed is not None and not isinstance(feed, OpenFeed)
    fed = (train, data, task, stores, order, device, ranks)
    if isinstance(feed, OpenFeed):
        feed = feed.bound(*fed) if data.encode == "online" else None
    _begin_with_eva(recipe.adapter, step, task, fed)
    flops, scores = None, None
    if ranks.sharded and device.type != "cpu":  # cut weights cannot be counted with
        flops = flops_per_image(task, one_row())
    if recipe.evaluate.every_images and (ranks.first or ranks.sharded):
        scores = Scores(recipe.evaluate, recipe.sample, data, task.read, store, held_rows, device)
    return TrainingSetup(
        recipe=recipe,
        task=task,
        step=step,
        feed=feed or make_feed(*fed, files=files),
        rows_of=None if foreign else lambda k: order.batch(k).positions_B.tolist(),
        flops=flops,
        device=device,
        rows=rows_an_epoch(data, store, train_rows),
        environment=exactness(device, precision, step.micro_batch, ranks) | measured,
        store={"version": versions_of(store), "rows": store.num_rows, "contents": contents, "chosen": chosen},
        base=base,
        heldout=heldout,
        scores=scores,
        calibration=calibration,
        prompts=_prompts(recipe.sample_prompts, recipe.sample.num, store, held_rows or train_rows),
        notes=notes,
        ranks=ranks,
    )


def _set_process(train: TrainSettings, device: torch.device, frees_in_forward: bool) -> None:
    """Choose kernels; on a CPU, freed blocks go back to the system in a run whose forward pass frees them."""
    set_kernels(train, device)
    if device.type == "cpu" and frees_in_forward:
        return_freed(FREED_BYTES, keep_top=True)


def _begin_with_eva(settings: AdapterSettings | None, step: Step, task: Task, fed: Fed) -> None:
    """Where an adapter asks for it, set its first factors to the main directions of its layers' inputs in the
    first batches, the same however long the run is.

    A run that goes on does the same, and then takes its checkpoint's values.
    """
    if settings is None or settings.init_lora_weights != "eva":
        return
    train, data, _, stores, order, device, ranks = fed
    first = train.model_copy(update={"steps": EVA_BATCHES})
    feed = make_feed(first, data, task, stores, order, device, ranks)
    masters = step.weights.masters
    for module in task.modules.values():
        module.eval()

    def look_at(columns: Columns) -> None:
        for micro in micro_batches(task.inputs(columns, device), step.micro_batch * task.rows_a_picture):
            task.losses(micro)

    with feed(0) as batches:
        found = find_eva_start(task.modules, (partial(look_at, columns) for columns in batches))
    with torch.no_grad():
        for name, directions in found.items():
            masters[name].copy_(directions)
    step.weights.publish()
    for module in task.modules.values():
        module.train()


def _opened_store(
    task: str, data: DataSettings, pinned: Pinned, feed: Feed | OpenFeed | None, say: Say, ranks: Ranks
) -> Store:
    """The pictures' store, as pinned; a folder's pictures are brought into the run's own before."""
    if data.encode == "online" and feed is None:
        raise RecipeError(
            "data.encode",
            "online, but there is nobody to encode",
            mend="train with --engine ray, or set data.encode=inline",
        )
    if has_own_store(data) and pinned.version is None:
        ranks.rank0_first(lambda: gather(task, data, pinned.run, say))
    return open_pinned(data, pinned.run, pinned.version, pinned.rows)


def _made_ready(
    task: str, data: DataSettings, base: str, model: Model, store: Store, site: _Site
) -> list[Store]:
    """The run's store and that of the class; class pictures drawn, latents made of a run's own, if read.

    Of a model whose parts are not on the device yet, for latents alone the VAE goes there.
    """
    pinned, ranks, say = site.pinned, site.ranks, site.say
    stores, makes, column = [store], has_own_store(data) and data.caches_latents, None
    if data.class_prompt is not None:
        if not makes:
            column = stored_latents(data, model, store)
        if ranks.broadcast(lambda: not class_store_path(pinned.run).exists() or pinned.version is None):
            _move(model, site.device)
            with site.part("class pictures"):
                ranks.rank0_first(lambda: gather_class(data, base, model, pinned.run, site.dtype, say))
        stores.append(Store.open(class_store_path(pinned.run)))
    if task == "dpo":
        stores.append(Store.open(class_store_path(pinned.run)))
    own = stores if makes else stores[1:] if column else []
    if own:
        with site.part("latents"):
            ranks.rank0_first(lambda: prepare_own(data, model, own, site.device, say))
        for one in own:
            one.refresh()
    return stores


def _move(model: Model, device: torch.device, but: nn.Module | None = None) -> None:
    """Put a model's parts on the device; what is to be held in fewer bits, or only in part, goes there
    afterwards.
    """
    for module in model.modules.values():
        if module is not but:
            nn.Module.to(module, device)  # diffusers' own `to` warns of nothing


def halve_text(model: Model, dtype: torch.dtype) -> None:
    """Cast an adapter's frozen text encoders to the U-Net's precision: 1.6 GB less of SDXL's on the card.

    Call it when the task is made: a store's column is known by the identity of float32 weights.
    """
    for encoder in model.text_encoders:
        nn.Module.to(encoder, dtype)


def _trained_share(name: str, task: Task) -> list[str]:
    """A note of how much a fine-tuning trains."""
    if name not in FINE_TUNING:
        return []
    trained, total = parameter_table(task.modules)
    share = format_number(100 * trained / total, 2)
    return [f"{trained:,} of {total:,} parameters are trained ({share} %)"]


def _one_row(task: Task, store: Store, rows: Rows, device: torch.device) -> dict[str, torch.Tensor]:
    """The inputs of one picture, to try a step with."""
    return task.inputs(read_once(store, rows, 1, task.read), device)


def own_device(asked: str, ranks: Ranks) -> torch.device:
    """The device that is asked for; of several ranks each has the GPU of its number."""
    device = models.device(asked)
    if ranks.size > 1 and device.type != "cpu":
        return torch.device(device.type, ranks.local_rank)
    return device


def bare_step(
    task: Task,
    *,
    train: TrainSettings,
    optim: OptimSettings,
    micro_batch: int,
    dtype: torch.dtype,
    ranks: Ranks = ALONE,
    shard: str = "grads",
    reduce: torch.dtype = torch.float32,
    innermost: bool | None = None,
) -> Step:
    """The step of a task without the loop around it, as `measure` times it and `plan` counts it; convolutions
    with their channels `innermost`, or as the recipe and the device have it.
    """
    device = next(next(iter(task.modules.values())).parameters()).device
    if innermost is None:
        innermost = channels_last(train.channels_last, device.type, sharded=ranks.sharded)
    if innermost:
        lay_out([*task.modules.values(), *_other_unets(task)], innermost=True)
    for module in task.modules.values():
        module.train()
        if train.gradient_checkpointing:
            _checkpoint_activations(module)
        forget_inputs(module)
        if (swap := swap_of(module)) is not None:
            swap.pin()
    _compile(task, train)
    if ranks.size == 1:
        weights = make_weights(task.modules, dtype)
    else:
        weights = share_weights(task.modules, dtype, ranks, shard, reduce)
    for module in _other_unets(task) if ranks.sharded else ():
        shard_frozen(module, dtype, ranks, shard)
    return Step(
        task,
        weights,
        train=train,
        optim=optim,
        micro_batch=micro_batch,
        rates=task.rates,
        rows_a_picture=task.rows_a_picture,
        processes=ranks.size,
    )


def _compile(task: Task, settings: TrainSettings) -> None:
    """Compile what most of a step's work is in: the U-Net, transformer or VAE, as the recipe says."""
    if settings.compile == "none":
        return
    denoiser = task.modules.get("unet", next(iter(task.modules.values())))
    for module in (denoiser, *_other_unets(task)):
        compile_blocks(module) if settings.compile == "blocks" else compile_whole(module)


def _other_unets(task: Task) -> Sequence[nn.Module]:
    """Those that answer besides the trained one: a distilled student's teacher and target."""
    return task.frozen if isinstance(task, FewSteps) else ()


# ---- what is put together


def make_task(
    recipe: Recipe, model: Model, store: Store, device: torch.device, run: Path | None = None
) -> Task:
    """The task of a recipe. Parts that no gradient goes through stay in float32. `run` is the run's folder,
    where an adapter's start may be noted.
    """
    if isinstance(model, ExtractorModel):
        return LearnExtractor(model, recipe.objective.extractor, recipe.data, recipe.train.seed)
    data, train = recipe.data, recipe.train
    read = ReadSettings(
        pixels=data.resolution,
        crop=data.crop,
        flip=data.flip,
        colour=ColourChange(**data.augment.model_dump()),
        seed=train.seed,
        latent_channels=model.latent_channels,
        latent_factor=model.vae_factor,
    )
    for module in model.modules.values():
        module.requires_grad_(False)
    if recipe.task == "autoencoder":
        _train(model.vae)
        return Autoencoder(model, recipe.objective.autoencoder, read)
    if isinstance(model, TinyVaeModel):
        return LearnTinyVae(model, recipe.objective.tiny_vae, read)
    extras = make_extras(
        train.routing, train.align, model, device, side=data.resolution, seed=recipe.model.seed
    )
    encode = None
    column = stored_latents(data, model, store)
    if column is not None:
        bucket_step(data, store, column)
        sees = extras is not None and extras.extractor is not None
        read = read.model_copy(update={"latents": column, "pixels": read.pixels if sees else None})
    else:
        assert model.vae is not None
        encode = VaeEncoder(model.vae, device=device).encode
    text = stored_text(data, model, store, trained=recipe.trains_text)
    masks = stored_masks(data, store, factor=model.vae_factor, floor=recipe.objective.unmasked_weight)
    captions = {
        "text": text,
        "caption": text is None,
        "prompts": recipe.prompts,
        "prompts_replace": recipe.task in (*SUBJECT_TASKS, "textual-inversion"),
    }
    columns = (*(SIZES if model.is_sdxl else ()), *(() if masks is None else (masks.column,)))
    read = read.model_copy(update=_caption_changes(data, columns) | captions)
    objective = make_objective(model.scheduler, recipe.objective, device)
    modules = _trained(model, recipe.model, recipe.adapter, train, device, run)
    limit = None if recipe.adapter is None else partial(limit_norms, settings=recipe.adapter)
    if recipe.task == "distill":
        return _distillation(
            recipe.objective.distill,
            (model, objective, read, modules),
            averages=train.ema.enabled and not recipe.adapts,
            adapts=recipe.adapts,
            encode=encode,
            limit=limit,
            discriminator=partial(make_discriminator, model, device, recipe.model.seed),
        )
    made = partial(Preference, beta=recipe.objective.dpo.beta) if recipe.task == "dpo" else Diffusion
    return made(
        model,
        objective,
        read,
        modules,
        rates={part: recipe.optim.part_lr(part) for part in modules},
        noise=recipe.objective.noise,
        num_points=recipe.evaluate.timesteps,
        encode=encode,
        cache_text=recipe.task in FINE_TUNING,
        reading=None if data.reads_text_plainly else Reading.of(data),
        prior_weight=None if data.class_prompt is None else data.prior_weight,
        masks=masks,
        extras=extras,
        limit=limit,
    )


def _distillation(
    settings: DistillSettings,
    made_of: tuple[Model, Objective | FlowObjective, ReadSettings, dict[str, nn.Module]],
    *,
    averages: bool,
    discriminator: Callable[[], Discriminator],
    **more: Any,
) -> FewSteps:
    """The task distill, by its method; `averages`: there are averaged weights that LCM can learn from."""
    if settings.method == "dmd2":
        made = discriminator() if settings.gan_weight else None
        encode = more["encode"]
        return DistributionMatching(*made_of, settings, discriminator=made, cache_text=True, encode=encode)
    learns = averages and settings.target != "student"
    return Distillation(*made_of, settings, averages=learns, cache_text=True, **more)


def _caption_changes(data: DataSettings, columns: tuple[str, ...]) -> dict[str, Any]:
    """How the loader changes captions, and which columns it reads besides these."""
    return {
        "caption_dropout": data.caption_dropout,
        "shuffle_tags": data.shuffle_tags,
        "keep_tokens": data.keep_tokens,
        "keep_tokens_separator": data.keep_tokens_separator,
        "secondary_separator": data.secondary_separator,
        "tag_dropout": data.tag_dropout,
        "token_warmup": (data.token_warmup_steps, data.token_warmup_min),
        "wildcards": data.wildcards,
        "around": (data.caption_prefix, data.caption_suffix),
        "columns": (*columns, *((PROMPT, LOSS_WEIGHT) if data.sets else ())),
        "prompt_column": PROMPT if data.sets else None,
    }


def _seldom_run(model: Model, task: Task) -> list[nn.Module]:
    """The VAE where latents are read, text encoders where their states are read or kept."""
    if not isinstance(task, Diffusion):
        return []
    names = ("vae", *task.rested_text) if task.read.latents else task.rested_text
    return [model.modules[name] for name in names]


def _trained(
    model: Model,
    settings: ModelSettings,
    adapter: AdapterSettings | None,
    train: TrainSettings,
    device: torch.device,
    run: Path | None = None,
) -> dict[str, nn.Module]:
    """The parts that gradients go through, by name; what is trained of them requires gradients."""
    assert model.unet is not None
    parts: dict[str, nn.Module] = {"unet": model.unet}
    if adapter is not None:
        parts |= add_adapters(model, adapter, seed=train.seed, begun=run)
    elif settings.word is not None:
        parts |= add_word(model, settings.word)
    else:
        if settings.train_text_encoder:
            parts |= {name: m for name, m in model.modules.items() if name.startswith("text_encoder")}
        _train(*parts.values())
    if settings.base_precision is not None:
        pack_layers(model.unet, settings.base_precision)
    if train.blocks_to_swap:
        swap_blocks(model.unet, train.blocks_to_swap, device)
    for module in parts.values():
        if swap_of(module) is None:
            nn.Module.to(module, device)
    return parts


def _train(*modules: nn.Module | None) -> None:
    for module in modules:
        assert module is not None
        module.requires_grad_(True)


def _heldout(
    task: Task, data: DataSettings, store: Store, rows: Rows, count: int, device: torch.device
) -> tuple[dict[str, Tensor] | None, list[str]]:
    """The held-out rows' inputs, read once, with the mean latent instead of a drawn one; and what to note."""
    if not len(rows):
        return None, []
    alike, notes = rows_of_one_size(data, task, store, rows), []
    if len(alike) < len(rows):
        notes.append(f"held-out loss: of {len(alike)} of {len(rows)} rows, the most frequent bucket's")
    columns = dict(read_once(store, alike, count, task.read))
    if "posterior" in columns:
        columns["posterior"] = torch.zeros_like(columns["posterior"])
    return task.inputs(columns, device), notes


def _calibration(
    task: Task, store: Store, rows: Rows, side: int, device: torch.device
) -> list[dict[str, Tensor]]:
    """Training rows that the finished VAE's latents are measured on."""
    if not isinstance(task, Autoencoder):
        return []
    count = max(1, min(CALIBRATION_ROWS, CALIBRATION_VALUES // (3 * side**2)))
    columns = read_once(store, rows, count, task.read)
    inputs = task.inputs(columns, device)
    return list(micro_batches(inputs, 16))


def _sized_step(
    task: Task,
    train: TrainSettings,
    optim: OptimSettings,
    parallel: ParallelSettings,
    one_row: Callable[[], dict[str, Tensor]],
    site: _Site,
) -> tuple[Step, list[str], dict[str, bool]]:
    """The step, with the micro-batch that fits into memory; notes; what was measured that a run keeps."""
    ranks = site.ranks
    micro, why = _micro_batch(task, train, one_row, site)
    if optim.fused_backward and micro < train.global_batch:
        raise RecipeError(
            "optim.fused_backward",
            f"true, but only {micro} of {train.global_batch} pictures fit at once and gradients cannot be "
            "added up",
            mend=f"set train.global_batch={micro}",
        )
    innermost, why_layout = ranks.broadcast(
        lambda: chosen_layout(task, train, site.pinned, site.dtype, one_row, micro, sharded=ranks.sharded)
    )
    step = bare_step(
        task,
        train=train,
        optim=optim,
        micro_batch=micro,
        dtype=site.dtype,
        ranks=ranks,
        shard=parallel.shard,
        reduce=DTYPES[parallel.reduce],
        innermost=innermost,
    )
    if why.startswith(ESTIMATED) and accelerator.kind_of(site.device).own_memory and not ranks.sharded:
        if optim.fused_backward:
            why = "all at once, for optim.fused_backward"
        else:
            micro, why = try_micro_batches(step, task, train.global_batch, one_row(), ranks)
    notes = [f"micro-batch {micro} of {train.global_batch}: {why}", *filter(None, [why_layout])]
    if ranks.size > 1:
        share = train.global_batch // ranks.size
        notes.append(f"{ranks.size} processes ({parallel.mode}), {share} pictures a step each")
    return step, notes, {"channels_last": innermost} if why_layout else {}


def _micro_batch(
    task: Task, train: TrainSettings, one_row: Callable[[], dict[str, Tensor]], site: _Site
) -> tuple[int, str]:
    """How many pictures are computed at once, and why so many."""
    share, before = train.global_batch // site.ranks.size, site.pinned.micro_batch
    if train.micro_batch == "auto" and before is not None and not share % before:
        return before, "as before"
    if train.global_batch == 1:
        return 1, "one picture a step"
    if isinstance(task, LearnExtractor):
        return train.global_batch, "pictures are contrasted with all others of a batch"
    micro, why = choose_micro_batch(train, task, one_row(), site.device, share)
    return site.ranks.smallest(micro), why


def _prompts(
    known: tuple[str | SamplePrompt, ...] | None, num: int, store: Store, rows: Rows
) -> tuple[str | SamplePrompt, ...]:
    """What samples are drawn of: what the recipe says, else captions of the first of these rows."""
    if known is not None:
        return known
    first = rows.positions(np.arange(min(num, len(rows))))
    return tuple(store.take(first, ["caption"])["caption"].to_pylist())


def _captions(store: Store, rows: Rows) -> Iterator[str]:
    for start in range(0, len(rows), 8192):
        positions = rows.positions(np.arange(start, min(start + 8192, len(rows))))
        yield from store.take(positions, ["caption"])["caption"].to_pylist()


def _checkpoint_activations(module: Any) -> None:
    # diffusers' name, transformers' and its deprecated one, of which each release has at least one
    enable: Sequence[str] = (
        "enable_gradient_checkpointing",
        "activation_checkpointing_enable",
        "gradient_checkpointing_enable",
    )
    getattr(module, next(name for name in enable if hasattr(module, name)))()
