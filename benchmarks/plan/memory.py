"""Predicted against measured peak memory of real CPU runs; writes memory-cpu.csv beside this file.

    python benchmarks/plan/memory.py             small cases, some minutes
    python benchmarks/plan/memory.py full        SD 1.5 at full size too: 16 GB free, half an hour
    python benchmarks/plan/memory.py full NAME   the cases whose name holds NAME; other rows of the file stay

Each case runs in a process of its own with real weights: two training steps (the second one is the peak: the
optimiser made its state at the end of the first), or pictures. Measured is the high-water mark of the
resident set less what was resident before the model was made, when libraries were loaded and a small step
had run. glibc keeps freed blocks below a threshold that grows to 32 MB, so a plain process holds up to twice
what is alive; MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ give each freed block back. The column
`plain_malloc` is the same run without them, where it was made.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILE = HERE / "memory-cpu.csv"
KINDS = ("weights", "gradients", "optimiser", "ema", "activations", "temporary")
COLUMNS = ("case", "predicted", "measured", "error", "plain_malloc", *KINDS, "torch", "date")
EAGER = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
CHECKPOINTED = {"train": {"gradient_checkpointing": True}}
WIDE = {"unet": {"block_out_channels": [128, 256, 256], "layers_per_block": 2, "attention_head_dim": 8}}
TINY = {"task": "pretrain", "model": {"base": "tiny"}, "data": {"store": "x", "resolution": 256}}
MIDDLE = {**TINY, "model": {"base": "tiny", **WIDE}}
MIDDLE_LORA = {**MIDDLE, "task": "lora", "adapter": {"rank": 8}}
SD15 = {"task": "finetune", "model": {"base": "sd15"}, "data": {"store": "x", "resolution": 512}}
LORA = {**SD15, "task": "lora", "adapter": {"rank": 8, "targets": "qv"}}


def _held_in(kind: str | None) -> dict[str, Any]:
    """A LoRA's training whose frozen U-Net is held in fewer bits."""
    return {**MIDDLE_LORA, "model": {**MIDDLE["model"], "base_precision": kind}}


FOLDER = "a folder of 16 pictures"  # made where the case is measured
VAE = {"block_out_channels": [128, 128, 256], "layers_per_block": 1}
RUN = {
    "task": "lora",
    "model": {"base": "tiny", "vae": VAE},
    "data": {"folder": FOLDER, "resolution": 256, "prompt": "a"},
    "adapter": {"rank": 4},
    "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "precision": "float32", "device": "cpu"},
}
INLINE = {"folder": FOLDER, "resolution": 256, "prompt": "a", "encode": "inline"}
DRAWN = {"prompts": ["a", "b", "c", "d"], "steps": 2, "solver": "ddim"}
PICTURES = {"pictures": "sd15", "size": 512}
TINY_PICTURES = {"pictures": "tiny", "size": 256}

SMALL: dict[str, tuple[dict[str, Any], int]] = {
    "tiny U-Net, 256 px, batch 8": (TINY, 8),
    "27 M U-Net, 256 px, batch 2": (MIDDLE, 2),
    "27 M U-Net, 256 px, batch 4": (MIDDLE, 4),
    "27 M U-Net, 256 px, batch 8, checkpointed": ({**MIDDLE, **CHECKPOINTED}, 8),
    "27 M U-Net, 256 px, batch 4, LoRA rank 8": (MIDDLE_LORA, 4),
    **{
        f"27 M U-Net, 256 px, batch 1, LoRA rank 8, {kind or 'float32'}": (_held_in(kind), 1)
        for kind in (None, "int8", "fp8", "nf4")
    },
    "a run with latents of its own, 256 px": (RUN, 1),
    "a run that draws samples of 4, 256 px": ({**RUN, "data": INLINE, "sample": DRAWN}, 1),
    "tiny model, 256 px, pictures, batch 2": (TINY_PICTURES, 2),
    "tiny model, 256 px, pictures, batch 8": (TINY_PICTURES, 8),
}
FULL: dict[str, tuple[dict[str, Any], int]] = {
    "SD 1.5, 512 px, pictures, batch 1": (PICTURES, 1),
    "SD 1.5, 512 px, pictures, batch 2": (PICTURES, 2),
    "SD 1.5, 512 px, LoRA rank 8, batch 1": (LORA, 1),
    "SD 1.5, 512 px, LoRA rank 8, batch 1, checkpointed": ({**LORA, **CHECKPOINTED}, 1),
    "SD 1.5, 512 px, LoRA rank 8, batch 4, checkpointed": ({**LORA, **CHECKPOINTED}, 4),
    "SD 1.5, 512 px, all weights, batch 1, checkpointed": ({**SD15, **CHECKPOINTED}, 1),
}


def measure(content: dict[str, Any], rows: int) -> dict[str, int]:
    """Run it here; bytes that the resident set grew by at its peak."""
    from darkroom.hardware.meters import PeakMemory, resident_bytes

    if content.get("data", {}).get("folder") == FOLDER:
        ready = _run(content)
    else:
        ready = (_pictures if "pictures" in content else _training)(content, rows)
        _warm_up(content)
    peak, before = PeakMemory(), resident_bytes()
    ready()
    return {"measured": peak.bytes() - before}


def _warm_up(content: dict[str, Any]) -> None:
    """Load what a first convolution, product and backward pass load; of pictures, what a small one loads."""
    import torch

    if "pictures" in content:
        _pictures({**content, "pictures": "tiny", "size": 64}, 1)()
        return

    layers = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.SiLU(), torch.nn.Linear(6, 6)
    )
    optimiser = torch.optim.AdamW(layers.parameters(), fused=True)
    layers(torch.zeros(1, 4, 8, 8)).sum().backward()
    optimiser.step()


def _training(content: dict[str, Any], rows: int) -> Callable[[], None]:
    import torch

    from darkroom import models
    from darkroom.plan.targets import encodes
    from darkroom.plan.tracing import outline
    from darkroom.plan.training import _columns, _NoStore, _without_files, offloaded, reads_text
    from darkroom.recipe import make_recipe
    from darkroom.train import model as build
    from darkroom.train import setup as job

    recipe = make_recipe(content)
    data, side, cpu = recipe.data, recipe.data.resolution, torch.device("cpu")
    layout = outline(recipe.task, recipe.model, recipe.objective, side)
    overrides = build.family_changes(recipe.task, recipe.model, side, None)
    inline = encodes(recipe.task, data)

    def run() -> None:
        parts = ("unet", "vae", "text_encoder")
        model = models.create(recipe.model.base, parts=parts, overrides=overrides)
        model.tokenizers = layout.tokenizers
        changes = _without_files(data, recipe.train, recipe.model, recipe.adapter)
        task = job.make_task(recipe.model_copy(update=changes), model, _NoStore(), cpu)
        text = reads_text(data, task)
        if not inline:
            task._encode = None
        idle = offloaded(model, task, text=text, inline=inline)
        job.offload_mmap([model.modules[name] for name in idle], Path(tempfile.mkdtemp()))
        step = job.bare_step(
            task, train=recipe.train, optim=recipe.optim, micro_batch=rows, dtype=torch.float32
        )
        columns = {
            name: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in _columns(side, model, task, inline=inline, text=text)(rows).items()
        }
        for k in range(2):
            step(k, task.inputs(columns, cpu))

    return run


def _run(content: dict[str, Any]) -> Callable[[], None]:
    """The whole run, from the folder to the file; a small one has loaded the libraries before."""
    import numpy as np
    from PIL import Image

    from darkroom.recipe import make_recipe
    from darkroom.train.run import train

    place = Path(tempfile.mkdtemp(prefix="darkroom-memory-"))
    draws = np.random.default_rng(0)

    def one(name: str, side: int, number: int, model: dict[str, Any]) -> None:
        (place / name).mkdir()
        for i in range(number):
            pixels = draws.integers(0, 255, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / name / f"{i}.png")
        data = {**content["data"], "folder": str(place / name), "resolution": side}
        recipe = make_recipe({**content, "model": model, "data": data})
        train(recipe, out=place / f"{name}-run", console=lambda _: None)

    one("small", 64, 2, {"base": "tiny"})
    return lambda: one("large", content["data"]["resolution"], 16, content["model"])


def _pictures(content: dict[str, Any], rows: int) -> Callable[[], None]:
    """Text, two denoising steps, decoding: as `darkroom.generate` does it, float32."""
    import torch

    from darkroom import models
    from darkroom.models.outline import outlined
    from darkroom.plan.tracing import GenerateSpec, _conditions, _denoise
    from darkroom.sample.pictures import decode

    spec = GenerateSpec(content["pictures"], content["size"], content["size"], precision="float32")
    # Every part, so that what its library loads is resident before the peak is watched.
    tokenizers = outlined(spec.model, ("unet", "vae", "text_encoder")).tokenizers

    class Unstaged:
        stage = ""

    def run() -> None:
        model = models.create(spec.model, parts=("unet", "vae", "text_encoder"))
        model.tokenizers = tokenizers
        with torch.no_grad():
            told = _conditions(model, spec, rows)
            latents = _denoise(Unstaged(), model, spec, told)  # type: ignore[arg-type]
            decode(model.vae, latents)

    return run


def predict(content: dict[str, Any], rows: int) -> dict[str, Any]:
    """What the plan says of the same."""
    from darkroom.plan.tracing import GenerateSpec, profile_generation
    from darkroom.plan.training import profile_recipe
    from darkroom.recipe import make_recipe

    if "pictures" in content:
        spec = GenerateSpec(content["pictures"], content["size"], content["size"], precision="float32")
        held = profile_generation(spec).memory(rows)
    else:
        held = profile_recipe(make_recipe(content).dump(), "float32", gpu=False).memory(rows)
    return {"predicted": round(sum(held.values()))} | {kind: round(size) for kind, size in held.items()}


def main(which: str, named: str = "") -> None:
    """Every case, each measured in a fresh process; rows are written as they come."""
    from datetime import date
    from importlib.metadata import version

    cases = SMALL | (FULL if which == "full" else {})
    rows = {row["case"]: row for row in csv.DictReader(FILE.open())} if FILE.is_file() else {}
    for name in (name for name in cases if named in name):
        got = {"case": name, "torch": version("torch"), "date": date.today().isoformat()}
        got |= _fresh("predict", name, {}) | _fresh("measure", name, EAGER)
        got["error"] = round(got["predicted"] / got["measured"] - 1, 4)
        got["plain_malloc"] = _fresh("measure", name, {})["measured"] if name in SMALL else ""
        rows[name] = got
        print(f"{name}: {got['predicted'] / 1e9:.3f} GB predicted, {got['measured'] / 1e9:.3f} measured, "
              f"{got['error']:+.1%}; plain malloc {got['plain_malloc']}", flush=True)  # fmt: skip
        _write(rows)


def _fresh(what: str, name: str, settings: dict[str, str]) -> dict[str, Any]:
    run = [sys.executable, __file__, "--one", what, name]
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    out = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True, env=plain | settings).stdout
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def _write(rows: dict[str, dict[str, Any]]) -> None:
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in SMALL | FULL if name in rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        content, number = (SMALL | FULL)[sys.argv[3]]
        print(json.dumps((measure if sys.argv[2] == "measure" else predict)(content, number)))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "small", *sys.argv[2:3])
