"""The shipped emoji recipes on the real emoji, a few steps of each: the losses fall, pictures come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from darkroom import cli

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def darkroom(*arguments: object) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    assert left.value.code == 0


def heldout_losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["heldout_loss"] for row in rows if "heldout_loss" in row]


@pytest.mark.nightly
def test_the_emoji_recipes_learn(shared_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    darkroom("import", shared_data / "noto_emoji_64", "emoji.lance", "--json")
    small_vae = ["train.steps=40", "optim.warmup_steps=10", "evaluate.every=20", "evaluate.rows=32"]
    darkroom("train", RECIPES / "emoji-autoencoder.yaml", *small_vae, "sample.every=0", "--json")
    vae = heldout_losses(Path("runs/emoji-autoencoder"))
    assert vae[-1] < 0.6 * vae[0]

    model = "runs/emoji-autoencoder/model"
    darkroom("prepare", "emoji.lance", "--model", model, "--resolution", 64, "--json")
    small_unet = ["train.steps=40", "optim.warmup_steps=10", "evaluate.every=20", "evaluate.rows=64"]
    darkroom(
        "train", RECIPES / "emoji.yaml", *small_unet, "sample.every=0", "sample.prompts=[pizza]", "--json"
    )
    unet = heldout_losses(Path("runs/emoji"))
    assert unet[-1] < 0.8 * unet[0]

    darkroom("generate", "runs/emoji/model", "pizza", "--steps", 4, "--num", 2, "--out", "pictures")
    assert len(list(Path("pictures").glob("*.png"))) == 3  # two pictures and their grid
