"""Names of weights in the original Stable Diffusion layout, which ComfyUI and A1111 read.

The rules say for a model's own configuration which original tensor each of its weights is; the same rules
read a file and write one. Tensors differ in shape only where the VAE's attention was a 1x1 convolution, and
in OpenCLIP's text encoders, whose queries, keys and values are one matrix.
"""

from __future__ import annotations

import re
from typing import Any

import torch

Weights = dict[str, torch.Tensor]

UNET, VAE = "model.diffusion_model.", "first_stage_model."
# The text encoders by the width of the text, as the original code's classes name them.
CLIP = "cond_stage_model.transformer.text_model."
OPENCLIP = "cond_stage_model.model."
SDXL_CLIP = "conditioner.embedders.0.transformer.text_model."
SDXL_OPENCLIP = "conditioner.embedders.1.model."

UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
OPENCLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
OPENCLIP_ENDS = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
QKV = ("q_proj", "k_proj", "v_proj")


def unet_names(config: Any) -> dict[str, str]:
    """Module paths of a U-Net and where they stand in the original, without its prefix."""
    names = dict(UNET_ENDS)
    depth, layers = len(config["block_out_channels"]), config["layers_per_block"]
    at = 1
    for block in range(depth):
        for layer in range(layers):
            names[f"down_blocks.{block}.resnets.{layer}"] = f"input_blocks.{at}.0"
            names[f"down_blocks.{block}.attentions.{layer}"] = f"input_blocks.{at}.1"
            at += 1
        if block + 1 < depth:
            names[f"down_blocks.{block}.downsamplers.0.conv"] = f"input_blocks.{at}.0.op"
            at += 1
    for place, name in enumerate(("resnets.0", "attentions.0", "resnets.1")):
        names[f"mid_block.{name}"] = f"middle_block.{place}"
    at = 0
    for block in range(depth):
        for layer in range(layers + 1):
            names[f"up_blocks.{block}.resnets.{layer}"] = f"output_blocks.{at}.0"
            names[f"up_blocks.{block}.attentions.{layer}"] = f"output_blocks.{at}.1"
            at += 1
        attends = config["up_block_types"][block].startswith("CrossAttn")
        names[f"up_blocks.{block}.upsamplers.0.conv"] = f"output_blocks.{at - 1}.{1 + attends}.conv"
    return names


def vae_names(config: Any) -> dict[str, str]:
    """Module paths of a VAE and where they stand in the original, without its prefix."""
    depth, layers = len(config["block_out_channels"]), config["layers_per_block"]
    names = {"quant_conv": "quant_conv", "post_quant_conv": "post_quant_conv"}
    for half in ("encoder", "decoder"):
        names |= {f"{half}.conv_in": f"{half}.conv_in", f"{half}.conv_out": f"{half}.conv_out"}
        names |= {
            f"{half}.conv_norm_out": f"{half}.norm_out",
            f"{half}.mid_block.resnets.0": f"{half}.mid.block_1",
            f"{half}.mid_block.attentions.0": f"{half}.mid.attn_1",
            f"{half}.mid_block.resnets.1": f"{half}.mid.block_2",
        }
    for block in range(depth):
        down, up = f"encoder.down.{block}", f"decoder.up.{depth - 1 - block}"
        for layer in range(layers):
            names[f"encoder.down_blocks.{block}.resnets.{layer}"] = f"{down}.block.{layer}"
        for layer in range(layers + 1):
            names[f"decoder.up_blocks.{block}.resnets.{layer}"] = f"{up}.block.{layer}"
        names[f"encoder.down_blocks.{block}.downsamplers.0.conv"] = f"{down}.downsample.conv"
        names[f"decoder.up_blocks.{block}.upsamplers.0.conv"] = f"{up}.upsample.conv"
    return names


def original_unet_name(name: str, names: dict[str, str]) -> str:
    """The original name of a U-Net's weight."""
    path, rest = _place(name, names)
    return names[path] + _inner(rest, UNET_RESNET if ".resnets." in f".{path}." else {})


def original_vae_name(name: str, names: dict[str, str]) -> str:
    """The original name of a VAE's weight."""
    path, rest = _place(name, names)
    inner = VAE_ATTENTION if ".attentions." in f".{path}." else {"conv_shortcut": "nin_shortcut"}
    return names[path] + _inner(rest, inner)


def _place(name: str, names: dict[str, str]) -> tuple[str, str]:
    """The longest known module path that a weight's name starts with, and the rest of the name."""
    path = name
    while path not in names:
        path, _, _ = path.rpartition(".")
        if not path:
            raise KeyError(name)
    return path, name[len(path) :]


def _inner(rest: str, renamed: dict[str, str]) -> str:
    module, _, kind = rest[1:].rpartition(".")
    inner = renamed.get(module, module)
    return f".{inner}.{kind}" if inner else f".{kind}"


def is_flat_in_vae(name: str) -> bool:
    """Whether a VAE's weight is a matrix here and a 1x1 convolution in the original."""
    return bool(re.search(r"attentions\.0\.to_(q|k|v|out\.0)\.weight$", name))


def openclip_names(layers: int) -> dict[str, str]:
    """Weights of a CLIP text model that stand in an OpenCLIP file under another name, as they are."""
    names = dict(OPENCLIP_ENDS)
    for i in range(layers):
        for ours, theirs in OPENCLIP_LAYER.items():
            for kind in ("weight", "bias"):
                names[f"encoder.layers.{i}.{ours}.{kind}"] = f"transformer.resblocks.{i}.{theirs}.{kind}"
    return names


def openclip_packed(layers: int) -> dict[str, list[str]]:
    """OpenCLIP's packed tensors, and the three of ours that each holds."""
    return {
        f"transformer.resblocks.{i}.attn.in_proj_{kind}": [
            f"encoder.layers.{i}.self_attn.{one}.{kind}" for one in QKV
        ]
        for i in range(layers)
        for kind in ("weight", "bias")
    }
