"""Settings of kohya's sd-scripts read as a recipe: the TOML of a training, and that of its data sets.

`TABLE` says option by option what it is here; docs/coming-from.md shows it. What is not known is
named and left out; what is known and cannot be had is refused.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from darkroom.errors import RecipeError

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
REPEATS = re.compile(r"(\d+)_(.+)")


@dataclass(frozen=True)
class KohyaOption:
    """What an option of kohya's is here: a recipe's key, how its value is read, and a remark."""

    key: str
    read: Callable[[Any], Any] = lambda value: value
    note: str = ""


def _choice(name: str, table: Mapping[str, Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if str(value).lower() not in table:
            raise RecipeError(name, f"'{value}' is not known here", allowed=", ".join(table))
        return table[str(value).lower()]

    return read


def _side(value: Any) -> int:
    """One side of '512', 512, '512,512' or [512, 512]."""
    sides = value if isinstance(value, list) else str(value).split(",")
    whole = {int(side) for side in sides}
    if len(whole) != 1:
        raise RecipeError("resolution", f"{value}: width and height differ", allowed="one side; data.buckets")
    return whole.pop()


def _number(value: Any) -> Any:
    try:
        return float(value) if not isinstance(value, list) else [float(one) for one in value]
    except ValueError:
        return value


PRECISIONS = {"no": "float32", "fp16": "fp16", "bf16": "bf16"}
LOSSES = {"l2": "mse", "l1": "l1", "huber": "huber", "smooth_l1": "smooth-l1"}
OPTIMISERS = {
    "adamw": "adamw",
    "adamw8bit": "adamw8bit",
    "adafactor": "adafactor",
    "prodigy": "prodigy",
    "adamwschedulefree": "schedule-free",
    "lion": "lion",
    "came": "came",
    "pytorch_optimizer.came": "came",
    "came_pytorch.came": "came",
}
DECAYS = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "linear": "linear",
    "adafactor": "constant",
}

TABLE: dict[str, KohyaOption] = {
    "pretrained_model_name_or_path": KohyaOption("model.base"),
    "vae": KohyaOption("model.vae"),
    "fp8_base": KohyaOption("model.base_precision", lambda on: "fp8" if on else None, "of the U-Net"),
    "fp8_base_unet": KohyaOption("model.base_precision", lambda on: "fp8" if on else None),
    "v_parameterization": KohyaOption("objective.prediction", lambda on: "v" if on else None),
    "resolution": KohyaOption("data.resolution", _side, "one side"),
    "enable_bucket": KohyaOption("data.buckets"),
    "train_batch_size": KohyaOption("train.micro_batch", note="and train.global_batch"),
    "max_train_steps": KohyaOption("train.steps"),
    "seed": KohyaOption("train.seed"),
    "mixed_precision": KohyaOption("train.precision", _choice("mixed_precision", PRECISIONS)),
    "gradient_checkpointing": KohyaOption("train.gradient_checkpointing"),
    "learning_rate": KohyaOption("optim.lr", _number),
    "unet_lr": KohyaOption("optim.unet_lr", _number),
    "learning_rate_te1": KohyaOption("optim.text_encoder_lr", _number),
    "learning_rate_te2": KohyaOption("optim.text_encoder_2_lr", _number),
    "stop_text_encoder_training": KohyaOption("optim.text_encoder_steps"),
    "lr_scheduler": KohyaOption("optim.decay", _choice("lr_scheduler", DECAYS)),
    "optimizer_type": KohyaOption("optim.name", _choice("optimizer_type", OPTIMISERS)),
    "fused_backward_pass": KohyaOption("optim.fused_backward"),
    "max_grad_norm": KohyaOption("optim.clip_norm", lambda norm: norm or None, "0 is null"),
    "loss_type": KohyaOption("objective.loss.type", _choice("loss_type", LOSSES)),
    "huber_c": KohyaOption("objective.loss.huber_c"),
    "huber_schedule": KohyaOption("objective.loss.huber_schedule"),
    "huber_scale": KohyaOption("objective.loss.huber_scale"),
    "min_snr_gamma": KohyaOption("objective.min_snr_gamma"),
    "debiased_estimation_loss": KohyaOption("objective.debiased_estimation"),
    "min_timestep": KohyaOption("objective.timesteps.min"),
    "max_timestep": KohyaOption("objective.timesteps.max"),
    "zero_terminal_snr": KohyaOption("objective.noise.zero_terminal_snr"),
    "noise_offset": KohyaOption("objective.noise.offset"),
    "multires_noise_iterations": KohyaOption("objective.noise.multires_iterations"),
    "multires_noise_discount": KohyaOption("objective.noise.multires_discount"),
    "ip_noise_gamma": KohyaOption("objective.noise.perturbation"),
    "alpha_mask": KohyaOption("data.mask", lambda on: "alpha" if on else None),
    "clip_skip": KohyaOption(
        "data.clip_skip", lambda layers: int(layers) - 1, "one less: 1 is the last layer"
    ),
    "max_token_length": KohyaOption("data.max_token_length", int),
    "weighted_captions": KohyaOption("data.weighted_captions"),
    "shuffle_caption": KohyaOption("data.shuffle_tags"),
    "keep_tokens": KohyaOption("data.keep_tokens"),
    "caption_dropout_rate": KohyaOption("data.caption_dropout"),
    "caption_tag_dropout_rate": KohyaOption("data.tag_dropout"),
    "token_warmup_step": KohyaOption("data.token_warmup_steps"),
    "token_warmup_min": KohyaOption("data.token_warmup_min"),
    "caption_prefix": KohyaOption("data.caption_prefix"),
    "caption_suffix": KohyaOption("data.caption_suffix"),
    "enable_wildcard": KohyaOption("data.wildcards"),
    "flip_aug": KohyaOption("data.flip"),
    "color_aug": KohyaOption(
        "data.augment.hue", lambda on: 0.045 if on else 0.0, "0.045; gamma 0.05, share 0.33"
    ),
    "random_crop": KohyaOption("data.crop", lambda on: "random" if on else "centre"),
    "max_data_loader_n_workers": KohyaOption("data.workers", lambda count: max(1, int(count))),
    "network_weights": KohyaOption("adapter.from"),
    "network_dim": KohyaOption("adapter.rank"),
    "network_alpha": KohyaOption("adapter.alpha"),
    "network_dropout": KohyaOption("adapter.dropout"),
    "save_every_n_steps": KohyaOption("checkpoint.every"),
    "sample_every_n_steps": KohyaOption("sample.every"),
}
"""Options that are one key here."""
NETWORK: dict[str, KohyaOption] = {
    "conv_dim": KohyaOption("adapter.conv_rank", int, "with adapter.targets=conv"),
    "conv_alpha": KohyaOption("adapter.conv_alpha", float),
    "rank_dropout": KohyaOption("adapter.rank_dropout", float),
    "module_dropout": KohyaOption("adapter.module_dropout", float),
    "loraplus_lr_ratio": KohyaOption("optim.loraplus_lr_ratio", float),
    "factor": KohyaOption("adapter.factor", int),
    "decompose_both": KohyaOption("adapter.decompose_both", lambda on: str(on).lower() == "true"),
    "dora_wd": KohyaOption("adapter.dora", lambda on: str(on).lower() == "true"),
    "rs_lora": KohyaOption("adapter.rslora", lambda on: str(on).lower() == "true"),
}
"""Entries of network_args."""
ALGORITHMS = {
    "lora": "lora",
    "locon": "lora",
    "loha": "loha",
    "lokr": "lokr",
    "diag-oft": "oft",
    "full": "full",
}
SEVERAL: dict[str, str] = {
    "train_data_dir": "data.sets: each folder N_name is one, with its repeats and its name as the caption",
    "reg_data_dir": "data.sets likewise, with loss_weight",
    "prior_loss_weight": "loss_weight of the sets of reg_data_dir, or with is_reg",
    "dataset_config": "a TOML of [[datasets]] with [[datasets.subsets]], read as data.sets",
    "in_json": "data.sets[].captions, of the pictures in train_data_dir",
    "gradient_accumulation_steps": "train.global_batch",
    "max_train_epochs": "train.steps, by the pictures in the folders",
    "lr_warmup_steps": "optim.warmup_steps; below 1 a share of the steps",
    "text_encoder_lr": "optim.text_encoder_lr; of a list the second is optim.text_encoder_2_lr",
    "optimizer_args": "optim.weight_decay, beta1 to beta3 (betas), eps, scale_parameter, d_coef, "
    "use_bias_correction",
    "network_module": "adapter.kind (networks.lora; lycoris.kohya with algo in network_args); none: finetune",
    "network_args": "see the next table",
    "network_train_unet_only": "adapter.text_encoder=false",
    "resume": "refused, with the key that begins with the state's weights: its optimiser is pickled",
    "sample_prompts": "sample.prompts: a text file's lines with --n, --d, --s, --l; pictures are of one size",
}
"""Options that are more than one key, or depend on others."""
NEEDLESS = frozenset(
    (
        "output_dir",
        "output_name",
        "logging_dir",
        "log_with",
        "log_prefix",
        "save_model_as",
        "save_precision",
        "save_last_n_steps",
        "save_every_n_epochs",
        "save_state",
        "cache_latents",
        "cache_latents_to_disk",
        "cache_text_encoder_outputs",
        "cache_text_encoder_outputs_to_disk",
        "xformers",
        "sdpa",
        "mem_eff_attn",
        "lowram",
        "highvram",
        "persistent_data_loader_workers",
        "caption_extension",
        "no_half_vae",
        "full_bf16",
        "full_fp16",
        "training_comment",
        "metadata_title",
        "metadata_author",
        "metadata_description",
        "metadata_license",
        "metadata_tags",
        "bucket_no_upscale",
        "min_bucket_reso",
        "max_bucket_reso",
        "bucket_reso_steps",
        "vae_batch_size",
        "sample_sampler",
        "sample_at_first",
        "console_log_simple",
        "skip_cache_check",
    )
)
"""Options that need no key: where things are written, what is done anyway, what only changes memory."""
ADAPTER_DEFAULTS = {"network_dim": 4, "network_alpha": 1}
"""sd-scripts' own, where its file says nothing."""
ATTENTIONS = "*attentions.*"
TEXT = ("*layers.*.self_attn.*", "*layers.*.mlp.*")


@dataclass
class RecipeDraft:
    """A recipe's content as it grows, and the notes on it."""

    content: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any) -> None:
        """Set a key, its sections made as needed."""
        *parents, last = key.split(".")
        inner = self.content
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value


def read_kohya(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """A recipe's content of a TOML of sd-scripts, and lines about what was left out."""
    file = Path(path)
    given = _flat(_toml(file))
    read = RecipeDraft()
    if state := given.pop("resume", None):
        refuse_foreign_state("resume", file.parent / str(state))
        raise RecipeError("resume", f"'{state}' is no folder of a state", mend="leave it out")
    adapts = bool(given.get("network_module"))
    read.put("task", "lora" if adapts else "finetune")
    if adapts:
        given = {**ADAPTER_DEFAULTS, **given}
    for name, value in given.items():
        if name in TABLE:
            if (adapts or not TABLE[name].key.startswith("adapter.")) and value is not None:
                read.put(TABLE[name].key, TABLE[name].read(value))
        elif name not in SEVERAL and name not in NEEDLESS:
            read.unknown.append(name)
    if adapts:
        _network(read, given)
    elif _number(given.get("text_encoder_lr", given.get("learning_rate_te1", 0))) not in (0, [0.0]):
        read.put("model.train_text_encoder", True)
    _sets(read, given, file.parent)
    if read.content.get("data", {}).get("augment", {}).get("hue"):
        read.put("data.augment.gamma", 0.05)
        read.put("data.augment.share", 0.33)
    _length(read, given)
    _optimiser(read, given)
    if prompts := given.get("sample_prompts"):
        read.put("sample.prompts", list(_prompts(read, file.parent / str(prompts))))
    notes = []
    if read.unknown:
        notes.append(f"not known here and left out: {', '.join(sorted(read.unknown))}")
    return read.content, notes


STATE_FILES = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")
"""What accelerate writes into a state's folder, for sd-scripts and for diffusers' scripts."""
STATE_WEIGHTS = ("pytorch_lora_weights.safetensors", "model.safetensors")


def refuse_foreign_state(key: str, folder: Path) -> None:
    """RecipeError where a folder is a state that accelerate has saved, with what to do instead.

    Its optimiser and its random numbers are pickled, and a pickle can run code on opening.
    """
    if not any((folder / name).is_file() for name in STATE_FILES):
        return
    from darkroom.models.adapters.export import is_adapter

    file = next((folder / name for name in STATE_WEIGHTS if is_adapter(folder / name)), None)
    done = _steps_of(folder)
    if file is None:
        mend = "save the weights there as a model, and set model.base to it"
    else:
        mend = f"begin with its weights: adapter.from={file}"
        mend += f", with train.steps less the {done:,} that are made" if done else ""
    raise RecipeError(
        key, f"'{folder}' is another trainer's state, whose optimiser is pickled and not read", mend=mend
    )


def _steps_of(folder: Path) -> int:
    """The steps of sd-scripts' train_state.json, or of a folder's name such as checkpoint-500; else 0."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return int(json.loads((folder / "train_state.json").read_text(encoding="utf-8"))["current_step"])
    named = re.search(r"(\d+)(?:-state)?$", folder.name)
    return int(named[1]) if named else 0


def _toml(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise RecipeError.missing(file)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(str(file), f"not readable as TOML: {error}") from error


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """Options of all sections together: their headings mean nothing to sd-scripts."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat


def _arguments(given: Any) -> Iterator[tuple[str, str]]:
    """The pairs of ["conv_dim=4", ...], or of one text of them."""
    for one in given.split() if isinstance(given, str) else given or ():
        name, _, value = str(one).partition("=")
        yield name.strip(), value.strip()


def _network(read: RecipeDraft, given: Mapping[str, Any]) -> None:
    module, arguments = str(given["network_module"]), dict(_arguments(given.get("network_args")))
    algorithm = arguments.pop("algo", "lora") if module == "lycoris.kohya" else "lora"
    if module == "networks.oft":
        algorithm = "diag-oft"
    elif module not in ("networks.lora", "lycoris.kohya"):
        raise RecipeError(
            "network_module", f"'{module}'", allowed="networks.lora, networks.oft, lycoris.kohya"
        )
    read.put("adapter.kind", _choice("network_args algo", ALGORITHMS)(algorithm))
    trains_text = not given.get("network_train_unet_only", False)
    read.put("adapter.text_encoder", trains_text)
    read.put(
        "adapter.targets", "conv" if "conv_dim" in arguments else [ATTENTIONS, *(TEXT if trains_text else ())]
    )
    for name, value in arguments.items():
        if name in NETWORK:
            read.put(NETWORK[name].key, NETWORK[name].read(value))
        else:
            read.unknown.append(f"network_args {name}")
    if given.get("text_encoder_lr") is not None and trains_text:
        rates = _number(given["text_encoder_lr"])
        first, *rest = rates if isinstance(rates, list) else [rates]
        read.put("optim.text_encoder_lr", first)
        if rest:
            read.put("optim.text_encoder_2_lr", rest[0])


# ---- pictures


SUBSET = {
    "image_dir": "folder",
    "num_repeats": "repeats",
    "class_tokens": "prompt",
    "metadata_file": "captions",
}
SHARED = frozenset(
    (
        "shuffle_caption",
        "keep_tokens",
        "caption_dropout_rate",
        "caption_tag_dropout_rate",
        "token_warmup_min",
        "token_warmup_step",
        "caption_prefix",
        "caption_suffix",
        "enable_wildcard",
        "flip_aug",
        "color_aug",
        "random_crop",
        "alpha_mask",
    )
)
"""Options of a subset that hold for all pictures here."""


def _sets(read: RecipeDraft, given: Mapping[str, Any], folder: Path) -> None:
    """Folders of pictures as data.sets."""
    prior = float(given.get("prior_loss_weight", 1.0))
    if config := given.get("dataset_config"):
        made = list(_configured(read, _toml(folder / str(config)), prior))
    else:
        if given.get("in_json"):
            made = [{"folder": str(given.get("train_data_dir", "")), "captions": str(given["in_json"])}]
        else:
            made = list(_named_folders(given.get("train_data_dir"), "train_data_dir", {}))
        made += _named_folders(given.get("reg_data_dir"), "reg_data_dir", {"loss_weight": prior})
    if made:
        read.put("data.sets", made)
        sides = [one["resolution"] for one in made if "resolution" in one]
        if sides:
            read.put("data.resolution", max(sides))


def _named_folders(place: Any, name: str, more: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The folders `10_sks dog` in one: repeats and class."""
    if not place:
        return
    if not Path(place).is_dir():
        raise RecipeError(name, f"no folder '{place}'")
    found = False
    for inner in sorted(Path(place).iterdir()):
        if inner.is_dir() and (named := REPEATS.fullmatch(inner.name)):
            found = True
            yield {"folder": str(inner), "repeats": int(named[1]), "prompt": named[2], **more}
    if not found:
        raise RecipeError(name, f"'{place}' has no folder named like '10_sks dog'")


def _configured(read: RecipeDraft, config: Mapping[str, Any], prior: float) -> Iterator[dict[str, Any]]:
    """The subsets of a dataset TOML, each with what its data set and [general] say."""
    general = dict(config.get("general", {}))
    shared: dict[str, Any] = {}
    for dataset in config.get("datasets", ()):
        outer = general | {key: value for key, value in dataset.items() if key != "subsets"}
        for subset in dataset.get("subsets", ()):
            options = outer | subset
            one = {here: options[theirs] for theirs, here in SUBSET.items() if theirs in options}
            if "image_dir" not in options:
                raise RecipeError("dataset_config", "a subset without image_dir", mend="give it one")
            if options.get("is_reg"):
                one["loss_weight"] = prior
            if "resolution" in options:
                one["resolution"] = _side(options["resolution"])
            yield one
            _share(read, options, shared)


def _share(read: RecipeDraft, options: Mapping[str, Any], shared: dict[str, Any]) -> None:
    """Put what a subset says and what holds for all here; refused where subsets differ in it."""
    known = {*SUBSET, "is_reg", "resolution"}
    for name, value in options.items():
        if name in SHARED or name in ("enable_bucket", "batch_size"):
            if shared.setdefault(name, value) != value:
                raise RecipeError(
                    "dataset_config", f"{name} is {shared[name]} and {value}", allowed="one for all subsets"
                )
            key = "train_batch_size" if name == "batch_size" else name
            read.put(TABLE[key].key, TABLE[key].read(value))
        elif name not in known and name not in NEEDLESS:
            read.unknown.append(f"dataset_config {name}")


# ---- length and rates


def _length(read: RecipeDraft, given: Mapping[str, Any]) -> None:
    train = read.content.setdefault("train", {})
    batch = int(train.get("micro_batch", 1))
    whole = batch * int(given.get("gradient_accumulation_steps", 1))
    train |= {"micro_batch": batch, "global_batch": whole}
    if epochs := given.get("max_train_epochs"):
        sets = read.content.get("data", {}).get("sets", ())
        pictures = sum(one.get("repeats", 1) * _pictures_in(one["folder"]) for one in sets)
        if not pictures:
            raise RecipeError(
                "max_train_epochs", f"{epochs}, and no picture was found", mend="set train.steps"
            )
        train["steps"] = math.ceil(pictures / whole) * int(epochs)
    train.setdefault("steps", 1600)


def _pictures_in(folder: str) -> int:
    place = Path(folder)
    return sum(one.suffix.lower() in PICTURES for one in place.iterdir()) if place.is_dir() else 0


def _optimiser(read: RecipeDraft, given: Mapping[str, Any]) -> None:
    warmup = given.get("lr_warmup_steps") or 0
    steps = read.content["train"]["steps"]
    if warmup:
        read.put("optim.warmup_steps", int(warmup * steps) if warmup < 1 else int(warmup))
    chosen = read.content.get("optim", {}).get("name")
    if chosen in ("lion", "came", "prodigy"):
        read.put("optim.weight_decay", 0.0)  # those classes' own default
    for name, value in _arguments(given.get("optimizer_args")):
        if name == "betas":
            for i, beta in enumerate(value.strip("()[]").split(","), 1):
                read.put(f"optim.beta{i}", float(beta))
        elif name in ("weight_decay", "eps", "d_coef"):
            read.put(f"optim.{name}", float(value))
        elif name == "use_bias_correction" or (name == "scale_parameter" and chosen == "adafactor"):
            read.put(f"optim.{name}", value.lower() == "true")
        elif (name, value.lower()) in DONE_ANYWAY:
            continue
        else:
            read.unknown.append(f"optimizer_args {name}")


DONE_ANYWAY = {
    ("relative_step", "false"),
    ("warmup_init", "false"),
    ("decouple", "true"),
    ("safeguard_warmup", "true"),
}
"""Entries of optimizer_args that are so here whatever is said."""

PROMPT_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "n": ("negative", str),
    "d": ("seed", int),
    "s": ("steps", int),
    "l": ("guidance", float),
}


def _prompts(read: RecipeDraft, file: Path) -> Iterator[str | dict[str, Any]]:
    """The prompts of a text file, with --n, --d, --s and --l behind them; their size is the grid's."""
    if not file.is_file():
        raise RecipeError("sample_prompts", f"no file '{file}'")
    for line in file.read_text(encoding="utf-8").splitlines():
        if (prompt := line.strip()) and not prompt.startswith("#"):
            first, *options = re.split(r"\s--(?=[a-z]+\s)", prompt)
            own: dict[str, Any] = {}
            for option in options:
                name, _, value = option.partition(" ")
                if name in PROMPT_OPTIONS:
                    key, kind = PROMPT_OPTIONS[name]
                    own[key] = kind(value.strip())
                elif f"sample_prompts --{name}" not in read.unknown:
                    read.unknown.append(f"sample_prompts --{name}")
            yield {"prompt": first.strip(), **own} if own else first.strip()


def table() -> str:
    """The options as Markdown tables, for docs/coming-from.md."""
    lines = ["| kohya | darkroom | note |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | `{one.key}` | {one.note} |" for name, one in TABLE.items()]
    lines += [f"| `{name}` | {text} | |" for name, text in SEVERAL.items()]
    lines += ["", "| `network_args` | darkroom | note |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | `{one.key}` | {one.note} |" for name, one in NETWORK.items()]
    lines.append(f"| `algo` | `adapter.kind` | {', '.join(f'{a}: {k}' for a, k in ALGORITHMS.items())} |")
    return "\n".join(lines)
