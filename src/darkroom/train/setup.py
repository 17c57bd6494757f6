"""From a recipe to a job that can be trained: everything is checked here, before any work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from darkroom import models
from darkroom.bill import format_number
from darkroom.data.loader import ReadSettings
from darkroom.data.mixing import versions_of
from darkroom.data.order import Rows
from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.hardware import accelerator
from darkroom.models.adapters.read import read_adapter
from darkroom.models.compiling import compile_blocks, compile_whole
from darkroom.models.mapped import cast_opened
from darkroom.models.model import Model
from darkroom.prepare.encoders import VaeEncoder
from darkroom.recipe.rules import FINE_TUNING, SUBJECT_TASKS, channels_last, check_batch
from darkroom.recipe.sections import TrainSettings
from darkroom.recipe.tuning import SamplePrompt
from darkroom.train.checkpoint.resume import exactness
from darkroom.train.checks import check_settings
from darkroom.train.contents import base_of, check_base, contents_of
from darkroom.train.data.feed import (
    LOSS_WEIGHT,
    PROMPT,
    Feed,
    bucket_step,
    make_feed,
    make_order,
    read_once,
    rows_an_epoch,
)
from darkroom.train.data.local_dataset import (
    class_store_path,
    gather,
    gather_class,
    has_own_store,
    open_store,
)
from darkroom.train.data.online import OpenFeed
from darkroom.train.data.precomputed import (
    prepare_own,
    stored_latents,
    stored_masks,
    stored_text,
)
from darkroom.train.data.rows import select_rows
from darkroom.train.distributed.ranks import ALONE, Ranks
from darkroom.train.jobs import Pinned, Say, TrainingSetup
from darkroom.train.memory import (
    ESTIMATED,
    choose_micro_batch,
    forget_inputs,
    rest,
    try_micro_batches,
)
from darkroom.train.model import build_model
from darkroom.train.objective import Objective, make_objective
from darkroom.train.scores import Scores
from darkroom.train.speed import flops_per_image, set_kernels
from darkroom.train.step import DTYPES, Step, choose_precision, micro_batches
from darkroom.train.tasks.autoencoder import Autoencoder
from darkroom.train.tasks.diffusion import SIZES, Diffusion, Reading, Task
from darkroom.train.tasks.distill import Distillation
from darkroom.train.tasks.extractor import ExtractorModel, LearnExtractor, build_extractor
from darkroom.train.tasks.lora import add_adapters, parameter_table
from darkroom.train.tasks.preference import Preference
from darkroom.train.tasks.repa import make_extras
from darkroom.train.tasks.textual_inversion import add_word

if TYPE_CHECKING:
    from darkroom.recipe.sections import Recipe

CALIBRATION_ROWS = 512
CALIBRATION_VALUES = 2**26
SCENES = ("{} in the snow", "{} on the beach")


def make_job(
    recipe: Recipe,
    pinned: Pinned,
    feed: Feed | OpenFeed | None = None,
    say: Say = lambda _: None,
    ranks: Ranks = ALONE,
) -> TrainingSetup:
    """Check a recipe against store, model and machine, and put together what trains it.

    Nothing is written but what a run gathers into its own `data` folder: pictures of a folder, their
    latents, pictures of the class. Raises RecipeError, StoreError, ColumnError or ModelError for what
    cannot be.
    """
    check_settings(recipe)
    check_batch(recipe, ranks.size)
    if recipe.data.encode == "online" and feed is None:
        raise RecipeError(
            "data.encode",
            "online, but there is nobody to encode",
            mend="train with --engine ray, or set data.encode=inline",
        )
    if has_own_store(recipe) and pinned.version is None:
        ranks.in_turn(lambda: gather(recipe, pinned.run, say))
    store = open_store(recipe, pinned.run, pinned.version)
    train_rows, held_rows = select_rows(store, recipe)
    _check_pinned(store, pinned)
    contents = ranks.tell(lambda: contents_of(store, pinned.contents))
    device = _device(recipe, ranks)
    set_kernels(recipe.train, device)
    precision, why = choose_precision(recipe.train.precision, device)
    notes = [f"precision {precision}: {why}"]
    model = (
        build_extractor(recipe, store, train_rows)
        if recipe.task == "extractor"
        else build_model(recipe, lambda: _captions(store, train_rows), pinned.run)
    )
    base = base_of(recipe, model)
    check_base(base, pinned.base, recipe)
    if frozen_unet(recipe) and model.unet is not None:
        cast_opened(model.unet, models.precision(precision))  # never trained: no float32 copy is needed
    stores = _made_ready(recipe, model, store, pinned, precision, say, ranks)
    _move(model, device)
    task = make_task(recipe, model, store, device)
    base |= _seen_by(task)
    if recipe.adapter is not None and recipe.adapter.start is not None:
        base["adapter"] = read_adapter(recipe.adapter.start).sha256[:16]
    check_base(base, pinned.base, recipe)
    if device.type != "cpu":
        halve_text(recipe, model, models.precision(precision))
    rest(_seldom_run(model, task), pinned.run)
    if recipe.task in FINE_TUNING:
        trained, total = parameter_table(task.modules)
        notes.append(
            f"{trained:,} of {total:,} parameters are trained ({format_number(100 * trained / total, 2)} %)"
        )
    heldout = _heldout(recipe, task, store, held_rows, device)
    calibration = _calibration(recipe, task, store, train_rows, device)
    one_row = partial(_one_row, task, store, train_rows, device)
    micro, told = _micro_batch(recipe, task, store, train_rows, device, pinned, ranks)
    step = bare_step(task, recipe, micro, models.precision(precision), ranks)
    if told.startswith(ESTIMATED) and accelerator.kind_of(device).own_memory and not ranks.sharded:
        micro, told = try_micro_batches(step, task, recipe, one_row(), ranks)
    notes.append(f"micro-batch {micro} of {recipe.train.global_batch}: {told}")
    if ranks.size > 1:
        share = recipe.train.global_batch // ranks.size
        notes.append(f"{ranks.size} processes ({recipe.parallel.mode}), {share} pictures a step each")
    order = make_order(recipe, task, store, train_rows)
    foreign = feed is not None and not isinstance(feed, OpenFeed)
    if isinstance(feed, OpenFeed):
        online = recipe.data.encode == "online"
        feed = feed.bound(recipe, task, stores, order, device, ranks) if online else None
    flops = None
    if ranks.sharded and device.type != "cpu":  # cut weights cannot be counted with
        flops = flops_per_image(task, one_row())
    return TrainingSetup(
        recipe=recipe,
        task=task,
        step=step,
        feed=feed or make_feed(recipe, task, stores, order, device, ranks),
        rows_of=None if foreign else lambda k: order.batch(k).positions_B.tolist(),
        flops=flops,
        device=device,
        rows=rows_an_epoch(recipe, store, train_rows),
        environment=exactness(device, precision, micro, ranks),
        store={"version": versions_of(store), "rows": store.num_rows, "contents": contents},
        base=base,
        heldout=heldout,
        scores=_scores(recipe, task, store, held_rows, device, ranks),
        calibration=calibration,
        prompts=_prompts(recipe, store, held_rows if len(held_rows) else train_rows),
        notes=notes,
        ranks=ranks,
    )


def frozen_unet(recipe: Recipe) -> bool:
    """Whether the U-Net's own weights stay as they are."""
    return recipe.adapts or recipe.task == "textual-inversion"


def _made_ready(
    recipe: Recipe, model: Model, store: Store, pinned: Pinned, precision: str, say: Say, ranks: Ranks
) -> list[Store]:
    """The run's store and that of the class; class pictures drawn, latents made of a run's own, if read.

    Of a model whose parts are not on the device yet, for latents alone the VAE goes there.
    """
    stores, makes, column = [store], has_own_store(recipe) and recipe.data.caches_latents, None
    if recipe.data.class_prompt is not None:
        if not makes:
            column = stored_latents(recipe, model, store)
        if ranks.tell(lambda: not class_store_path(pinned.run).exists() or pinned.version is None):
            dtype = models.precision(precision)
            _move(model, _device(recipe, ranks))
            ranks.in_turn(lambda: gather_class(recipe, model, pinned.run, dtype, say))
        stores.append(Store.open(class_store_path(pinned.run)))
    if recipe.task == "dpo":
        stores.append(Store.open(class_store_path(pinned.run)))
    own = stores if makes else stores[1:] if column else []
    if own:
        ranks.in_turn(lambda: prepare_own(recipe, model, own, _device(recipe, ranks), say))
        for one in own:
            one.refresh()
    return stores


def _move(model: Model, device: torch.device) -> None:
    for module in model.modules.values():
        nn.Module.to(module, device)  # diffusers' own `to` warns of nothing


def halve_text(recipe: Recipe, model: Model, dtype: torch.dtype) -> None:
    """Cast an adapter's frozen text encoders to the U-Net's precision: 1.6 GB less of SDXL's on the card.

    Call it when the task is made: a store's column is known by the identity of float32 weights.
    """
    if recipe.adapts and recipe.adapter is not None and not recipe.adapter.text_encoder:
        for encoder in model.text_encoders:
            nn.Module.to(encoder, dtype)


def _one_row(task: Task, store: Store, rows: Rows, device: torch.device) -> dict[str, torch.Tensor]:
    """The inputs of one picture, to try a step with."""
    return task.inputs(read_once(store, rows, 1, task.read), device)


def _device(recipe: Recipe, ranks: Ranks) -> torch.device:
    """The recipe's device; of several ranks each has the GPU of its number."""
    device = models.device(recipe.train.device)
    if ranks.size > 1 and device.type != "cpu":
        return torch.device(device.type, ranks.local_rank)
    return device


def bare_step(task: Task, recipe: Recipe, micro_batch: int, dtype: torch.dtype, ranks: Ranks = ALONE) -> Step:
    """The step of a task without the loop around it, as `measure` times it and `plan` counts it."""
    train, device = recipe.train, next(next(iter(task.modules.values())).parameters()).device
    innermost = channels_last(train.channels_last, device.type, sharded=ranks.sharded)
    for module in task.modules.values():
        module.train()
        if innermost:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if train.gradient_checkpointing:
            _checkpoint_activations(module)
        forget_inputs(module)
    _compile(task, train)
    return Step(
        task,
        task.modules,
        train=train,
        optim=recipe.optim,
        micro_batch=micro_batch,
        dtype=dtype,
        rates=task.rates,
        rows_a_picture=task.rows_a_picture,
        ranks=ranks,
        shard=recipe.parallel.shard,
        reduce=DTYPES[recipe.parallel.reduce],
    )


def _compile(task: Task, settings: TrainSettings) -> None:
    """Compile what most of a step's work is in: the U-Net, transformer or VAE, as the recipe says."""
    if settings.compile == "none":
        return
    denoiser = task.modules.get("unet", next(iter(task.modules.values())))
    compile_blocks(denoiser) if settings.compile == "blocks" else compile_whole(denoiser)


def _check_pinned(store: Store, pinned: Pinned) -> None:
    if pinned.rows is not None and store.num_rows != pinned.rows:
        raise RecipeError(
            "data.store",
            f"'{store.path}' has {store.num_rows} rows at version {store.version}, not {pinned.rows}",
            mend="it is not the store that this run was started with",
        )


# ---- what is put together


def make_task(recipe: Recipe, model: Model, store: Store, device: torch.device) -> Task:
    """The task of a recipe. Parts that no gradient goes through stay in float32."""
    if isinstance(model, ExtractorModel):
        return LearnExtractor(model, recipe)
    data = recipe.data
    pixels = ReadSettings(
        pixels=data.resolution,
        crop=data.crop,
        flip=data.flip,
        seed=recipe.train.seed,
        latent_channels=model.latent_channels,
        latent_factor=model.vae_factor,
    )
    for module in model.modules.values():
        module.requires_grad_(False)
    if recipe.task == "autoencoder":
        _train(model.vae)
        return Autoencoder(model, recipe.objective.autoencoder, pixels)
    read = pixels.model_copy(update={"caption_dropout": data.caption_dropout})
    encode = None
    extras = make_extras(recipe, model, device)
    sees = extras is not None and extras.extractor is not None
    column = stored_latents(recipe, model, store)
    if column is not None:
        bucket_step(recipe, store, column)
        read = read.model_copy(update={"latents": column, "pixels": read.pixels if sees else None})
    else:
        assert model.vae is not None
        encode = VaeEncoder(model.vae, device=device).encode
    text = stored_text(recipe, model, store)
    masks = stored_masks(recipe, model, store)
    read = read.model_copy(
        update={
            "text": text,
            "caption": text is None,
            "prompts": _captions_of(recipe),
            "prompts_replace": recipe.task in (*SUBJECT_TASKS, "textual-inversion"),
            "shuffle_tags": data.shuffle_tags,
            "keep_tokens": data.keep_tokens,
            "tag_dropout": data.tag_dropout,
            "token_warmup": (data.token_warmup_steps, data.token_warmup_min),
            "wildcards": data.wildcards,
            "around": (data.caption_prefix, data.caption_suffix),
            "columns": (
                *(SIZES if model.is_sdxl else ()),
                *(() if masks is None else (masks.column,)),
                *((PROMPT, LOSS_WEIGHT) if data.sets else ()),
            ),
            "prompt_column": PROMPT if data.sets else None,
        }
    )
    objective = make_objective(model.scheduler, recipe.objective, device)
    modules = _trained(recipe, model, device)
    if recipe.task == "distill":
        assert isinstance(objective, Objective)
        return Distillation(
            model,
            objective,
            read,
            modules,
            recipe.objective.distill,
            adapts=recipe.adapts,
            encode=encode,
            cache_text=True,
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
    )


def _seen_by(task: Task) -> dict[str, str]:
    """The fingerprint of the extractor that a transformer is aligned with, where there is one."""
    extractor = task.extractor if isinstance(task, Diffusion) else None
    return {} if extractor is None else {"extractor": extractor.sha256[:16]}


def _seldom_run(model: Model, task: Task) -> list[nn.Module]:
    """The VAE where latents are read, text encoders where their states are read or kept."""
    if not isinstance(task, Diffusion):
        return []
    names = ("vae", *task.rested_text) if task.read.latents else task.rested_text
    return [model.modules[name] for name in names]


def _trained(recipe: Recipe, model: Model, device: torch.device) -> dict[str, nn.Module]:
    """The parts that gradients go through, by name; what is trained of them requires gradients."""
    assert model.unet is not None
    parts: dict[str, nn.Module] = {"unet": model.unet}
    if recipe.adapts:
        assert recipe.adapter is not None
        parts |= add_adapters(model, recipe.adapter, seed=recipe.train.seed)
    elif recipe.task == "textual-inversion":
        assert recipe.model.word is not None
        parts |= add_word(model, recipe.model.word)
    else:
        if recipe.model.train_text_encoder:
            parts |= {name: m for name, m in model.modules.items() if name.startswith("text_encoder")}
        _train(*parts.values())
    for module in parts.values():
        nn.Module.to(module, device)
    return parts


def _train(*modules: nn.Module | None) -> None:
    for module in modules:
        assert module is not None
        module.requires_grad_(True)


def _heldout(
    recipe: Recipe, task: Task, store: Store, rows: Rows, device: torch.device
) -> dict[str, Tensor] | None:
    """The held-out rows' inputs, read once, with the mean latent instead of a drawn one."""
    if not len(rows):
        return None
    columns = dict(read_once(store, rows, recipe.evaluate.rows, task.read))
    if "posterior" in columns:
        columns["posterior"] = torch.zeros_like(columns["posterior"])
    return task.inputs(columns, device)


def _scores(
    recipe: Recipe, task: Task, store: Store, held: Rows, device: torch.device, ranks: Ranks
) -> Scores | None:
    """What scores drawn pictures, where it is asked for, on the ranks that draw."""
    if not recipe.evaluate.every_images or not (ranks.first or ranks.sharded):
        return None
    return Scores(recipe, task.read, store, held, device)


def _calibration(
    recipe: Recipe, task: Task, store: Store, rows: Rows, device: torch.device
) -> list[dict[str, Tensor]]:
    """Training rows that the finished VAE's latents are measured on."""
    if not isinstance(task, Autoencoder):
        return []
    count = max(1, min(CALIBRATION_ROWS, CALIBRATION_VALUES // (3 * recipe.data.resolution**2)))
    columns = read_once(store, rows, count, task.read)
    inputs = task.inputs(columns, device)
    return list(micro_batches(inputs, 16))


def _micro_batch(
    recipe: Recipe, task: Task, store: Store, rows: Rows, device: torch.device, pinned: Pinned, ranks: Ranks
) -> tuple[int, str]:
    settings: TrainSettings = recipe.train
    share = settings.global_batch // ranks.size
    if settings.micro_batch == "auto" and pinned.micro_batch is not None and not share % pinned.micro_batch:
        return pinned.micro_batch, "as before"
    if settings.global_batch == 1:
        return 1, "one picture a step"
    if recipe.task == "extractor":
        return settings.global_batch, "pictures are told from all others of a batch"
    inputs = _one_row(task, store, rows, device)
    micro, why = choose_micro_batch(settings, task, inputs, device, share)
    micro = ranks.smallest(micro)
    if recipe.optim.fused_backward and micro < settings.global_batch:
        raise RecipeError(
            "optim.fused_backward",
            f"true, but only {micro} of {settings.global_batch} pictures fit at once and gradients cannot be "
            "added up",
            mend=f"set train.global_batch={micro}",
        )
    return micro, why


def _captions_of(recipe: Recipe) -> tuple[str, ...]:
    """What is said of pictures by the recipe itself."""
    if recipe.model.word is not None:
        return recipe.data.prompts or recipe.model.word.prompts
    return recipe.data.prompts


def known_prompts(recipe: Recipe) -> tuple[str | SamplePrompt, ...] | None:
    """What samples are drawn of, as far as the recipe alone says it; None: of pictures' captions."""
    settings = recipe.sample
    if recipe.task == "extractor":
        return ()
    if settings.prompts or not settings.every or recipe.task == "autoencoder":
        return settings.prompts
    if said := _captions_of(recipe):
        scenes = tuple(scene.format(said[0]) for scene in SCENES)
        return (said[0], *scenes, *filter(None, [recipe.data.class_prompt]))
    return None


def _prompts(recipe: Recipe, store: Store, rows: Rows) -> tuple[str | SamplePrompt, ...]:
    known = known_prompts(recipe)
    if known is not None:
        return known
    first = rows.positions(np.arange(min(recipe.sample.num, len(rows))))
    return tuple(store.take(first, ["caption"])["caption"].to_pylist())


def _captions(store: Store, rows: Rows) -> Iterator[str]:
    for start in range(0, len(rows), 8192):
        positions = rows.positions(np.arange(start, min(start + 8192, len(rows))))
        yield from store.take(positions, ["caption"])["caption"].to_pylist()


def _checkpoint_activations(module: Any) -> None:
    enable: Sequence[str] = ("enable_gradient_checkpointing", "gradient_checkpointing_enable")
    getattr(module, next(name for name in enable if hasattr(module, name)))()
