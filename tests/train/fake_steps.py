"""Every kind of training step on a CARD device without a card: places, waits and launches."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from darkroom import models
from darkroom.plan.memory import reads_text
from darkroom.plan.settings import encodes
from darkroom.plan.training import _columns, _NoStore, _without_store
from darkroom.recipe import make_recipe
from darkroom.recipe.sections import VAE_TASKS
from darkroom.train import model as build
from darkroom.train import setup
from darkroom.train.distributed.ranks import ALONE, Ranks
from darkroom.train.memory import rest
from darkroom.train.step import DTYPES
from darkroom.train.tasks.tiny_vae import with_student
from fake_card import CARD, Watched, elsewhere, fake_card

ROWS = 4
UNET = {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2, "layers_per_block": 1}
DIT = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 8}
VAE = {"block_out_channels": [8, 16, 16]}
TINY = {"base": "tiny", "unet": UNET, "vae": VAE}
TINY_DIT = {"base": "tiny-dit", "unet": DIT, "vae": VAE}
TINY_XL = {
    "base": "sdxl",
    "unet": {
        "block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": [2, 2],
        "cross_attention_dim": 32, "addition_time_embed_dim": 16,
        "projection_class_embeddings_input_dim": 112,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 1], "layers_per_block": 1,
    },
    "vae": {"block_out_channels": [32, 32]},
}  # fmt: skip
XL_TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}


class Made:
    """A job's step on the device, and what it is called with."""

    def __init__(self, content: dict[str, Any]) -> None:
        content = {"data": {"store": "x", "resolution": 32}, **content}
        ranks = Ranks(0, 2, 0, 2) if "parallel" in content else ALONE
        train = {"global_batch": ROWS * ranks.size, "micro_batch": ROWS, "precision": "bf16", "steps": 10}
        content["train"] = {**train, **content.get("train", {})}
        self.recipe = recipe = make_recipe(content)
        self.dtype = models.precision(str(recipe.train.precision))
        overrides = build.family_changes(recipe.task, recipe.model, recipe.data.resolution, None)
        if recipe.model.base == "sdxl":
            overrides |= {"text_encoder": XL_TEXT, "text_encoder_2": {**XL_TEXT, "projection_dim": 16}}
        parts = ("vae",) if recipe.task in VAE_TASKS else ("unet", "vae", "text_encoder", "tokenizer")
        tokenizer = None
        if recipe.model.base == "sdxl":
            tokenizer = models.train_tokenizer(["a picture of a dog"], vocab_size=640)
        self.model = models.create(recipe.model.base, parts=parts, overrides=overrides, tokenizer=tokenizer)
        if recipe.task == "tiny-vae":
            self.model = with_student(self.model, recipe.objective.tiny_vae, 0)
        setup._move(self.model, torch.device(CARD))
        self.task: Any = setup.make_task(_without_store(recipe), self.model, _NoStore(), torch.device(CARD))
        if recipe.frozen_text:
            setup.halve_text(self.model, self.dtype)
        # Weights that seldom run are laid into a file on a CPU alone.
        assert rest(setup._seldom_run(self.model, self.task), Path("/nowhere")) == 0
        self.step = setup.bare_step(
            self.task,
            train=recipe.train,
            optim=recipe.optim,
            micro_batch=int(recipe.train.micro_batch),
            dtype=self.dtype,
            ranks=ranks,
            shard=recipe.parallel.shard,
            reduce=DTYPES[recipe.parallel.reduce],
        )

    def columns(self) -> dict[str, Any]:
        data = self.recipe.data
        share = self.recipe.train.global_batch // (2 if self.recipe.parallel.mode == "ddp" else 1)
        given = _columns(
            data.resolution,
            self.model,
            self.task,
            inline=encodes(self.recipe.task, data),
            text=reads_text(data, self.task),
        )(share)
        return {
            name: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }

    def tensors(self) -> list[torch.Tensor]:
        """All that the step keeps between two calls."""
        state = self.step.optimiser.state.values()
        return [*self.step.weights.masters.values(), *self.step.ema.state().values(), *state]


def steady(made: Made) -> Watched:
    """The third step, watched: by then the optimiser has its state and captions are encoded."""
    for k in range(2):
        made.step(k, made.task.inputs(made.columns(), torch.device(CARD)))
    columns, watched = made.columns(), Watched()
    with watched:
        result = made.step(2, made.task.inputs(columns, torch.device(CARD)))
    assert not elsewhere([*result.losses.values(), result.grad_norm], CARD)
    return watched


TASKS: dict[str, dict[str, Any]] = {
    "pretrain": {"task": "pretrain", "model": TINY},
    "pretrain dit": {"task": "pretrain", "model": TINY_DIT},
    "pretrain sdxl": {"task": "pretrain", "model": TINY_XL},
    "text encoder too": {"task": "finetune", "model": {**TINY, "train_text_encoder": True}},
    "finetune": {"task": "finetune", "model": TINY},
    "tiny vae": {"task": "tiny-vae", "model": {"base": "tiny", "vae": VAE}},
    "autoencoder": {"task": "autoencoder", "model": {"base": "tiny", "vae": VAE}},
    "lora": {"task": "lora", "model": TINY, "adapter": {"rank": 2}},
    "lora conv dora": {
        "task": "lora", "model": TINY, "adapter": {"rank": 2, "targets": "conv", "dora": True},
    },
    "lora text": {"task": "lora", "model": TINY, "adapter": {"rank": 2, "text_encoder": True}},
    "dreambooth": {
        "task": "dreambooth", "model": TINY,
        "data": {"instance": "x", "resolution": 32, "prompt": "a", "class_prompt": "b"},
    },
    "textual inversion": {
        "task": "textual-inversion", "model": {**TINY, "word": {"token": "<x>", "initial": "a"}},
        "data": {"folder": "x", "resolution": 32},
    },
    "routing": {"task": "pretrain", "model": TINY_DIT, "train": {"routing": {"keep": 0.5, "before": 1}}},
    "dreambooth sdxl": {
        "task": "dreambooth", "model": TINY_XL,
        "data": {"instance": "x", "resolution": 32, "prompt": "a", "class_prompt": "b"},
    },
    "dpo": {
        "task": "dpo", "model": TINY, "adapter": {"rank": 2},
        "data": {"folder": "x", "resolution": 32, "prompt": "a"},
    },
    "distill": {"task": "distill", "model": TINY},
    "distill dmd2": {
        "task": "distill", "model": TINY,
        "objective": {"distill": {"method": "dmd2", "steps": 2, "fake_updates": 1}},
    },
    "distill lora": {"task": "distill", "model": TINY, "adapter": {"rank": 2}},
    **{
        f"lora {kind}": {"task": "lora", "model": TINY, "adapter": {"rank": 2, "kind": kind}}
        for kind in ("loha", "lokr", "full")
    },
    "long captions": {
        "task": "finetune", "model": TINY,
        "data": {"store": "x", "resolution": 32, "text": "inline", "max_token_length": 150},
    },
    "inline": {
        "task": "pretrain", "model": TINY, "data": {"store": "x", "resolution": 32, "encode": "inline"},
    },
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"train": {"precision": "float32"}},
    "fp16": {"train": {"precision": "fp16"}},
    "two micro-batches": {"train": {"micro_batch": 2}},
    "two micro-batches, fp16": {"train": {"micro_batch": 2, "precision": "fp16"}},
    "channels last": {"train": {"channels_last": True}},
    "skip": {"train": {"on_nan": "skip", "spike_norm": 10.0}},
    "no ema": {"train": {"ema": {"enabled": False}}},
    "noise offset": {"objective": {"noise": {"offset": 0.1}}},
    "min-snr": {"objective": {"min_snr_gamma": 5.0}},
    "fused backward": {"optim": {"fused_backward": True, "clip_norm": None}},
    **{name: {"optim": {"name": name}} for name in ("schedule-free", "muon")},
    "huber": {"objective": {"loss": {"type": "huber"}}},
    "multires, perturbation": {"objective": {"noise": {"multires_iterations": 4, "perturbation": 0.1}}},
    "logit-normal": {"objective": {"timesteps": {"distribution": "logit-normal"}}},
    "ema every fourth": {"train": {"ema": {"every": 4}}},
    "no clipping": {"optim": {"clip_norm": None}},
    "ddp": {"parallel": {"mode": "ddp"}},
    "ddp float32": {"parallel": {"mode": "ddp"}, "train": {"precision": "float32"}},
    "ddp summed in bf16": {"parallel": {"mode": "ddp", "reduce": "bf16"}},
    "ddp two micro-batches": {
        "parallel": {"mode": "ddp"}, "train": {"global_batch": 4 * ROWS, "micro_batch": ROWS},
    },
}  # fmt: skip


WAITING: dict[str, dict[str, Any]] = {name: {"optim": {"name": name}} for name in ("adafactor", "prodigy")}
"""Optimisers of PyTorch and prodigyopt that ask the device for numbers: a step with them is waited for."""


KEPT: list[Made] = []
"""All that were made: torch may crash where tensors of a device from Python are let go."""
CASES = {**TASKS, **{name: {**TASKS["pretrain"], **way} for name, way in {**WAYS, **WAITING}.items()}}


def seen(content: dict[str, Any] | Made) -> dict[str, Any]:
    """What is to be known of one step."""
    made = content if isinstance(content, Made) else Made(content)
    KEPT.append(made)
    watched = steady(made)
    modules = [name for module in made.task.modules.values() for name in elsewhere(module, CARD)]
    return {
        "waits": watched.waits,
        "kernels": watched.launched,
        "elsewhere": modules + elsewhere(made.tensors(), CARD),
    }


def _spoilt(how: str) -> Any:
    """The first task with a loss that does what a step must not."""
    made = Made(TASKS["pretrain"])
    losses = made.task.losses

    def spoilt(inputs: Any) -> Any:
        found = losses(inputs)
        if how == "reads a number" and found["loss"].sum() > 0:
            return found
        more = torch.ones(1) if how == "mixes devices" else torch.ones(1).to(CARD)
        return {**found, "loss": found["loss"] * more.expand(found["loss"].shape)}

    made.task.losses = spoilt
    return made


def join_a_group() -> None:
    """Of two processes, of whom the other answers at once; one import is for what that does to fakes."""
    import torch.distributed as dist
    import torch.distributed._tools.fake_collectives  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(f"cpu:fake,{CARD}:fake", rank=0, world_size=2, store=FakeStore())


def main() -> None:
    with fake_card():
        if any("parallel" in CASES.get(name, {}) for name in sys.argv[1:]):
            join_a_group()
        for name in sys.argv[1:] or CASES:
            try:
                found = seen(CASES[name]) if name in CASES else seen(_spoilt(name))
            except Exception:
                found = {"error": traceback.format_exc(limit=-20)}
            print(json.dumps({"name": name, **found}), flush=True)
        os._exit(0)  # for the same reason


if __name__ == "__main__":
    main()
