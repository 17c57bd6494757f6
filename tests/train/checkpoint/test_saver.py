"""Saving behind the loop: the state of the moment, and what happens where it cannot be written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from darkroom.errors import CheckpointError
from darkroom.run import Run
from darkroom.train.checkpoint import format as checkpoint
from darkroom.train.checkpoint.format import checkpoints, load_checkpoint
from darkroom.train.checkpoint.saver import Saver
from darkroom.train.distributed.ranks import ALONE, Ranks
from darkroom.train.run import train


def saver(folder: Path, said: list[str] | None = None, ranks: Ranks = ALONE) -> Saver:
    return Saver(folder, keep=2, ranks=ranks, say=(said if said is not None else []).append)


def test_what_is_saved_is_the_moment_of_the_call(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    one = saver(tmp_path)
    one.save(5, {"weights": {"unet.a": weight}}, {}, {})
    weight.add_(100)  # training goes on
    one.finish()
    saved = load_checkpoint(tmp_path / "step-00000005").tensors["weights"]["unet.a"]
    assert torch.equal(saved, torch.arange(6.0).reshape(2, 3))
    assert not torch.equal(saved, weight)


class FullDisk:
    """Stands where files are written, and has no room from some file on."""

    def __init__(self, monkeypatch, room: int) -> None:
        self.room, self.write = room, checkpoint._write_hashed
        monkeypatch.setattr(checkpoint, "_write_hashed", self)

    def __call__(self, file, chunks):
        self.room -= 1
        if self.room < 0:
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.write(file, chunks)


@pytest.mark.parametrize("room", range(4))
def test_a_full_disk_leaves_the_older_one_and_training_goes_on(tmp_path, monkeypatch, room):
    said: list[str] = []
    one = saver(tmp_path, said)
    one.save(5, {"weights": {"unet.a": torch.ones(3)}}, {}, {})
    one.finish()
    disk = FullDisk(monkeypatch, room)
    one.save(10, {"weights": {"unet.a": torch.zeros(3)}}, {}, {})
    disk_full = "No space left on device; the checkpoint of step 5 is intact"
    with pytest.raises(CheckpointError, match=disk_full):
        one.finish()
    assert [load_checkpoint(path).step for path in checkpoints(tmp_path)] == [5]
    assert len(list(tmp_path.iterdir())) == 1  # nothing half-written stays
    one.save(15, {"weights": {"unet.a": torch.zeros(3)}}, {}, {})
    disk.room = 100  # somebody made room
    one.save(20, {"weights": {"unet.a": torch.zeros(3)}}, {}, {})
    one.finish()
    assert checkpoints(tmp_path)[-1].name == "step-00000020"


def test_a_run_outlives_a_disk_that_was_full_for_a_while(recipe_of, tmp_path, monkeypatch):
    recipe = recipe_of("pretrain", "train.steps=8", "checkpoint.every=2")
    disk = FullDisk(monkeypatch, 7)  # the first checkpoint, of five files and a list, and a bit of the second

    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        if "could not be written" in line:
            disk.room = 1000

    result = train(recipe, out=tmp_path / "run", console=hear)
    assert result.steps == 8
    assert sum("could not be written" in line for line in said) == 1
    assert load_checkpoint(checkpoints(tmp_path / "run" / "checkpoints")[-1]).step == 8
    undisturbed = train(recipe, out=tmp_path / "other", console=lambda _: None)
    assert undisturbed.loss == result.loss


@pytest.mark.parametrize("background", [True, False])
def test_a_first_save_that_fails_ends_the_run_in_one_line(recipe_of, tmp_path, monkeypatch, background):
    """A run of many steps is not to find out at its end that nothing can be kept of it."""
    more = ("train.steps=400", "train.log_every=1", "checkpoint.every=2", "sample.every=0")
    recipe = recipe_of("pretrain", *more, f"checkpoint.background={str(background).lower()}")
    disk, said = FullDisk(monkeypatch, 0), []
    with pytest.raises(CheckpointError, match="No space left on device; there is none before it") as raised:
        train(recipe, out=tmp_path / "run", console=said.append)
    assert "\n" not in str(raised.value)
    made = Run(tmp_path / "run").metrics()[-1]["step"]
    assert 2 <= made < 400
    disk.room = 10_000
    assert train(recipe_of("pretrain", *more[1:], "train.steps=4"), out=tmp_path / "new", console=said.append)


def test_shares_of_several_are_one_checkpoint(tmp_path):
    """Rows of a weight from two processes, and numbers from the first, read back whole or by rows."""
    whole = torch.arange(20.0).reshape(5, 4)
    beside = checkpoint.temporary_folder(tmp_path, 3, "t")
    for rank, (first, rows) in enumerate([(0, whole[:3]), (3, whole[3:])]):
        step = {"unet.a/step": torch.tensor(3.0)} if rank == 0 else {}
        tensors = {"weights": {"unet.a": rows}, "optimiser": {"unet.a/exp_avg": -rows, **step}}
        checkpoint.write_share(beside, rank, 2, tensors, {"unet.a": (first, 5)})
    path = checkpoint.complete(beside, 3, 2, {}, keep=1)
    read = load_checkpoint(path).tensors
    assert torch.equal(read["weights"]["unet.a"], whole)
    assert torch.equal(read["optimiser"]["unet.a/exp_avg"], -whole)
    assert torch.equal(read["weights"].rows("unet.a", 2, 2), whole[2:4])
    assert torch.equal(read["optimiser"].rows("unet.a/step", 2, 2), torch.tensor(3.0))


def test_a_share_that_never_comes_is_an_error(tmp_path):
    beside = checkpoint.temporary_folder(tmp_path, 3, "t")
    checkpoint.write_share(beside, 0, 2, {"weights": {"unet.a": torch.ones(2)}}, {})
    with pytest.raises(CheckpointError, match="rank 1 has not written its share"):
        checkpoint.complete(beside, 3, 2, {}, keep=1, wait_s=0.1)
    checkpoint.note_failure(beside, 1)
    with pytest.raises(CheckpointError, match="rank 1 could not write"):
        checkpoint.complete(beside, 3, 2, {}, keep=1)
    assert checkpoints(tmp_path) == []
