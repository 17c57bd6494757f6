"""Small extractors of every kind, with random weights, and pictures to look at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from makers import paint, small_extractor, write_preprocess

from darkroom import models


@pytest.fixture(scope="session")
def dino_folder(tmp_path_factory) -> Path:
    """A ViT as DINO is saved."""
    from transformers import ViTConfig, ViTModel

    folder = tmp_path_factory.mktemp("dino")
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=32,
        patch_size=8,
    )  # fmt: skip
    ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    write_preprocess(folder)
    return folder


@pytest.fixture(scope="session")
def dinov2_folder(tmp_path_factory) -> Path:
    from transformers import Dinov2Config, Dinov2Model

    folder = tmp_path_factory.mktemp("dinov2")
    torch.manual_seed(1)
    config = Dinov2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, image_size=28, patch_size=4
    )
    Dinov2Model(config).save_pretrained(folder)
    write_preprocess(folder)
    return folder


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory) -> Path:
    from transformers import CLIPConfig, CLIPModel

    folder = tmp_path_factory.mktemp("clip")
    tokenizer = models.train_tokenizer(["a photo of a dog", "a red circle"], vocab_size=600)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    torch.manual_seed(2)
    config = CLIPConfig(
        text_config={**small, "vocab_size": len(tokenizer), **ends},
        vision_config={**small, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_preprocess(folder)
    return folder


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory) -> Path:
    """darkroom's own, which has seen nothing."""
    return small_extractor(tmp_path_factory.mktemp("small") / "extractor")


@pytest.fixture(scope="session")
def painted(tmp_path_factory) -> Path:
    return paint(tmp_path_factory.mktemp("painted") / "pictures", 24)


@pytest.fixture(scope="session")
def tiny() -> models.Model:
    return models.create("tiny", seed=1)
