"""How many processes train together and what each of them holds: settings, and what goes with what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from darkroom.errors import RecipeError

if TYPE_CHECKING:
    from darkroom.recipe import Recipe

SHARDED_TASKS = ("pretrain", "finetune")
SHARDED_OPTIMISERS = ("adamw", "schedule-free")  # each number has a step of its own; the rest need matrices


class ParallelSettings(BaseModel):
    """Processes that share each global batch. What is learned does not depend on how many there are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["none", "ddp", "fsdp"] = Field(
        default="none",
        description="none: one process; ddp: each holds the whole model, gradients are summed while the "
        "backward pass runs; fsdp: weights' masters, gradients, optimiser and average are cut among them",
    )
    devices: int | Literal["auto"] = Field(
        default="auto", description="processes on each machine; auto: one a GPU, or one where there is none"
    )
    nodes: int = Field(
        default=1, ge=1, le=10_000, description="machines; above 1 they are started by torchrun"
    )
    shard: Literal["grads", "full", "hybrid"] = Field(
        default="grads",
        description="fsdp. grads: a step's weights stay whole from forward to backward; full: gathered block "
        "by block, twice; hybrid: cut inside each machine and the same on all machines",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="seconds without progress after which a job names who hangs, and ends",
    )


def channels_last(asked: bool | Literal["auto"], device_type: str, *, sharded: bool) -> bool:
    """Whether a step's convolutions lie channels last: as asked, of itself on GPUs, never where weights are
    cut, which are cut in their plain layout.
    """
    wanted = device_type == "cuda" if asked == "auto" else asked
    return wanted and not sharded


def check_parallel(recipe: Recipe) -> None:
    """RecipeError for what processes together cannot do."""
    parallel = recipe.parallel
    if isinstance(parallel.devices, int) and parallel.devices < 1:
        raise RecipeError("parallel.devices", f"{parallel.devices}", allowed="1 or more, or auto")
    if parallel.mode == "none":
        _check_alone(parallel)
        return
    if recipe.task == "extractor":
        raise RecipeError(
            "parallel.mode",
            f"{parallel.mode} with the task extractor, which needs its whole batch at once",
            allowed="none",
        )
    if recipe.optim.fused_backward:
        raise RecipeError(
            "optim.fused_backward",
            f"true with parallel.mode={parallel.mode}: gradients are summed first",
            mend="set optim.fused_backward=false",
        )
    if parallel.mode == "fsdp":
        _check_sharded(recipe)


def _check_alone(parallel: ParallelSettings) -> None:
    several = "devices" if parallel.devices not in ("auto", 1) else "nodes" if parallel.nodes > 1 else ""
    if several:
        raise RecipeError(
            f"parallel.{several}",
            f"{getattr(parallel, several)} with parallel.mode=none",
            mend="set parallel.mode=ddp or fsdp",
        )


def _check_sharded(recipe: Recipe) -> None:
    if recipe.task not in SHARDED_TASKS:
        raise RecipeError(
            "parallel.mode",
            f"fsdp with the task {recipe.task}",
            allowed=f"fsdp with {' or '.join(SHARDED_TASKS)}; ddp with this one",
        )
    if recipe.optim.name not in SHARDED_OPTIMISERS:
        raise RecipeError(
            "optim.name",
            f"{recipe.optim.name} with parallel.mode=fsdp",
            allowed=f"{' or '.join(SHARDED_OPTIMISERS)}; or parallel.mode=ddp",
        )
    if recipe.train.precision == "fp16":
        raise RecipeError("train.precision", "fp16 with parallel.mode=fsdp", allowed="bf16, float32 or auto")
    if recipe.train.channels_last is True:
        raise RecipeError(
            "train.channels_last",
            "true with parallel.mode=fsdp, which cuts weights in their plain layout",
            allowed="auto or false; or parallel.mode=ddp",
        )


def check_batch(recipe: Recipe, size: int) -> None:
    """RecipeError unless every process gets the same number of whole micro-batches."""
    batch, micro = recipe.train.global_batch, recipe.train.micro_batch
    if batch % size:
        raise RecipeError(
            "train.global_batch", f"{batch} over {size} processes", allowed=f"multiples of {size}"
        )
    if micro != "auto" and (batch // size) % micro:
        raise RecipeError(
            "train.micro_batch",
            f"{micro} does not divide the {batch // size} pictures of each of {size} processes",
            allowed=f"divisors of {batch // size}, or auto",
        )
