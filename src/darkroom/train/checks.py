"""What a recipe asks of this machine: found before any work, and as a rule without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkroom.train.tracking import check_tracker

if TYPE_CHECKING:
    from darkroom.recipe.sections import CheckpointSettings, EvaluateSettings, TrackSettings


def check_reach(track: TrackSettings, evaluate: EvaluateSettings, checkpoint: CheckpointSettings) -> None:
    """Raise RecipeError or MissingExtra for a tracker, score or address that cannot be had from here."""
    check_tracker(track)
    if evaluate.every_images:
        from darkroom.train.scores import check_scores

        check_scores(evaluate)
    if checkpoint.url is not None:
        from darkroom.train.checkpoint.storage import check_url

        check_url(checkpoint.url)
