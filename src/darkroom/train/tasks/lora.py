"""LoRA layers on a model's frozen weights: which layers, how many numbers, and the file they become.

PEFT makes the layers; their parameters alone are trained, averaged and saved. They are named
`<part>.<module>.lora_A.default.weight`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from darkroom.errors import RecipeError
from darkroom.recipe.sections import AdapterSettings

if TYPE_CHECKING:
    from darkroom.models.adapters.adapter import Adapter
    from darkroom.models.model import Model


NAME = "default"  # PEFT's own name for a single adapter
BLOCKS = re.compile(r"(down_blocks|mid_block|up_blocks|blocks)\.")
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
TEXT_LINEAR = (*TEXT_ATTENTION, "fc1", "fc2")
NAMED = ("qv", "attention", "all-linear", "conv")


def add_adapters(model: Model, settings: AdapterSettings, *, seed: int = 0) -> dict[str, nn.Module]:
    """Put LoRA layers into the U-Net (and text encoders); returns the parts that have some, by name.

    The first matrix starts as PEFT draws it with `seed`, the second as zeros: the model is unchanged. Only
    the new parameters require gradients. RecipeError where a pattern names no layer.
    """
    parts = {
        name: module
        for name, module in model.modules.items()
        if name == "unet" or (settings.text_encoder and name.startswith("text_encoder"))
    }
    chosen = {part: target_layers(part, module, settings.targets) for part, module in parts.items()}
    _check_patterns(parts, chosen, settings.targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part, layers in chosen.items():
            if layers:
                _inject(parts[part], layers, settings)
    return {part: parts[part] for part, layers in chosen.items() if layers}


def target_layers(part: str, module: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """The names of a part's layers that targets mean."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    if not isinstance(targets, str):
        return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in targets)]
    if part != "unet":
        ends = {"qv": ("q_proj", "v_proj"), "attention": TEXT_ATTENTION}.get(targets, TEXT_LINEAR)
        return [name for name in names if name.rsplit(".", 1)[-1] in ends]
    if targets in ("qv", "attention"):
        ends = ("to_q", "to_v") if targets == "qv" else ATTENTION
        return [name for name in names if name.endswith(tuple(f".{end}" for end in ends))]
    kinds = (nn.Linear,) if targets == "all-linear" else (nn.Linear, nn.Conv2d)
    return [n for n, layer in module.named_modules() if isinstance(layer, kinds) and BLOCKS.match(n)]


def _check_patterns(
    parts: Mapping[str, nn.Module], chosen: Mapping[str, list[str]], targets: str | tuple[str, ...]
) -> None:
    if isinstance(targets, str):
        return
    found = [name for layers in chosen.values() for name in layers]
    for pattern in targets:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in found):
            example = next(n for n, m in parts["unet"].named_modules() if n.endswith("attn2.to_k"))
            raise RecipeError(
                "adapter.targets",
                f"'{pattern}' names no linear or convolution layer",
                allowed=f"{', '.join(NAMED)}, or patterns of names such as {example}",
            )


def _inject(module: nn.Module, layers: list[str], settings: AdapterSettings) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.rank if settings.alpha is None else settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        target_modules="|".join(map(re.escape, layers)),
    )
    module.requires_grad_(False)
    inject_adapter_in_model(config, module, adapter_name=NAME)


def parameter_table(modules: Mapping[str, nn.Module]) -> tuple[int, int]:
    """Trainable parameters, and all of the parts' parameters together."""
    params = [param for module in modules.values() for param in module.parameters()]
    return sum(p.numel() for p in params if p.requires_grad), sum(p.numel() for p in params)


# ---- out again


def adapter_of(
    name: str, values: Mapping[str, Tensor], settings: AdapterSettings, metadata: Mapping[str, str]
) -> Adapter:
    """The adapter that trained values, named `<part>.<module>.lora_...`, are, in float32."""
    from darkroom.models.adapters.adapter import Adapter
    from darkroom.models.adapters.layers import Factors, Layer

    layers: dict[str, Layer | Factors] = {}
    for key, down in values.items():
        path, found, _ = key.partition(f".lora_A.{NAME}.")
        if found:
            up = values[f"{path}.lora_B.{NAME}.weight"]
            magnitude = values.get(f"{path}.lora_magnitude_vector.{NAME}.weight")
            flat = None if magnitude is None else _plain(magnitude).flatten()
            layers[path] = Layer(_plain(down), _plain(up), settings.scale, flat)
    return Adapter(name, layers, metadata, "dora" if settings.dora else "lora")


def _plain(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float32).contiguous()
