"""The scorer: always right on drawn truth, chance on noise and on shuffled captions."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageFilter

from darkroom.quickstart.journey import UNKNOWN, judge, look, score
from darkroom.quickstart.shapes import COLORS, SHAPES, Scene, Triple, draw, scenes

CHANCE_COLORS = 1 / (len(COLORS) * (len(COLORS) - 1))
CHANCE_SHAPE = 1 / len(SHAPES)


def drawn(count: int, seed: int = 11, size: int = 32) -> tuple[list[Image.Image], list[Triple]]:
    chosen = list(scenes(count, seed=seed, without=frozenset()))
    return [draw(scene, size) for scene in chosen], [scene.triple for scene in chosen]


@pytest.mark.parametrize(("size", "count"), [(32, 336), (48, 60), (64, 60)])
def test_drawn_truth_scores_100_percent(size, count):
    pictures, wanted = drawn(count, size=size)
    scores = score(pictures, wanted)
    assert (scores.color_fidelity, scores.shape_fidelity, scores.all_fidelity) == (1.0, 1.0, 1.0)
    assert min(seen.overlap for seen in scores.seen) > 0.9


def test_slightly_soft_and_grainy_truth_is_still_read():
    """A decoder's output is never exact: blur of 0.6 px and a grain of 6 levels are forgiven."""
    rng = np.random.default_rng(0)
    pictures, wanted = drawn(120)
    soft = [np.asarray(p.filter(ImageFilter.GaussianBlur(0.6)), dtype=float) for p in pictures]
    grainy = [Image.fromarray((p + rng.normal(0, 6, p.shape)).clip(0, 255).astype(np.uint8)) for p in soft]
    scores = score(grainy, wanted)
    assert scores.color_fidelity == 1.0
    assert scores.shape_fidelity == 1.0


def test_noise_scores_no_better_than_chance():
    rng = np.random.default_rng(0)
    _, wanted = drawn(200)
    noise = [Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in wanted]
    scores = score(noise, wanted)
    assert scores.color_fidelity <= CHANCE_COLORS
    assert scores.shape_fidelity <= CHANCE_SHAPE


def test_smooth_noise_scores_no_better_than_chance():
    """Blobs in two palette colours, the nearest that nonsense comes to a picture of the set."""
    rng = np.random.default_rng(1)
    _, wanted = drawn(200)
    blobs = []
    for _ in wanted:
        field = Image.fromarray(rng.integers(0, 256, (32, 32), dtype=np.uint8)).filter(
            ImageFilter.GaussianBlur(3)
        )
        inside = (np.asarray(field) > 132)[..., None]
        front, back = (np.array(color) for color in rng.permutation(list(COLORS.values()))[:2])
        blobs.append(Image.fromarray(np.where(inside, front, back).astype(np.uint8)))
    scores = score(blobs, wanted)
    assert scores.color_fidelity <= CHANCE_COLORS + 0.03
    assert scores.shape_fidelity <= CHANCE_SHAPE
    assert np.mean([seen.shape == UNKNOWN for seen in scores.seen]) > 0.9


def test_shuffled_captions_score_chance():
    pictures, wanted = drawn(336)
    seen, rng = [look(picture) for picture in pictures], np.random.default_rng(0)
    rounds = [judge(seen, [wanted[i] for i in rng.permutation(len(wanted))]) for _ in range(20)]
    assert np.mean([s.shape_fidelity for s in rounds]) == pytest.approx(CHANCE_SHAPE, abs=0.02)
    assert np.mean([s.color_fidelity for s in rounds]) == pytest.approx(CHANCE_COLORS, abs=0.006)
    assert judge(seen, wanted).all_fidelity == 1.0


def test_unknown_counts_as_wrong():
    empty = Image.new("RGB", (32, 32), COLORS["blue"])
    wanted = Triple("red", "circle", "blue")
    scores = score([empty, draw(Scene(wanted))], [wanted, wanted])
    assert scores.seen[0].shape == scores.seen[0].color == UNKNOWN
    assert scores.seen[0].background == "blue"
    assert (scores.color_fidelity, scores.shape_fidelity, scores.all_fidelity) == (0.5, 0.5, 0.5)


def test_each_part_is_judged_by_itself():
    picture = draw(Scene(Triple("red", "circle", "blue")))
    wrong_color = score([picture], [Triple("green", "circle", "blue")])
    wrong_background = score([picture], [Triple("red", "circle", "green")])
    wrong_shape = score([picture], [Triple("red", "heart", "blue")])
    assert (wrong_color.color_fidelity, wrong_color.shape_fidelity) == (0, 1)
    assert (wrong_background.color_fidelity, wrong_background.shape_fidelity) == (0, 1)
    assert (wrong_shape.color_fidelity, wrong_shape.shape_fidelity) == (1, 0)


def test_a_shape_that_is_not_of_the_set_is_unknown():
    stripes = np.zeros((32, 32, 3), np.uint8) + np.array(COLORS["blue"], np.uint8)
    stripes[8:12, 4:28] = stripes[20:24, 4:28] = COLORS["red"]
    assert look(Image.fromarray(stripes)).shape == UNKNOWN


def test_colors_between_two_of_the_palette_are_unknown():
    red, green = (np.array(COLORS[name], float) for name in ("red", "green"))
    halfway = Image.new("RGB", (32, 32), tuple(int(c) for c in (red + green) / 2))
    assert look(halfway).background == UNKNOWN


def test_pictures_and_captions_must_be_as_many():
    with pytest.raises(ValueError, match="zip"):
        score([Image.new("RGB", (32, 32))], [])
