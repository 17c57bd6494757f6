"""Making and preparing pictures as asked for, and their counts, kept: no torch until one is counted."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from darkroom.plan.counts import Profile, cached_profile
from darkroom.plan.settings import configs_of

USUAL_GUIDANCE = 7.5


def own_guidance(model: str) -> float:
    """The guidance scale that a model folder notes, else the usual one."""
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        index = json.loads((Path(model) / "model_index.json").read_text(encoding="utf-8"))
        return float(index["_darkroom"]["guidance"])
    return USUAL_GUIDANCE


def picture_profile(
    model: str, width: int, height: int, guided: bool, precision: str, attention: str, *, whole: bool = False
) -> Profile:
    """The counts of making pictures, kept. `whole`: the VAE decodes a batch at once."""
    key = {
        "job": "generate",
        "model": configs_of(model),
        "size": [width, height],
        "guided": guided,
        "precision": precision,
        "attention": attention,
        "whole": whole,
    }

    def count() -> Profile:
        """Count the job's kernels, decoding in as many pixels at once as `generate` does."""
        from darkroom.plan.generation import GenerateSpec, profile_generation
        from darkroom.sample.pictures import DECODE_PIXELS

        pixels = None if whole else DECODE_PIXELS
        return profile_generation(GenerateSpec(model, width, height, guided, precision, attention, pixels))

    return cached_profile(key, count)


def preparing_profile(
    model: str, resolution: int, text: bool, precision: str, vae: str | None = None
) -> Profile:
    """The counts of encoding, kept; with another model's VAE, if that is said."""
    key = {
        "job": "prepare",
        "model": configs_of(model),
        "resolution": resolution,
        "text": text,
        "precision": precision,
        "vae": None if vae is None else configs_of(vae),
    }

    def count() -> Profile:
        from darkroom.plan.generation import PrepareSpec, profile_preparing

        return profile_preparing(PrepareSpec(model, resolution, text, precision, vae))

    return cached_profile(key, count)
