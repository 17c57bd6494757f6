"""What `fake_device` runs: a step of every task, a draw with every solver, all of them small."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from PIL import Image
from pydantic import BaseModel

from darkroom.models.control import ControlNet
from darkroom.recipe.objective import DistillSettings
from darkroom.recipe.sections import VAE_TASKS
from darkroom.recipe.training import AdapterSettings, OptimSettings
from fake_device import OTHER, draw, draw_steered, prepare, train_a_step
from sample.conftest import CAPTIONS, SMALL_XL
from train.conftest import BASE_WORDS, SIDE, TEXT, UNET, VAE, paint

Case = tuple[str, Callable[[], int]]
DIT = {"num_layers": 5, "num_attention_heads": 2, "attention_head_dim": 8}
NETWORK = {"width": 8, "levels": 2, "embedding": 32, "buckets": 128}


def drawings() -> Iterator[Case]:
    from darkroom import models
    from darkroom.options import FLOW_SOLVER_NAMES, SOLVER_NAMES

    for family, solvers in (("tiny", SOLVER_NAMES), ("tiny-dit", FLOW_SOLVER_NAMES)):
        for solver in solvers:
            yield f"draw {family} {solver}", lambda f=family, s=solver: draw(models.create(f), s, OTHER)  # type: ignore[misc]

    def of_sdxl() -> int:
        tokenizer = models.train_tokenizer(CAPTIONS, vocab_size=600)
        return draw(models.create("sdxl", tokenizer=tokenizer, overrides=SMALL_XL), "euler", OTHER)

    def of_doubles() -> int:
        model = models.create("tiny-dit")
        model.modules["unet"].register_buffer("places", torch.zeros(3, dtype=torch.float64))
        return draw(model, "flow_euler", OTHER)

    def of_a_variation() -> int:
        model = models.create("tiny")
        size = (model.size_unit, model.size_unit)
        more = {"variation_seed": 3, "variation_strength": 0.3, "seed_size": size, "sigmas": "beta"}
        return draw(model, "euler_a", OTHER, **more)

    yield "draw sdxl euler", of_sdxl
    yield "draw variation", of_a_variation
    yield "draw control", of_doubles


def steered(folder: Path) -> Iterator[Case]:
    """Drawings that a picture steers."""
    from darkroom import models

    sys.path.append(str(Path(__file__).parent / "sample"))
    from sample.test_control import adapter_of, net_of, saved
    from sample.test_image_prompt import adapter_file

    tiny = lambda: models.create("tiny")  # noqa: E731
    for name, made in (("ControlNet", net_of), ("T2I-Adapter", adapter_of)):
        yield (
            f"steer {name}",
            lambda n=name, m=made: draw_steered(  # type: ignore[misc]
                model := tiny(), saved(m(model), folder / "nets" / n), OTHER
            ),
        )
    for kind in ("plain", "plus"):
        yield (
            f"steer IP-Adapter {kind}",
            lambda k=kind: draw_steered(  # type: ignore[misc]
                model := tiny(), adapter_file(model, folder / "nets" / k / "ip.safetensors", k), OTHER,
                mask=Image.new("L", (8, 8), 128),
            ),
        )  # fmt: skip

    def of_doubles() -> int:
        net = adapter_of(model := tiny())
        net.register_forward_hook(lambda module, given, out: [one.double() for one in out])
        return draw_steered(model, ControlNet("doubles", "t2i-adapter", net, "0"), OTHER)

    yield "steer control", of_doubles


def preparations() -> Iterator[Case]:
    from darkroom import models

    def of_sdxl() -> int:
        tokenizer = models.train_tokenizer(CAPTIONS, vocab_size=600)
        return prepare(models.create("sdxl", tokenizer=tokenizer, overrides=SMALL_XL), OTHER)

    yield "prepare tiny", lambda: prepare(models.create("tiny"), OTHER)
    yield "prepare sdxl", of_sdxl


def choices(settings: type[BaseModel], field: str) -> tuple[str, ...]:
    """What a setting may be."""
    return get_args(settings.model_fields[field].annotation)


def trainings(folder: Path) -> Iterator[Case]:
    from darkroom import models
    from darkroom.data.importers import import_pictures
    from darkroom.recipe import make_recipe

    pictures, store, base = folder / "pictures", folder / "pictures.lance", folder / "base"
    paint(pictures, 8)
    import_pictures(pictures, store)
    tokenizer = models.train_tokenizer([BASE_WORDS] * 3, vocab_size=640)
    models.save(models.create("tiny", tokenizer=tokenizer), base)
    models.save(models.create("sdxl", tokenizer=tokenizer, overrides=SMALL_XL), folder / "sdxl")
    stored = {"store": str(store), "resolution": SIDE, "encode": "inline"}
    subject = {
        "folder": str(pictures),
        "prompt": "a photo of sks square",
        "resolution": SIDE,
        "encode": "inline",
    }
    for kind in ("chosen", "rejected"):
        paint(folder / "pairs" / kind, 4)
    pairs = subject | {"folder": str(folder / "pairs"), "prompt": "a square"}
    train = {"steps": 3, "global_batch": 2, "micro_batch": 2, "precision": "float32"}
    fresh = {"base": "tiny", "vae": VAE, "unet": UNET, "text_encoder": TEXT}
    cases: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "pretrain": ({"task": "pretrain", "model": fresh, "data": stored}, ("objective.noise.offset=0.1",)),
        "pretrain v, bf16": (
            {"task": "pretrain", "model": fresh, "data": stored},
            ("objective.prediction=v", "train.precision=bf16", "objective.min_snr_gamma=5"),
        ),
        "pretrain, transformer, routed": (
            {"task": "pretrain", "model": fresh | {"base": "tiny-dit", "unet": DIT}, "data": stored},
            (
                "train.routing.keep=0.5",
                "objective.loss.type=huber",
                "objective.loss.huber_schedule=exponential",
            ),
        ),
        **{
            task: ({"task": task, "model": {"base": "tiny", "vae": VAE}, "data": stored}, ())
            for task in VAE_TASKS
        },
        "extractor": (
            {
                "task": "extractor",
                "data": {"store": str(store), "resolution": SIDE, "crop": "random"},
                "objective": {"extractor": {"network": NETWORK}},
            },
            ("train.micro_batch=auto",),
        ),
        "finetune": (
            {"task": "finetune", "model": {"base": str(base)}, "data": stored},
            ("model.train_text_encoder=true",),
        ),
        **{
            f"lora, {kind}": (
                {"task": "lora", "model": {"base": str(base)}, "data": stored, "adapter": {"kind": kind}},
                (),
            )
            for kind in choices(AdapterSettings, "kind")
        },
        "lora, SDXL": ({"task": "lora", "model": {"base": str(folder / "sdxl")}, "data": stored}, ()),
        **{
            f"distill, {method}": (
                {"task": "distill", "model": {"base": str(base)}, "data": stored},
                (f"objective.distill.method={method}",),
            )
            for method in choices(DistillSettings, "method")
        },
        "dpo": ({"task": "dpo", "model": {"base": str(base)}, "data": pairs}, ()),
        "dreambooth": ({"task": "dreambooth", "model": {"base": str(base)}, "data": subject}, ()),
        "dreambooth-lora": ({"task": "dreambooth-lora", "model": {"base": str(base)}, "data": subject}, ()),
        "textual-inversion": (
            {
                "task": "textual-inversion",
                "model": {"base": str(base), "word": {"token": "<sks>", "initial": "square"}},
                "data": {name: value for name, value in subject.items() if name != "prompt"},
            },
            (),
        ),
    }
    cases |= {
        f"pretrain, {name}": ({"task": "pretrain", "model": fresh, "data": stored}, (f"optim.name={name}",))
        for name in choices(OptimSettings, "name")
        if name != "adamw8bit"  # whose step torchao compiles
    }
    for name, (content, overrides) in cases.items():
        yield (
            f"train {name}",
            lambda n=name, c=content, o=overrides: train_a_step(  # type: ignore[misc]
                make_recipe(c | {"train": train}, o), folder / "runs" / n.partition(",")[0], OTHER
            ),
        )
    yield (
        "train control",
        lambda: train_a_step(
            make_recipe(cases["pretrain"][0] | {"train": train}, ()), folder / "control", OTHER, spoil=True
        ),
    )
