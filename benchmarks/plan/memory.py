"""Predicted against measured peak memory of real CPU runs; writes memory-cpu.csv beside this file.

    python benchmarks/plan/memory.py [small|full]

Each case runs in a process of its own: three real training steps (or one batch of pictures) with real
weights, and the growth of the peak resident set since before the model was made. `full` adds SD
1.5 at full size: full training in float32 needs about 14 GB free.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDE = {"unet": {"block_out_channels": [128, 256, 256], "layers_per_block": 2, "attention_head_dim": 8}}
DATA = {"store": "x", "resolution": 256}
SMALL: dict[str, tuple[dict[str, Any], int]] = {
    **{
        f"27 M U-Net, 256 px, batch {rows}": (
            {"task": "pretrain", "model": {"base": "tiny", **WIDE}, "data": DATA},
            rows,
        )
        for rows in (4, 8)
    },
    "27 M U-Net, 256 px, batch 8, checkpointed": (
        {
            "task": "pretrain",
            "model": {"base": "tiny", **WIDE},
            "data": {"store": "x", "resolution": 256},
            "train": {"gradient_checkpointing": True},
        },
        8,
    ),
    "27 M U-Net, 256 px, batch 8, LoRA rank 8": (
        {
            "task": "lora",
            "model": {"base": "tiny", **WIDE},
            "adapter": {"rank": 8},
            "data": {"folder": "x", "resolution": 256},
        },
        8,
    ),
}  # fmt: skip
SD15 = {
    "task": "finetune",
    "model": {"base": "sd15"},
    "data": {"folder": "x", "resolution": 512, "prompt": "a"},
}
LORA = {**SD15, "task": "lora", "adapter": {"rank": 8, "targets": "qv"}}
FULL: dict[str, tuple[dict[str, Any], int]] = {
    "SD 1.5, 512 px, LoRA rank 8, batch 1": (LORA, 1),
    "SD 1.5, 512 px, LoRA rank 8, batch 2, checkpointed": (
        {**LORA, "train": {"gradient_checkpointing": True}},
        2,
    ),
    "SD 1.5, 512 px, all weights, batch 1, checkpointed": (
        {**SD15, "train": {"gradient_checkpointing": True}},
        1,
    ),
}


def measure(content: dict[str, Any], rows: int) -> dict[str, int]:
    """Run three real steps here; bytes that the resident set grew by at its peak."""
    import torch

    from darkroom import models
    from darkroom.hardware import PeakMemory, resident_bytes
    from darkroom.plan.training import _columns, _NoStore, _without_store, encodes, outline
    from darkroom.recipe import make_recipe
    from darkroom.train import build, job

    recipe = make_recipe(content)
    torch.zeros(10).sum()
    layout = outline(recipe)
    peak, before = PeakMemory(), resident_bytes()
    overrides = build._overrides(recipe, None)
    model = models.create(recipe.model.base, parts=("unet", "vae", "text_encoder"), overrides=overrides)
    model.tokenizers = layout.tokenizers
    task = job.make_task(_without_store(recipe), model, _NoStore(), torch.device("cpu"))
    if not encodes(recipe):
        task._encode = None
    step = job.bare_step(task, recipe, rows, torch.float32)
    given = _columns(recipe, model, task)(rows)
    columns = {
        name: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    for k in range(3):
        step(k, task.inputs(columns, torch.device("cpu")))
    return {"measured": peak.bytes() - before}


def predict(content: dict[str, Any], rows: int) -> dict[str, Any]:
    """What the plan says of the same."""
    from darkroom.plan.training import profile_recipe
    from darkroom.recipe import make_recipe

    held = profile_recipe(make_recipe(content), "float32", gpu=False).memory(rows)
    return {"predicted": round(sum(held.values()))} | {kind: round(size) for kind, size in held.items()}


def main(which: str) -> None:
    """Every case, each measured in a fresh process."""
    cases = SMALL | (FULL if which == "full" else {})
    rows = []
    for name in cases:
        got: dict[str, Any] = {}
        for what in ("measure", "predict"):
            run = [sys.executable, __file__, what, name]
            out = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            got |= json.loads(out)
        got["error"] = got["predicted"] / got["measured"] - 1
        rows.append({"case": name, **got})
        print(f"{name}: {got['predicted'] / 1e9:.3f} GB predicted, {got['measured'] / 1e9:.3f} measured, "
              f"{got['error']:+.1%}", flush=True)  # fmt: skip
    with (HERE / "memory-cpu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        content, number = (SMALL | FULL)[sys.argv[2]]
        print(json.dumps((measure if sys.argv[1] == "measure" else predict)(content, number)))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "small")
