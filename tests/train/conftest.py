"""A small store of pictures, and recipes that train on it in a second."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from darkroom import models
from darkroom.data.importers import import_pictures
from darkroom.data.store import Store
from darkroom.recipe import Recipe, make_recipe

SIDE = 16
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220), "white": (240, 240, 240)}
MakeRecipe = Callable[..., Recipe]
BASE_WORDS = "a photo of an astronaut riding a horse, a red dog and a blue square on a green ground"


def paint(folder: Path, count: int) -> None:
    """Pictures of a coloured square somewhere on a coloured ground, with captions that say so."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    names, lines = list(COLOURS), []
    for i in range(count):
        square, ground = draws.choice(names, 2, replace=False)
        pixels = np.full((SIDE, SIDE, 3), COLOURS[ground], dtype=np.uint8)
        left, top = draws.integers(0, SIDE // 2, 2)
        pixels[top : top + SIDE // 2, left : left + SIDE // 2] = COLOURS[square]
        Image.fromarray(pixels).save(folder / f"{i:04d}.png")
        lines.append(json.dumps({"file_name": f"{i:04d}.png", "text": f"a {square} square on {ground}, {i}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 44 pictures, which no global batch used here divides."""
    root = tmp_path_factory.mktemp("material")
    paint(root / "pictures", 44)
    store = Store.create(root / "pictures.lance")
    import_pictures(root / "pictures", store)
    return root / "pictures.lance"


VAE = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
UNET = {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2, "layers_per_block": 1}
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.fixture(scope="session")
def recipe_of(store_path: Path) -> MakeRecipe:
    """Makes recipes: `recipe_of('pretrain', 'train.steps=3', ...)`."""

    def make(task: str = "pretrain", *overrides: str, **extra: Any) -> Recipe:
        content = {
            "task": task,
            "model": {"base": "tiny", "vae": VAE},
            "data": {"store": str(store_path), "resolution": SIDE, "encode": "inline"},
            "optim": {"lr": 2e-3},
            "train": {
                "steps": 4,
                "global_batch": 8,
                "micro_batch": 8,
                "precision": "float32",
                "log_every": 2,
                "ema": {"decay": 0.9},
            },
            "checkpoint": {"every": 2},
        }
        if task == "pretrain":
            content["model"] |= {"unet": UNET, "text_encoder": TEXT}
        return make_recipe(copy.deepcopy(content | extra), overrides)

    return make


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder, as a user's base."""
    folder = tmp_path_factory.mktemp("base") / "model"
    tokenizer = models.train_tokenizer([BASE_WORDS] * 3, vocab_size=640)
    models.save(models.create("tiny", seed=3, tokenizer=tokenizer), folder)
    return folder


@pytest.fixture(scope="session")
def photos(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five photographs of a dog, small, without captions."""
    folder = tmp_path_factory.mktemp("photos") / "photos"
    folder.mkdir()
    for path in sorted((shared_data / "dreambooth" / "dog").glob("*.jp*g"))[:5]:
        with Image.open(path) as image:
            image.thumbnail((96, 96))
            image.save(folder / f"{path.stem}.png")
    assert len(list(folder.iterdir())) == 5
    return folder
