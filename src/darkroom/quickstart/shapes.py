"""Pictures of coloured shapes with captions, drawn by the program itself.

A scene is a colour, a shape and a background, with a place and a size. The set leaves out 64
colour-shape-background triples, each of whose words is seen in many other triples: a model that
draws those has learned to compose and not to copy.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (216, 38, 44),
    "orange": (247, 142, 30),
    "yellow": (250, 224, 70),
    "green": (34, 150, 76),
    "blue": (38, 84, 204),
    "purple": (132, 50, 164),
    "white": (246, 246, 246),
    "black": (22, 22, 26),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross")
PICTURE_SIZE = 32  # pixels a side
NUM_HELD_OUT = 64
RADII = (0.29, 0.34)  # of the picture's side
# How far a centre may lie from the middle. Place and outline compete in the noisiest steps: at 0.13 the
# word for the shape explains half as much of the noise, and a short training does not learn it.
JITTER = 0.05
_OVERSAMPLE = 8  # sub-pixels a side; also the grid that polygon corners are rounded to

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, order=True)
class Triple:
    """What a caption says: a colour, a shape and the background's colour."""

    color: str
    shape: str
    background: str

    @property
    def caption(self) -> str:
        """Its caption, as training sees it."""
        return f"{_with_article(self.color)} {self.shape} on {_with_article(self.background)} background"


def _with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


@dataclass(frozen=True)
class Scene:
    """A triple with its place: centre and radius as parts of the picture's side."""

    triple: Triple
    x: float = 0.5
    y: float = 0.5
    radius: float = 0.32


def all_triples() -> list[Triple]:
    """Every colour, shape and background of another colour, in a fixed order."""
    return [Triple(c, s, b) for c in COLORS for s in SHAPES for b in COLORS if b != c]


def held_out(count: int = NUM_HELD_OUT, *, seed: int = 0) -> list[Triple]:
    """`count` triples kept from training, spread evenly over colours, shapes and backgrounds."""
    rng = np.random.default_rng([seed, 64])
    triples = all_triples()
    return sorted(varied([triples[i] for i in rng.permutation(len(triples))], count))


def varied(triples: Sequence[Triple], count: int) -> list[Triple]:
    """At most `count` of them, spread evenly over colours, shapes and backgrounds; of equals the first."""
    used: dict[str, int] = {}
    left = list(triples)
    chosen: list[Triple] = []
    while left and len(chosen) < count:
        best = min(left, key=lambda t: sum(used.get(k, 0) ** 2 for k in _keys(t)))
        left.remove(best)
        chosen.append(best)
        for k in _keys(best):
            used[k] = used.get(k, 0) + 1
    return chosen


def _keys(t: Triple) -> tuple[str, ...]:
    """What to balance: each word, and each pair of words so that no pair is lost altogether."""
    return (
        t.color,
        t.shape,
        "on " + t.background,
        f"{t.color} {t.shape}",
        f"{t.shape} on {t.background}",
        f"{t.color} on {t.background}",
    )


def scenes(count: int, *, seed: int = 0, without: frozenset[Triple] | None = None) -> Iterator[Scene]:
    """`count` random scenes, their triples taken in turn from a shuffled list without those held out."""
    hidden = frozenset(held_out(seed=seed)) if without is None else without
    triples = [t for t in all_triples() if t not in hidden]
    rng = np.random.default_rng([seed, 1])
    for i in range(count):
        if i % len(triples) == 0:
            order = rng.permutation(len(triples))
        radius = float(rng.uniform(*RADII))
        x, y = 0.5 + rng.uniform(-JITTER, JITTER, 2)
        yield Scene(triples[order[i % len(triples)]], float(x), float(y), radius)


def outline(shape: str) -> npt.NDArray[np.float64]:
    """Corners [N, 2] (x, y; y downwards) of a shape around the origin, mostly of radius 1."""
    turn = np.linspace(0, 2 * np.pi, 96, endpoint=False)
    if shape == "circle":
        return np.stack([np.cos(turn), np.sin(turn)], 1)
    if shape == "square":
        return np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * 0.88
    if shape == "triangle":
        return np.array([[0, -1.0], [1.05, 0.85], [-1.05, 0.85]])
    if shape == "star":
        angle = np.arange(10) * np.pi / 5 - np.pi / 2
        reach = np.where(np.arange(10) % 2 == 0, 1.15, 0.48)
        return np.stack([reach * np.cos(angle), reach * np.sin(angle)], 1)
    if shape == "heart":
        x = 16 * np.sin(turn) ** 3
        y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
        return np.stack([x / 15.5, -(y + 2.5) / 15.5], 1)
    if shape == "cross":
        a, b = 1.0, 0.34
        return np.array(
            [
                [-b, -a],
                [b, -a],
                [b, -b],
                [a, -b],
                [a, b],
                [b, b],
                [b, a],
                [-b, a],
                [-b, b],
                [-a, b],
                [-a, -b],
                [-b, -b],
            ]
        )
    raise KeyError(shape)


def coverage(shape: str, x: float, y: float, radius: float, size: int) -> FloatArray:
    """The part of each pixel [size, size] that a shape covers, 0..1. x, y and radius in pixels."""
    mask = Image.new("L", (size * _OVERSAMPLE, size * _OVERSAMPLE), 0)
    corners = (outline(shape) * radius + np.array([x, y])) * _OVERSAMPLE - 0.5
    ImageDraw.Draw(mask).polygon([tuple(c) for c in corners], fill=255)
    part: FloatArray = np.asarray(mask.reduce(_OVERSAMPLE)).astype(np.float32) / np.float32(255)
    return part


def draw(scene: Scene, size: int = PICTURE_SIZE) -> Image.Image:
    """The scene as an RGB picture with smooth edges."""
    part_HW1 = coverage(scene.triple.shape, scene.x * size, scene.y * size, scene.radius * size, size)[
        ..., None
    ]
    front = np.array(COLORS[scene.triple.color], dtype=np.float32)
    back = np.array(COLORS[scene.triple.background], dtype=np.float32)
    return Image.fromarray(np.round(part_HW1 * front + (1 - part_HW1) * back).astype(np.uint8))


def write_set(folder: Path, count: int, *, seed: int = 0, size: int = PICTURE_SIZE) -> list[str]:
    """Writes `count` PNG pictures and `metadata.jsonl` into a folder; returns the captions."""
    folder.mkdir(parents=True, exist_ok=True)
    captions, lines = [], []
    for i, scene in enumerate(scenes(count, seed=seed)):
        buffer = io.BytesIO()
        draw(scene, size).save(buffer, "PNG")
        name = f"{i:06d}.png"
        (folder / name).write_bytes(buffer.getvalue())
        captions.append(scene.triple.caption)
        lines.append(json.dumps({"file_name": name, "text": captions[-1]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return captions
