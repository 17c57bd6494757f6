"""Scores a picture of a shape exactly, by its pixels: which colour, shape and background it shows.

Every pixel of a clean picture is a blend of two palette colours. The background is the colour of
the rim, the front that of the pixels farthest from it; each pixel's blend gives the part of it that
is covered, and the covered part is compared with every shape drawn at the same centre and area.
Whatever is not clear is unknown, and unknown is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image

from darkroom.quickstart.shapes import COLORS, SHAPES, FloatArray, Triple, coverage

UNKNOWN = "unknown"
COLOR_TOLERANCE = 45.0  # RGB distance to a palette colour; the nearest two of the palette are 86 apart
BLEND_TOLERANCE = 60.0  # RGB distance of a pixel to the line between front and background
MIN_EXPLAINED = 0.95  # part of all pixels that must lie on that line
MIN_OVERLAP = 0.80  # soft intersection over union with the best shape
MIN_LEAD = 0.03  # by how much the best shape must lead the second


@dataclass(frozen=True)
class ShapeReading:
    """What a picture shows; `unknown` where it is not clear. `overlap` is that of the best shape."""

    color: str
    shape: str
    background: str
    overlap: float


@dataclass(frozen=True)
class ShapeScores:
    """Parts (0..1) of the pictures that are right: colour and background together, shape, all three."""

    color_fidelity: float
    shape_fidelity: float
    all_fidelity: float
    seen: tuple[ShapeReading, ...]


def look(picture: Image.Image) -> ShapeReading:
    """Reads colour, shape and background off a picture's pixels."""
    pixels_HW3 = np.asarray(picture.convert("RGB"), dtype=np.float32)
    back, background = _background(pixels_HW3)
    distance_HW = np.linalg.norm(pixels_HW3 - back, axis=-1)
    front, color = _front(pixels_HW3, distance_HW)
    if UNKNOWN in (background, color) or color == background:
        return ShapeReading(color, UNKNOWN, background, 0.0)
    blend_HW, off_HW = _blend(pixels_HW3, front, back)
    if np.mean(off_HW < BLEND_TOLERANCE) < MIN_EXPLAINED:
        return ShapeReading(UNKNOWN, UNKNOWN, background, 0.0)
    shape, overlap = _shape(blend_HW)
    return ShapeReading(color, shape, background, overlap)


def score(pictures: Sequence[Image.Image], wanted: Sequence[Triple]) -> ShapeScores:
    """Compares what each picture shows with what its caption asked for."""
    return judge([look(picture) for picture in pictures], wanted)


def judge(seen: Sequence[ShapeReading], wanted: Sequence[Triple]) -> ShapeScores:
    """Scores what has been seen; ValueError where pictures and captions are not as many."""
    pairs = list(zip(seen, wanted, strict=True))
    tone = [s.color == w.color and s.background == w.background for s, w in pairs]
    form = [s.shape == w.shape for s, w in pairs]
    both = [t and f for t, f in zip(tone, form, strict=True)]
    count = max(len(pairs), 1)
    return ShapeScores(sum(tone) / count, sum(form) / count, sum(both) / count, tuple(seen))


def name_of(color_3: FloatArray) -> str:
    """The palette's name for a colour, or unknown."""
    names = list(COLORS)
    far = np.linalg.norm(np.array([COLORS[n] for n in names], dtype=np.float32) - color_3, axis=1)
    return names[int(far.argmin())] if far.min() < COLOR_TOLERANCE else UNKNOWN


def _background(pixels_HW3: FloatArray) -> tuple[FloatArray, str]:
    """The median colour of the picture's rim; unknown where the rim is not of one colour."""
    rim = np.concatenate([pixels_HW3[0], pixels_HW3[-1], pixels_HW3[1:-1, 0], pixels_HW3[1:-1, -1]])
    back = np.median(rim, axis=0).astype(np.float32)
    even = np.mean(np.linalg.norm(rim - back, axis=1) < COLOR_TOLERANCE) >= 0.9
    return back, name_of(back) if even else UNKNOWN


def _front(pixels_HW3: FloatArray, distance_HW: FloatArray) -> tuple[FloatArray, str]:
    """The median colour of the pixels that differ most from the background."""
    limit = max(float(np.quantile(distance_HW, 0.95)) * 0.8, COLOR_TOLERANCE)
    inside_N3 = pixels_HW3[distance_HW > limit]
    if len(inside_N3) < 0.02 * distance_HW.size:
        return np.zeros(3, np.float32), UNKNOWN
    front = np.median(inside_N3, axis=0).astype(np.float32)
    even = np.mean(np.linalg.norm(inside_N3 - front, axis=1) < COLOR_TOLERANCE) >= 0.7
    return front, name_of(front) if even else UNKNOWN


def _blend(pixels_HW3: FloatArray, front: FloatArray, back: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Each pixel's place on the line from background (0) to front (1), and its distance to that line."""
    line = front - back
    place_HW = np.clip((pixels_HW3 - back) @ line / (line @ line), 0, 1)
    nearest_HW3 = back + place_HW[..., None] * line
    return place_HW.astype(np.float32), np.linalg.norm(pixels_HW3 - nearest_HW3, axis=-1)


def _shape(part_HW: FloatArray) -> tuple[str, float]:
    """The shape whose drawing, at the same centre and area, overlaps the covered part best."""
    part_HW = np.clip((part_HW - 0.1) / 0.8, 0, 1)
    size, area = part_HW.shape[0], float(part_HW.sum())
    if not 0.03 < area / part_HW.size < 0.7:
        return UNKNOWN, 0.0
    y, x = (float((part_HW * grid).sum() / area) for grid in np.mgrid[0.5:size, 0.5:size])
    overlaps = {}
    for shape in SHAPES:
        unit_area, dx, dy = _moments(shape)
        radius = (area / unit_area) ** 0.5
        drawn_HW = coverage(shape, x - dx * radius, y - dy * radius, radius, size)
        overlaps[shape] = float(np.minimum(part_HW, drawn_HW).sum() / np.maximum(part_HW, drawn_HW).sum())
    best, second = sorted(SHAPES, key=overlaps.__getitem__, reverse=True)[:2]
    clear = overlaps[best] >= MIN_OVERLAP and overlaps[best] - overlaps[second] >= MIN_LEAD
    return (best if clear else UNKNOWN), overlaps[best]


@lru_cache
def _moments(shape: str) -> tuple[float, float, float]:
    """Area and centroid of a shape of radius 1."""
    part: npt.NDArray[np.float32] = coverage(shape, 128, 128, 96, 256)
    area = float(part.sum())
    y, x = (float((part * grid).sum() / area) - 128 for grid in np.mgrid[0.5:256, 0.5:256])
    return area / 96**2, x / 96, y / 96
