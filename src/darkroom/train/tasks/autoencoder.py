"""Training the autoencoder: reconstruction, KL, perceptual and adversarial losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from darkroom.data.loader import ReadSettings
from darkroom.hardware.accelerator import to_device
from darkroom.models.model import Model
from darkroom.recipe.sections import AutoencoderLossSettings
from darkroom.train.objective import square_error
from darkroom.train.tasks.diffusion import Columns, distance, edge_distance, kl_divergence


def unit_pixels(columns: Columns, device: torch.device) -> dict[str, Tensor]:
    """Pixels [B, 3, H, W] in [-1, 1], and the noise of the posterior [B, C, h, w]."""
    pixels_B3HW = to_device(columns["pixels"], device).float() / 127.5 - 1.0
    return {"pixels": pixels_B3HW, "posterior": to_device(columns["posterior"], device)}


def decibels(out_b3HW: Tensor, pixels_b3HW: Tensor) -> Tensor:
    """PSNR of pictures of -1 to 1 [b], in dB."""
    return 10 * torch.log10(4.0 / square_error(out_b3HW, pixels_b3HW).clamp(min=1e-10))


class Autoencoder:
    """Train the VAE to give back pictures through a small latent close to a normal distribution."""

    def __init__(self, model: Model, settings: AutoencoderLossSettings, read: ReadSettings) -> None:
        assert model.vae is not None
        self.model, self._settings = model, settings
        self.modules: dict[str, nn.Module] = {"vae": model.vae}
        self.rows_a_picture = 1
        self.rates: dict[str, float] = {}
        self.frozen: Sequence[nn.Module] = ()
        self.read = read.model_copy(update={"draws": ("posterior",)})

    @property
    def points(self) -> Sequence[int]:
        return ()

    def inputs(self, columns: Columns, device: torch.device) -> dict[str, Tensor]:
        """Pixels [B, 3, H, W] in [-1, 1], and the noise of the posterior [B, C, h, w]."""
        return unit_pixels(columns, device)

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each row [b]: `loss`, and its parts `reconstruction` and `kl`."""
        pixels_b3HW = inputs["pixels"]
        mean_bChw, logvar_bChw = self._encode(pixels_b3HW)
        latents_bChw = mean_bChw + (0.5 * logvar_bChw).exp() * inputs["posterior"]
        out_b3HW = self._decode(latents_bChw)
        settings = self._settings
        reconstruction_b = distance(out_b3HW, pixels_b3HW, settings.reconstruction)
        kl_b = kl_divergence(mean_bChw, logvar_bChw) / pixels_b3HW[0].numel()
        loss_b = reconstruction_b + settings.kl_weight * kl_b
        if settings.edge_weight:
            loss_b = loss_b + settings.edge_weight * edge_distance(out_b3HW, pixels_b3HW)
        return {"loss": loss_b, "reconstruction": reconstruction_b, "kl": kl_b}

    def heldout(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each held-out row [b]: the reconstruction loss, and PSNR in dB."""
        pixels_b3HW = inputs["pixels"]
        out_b3HW = self.reconstruct(pixels_b3HW)
        return {
            "heldout_loss": distance(out_b3HW, pixels_b3HW, self._settings.reconstruction),
            "heldout_psnr_db": decibels(out_b3HW, pixels_b3HW),
        }

    @torch.no_grad()
    def measure(self, inputs: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        """The factor that brings sampled latents to a standard deviation of one (Rombach et al. 2022).

        A shift and a deviation for each channel that the VAE's configuration has stay as they are.
        """
        scaling = replace(self.model.latent_scaling, factor=1.0)
        total, count = np.zeros(2), 0
        for some in inputs:
            mean_bChw, logvar_bChw = self._encode(some["pixels"])
            latents = scaling.seen(mean_bChw + (0.5 * logvar_bChw).exp() * some["posterior"]).cpu().double()
            total += np.array([latents.sum().item(), latents.square().sum().item()])
            count += latents.numel()
        mean, square = total / max(count, 1)
        variance = square - mean**2
        return {"vae.scaling_factor": float(variance**-0.5)} if variance > 0 else {}

    def reconstruct(self, pixels_b3HW: Tensor) -> Tensor:
        """What the VAE gives back of pictures, from the mean latent."""
        return self._decode(self._encode(pixels_b3HW)[0]).clamp(-1, 1)

    def _encode(self, pixels_b3HW: Tensor) -> tuple[Tensor, Tensor]:
        vae: Any = self.model.vae
        given = vae.encode(pixels_b3HW.to(vae.dtype), return_dict=False)[0]
        return given.mean.float(), given.logvar.float()

    def _decode(self, latents_bChw: Tensor) -> Tensor:
        vae: Any = self.model.vae
        out: Tensor = vae.decode(latents_bChw.to(vae.dtype), return_dict=False)[0]
        return out.float()
