"""What must hold before pictures are made, and what settings mean for a model: its table, its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from PIL import Image

from darkroom.errors import InputError
from darkroom.options import MAX_SIDE
from darkroom.sample import inputs
from darkroom.sample.adapters import Adapted
from darkroom.sample.backends import Backend
from darkroom.sample.choice import default_solver, make_table
from darkroom.sample.ladder import parse as parse_optimisations
from darkroom.sample.prompts import check_text_parts
from darkroom.sample.settings import GenerateSettings
from darkroom.sample.table import Table

if TYPE_CHECKING:
    from darkroom.models import Model


def with_lcm(settings: GenerateSettings, optimise: Sequence[str] | str) -> GenerateSettings:
    """With the `lcm` optimisation the solver is its own, unless another is asked for."""
    lcm = any(choice.name == "lcm" for choice in parse_optimisations(optimise))
    return settings.model_copy(update={"solver": "lcm"}) if lcm and settings.solver is None else settings


def table_for(model: Model, settings: GenerateSettings) -> Table:
    """The table that settings ask of a model's scheduler."""
    steps = settings.steps
    if steps is None:
        steps = settings.resolved(settings.solver or default_solver(model.scheduler)[0]).steps
    assert steps is not None
    return make_table(
        settings.solver,
        model.scheduler,
        steps,
        eta=settings.eta,
        spacing=settings.spacing,
        karras=settings.karras,
        strength=1.0 if settings.strength is None else settings.strength,
    )


def size_unit(model: Model) -> int:
    """What a side in pixels must be a multiple of."""
    return model.size_unit


def checked_size(
    model: Model, size: tuple[int, int] | None, image: Image.Image | None = None
) -> tuple[int, int]:
    """Width and height in pixels; where None the U-Net's own, in the shape of a picture to start from.

    InputError unless the model can make it.
    """
    unit = size_unit(model)
    if size is None:
        side = model.sample_size
        return (side, side) if image is None else inputs.fitted_size(image, side, unit)
    for side in size:
        if side % unit or not unit <= side <= MAX_SIDE:
            raise InputError(
                f"size {size[0]}x{size[1]}",
                allowed=f"sides of {unit} to {MAX_SIDE} pixels, multiples of {unit}",
                mend="nearest: " + "x".join(str(nearest_side(one, unit)) for one in size),
            )
    return size


def nearest_side(side: int, unit: int) -> int:
    """The multiple of `unit` that is nearest to a side, within what is allowed."""
    return min(max(unit, math.floor(side / unit + 0.5) * unit), MAX_SIDE // unit * unit)


def check_parts(model: Model, *, has_mask: bool) -> None:
    """InputError unless the model has what it takes to make pictures, of the kind that is asked for."""
    missing = [name for name in ("unet", "vae") if getattr(model, name) is None]
    if missing:
        raise InputError(f"the model has no {' and no '.join(missing)}", mend="load it with all its parts")
    check_text_parts(model)
    assert model.unet is not None
    takes, latents = int(model.unet.config.in_channels), model.latent_channels
    if takes == latents:
        return
    if takes != 2 * latents + 1:
        raise InputError(
            f"the U-Net takes {takes} channels and the latents have {latents}",
            allowed=f"{latents}, or {2 * latents + 1} of an inpainting U-Net",
        )
    if not has_mask:
        raise InputError(
            f"the U-Net takes {takes} channels: it repaints a part of a picture",
            mend="give the picture and a mask, white where it is painted anew",
        )


def repaints(model: Model) -> bool:
    """Whether the U-Net sees a mask and a picture beside the latents, and so wants both."""
    assert model.unet is not None
    return int(model.unet.config.in_channels) != model.latent_channels


def check_pictures(settings: GenerateSettings, image: Image.Image | None, mask: Image.Image | None) -> None:
    """InputError unless settings, picture and mask go together."""
    if image is None and mask is not None:
        raise InputError("a mask without a picture", mend="give the picture too")
    if image is None and settings.strength is not None:
        raise InputError(f"strength {settings.strength:g} without a picture to start from", mend="give one")
    if image is not None and settings.hires is not None:
        raise InputError("hires with a picture to start from", mend="give a larger size instead")
    if image is not None and mask is not None:
        inputs.check_mask(mask, image)


def check_adapters(adapted: Adapted, backend: Backend) -> None:
    """InputError unless the backend runs the model's own layers, which adapters change."""
    if not adapted.has_any:
        return
    if backend.name not in ("torch", "compile"):
        raise InputError(
            f"adapters with backend {backend.name}",
            allowed="torch, compile",
            mend="or merge them: darkroom export MODEL --merge ADAPTER --to FOLDER",
        )
    if adapted.bank is not None:
        adapted.bank.verify()
