"""The sections `adapter`, `optim` and `train` of a recipe: which weights are trained, and how."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Precision = Literal["float32", "bf16", "fp16"]


class LayerRule(BaseModel):
    """A rate and a time of its own for some weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str = Field(
        min_length=1,
        description="names of weights with * and ?, such as 'unet.up_blocks.*', 'unet.*.attn2.*' or "
        "'text_encoder'; the first entry that matches a weight holds",
    )
    lr_scale: float = Field(
        default=1.0, ge=0, le=1000, description="their rate as a multiple of their part's; 0: they stay"
    )
    start_step: int = Field(default=0, ge=0, description="steps before they are trained")
    stop_step: int | None = Field(default=None, gt=0, description="step after which they stay; null: never")

    @model_validator(mode="after")
    def _possible(self) -> LayerRule:
        if self.stop_step is not None and self.stop_step <= self.start_step:
            raise ValueError(f"stop_step {self.stop_step} is not after start_step {self.start_step}")
        return self

    def holds_for(self, name: str) -> bool:
        """Whether a weight's name, `<part>.<path>`, is meant."""
        return fnmatchcase(name, self.match) or fnmatchcase(name, f"{self.match}.*")


class OptimSettings(BaseModel):
    """The optimiser and its learning rate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["adamw", "adamw8bit", "adafactor", "came", "lion", "prodigy", "schedule-free", "muon"] = (
        Field(
            default="adamw",
            description="AdamW (Loshchilov & Hutter 2019), fused; adamw8bit: its state in 8 bits (torchao); "
            "adafactor (Shazeer & Stern 2018); came (Luo et al. 2023); lion (Chen et al. 2023); prodigy "
            "(Mishchenko & Defazio 2023); schedule-free AdamW (Defazio et al. 2024); muon for matrices "
            "(Jordan et al. 2024), AdamW for the rest",
        )
    )
    fused_backward: bool = Field(
        default=False,
        description="step each weight inside the backward pass, so that no full set of gradients is held",
    )
    lr: float = Field(default=1e-4, gt=0, le=10, description="peak learning rate")
    text_encoder_lr: float | None = Field(
        default=None, gt=0, le=10, description="peak rate of the text encoder where it is trained; null: lr"
    )
    text_encoder_2_lr: float | None = Field(
        default=None, gt=0, le=10, description="of SDXL's second one; null: text_encoder_lr"
    )
    unet_lr: float | None = Field(default=None, gt=0, le=10, description="peak rate of the U-Net; null: lr")
    text_encoder_steps: int | None = Field(
        default=None, gt=0, description="steps after which the text encoders stay as they are; null: never"
    )
    loraplus_lr_ratio: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="LoRA+ (Hayou et al. 2024): rate of an adapter's second matrix as a multiple of the "
        "first's; 16 is usual; null: the same",
    )
    layers: tuple[LayerRule, ...] = Field(
        default=(), max_length=256, description="weights with rates of their own, or frozen for a time"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps in which the rate rises from 0 to lr")
    lr_schedule: Literal["constant", "cosine", "cosine-with-restarts", "linear", "polynomial"] = Field(
        default="constant", description="the rate after warm-up, until train.steps"
    )
    num_cycles: int = Field(
        default=1, ge=1, le=1000, description="of cosine-with-restarts: how often the rate falls from lr"
    )
    power: float = Field(default=1.0, gt=0, le=100, description="of polynomial: 1 is linear")
    final_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="the last step's rate as a share of lr (not constant)"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean of the gradients")
    beta2: float = Field(
        default=0.999,
        ge=0,
        lt=1,
        description="decay of the mean of their squares; of lion of the mean itself",
    )
    beta3: float = Field(
        default=0.9999, ge=0, lt=1, description="of came: decay of the mean of the updates' instability"
    )
    scale_parameter: bool = Field(
        default=True,
        description="of adafactor: rates are relative to each weight's size; false: lr is as AdamW's",
    )
    d_coef: float = Field(default=1.0, gt=0, le=100, description="of prodigy: factor of the rate it finds")
    use_bias_correction: bool = Field(default=False, description="of prodigy: Adam's correction at the start")
    eps: float = Field(default=1e-8, gt=0, description="keeps the division finite")
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        description="decoupled weight decay of matrices and kernels (not biases and norms)",
    )
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="largest norm of all gradients together; null: no clipping"
    )

    @model_validator(mode="after")
    def _possible(self) -> OptimSettings:
        for name, of in (("num_cycles", "cosine-with-restarts"), ("power", "polynomial")):
            if getattr(self, name) != 1 and self.lr_schedule != of:
                raise ValueError(
                    f"{name} {getattr(self, name):g} with lr_schedule {self.lr_schedule}; "
                    f"it is of lr_schedule {of}"
                )
        return self

    def part_lr(self, part: str) -> float:
        """The peak rate of a part of the model."""
        own = {
            "unet": self.unet_lr,
            "text_encoder": self.text_encoder_lr,
            "text_encoder_2": self.text_encoder_2_lr or self.text_encoder_lr,
        }.get(part)
        return self.lr if own is None else own


class AdapterSettings(BaseModel):
    """Which layers get a low-rank addition (LoRA, Hu et al. 2021), and of what kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)

    kind: Literal["lora", "loha", "lokr", "oft", "full"] = Field(
        default="lora",
        description="lora (with targets conv it is LyCORIS' LoCon); loha: a Hadamard product of two "
        "(Hyeon-Woo et al. 2022); lokr: a Kronecker product (Yeh et al. 2024); oft: a rotation of outputs in "
        "blocks (Qiu et al. 2023); full: the whole difference",
    )
    start: str | None = Field(
        default=None,
        alias="from",
        description="an adapter file that training starts from, of the same kind, rank and layers",
    )
    init_lora_weights: Literal["default", "gaussian", "pissa", "pissa_niter_16", "eva"] = Field(
        default="default",
        description="how training starts, by PEFT's names. default, gaussian: from nothing added; pissa "
        "(Meng et al. 2024): from the base's own main directions, whose share is taken out of the base "
        "(niter_16: found quickly); eva (Paischer et al. 2024): from the main directions of the layers' "
        "inputs in the first batches. What is written goes with the base as it was",
    )
    targets: Literal["qv", "attention", "all-linear", "conv"] | tuple[str, ...] = Field(
        default="attention",
        description="qv: query and value projections; attention: these, keys and outputs; all-linear: every "
        "linear layer of the blocks; conv: these and the blocks' convolutions; or patterns of layer names "
        "such as '*.attn2.to_k'",
    )
    rank: int = Field(
        default=8, ge=1, le=4096, description="width of the additions; of oft the side of a block, at most"
    )
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="scale is alpha / rank; null: alpha = rank; 1 where both of lokr's factors are whole",
    )
    conv_rank: int | None = Field(
        default=None, ge=1, le=4096, description="rank of convolutions with a kernel above 1x1; null: rank"
    )
    conv_alpha: float | None = Field(
        default=None, gt=0, description="their alpha; null: conv_rank, or alpha where that is null"
    )
    rank_pattern: dict[str, Annotated[int, Field(ge=0, le=4096)]] = Field(
        default={},
        description="ranks by names of layers with * and ?, such as {'unet.up_blocks.*': 16}; the first that "
        "matches holds; 0: no addition",
    )
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(default={}, description="alphas likewise")
    rank_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of ranks left out in training; loha, lokr: of outputs"
    )
    module_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of layers whose addition a training step leaves out"
    )
    scale_weight_norms: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="max-norm regularisation, kohya's name: after each step the addition of a layer whose "
        "norm is above this is made so much smaller; 1 is usual; null: none is",
    )
    factor: int = Field(
        default=-1, ge=-1, le=4096, description="of lokr: size of the first factor; -1: as square as possible"
    )
    decompose_both: bool = Field(default=False, description="of lokr: the first factor is of low rank too")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of inputs left out in training")
    rslora: bool = Field(
        default=False, description="scale by alpha / sqrt(rank) instead (Kalajdzievski 2023), for high ranks"
    )
    dora: bool = Field(
        default=False, description="train each output's magnitude apart from its direction (Liu et al. 2024)"
    )
    text_encoder: bool = Field(default=False, description="adapt the text encoders' layers too")
    trigger: str | None = Field(
        default=None, description="the words that call it up, noted in the file; null: data.prompt"
    )

    @property
    def changes_base(self) -> bool:
        """Whether training takes something out of the base's weights, which the written adapter puts back."""
        return self.init_lora_weights.startswith("pissa")

    def rank_of(self, layer: str) -> int:
        """The rank of a layer `<part>.<path>`; 0 where it has no addition."""
        found = _first_match(self.rank_pattern, layer)
        if found is not None:
            return int(found)
        return self.conv_rank if self.conv_rank is not None and _is_kernel(layer) else self.rank

    def alpha_of(self, layer: str) -> float:
        """The alpha of a layer."""
        found = _first_match(self.alpha_pattern, layer)
        if found is None and _is_kernel(layer):
            found = self.conv_alpha or (None if self.conv_rank is None else self.rank_of(layer))
        return found or self.alpha or self.rank_of(layer)

    def scale_of(self, layer: str) -> float:
        """What a layer's addition is multiplied by."""
        rank = self.rank_of(layer)
        return self.alpha_of(layer) / (math.sqrt(rank) if self.rslora else rank)

    @model_validator(mode="after")
    def _possible(self) -> AdapterSettings:
        if self.kind != "lora":
            extra = ["dora", "rslora", "dropout"]
            extra += [] if self.kind in ("loha", "lokr") else ["rank_dropout", "module_dropout"]
            if given := next((name for name in extra if getattr(self, name)), None):
                raise ValueError(f"{given} with kind {self.kind}, which has none; use kind lora")
        if self.scale_weight_norms is not None and (
            other := "dora" if self.dora else f"kind {self.kind}" if self.kind != "lora" else ""
        ):
            raise ValueError(f"scale_weight_norms with {other}; it is of kind lora without dora")
        start = self.init_lora_weights
        if self.scale_weight_norms is not None and self.changes_base:
            raise ValueError(
                f"scale_weight_norms with init_lora_weights {start}; use default, gaussian or eva"
            )
        if start != "default" and (self.kind != "lora" or self.start is not None):
            other = "from" if self.kind == "lora" else f"kind {self.kind}"
            raise ValueError(f"init_lora_weights {start} with {other}; use default")
        if self.dora and start.startswith("pissa"):
            raise ValueError(
                f"init_lora_weights {start} with dora, whose magnitudes are the base's; use default"
            )
        if self.kind != "lokr" and (self.factor != -1 or self.decompose_both):
            raise ValueError(f"factor and decompose_both with kind {self.kind}; they are of kind lokr")
        if self.dora and (self.rank_dropout or self.module_dropout):
            raise ValueError("rank_dropout or module_dropout with dora, whose magnitudes need all ranks")
        if self.targets in ("qv", "attention", "all-linear") and (self.conv_rank or self.conv_alpha):
            raise ValueError(f"conv_rank or conv_alpha with targets {self.targets}; use targets conv")
        return self


def _is_kernel(layer: str) -> bool:
    """Whether a layer is a convolution of more than one pixel, by diffusers' names."""
    return layer.rpartition(".")[2] in ("conv", "conv1", "conv2", "conv_in", "conv_out")


def _first_match(patterns: Mapping[str, float], layer: str) -> float | None:
    path = layer.partition(".")[2]
    return next((v for p, v in patterns.items() if fnmatchcase(layer, p) or fnmatchcase(path, p)), None)


class AlignSettings(BaseModel):
    """Drawing what a block makes towards what a frozen network sees."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    extractor: str | None = Field(
        default=None,
        description="folder or hub id of the frozen network: DINO, CLIP, darkroom's own; null: no alignment",
    )
    weight: float = Field(
        default=0.5, ge=0, le=100, description="weight of its loss, added to the denoiser's"
    )
    block: int | None = Field(
        default=None, ge=1, description="whose tokens are aligned, from 1; null: a third of the way"
    )
    hidden: int = Field(default=1024, ge=8, le=65536, description="width of the two layers between them")


class RoutingSettings(BaseModel):
    """Which share of the tokens goes through which blocks in training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: float = Field(
        default=1.0, gt=0, le=1, description="share of a picture's tokens that the middle blocks see; 1: all"
    )
    before: int = Field(default=2, ge=0, description="blocks at the start that see every token")
    after: int = Field(default=1, ge=0, description="blocks at the end that do")
    loss: Literal["all", "kept"] = Field(
        default="all", description="of which tokens; kept, with after 0: masking"
    )


class EmaSettings(BaseModel):
    """The averaged weights, which are sampled from and exported."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(default=True, description="keep averaged weights")
    decay: float = Field(default=0.999, ge=0, lt=1, description="share of the average that a step keeps")
    start_step: int = Field(
        default=0, ge=0, description="the first step that is averaged; until then the average is the weights"
    )
    every: int = Field(
        default=1,
        ge=1,
        description="steps between two updates, each of which keeps decay ** every: less work",
    )
    warmup: bool = Field(
        default=True,
        description="keep at most (1 + n) / (10 + n) after n averaged steps, so that early weights go",
    )


class TrainSettings(BaseModel):
    """Length, batch and numbers of a training run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(default=1000, gt=0, description="optimiser steps")
    global_batch: int = Field(default=64, gt=0, le=1_000_000, description="pictures in an optimiser step")
    micro_batch: int | Literal["auto"] = Field(
        default="auto",
        description="pictures in one forward pass; divides global_batch; auto: the most that fit",
    )
    precision: Precision | Literal["auto"] = Field(
        default="auto",
        description="number format of computation (master weights are float32); auto: bf16 where it is fast",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="of order, noise, timesteps, crops and dropout")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    gradient_checkpointing: bool = Field(
        default=False,
        description="compute activations again in the backward pass: less memory, a third more time",
    )
    blocks_to_swap: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="so many of the last blocks of a frozen U-Net or transformer (kohya's name) rest in main "
        "memory, under an adapter or a new word, and come to the card ahead of use in both passes; two of "
        "them are there at a time; 0: none rests",
    )
    channels_last: bool | Literal["auto"] = Field(
        default="auto", description="memory layout of convolutions; auto: as a pass is faster in"
    )
    compile: Literal["none", "blocks", "whole"] = Field(
        default="none",
        description="torch.compile of the U-Net or transformer: each kind of block, half a minute at the "
        "start, or the whole, minutes; a graph for each size of picture and micro-batch; not with fsdp",
    )
    tf32: bool = Field(
        default=False,
        description="on NVIDIA cards, float32 products and convolutions with factors rounded to 10 bits",
    )
    cudnn_benchmark: bool = Field(
        default=False,
        description="on NVIDIA cards, time each convolution's algorithms at its first call, keep the best; "
        "a run that is resumed may then differ in the last bits",
    )
    log_every: int = Field(default=10, gt=0, description="steps between console lines and writes of metrics")
    nonfinite_policy: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="where a step's loss or gradients are no numbers (or above spike_norm): stop; skip: "
        "leave the weights as they are; rollback: go on from the last checkpoint without that batch",
    )
    spike_norm: float | None = Field(
        default=None, gt=0, description="a gradient norm that counts as odd too; null: none does"
    )
    ema: EmaSettings = Field(default=EmaSettings(), description="averaged weights")
    routing: RoutingSettings = Field(
        default=RoutingSettings(), description="tokens that pass a transformer's blocks by"
    )
    align: AlignSettings = Field(
        default=AlignSettings(), description="a transformer's tokens drawn towards a frozen network's"
    )
