"""What several tests make: small networks, their files, painted pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from darkroom.evaluate.settings import SmallSettings
from darkroom.evaluate.small import SmallExtractor, TrainingHashes, save_small

SMALL = SmallSettings(width=8, levels=3, embedding=32, buckets=256)
CLIP_PREPROCESS = {
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
    "resample": 3,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}


def write_preprocess(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(CLIP_PREPROCESS))


def small_extractor(
    folder: Path, *, text: bool = True, seen: TrainingHashes | None = None, seed: int = 3
) -> Path:
    torch.manual_seed(seed)
    network = SmallExtractor(SMALL, resolution=32, text=text)
    empty = np.zeros(0, np.int64)
    save_small(network, folder, (seen or TrainingHashes(empty, empty)).tensors())
    return folder


def paint(folder: Path, count: int, *, seed: int = 0, side: int = 32) -> Path:
    """Pictures of smooth coloured noise."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(seed)
    for i in range(count):
        coarse = draws.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{i:03d}.png")
    return folder
