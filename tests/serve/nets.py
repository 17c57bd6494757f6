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

NAMES = ("depth", "edges", "face", "lines", "pose", "sketch")


def shaken(net: Any, seed: int) -> Any:
    """Weights that do something: a fresh net's last convolutions are zero."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw) * 0.1)
    return net


def write_nets(folder: Path, model: Any, other: Any) -> None:
    """ControlNets `edges`, `depth` and `pose`, LLLite `lines`, T2I-Adapter `sketch`, IP-Adapter `face`;
    `foreign` is for another model, `broken` no net at all."""

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
    write_lite(folder / "lines.safetensors", model)
    (folder / "broken.safetensors").write_bytes(b"no net")


def write_lite(file: Path, model: Any) -> None:
    """A ControlNet-LLLite of random weights in kohya's layout, for the self-attentions of the down blocks."""
    draw = torch.Generator().manual_seed(7)
    tensors = {}
    for path, layer in model.unet.named_modules():
        if not path.startswith("down_blocks.") or not path.endswith(
            ("attn1.to_q", "attn1.to_k", "attn1.to_v")
        ):
            continue
        level = int(path.split(".")[1])
        shapes: dict[str, tuple[int, ...]] = {"down.0": (4, layer.in_features), "mid.0": (4, 12)}
        shapes["up.0"] = layer.in_features, 4
        pixels, wide, at = model.vae_factor * 2**level, 3, 0
        while pixels > 1:  # kernels as large as their stride, of 4 pixels where they divide
            kernel = 4 if pixels % 4 == 0 else pixels
            shapes[f"conditioning1.{at}"] = 8, wide, kernel, kernel
            pixels, wide, at = pixels // kernel, 8, at + 2
        for role, shape in shapes.items():
            key = f"lllite_unet_{path.replace('.', '_')}.{role}"
            tensors[f"{key}.weight"] = 0.5 * torch.randn(*shape, generator=draw)
            tensors[f"{key}.bias"] = 0.5 * torch.randn(shape[0], generator=draw)
    save_file(tensors, str(file))


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
