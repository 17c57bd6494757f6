"""`Backend`: what the denoising loop drives, whatever computes behind it. And the `torch` one: the model's
own modules, as they are, as optimisations changed them, or compiled.

Shapes: B rows, C H W latents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from PIL import Image

from darkroom.sample.denoise import Unet, unet_call

if TYPE_CHECKING:
    from darkroom.models.model import Model
    from darkroom.sample.optimisations.applied import Applied

Decode = Callable[[torch.Tensor], list[Image.Image]]
Encode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(repr=False)
class Backend:
    """A model's U-Net and VAE, ready to be called."""

    name: str
    unet: Unet
    decode: Decode
    """Latents [B, C, H, W] to pictures."""
    encode: Encode
    """Pixels [B, 3, 8H, 8W] of -1 to 1 to the latents' mean and standard deviation, in the U-Net's scale."""
    device: torch.device
    """Where latents and conditions are handed over."""
    dtype: torch.dtype
    """What conditions are handed over in."""
    precision: str
    """What the U-Net is computed in, as pictures say it: float32, bfloat16, float16."""
    notes: list[str] = field(default_factory=list)
    """What a user should know about the pictures: what was chosen or substituted."""
    times_s: dict[str, float] = field(default_factory=dict)
    """Seconds of work done once, by what it was: export, compile, warm-up."""
    model: Model | None = None
    """The model as optimisations changed it, with its text encoders; None: the one that was opened."""
    optimised: tuple[str, ...] = ()
    """Optimisations in place."""
    reasons: list[str] = field(default_factory=list)
    """Why they were chosen, where `auto` chose."""
    guidance_interval: tuple[float, float] | None = None
    """Noise levels between which guidance is on."""


def open_torch(
    model: Model, optimise: Sequence[str] | str = (), device: torch.device | str | None = None
) -> Backend:
    """The model's modules as a backend, with the optimisations that `optimise` names in place.

    The model itself stays as it is: look-alikes of its modules are changed. `device` is where the work
    is done if that is not where the weights lie.
    """
    from darkroom.sample.optimisations.table import optimise as put_in_place

    applied = put_in_place(model, optimise, device)
    return torch_backend(applied)


def torch_backend(applied: Applied) -> Backend:
    """A model with its optimisations in place, as a backend."""
    dtype = next(applied.model.unet.parameters()).dtype  # type: ignore[union-attr]
    return Backend(
        "torch",
        applied.unet(unet_call),
        decode=applied.decode,
        encode=applied.encode,
        device=applied.device,
        dtype=dtype,
        precision=str(dtype).removeprefix("torch."),
        notes=applied.notes,
        times_s=applied.times_s,
        model=applied.model,
        optimised=applied.names,
        reasons=applied.reasons,
        guidance_interval=applied.guidance_interval,
    )


def open_compiled(
    model: Model,
    optimise: Sequence[str] | str,
    device: torch.device | str | None,
    notice: Callable[[str], None],
) -> Backend:
    """The torch backend with `compile` among its optimisations; its first call compiles.

    Compiled code stays in PyTorch's own cache folder, so the next process starts quicker.
    """
    names = [optimise] if isinstance(optimise, str) else list(optimise)
    if not any(part.strip().partition(":")[0] == "compile" for name in names for part in name.split(",")):
        names.append("compile")
    backend = open_torch(model, names, device)
    backend.name = "compile"
    backend.unet = _first_call_logged(backend.unet, backend.times_s, notice)
    return backend


def _first_call_logged(unet: Unet, times_s: dict[str, float], notice: Callable[[str], None]) -> Unet:
    def call(
        x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The compiled call; the first one is timed and announced."""
        if "compile unet" in times_s:
            return unet(x, t, text, added)
        notice("the U-Net is compiled at its first call; at full size this takes minutes")
        start = time.perf_counter()
        out = unet(x, t, text, added)
        times_s["compile unet"] = time.perf_counter() - start
        return out

    return call
