"""Training from the outside: it learns, it refuses, and diffusers opens what it leaves."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from darkroom import models
from darkroom.data.store import Store
from darkroom.errors import (
    ColumnError,
    DarkroomError,
    InputError,
    MissingExtra,
    ModelError,
    RecipeError,
    StoreError,
)
from darkroom.hardware import machine
from darkroom.hardware.prices import price
from darkroom.prepare.job import prepare
from darkroom.recipe import Recipe
from darkroom.run import Run
from darkroom.train.checkpoint import checkpoints
from darkroom.train.run import export, train
from darkroom.train.tracking import check_tracker
from darkroom.train.trainer import TrainResult
from train.conftest import SIDE, MakeRecipe


def quietly(recipe: Recipe, out: Path, **more: Any) -> TrainResult:
    return train(recipe, out=out, console=lambda _: None, **more)


@pytest.fixture(scope="module")
def vae_run(recipe_of: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = recipe_of(
        "autoencoder", "train.steps=60", "data.holdout=4", "checkpoint.every=60", "sample.every=60"
    )
    return quietly(recipe, tmp_path_factory.mktemp("vae") / "run").run


@pytest.fixture(scope="module")
def prepared(store_path: Path, vae_run: Path) -> Path:
    """The store with the trained VAE's latents."""
    prepare(Store.open(store_path), str(vae_run / "model"), resolution=SIDE)
    return store_path


def test_an_autoencoder_learns_and_measures_its_scale(vae_run: Path) -> None:
    rows = Run.open(vae_run).metrics()
    assert [row["step"] for row in rows] == list(range(61))
    assert rows[-1]["heldout_loss"] < 0.6 * rows[0]["heldout_loss"]
    assert rows[-1]["heldout_psnr_db"] > rows[0]["heldout_psnr_db"] + 3
    config = json.loads((vae_run / "model" / "vae" / "config.json").read_text())
    assert config["scaling_factor"] != 1.0
    assert models.load(vae_run / "model", parts=("vae",)).latent_scaling.factor == config["scaling_factor"]
    grid = Image.open(vae_run / "samples" / "step-00000060.png")
    assert grid.size == (4 * SIDE, 2 * SIDE)  # held-out pictures above what the VAE gives back


def pretrain_of(recipe_of: MakeRecipe, vae_run: Path, *overrides: str) -> Recipe:
    return recipe_of("pretrain", f"model.vae={vae_run / 'model'}", "data.encode=stored", *overrides)


@pytest.fixture(scope="module")
def unet_run(
    recipe_of: MakeRecipe, prepared: Path, vae_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    overrides = (
        *(
            "train.steps=80",
            "data.holdout=8",
            "evaluate.every=40",
            "checkpoint.every=40",
            "optim.warmup_steps=4",
        ),
        *("objective.prediction=v", "objective.noise.zero_terminal_snr=true", "objective.min_snr_gamma=5"),
        *("model.train_text_encoder=true", "model.tokenizer=train", "model.max_length=16"),
        *(
            "sample.every=80",
            "sample.num=4",
            "sample.steps=2",
            "sample.guidance=2",
            "data.caption_dropout=0.1",
        ),
        *("train.precision=bf16", "train.micro_batch=4"),
    )
    recipe = pretrain_of(recipe_of, vae_run, *overrides)
    return quietly(recipe, tmp_path_factory.mktemp("unet") / "run").run


def test_a_unet_learns_from_prepared_latents(unet_run: Path) -> None:
    rows = Run.open(unet_run).metrics()
    losses = [(row["step"], row["heldout_loss"]) for row in rows if "heldout_loss" in row]
    assert [step for step, _ in losses] == [0, 40, 80]
    assert losses[2][1] < losses[1][1] < losses[0][1]
    assert losses[2][1] < 0.9 * losses[0][1]
    assert len(rows[-1]["heldout_loss_by_timestep"]) == 8
    assert {"loss", "lr", "grad_norm", "images_per_s", "data_wait_s", "epoch"} <= rows[5].keys()
    assert Image.open(unet_run / "samples" / "step-00000080.png").size == (2 * SIDE, 2 * SIDE)
    bill = Run.open(unet_run).bill()
    assert bill is not None
    assert bill.images == 80 * 8
    assert {"train", "wait", "evaluate", "sample", "checkpoint"} <= bill.parts.keys()
    assert models.load(unet_run / "model", parts=("unet",)).guidance == 2  # as the samples were drawn


def test_diffusers_opens_the_finished_model(unet_run: Path) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(unet_run / "model", local_files_only=True)
    assert type(pipeline.scheduler).__name__ == "DDIMScheduler"
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    assert pipeline.scheduler.config.rescale_betas_zero_snr is True
    assert {p.dtype for p in pipeline.unet.parameters()} == {torch.float32}
    pipeline.set_progress_bar_config(disable=True)
    out = pipeline("a red square on blue", num_inference_steps=2, height=SIDE, width=SIDE, output_type="np")
    assert out.images.shape == (1, SIDE, SIDE, 3)
    assert np.isfinite(out.images).all()


def weights_of(folder: Path, part: str = "unet") -> dict[str, torch.Tensor]:
    return models.load(folder).modules[part].state_dict()


def test_export_is_the_finished_model_and_can_be_the_trained_weights(unet_run: Path, tmp_path: Path) -> None:
    again = export(unet_run, tmp_path / "ema")
    for part in ("unet", "text_encoder", "vae"):
        one, other = weights_of(unet_run / "model", part), weights_of(again, part)
        assert all(torch.equal(one[name], other[name]) for name in one), part
    trained = weights_of(export(unet_run, tmp_path / "trained", ema=False))
    earlier = weights_of(export(unet_run, tmp_path / "earlier", checkpoint=40))
    averaged = weights_of(again)
    for other in (trained, earlier):
        assert not torch.equal(averaged["conv_in.weight"], other["conv_in.weight"])
    with pytest.raises(InputError, match=r"no checkpoint of step 7; allowed: 40, 80"):
        export(unet_run, tmp_path / "none", checkpoint=7)
    with pytest.raises(InputError, match="is there already"):
        export(unet_run, tmp_path / "ema")


def test_stored_and_inline_latents_give_the_same_losses(
    recipe_of: MakeRecipe, prepared: Path, vae_run: Path, tmp_path: Path
) -> None:
    stored = quietly(pretrain_of(recipe_of, vae_run), tmp_path / "stored")
    inline = quietly(pretrain_of(recipe_of, vae_run, "data.encode=inline"), tmp_path / "inline")
    one, other = ([row["loss"] for row in Run.open(r.run).metrics()] for r in (stored, inline))
    assert one == pytest.approx(other, abs=1e-3)
    seeded = quietly(pretrain_of(recipe_of, vae_run, "train.seed=1"), tmp_path / "seed")
    assert [row["loss"] for row in Run.open(seeded.run).metrics()] != pytest.approx(one, abs=1e-3)


def test_stored_text_gives_the_same_losses(
    recipe_of: MakeRecipe, store_path: Path, vae_run: Path, tmp_path: Path
) -> None:
    first = quietly(
        pretrain_of(recipe_of, vae_run, "train.steps=1", "data.encode=inline"), tmp_path / "first"
    )
    prepare(Store.open(store_path), str(first.model), resolution=SIDE, text=True)
    # The finished model's text encoder is the untrained one: only the U-Net was trained.
    text = ("data.caption_dropout=0.5", "train.steps=3")
    stored = quietly(pretrain_of(recipe_of, vae_run, "data.text=stored", *text), tmp_path / "stored")
    inline = quietly(pretrain_of(recipe_of, vae_run, "data.text=inline", *text), tmp_path / "inline")
    one, other = ([row["loss"] for row in Run.open(r.run).metrics()] for r in (stored, inline))
    assert one == pytest.approx(other, abs=1e-3)


def test_another_vaes_column_is_refused_with_both_hashes(
    recipe_of: MakeRecipe, prepared: Path, tmp_path: Path
) -> None:
    with pytest.raises(ColumnError, match=r"another encoder: [0-9a-f]{64}, the model's is [0-9a-f]{64}"):
        quietly(recipe_of("pretrain", "data.encode=stored"), tmp_path / "run")
    with pytest.raises(ColumnError, match="no latents at resolution 64"):
        quietly(recipe_of("pretrain", "data.encode=stored", "data.resolution=64"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_buckets_are_those_the_column_was_prepared_in(
    recipe_of: MakeRecipe, prepared: Path, vae_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=r"data.buckets: true, but latents_16_.* was prepared in squares"):
        quietly(pretrain_of(recipe_of, vae_run, "data.buckets=true"), tmp_path / "run")
    wide = ("data.resolution=32", "train.steps=1")
    prepare(Store.open(prepared), str(vae_run / "model"), resolution=32, bucket_step=8)
    with pytest.raises(RecipeError, match=r"data.buckets: false, but .* in buckets of 8 pixels; set .*=true"):
        quietly(pretrain_of(recipe_of, vae_run, *wide), tmp_path / "run")
    assert quietly(pretrain_of(recipe_of, vae_run, "data.buckets=true", *wide), tmp_path / "run").steps == 1


REFUSED = [
    (
        "train.micro_batch=3",
        RecipeError,
        r"train.micro_batch: 3 does not divide train.global_batch 8; allowed: 1, 2, 4 or auto",
    ),
    ("optim.warmup_steps=9", RecipeError, r"optim.warmup_steps: 9 is more than train.steps 4"),
    ("train.precision=fp16", RecipeError, r"train.precision: fp16 on a CPU.*use bf16"),
    ("train.ema.start_step=4", RecipeError, r"train.ema.start_step: 4 is not before the end"),
    ("data.holdout=30", RecipeError, r"data.holdout: 30 of 44 rows; allowed: at most half"),
    ("data.holdout=2.5", RecipeError, r"data.holdout: 2.5"),
    ("data.store=nowhere.lance", StoreError, r"no picture store at nowhere.lance"),
    ("data.filter=wdith > 3", StoreError, r"width"),
    ("data.filter=width > 300", RecipeError, r"data.filter: no row of 44 matches"),
    ("data.resolution=24", RecipeError, None),
    ("model.base=tinny", ModelError, r"tinny"),
    ("model.vae=nowhere", ModelError, r"nowhere"),
    ("model.unet.in_channels=5", RecipeError, r"in_channels: 5, but the VAE's latents have 4"),
    ("objective.noise.zero_terminal_snr=true", RecipeError, r"zero_terminal_snr.*prediction=v"),
    ("train.device=cuda:99", InputError, r"cuda:99"),
]


@pytest.mark.parametrize(("override", "error", "match"), REFUSED, ids=[case[0] for case in REFUSED])
def test_impossible_recipes_are_refused_before_any_work(
    recipe_of: MakeRecipe, tmp_path: Path, override: str, error: type[Exception], match: str | None
) -> None:
    if match is None:
        recipe = recipe_of("pretrain", "data.resolution=24", "model.unet.block_out_channels=[8,8,8,8]")
        match = r"data.resolution: 24; allowed: multiples of 16"
    else:
        recipe = recipe_of("pretrain", override)
    with pytest.raises(error, match=match):
        quietly(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


CONTRADICTIONS = [
    ("pretrain", ("data.encode=stored", "data.flip=true"), r"data.flip: True.*encode=inline"),
    ("pretrain", ("model.train_text_encoder=true", "data.text=stored"), r"data.text: stored.*text=inline"),
    ("autoencoder", ("model.train_text_encoder=true",), r"model.train_text_encoder"),
    ("autoencoder", ("model.vae=some/folder",), r"model.vae: 'some/folder', but the VAE is what is trained"),
]


@pytest.mark.parametrize(("task", "overrides", "match"), CONTRADICTIONS)
def test_contradictions_are_refused(
    recipe_of: MakeRecipe, tmp_path: Path, task: str, overrides: tuple[str, ...], match: str
) -> None:
    with pytest.raises(RecipeError, match=match):
        quietly(recipe_of(task, *overrides), tmp_path / "run")


def test_a_folders_shape_cannot_be_changed(recipe_of: MakeRecipe, unet_run: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model.unet: changes to .* whose weights fix its shape"):
        quietly(recipe_of("pretrain", f"model.base={unet_run / 'model'}"), tmp_path / "run")


def test_training_goes_on_from_a_model_folder(recipe_of: MakeRecipe, unet_run: Path, tmp_path: Path) -> None:
    """The model's own scheduler says what is predicted; nothing of the recipe has to repeat it."""
    model = {"base": str(unet_run / "model")}
    recipe = recipe_of("pretrain", "data.encode=stored", "train.steps=2", "data.holdout=8", model=model)
    result = quietly(recipe, tmp_path / "run")
    rows, before = Run.open(result.run).metrics(), Run.open(unet_run).metrics()
    assert rows[0]["heldout_loss"] == pytest.approx(before[-1]["heldout_loss"], rel=2e-2)  # bf16 there
    assert json.loads((result.model / "scheduler/scheduler_config.json").read_text()) == json.loads(
        (unet_run / "model/scheduler/scheduler_config.json").read_text()
    )


def test_a_loss_that_is_not_finite_stops_with_the_checkpoint_kept(
    recipe_of: MakeRecipe, tmp_path: Path
) -> None:
    recipe = recipe_of(
        "pretrain", "optim.lr=10", "optim.clip_norm=null", "train.steps=200", "checkpoint.every=1"
    )
    with pytest.raises(
        DarkroomError, match=r"of step \d+ is (nan|inf); the checkpoint of step \d+ is kept; .*optim.lr"
    ):
        quietly(recipe, tmp_path / "run")
    rows = Run.open(tmp_path / "run").metrics()
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert checkpoints(tmp_path / "run" / "checkpoints")


def test_pictures_that_take_long_are_told_of(
    recipe_of: MakeRecipe, prepared: Path, vae_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = pretrain_of(recipe_of, vae_run, "train.steps=2", "sample.prompts=[a,b]", "sample.steps=4")

    def lines(name: str) -> list[str]:
        said: list[str] = []
        train(recipe, out=tmp_path / name, console=said.append)
        return [line for line in said if line.startswith("drawing")]

    assert lines("quick") == []
    monkeypatch.setattr("darkroom.train.evaluation.TOLD_EVERY_S", 0.0)
    told = lines("slow")
    assert [line.split(",")[0] for line in told] == [
        f"drawing pictures at step 2: {n} %" for n in (25, 50, 75)
    ]


def test_tensorboard_shows_what_metrics_hold(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'track' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_of("autoencoder", "track.tensorboard=true", "data.holdout=4", "sample.every=4")
    result = quietly(recipe, tmp_path / "run")
    events = EventAccumulator(str(result.run / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    rows = [row for row in Run.open(result.run).metrics() if "loss" in row]
    assert shown == [(row["step"], pytest.approx(row["loss"])) for row in rows]
    assert [event.step for event in events.Images("samples")] == [4]


def test_tensorboard_is_refused_where_it_is_missing(
    recipe_of: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[track\]'"):
        check_tracker(recipe_of("autoencoder", "track.tensorboard=true").track)


def test_the_console_says_loss_speed_time_and_cost(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    said: list[str] = []
    empty = dict.fromkeys(("batch", "step_s", "images_per_s", "peak_bytes", "steps", "cost", "device"))
    plan = {**empty, "line": "planned: 3 s", "hours": 3 / 3600}
    asked: list[tuple[Run, int]] = []

    def estimate(run: Run, devices: int) -> dict[str, Any]:
        asked.append((run, devices))
        return plan

    train(recipe_of("autoencoder"), out=tmp_path / "run", console=said.append, estimate=estimate)
    assert said.count("planned: 3 s") == 1
    assert [(run.path, devices) for run, devices in asked] == [(tmp_path / "run", 1)]
    assert Run.open(tmp_path / "run").plan() == plan
    lines = [line for line in said if line.startswith("step ")]
    assert len(lines) == 2
    for word in ("step 2/4", "loss 0.", "lr 2.00e-03", "images/s", " left"):
        assert word in lines[0]
    assert ("USD 0." in lines[0]) == (price(machine().cpu_class) is not None)  # of a CPU that is rented out


def test_what_a_process_left_out_of_garbage_collections_stays_out(
    recipe_of: MakeRecipe, tmp_path: Path, counts_frozen: None
) -> None:
    """A host that froze its objects finds them frozen after a run, and one that did not finds none."""
    recipe = recipe_of("autoencoder", "train.steps=1")
    gc.freeze()
    frozen = gc.get_freeze_count()
    quietly(recipe, tmp_path / "frozen")
    assert gc.get_freeze_count() > 0.9 * frozen > 0
    assert gc.isenabled()
    gc.unfreeze()
    quietly(recipe, tmp_path / "plain")
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


def test_a_store_at_its_pinned_version(recipe_of: MakeRecipe, store_path: Path, tmp_path: Path) -> None:
    """Rows imported later do not change a run that goes on."""
    result = quietly(recipe_of("autoencoder", "train.steps=2"), tmp_path / "run")
    store = Store.open(store_path)
    pinned = Run.open(result.run).environment["store"]
    assert (pinned["version"], pinned["rows"]) == (store.version, 44)
    assert any(version == store.version for version in store.pins().values())


def test_rows_kept_in_files_change_nothing_but_where_they_are_read(
    recipe_of: MakeRecipe, tmp_path: Path
) -> None:
    """A run may begin to keep them, elsewhere or no longer, when it is resumed."""
    steps = ("train.steps=2", "train.steps=4", "train.steps=6")
    caches: tuple[tuple[str, ...], ...] = (
        (f"data.cache={tmp_path / 'rows'}", "data.cache_gb=1"),
        (),
        (f"data.cache={tmp_path / 'others'}",),
    )
    for more, cache in zip(steps, caches, strict=True):
        quietly(recipe_of("pretrain", more, *cache), tmp_path / "cached")
    quietly(recipe_of("pretrain", steps[-1]), tmp_path / "plain")
    losses = [
        [row["loss"] for row in Run.open(tmp_path / name).metrics() if "loss" in row]
        for name in ("cached", "plain")
    ]
    assert losses[0] == losses[1]
    assert list((tmp_path / "rows").rglob("*.rows"))
    assert list((tmp_path / "others").rglob("*.rows"))


def test_rows_that_cannot_be_kept_are_refused(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"data\.cache: .*file.rows"):
        quietly(recipe_of("pretrain", f"data.cache={tmp_path / 'file' / 'rows'}"), tmp_path / "run")
    with pytest.raises(RecipeError, match=r"data\.cache_gb: given, but nothing reads it.*data\.cache"):
        recipe_of("pretrain", "data.cache_gb=3").check()
    with pytest.raises(RecipeError, match=r"data\.cache: .*online"):
        recipe_of("pretrain", "data.encode=online", "data.cache=rows").check()
    with pytest.raises(
        RecipeError, match=r"data\.cache: s3://bucket/rows; allowed: a folder on a local disk"
    ):
        recipe_of("pretrain", "data.cache=s3://bucket/rows").check()
