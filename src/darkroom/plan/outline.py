"""The model of a recipe without weights: its shapes on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkroom.errors import RecipeError
from darkroom.models import FAMILIES, PARTS, Model
from darkroom.models.outline import outlined
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
