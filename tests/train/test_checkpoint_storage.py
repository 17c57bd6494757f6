"""Checkpoints at an address: on an S3 server of this machine, killed, damaged, gone on with elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from darkroom.errors import CheckpointError, DamagedCheckpoint, RecipeError
from darkroom.train import checkpoint_storage
from darkroom.train.checkpoint_storage import (
    Kept,
    LocalPlace,
    RemotePlace,
    check_url,
    newest,
    place_of,
    take_records,
)
from darkroom.train.ranks import ALONE, Ranks
from darkroom.train.run import export, train

pytest.importorskip("moto", reason="moto[server] is not installed")
pytest.importorskip("s3fs", reason="s3fs is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server, and the environment in which it is found."""
    from moto.server import ThreadedMotoServer

    one = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    one.start()
    host, port = one.get_host_and_port()
    told = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    patch = pytest.MonkeyPatch()
    for name, value in told.items():
        patch.setenv(name, value)
    yield told["AWS_ENDPOINT_URL"]
    patch.undo()
    one.stop()


@pytest.fixture
def s3_url(server: str, request: pytest.FixtureRequest) -> str:
    """A prefix of its own in a bucket that is there."""
    import s3fs

    files = s3fs.S3FileSystem()
    if not files.exists("runs"):
        files.mkdir("runs")
    return f"s3://runs/{zlib.crc32(request.node.name.encode())}/a"


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address of its own, in a folder and on the server."""
    if request.param == "file":
        return f"file://{tmp_path}/store"
    address: str = request.getfixturevalue("s3_url")
    return address


def keys(url: str) -> list[str]:
    """All objects under an address, without it."""
    files, root = fsspec.url_to_fs(url)
    files.invalidate_cache()
    return sorted(key.removeprefix(f"{root}/") for key in files.find(root))


def spoil(url: str, key: str) -> None:
    """Change one byte of an object."""
    files, root = fsspec.url_to_fs(url)
    path = f"{root}/{key}"
    content = bytearray(files.cat_file(path))
    content[-1] ^= 1
    files.pipe_file(path, bytes(content))


def tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"weights": {"unet.a": torch.full((5, 3), value)}, "ema": {}}


def save(place: RemotePlace, step: int, token: str = "t", keep: int = 2) -> None:
    place.write_share(step, token, 0, 1, tensors(step), {})
    place.complete(step, token, 1, {"k": step}, keep)


def test_there_and_back_and_the_older_ones_go(url: str, tmp_path: Path) -> None:
    place = RemotePlace(url, tmp_path)
    place.prepare()
    assert place.kept() == []
    for step in (10, 20, 30):
        save(place, step)
    assert place.kept() == [Kept(20, "step-00000020.t"), Kept(30, "step-00000030.t")]
    read = place.load(place.kept()[-1])
    assert (read.step, read.scalars) == (30, {"k": 30})
    assert torch.equal(read.tensors["weights"]["unet.a"], tensors(30)["weights"]["unet.a"])
    assert not torch.equal(read.tensors["weights"]["unet.a"], tensors(20)["weights"]["unet.a"])
    names = ["ema.safetensors", "manifest.json", "state.json", "weights.safetensors"]
    assert keys(url) == [f"step-000000{step}.t/{name}" for step in (20, 30) for name in names]
    place.forget()
    assert list((tmp_path / "checkpoints").glob(".read-*")) == []


def test_large_files_go_and_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_storage, "BLOCK_BYTES", 64)
    url, whole = f"file://{tmp_path}/store", torch.arange(1000.0).reshape(50, 20)
    place = RemotePlace(url, tmp_path)
    place.write_share(3, "t", 0, 1, {"weights": {"unet.a": whole}}, {})
    place.complete(3, "t", 1, {}, 1)
    assert torch.equal(place.load(place.kept()[0]).tensors["weights"]["unet.a"], whole)
    place.forget()
    weights = tmp_path / "store" / place.kept()[0].name / "weights.safetensors"
    content = weights.read_bytes()
    for wrong in (content[:100], content + b"x"):
        weights.write_bytes(wrong)
        told = f"weights.safetensors has {len(wrong)} bytes, not {len(content)}"
        with pytest.raises(DamagedCheckpoint, match=told):
            place.load(place.kept()[0])


def test_shares_of_several_come_together(url: str, tmp_path: Path) -> None:
    place, whole = RemotePlace(url, tmp_path), torch.arange(20.0).reshape(5, 4)
    for rank, (first, rows) in enumerate([(0, whole[:3]), (3, whole[3:])]):
        place.write_share(3, "t", rank, 2, {"weights": {"unet.a": rows}}, {"unet.a": (first, 5)})
    assert place.kept() == []  # without its manifest it does not count
    place.complete(3, "t", 2, {}, 1)
    read = place.load(place.kept()[0]).tensors["weights"]
    assert torch.equal(read["unet.a"], whole)
    assert torch.equal(read.rows("unet.a", 2, 2), whole[2:4])


@pytest.mark.parametrize("key", ["weights.safetensors", "state.json", "manifest.json"])
def test_a_damaged_newest_is_passed_over_aloud(url: str, tmp_path: Path, key: str) -> None:
    place = RemotePlace(url, tmp_path)
    save(place, 10)
    save(place, 20)
    spoil(url, f"step-00000020.t/{key}")
    said: list[str] = []
    _, found = newest([place], said.append, ALONE)
    assert found is not None
    assert found.scalars == {"k": 10}
    assert len(said) == 1
    assert "step-00000020.t' is damaged" in said[0]
    save(place, 20, token="u")  # the same step again, whole: the damaged one goes
    assert [kept.name for kept in place.kept()] == ["step-00000010.t", "step-00000020.u"]
    spoil(url, "step-00000010.t/state.json")
    spoil(url, "step-00000020.u/state.json")
    place.forget()  # the copy that was read before is whole
    with pytest.raises(CheckpointError, match="none of 2 checkpoints"):
        newest([place], said.append, ALONE)


def test_a_copy_is_read_again_only_while_it_is_that_checkpoint(tmp_path: Path) -> None:
    """Whichever of two manifests comes first in order: the address counts, not what was read before."""
    place = RemotePlace(f"file://{tmp_path}/store", tmp_path / "run")
    place.prepare()
    for value in (1.0, 2.0, 1.0):
        place.write_share(20, "t", 0, 1, tensors(value), {})
        place.complete(20, "t", 1, {"k": value}, 1)
        read = place.load(place.kept()[0])
        assert (read.scalars, float(read.tensors["weights"]["unet.a"][0, 0])) == ({"k": value}, value)
    (tmp_path / "store" / "step-00000020.t" / "weights.safetensors").unlink()
    assert place.load(place.kept()[0]).scalars == {"k": 1.0}  # the copy, which is whole
    place.forget()
    with pytest.raises(DamagedCheckpoint, match="no such object"):
        place.load(place.kept()[0])


def test_another_rank_of_the_machine_waits_for_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what the first one has read, and never the store."""
    monkeypatch.setattr(checkpoint_storage, "POLL_S", 0.0)
    place, second = RemotePlace(f"file://{tmp_path}/store", tmp_path / "run"), Ranks(local_rank=1)
    save(place, 20)
    (kept,) = place.kept()
    monkeypatch.setattr(checkpoint_storage, "SHARES_WAIT_S", 0.05)
    with pytest.raises(CheckpointError, match="step-00000020.t' was not read for 0.05 s"):
        place.open(kept, second)
    monkeypatch.setattr(checkpoint_storage, "SHARES_WAIT_S", 60.0)
    reader = threading.Timer(0.2, place.load, [kept])
    reader.start()
    assert place.open(kept, second).scalars == {"k": 20}
    reader.join()
    shutil.rmtree(tmp_path / "store")
    assert place.open(kept, second).scalars == {"k": 20}
    place.forget()
    with pytest.raises(DamagedCheckpoint):
        place.open(kept, ALONE)


def test_a_share_that_never_comes_is_an_error_at_an_address_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_storage, "POLL_S", 0.0)
    monkeypatch.setattr(checkpoint_storage, "SHARES_WAIT_S", 0.05)
    place = RemotePlace(f"file://{tmp_path}/store", tmp_path / "run")
    place.write_share(3, "t", 0, 2, tensors(3), {})
    with pytest.raises(CheckpointError, match="rank 1 has not written its share for 0.05 s"):
        place.complete(3, "t", 2, {}, 1)
    place.failed(3, "t", 1)
    with pytest.raises(CheckpointError, match="rank 1 could not write its share to file://"):
        place.complete(3, "t", 2, {}, 1)
    assert place.kept() == []
    monkeypatch.setattr(checkpoint_storage, "SHARES_WAIT_S", 60.0)
    place.write_share(4, "t", 0, 2, tensors(4), {})
    late = threading.Timer(0.2, place.write_share, [4, "t", 1, 2, {"weights": {"unet.b": torch.ones(2)}}, {}])
    late.start()
    place.complete(4, "t", 2, {}, 1)
    late.join()
    assert [kept.step for kept in place.kept()] == [4]


def test_a_share_is_waited_for_whose_index_is_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems show a file before all that is in it."""
    monkeypatch.setattr(checkpoint_storage, "POLL_S", 0.0)
    place = RemotePlace(f"file://{tmp_path}/store", tmp_path / "run")
    place.write_share(4, "t", 0, 2, tensors(4), {})
    place.write_share(4, "t", 1, 2, {"weights": {"unet.b": torch.ones(2)}}, {})
    index = tmp_path / "store" / "step-00000004.t" / "rank-00001.json"
    whole = index.read_bytes()
    for cut in (0, 1, len(whole.rstrip()) - 1):
        index.write_bytes(whole[:cut])
        monkeypatch.setattr(checkpoint_storage, "SHARES_WAIT_S", 0.05)
        with pytest.raises(CheckpointError, match="rank 1 has not written its share for 0.05 s"):
            place.complete(4, "t", 2, {}, 1)
    monkeypatch.setattr(checkpoint_storage, "SHARES_WAIT_S", 60.0)
    late = threading.Timer(0.2, index.write_bytes, [whole])
    late.start()
    place.complete(4, "t", 2, {}, 1)
    late.join()
    assert [kept.step for kept in place.kept()] == [4]


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.json"])
def test_what_others_look_for_is_put_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Another process sees it whole or not at all, at a path as in the copy to read from."""
    put: list[bytes] = []

    def replace(source: Path, target: Path | str) -> Path:
        if Path(target).name == file:
            assert not Path(target).exists()
            put.append(source.read_bytes())
        return source.replace(target)

    monkeypatch.setattr("darkroom.hardware.system.atomic_replace", replace)
    place = RemotePlace(f"file://{tmp_path}/store", tmp_path / "run")
    save(place, 4)
    place.load(place.kept()[0])
    assert len(put) == (2 if file == "manifest.json" else 1)
    assert all(json.loads(content) for content in put)


def test_a_save_after_an_older_one_was_gone_on_from_replaces_all_others(tmp_path: Path) -> None:
    """The later ones were passed over, and would be tried first again."""
    place = RemotePlace(f"file://{tmp_path}/store", tmp_path / "run")
    save(place, 20)
    save(place, 30)
    save(place, 25, keep=1)
    assert [kept.step for kept in place.kept()] == [25]


def test_records_of_a_run_go_with_its_checkpoints(url: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}\n")
    place = place_of(url, run)
    assert isinstance(place, RemotePlace)
    save(place, 5)
    take_records(place.load(place.kept()[0]), tmp_path / "elsewhere" / "run")
    assert [path.name for path in (tmp_path / "elsewhere" / "run").iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "elsewhere" / "run" / "metrics.jsonl").read_text() == "{}\n"
    own = place_of(None, run)
    assert isinstance(own, LocalPlace)
    assert own.folder == run / "checkpoints"


def test_addresses_are_checked_before_any_work() -> None:
    check_url(None)
    check_url("s3://bucket/prefix")
    for given, told in (("s3://", "names no place"), ("nowhere://bucket/a", "nowhere")):
        with pytest.raises(RecipeError, match=told):
            check_url(given)


def test_a_store_that_fails_is_no_damage(tmp_path: Path) -> None:
    """The older one is not taken where the newest cannot be read just now."""
    place = RemotePlace(f"file://{tmp_path}/store", tmp_path / "run")
    place.prepare()
    save(place, 10)
    save(place, 20)
    weights = tmp_path / "store" / "step-00000020.t" / "weights.safetensors"
    weights.rename(weights.with_name("kept"))
    weights.symlink_to("/proc/self/mem")  # its first byte is an input/output error
    said: list[str] = []
    with pytest.raises(CheckpointError, match="step-00000020.t' could not be read: "):
        newest([place], said.append, ALONE)
    assert said == []
    weights.with_name("kept").rename(weights)
    _, found = newest([place], said.append, ALONE)
    assert found is not None
    assert (found.step, said) == (20, [])


def test_an_address_that_does_not_answer_is_no_mistake_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nobody")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()  # of other tests, which speak with the server that answers
    place = RemotePlace("s3://gone/a", tmp_path)
    place._fs.retries = 1
    s3fs.S3FileSystem.clear_instance_cache()  # this one is for no other test
    with pytest.raises(CheckpointError, match="checkpoint.url: 's3://gone/a' cannot be written: ") as caught:
        place.prepare()
    assert caught.value.exit_code == 1


def test_what_does_not_arrive_whole_does_not_count(url: str, tmp_path: Path) -> None:
    place = RemotePlace(url, tmp_path)
    save(place, 10)
    place.write_share(20, "t", 0, 1, tensors(20), {})
    spoil(url, "step-00000020.t/weights.safetensors")
    with pytest.raises(CheckpointError, match=r"did not arrive whole: weights.safetensors has another hash"):
        place.complete(20, "t", 1, {}, 1)
    assert [kept.step for kept in place.kept()] == [10]  # the older one stays
    place.failed(20, "t", 0)
    assert not [key for key in keys(url) if "20" in key.partition("/")[0]]


KILLED_IN_AN_UPLOAD = """
import os, signal, sys
from pathlib import Path
import torch
from darkroom.train import checkpoint, checkpoint_storage as places
places.BLOCK_BYTES = 5 * 2**20
whole = checkpoint._safetensors
def dies(tensors):
    for i, chunk in enumerate(whole(tensors)):
        yield chunk
        if i == 3:
            os.kill(os.getpid(), signal.SIGKILL)
checkpoint._safetensors = dies
place = places.RemotePlace(sys.argv[1], Path(sys.argv[2]))
large = {"weights": {str(i): torch.ones(2**20 * 3 // 2) for i in range(6)}}
place.write_share(20, "killed", 0, 1, large, {})
"""


def test_a_kill_in_the_middle_of_an_upload_leaves_the_older_one(s3_url: str, tmp_path: Path) -> None:
    import s3fs

    place, files = RemotePlace(s3_url, tmp_path), s3fs.S3FileSystem()
    save(place, 10)
    command = [sys.executable, "-c", KILLED_IN_AN_UPLOAD, s3_url, str(tmp_path)]
    assert subprocess.run(command, timeout=120, env=dict(os.environ)).returncode == -signal.SIGKILL
    begun = [upload["Key"] for upload in files.list_multipart_uploads("runs")]
    assert any("step-00000020.killed/weights.safetensors" in key for key in begun)  # parts were sent
    assert [kept.step for kept in place.kept()] == [10]
    save(place, 15, token="half")
    files.rm_file(f"{s3_url.removeprefix('s3://')}/step-00000015.half/manifest.json")  # killed just before it
    assert newest([place], print, ALONE)[1].step == 10  # type: ignore[union-attr]
    place.prepare()  # the next session clears away
    assert {key.partition("/")[0] for key in keys(s3_url)} == {"step-00000010.t"}
    assert not files.list_multipart_uploads("runs")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("nowhere://bucket/prefix", "nowhere"),
        ("s3://", "names no place"),
    ],
)
def test_an_address_that_cannot_be_is_refused(recipe_of: Any, tmp_path: Path, given: str, told: str) -> None:
    recipe = recipe_of("pretrain", f"checkpoint.url={given}")
    with pytest.raises(RecipeError, match=told):
        train(recipe, out=tmp_path / "run", console=lambda _: None)
    assert not (tmp_path / "run").exists()


def test_a_bucket_that_is_not_there_is_told_first(server: str, recipe_of: Any, tmp_path: Path) -> None:
    recipe = recipe_of("pretrain", "checkpoint.url=s3://missing-bucket/a")
    with pytest.raises(RecipeError, match="'s3://missing-bucket/a' cannot be written"):
        train(recipe, out=tmp_path / "run", console=lambda _: None)


def rows(run: Path) -> list[dict[str, Any]]:
    """What was learned step by step, without how fast."""
    kept = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "lr")} for row in kept]


class Enough(Exception):
    """The machine is gone."""


def test_a_run_goes_on_in_an_empty_folder(s3_url: str, recipe_of: Any, tmp_path: Path) -> None:
    """Lost with its machine after a save; another machine with nothing but recipe and store ends it alike."""
    settings = ("train.steps=8", "checkpoint.every=2", "train.log_every=1")
    recipe = recipe_of("pretrain", *settings, f"checkpoint.url={s3_url}")

    def dies(line: str) -> None:
        if line.startswith("step 5/8"):
            raise Enough

    with pytest.raises(Enough):
        train(recipe, out=tmp_path / "first", console=dies)
    assert list((tmp_path / "first" / "checkpoints").iterdir()) == []
    said: list[str] = []
    train(recipe, out=tmp_path / "second", console=said.append)
    assert any("holds this run up to step 4" in line for line in said)
    assert "going on after step 4 of 8" in said
    train(recipe_of("pretrain", *settings), out=tmp_path / "undisturbed", console=lambda _: None)
    assert rows(tmp_path / "second") == rows(tmp_path / "undisturbed")
    one, other = (
        load_file(tmp_path / name / "model/unet/diffusion_pytorch_model.safetensors")
        for name in ("second", "undisturbed")
    )
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert list((tmp_path / "second" / "checkpoints").glob(".read-*")) == []
    made = export(tmp_path / "second", tmp_path / "model", checkpoint=6, ema=False, say=lambda _: None)
    earlier = load_file(made / "unet/diffusion_pytorch_model.safetensors")
    assert not all(torch.equal(earlier[name], other[name]) for name in other)
    another = recipe_of("pretrain", *settings, "optim.lr=0.001", f"checkpoint.url={s3_url}")
    with pytest.raises(RecipeError, match=r"optim.lr"):
        train(another, out=tmp_path / "third", console=lambda _: None)
    with pytest.raises(RecipeError, match="another run's checkpoints"):
        train(recipe, out=tmp_path / "second", resume="never", console=lambda _: None)


def test_a_run_moves_to_an_address_and_back(recipe_of: Any, tmp_path: Path) -> None:
    """checkpoint.url may change between sessions: the newest of both places is gone on from."""
    address = f"checkpoint.url=file://{tmp_path}/elsewhere"
    settings = ("checkpoint.every=2", "train.log_every=1")

    def session(*more: str, until: int) -> list[str]:
        said: list[str] = []

        def hear(line: str) -> None:
            said.append(line)
            if line.startswith(f"step {until}/8"):
                raise Enough

        recipe = recipe_of("pretrain", *settings, "train.steps=8", *more)
        with suppress(Enough):
            train(recipe, out=tmp_path / "run", console=hear)
        return said

    session(until=3)
    assert "going on after step 2 of 8" in session(address, until=5)
    assert any("going on after step 4 of 8" in line for line in session(until=99))
    train(recipe_of("pretrain", *settings, "train.steps=8"), out=tmp_path / "other", console=lambda _: None)
    assert rows(tmp_path / "run") == rows(tmp_path / "other")
