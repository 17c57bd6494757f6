"""The micro-batch that is found by trial, and what happens when memory runs out later."""

from __future__ import annotations

import pytest
import torch
from test_step import B, Denoise, furthest, make_step, some_inputs

from darkroom.errors import RecipeError
from darkroom.run import Run
from darkroom.train.checkpoint import checkpoints, load_checkpoint
from darkroom.train.memory import tried_micro_batch, try_micro_batches
from darkroom.train.ranks import ALONE
from darkroom.train.run import train
from darkroom.train.tasks import diffusion as tasks

SIZES = [1, 2, 4, 8, 16]


class Memory:
    """Has room for so many rows."""

    def __init__(self, room: int) -> None:
        self.room, self.asked = room, []

    def __call__(self, rows: int) -> bool:
        self.asked.append(rows)
        return rows <= self.room


@pytest.mark.parametrize(
    ("room", "estimate", "found", "asked"),
    [
        (8, 4, 8, [4, 8, 16]),
        (16, 16, 16, [16]),
        (3, 8, 2, [8, 4, 2]),
        (0, 4, None, [4, 2, 1]),
    ],
)
def test_the_largest_that_fits_is_found_from_either_side(room, estimate, found, asked):
    memory = Memory(room)
    assert tried_micro_batch(memory, SIZES, estimate)[0] == found
    assert memory.asked == asked


def limited(room: int, losses):
    """Losses that run out of memory beyond so many rows, as CUDA's allocator says it."""

    def within(self, inputs):
        if len(next(iter(inputs.values()))) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return losses(self, inputs)

    return within


def test_a_trial_teaches_nothing_and_takes_what_fits(monkeypatch):
    monkeypatch.setattr(Denoise, "losses", limited(2, Denoise.losses))
    step = make_step(B)
    step.task.rows_a_picture = 1
    before = {name: master.detach().clone() for name, master in step.weights.masters.items()}
    one = {name: tensor[:1] for name, tensor in some_inputs().items()}
    micro, told = try_micro_batches(step, step.task, B, one, ALONE)
    assert (micro, told) == (2, "found by trial: 4 ran out of memory")
    assert step.micro_batch == 2
    assert furthest(before, step.weights.masters) == 0
    assert all(master.grad is None for master in step.weights.masters.values())
    monkeypatch.setattr(Denoise, "losses", limited(0, Denoise.losses))
    with pytest.raises(RecipeError, match="^train.micro_batch: auto, but not one picture"):
        try_micro_batches(step, step.task, B, one, ALONE)


def test_a_run_goes_on_with_fewer_rows_when_memory_runs_out(recipe_of, tmp_path, monkeypatch):
    more = ("train.steps=4", "train.log_every=1", "data.holdout=0")
    alike = train(recipe_of("pretrain", *more, "train.micro_batch=2"), out=tmp_path / "a", console=print)
    monkeypatch.setattr(tasks.Diffusion, "losses", limited(2, tasks.Diffusion.losses))
    said: list[str] = []
    recipe = recipe_of("pretrain", *more, "train.micro_batch=auto")
    result = train(recipe, out=tmp_path / "b", console=said.append)
    told = [line for line in said if line.startswith("micro-batch")]
    assert told[0].startswith("micro-batch 8 of 8: estimated")
    assert told[1:] == ["micro-batch 2 from step 1 on: 8 ran out of memory"]
    rows = [[row["loss"] for row in Run(one.run).metrics()] for one in (alike, result)]
    assert rows[0] == rows[1]  # to the bit what two rows at a time give
    kept = load_checkpoint(checkpoints(result.run / "checkpoints")[-1])
    assert kept.scalars["micro_batch"] == kept.scalars["environment"]["micro_batch"] == 2
    with pytest.raises(torch.OutOfMemoryError):  # what was asked for is not changed
        train(recipe_of("pretrain", *more, "train.micro_batch=4"), out=tmp_path / "c", console=print)
