"""How good pictures are: statistics of features, the networks that give them, and the rows of scores.

`statistics` holds the distances (Frechet, kernel, cosine) in float64, `metrics` the measures by name and
their bootstrap intervals. `extractors` opens networks: published ones, or darkroom's own `small` one, whose
folder says which pictures it has `seen`. `pictures` holds the pictures to be scored and their prompts, and
draws them once; `job` is the whole way from a model or a folder to rows of scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkroom.lazy import importer

if TYPE_CHECKING:
    from darkroom.evaluate.extractors import Extractor, open_extractor
    from darkroom.evaluate.job import (
        Score,
        append_scores,
        evaluate,
        evaluate_folder,
        open_extractors,
        read_scores,
    )
    from darkroom.evaluate.metrics import METRICS
    from darkroom.evaluate.pictures import FolderPictures, Prompts, StorePictures, open_pictures, read_prompts

__all__ = [
    "METRICS",
    "Extractor",
    "FolderPictures",
    "Prompts",
    "Score",
    "StorePictures",
    "append_scores",
    "evaluate",
    "evaluate_folder",
    "open_extractor",
    "open_extractors",
    "open_pictures",
    "read_prompts",
    "read_scores",
]

_MODULES = {
    "extractors": (
        "Extractor",
        "open_extractor",
    ),
    "job": (
        "Score",
        "append_scores",
        "evaluate",
        "evaluate_folder",
        "open_extractors",
        "read_scores",
    ),
    "metrics": ("METRICS",),
    "pictures": (
        "FolderPictures",
        "Prompts",
        "StorePictures",
        "open_pictures",
        "read_prompts",
    ),
}
__getattr__ = importer(__name__, _MODULES)
