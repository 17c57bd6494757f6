"""How near a tiny VAE comes to its teacher: PSNR on held-out pictures, before (the control) and after.

    python benchmarks/tiny_vae.py STORE TEACHER --out DIR [--resolution 64] [--steps 2000] [--width 32]

STORE holds pictures (`darkroom import`), TEACHER is a model or a tiny VAE's folder. The run is that of
recipes/tiny-vae.yaml with these changes; the same command goes on where it was stopped. One JSON line: dB of
the decoder against the teacher's decoding of the same latents, dB of both halves against the pictures, and
the latents' square error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from darkroom.hardware import machine
from darkroom.recipe import read_recipe
from darkroom.run import Run
from darkroom.train import train

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny-vae.yaml"
MEASURED = ("heldout_psnr_db", "heldout_picture_psnr_db", "heldout_latents")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("teacher")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    told = {
        "data.store": args.store,
        "model.base": args.teacher,
        "data.resolution": args.resolution,
        "data.crop": "centre",
        "data.holdout": 64,
        "evaluate.rows": 64,
        "objective.tiny_vae.width": args.width,
        "optim.lr": args.lr,
        "optim.warmup_steps": min(50, args.steps),
        "train.steps": args.steps,
        "train.global_batch": args.batch,
        "train.micro_batch": args.batch,
        "train.precision": "float32",
        "evaluate.every": max(1, args.steps // 4),
        "checkpoint.every": max(1, args.steps // 4),
        "sample.every": 0,
    }
    recipe = read_recipe(RECIPE, [f"{key}={value}" for key, value in told.items()])
    run = Run.open(train(recipe, out=Path(args.out), console=lambda line: print(line, flush=True)).run)
    rows = [row for row in run.metrics() if MEASURED[0] in row]
    row = {
        "teacher": Path(args.teacher).name,
        "resolution": args.resolution,
        "width": args.width,
        "steps": args.steps,
        "batch": args.batch,
        "untrained": {name: round(rows[0][name], 3) for name in MEASURED},
        "trained": {name: round(rows[-1][name], 3) for name in MEASURED},
        "cpu": machine().cpu,
        "torch": torch.__version__,
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
