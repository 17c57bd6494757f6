"""Optimisations that change the steps: guidance_interval, feature_cache, lcm."""

from __future__ import annotations

import re

from darkroom.errors import InputError
from darkroom.sample.denoise import Unet
from darkroom.sample.optimisations.applied import Applied, CallOf
from darkroom.sample.optimisations.deep import EVERY, FeatureCache, Shallow
from darkroom.sample.solvers import SolverTable

INTERVAL = (0.28, 5.42)
"""Noise levels of Kynkaanniemi et al. 2024 (arXiv 2404.07724) for Stable Diffusion XL."""
MOST_EVERY = 10


def guidance_interval(applied: Applied, argument: str) -> None:
    """Guidance only at middling noise levels; elsewhere a picture takes one U-Net row, not two."""
    low, high = INTERVAL
    if argument:
        found = re.fullmatch(r"(\d*\.?\d+)-(\d*\.?\d+)", argument)
        low, high = (float(found[1]), float(found[2])) if found else (1.0, 0.0)
        if low >= high:
            raise InputError(
                f"guidance_interval:{argument}",
                allowed="LOW-HIGH, noise levels (sigma) such as 0.28-5.42; SD's lie between 0.03 and 14.6",
            )
    applied.guidance_interval = (low, high)
    applied.notes.append(f"guidance_interval: guided where {low:g} < sigma <= {high:g}")


def interval_of(table: SolverTable, low: float, high: float) -> tuple[float, float]:
    """The steps of a table with noise levels above `low` and not above `high`, as fractions of all steps.

    The level is the noise's share by the picture's share. No step at all: an empty interval.
    """
    picture, noise = table.levels_S2[:, 0], table.levels_S2[:, 1]
    inside = [i for i in range(len(table)) if low * picture[i] < noise[i] <= high * picture[i]]
    return (inside[0] / len(table), (inside[-1] + 1) / len(table)) if inside else (0.0, 0.0)


def feature_cache(applied: Applied, argument: str) -> None:
    """The whole U-Net at every N-th step only; its first and last layers between."""
    every = int(argument) if argument.isdecimal() else 0 if argument else EVERY
    if not 2 <= every <= MOST_EVERY:
        raise InputError(
            f"feature_cache:{argument}", allowed=f"N of 2 to {MOST_EVERY}: whole steps in every N"
        )
    applied.own("unet")

    def outer(applied: Applied, call_of: CallOf) -> Unet:
        parts = Shallow(applied.model.unet)
        return FeatureCache(applied.plain(call_of), applied.plain(call_of, parts), parts, every)

    applied.outer = outer
    applied.notes.append(f"feature_cache: deep layers of the U-Net at one step in {every} only")


def lcm(applied: Applied, argument: str) -> None:
    """A latent consistency model's few steps: its weights as they are, or an adapter added to the U-Net."""
    model = applied.model
    if argument:
        _merge(applied, argument)
    elif not is_lcm(model):
        raise InputError(
            "lcm: this model was not distilled to few steps", mend="give an LCM adapter: lcm:FILE"
        )
    applied.notes.append("lcm: another model's picture, in few steps without guidance")


def _merge(applied: Applied, file: str) -> None:
    """Add an adapter to copies of the weights that it changes."""
    from darkroom.models.adapters.read import changeable, fit, merge, read_adapter

    adapter = read_adapter(file)
    applied.own_all()
    layers = changeable(applied.model)
    for path in fit(adapter, applied.model).layers:
        for parameter in layers[path].parameters(recurse=False):
            parameter.data = parameter.data.clone()
    merge(applied.model, adapter)


def is_lcm(model: object) -> bool:
    """Whether a model is a consistency model itself."""
    config = getattr(getattr(model, "unet", None), "config", None)
    scheduler = getattr(model, "scheduler", {})
    takes_guidance = getattr(config, "time_cond_proj_dim", None) is not None
    return takes_guidance or scheduler.get("_class_name") == "LCMScheduler"
