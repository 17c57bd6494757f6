"""From a recipe to a job that can be trained: everything is checked here, before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import darkroom
from darkroom import hardware, models
from darkroom.data import Store
from darkroom.data.loader import Loader, ReadSettings
from darkroom.data.order import BucketOrder, Order, OrderSettings, Rows, SampleOrder
from darkroom.data.pictures import buckets, nearest_bucket
from darkroom.errors import RecipeError
from darkroom.models import Model
from darkroom.prepare import TextEncoder, VaeEncoder, latents_column, text_column
from darkroom.train.build import build_model, size_unit
from darkroom.train.micro import check_micro_batch, choose_micro_batch
from darkroom.train.objective import Objective
from darkroom.train.step import Step, TrainSettings, choose_precision, micro_batches
from darkroom.train.tasks import Autoencoder, Columns, Pretrain, Task
from darkroom.train.tracking import check_tracker

if TYPE_CHECKING:
    from darkroom.recipe import Recipe

Say = Callable[[str], None]
Feed = Callable[[int], AbstractContextManager[Iterator[Columns]]]
"""Opens the stream of global batches from step k on."""

CALIBRATION_ROWS = 512
CALIBRATION_VALUES = 2**26
HELDOUT_SEED = 0


@dataclass(frozen=True)
class Job:
    """A checked recipe with everything that training it needs."""

    recipe: Recipe
    task: Task
    step: Step
    feed: Feed
    device: torch.device
    rows: int  # pictures trained on
    environment: Mapping[str, Any]  # what bit-exactness depends on
    store: Mapping[str, Any]  # version and rows, which the run pins
    heldout: dict[str, Tensor] | None
    calibration: list[dict[str, Tensor]]
    prompts: tuple[str, ...]
    notes: list[str]  # what was derived, and why


@dataclass(frozen=True)
class Pinned:
    """What a run that goes on has settled before."""

    run: Path
    version: int | None = None
    rows: int | None = None
    micro_batch: int | None = None


def make_job(recipe: Recipe, pinned: Pinned, feed: Feed | None = None) -> Job:
    """Check a recipe against store, model and machine, and put together what trains it.

    Nothing is written. Raises RecipeError, StoreError, ColumnError or ModelError for what cannot be.
    """
    check_settings(recipe)
    store = Store.open(recipe.data.store, version=pinned.version)
    train_rows, held_rows = select_rows(store, recipe)
    _check_pinned(store, pinned)
    device = models.device(recipe.train.device)
    precision, why = choose_precision(recipe.train.precision, device, hardware.machine().instructions)
    notes = [f"precision {precision}: {why}"]
    model = build_model(recipe, lambda: _captions(store, train_rows), pinned.run)
    for module in model.modules.values():
        nn.Module.to(module, device)  # diffusers' own `to` warns of nothing
    task = make_task(recipe, model, store, device)
    heldout = _heldout(recipe, task, store, held_rows, device)
    calibration = _calibration(recipe, task, store, train_rows, device)
    micro, told = _micro_batch(recipe, task, store, train_rows, device, pinned)
    notes.append(f"micro-batch {micro} of {recipe.train.global_batch}: {told}")
    return Job(
        recipe=recipe,
        task=task,
        step=bare_step(task, recipe, micro, models.precision(precision)),
        feed=feed or _feed(recipe, task, store, train_rows, device),
        device=device,
        rows=len(train_rows),
        environment=exactness(device, precision, micro),
        store={"version": store.version, "rows": store.num_rows},
        heldout=heldout,
        calibration=calibration,
        prompts=_prompts(recipe, store, held_rows if len(held_rows) else train_rows),
        notes=notes,
    )


def bare_step(task: Task, recipe: Recipe, micro_batch: int, dtype: torch.dtype) -> Step:
    """The step of a task without the loop around it, as `measure` times it and `plan` counts it."""
    train, device = recipe.train, next(next(iter(task.modules.values())).parameters()).device
    fast = device.type == "cuda" if train.channels_last == "auto" else train.channels_last
    for module in task.modules.values():
        module.train()
        if fast:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if train.gradient_checkpointing:
            _checkpoint_activations(module)
    return Step(
        task,
        task.modules,
        train=train,
        optim=recipe.optim,
        micro_batch=micro_batch,
        dtype=dtype,
        rates=task.rates,
    )


# ---- what is checked


def check_settings(recipe: Recipe) -> None:
    """Raise RecipeError for settings that contradict each other, whatever the store and the model."""
    train, optim, data = recipe.train, recipe.optim, recipe.data
    check_micro_batch(train)
    check_tracker(recipe.track)
    if optim.warmup_steps > train.steps:
        raise RecipeError(
            "optim.warmup_steps", f"{optim.warmup_steps} is more than train.steps {train.steps}"
        )
    if train.ema.start_step >= train.steps and train.ema.enabled:
        raise RecipeError(
            "train.ema.start_step",
            f"{train.ema.start_step} is not before the end ({train.steps} steps)",
            mend="start earlier, or set train.ema.enabled=false",
        )
    if recipe.task == "autoencoder":
        _check_autoencoder(recipe)
    elif data.encode == "stored" and (data.flip or data.crop == "random"):
        named = "flip" if data.flip else "crop"
        raise RecipeError(
            f"data.{named}",
            f"{getattr(data, named)}, but prepared latents are of pictures as they are, cut at the centre",
            mend="set data.encode=inline",
        )
    if recipe.model.train_text_encoder and data.text == "stored":
        raise RecipeError(
            "data.text",
            "stored, but a text encoder that is trained cannot be read from a column",
            mend="set data.text=inline",
        )


def _check_autoencoder(recipe: Recipe) -> None:
    if recipe.model.train_text_encoder:
        raise RecipeError("model.train_text_encoder", "true, but the task autoencoder trains the VAE alone")
    if isinstance(recipe.model.vae, str):
        raise RecipeError(
            "model.vae",
            f"'{recipe.model.vae}', but the VAE is what is trained",
            mend="give the folder as model.base to go on from it, or changes to the family's VAE here",
        )
    if recipe.data.buckets:
        raise RecipeError("data.buckets", "true", allowed="false with the task autoencoder")


def _check_pinned(store: Store, pinned: Pinned) -> None:
    if pinned.rows is not None and store.num_rows != pinned.rows:
        raise RecipeError(
            "data.store",
            f"'{store.path}' has {store.num_rows} rows at version {store.version}, not {pinned.rows}",
            mend="it is not the store that this run was started with",
        )


def select_rows(store: Store, recipe: Recipe) -> tuple[Rows, Rows]:
    """The rows that are trained on, and those held out."""
    data = recipe.data
    rows = Rows.of(store.num_rows if data.filter is None else store.select(data.filter))
    if not len(rows):
        what = f"no row of {store.num_rows} matches '{data.filter}'" if data.filter else "the store is empty"
        raise RecipeError("data.filter" if data.filter else "data.store", what)
    if data.holdout >= 1 and data.holdout != int(data.holdout):
        raise RecipeError("data.holdout", f"{data.holdout}", allowed="a share below 1, or a whole number")
    if data.holdout * 2 > len(rows) or 0.5 < data.holdout < 1:
        raise RecipeError(
            "data.holdout", f"{data.holdout:g} of {len(rows)} rows", allowed="at most half of the rows"
        )
    return rows.split(data.holdout if data.holdout < 1 else int(data.holdout))


# ---- what is put together


def make_task(recipe: Recipe, model: Model, store: Store, device: torch.device) -> Task:
    """The task of a recipe; its frozen parts stay in float32."""
    data, settings = recipe.data, recipe.model
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
    if data.encode == "stored":
        column = latents_column(store, data.resolution, models.identity(_vae(model)))
        _bucket_step(recipe, store, column)
        read = read.model_copy(update={"latents": column, "pixels": None})
    else:
        encode = VaeEncoder(_vae(model), device=device).encode
    text = _text_column(recipe, model, store)
    read = read.model_copy(update={"text": text, "caption": text is None})
    _train(model.unet, *(model.text_encoders if settings.train_text_encoder else ()))
    objective = Objective.from_config(model.scheduler, recipe.objective.min_snr_gamma, device)
    return Pretrain(
        model,
        objective,
        read,
        train_text_encoder=settings.train_text_encoder,
        text_encoder_lr=recipe.optim.text_encoder_lr,
        noise_offset=recipe.objective.noise.offset,
        num_points=recipe.evaluate.timesteps,
        encode=encode,
    )


def _train(*modules: nn.Module | None) -> None:
    for module in modules:
        assert module is not None
        module.requires_grad_(True)


def _vae(model: Model) -> nn.Module:
    vae: nn.Module | None = model.vae
    assert vae is not None
    return vae


def _text_column(recipe: Recipe, model: Model, store: Store) -> str | None:
    """The prepared text column to read, or None to encode captions at each step."""
    asked = recipe.data.text
    if recipe.model.train_text_encoder or asked == "inline":
        return None
    made = [meta for meta in store.columns().values() if meta.get("darkroom.kind") == "text"]
    if asked == "auto" and not made:
        return None
    identity = TextEncoder(model.text_encoders, model.tokenizers).identity
    if asked == "auto" and all(meta.get("darkroom.encoder") != identity for meta in made):
        return None  # what is there is another model's
    column: str = text_column(store, identity)
    return column


def _bucket_step(recipe: Recipe, store: Store, column: str) -> int:
    """What the sides of a prepared column's pictures are multiples of; 0 where they are squares.

    RecipeError where the recipe asks for the other kind.
    """
    crop = store.columns()[column].get("darkroom.crop", "centre")
    step = int(crop.removeprefix("buckets-")) if crop.startswith("buckets-") else 0
    if recipe.data.buckets != bool(step):
        made = f"buckets of {step} pixels" if step else "squares"
        raise RecipeError(
            "data.buckets",
            f"{str(recipe.data.buckets).lower()}, but {column} was prepared in {made}",
            mend=f"set data.buckets={str(bool(step)).lower()}, or encode=inline",
        )
    return step


def _order(recipe: Recipe, task: Task, store: Store, rows: Rows) -> SampleOrder:
    train, data, column = recipe.train, recipe.data, task.read.latents
    if not data.buckets:
        return Order(rows, seed=train.seed, global_batch=train.global_batch)
    positions = rows.positions(np.arange(len(rows)))
    sizes = store.take(positions, ["width", "height"])
    step = _bucket_step(recipe, store, column) if column else _inline_step(data.resolution, task.model)
    allowed = buckets(data.resolution, step=step)
    chosen: dict[tuple[int, int], list[int]] = {}
    pairs = zip(sizes["width"].to_pylist(), sizes["height"].to_pylist(), strict=True)
    for position, (width, height) in zip(positions.tolist(), pairs, strict=True):
        chosen.setdefault(nearest_bucket(width, height, allowed), []).append(position)
    by_size = {size: np.array(listed, dtype=np.int64) for size, listed in chosen.items()}
    return BucketOrder(by_size, seed=train.seed, global_batch=train.global_batch)


def _inline_step(resolution: int, model: Model) -> int:
    """Bucket sides as the SDXL trainers have them; small models take what their levels allow."""
    return 64 if resolution >= 256 else size_unit(model)


def _feed(recipe: Recipe, task: Task, store: Store, rows: Rows, device: torch.device) -> Feed:
    order = _order(recipe, task, store, rows)

    @contextmanager
    def feed(k: int) -> Iterator[Iterator[Columns]]:
        data = recipe.data
        with Loader(
            store,
            order,
            read=task.read,
            start=k,
            end=recipe.train.steps,
            workers=data.workers,
            ahead=data.ahead,
            pin_memory=device.type == "cuda",
        ) as loader:
            yield (batch.columns for batch in loader)

    return feed


def _read_once(store: Store, rows: Rows, count: int, read: ReadSettings) -> Columns:
    """`count` rows spread evenly, the same each time: centre cut, no flip, no dropped caption."""
    index = np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(np.int64))
    still = OrderSettings(shuffle=False)
    order = Order(rows.positions(index), seed=HELDOUT_SEED, global_batch=len(index), settings=still)
    plain = {"crop": "centre", "flip": False, "caption_dropout": 0.0, "seed": HELDOUT_SEED}
    with Loader(store, order, read=read.model_copy(update=plain), end=1) as loader:
        return next(loader).columns


def _heldout(
    recipe: Recipe, task: Task, store: Store, rows: Rows, device: torch.device
) -> dict[str, Tensor] | None:
    """The held-out rows' inputs, read once, with the mean latent instead of a drawn one."""
    if not len(rows):
        return None
    columns = dict(_read_once(store, rows, recipe.evaluate.rows, task.read))
    columns["posterior"] = torch.zeros_like(columns["posterior"])
    return task.inputs(columns, device)


def _calibration(
    recipe: Recipe, task: Task, store: Store, rows: Rows, device: torch.device
) -> list[dict[str, Tensor]]:
    """Training rows that the finished VAE's latents are measured on."""
    if not isinstance(task, Autoencoder):
        return []
    count = max(1, min(CALIBRATION_ROWS, CALIBRATION_VALUES // (3 * recipe.data.resolution**2)))
    columns = _read_once(store, rows, count, task.read)
    inputs = task.inputs(columns, device)
    return list(micro_batches(inputs, 16))


def _micro_batch(
    recipe: Recipe, task: Task, store: Store, rows: Rows, device: torch.device, pinned: Pinned
) -> tuple[int, str]:
    settings: TrainSettings = recipe.train
    if settings.micro_batch == "auto" and pinned.micro_batch is not None:
        return pinned.micro_batch, "as before"
    inputs = task.inputs(_read_once(store, rows, 1, task.read), device)
    return choose_micro_batch(settings, task, inputs, device)


def _prompts(recipe: Recipe, store: Store, rows: Rows) -> tuple[str, ...]:
    settings = recipe.sample
    if settings.prompts or not settings.every or recipe.task == "autoencoder":
        return settings.prompts
    first = rows.positions(np.arange(min(settings.num, len(rows))))
    return tuple(store.take(first, ["caption"])["caption"].to_pylist())


def _captions(store: Store, rows: Rows) -> Iterator[str]:
    for start in range(0, len(rows), 8192):
        positions = rows.positions(np.arange(start, min(start + 8192, len(rows))))
        yield from store.take(positions, ["caption"])["caption"].to_pylist()


def _checkpoint_activations(module: Any) -> None:
    enable: Sequence[str] = ("enable_gradient_checkpointing", "gradient_checkpointing_enable")
    getattr(module, next(name for name in enable if hasattr(module, name)))()


def exactness(device: torch.device, precision: str, micro_batch: int) -> dict[str, Any]:
    """What decides the last bits of every number, to be compared when a run goes on."""
    versions = hardware.versions(("torch", "diffusers", "transformers", "numpy"))
    here = hardware.machine()
    return {
        "darkroom": darkroom.__version__,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "micro_batch": micro_batch,
        "device": here.devices[device.index or 0].name if device.type == "cuda" else here.cpu,
        **versions,
    }
