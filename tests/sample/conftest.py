"""Small models with random weights, made once."""

from __future__ import annotations

from typing import Any

import pytest

from darkroom import models

CAPTIONS = ["a photo of an astronaut riding a horse", "a red circle on a blue background"]
SMALL_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": 32,
}
SMALL_XL: dict[str, dict[str, Any]] = {
    "unet": {
        "sample_size": 8,
        "block_out_channels": [16, 32, 32],
        "layers_per_block": 1,
        "transformer_layers_per_block": [1, 1, 2],
        "cross_attention_dim": 64,
        "attention_head_dim": [2, 4, 4],
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 6 * 8,
        "norm_num_groups": 8,
    },
    "vae": {
        "block_out_channels": [16, 16],
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "sample_size": 16,
    },
    "text_encoder": SMALL_TEXT,
    "text_encoder_2": SMALL_TEXT,
}


@pytest.fixture(scope="session")
def tiny() -> models.Model:
    """SD in small: 32 px, latents 4x8x8."""
    return models.create("tiny", seed=1)


@pytest.fixture(scope="session")
def small_xl() -> models.Model:
    """SDXL in small: two text encoders, pooled text and size conditioning, 16 px."""
    tokenizer = models.train_tokenizer(CAPTIONS, vocab_size=600)
    return models.create("sdxl", seed=2, tokenizer=tokenizer, overrides=SMALL_XL)
