"""The pictures of a fine-tuning run: its folder's, their masks, and those of the class."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from subjects import SIDE, recipe_for

from darkroom.data import Store
from darkroom.data.importers import import_pictures
from darkroom.prepare import prepare
from darkroom.train import Pinned, make_job, train


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
