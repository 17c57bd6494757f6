"""Rules of the fine-tuning tasks: adapters, subjects with their words and classes, preferences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkroom.errors import RecipeError
from darkroom.recipe.sections import (
    ADAPTER_TASKS,
    ParallelSettings,
    PreferenceSettings,
)

if TYPE_CHECKING:
    from darkroom.recipe.sections import (
        AdapterSettings,
        DataSettings,
        ModelSettings,
        ObjectiveSettings,
        OptimSettings,
        TrainSettings,
    )

SUBJECT_TASKS = ("dreambooth", "dreambooth-lora")
FINE_TUNING = ("finetune", *ADAPTER_TASKS, "dreambooth", "textual-inversion", "distill")


def is_subject(task: str) -> bool:
    """Whether the pictures are of one subject."""
    return task in (*SUBJECT_TASKS, "textual-inversion")


def check_adapter(
    task: str,
    adapter: AdapterSettings | None,
    model: ModelSettings,
    data: DataSettings,
    parallel: ParallelSettings,
    optim: OptimSettings,
) -> None:
    """Where an adapter and the other sections exclude each other."""
    _check_use(task, adapter, model, parallel)
    _check_start(task, adapter, data, parallel)
    _check_loraplus(adapter, optim)
    _check_norms(adapter, optim)


def _check_use(
    task: str, adapter: AdapterSettings | None, model: ModelSettings, parallel: ParallelSettings
) -> None:
    able = (*ADAPTER_TASKS, "distill")
    if adapter is None:
        return
    if task not in able:
        raise RecipeError("adapter", f"given with the task {task}", allowed=f"with {' or '.join(able)}")
    if model.train_text_encoder:
        raise RecipeError(
            "model.train_text_encoder",
            f"true with the task {task}, which leaves the model's own weights alone",
            mend="set adapter.text_encoder=true to adapt it too",
        )
    if parallel.mode == "fsdp" and adapter.kind in ("oft", "full"):
        raise RecipeError("parallel.mode", f"fsdp with adapter.kind={adapter.kind}", allowed="none or ddp")


def _check_start(
    task: str, adapter: AdapterSettings | None, data: DataSettings, parallel: ParallelSettings
) -> None:
    """Where an adapter's start and the rest exclude each other."""
    if adapter is None:
        return
    start = adapter.init_lora_weights
    if adapter.changes_base and task in ("dpo", "distill"):
        raise RecipeError(
            "adapter.init_lora_weights",
            f"{start} with the task {task}, which compares with the base as it is",
            allowed="default, gaussian, eva",
        )
    if start == "eva" and data.encode == "online":
        raise RecipeError(
            "data.encode", "online with adapter.init_lora_weights=eva", allowed="stored, inline"
        )
    if start == "eva" and parallel.mode != "none":
        raise RecipeError(
            "parallel.mode", f"{parallel.mode} with adapter.init_lora_weights=eva", allowed="none"
        )


def _check_loraplus(adapter: AdapterSettings | None, optim: OptimSettings) -> None:
    """A rate of what the adapter does not have."""
    if optim.loraplus_lr_ratio is not None and (adapter is None or adapter.kind != "lora"):
        raise RecipeError(
            "optim.loraplus_lr_ratio",
            "given, but there is no second matrix",
            allowed="with adapter.kind=lora",
        )


def _check_norms(adapter: AdapterSettings | None, optim: OptimSettings) -> None:
    """Norms that are limited behind an optimiser that holds the weights a second time."""
    if adapter is not None and adapter.scale_weight_norms is not None and optim.name == "schedule-free":
        raise RecipeError(
            "adapter.scale_weight_norms",
            f"{adapter.scale_weight_norms:g} with optim.name=schedule-free, which keeps weights of its own",
            mend="take another optim.name",
        )


def check_subject(task: str, model: ModelSettings, data: DataSettings) -> None:
    """What a subject's pictures, its class and its new word need."""
    _check_pictures(task, data)
    _check_prior(data)
    _check_word(task, model, data)


def _check_pictures(task: str, data: DataSettings) -> None:
    if task in SUBJECT_TASKS:
        if data.prompt is None:
            raise RecipeError(
                "data.prompt", "missing", mend="say it with a rare word: data.prompt='a photo of sks dog'"
            )
    elif key := "class_prompt" if data.class_prompt is not None else _said_of_prior(data):
        raise RecipeError(
            f"data.{key}", f"given with the task {task}", allowed=f"with {' or '.join(SUBJECT_TASKS)}"
        )


def _check_prior(data: DataSettings) -> None:
    if data.class_prompt is None and (key := _said_of_prior(data)):
        raise RecipeError("data.class_prompt", f"needed with data.{key}", mend="such as 'a photo of a dog'")
    if data.class_prompt is not None and data.class_prompt == data.prompt:
        raise RecipeError(
            "data.class_prompt", f"'{data.class_prompt}' is data.prompt too", mend="leave its rare word out"
        )
    if data.class_prompt is not None and data.encode == "online":
        raise RecipeError("data.encode", "online with data.class_prompt", allowed="stored, inline or auto")
    if data.class_prompt is not None and data.buckets and data.encode == "stored":
        raise RecipeError(
            "data.encode",
            "stored with data.buckets and data.class_prompt: class pictures are cut to each batch's shape",
            allowed="inline or auto",
        )


def check_preference(
    task: str, data: DataSettings, adapter: AdapterSettings | None, objective: ObjectiveSettings
) -> None:
    """What Diffusion-DPO needs, and has no place for."""
    if task != "dpo":
        if objective.dpo != PreferenceSettings():
            raise RecipeError("objective.dpo", f"given with the task {task}", allowed="dpo")
        return
    if data.folder is None:
        raise RecipeError("data.folder", "missing", mend="a folder with chosen/ and rejected/")
    if adapter is not None and adapter.kind in ("oft", "full"):
        raise RecipeError("adapter.kind", f"{adapter.kind} with the task dpo", allowed="lora, loha, lokr")
    refused = {
        "data.buckets": data.buckets,
        "data.repeats": data.repeats != 1,
        "data.encode": data.encode == "online",
        **dict.fromkeys((f"objective.{name}" for name in objective.weighs), True),
        "objective.scale_v_pred_loss_like_noise_pred": objective.scale_v_pred_loss_like_noise_pred,
        "objective.loss": objective.loss.type != "mse",
    }
    if given := next((key for key, is_so in refused.items() if is_so), None):
        raise RecipeError(
            given, "given with the task dpo, whose loss has no place for it", mend="leave it out"
        )


LEAST_SWAPPED = 3


def check_frozen_base(
    task: str, model: ModelSettings, adapter: AdapterSettings | None, train: TrainSettings, *, frozen: bool
) -> None:
    """Only a frozen U-Net can be held in fewer bits, or in part in main memory."""
    number = train.blocks_to_swap
    if 0 < number < LEAST_SWAPPED:
        raise RecipeError(
            "train.blocks_to_swap",
            f"{number}, but two of them are on the card at a time",
            allowed=f"{LEAST_SWAPPED} or more, or 0",
        )
    given = {"model.base_precision": model.base_precision, "train.blocks_to_swap": number}
    for key, value in given.items():
        if value:
            _check_made_anew(key, value, task, adapter, train, frozen=frozen)


def _check_made_anew(
    key: str,
    value: str | int,
    task: str,
    adapter: AdapterSettings | None,
    train: TrainSettings,
    *,
    frozen: bool,
) -> None:
    """What layers whose weights are made anew for each pass cannot stand."""
    if not frozen:
        raise RecipeError(
            key,
            f"{value} with the task {task}, which trains the U-Net's own weights",
            allowed=f"with {', '.join(ADAPTER_TASKS)}, textual-inversion, or distill with an adapter",
        )
    if adapter is not None and adapter.kind in ("oft", "full"):
        raise RecipeError(
            "adapter.kind",
            f"{adapter.kind} with {key}={value}: it changes the whole weight",
            allowed="lora, loha, lokr",
        )
    if train.compile != "none":
        raise RecipeError("train.compile", f"{train.compile} with {key}={value}", allowed="none")


def _said_of_prior(data: DataSettings) -> str | None:
    """A setting of prior preservation that was given without a class prompt."""
    if data.class_images is not None:
        return "class_images"
    for name in ("num_class_images", "prior_weight"):
        # A run's own recipe says every setting, the missing prompt too.
        is_given = name in data.model_fields_set and "class_prompt" not in data.model_fields_set
        if is_given or getattr(data, name) != type(data).model_fields[name].default:
            return name
    return None


def _check_word(task: str, model: ModelSettings, data: DataSettings) -> None:
    word, prompts = model.word, data.prompts
    if task != "textual-inversion":
        if word is not None:
            raise RecipeError("model.word", f"given with the task {task}", allowed="textual-inversion")
        return
    if word is None:
        raise RecipeError(
            "model.word",
            "missing",
            mend="say the new word: model.word.token='<sks-dog>' model.word.initial=dog",
        )
    if model.train_text_encoder:
        raise RecipeError(
            "model.train_text_encoder",
            "true, but textual inversion trains the new word alone",
            mend="leave it out",
        )
    if missing := [prompt for prompt in prompts if word.token not in prompt]:
        raise RecipeError(
            "data.prompt",
            f"'{missing[0]}' lacks the word {word.token}",
            mend=f"such as 'a photo of {word.token}'",
        )
