"""The drawn pictures: what they show, what is held out, and that nothing held out is drawn."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from darkroom.quickstart.shapes import (
    COLORS,
    SHAPES,
    Scene,
    Triple,
    all_triples,
    coverage,
    draw,
    held_out,
    scenes,
    varied,
    write_set,
)


def test_there_are_enough_words_to_compose():
    assert len(SHAPES) >= 4
    assert len(COLORS) >= 8
    assert len(all_triples()) == len(set(all_triples())) == len(COLORS) * len(SHAPES) * (len(COLORS) - 1)


def test_captions_are_plain_english():
    assert Triple("red", "circle", "blue").caption == "a red circle on a blue background"
    assert Triple("orange", "star", "black").caption == "an orange star on a black background"
    assert Triple("black", "star", "orange").caption == "a black star on an orange background"


def test_palette_colors_stand_apart():
    colors = np.array(list(COLORS.values()), dtype=float)
    apart = np.linalg.norm(colors[:, None] - colors[None], axis=-1)
    assert apart[~np.eye(len(colors), dtype=bool)].min() > 90


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_triples_are_64_and_leave_each_word_and_pair_to_learn_from(seed):
    hidden = held_out(seed=seed)
    assert len(set(hidden)) == 64
    for part in ("color", "shape", "background"):
        counts = Counter(getattr(t, part) for t in hidden)
        assert max(counts.values()) - min(counts.values()) <= 2
    left = set(all_triples()) - set(hidden)
    assert {(t.color, t.background) for t in left} == {(t.color, t.background) for t in all_triples()}
    assert {(t.color, t.shape) for t in left} == {(t.color, t.shape) for t in all_triples()}
    assert {(t.shape, t.background) for t in left} == {(t.shape, t.background) for t in all_triples()}


def test_another_seed_holds_out_other_triples():
    assert held_out(seed=0) == held_out(seed=0)
    assert held_out(seed=0) != held_out(seed=1)


def test_scenes_never_show_a_held_out_triple_and_use_all_others():
    seen = Counter(scene.triple for scene in scenes(2000, seed=3))
    assert not set(seen) & set(held_out(seed=3))
    assert set(seen) == set(all_triples()) - set(held_out(seed=3))
    assert max(seen.values()) - min(seen.values()) <= 1


def test_without_says_what_is_left_out():
    """The control: with nothing left out the held-out triples do appear."""
    seen = {scene.triple for scene in scenes(2000, seed=3, without=frozenset())}
    assert set(held_out(seed=3)) <= seen


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_lies_within_its_picture_with_room_at_the_rim(shape):
    for scene in scenes(400, seed=5):
        part = coverage(shape, scene.x * 32, scene.y * 32, scene.radius * 32, 32)
        assert part.max() == 1
        assert part[0].max() == part[-1].max() == part[:, 0].max() == part[:, -1].max() == 0


def test_coverage_is_the_area_that_is_covered():
    assert coverage("circle", 16, 16, 10, 32).sum() == pytest.approx(np.pi * 100, rel=0.02)
    assert coverage("square", 16, 16, 10, 32).sum() == pytest.approx((2 * 0.88 * 10) ** 2, rel=0.02)


def test_a_picture_has_its_colors_where_they_belong():
    picture = np.asarray(draw(Scene(Triple("red", "circle", "blue"), x=0.25, y=0.5, radius=0.2), 32))
    assert tuple(picture[16, 8]) == COLORS["red"]
    assert tuple(picture[16, 24]) == tuple(picture[0, 0]) == COLORS["blue"]


def test_a_written_set_is_a_folder_the_importer_knows(tmp_path):
    captions = write_set(tmp_path, 50, seed=1)
    rows = [json.loads(line) for line in (tmp_path / "metadata.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == captions == [s.triple.caption for s in scenes(50, seed=1)]
    with Image.open(tmp_path / rows[7]["file_name"]) as picture:
        assert picture.size == (32, 32)
        assert np.array_equal(np.asarray(picture), np.asarray(draw(list(scenes(8, seed=1))[7])))


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a_few_prompts_show_every_kind(seed):
    """Eight of the held-out ones: all colours and backgrounds, and no shape more than twice."""
    chosen = varied(held_out(seed=seed), 8)
    assert len({triple.color for triple in chosen}) >= 7
    assert len({triple.background for triple in chosen}) >= 7
    shapes = Counter(triple.shape for triple in chosen)
    assert len(shapes) == len(SHAPES)
    assert max(shapes.values()) == 2
    assert set(chosen) <= set(held_out(seed=seed))
    assert len(varied(chosen, 99)) == 8
