"""The training loop against the bare step: turns are taken, the bare step trains, rows say what ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from darkroom.data.importers import import_pictures
from darkroom.data.store import Store
from darkroom.errors import InputError, RecipeError
from darkroom.measure.training import BARE, LOOP, STEP, bare_step, bench_train
from darkroom.recipe import read_recipe
from darkroom.train.jobs import Pinned, flops_per_image
from darkroom.train.setup import make_job

VAE = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    (root / "pictures").mkdir()
    lines = []
    for i in range(24):
        Image.new("RGB", (16, 16), (i * 10, 255 - i * 10, 90)).save(root / "pictures" / f"{i:02d}.png")
        lines.append(json.dumps({"file_name": f"{i:02d}.png", "text": f"shade {i}"}))
    (root / "pictures" / "metadata.jsonl").write_text("\n".join(lines))
    import_pictures(root / "pictures", Store.create(root / "store.lance"))

    content = {
        "task": "autoencoder",
        "model": {"base": "tiny", "vae": VAE},
        "data": {"store": str(root / "store.lance"), "resolution": 16},
        "optim": {"lr": 1e-3, "clip_norm": None},
        "train": {"steps": 4, "global_batch": 8, "micro_batch": 4, "precision": "float32"},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(content))
    return root / "recipe.yaml"


def job_of(file, *overrides):
    return make_job(read_recipe(file, overrides), Pinned(Path("unused")))


def first_inputs(job):
    with job.feed(0) as batches:
        return job.task.inputs(next(batches), job.device)


def test_rows_for_the_bare_step_the_step_and_the_loop(file):
    rows = {row.case: row for row in bench_train(file, repeats=2, warmup=1, chunk=2)}
    assert list(rows) == [BARE, STEP, LOOP]
    assert rows[BARE].ratio == 1.0
    for row in rows.values():
        assert (row.benchmark, row.ratio_to, row.repeats) == ("train", BARE, 2)
        assert row.median_s is not None
        assert row.images_per_s == pytest.approx(8 / row.median_s)
        assert row.steps_per_s == pytest.approx(1 / row.median_s)
        assert row.mfu is not None
        assert 0 < row.mfu < 1
        assert row.peak_memory_bytes is not None
        assert row.peak_memory_bytes > 100 * 2**20
        assert row.settings["global_batch"] == 8
        assert row.settings["micro_batch"] == 4
    assert 0.5 < (rows[LOOP].ratio or 0) < 5


def test_the_bare_step_learns_what_the_whole_step_learns(file):
    weights = []
    for step_of in (lambda job, inputs: bare_step(job.step, inputs), lambda job, inputs: job.step(0, inputs)):
        job = job_of(file, "train.ema.enabled=false")
        step_of(job, first_inputs(job))
        weights.append([master.detach().clone() for master in job.step.weights.masters.values()])
    before = [master.detach() for master in job_of(file).step.weights.masters.values()]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights[0], before, strict=True) if a.ndim > 1)


def test_flops_are_counted_on_the_tasks_own_loss(file):
    job = job_of(file)
    found = flops_per_image(job.task, first_inputs(job))
    parameters = sum(master.numel() for master in job.step.weights.masters.values())
    # A kernel of a convolution is used at 8x8 to 16x16 places, 2 FLOP each, forward and twice backward.
    assert 6 * 64 * 0.5 * parameters < found < 6 * 256 * parameters
    assert all(param.grad is None for param in job.step.weights.masters.values())


def test_wrong_input_is_refused(file):
    with pytest.raises(InputError, match="repeats=0"):
        bench_train(file, repeats=0)
    with pytest.raises(RecipeError):
        bench_train(file, ["train.micro_batch=3"])


def test_an_optimiser_whose_rate_is_of_another_scale_is_measured_too(file):
    """Adafactor and Prodigy refuse the rate at which AdamW's weights stay as they are."""
    own = ["optim.name=prodigy", "optim.lr=1"]
    rows = {row.case: row for row in bench_train(file, own, repeats=1, warmup=0, chunk=1)}
    assert list(rows) == [BARE, STEP, LOOP]
    assert rows[STEP].ratio is not None
