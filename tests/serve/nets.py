"""Nets of random weights on disk, and pictures that steer by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from darkroom.models.image_prompt import cross_attentions
from darkroom.models.upscaler import RRDBNet

NAMES = ("depth", "edges", "face", "pose", "sketch")


def shaken(net: Any, seed: int) -> Any:
    """Weights that do something: a fresh net's last convolutions are zero."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw) * 0.1)
    return net


def write_nets(folder: Path, model: Any, other: Any) -> None:
    """ControlNets `edges`, `depth` and `pose`, T2I-Adapter `sketch`, IP-Adapter `face`; `foreign`
    is for another model, `broken` no net at all."""

    def controlnet(of: Any, seed: int) -> Any:
        torch.manual_seed(seed)
        channels = (16, 32, 96, 256)[: of.vae_factor.bit_length()]
        made = diffusers.ControlNetModel.from_unet(of.unet, conditioning_embedding_out_channels=channels)
        return shaken(made, seed)

    controlnet(model, 1).save_pretrained(str(folder / "edges"))
    controlnet(other, 1).save_pretrained(str(folder / "foreign"))
    controlnet(model, 2).save_pretrained(str(folder / "depth"))
    wide = list(model.unet.config.block_out_channels)
    sketch = diffusers.T2IAdapter(3, wide, 1, model.vae_factor, "full_adapter")
    shaken(sketch, 3).save_pretrained(str(folder / "sketch"))
    controlnet(model, 4).save_pretrained(str(folder / "pose"))
    write_image_prompt(folder / "face.safetensors", model)
    (folder / "broken.safetensors").write_bytes(b"no net")


def write_image_prompt(file: Path, model: Any) -> None:
    """An IP-Adapter of random weights in the layout of the published files, and its encoder beside it."""
    draw = torch.Generator().manual_seed(6)
    width = int(model.unet.config.cross_attention_dim)

    def weight(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=draw)

    tensors = {
        "image_proj.proj.weight": weight(4 * width, 24),
        "image_proj.proj.bias": weight(4 * width),
        "image_proj.norm.weight": torch.ones(width),
        "image_proj.norm.bias": torch.zeros(width),
    }
    for i, (_, attention) in enumerate(cross_attentions(model.unet)):
        for part in "kv":
            tensors[f"ip_adapter.{2 * i + 1}.to_{part}_ip.weight"] = weight(
                attention.to_k.out_features, width
            )
    save_file(tensors, str(file))
    torch.manual_seed(6)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=24,
        image_size=32,
        patch_size=8,
    )
    CLIPVisionModelWithProjection(vision).save_pretrained(str(file.parent / "image_encoder"))


def steering(seed: int) -> Image.Image:
    """A picture of 4 by 4 squares."""
    small = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize((32, 32), Image.Resampling.NEAREST)


def file_of(nets: Path, name: str) -> Path:
    return next(file for file in (nets / name, nets / f"{name}.safetensors") if file.exists())


def write_network(file: Path) -> Path:
    """A network of random weights that makes pictures four times as large."""
    torch.manual_seed(4)
    net = RRDBNet(4, 4, 1, 2)
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    save_file({key: tensor.clone() for key, tensor in net.state_dict().items()}, str(file))
    return file
