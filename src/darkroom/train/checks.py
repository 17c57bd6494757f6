"""What a recipe is checked for before any work: settings that contradict each other, the store, its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkroom.data import Store
from darkroom.data.mixing import MixedRows, MixedStore
from darkroom.data.order import Rows
from darkroom.errors import RecipeError
from darkroom.train.defaults import check_together
from darkroom.train.extractor import check_extractor
from darkroom.train.micro import check_micro_batch
from darkroom.train.places import check_url
from darkroom.train.scores import check_scores
from darkroom.train.tracking import check_tracker

if TYPE_CHECKING:
    from darkroom.recipe import Recipe


def check_settings(recipe: Recipe) -> None:
    """Raise RecipeError for settings that contradict each other, whatever the store and the model."""
    train, optim, data = recipe.train, recipe.optim, recipe.data
    check_together(recipe)
    check_micro_batch(train)
    check_tracker(recipe.track)
    check_scores(recipe)
    check_url(recipe.checkpoint.url)
    whole = not recipe.phases  # each phase has a length of its own, and is checked as a recipe of its own
    if whole and optim.warmup_steps > train.steps:
        raise RecipeError(
            "optim.warmup_steps", f"{optim.warmup_steps} is more than train.steps {train.steps}"
        )
    if whole and train.ema.start_step >= train.steps and train.ema.enabled:
        raise RecipeError(
            "train.ema.start_step",
            f"{train.ema.start_step} is not before the end ({train.steps} steps)",
            mend="start earlier, or set train.ema.enabled=false",
        )
    if recipe.task == "autoencoder":
        _check_autoencoder(recipe)
    elif recipe.task == "extractor":
        check_extractor(recipe)
    elif data.encode == "stored" and (data.flip or data.crop == "random"):
        named = "flip" if data.flip else "crop"
        raise RecipeError(
            f"data.{named}",
            f"{getattr(data, named)}, but prepared latents are of pictures as they are, cut at the centre",
            mend="set data.encode=inline",
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


def select_rows(store: Store, recipe: Recipe) -> tuple[Rows, Rows]:
    """The rows that are trained on, and those held out; of several stores, those of each."""
    data = recipe.data
    if isinstance(store, MixedStore):
        parts = [_matching(one, recipe) for one in store.stores]
        rows: Rows = MixedRows.over(parts, store.offsets)
    else:
        rows = _matching(store, recipe)
    if data.holdout >= 1 and data.holdout != int(data.holdout):
        raise RecipeError("data.holdout", f"{data.holdout}", allowed="a share below 1, or a whole number")
    if data.holdout * 2 > len(rows) or 0.5 < data.holdout < 1:
        raise RecipeError(
            "data.holdout", f"{data.holdout:g} of {len(rows)} rows", allowed="at most half of the rows"
        )
    return rows.split(data.holdout if data.holdout < 1 else int(data.holdout))


def _matching(store: Store, recipe: Recipe) -> Rows:
    """The rows of one store that the recipe's filter lets through; RecipeError where there are none."""
    given = recipe.data.filter
    rows = Rows.of(store.choose(given) if given else store.num_rows)
    if len(rows):
        return rows
    of = f" of '{store.path}'" if recipe.data.stores else ""
    if given:
        raise RecipeError("data.filter", f"no row of {store.num_rows}{of} matches '{given}'")
    raise RecipeError("data.stores" if recipe.data.stores else "data.store", f"the store{of} is empty")
