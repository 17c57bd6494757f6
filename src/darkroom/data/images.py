"""Pictures: from a file's bytes to upright RGB, to tensors, crops and aspect-ratio buckets.

Legend: H height, W width in pixels, 3 the colours.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image, ImageColor, ImageEnhance, ImageOps, UnidentifiedImageError

from darkroom.errors import InputError

if TYPE_CHECKING:
    import torch


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF", "PPM", "ICO")
"""What is decoded. Pillow's other readers are left out: one of them runs an outside program."""

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff"}
    | {".jp2", ".j2k", ".jpx", ".avif", ".ppm", ".pgm", ".pbm", ".ico"}
)
MASK_ENDING = ".mask.png"
MAX_PIXELS = 178_000_000
PILLOW_MAX_PIXELS = 178_956_970  # Pillow itself refuses more
LARGE_PIXELS = 16_000_000
ORIENTATION = 0x0112
SIDEWAYS = (5, 6, 7, 8)
HASH_SIZE = (9, 8)

Reason = Literal["undecodable", "too-small", "bomb", "unsupported"]

_one_large_at_a_time = Lock()


class PictureError(ValueError):
    """A picture that cannot be used: `reason` is one word for counting, the message says more."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason: Reason = reason
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class Facts:
    """What an import notes of a picture: upright size in pixels, format, perceptual hash."""

    width: int
    height: int
    format: str
    phash: int


def is_picture(name: str) -> bool:
    """Whether a file is a picture by its name. NAME.mask.png is none: it says where NAME's counts."""
    lowered = name.lower()
    return lowered.endswith(tuple(EXTENSIONS)) and not lowered.endswith(MASK_ENDING)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is the system's or an editor's business."""
    return name.startswith((".", "__MACOSX")) and name not in (".", "..")


def files_below(
    root: Path, skipped: Callable[[str, str], None] = lambda path, why: None
) -> Iterator[tuple[str, str]]:
    """All files as (folder, name) in a fixed order; hidden ones and stores are left out.

    `skipped` is called with the path of each folder that is not read, and the reason.
    """

    def failed(error: OSError) -> None:
        skipped(str(error.filename), f"cannot be read: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=failed):
        folders[:] = sorted(f for f in folders if not is_hidden(f) and not f.endswith(".lance"))
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                skipped(os.path.join(folder, name), "a link to a folder, which is not followed")
        yield from ((folder, file) for file in sorted(files) if not is_hidden(file))


def paths_below(root: Path, endings: tuple[str, ...]) -> list[Path]:
    """The files below a folder whose names end so, or the file that the path is."""
    if root.is_file():
        return [root] if root.name.lower().endswith(endings) else []
    paths = (Path(folder, name) for folder, name in files_below(root) if name.lower().endswith(endings))
    return [path for path in paths if path.is_file()]


def pictures_below(root: Path) -> list[Path]:
    """The pictures below a folder, as an import finds them; masks are none."""
    return [path for path in paths_below(root, tuple(EXTENSIONS)) if is_picture(path.name)]


def decode(data: bytes, *, background: str = "white", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A picture as upright RGB: EXIF rotation applied, transparency laid on a colour, the first frame.

    The size is checked before anything is decoded. Raises PictureError.
    """
    with _opened(data, max_pixels) as image:
        return _to_rgb(_loaded(image), colour(background))


def examine(
    data: bytes, *, background: str = "white", min_size: int = 1, max_pixels: int = MAX_PIXELS
) -> Facts:
    """Decode a picture to see that it can be, and note its facts; raises PictureError.

    A JPEG is decoded at an eighth of its size: all of its data is read, so that a torn file is noticed,
    but most of the arithmetic is saved. Of large pictures there is one at a time in memory.
    """
    with _opened(data, max_pixels) as image:
        width, height = image.size
        if min(width, height) < min_size:
            raise PictureError(
                "too-small", f"{width}x{height} pixels, the shortest side allowed is {min_size}"
            )
        image.draft(None, (HASH_SIZE[0] * 4, HASH_SIZE[1] * 4))
        with _one_large_at_a_time if image.width * image.height > LARGE_PIXELS else nullcontext():
            phash = _phash(_loaded(image), colour(background))
        if _orientation(image) in SIDEWAYS:
            width, height = height, width
        return Facts(width, height, image.format or "", phash)


@lru_cache(maxsize=64)
def colour(name: str) -> tuple[int, int, int]:
    """A colour by its name or as '#rrggbb'; InputError for what is none."""
    try:
        return ImageColor.getrgb(name)[:3]
    except ValueError:
        raise InputError(f"no colour '{name}'", allowed="a name such as white, or #rrggbb") from None


def open_picture(data: bytes) -> Image.Image:
    """A picture as its file has it, read to the end by the readers of `FORMATS` alone; PictureError."""
    return _loaded(_opened(data, PILLOW_MAX_PIXELS))


def _opened(data: bytes, max_pixels: int) -> Image.Image:
    if max_pixels > PILLOW_MAX_PIXELS:
        raise InputError(
            f"{max_pixels} pixels as the most of a picture", allowed=f"up to {PILLOW_MAX_PIXELS}"
        )
    if not data:
        raise PictureError("undecodable", "an empty file")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise PictureError("undecodable", "no picture of a known format") from None
    except Image.DecompressionBombError:
        raise PictureError("bomb", f"more than {max_pixels} pixels") from None
    except MemoryError:  # the machine's trouble, not the picture's
        raise
    except Exception as error:  # a torn header makes Pillow's readers raise anything
        raise PictureError("undecodable", _message(error)) from None
    if image.width * image.height > max_pixels:
        raise PictureError("bomb", f"{image.width}x{image.height} pixels, more than {max_pixels}")
    return image


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _loaded(image: Image.Image) -> Image.Image:
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # as above: zlib, struct, index and type errors among others
        raise PictureError("undecodable", _message(error)) from None
    return image


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # damaged EXIF says nothing about the picture
        return 1


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    orientation = _orientation(image)
    image = _flattened(image, background)
    if orientation in range(2, 9):
        image.getexif()[ORIENTATION] = orientation
        image = ImageOps.exif_transpose(image)
    return image


def _flattened(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """A loaded picture of any mode as RGB without transparency."""
    if image.mode.startswith("I") or image.mode == "F":
        return _from_deep(image)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    see_through = image.convert("RGBA")
    flat = Image.new("RGB", image.size, background)
    flat.paste(see_through, mask=see_through.getchannel("A"))
    return flat


def _from_deep(image: Image.Image) -> Image.Image:
    """One channel of 16 bits as RGB; wider numbers have no agreed white and are refused."""
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
        raise PictureError("unsupported", f"pixels of mode {image.mode} beyond 16 bits")
    return Image.fromarray((values // 257).astype(np.uint8)).convert("RGB")


def _phash(image: Image.Image, background: tuple[int, int, int]) -> int:
    """Difference hash: is each of 9x8 grey patches darker than its right neighbour? 64 bits, signed."""
    if image.width * image.height > LARGE_PIXELS:
        # Before anything makes a second copy of the whole.
        image = image.resize((1024, 1024), Image.Resampling.NEAREST)
    if image.mode in ("1", "P", "PA", "RGBa", "La") or (image.mode != "RGBA" and image.has_transparency_data):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if image.mode.startswith("I") or image.mode == "F":
        image = _from_deep(image)
    # First small, then flat: the same numbers, for a fraction of the work.
    patches = _flattened(image.resize(HASH_SIZE, Image.Resampling.BOX), background).convert("L")
    grey = np.frombuffer(patches.tobytes(), np.uint8).reshape(HASH_SIZE[1], HASH_SIZE[0])
    return int(np.packbits(grey[:, 1:] > grey[:, :-1]).view(">i8")[0])


def resize_crop(
    image: Image.Image,
    size: int | tuple[int, int],
    *,
    crop: Literal["centre"] | tuple[float, float] = "centre",
    flip: bool = False,
) -> Image.Image:
    """Scale a picture until it covers a size (a side, or width and height), and cut off what stands over.

    The cut is in the middle, or at (u, v) from 0 to 1: the share of the overhang left out on the left and
    at the top. Bicubic with antialiasing, in one pass.
    """
    width, height = (size, size) if isinstance(size, int) else size
    scale = max(width / image.width, height / image.height)
    kept = min(width / scale, image.width), min(height / scale, image.height)
    u, v = (0.5, 0.5) if crop == "centre" else crop
    left, top = u * (image.width - kept[0]), v * (image.height - kept[1])
    box = (left, top, min(left + kept[0], image.width), min(top + kept[1], image.height))
    cut = image.resize((width, height), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    return cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else cut


@dataclass(frozen=True)
class ColourChange:
    """How far colours may vary: each factor lies between 1 - x and 1 + x, a hue's shift between -x and x."""

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # of the whole circle
    gamma: float = 0.0
    share: float = 1.0  # of pictures that are changed at all

    @property
    def changes(self) -> bool:
        """Whether anything may vary."""
        return bool(self.share) and any(vars(self)[name] for name in (*ENHANCERS, "hue", "gamma"))

    def applied(self, image: Image.Image, key: int) -> Image.Image:
        """An RGB picture with colours drawn by a key."""
        first, *drawn = np.random.Generator(np.random.Philox(key=key)).random(6).tolist()
        if first >= self.share:
            return image
        moved = [2 * number - 1 for number in drawn]
        for name, u in zip(ENHANCERS, moved, strict=False):
            if most := getattr(self, name):
                image = getattr(ImageEnhance, ENHANCERS[name])(image).enhance(1 + most * u)
        if self.hue:
            hue, *others = image.convert("HSV").split()
            shift = round(256 * self.hue * moved[3])
            image = Image.merge("HSV", (hue.point(lambda value: (value + shift) % 256), *others)).convert(
                "RGB"
            )
        if self.gamma:
            power = 1 + self.gamma * moved[4]
            table = [round(255 * (value / 255) ** power) for value in range(256)]
            image = image.point(table * 3)
        return image


ENHANCERS = {"brightness": "Brightness", "contrast": "Contrast", "saturation": "Color"}
"""Pillow's classes, whose factors these are."""


def buckets(resolution: int, *, step: int = 64, max_ratio: float = 2.0) -> list[tuple[int, int]]:
    """Sizes (width, height) for pictures of many shapes, of about the same area, by growing width.

    Sides are multiples of `step`, areas at most resolution squared, the longer side at most `max_ratio`
    times the shorter; each width has the greatest height that fits, and the other way round. As in
    NovelAI's aspect-ratio bucketing, which the SDXL trainers follow. InputError when nothing fits.
    """
    area, longest = resolution * resolution, int(resolution * math.sqrt(max_ratio)) + step
    wide = [(width, area // width // step * step) for width in range(step, longest + 1, step)]
    both = {pair for w, h in wide for pair in ((w, h), (h, w)) if h}
    fitting = sorted((w, h) for w, h in both if max(w, h) <= max_ratio * min(w, h))
    if not fitting:
        raise InputError(
            f"no bucket at resolution {resolution} in steps of {step}", mend="take a smaller step, such as 8"
        )
    return fitting


def nearest_bucket(width: int, height: int, buckets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The bucket whose aspect ratio is nearest on a logarithmic scale; of equals the larger one."""
    ratio = math.log(width / height)
    return min(buckets, key=lambda size: (abs(math.log(size[0] / size[1]) - ratio), -size[0] * size[1]))


def to_tensor(image: Image.Image) -> torch.Tensor:
    """An RGB picture as uint8 [3, H, W]."""
    import torch

    pixels_HW3 = torch.from_numpy(np.array(image.convert("RGB")))
    return pixels_HW3.permute(2, 0, 1).contiguous()
