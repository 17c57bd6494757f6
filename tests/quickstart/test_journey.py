"""The whole way at toy size, through the same code as the real one: what it leaves, resumes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from darkroom import models, sample
from darkroom.data.importers.job import import_pictures
from darkroom.data.store import Store
from darkroom.errors import DarkroomError, InputError
from darkroom.quickstart.journey import TOY, QuickstartResult, check_unseen, look, quickstart
from darkroom.quickstart.shapes import Triple, draw, held_out, scenes, write_set
from darkroom.run import Run


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[QuickstartResult, Path, list[str]]:
    """A finished toy journey: its result, its folder, and what it said."""
    out, said = tmp_path_factory.mktemp("quick") / "out", []
    return quickstart(out, scale=TOY, console=said.append), out, said


def test_it_leaves_pictures_report_model_and_bill(done):
    result, out, _ = done
    assert len(list(result.pictures.glob("*.png"))) == TOY.num_prompts
    assert result.report.read_text().startswith("<!doctype html>") or "<html" in result.report.read_text()
    assert (result.model / "model_index.json").is_file()
    assert models.load(result.model, parts=("unet",)).guidance == 1.5
    with Image.open(out / "gallery.png") as sheet:
        assert sheet.width > 8 * 128
    assert 0 < result.run_wall_s == result.bill.wall_s
    assert set(result.bill.parts) >= {"import", "train", "encode", "sample"}


def test_the_result_as_json_has_what_was_promised(done):
    result, _, _ = done
    told = json.loads(json.dumps(result.to_dict()))
    assert list(told) == [
        "color_fidelity",
        "shape_fidelity",
        "run_wall_s",
        "pictures",
        "report",
        "model",
        "bill",
    ]


def test_an_untrained_model_scores_no_better_than_chance(done):
    """The control of the scores: fog is not mistaken for shapes."""
    result, _, _ = done
    assert result.color_fidelity <= 0.25
    assert result.shape_fidelity <= 0.25


def test_the_story_tells_each_stage(done):
    _, _, said = done
    stages = [line for line in said if line.startswith("==")]
    assert len(stages) == 6
    assert any("none of the 64 held-out triples is in the store" in line for line in said)


def test_no_held_out_triple_is_in_the_store_by_caption_or_by_pixels(done):
    _, out, _ = done
    hidden = {t.caption for t in held_out()}
    rows = Store.open(out / "pictures.lance").take(np.arange(150), ["picture", "caption"])
    assert not hidden & set(rows.column("caption").to_pylist())
    for data, caption in zip(rows.column("picture"), rows.column("caption").to_pylist(), strict=True):
        seen = look(_open(data.as_py()))
        assert Triple(seen.color, seen.shape, seen.background).caption == caption


def _open(data: bytes) -> Image.Image:
    import io

    return Image.open(io.BytesIO(data))


def test_vae_unet_and_tokenizer_learn_from_that_store_alone(done):
    _, out, _ = done
    for name in ("autoencoder", "pretrain"):
        run = Run.open(out / "runs" / name)
        assert run.recipe["data"]["store"] == str(out / "pictures.lance")
        assert run.environment["store"]["rows"] == TOY.num_pictures
    tokenizer = models.load(out / "runs" / "pretrain" / "model", parts=("tokenizer",)).tokenizers[0]
    words = {word for scene in scenes(TOY.num_pictures) for word in scene.triple.caption.split()}
    assert {word for word in words if f"{word}</w>" in tokenizer.get_vocab()} == words
    assert "astronaut</w>" not in tokenizer.get_vocab()
    for triple in held_out():
        assert len(tokenizer.tokenize(triple.caption)) == 7


def test_a_held_out_triple_in_the_store_is_an_error(tmp_path):
    write_set(tmp_path / "drawn", 30)
    import_pictures(tmp_path / "drawn", tmp_path / "pictures.lance")
    check_unseen(tmp_path / "pictures.lance", held_out())
    unseen = next(s for s in scenes(2000, without=frozenset()) if s.triple in held_out())
    (tmp_path / "more").mkdir()
    draw(unseen).save(tmp_path / "more" / "a.png")
    (tmp_path / "more" / "a.txt").write_text(unseen.triple.caption)
    import_pictures(tmp_path / "more", tmp_path / "pictures.lance")
    with pytest.raises(DarkroomError, match=unseen.triple.caption):
        check_unseen(tmp_path / "pictures.lance", held_out())


def test_a_second_call_finds_everything_done(done):
    result, out, _ = done
    said: list[str] = []
    assert quickstart(out, scale=TOY, console=said.append) == result
    assert len(said) == 1
    assert "finished" in said[0]


def test_a_folder_with_other_things_or_settings_is_refused(done, tmp_path):
    _, out, _ = done
    with pytest.raises(InputError, match=r"another seed \(0\)"):
        quickstart(out, seed=1, scale=TOY)
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        quickstart(tmp_path, scale=TOY)
    assert (tmp_path / "letter.txt").read_text() == "mine"


def test_diffusers_opens_the_model_and_makes_the_same_picture(done):
    from diffusers import DPMSolverMultistepScheduler, StableDiffusionPipeline

    result, _, _ = done
    pipeline = StableDiffusionPipeline.from_pretrained(str(result.model), safety_checker=None)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    model, prompt = models.load(result.model), held_out()[3].caption

    def theirs(seed: int) -> np.ndarray:
        generator = torch.Generator("cpu").manual_seed(seed)
        made = pipeline(prompt, num_inference_steps=6, guidance_scale=2.0, generator=generator)
        return np.asarray(made.images[0], dtype=int)

    ours = sample.generate(model, [prompt], seed=7, steps=6, guidance=2.0, solver="dpmpp_2m")[0]
    pixels = np.asarray(ours.image, dtype=int)
    assert pixels.shape == (32, 32, 3)
    assert np.abs(pixels - theirs(7)).max() <= 2
    assert np.abs(pixels - theirs(8)).max() >= 10


class _Interrupted(Exception):
    pass


@pytest.mark.nightly
def test_a_journey_that_was_stopped_goes_on_where_it_was(done, tmp_path):
    result, _, _ = done
    out = tmp_path / "out"

    def stop(line: str) -> None:
        if line.startswith("== training a U-Net"):
            raise _Interrupted

    with pytest.raises(_Interrupted):
        quickstart(out, scale=TOY, console=stop)
    made = (out / "runs" / "autoencoder" / "model" / "model_index.json").stat().st_mtime_ns
    resumed = quickstart(out, scale=TOY, quiet=True)
    assert (out / "runs" / "autoencoder" / "model" / "model_index.json").stat().st_mtime_ns == made
    assert resumed.bill.sessions == 2
    weights = [models.identity(models.load(r.model, parts=("unet",)).unet) for r in (result, resumed)]
    assert weights[0] == weights[1]
