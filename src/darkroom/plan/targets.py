"""What a plan is for: cards and their number, precision, layout, and this machine's own rates. And what it
reads of a recipe, its model's folder and its store, besides the counts.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.errors import InputError, RecipeError
from darkroom.hardware.cards import NVIDIA, Card, cards, find_card
from darkroom.hardware.prices import Price
from darkroom.hardware.system import cache_folder
from darkroom.models.reference import check_reference
from darkroom.plan.counts import Profile, cached_profile
from darkroom.plan.jobs import Plan, Where
from darkroom.plan.roofline import ClusterSpec, Software, default_cluster, efficiency
from darkroom.recipe.recipe import Recipe
from darkroom.recipe.sections import VAE_TASKS

if TYPE_CHECKING:
    from pydantic import BaseModel

    from darkroom.hardware.machine import Machine
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


OTHER_MAKES = ("gaudi", "intel gaudi", "habana", "tpu", "trainium", "inferentia")


@dataclass(frozen=True)
class Target:
    """On what, how many, and what may be spent."""

    gpu: str = "here"  # here, all, memory=12GB, a card's name, or several with commas
    count: int = 1
    mode: str = "auto"  # the recipe's own, else ddp
    shard: str = "grads"  # of fsdp: the recipe's own
    node_devices: int | None = None  # on one machine; a recipe's own
    network: str | None = None
    stands_in: str | None = None  # a row of machines.csv; None: the card's usual one
    usd_per_hour: float | None = None
    prices: tuple[Price, ...] | None = None
    budget_usd: float | None = None
    deadline_hours: float | None = None
    usd_per_gb_month: float | None = None
    usd_per_gb_out: float | None = None
    precision: str = "auto"
    engine: str = "eager"
    software: str = "darkroom"  # a key of SOFTWARE
    tf32: bool = False  # float32 products on tensor cores
    machine: Machine | None = None  # which machine is 'here', where it is not this one

    @property
    def several(self) -> bool:
        """Whether it names many cards, which are compared."""
        return self.gpu == "all" or self.gpu.startswith("memory=") or "," in self.gpu


SOFTWARE = {
    "darkroom": ("", ""),
    "diffusers": ("", "diffusers: plain PyTorch, tensors not channels last; fitted on its published rates"),
    "compile": (
        "compile",
        "torch.compile: fused kernels, by constants fitted on A100, V100, T4, 3090, 4090, H100",
    ),
    "tensorrt": (
        "tensorrt",
        "TensorRT is taken as CUDA graphs of fused kernels: of 8 published rows (A100, H100, H200, B200, "
        "3090, 4080) some are 11 % slower than that, some 40 % quicker",
    ),
}
"""Whose program runs it: the engine it stands for, and what its figures rest on."""
QUANTISED = ("fp8", "int8")

Layout = Callable[[str, Where, bool], bool]
"""Whether tensors lie channels last, of a precision, a place, and whether a compiler fuses the kernels."""


def layout_of(asked: bool | None) -> Layout:
    """As asked; where nothing is, in half precisions that are compiled: PyTorch's own group norm turns every
    tensor back.
    """

    def chosen(precision: str, where: Where, compiled: bool) -> bool:
        return (compiled and precision != "float32") if asked is None else asked

    return chosen


@dataclass(frozen=True)
class PlanRequest:
    """A job that can be planned on any device."""

    name: str
    profile: Callable[[str, bool], Profile]  # of a precision; whether a GPU computes it
    plan: Callable[[Profile, Where, Software, float | None, Sequence[Price] | None], Plan]
    precision: str = "auto"
    attention: str = "fused"
    channels_last: Layout = lambda precision, where, compiled: True
    settings: dict[str, Any] = field(default_factory=dict)
    remade: Callable[[Mapping[str, Any]], PlanRequest] | None = (
        None  # with other settings and the same counts
    )


def mode_of(asked: PlanRequest, target: Target) -> str:
    """How several devices train together: as asked, else as the recipe says."""
    return target.mode if target.mode != "auto" else str(asked.settings.get("mode", "ddp"))


def choose_precision(asked: PlanRequest, target: Target, card: Card) -> str:
    """The precision to compute in: as asked, else what the hardware is fast in."""
    precision = target.precision if target.precision != "auto" else asked.precision
    return fast_precision(card) if precision == "auto" else precision


def software_of(asked: PlanRequest, target: Target, where: Where) -> Software:
    """The program that computes it, in which precision and layout."""
    chosen = target.precision if target.precision != "auto" else asked.precision
    quantised = chosen if chosen in QUANTISED else ""
    if quantised and asked.settings:
        raise InputError(f"--precision {quantised}", allowed="generate and serve: training has no such step")
    precision = fast_precision(where.card) if quantised else choose_precision(asked, target, where.card)
    tf32 = target.tf32 or bool(asked.settings.get("tf32"))
    engine = SOFTWARE[target.software][0] or target.engine
    if engine == "tensorrt" and asked.settings:
        raise InputError("--software tensorrt", allowed="generate and serve: it does not train")
    if engine == "tensorrt" and not runs_tensorrt(where.card):
        raise InputError(f"--software tensorrt on {where.card.name}", allowed="NVIDIA's cards")
    if engine == "eager" and asked.settings.get("compile"):
        engine = "compile"
    if quantised and where.card.kind == "cpu" and quantised in where.card.flops:
        engine = "compile"  # OpenVINO, which fuses what follows a product
    return Software(
        precision=precision,
        engine=engine,
        channels_last=target.software != "diffusers"
        and asked.channels_last(precision, where, engine != "eager"),
        attention=asked.attention,
        matmul_tf32=tf32,
        # Others leave cuDNN its default, which rounds convolutions.
        conv_tf32=tf32 or (target.software in ("diffusers", "tensorrt") and not asked.settings),
        quantised=quantised,
    )


def runs_tensorrt(card: Card) -> bool:
    """Whether TensorRT has kernels for a card."""
    return card.kind == "gpu" and card.architecture in NVIDIA


def software_notes(target: Target, where: Where, software: Software) -> Iterator[str]:
    """What a reader must know of the software that was planned with."""
    card, gpu = where.card, where.card.kind == "gpu"
    if SOFTWARE[target.software][1]:
        yield SOFTWARE[target.software][1]
    if gpu and software.precision == "bf16" and "bf16" not in card.flops:
        yield f"{card.name} has no bf16 units: it computes in float32"
    if software.quantised and software.quantised not in card.flops:
        yield f"{card.name} has no {software.quantised} units: it computes in {software.precision}"
    elif software.quantised:
        which = (
            "products and convolutions"
            if software.engine == "tensorrt" or not gpu
            else "products, not convolutions,"
        )
        if not gpu:
            yield f"{software.quantised} on a CPU: OpenVINO's, at the rate of {_int8_instruction(card)}"
        yield f"{software.quantised}: {which} at its rate; memory is planned as in {software.precision}"
    if target.tf32 and "tf32" not in card.flops:
        yield f"{card.name} has no tf32 units"


def _int8_instruction(card: Card) -> str:
    return (
        "AMX" if "AMX" in card.name else "VNNI, which Intel's has from Cascade Lake on and AMD's from Zen 4"
    )


def fast_precision(card: Card) -> str:
    """The precision that a device is fastest in and trains in by default."""
    if "bf16" in card.flops:
        return "bf16"
    return "fp16" if card.kind == "gpu" and "fp16" in card.flops else "float32"


# ---- devices


def chosen_cards(name: str, option: str = "--gpu") -> list[Card]:
    """The cards of a name; 'all' is every GPU. InputError names the nearest for one that `option` does not
    know.
    """
    if name == "all":
        return [card for card in cards().values() if card.kind == "gpu"]
    if name.startswith("memory="):
        return _cards_with(name)
    names = [one for part in name.split(",") if (one := part.strip())]
    if len(names) > 1:
        return _cards_named(name, names)
    card = find_card(name)
    if card is None:
        near = nearest(name)
        mend = f"did you mean {', '.join(near)}?" if near else ""
        counted = re.fullmatch(r"(\d+)\s*[x*]\s*(.+)", name.strip(), re.IGNORECASE)
        if counted and find_card(counted[2]):
            mend = f"say --gpu '{counted[2]}' --count {counted[1]}"
        elif re.search(r"laptop|mobile|max-?q", name, re.IGNORECASE):
            mend = "a laptop's card has less memory and power than that of its name: compare --gpu memory=8GB"
        elif re.search(r"\b(i[3579]|core|ryzen|xeon|epyc|threadripper)\b", name, re.IGNORECASE):
            classes = (one.name for one in cards().values() if one.kind == "cpu")
            mend = f"processors are planned by their class: {', '.join(classes)}"
        if name.lower().startswith(OTHER_MAKES):
            mend = "darkroom does not run on it, so its rates there are not known"
        allowed = "here, all, memory=12GB, or cards of hardware.csv, with commas between"
        raise InputError(f"{option} {name}", allowed=allowed if option == "--gpu" else "a card", mend=mend)
    return [card]


def _cards_named(given: str, names: Sequence[str]) -> list[Card]:
    """Several cards to compare, each once."""
    if alone := next((one for one in names if one in ("here", "all")), None):
        raise InputError(f"--gpu {given}", mend=f"'{alone}' stands by itself: leave it out of the list")
    return list({card.name: card for one in names for card in chosen_cards(one)}.values())


def _cards_with(name: str) -> list[Card]:
    """Every GPU with so much memory as it is sold: 'memory=12GB'."""
    match = re.fullmatch(r"memory=(\d+(?:\.\d+)?)\s*(?:GB|GiB|G)?", name, re.IGNORECASE)
    gpus = [card for card in cards().values() if card.kind == "gpu"]
    found = [card for card in gpus if match and card.memory_gb == float(match[1])]
    if not found:
        sizes = sorted({card.memory_gb for card in gpus if card.memory_gb})
        raise InputError(f"--gpu {name}", allowed="memory=12GB, of " + ", ".join(f"{s:g}" for s in sizes))
    return found


def nearest(name: str) -> list[str]:
    """Up to three cards that are called nearly so: those whose name is in it first, then the most alike."""
    wanted = name.lower()
    names = {text.lower(): text for card in cards().values() for text in (card.name, *card.aliases)}
    inside = sorted((text for text in names if text in wanted), key=len, reverse=True)
    alike = [one for text in (wanted, f"rtx {wanted}") for one in difflib.get_close_matches(text, names, 3)]
    return list(dict.fromkeys(names[text] for text in [*inside, *alike]))[:3]


def place(card: Card, target: Target) -> Where:
    """A card as it usually stands; a CPU class stands for eight of its cores."""
    return Where(card, _cluster(card, target), cores=8 if card.unit == "core" else 1)


def _cluster(card: Card, target: Target) -> ClusterSpec:
    return default_cluster(
        card,
        target.count,
        target.mode,
        target.network,
        machine=target.stands_in,
        node_devices=target.node_devices,
        shard=target.shard,
    )


def here(target: Target) -> Where:
    """This machine, with what `plan --calibrate` measured of it; or the target's."""
    from darkroom.hardware.machine import machine

    found = target.machine or machine()
    memory: float | None
    if found.devices:
        name, memory = found.devices[0].name, found.devices[0].memory_bytes
        card = find_card(name)
        if card is None:
            raise InputError(f"this machine's {name} is not in hardware.csv", mend="say --gpu NAME")
    else:
        name = found.cpu
        card, memory = cards()[found.cpu_class], float(found.memory_bytes)
    measured = calibration(card.name) if target.machine is None else {}
    known = efficiency().with_values(measured)
    # Processes on one CPU share its cores and its memory.
    sharers = 1 if found.devices else min(target.count, target.node_devices or 1)
    cores = max(1, round(found.cores / sharers))
    share = None if memory is None else memory / sharers
    return Where(card, _cluster(card, target), cores, known, share, calibrated=bool(measured))


@dataclass(frozen=True)
class Measured:
    """One measurement: its rate, what share of the rated peak that is, and the constant it replaces."""

    name: str
    rate: float
    unit: str
    share: float | None = None  # of the rated peak, where there is one
    constant: tuple[str, str, float] | None = None  # name, what it applies to, value


def calibration_file() -> Path:
    """Where the measurements of this machine are kept."""
    return cache_folder() / "calibration.json"


def calibration(card: str) -> dict[tuple[str, str], float]:
    """Constants measured on this machine for a card, to replace the fitted ones; empty if none were."""
    with suppress(OSError, ValueError, TypeError):
        content = json.loads(calibration_file().read_text(encoding="utf-8"))
        return {(name, applies_to): float(value) for name, applies_to, value in content.get(card, [])}
    return {}


# ---- recipes, pictures and stores
#
# Also making and preparing pictures as asked for, with their counts, kept: no torch until one is counted.


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
    "data": ("filter", "holdout", "workers", "prefetch_batches", "cache", "cache_gb"),
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
    from darkroom.train.local_dataset import CLASS_STEPS, class_call

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
    from darkroom.data.images import pictures_below

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


def counted_as(precision: str) -> str:
    """Half precisions move and hold the same bytes: one count serves both."""
    return "bf16" if precision == "fp16" else precision


DECODES_IN_FLOAT32 = ("sdxl",)
"""Families whose VAE overflows in fp16."""


def _decodes_in_float32(model: str) -> bool:
    """Whether a model's VAE is turned to float32 where the rest is in fp16."""
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((Path(model) / "vae" / "config.json").read_text(encoding="utf-8"))
        return bool(config.get("force_upcast"))
    return model in DECODES_IN_FLOAT32


def picture_profile(
    model: str, width: int, height: int, guided: bool, precision: str, attention: str, *, whole: bool = False
) -> Profile:
    """The counts of making pictures, kept. `whole`: the VAE decodes a batch at once."""
    if not _decodes_in_float32(model):
        precision = counted_as(precision)
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
    precision = counted_as(precision)
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
