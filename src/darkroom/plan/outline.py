"""Models without weights: their shapes on the meta device, from a family's or a folder's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from darkroom import models
from darkroom.errors import ModelError, RecipeError
from darkroom.models import FAMILIES, PARTS, PUBLISHED, Model
from darkroom.models.folder import denoiser_class, denoiser_of
from darkroom.models.model import numbered
from darkroom.train import build
from darkroom.train.objective import scheduler_config

if TYPE_CHECKING:
    from darkroom.recipe import Recipe


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


def text_configs(model: Model) -> list[Any]:
    """The text encoders' settings."""
    encoders: list[Any] = list(model.text_encoders)
    return [encoder.config for encoder in encoders]


def _folder(ref: str) -> Path:
    if (path := Path(ref)).is_dir():
        return path
    if ref.count("/") != 1 or ref.startswith((".", "/", "~")):
        raise ModelError(
            f"no model at '{ref}'", allowed=f"a folder, a hub id, or one of {', '.join(FAMILIES)}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(ref, allow_patterns=["*.json"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
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
