"""What a plan reads of a recipe, its model's folder and its store, besides the counts; and making and
preparing pictures as asked for, with their counts, kept: no torch until one is counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.errors import InputError, RecipeError
from darkroom.models.reference import check_reference
from darkroom.plan.counts import Profile, cached_profile
from darkroom.recipe.recipe import Recipe
from darkroom.recipe.sections import VAE_TASKS

if TYPE_CHECKING:
    from pydantic import BaseModel

    from darkroom.recipe.sections import (
        AdapterSettings,
        CheckpointSettings,
        DataSettings,
        ModelSettings,
        OptimSettings,
        ParallelSettings,
        SampleSettings,
        TrainSettings,
    )


def encodes(task: str, data: DataSettings) -> bool:
    """Whether pictures are encoded at each step."""
    if task in VAE_TASKS or data.encode == "stored":
        return False
    return data.encode == "inline" or not data.caches_latents


NO_EFFECT: dict[str, tuple[str, ...]] = {
    "train": (
        *("steps", "global_batch", "micro_batch", "precision", "device", "seed", "log_every"),
        *("compile", "tf32", "cudnn_benchmark"),
    ),
    "optim": ("warmup_steps", "lr_schedule", "final_lr_ratio"),
    "data": ("filter", "holdout", "workers", "prefetch_batches"),
    "sample": ("seed", "steps", "solver"),
}
"""What changes neither an operation of a step nor a tensor; precision, batch and what kernels are computed by
(compile, tf32) are asked for apart."""
NO_EFFECT_SECTIONS = ("parallel", "checkpoint", "evaluate", "track", "budget")
RATES = ("unet_lr", "text_encoder_lr", "text_encoder_2_lr", "loraplus_lr_ratio")
"""Where one of these is said, the rate decides which weights are stepped together."""


def as_counted(
    train: TrainSettings, optim: OptimSettings, data: DataSettings, sample: SampleSettings
) -> dict[str, Any]:
    """The sections without what a recipe's counts do not depend on: recipes alike in this share one count."""
    changes: dict[str, Any] = {}
    for name, section in (("train", train), ("optim", optim), ("data", data), ("sample", sample)):
        keys = NO_EFFECT[name]
        changes[name] = section.model_copy(update={key: _default(section, key) for key in keys})
    if not optim.layers and not any(getattr(optim, rate) for rate in RATES):
        changes["optim"] = changes["optim"].model_copy(update={"lr": _default(optim, "lr")})
    # Which store or folder it is does not matter, only of what kind.
    named = {key: key for key in ("store", "folder", "instance") if getattr(data, key) is not None}
    changes["data"] = changes["data"].model_copy(update=named)
    for name in NO_EFFECT_SECTIONS:
        changes[name] = Recipe.model_fields[name].get_default(call_default_factory=True)
    return changes


def _default(section: BaseModel, key: str) -> Any:
    return type(section).model_fields[key].get_default(call_default_factory=True)


def check_planned(task: str, model: ModelSettings) -> None:
    """InputError for a task that is not planned, ModelError for a base that is no model's name."""
    if task == "extractor":
        raise InputError(
            "a plan of task extractor",
            allowed="the other tasks",
            mend="a small extractor trains within minutes: just train it",
        )
    check_reference(str(model.base))


def of_steps(
    train: TrainSettings, optim: OptimSettings, parallel: ParallelSettings, checkpoint: CheckpointSettings
) -> dict[str, Any]:
    """What a plan needs of how a run's steps are made and kept."""
    return {
        "mode": "fsdp" if parallel.mode == "fsdp" else "ddp",
        "alone": parallel.mode == "none",
        "nodes": parallel.nodes,
        "node_devices": None if parallel.devices == "auto" else parallel.devices,
        "shard": parallel.shard if parallel.mode == "fsdp" else "grads",
        "gradient_bytes": 2 if parallel.reduce == "bf16" else 4,  # between processes
        "channels_last": train.channels_last,
        "compile": train.compile != "none",
        "tf32": train.tf32,
        "on_cpu": train.device == "cpu",
        "steps": train.steps,
        "global_batch": train.global_batch,
        "micro_batch": None if train.micro_batch == "auto" else train.micro_batch,
        "precision": train.precision,
        "checkpointing": train.gradient_checkpointing,
        "aligns": train.align.extractor is not None,
        "optimiser": optim.name,
        "saves": 1 if checkpoint.background else -(-train.steps // checkpoint.every),
        "every_save": None if checkpoint.url else -(-train.steps // checkpoint.every),
    }


def of_pictures(task: str, model: ModelSettings, data: DataSettings) -> dict[str, Any]:
    """What a plan needs of a model and of the pictures that it is trained on."""
    from darkroom.train.data.local_dataset import CLASS_STEPS, class_call

    stores_text = data.text != "inline" and not model.train_text_encoder
    return {
        "task": task,
        "base": str(model.base),
        "vae": model.vae if isinstance(model.vae, str) else None,
        "store": data.store,
        "pictures": data.folder or data.instance,
        "class_pictures": data.num_class_images if data.class_prompt else 0,
        "class_images": data.class_images,
        "class_steps": CLASS_STEPS,
        "class_call": class_call(data.resolution),
        "resolution": data.resolution,
        "encode": data.encode,
        "stores_text": stores_text,  # where latents are stored beforehand
        "reads": _reads(task, data, stores_text),
    }


def may_make_anew(train: TrainSettings, adapter: AdapterSettings | None) -> bool:
    """Whether a frozen U-Net's layers may be held in fewer bits, or rest in main memory."""
    kind = "lora" if adapter is None else adapter.kind
    return train.compile == "none" and kind in ("lora", "loha", "lokr")


def _reads(task: str, data: DataSettings, stores_text: bool) -> list[str]:
    """What is read of the store at each step instead of being computed."""
    latents = task not in VAE_TASKS and not encodes(task, data)
    text = stores_text and "stored" in (data.text, data.encode)
    return ["latents"] * latents + ["text"] * text


def pictures_of(folder: str | None) -> int | None:
    """Pictures below a folder, where it is there and has some."""
    if not folder or not Path(folder).is_dir():
        return None
    from darkroom.data.importers.source import pictures_below

    return len(pictures_below(Path(folder))) or None


def read_phase(path: Path, overrides: Sequence[str], phase: int | None) -> tuple[Recipe, list[str]]:
    """A recipe, or one of its phases with the recipe's own model: its weights do not matter here; with notes
    on what stands in for parts that are not there yet.
    """
    from darkroom.recipe.recipe import read_recipe

    recipe = read_recipe(path, overrides)
    model, notes = _stood_in(recipe.model, path.parent)
    if phase is not None:
        _, recipe = list(recipe.in_phases(Path()))[phase]
    return recipe.model_copy(update={"model": model}), notes


def runs_of(text: str, folder: Path) -> list[Any]:
    """What of a recipe may change though its text does not: whether the runs that it names are there, and
    what the recipes in the same folder say that make them.
    """
    names = sorted(set(re.findall(r"runs/([\w.-]+)/", text)))
    files = [folder / f"{name}.yaml" for name in names]
    texts = [file.read_text(encoding="utf-8") if file.is_file() else "" for file in files]
    return [Path("runs", name).exists() for name in names] + texts


def _stood_in(model: ModelSettings, folder: Path) -> tuple[ModelSettings, list[str]]:
    """A model whose VAE or base an earlier run has yet to make, with what stands in for it, and notes.

    Of `runs/NAME/model` that is what its NAME.yaml trains; of another VAE the family's own.
    """
    notes, changes = [], dict[str, Any]()
    vae, base = model.vae, str(model.base)
    if _to_be_made(base) and (before := _model_of(base, folder)) is not None:
        changes["base"] = before.base
        notes.append(f"model.base {base} is not there yet: planned as {before.base}, as its recipe says")
    if isinstance(vae, str) and _to_be_made(vae):
        before = _model_of(vae, folder)
        changes["vae"] = None if before is None else before.vae
        stand_in = f"the {model.base} family's own" if before is None else "its recipe says"
        notes.append(f"model.vae {vae} is not there yet: planned as {stand_in}")
    return model.model_copy(update=changes), notes


def _to_be_made(ref: str) -> bool:
    """Whether a reference is a run's folder that is not there: neither a family nor of a hub's form."""
    return (ref.startswith("runs/") or ref.count("/") > 1) and not Path(ref).exists()


def _model_of(ref: str, folder: Path) -> ModelSettings | None:
    """The model of the recipe that makes a run's model, with what stands in; None without one."""
    from darkroom.recipe.recipe import read_recipe

    parts = Path(ref).parts
    file = folder / f"{parts[-2]}.yaml" if len(parts) > 1 and parts[-1] == "model" else None
    return _stood_in(read_recipe(file).model, folder)[0] if file is not None and file.is_file() else None


def text_of(path: Path) -> str:
    """A recipe's file as it stands; RecipeError where there is none, before anything heavy is imported."""
    if not path.is_file():
        raise RecipeError.missing(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return str(path)  # reading the recipe will say what is wrong with it


def configs_of(ref: str) -> str:
    """The settings of a model folder, which may change under the same name. ModelError for what is no model's
    name, before anything heavy is imported.
    """
    check_reference(ref)
    return (
        "".join(file.read_text(encoding="utf-8") for file in sorted(Path(ref).glob("*/*config.json"))) or ref
    )


def rows_of(store: str | None) -> int | None:
    """Pictures in a store, where it is there."""
    if not store or not Path(store).is_dir():
        return None
    from darkroom.data.store import Store
    from darkroom.errors import StoreError

    try:
        return Store.open(store).num_rows
    except StoreError:
        return None


USUAL_GUIDANCE = 7.5


def own_guidance(model: str) -> float:
    """The guidance scale that a model folder notes, else the usual one."""
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        index = json.loads((Path(model) / "model_index.json").read_text(encoding="utf-8"))
        return float(index["_darkroom"]["guidance"])
    return USUAL_GUIDANCE


def picture_profile(
    model: str, width: int, height: int, guided: bool, precision: str, attention: str, *, whole: bool = False
) -> Profile:
    """The counts of making pictures, kept. `whole`: the VAE decodes a batch at once."""
    key = {
        "job": "generate",
        "model": configs_of(model),
        "size": [width, height],
        "guided": guided,
        "precision": precision,
        "attention": attention,
        "whole": whole,
    }

    def count() -> Profile:
        """Count the job's kernels, decoding in as many pixels at once as `generate` does."""
        from darkroom.plan.tracing import GenerateSpec, profile_generation
        from darkroom.sample.pictures import DECODE_PIXELS

        pixels = None if whole else DECODE_PIXELS
        return profile_generation(GenerateSpec(model, width, height, guided, precision, attention, pixels))

    return cached_profile(key, count)


def preparing_profile(
    model: str, resolution: int, text: bool, precision: str, vae: str | None = None
) -> Profile:
    """The counts of encoding, kept; with another model's VAE, if that is said."""
    key = {
        "job": "prepare",
        "model": configs_of(model),
        "resolution": resolution,
        "text": text,
        "precision": precision,
        "vae": None if vae is None else configs_of(vae),
    }

    def count() -> Profile:
        from darkroom.plan.tracing import PrepareSpec, profile_preparing

        return profile_preparing(PrepareSpec(model, resolution, text, precision, vae))

    return cached_profile(key, count)
