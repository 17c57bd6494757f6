"""Preparing adds columns that are the same however it was interrupted, and loses nothing that arrives."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from settings import RESOLUTION, fill, picture, tiny

import darkroom
import warm
from darkroom import models
from darkroom.data.images import buckets, decode, nearest_bucket, resize_crop, to_tensor
from darkroom.data.store import Store
from darkroom.errors import ColumnError, InputError, StoreError
from darkroom.models.model import Model
from darkroom.prepare.columns import TextEncoder, VaeEncoder, latents_column, text_column
from darkroom.prepare.job import Notes, PrepareReport, prepare

HERE = Path(__file__).parent


def column_of(store: Store, name: str) -> dict[str, object]:
    """The column's values by row id."""
    table = Store.open(store.path).dataset.to_table(columns=["id", name])
    return dict(zip(table["id"].to_pylist(), table[name].to_pylist(), strict=True))


def run(store: Store, model: Model, **options: object) -> PrepareReport:
    return prepare(store, model, **{"resolution": RESOLUTION, "device": "cpu", "batch_rows": 4, **options})


def latents(store: Store, model: Model) -> dict[str, object]:
    return column_of(store, latents_column(store, RESOLUTION, VaeEncoder(model.vae).identity))


def process(action: str, store: Store, *numbers: float) -> warm.Popen:
    command = [sys.executable, str(HERE / "settings.py"), action, store.path, *map(str, numbers)]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    return warm.Popen(command, stdout=warm.PIPE, stderr=warm.PIPE, text=True, env=alone)


def test_what_a_killed_writer_left_goes(store: Store, model: Model) -> None:
    left = [Path(store.path) / folder / ".tmpAbCdEf" for folder in ("data", "_transactions", "_versions")]
    for file in left:
        file.write_bytes(b"left")
    run(store, model)
    assert not any(file.exists() for file in left)


def test_every_row_gets_its_own_latents(store: Store, model: Model) -> None:
    report = run(store, model)
    vae = VaeEncoder(model.vae)
    name = latents_column(Store.open(store.path), RESOLUTION, vae.identity)
    assert name == f"latents_16_{vae.identity[:8]}"
    assert report.encoded == {name: 30}
    for number, value in ((0, 0), (7, 7), (29, 29)):
        expected = vae.encode(to_tensor(resize_crop(decode(picture(number)), RESOLUTION))[None])[0]
        got = column_of(store, name)[f"{value:032x}"]
        found = torch.from_numpy(np.frombuffer(got["moments"], np.float16).reshape(2, 4, 4, 4).copy())
        assert torch.allclose(found.float(), expected.float(), atol=4e-3)
        assert (got["height"], got["width"]) == (4, 4)
    noted = Store.open(store.path).columns()[name]
    assert noted["darkroom.encoder"] == vae.identity
    assert float(noted["darkroom.scale"]) == vae.scaling.factor
    assert {k: noted[f"darkroom.{k}"] for k in ("kind", "resolution", "crop", "precision", "made_by")} == {
        "kind": "latents",
        "resolution": "16",
        "crop": "centre",
        "precision": "float32",
        "made_by": darkroom.__version__,
    }


def test_text_states_and_the_empty_captions(store: Store, model: Model) -> None:
    run(store, model, text=True, latents=False)
    text = TextEncoder(model.text_encoders, model.tokenizers)
    name = text_column(store, text.identity)
    got = column_of(store, name)[f"{5:032x}"]
    expected = text.encode(["a red circle, number 5"])[0][0]
    assert (got["length"], got["width"]) == tuple(expected.shape)
    found = np.frombuffer(got["states"], np.float16).reshape(expected.shape)
    assert np.allclose(found.astype(np.float32), expected.float().numpy(), atol=4e-3)
    assert got["pooled"] is None
    assert json.loads(store.columns()[name]["darkroom.empty"])["text"]["shape"] == list(expected.shape)


def test_only_what_is_new_is_encoded(store: Store, model: Model) -> None:
    run(store, model)
    before = latents(store, model)
    again = run(store, model)
    assert (list(again.encoded.values()), list(again.done_before.values())) == ([0], [30])
    fill(store, 30, 7)
    with pytest.raises(ColumnError, match=r"7 of 37 rows have no latents_16.*darkroom prepare"):
        latents(store, model)
    more = run(store, model)
    assert (list(more.encoded.values()), list(more.done_before.values())) == ([7], [30])
    after = latents(store, model)
    assert len(after) == 37
    assert {key: after[key] for key in before} == before
    assert "7 rows encoded, 30 were done before" in more.lines()[0]


def test_resolutions_and_encoders_stand_side_by_side(store: Store, model: Model) -> None:
    run(store, model)
    first = latents(store, model)
    run(store, model, resolution=32)
    run(store, tiny(seed=1))
    assert sum(name.startswith("latents_") for name in store.columns()) == 3
    assert latents(store, model) == first
    other = latents(store, tiny(seed=1))
    assert all(other[key] != first[key] for key in first)
    large = column_of(store, latents_column(store, 32, VaeEncoder(model.vae).identity))
    assert {value["height"] for value in large.values()} == {8}


def test_another_encoders_column_is_refused_with_both_hashes(store: Store, model: Model) -> None:
    identity, other = VaeEncoder(model.vae).identity, VaeEncoder(tiny(seed=1).vae).identity
    with pytest.raises(
        ColumnError, match=r"has no latents prepared; run: darkroom prepare .* --resolution 16"
    ):
        latents_column(store, RESOLUTION, identity)
    run(store, model)
    with pytest.raises(ColumnError, match=f"{identity}, the model's is {other}; run: darkroom prepare"):
        latents_column(store, RESOLUTION, other)
    with pytest.raises(ColumnError, match="no latents at resolution 64; allowed: resolution 16"):
        latents_column(store, 64, identity)
    with pytest.raises(ColumnError, match=r"no text prepared; run: darkroom prepare .* --text"):
        text_column(store, other)


def test_a_column_made_otherwise_is_refused(store: Store, model: Model) -> None:
    run(store, model)
    with pytest.raises(
        ColumnError, match="made with precision float32, not bf16; prepare with precision float32"
    ):
        run(store, model, precision="bf16")
    with pytest.raises(ColumnError, match="made with crop centre, not buckets-8"):
        run(store, model, bucket_step=8)
    with pytest.raises(InputError, match="fp16 on a CPU"):
        run(store, model, precision="fp16")
    with pytest.raises(InputError, match="buckets 7; allowed: multiples of 4"):
        run(store, model, bucket_step=7, resolution=24)
    with pytest.raises(InputError, match="resolution 18; allowed: multiples of 4"):
        run(store, model, resolution=18)


def test_a_column_of_the_same_weights_in_another_network_is_refused(store: Store, model: Model) -> None:
    """Weights alone do not say which activation stands between them, nor how many groups are normalised."""

    def columns_of(other: Model) -> tuple[str, str]:
        vae, text = VaeEncoder(other.vae), TextEncoder(other.text_encoders, other.tokenizers)
        return (
            latents_column(store, RESOLUTION, vae.identity, vae.settings),
            text_column(store, text.identity, text.settings),
        )

    run(store, model, text=True)
    made = columns_of(model)
    for part, key, value in (("vae", "act_fn", "relu"), ("text_encoder", "hidden_act", "gelu")):
        other = tiny(overrides={part: {key: value}})
        assert models.identity(other.modules[part]) == models.identity(model.modules[part])
        was = model.modules[part].config.to_dict()[key] if part != "vae" else model.vae.config[key]
        with pytest.raises(
            ColumnError, match=f"same weights with {key} {was}, the model's has {key} {value}"
        ):
            columns_of(other)
        with pytest.raises(ColumnError, match=f"same weights with {key} {was}"):
            run(store, other, text=True)
    assert columns_of(tiny()) == made, "the control: the same network, made anew"


def test_a_column_of_an_earlier_version_is_read(store: Store, model: Model) -> None:
    run(store, model)
    vae = VaeEncoder(model.vae)
    name = latents_column(store, RESOLUTION, vae.identity, vae.settings)
    noted = {key: value for key, value in store.columns()[name].items() if "settings" not in key}
    store.dataset.replace_field_metadata(name, noted)
    store.refresh()
    assert "darkroom.encoder_settings" not in store.columns()[name]
    assert latents_column(store, RESOLUTION, vae.identity, vae.settings) == name
    assert run(store, model).encoded[name] == 0


def test_buckets_keep_aspect_ratios(store: Store, model: Model) -> None:
    run(store, model, bucket_step=8, resolution=24)
    found = column_of(store, latents_column(store, 24, VaeEncoder(model.vae).identity))
    sizes = buckets(24, step=8)
    for number in (0, 1):
        width, height = nearest_bucket(*decode(picture(number)).size, sizes)
        value = found[f"{number:032x}"]
        assert (value["width"], value["height"]) == (width // 4, height // 4)
    assert len({(value["width"], value["height"]) for value in found.values()}) == 2


def test_deleted_and_joined_rows_keep_their_latents(store: Store, model: Model) -> None:
    store.dataset.delete("phash IN (0, 1, 2, 14, 29)")  # marked as deleted, in the middle of fragments
    store.refresh()
    assert sum(run(store, model).encoded.values()) == 25
    kept = latents(store, model)
    fill(store, 30, 6)
    store.delete(ids=[f"{i:032x}" for i in (5, 31)])
    store.compact()  # one fragment of encoded rows and null ones
    assert len(store.fragments) == 1
    report = run(store, model)
    assert (list(report.encoded.values()), list(report.done_before.values())) == ([5], [24])
    after = latents(store, model)
    assert {key: after[key] for key in kept if key in after} == {
        k: v for k, v in kept.items() if k != f"{5:032x}"
    }
    assert len(after) == 29
    assert None not in after.values()


def test_pictures_that_cannot_be_decoded_are_told_and_refused(store: Store, model: Model) -> None:
    fill(store, 30, 5, broken=(31, 33))
    lost = [f"{31:032x}", f"{33:032x}"]
    for encoded in (33, 0):  # told again by the second run
        report = run(store, model)
        assert report.unreadable == lost
        assert sum(report.encoded.values()) == encoded
    assert "2 pictures could not be decoded" in report.lines()[1]
    with pytest.raises(ColumnError, match="2 of 35 rows have no"):
        latents(store, model)
    store.delete(ids=lost)
    assert len(latents(store, model)) == 33


def test_one_process_at_a_time(store: Store, model: Model) -> None:
    name = run(store, model).columns[0]
    with Notes(store.path, name), pytest.raises(StoreError, match=f"another process is preparing {name}"):
        run(store, model)
    assert sum(run(store, model).encoded.values()) == 0


def test_a_finished_but_uncommitted_fragment_is_taken_over(store: Store, model: Model, monkeypatch) -> None:
    """What a kill right before the commit leaves: notes and files, which the next run commits unencoded."""
    import lance

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lance.LanceDataset, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            run(store, model)
    report = run(store, model)
    assert (list(report.encoded.values()), list(report.done_before.values())) == ([0], [30])
    assert None not in latents(store, model).values()
    assert not list(Path(store.path).glob("_prepare/*/*.lance"))


@pytest.mark.nightly
def test_killed_at_random_moments_the_columns_are_the_same_to_the_bit(tmp_path: Path, model: Model) -> None:
    calm, killed = (Store.create(tmp_path / f"{name}.lance") for name in ("calm", "killed"))
    for start in range(0, 600, 20):
        fill(calm, start, 20)
        fill(killed, start, 20)
    began = time.perf_counter()
    run(calm, model, text=True)
    calm_s = time.perf_counter() - began
    worker = process("kills", killed, 0, calm_s / 4)
    said, complained = worker.communicate(timeout=300)
    assert worker.returncode == 0, complained
    assert int(said) >= 5
    names = [name for name in Store.open(calm.path).columns() if name.startswith(("latents_", "text_"))]
    assert len(names) == 2
    for name in names:
        whole = column_of(calm, name)
        assert None not in whole.values()
        assert column_of(killed, name) == whole
    assert not [path for path in Path(killed.path).glob("_prepare/*/*") if path.name != "lock"]


@pytest.mark.nightly
def test_a_store_that_moves_meanwhile_loses_nothing(store: Store, model: Model) -> None:
    """Another process imports, deletes and joins fragments; in the end every row has its own latents."""
    worker = process("disturb", store, 1)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    runs = 0
    while worker.poll() is None:
        run(store, model)
        runs += 1
    assert worker.returncode == 0, worker.communicate()[1]
    run(store, model)
    found = latents(Store.open(store.path), model)
    assert runs > 1
    assert 30 + 12 * 5 - 12 <= len(found) < 30 + 12 * 5
    vae = VaeEncoder(model.vae)
    for key, value in found.items():
        expected = vae.encode(to_tensor(resize_crop(decode(picture(int(key, 16))), RESOLUTION))[None])[0]
        moments = np.frombuffer(value["moments"], np.float16).reshape(expected.shape).astype(np.float32)
        assert np.allclose(moments, expected.float().numpy(), atol=8e-3)
