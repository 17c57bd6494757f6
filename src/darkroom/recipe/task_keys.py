"""Which keys of a recipe are read, by which tasks and with which other keys; the rest are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from darkroom.errors import RecipeError
from darkroom.recipe.data import AugmentSettings
from darkroom.recipe.fine_tuning import FINE_TUNING, SUBJECT_TASKS
from darkroom.recipe.objective import HUBER
from darkroom.recipe.sections import ADAPTER_TASKS, VAE_TASKS, Task

TASKS: tuple[str, ...] = get_args(Task)
_DENOISERS = tuple(task for task in TASKS if task not in (*VAE_TASKS, "extractor"))
_BY_NOISE = tuple(task for task in _DENOISERS if task != "distill")
"""Those that choose what noise a denoiser learns from; a student's is its teacher's."""
_BY_ERROR = tuple(task for task in _BY_NOISE if task != "dpo")
"""Those whose loss is the denoiser's error."""
_WITH_TEXT = ("pretrain", "finetune", "dreambooth")
_ADAPTERS = (*ADAPTER_TASKS, "distill")

_OF: dict[str, tuple[str, ...]] = {
    "model.vae": tuple(task for task in TASKS if task != "extractor"),
    **dict.fromkeys(("model.unet", "model.text_encoder", "model.tokenizer"), _DENOISERS),
    **dict.fromkeys(("model.vocab_size", "model.max_length"), _DENOISERS),
    "model.train_text_encoder": _WITH_TEXT,
    "model.fresh_unet": _BY_NOISE,
    "model.base_precision": (*_ADAPTERS, "textual-inversion"),
    "model.word": ("textual-inversion",),
    **dict.fromkeys(("data.store", "data.repeats"), tuple(task for task in TASKS if task != "dpo")),
    "data.stores": ("pretrain", *VAE_TASKS, "finetune", "lora"),
    "data.sets": ("finetune", "lora"),
    "data.folder": FINE_TUNING,
    "data.instance": tuple(task for task in FINE_TUNING if task != "dpo"),
    **dict.fromkeys(("data.class_prompt", "data.class_images"), SUBJECT_TASKS),
    **dict.fromkeys(("data.num_class_images", "data.prior_weight"), SUBJECT_TASKS),
    **dict.fromkeys(("data.prompt", "data.caption_dropout", "data.text", "data.online"), _DENOISERS),
    **dict.fromkeys(
        ("data.shuffle_tags", "data.keep_tokens", "data.keep_tokens_separator", "data.secondary_separator"),
        _DENOISERS,
    ),
    **dict.fromkeys(("data.tag_dropout", "data.token_warmup_steps", "data.token_warmup_min"), _DENOISERS),
    **dict.fromkeys(("data.wildcards", "data.caption_prefix", "data.caption_suffix"), _DENOISERS),
    **dict.fromkeys(("data.max_token_length", "data.weighted_captions", "data.clip_skip"), _BY_NOISE),
    **dict.fromkeys(("data.mask", "objective.unmasked_weight"), _BY_NOISE),
    "data.buckets": tuple(task for task in _DENOISERS if task != "dpo"),
    "adapter": _ADAPTERS,
    "adapter.text_encoder": ADAPTER_TASKS,
    **dict.fromkeys(
        (
            *("objective.prediction", "objective.timesteps", "objective.flow.mean", "objective.flow.std"),
            *(f"objective.noise.{name}" for name in ("offset", "offset_random_strength", "adaptive_scale")),
            *(f"objective.noise.multires_{name}" for name in ("iterations", "discount")),
            *(f"objective.noise.perturbation{name}" for name in ("", "_random_strength")),
        ),
        _BY_NOISE,
    ),
    **dict.fromkeys(
        (
            *("objective.min_snr_gamma", "objective.soft_min_snr_gamma", "objective.p2_gamma"),
            *("objective.p2_k", "objective.debiased_estimation", "objective.loss"),
            "objective.scale_v_pred_loss_like_noise_pred",
        ),
        _BY_ERROR,
    ),
    **dict.fromkeys(("objective.noise", "objective.flow"), _DENOISERS),
    "objective.dpo": ("dpo",),
    "objective.autoencoder": ("autoencoder",),
    "objective.tiny_vae": ("tiny-vae",),
    "objective.extractor": ("extractor",),
    "objective.distill": ("distill",),
    "optim.unet_lr": (*_WITH_TEXT, *ADAPTER_TASKS),
    **dict.fromkeys(
        ("optim.text_encoder_lr", "optim.text_encoder_2_lr", "optim.text_encoder_steps"),
        (*_WITH_TEXT, *ADAPTER_TASKS),
    ),
    "optim.loraplus_lr_ratio": _ADAPTERS,
    "train.blocks_to_swap": (*_ADAPTERS, "textual-inversion"),
    # diffusers' encoder of a tiny VAE leaves out its scaling of pixels where it is checkpointed
    "train.gradient_checkpointing": tuple(task for task in TASKS if task not in ("tiny-vae", "extractor")),
    **dict.fromkeys(("train.routing", "train.align"), ("pretrain", "finetune")),
    "parallel": tuple(task for task in TASKS if task != "extractor"),
    "sample": _DENOISERS,
    "sample.every": tuple(task for task in TASKS if task != "extractor"),
    "evaluate.timesteps": _BY_NOISE,
    **dict.fromkeys(
        (f"evaluate.{name}" for name in ("every_images", "scores", "num", "extractors")), _DENOISERS
    ),
}
"""By key or section, of which the longest that a key begins with holds; without one all tasks read it."""


_TAGS = "data.shuffle_tags|data.tag_dropout|data.token_warmup_steps"
_COLOURS = "|".join(f"data.augment.{name}" for name in AugmentSettings.model_fields if name != "share")
_FALLING = ("cosine", "cosine-with-restarts", "linear", "polynomial")
_GROUPS: tuple[tuple[tuple[str, ...], dict[str, tuple[str, ...]]], ...] = (
    (("model.vocab_size", "model.max_length"), {"model.tokenizer": ("train",)}),
    (("data.augment.share",), {_COLOURS: ()}),
    (("data.cache_gb",), {"data.cache": ()}),
    (("data.keep_tokens",), {_TAGS: ()}),
    (("data.token_warmup_min",), {"data.token_warmup_steps": ()}),
    (("objective.loss.huber_c", "objective.loss.huber_schedule"), {"objective.loss.type": HUBER}),
    (
        ("objective.loss.huber_scale",),
        {"objective.loss.type": HUBER, "objective.loss.huber_schedule": ("constant", "exponential")},
    ),
    (("objective.timesteps.mode_scale",), {"objective.timesteps.distribution": ("mode",)}),
    (("objective.noise.multires_discount",), {"objective.noise.multires_iterations": ()}),
    (("objective.extractor.label",), {"objective.extractor.loss": ("classifier",)}),
    (("objective.extractor.caption_weight",), {"objective.extractor.loss": ("contrastive",)}),
    (("objective.distill.huber_c",), {"objective.distill.method": ("lcm",)}),
    (
        ("optim.text_encoder_lr", "optim.text_encoder_2_lr", "optim.text_encoder_steps"),
        {"model.train_text_encoder|adapter.text_encoder": ()},
    ),
    (("optim.final_lr_ratio",), {"optim.lr_schedule": _FALLING}),
    (("evaluate.scores", "evaluate.extractors", "evaluate.num"), {"evaluate.every_images": ()}),
)
"""Keys that are read only where all of these others have one of the values; without values, where one of the
others is given. Where one of the others was given its default nothing is refused: it was turned off.

Left out are what one recipe carries to other machines, such as `parallel.reduce` and `data.online`, and what
several optimisers share.
"""
_WITH = {key: others for keys, others in _GROUPS for key in keys}


def tasks_of(key: str) -> tuple[str, ...]:
    """The tasks that read a key, such as `objective.loss.type`, in the order of `Task`."""
    parts = key.replace("[]", "").split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    found = next((_OF[name] for name in names if name in _OF), TASKS)
    return tuple(task for task in TASKS if task in found)


def others_of(key: str) -> list[str]:
    """What else a key needs to be read, such as `objective.loss.type=huber|smooth-l1`."""
    shown = {other.replace("|", " or "): "|".join(values) for other, values in _WITH.get(key, {}).items()}
    return [f"{other}={values}" if values else other for other, values in shown.items()]


def check_read(task: str, settings: BaseModel) -> None:
    """RecipeError for a key that is not at its default and that nothing of this recipe reads."""
    for key in _given(settings):
        if task not in (readers := tasks_of(key)):
            raise RecipeError(
                key,
                f"given with the task {task}, which does not read it",
                allowed=f"with {', '.join(readers)}",
            )
        for (others, allowed), shown in zip(_WITH.get(key, {}).items(), others_of(key), strict=True):
            found = [_value(settings, other) for other in others.split("|")]
            is_read = found[0][0] in allowed if allowed else any(value for value, _ in found)
            if not is_read and not any(is_off for _, is_off in found):
                raise RecipeError(key, "given, but nothing reads it", allowed=f"with {shown}")


def _given(settings: BaseModel, path: str = "") -> Iterator[str]:
    """The keys that are not at their defaults."""
    for name, field in type(settings).model_fields.items():
        value, key = getattr(settings, name), f"{path}{field.alias or name}"
        if isinstance(value, BaseModel):
            yield from _given(value, f"{key}.")
        elif value != field.default:
            yield key


def _value(settings: BaseModel, key: str) -> tuple[Any, bool]:
    """A key's value, and whether that is its default and was given nevertheless: it was turned off, in a
    recipe that has what belongs to it. None in a section that is not there.
    """
    *parents, name = key.split(".")
    section: Any = settings
    for parent in parents:
        section = getattr(section, parent, None)
    if section is None:
        return None, False
    value = getattr(section, name)
    default = type(section).model_fields[name].default
    return value, name in section.model_fields_set and value == default
