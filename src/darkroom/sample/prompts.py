"""Prompts to what the U-Net listens to: tokens, text states, and SDXL's pooled text and size conditioning.

Shapes: B prompts, L tokens, D text width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from darkroom.errors import InputError
from darkroom.sample.denoise import Condition

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

    from darkroom.models import Model

ENCODE_BATCH = 32


def tokenize(
    tokenizer: CLIPTokenizer, prompts: Sequence[str], length: int = 77
) -> tuple[torch.Tensor, list[str]]:
    """Token ids [B, L], padded to `length` (77 for CLIP) and cut there, with a notice for each prompt cut."""
    length = min(length, tokenizer.model_max_length)
    ids_BL = tokenizer(
        list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    notices = []
    for prompt, whole in zip(prompts, tokenizer(list(prompts), verbose=False).input_ids, strict=True):
        if len(whole) > length:
            lost = tokenizer.decode(whole[length - 1 : -1]).strip()
            notices.append(f"prompt '{_short(prompt)}' is cut after {length - 2} tokens; not read: '{lost}'")
    return ids_BL, notices


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


@torch.no_grad()
def encode_prompts(
    model: Model, prompts: Sequence[str], size: tuple[int, int]
) -> tuple[list[Condition], list[str]]:
    """A condition for each prompt, and notices of what was cut. `size` (width, height) is told to SDXL.

    SD 1 and 2: the text encoder's last states after its final norm. SDXL: both encoders' states one layer
    below the last, side by side, with the second one's pooled projection and the picture's size.
    """
    conditions: list[Condition] = []
    notices: dict[str, None] = {}
    for start in range(0, len(prompts), ENCODE_BATCH):
        some = prompts[start : start + ENCODE_BATCH]
        states: list[torch.Tensor] = []
        pooled = None
        for tokenizer, encoder in zip(model.tokenizers, model.text_encoders, strict=True):
            config: Any = encoder.config
            ids_BL, cut = tokenize(tokenizer, some, config.max_position_embeddings)
            if not states:  # SDXL's two tokenizers cut alike
                notices |= dict.fromkeys(cut)
            given = encoder(ids_BL.to(_device(encoder)), output_hidden_states=model.is_sdxl)
            states.append(given.hidden_states[-2] if model.is_sdxl else given[0])
            pooled = given[0] if model.is_sdxl else None
        text_BLD = torch.cat(states, dim=-1)
        for i in range(len(some)):
            added = {} if pooled is None else {"text_embeds": pooled[i], "time_ids": time_ids(size, text_BLD)}
            conditions.append(Condition(text_BLD[i], added))
    return conditions, list(notices)


def _device(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device


def time_ids(size: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """SDXL's size conditioning [6]: original height and width, crop top and left, target height and width."""
    width, height = size
    return torch.tensor([height, width, 0, 0, height, width], device=like.device, dtype=like.dtype)


def silent(condition: Condition) -> Condition:
    """SDXL's condition for no negative prompt at all: zeros for the text, the size as it is."""
    added = {
        name: value if name == "time_ids" else torch.zeros_like(value)
        for name, value in condition.added.items()
    }
    return Condition(torch.zeros_like(condition.text_LD), added)


def guidance_embedding(guidance: float, width: int) -> torch.Tensor:
    """A guidance scale as sines and cosines [width], for U-Nets distilled to take it (Luo et al. 2023)."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000.0) / (half - 1)))
    angles = (guidance - 1) * 1000.0 * frequencies
    return torch.nn.functional.pad(torch.cat([angles.sin(), angles.cos()]), (0, width % 2))


def check_text_parts(model: Model) -> None:
    """InputError unless the model can read prompts and its U-Net takes what they give."""
    if not model.text_encoders or len(model.tokenizers) != len(model.text_encoders):
        raise InputError("the model has no text encoder with its tokenizer", mend="it cannot read prompts")
    if not model.is_sdxl or model.unet is None:
        return
    config: Any = model.unet.config
    pooled = int(getattr(model.text_encoders[-1].config, "projection_dim", 0))
    given = pooled + 6 * int(config.addition_time_embed_dim)
    if given != config.projection_class_embeddings_input_dim:
        raise InputError(
            f"the U-Net takes {config.projection_class_embeddings_input_dim} added numbers, not {given}",
            allowed="SDXL base's conditioning; its refiner is not known",
        )
