"""An invisible mark with a payload of 32 bits, found again after scaling, a crop and JPEG.

A tile of `TILE` pixels is repeated over the brightness of a picture. Its spectrum is flat between two
frequencies and drawn from a key: a third of its coefficients are known to who has the key (the sync), the
others carry the payload, its checksum and the redundancy of a convolutional code. A repeated tile has all its
energy at the points of a lattice in the picture's spectrum; scaling stretches the lattice, a crop only turns
phases. So the detector takes one Fourier transform of the picture, reads it at the lattice of each scale in
question, and finds scale and crop where the sync correlates (spread spectrum: Cox, Kilian, Leighton, Shamoon
1997; a lattice as template: Kutter 1998). Each coefficient gets what it lacks, not a fixed amount (informed
embedding: Malvar & Florencio 2003), more of it where the picture has texture.

Anyone with the key can find the mark, and anyone determined can remove it: it answers "was this drawn here,
and by which job", not "is this genuine". Pictures with a side below `LEAST_SIDE` carry none.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.float64]
TILE = 128
LEAST_SIDE = 256
LOW, HIGH = 0.045, 0.19
"""Cycles a pixel: below is most of a picture's energy, above is lost in halving it."""
PSNR_DB, LEAST_PSNR_DB = 41.0, 40.2
"""Of pictures of 512 px and more, and of the smallest, which hold less of it."""
SCALES = (0.48, 1.56)
TURNED, SIZED = np.radians(2.2), 0.03
"""The most that a picture may be turned, in radians, and its size changed in that case, as a logarithm."""
MOST_SIDE = 1024
"""Of what the detector looks at, from the picture's middle."""
GRID = 64
"""Of the correlation over positions while scales are searched."""
FOUND = 6.0
"""Standard deviations of the sync, at the best scale and position, below which no payload is read."""
SURE = 9.0
"""The same, from where the mark is there even if its payload cannot be read."""
CANDIDATES = 6
DATA_BITS, CHECK_BITS = 32, 16
MEMORY = 6
POLYNOMIALS = (0o133, 0o171, 0o145, 0o165)
"""A convolutional code of rate 1/4 and constraint length 7 (Larsen 1973 and later tables)."""


@dataclass(frozen=True)
class WatermarkReading:
    """What the detector found."""

    score: float
    """Standard deviations of the sync above chance."""
    scale: float
    """How much larger the picture is than when it was marked."""
    degrees: float
    """How far it was turned."""
    payload: int | None
    """None where the mark is there, but too faint to be read."""


@dataclass(frozen=True, eq=False)
class _Code:
    """What a key says: lattice points (a half plane), phases, and which of them are the sync."""

    kx: NDArray[np.int64]
    ky: NDArray[np.int64]
    phase: NDArray[np.complex128]
    sync: NDArray[np.int64]
    data: NDArray[np.int64]


@functools.lru_cache(maxsize=8)
def _code(key: str) -> _Code:
    reach = int(HIGH * TILE) + 1
    ky, kx = np.mgrid[-reach : reach + 1, 0 : reach + 1]
    radius = np.hypot(kx, ky) / TILE
    half = (kx > 0) | (ky > 0)
    # Off the axes: borders, horizons and walls have their energy there.
    off_axes = (kx > 0) & (ky != 0)
    kept = (radius >= LOW) & (radius <= HIGH) & half & off_axes
    kx, ky = kx[kept], ky[kept]
    seed = int.from_bytes(hashlib.sha256(f"darkroom mark 2 {key}".encode()).digest()[:8], "big")
    draw = np.random.default_rng(seed)
    phase = np.exp(2j * np.pi * draw.random(len(kx)))
    order = draw.permutation(len(kx))
    return _Code(kx, ky, phase, order[::3], np.concatenate([order[1::3], order[2::3]]))


def embed(
    image: Image.Image, payload: int, key: str = "darkroom", psnr_db: float | None = None
) -> Image.Image:
    """The picture with the mark of a key and a payload of 32 bits; as it was where it is too small."""
    if min(image.size) < LEAST_SIDE:
        return image
    if psnr_db is None:
        doublings = np.log2(min(image.size) / LEAST_SIDE)
        psnr_db = min(PSNR_DB, LEAST_PSNR_DB + (PSNR_DB - LEAST_PSNR_DB) * doublings)
    rgb = np.asarray(image.convert("RGB"), dtype=np.float64)
    grey = rgb @ (0.299, 0.587, 0.114)
    gain = _gain(grey)
    pattern = gain * _pattern(grey, gain, _signs(_code(key), payload), _code(key))
    pattern *= 255 * 10 ** (-psnr_db / 20) / np.sqrt(np.mean(pattern**2))
    marked = Image.fromarray(np.clip(np.rint(rgb + pattern[..., None]), 0, 255).astype(np.uint8))
    if "A" in image.getbands():
        marked.putalpha(image.getchannel("A"))
    return marked


def too_small(sizes: Iterable[tuple[int, int]]) -> str:
    """One line where pictures of these sizes (width, height) carry no mark; else nothing."""
    small = sorted({size for size in sizes if min(size) < LEAST_SIDE})
    listed = ", ".join(f"{width}x{height}" for width, height in small)
    return f"no watermark in pictures of {listed}: it needs {LEAST_SIDE} pixels a side" if small else ""


def find(image: Image.Image, key: str = "darkroom") -> WatermarkReading | None:
    """The mark of a key in a picture, scaled by 0.5 to 1.5, cropped, or turned by up to 2 degrees."""
    if min(image.size) < LEAST_SIDE * SCALES[0]:
        return None
    code = _code(key)
    spectrum = _Spectrum(_middle(image))
    seen: WatermarkReading | None = None
    for places in (_upright, _turned):
        best = sorted(_search(spectrum, code, places(spectrum.step)), reverse=True)[:CANDIDATES]
        for score, place, at in best:
            if score < FOUND:
                break
            found = _read(spectrum, code, place, at)
            if found.payload is not None:
                return found
            if found.score >= SURE and (seen is None or found.score > seen.score):
                seen = found
    return seen


# ---- embedding


def _gain(grey: Floats) -> Floats:
    """How much of the mark each place takes: more where there is texture to hide it."""
    mean = _blurred(grey, 4)
    spread = np.sqrt(np.maximum(_blurred(grey**2, 4) - mean**2, 0))
    spread = _blurred(spread, 4)
    gain: Floats = 0.55 + np.minimum(spread, 24) / 12
    return gain


def _pattern(grey: Floats, gain: Floats, wanted: NDArray[np.complex128], code: _Code) -> Floats:
    """The tile that gives each coefficient what it lacks of the phase that is wanted, over the picture."""
    height, width = grey.shape
    down, across = height // TILE, width // TILE
    flat = (grey - _blurred(grey, 6)) / (_spread(grey) + 3)
    tiles = flat[: down * TILE, : across * TILE].reshape(down, TILE, across, TILE).sum(axis=(0, 2))
    there = np.fft.fft2(tiles)[code.ky % TILE, code.kx]
    agrees = np.real(there * np.conj(wanted))
    size = np.sqrt(np.mean(np.abs(there) ** 2))
    # Those that agree by chance need less, those that disagree more; within bounds, for chance is not kept.
    amount = np.clip(1.15 - 0.45 * agrees / size, 0.35, 2.2)
    spectrum = np.zeros((TILE, TILE), dtype=np.complex128)
    spectrum[code.ky % TILE, code.kx] = amount * wanted
    tile = np.real(np.fft.ifft2(spectrum))
    return np.tile(tile, (-(-height // TILE), -(-width // TILE)))[:height, :width]


def _signs(code: _Code, payload: int) -> NDArray[np.complex128]:
    """Each coefficient's phase: the key's, turned by half where its bit is 1."""
    coded = _coded(_with_check(payload))
    wanted = code.phase.copy()
    wanted[code.data] *= 1 - 2 * coded[np.arange(len(code.data)) % len(coded)]
    return wanted


def _with_check(payload: int) -> list[int]:
    if not 0 <= payload < 2**DATA_BITS:
        raise ValueError(f"payload {payload}: 32 bits")
    check = zlib.crc32(payload.to_bytes(4, "big")) & 0xFFFF
    whole = payload << CHECK_BITS | check
    return [whole >> i & 1 for i in reversed(range(DATA_BITS + CHECK_BITS))]


def _coded(bits: list[int]) -> NDArray[np.int64]:
    """The convolutional code of bits, ended with zeros."""
    state, out = 0, []
    for bit in [*bits, *[0] * MEMORY]:
        state = (state << 1 | bit) & (2 ** (MEMORY + 1) - 1)
        out += [(state & polynomial).bit_count() & 1 for polynomial in POLYNOMIALS]
    return np.array(out)


# ---- finding


class _Spectrum:
    """The Fourier transform of a picture's fine structure, to be read at any frequency."""

    def __init__(self, grey: Floats) -> None:
        flat = (grey - _blurred(grey, 6)) / (_spread(grey) + 3)
        height, width = self.shape = grey.shape
        flat *= _edges(height)[:, None] * _edges(width)[None]
        self.size = 2 ** int(np.ceil(np.log2(2 * max(height, width))))
        spectrum = np.fft.rfft2(flat, (self.size, self.size))
        # As if the picture's middle were the origin: between two samples the phase then turns little.
        y = np.exp(2j * np.pi * np.fft.fftfreq(self.size) * (height / 2))
        x = np.exp(2j * np.pi * np.fft.rfftfreq(self.size) * (width / 2))
        self.values = spectrum * y[:, None] * x[None]
        self.step = 0.7 / (2 * HIGH * max(self.shape))
        """Two scales, or two angles in radians, that lie so far apart differ by less than what is looked for
        turns its phase over the picture."""

    def at(self, kx: Any, ky: Any, place: Place) -> NDArray[np.complex128]:
        """The phases at points of the tile's lattice, strong ones not counting more."""
        scale, angle = place
        turned = np.exp(1j * angle) * (kx + 1j * ky) * self.size / (scale * TILE)
        x, y = np.rint(turned.real).astype(np.int64), np.rint(turned.imag).astype(np.int64)
        behind = x < 0  # of a real picture: the other half plane's, mirrored
        values = self.values[np.where(behind, -y, y) % self.size, np.abs(x)]
        values = np.where(behind, np.conj(values), values)
        found: NDArray[np.complex128] = values / (np.abs(values) + 1e-9)
        return found


Place = tuple[float, float]
"""A scale, and an angle in radians."""


def _upright(step: float) -> list[Place]:
    scales = np.exp(np.arange(np.log(SCALES[0]), np.log(SCALES[1]), step))
    return [(float(scale), 0.0) for scale in np.unique(np.append(scales, 1.0))]


def _turned(step: float) -> list[Place]:
    """A little off the vertical, at about its own size."""
    angles = np.arange(step, TURNED, step)
    scales = np.exp(np.arange(-SIZED, SIZED, step))
    return [(float(s), float(a)) for s in scales for a in (*angles, *-angles)]


def _search(
    spectrum: _Spectrum, code: _Code, places: list[Place]
) -> list[tuple[float, Place, tuple[float, float]]]:
    """The sync's correlation at each scale and angle: standard deviations, and where the tile begins."""
    kx, ky, phase = code.kx[code.sync], code.ky[code.sync], code.phase[code.sync]
    found = []
    for place in places:
        grid = np.zeros((GRID, GRID), dtype=np.complex128)
        grid[ky % GRID, kx % GRID] = spectrum.at(kx, ky, place) * np.conj(phase)
        correlation = np.real(np.fft.ifft2(grid)) * GRID**2
        peak = int(correlation.argmax())
        score = correlation.flat[peak] / np.sqrt(len(kx) / 2)
        at = (peak // GRID * TILE / GRID, peak % GRID * TILE / GRID)
        found.append((float(score), place, at))
    return found


def _read(spectrum: _Spectrum, code: _Code, place: Place, at: tuple[float, float]) -> WatermarkReading:
    """Scale, angle and position to a fraction of a step, then the payload."""
    kx, ky = code.kx[code.sync], code.ky[code.sync]
    angles = (0,) if place[1] == 0 else (-1, 0, 1)

    def score(scale: float, angle: float, y: float, x: float) -> float:
        turned = np.exp(2j * np.pi * (kx * x + ky * y) / TILE)
        values = spectrum.at(kx, ky, (scale, angle)) * np.conj(code.phase[code.sync]) * turned
        return float(np.real(values.sum()) / np.sqrt(len(kx) / 2))

    best = (score(*place, *at), *place, *at)
    for fine, far in ((spectrum.step / 3, 1.0), (spectrum.step / 6, 0.5), (spectrum.step / 12, 0.25)):
        _, centre, angle, y0, x0 = best
        tries = [
            (centre * (1 + i * fine), angle + a * fine, y0 + j * far, x0 + k * far)
            for a in angles
            for i in range(-2, 3)
            for j in (-1, 0, 1)
            for k in (-1, 0, 1)
        ]
        best = max([best, *((score(*one), *one) for one in tries)])
    value, scale, angle, y, x = best
    turned = np.exp(2j * np.pi * (code.kx * x + code.ky * y) / TILE)
    values = np.real(spectrum.at(code.kx, code.ky, (scale, angle)) * np.conj(code.phase) * turned)
    values = values[code.data]
    length = len(POLYNOMIALS) * (DATA_BITS + CHECK_BITS + MEMORY)
    soft = np.bincount(np.arange(len(values)) % length, values, length)
    bits = _decoded(soft)
    whole = int("".join(map(str, bits)), 2)
    payload = whole >> CHECK_BITS
    right = _with_check(payload) == bits
    return WatermarkReading(value, scale, float(np.degrees(angle)), payload if right else None)


def _decoded(soft: NDArray[Any]) -> list[int]:
    """The most likely bits behind a convolutional code (Viterbi); `soft` is above zero for a 0."""
    states = 2**MEMORY
    registers = np.arange(2 * states)  # the state before, and the new bit
    signs = np.array([[1 - 2 * ((r & p).bit_count() & 1) for p in POLYNOMIALS] for r in registers.tolist()])
    metric = np.full(states, -np.inf)
    metric[0] = 0.0
    came = []
    for values in soft.reshape(-1, len(POLYNOMIALS)):
        gains = np.repeat(metric, 2) + signs @ values  # of register state << 1 | bit
        one, other = gains[:states], gains[states:]  # both lead to the same state
        came.append(other > one)
        metric = np.maximum(one, other)
    state, bits = 0, []
    for turned in reversed(came):
        bits.append(state & 1)
        register = state + states * int(turned[state])
        state = register >> 1
    return bits[::-1][: DATA_BITS + CHECK_BITS]


# ---- small things


def _middle(image: Image.Image) -> Floats:
    grey = image.convert("RGB").convert("L")
    width, height = (min(side, MOST_SIDE) for side in grey.size)
    left, top = (grey.width - width) // 2, (grey.height - height) // 2
    return np.asarray(grey.crop((left, top, left + width, top + height)), dtype=np.float64)


def _spread(grey: Floats) -> Floats:
    """The standard deviation around each place."""
    mean = _blurred(grey, 6)
    found: Floats = np.sqrt(np.maximum(_blurred(grey**2, 6) - mean**2, 0))
    return found


def _blurred(values: Floats, radius: int) -> Floats:
    """The mean over a square around each place."""
    for axis in (0, 1):
        width = [(0, 0), (0, 0)]
        width[axis] = (radius + 1, radius)
        sums = np.cumsum(np.pad(values, width, mode="edge"), axis=axis)
        size = 2 * radius + 1
        ahead, behind = [slice(None)] * 2, [slice(None)] * 2
        ahead[axis], behind[axis] = slice(size, None), slice(None, -size)
        values = (sums[tuple(ahead)] - sums[tuple(behind)]) / size
    return values


def _edges(size: int) -> Floats:
    """A window that falls to zero over the outer twentieth."""
    fall = max(1, size // 20)
    window = np.ones(size)
    window[:fall] = 0.5 - 0.5 * np.cos(np.pi * np.arange(fall) / fall)
    window[-fall:] = window[:fall][::-1]
    return window
