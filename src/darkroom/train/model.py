"""The model a recipe names: a family's random weights or a folder's, with its VAE and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom import models
from darkroom.errors import CheckpointError, RecipeError
from darkroom.hardware.system import atomic_replace
from darkroom.models.families import FAMILIES
from darkroom.models.model import PARTS, Model, is_flow
from darkroom.recipe.sections import VAE_TASKS
from darkroom.train.objective import scheduler_config
from darkroom.train.tasks.distill import lcm_scheduler
from darkroom.train.tasks.encoders import teacher_of, with_student

if TYPE_CHECKING:
    from darkroom.recipe.sections import ModelSettings, ObjectiveSettings


TOKENIZER = "tokenizer"
TEXT_PARTS = ("text_encoder", "tokenizer")


def build_model(
    task: str,
    settings: ModelSettings,
    objective: ObjectiveSettings,
    resolution: int,
    captions: Callable[[], Iterable[str]],
    run: Path,
) -> Model:
    """The model before training, the same each time.

    A tokenizer that is to be learned is learned from `captions()`, unless the run has kept one (see
    `keep_tokenizer`). Raises RecipeError and ModelError for what cannot be.
    """
    own_vae = isinstance(settings.vae, str)
    parts = ("vae",) if task in VAE_TASKS else PARTS
    wanted = tuple(part for part in parts if not (own_vae and part == "vae"))
    vae = _vae_of(settings) if own_vae else None
    text = _text_of(settings) if "text_encoder" in parts else None
    if text is not None:
        wanted = tuple(part for part in wanted if part not in TEXT_PARTS)
    if settings.base in FAMILIES:
        reads = task not in VAE_TASKS and text is None
        tokenizer = _tokenizer(settings, captions, run) if reads else None
        overrides = family_changes(task, settings, resolution, vae, text)
        model = models.create(
            settings.base, seed=settings.seed, tokenizer=tokenizer, overrides=overrides, parts=wanted
        )
    elif task == "tiny-vae" and (teacher := teacher_of(settings.base)) is not None:
        model = teacher
    else:
        model = models.load(settings.base, parts=wanted, variant=settings.variant, revision=settings.revision)
        _refuse_overrides(settings)
        if settings.fresh_unet:
            model.unet = _fresh(model.unet, settings.seed)
    if vae is not None:
        model.vae = vae
    if text is not None:
        model.text_encoders, model.tokenizers = text.text_encoders, text.tokenizers
    models.check_text_width(model, f"model.base {settings.base} with the recipe's parts")
    if task == "tiny-vae":
        return with_student(model, objective.tiny_vae, settings.seed)
    if task not in VAE_TASKS:
        settle_scheduler(model, task, objective, resolution)
    return model


def settle_scheduler(model: Model, task: str, objective: ObjectiveSettings, resolution: int) -> None:
    """Give a model the scheduler that it is trained with; RecipeError for pictures of an impossible size."""
    latent_pixels = (resolution // model.vae_factor) ** 2
    if task == "distill" and objective.flow.shift == "auto" and is_flow(model.scheduler):  # the teacher's
        flow = objective.flow.model_copy(update={"shift": "model"})
        objective = objective.model_copy(update={"flow": flow})
    model.scheduler = scheduler_config(objective, model.scheduler, latent_pixels)
    if task == "distill":
        model.scheduler = lcm_scheduler(model.scheduler, objective.distill)
    _check_resolution(resolution, model)


def _fresh(unet: Any, seed: int) -> Any:
    """A U-Net of the same shape with random weights."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return type(unet).from_config(unet.config).eval()


def no_captions() -> Iterator[str]:
    """Where a run's tokenizer has been learned already."""
    raise CheckpointError("the run has lost its tokenizer")


def keep_tokenizer(settings: ModelSettings, model: Model, run: Path) -> None:
    """Keep a learned tokenizer in the run, written atomically."""
    if settings.tokenizer == "train" and model.tokenizers and not (run / TOKENIZER).exists():
        temporary = run / f".{TOKENIZER}"
        model.tokenizers[0].save_pretrained(str(temporary))
        atomic_replace(temporary, run / TOKENIZER)


def _check_resolution(resolution: int, model: Model) -> None:
    """RecipeError unless pictures of this size go through the VAE and all levels of the U-Net."""
    if model.unet is None or model.vae is None:
        return
    if int(model.unet.config.in_channels) != model.latent_channels:
        raise RecipeError(
            "model.unet.in_channels",
            f"{model.unet.config.in_channels}, but the VAE's latents have {model.latent_channels} channels",
        )
    if resolution % (unit := model.size_unit):
        raise RecipeError("data.resolution", f"{resolution}", allowed=f"multiples of {unit} with this model")


def _vae_of(settings: ModelSettings) -> Any:
    return models.load(str(settings.vae), parts=("vae",), variant=settings.variant).vae


def _text_of(settings: ModelSettings) -> Model | None:
    """The model whose text encoder and tokenizer are taken, of a recipe that says one."""
    if not isinstance(settings.text_encoder, str):
        return None
    for name in ("tokenizer", "base"):
        given = getattr(settings, name)
        if given is not None and given not in FAMILIES:
            raise RecipeError(
                "model.text_encoder",
                f"'{settings.text_encoder}', but model.{name} is '{given}', with words of its own",
                mend="leave one of them out",
            )
    return models.load(settings.text_encoder, parts=TEXT_PARTS, variant=settings.variant)


def _tokenizer(settings: ModelSettings, captions: Callable[[], Iterable[str]], run: Path) -> Any:
    if settings.tokenizer != "train":
        return settings.tokenizer
    if (run / TOKENIZER).is_dir():
        return run / TOKENIZER
    return models.train_tokenizer(
        captions(), vocab_size=settings.vocab_size, model_max_length=settings.max_length
    )


def family_changes(
    task: str, settings: ModelSettings, resolution: int, vae: Any, text: Model | None = None
) -> dict[str, dict[str, Any]]:
    """The recipe's changes to a family, and what follows from them for the U-Net unless it is said."""
    family = FAMILIES[settings.base]
    given = {family.denoiser: settings.unet}
    if isinstance(settings.text_encoder, dict):
        given["text_encoder"] = settings.text_encoder
    if isinstance(settings.vae, dict):
        given["vae"] = settings.vae
    config = {**family.vae, **given.get("vae", {})} if vae is None else dict(vae.config)
    channels, levels = config["latent_channels"], len(config["block_out_channels"])
    derived = {
        "in_channels": channels,
        "out_channels": channels,
        "sample_size": resolution // 2 ** (levels - 1),
    }
    if text is not None:
        encoders: list[Any] = list(text.text_encoders)
        derived["cross_attention_dim"] = sum(encoder.config.hidden_size for encoder in encoders)
    elif len(family.text_encoders) == 1:
        text_encoder = {**family.text_encoders[0], **given.get("text_encoder", {})}
        derived["cross_attention_dim"] = text_encoder["hidden_size"]
    given[family.denoiser] = derived | settings.unet
    wanted = ("vae",) if task in VAE_TASKS else tuple(given)
    return {part: changes for part, changes in given.items() if changes and part in wanted}


def _refuse_overrides(settings: ModelSettings) -> None:
    for part in ("unet", "vae", "text_encoder"):
        if isinstance(changes := getattr(settings, part), dict) and changes:
            raise RecipeError(
                f"model.{part}",
                f"changes to '{settings.base}', whose weights fix its shape",
                mend=f"take them out, or give a family as model.base ({', '.join(FAMILIES)})",
            )
    if settings.tokenizer is not None:
        raise RecipeError(
            "model.tokenizer",
            f"'{settings.tokenizer}', but '{settings.base}' has its own",
            mend="leave it out",
        )
