"""Encoders: what turns pictures into latent moments and captions into states, stored or inline alike.

Legend: B rows, H and W pixels, C channels, h and w latent pixels, L tokens, D width of a state, P of a
pooled.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from darkroom import models
from darkroom.data.loader import Batch
from darkroom.errors import InputError, ModelError
from darkroom.hardware.accelerator import to_device

_COUNTS = ("act_fn", "hidden_act", "norm_num_groups", "num_attention_heads", "layer_norm_eps")
"""Of an encoder's configuration: what its weights' names and shapes do not tell and its numbers depend on."""


def encoder_settings(*modules: nn.Module) -> str:
    """What of these encoders' configurations decides their numbers besides the weights, as JSON."""
    found = []
    for module in modules:
        config: Any = module.config
        given = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        found.append({name: given[name] for name in _COUNTS if name in given})
    return json.dumps(found, sort_keys=True)


def _compute_type(precision: str, device: torch.device) -> torch.dtype:
    """The number format to encode in; InputError for float16 on a CPU, where it is five times slower."""
    if precision == "fp16" and device.type == "cpu":
        raise InputError("precision fp16 on a CPU", allowed="float32, or bf16 (faster where the CPU has it)")
    return models.precision(precision)


def _placed(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The module on a device in a number format, in eval mode; a copy where the caller's would change."""
    here = next(module.parameters())
    if here.device != device or here.dtype != dtype or module.training:
        module = copy.deepcopy(module).to(device, dtype).eval()
    return module


class VaeEncoder:
    """Pictures to the mean and standard deviation of their latents.

    `identity` is the SHA-256 of the VAE's float32 weights, `settings` what else its numbers depend on,
    `scaling` how its latents become the U-Net's.
    """

    def __init__(
        self, vae: nn.Module, *, precision: str = "float32", device: str | torch.device = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self.precision, self._dtype = precision, _compute_type(precision, self.device)
        self.identity, self.settings = models.identity(vae), encoder_settings(vae)
        config: Any = vae.config
        self.scaling = models.LatentScaling.of(vae)
        self.channels = int(config.latent_channels)
        self.factor: int = 2 ** (len(config.block_out_channels) - 1)
        self._vae = _placed(vae, self.device, self._dtype)

    def to(self, device: str | torch.device) -> Self:
        """Move to a device, in place."""
        self.device = torch.device(device)
        self._dtype = _compute_type(self.precision, self.device)
        self._vae = _placed(self._vae, self.device, self._dtype)
        return self

    def encode(self, pixels_B3HW: Tensor) -> Tensor:
        """Moments float16 [B, 2, C, h, w] of uint8 pictures: mean and standard deviation, not scaled."""
        return encode_moments(self._vae, to_device(pixels_B3HW, self.device))


@torch.no_grad()
def encode_moments(vae: Any, pixels_B3HW: Tensor) -> Tensor:
    """What a VAE makes of uint8 pictures on its device, in its precision; moments as `VaeEncoder.encode`."""
    x_B3HW = (pixels_B3HW.float() / 127.5 - 1).to(next(vae.parameters()).dtype)
    latents = vae.encode(x_B3HW).latent_dist
    return torch.stack([latents.mean, latents.std], dim=1).to(torch.float16)


def sample_latents(
    moments_B2CHW: Tensor, posterior_BCHW: Tensor | None, scaling: models.LatentScaling
) -> Tensor:
    """Latents as the U-Net takes them, float32: mean + std * draw, scaled; without a draw the mean."""
    mean, std = moments_B2CHW.float().unbind(1)
    return scaling.seen(mean if posterior_BCHW is None else mean + std * posterior_BCHW.to(mean))


def tokenize(tokenizers: Sequence[Any], captions: Sequence[str]) -> list[Tensor]:
    """Token ids int64 [B, L] of each tokenizer, cut and padded to its length as diffusers' pipelines do."""
    return [
        tokenizer(
            models.spelled(tokenizer, captions),
            padding="max_length",
            max_length=tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        for tokenizer in tokenizers
    ]


def text_states(encoders: Sequence[nn.Module], tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """States [B, L, D] as the U-Net takes them, and SDXL's pooled state [B, P]; keeps gradients.

    One encoder: its last hidden state. Two (SDXL): their penultimate layers side by side, and the second's
    projected pooled state.
    """
    if len(encoders) == 1:
        states: Tensor = encoders[0](tokens[0]).last_hidden_state
        return states, None
    outs = [encoder(ids, output_hidden_states=True) for encoder, ids in zip(encoders, tokens, strict=True)]
    return torch.cat([out.hidden_states[-2] for out in outs], dim=-1), outs[-1].text_embeds


class TextEncoder:
    """Captions to text states.

    `identity` is the SHA-256 over the encoders' float32 weights and the tokenizers' vocabularies: the same
    weights read other words through another tokenizer. `settings` is what else their numbers depend on.
    """

    def __init__(
        self,
        encoders: Sequence[nn.Module],
        tokenizers: Sequence[Any],
        *,
        precision: str = "float32",
        device: str | torch.device = "cpu",
    ) -> None:
        if not encoders or len(encoders) != len(tokenizers):
            raise ModelError(f"{len(encoders)} text encoders and {len(tokenizers)} tokenizers")
        self.device = torch.device(device)
        self.precision, dtype = precision, _compute_type(precision, self.device)
        self.identity, self.settings = _text_identity(encoders, tokenizers), encoder_settings(*encoders)
        self._tokenizers = list(tokenizers)
        self._encoders = [_placed(encoder, self.device, dtype) for encoder in encoders]

    def to(self, device: str | torch.device) -> Self:
        """Move to a device, in place."""
        self.device = torch.device(device)
        dtype = _compute_type(self.precision, self.device)
        self._encoders = [_placed(encoder, self.device, dtype) for encoder in self._encoders]
        return self

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """States float16 [B, L, D] and, for SDXL, pooled float16 [B, P]."""
        return self.encode_tokens(tokenize(self._tokenizers, captions))

    @torch.no_grad()
    def encode_tokens(self, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The same of token ids [B, L], one for each text encoder."""
        states, pooled = text_states(self._encoders, [to_device(ids, self.device) for ids in tokens])
        return states.to(torch.float16), None if pooled is None else pooled.to(torch.float16)

    def empty(self) -> str:
        """The empty caption's states as the JSON that a text column's metadata keeps."""
        states, pooled = self.encode([""])
        parts = {"text": states[0]} | ({} if pooled is None else {"pooled": pooled[0]})
        packed = {
            name: {
                "data": base64.b64encode(part.cpu().contiguous().numpy().tobytes()).decode(),
                "shape": list(part.shape),
            }
            for name, part in parts.items()
        }
        return json.dumps(packed)


def _text_identity(encoders: Sequence[nn.Module], tokenizers: Sequence[Any]) -> str:
    digest = hashlib.sha256(models.identity(*encoders).encode())
    for tokenizer in tokenizers:
        kept = {"length": tokenizer.model_max_length, "vocabulary": tokenizer.get_vocab()}
        digest.update(json.dumps(kept, sort_keys=True).encode())
    return digest.hexdigest()


class InlineEncoder:
    """Adds to a batch of pixels and captions what prepared columns would have given: the same numbers."""

    def __init__(self, vae: VaeEncoder | None = None, text: TextEncoder | None = None) -> None:
        self._vae, self._text = vae, text

    def __call__(self, batch: Batch) -> Batch:
        """The batch itself, with `moments` and `text` (and `pooled`) where it lacks them."""
        if self._vae is not None and "moments" not in batch:
            batch.columns["moments"] = self._vae.encode(batch["pixels"])
        if self._text is not None and "text" not in batch:
            states, pooled = self._text.encode(batch["caption"])
            batch.columns["text"] = states
            if pooled is not None:
                batch.columns["pooled"] = pooled
        return batch
