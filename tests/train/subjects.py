"""Recipes that fine-tune a tiny model on photographs of a dog."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from darkroom.recipe import Recipe, make_recipe
from darkroom.run import Run
from darkroom.train.checkpoint import checkpoints, load_checkpoint
from darkroom.train.run import train

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


def check_resumes_exactly(
    recipe: Callable[..., Recipe], folder: Path, *, control: Sequence[str] = ()
) -> Path:
    """A run that stops after two of four steps learns what an undisturbed one does, to the bit.

    `recipe(*overrides)` makes it; with `control` it must learn something else.
    """

    def trained(name: str, *overrides: str) -> tuple[Path, list[float], dict[str, Any]]:
        run = train(recipe(*overrides), out=folder / name, console=lambda _: None).run
        losses = [row["loss"] for row in Run.open(run).metrics() if "loss" in row]
        tensors = load_checkpoint(checkpoints(run / "checkpoints")[-1]).tensors["weights"]
        return run, losses, {key: tensors[key] for key in tensors}

    run, losses, weights = trained("whole", "train.steps=4")
    trained("parts", "train.steps=2")
    _, again, resumed = trained("parts", "train.steps=4")
    assert losses == again
    assert all(torch.equal(weights[key], resumed[key]) for key in weights)
    if control:
        _, others, changed = trained("control", "train.steps=4", *control)
        alike = weights.keys() == changed.keys()
        assert others != losses or not alike or any(not torch.equal(weights[k], changed[k]) for k in weights)
    return run
