"""Recipes that fine-tune a tiny model on photographs of a dog."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from darkroom.recipe import Recipe, make_recipe

SIDE = 32


def recipe_for(task: str, base: Path, photos: Path, *overrides: str, **more: Any) -> Recipe:
    content: dict[str, Any] = {
        "task": task,
        "model": {"base": str(base)},
        "data": {"resolution": SIDE},
        "optim": {"lr": 1e-2},
        "train": {"steps": 6, "precision": "float32", "log_every": 3},
        "checkpoint": {"every": 3},
    }
    if task in ("finetune", "lora", "pretrain"):
        content["data"] |= {"folder": str(photos), "prompt": "a photo of a dog"}
        content["train"] |= {"global_batch": 2, "micro_batch": 2}
    else:
        content["data"] |= {"instance": str(photos)}
    if task.startswith("dreambooth"):
        content["data"] |= {"prompt": "a photo of sks dog"}
    if task == "textual-inversion":
        content["model"] |= {"word": {"token": "<sks>", "initial": "dog"}}
        content["train"] |= {"global_batch": 2, "micro_batch": 2}
    return make_recipe(copy.deepcopy(content | more), overrides)
