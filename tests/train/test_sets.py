"""Several folders in one run, each with its own repeats, captions, resolution and weight of the loss."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from subjects import check_resumes_exactly, recipe_for

from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.recipe import Recipe
from darkroom.train.jobs import Pinned
from darkroom.train.setup import make_job


@pytest.fixture(scope="module")
def sets(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three dogs without captions that come four times, and two red squares with captions."""
    root = tmp_path_factory.mktemp("sets")
    for name in ("dogs", "squares"):
        (root / name).mkdir()
    for path in sorted(photos.iterdir())[:3]:
        shutil.copy(path, root / "dogs" / path.name)
    for i in range(2):
        Image.new("RGB", (40 + i, 40), (200, 30, 30)).save(root / "squares" / f"{i}.png")
        (root / "squares" / f"{i}.txt").write_text(f"a red square {i}")
    return [
        {"folder": str(root / "dogs"), "repeats": 4, "prompt": "a dog"},
        {"folder": str(root / "squares"), "loss_weight": 0.25},
    ]


def recipe_of(base: Path, sets: list[dict[str, Any]], *overrides: str, **data: Any) -> Recipe:
    content = {"resolution": 32, "sets": sets, "encode": "auto", **data}
    return recipe_for("lora", base, Path(), *overrides, data=content)


def test_each_set_has_its_repeats_captions_and_weight(
    base: Path, sets: list[dict[str, Any]], tmp_path: Path
) -> None:
    job = make_job(
        recipe_of(base, sets, "train.global_batch=7", "train.micro_batch=7"), Pinned(tmp_path / "run")
    )
    assert job.rows == 3 * 4 + 2
    captions: Counter[str] = Counter()
    with job.feed(0) as batches:
        for _ in range(6):
            columns = next(batches)
            captions.update(columns["caption"])
            weights = [1.0 if caption == "a dog" else 0.25 for caption in columns["caption"]]
            assert columns["loss_weight"].tolist() == weights
    assert captions["a dog"] == 6 * 6  # 12 of 14
    assert captions["a red square 0"] == captions["a red square 1"] == 3
    inputs = job.task.inputs(columns, job.device)
    found = job.task.losses(inputs)["loss"]
    plain = job.task.losses({key: value for key, value in inputs.items() if key != "loss_weight"})["loss"]
    torch.testing.assert_close(found, plain * torch.tensor(weights))
    assert not torch.allclose(found, plain)


def test_sets_of_several_resolutions_come_in_batches_of_one(
    base: Path, sets: list[dict[str, Any]], tmp_path: Path
) -> None:
    mixed = [sets[0], {**sets[1], "resolution": 16, "repeats": 6}]
    job = make_job(recipe_of(base, mixed, "train.steps=12"), Pinned(tmp_path / "run"))
    shapes: Counter[int] = Counter()
    with job.feed(0) as batches:
        for _ in range(12):
            columns = next(batches)
            shapes[columns["pixels"].shape[-1]] += 1
            assert len({caption == "a dog" for caption in columns["caption"]}) == 1
            side = 32 if columns["caption"][0] == "a dog" else 16
            assert columns["pixels"].shape[-2:] == (side, side)
            inputs = job.task.inputs(columns, job.device)
            assert inputs["noise"].shape == inputs["latents"].shape
    assert shapes == {32: 6, 16: 6}  # as their repeats weigh: 12 to 12


def test_a_run_of_several_sets_resumes_to_the_bit(
    base: Path, sets: list[dict[str, Any]], tmp_path: Path
) -> None:
    other = [{**sets[0], "repeats": 1}, sets[1]]
    run = check_resumes_exactly(
        lambda *more: recipe_of(
            base, other if "control" in more else sets, *(m for m in more if m != "control")
        ),
        tmp_path,
        control=("control",),
    )
    assert (run / "adapter.safetensors").is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeats": 3}, "data.repeats: 3 with data.sets; say repeats in each set"),
        ({"resolution": 16}, r"data.sets.0.resolution: 32 is more than data.resolution 16"),
        ({"encode": "stored"}, "data.encode: stored with sets of several resolutions"),
        ({"folder": "x"}, "folder and sets are both given"),
        ({"text": "stored"}, "data.text: stored, but with data.sets"),
    ],
)
def test_impossible_pairs_are_refused(change: dict[str, Any], message: str) -> None:
    sets = [{"folder": "a", "resolution": 32}, {"folder": "b", "resolution": 16}]
    with pytest.raises(RecipeError, match=message):
        recipe_of(Path("nowhere"), sets, **change)


def test_a_set_without_pictures_or_captions_is_named(
    base: Path, sets: list[dict[str, Any]], tmp_path: Path
) -> None:
    bare = [{**sets[0], "prompt": None}, sets[1]]
    with pytest.raises(RecipeError, match=r"data.prompt: missing, and 3 of 5 pictures in data.sets"):
        make_job(recipe_of(base, bare), Pinned(tmp_path / "bare"))
    again = [sets[0], {**sets[0], "folder": str(shutil.copytree(sets[0]["folder"], tmp_path / "again"))}]
    with pytest.raises(RecipeError, match=r"data.sets.1.folder: .* adds no picture, 3 are in another set"):
        make_job(recipe_of(base, again), Pinned(tmp_path / "again-run"))
    with pytest.raises(RecipeError, match=r"data.sets.0.folder: no folder"):
        make_job(recipe_of(base, [{"folder": str(tmp_path / "nowhere")}]), Pinned(tmp_path / "no"))
    with pytest.raises(
        RecipeError, match="data.sets: given with the task dreambooth; allowed: finetune, lora"
    ):
        recipe_for("dreambooth", base, tmp_path, data={"sets": sets, "prompt": "a photo of sks dog"})


def test_captions_come_from_kohyas_json(base: Path, sets: list[dict[str, Any]], tmp_path: Path) -> None:
    names = sorted(path.name for path in Path(sets[0]["folder"]).iterdir())
    told = {
        f"/elsewhere/{names[0]}": {"caption": "a dog", "tags": "grass, sun"},
        Path(names[1]).stem: {"tags": ["snow"]},
    }
    (tmp_path / "meta.json").write_text(json.dumps(told))
    both = [{**sets[0], "captions": str(tmp_path / "meta.json"), "prompt": "else"}, sets[1]]
    make_job(recipe_of(base, both), Pinned(tmp_path / "run"))
    store = Store.open(tmp_path / "run" / "data" / "pictures.lance")
    rows = store.take(range(5), ["key", "caption", "set_prompt"]).to_pylist()
    assert {row["key"]: row["caption"] for row in rows} == {
        names[0]: "a dog, grass, sun",
        names[1]: "snow",
        names[2]: "",
        "0.png": "a red square 0",
        "1.png": "a red square 1",
    }
    (tmp_path / "meta.json").write_text(json.dumps({names[0]: {"caption": {"en": "a dog"}}}))
    with pytest.raises(RecipeError, match=r"data.sets.0.captions: .*\{'en': 'a dog'\}; allowed: text"):
        make_job(recipe_of(base, both), Pinned(tmp_path / "another"))
    (tmp_path / "meta.json").write_text("[1]")
    with pytest.raises(RecipeError, match=r"data.sets.0.captions: .*allowed: \{picture: \{caption"):
        make_job(recipe_of(base, both), Pinned(tmp_path / "other"))


def test_pictures_of_one_name_in_two_folders_have_their_own_captions(base: Path, tmp_path: Path) -> None:
    folder, captions = tmp_path / "set", tmp_path / "meta.json"
    for name, colour in (("cat", (90, 0, 0)), ("dog", (0, 90, 0))):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), colour).save(folder / name / "1.png")
    recipe = recipe_of(base, [{"folder": str(folder), "captions": str(captions)}])

    def told(number: int, content: dict[str, str]) -> dict[str, str]:
        captions.write_text(json.dumps({name: {"caption": text} for name, text in content.items()}))
        make_job(recipe, Pinned(tmp_path / f"run{number}"))
        store = Store.open(tmp_path / f"run{number}" / "data" / "pictures.lance")
        return {row["key"]: row["caption"] for row in store.take(range(2), ["key", "caption"]).to_pylist()}

    wanted = {"cat/1.png": "a cat", "dog/1.png": "a dog"}
    assert told(0, {"/old/cat/1.png": "a cat", "/old/dog/1.png": "a dog"}) == wanted
    assert told(1, {"dog/1": "a dog", "cat\\1.png": "a cat"}) == wanted
    with pytest.raises(
        RecipeError, match="data.sets.0.captions: .*'1.png' alone for cat/1.png and dog/1.png"
    ):
        told(2, {"1.png": "which?"})
    with pytest.raises(RecipeError, match="data.sets.0.captions: .*'/a/1.png' and '/b/1.png' for cat/1.png"):
        told(3, {"/a/1.png": "a cat", "/b/1.png": "a dog"})


def test_pictures_of_a_set_that_are_rejected_are_said(
    base: Path, sets: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(sets[1]["folder"], tmp_path / "squares")
    (folder / "1.txt").write_bytes("красный".encode("cp1251"))
    messages: list[str] = []
    job = make_job(recipe_of(base, [{"folder": str(folder)}]), Pinned(tmp_path / "run"), say=messages.append)
    assert job.rows == 1
    assert any("rejected: {'bad-caption': 1}; see " in line for line in messages), messages
