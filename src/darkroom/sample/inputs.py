"""Pictures that go in: read from files, brought to size, masks, and where a picture's denoising starts.

Shapes: C H W latents, f the VAE's factor.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageOps

from darkroom.errors import InputError, is_system_failure
from darkroom.sample.denoise import KnownPart

if TYPE_CHECKING:
    from darkroom.sample.backends.backend import Backend
    from darkroom.sample.solvers import SolverTable

MAX_BYTES, MAX_PIXELS = 64 * 2**20, 64_000_000
# PNG, JPEG and WebP by the first bytes; other readers of Pillow never see a file.
SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
OPAQUE = 255
ORIENTATION = 0x0112
"""EXIF's tag of how a picture is to be turned."""


def read_image(source: Image.Image | bytes | str | Path) -> Image.Image:
    """A PNG, JPEG or WebP as upright RGB, transparency laid on white. InputError for anything else.

    Size and format are checked before anything is decoded.
    """
    if isinstance(source, Image.Image):
        return _on_white(upright(source))
    data, name = _bytes_of(source)
    # Here, so that pictures from prompts alone need no store's packages.
    from darkroom.data.images import PictureError, decode

    try:
        return decode(data, max_pixels=MAX_PIXELS)
    except PictureError as error:
        raise InputError(f"{name} is no picture that can be read: {error}") from error


def upright(image: Image.Image) -> Image.Image:
    """A picture turned as its EXIF says; damaged EXIF says nothing."""
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:  # Pillow raises anything for a torn block
        return image
    return ImageOps.exif_transpose(image) if orientation in range(2, 9) else image


def _on_white(image: Image.Image) -> Image.Image:
    """As RGB, what is transparent laid on white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    see_through = image.convert("RGBA")
    flat = Image.new("RGB", image.size, "white")
    flat.paste(see_through, mask=see_through.getchannel("A"))
    return flat


def read_mask(source: Image.Image | bytes | str | Path) -> Image.Image:
    """A mask as grey: white is painted anew, black stays. A mask's transparent part is painted anew."""
    if isinstance(source, Image.Image):
        image = upright(source)
    else:
        read_image(source)  # the same refusals
        image = upright(Image.open(io.BytesIO(_bytes_of(source)[0])))
    if image.has_transparency_data:
        alpha = image.convert("RGBA").getchannel("A")
        if np.asarray(alpha).min() < OPAQUE // 2:
            return ImageOps.invert(alpha)
    return image.convert("RGB").convert("L")


def _bytes_of(source: bytes | str | Path) -> tuple[bytes, str]:
    if isinstance(source, bytes):
        data, name = source, "the picture"
    else:
        path, name = Path(source), f"'{source}'"
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            if is_system_failure(error):
                raise
            raise InputError(f"{name} cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise InputError(f"{name} is larger than {MAX_BYTES // 2**20} MiB", mend="make it smaller first")
    if not (data.startswith(SIGNATURES) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")):
        raise InputError(f"{name} is no picture that is taken", allowed="PNG, JPEG, WebP")
    return data, name


def fitted_size(image: Image.Image, area_side: int, unit: int) -> tuple[int, int]:
    """Width and height in multiples of `unit`: the picture's shape, about `area_side` squared at most."""
    scale = min(1.0, area_side / math.sqrt(image.width * image.height))
    width, height = (max(unit, math.floor(side * scale / unit + 0.5) * unit) for side in image.size)
    return width, height


def check_mask(mask: Image.Image, image: Image.Image) -> None:
    """InputError unless a mask has the picture's shape, whatever its size."""
    if abs(math.log(mask.width / mask.height) - math.log(image.width / image.height)) > 0.02:
        raise InputError(
            f"a mask of {mask.width}x{mask.height} for a picture of {image.width}x{image.height}",
            allowed="the same shape",
        )


def to_pixels(image: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """A picture at a size (width, height) as the VAE sees it: [1, 3, H, W] of -1 to 1."""
    array = np.asarray(image.convert("RGB").resize(size, Image.Resampling.LANCZOS), np.float32)
    return torch.from_numpy(array / 255 * 2 - 1).permute(2, 0, 1)[None].contiguous()


def to_mask(mask: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """A mask at a size (width, height), [1, 1, H, W] of zeros and ones: one where half white or more."""
    array = np.asarray(mask.convert("L").resize(size, Image.Resampling.LANCZOS), np.float32) / 255
    return torch.from_numpy((array >= 0.5).astype(np.float32))[None, None]


@dataclass(frozen=True, repr=False)
class Spread:
    """What a VAE says of a picture: its latents' mean and standard deviation [C, H/f, W/f]."""

    mean_CHW: torch.Tensor
    std_CHW: torch.Tensor

    @classmethod
    def of(cls, backend: Backend, pixels_13HW: torch.Tensor) -> Spread:
        """Encode one picture."""
        mean, std = backend.encode(pixels_13HW)
        return cls(mean[0].float().cpu(), std[0].float().cpu())

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Latents of the picture, drawn from a row's own generator as diffusers draws them."""
        noise = torch.randn(self.mean_CHW.shape, generator=generator)
        return torch.addcmul(self.mean_CHW, self.std_CHW, noise)


@dataclass(frozen=True, repr=False)
class StartPicture:
    """An encoded picture that others start from, and its mask where only a part is painted anew."""

    whole: Spread
    outside: Spread | None = None
    """The picture with the masked part greyed out, which inpainting U-Nets are shown."""
    mask_1HW: torch.Tensor | None = None
    shows: bool = False
    """Whether the U-Net is shown mask and picture; else the known part is laid over the latents."""

    @classmethod
    def encoded(
        cls,
        backend: Backend,
        image: Image.Image,
        mask: Image.Image | None,
        size: tuple[int, int],
        factor: int,
        *,
        shows: bool,
    ) -> StartPicture:
        """Encode a picture once for all rows that start from it."""
        pixels = to_pixels(image, size)
        whole = Spread.of(backend, pixels)
        if mask is None:
            return cls(whole)
        mask_11HW = to_mask(mask, size)
        small = torch.nn.functional.interpolate(mask_11HW, size=(size[1] // factor, size[0] // factor))
        outside = Spread.of(backend, pixels * (mask_11HW < 0.5))
        return cls(whole, outside, small[0], shows)

    def start(
        self, table: SolverTable, strength: float, generator: torch.Generator
    ) -> tuple[torch.Tensor, KnownPart | None, torch.Tensor | None]:
        """First latents, what stays known, and what else the U-Net is shown.

        Draws come in diffusers' order: the picture's latents (where they are used), noise, the masked ones.
        """
        pure = self.mask_1HW is not None and strength == 1
        latents = None if pure and self.shows else self.whole.draw(generator)
        noise = torch.randn(self.whole.mean_CHW.shape, generator=generator)
        if pure:
            first = noise * table.initial_scale
        else:
            assert latents is not None
            first = noised(latents, noise, table)
        if self.mask_1HW is None or self.outside is None:
            return first, None, None
        outside = self.outside.draw(generator)
        if self.shows:
            return first, None, torch.cat([self.mask_1HW, outside])
        assert latents is not None
        return first, KnownPart(latents, noise, self.mask_1HW), None


def noised(latents_CHW: torch.Tensor, noise_CHW: torch.Tensor, table: SolverTable) -> torch.Tensor:
    """Latents as noisy as a table's first step expects them."""
    picture, noise = (float(level) for level in table.levels_S2[0])
    return picture * latents_CHW + noise * noise_CHW


def pasted(made: Image.Image, image: Image.Image, mask: Image.Image) -> Image.Image:
    """The made picture inside the mask, the given one outside; greys of the mask mix both."""
    resized = [one.resize(made.size, Image.Resampling.LANCZOS) for one in (image.convert("RGB"), mask)]
    return Image.composite(made, resized[0], resized[1].convert("L"))


Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels."""


def masked_box(mask: Image.Image, size: tuple[int, int], padding: int, drawn: tuple[int, int]) -> Box:
    """What lies around the white of a mask in a picture of a size, in the shape of what is drawn for it.

    InputError where nothing is white.
    """
    white = mask.resize(size, Image.Resampling.LANCZOS).getbbox()
    if white is None:
        raise InputError("a mask with nothing white", mend="paint white what is to be drawn anew")
    left, top = (max(0, side - padding) for side in white[:2])
    right, bottom = (min(most, side + padding) for side, most in zip(white[2:], size, strict=True))
    wide, high = right - left, bottom - top
    if wide * drawn[1] > high * drawn[0]:
        high = min(size[1], round(wide * drawn[1] / drawn[0]))
    else:
        wide = min(size[0], round(high * drawn[0] / drawn[1]))
    x = min(max(0, (left + right - wide) // 2), size[0] - wide)
    y = min(max(0, (top + bottom - high) // 2), size[1] - high)
    return x, y, x + wide, y + high


@dataclass(frozen=True, repr=False)
class MaskedRegion:
    """The part of a picture that is drawn anew, alone and at the full size, and put back into the whole."""

    whole: Image.Image
    whole_mask: Image.Image
    box: Box

    @classmethod
    def around(
        cls, whole: Image.Image, mask: Image.Image, padding: int, drawn: tuple[int, int]
    ) -> MaskedRegion:
        """Around the white of a mask."""
        fitting = mask.resize(whole.size, Image.Resampling.LANCZOS)
        return cls(whole, fitting, masked_box(mask, whole.size, padding, drawn))

    @property
    def image(self) -> Image.Image:
        """Of the picture."""
        return self.whole.crop(self.box)

    @property
    def mask(self) -> Image.Image:
        """Of the mask."""
        return self.whole_mask.crop(self.box)

    def put_back(self, made: Image.Image) -> Image.Image:
        """The whole picture with what was made of its part."""
        left, top, right, bottom = self.box
        found = self.whole.copy()
        found.paste(made.resize((right - left, bottom - top), Image.Resampling.LANCZOS), (left, top))
        return Image.composite(found, self.whole, self.whole_mask)
