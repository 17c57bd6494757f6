"""Grids and curves of a run of recipes/emoji.yaml: python benchmarks/emoji/pictures.py RUN STORE OUT

For names the model learned from (some chosen, some drawn at random) and for every caption that was held out:
Noto's own picture on top, three of the model's below, seeds 0 to 2, none chosen.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image

from darkroom import models, sample
from darkroom.data.store import Store
from darkroom.recipe import read_recipe
from darkroom.run import Run
from darkroom.train.feed import select_rows

matplotlib.use("agg")
from matplotlib import pyplot as plt

CHOSEN = (
    "red heart",
    "grinning face",
    "cat face",
    "angry face",
    "full moon",
    "red apple",
    "blue circle",
    "green square",
    "pizza",
    "birthday cake",
    "fire",
    "basketball",
    "strawberry",
    "star",
    "green book",
    "skull",
    "tooth",
    "mobile phone",
    "thumbs down",
    "horse face",
    "beer mug",
    "watch",
    "rocket",
    "octopus",
)
NUM_EACH, COLUMNS = 3, 12


def main(run_path: str, store_path: str, out_path: str) -> None:
    """Write held-in.png, held-in-random.png, held-out.png and curves.png into a folder."""
    run, store, out = Run.open(run_path), Store.open(store_path), Path(out_path)
    out.mkdir(parents=True, exist_ok=True)
    learned, held = (
        store.take(rows.positions(np.arange(len(rows))), ["caption", "picture"]).to_pylist()
        for rows in select_rows(store, read_recipe(run.path / "recipe.yaml").data)
    )
    model = models.load(run.model)
    by_name = {row["caption"]: row for row in learned}
    drawn = np.random.default_rng(0).choice(len(learned), len(CHOSEN), replace=False)
    grid(model, [by_name[name] for name in CHOSEN if name in by_name], out / "held-in.png")
    grid(model, [learned[i] for i in sorted(drawn)], out / "held-in-random.png")
    grid(model, held, out / "held-out.png")
    curves(run, out / "curves.png")


def grid(model: models.Model, rows: list[dict[str, object]], path: Path) -> None:
    """Noto's picture above the model's, each column with its caption."""
    captions = [str(row["caption"]) for row in rows]
    made = sample.generate(
        model, captions, num=NUM_EACH, guidance=3.0, steps=25, solver="dpmpp_2m", notice=lambda note: None
    )
    bands, height = -(-len(rows) // COLUMNS), NUM_EACH + 2
    ratios = [0.5, *[1] * (NUM_EACH + 1)] * bands  # room for the captions above every band
    size = (COLUMNS * 0.72, sum(ratios) * 0.73)
    figure, axes = plt.subplots(bands * height, COLUMNS, figsize=size, height_ratios=ratios)
    for ax in axes.flat:
        ax.axis("off")
    for i, row in enumerate(rows):
        top, column = i // COLUMNS * height + 1, i % COLUMNS
        with Image.open(io.BytesIO(row["picture"])) as truth:  # type: ignore[arg-type]
            white = Image.new("RGBA", truth.size, "white")
            axes[top, column].imshow(Image.alpha_composite(white, truth.convert("RGBA")))
        axes[top, column].set_title(wrapped(captions[i]), fontsize=5, pad=2)
        for j in range(NUM_EACH):
            axes[top + 1 + j, column].imshow(made[NUM_EACH * i + j].image)
    figure.subplots_adjust(0.005, 0.005, 0.995, 0.995, wspace=0.06, hspace=0.06)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(255).save(path, optimize=True)


def wrapped(caption: str, width: int = 15) -> str:
    """At most two lines."""
    lines = [""]
    for word in caption.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width and len(lines) < 2:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(line if len(line) <= width + 4 else line[: width + 1] + "..." for line in lines)


def curves(run: Run, path: Path) -> None:
    """Training loss (smoothed) and the held-out loss, by step; and the held-out loss by timestep."""
    rows = run.metrics()
    steps = [row["step"] for row in rows if "loss" in row]
    losses = np.array([row["loss"] for row in rows if "loss" in row])
    held = [row for row in rows if "heldout_loss" in row]
    window = np.ones(100) / 100
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
    left.plot(steps[99:], np.convolve(losses, window, mode="valid"), label="training, mean of 100 steps")
    left.plot([row["step"] for row in held], [row["heldout_loss"] for row in held], "o-", label="held out")
    left.set(xlabel="step", ylabel="loss (v)", ylim=(0.15, 0.6))
    left.legend(frameon=False)
    timesteps = list(held[0]["heldout_loss_by_timestep"])
    for timestep, shade in zip(timesteps, plt.get_cmap("viridis")(np.linspace(0, 0.9, 8)), strict=True):
        losses_at = [row["heldout_loss_by_timestep"][timestep] for row in held]
        right.plot([row["step"] for row in held], losses_at, color=shade, label=f"t {timestep}")
    right.set(xlabel="step", ylabel="held-out loss by timestep", ylim=(0, 1))
    right.legend(frameon=False, ncol=2, fontsize=7)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(*sys.argv[1:])
