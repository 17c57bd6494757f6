"""Every section of a recipe: its keys, types, defaults, units and allowed ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from darkroom.bill import Bill, format_usd
from darkroom.evaluate.settings import SmallSettings
from darkroom.recipe.tuning import (
    AugmentSettings,
    DataSet,
    LayerRule,
    LossSettings,
    PreferenceSettings,
    SamplePrompt,
    TimestepSettings,
)


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


class StoreWeight(BaseModel):
    """One store of several."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str = Field(description="a picture store")
    weight: float = Field(
        default=1.0, gt=0, le=1e9, description="its share of every batch, against the others'"
    )


class OnlineSettings(BaseModel):
    """Who reads, cuts and encodes where data.encode is online."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    encoders: int | str = Field(default=1, description="how many encoders: N, or MIN:MAX")
    accelerator: str | None = Field(
        default=None, description="accelerator type that encoders run on, as Ray names it"
    )
    fraction: float = Field(
        default=1.0, gt=0, le=64, description="each one's share of a GPU, or of CPU cores where there is none"
    )
    cpu_workers: int = Field(default=2, ge=1, le=100_000, description="tasks that read and cut at once")
    timeout_s: float = Field(default=600.0, gt=0, description="longest wait for a batch, in seconds")


class DataSettings(BaseModel):
    """Which pictures are trained on, and in what form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str | None = Field(default=None, description="the picture store, such as pictures.lance")
    stores: tuple[StoreWeight, ...] = Field(
        default=(), max_length=1024, description="or several stores, mixed by weight"
    )
    folder: str | None = Field(
        default=None,
        description="or a folder of pictures, imported into the run; of the task dpo one with chosen/ and "
        "rejected/, whose files have the same names",
    )
    instance: str | None = Field(default=None, description="or a folder of pictures of one subject, likewise")
    sets: tuple[DataSet, ...] = Field(
        default=(), max_length=256, description="or several folders, each with settings of its own"
    )
    prompt: str | tuple[str, ...] | None = Field(
        default=None,
        description="caption of a subject's pictures, and of pictures without one; of several one is drawn",
    )
    class_prompt: str | None = Field(
        default=None, description="the subject's class, 'a photo of a dog': turns prior preservation on"
    )
    class_images: str | None = Field(
        default=None, description="folder of class pictures; what lacks is generated; null: in the run"
    )
    num_class_images: int = Field(default=200, gt=0, le=100_000, description="how many class pictures")
    prior_weight: float = Field(default=1.0, ge=0, le=100, description="weight of the class pictures' loss")
    resolution: int = Field(default=512, ge=8, le=8192, multiple_of=8, description="side in pixels")
    encode: Literal["auto", "stored", "inline", "online"] = Field(
        default="stored",
        description="stored: prepared columns are read; inline: encoded at each step; online: by other "
        "machines (--engine ray); auto: stored where a column is there, or can be made because the run has "
        "its own store and cuts pictures always alike",
    )
    online: OnlineSettings = Field(default=OnlineSettings(), description="of encode=online: who encodes")
    text: Literal["auto", "stored", "inline"] = Field(
        default="auto", description="the same for the text; auto: stored where it was prepared"
    )
    filter: str | None = Field(default=None, description='rows to take, in SQL: "width >= 512"')
    holdout: float = Field(
        default=0.0, ge=0, description="rows kept out of training: a share below 1, or a number of rows"
    )
    crop: Literal["centre", "random"] = Field(default="centre", description="of pictures encoded inline")
    flip: bool = Field(default=False, description="mirror half of the pictures that are encoded inline")
    augment: AugmentSettings = Field(
        default=AugmentSettings(), description="colours of pictures that are encoded inline vary"
    )
    repeats: Annotated[int, Field(ge=1, le=10_000)] | Literal["folders"] = Field(
        default=1,
        description="folders: each picture in `10_sks dog/` comes ten times as often as one in `1_more/` or "
        "in no such folder; a number changes nothing but what the metrics count as an epoch",
    )
    shuffle_tags: bool = Field(
        default=False, description="deal a caption's tags (between commas) anew each time"
    )
    keep_tokens: int = Field(default=0, ge=0, description="tags at the start that stay there")
    keep_tokens_separator: str = Field(
        default="",
        max_length=64,
        description="such as |||: the tags before it stay instead of keep_tokens, and those after a second "
        "one at the end; it is taken out of captions",
    )
    secondary_separator: str = Field(
        default="",
        max_length=64,
        description="such as ;;;: what it joins is one tag to the settings of tags; then it becomes a comma",
    )
    mask: str | None = Field(
        default=None,
        description="column of masks, white where the loss counts; alpha: the pictures' own; null: the files "
        "NAME.mask.png next to a folder's pictures, if any",
    )
    caption_dropout: float = Field(default=0.0, ge=0, le=1, description="share of captions left empty")
    tag_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of a caption's tags left out, keep_tokens' excepted"
    )
    token_warmup_steps: int = Field(
        default=0, ge=0, description="steps in which a caption's tags grow from token_warmup_min to all"
    )
    token_warmup_min: int = Field(default=1, ge=0, description="tags that a caption begins with, then")
    wildcards: bool = Field(
        default=False, description="draw one of {a|b|c} in a caption, and one of its lines, anew each time"
    )
    caption_prefix: str = Field(default="", description="text put before every caption of the pictures")
    caption_suffix: str = Field(default="", description="text put after them")
    max_token_length: Literal[75, 150, 225] = Field(
        default=75, description="tokens of a caption that are read, in parts of 75, as generate reads them"
    )
    weighted_captions: bool = Field(
        default=False, description="captions have A1111's weights, such as (red:1.2); their brackets count"
    )
    clip_skip: int = Field(
        default=0,
        ge=0,
        le=11,
        description="last layers of the text encoder left out, as generate --clip-skip",
    )
    buckets: bool = Field(default=False, description="batches of one aspect ratio instead of square crops")
    workers: int = Field(default=2, ge=1, le=256, description="threads that read and decode")
    ahead: int = Field(default=4, ge=1, le=1024, description="batches read ahead")

    @property
    def sides(self) -> tuple[int, ...]:
        """The resolution of each of the sets."""
        return tuple(one.resolution or self.resolution for one in self.sets)

    @property
    def caches_latents(self) -> bool:
        """Whether a run with a store of its own makes latents once, because pictures are always cut alike."""
        alike = self.crop == "centre" and not self.flip and not self.augment.used
        alike = alike and set(self.sides) <= {self.resolution}
        # Class pictures are cut to the shape of the subject's picture that they go with.
        alike = alike and not (self.buckets and self.class_prompt is not None)
        return self.encode not in ("inline", "online") and alike

    @property
    def reads_text_plainly(self) -> bool:
        """Whether captions are read in one part, unweighted, by all of the encoder's layers."""
        return self.max_token_length == 75 and not self.weighted_captions and not self.clip_skip

    @property
    def reading(self) -> dict[str, Any]:
        """How `generate` reads prompts as training reads captions."""
        return {"clip_skip": self.clip_skip, "weighting": "a1111" if self.weighted_captions else "none"}

    @property
    def changes_captions(self) -> bool:
        """Whether a picture's caption is another one each time."""
        return bool(
            self.shuffle_tags
            or self.tag_dropout
            or self.token_warmup_steps
            or self.wildcards
            or self.caption_prefix
            or self.caption_suffix
            or self.keep_tokens_separator
            or self.secondary_separator
        )

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts, however many were given."""
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt or ()


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
    decay: Literal["constant", "cosine", "cosine-with-restarts", "linear", "polynomial"] = Field(
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
            if getattr(self, name) != 1 and self.decay != of:
                raise ValueError(
                    f"{name} {getattr(self, name):g} with decay {self.decay}; it is of decay {of}"
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


class FlowSettings(BaseModel):
    """Rectified flow: at which times it is trained. What is left out is what the model's scheduler says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: float | None = Field(
        default=None,
        ge=-10,
        le=10,
        description="of the normal number whose logistic is the time (0 picture, 1 noise); null: the "
        "model's, else 0",
    )
    std: float | None = Field(
        default=None, gt=0, le=10, description="its standard deviation; null: the model's, else 1"
    )
    shift: Annotated[float, Field(gt=0, le=100)] | Literal["auto", "model"] = Field(
        default="auto",
        description="times are moved to shift * t / (1 + (shift - 1) * t), more noise above 1; auto: by "
        "data.resolution, sqrt(latent pixels / 1024), at least 1; model: as its scheduler says",
    )


class NoiseSettings(BaseModel):
    """How noise grows with the timestep. What is left out is what the model's scheduler says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schedule: Literal["scaled-linear", "linear", "cosine"] | None = Field(
        default=None, description="shape of the betas over the timesteps; null: the model's own"
    )
    beta_start: float | None = Field(default=None, gt=0, lt=1, description="beta of the first timestep")
    beta_end: float | None = Field(default=None, gt=0, lt=1, description="beta of the last timestep")
    num_timesteps: int | None = Field(default=None, gt=1, le=100_000, description="length of the schedule")
    zero_terminal_snr: bool | None = Field(
        default=None,
        description="rescale the betas so that the last timestep is pure noise (Lin et al. 2023)",
    )
    offset: float = Field(
        default=0.0, ge=0, le=1, description="offset noise: strength of a shift common to a channel's pixels"
    )
    offset_random_strength: bool = Field(
        default=False, description="draw each picture's strength between 0 and offset"
    )
    adaptive_scale: float | None = Field(
        default=None,
        ge=-10,
        le=10,
        description="kohya's adaptive_noise_scale: so many times the size of a latent channel's mean is "
        "added to offset, at least 0 in all; null: nothing",
    )
    multires_iterations: int = Field(
        default=0,
        ge=0,
        le=16,
        description="multi-resolution noise: how many coarser noises are added; 0: none; 6 is usual",
    )
    multires_discount: float = Field(
        default=0.3, gt=0, le=1, description="each coarser noise's strength as a share of the one before"
    )
    perturbation: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="input perturbation (Ning et al. 2023; kohya's ip_noise_gamma): further noise in the "
        "input that the target lacks; 0.1 is usual",
    )
    perturbation_random_strength: bool = Field(
        default=False, description="draw each picture's strength between 0 and perturbation"
    )

    @model_validator(mode="after")
    def _possible(self) -> NoiseSettings:
        needs = {
            "offset_random_strength": (self.offset_random_strength, "offset"),
            "adaptive_scale": (self.adaptive_scale is not None, "offset"),
            "perturbation_random_strength": (self.perturbation_random_strength, "perturbation"),
        }
        for name, (given, of) in needs.items():
            if given and not getattr(self, of):
                raise ValueError(f"{name}, but {of} is 0; set noise.{of}")
        return self


class AutoencoderLossSettings(BaseModel):
    """The loss of the task `autoencoder`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reconstruction: Literal["l1", "mse"] = Field(default="l1", description="distance of pixels in [-1, 1]")
    kl_weight: float = Field(
        default=1e-6, ge=0, description="weight of the KL divergence, summed over a latent"
    )
    edge_weight: float = Field(
        default=0.0,
        ge=0,
        description="weight of the L1 distance between the pictures' horizontal and vertical "
        "differences; sharpens outlines",
    )


class TinyVaeSettings(BaseModel):
    """Of the task tiny-vae: the small encoder and decoder (TAESD), and what they learn from the VAE."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(default=64, ge=4, le=1024, description="channels of every layer")
    blocks: int = Field(
        default=3,
        ge=1,
        le=32,
        description="residual blocks at each size but the pictures' own, which has one",
    )
    target: Literal["teacher", "picture"] = Field(
        default="teacher",
        description="what the decoder makes of a latent: what the VAE makes of it, or the picture it is of, "
        "for which the VAE need not decode",
    )
    reconstruction: Literal["l1", "mse"] = Field(default="l1", description="distance of pixels in [-1, 1]")
    edge_weight: float = Field(
        default=0.0,
        ge=0,
        description="weight of the L1 distance between the pictures' horizontal and vertical differences",
    )
    latent_weight: float = Field(
        default=1.0, gt=0, description="weight of the encoder's square distance from the VAE's mean latent"
    )


class ExtractorSettings(BaseModel):
    """What the task extractor learns from, and its network."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: Literal["contrastive", "classifier"] = Field(
        default="contrastive", description="tell pictures apart, or tell the classes of a column"
    )
    label: str | None = Field(default=None, description="the store's column of classes, for classifier")
    caption_weight: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of the contrastive loss that captions have; null: 0.5 where there are any",
    )
    zoom: float = Field(default=0.4, gt=0, le=1, description="smallest share of the sides that a view shows")
    tint: float = Field(default=0.3, ge=0, le=1, description="how far brightness, contrast, colour vary")
    network: SmallSettings = Field(default=SmallSettings(), description="the network's shape")


class DistillSettings(BaseModel):
    """Of the task distill: how the few-step model learns from its teacher."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["lcm", "dmd2"] = Field(
        default="lcm",
        description="lcm: latent consistency (Luo et al. 2023); dmd2: distribution matching (Yin et al. "
        "2024, without its GAN loss), whose student draws by itself while it learns",
    )
    ddim_steps: int = Field(
        default=50, ge=2, le=1000, description="the teacher's steps; few steps are drawn at some of theirs"
    )
    guidance_min: float | None = Field(
        default=None,
        ge=1,
        le=100,
        description="the teacher's guidance scale, drawn evenly from here; null: the model's own, else 7.5",
    )
    guidance_max: float | None = Field(
        default=None, ge=1, le=100, description="to here; null: the model's own, else 7.5, or guidance_min"
    )
    huber_c: float = Field(
        default=0.001, gt=0, description="of lcm, its pseudo-Huber loss: where it turns linear"
    )
    timestep_scaling: float = Field(
        default=10.0, gt=0, description="how quickly answers count more than inputs as timesteps rise"
    )
    steps: int = Field(default=4, ge=1, le=64, description="of dmd2: the steps that the student draws in")
    fake_updates: int = Field(
        default=5, ge=1, le=100, description="of dmd2: train.steps for each at which the student moves"
    )
    fake_lr: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="of dmd2: peak rate of the network that learns what the student draws; null: optim.lr",
    )

    @model_validator(mode="after")
    def _possible(self) -> DistillSettings:
        if self.method == "lcm":
            others = {"steps": 4, "fake_updates": 5, "fake_lr": None}
            if given := next((name for name, usual in others.items() if getattr(self, name) != usual), None):
                raise ValueError(f"{given} with method lcm, which has none; use method dmd2")
        elif self.steps > self.ddim_steps:
            raise ValueError(f"steps {self.steps} is more than ddim_steps {self.ddim_steps}")
        return self


class ObjectiveSettings(BaseModel):
    """What is predicted, from how much noise, and how timesteps are weighed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prediction: Literal["epsilon", "v", "sample", "flow"] | None = Field(
        default=None,
        description="what is predicted: the noise, the velocity of diffusion, the picture, or the velocity "
        "of rectified flow (noise less picture); null: what the model's scheduler says",
    )
    min_snr_gamma: float | None = Field(
        default=None,
        gt=0,
        description="min-SNR-gamma loss weights (Hang et al. 2023 use 5); null: equal weights",
    )
    soft_min_snr_gamma: float | None = Field(
        default=None,
        gt=0,
        description="the same without a corner (Crowson et al. 2024, k-diffusion): SNR gamma / (SNR + gamma) "
        "on the picture's error; 4 is k-diffusion's, whose sigma_data is 1 / sqrt(gamma); null: none",
    )
    p2_gamma: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="P2 loss weights (Choi et al. 2022): 1 / (p2_k + SNR)^gamma on the noise's error; 0.5 "
        "and 1 are usual; null: equal weights",
    )
    p2_k: float = Field(default=1.0, gt=0, le=1000, description="of p2_gamma: keeps weights finite at SNR 0")
    debiased_estimation: bool = Field(
        default=False,
        description="weigh the loss by 1 / sqrt(SNR), of v by 1 / (SNR + 1) (Yu et al. 2023)",
    )
    scale_v_pred_loss_like_noise_pred: bool = Field(
        default=False,
        description="of prediction v: times SNR / (SNR + 1), as if the noise's error were meant (kohya)",
    )
    unmasked_weight: float = Field(
        default=0.0, ge=0, le=1, description="weight of the loss where a picture's mask is black"
    )
    loss: LossSettings = Field(default=LossSettings(), description="the distance from the target")
    timesteps: TimestepSettings = Field(default=TimestepSettings(), description="which are trained")
    noise: NoiseSettings = Field(default=NoiseSettings(), description="the noise schedule")
    flow: FlowSettings = Field(default=FlowSettings(), description="of rectified flow: times and shift")
    dpo: PreferenceSettings = Field(default=PreferenceSettings(), description="of the task dpo")
    autoencoder: AutoencoderLossSettings = Field(
        default=AutoencoderLossSettings(), description="loss of the task autoencoder"
    )
    tiny_vae: TinyVaeSettings = Field(default=TinyVaeSettings(), description="of the task tiny-vae")
    extractor: ExtractorSettings = Field(
        default=ExtractorSettings(), description="loss and network of the task extractor"
    )
    distill: DistillSettings = Field(default=DistillSettings(), description="of the task distill")

    @model_validator(mode="after")
    def _possible(self) -> ObjectiveSettings:
        if self.prediction == "epsilon" and self.noise.zero_terminal_snr:
            raise ValueError(
                "prediction epsilon with noise.zero_terminal_snr: at the last timestep the input is pure "
                "noise, so epsilon teaches nothing there; use prediction v or sample"
            )
        if len(weighs := self.weighs) > 1:
            second, first = list(weighs)[:2]
            raise ValueError(f"{first} with {second}: both weigh timesteps; use one of them")
        if self.p2_k != 1 and self.p2_gamma is None:
            raise ValueError("p2_k without p2_gamma, of which it is; set p2_gamma")
        if self.scale_v_pred_loss_like_noise_pred and self.prediction not in (None, "v"):
            raise ValueError(f"scale_v_pred_loss_like_noise_pred with prediction {self.prediction}; use v")
        return self

    @property
    def weighs(self) -> dict[str, float | bool]:
        """What is given of the settings that weigh timesteps against each other, by name."""
        names = ("min_snr_gamma", "soft_min_snr_gamma", "p2_gamma", "debiased_estimation")
        return {name: value for name in names if (value := getattr(self, name))}


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
        default=True, description="write while training goes on: a step waits only for the copy of the state"
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
    hours: float | None = Field(default=None, gt=0, description="wall-clock hours, all sessions together")
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


Precision = Literal["float32", "bf16", "fp16"]


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
    channels_last: bool | Literal["auto"] = Field(
        default="auto", description="memory layout of convolutions; auto: as is faster on the device"
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
    on_nan: Literal["stop", "skip", "rollback"] = Field(
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


class Recipe(BaseModel):
    """A training job, whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: Task = Field(description="what is trained, and on what kind of pictures")
    model: ModelSettings
    data: DataSettings
    adapter: AdapterSettings | None = None
    objective: ObjectiveSettings = ObjectiveSettings()
    optim: OptimSettings = OptimSettings()
    train: TrainSettings = TrainSettings()
    parallel: ParallelSettings = ParallelSettings()
    phases: tuple[PhaseSettings, ...] = Field(
        default=(), description="runs one after the other, each from the weights of the one before"
    )
    checkpoint: CheckpointSettings = CheckpointSettings()
    sample: SampleSettings = SampleSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    track: TrackSettings = TrackSettings()
    budget: BudgetSettings = BudgetSettings()
    _derived: tuple[str, ...] = PrivateAttr(default=())

    @property
    def adapts(self) -> bool:
        """Whether low-rank additions are trained instead of the model's own weights."""
        return self.task in ADAPTER_TASKS or (self.task == "distill" and self.adapter is not None)

    @property
    def trains_text(self) -> bool:
        """Whether anything of the text encoders is trained: weights, an adapter, or a new word."""
        adapted = self.adapter is not None and self.adapter.text_encoder
        return self.model.train_text_encoder or adapted or self.model.word is not None

    @property
    def frozen_text(self) -> bool:
        """Whether an adapter is trained that leaves the text encoders as they are."""
        return self.adapts and not self.trains_text

    @property
    def frozen_unet(self) -> bool:
        """Whether the U-Net's own weights stay as they are."""
        return self.adapts or self.task == "textual-inversion"

    @property
    def prompts(self) -> tuple[str, ...]:
        """The captions of pictures that the recipe itself gives."""
        word = self.model.word
        return self.data.prompts or (() if word is None else word.prompts)

    @property
    def sample_prompts(self) -> tuple[str | SamplePrompt, ...] | None:
        """What samples are drawn of, as far as the recipe alone gives it; None: of pictures' captions."""
        settings, prompts = self.sample, self.prompts
        if self.task == "extractor":
            return ()
        if settings.prompts or not settings.every or self.task in VAE_TASKS:
            return settings.prompts
        if not prompts:
            return None
        scenes = (scene.format(prompts[0]) for scene in SCENES)
        return (prompts[0], *scenes, *filter(None, [self.data.class_prompt]))

    @property
    def trigger(self) -> str | None:
        """The words that call a trained adapter up."""
        own = None if self.adapter is None else self.adapter.trigger
        return own or next(iter(self.data.prompts), None)

    @property
    def derived(self) -> tuple[str, ...]:
        """What the task decided because the recipe did not say it, with the reason."""
        return self._derived

    def dump(self) -> str:
        """The resolved recipe as YAML, every value said; reading it back gives the same recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


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

SCENES = ("{} in the snow", "{} on the beach")
"""Of which samples are drawn besides a subject's own prompt."""


def _with_zone(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
