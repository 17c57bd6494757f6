"""Rules across sections: what does not go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from darkroom.errors import RecipeError
from darkroom.recipe.fine_tuning import (
    FINE_TUNING,
    is_subject,
)
from darkroom.recipe.sections import (
    VAE_TASKS,
    AlignSettings,
    ParallelSettings,
    RoutingSettings,
)

if TYPE_CHECKING:
    from darkroom.recipe.sections import (
        AdapterSettings,
        DataSettings,
        EvaluateSettings,
        ExtractorSettings,
        ModelSettings,
        ObjectiveSettings,
        OptimSettings,
        PhaseSettings,
        TrainSettings,
    )

Default = tuple[str, Any, str]
"""A key, its value, and why."""
_ADAFACTOR = {"finetune": 5e-4, "dreambooth": 2.5e-4}
"""AdamW's rate by the size of a trained U-Net's weights, about 0.02."""
LEAST_SHARE = 0.05
"""A rate below this share of the optimiser's own is one that was meant for another optimiser."""


def own_rate(task: Any, name: Any, *, scales: bool = True) -> Default | None:
    """The learning rate of an optimiser whose scale is not AdamW's; None of the others."""
    if name == "prodigy":
        return "optim.lr", 1.0, "Prodigy finds the rate by itself; this is its factor"
    if name == "adafactor" and scales:
        rate = _ADAFACTOR.get(task, 1e-2) if isinstance(task, str) else 1e-2
        return "optim.lr", rate, "Adafactor's rate is relative to the size of each weight"
    return None


# ---- what does not go together


MIXED_TASKS = ("pretrain", *VAE_TASKS, "finetune", "lora")


def check_patience(evaluate: EvaluateSettings, data: DataSettings) -> None:
    if evaluate.patience is not None and not (evaluate.every and data.holdout):
        key = "evaluate.every" if not evaluate.every else "data.holdout"
        raise RecipeError("evaluate.patience", f"given, but {key} is 0", mend=f"set {key}")


def _sources(data: DataSettings) -> list[str]:
    """Which settings say where the pictures are."""
    return [key for key in ("store", "stores", "folder", "instance", "sets") if getattr(data, key)]


def check_sources(task: str, data: DataSettings) -> None:
    """RecipeError unless pictures come from one place, of the kind that the task takes."""
    sources = _sources(data)
    fine = task in FINE_TUNING
    wanted = "data.instance" if is_subject(task) else "data.folder" if fine else "data.store"
    if not sources:
        raise RecipeError(wanted, "missing", mend=f"say where the pictures are: {wanted}=PATH")
    if len(sources) > 1:
        raise RecipeError("data", f"{' and '.join(sources)} are both given", allowed="one of them")


def check_folder(task: str, data: DataSettings) -> None:
    """RecipeError for settings of a folder of pictures where they come from a store, and the reverse."""
    stored = bool(data.store or data.stores)
    if data.repeats == "folders" and stored:
        mend = "weigh several stores in data.stores"
        raise RecipeError("data.repeats", "folders with a store", allowed="with a folder", mend=mend)
    if task not in FINE_TUNING and not stored:
        raise RecipeError(
            f"data.{_sources(data)[0]}",
            f"a folder with the task {task}",
            mend="import it into a store first: darkroom import FOLDER STORE",
        )


def check_mixture(task: str, data: DataSettings) -> None:
    """RecipeError for several stores with a task or settings that take one."""
    stores = data.stores
    if not stores:
        return
    if task not in MIXED_TASKS:
        raise RecipeError(
            "data.stores", f"given with the task {task}", allowed=f"with {', '.join(MIXED_TASKS)}"
        )
    if data.encode == "online":
        raise RecipeError(
            "data.encode", "online with data.stores", allowed="stored or inline; or one data.store"
        )
    paths = [one.store for one in stores]
    double = next((path for path in paths if paths.count(path) > 1), None)
    if double is not None:
        raise RecipeError("data.stores", f"'{double}' is given twice", mend="say it once, with one weight")


def check_sets(task: str, data: DataSettings, train: TrainSettings) -> None:
    """RecipeError for several sets of pictures with a task or settings that take one."""
    if not data.sets:
        return
    if task not in ("finetune", "lora"):
        mend = "a set of class pictures is one with its own prompt and loss_weight"
        raise RecipeError("data.sets", f"given with the task {task}", allowed="finetune, lora", mend=mend)
    if data.repeats != 1:
        raise RecipeError("data.repeats", f"{data.repeats} with data.sets", mend="say repeats in each set")
    folders = [one.folder for one in data.sets]
    if double := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise RecipeError("data.sets", f"'{double}' is given twice", mend="say it once, with its repeats")
    larger = next((i for i, side in enumerate(data.sides) if side > data.resolution), None)
    if larger is not None:
        raise RecipeError(
            f"data.sets.{larger}.resolution",
            f"{data.sides[larger]} is more than data.resolution {data.resolution}",
            mend=f"set data.resolution={max(data.sides)}",
        )
    if set(data.sides) != {data.resolution} and data.encode not in ("auto", "inline"):
        raise RecipeError(
            "data.encode", f"{data.encode} with sets of several resolutions", allowed="inline or auto"
        )
    if train.align.extractor is not None:
        raise RecipeError("train.align", "given with data.sets", allowed="with a store or a folder")


CAPTIONS = (
    *("shuffle_tags", "tag_dropout", "token_warmup_steps", "wildcards", "caption_prefix", "caption_suffix"),
    *("weighted_captions", "clip_skip", "keep_tokens_separator", "secondary_separator"),
)
"""Settings of `data` with which a caption is not read as it stands in the store."""


def check_text(task: str, data: DataSettings, model: ModelSettings, adapter: AdapterSettings | None) -> None:
    """Stored text states are of the store's captions, by an encoder that stays as it is."""
    if task in (*VAE_TASKS, "extractor") and (
        caption_key := next((name for name in CAPTIONS if getattr(data, name)), None)
    ):
        raise RecipeError(f"data.{caption_key}", f"given with the task {task}, which reads no captions")
    if data.text != "stored":
        return
    against = {
        "model.train_text_encoder": model.train_text_encoder,
        "adapter.text_encoder": adapter is not None and adapter.text_encoder,
        "model.word": model.word is not None,
        "data.prompt": bool(data.prompts),
        **{f"data.{name}": bool(getattr(data, name)) for name in CAPTIONS},
        "data.max_token_length": data.max_token_length != 75,
        "data.folder": data.folder is not None,
        "data.instance": data.instance is not None,
        "data.sets": bool(data.sets),
    }
    if given := next((key for key, is_so in against.items() if is_so), None):
        raise RecipeError(
            "data.text",
            f"stored, but with {given} the store's text states are not what is trained on",
            mend="set data.text=inline",
        )


def check_masks(data: DataSettings, objective: ObjectiveSettings) -> None:
    """RecipeError for masks, or a weight of what they leave out, that the pictures cannot have."""
    if data.mask == "alpha" and data.store:
        raise RecipeError(
            "data.mask", "alpha with data.store", allowed="the name of a column of masks; alpha with a folder"
        )
    masked = data.mask is not None or data.folder or data.instance or data.sets
    if objective.unmasked_weight and not masked:
        raise RecipeError("objective.unmasked_weight", "given, but there are no masks", mend="say data.mask")


OWN_RATES = (
    *("text_encoder_lr", "text_encoder_2_lr", "unet_lr"),
    *("text_encoder_steps", "loraplus_lr_ratio", "layers"),
)
"""Settings of `optim` that give some weights another rate than others."""


_OF_ONE = {
    "beta3": "came",
    "scale_parameter": "adafactor",
    "d_coef": "prodigy",
    "use_bias_correction": "prodigy",
}
"""Settings of `optim` that one optimiser has."""


def check_optimiser(optim: OptimSettings, train: TrainSettings) -> None:
    """RecipeError for settings that the chosen optimiser has not, or cannot have together."""
    for key, only in _OF_ONE.items():
        given = getattr(optim, key)
        if optim.name != only and given != type(optim).model_fields[key].default:
            value = str(given).lower() if isinstance(given, bool) else f"{given:g}"
            raise RecipeError(f"optim.{key}", f"{value} with optim.name={optim.name}", allowed=f"with {only}")
    if optim.name == "prodigy" and (own := next((name for name in OWN_RATES if getattr(optim, name)), None)):
        raise RecipeError(f"optim.{own}", "given, but Prodigy has one rate for all", mend="leave it out")
    if optim.name == "schedule-free":
        if optim.lr_schedule != "constant":
            raise RecipeError(
                "optim.lr_schedule", f"{optim.lr_schedule} with schedule-free", allowed="constant"
            )
        if train.ema.enabled:
            raise RecipeError(
                "train.ema.enabled", "true, but schedule-free averages by itself", mend="set it to false"
            )
    if train.nonfinite_policy == "skip" and optim.name != "adamw":
        raise RecipeError(
            "train.nonfinite_policy",
            f"skip with optim.name={optim.name}, which cannot leave a step out on the device",
            allowed="stop or rollback; or optim.name=adamw",
        )
    if train.nonfinite_policy == "skip" and optim.fused_backward:
        raise RecipeError(
            "train.nonfinite_policy", "skip with optim.fused_backward", allowed="stop or rollback"
        )
    if not optim.fused_backward:
        return
    if optim.clip_norm is not None:
        raise RecipeError(
            "optim.clip_norm",
            f"{optim.clip_norm:g} with optim.fused_backward: each weight steps before the norm is known",
            mend="set optim.clip_norm=null",
        )
    if optim.name == "prodigy":
        raise RecipeError(
            "optim.fused_backward",
            "true, but Prodigy needs all gradients together",
            mend="take another optim.name",
        )
    if train.precision == "fp16":
        raise RecipeError(
            "train.precision", "fp16 with optim.fused_backward", allowed="bf16, float32 or auto"
        )
    if train.micro_batch not in ("auto", train.global_batch):
        raise RecipeError(
            "train.micro_batch",
            f"{train.micro_batch} with optim.fused_backward, which cannot add up gradients",
            allowed=f"train.global_batch ({train.global_batch}) or auto",
        )


def check_rates(task: str, optim: OptimSettings, phases: Sequence[PhaseSettings]) -> None:
    """A rate for AdamW makes an optimiser of another scale learn nothing, and nobody would see why."""
    own = own_rate(task, optim.name, scales=optim.scale_parameter)
    if own is None:
        return
    names = ("lr", "unet_lr", "text_encoder_lr", "text_encoder_2_lr")
    rates = {f"optim.{name}": getattr(optim, name) for name in names}
    rates |= {f"phases.{i}.lr": phase.lr for i, phase in enumerate(phases)}
    _, usual, why = own
    for key, rate in rates.items():
        if rate is not None and rate < LEAST_SHARE * usual:
            raise RecipeError(
                key,
                f"{rate:g} with optim.name={optim.name}: next to nothing would be learned",
                allowed=f"{LEAST_SHARE * usual:g} or more",
                mend=f"set {key}={usual:g} ({why})",
            )


def check_extras(task: str, train: TrainSettings, data: DataSettings, *, phases: bool) -> None:
    """Where routing or alignment contradict the rest."""
    routing, align = train.routing, train.align
    on = [name for name, used in (("routing", routing.keep < 1), ("align", align.extractor)) if used]
    if on and task not in ("pretrain", "finetune"):
        raise RecipeError(f"train.{on[0]}", f"given with the task {task}", allowed="pretrain, finetune")
    if routing.keep == 1 and routing != RoutingSettings() and not phases:  # they say it anew
        raise RecipeError("train.routing", "given, but train.routing.keep is 1: every token goes all the way")
    if align.extractor is None and align != AlignSettings():
        raise RecipeError(
            "train.align", "given without an extractor", mend="say train.align.extractor=FOLDER"
        )
    if align.extractor is None:
        return
    refused = {
        "buckets": data.buckets,
        "crop": data.crop == "random",
        "flip": data.flip,
        "augment": data.augment.used,
        "encode": data.encode == "online",
    }
    if named := next((key for key, is_so in refused.items() if is_so), None):
        given = str(getattr(data, named)).lower()
        raise RecipeError(
            f"data.{named}",
            f"{given} with train.align, which sees whole pictures cut at the centre",
            mend="leave one of them out",
        )


def check_distill(
    task: str,
    objective: ObjectiveSettings,
    model: ModelSettings,
    adapter: AdapterSettings | None,
    train: TrainSettings,
    optim: OptimSettings,
) -> None:
    """RecipeError for what distillation cannot have, or needs and was not given."""
    if task != "distill":
        return
    keys_given = {
        **{f"objective.{name}": value for name, value in objective.weighs.items()},
        "objective.scale_v_pred_loss_like_noise_pred": objective.scale_v_pred_loss_like_noise_pred,
        "objective.loss.type": objective.loss.type if objective.loss.type != "mse" else None,
        "objective.noise.offset": objective.noise.offset,
        "objective.noise.multires_iterations": objective.noise.multires_iterations,
        "objective.noise.perturbation": objective.noise.perturbation,
        "objective.prediction": objective.prediction,
        "model.train_text_encoder": model.train_text_encoder,
        "model.fresh_unet": model.fresh_unet,
        "adapter.text_encoder": adapter is not None and adapter.text_encoder,
    }
    if objective.distill.method == "dmd2" and adapter is not None:
        raise RecipeError(
            "adapter", "given with objective.distill.method=dmd2", allowed="all of the U-Net; or method=lcm"
        )
    if objective.distill.target == "average":
        if adapter is not None:
            raise RecipeError(
                "objective.distill.target", "average with an adapter", allowed="student, or all of the U-Net"
            )
        if optim.name == "schedule-free":
            raise RecipeError(
                "objective.distill.target",
                "average with schedule-free",
                allowed="student, or another optimiser",
            )
        if not train.ema.enabled:
            raise RecipeError(
                "objective.distill.target",
                "average without averaged weights",
                mend="train.ema.enabled=true, or target: student",
            )
    for key, value in keys_given.items():
        if value:
            raise RecipeError(key, f"{value} with the task distill, whose teacher is the model as it is")
    drawn = objective.timesteps.model_dump(exclude_defaults=True)
    times = {f"objective.timesteps.{name}": value for name, value in drawn.items()}
    times |= {"objective.flow.mean": objective.flow.mean, "objective.flow.std": objective.flow.std}
    for key, value in times.items():
        if value is not None:
            raise RecipeError(key, f"{value} with the task distill, whose timesteps are its teacher's steps")


def check_online(task: str, data: DataSettings) -> None:
    """What cannot be encoded by other machines, and where rows cannot be kept."""
    if data.cache is not None and "://" in data.cache:
        raise RecipeError("data.cache", data.cache, allowed="a folder on a local disk")
    if data.encode != "online":
        return
    if data.cache is not None:
        raise RecipeError("data.cache", "given with data.encode=online, whose rows other machines read")
    if task in (*VAE_TASKS, "extractor"):
        raise RecipeError(
            "data.encode", f"online with the task {task}, which learns from pixels", allowed="inline"
        )
    if data.store is None:
        raise RecipeError("data.encode", "online without data.store", allowed="inline or auto, with a folder")


SHARDED_TASKS = ("pretrain", "finetune", "distill")
SHARDED_OPTIMISERS = (
    "adamw",
    "lion",
    "schedule-free",
)  # each number has a step of its own; the rest need matrices


def check_parallel(
    task: str,
    parallel: ParallelSettings,
    optim: OptimSettings,
    train: TrainSettings,
    adapter: AdapterSettings | None,
) -> None:
    """What processes together cannot do."""
    if isinstance(parallel.devices, int) and parallel.devices < 1:
        raise RecipeError("parallel.devices", f"{parallel.devices}", allowed="1 or more, or auto")
    if parallel.mode == "none":
        _check_alone(parallel)
        return
    if task == "extractor":
        raise RecipeError(
            "parallel.mode",
            f"{parallel.mode} with the task extractor, which needs its whole batch at once",
            allowed="none",
        )
    if optim.fused_backward:
        raise RecipeError(
            "optim.fused_backward",
            f"true with parallel.mode={parallel.mode}: gradients are summed first",
            mend="set optim.fused_backward=false",
        )
    if parallel.mode == "fsdp":
        _check_sharded(task, optim, train, adapter)


def _check_alone(parallel: ParallelSettings) -> None:
    several = "devices" if parallel.devices not in ("auto", 1) else "nodes" if parallel.nodes > 1 else ""
    if several:
        raise RecipeError(
            f"parallel.{several}",
            f"{getattr(parallel, several)} with parallel.mode=none",
            mend="set parallel.mode=ddp or fsdp",
        )


def _check_sharded(
    task: str, optim: OptimSettings, train: TrainSettings, adapter: AdapterSettings | None
) -> None:
    if task not in SHARDED_TASKS:
        raise RecipeError(
            "parallel.mode",
            f"fsdp with the task {task}",
            allowed=f"fsdp with {' or '.join(SHARDED_TASKS)}; ddp with this one",
        )
    if adapter is not None:
        allowed = "all of the U-Net; or parallel.mode=ddp"
        raise RecipeError("adapter", "given with parallel.mode=fsdp", allowed=allowed)
    if optim.name not in SHARDED_OPTIMISERS:
        raise RecipeError(
            "optim.name",
            f"{optim.name} with parallel.mode=fsdp",
            allowed=f"{' or '.join(SHARDED_OPTIMISERS)}; or parallel.mode=ddp",
        )
    if train.precision == "fp16":
        raise RecipeError("train.precision", "fp16 with parallel.mode=fsdp", allowed="bf16, float32 or auto")
    if train.compile != "none":
        raise RecipeError(
            "train.compile",
            f"{train.compile} with parallel.mode=fsdp, whose hooks gather the weights of each block",
            allowed="none; or parallel.mode=ddp",
        )
    if train.channels_last is True:
        raise RecipeError(
            "train.channels_last",
            "true with parallel.mode=fsdp, which cuts weights in their plain layout",
            allowed="auto or false; or parallel.mode=ddp",
        )


# ---- what cannot be trained, though it can be read: a recipe of phases need not be of a length


def check_stored(data: DataSettings) -> None:
    """RecipeError where prepared latents are to be read of pictures that vary."""
    if data.encode == "stored" and (data.flip or data.crop == "random" or data.augment.used):
        named = "flip" if data.flip else "crop" if data.crop == "random" else "augment"
        given = "given" if named == "augment" else getattr(data, named)
        raise RecipeError(
            f"data.{named}",
            f"{given}, but prepared latents are of pictures as they are, cut at the centre",
            mend="set data.encode=inline",
        )


def check_scored(evaluate: EvaluateSettings, data: DataSettings) -> None:
    """RecipeError where scores are asked for without pictures to compare with."""
    if evaluate.every_images and not data.holdout:
        raise RecipeError(
            "data.holdout",
            "0, but evaluate.every_images scores against held-out pictures",
            mend="hold some out: data.holdout=0.01, or a number of pictures",
        )


def check_extractor(train: TrainSettings, data: DataSettings, settings: ExtractorSettings) -> None:
    """RecipeError for settings that the task extractor has no use for or cannot follow."""
    if train.micro_batch not in ("auto", train.global_batch):
        raise RecipeError(
            "train.micro_batch",
            f"{train.micro_batch}, but pictures are contrasted with all others of a batch",
            allowed=f"auto, or train.global_batch ({train.global_batch})",
        )
    least = 2**settings.network.levels
    if data.resolution < 2 * least:
        raise RecipeError(
            "data.resolution", f"{data.resolution} with so many levels", allowed=f"{2 * least} or more"
        )


def check_length(train: TrainSettings, optim: OptimSettings) -> None:
    """RecipeError for a warm-up or an EMA that does not begin before the end."""
    if optim.warmup_steps > train.steps:
        raise RecipeError(
            "optim.warmup_steps", f"{optim.warmup_steps} is more than train.steps {train.steps}"
        )
    if train.ema.start_step >= train.steps and train.ema.enabled:
        raise RecipeError(
            "train.ema.start_step",
            f"{train.ema.start_step} is not before the end ({train.steps} steps)",
            mend="start earlier, or set train.ema.enabled=false",
        )


def check_vae_task(task: str, model: ModelSettings) -> None:
    """RecipeError for what a task that trains a VAE alone cannot have."""
    if task == "autoencoder" and isinstance(model.vae, str):
        raise RecipeError(
            "model.vae",
            f"'{model.vae}', but the VAE is what is trained",
            mend="give the folder as model.base to go on from it, or changes to the family's VAE here",
        )


def check_micro_batch(settings: TrainSettings) -> None:
    """RecipeError unless the global batch is made of whole micro-batches."""
    micro, batch = settings.micro_batch, settings.global_batch
    if micro == "auto" or (0 < micro <= batch and batch % micro == 0):
        return
    fitting = sorted(divisors(batch), key=lambda d: abs(d - micro))[:3]
    raise RecipeError(
        "train.micro_batch",
        f"{micro} does not divide train.global_batch {batch}",
        allowed=", ".join(map(str, sorted(fitting))) + " or auto",
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def check_batch(train: TrainSettings, size: int) -> None:
    """RecipeError unless every process gets the same number of whole micro-batches."""
    batch, micro = train.global_batch, train.micro_batch
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


def channels_last(asked: bool | Literal["auto"], device_type: str, *, sharded: bool) -> bool:
    """Whether a step's convolutions lie channels last: as asked, of itself on GPUs, never where weights are
    cut, which are cut in their plain layout.
    """
    wanted = device_type in ("cuda", "xpu") if asked == "auto" else asked
    return wanted and not sharded
