"""Every key with every task: read by it, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from darkroom.errors import RecipeError
from darkroom.recipe import make_recipe
from darkroom.recipe.reference import RecipeKey, find_keys
from darkroom.recipe.task_keys import TASKS, tasks_of

SUBJECT = {"instance": "pictures", "prompt": "a photo of a sks dog"}
OTHER_PICTURES: dict[str, dict[str, Any]] = {
    "dreambooth": SUBJECT,
    "dreambooth-lora": SUBJECT,
    "textual-inversion": {"instance": "pictures"},
    "dpo": {"folder": "pictures"},
}
SOURCES = ("store", "stores", "folder", "instance", "sets")
NEEDS: dict[tuple[str, ...], dict[str, Any]] = {
    ("data.num_class_images", "data.class_images", "data.prior_weight"): {"data.class_prompt": "a dog"},
    ("data.augment.share",): {"data.encode": "inline", "data.augment.hue": 0.1},
    ("data.crop", "data.flip", "data.augment"): {"data.encode": "inline"},
    ("objective.unmasked_weight",): {"data.mask": "mask"},
    ("data.cache_gb",): {"data.cache": "rows"},
    ("adapter.conv_rank", "adapter.conv_alpha"): {"adapter.targets": "conv"},
    ("adapter.factor", "adapter.decompose_both"): {"adapter.kind": "lokr"},
    ("model.base_precision", "train.blocks_to_swap", "optim.loraplus_lr_ratio"): {"adapter.rank": 2},
    ("objective.p2_k",): {"objective.p2_gamma": 1.0},
    ("objective.timesteps.mean", "objective.timesteps.std"): {
        "objective.timesteps.distribution": "logit-normal"
    },
    ("objective.noise.offset_random_strength", "objective.noise.adaptive_scale"): {
        "objective.noise.offset": 0.1
    },
    ("model.vocab_size", "model.max_length"): {"model.tokenizer": "train"},
    ("data.keep_tokens_",): {},
    ("data.keep_tokens",): {"data.shuffle_tags": True},
    ("data.token_warmup_min",): {"data.token_warmup_steps": 5},
    ("objective.loss.huber_",): {"objective.loss.type": "huber", "objective.loss.huber_schedule": "constant"},
    ("objective.timesteps.mode_scale",): {"objective.timesteps.distribution": "mode"},
    ("objective.extractor.label",): {"objective.extractor.loss": "classifier"},
    ("optim.final_lr_ratio",): {"optim.lr_schedule": "cosine"},
    ("evaluate.scores", "evaluate.extractors", "evaluate.num"): {
        "data.holdout": 0.1,
        "evaluate.every_images": 100,
    },
    ("objective.noise.multires_discount",): {"objective.noise.multires_iterations": 2},
    ("objective.noise.perturbation_random_strength",): {"objective.noise.perturbation": 0.1},
    (
        "objective.distill.steps",
        "objective.distill.fake_",
        "objective.distill.gan_weight",
    ): {"objective.distill.method": "dmd2"},
    ("objective.distill.discriminator_weight",): {
        "objective.distill.method": "dmd2",
        "objective.distill.gan_weight": 0.1,
    },
    ("train.routing.before", "train.routing.after", "train.routing.loss"): {"train.routing.keep": 0.5},
    ("train.align.weight", "train.align.block", "train.align.hidden"): {"train.align.extractor": "x"},
    ("optim.text_encoder",): {"model.train_text_encoder": True, "adapter.text_encoder": True},
    ("optim.num_cycles",): {"optim.lr_schedule": "cosine-with-restarts"},
    ("optim.power",): {"optim.lr_schedule": "polynomial"},
    ("optim.beta3",): {"optim.name": "came"},
    ("optim.scale_parameter",): {"optim.name": "adafactor", "optim.lr": 0.01},
    ("optim.d_coef", "optim.use_bias_correction"): {"optim.name": "prodigy", "optim.lr": 1.0},
    ("parallel.nodes",): {"parallel.mode": "ddp"},
    ("evaluate.every_images",): {"data.holdout": 0.1},
    ("evaluate.patience",): {"data.holdout": 0.1, "evaluate.every": 5},
}  # fmt: skip
"""What else has to be said with keys that begin so."""


def content_of(task: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A short recipe of a task with these settings by key, and what they need."""
    content: dict[str, Any] = {
        "task": task,
        "model": {"base": "tiny"},
        "data": dict(OTHER_PICTURES.get(task, {"store": "pictures.lance"})),
        "train": {"steps": 10, "global_batch": 8},
    }
    if task == "textual-inversion":
        content["model"]["word"] = {"token": "<sks-dog>", "initial": "dog"}
    if any(key.removeprefix("data.").split("[")[0] in SOURCES for key in settings):
        content["data"] = {name: value for name, value in content["data"].items() if name not in SOURCES}
    for key, value in settings.items():
        *parents, name = key.split(".")
        inner = content
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return content


def values_of(one: RecipeKey) -> Iterator[Any]:
    """Values that may be allowed, other than the default."""
    limits = [
        float(number) for number in re.findall(r"(?:at least|above|at most|below) (-?[\d.e+-]+)", one.allowed)
    ]
    own = one.default if isinstance(one.default, int | float) else 1
    found: list[Any] = [True, False] if "boolean" in one.type else []
    if "choice" in one.type:
        names = [name for name in re.split(", |; or ", one.allowed) if name]
        found += [int(name) if name.isdigit() else name for name in names]
    if "number" in one.type or "integer" in one.type:
        numbers = [8, *limits, 2 * own, own / 2, 1.1 * own, own + 1, own - 1, 1, 2, 0.5, 0.1, 3, 4, 128, 150]
        found += numbers if "number" in one.type else [int(number) for number in numbers]
    found += ["x", "a photo of <sks-dog>"] if "text" in one.type else []
    found += [["x"], ["heldout_loss"], ["fid"]] if "list" in one.type else []
    found += [{"num_layers": 1}, {"x": 8}, {"x": "y"}] if "mapping" in one.type else []
    found += ["2026-12-01"] if "date-time" in one.type else []
    return (value for value in found if value != one.default)


def is_read(task: str, one: RecipeKey, value: Any) -> str:
    """What a recipe with this value is refused with; nothing where it is read."""
    needs = next((needs for keys, needs in NEEDS.items() if one.key.startswith(keys)), {})
    left_out = ["adapter."] if task not in tasks_of("adapter.rank") else []
    left_out += ["model.train_text"] if task not in tasks_of("model.train_text_encoder") else []
    needs = {key: value for key, value in needs.items() if not key.startswith(tuple(left_out))}
    try:
        make_recipe(content_of(task, {**needs, one.key: value})).check()
    except RecipeError as error:
        return str(error)
    return ""


KEYS = [one for one in find_keys() if "[]" not in one.key and one.key not in ("task", "model.base")]


@pytest.mark.parametrize("section", sorted({one.key.split(".")[0] for one in KEYS}))
def test_a_key_is_read_or_refused(section: str) -> None:
    """By each task, with the same values; the refusal of the others names a key."""
    wrong = []
    for one in (one for one in KEYS if one.key.split(".")[0] == section):
        readers = tasks_of(one.key)
        for task in TASKS:
            refusals = [is_read(task, one, value) for value in values_of(one)]
            if ("" in refusals) is not (task in readers):
                wrong.append((one.key, task, task in readers, refusals[:2]))
    assert wrong == []


@pytest.mark.parametrize(
    ("task", "key", "value"),
    [
        ("pretrain", "model.vocab_size", 900),
        ("pretrain", "model.max_length", 30),
        ("pretrain", "data.augment.share", 0.5),
        ("pretrain", "data.keep_tokens", 2),
        ("pretrain", "data.token_warmup_min", 3),
        ("pretrain", "objective.loss.huber_c", 0.3),
        ("pretrain", "objective.loss.huber_schedule", "constant"),
        ("pretrain", "objective.loss.huber_scale", 2.0),
        ("pretrain", "objective.timesteps.mode_scale", 0.5),
        ("pretrain", "objective.noise.multires_discount", 0.5),
        ("pretrain", "optim.text_encoder_lr", 1e-5),
        ("pretrain", "optim.text_encoder_2_lr", 1e-5),
        ("lora", "optim.text_encoder_steps", 5),
        ("pretrain", "optim.final_lr_ratio", 0.1),
        ("pretrain", "evaluate.scores", ["fid"]),
        ("pretrain", "evaluate.extractors", {"all": "x"}),
        ("pretrain", "evaluate.num", 8),
        ("extractor", "objective.extractor.label", "kind"),
    ],
)
def test_a_key_is_refused_without_what_it_belongs_to(task: str, key: str, value: object) -> None:
    with pytest.raises(RecipeError, match=f"^{re.escape(key)}: given, but nothing reads it; allowed: with "):
        make_recipe(content_of(task, {key: value}))
    needs = next(needs for keys, needs in NEEDS.items() if key.startswith(keys))
    left_out = "adapter." if task != "lora" else "model.train_text"
    needs = {name: one for name, one in needs.items() if not name.startswith(left_out)}
    make_recipe(content_of(task, {**needs, key: value}))


def test_other_losses_have_no_threshold() -> None:
    settings = {"objective.loss.type": "huber", "objective.loss.huber_scale": 2.0}
    with pytest.raises(RecipeError, match="huber_scale: given, but .*huber_schedule=constant"):
        make_recipe(content_of("pretrain", settings))
    dmd2 = {"objective.distill.method": "dmd2", "objective.distill.huber_c": 0.1}
    with pytest.raises(RecipeError, match=r"distill\.huber_c: given, but nothing reads it"):
        make_recipe(content_of("distill", dmd2))
    classes = {"objective.extractor.loss": "classifier", "objective.extractor.label": "kind"}
    with pytest.raises(RecipeError, match="caption_weight: given, but .*extractor.loss=contrastive"):
        make_recipe(content_of("extractor", {**classes, "objective.extractor.caption_weight": 0.5}))


def test_what_is_turned_off_may_keep_what_belongs_to_it() -> None:
    """A shipped recipe's text encoder is frozen by one key; so is a run's resolved recipe read again."""
    for off, left in (
        ({"model.train_text_encoder": False}, {"optim.text_encoder_lr": 1e-5}),
        ({"evaluate.every_images": 0}, {"evaluate.num": 8, "evaluate.scores": ["fid"]}),
        ({"optim.lr_schedule": "constant"}, {"optim.final_lr_ratio": 0.1}),
        ({"objective.loss.type": "mse"}, {"objective.loss.huber_c": 0.3}),
    ):
        recipe = make_recipe(content_of("pretrain", {**off, **left}))
        assert make_recipe(yaml.safe_load(recipe.dump())) == recipe
        with pytest.raises(RecipeError, match="given, but nothing reads it"):
            make_recipe(content_of("pretrain", left))
    with pytest.raises(RecipeError, match="huber_c: given, but nothing reads it"):  # chosen is not off
        make_recipe(content_of("pretrain", {"objective.loss.type": "l1", "objective.loss.huber_c": 0.3}))
