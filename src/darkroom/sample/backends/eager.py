"""The `torch` backend: the model's own modules, called as they are.

Shapes: B rows, C H W latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from darkroom.errors import InputError
from darkroom.sample.backends.backend import Backend
from darkroom.sample.denoise import Unet
from darkroom.sample.pictures import decode, encode

if TYPE_CHECKING:
    from darkroom.models import Model


def unet_call(unet: Any) -> Unet:
    """A diffusers U-Net as the denoising loop calls it, in the precision of its weights."""
    dtype = next(unet.parameters()).dtype

    def call(
        x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        added = dict(added)
        guidance = added.pop("timestep_cond", None)
        out: torch.Tensor = unet(
            x.to(dtype),
            t,
            encoder_hidden_states=text,
            timestep_cond=guidance,
            added_cond_kwargs=added or None,
            return_dict=False,
        )[0]
        return out

    return call


def open_torch(model: Model, optimise: Sequence[str] = ()) -> Backend:
    """The model's modules as a backend; `optimise` names what the ladder changes in them first."""
    if optimise:
        raise InputError(f"optimise {', '.join(optimise)}", allowed="none with this backend")
    parameter = next(model.unet.parameters())  # type: ignore[union-attr]
    return Backend(
        "torch",
        unet_call(model.unet),
        decode=lambda latents_BCHW: decode(model.vae, latents_BCHW),
        encode=lambda pixels_B3HW: encode(model.vae, pixels_B3HW),
        device=parameter.device,
        dtype=parameter.dtype,
        precision=str(parameter.dtype).removeprefix("torch."),
    )


def refuse_half_on_cpu(model: Model) -> None:
    """InputError where the U-Net is float16 on a CPU."""
    parameter = next(model.unet.parameters())  # type: ignore[union-attr]
    if parameter.device.type == "cpu" and parameter.dtype == torch.float16:
        raise InputError("float16 on a CPU is about five times slower than float32", mend="use bfloat16")
