"""A run that is killed and started again ends as if it had never been disturbed, to the bit."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import TrainingServer
from safetensors.torch import load_file

from darkroom.errors import CheckpointError, InputError, RecipeError
from darkroom.recipe import Recipe
from darkroom.run import Run
from darkroom.train.checkpoint import checkpoints, load_checkpoint, step_of
from darkroom.train.run import train
from train.conftest import MakeRecipe

STEPS = 40
EXACT = ("step", "loss", "lr", "grad_norm", "epoch", "heldout_loss", "heldout_loss_by_timestep")


def the_recipe(recipe_of: MakeRecipe, *overrides: str) -> Recipe:
    """Half an epoch's steps do not divide anything: epochs end in the middle of batches and of saves."""
    return recipe_of(
        "pretrain",
        f"train.steps={STEPS}",
        "train.micro_batch=4",
        "optim.warmup_steps=5",
        "optim.lr_schedule=cosine",
        "train.ema.start_step=7",
        "model.train_text_encoder=true",
        "model.tokenizer=train",
        "model.max_length=12",
        "data.caption_dropout=0.2",
        "data.flip=true",
        "data.holdout=4",
        "evaluate.every=15",
        "objective.noise.offset=0.1",
        "checkpoint.every=3",
        "train.log_every=4",
        *overrides,
    )


def content(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json")


def finished_state(run: Path) -> dict[str, torch.Tensor]:
    """Weights, averaged weights, optimiser and the exported model, all tensors by file and name."""
    last = load_checkpoint(checkpoints(run / "checkpoints")[-1])
    assert last.step == STEPS
    tensors = {f"{file}/{name}": t for file, named in last.tensors.items() for name, t in named.items()}
    for file in sorted((run / "model").rglob("*.safetensors")):
        tensors |= {f"{file.parent.name}:{name}": t for name, t in load_file(file).items()}
    return tensors


def exact_metrics(run: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in EXACT if key in row} for row in Run.open(run).metrics()]


def assert_same_run(a: Path, b: Path) -> None:
    one, other = finished_state(a), finished_state(b)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert exact_metrics(a) == exact_metrics(b)
    assert [row["step"] for row in Run.open(b).metrics()] == list(range(STEPS + 1))


@pytest.fixture(scope="module")
def server() -> Iterator[TrainingServer]:
    with TrainingServer() as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(
    server: TrainingServer, recipe_of: MakeRecipe, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    server.start(content(the_recipe(recipe_of)), out)
    assert server.wait() == 0, Path(f"{out}.log").read_text()
    return out


def wait_for_a_save(out: Path, pid: int, patience_s: float) -> bool:
    """Until a checkpoint is being written; False when none was in time."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if any((out / "checkpoints").glob(".writing-*")):
            return True
        time.sleep(0.0005)
    return False


@pytest.mark.nightly
def test_killed_at_25_moments_ends_bit_identical(
    server: TrainingServer, undisturbed: Path, recipe_of: MakeRecipe, tmp_path: Path
) -> None:
    recipe, out, moments = content(the_recipe(recipe_of)), tmp_path / "run", random.Random(0)
    kills = in_a_save = 0
    while True:
        pid = server.start(recipe, out)
        if kills < 25:
            if kills % 2:
                wait_for_a_save(out, pid, 20.0)
                time.sleep(moments.uniform(0, 0.01))
            else:
                time.sleep(moments.uniform(0.02, 0.8))
            with suppress(ProcessLookupError):  # it may have come to its end
                os.kill(pid, signal.SIGKILL)
        code = server.wait()
        in_a_save += any((out / "checkpoints").glob(".writing-*"))
        if code == 0:
            break
        assert code == -signal.SIGKILL, Path(f"{out}.log").read_text()
        kills += 1
    assert kills >= 20
    assert in_a_save >= 3
    assert_same_run(undisturbed, out)
    bill = Run.open(out).bill()
    assert bill is not None
    assert bill.images >= STEPS * 8


@pytest.mark.nightly
def test_another_seed_is_another_run(
    server: TrainingServer, undisturbed: Path, recipe_of: MakeRecipe, tmp_path: Path
) -> None:
    """The control: the comparison above can fail."""
    server.start(content(the_recipe(recipe_of, "train.seed=1")), tmp_path / "run")
    assert server.wait() == 0
    one, other = finished_state(undisturbed), finished_state(tmp_path / "run")
    assert not torch.equal(one["weights/unet.conv_in.weight"], other["weights/unet.conv_in.weight"])
    assert exact_metrics(undisturbed)[1] != exact_metrics(tmp_path / "run")[1]


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_and_leaves_cleanly(
    server: TrainingServer, undisturbed: Path, recipe_of: MakeRecipe, tmp_path: Path, number: int
) -> None:
    recipe, out = content(the_recipe(recipe_of, "checkpoint.every=1000")), tmp_path / "run"
    pid = server.start(recipe, out)
    while not (out / "metrics.jsonl").exists() or len(Run(out).metrics()) < 5:
        time.sleep(0.002)
    os.kill(pid, number)
    assert server.wait() == 1
    said = Path(f"{out}.log").read_text()
    stopped = re.search(r"Stopped stopped after step (\d+) of 40, saved; the same command goes on", said)
    assert stopped is not None, said
    assert [path.name for path in checkpoints(out / "checkpoints")] == [f"step-{int(stopped[1]):08d}"]
    server.start(recipe, out)
    assert server.wait() == 0
    assert_same_run(undisturbed, out)
    assert Run.open(out).bill().sessions == 2  # type: ignore[union-attr]


def stopped_after_two(recipe_of: MakeRecipe, out: Path) -> None:
    train(recipe_of("autoencoder", "train.steps=2"), out=out, console=lambda _: None)


def test_a_damaged_checkpoint_is_passed_over_aloud(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    out, said = tmp_path / "run", list[str]()
    recipe = recipe_of("autoencoder", "train.steps=4")
    train(recipe, out=out, console=lambda _: None)
    whole = Run.open(out).metrics()
    newest = checkpoints(out / "checkpoints")[-1]
    (newest / "optimiser.safetensors").write_bytes(b"")
    train(recipe, out=out, console=said.append)
    assert any("step-00000004' is damaged: optimiser.safetensors has 0 bytes" in line for line in said)
    assert "going on after step 2 of 4" in said
    again = Run.open(out).metrics()
    assert [row["loss"] for row in again] == [row["loss"] for row in whole]
    for path in checkpoints(out / "checkpoints"):
        (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match="none of 2 checkpoints"):
        train(recipe, out=out, console=lambda _: None)


def test_a_changed_recipe_is_refused_by_name(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped_after_two(recipe_of, out)
    with pytest.raises(RecipeError, match=r"optim.lr: .*was 0.002, is 0.001.*--resume never"):
        train(recipe_of("autoencoder", "train.steps=4", "optim.lr=1e-3"), out=out, console=lambda _: None)
    changed = recipe_of("autoencoder", "train.steps=4", "optim.beta1=0.5", "train.seed=3")
    with pytest.raises(RecipeError, match=r"optim.beta1 .*train.seed"):
        train(changed, out=out, console=lambda _: None)
    with pytest.raises(RecipeError, match=r"train.steps: 1, but 2 steps are made"):
        train(recipe_of("autoencoder", "train.steps=1"), out=out, console=lambda _: None)


def test_more_steps_go_on_and_harmless_changes_are_let_through(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    out, said = tmp_path / "run", list[str]()
    stopped_after_two(recipe_of, out)
    longer = recipe_of("autoencoder", "train.steps=5", "checkpoint.every=1", "train.micro_batch=4")
    result = train(longer, out=out, console=said.append)
    assert result.steps == 5
    assert "note: train.steps was 2 and is 5" in said
    assert any(
        re.match(r"note: .*micro_batch was 8 and is 4: no longer bit-identical", line) for line in said
    )
    assert [row["step"] for row in Run.open(out).metrics()] == [1, 2, 3, 4, 5]
    said.clear()
    train(longer, out=out, console=said.append)
    assert said == [f"'{out}' is finished: all 5 steps are made"]


def test_another_thread_count_ends_the_promise_aloud(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    out, said, before = tmp_path / "run", list[str](), torch.get_num_threads()
    stopped_after_two(recipe_of, out)
    try:
        torch.set_num_threads(before + 1)
        train(recipe_of("autoencoder", "train.steps=3"), out=out, console=said.append)
    finally:
        torch.set_num_threads(before)
    told = f"note: threads was {before} and is {before + 1}: no longer bit-identical to an undisturbed run"
    assert told in said


def test_resume_never_starts_a_numbered_run(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped_after_two(recipe_of, out)
    second = train(recipe_of("autoencoder"), out=out, resume="never", console=lambda _: None)
    third = train(recipe_of("autoencoder"), out=out, resume="never", console=lambda _: None)
    assert [second.run.name, third.run.name] == ["run-2", "run-3"]
    assert len(Run.open(out).metrics()) == 2


def test_resume_from_a_checkpoint_starts_a_new_run_with_another_rate(
    recipe_of: MakeRecipe, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    stopped_after_two(recipe_of, out)
    other = recipe_of("autoencoder", "train.steps=4", "optim.lr=1e-3")
    start = checkpoints(out / "checkpoints")[-1]
    result = train(other, out=out, resume=str(start), console=lambda _: None)
    assert result.run.name == "run-2"
    rows = Run.open(result.run).metrics()
    assert [(row["step"], row["lr"]) for row in rows] == [(3, 1e-3), (4, 1e-3)]
    assert [step_of(path) for path in checkpoints(result.run / "checkpoints")] == [2, 4]
    with pytest.raises(RecipeError, match=r"train.steps: 2, but 2 steps are made"):
        train(recipe_of("autoencoder", "train.steps=2"), out=out, resume=str(start), console=print)
    with pytest.raises(InputError, match=r"--resume 7; allowed: auto, never, or a checkpoint's folder"):
        train(other, out=out, resume="7", console=print)


def test_a_folder_that_is_no_run_is_left_alone(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="holds something that is no run"):
        train(recipe_of("autoencoder"), out=tmp_path, console=print)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
