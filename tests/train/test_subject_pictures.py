"""The pictures of a fine-tuning run: its folder's, their masks, and those of the class."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from subjects import SIDE, recipe_for

from darkroom.data.importers import import_pictures
from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.prepare.job import prepare
from darkroom.train.jobs import Pinned
from darkroom.train.run import sweep, train
from darkroom.train.setup import make_job


def test_masks_are_cut_and_mirrored_with_their_pictures(base: Path, tmp_path: Path) -> None:
    """A mask beside a picture that looks like it stays like it, whatever the draws."""
    folder = tmp_path / "alike"
    folder.mkdir()
    alike = Image.new("RGB", (3 * SIDE, SIDE))
    for i in range(6):  # brighter to the right, in steps of a latent pixel
        alike.paste((45 * i + 20,) * 3, (i * SIDE // 2, 0, (i + 1) * SIDE // 2, SIDE))
    alike.save(folder / "a.png")
    alike.convert("L").save(folder / "a.mask.png")
    draws = ("data.flip=true", "data.crop=random", "train.global_batch=8", "train.micro_batch=8")
    job = make_job(recipe_for("lora", base, folder, *draws), Pinned(tmp_path / "run"))
    with job.feed(0) as batches:
        columns = next(batches)
    assert 0 < columns["mirrored"].sum() < 8
    pixels = columns["pixels"][:, :1].float() / 255
    factor = job.task.model.vae_factor
    expected = torch.nn.functional.avg_pool2d(pixels, factor)
    torch.testing.assert_close(job.task.inputs(columns, job.device)["mask"], expected, atol=0.02, rtol=0)


def test_class_pictures_beside_a_prepared_store(base: Path, photos: Path, tmp_path: Path) -> None:
    """They are read as the subject's are: as latents of the same column."""
    store = Store.create(tmp_path / "dog.lance")
    import_pictures(photos, store, on_missing_caption="keep")
    prepare(store, str(base), resolution=SIDE)
    settings = (
        "data.instance=null",
        f"data.store={store.path}",
        "data.encode=stored",
        "data.class_prompt=a photo of a dog",
        "data.num_class_images=2",
        "train.steps=2",
    )
    said: list[str] = []
    recipe = recipe_for("dreambooth-lora", base, photos, *settings)
    assert train(recipe, out=tmp_path / "run", console=said.append).steps == 2
    assert next(line for line in said if line.startswith("latents of")).startswith("latents of 2 pictures")


def test_own_class_pictures_are_counted_as_they_are_imported(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    """In subfolders too, and masks not."""
    folder = tmp_path / "dogs"
    shutil.copytree(photos, folder / "mine")
    for path in sorted((folder / "mine").glob("*.png"))[:3]:
        shutil.copy(path, path.with_suffix(".mask.png"))
    before = sorted(folder.rglob("*"))
    settings = ("data.class_prompt=a photo of a dog", f"data.class_images={folder}")
    said: list[str] = []
    enough = recipe_for("dreambooth-lora", base, photos, *settings, "data.num_class_images=5")
    make_job(enough, Pinned(tmp_path / "run"), say=said.append)
    assert f"5 class pictures in {folder}, 5 are used" in said
    assert sorted(folder.rglob("*")) == before


def test_runs_share_class_pictures_that_are_alike(base: Path, photos: Path, tmp_path: Path) -> None:
    prior = ("data.class_prompt=a photo of a dog", "data.num_class_images=1", "train.steps=1")
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_for("dreambooth-lora", base, photos, *prior).dump())
    several = ["data.resolution=32,64", "optim.lr=1e-3,2e-3"]
    assert len(sweep(file, several, out=tmp_path / "sweep", console=lambda _: None)) == 4
    sides = sorted(Image.open(path).width for path in (tmp_path / "sweep").glob("class-*/*.png"))
    assert sides == [32, 64]
    # As many as are wanted are there, but of another size.
    folder = next(path.parent for path in (tmp_path / "sweep").glob("class-*/*.png"))
    side = 96 - Image.open(next(folder.glob("*.png"))).width
    other = (*prior, f"data.class_images={folder}", f"data.resolution={side}")
    with pytest.raises(
        RecipeError, match=r"data.class_images: the pictures in .* with another side \(\d\d\)"
    ):
        make_job(recipe_for("dreambooth-lora", base, photos, *other), Pinned(tmp_path / "run"))


def test_folders_say_how_often_their_pictures_come(base: Path, photos: Path, tmp_path: Path) -> None:
    files = sorted(photos.glob("*.png"))
    for name, some in (("5_sks dog", files[:2]), ("1_more", files[2:4]), ("others", files[4:])):
        (tmp_path / "kohya" / name).mkdir(parents=True)
        for file in some:
            shutil.copy(file, tmp_path / "kohya" / name)
    recipe = recipe_for("lora", base, tmp_path / "kohya", "data.repeats=folders")
    job = make_job(recipe, Pinned(tmp_path / "run"))
    assert job.rows == 5 * 2 + 1 * 3  # pictures an epoch
    assert job.rows_of is not None
    keys = Store.open(tmp_path / "run" / "data" / "pictures.lance").take(range(5), ["key"])["key"].to_pylist()
    came = Counter(keys[row] for k in range(13 * 5) for row in job.rows_of(k))  # ten epochs
    assert {key: count for key, count in came.items() if key.startswith("5_")} == pytest.approx(
        {f"5_sks dog/{file.name}": 50 for file in files[:2]}, abs=2
    )
    assert sum(came.values()) == 130
    assert max(count for key, count in came.items() if not key.startswith("5_")) <= 12
    with job.feed(0) as batches:
        assert job.task.inputs(next(batches), job.device)["latents"].shape[0] == 2
    with pytest.raises(RecipeError, match="data.repeats: folders, but no folder is named like '10_sks dog'"):
        make_job(recipe_for("lora", base, photos, "data.repeats=folders"), Pinned(tmp_path / "none"))
