"""Draws that are pure functions of seed, epoch and row: noise, crops, and what changes in a caption."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIT = np.float64(2.0**-53)

Keys = npt.NDArray[np.uint64]


class Purpose(IntEnum):
    """What a draw is for; part of its key, so new purposes never disturb the others. Never renumber."""

    NOISE = 1
    TIMESTEP = 2
    CROP_X = 3
    CROP_Y = 4
    FLIP = 5
    DROPOUT = 6
    POSTERIOR = 7
    OFFSET_NOISE = 8
    PROMPT = 9
    TAGS = 10
    MULTIRES = 11
    PERTURBATION = 12
    TAG_DROPOUT = 13
    WILDCARDS = 14
    FURTHER = 15
    COLOUR = 16
    OFFSET_STRENGTH = 17
    PERTURBATION_STRENGTH = 18


def _mix_int(h: int, part: int) -> int:
    h = ((h ^ part) + _GOLDEN) & _MASK
    h = ((h ^ (h >> 30)) * _A) & _MASK
    h = ((h ^ (h >> 27)) * _B) & _MASK
    return h ^ (h >> 31)


def _mix_array(h: Keys, part: Keys) -> Keys:
    h = (h ^ part) + np.uint64(_GOLDEN)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(_A)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(_B)
    return h ^ (h >> np.uint64(31))


def mix(*parts: int | npt.NDArray[np.int64] | Keys) -> Keys:
    """Hash of integers, elementwise over arrays, to uint64 (the last part is an array).

    Each part passes through the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014). Integer arithmetic only: the same on every machine and numpy
    release. Leading single numbers are mixed as Python's integers, ten times as quick as an array of one.
    """
    plain = 0
    h: Keys | None = None
    for part in parts:
        if h is None and not isinstance(part, np.ndarray):
            plain = _mix_int(plain, int(part) & _MASK)
            continue
        value = (
            part.astype(np.uint64) if isinstance(part, np.ndarray) else np.array(int(part) & _MASK, np.uint64)
        )
        h = _mix_array(np.full(1, plain, dtype=np.uint64) if h is None else h, value)
    if h is None:
        raise TypeError("mix needs an array among its parts")
    return h


def uniform(
    seed: int, epochs_B: npt.NDArray[np.int64], positions_B: npt.NDArray[np.int64], purpose: Purpose
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) a row, float64 [B]."""
    return (mix(seed, int(purpose), epochs_B, positions_B) >> np.uint64(11)).astype(np.float64) * _UNIT


def normal(
    seed: int,
    epochs_B: npt.NDArray[np.int64],
    positions_B: npt.NDArray[np.int64],
    shape: Sequence[int],
    purpose: Purpose = Purpose.NOISE,
) -> npt.NDArray[np.float32]:
    """Standard normal draws, float32 [B, *shape]: each row from its own Philox counter.

    Philox 4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed by the seed and
    counted from (row, epoch, purpose); the normals are numpy's ziggurat. One generator is set anew for
    every row, which costs a quarter of building one.
    """
    out = np.empty((len(positions_B), *shape), dtype=np.float32)
    bits = np.random.Philox(key=seed & _MASK)
    generator, state = np.random.Generator(bits), bits.state
    counter = state["state"]["counter"]
    counter[3] = int(purpose)
    state["buffer_pos"], state["has_uint32"] = 4, 0  # nothing left over from the row before
    for row, epoch, position in zip(out, epochs_B.tolist(), positions_B.tolist(), strict=True):
        counter[0], counter[1], counter[2] = 0, position, epoch
        bits.state = state
        generator.standard_normal(dtype=np.float32, out=row)
    return out


def noise(
    seed: int, epochs_B: npt.NDArray[np.int64], positions_B: npt.NDArray[np.int64], shape: Sequence[int]
) -> npt.NDArray[np.float32]:
    """The diffusion noise of each row, float32 [B, *shape]."""
    return normal(seed, epochs_B, positions_B, shape, Purpose.NOISE)


def pyramid(
    seed: int,
    epochs_B: npt.NDArray[np.int64],
    positions_B: npt.NDArray[np.int64],
    shape: Sequence[int],
    iterations: int,
    discount: float,
) -> npt.NDArray[np.float32]:
    """What multi-resolution noise adds to plain noise, float32 [B, C, h, w]: ever coarser noises.

    Iteration i has noise of 1 / r^i of the sides, enlarged bilinearly, times discount^i; r is drawn anew from
    [2, 4) each time, and 1 pixel ends it (Whitaker 2023, as kohya's trainers have it). Each row has its own.
    """
    out = np.zeros((len(positions_B), *shape), dtype=np.float32)
    channels, height, width = shape
    keys = mix(seed, int(Purpose.MULTIRES), epochs_B, positions_B)
    for row, key in zip(out, keys.tolist(), strict=True):
        generator = np.random.Generator(np.random.Philox(key=key))
        for i in range(iterations):
            r = float(generator.random()) * 2 + 2
            sides = max(1, int(height / r**i)), max(1, int(width / r**i))
            coarse = generator.standard_normal((channels, *sides), dtype=np.float32)
            row += enlarged(coarse, (height, width)) * np.float32(discount**i)
            if 1 in sides:
                break
    return out


def enlarged(values: npt.NDArray[np.float32], size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Bilinear enlargement of [C, h, w] to a size, pixels' centres kept, as torch's interpolate does."""
    for axis, new in zip((1, 2), size, strict=True):
        old = values.shape[axis]
        at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, None).astype(np.float32)
        low = np.minimum(at.astype(np.int64), old - 1)
        high = np.minimum(low + 1, old - 1)
        share = (at - low).reshape((-1, 1) if axis == 1 else -1)
        values = values.take(low, axis) * (1 - share) + values.take(high, axis) * share
    return values.astype(np.float32, copy=False)


def shuffled_tags(caption: str, key: int, keep: int) -> str:
    """The parts of a caption between commas in an order that `key` decides; the first `keep` stay."""
    tags = [tag for part in caption.split(",") if (tag := part.strip())]
    order = np.argsort(mix(key, np.arange(max(len(tags) - keep, 0))), kind="stable")
    return ", ".join([*tags[:keep], *(tags[keep + i] for i in order.tolist())])


def kept_tags(
    caption: str, key: int, keep: int, dropout: float = 0.0, least: int = 1, share: float | None = None
) -> str:
    """What is left of a caption's parts between commas, the first `keep` always.

    Of the others the first `least` and a `share` of the rest (all, where that is None) are there yet; each of
    these is left out with probability `dropout`.
    """
    tags = [tag for part in caption.split(",") if (tag := part.strip())]
    fixed, others = tags[:keep], tags[keep:]
    if share is not None:
        others = others[: int(share * (len(others) - least)) + least if len(others) > least else len(others)]
    if dropout:
        drawn = (mix(key, np.arange(len(others))) >> np.uint64(11)).astype(np.float64) * _UNIT
        others = [tag for tag, u in zip(others, drawn.tolist(), strict=True) if u >= dropout]
    return ", ".join([*fixed, *others])


class CaptionParts(NamedTuple):
    """A caption cut at its separators: what stays at the start and at the end, and what changes."""

    first: str
    changing: str
    last: str
    parted: bool

    def around(self, changed: str) -> str:
        """The caption with what changes changed."""
        if not self.parted:
            return changed
        return ", ".join(part for part in (self.first, changed, self.last) if part)


def parts_of(caption: str, separator: str) -> CaptionParts:
    """A caption's parts by the first and second of a separator; where there is none all of it changes."""
    if not separator or separator not in caption:
        return CaptionParts("", caption, "", parted=False)
    first, _, rest = caption.partition(separator)
    changing, _, last = rest.partition(separator)
    first, changing, last = (part.strip(" ,\n") for part in (first, changing, last))
    return CaptionParts(first, changing, last, parted=True)


WILDCARD = re.compile(r"\{([^{}|]*(?:\|[^{}|]*)+)\}")


def chosen_wildcards(caption: str, key: int) -> str:
    """A caption with one of its lines, and one of every {a|b|c}; the innermost braces first."""
    lines = [line for line in caption.splitlines() if line.strip()] or [""]
    caption, n = lines[int(mix(key, np.array([0]))[0]) % len(lines)], 0
    while found := WILDCARD.search(caption):
        n += 1
        options = found[1].split("|")
        option = options[int(mix(key, np.array([n]))[0]) % len(options)].strip()
        caption = caption[: found.start()] + option + caption[found.end() :]
    return caption
