"""Modules as exporters want them: tensors in, one tensor out, with examples and names for each.

Shapes: B rows, C H W latents, L tokens, D text width, P pooled width, N layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from darkroom.errors import InputError

EXAMPLE_ROWS, EXAMPLE_SIDES, EXAMPLE_TOKENS = 2, (16, 24), 77
"""Small and all different, so that no exporter takes two sides for one."""


@dataclass(frozen=True, repr=False)
class Shell:
    """A module to export: `inputs` are examples by name, `open_axes` the axes of each that may change."""

    part: str
    module: nn.Module
    inputs: dict[str, torch.Tensor]
    open_axes: dict[str, tuple[int, ...]]
    out_shape: Callable[[torch.Tensor], tuple[int, ...]]
    """The output's shape for a first input."""

    def check(self, names: Iterable[str]) -> None:
        """InputError for an input that the module was not exported with."""
        for name in names:
            if name not in self.inputs:
                raise _not_taken(name)

    @property
    def shape(self) -> str:
        """The inputs with their open axes as ?, as the cache's key says it."""
        return " ".join(
            name + "x".join("?" if i in self.open_axes[name] else str(n) for i, n in enumerate(value.shape))
            for name, value in self.inputs.items()
        )


def _picture_shape(channels: int, scale: int = 1) -> Callable[[torch.Tensor], tuple[int, ...]]:
    """So many channels, on sides `scale` times as long as those of the first input."""

    def shape(first_BCHW: torch.Tensor) -> tuple[int, ...]:
        rows, _, height, width = first_BCHW.shape
        return rows, channels, height * scale, width * scale

    return shape


class UnetShell(nn.Module):
    """A U-Net with its further conditions as plain inputs, float32 outside whatever is inside."""

    def __init__(self, unet: nn.Module, added: tuple[str, ...]) -> None:
        super().__init__()
        self.unet, self.added = unet, added
        self.dtype = next(unet.parameters()).dtype

    def forward(
        self, x_BCHW: torch.Tensor, t_B: torch.Tensor, text_BLD: torch.Tensor, *more: torch.Tensor
    ) -> torch.Tensor:
        """Latents, timesteps, text and the U-Net's further conditions, in the order of the inputs."""
        added = {  # sizes in pixels would lose digits in half precision
            name: value if name == "time_ids" else value.to(self.dtype)
            for name, value in zip(self.added, more, strict=True)
        }
        guidance = added.pop("timestep_cond", None)
        out: torch.Tensor = self.unet(
            x_BCHW.to(self.dtype),
            t_B,
            encoder_hidden_states=text_BLD.to(self.dtype),
            timestep_cond=guidance,
            added_cond_kwargs=added or None,
            return_dict=False,
        )[0]
        return out.float()


class DecoderShell(nn.Module):
    """A VAE's decoder, or a tiny one: unscaled latents to pixels of -1 to 1."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.post_quant_conv, self.decoder = getattr(vae, "post_quant_conv", None), vae.decoder
        self.dtype = next(vae.parameters()).dtype

    def forward(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, H, W] to pixels [B, 3, 8H, 8W] of -1 to 1."""
        latents_BCHW = latents_BCHW.to(self.dtype)
        if self.post_quant_conv is not None:
            latents_BCHW = self.post_quant_conv(latents_BCHW)
        out: torch.Tensor = self.decoder(latents_BCHW)
        return out.float()


def unet_shell(unet: Any) -> Shell:
    """A U-Net of SD 1, 2 or XL, with whatever conditions its configuration needs."""
    config = unet.config
    rows, (height, width) = EXAMPLE_ROWS, EXAMPLE_SIDES
    inputs = {
        "x": torch.zeros(rows, int(config.in_channels), height, width),
        "t": torch.full((rows,), 500.0),
        "text": torch.zeros(rows, EXAMPLE_TOKENS, _one(config.cross_attention_dim)),
    }
    open_axes: dict[str, tuple[int, ...]] = {"x": (0, 2, 3), "t": (0,), "text": (0, 1)}
    for name, size in _added_sizes(config).items():
        inputs[name] = torch.zeros(rows, size)
        open_axes[name] = (0,)
    added = tuple(name for name in inputs if name not in ("x", "t", "text"))
    out_shape = _picture_shape(int(config.out_channels))
    return Shell("unet", UnetShell(unet, added).eval(), inputs, open_axes, out_shape)


def _not_taken(name: str) -> InputError:
    if name.startswith("adapter_"):
        return InputError(
            "adapters with an exported U-Net", mend="merge them into the model, or use backend torch"
        )
    return InputError(f"'{name}' for an exported U-Net", mend="use backend torch")


def _one(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _added_sizes(config: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        sizes |= {"text_embeds": int(pooled), "time_ids": 6}
    elif config.addition_embed_type is not None:
        raise InputError(f"a U-Net with '{config.addition_embed_type}'", mend="use backend torch")
    if getattr(config, "time_cond_proj_dim", None) is not None:
        sizes["timestep_cond"] = int(config.time_cond_proj_dim)
    return sizes


def decoder_shell(vae: Any) -> Shell:
    """A VAE's decoder, or a tiny one in its place."""
    latents = torch.zeros(1, int(vae.config.latent_channels), *EXAMPLE_SIDES)
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    module = DecoderShell(vae).eval()
    out_shape = _picture_shape(3, scale)
    return Shell("vae_decoder", module, {"latents": latents}, {"latents": (0, 2, 3)}, out_shape)


class TextShell(nn.Module):
    """The layers of a CLIP text encoder; each token sees those before it."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, embedded_BLD: torch.Tensor) -> torch.Tensor:
        """Embedded tokens [B, L, D] to the states after each layer [B, N, L, D]."""
        length = embedded_BLD.shape[1]
        unseen_LL = torch.full((length, length), torch.finfo(embedded_BLD.dtype).min).triu(1)
        states = []
        for layer in self.layers:
            embedded_BLD = layer(embedded_BLD, unseen_LL[None, None])
            states.append(embedded_BLD)
        return torch.stack(states, dim=1)


def text_layers(encoder: nn.Module) -> list[nn.Module]:
    """A CLIP text encoder's layers in their order."""
    return [part for part in encoder.modules() if type(part).__name__ == "CLIPEncoderLayer"]


def text_shell(part: str, encoder: Any) -> Shell:
    """What a CLIP text encoder computes between embedded tokens and its last norm; its length is fixed."""
    layers, config = text_layers(encoder), encoder.config
    inputs = {
        "embedded": torch.zeros(EXAMPLE_ROWS, int(config.max_position_embeddings), int(config.hidden_size))
    }

    def shape(first_BLD: torch.Tensor) -> tuple[int, ...]:
        rows, length, width = first_BLD.shape
        return rows, len(layers), length, width

    return Shell(part, TextShell(layers).eval(), inputs, {"embedded": (0,)}, shape)


def look_alike(module: nn.Module) -> Any:
    """The same structure anew around the same weights: what is changed in it leaves the original alone."""
    shared = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
