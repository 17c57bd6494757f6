"""The profile of a recipe's training step: the very `train.step`, built without weights or a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from darkroom import models
from darkroom.count import Counter
from darkroom.errors import ModelError, RecipeError
from darkroom.models import FAMILIES, PARTS, PUBLISHED, Model
from darkroom.models.folder import denoiser_class, denoiser_of
from darkroom.models.model import numbered
from darkroom.plan.adapter import safetensors_bytes
from darkroom.plan.counting import (
    as_on_gpu,
    fakes,
    moments_of,
    profile_of,
    size_bytes,
    tag_weights,
    tensors,
    trace_training,
)
from darkroom.plan.profile import Moment, Profile
from darkroom.prepare.encoders import encode_moments
from darkroom.train import build, job
from darkroom.train.defaults import ADAPTER_TASKS
from darkroom.train.extras import AlignSettings
from darkroom.train.gather import has_own_store
from darkroom.train.objective import scheduler_config
from darkroom.train.sharing import blocks_of
from darkroom.train.stored import PREPARED_PIXELS, caches_latents
from darkroom.train.tasks import ENCODED_PIXELS
from darkroom.train.weights import cast

if TYPE_CHECKING:
    from darkroom.recipe import Recipe

CPU = torch.device("cpu")


def profile_recipe(recipe: Recipe, precision: str, *, gpu: bool) -> Profile:
    """Count a recipe's step in a precision (float32, bf16, fp16), as a GPU or a CPU computes it."""
    model = outline(recipe)
    if recipe.model.word is not None:
        _fill_tokenizers(model)
    quiet = _without_store(recipe)
    dtype = models.precision(precision)
    with fakes(*model.modules.values()) as counter:
        if recipe.task in job.FROZEN_UNET and model.unet is not None:
            cast(model.unet, dtype)
        before = _own_latents(counter, recipe, model)
        # The store is never looked into where everything is encoded inline.
        task = job.make_task(quiet, model, _NoStore(), CPU)  # type: ignore[arg-type]
        if not encodes(recipe) and recipe.task != "autoencoder" and hasattr(task, "_encode"):
            task._encode = None
        held = {**model.modules, **task.modules}  # the job keeps all its parts on the device
        step = job.bare_step(task, recipe, 1, dtype)
        if gpu:
            as_on_gpu(model.modules.values())
        tag_weights(counter, held.values())
        columns = _columns(recipe, model, task)
        task.inputs(counter.fake(columns(1)), CPU)  # captions whose states are kept are encoded once
        traces = trace_training(counter, step, task, columns, rows=(2, 3))
        parameters = {name: sum(p.numel() for p in module.parameters()) for name, module in held.items()}
        masters = step.weights.masters
        counted = profile_of(
            traces,
            (2, 3),
            parameters=parameters,
            trained=sum(master.numel() for master in masters.values()),
            chunks=_chunks(recipe),
            facts=_facts(recipe, model, task.modules.values(), step),
        )
    return replace(counted, moments=(*counted.moments, *before))


def _chunks(recipe: Recipe) -> dict[str, int]:
    """Pictures that are encoded at once: at each step, or before the first one."""
    if makes_latents(recipe):
        return {"latents": max(1, PREPARED_PIXELS // recipe.data.resolution**2)}
    return {"inputs": max(1, ENCODED_PIXELS // recipe.data.resolution**2)} if encodes(recipe) else {}


def makes_latents(recipe: Recipe) -> bool:
    """Whether the run makes latents of its own pictures before it trains."""
    return recipe.task != "autoencoder" and has_own_store(recipe) and caches_latents(recipe)


def _own_latents(counter: Counter, recipe: Recipe, model: Model) -> tuple[Moment, ...]:
    """What is alive while a run makes its own latents: all parts are on the device, nothing trains yet."""
    if not makes_latents(recipe):
        return ()
    side, traces = recipe.data.resolution, []
    tag_weights(counter, model.modules.values())
    for rows in (2, 3):
        counter.stage = "latents"
        pixels = torch.empty(rows, 3, side, side, dtype=torch.uint8, device="meta")
        given = counter.fake_tensor(pixels)
        traces.append(counter.start_trace())
        encode_moments(model.vae, given)
        counter.stage, counter.trace = "", None
    return moments_of((traces[0], traces[1]), (2, 3))


def _fill_tokenizers(model: Model) -> None:
    """As many words as the text encoders have: a new one takes the row after the last."""
    for tokenizer, config in zip(model.tokenizers, text_configs(model), strict=True):
        tokenizer.add_tokens([f"<filled-{i}>" for i in range(len(tokenizer), config.vocab_size)])


class _NoStore:
    """A store without prepared columns."""

    def columns(self) -> dict[str, Any]:
        return {}


def _without_store(recipe: Recipe) -> Recipe:
    changes = {"encode": "inline", "text": "inline", "buckets": False, "mask": None}
    train = recipe.train.model_copy(update={"align": AlignSettings()})  # its extractor is not opened
    quiet = recipe.model_copy(update={"data": recipe.data.model_copy(update=changes), "train": train})
    word = recipe.model.word
    if word is None:
        return quiet
    plain = word.model_copy(update={"initial": "a"})  # one token of any tokenizer, also of the stand-in
    return quiet.model_copy(update={"model": recipe.model.model_copy(update={"word": plain})})


def encodes(recipe: Recipe) -> bool:
    """Whether pictures are encoded at each step."""
    data = recipe.data
    if recipe.task == "autoencoder" or data.encode == "stored":
        return False
    return data.encode == "inline" or not caches_latents(recipe)


def _reads_text(recipe: Recipe, task: Any) -> bool:
    """Whether the text's states come from a column; 'auto' takes one where the latents are prepared too."""
    data = recipe.data
    if recipe.task == "autoencoder" or getattr(task, "_trains_text", False):
        return False
    return data.text == "stored" or (data.text == "auto" and data.encode == "stored")


def _facts(recipe: Recipe, model: Model, modules: Collection[Any], step: Any) -> dict[str, Any]:
    masters = step.weights.masters
    trained = sum(master.numel() for master in masters.values())
    averaged = trained if recipe.train.ema.enabled else 0
    states = [tensor for inner in step.optimiser.inner for tensor in tensors(inner.state)]
    factor, channels = model.vae_factor, model.latent_channels
    side = recipe.data.resolution // factor
    text = [(c.max_position_embeddings, c.hidden_size) for c in text_configs(model)]
    return {
        "resolution": recipe.data.resolution,
        "encodes_inline": encodes(recipe),
        "masters_apart": _masters_apart(step.weights),
        "computing_bytes": sum(_trained_bytes(module) for module in modules),
        "block_bytes": max(
            (_trained_bytes(block) for module in modules for block in blocks_of(module)), default=0
        ),
        # weights and average in float32, and the optimiser's own state
        "checkpoint_bytes": 4 * (trained + averaged) + sum(map(size_bytes, states)),
        **({"adapter_bytes": _adapter_bytes(masters)} if recipe.task in ADAPTER_TASKS else {}),
        "latent_bytes_a_row": 2 * 2 * channels * side * side,
        "text_bytes_a_row": sum(2 * length * width for length, width in text),
    }


def _trained_bytes(module: Any) -> int:
    return sum(size_bytes(param) for param in module.parameters() if param.requires_grad)


def _adapter_bytes(masters: Mapping[str, Any]) -> int:
    """Size of the file that an adapter's weights are written to."""
    return safetensors_bytes(
        {name.replace(".default", ""): tuple(master.shape) for name, master in masters.items()}
    )


def _masters_apart(weights: Any) -> bool:
    """Whether the step computes with weights of their own, beside the float32 ones that it trains."""
    computing = {id(param) for param in weights.computing.values()}
    return not any(id(master) in computing for master in weights.masters.values())


def _columns(recipe: Recipe, model: Model, task: Any) -> Callable[[int], Mapping[str, Any]]:
    """What the loader would give of so many pictures."""
    side = recipe.data.resolution
    latent = (model.latent_channels, side // model.vae_factor, side // model.vae_factor)
    draws = {"u": (), "offset": (model.latent_channels, 1, 1)}

    def columns(pictures: int) -> dict[str, Any]:
        rows = pictures * task.rows_a_picture
        given: dict[str, Any] = {
            name: torch.empty(rows, *draws.get(name, latent), device="meta") for name in task.read.draws
        }
        given["pixels"] = torch.empty(rows, 3, side, side, dtype=torch.uint8, device="meta")
        if not encodes(recipe):
            given["moments"] = torch.empty(rows, 2, *latent, dtype=torch.float16, device="meta")
        given["caption"] = ["a picture"] * rows
        if task.rows_a_picture > 1:
            given["is_prior"] = torch.empty(rows, device="meta")
        if _reads_text(recipe, task):
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


def text_configs(model: Model) -> list[Any]:
    """The text encoders' settings."""
    encoders: list[Any] = list(model.text_encoders)
    return [encoder.config for encoder in encoders]


# ---- models without weights


def outline(recipe: Recipe) -> Model:
    """The model of a recipe on the meta device: its shapes, no weights, no downloads of them."""
    settings = recipe.model
    parts = ("vae",) if recipe.task == "autoencoder" else PARTS
    vae = outlined(str(settings.vae), ("vae",)).vae if isinstance(settings.vae, str) else None
    if settings.base in FAMILIES:
        own = settings.text_encoder if isinstance(settings.text_encoder, str) else None
        text = None if own is None else outlined(own, ("text_encoder",))
        overrides = build._overrides(recipe, vae, text)
        if settings.tokenizer == "train" and "text_encoder" in overrides:
            learned = {"vocab_size": settings.vocab_size, "max_position_embeddings": settings.max_length}
            overrides["text_encoder"] = learned | overrides["text_encoder"]
        model = outlined(settings.base, parts, overrides)
        if text is not None:
            model.text_encoders, model.tokenizers = text.text_encoders, text.tokenizers
    else:
        model = outlined(settings.base, parts)
    model.vae = vae or model.vae
    if recipe.task != "autoencoder":
        if model.unet is None:
            raise RecipeError("model.base", f"'{settings.base}' has no unet")
        latent_pixels = (recipe.data.resolution // model.vae_factor) ** 2
        model.scheduler = scheduler_config(recipe.objective, model.scheduler, latent_pixels)
        build.check_resolution(recipe.data.resolution, model)
    return model


def outlined(ref: str, parts: tuple[str, ...], overrides: Mapping[str, Any] | None = None) -> Model:
    """A family, folder or hub id without weights; its tokenizers know two words.

    Of a published model the settings are known: nothing is asked of the hub.
    """
    ref = ref if Path(ref).is_dir() else PUBLISHED.get(ref, ref)
    if ref in FAMILIES:
        wanted = tuple(part for part in parts if part != "tokenizer")
        model = models.create(ref, parts=wanted, overrides=dict(overrides or {}), device="meta")
    else:
        model = _from_configs(_folder(ref), parts)
    # Any tokenizer gives as many tokens a caption; which they are does not matter.
    lengths = [config.max_position_embeddings for config in text_configs(model)]
    words = ["a picture"]
    model.tokenizers = [
        models.train_tokenizer(words, vocab_size=514, model_max_length=length) for length in lengths
    ]
    return model


def _folder(ref: str) -> Path:
    if (path := Path(ref)).is_dir():
        return path
    if ref.count("/") != 1 or ref.startswith((".", "/", "~")):
        raise ModelError(
            f"no model at '{ref}'", allowed=f"a folder, a hub id, or one of {', '.join(FAMILIES)}"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(ref, allow_patterns=["*.json"]))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"'{ref}' is no folder here and its settings could not be had from the hub ({reason})"
        ) from error


def _from_configs(path: Path, parts: tuple[str, ...]) -> Model:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    file = path / "scheduler" / "scheduler_config.json"
    model = Model(
        family="custom", path=str(path), scheduler=json.loads(file.read_text()) if file.is_file() else {}
    )
    with torch.device("meta"):
        if "unet" in parts and (folder := path / denoiser_of(path)).is_dir():
            model.unet = denoiser_class(folder).from_config(_config(folder))
        if "vae" in parts and (path / "vae").is_dir():
            model.vae = AutoencoderKL.from_config(_config(path / "vae"))
        for i in range(2):
            if "text_encoder" in parts and (folder := path / numbered("text_encoder", i)).is_dir():
                config = _config(folder)
                projected = "CLIPTextModelWithProjection" in config.get("architectures", [])
                cls = CLIPTextModelWithProjection if projected else CLIPTextModel
                model.text_encoders.append(cls(CLIPTextConfig(**config)))
    if not model.modules:
        raise ModelError(f"'{path}' is no model folder", mend=f"it should hold {', '.join(PARTS)}")
    for module in model.modules.values():
        module.eval()
    return model


def _config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content
