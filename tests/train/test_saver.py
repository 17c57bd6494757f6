"""Saving behind the loop: the state of the moment, and what happens where it cannot be written."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from darkroom import hardware
from darkroom.errors import CheckpointError, RecipeError
from darkroom.run import Run
from darkroom.train import checkpoint as checkpoint
from darkroom.train import checkpoint_storage as saving
from darkroom.train.checkpoint import checkpoints, load_checkpoint
from darkroom.train.checkpoint_storage import Saver, check_changes, check_environment, exactness
from darkroom.train.ranks import ALONE, Ranks
from darkroom.train.run import train


def saver(folder: Path, said: list[str] | None = None, ranks: Ranks = ALONE) -> Saver:
    return Saver(folder, keep=2, ranks=ranks, say=(said if said is not None else []).append)


@pytest.mark.parametrize("most", [10**6, 8])
def test_what_is_saved_is_the_moment_of_the_call(tmp_path, monkeypatch, most):
    """A small state is copied and written meanwhile; a larger one on a CPU is written from where it is."""
    monkeypatch.setattr(saving, "COPIED_BYTES", most)
    copy, copied = Saver._copy, []
    monkeypatch.setattr(
        Saver, "_copy", lambda self, key, tensor: copied.append(key) or copy(self, key, tensor)
    )
    weight = torch.arange(6.0).reshape(2, 3)
    one = saver(tmp_path)
    one.save(5, {"weights": {"unet.a": weight}}, {}, {})
    assert (one._thread is None) == (not copied) == (most == 8)
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
    assert torch.equal(read["weights"].rows("unet.a", 0, 2), whole[:2])  # of the first file alone
    assert torch.equal(read["weights"].rows("unet.a", 4, 1), whole[4:])


def test_a_share_that_never_comes_is_an_error(tmp_path):
    beside = checkpoint.temporary_folder(tmp_path, 3, "t")
    checkpoint.write_share(beside, 0, 2, {"weights": {"unet.a": torch.ones(2)}}, {})
    with pytest.raises(CheckpointError, match="rank 1 has not written its share"):
        checkpoint.complete(beside, 3, 2, {}, keep=1, wait_s=0.1)
    checkpoint.note_failure(beside, 1)
    with pytest.raises(CheckpointError, match="rank 1 could not write"):
        checkpoint.complete(beside, 3, 2, {}, keep=1)
    assert checkpoints(tmp_path) == []


def test_the_newest_is_the_one_that_was_saved_last(tmp_path):
    one = saver(tmp_path)
    assert one.newest() is None
    for step in (5, 10):
        one.save(step, {"weights": {"unet.a": torch.ones(3)}}, {}, {})
    one.finish()
    newest = one.newest()
    assert newest is not None
    assert (newest.step, newest.name) == (10, "step-00000010")


def save_and_look(one: Saver, step: int) -> None:
    """Save, and look until it is written, as a loop between its steps."""
    one.save(step, {"weights": {"unet.a": torch.ones(3)}}, {}, {})
    while one._thread is not None:
        one.look()


@pytest.mark.parametrize("background", [True, False])
def test_a_first_save_that_failed_is_heard_of_without_waiting(tmp_path, monkeypatch, background):
    FullDisk(monkeypatch, 0)
    one = Saver(tmp_path, keep=2, ranks=ALONE, say=lambda _: None, background=background)
    with pytest.raises(CheckpointError, match="there is none before it"):
        save_and_look(one, 5)


def test_a_later_save_that_failed_is_a_warning_where_an_earlier_session_could_save(tmp_path, monkeypatch):
    first = saver(tmp_path)
    first.save(5, {"weights": {"unet.a": torch.ones(3)}}, {}, {})
    first.finish()
    said: list[str] = []
    one = saver(tmp_path, said)
    FullDisk(monkeypatch, 0)
    save_and_look(one, 10)
    assert len(said) == 1
    assert said[0].startswith("warning: a checkpoint could not be written: ")
    assert "the checkpoint of step 5 is intact; training goes on" in said[0]


def test_of_numbers_that_all_rows_share_the_first_rows_rank_writes_one(tmp_path):
    for first in (0, 3):
        one = saver(tmp_path / str(first), ranks=Ranks(sharded=True))
        tensors = {"optimiser": {"unet.a/exp_avg": torch.ones(2, 4), "unet.a/step": torch.tensor(3.0)}}
        one.save(5, tensors, {}, {"unet.a": (first, 5)})
        one.finish()
        read = load_checkpoint(tmp_path / str(first) / "step-00000005").tensors["optimiser"]
        assert set(read) == ({"unet.a/exp_avg", "unet.a/step"} if first == 0 else {"unet.a/exp_avg"})


class Of(Ranks):
    """One of several that takes its own word, so that its share can be seen alone."""

    def broadcast(self, decide):
        return decide()


def test_where_all_hold_all_each_rank_writes_a_part_of_the_weights(tmp_path):
    named = {f"unet.{i}": torch.full((2,), float(i)) for i in range(5)}
    for rank, own in ((1, {"unet.1", "unet.4"}), (2, {"unet.2"})):
        one = Saver(tmp_path, keep=2, ranks=Of(rank, 3), say=print, background=False)
        one.save(5, {"weights": named}, {}, {})
        (written,) = tmp_path.glob(f".writing-*/weights-{rank:05d}.safetensors")
        found = load_file(written)
        assert set(found) == own
        assert all(torch.equal(found[name], named[name]) for name in own)


RECIPE = {
    "train": {"steps": 10, "log_every": 1, "device": "cpu", "micro_batch": 4},
    "optim": {"lr": 0.1, "lr_schedule": "constant"},
    "data": {"workers": 2, "folder": "a"},
}


def changed(**sections: dict[str, object]) -> dict[str, dict[str, object]]:
    """The recipe with other values."""
    made = {name: {**values, **sections.get(name, {})} for name, values in RECIPE.items()}
    read: dict[str, dict[str, object]] = json.loads(json.dumps(made))  # as from a run's folder
    return read


def test_what_changes_nothing_that_is_learned_may_change_unsaid():
    assert check_changes(RECIPE, RECIPE, 5) == []
    assert check_changes(RECIPE, changed(train={"log_every": 7}, data={"workers": 0}), 5) == []


def test_what_changes_the_last_bits_is_said():
    assert check_changes(RECIPE, changed(train={"micro_batch": 2, "device": "cuda"}), 5) == [
        "train.device was cpu and is cuda: no longer bit-identical to an undisturbed run",
        "train.micro_batch was 4 and is 2: no longer bit-identical to an undisturbed run",
    ]


def test_a_run_may_be_made_longer_and_not_shorter_than_it_is():
    assert check_changes(RECIPE, changed(train={"steps": 20}), 5) == ["train.steps was 10 and is 20"]
    assert check_changes(RECIPE, changed(train={"steps": 5}), 5) == ["train.steps was 10 and is 5"]
    with pytest.raises(RecipeError, match="train.steps: 4, but 5 steps are made already"):
        check_changes(RECIPE, changed(train={"steps": 4}), 5)
    before = changed(optim={"lr_schedule": "cosine"})
    now = changed(optim={"lr_schedule": "cosine"}, train={"steps": 20})
    told = "train.steps was 10 and is 20; the rate's cosine decay is stretched over the new length"
    assert check_changes(before, now, 5) == [told]


def test_what_makes_another_run_of_it_is_refused_by_name():
    with pytest.raises(RecipeError, match=r"^optim.lr: .*other settings: optim.lr \(was 0.1, is 0.2\)"):
        check_changes(RECIPE, changed(optim={"lr": 0.2}, data={"workers": 0}), 5)
    with pytest.raises(
        RecipeError, match="^recipe: .*data.folder.*optim.lr|^recipe: .*optim.lr.*data.folder"
    ):
        check_changes(RECIPE, changed(optim={"lr": 0.2}, data={"folder": "b"}), 5)


def test_another_machine_or_version_is_said():
    here = exactness(torch.device("cpu"), "float32", 4)
    assert (here["threads"], here["processes"], here["micro_batch"]) == (torch.get_num_threads(), 1, 4)
    assert here["torch"] == torch.__version__
    assert check_environment(here, here) == []
    told = f"threads was {here['threads']} and is 99: no longer bit-identical to an undisturbed run"
    assert check_environment(here, {**here, "threads": 99}) == [told]


def test_a_card_is_told_by_its_own_name(monkeypatch):
    here = hardware.machine()
    cards = tuple(hardware.Device("cuda", i, f"card {i}", None) for i in range(2))
    monkeypatch.setattr(hardware, "machine", lambda: replace(here, devices=cards))
    told = [
        exactness(torch.device(name), "bf16", 4)["device"] for name in ("cpu", "cuda", "cuda:0", "cuda:1")
    ]
    assert told == [here.cpu, "card 0", "card 0", "card 1"]


def test_a_cards_tensors_go_where_the_last_ones_were(tmp_path, monkeypatch):
    """On a look-alike: pinned memory is made once for a tensor, and anew where its shape or type changed."""
    made, empty_like = [], torch.empty_like

    def noted(tensor, **more):
        made.append(more)
        return empty_like(tensor, **more)

    monkeypatch.setattr(torch, "empty_like", noted)
    one = saver(tmp_path)
    with FakeTensorMode():

        def copied(dtype=torch.float32, shape=(2, 3)):
            there = torch.empty(shape, device="cuda", dtype=dtype)
            [copy] = one._copied("weights", {"unet.a": there}).values()
            assert (copy.device.type, copy.dtype, tuple(copy.shape)) == ("cpu", dtype, shape)
            return copy

        first = copied()
        assert copied() is first
        for changed in (
            {"shape": (3, 2)},
            {"shape": (1, 3)},
            {"dtype": torch.float64},
            {"dtype": torch.bfloat16},
        ):
            other = copied(**changed)
            assert other is not first
            assert copied(**changed) is other
            first = copied()
            assert first is not other
    assert made == [{"device": "cpu", "pin_memory": True}] * (1 + 2 * 4)
