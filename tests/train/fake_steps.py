"""Every kind of training step on a CARD device without a card: places, waits and launches."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torchao.optim import subclass_8bit

from darkroom import models
from darkroom.evaluate.extractors import Extractor
from darkroom.evaluate.pictures import Preprocess
from darkroom.evaluate.settings import SmallSettings
from darkroom.evaluate.small import SmallExtractor
from darkroom.plan.targets import encodes
from darkroom.plan.training import _columns, _NoStore, _without_files, reads_text
from darkroom.recipe import Recipe, make_recipe
from darkroom.recipe.sections import VAE_TASKS
from darkroom.train import ddp_fsdp, setup
from darkroom.train import model as build
from darkroom.train.block_swap import swap_of
from darkroom.train.memory import offload_mmap
from darkroom.train.precision import DTYPES, cast
from darkroom.train.ranks import ALONE, Ranks
from darkroom.train.tasks import repa
from darkroom.train.tasks.diffusion import Masks
from darkroom.train.tasks.encoders import ExtractorModel, with_student
from fake_card import CARD, PINNED, Watched, elsewhere, fake_card, outside

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
NETWORK = {"width": 8, "levels": 2, "embedding": 16, "buckets": 64}
CLASSES = ("cat", "dog")
XL_TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}


class Made:
    """A job's step on the device, and what it is called with."""

    def __init__(self, content: dict[str, Any]) -> None:
        content = {"data": {"store": "x", "resolution": 32}, **content}
        shared = content.get("parallel", {}).get("mode")
        ranks = Ranks(0, 2, 0, 2, sharded=shared == "fsdp") if shared else ALONE
        train = {"global_batch": ROWS * ranks.size, "micro_batch": ROWS, "precision": "bf16", "steps": 10}
        content["train"] = {**train, **content.get("train", {})}
        self.recipe = recipe = make_recipe(content)
        self.dtype = models.precision(str(recipe.train.precision))
        self.model = _new_model(recipe)
        if recipe.train.blocks_to_swap:
            cast(self.model.unet, self.dtype)  # early, as a frozen one is
        setup._move(self.model, torch.device(CARD))
        changes = _without_files(recipe.data, recipe.train, recipe.model, recipe.adapter)
        quiet = recipe.model_copy(update={**changes, "train": recipe.train})
        self.task: Any = setup.make_task(quiet, self.model, _NoStore(), torch.device(CARD))
        if recipe.data.mask is not None:
            self.task._masks = Masks(recipe.data.mask, factor=self.model.vae_factor, floor=0.5)
        if recipe.frozen_text:
            setup.halve_text(self.model, self.dtype)
        # Weights that seldom run are laid into a file on a CPU alone.
        assert offload_mmap(setup._seldom_run(self.model, self.task), Path("/nowhere")) == 0
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
        if recipe.optim.name == "adamw8bit":
            outside(lambda: (subclass_8bit.get_qmap_signed(), subclass_8bit.get_qmap_unsigned()))
            # torchao compiles its step on a card; as it is, it launches more, and waits for the same.
            self.step.optimiser._stance = torch.compiler.set_stance

    def columns(self) -> dict[str, Any]:
        data = self.recipe.data
        share = self.recipe.train.global_batch // (1 if self.recipe.parallel.mode == "none" else 2)
        if self.recipe.task == "extractor":
            pixels = torch.zeros(share, 3, data.resolution, data.resolution, dtype=torch.uint8)
            captions = [f"a {CLASSES[i % 2]}" for i in range(share)]
            return {"pixels": pixels, "caption": captions, "label": [c[2:] for c in captions]}
        given = _columns(
            data.resolution,
            self.model,
            self.task,
            inline=encodes(self.recipe.task, data),
            text=reads_text(data, self.task),
        )(share)
        if data.mask is not None:
            given = {**given, data.mask: [None] * share}
        return {
            name: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }

    def tensors(self) -> list[torch.Tensor]:
        """All that the step keeps between two calls. torchao counts its steps on the host."""
        counts = ("step",) if self.recipe.optim.name == "adamw8bit" else ()
        state = [v for own in self.step.optimiser.state.values() for k, v in own.items() if k not in counts]
        return [*self.step.weights.masters.values(), *self.step.ema.state().values(), *state]


def _new_model(recipe: Recipe) -> models.Model:
    """The recipe's model with random weights."""
    if recipe.task == "extractor":
        by_class = recipe.objective.extractor.loss == "classifier"
        network = SmallExtractor(
            recipe.objective.extractor.network,
            resolution=recipe.data.resolution,
            text=not by_class,
            labels=CLASSES if by_class else (),
        )
        return ExtractorModel("extractor", path="extractor", network=network)
    overrides = build.family_changes(recipe.task, recipe.model, recipe.data.resolution, None)
    tokenizer = None
    if recipe.model.base == "sdxl":
        overrides |= {"text_encoder": XL_TEXT, "text_encoder_2": {**XL_TEXT, "projection_dim": 16}}
        tokenizer = models.train_tokenizer(["a picture of a dog"], vocab_size=640)
    parts = ("vae",) if recipe.task in VAE_TASKS else ("unet", "vae", "text_encoder", "tokenizer")
    made = models.create(recipe.model.base, parts=parts, overrides=overrides, tokenizer=tokenizer)
    return with_student(made, recipe.objective.tiny_vae, 0) if recipe.task == "tiny-vae" else made


def _opened(where: str, side: int, tokens: int, device: torch.device) -> tuple[Extractor, int]:
    """What `repa` opens from a folder: a small network on the device, and how wide its features are."""
    network = SmallExtractor(SmallSettings(**NETWORK), resolution=side).requires_grad_(False)
    torch.nn.Module.to(network, device)
    told = Preprocess(size=(side, side))
    extractor = Extractor(where, "small", "0", network, told, embed=network, maps=network.maps)
    blank = torch.zeros(1, 3, side, side, dtype=torch.uint8, device=device)
    return extractor, repa.seen(extractor, blank, (tokens, tokens)).shape[-1]


def steady(made: Made) -> Watched:
    """The second step, watched: by then the optimiser has its state and captions are encoded."""
    made.step(0, made.task.inputs(made.columns(), torch.device(CARD)))
    columns, watched = made.columns(), Watched()
    with watched:
        result = made.step(1, made.task.inputs(columns, torch.device(CARD)))
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
    "dreambooth lora": {
        "task": "dreambooth-lora", "model": TINY, "adapter": {"rank": 2},
        "data": {"instance": "x", "resolution": 32, "prompt": "a"},
    },
    "lora sdxl": {"task": "lora", "model": TINY_XL, "adapter": {"rank": 2, "text_encoder": True}},
    "finetune dit": {"task": "finetune", "model": TINY_DIT},
    "lora dit": {"task": "lora", "model": TINY_DIT, "adapter": {"rank": 2}},
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
    "distill dmd2 gan": {
        "task": "distill", "model": TINY,
        "objective": {"distill": {"method": "dmd2", "steps": 2, "fake_updates": 1, "gan_weight": 0.1}},
    },
    "distill lora": {"task": "distill", "model": TINY, "adapter": {"rank": 2}},
    **{
        f"lora {kind}": {"task": "lora", "model": TINY, "adapter": {"rank": 2, "kind": kind}}
        for kind in ("loha", "lokr", "oft", "full")
    },
    "extractor": {"task": "extractor", "objective": {"extractor": {"network": NETWORK}}},
    "extractor of classes": {
        "task": "extractor",
        "objective": {"extractor": {"network": NETWORK, "loss": "classifier", "label": "label"}},
    },
    "aligned": {
        "task": "pretrain", "model": TINY_DIT,
        "train": {
            "align": {"extractor": "small", "hidden": 16, "block": 2}, "routing": {"keep": 0.5, "before": 1},
        },
    },
    **{
        f"lora on {kind}": {"task": "lora", "model": {**TINY, "base_precision": kind}, "adapter": {"rank": 2}}
        for kind in ("int8", "fp8", "nf4")
    },
    "long captions": {
        "task": "finetune", "model": TINY,
        "data": {"store": "x", "resolution": 32, "text": "inline", "max_token_length": 150},
    },
    "inline": {
        "task": "pretrain", "model": TINY, "data": {"store": "x", "resolution": 32, "encode": "inline"},
    },
    "stored text": {
        "task": "pretrain", "model": TINY, "data": {"store": "x", "resolution": 32, "encode": "stored"},
    },
    "masked": {
        "task": "finetune", "model": TINY, "data": {"store": "x", "resolution": 32, "mask": "mask"},
    },
}  # fmt: skip


def _with(task: str, **train: Any) -> dict[str, Any]:
    """A task with other settings of its training."""
    return {**TASKS[task], "train": {**TASKS[task].get("train", {}), **train}}


TASKS |= {f"{name}, fp16": _with(name, precision="fp16") for name in tuple(TASKS)}
TASKS |= {
    f"{name}, checkpointing": _with(name, gradient_checkpointing=True)
    for name in (
        "pretrain", "pretrain dit", "pretrain sdxl", "text encoder too", "autoencoder", "lora", "aligned",
        "textual inversion", "distill", "dpo",
    )
}  # fmt: skip
TASKS |= {
    f"{name}, blocks swapped": _with(name, blocks_to_swap=3)
    for name in (
        "lora", "lora dit", "lora on fp8", "lora conv dora", "textual inversion", "dpo",
        "lora, checkpointing",
    )
}  # fmt: skip
TASKS |= {  # as CUDA lays convolutions of itself
    f"{name}, channels last": _with(name, channels_last=True)
    for name in (
        "pretrain sdxl", "autoencoder", "tiny vae", "lora conv dora", "lora loha", "lora on int8", "distill",
        "text encoder too", "textual inversion",
    )
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"train": {"precision": "float32"}},
    "two micro-batches": {"train": {"micro_batch": 2}},
    "two micro-batches, fp16": {"train": {"micro_batch": 2, "precision": "fp16"}},
    "channels last": {"train": {"channels_last": True}},
    "skip": {"train": {"nonfinite_policy": "skip", "spike_norm": 10.0}},
    "no ema": {"train": {"ema": {"enabled": False}}},
    "noise offset": {"objective": {"noise": {"offset": 0.1}}},
    "min-snr": {"objective": {"min_snr_gamma": 5.0}},
    "fused backward": {"optim": {"fused_backward": True, "clip_norm": None}},
    **{
        name: {"optim": {"name": name}}
        for name in ("schedule-free", "muon", "lion", "came", "adamw8bit", "adafactor", "prodigy")
    },
    "adafactor, fused backward": {
        "optim": {"name": "adafactor", "fused_backward": True, "clip_norm": None},
    },
    "adafactor absolute": {"optim": {"name": "adafactor", "scale_parameter": False}},
    "v, zero terminal SNR": {"objective": {"prediction": "v", "noise": {"zero_terminal_snr": True}}},
    "predicts the picture": {"objective": {"prediction": "sample"}},
    "flow": {"objective": {"prediction": "flow"}},
    "huber": {"objective": {"loss": {"type": "huber"}}},
    "multires, perturbation": {"objective": {"noise": {"multires_iterations": 4, "perturbation": 0.1}}},
    "logit-normal": {"objective": {"timesteps": {"distribution": "logit-normal"}}},
    "ema every fourth": {"train": {"ema": {"every": 4}}},
    "no clipping": {"optim": {"clip_norm": None}},
    "ddp": {"parallel": {"mode": "ddp"}},
    "ddp float32": {"parallel": {"mode": "ddp"}, "train": {"precision": "float32"}},
    "ddp summed in bf16": {"parallel": {"mode": "ddp", "reduce": "bf16"}},
    "ddp, fp16": {"parallel": {"mode": "ddp"}, "train": {"precision": "fp16"}},
    "fsdp": {"parallel": {"mode": "fsdp"}},
    "fsdp float32": {"parallel": {"mode": "fsdp"}, "train": {"precision": "float32"}},
    "fsdp of all": {"parallel": {"mode": "fsdp", "shard": "full"}},
    "fsdp two micro-batches": {
        "parallel": {"mode": "fsdp"}, "train": {"global_batch": 4 * ROWS, "micro_batch": ROWS},
    },
    "ddp two micro-batches": {
        "parallel": {"mode": "ddp"}, "train": {"global_batch": 4 * ROWS, "micro_batch": ROWS},
    },
}  # fmt: skip


KEPT: list[Made] = []
"""All that were made: torch may crash where tensors of a device from Python are let go."""
TASKS |= {
    f"{name} in shards": {**TASKS[name], "parallel": {"mode": "fsdp"}}
    for name in ("distill", "distill dmd2", "distill dmd2 gan")
}
CASES = {**TASKS, **{name: {**TASKS["pretrain"], **way} for name, way in WAYS.items()}}


def seen(content: dict[str, Any] | Made) -> dict[str, Any]:
    """What is to be known of one step."""
    made = content if isinstance(content, Made) else Made(content)
    KEPT.append(made)
    watched = steady(made)
    swaps = [swap for module in made.task.modules.values() if (swap := swap_of(module)) is not None]
    resting = sum(len(swap.resting) for swap in swaps)
    modules = [name for module in made.task.modules.values() for name in elsewhere(module, CARD)]
    if resting and len(modules) == resting:  # these, and nothing else
        modules = []
    return {
        "waits": watched.waits,
        "kernels": watched.launched,
        "elsewhere": modules + elsewhere(made.tensors(), CARD),
    }


def _spoilt(how: str) -> Any:
    """The first task with a loss that does what a step must not, or blocks in memory that no card reads."""
    if how == "does not pin":
        made = Made(TASKS["lora, blocks swapped"])
        for home in swap_of(made.model.unet).resting:  # type: ignore[arg-type, union-attr]
            delattr(home, PINNED)
        return made
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


def _outside(call: Any) -> Any:
    return lambda *args, **kwargs: outside(lambda: call(*args, **kwargs))


def join_a_group() -> None:
    """Of two processes, of whom the other answers at once; one import is for what that does to fakes."""
    import torch.distributed as dist
    import torch.distributed._tools.fake_collectives  # noqa: F401
    from torch.distributed import device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(f"cpu:fake,{CARD}:fake", rank=0, world_size=2, store=FakeStore())
    for module, name in ((device_mesh, "init_device_mesh"), (ddp_fsdp, "_part_of")):
        setattr(module, name, _outside(getattr(module, name)))


def main() -> None:
    repa._opened = _opened
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
