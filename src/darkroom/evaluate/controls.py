"""Controls of a likeness: what the same measure says of pictures that are not the subject.

A likeness is the mean cosine between the features of pictures and of a subject's photographs. Alone it says
little: a network may find grey murk as like a cat as another photograph of it. So the same number is taken of
photographs blurred beyond recognition, of their shuffled tiles, of another subject's photographs, of these
with the subject's colours, and of what the base draws without training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from darkroom.errors import InputError
from darkroom.evaluate.extractors import Extractor
from darkroom.evaluate.statistics import Array

TILES = 8
BLUR = 1 / 8
"""Radius of the blur as a share of the shorter side: shapes are gone, colours stay."""
PHOTOGRAPHS, OTHER, COLOURED = "photographs", "another subject", "another subject, colour-matched"
BLURRED, SHUFFLED, BASE = "blurred", "tile-shuffled", "base without training"
OWN = (BLURRED, SHUFFLED)
"""Made of the photographs themselves."""


@dataclass(frozen=True)
class ControlScores:
    """Likeness of each control by its name, and of each picture that was asked about."""

    values: dict[str, float]
    extractor: str

    @property
    def holds(self) -> bool:
        """Whether the measure ranks photographs above every control, and another subject above a blur.

        Shuffled tiles keep fur and print, so they may come above another subject, never above photographs.
        """
        below = max(self.values[name] for name in (OTHER, COLOURED, SHUFFLED))
        return self.values[PHOTOGRAPHS] > below and self.values[OTHER] > self.values[BLURRED]

    def lines(self) -> list[str]:
        """As the terminal shows them, highest first, and the verdict."""
        ranked = sorted(self.values.items(), key=lambda one: -one[1])
        lines = [f"{name:34} {value:.3f}" for name, value in ranked]
        verdict = "ranks photographs > another subject > murk: it may be called likeness"
        if not self.holds:
            verdict = "does not rank photographs > another subject > murk: it is no likeness"
        return [*lines, f"{self.extractor} {verdict}"]


def likeness(features_ND: Array, subject_MD: Array, *, same: bool = False) -> float:
    """Mean cosine of all pairs; of a set with itself (`same`) without each picture's own."""
    one, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (features_ND, subject_MD))
    cosines_NM = one @ other.T
    if not same:
        return float(cosines_NM.mean())
    count = len(one)
    return float((cosines_NM.sum() - np.trace(cosines_NM)) / (count * (count - 1)))


def likeness_controls(
    extractor: Extractor,
    photographs: Sequence[Image.Image],
    others: Sequence[Image.Image],
    *,
    base: Sequence[Image.Image] = (),
    drawn: Sequence[Image.Image] = (),
    seed: int = 0,
) -> ControlScores:
    """The measure on every control, on what the `base` draws, and on `drawn`, what is asked about.

    InputError for fewer than two photographs or none of another subject.
    """
    if len(photographs) < 2 or not others:
        raise InputError(
            f"{len(photographs)} photographs and {len(others)} of another subject", allowed="2 and 1, or more"
        )
    subject_MD = extractor.pictures(photographs)
    generator = np.random.default_rng(seed)
    given: dict[str, Sequence[Image.Image]] = {
        OTHER: others,
        COLOURED: [colour_matched(one, photographs[i % len(photographs)]) for i, one in enumerate(others)],
        BLURRED: [blurred(one) for one in photographs],
        SHUFFLED: [tile_shuffled(one, generator) for one in photographs],
        BASE: base,
        "drawn": drawn,
    }
    values = {PHOTOGRAPHS: likeness(subject_MD, subject_MD, same=True)}
    for name, pictures in given.items():
        if not pictures:
            continue
        features = extractor.pictures(pictures)
        if name in OWN:  # each is compared with the other photographs
            cosines = [
                likeness(features[i : i + 1], np.delete(subject_MD, i, 0)) for i in range(len(features))
            ]
            values[name] = float(np.mean(cosines))
        else:
            values[name] = likeness(features, subject_MD)
    return ControlScores(values, extractor.kind)


def blurred(image: Image.Image) -> Image.Image:
    """A photograph of which the colours alone are left."""
    return image.convert("RGB").filter(ImageFilter.GaussianBlur(min(image.size) * BLUR))


def tile_shuffled(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    """A photograph's tiles in another order: its textures and colours, not its shape."""
    side = min(image.size) // TILES * TILES
    pixels = np.asarray(image.convert("RGB").resize((side, side)))
    tile = side // TILES
    tiles = pixels.reshape(TILES, tile, TILES, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
    mixed = tiles[generator.permutation(len(tiles))].reshape(TILES, TILES, tile, tile, 3)
    return Image.fromarray(mixed.swapaxes(1, 2).reshape(side, side, 3))


def colour_matched(image: Image.Image, like: Image.Image) -> Image.Image:
    """A photograph with each channel's mean and deviation those of another."""
    pixels, wanted = (np.asarray(one.convert("RGB"), dtype=np.float64) for one in (image, like))
    mean, deviation = pixels.mean(axis=(0, 1)), pixels.std(axis=(0, 1)).clip(min=1e-6)
    moved = (pixels - mean) / deviation * wanted.std(axis=(0, 1)) + wanted.mean(axis=(0, 1))
    return Image.fromarray(moved.round().clip(0, 255).astype(np.uint8))
