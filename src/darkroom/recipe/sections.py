"""Every section of a recipe: keys, types, defaults, units and allowed ranges.

The larger sections are in `data`, `objective` and `training`; all of them are imported from here.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from darkroom.bill import Bill, format_usd
from darkroom.recipe.data import (
    AugmentSettings,
    DataSet,
    DataSettings,
    OnlineSettings,
    StoreWeight,
)
from darkroom.recipe.objective import (
    AutoencoderLossSettings,
    DistillSettings,
    ExtractorSettings,
    FlowSettings,
    LossSettings,
    NoiseSettings,
    ObjectiveSettings,
    PreferenceSettings,
    TimestepSettings,
    TinyVaeSettings,
)
from darkroom.recipe.training import (
    AdapterSettings,
    AlignSettings,
    EmaSettings,
    LayerRule,
    OptimSettings,
    Precision,
    RoutingSettings,
    TrainSettings,
)

__all__ = [
    "ADAPTER_TASKS",
    "VAE_TASKS",
    "AdapterSettings",
    "AlignSettings",
    "AugmentSettings",
    "AutoencoderLossSettings",
    "BudgetSettings",
    "CheckpointSettings",
    "DataSet",
    "DataSettings",
    "DistillSettings",
    "EmaSettings",
    "EvaluateSettings",
    "ExtractorSettings",
    "FlowSettings",
    "LayerRule",
    "LossSettings",
    "ModelSettings",
    "NoiseSettings",
    "ObjectiveSettings",
    "OnlineSettings",
    "OptimSettings",
    "ParallelSettings",
    "PhaseSettings",
    "Precision",
    "PreferenceSettings",
    "RoutingSettings",
    "SamplePrompt",
    "SampleSettings",
    "StoreWeight",
    "Task",
    "TimestepSettings",
    "TinyVaeSettings",
    "TrackSettings",
    "TrainSettings",
    "WordSettings",
]


class WordSettings(BaseModel):
    """A word that the model learns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token: str = Field(pattern=r"^\S+$", description="how it is written, such as <sks-dog>; no word so far")
    initial: str = Field(description="a word of one token that it starts from, such as dog")
    vectors: int = Field(default=1, ge=1, le=64, description="tokens it stands for")

    @property
    def tokens(self) -> list[str]:
        """The tokens of the word, written as diffusers does: <x>, <x>_1, <x>_2, ..."""
        return [self.token, *(f"{self.token}_{i}" for i in range(1, self.vectors))]

    @property
    def prompts(self) -> tuple[str, ...]:
        """Captions with the word in them."""
        return tuple(prompt.format(self.token) for prompt in PROMPTS)


class ModelSettings(BaseModel):
    """Which model is trained, and what of it differs from its family."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str = Field(description="a family (random weights), a model folder, or a hub id")
    vae: str | dict[str, Any] | None = Field(
        default=None, description="a model folder whose VAE is taken, or changes to the family's VAE"
    )
    unet: dict[str, Any] = Field(default={}, description="changes to the family's U-Net configuration")
    text_encoder: str | dict[str, Any] = Field(
        default={},
        description="a model folder or hub id whose text encoder and tokenizer are taken, or changes to the "
        "family's text encoder",
    )
    tokenizer: str | None = Field(
        default=None, description="a tokenizer folder, or 'train': learn one from the store's captions"
    )
    vocab_size: int = Field(default=1024, ge=514, description="tokens of a tokenizer that is learned")
    max_length: int = Field(default=77, ge=4, le=77, description="tokens a caption, of one that is learned")
    train_text_encoder: bool = Field(default=False, description="train the text encoder with the U-Net")
    fresh_unet: bool = Field(
        default=False, description="keep the base's VAE and text encoder, its U-Net from random weights"
    )
    base_precision: Literal["fp8", "int8", "nf4"] | None = Field(
        default=None,
        description="what the layers of a frozen U-Net's blocks are held in, under an adapter or a new word: "
        "8 bits, or 4 (QLoRA, Dettmers et al. 2023); computed with in train.precision; null: that",
    )
    word: WordSettings | None = Field(default=None, description="the new word of textual inversion")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of the random weights")
    variant: str | None = Field(default=None, description="weight files of a variant, such as fp16")
    revision: str | None = Field(default=None, description="branch, tag or commit on the hub")


Task = Literal[
    "autoencoder",
    "tiny-vae",
    "extractor",
    "pretrain",
    "finetune",
    "lora",
    "dreambooth",
    "dreambooth-lora",
    "textual-inversion",
    "dpo",
    "distill",
]


class PhaseSettings(BaseModel):
    """A part of a training with its own resolution and length. What is left out is the recipe's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    resolution: int = Field(ge=8, le=8192, multiple_of=8, description="side in pixels")
    samples: int = Field(gt=0, description="pictures seen, in whole batches")
    global_batch: int | None = Field(default=None, gt=0, description="pictures in an optimiser step")
    lr: float | None = Field(default=None, gt=0, le=10, description="peak learning rate")
    warmup_steps: int | None = Field(default=None, ge=0, description="steps in which the rate rises")
    ema_from: int | None = Field(
        default=None,
        ge=0,
        description="pictures of the phase before weights are averaged; null: ema.start_step",
    )
    keep: float | None = Field(
        default=None, gt=0, le=1, description="train.routing.keep of this phase; 1: no token is routed"
    )
    align: float | None = Field(
        default=None, ge=0, le=100, description="train.align.weight of this phase; 0: nothing is aligned"
    )


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


class CheckpointSettings(BaseModel):
    """When the state of a run is saved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(default=500, gt=0, description="steps between checkpoints (the last is always saved)")
    keep: int = Field(default=2, ge=1, description="how many to keep; one goes only when a newer is proven")
    url: str | None = Field(
        default=None,
        description="where they go instead of into the run: s3://bucket/prefix, or another address that "
        "fsspec knows; one run's own, from which it goes on in any folder (extra: s3)",
    )
    background: bool = Field(
        default=True,
        description="write while training goes on: a step waits only for the copy of the state; on a CPU a "
        "state above 64 MiB is not copied, which would take as much memory again, but waited for",
    )


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
    reduce: Literal["float32", "bf16"] = Field(
        default="float32",
        description="what gradients are summed in between processes; bf16 sends half as much and rounds each",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="seconds without progress after which a job names who hangs, and ends",
    )


class TrackSettings(BaseModel):
    """Where metrics go besides metrics.jsonl."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensorboard: bool = Field(
        default=False, description="write TensorBoard events into the run (extra: track)"
    )
    wandb: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None,
        description="project on Weights & Biases (extra: track); with WANDB_MODE=offline it stays in the "
        "run until `wandb sync`",
    )


class SamplePrompt(BaseModel):
    """One picture of a sample grid with settings of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = Field(description="what is drawn")
    negative: str | None = Field(default=None, description="what is not to be in it")
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="null: as if it stood alone")
    steps: int | None = Field(default=None, gt=0, le=1000, description="solver steps; null: sample.steps")
    guidance: float | None = Field(default=None, ge=0, le=100, description="null: sample.guidance")
    solver: str | None = Field(default=None, description="null: sample.solver")


class SampleSettings(BaseModel):
    """Pictures drawn from fixed prompts and seeds while training, with the averaged weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(
        default=0, ge=0, description="steps between sample grids; 0: one at the end, if prompts"
    )
    prompts: tuple[str | SamplePrompt, ...] = Field(
        default=(),
        max_length=256,
        description="one picture each; empty: captions of the first held-out pictures; each a text, or "
        "{prompt: ..., negative: ..., seed: 7, steps: 20, guidance: 5, solver: euler} with what differs",
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

    def of(self, i: int, given: str | SamplePrompt) -> dict[str, Any]:
        """What `generate` takes for picture i."""
        own = SamplePrompt(prompt=given) if isinstance(given, str) else given
        return {
            "negative": own.negative,
            "seed": self.seed + i if own.seed is None else own.seed,
            "steps": own.steps or self.steps,
            "guidance": self.guidance if own.guidance is None else own.guidance,
            "solver": own.solver or self.solver,
        }


class BudgetSettings(BaseModel):
    """The most that a run (or a whole sweep) may use; it then stops with its state saved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    usd: float | None = Field(default=None, gt=0, description="dollars, where the device's price is known")
    hours: float | None = Field(default=None, gt=0, description="elapsed hours, all sessions together")
    deadline: datetime | None = Field(
        default=None, description="moment at which it stops, such as 2026-12-01T06:00+00:00; no zone is UTC"
    )

    def spent(self, bill: Bill) -> str:
        """What of the budget a bill has used up, as words; empty while it has not."""
        if self.deadline is not None and datetime.now(UTC) >= _with_zone(self.deadline):
            return f"budget.deadline {self.deadline.isoformat()}"
        if self.hours is not None and bill.wall_s >= self.hours * 3600:
            return f"budget.hours {self.hours:g}"
        if self.usd is not None and bill.usd is not None and bill.usd >= self.usd:
            return f"budget.usd {self.usd:g} ({format_usd(bill.usd)} used)"
        return ""

    def less(self, bill: Bill) -> BudgetSettings | None:
        """What is left after a bill; None where nothing is."""
        if self.spent(bill):
            return None
        hours = None if self.hours is None else self.hours - bill.wall_s / 3600
        usd = None if self.usd is None else self.usd - (bill.usd or 0.0)
        return BudgetSettings(usd=usd, hours=hours, deadline=self.deadline)


VAE_TASKS = ("autoencoder", "tiny-vae")
"""They learn from pixels alone, with a VAE and no denoiser."""


ADAPTER_TASKS = ("lora", "dreambooth-lora", "dpo")


PROMPTS = (
    "a photo of {}",
    "a close-up photo of {}",
    "a bright photo of {}",
    "a dark photo of {}",
    "a cropped photo of {}",
    "a good photo of {}",
    "a picture of one {}",
    "a rendition of {}",
)
"""What is said of a subject's pictures where the recipe says nothing, in the manner of the paper's."""


def _with_zone(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
