"""Kohya's options, and what each is here: docs/coming-from.md shows these tables."""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from darkroom.errors import RecipeError
from darkroom.hardware.system import read_typed

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
REPEATS = re.compile(r"(\d+)_(.+)")
MOST_REPEATS = 10_000


@dataclass(frozen=True)
class KohyaOption:
    """What an option of kohya's is here: a recipe's key, how its value is read, and a remark."""

    key: str
    read: Callable[[Any], Any] = lambda value: value
    note: str = ""


def read_choice(name: str, table: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Reads a value as the table's, whatever its case; RecipeError names what the table has."""

    def read(value: Any) -> Any:
        if str(value).lower() not in table:
            raise RecipeError(name, f"'{value}' is not known here", allowed=", ".join(table))
        return table[str(value).lower()]

    return read


def read_table(file: Path) -> dict[str, Any]:
    """A TOML or JSON file's content, by its ending; RecipeError where it is missing or neither."""
    content = read_file(file)
    if not isinstance(content, dict):
        raise RecipeError(str(file), "not a table of options", mend='write it as {"name": value, ...}')
    return content


def read_file(file: Path) -> Any:
    """What a JSON file holds, or one of TOML, which has any other ending."""
    if not file.is_file():
        raise RecipeError.missing(file)
    kind = "JSON" if file.suffix.lower() == ".json" else "TOML"
    try:
        return json.loads(read_typed(file)) if kind == "JSON" else tomllib.loads(read_typed(file))
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeError(str(file), f"not readable as {kind}: {error}") from error


def read_arguments(given: Any) -> Iterator[tuple[str, str]]:
    """The pairs of ["conv_dim=4", ...], or of one text of them."""
    if not isinstance(given, str | list | None):
        raise RecipeError("network_args, optimizer_args", f"'{given}'", allowed='["name=value", ...]')
    for one in given.split() if isinstance(given, str) else given or ():
        name, _, value = str(one).partition("=")
        yield name.strip(), value.strip()


def read_float(name: str, value: str) -> float:
    """A number of optimizer_args; RecipeError for anything else."""
    return read_real(f"optimizer_args {name}", value)


WHOLE = {
    "train_batch_size": 1,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_train_steps": 1,
    "max_train_epochs": 1,
    "save_every_n_epochs": 1,
    "sample_every_n_epochs": 1,
    "num_repeats": 1,
    "clip_skip": 1,
    "network_dim": 1,
    "caption_dropout_every_n_epochs": 0,
    "max_data_loader_n_workers": 0,
}
"""Options that are whole numbers, with the least of each; of those not `NEEDED`, 0 is as if not given."""
REAL = ("caption_dropout_rate", "lr_warmup_steps", "prior_loss_weight")
NEEDED = ("train_batch_size", "batch_size", "gradient_accumulation_steps", "num_repeats")


def check_numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same options, the numbers that are computed with as numbers; RecipeError where one is none."""
    read = dict(given)
    for name in (*WHOLE, *REAL):
        value = given.get(name)
        if value or (name in NEEDED and value is not None):
            read[name] = read_whole(name, value, WHOLE[name]) if name in WHOLE else read_real(name, value)
    return read


def read_whole(name: str, value: Any, least: int | None = None) -> int:
    """A whole number, also as text; RecipeError for anything else."""
    allowed = "a whole number" + ("" if least is None else f", at least {least}")
    try:
        found = int(value)
    except (ValueError, TypeError, OverflowError):
        raise RecipeError(name, f"'{str(value)[:60]}'", allowed=allowed) from None
    if (isinstance(value, float) and found != value) or (least is not None and found < least):
        raise RecipeError(name, f"'{value}'", allowed=allowed)
    return found


def read_real(name: str, value: Any) -> float:
    """A finite number, also as text; RecipeError for anything else."""
    try:
        found = float(value)
    except (ValueError, TypeError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise RecipeError(name, f"'{str(value)[:60]}'", allowed="a number")
    return found


def read_side(value: Any) -> int:
    """One side of '512', 512, '512,512' or [512, 512]."""
    sides = value if isinstance(value, list) else str(value).split(",")
    whole = {read_whole("resolution", side, 1) for side in sides}
    if len(whole) != 1:
        raise RecipeError("resolution", f"{value}: width and height differ", allowed="one side; data.buckets")
    return whole.pop()


def read_number(value: Any) -> Any:
    try:
        return float(value) if not isinstance(value, list) else [float(one) for one in value]
    except (ValueError, TypeError):  # the recipe's own check names it
        return value


def whole(name: str) -> Callable[[Any], int]:
    """Reads a whole number under the name of its option."""
    return partial(read_whole, name)


def real(name: str) -> Callable[[Any], float]:
    """Reads a number under the name of its option."""
    return partial(read_real, name)


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
    "cosine_with_restarts": "cosine-with-restarts",
    "linear": "linear",
    "polynomial": "polynomial",
    "adafactor": "constant",
}

TABLE: dict[str, KohyaOption] = {
    "pretrained_model_name_or_path": KohyaOption("model.base"),
    "vae": KohyaOption("model.vae"),
    "fp8_base": KohyaOption("model.base_precision", lambda on: "fp8" if on else None, "of the U-Net"),
    "fp8_base_unet": KohyaOption("model.base_precision", lambda on: "fp8" if on else None),
    "v_parameterization": KohyaOption("objective.prediction", lambda on: "v" if on else None),
    "resolution": KohyaOption("data.resolution", read_side, "one side"),
    "enable_bucket": KohyaOption("data.buckets"),
    "train_batch_size": KohyaOption("train.micro_batch", note="and train.global_batch"),
    "max_train_steps": KohyaOption("train.steps"),
    "seed": KohyaOption("train.seed"),
    "mixed_precision": KohyaOption("train.precision", read_choice("mixed_precision", PRECISIONS)),
    "gradient_checkpointing": KohyaOption("train.gradient_checkpointing"),
    "blocks_to_swap": KohyaOption(
        "train.blocks_to_swap", whole("blocks_to_swap"), "of a frozen U-Net's blocks, of which there are more"
    ),
    "learning_rate": KohyaOption("optim.lr", read_number, "2e-6 where it is not given, as there"),
    "unet_lr": KohyaOption("optim.unet_lr", read_number),
    "stop_text_encoder_training": KohyaOption("optim.text_encoder_steps"),
    "lr_scheduler": KohyaOption("optim.lr_schedule", read_choice("lr_scheduler", DECAYS)),
    "lr_scheduler_num_cycles": KohyaOption(
        "optim.num_cycles", whole("lr_scheduler_num_cycles"), "of cosine_with_restarts, else left out"
    ),
    "lr_scheduler_power": KohyaOption(
        "optim.power", real("lr_scheduler_power"), "of polynomial, else left out"
    ),
    "optimizer_type": KohyaOption("optim.name", read_choice("optimizer_type", OPTIMISERS)),
    "fused_backward_pass": KohyaOption("optim.fused_backward"),
    "max_grad_norm": KohyaOption("optim.clip_norm", lambda norm: norm or None, "0 is null"),
    "loss_type": KohyaOption("objective.loss.type", read_choice("loss_type", LOSSES)),
    "huber_c": KohyaOption("objective.loss.huber_c", note="of huber and smooth_l1, else left out"),
    "huber_schedule": KohyaOption(
        "objective.loss.huber_schedule", note="of huber and smooth_l1, else left out"
    ),
    "huber_scale": KohyaOption(
        "objective.loss.huber_scale", note="of constant and exponential, else left out"
    ),
    "min_snr_gamma": KohyaOption("objective.min_snr_gamma", lambda gamma: gamma or None, "0 is null"),
    "debiased_estimation_loss": KohyaOption("objective.debiased_estimation"),
    "scale_v_pred_loss_like_noise_pred": KohyaOption("objective.scale_v_pred_loss_like_noise_pred"),
    "min_timestep": KohyaOption("objective.timesteps.min"),
    "max_timestep": KohyaOption("objective.timesteps.max"),
    "zero_terminal_snr": KohyaOption("objective.noise.zero_terminal_snr"),
    "noise_offset": KohyaOption("objective.noise.offset"),
    "noise_offset_random_strength": KohyaOption(
        "objective.noise.offset_random_strength", note="each picture has its own; there a batch"
    ),
    "adaptive_noise_scale": KohyaOption(
        "objective.noise.adaptive_scale", lambda scale: scale or None, "0 is null"
    ),
    "multires_noise_iterations": KohyaOption("objective.noise.multires_iterations"),
    "multires_noise_discount": KohyaOption(
        "objective.noise.multires_discount", note="with multires_noise_iterations, else left out"
    ),
    "ip_noise_gamma": KohyaOption("objective.noise.perturbation"),
    "ip_noise_gamma_random_strength": KohyaOption(
        "objective.noise.perturbation_random_strength", note="likewise"
    ),
    "alpha_mask": KohyaOption("data.mask", lambda on: "alpha" if on else None),
    "clip_skip": KohyaOption(
        "data.clip_skip",
        lambda layers: layers - 1,
        "one less: 1 is the last layer; left out for SDXL, where sd-scripts pass it by",
    ),
    "max_token_length": KohyaOption("data.max_token_length", whole("max_token_length")),
    "weighted_captions": KohyaOption("data.weighted_captions"),
    "shuffle_caption": KohyaOption("data.shuffle_tags"),
    "keep_tokens": KohyaOption(
        "data.keep_tokens", note="with shuffled, dropped or growing tags, else left out"
    ),
    "keep_tokens_separator": KohyaOption("data.keep_tokens_separator"),
    "secondary_separator": KohyaOption("data.secondary_separator"),
    "caption_dropout_rate": KohyaOption("data.caption_dropout"),
    "caption_tag_dropout_rate": KohyaOption("data.tag_dropout"),
    "token_warmup_step": KohyaOption("data.token_warmup_steps"),
    "token_warmup_min": KohyaOption("data.token_warmup_min", note="with token_warmup_step, else left out"),
    "caption_prefix": KohyaOption(
        "data.caption_prefix", lambda text: f"{text} " if text else "", "and a space, as there"
    ),
    "caption_suffix": KohyaOption("data.caption_suffix", lambda text: f" {text}" if text else "", "likewise"),
    "enable_wildcard": KohyaOption("data.wildcards"),
    "flip_aug": KohyaOption("data.flip"),
    "color_aug": KohyaOption(
        "data.augment.hue", lambda on: 0.045 if on else 0.0, "0.045; gamma 0.05, share 0.33"
    ),
    "random_crop": KohyaOption("data.crop", lambda on: "random" if on else "centre"),
    "max_data_loader_n_workers": KohyaOption("data.workers", lambda count: max(1, count)),
    "network_weights": KohyaOption("adapter.from"),
    "network_dim": KohyaOption("adapter.rank"),
    "network_alpha": KohyaOption("adapter.alpha", lambda alpha: alpha or None, "0 is null"),
    "network_dropout": KohyaOption("adapter.dropout", note="of a layer's inputs; there of its ranks"),
    "scale_weight_norms": KohyaOption("adapter.scale_weight_norms", lambda most: most or None, "0 is null"),
    "save_every_n_steps": KohyaOption("checkpoint.every"),
    "sample_every_n_steps": KohyaOption("sample.every"),
}
"""Options that are one key here."""
NETWORK: dict[str, KohyaOption] = {
    "conv_dim": KohyaOption("adapter.conv_rank", whole("network_args conv_dim"), "with adapter.targets=conv"),
    "conv_alpha": KohyaOption(
        "adapter.conv_alpha",
        real("network_args conv_alpha"),
        "not given: 1 of networks.lora, network_alpha of lycoris.kohya",
    ),
    "rank_dropout": KohyaOption("adapter.rank_dropout", real("network_args rank_dropout")),
    "module_dropout": KohyaOption("adapter.module_dropout", real("network_args module_dropout")),
    "loraplus_lr_ratio": KohyaOption("optim.loraplus_lr_ratio", real("network_args loraplus_lr_ratio")),
    "factor": KohyaOption("adapter.factor", whole("network_args factor")),
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
    "reg_data_dir": "data.sets likewise, with loss_weight; in all they come as often as the rest",
    "prior_loss_weight": "loss_weight of the sets of reg_data_dir, or with is_reg",
    "dataset_config": "a TOML or JSON of [[datasets]] with [[datasets.subsets]], read as data.sets",
    "in_json": "data.sets[].captions, of the pictures in train_data_dir",
    "gradient_accumulation_steps": "train.global_batch",
    "max_train_epochs": "train.steps, by the pictures in the folders",
    "save_every_n_epochs": "checkpoint.every, likewise",
    "sample_every_n_epochs": "sample.every, likewise",
    "caption_dropout_every_n_epochs": "data.caption_dropout: 1 of n captions, drawn one by one; there all of "
    "an epoch",
    "lr_warmup_steps": "optim.warmup_steps; below 1 a share of the steps",
    "text_encoder_lr": "optim.text_encoder_lr; of a list the second is text_encoder_2_lr; 0: not trained",
    "learning_rate_te": "the same",
    "learning_rate_te1": "the same",
    "learning_rate_te2": "optim.text_encoder_2_lr; 0: not trained",
    "train_text_encoder": "model.train_text_encoder",
    "optimizer_args": "optim.weight_decay, beta1 to beta3 (betas), eps, scale_parameter, d_coef, "
    "use_bias_correction; Adafactor's relative_step, which is true unless it is said, is optim.lr=0.01",
    "network_module": "adapter.kind (networks.lora; lycoris.kohya with algo in network_args); none: finetune",
    "network_args": "see the next table",
    "network_train_unet_only": "adapter.text_encoder=false",
    "network_train_text_encoder_only": "optim.layers: the U-Net's rate is 0",
    "resume": "refused, with the key that begins with the state's weights: its optimiser is pickled",
    "sample_prompts": "sample.prompts: a text file's lines with --n, --d, --s, --l, or TOML or JSON; "
    "pictures are of one size",
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
        "v2",
        "skip_cache_check",
    )
)
"""Options that need no key: where things are written, what is done anyway, what only changes memory."""
DEFAULTS = {"learning_rate": 2e-6}
ADAPTER_DEFAULTS = {"network_dim": 4, "network_alpha": 1}
"""sd-scripts' own, where its file says nothing."""
ATTENTIONS = "*attentions.*"
TEXT_ATTENTION = "*layers.*.self_attn.*"
TEXT = (TEXT_ATTENTION, "*layers.*.mlp.*")
BLOCKS = ("down_blocks.*", "mid_block.*", "up_blocks.*")
ENDS, TIMES = ("conv_in", "conv_out"), ("time_embedding.linear_*",)
PRESETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "full": ((*BLOCKS, *ENDS, *TIMES), TEXT),
    "full-lin": ((ATTENTIONS, "*.time_emb_proj", "*.conv_shortcut", *TIMES), TEXT),
    "attn-mlp": ((ATTENTIONS,), TEXT),
    "attn-only": (("*.attn?.to_*",), (TEXT_ATTENTION,)),
    "unet-only": ((*BLOCKS, *ENDS, *TIMES), ()),
    "unet-transformer-only": ((ATTENTIONS,), ()),
    "unet-convblock-only": (("*.resnets.*", "*samplers.*", *ENDS), ()),
}
"""LyCORIS' presets: patterns of layers of the U-Net, and of the text encoders."""
MOST_RANK = 4096
ADAFACTOR_RATE = 1e-2
"""What Adafactor's relative step is, until 1 / sqrt(step) is less: as PyTorch's own has it anyway."""


def table() -> str:
    """The options as Markdown tables, for docs/coming-from.md."""
    lines = ["| kohya | darkroom | note |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | `{one.key}` | {one.note} |" for name, one in TABLE.items()]
    lines += [f"| `{name}` | {text} | |" for name, text in SEVERAL.items()]
    lines += ["", "| `network_args` | darkroom | note |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | `{one.key}` | {one.note} |" for name, one in NETWORK.items()]
    lines.append(f"| `algo` | `adapter.kind` | {', '.join(f'{a}: {k}' for a, k in ALGORITHMS.items())} |")
    lines.append(f"| `preset` | `adapter.targets` | {', '.join(PRESETS)}; of lycoris.kohya, which has full |")
    lines.append(
        "| `down_lr_weight`, `mid_lr_weight`, `up_lr_weight` | `optim.layers[].lr_scale` | "
        "12, 1, 12 numbers, of SD 1.x and 2.x |"
    )
    lines.append(
        "| `block_dims`, `block_alphas` | `adapter.rank_pattern`, `adapter.alpha_pattern` | 25 numbers, "
        "of linear layers |"
    )
    lines.append("| `full_matrix` | `adapter.rank` | 4096 of lokr, as is any higher rank: whole matrices |")
    return "\n".join(lines)


HALF, SIDES = 12, {"down": 1, "up": 13}
"""sd-scripts' blocks of SD 1.x and 2.x: 12 down (the first has no layers), one in the middle, 12 up."""


def layers_of_blocks() -> Iterator[tuple[int, str]]:
    """Each of sd-scripts' blocks by its number, with the names of what is in it."""
    yield HALF, "mid_block"
    for i, (side, first) in itertools.product(range(4), SIDES.items()):
        block, steps = f"{side}_blocks.{i}", 2 if side == "down" else 3
        for j in range(steps):
            if (i < 3) if side == "down" else i:
                yield first + 3 * i + j, f"{block}.attentions.{j}"
            yield first + 3 * i + j, f"{block}.resnets.{j}"
        if i < 3:
            yield first + 3 * i + 2, f"{block}.{side}samplers.0"


def inner_patterns(layer: str, *, kernels: bool) -> Iterator[str]:
    """What of a block's part has the rank of linear layers; kernels have conv_dim."""
    if layer == "mid_block":
        yield "unet.mid_block.attentions.*"
        if kernels:
            yield "unet.mid_block.resnets.*_*"
    elif ".attentions." in layer:
        yield f"unet.{layer}.*"
    elif kernels and ".resnets." in layer:
        yield f"unet.{layer}.*_*"  # time_emb_proj and conv_shortcut
