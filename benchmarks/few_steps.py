"""What few steps cost a trained model: distilled by LCM and by DMD2, against simply drawing in fewer steps.

    python benchmarks/few_steps.py --out DIR [--seed 0] [--steps 2400] [--dmd2-steps 3000] [--toy]

Trains the quickstart's model (or takes the one that is in DIR/quickstart), distils it with each method, and
scores 50 steps of the teacher, and 4, 2 and 1 steps of the teacher (the naive control) and of each student,
on the quickstart's 64 captions that were never seen, four pictures of each; and how near each picture is to
the teacher's in 50 steps from the same noise, which of several steps LCM's share at the first alone. One JSON
line a finding, to DIR/few-steps.jsonl too. The same command goes on where it was stopped. `--toy`: the same
way in a minute, its pictures are fog.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from darkroom import models, sample
from darkroom.hardware import machine
from darkroom.quickstart.journey import FULL, TOY, quickstart, score
from darkroom.quickstart.shapes import held_out
from darkroom.recipe import make_recipe
from darkroom.sample.likeness import likeness
from darkroom.train import train

GUIDANCE = 1.5
"""The quickstart's."""
FEW = (4, 2, 1)
METHODS = ("lcm", "dmd2")
UNTRAINED = "teacher, drawn as a student"


def distilled(args: argparse.Namespace, method: str, few: int) -> Path:
    """A student's model; one for all numbers of steps with LCM, one for each with DMD2."""
    out = Path(args.out) / f"{method}{'' if method == 'lcm' else f'-{few}'}"
    steps = args.steps if method == "lcm" else args.dmd2_steps
    distill: dict[str, Any] = {"method": method, "guidance_min": GUIDANCE, "guidance_max": GUIDANCE}
    if method == "lcm":
        distill |= {"ddim_steps": args.ddim_steps, "distance": args.distance, "target": args.target}
    else:
        distill |= {"steps": few, "fake_updates": 5}
    recipe = make_recipe(
        {
            "task": "distill",
            "model": {"base": str(Path(args.out) / "quickstart" / "runs" / "pretrain" / "model")},
            "data": {
                "store": str(Path(args.out) / "quickstart" / "pictures.lance"),
                "resolution": 32,
                "encode": "stored",
                "text": "inline",
            },
            "objective": {"distill": distill},
            "optim": {
                "lr": args.lr if method == "lcm" else args.dmd2_lr,
                "warmup_steps": min(50, steps),
                "lr_schedule": args.lr_schedule if method == "lcm" else "constant",
                **({"beta2": 0.99, "weight_decay": 0.0} if method == "lcm" else {}),
            },
            "train": {
                "steps": steps,
                "global_batch": 32,
                "precision": "float32",
                "seed": args.seed,
                "log_every": max(1, steps // 10),
                "ema": {"enabled": True, "decay": args.average if method == "lcm" else 0.995},
            },
            "checkpoint": {"every": max(1, steps // 4), "keep": 1},
        }
    )
    return train(recipe, out=out, console=lambda line: print(line, flush=True)).model


def main() -> None:
    args = read_arguments()
    out = Path(args.out)
    scale = TOY if args.toy else FULL
    print("the quickstart's model", flush=True)
    teacher = quickstart(out / "quickstart", seed=args.seed, scale=scale).model
    rows = out / "few-steps.jsonl"
    kept = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
    again = ("teacher", UNTRAINED, *(args.method or METHODS))
    kept = [line for line in kept if json.loads(line)["model"] not in again]
    rows.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    firsts: list[Image.Image] = []

    def finding(model: Path, name: str, steps: int, **how: Any) -> None:
        opened = models.load(model)
        wanted = held_out(seed=args.seed)[: scale.num_prompts]
        began = time.process_time()
        pictures = []
        for seed in range(args.seed, args.seed + args.seeds):
            captions = [one.caption for one in wanted]
            pictures += sample.generate(
                opened, captions, seed=seed, steps=steps, notice=lambda _: None, **how
            )
        spent = time.process_time() - began
        images = [picture.image for picture in pictures]
        found = score(images, wanted * args.seeds)
        alike = likeness(images, firsts) if firsts else {}
        firsts[:] = firsts or images
        row = {
            "model": name,
            "steps": steps,
            "color_fidelity": found.color_fidelity,
            "shape_fidelity": found.shape_fidelity,
            "all_fidelity": found.all_fidelity,
            **{f"{name}_to_first": round(alike[name], 3) for name in ("psnr_db", "ssim") if alike},
            "pictures": len(pictures),
            "cpu_s": round(spent, 2),
            "seed": args.seed,
            **settings_of(args, name),
            "cpu": machine().cpu,
            "torch": torch.__version__,
        }
        line = json.dumps(row)
        print(line, flush=True)
        with rows.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    plain = {"guidance": GUIDANCE, "solver": "dpmpp_2m"}
    for steps in (50, *FEW):
        finding(teacher, "teacher", steps, **plain)
    # Its mean pictures, without guidance: blurred, and more often right than one guided step.
    for steps in FEW:
        finding(teacher, UNTRAINED, steps, guidance=1.0, solver="lcm")
    for method in args.method or METHODS:
        for steps in FEW:
            finding(distilled(args, method, steps), method, steps)


def settings_of(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """What a student's row says of its training."""
    if name == "lcm":
        return {"train_steps": args.steps, "lr": args.lr} | {
            key: getattr(args, key) for key in ("lr_schedule", "ddim_steps", "target", "average", "distance")
        }
    return {"train_steps": args.dmd2_steps, "lr": args.dmd2_lr} if name == "dmd2" else {}


def read_arguments() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=4, help="pictures of each caption")
    parser.add_argument("--method", choices=METHODS, action="append", help="both if not said")
    parser.add_argument("--steps", type=int, default=2400, help="of LCM")
    parser.add_argument("--dmd2-steps", type=int, default=3000, help="of DMD2, the student's are a fifth")
    parser.add_argument("--lr", type=float, default=5e-4, help="of LCM")
    parser.add_argument("--average", type=float, default=0.99, help="decay of the weights LCM learns from")
    parser.add_argument("--target", choices=("average", "student"), default="average", help="of LCM")
    parser.add_argument("--distance", default="velocity", help="of LCM")
    parser.add_argument("--lr-schedule", default="cosine", help="of LCM")
    parser.add_argument(
        "--ddim-steps", type=int, default=10, help="of LCM's teacher: errors pass on from each"
    )
    parser.add_argument("--dmd2-lr", type=float, default=1e-4, help="of DMD2")
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    if args.toy:
        args.steps = args.dmd2_steps = 4
    return args


if __name__ == "__main__":
    main()
