"""`tiny_vae`: a small decoder distilled from the VAE (TAESD, Ollin Boer Bohan), about 18 times less work.

Two file layouts are read: diffusers' AutoencoderTiny, and the numbered layers of the TAESD repository with a
`config.json` that says how many there are (its later members pool over the picture in the middle blocks).

Shapes: B pictures, C channels, H W latents.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from darkroom.errors import InputError, is_system_failure
from darkroom.models.checked import read_json, tensor_types
from darkroom.models.tiny import NumberedDecoder, NumberedEncoder
from darkroom.sample.optimisations.applied import Applied

OF_FAMILY = {"sdxl": "madebyollin/taesdxl"}
OTHERS = "madebyollin/taesd"


class TinyFront(nn.Module):
    """A tiny decoder as `pictures.decode` calls a VAE: it takes latents as the U-Net gives them."""

    def __init__(self, decoder: nn.Module, channels: int, factor: int) -> None:
        super().__init__()
        self.decoder, self.channels, self.factor = decoder, channels, factor
        # Latents come as they are: scaling factor 1, and as many widths as tell `decode` the factor.
        self.config = _Config(
            scaling_factor=1.0, latent_channels=channels, block_out_channels=[0] * factor.bit_length(),
            layers=str(decoder),
        )  # fmt: skip

    def decode(self, latents_BCHW: torch.Tensor) -> Any:
        """Pixels of -1 to 1, under `sample`."""
        return SimpleNamespace(sample=self.decoder(latents_BCHW))


class _Config(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


def tiny_vae(applied: Applied, argument: str) -> None:
    """Another, small decoder in the VAE's place."""
    model = applied.model
    source = argument or OF_FAMILY.get(model.family, OTHERS)
    dtype = next(model.vae.parameters()).dtype  # type: ignore[union-attr]
    front = load_tiny(source)
    if front.channels != model.latent_channels:
        raise InputError(
            f"tiny_vae:{source} decodes {front.channels} latent channels",
            allowed=f"a decoder of {model.latent_channels}, as the model's VAE",
        )
    if front.factor != model.vae_factor:
        raise InputError(
            f"tiny_vae:{source} makes {front.factor} pixels of each latent's side",
            allowed=f"a decoder that makes {model.vae_factor}, as the model's VAE",
        )
    front.to(applied.device, dtype)
    applied.tiny_vae = front
    applied.notes.append(f"tiny_vae: decoded by {Path(source).name}, not by the model's VAE")


MOST = 4096
"""Of channels, blocks and the like in a configuration."""


def load_tiny(source: str) -> TinyFront:
    """A tiny decoder from a folder or a hub id. InputError where there is none that can be read."""
    about = Path(source) / "config.json"
    config = read_json(about) if about.is_file() else {}
    if "blocks_per_stage_decoder" in config:
        decoder = _numbered(Path(source), config)
        return TinyFront(decoder, int(config["latent_channels"]), int(config["downscale"]))
    from darkroom.models.checked import fetch
    from darkroom.models.reference import is_hub_id

    if not Path(source).is_dir() and is_hub_id(source):
        source = str(
            fetch(
                source,
                ["*.json", "*.safetensors"],
                whole=lambda folder: any(folder.glob("*.safetensors")),
                mend="give a folder with its config.json and safetensors: tiny_vae:FOLDER",
            )
        )
    tiny = _of_diffusers(source)
    return TinyFront(tiny.decoder, int(tiny.config.latent_channels), _factor(tiny))


def _factor(tiny: Any) -> int:
    """How many pixels a latent pixel spans along each side."""
    return int(2 ** (len(tiny.config.decoder_block_out_channels) - 1))


def _of_diffusers(source: str) -> Any:
    """diffusers' AutoencoderTiny in a folder."""
    from darkroom.libraries import quiet
    from darkroom.models.parts import AutoencoderTiny

    try:
        with quiet():
            tiny: Any = AutoencoderTiny.from_pretrained(source, use_safetensors=True, local_files_only=True)
    except (OSError, ValueError) as error:
        if is_system_failure(error):
            raise
        raise InputError(
            f"tiny_vae: no tiny decoder in '{source}'",
            mend="give a folder with its config.json and safetensors: tiny_vae:FOLDER",
        ) from error
    return tiny.eval()


def _numbered(folder: Path, config: dict[str, Any], half: str = "decoder") -> Any:
    """A half of the repository's own layout: layers by number, picture values of 0 to 1."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise InputError(f"tiny_vae:{folder} holds {len(files)} safetensors files", allowed="one")
    _check_numbers(folder, config, half)
    made = (NumberedDecoder if half == "decoder" else NumberedEncoder)(config)
    weights = {
        key.removeprefix(f"{half}."): value
        for key, value in _tensors(files[0]).items()
        if key.startswith(f"{half}.")
    }
    try:
        made.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"tiny_vae:{folder}: the weights do not fit its config.json") from error
    return made.eval()


def _check_numbers(folder: Path, config: dict[str, Any], half: str) -> None:
    stages = config.get(f"blocks_per_stage_{half}")
    for name in ("width", "latent_channels", "downscale"):
        if type(config.get(name)) is not int or not 1 <= config[name] <= MOST:
            raise InputError(f"tiny_vae:{folder}: {name} {config.get(name)!r}", allowed=f"1 to {MOST}")
    if not (isinstance(stages, list) and stages and all(type(n) is int and 1 <= n <= MOST for n in stages)):
        raise InputError(f"tiny_vae:{folder}: blocks_per_stage_{half} {stages!r}", allowed="a list of counts")


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensor_types([file])  # ModelError for a file that is cut short or damaged
    found: dict[str, torch.Tensor] = load_file(file)
    return found


class TinyPair(nn.Module):
    """Both halves of a tiny VAE in the place of diffusers' AutoencoderKL: its latents have no spread."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, channels: int, factor: int) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        widths = [0] * factor.bit_length()
        self.config = _Config(scaling_factor=1.0, latent_channels=channels, block_out_channels=widths)

    @classmethod
    def read(cls, folder: Path) -> TinyPair:
        """A folder of either layout. InputError where it cannot be read."""
        config = read_json(folder / "config.json")
        if "blocks_per_stage_decoder" in config:
            encoder, decoder = (_numbered(folder, config, half) for half in ("encoder", "decoder"))
            pair = cls(encoder, decoder, int(config["latent_channels"]), int(config["downscale"]))
        else:
            tiny = _of_diffusers(str(folder))
            pair = cls(tiny.encoder, tiny.decoder, int(tiny.config.latent_channels), _factor(tiny))
        return pair.float().eval()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype

    def encode(self, pixels_B3HW: torch.Tensor, return_dict: bool = False) -> tuple[Any]:
        """The mean latent, and a logarithm of the variance that is next to nothing."""
        mean = self.encoder(pixels_B3HW)
        return (SimpleNamespace(mean=mean, logvar=torch.full_like(mean, -60.0)),)

    def decode(self, latents_BCHW: torch.Tensor, return_dict: bool = False) -> tuple[torch.Tensor]:
        """Pixels of -1 to 1."""
        return (self.decoder(latents_BCHW),)


def is_tiny_vae(folder: str) -> bool:
    """Whether a folder holds a tiny VAE of either layout."""
    about = Path(folder) / "config.json"
    config = read_json(about) if about.is_file() else {}
    return "blocks_per_stage_decoder" in config or config.get("_class_name") == "AutoencoderTiny"
