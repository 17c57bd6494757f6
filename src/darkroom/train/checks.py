"""What of a recipe contradicts itself, whatever the store and the model: checked before any work, and without
torch, so that a plan can say it at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkroom.errors import RecipeError
from darkroom.recipe.rules import check_batch, check_together
from darkroom.recipe.sections import VAE_TASKS, DataSettings, ModelSettings, OptimSettings, TrainSettings
from darkroom.train.tracking import check_tracker

if TYPE_CHECKING:
    from darkroom.recipe.sections import Recipe


def check_settings(recipe: Recipe, processes: int | None = None) -> None:
    """Raise RecipeError for settings that contradict each other, whatever the store and the model.

    With a number of `processes` also where they cannot share a batch.
    """
    train, optim, data = recipe.train, recipe.optim, recipe.data
    check_together(recipe)
    _check_micro_batch(train)
    check_tracker(recipe.track)
    if recipe.evaluate.every_images:
        from darkroom.train.scores import check_scores

        check_scores(recipe.task, recipe.evaluate, data.holdout)
    if recipe.checkpoint.url is not None:
        from darkroom.train.checkpoint.storage import check_url

        check_url(recipe.checkpoint.url)
    if not recipe.phases:  # each phase has a length of its own, and is checked as a recipe of its own
        _check_length(train, optim)
    if recipe.task in VAE_TASKS:
        _check_vae_task(recipe.task, recipe.model, data, train)
    elif recipe.task == "extractor":
        from darkroom.train.tasks.extractor import check_extractor

        check_extractor(train, data, recipe.model, recipe.objective.extractor)
    elif data.encode == "stored" and (data.flip or data.crop == "random" or data.augment.used):
        named = "flip" if data.flip else "crop" if data.crop == "random" else "augment"
        given = "given" if named == "augment" else getattr(data, named)
        raise RecipeError(
            f"data.{named}",
            f"{given}, but prepared latents are of pictures as they are, cut at the centre",
            mend="set data.encode=inline",
        )
    if processes is not None:
        check_batch(train, processes)


def _check_length(train: TrainSettings, optim: OptimSettings) -> None:
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


def _check_vae_task(task: str, model: ModelSettings, data: DataSettings, train: TrainSettings) -> None:
    if model.train_text_encoder:
        raise RecipeError("model.train_text_encoder", f"true, but the task {task} trains a VAE alone")
    if task == "tiny-vae" and train.gradient_checkpointing:
        # diffusers' encoder of this kind leaves out its scaling of pixels where it is checkpointed
        raise RecipeError("train.gradient_checkpointing", "true", allowed="false with the task tiny-vae")
    if task == "autoencoder" and isinstance(model.vae, str):
        raise RecipeError(
            "model.vae",
            f"'{model.vae}', but the VAE is what is trained",
            mend="give the folder as model.base to go on from it, or changes to the family's VAE here",
        )
    if data.buckets:
        raise RecipeError("data.buckets", "true", allowed=f"false with the task {task}")


def _check_micro_batch(settings: TrainSettings) -> None:
    """RecipeError unless the global batch is made of whole micro-batches."""
    micro, batch = settings.micro_batch, settings.global_batch
    if micro == "auto" or (0 < micro <= batch and batch % micro == 0):
        return
    fitting = sorted(divisors(batch), key=lambda d: abs(d - micro))[:3]
    raise RecipeError(
        "train.micro_batch",
        f"{micro} does not divide train.global_batch {batch}",
        allowed=", ".join(map(str, sorted(fitting))) + " or auto",
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
