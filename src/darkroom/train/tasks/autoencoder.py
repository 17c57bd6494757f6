"""Training autoencoders: the VAE, by reconstruction, KL, perceptual and adversarial losses; and a tiny one of
it.

The task `tiny-vae` has a small encoder and decoder learn to do what a VAE does (TAESD, Ollin Boer Bohan). The
encoder learns the teacher's latents of pictures, the decoder what the teacher makes of its latents. Both work
on latents as the denoiser sees them, so a scale and a shift of the VAE are learned with them.

Shapes: b pictures of a micro-batch, H W pixels, C latent channels, h w latent pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from darkroom.data.loader import ReadSettings
from darkroom.hardware.accelerator import to_device
from darkroom.libraries import quiet
from darkroom.models.folder import replaced_folder
from darkroom.models.model import Model
from darkroom.recipe.sections import AutoencoderLossSettings
from darkroom.sample.optimisations.tiny_vae import TinyPair, is_tiny_vae
from darkroom.train.objective import square_error
from darkroom.train.tasks.diffusion import Columns, distance, edge_distance, kl_divergence

if TYPE_CHECKING:
    from darkroom.recipe.sections import TinyVaeSettings


def _decibels(out_b3HW: Tensor, pixels_b3HW: Tensor) -> Tensor:
    """PSNR of pictures of -1 to 1 [b], in dB."""
    return 10 * torch.log10(4.0 / square_error(out_b3HW, pixels_b3HW).clamp(min=1e-10))


class _OfPictures:
    """What tasks share that learn from pictures without noise and timesteps."""

    rows_a_picture = 1

    def __init__(
        self,
        model: Model,
        read: ReadSettings,
        modules: dict[str, nn.Module],
        frozen: Sequence[nn.Module] = (),
    ) -> None:
        self.model, self.modules, self.frozen = model, modules, frozen
        self.rates: dict[str, float] = {}
        self.read = read.model_copy(update={"draws": ("posterior",)})

    @property
    def points(self) -> Sequence[int]:
        return ()

    def inputs(self, columns: Columns, device: torch.device) -> dict[str, Tensor]:
        """Pixels [B, 3, H, W] in [-1, 1], and the noise of the posterior [B, C, h, w]."""
        pixels_B3HW = to_device(columns["pixels"], device).float() / 127.5 - 1.0
        return {"pixels": pixels_B3HW, "posterior": to_device(columns["posterior"], device)}


class Autoencoder(_OfPictures):
    """Train the VAE to give back pictures through a small latent close to a normal distribution."""

    def __init__(self, model: Model, settings: AutoencoderLossSettings, read: ReadSettings) -> None:
        assert model.vae is not None
        super().__init__(model, read, {"vae": model.vae})
        self._settings = settings

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
            "heldout_psnr_db": _decibels(out_b3HW, pixels_b3HW),
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


@dataclass
class TinyVaeModel(Model):
    """A VAE, the teacher, and the small one that learns from it; what is written is the small one alone."""

    tiny: Any = None

    @property
    def modules(self) -> dict[str, nn.Module]:
        assert self.vae is not None
        return {"vae": self.vae, "tiny_vae": self.tiny}

    def write(self, folder: Path) -> None:
        """Write the folder of diffusers' AutoencoderTiny, as the optimisation `tiny_vae` opens it."""
        with replaced_folder(folder) as temporary, quiet():
            self.tiny.save_pretrained(str(temporary))


def teacher_of(base: str) -> Model | None:
    """A model whose VAE is the tiny VAE in a folder; None where the folder holds none."""
    if not is_tiny_vae(base):
        return None
    vae: Any = TinyPair.read(Path(base))
    return Model("tiny-vae", vae=vae, path=base)


def with_student(model: Model, settings: TinyVaeSettings, seed: int) -> TinyVaeModel:
    """The teacher's model, with a student of random weights."""
    from darkroom.models.parts import AutoencoderTiny

    levels = model.vae_factor.bit_length()
    widths, blocks = (settings.width,) * levels, (settings.blocks,) * (levels - 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tiny = AutoencoderTiny(
            latent_channels=model.latent_channels,
            encoder_block_out_channels=widths,
            decoder_block_out_channels=widths,
            num_encoder_blocks=(1, *blocks),
            num_decoder_blocks=(*blocks, 1),
        )
    return TinyVaeModel("tiny-vae", vae=model.vae, path=model.path, tiny=tiny)


class LearnTinyVae(_OfPictures):
    """Train the small encoder and decoder."""

    def __init__(self, model: TinyVaeModel, settings: TinyVaeSettings, read: ReadSettings) -> None:
        assert model.vae is not None
        super().__init__(model, read, {"tiny_vae": model.tiny}, (model.vae,))
        self._tiny, self._settings, self._scaling = model.tiny, settings, model.latent_scaling
        self._tiny.requires_grad_(True)

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each row [b]: `loss`, and its parts `reconstruction` and `latents`."""
        settings = self._settings
        mean_bChw, drawn_bChw, target_b3HW = self._taught(inputs)
        out_b3HW = self._decode(drawn_bChw)
        reconstruction_b = distance(out_b3HW, target_b3HW, settings.reconstruction)
        latents_b = square_error(self._encode(inputs["pixels"]), mean_bChw)
        loss_b = reconstruction_b + settings.latent_weight * latents_b
        if settings.edge_weight:
            loss_b = loss_b + settings.edge_weight * edge_distance(out_b3HW, target_b3HW)
        return {"loss": loss_b, "reconstruction": reconstruction_b, "latents": latents_b}

    def heldout(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each held-out row [b]: the loss of the decoder, its PSNR in dB against what it learns from, and
        that of a picture that went through both halves against the picture.
        """
        mean_bChw, drawn_bChw, target_b3HW = self._taught(inputs)
        out_b3HW = self._decode(drawn_bChw).clamp(-1, 1)
        return {
            "heldout_loss": distance(out_b3HW, target_b3HW, self._settings.reconstruction),
            "heldout_psnr_db": _decibels(out_b3HW, target_b3HW.clamp(-1, 1)),
            "heldout_latents": square_error(self._encode(inputs["pixels"]), mean_bChw),
            "heldout_picture_psnr_db": _decibels(self.reconstruct(inputs["pixels"]), inputs["pixels"]),
        }

    def measure(self, inputs: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        return {}

    def reconstruct(self, pixels_b3HW: Tensor) -> Tensor:
        """What the small encoder and decoder give back of pictures."""
        return self._decode(self._encode(pixels_b3HW)).clamp(-1, 1)

    @torch.no_grad()
    def _taught(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The teacher's mean latent and a drawn one, as the denoiser sees them, and the decoder's target."""
        teacher: Any = self.model.vae
        given = teacher.encode(inputs["pixels"].to(teacher.dtype), return_dict=False)[0]
        mean_bChw = given.mean.float()
        drawn_bChw = mean_bChw + (0.5 * given.logvar.float()).exp() * inputs["posterior"]
        target_b3HW = inputs["pixels"]
        if self._settings.target == "teacher":
            target_b3HW = teacher.decode(drawn_bChw.to(teacher.dtype), return_dict=False)[0].float()
        return self._scaling.seen(mean_bChw), self._scaling.seen(drawn_bChw), target_b3HW

    def _encode(self, pixels_b3HW: Tensor) -> Tensor:
        latents: Tensor = self._tiny.encoder(pixels_b3HW.to(self._tiny.dtype))
        return latents.float()

    def _decode(self, latents_bChw: Tensor) -> Tensor:
        pixels: Tensor = self._tiny.decoder(latents_bChw.to(self._tiny.dtype))
        return pixels.float()
