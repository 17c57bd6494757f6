"""The shipped emoji recipes on the real emoji, a few steps of each: the losses fall, pictures come out."""

from __future__ import annotations

import json
import zipfile
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


def learn(emoji: Path, vae_settings: list[str], settings: list[str]) -> tuple[float, float]:
    """By how much the held-out losses of the autoencoder and the U-Net fall: the last over the first."""
    darkroom("import", emoji, "emoji.lance", "--json")
    quick = ["optim.warmup_steps=4", "sample.every=0", "--json"]
    darkroom("train", RECIPES / "emoji-autoencoder.yaml", *vae_settings, *quick)
    model = "runs/emoji-autoencoder/model"
    darkroom("prepare", "emoji.lance", "--model", model, "--resolution", 64, "--json")
    darkroom("train", RECIPES / "emoji.yaml", *settings, "sample.prompts=[pizza]", *quick)
    darkroom("generate", "runs/emoji/model", "pizza", "--steps", 4, "--num", 2, "--out", "pictures")
    assert len(list(Path("pictures").glob("*.png"))) == 3  # two pictures and their grid
    vae, unet = (heldout_losses(Path("runs") / name) for name in ("emoji-autoencoder", "emoji"))
    return vae[-1] / vae[0], unet[-1] / unet[0]


@pytest.fixture
def some_emoji(shared_data, tmp_path, monkeypatch) -> Path:
    """Two hundred of the emoji with their captions, in the layout that they came in."""
    monkeypatch.chdir(tmp_path)
    found, folder = shared_data / "noto_emoji_64", tmp_path / "emoji"
    folder.mkdir()
    lines = (found / "captions.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    (folder / "captions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with zipfile.ZipFile(found / "images.zip") as every, zipfile.ZipFile(folder / "images.zip", "w") as some:
        names = {Path(name).name: name for name in every.namelist()}
        for line in lines:
            name = json.loads(line)["file_name"]
            some.writestr(names[name], every.read(names[name]))
    return folder


TOY = ["train.steps=24", "train.global_batch=8", "evaluate.every=12", "evaluate.rows=4"]
TOY_TEXT = "{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"


def test_the_emoji_recipes_learn_at_toy_size(some_emoji):
    small_vae = ["model.vae.block_out_channels=[8,8,16,16]", "model.vae.norm_num_groups=8"]
    small_unet = ["model.unet.block_out_channels=[16,32]", "model.unet.norm_num_groups=8"]
    small_unet += [
        "model.unet.attention_head_dim=8",
        f"model.text_encoder={TOY_TEXT}",
        "model.vocab_size=600",
    ]
    vae, unet = learn(some_emoji, small_vae + TOY, small_unet + TOY)
    assert vae < 0.7
    assert unet < 0.9


@pytest.mark.nightly
def test_the_emoji_recipes_learn(shared_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = ["train.steps=20", "train.global_batch=16", "evaluate.every=10", "evaluate.rows=32"]
    vae, unet = learn(shared_data / "noto_emoji_64", steps, steps)
    assert vae < 0.7
    assert unet < 0.85
