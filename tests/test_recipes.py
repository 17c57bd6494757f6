"""Every shipped recipe reads, and its head comment names commands that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from darkroom import models
from darkroom.recipe import read_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(ROOT.glob("recipes/*.yaml")) + sorted(ROOT.glob("src/darkroom/quickstart/*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_reads_and_its_model_can_be_built(path):
    recipe = read_recipe(path)
    parts = {"unet": recipe.model.unet, "text_encoder": recipe.model.text_encoder}
    if isinstance(recipe.model.vae, dict):
        parts["vae"] = recipe.model.vae
    model = models.create(recipe.model.base, overrides={k: v for k, v in parts.items() if v})
    assert model.num_parameters["unet"] > 0
    assert path.read_text().startswith("# ")


def test_the_recipes_are_found():
    assert {"autoencoder", "pretrain", "emoji", "emoji-autoencoder"} <= {path.stem for path in RECIPES}
