"""The architectures darkroom knows by name, and how to make one with random weights.

The numbers are those of the published models' own configuration files: Stable Diffusion 1.5, 2 base,
2 with v-prediction at 768 px, and SDXL base. `tiny` is the same architecture at a width that trains on
two CPU cores; every number of it can be overridden. `dit` is darkroom's own: a diffusion transformer on
rectified flow with SD 1.5's VAE and text encoder; `tiny-dit` is small in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from darkroom.errors import ModelError
from darkroom.models.model import PARTS, TRANSFORMER, Model, numbered
from darkroom.models.quick_open import without_start
from darkroom.models.tokenizer import find_tokenizer, train_tokenizer, with_padding

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

Config = dict[str, Any]

BETAS: Config = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "steps_offset": 1,
}
PNDM: Config = {
    "_class_name": "PNDMScheduler",
    **BETAS,
    "skip_prk_steps": True,
    "set_alpha_to_one": False,
    "timestep_spacing": "leading",
}
DDIM: Config = {
    "_class_name": "DDIMScheduler",
    **BETAS,
    "clip_sample": False,
    "set_alpha_to_one": False,
    "timestep_spacing": "leading",
}
EULER: Config = {"_class_name": "EulerDiscreteScheduler", **BETAS, "timestep_spacing": "leading"}

VAE: Config = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 512,
    "scaling_factor": 0.18215,
    "force_upcast": False,
}
UNET: Config = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
SD2_UNET: Config = {
    **UNET,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
SDXL_UNET: Config = {
    **UNET,
    "sample_size": 128,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [320, 640, 1280],
    "transformer_layers_per_block": [1, 2, 10],
    "cross_attention_dim": 2048,
    "attention_head_dim": [5, 10, 20],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
# OpenAI's CLIP ViT-L/14. Its published configuration says eos_token_id 2, which transformers reads as
# "take the highest id": the same position as the real end token 49407.
CLIP_L: Config = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
    "max_position_embeddings": 77,
    "projection_dim": 768,
    "bos_token_id": 49406,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
OPENCLIP_H: Config = {
    **CLIP_L,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "projection_dim": 512,
}
OPENCLIP_G: Config = {
    **CLIP_L,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}
TINY_UNET: Config = {
    **UNET,
    "sample_size": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "cross_attention_dim": 64,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}
TINY_VAE: Config = {
    **VAE,
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [16, 32, 32],
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 32,
    "scaling_factor": 1.0,
}
TINY_TEXT: Config = {
    **CLIP_L,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 64,
}
FLOW: Config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
DIT: Config = {
    "sample_size": 32,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 16,
    "num_attention_heads": 16,
    "attention_head_dim": 64,
    "cross_attention_dim": 768,
}
TINY_DIT: Config = {
    **DIT,
    "sample_size": 8,
    "num_layers": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "cross_attention_dim": 64,
}
CLIP_WORD_SPREAD, TINY_WORD_SPREAD = 0.02, 0.5
"""Standard deviation of the words' embeddings at the start: transformers' for CLIP, and a tiny model's."""
TINY_WORDS = "a photo of an astronaut riding a horse, a red circle and a blue square on a green background"


@dataclass(frozen=True)
class Family:
    """One architecture: the configuration of each part, and what its second tokenizer pads with.

    `unet` is the configuration of what denoises: of a U-Net, or of a `DiT` where it has a patch size.
    """

    name: str
    unet: Config
    vae: Config
    text_encoders: tuple[Config, ...]
    scheduler: Config
    padding: tuple[str | None, ...] = field(default=(None,))
    """The padding token of each tokenizer; None keeps the tokenizer's own (CLIP's end of text)."""

    num_parameters: int = 0
    """Of all parts together."""

    @property
    def denoiser(self) -> str:
        """The folder of what denoises."""
        return TRANSFORMER if "patch_size" in self.unet else "unet"

    @property
    def tiny(self) -> bool:
        """Whether it is made for two CPU cores, with a vocabulary as its tokenizer has it."""
        return self.name.startswith("tiny")


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("sd15", UNET, VAE, (CLIP_L,), PNDM, num_parameters=1_066_235_307),
        Family("sd2", SD2_UNET, VAE, (OPENCLIP_H,), PNDM, ("!",), 1_289_952_427),
        Family(
            "sd2-v",
            {**SD2_UNET, "sample_size": 96},
            {**VAE, "sample_size": 768},
            (OPENCLIP_H,),
            {**DDIM, "prediction_type": "v_prediction"},
            ("!",),
            1_289_952_427,
        ),
        Family(
            "sdxl",
            SDXL_UNET,
            {**VAE, "sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True},
            (CLIP_L, OPENCLIP_G),
            EULER,
            (None, "!"),
            3_468_837_867,
        ),
        Family("tiny", TINY_UNET, TINY_VAE, (TINY_TEXT,), DDIM, num_parameters=1_428_059),
        Family("dit", DIT, VAE, (CLIP_L,), FLOW, num_parameters=485_046_775),
        Family("tiny-dit", TINY_DIT, TINY_VAE, (TINY_TEXT,), FLOW, num_parameters=675_431),
    )
}


def create(
    family: str,
    *,
    seed: int = 0,
    tokenizer: CLIPTokenizer | str | Path | None = None,
    overrides: dict[str, Config] | None = None,
    parts: Sequence[str] = PARTS,
    device: str = "cpu",
) -> Model:
    """A model of a family with random weights, the same for the same seed.

    `overrides` changes configuration values by part (`unet` or `transformer`, `vae`, `text_encoder`,
    `text_encoder_2`, `scheduler`). A tiny model's text encoder takes its vocabulary and length from the
    tokenizer. On device 'meta' no memory is taken. Raises ModelError for an unknown family, part or setting.
    """
    spec = _family(family)
    changes = _known_overrides(spec, overrides or {})
    model = Model(family=family, scheduler={**spec.scheduler, **changes.get("scheduler", {})})
    if {"tokenizer", "text_encoder"} & set(parts) and (spec.tiny or "tokenizer" in parts):
        model.tokenizers = _tokenizers(spec, tokenizer)
    without_values = without_start(device) if device == "meta" else torch.device(device)
    with torch.random.fork_rng(devices=[]), without_values:
        torch.manual_seed(seed)
        if "unet" in parts:
            model.unet = _unet({**spec.unet, **changes.get(spec.denoiser, {})})
        if "vae" in parts:
            model.vae = _vae({**spec.vae, **changes.get("vae", {})})
        if "text_encoder" in parts:
            for i, config in enumerate(spec.text_encoders):
                changed = changes.get(numbered("text_encoder", i), {})
                model.text_encoders.append(_text_encoder(model, config, changed, last=i > 0))
    if "tokenizer" not in parts:
        model.tokenizers = []
    check_text_width(model, f"family '{family}' with these overrides")
    for module in model.modules.values():
        module.eval()
    return model


def check_text_width(model: Model, name: str) -> None:
    """ModelError where the text encoders give another width than the denoiser takes."""
    encoders: list[Any] = [*model.text_encoders]
    given = sum(encoder.config.hidden_size for encoder in encoders)
    takes = None if model.unet is None else model.unet.config.cross_attention_dim
    if encoders and isinstance(takes, int) and takes != given:
        raise ModelError(
            f"{name}: its {model.denoiser} takes text of width {takes}, its text encoders give {given}",
            mend="a part is of another model",
        )


def check_fit(model: Model, name: str) -> None:
    """ModelError where parts do not go together: the first step would fail far from here."""
    check_text_width(model, name)
    if model.unet is not None and model.vae is not None:
        made, read = int(model.unet.config.out_channels), int(model.vae.config.latent_channels)
        if made not in (read, 2 * read):
            raise ModelError(
                f"{name}: its {model.denoiser} makes latents of {made} channels, its VAE reads {read}",
                mend="a part is of another model",
            )
    encoders: list[Any] = [*model.text_encoders]
    for encoder, tokenizer in zip(encoders, model.tokenizers, strict=False):
        most = max(tokenizer.get_vocab().values(), default=0)
        if most >= encoder.config.vocab_size:
            raise ModelError(
                f"{name}: its tokenizer has words up to number {most}, its text encoder knows "
                f"{encoder.config.vocab_size}",
                mend="a part is of another model",
            )


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ModelError(f"no model family '{name}'", allowed=", ".join(FAMILIES))
    return FAMILIES[name]


def _known_overrides(spec: Family, overrides: dict[str, Config]) -> dict[str, Config]:
    known = [
        spec.denoiser,
        "vae",
        "scheduler",
        *(numbered("text_encoder", i) for i in range(len(spec.text_encoders))),
    ]
    for part in overrides:
        if part not in known:
            raise ModelError(
                f"no part '{part}' to override in family '{spec.name}'", allowed=", ".join(known)
            )
    return overrides


def _tokenizers(spec: Family, given: CLIPTokenizer | str | Path | None) -> list[CLIPTokenizer]:
    if spec.tiny and given is None:
        return [train_tokenizer([TINY_WORDS], vocab_size=640)]
    base = find_tokenizer(given)
    return [base if pad is None else with_padding(base, pad) for pad in spec.padding]


def _unet(config: Config) -> Any:
    from darkroom.models.parts import UNet2DConditionModel

    if "patch_size" in config:
        from darkroom.models.dit import DiT

        return _made(TRANSFORMER, DiT, config)
    return _made("unet", UNet2DConditionModel, _fitted(config))


def _vae(config: Config) -> Any:
    from darkroom.models.parts import AutoencoderKL

    config = dict(config)
    config["down_block_types"] = ["DownEncoderBlock2D"] * len(config["block_out_channels"])
    config["up_block_types"] = ["UpDecoderBlock2D"] * len(config["block_out_channels"])
    return _made("vae", AutoencoderKL, config)


def _fitted(config: Config) -> Config:
    """Block types for a changed number of widths: attention everywhere, as in the tiny family."""
    count = len(config["block_out_channels"])
    if len(config["down_block_types"]) == count:
        return config
    return {
        **config,
        "down_block_types": ["CrossAttnDownBlock2D"] * count,
        "up_block_types": ["CrossAttnUpBlock2D"] * count,
    }


def _text_encoder(model: Model, config: Config, changes: Config, *, last: bool) -> Any:
    from darkroom.models.parts import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = dict(config)
    if FAMILIES[model.family].tiny:
        tokenizer = model.tokenizers[0]
        config |= {
            "vocab_size": len(tokenizer),
            "max_position_embeddings": min(tokenizer.model_max_length, 77),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
    cls = CLIPTextModelWithProjection if last else CLIPTextModel
    encoder = cls(CLIPTextConfig(**{**config, **changes}))
    if FAMILIES[model.family].tiny:
        _spread_words(encoder)
    return encoder


def _spread_words(encoder: Any) -> None:
    """Start the words of an encoder that learns from nothing far enough apart to be distinct.

    CLIP's own start (standard deviation 0.02) is for billions of captions: with it a small model's first
    thousands of steps draw well-made shapes, but not the ones that were asked for.
    """
    with torch.no_grad():
        encoder.get_input_embeddings().weight.mul_(TINY_WORD_SPREAD / CLIP_WORD_SPREAD)


def _made(part: str, cls: Any, config: Config) -> Any:
    """Build a module; a setting it does not know or cannot bear is a ModelError that names it."""
    import inspect

    allowed = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
    for name in config:
        if name not in allowed:
            raise ModelError(f"no setting '{name}' in the {part}", allowed=", ".join(allowed))
    try:
        return cls(**config)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(f"the {part} cannot be built: {error}") from error
