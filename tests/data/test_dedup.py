"""Near-doubles are found by hash and by pixels, marked in a column, and left out by a filter."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from material import encoded, noise_picture
from PIL import Image, ImageDraw

from darkroom.data import verify
from darkroom.data.importers.job import import_pictures
from darkroom.data.inspect import candidates, describe, find_doubles, mark_doubles
from darkroom.data.store import Store
from darkroom.errors import InputError


def store_of(folder: Path, pictures: list[bytes]) -> Store:
    """A store of the pictures in this order, through a real import."""
    folder.mkdir(exist_ok=True)
    with (folder / "metadata.jsonl").open("w") as file:
        for number, data in enumerate(pictures):
            (folder / f"{number:04d}.png").write_bytes(data)
            file.write(json.dumps({"file_name": f"{number:04d}.png", "text": f"picture {number}"}) + "\n")
    import_pictures(folder, folder.with_suffix(".lance"))
    return Store.open(folder.with_suffix(".lance"))


def photo(seed: int) -> Image.Image:
    return noise_picture(seed, (240, 200))


def circle(colour: str, background: str) -> bytes:
    image = Image.new("RGB", (64, 64), background)
    ImageDraw.Draw(image).ellipse((16, 16, 48, 48), fill=colour)
    return encoded(image)


def test_copies_are_found_and_others_are_not(tmp_path):
    store = store_of(
        tmp_path / "a",
        [
            encoded(photo(1)),
            encoded(photo(2)),
            encoded(photo(1).resize((120, 100)), "JPEG", quality=70),
            encoded(photo(3)),
            encoded(photo(1), "WEBP", quality=60),
            encoded(photo(3).resize((480, 400))),
        ],
    )
    assert find_doubles(store) == {2: 0, 4: 0, 5: 3}


def test_pictures_of_one_hash_but_other_colours_stay_apart(tmp_path):
    """A hash of grey differences cannot tell these, which is why pixels decide."""
    pictures = [circle("red", "white"), circle("green", "white"), circle("red", "yellow")]
    plain = [encoded(Image.new("RGB", (32, 32), colour)) for colour in ("red", "blue", "white")]
    store = store_of(tmp_path / "a", [*pictures, *plain])
    hashes = store.take(store.select(None), ["phash"])["phash"].to_pylist()
    assert len(set(hashes)) < len(hashes), "the control: the hashes alone do not tell them apart"
    assert find_doubles(store) == {}


def test_marks_make_a_filter_and_follow_what_is_imported(tmp_path):
    store = store_of(tmp_path / "a", [encoded(photo(1)), encoded(photo(2)), encoded(photo(1), "WEBP")])
    assert mark_doubles(store) == 1
    assert store.select("double_of IS NULL").tolist() == [0, 1]
    ids = store.take([0, 2], ["id", "double_of"])
    assert ids["double_of"].to_pylist() == [None, ids["id"][0].as_py()]
    version = store.version
    assert mark_doubles(store) == 1
    assert store.version == version, "nothing changed, nothing written"
    store = store_of(
        tmp_path / "a", [encoded(photo(i), f) for i, f in ((1, "PNG"), (2, "PNG"), (1, "WEBP"), (2, "WEBP"))]
    )
    assert mark_doubles(store) == 2
    assert store.select("double_of IS NULL").tolist() == [0, 1]
    store.delete(ids=[store.take([0], ["id"])["id"][0].as_py()])
    assert mark_doubles(store) == 1
    assert len(store.select("double_of IS NULL")) == 2


def test_a_double_takes_the_place_of_a_picture_that_is_deleted(tmp_path):
    """Or a filter by `double_of` would leave out all of them."""
    kinds = ((1, "PNG"), (2, "PNG"), (1, "WEBP"), (1, "BMP"), (2, "WEBP"))
    store = store_of(tmp_path / "a", [encoded(photo(i), f) for i, f in kinds])
    assert mark_doubles(store) == 3
    ids = store.take(range(5), ["id"])["id"].to_pylist()
    by_id = dict(zip(ids, kinds, strict=True))

    def marks() -> dict[str, str | None]:
        rows = store.take(store.select(None), ["id", "double_of"]).to_pylist()
        return {row["id"]: row["double_of"] for row in rows}

    assert [by_id[id_] for id_, mark in marks().items() if mark is None] == [(1, "PNG"), (2, "PNG")]
    store.delete(ids=[ids[0]])
    left = marks()
    assert left[ids[2]] is None, "the first of its doubles stands for it"
    assert left[ids[3]] == ids[2]
    assert left[ids[4]] == ids[1], "the control: other marks stay"
    assert describe(store)["doubles"]["marked"] == 2
    assert verify(store).problems == []


def test_candidates_are_all_pairs_within_the_distance():
    """Against the plain comparison of all with all, where groups hang together by steps."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2**63, 40, dtype=np.uint64)
    flips = np.array(
        [sum(1 << int(b) for b in rng.choice(64, n, replace=False)) for n in range(6)], np.uint64
    )
    hashes = np.concatenate([base, base[:20] ^ flips[3], base[:10] ^ flips[5], base[5:8]])
    for distance in (0, 1, 3, 5, 7):
        near = np.bitwise_count(hashes[:, None] ^ hashes[None]) <= distance
        reach = np.linalg.matrix_power(near.astype(float), 8) > 0
        expected = {tuple(np.flatnonzero(row).tolist()) for row in reach if row.sum() > 1}
        assert {tuple(sorted(g.tolist())) for g in candidates(hashes, distance)} == expected


def test_an_impossible_distance_is_told(store):
    with pytest.raises(InputError, match="allowed: 0 to 7"):
        find_doubles(store, max_distance=20)


def test_pictures_that_do_not_decode_are_like_nothing(store):
    assert mark_doubles(store) == 0
