"""Routing, masking and alignment against plain training, at equal compute, on the emoji store.

    darkroom import noto_emoji_64 emoji.lance
    darkroom train recipes/emoji-autoencoder.yaml
    darkroom prepare emoji.lance --model runs/emoji-autoencoder/model --resolution 64
    python benchmarks/pretrain/extras.py emoji.lance --vae runs/emoji-autoencoder/model --out extras

Every case trains the same small diffusion transformer from the same start on the same rows, and stops when
it has spent as many FLOPs: those of a picture's forward and backward pass, the aligner's projector and the
frozen extractor's forward pass, counted on the code itself. Cheaper cases make more steps; the schedule
(warm-up, cosine) is stretched over each case's own steps. The extractor that is aligned with learns from the
same training rows first, which is counted to nobody. Held-out loss sees every token, with the averaged
weights. The same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from pathlib import Path
from typing import Any

import torch

from darkroom.counting import count
from darkroom.recipe import make_recipe
from darkroom.run import Run
from darkroom.train.jobs import Pinned, flops_per_image
from darkroom.train.run import train
from darkroom.train.setup import make_job

TRANSFORMER = {"num_layers": 6, "num_attention_heads": 4, "attention_head_dim": 16}
TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
DATA = {"filter": "array_length(skin_tone) = 0", "holdout": 0.05, "resolution": 64}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "routing 50 %": {"routing": {"keep": 0.5, "before": 2, "after": 1}},
    "alignment": {"align": {"weight": 0.5, "block": 2, "hidden": 128}},
    "masking 50 %": {"routing": {"keep": 0.5, "before": 1, "after": 0, "loss": "kept"}},
    "alignment, features free": {"align": {"weight": 0.5, "block": 2, "hidden": 128}},
}
FREE = ("alignment, features free",)  # as where features were prepared once: the extractor is not counted
COLUMNS = ("case", "seed", "step", "images", "flops", "heldout_loss", "wall_s", "settings")
Row = dict[str, Any]


def main() -> None:
    told = arguments()
    out: Path = told.out
    out.mkdir(parents=True, exist_ok=True)
    extractor = aligned_with(told)
    rows: list[Row] = []
    for seed, name in [(0, name) for name in CASES] + [(seed, "plain") for seed in range(1, told.seeds)]:
        rows += run_case(told, name, seed, extractor)
        write(out / "extras.csv", rows)
        draw(out / "extras.png", rows, told)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--vae", required=True, help="the model whose VAE made the store's latents")
    parser.add_argument("--out", type=Path, default=Path("extras"))
    parser.add_argument("--tflop", type=float, default=30.0, help="what each case may spend")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=2, help="of the plain case, to see chance")
    parser.add_argument("--extractor-steps", type=int, default=150)
    return parser.parse_args()


def aligned_with(told: argparse.Namespace) -> Path:
    """darkroom's own extractor, trained on the same training rows by their pictures and captions."""
    folder: Path = told.out / "extractor"
    content = {
        "task": "extractor",
        "data": {"store": str(told.store), "crop": "random", "flip": True, **DATA},
        "objective": {"extractor": {"network": {"width": 16, "levels": 4}}},
        "optim": {"lr": 2e-3, "warmup_steps": 20, "lr_schedule": "cosine"},
        "train": {"steps": told.extractor_steps, "global_batch": 64, "log_every": 50},
    }
    train(make_recipe(content), out=folder)
    return folder / "model"


def content_of(told: argparse.Namespace, name: str, seed: int, steps: int, extractor: Path) -> dict[str, Any]:
    """A case's recipe."""
    extra = json.loads(json.dumps(CASES[name]))
    if "align" in extra:
        extra["align"]["extractor"] = str(extractor)
    return {
        "task": "pretrain",
        "model": {
            "base": "tiny-dit",
            "vae": told.vae,
            "unet": TRANSFORMER,
            "text_encoder": TEXT,
            "tokenizer": "train",
            "vocab_size": 2048,
            "max_length": 16,
            "train_text_encoder": True,
            "seed": seed,
        },
        "data": {"store": str(told.store), "caption_dropout": 0.1, **DATA},
        "optim": {
            "lr": 2e-3,
            "text_encoder_lr": 5e-4,
            "warmup_steps": min(30, steps),
            "lr_schedule": "cosine",
        },
        "train": {
            "steps": steps,
            "global_batch": told.batch,
            "micro_batch": told.batch,
            "precision": "float32",
            "log_every": 50,
            "seed": seed,
            "ema": {"decay": 0.99},
            **extra,
        },
        "evaluate": {"every": max(1, steps // 6), "rows": 128},
        "checkpoint": {"every": max(1, steps // 6), "keep": 1},
    }


def flops_of(told: argparse.Namespace, name: str, extractor: Path) -> int:
    """Of one picture: the step's and, where there is one, the extractor's."""
    recipe = make_recipe(content_of(told, name, 0, 1, extractor))
    job = make_job(recipe, Pinned(told.out / "counted"))
    with job.feed(0) as batches:
        columns = next(batches)
    flops = flops_per_image(job.task, job.task.inputs(columns, torch.device("cpu")))
    extras = job.task._extras  # type: ignore[union-attr]
    if extras is not None and extras.extractor is not None and name not in FREE:
        sees = extras.extractor.maps
        flops += count(sees, torch.zeros(1, 3, DATA["resolution"], DATA["resolution"])).flops
    return flops


def run_case(told: argparse.Namespace, name: str, seed: int, extractor: Path) -> list[Row]:
    """Train a case to its end; a row for each evaluation."""
    each = flops_of(told, name, extractor)
    steps = max(1, round(told.tflop * 1e12 / (each * told.batch)))
    folder = told.out / f"{re.sub(r'[^a-z]+', '-', name).strip('-')}-{seed}"
    print(f"{name}, seed {seed}: {each / 1e9:.4f} GFLOP a picture, {steps} steps of {told.batch}", flush=True)
    train(make_recipe(content_of(told, name, seed, steps, extractor)), out=folder)
    bill = Run.open(folder).bill()
    wall_s = 0.0 if bill is None else bill.wall_s
    settings = {"transformer": TRANSFORMER, "text": TEXT, "batch": told.batch, "steps": steps, **CASES[name]}
    return [
        {
            "case": name,
            "seed": seed,
            "step": row["step"],
            "images": row["step"] * told.batch,
            "flops": row["step"] * told.batch * each,
            "heldout_loss": row["heldout_loss"],
            "wall_s": round(wall_s * row["step"] / steps, 1),
            "settings": json.dumps(settings),
        }
        for row in Run.open(folder).metrics()
        if "heldout_loss" in row
    ]


def write(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def draw(path: Path, rows: list[Row], told: argparse.Namespace) -> None:
    """Held-out loss over the FLOPs spent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for i, (name, seed) in enumerate(dict.fromkeys((row["case"], row["seed"]) for row in rows)):
        curve = [row for row in rows if (row["case"], row["seed"]) == (name, seed)]
        style = {"linestyle": "--"} if seed else {}
        label = f"{name}, seed {seed}" if name == "plain" else name
        x, y = [row["flops"] / 1e12 for row in curve], [row["heldout_loss"] for row in curve]
        axes.plot(x, y, marker="o", markersize=3, color=f"C{0 if seed else i}", label=label, **style)
    axes.set(xlabel="TFLOP spent", ylabel="held-out loss of rectified flow", yscale="log")
    axes.grid(which="both", alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title(f"Emoji at 64 px, 64 tokens, {told.tflop:g} TFLOP a case", fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
