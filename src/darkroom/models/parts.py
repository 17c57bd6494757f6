"""The classes of diffusers and transformers that models are made of.

They are imported from here and with `waiting()`, so that torch's compiler, peft, torchao, scipy and a
hundred other models come only where they are used.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from darkroom.libraries import waiting

with waiting():
    from diffusers.configuration_utils import ConfigMixin, register_to_config
    from diffusers.models.activations import GEGLU
    from diffusers.models.attention import BasicTransformerBlock, FeedForward
    from diffusers.models.attention_processor import (
        Attention,
        AttnProcessor,
        AttnProcessor2_0,
        FusedAttnProcessor2_0,
    )
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from diffusers.models.modeling_outputs import Transformer2DModelOutput
    from diffusers.models.modeling_utils import ModelMixin
    from diffusers.models.resnet import ResnetBlock2D
    from diffusers.models.transformers.transformer_2d import Transformer2DModel
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from diffusers.utils import peft_utils
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        PreTrainedModel,
    )

__all__ = [
    "GEGLU",
    "Attention",
    "AttnProcessor",
    "AttnProcessor2_0",
    "AutoencoderKL",
    "AutoencoderTiny",
    "BasicTransformerBlock",
    "CLIPTextConfig",
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "CLIPTokenizer",
    "ConfigMixin",
    "DiagonalGaussianDistribution",
    "FeedForward",
    "FusedAttnProcessor2_0",
    "ModelMixin",
    "PreTrainedModel",
    "ResnetBlock2D",
    "Transformer2DModel",
    "Transformer2DModelOutput",
    "UNet2DConditionModel",
    "register_to_config",
]


def _where_scaled(function: Callable[..., None]) -> Callable[..., None]:
    """diffusers scales peft's layers in each call of a U-Net: by 1 it does nothing but import peft."""

    @wraps(function)
    def scale(model: Any, weight: float | None = None) -> None:
        if weight != 1.0:
            function(model, weight)

    return scale


peft_utils.scale_lora_layers = _where_scaled(peft_utils.scale_lora_layers)
peft_utils.unscale_lora_layers = _where_scaled(peft_utils.unscale_lora_layers)
