"""What the U-Net is given: shifted latents, and SDXL's sizes and corners, as diffusers has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from darkroom import models
from darkroom.data.images import resize_crop
from darkroom.data.importers.job import import_pictures
from darkroom.data.store import Store
from darkroom.prepare.job import prepare
from darkroom.recipe import make_recipe
from darkroom.train.jobs import Pinned, TrainingSetup
from darkroom.train.setup import make_job
from darkroom.train.tasks.diffusion import size_conditioning

SIDE = 32
SIZES = [(96, 40), (40, 96), (50, 33), (32, 32), (16, 24), (133, 67), (64, 64), (31, 90)]
SHIFT = {"scaling_factor": 1.5, "shift_factor": 0.375}


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right and green downwards, so that a cut tells where it is from."""
    x, y = (np.arange(n) + 0.5 for n in (width, height))
    red, green = np.broadcast_to(255 * x / width, (height, width)), 255 * y[:, None] / height
    colours = np.stack([red, np.broadcast_to(green, (height, width)), np.zeros((height, width))], axis=2)
    return Image.fromarray(colours.round().astype(np.uint8))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sizes")
    (folder / "in").mkdir()
    for i, size in enumerate(SIZES):
        gradient(*size).save(folder / "in" / f"{i}.png")
        (folder / "in" / f"{i}.txt").write_text(f"picture {i}")
    import_pictures(folder / "in", Store.create(folder / "pictures.lance"))
    assert Store.open(folder / "pictures.lance").num_rows == len(SIZES)
    return folder / "pictures.lance"


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of SDXL's build, whose VAE has a shift."""
    tokenizer = models.train_tokenizer(["picture 0 1 2 3 4 5 6 7"] * 3, vocab_size=600)
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"projection_dim": 16, "vocab_size": len(tokenizer), "eos_token_id": len(tokenizer) - 1}
    unet = {
        "block_out_channels": [8, 16, 16],
        "transformer_layers_per_block": [1, 1, 1],
        "layers_per_block": 1,
    }
    unet |= {"norm_num_groups": 4, "attention_head_dim": 4, "cross_attention_dim": 32, "sample_size": 8}
    unet |= {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 16 + 6 * 8}
    vae = {"block_out_channels": [8, 8, 8], "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 32}
    overrides = {"unet": unet, "vae": vae | SHIFT, "text_encoder": text, "text_encoder_2": text}
    folder = tmp_path_factory.mktemp("sdxl") / "model"
    models.save(models.create("sdxl", seed=1, tokenizer=tokenizer, overrides=overrides), folder)
    return folder


def job_of(base: Path, store: Path, *overrides: str) -> TrainingSetup:
    content = {
        "task": "finetune",
        "model": {"base": str(base)},
        "data": {"store": str(store), "resolution": SIDE, "encode": "inline"},
        "train": {"steps": 4, "global_batch": 8, "precision": "float32", "micro_batch": 8},
    }
    return make_job(make_recipe(content, overrides), Pinned(Path("nowhere")))


def batches(
    job: TrainingSetup, count: int = 1
) -> Iterator[tuple[Mapping[str, Any], dict[str, torch.Tensor]]]:
    """Columns as they are read, and the task's inputs of them."""
    with job.feed(0) as feed:
        for _ in range(count):
            columns = next(feed)
            yield columns, job.task.inputs(columns, job.device)


def diffusers_row(width: int, height: int) -> list[float]:
    """`preprocess_train` of diffusers' train_text_to_image_sdxl.py with --center_crop, and its time ids.

    torchvision's Resize brings the shorter side to SIDE and cuts the other's fraction off.
    """
    short, long = sorted((width, height))
    resized = SIDE, int(SIDE * long / short)
    resized_width, resized_height = resized if width <= height else resized[::-1]
    y1 = max(0, round((resized_height - SIDE) / 2.0))
    x1 = max(0, round((resized_width - SIDE) / 2.0))
    original_size, crop_top_left, target_size = (height, width), (y1, x1), (SIDE, SIDE)
    return list(map(float, original_size + crop_top_left + target_size))


def test_each_rows_size_and_corner_are_diffusers(sdxl: Path, store: Path) -> None:
    ((columns, inputs),) = batches(job_of(sdxl, store))
    rows = list(zip(columns["width"].tolist(), columns["height"].tolist(), strict=True))
    assert sorted(rows) == sorted(SIZES)
    assert inputs["time_ids"].tolist() == [diffusers_row(*size) for size in rows]
    told = set(map(tuple, inputs["time_ids"].tolist()))
    assert len(told) == len(SIZES)  # not the same of all, as it was
    assert (40.0, 96.0, 0.0, 22.0, 32.0, 32.0) in told


@pytest.mark.parametrize("flip", ["false", "true"])
def test_a_random_cuts_corner_is_where_its_pixels_are_from(sdxl: Path, store: Path, flip: str) -> None:
    found = batches(job_of(sdxl, store, "data.crop=random", f"data.flip={flip}"), count=3)
    corners = set()
    for columns, inputs in found:
        mirrored = columns.get("mirrored", torch.zeros(8, dtype=torch.bool))
        for pixels, ids, turned in zip(columns["pixels"], inputs["time_ids"], mirrored, strict=True):
            height, width, top, left, *target = ids.tolist()
            assert target == [SIDE, SIDE]
            scale = SIDE / min(width, height)
            red, green = (pixels[i].float().mean() / 255 for i in (0, 1))  # the cut's middle, in shares
            middle = (1 - red if turned else red) * width * scale
            assert middle - SIDE / 2 == pytest.approx(left, abs=1.1)
            assert green * height * scale - SIDE / 2 == pytest.approx(top, abs=1.1)
            corners.add((top, left))
    assert len(corners) > 10


def test_buckets_and_prepared_latents_are_cut_at_the_centre(sdxl: Path, store: Path) -> None:
    """The bucket's size is the target; with latents there are no pixels, and the corner is the same."""
    prepare(store, sdxl, resolution=64, bucket_step=16, device="cpu", batch_rows=4)
    one, seen = ("data.buckets=true", "data.resolution=64", "train.steps=8", "train.global_batch=1"), {}
    for encode in ("inline", "stored"):
        job = job_of(sdxl, store, *one, "train.micro_batch=1", f"data.encode={encode}")
        found = [inputs["time_ids"][0].tolist() for _, inputs in batches(job, count=8)]
        seen[encode] = found
        for height, width, top, left, *target in found:
            cut = resize_crop(gradient(int(width), int(height)), (int(target[1]), int(target[0])))
            scale = max(target[1] / width, target[0] / height)
            red, green, _ = np.asarray(cut, dtype=float).mean(axis=(0, 1)) / 255
            assert red * width * scale - target[1] / 2 == pytest.approx(left, abs=1.1)
            assert green * height * scale - target[0] / 2 == pytest.approx(top, abs=1.1)
        assert len({tuple(target) for *_, a, b in found for target in [(a, b)]}) > 1
    assert seen["inline"] == seen["stored"]


def test_held_out_rows_of_prepared_buckets_are_of_one_size(sdxl: Path, store: Path) -> None:
    """They are measured in one batch: with `data.buckets=true` the run was refused for want of it."""
    prepare(store, sdxl, resolution=64, bucket_step=16, device="cpu", batch_rows=4)
    told = ("data.buckets=true", "data.resolution=64", "data.encode=stored", "train.global_batch=2")
    job = job_of(sdxl, store, *told, "train.micro_batch=2", "data.holdout=4")
    assert job.heldout is not None
    sizes, shape = job.heldout["time_ids"], job.heldout["latents"].shape
    factor = job.task.model.vae_factor
    assert sizes[:, 4:].tolist() == [[factor * shape[2], factor * shape[3]]] * len(sizes)
    [note] = [note for note in job.notes if note.startswith("held-out loss")]
    assert note == f"held-out loss: of {len(sizes)} of 4 rows, the most frequent bucket's"
    square = job_of(sdxl, store, "data.holdout=4", "train.global_batch=2", "train.micro_batch=2")
    assert square.heldout is not None
    assert len(square.heldout["latents"]) == 4
    assert not any(note.startswith("held-out loss") for note in square.notes)


@pytest.mark.parametrize("buckets", ["false", "true"])
def test_class_pictures_have_their_own_sizes_and_corners(
    sdxl: Path, store: Path, buckets: str, tmp_path: Path
) -> None:
    """Beside a subject's of other shapes: their size, their cut, and the target of the batch they are in."""
    (tmp_path / "class").mkdir()
    of_class = [(80, 44), (37, 90), (72, 72)]
    for i, size in enumerate(of_class):
        gradient(*size).save(tmp_path / "class" / f"{i}.png")
    content = {
        "task": "dreambooth-lora",
        "model": {"base": str(sdxl)},
        "data": {
            "store": str(store),
            "encode": "inline",
            "resolution": 64,
            "prompt": "picture 0",
            "class_prompt": "picture 1",
            "class_images": str(tmp_path / "class"),
            "num_class_images": 3,
            "crop": "centre" if buckets == "true" else "random",
            "buckets": buckets == "true",
            "flip": True,
        },
        "train": {"steps": 9, "global_batch": 1, "precision": "float32", "micro_batch": 1},
    }
    job = make_job(make_recipe(content), Pinned(tmp_path / "run"))
    corners, targets = set(), set()
    for columns, inputs in batches(job, count=9):
        assert inputs["is_prior"].tolist() == [0, 1]
        both = zip(columns["pixels"], inputs["time_ids"], columns["mirrored"], (False, True), strict=True)
        for pixels, ids, turned, is_prior in both:
            height, width, top, left, *target = ids.tolist()
            assert ((width, height) in of_class) == is_prior
            assert target == list(pixels.shape[1:])
            scale = max(target[1] / width, target[0] / height)
            red, green = (pixels[i].float().mean() / 255 for i in (0, 1))
            middle = (1 - red if turned else red) * width * scale
            assert middle - target[1] / 2 == pytest.approx(left, abs=1.5)
            assert green * height * scale - target[0] / 2 == pytest.approx(top, abs=1.5)
            if is_prior:
                corners.add((top, left))
            targets.add(tuple(target))
    assert len(corners) > 4
    assert (len(targets) > 1) == (buckets == "true")


def test_a_corner_by_hand() -> None:
    columns = {
        "width": torch.tensor([100, 100, 30]),
        "height": torch.tensor([50, 50, 90]),
        "cut_at": torch.tensor([[0.25, 0.9], [0.25, 0.9], [0.5, 1.0]], dtype=torch.float64),
        "mirrored": torch.tensor([False, True, False]),
    }
    assert size_conditioning(columns, (64, 32)).tolist() == [
        [50, 100, 0, 24, 64, 32],  # scaled to 128 x 64, of which 96 stand over
        [50, 100, 0, 72, 64, 32],
        [90, 30, 32, 0, 64, 32],  # scaled to 32 x 96
    ]


@pytest.mark.parametrize("encode", ["inline", "stored"])
def test_latents_are_shifted_then_scaled(sdxl: Path, store: Path, encode: str) -> None:
    """z = (latents - shift_factor) * scaling_factor, whether encoded at the step or read from the store."""
    if encode == "stored":
        prepare(store, sdxl, resolution=SIDE, device="cpu", batch_rows=4)
        noted = [c for c in Store.open(store).columns().values() if c.get("darkroom.crop") == "centre"]
        assert (noted[0]["darkroom.scale"], noted[0]["darkroom.shift"]) == ("1.5", "[0.375]")
    ((columns, inputs),) = batches(job_of(sdxl, store, f"data.encode={encode}"))
    job = job_of(sdxl, store)
    mean, std = job.task._moments(columns).float().unbind(1)  # type: ignore[attr-defined]
    if encode == "stored":
        mean, std = columns["moments"].float().unbind(1)
    expected = (mean + std * columns["posterior"] - 0.375) * 1.5
    assert torch.allclose(inputs["latents"], expected, atol=1e-5)
    assert not torch.allclose(inputs["latents"], expected + 0.375 * 1.5, atol=0.1)
