"""Checkpoints: exact there and back, whole or not there, the older one kept until the newer is proven."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import warm
from darkroom.errors import CheckpointError
from darkroom.train.checkpoint import (
    Checkpoint,
    checkpoints,
    load_checkpoint,
    reading,
)
from darkroom.train.checkpoint_storage import LocalPlace, newest
from darkroom.train.ranks import ALONE

AWKWARD = {"tenth": 0.1, "third": 1 / 3, "tiny": 5e-324, "large": 1.7976931348623157e308, "n": 2**62 + 1}


def tensors(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    kernel = torch.randn(8, 4, 3, 3, generator=generator).to(memory_format=torch.channels_last)
    weights = {"unet.conv.weight": kernel, "unet.step": torch.tensor(3.0), "half": torch.ones(3).bfloat16()}
    return {"weights": weights, "ema": {}}


def save_checkpoint(folder: Path, step: int, named: Any, scalars: dict[str, Any], *, keep: int) -> Path:
    """As one process of a run saves."""
    folder.mkdir(parents=True, exist_ok=True)
    place, token = LocalPlace(folder), str(os.getpid())
    place.prepare()
    place.write_share(step, token, 0, 1, named, {})
    place.complete(step, token, 1, scalars, keep)
    return folder / f"step-{step:08d}"


def newest_in(*folders: Path, say: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
    """As a run that goes on looks for it."""
    return newest([LocalPlace(folder) for folder in folders], say, ALONE)[1]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_reads_back_to_the_bit(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 7, tensors(), AWKWARD, keep=2)
    read = load_checkpoint(path)
    assert (read.step, read.scalars) == (7, AWKWARD)
    assert same(read.tensors["weights"], tensors()["weights"])
    assert read.tensors["ema"] == {}
    assert not same(read.tensors["weights"], tensors(seed=1)["weights"])


def test_the_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 7, tensors(), {}, keep=2)
    assert same(load_file(path / "weights.safetensors"), tensors()["weights"])
    names = sorted(file.name for file in path.iterdir())
    assert names == ["ema.safetensors", "manifest.json", "state.json", "weights.safetensors"]
    assert json.loads((path / "manifest.json").read_text())["step"] == 7


def test_tensors_begin_on_whole_words_whatever_their_names(tmp_path: Path) -> None:
    for length in range(1, 9):
        named = {"weights": {"a" * length: torch.ones(3)}}
        raw = (save_checkpoint(tmp_path, length, named, {}, keep=1) / "weights.safetensors").read_bytes()
        assert int.from_bytes(raw[:8], "little") % 8 == 0


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30, 100_000_000):
        save_checkpoint(tmp_path, step, tensors(step), {}, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000030", "step-100000000"]
    assert len(list(tmp_path.iterdir())) == 2


def damage_a_byte(path: Path) -> None:
    file = path / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def cut_short(path: Path) -> None:
    os.truncate(path / "weights.safetensors", 100)


def lose_a_file(path: Path) -> None:
    (path / "state.json").unlink()


def spoil_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def point_outside(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../etc.safetensors"] = manifest["files"].pop("weights.safetensors")
    (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = [damage_a_byte, cut_short, lose_a_file, spoil_manifest, point_outside]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over_aloud(tmp_path: Path, damage: object) -> None:
    save_checkpoint(tmp_path, 10, tensors(1), {"k": 10}, keep=2)
    newest = save_checkpoint(tmp_path, 20, tensors(2), {"k": 20}, keep=2)
    damage(newest)  # type: ignore[operator]
    said: list[str] = []
    found = newest_in(tmp_path, say=said.append)
    assert found is not None
    assert (found.step, found.scalars) == (10, {"k": 10})
    assert len(said) == 1
    assert "step-00000020' is damaged" in said[0]
    save_checkpoint(tmp_path, 20, tensors(3), {"k": 20}, keep=2)  # its place can be taken
    again = newest_in(tmp_path, say=said.append)
    assert again is not None
    assert same(again.tensors["weights"], tensors(3)["weights"])


def test_none_whole_is_an_error_and_none_at_all_is_not(tmp_path: Path) -> None:
    assert newest_in(tmp_path) is None
    damage_a_byte(save_checkpoint(tmp_path, 10, tensors(), {}, keep=2))
    with pytest.raises(CheckpointError, match="none of 1 checkpoints .* another hash"):
        newest_in(tmp_path)


def test_all_damaged_ones_are_passed_over_in_all_places(tmp_path: Path) -> None:
    """Two places, as after `checkpoint.url` changed: the newest whole one of both, on a tie the first's."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, step, k in [
        (here, 10, "a"),
        (there, 10, "b"),
        (there, 20, "c"),
        (here, 30, "d"),
        (here, 40, "e"),
    ]:
        save_checkpoint(folder, step, tensors(step), {"k": k}, keep=9)
    expected = {"e": here / "step-00000040", "d": here / "step-00000030", "c": there / "step-00000020"}
    said: list[str] = []
    for k, path in expected.items():
        said.clear()
        found = newest_in(here, there, say=said.append)
        assert found is not None
        assert (found.scalars, found.path) == ({"k": k}, path)
        damage_a_byte(path)
    assert [line.partition("' is damaged")[0].rpartition("/")[2] for line in said] == [
        "step-00000040",
        "step-00000030",
    ]
    tied = newest_in(here, there)
    assert tied is not None
    assert tied.scalars == {"k": "a"}
    damage_a_byte(here / "step-00000010")
    other = newest_in(here, there)
    assert other is not None
    assert other.scalars == {"k": "b"}
    damage_a_byte(there / "step-00000010")
    with pytest.raises(
        CheckpointError, match=r"none of 5 checkpoints in '.*here' and '.*there' is whole: .*-00000040"
    ):
        newest_in(here, there)


@pytest.mark.parametrize("file", ["weights.safetensors", "ema.safetensors"])
def test_an_older_one_goes_only_when_the_new_one_reads_back(tmp_path: Path, file: str) -> None:
    """A disk that loses what it was given: the new one is refused, and the one before still opens."""
    save_checkpoint(tmp_path, 10, tensors(1), {"k": 10}, keep=1)
    place = LocalPlace(tmp_path)
    place.write_share(20, "t", 0, 1, tensors(2), {})
    written = next(tmp_path.glob(f".writing-*/{file}"))
    content = bytearray(written.read_bytes())
    content[-1] ^= 1
    written.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=f"step-00000020' is damaged: {file} has another hash"):
        place.complete(20, "t", 1, {"k": 20}, 1)
    found = newest_in(tmp_path)
    assert found is not None
    assert found.scalars == {"k": 10}
    assert same(found.tensors["weights"], tensors(1)["weights"])
    place.write_share(30, "t", 0, 1, tensors(3), {})  # one that reads back takes its place
    place.complete(30, "t", 1, {"k": 30}, 1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000030"]


SAVES_WITHOUT_PAUSE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoint import checkpoints, save_checkpoint, tensors
folder = Path(sys.argv[2])
print("ready", flush=True)
step = max((int(path.name[5:]) for path in checkpoints(folder)), default=0)
while True:
    step += 1
    save_checkpoint(folder, step, tensors(step), {"k": step}, keep=1)
"""


@pytest.mark.nightly
def test_a_process_killed_while_saving_leaves_a_whole_one(tmp_path: Path) -> None:
    """SIGKILL to processes that do nothing but save."""
    folder, found = tmp_path / "checkpoints", None
    for i in range(5):
        command = [sys.executable, "-c", SAVES_WITHOUT_PAUSE, str(Path(__file__).parent), str(folder)]
        with warm.Popen(command, stdout=warm.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(0.05 + 0.013 * i)
            child.kill()
        if (found := newest_in(folder)) is not None:
            assert found.scalars == {"k": found.step}
            assert same(found.tensors["weights"], tensors(found.step)["weights"])
    assert found is not None
    save_checkpoint(folder, found.step + 1, tensors(), {}, keep=1)
    assert len(list(folder.iterdir())) == 1  # what the killed ones left is cleared away


def test_a_disk_that_fails_is_no_damage(tmp_path: Path) -> None:
    """No older checkpoint is taken, and none said to be damaged, where files cannot be opened just now."""
    save_checkpoint(tmp_path, 10, tensors(1), {"k": 10}, keep=2)
    newest = save_checkpoint(tmp_path, 20, tensors(2), {"k": 20}, keep=2)
    said: list[str] = []
    weights = newest / "weights.safetensors"
    weights.rename(newest / "kept")
    weights.symlink_to("/proc/self/mem")  # a file whose first byte is an input/output error
    with pytest.raises(CheckpointError, match="could not be read: .*Input/output error") as caught:
        newest_in(tmp_path, say=said.append)
    assert said == []
    assert f"'{newest}'" in str(caught.value)
    assert "damaged" not in str(caught.value)
    (newest / "kept").rename(weights)
    found = newest_in(tmp_path, say=said.append)
    assert found is not None
    assert (found.step, said) == (20, [])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "lists no files"),
        ('{"files": []}', "lists no files"),
        ('{"files": {"a": 1}}', "lists no files"),
        ("[" * 100_000, "manifest.json: "),
        ('{"files": {"a": {"bytes": 1}}}', "lists no files"),
        ('{"files": {"a": {"sha256": ""}}}', "lists no files"),
        ('{"files": {"x/a": {"bytes": 1, "sha256": ""}}}', "'x/a' is no file name"),
        ('{"files": {}, "step": 20, "format": 2}', "does not belong to it"),
    ],
)
def test_a_list_of_another_shape_is_damage(tmp_path: Path, content: str, told: str) -> None:
    (save_checkpoint(tmp_path, 20, tensors(2), {}, keep=2) / "manifest.json").write_text(content)
    said: list[str] = []
    with pytest.raises(CheckpointError, match="none of 1"):
        newest_in(tmp_path, say=said.append)
    assert len(said) == 1
    assert told in said[0]


class StoreError(Exception):
    """As a store's own package raises it."""


def fail_with(error: Exception) -> None:
    with reading("checkpoint 'x'"):
        raise error


def test_what_a_store_raises_is_told_and_a_mistake_of_ours_is_raised_as_it_is() -> None:
    with pytest.raises(CheckpointError, match="checkpoint 'x' could not be read: no answer; run the same"):
        fail_with(StoreError("no\nanswer"))
    with pytest.raises(CheckpointError, match="could not be read: StoreError;"):
        fail_with(StoreError())
    with pytest.raises(CheckpointError, match="checkpoint 'x' is damaged: gone"):
        fail_with(FileNotFoundError("gone"))
    with pytest.raises(KeyError):
        fail_with(KeyError("ours"))


def test_of_three_places_each_is_read_where_it_is(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for i, folder in enumerate(folders):
        for step in (10, 20):
            save_checkpoint(folder, step + i, tensors(step + i), {"k": step + i}, keep=9)
    for step, folder in ((22, folders[2]), (21, folders[1]), (20, folders[0])):
        found = newest_in(*folders)
        assert found is not None
        assert (found.step, found.scalars, found.path.parent) == (step, {"k": step}, folder)
        place, _ = newest([LocalPlace(one) for one in folders], lambda _: None, ALONE)
        assert isinstance(place, LocalPlace)
        assert place.folder == folder
        damage_a_byte(found.path)
