"""What few steps cost a trained model: distilled by LCM and by DMD2, against simply drawing in fewer steps.

    python benchmarks/few_steps.py --out DIR [--seed 0] [--steps 2400] [--dmd2-steps 3000] [--toy]
    python benchmarks/few_steps.py --out DIR --run runs/emoji --store emoji.lance

Trains the quickstart's model (or takes the one that is in DIR/quickstart), or takes that of a run of
recipes/emoji.yaml, distils it with each method, and scores 50 steps of the teacher, and 4, 2 and 1 steps of
the teacher (the naive control) and of each student. Of the quickstart on its 64 captions that were never
seen, four pictures of each: the share whose colours and shape are right. Of emoji on 128 names it learned
from, two pictures of each: the share of all other names' pictures that are farther from it than Noto's
picture of its own name (`rank`, by chance a half), the share that none is nearer to (`nearest`), and its
fine detail over that of Noto's pictures, since fog is near to everything (`detail`: mean squares of what a
mean of 3 x 3 pixels takes off). And how near each picture is to the teacher's in 50 steps from the same
noise, which of several steps a student's share at the first alone. DMD2's student of four steps also draws
in two and one, at some of the same timesteps. One JSON line a finding, to DIR/few-steps.jsonl too. The same
command goes on where it was stopped. `--toy`: the same way in a minute, its pictures are fog.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from darkroom import models, sample
from darkroom.data import Store
from darkroom.hardware import machine
from darkroom.quickstart.journey import FULL, TOY, quickstart, score
from darkroom.quickstart.shapes import held_out
from darkroom.recipe import make_recipe, read_recipe
from darkroom.run import Run
from darkroom.sample.likeness import likeness
from darkroom.train import train
from darkroom.train.feed import select_rows

FEW = (4, 2, 1)
METHODS = ("lcm", "dmd2")
UNTRAINED = "teacher, drawn as a student"
NUM_NAMES = 128


@dataclass(frozen=True)
class Subject:
    """A trained model, what it learned from, and how its pictures are scored."""

    name: str
    teacher: Path
    data: dict[str, Any]
    captions: Sequence[str]
    guidance: float
    score: Callable[[Sequence[Image.Image]], dict[str, float]]


def shapes(args: argparse.Namespace) -> Subject:
    """The quickstart's model; trained where it is not there."""
    scale = TOY if args.toy else FULL
    print("the quickstart's model", flush=True)
    teacher = quickstart(Path(args.out) / "quickstart", seed=args.seed, scale=scale).model
    wanted = held_out(seed=args.seed)[: scale.num_prompts]

    def scores(images: Sequence[Image.Image]) -> dict[str, float]:
        found = score(images, wanted * args.seeds)
        return {name: getattr(found, name) for name in ("color_fidelity", "shape_fidelity", "all_fidelity")}

    store = Path(args.out) / "quickstart" / "pictures.lance"
    data = {"store": str(store), "resolution": 32}
    return Subject("quickstart", teacher, data, [one.caption for one in wanted], scale.guidance, scores)


def emoji(args: argparse.Namespace) -> Subject:
    """The model of a run of recipes/emoji.yaml; scored on names drawn at random from those it learned."""
    run, store = Run.open(args.run), Store.open(args.store)
    recipe = read_recipe(run.path / "recipe.yaml")
    learned, _ = select_rows(store, recipe.data)
    rows = store.take(learned.positions(np.arange(len(learned))), ["caption", "picture"]).to_pylist()
    names = [row["caption"] for row in rows]
    truths = torch.from_numpy(np.stack([on_white(row["picture"]) for row in rows]))
    chosen = sorted(np.random.default_rng(args.seed).choice(len(rows), NUM_NAMES, replace=False))
    captions = [names[i] for i in chosen]

    def scores(images: Sequence[Image.Image]) -> dict[str, float]:
        drawn = torch.from_numpy(np.stack([np.asarray(image, np.float32) for image in images]))
        apart = torch.cdist(drawn.flatten(1), truths.flatten(1))
        own = apart.gather(1, torch.tensor(list(chosen) * args.seeds)[:, None])
        return {
            "rank": float((apart > own).sum(dim=1).float().mean() / (len(rows) - 1)),
            "nearest": float((apart >= own).all(dim=1).float().mean()),
            "detail": float(detail(drawn) / detail(truths)),
        }

    data = {"store": str(args.store), "resolution": recipe.data.resolution, "filter": recipe.data.filter}
    guidance = recipe.sample.guidance
    return Subject("emoji", Path(run.model), data, captions, guidance, scores)


def on_white(encoded: bytes) -> np.ndarray:
    """A picture [H, W, 3], float32 levels, laid on white."""
    with Image.open(io.BytesIO(encoded)) as picture:
        white = Image.new("RGBA", picture.size, "white")
        laid = Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    return np.asarray(laid, dtype=np.float32)


def detail(pictures_BHWC: torch.Tensor) -> torch.Tensor:
    """Mean square of what a mean of 3 x 3 pixels takes off a batch of pictures [B, H, W, C]."""
    pixels = pictures_BHWC.permute(0, 3, 1, 2)
    smooth = torch.nn.functional.avg_pool2d(pixels, 3, stride=1)
    return (pixels[:, :, 1:-1, 1:-1] - smooth).square().mean()


def distilled(args: argparse.Namespace, subject: Subject, method: str) -> Path:
    """A student's model."""
    lcm = method == "lcm"
    guidance = subject.guidance if lcm else args.dmd2_guidance or subject.guidance
    distill: dict[str, Any] = {"method": method, "guidance_min": guidance, "guidance_max": guidance}
    if lcm:
        distill |= {"ddim_steps": args.ddim_steps, "distance": args.distance, "target": args.target}
    else:
        if args.dmd2_interval:
            low, high = args.dmd2_interval
            distill |= {"guidance_sigma_min": low, "guidance_sigma_max": high}
        names = ("fake_updates", "fake_lr", "gan_weight", "discriminator_weight")
        distill |= {"steps": max(FEW), **{name: getattr(args, name) for name in names}}
    steps = args.steps if lcm else args.dmd2_steps
    recipe = make_recipe(
        {
            "task": "distill",
            "model": {"base": str(subject.teacher)},
            "data": {**subject.data, "encode": "stored", "text": "inline"},
            "objective": {"distill": distill},
            "optim": {
                "lr": args.lr if lcm else args.dmd2_lr,
                "warmup_steps": min(50, steps),
                "lr_schedule": args.lr_schedule if lcm else args.dmd2_lr_schedule,
                "beta2": 0.99,
                "weight_decay": 0.0,
            },
            "train": {
                "steps": steps,
                "global_batch": 32,
                "precision": "float32",
                "seed": args.seed,
                "log_every": max(1, steps // 10),
                "ema": {"enabled": True, "decay": args.average if lcm else 0.995},
            },
            "checkpoint": {"every": max(1, steps // 4), "keep": 1},
        }
    )
    out = Path(args.out) / f"{subject.name}-{method}"
    return train(recipe, out=out, console=lambda line: print(line, flush=True)).model


def main() -> None:
    args = read_arguments()
    out = Path(args.out)
    subject = emoji(args) if args.run else shapes(args)
    rows = out / "few-steps.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    kept = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
    again = ("teacher", UNTRAINED, *(args.method or METHODS))
    kept = [line for line in kept if not is_again(json.loads(line), subject.name, again)]
    rows.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    firsts: list[Image.Image] = []

    def finding(model: Path, name: str, steps: int, **how: Any) -> None:
        opened = models.load(model)
        began = time.process_time()
        pictures = []
        for seed in range(args.seed, args.seed + args.seeds):
            pictures += sample.generate(
                opened, subject.captions, seed=seed, steps=steps, notice=lambda _: None, **how
            )
        spent = time.process_time() - began
        images = [picture.image for picture in pictures]
        alike = likeness(images, firsts) if firsts else {}
        firsts[:] = firsts or images
        show(images, out / f"{subject.name}-{name.replace(', ', '-').replace(' ', '-')}-{steps}.png")
        row = {
            "subject": subject.name,
            "model": name,
            "steps": steps,
            **subject.score(images),
            **{f"{key}_to_first": round(alike[key], 3) for key in ("psnr_db", "ssim") if alike},
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

    plain = {"guidance": subject.guidance, "solver": "dpmpp_2m"}
    for steps in (50, *FEW):
        finding(subject.teacher, "teacher", steps, **plain)
    # Its mean pictures, without guidance: blurred, and more often right than one guided step.
    for steps in FEW:
        finding(subject.teacher, UNTRAINED, steps, guidance=1.0, solver="lcm")
    for method in args.method or METHODS:
        student = distilled(args, subject, method)
        for steps in FEW:
            finding(student, method, steps)


def is_again(row: dict[str, Any], subject: str, models: Sequence[str]) -> bool:
    """Whether a row of before is made anew."""
    return row.get("subject", "quickstart") == subject and row["model"] in models


def show(images: Sequence[Image.Image], path: Path) -> None:
    """The first 24 pictures, twelve in a line, to look at."""
    width, height = images[0].size
    sheet = Image.new("RGB", (12 * width, 2 * height), "white")
    for i, image in enumerate(images[:24]):
        sheet.paste(image, (i % 12 * width, i // 12 * height))
    sheet.save(path)


def settings_of(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """What a student's row says of its training."""
    if name == "lcm":
        return {"train_steps": args.steps, "lr": args.lr} | {
            key: getattr(args, key) for key in ("lr_schedule", "ddim_steps", "target", "average", "distance")
        }
    if name != "dmd2":
        return {}
    names = (
        "dmd2_guidance",
        "dmd2_interval",
        "fake_lr",
        "fake_updates",
        "gan_weight",
        "discriminator_weight",
    )
    told = {"train_steps": args.dmd2_steps, "lr": args.dmd2_lr, "lr_schedule": args.dmd2_lr_schedule}
    return told | {key: getattr(args, key) for key in names}


def read_arguments() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, help="pictures of each caption; 4, of emoji 2")
    parser.add_argument(
        "--run", metavar="RUN", help="a run of recipes/emoji.yaml, in place of the quickstart"
    )
    parser.add_argument("--store", metavar="STORE", help="what that run learned from")
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
    parser.add_argument("--dmd2-lr-schedule", default="cosine", help="of DMD2, both networks")
    parser.add_argument("--fake-lr", type=float, help="of DMD2's second score; as the student's")
    parser.add_argument("--fake-updates", type=int, default=5, help="of DMD2: steps for each of the student")
    parser.add_argument("--dmd2-guidance", type=float, help="of DMD2's teacher; as it is drawn with")
    parser.add_argument(
        "--dmd2-interval",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="of DMD2's teacher: sigmas between which it is guided; all",
    )
    parser.add_argument("--gan-weight", type=float, default=0.0, help="of DMD2")
    parser.add_argument("--discriminator-weight", type=float, default=0.01, help="of DMD2's GAN loss")
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    if (args.run is None) is not (args.store is None):
        parser.error("--run and --store go together")
    args.seeds = args.seeds or (2 if args.run else 4)
    if args.toy:
        args.steps = args.dmd2_steps = 4
    return args


if __name__ == "__main__":
    main()
