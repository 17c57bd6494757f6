"""The section `data` of a recipe: which pictures are trained on, and in what form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class AugmentSettings(BaseModel):
    """How the colours of pictures vary, anew each time a picture comes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    brightness: float = Field(default=0.0, ge=0, le=1, description="factor between 1 - x and 1 + x")
    contrast: float = Field(default=0.0, ge=0, le=1, description="likewise")
    saturation: float = Field(default=0.0, ge=0, le=1, description="likewise")
    hue: float = Field(default=0.0, ge=0, le=0.5, description="largest shift, as a share of the whole circle")
    gamma: float = Field(default=0.0, ge=0, lt=1, description="power between 1 - x and 1 + x")
    share: float = Field(default=1.0, ge=0, le=1, description="share of pictures that are changed each time")

    @property
    def used(self) -> bool:
        """Whether anything varies."""
        return bool(
            self.share and (self.brightness or self.contrast or self.saturation or self.hue or self.gamma)
        )


class DataSet(BaseModel):
    """One folder of several."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str = Field(description="its pictures, with .txt captions or metadata.jsonl")
    captions: str | None = Field(
        default=None, description="a JSON file of kohya's fine-tuning: {picture: {caption: ..., tags: ...}}"
    )
    repeats: int = Field(
        default=1, ge=1, le=10_000, description="how often each of its pictures comes against the others'"
    )
    prompt: str | None = Field(
        default=None, description="caption of its pictures without one; null: data.prompt"
    )
    loss_weight: float = Field(default=1.0, gt=0, le=100, description="weight of its pictures' loss")
    resolution: int | None = Field(
        default=None,
        ge=8,
        le=8192,
        multiple_of=8,
        description="side in pixels, at most data.resolution; null: that",
    )


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
    prefetch_batches: int = Field(default=4, ge=1, le=1024, description="batches read ahead")
    cache: str | None = Field(
        default=None,
        min_length=1,
        description="folder on a local disk where rows that are read are kept as files: of a store at an "
        "address each machine downloads a row once; what lies there may be deleted",
    )
    cache_gb: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="about the most that the files take; null: what the disk has, less a tenth",
    )

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
