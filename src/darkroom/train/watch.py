"""What is looked at while training goes on: held-out loss by timestep, and sample grids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from darkroom.train.step import micro_batches

if TYPE_CHECKING:
    from darkroom.models import Model
    from darkroom.train.tasks import Autoencoder, Task


class SampleSettings(BaseModel):
    """Pictures drawn from fixed prompts and seeds while training, with the averaged weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(
        default=0, ge=0, description="steps between sample grids; 0: one at the end, if prompts"
    )
    prompts: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        description="one picture each; empty: captions of the first held-out pictures",
    )
    num: int = Field(
        default=8, ge=0, le=256, description="how many held-out captions, where prompts is empty"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="picture i has seed + i")
    steps: int = Field(default=30, gt=0, le=1000, description="solver steps")
    guidance: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="guidance scale, noted with the model; 1 is none; null: the model's own, else 7.5",
    )
    solver: str | None = Field(default=None, description="a solver's name; null: the model's own")


class EvaluateSettings(BaseModel):
    """The loss on held-out pictures at fixed timesteps with fixed noise; scores of what is drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(default=0, ge=0, description="steps between evaluations; 0: only before and after")
    rows: int = Field(default=256, gt=0, description="at most so many of the held-out pictures")
    timesteps: int = Field(default=8, gt=0, le=100, description="how many, spread evenly over the schedule")
    every_images: int = Field(
        default=0,
        ge=0,
        description="pictures trained on between scores of drawn pictures, and at the end; 0: none",
    )
    scores: tuple[str, ...] = Field(
        default=("fid", "kid", "clip"),
        min_length=1,
        description="which, by the names of `darkroom evaluate`, against the held-out pictures",
    )
    extractors: dict[str, str] = Field(
        default={},
        description="the networks they need: inception, clip, dino, coca or all, each a folder or a hub id",
    )
    num: int = Field(
        default=256, ge=2, description="held-out pictures' prompts drawn for scores, as `sample` says how"
    )
    patience: int | None = Field(
        default=None,
        gt=0,
        description="evaluations without a better loss after which training ends; the results are then the "
        "weights of the best evaluation; null: never, and they are the last ones",
    )


@torch.no_grad()
def heldout_metrics(task: Task, inputs: Mapping[str, Tensor], micro_batch: int) -> dict[str, Any]:
    """Means over the held-out rows: `heldout_loss`, and `heldout_loss_by_timestep` as {timestep: loss}."""
    parts = [task.heldout(micro) for micro in micro_batches(inputs, micro_batch)]
    found: dict[str, Any] = {}
    for name in parts[0]:
        mean = torch.cat([part[name] for part in parts]).double().mean(dim=0).tolist()
        found[name] = dict(zip(map(str, task.points), mean, strict=True)) if isinstance(mean, list) else mean
    return found


def sample_grid(
    model: Model,
    settings: SampleSettings,
    prompts: Sequence[str],
    size: int,
    path: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Draw the prompts' pictures, `size` pixels square, and save them as one PNG."""
    from darkroom import sample

    pictures = sample.generate(
        model,
        prompts,
        seed=settings.seed,
        size=(size, size),
        steps=settings.steps,
        guidance=settings.guidance,
        solver=settings.solver,
        optimise="none",  # the weights in training stay where and as they are, also where ranks share them
        progress=progress,
        notice=lambda _: None,
    )
    return save_grid([picture.image for picture in pictures], path)


@torch.no_grad()
def reconstruction_grid(task: Autoencoder, inputs: Mapping[str, Tensor], path: Path) -> Path:
    """Held-out pictures above what the VAE gives back, as one PNG."""
    from PIL import Image

    pixels_b3HW = inputs["pixels"][:8]
    out_b3HW = task.reconstruct(pixels_b3HW)
    images = []
    for tensor_3HW in (*pixels_b3HW, *out_b3HW):
        bytes_HW3 = ((tensor_3HW.float() + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 0)
        images.append(Image.fromarray(bytes_HW3.cpu().numpy()))
    return save_grid(images, path, columns=len(pixels_b3HW))


def save_grid(images: Sequence[Any], path: Path, columns: int | None = None) -> Path:
    """One PNG of all images, written beside and renamed."""
    from darkroom.sample import make_grid

    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    make_grid(images, columns).save(beside, format="PNG")
    return beside.replace(path)
