"""What the pre-training benchmarks train: a U-Net of 28.6 M weights at 32x32 latents, and a prepared store.

The pictures are random blocks of colour at 256 px with captions; VAE and text encoder have random weights and
the real sizes' shapes: moments [2, 4, 32, 32] and text states [77, 256] a picture, prepared once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from darkroom import models
from darkroom.data.importers import import_pictures
from darkroom.data.store import Store
from darkroom.prepare.job import prepare

SIDE, PICTURES, WIDTH = 256, 128, 256
CROSS = "CrossAttnDownBlock2D"
VAE = {
    "block_out_channels": [8, 8, 8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
    "sample_size": SIDE,
}
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 4,
    "projection_dim": WIDTH,
}


def unet(channels: tuple[int, ...] = (96, 192, 288)) -> dict[str, Any]:
    """A U-Net's configuration: cross-attention in all levels but the lowest, as Stable Diffusion has it."""
    levels = len(channels) - 1
    return {
        "block_out_channels": list(channels),
        "layers_per_block": 2,
        "down_block_types": [CROSS] * levels + ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * levels,
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 8,
        "norm_num_groups": 16,
        "sample_size": 32,
    }


def make_base(folder: Path, channels: tuple[int, ...] = (96, 192, 288)) -> Path:
    """A model folder with random weights."""
    captions = [caption(i) for i in range(PICTURES)]
    tokenizer = models.train_tokenizer(captions, vocab_size=640)
    made = models.create(
        "tiny",
        tokenizer=tokenizer,
        overrides={"unet": unet(channels), "vae": VAE, "text_encoder": TEXT},
    )
    models.save(made, folder / "base")
    return folder / "base"


def caption(number: int) -> str:
    """The caption of a picture."""
    return f"a pattern of blocks of colour, number {number}"


def paint(folder: Path, pictures: int) -> Path:
    """A folder of random pictures with captions beside them."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    for i in range(pictures):
        blocks = Image.fromarray(draws.integers(0, 255, (8, 8, 3), dtype=np.uint8))
        blocks.resize((SIDE, SIDE), Image.Resampling.NEAREST).save(folder / f"{i:04d}.png")
        (folder / f"{i:04d}.txt").write_text(caption(i))
    return folder


def make_store(folder: Path, base: Path, pictures: int = PICTURES) -> Path:
    """A store of random pictures with the columns of this base's encoders."""
    source = paint(folder / "pictures", pictures)
    store = Store.create(folder / "pictures.lance")
    import_pictures(source, store)
    prepare(store, base, resolution=SIDE, text=True)
    return folder / "pictures.lance"


def content(base: Path, store: Path, **train: Any) -> dict[str, Any]:
    """A recipe that pre-trains this base's U-Net on the prepared columns; `train` are its settings."""
    return {
        "task": "pretrain",
        "model": {"base": str(base)},
        "data": {"store": str(store), "resolution": SIDE, "encode": "stored", "text": "stored"},
        "optim": {"lr": 1e-4, "warmup_steps": 0, "clip_norm": 1.0, "weight_decay": 0.01},
        "train": {"ema": {"enabled": False}} | train,
        "checkpoint": {"every": 10**6},
    }


def write_recipe(path: Path, made: dict[str, Any]) -> Path:
    """A recipe as a file."""
    path.write_text(yaml.safe_dump(made))
    return path
