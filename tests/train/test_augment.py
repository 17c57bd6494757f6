"""Colours that vary, and class pictures beside a subject's of many shapes."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from subjects import check_resumes_exactly, recipe_for

from darkroom.data.images import ColourChange
from darkroom.errors import RecipeError
from darkroom.train.jobs import Pinned
from darkroom.train.setup import make_job

KEY = 12345


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8))


def changed(**most: float) -> np.ndarray:
    return np.asarray(ColourChange(**most).applied(picture(), KEY)).astype(float)


def drawn() -> list[float]:
    """What the key draws for brightness, contrast, saturation, hue and gamma, from -1 to 1."""
    return [2 * n - 1 for n in np.random.Generator(np.random.Philox(key=KEY)).random(6)[1:]]


def test_each_change_is_its_formula() -> None:
    x = np.asarray(picture()).astype(float)
    grey = np.floor((19595 * x[..., 0] + 38470 * x[..., 1] + 7471 * x[..., 2] + 32768) / 65536)
    bright, contrast, saturation, _, gamma = drawn()
    expected = {
        "brightness": x * (1 + 0.5 * bright),
        "contrast": (mean := round(grey.mean())) + (1 + 0.5 * contrast) * (x - mean),
        "saturation": grey[..., None] + (1 + 0.5 * saturation) * (x - grey[..., None]),
        "gamma": 255 * (x / 255) ** (1 + 0.5 * gamma),
    }
    for name, wanted in expected.items():
        found = changed(**{name: 0.5})
        assert np.abs(found - wanted.clip(0, 255)).max() <= 1.01, name
        assert np.abs(found - x).max() > 5, name


def test_a_hue_is_turned_by_as_much_as_was_drawn() -> None:
    colour = (200, 40, 40)
    plain = Image.new("RGB", (2, 2), colour)
    found = ColourChange(hue=0.25).applied(plain, KEY).getpixel((0, 0))
    assert isinstance(found, tuple)
    before, after = (colorsys.rgb_to_hsv(*(one / 255 for one in c)) for c in (colour, found))
    assert (after[0] - before[0]) % 1 == pytest.approx((0.25 * drawn()[3]) % 1, abs=0.01)
    assert after[1:] == pytest.approx(before[1:], abs=0.02)


def test_a_share_of_pictures_is_left_alone_and_none_where_nothing_varies() -> None:
    x = np.asarray(picture())
    colour = ColourChange(brightness=0.5, share=0.3)
    same = [np.array_equal(colour.applied(picture(), key), x) for key in range(300)]
    assert np.mean(same) == pytest.approx(0.7, abs=0.08)
    assert not ColourChange().changes
    assert not ColourChange(hue=0.1, share=0.0).changes


AUGMENT = "data.augment={brightness: 0.3, contrast: 0.3, saturation: 0.3, hue: 0.1, gamma: 0.2}"


def pixels(base: Path, photos: Path, tmp_path: Path, *overrides: str) -> list[dict[str, Any]]:
    job = make_job(recipe_for("lora", base, photos, *overrides), Pinned(tmp_path / str(len(overrides))))
    assert job.task.read.latents is None
    with job.feed(0) as batches:
        return [dict(next(batches)) for _ in range(2)]


def test_pictures_vary_alike_each_time_they_are_read_and_held_out_ones_do_not(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    plain = pixels(base, photos, tmp_path, "data.encode=inline")
    varied = pixels(base, photos, tmp_path, AUGMENT, "data.holdout=1", "data.workers=1")
    again = pixels(
        base, photos, tmp_path, AUGMENT, "data.holdout=1", "data.workers=2", "data.prefetch_batches=1"
    )
    assert all(torch.equal(a["pixels"], b["pixels"]) for a, b in zip(varied, again, strict=True))
    assert not any(torch.equal(a["pixels"], b["pixels"]) for a, b in zip(varied, plain, strict=True))
    held = {}
    for name, more in {"plain": ("data.encode=inline",), "varied": (AUGMENT,)}.items():
        recipe = recipe_for("lora", base, photos, "data.holdout=1", *more)
        held[name] = make_job(recipe, Pinned(tmp_path / name)).heldout
    assert held["plain"] is not None
    assert held["varied"] is not None
    assert torch.equal(held["plain"]["latents"], held["varied"]["latents"])


def test_a_run_whose_colours_vary_resumes_to_the_bit(base: Path, photos: Path, tmp_path: Path) -> None:
    check_resumes_exactly(
        lambda *more: recipe_for("lora", base, photos, AUGMENT, *more),
        tmp_path,
        control=("data.augment.hue=0",),
    )


def test_prepared_latents_are_refused() -> None:
    recipe = recipe_for("lora", Path("a"), Path("b"), AUGMENT, "data.encode=stored")
    with pytest.raises(
        RecipeError, match=r"data.augment: given, but prepared latents .* set data.encode=inline"
    ):
        recipe.check(1)


# ---- buckets with prior preservation

PRIOR = ("data.class_prompt=a photo of a dog", "data.num_class_images=2", "data.buckets=true")


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """A subject's pictures, wide and tall."""
    folder = tmp_path / "subject"
    folder.mkdir()
    draws = np.random.default_rng(0)
    for i, (width, height) in enumerate([(96, 48), (96, 48), (48, 96), (48, 96)]):
        pixels = draws.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


@pytest.fixture
def of_class(tmp_path: Path) -> Path:
    folder = tmp_path / "class"
    folder.mkdir()
    for i in range(2):
        Image.new("RGB", (64, 64), (90 * i, 200, 30)).save(folder / f"{i}.png")
    return folder


def test_class_pictures_take_the_shape_of_the_subjects(
    base: Path, shapes: Path, of_class: Path, tmp_path: Path
) -> None:
    overrides = (*PRIOR, f"data.class_images={of_class}", "train.global_batch=2", "train.micro_batch=2")
    job = make_job(recipe_for("dreambooth-lora", base, shapes, *overrides), Pinned(tmp_path / "run"))
    seen = set()
    with job.feed(0) as batches:
        for _ in range(6):
            columns = next(batches)
            inputs = job.task.inputs(columns, job.device)
            assert columns["is_prior"].tolist() == [False, True] * 2
            prior = columns["pixels"][1::2]
            assert set(prior[:, 1].unique().tolist()) == {200}  # whole, without a border
            seen.add(tuple(inputs["latents"].shape[-2:]))
            assert set(job.task.losses(inputs)) == {"loss", "subject_loss", "prior_loss"}
    assert len(seen) == 2
    assert all(height != width for height, width in seen)


def test_such_a_run_resumes_to_the_bit(base: Path, shapes: Path, of_class: Path, tmp_path: Path) -> None:
    check_resumes_exactly(
        lambda *more: recipe_for(
            "dreambooth-lora", base, shapes, *PRIOR, f"data.class_images={of_class}", *more
        ),
        tmp_path / "runs",
        control=("data.prior_weight=0.2",),
    )


def test_stored_latents_of_another_shape_are_refused() -> None:
    with pytest.raises(RecipeError, match="data.encode: stored with data.buckets and data.class_prompt"):
        recipe_for("dreambooth-lora", Path("a"), Path("b"), *PRIOR, "data.encode=stored")
