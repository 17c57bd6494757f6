"""Settings of kohya's sd-scripts read as a recipe: the TOML of a training, and that of its data sets.

`kohya_options` says option by option what it is here; docs/coming-from.md shows it. What is not known is
named and left out; what is known and cannot be had is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from darkroom.errors import RecipeError
from darkroom.recipe.kohya_options import (
    ADAFACTOR_RATE,
    ADAPTER_DEFAULTS,
    ALGORITHMS,
    ATTENTIONS,
    BLOCKS,
    DEFAULTS,
    ENDS,
    HALF,
    MOST_RANK,
    MOST_REPEATS,
    NEEDLESS,
    NETWORK,
    PICTURES,
    PRESETS,
    REPEATS,
    SEVERAL,
    TABLE,
    TEXT,
    TIMES,
    check_numbers,
    inner_patterns,
    layers_of_blocks,
    read_arguments,
    read_choice,
    read_file,
    read_float,
    read_number,
    read_real,
    read_side,
    read_table,
    read_whole,
)
from darkroom.recipe.objective import HUBER


@dataclass
class RecipeDraft:
    """A recipe's content as it grows, and the notes on it."""

    content: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    epoch_pictures: int = 0
    is_sdxl: bool | None = None

    def put(self, key: str, value: Any) -> None:
        """Set a key, its sections made as needed."""
        *parents, last = key.split(".")
        inner = self.content
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value

    def add_rules(self, rules: Sequence[Mapping[str, Any]]) -> None:
        """Put rates of layers before those that are there: the first that matches holds."""
        self.put("optim.layers", [*rules, *self.content.get("optim", {}).get("layers", [])])

    def drop(self, key: str) -> None:
        """Take a key out, if it is there."""
        *parents, last = key.split(".")
        inner = self.content
        for parent in parents:
            inner = inner.get(parent, {})
        inner.pop(last, None)


def read_kohya(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """A recipe's content of a TOML of sd-scripts, and lines about what was left out."""
    file = Path(path)
    given = _flat(read_table(file))
    read = RecipeDraft()
    if state := given.pop("resume", None):
        refuse_foreign_state("resume", file.parent / str(state))
        raise RecipeError("resume", f"'{state}' is no folder of a state", mend="leave it out")
    adapts = bool(given.get("network_module"))
    read.put("task", "lora" if adapts else "finetune")
    given = check_numbers({**DEFAULTS, **(ADAPTER_DEFAULTS if adapts else {}), **given})
    read.is_sdxl = _is_sdxl(str(given.get("pretrained_model_name_or_path", "")))
    for name, value in given.items():
        if name in TABLE:
            if (adapts or not TABLE[name].key.startswith("adapter.")) and value is not None:
                read.put(TABLE[name].key, TABLE[name].read(value))
        elif name not in SEVERAL and name not in NEEDLESS:
            read.unknown.append(name)
    if adapts:
        _network(read, given)
    _text_rates(read, given, adapts=adapts)
    _clip_skip(read)
    _sets(read, given, file.parent)
    if read.content.get("data", {}).get("augment", {}).get("hue"):
        read.put("data.augment.gamma", 0.05)
        read.put("data.augment.share", 0.33)
    _caption_dropout(read, given)
    _length(read, given)
    _optimiser(read, given)
    if prompts := given.get("sample_prompts"):
        read.put("sample.prompts", list(_prompts(read, _near(file.parent, prompts))))
    _unread(read)
    if read.unknown:
        read.notes.append(f"not known here and left out: {', '.join(sorted(read.unknown))}")
    return read.content, read.notes


def _is_sdxl(base: str) -> bool | None:
    """Whether a base is SDXL, by its name, its folder or its file's header; None where these do not tell."""
    place = Path(base)
    if place.is_dir():
        return (place / "text_encoder_2").is_dir()
    if place.is_file():
        with suppress(OSError), place.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return b'"conditioner.embedders.1.' in file.read(min(size, MOST_HEADER))
        return None
    if re.search(r"sd-?xl|stable-diffusion-xl", base, re.IGNORECASE):
        return True
    return False if re.search(r"^(sd\d|tiny)|stable-diffusion-(v1|2)", base) else None


MOST_HEADER = 2**24
"""Bytes of a single file's header that are looked at."""


def _clip_skip(read: RecipeDraft) -> None:
    """sd-scripts take SDXL's last layer but one, whatever clip_skip says."""
    if not read.content.get("data", {}).get("clip_skip"):
        return
    if read.is_sdxl:
        read.drop("data.clip_skip")
        read.notes.append("clip_skip is left out: sd-scripts pass it by for SDXL")
    elif read.is_sdxl is None:
        read.notes.append("if the base is SDXL, set data.clip_skip=0: sd-scripts pass clip_skip by for it")


def _text_rates(read: RecipeDraft, given: Mapping[str, Any], *, adapts: bool) -> None:
    """The rates of the text encoders; of those that have 0 nothing is trained."""
    names = ("text_encoder_lr", "learning_rate_te", "learning_rate_te1")
    first = next((read_number(given[name]) for name in names if given.get(name) is not None), None)
    rates = first if isinstance(first, list) else [] if first is None else [first]
    if (second := given.get("learning_rate_te2")) is not None:
        rates = [*(rates[:1] or [None]), read_number(second)]
    if adapts:
        trains = bool(read.content["adapter"]["text_encoder"])
    else:
        trains = bool(given.get("train_text_encoder", any(rates)))
    if trains and rates and not any(rate is None or rate for rate in rates):
        trains = False
        read.drop("optim.text_encoder_steps")
    if adapts:
        read.put("adapter.text_encoder", trains)
        if not trains and isinstance(targets := read.content["adapter"]["targets"], list):
            read.put("adapter.targets", [one for one in targets if one not in TEXT])
    elif trains:
        read.put("model.train_text_encoder", True)
    if not trains:
        return
    frozen = []
    for part, rate in zip(("text_encoder", "text_encoder_2"), rates, strict=False):
        if rate:
            read.put(f"optim.{part}_lr", rate)
        elif rate is not None:
            frozen.append({"match": part, "lr_scale": 0.0})
    if frozen:
        read.add_rules(frozen)


STATE_FILES = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")
"""What accelerate writes into a state's folder, for sd-scripts and for diffusers' scripts."""
STATE_WEIGHTS = ("pytorch_lora_weights.safetensors", "model.safetensors")


def refuse_foreign_state(key: str, folder: Path) -> None:
    """RecipeError where a folder is a state that accelerate has saved, with what to do instead.

    Its optimiser and its random numbers are pickled, and a pickle can run code on opening.
    """
    if not any((folder / name).is_file() for name in STATE_FILES):
        return
    from darkroom.models.adapters.read import is_adapter

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


def _unread(read: RecipeDraft) -> None:
    """sd-scripts pass by what belongs to something that is not there."""
    noise = read.content.get("objective", {}).get("noise", {})
    loss = read.content.get("objective", {}).get("loss", {})
    data = read.content.get("data", {})
    deals_tags = any(data.get(name) for name in ("shuffle_tags", "tag_dropout", "token_warmup_steps"))
    lost = [
        *([] if noise.get("offset") else ["noise.offset_random_strength", "noise.adaptive_scale"]),
        *([] if noise.get("perturbation") else ["noise.perturbation_random_strength"]),
        *([] if noise.get("multires_iterations") else ["noise.multires_discount"]),
        *([] if loss.get("type") in HUBER else [f"loss.huber_{name}" for name in ("c", "schedule", "scale")]),
        *(["loss.huber_scale"] if loss.get("huber_schedule", "snr") == "snr" else []),
    ]
    for name in lost:
        read.drop(f"objective.{name}")
    if not deals_tags:
        read.drop("data.keep_tokens")
    if not data.get("token_warmup_steps"):
        read.drop("data.token_warmup_min")


def _caption_dropout(read: RecipeDraft, given: Mapping[str, Any]) -> None:
    """Epochs without captions as so large a share of captions."""
    if every := int(given.get("caption_dropout_every_n_epochs") or 0):
        rate = float(read.content.get("data", {}).get("caption_dropout", 0.0))
        read.put("data.caption_dropout", round(1 - (1 - rate) * (1 - 1 / every), 6))


def _near(folder: Path, name: Any) -> Path:
    """A file named in a TOML: in its folder, or from the working directory, as in sd-scripts."""
    path = Path(str(name))
    return path if path.is_file() and not (folder / path).is_file() else folder / path


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """Options of all sections together: their headings mean nothing to sd-scripts."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat


def _network(read: RecipeDraft, given: Mapping[str, Any]) -> None:
    module, arguments = str(given["network_module"]), dict(read_arguments(given.get("network_args")))
    is_lycoris = module == "lycoris.kohya"
    if module == "networks.oft":
        raise RecipeError(
            "network_module",
            "'networks.oft', whose network_dim is a number of blocks and whose network_alpha is a bound",
            allowed="networks.lora, lycoris.kohya",
            mend="say lycoris.kohya with network_args algo=diag-oft, whose network_dim is a block's side",
        )
    if module not in ("networks.lora", "lycoris.kohya"):
        raise RecipeError("network_module", f"'{module}'", allowed="networks.lora, lycoris.kohya")
    algorithm = arguments.pop("algo", "lora") if is_lycoris else "lora"
    kind = read_choice("network_args algo", ALGORITHMS)(algorithm)
    read.put("adapter.kind", kind)
    trains_text = not given.get("network_train_unet_only", False)
    if is_lycoris:
        trains_text = _preset(read, given, arguments, trains_text=trains_text)
    elif "conv_dim" in arguments:
        read.put("adapter.targets", "conv")
        arguments.setdefault("conv_alpha", "1")
    else:
        read.put("adapter.targets", [ATTENTIONS, *(TEXT if trains_text else ())])
    read.put("adapter.text_encoder", trains_text)
    if kind == "lokr":
        _whole_matrices(read, given, arguments)
    _blocks(read, given, arguments, kernels="conv_dim" in arguments)
    for name, value in arguments.items():
        if name in NETWORK:
            read.put(NETWORK[name].key, NETWORK[name].read(value))
        else:
            read.unknown.append(f"network_args {name}")


def _blocks(read: RecipeDraft, given: Mapping[str, Any], arguments: dict[str, str], *, kernels: bool) -> None:
    """Rates, ranks and alphas by block, as patterns of layers."""
    down, mid, up = (
        _numbers(arguments, f"{side}_lr_weight", count)
        for side, count in (("down", 12), ("mid", 1), ("up", 12))
    )
    if down or mid or up:
        weights = [*(down or [1.0] * HALF), *(mid or [1.0]), *(up or [1.0] * HALF)]
        rules = [
            {"match": f"unet.{layer}", "lr_scale": weights[index]}
            for index, layer in layers_of_blocks()
            if weights[index] != 1
        ]
        read.add_rules(rules)
    for name, key, kind in (("block_dims", "rank", int), ("block_alphas", "alpha", float)):
        if numbers := _numbers(arguments, name, 2 * HALF + 1):
            shown = [
                (pattern, kind(numbers[index]))
                for index, layer in layers_of_blocks()
                for pattern in inner_patterns(layer, kernels=kernels)
            ]
            read.put(f"adapter.{key}_pattern", dict(shown))


def _numbers(arguments: dict[str, str], name: str, count: int) -> list[float]:
    """The numbers of an entry of network_args, which is taken out; none where it is not given."""
    if (text := arguments.pop(name, None)) is None:
        return []
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count:
        raise RecipeError(
            f"network_args {name}",
            f"'{text}'",
            allowed=f"{count} numbers, of the blocks of SD 1.x or 2.x",
            mend="say optim.layers or adapter.rank_pattern",
        )
    return found


def _preset(
    read: RecipeDraft, given: Mapping[str, Any], arguments: dict[str, str], *, trains_text: bool
) -> bool:
    """The layers of LyCORIS' preset, convolutions among them unless it is one without; whether text's are."""
    name = arguments.pop("preset", "full")
    if name not in PRESETS:
        raise RecipeError("network_args preset", f"'{name}'", allowed=", ".join(PRESETS))
    layers, text = PRESETS[name]
    if read.is_sdxl:  # its outer layers have other names in sd-scripts, and are not found there
        layers = tuple(layer for layer in layers if layer not in (*ENDS, *TIMES))
    trains_text = trains_text and bool(text)
    read.put("adapter.targets", [*layers, *(text if trains_text else ())])
    if not any(layer in layers for layer in (*BLOCKS, "*.resnets.*")):
        for of_kernels in ("conv_dim", "conv_alpha"):
            arguments.pop(of_kernels, None)
    elif "conv_dim" in arguments:
        arguments.setdefault("conv_alpha", str(given["network_alpha"] or arguments["conv_dim"]))
    return trains_text


def _whole_matrices(read: RecipeDraft, given: Mapping[str, Any], arguments: dict[str, str]) -> None:
    """LoKr of full matrices: by its own word, or by a rank above any layer's."""
    whole = arguments.pop("full_matrix", "false").lower() == "true"
    if whole or given["network_dim"] > MOST_RANK:
        read.put("adapter.rank", MOST_RANK)
        if read_real("network_args conv_dim", arguments.get("conv_dim", 0)) > MOST_RANK or whole:
            arguments.pop("conv_dim", None)


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
        "keep_tokens_separator",
        "secondary_separator",
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
        found = list(_configured(read, read_table(_near(folder, config)), prior))
        made, is_class = [one for one, _ in found], [of_class for _, of_class in found]
    else:
        if given.get("in_json"):
            made = [{"folder": str(given.get("train_data_dir", "")), "captions": str(given["in_json"])}]
        else:
            made = list(_named_folders(given.get("train_data_dir"), "train_data_dir", {}))
        own = len(made)
        made += _named_folders(given.get("reg_data_dir"), "reg_data_dir", {"loss_weight": prior})
        is_class = [i >= own for i in range(len(made))]
    read.epoch_pictures = _balance(made, is_class)
    if made:
        read.put("data.sets", made)
        sides = [one["resolution"] for one in made if "resolution" in one]
        if sides:
            read.put("data.resolution", max(sides))


def _balance(sets: list[dict[str, Any]], is_class: list[bool]) -> int:
    """Let class pictures come as often as the others, as sd-scripts have it; pictures of an epoch."""
    counts = [int(one.get("repeats", 1)) * _pictures_in(one["folder"]) for one in sets]
    class_pictures = sum(count for count, of_class in zip(counts, is_class, strict=True) if of_class)
    own_pictures = sum(counts) - class_pictures
    if not class_pictures or not own_pictures:
        return sum(counts)
    share = Fraction(own_pictures, class_pictures).limit_denominator(100)
    factors = {True: max(1, share.numerator), False: share.denominator}
    repeats = [one.get("repeats", 1) * factors[of] for one, of in zip(sets, is_class, strict=True)]
    too_many = max(1.0, max(repeats) / MOST_REPEATS)
    for one, times in zip(sets, repeats, strict=True):
        one["repeats"] = max(1, int(times / too_many))
    return 2 * own_pictures


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


def _configured(
    read: RecipeDraft, config: Mapping[str, Any], prior: float
) -> Iterator[tuple[dict[str, Any], bool]]:
    """The subsets of a dataset TOML, each with what its data set and [general] say; whether of the class."""
    (general,) = _tables([config.get("general", {})], "[general]")
    shared: dict[str, Any] = {}
    for dataset in _tables(config.get("datasets", []), "[[datasets]]"):
        outer = general | {key: value for key, value in dataset.items() if key != "subsets"}
        for subset in _tables(dataset.get("subsets", []), "[[datasets.subsets]]"):
            options = check_numbers(outer | subset)
            one = {here: options[theirs] for theirs, here in SUBSET.items() if theirs in options}
            if "image_dir" not in options:
                raise RecipeError("dataset_config", "a subset without image_dir", mend="give it one")
            if options.get("is_reg"):
                one["loss_weight"] = prior
            if "resolution" in options:
                one["resolution"] = read_side(options["resolution"])
            yield one, bool(options.get("is_reg"))
            _share(read, options, shared)


def _tables(given: Any, name: str) -> list[dict[str, Any]]:
    """A list of tables; RecipeError for anything else."""
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise RecipeError("dataset_config", f"{name} is no table", mend=f"write its options below {name}")
    return given


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
    mends = {
        "max_train_epochs": "train.steps",
        "save_every_n_epochs": "checkpoint.every",
        "sample_every_n_epochs": "sample.every",
    }
    for name, key in mends.items():
        if epochs := given.get(name):
            if not read.epoch_pictures:
                raise RecipeError(name, f"{epochs}, and no picture was found", mend=f"set {key}")
            steps = math.ceil(read.epoch_pictures / whole) * int(epochs)
            section, _, last = key.partition(".")
            said = None if key == "train.steps" else read.content.get(section, {}).get(last)
            read.put(key, steps if said is None else min(said, steps))
    train.setdefault("steps", 1600)


def _pictures_in(folder: str) -> int:
    place = Path(folder)
    return sum(one.suffix.lower() in PICTURES for one in place.iterdir()) if place.is_dir() else 0


def _optimiser(read: RecipeDraft, given: Mapping[str, Any]) -> None:
    schedule = read.content.get("optim", {}).get("lr_schedule")
    for key, of in (("num_cycles", "cosine-with-restarts"), ("power", "polynomial")):
        if schedule != of:
            read.drop(f"optim.{key}")
    if given.get("network_train_text_encoder_only"):
        read.add_rules([{"match": "unet", "lr_scale": 0}])
    warmup = given.get("lr_warmup_steps") or 0
    steps = read.content["train"]["steps"]
    if warmup:
        read.put("optim.warmup_steps", int(warmup * steps) if warmup < 1 else int(warmup))
    chosen = read.content.get("optim", {}).get("name")
    if chosen in ("adafactor", "lion", "came", "prodigy"):
        read.put("optim.weight_decay", 0.0)  # those classes' own default
    arguments = dict(read_arguments(given.get("optimizer_args")))
    if chosen == "adafactor":
        _relative_step(read, arguments.pop("relative_step", "true"))
    known = DONE_ANYWAY | ({("safeguard_warmup", "true")} if warmup else set())
    for name, value in arguments.items():
        if name == "betas":
            for i, beta in enumerate(value.strip("()[]").split(","), 1):
                read.put(f"optim.beta{i}", read_float(name, beta))
        elif name in ("weight_decay", "eps", "d_coef"):
            read.put(f"optim.{name}", read_float(name, value))
        elif name == "use_bias_correction" or (name == "scale_parameter" and chosen == "adafactor"):
            read.put(f"optim.{name}", value.lower() == "true")
        elif (name, value.lower()) not in known:
            read.unknown.append(f"optimizer_args {name}")


def _relative_step(read: RecipeDraft, value: str) -> None:
    """Adafactor's own rate, which sd-scripts take by default; those of the file are passed by."""
    if value.lower() == "false":
        return
    for key in ("unet_lr", "text_encoder_lr", "text_encoder_2_lr", "warmup_steps"):
        read.drop(f"optim.{key}")
    read.put("optim.lr", ADAFACTOR_RATE)
    read.put("optim.lr_schedule", "constant")
    read.notes.append(
        f"optim.lr={ADAFACTOR_RATE:g}, constant: without relative_step=False sd-scripts' Adafactor passes "
        "learning rates and lr_scheduler by"
    )


DONE_ANYWAY = {("warmup_init", "false"), ("decouple", "true")}
"""Entries of optimizer_args that are so here whatever is said."""

PROMPT_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "n": ("negative", lambda text: text),
    "d": ("seed", lambda text: read_whole("sample_prompts --d", text, 0)),
    "s": ("steps", lambda text: read_whole("sample_prompts --s", text, 1)),
    "l": ("guidance", lambda text: read_real("sample_prompts --l", text)),
}


PROMPT_KEYS = {"negative_prompt": "n", "seed": "d", "sample_steps": "s", "scale": "l"}
"""What sample prompts in TOML or JSON call the options of a text file."""


def _prompts(read: RecipeDraft, file: Path) -> Iterator[str | dict[str, Any]]:
    """The prompts of a text, TOML or JSON file with their own settings; their size is the grid's."""
    if not file.is_file():
        raise RecipeError("sample_prompts", f"no file '{file}'")
    if file.suffix.lower() in (".toml", ".json"):
        yield from _prompt_tables(read, file)
        return
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(
            "sample_prompts", f"'{file}' is not UTF-8 at byte {error.start}", mend="save it as UTF-8"
        ) from error
    for line in text.splitlines():
        if (prompt := line.strip()) and not prompt.startswith("#"):
            yield _prompt_of_line(read, prompt)


def _prompt_of_line(read: RecipeDraft, line: str) -> str | dict[str, Any]:
    prompt, *options = re.split(r"\s--(?=[a-z]+\s)", line)
    pairs = (option.partition(" ") for option in options)
    return _with_options(read, prompt.strip(), {name: value for name, _, value in pairs}, "--")


def _prompt_tables(read: RecipeDraft, file: Path) -> Iterator[str | dict[str, Any]]:
    """[[prompt.subset]] of TOML, each with what [prompt] says for all, or a list of JSON."""
    content = read_file(file)
    if file.suffix.lower() == ".toml":
        shared = content.get("prompt", {})
        subsets = shared.get("subset") if isinstance(shared, dict) else None
        if not isinstance(subsets, list) or not all(isinstance(one, dict) for one in subsets):
            raise RecipeError("sample_prompts", f"'{file}' has no [[prompt.subset]]")
        content = [{name: value for name, value in shared.items() if name != "subset"} | s for s in subsets]
    if not isinstance(content, list):
        raise RecipeError("sample_prompts", f"'{file}' is no list of prompts")
    for one in content:
        if isinstance(one, str):
            yield _prompt_of_line(read, one)
        elif isinstance(one, dict) and isinstance(prompt := one.get("prompt"), str):
            options = {PROMPT_KEYS.get(str(n), str(n)): value for n, value in one.items() if n != "prompt"}
            yield _with_options(read, prompt, options, "")
        else:
            raise RecipeError("sample_prompts", f"'{file}': {str(one)[:60]}", mend="give it a prompt")


def _with_options(
    read: RecipeDraft, prompt: str, options: Mapping[str, Any], before: str
) -> str | dict[str, Any]:
    """A prompt with those of its options that are known here; the others are named."""
    own: dict[str, Any] = {}
    for name, value in options.items():
        if name in PROMPT_OPTIONS:
            key, kind = PROMPT_OPTIONS[name]
            own[key] = kind(str(value).strip())
        elif f"sample_prompts {before}{name}" not in read.unknown:
            read.unknown.append(f"sample_prompts {before}{name}")
    return {"prompt": prompt, **own} if own else prompt
