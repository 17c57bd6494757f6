"""Scores of drawn pictures while training goes on: FID, KID, CLIP score against the held-out pictures.

The prompts are what training says of held-out pictures, the reference is the pictures, and the seeds are
fixed: a score differs from the one before by the weights alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from darkroom.data.loader import ReadSettings
from darkroom.data.order import Ints, Rows
from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.train.feed import read_once

if TYPE_CHECKING:
    from darkroom.evaluate.extractors import Extractor
    from darkroom.evaluate.metrics import Scorer
    from darkroom.models.model import Model
    from darkroom.recipe.sections import DataSettings, EvaluateSettings, SampleSettings

BATCH = 64
FEWEST = 2  # pictures that a covariance can be taken of
Drawing = Callable[[int, int], None]


def check_scores(settings: EvaluateSettings) -> None:
    """RecipeError for scores that there are not, or without the extractor that they need."""
    from darkroom.evaluate.job import ALL
    from darkroom.evaluate.metrics import METRICS

    possible = [name for name, m in METRICS.items() if set(m.needs) <= {"reference"} and name != "div"]
    for name in settings.scores:
        if name not in possible:
            raise RecipeError("evaluate.scores", f"'{name}'", allowed=", ".join(possible))
        role = METRICS[name].role
        if not {role, ALL} & settings.extractors.keys():
            raise RecipeError(
                "evaluate.extractors",
                f"no {role} extractor, which the score '{name}' needs",
                mend=f"say evaluate.extractors.{role}=FOLDER (docs/evaluation.md says how to come by one), "
                "or leave the score out of evaluate.scores",
            )


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out rows of a store, as pictures to compare with."""

    store: Store
    positions: Ints

    @property
    def name(self) -> str:
        """What rows call these pictures."""
        return f"{self.store.path}@{self.store.version}, held out"

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> Iterator[Any]:
        """A column's values, part by part."""
        for start in range(0, len(self), BATCH):
            yield from self.store.take(self.positions[start : start + BATCH], [name])[name].to_pylist()

    def bytes(self) -> Iterator[bytes]:
        """Each held-out picture's bytes."""
        return self.column("picture")

    @cached_property
    def sha256(self) -> str:
        """Of all their ids: which pictures these are."""
        return hashlib.sha256(b"\n".join(sorted(str(i).encode() for i in self.column("id")))).hexdigest()


class Scores:
    """Draws the held-out prompts' pictures and scores them; the reference's features are taken once."""

    def __init__(
        self,
        settings: EvaluateSettings,
        drawn: SampleSettings,
        data: DataSettings,
        read: ReadSettings,
        store: Store,
        held: Rows,
        device: torch.device,
    ) -> None:
        """Opens the extractors; `drawn` says how to draw, `read` what is said of pictures, as in training.

        Raises RecipeError, InputError or ModelError where that cannot be.
        """
        from darkroom.evaluate.job import open_extractors

        check_scores(settings)
        self._settings = settings
        count = min(settings.num, len(held))
        if count < FEWEST:
            raise RecipeError(
                "data.holdout", f"{len(held)} pictures", allowed=f"{FEWEST} or more, for scores"
            )
        self._drawn, self._how, self._side = drawn, data.reading, data.resolution
        index = np.unique(np.linspace(0, len(held) - 1, count).round().astype(np.int64))
        self._reference = HeldOut(store, held.positions(index))
        self._prompts = _prompts(read, store, held, count)
        _check_prompts(settings.scores, self._prompts)
        self._extractors: dict[str, Extractor] = open_extractors(
            settings.scores, settings.extractors, device=device
        )
        self._scorer: Scorer | None = None

    def __call__(self, model: Model, folder: Path, progress: Drawing, *, scores: bool) -> dict[str, Any]:
        """Draw with a model as it is now, and score; `scores` false draws alone.

        `heldout_<score>` is the value; `scores` has each one's 95 % interval and what it was taken with.
        """
        from darkroom import sample
        from darkroom.evaluate.metrics import METRICS, Scorer, Sets
        from darkroom.evaluate.pictures import draw

        drawn = self._drawn
        how = self._how
        generate = partial(sample.generate, optimise="none", progress=progress, notice=lambda _: None, **how)
        settings = {"size": (self._side, self._side), "steps": drawn.steps, "guidance": drawn.guidance}
        settings |= {} if drawn.solver is None else {"solver": drawn.solver}
        with TemporaryDirectory(prefix=".scores-", dir=folder, ignore_cleanup_errors=True) as place:
            pictures = draw(
                generate,
                model,
                self._prompts,
                folder=Path(place) / "pictures",
                model_sha256="",
                seed=drawn.seed,
                settings=settings,
            )
            if not scores:
                return {}
            sets = Sets(pictures, self._prompts, self._reference)
            before = self._scorer
            self._scorer = Scorer(sets, drawn.seed) if before is None else before.with_sets(sets)
            names = self._settings.scores
            found = {
                name: METRICS[name].measure(self._scorer, self._extractors[METRICS[name].role])
                for name in names
            }
        details: dict[str, Mapping[str, Any]] = {}
        for name, one in found.items():
            extractor = self._extractors[METRICS[name].role]
            interval = {"value": one.interval.value, "low": one.interval.low, "high": one.interval.high}
            details[name] = {**interval, "n": len(one.pictures), "extractor": extractor.sha256}
        values = {f"heldout_{name.replace('-', '_')}": one.interval.value for name, one in found.items()}
        return {**values, "scores": details}


def _prompts(read: ReadSettings, store: Store, held: Rows, count: int) -> tuple[str, ...]:
    """What is said of held-out pictures: their captions, or the recipe's prompts."""
    alone = {"latents": None, "text": None, "pixels": None, "caption": True, "columns": (), "draws": ()}
    return tuple(read_once(store, held, count, read.model_copy(update=alone))["caption"])


def _check_prompts(scores: Sequence[str], prompts: Sequence[str]) -> None:
    from darkroom.evaluate.metrics import METRICS

    reads = next((name for name in scores if METRICS[name].reads_text), None)
    if reads is not None and (bare := prompts.count("")):
        raise RecipeError(
            "evaluate.scores",
            f"'{reads}', but {bare} of {len(prompts)} held-out pictures have no caption",
            mend="leave it out, or take captioned pictures alone: data.filter=\"caption <> ''\"",
        )
