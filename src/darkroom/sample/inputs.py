"""Pictures that go in: read from files, brought to size, masks, and where a picture's denoising starts.

Shapes: C H W latents, f the VAE's factor.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps

from darkroom.errors import InputError, is_system_failure
from darkroom.options import MAX_SIDE
from darkroom.picture_settings import GenerateSettings
from darkroom.sample.denoise import KnownPart

if TYPE_CHECKING:
    from darkroom.models.model import Model
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
    except MemoryError:  # the machine's trouble, not the picture's
        raise
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


def _fitted_size(image: Image.Image, area_side: int, unit: int) -> tuple[int, int]:
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
    content: str | None = None
    """What the masked part starts from, where not from the picture."""

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
        content: str | None = None,
    ) -> StartPicture:
        """Encode a picture once for all rows that start from it; `content` is what the masked part starts
        from."""
        pixels = to_pixels(image, size)
        if mask is None:
            return cls(Spread.of(backend, pixels))
        filled = pixels if content != "fill" else to_pixels(_filled_around(image, mask, size), size)
        whole = Spread.of(backend, filled)
        mask_11HW = to_mask(mask, size)
        small = torch.nn.functional.interpolate(mask_11HW, size=(size[1] // factor, size[0] // factor))
        outside = Spread.of(backend, pixels * (mask_11HW < 0.5))
        return cls(whole, outside, small[0], shows, content)

    def start(
        self, table: SolverTable, strength: float, generator: torch.Generator, draw: Noise
    ) -> tuple[torch.Tensor, KnownPart | None, torch.Tensor | None]:
        """First latents, what stays known, and what else the U-Net is shown.

        Draws come in diffusers' order: the picture's latents (where they are used), noise, the masked ones.
        """
        pure = self.mask_1HW is not None and strength == 1
        latents = None if pure and self.shows else self.whole.draw(generator)
        noise = draw(self.whole.mean_CHW.shape, generator)
        if latents is not None and self.mask_1HW is not None and self.content in ("noise", "nothing"):
            # A1111 draws this noise by the seed anew, so that it is that of the first latents.
            inside = draw.of_seed(latents.shape) if self.content == "noise" else torch.zeros_like(latents)
            latents = latents + self.mask_1HW * (inside - latents)
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


@dataclass(frozen=True)
class Noise:
    """How the first noise of a picture is drawn: by its seed, or as a variation of it, as A1111 does."""

    seed: int
    other_seed: int = 0
    strength: float = 0.0
    """How far it goes towards the noise of the other seed."""
    size_HW: tuple[int, int] | None = None
    """Of the latents whose noise is kept in the middle of these."""

    def __call__(self, shape_CHW: Sequence[int], generator: torch.Generator) -> torch.Tensor:
        """Noise [C, H, W]; `generator`, the picture's own, moves on by so many values whatever is asked."""
        own = torch.randn(tuple(shape_CHW), generator=generator, dtype=torch.float32)
        size = tuple(shape_CHW[1:]) if self.size_HW is None else self.size_HW
        kept = own if size == tuple(shape_CHW[1:]) else self.of_seed((shape_CHW[0], *size))
        if self.strength:
            other = torch.randn(kept.shape, generator=torch.Generator().manual_seed(self.other_seed))
            kept = _slerp(kept, other, self.strength)
        return kept if kept.shape == own.shape else _with_middle(own, kept)

    def of_seed(self, shape_CHW: Sequence[int]) -> torch.Tensor:
        """The first noise of the seed alone."""
        return torch.randn(tuple(shape_CHW), generator=torch.Generator().manual_seed(self.seed))


def _slerp(start_CHW: torch.Tensor, end_CHW: torch.Tensor, share: float) -> torch.Tensor:
    """Between two noises along the circle through them, each column (over H) by itself, as A1111 has it."""
    start, end = (one / torch.linalg.vector_norm(one, dim=1, keepdim=True) for one in (start_CHW, end_CHW))
    cosine = (start * end).sum(1, keepdim=True).clamp(-1, 1)
    angle = torch.acos(cosine)
    straight = torch.lerp(start_CHW, end_CHW, share)
    along = torch.sin((1 - share) * angle) * start_CHW + torch.sin(share * angle) * end_CHW
    # Of the same direction, or of opposite ones (latents one pixel high), there is no circle.
    return torch.where(cosine.abs() > 1 - 1e-6, straight, along / torch.sin(angle))


def _with_middle(outer_CHW: torch.Tensor, inner_CHW: torch.Tensor) -> torch.Tensor:
    """The one with the middle of the other in its middle, as far as it goes."""
    into, of = [slice(None)], [slice(None)]
    for outer, inner in zip(outer_CHW.shape[1:], inner_CHW.shape[1:], strict=True):
        shift = (outer - inner) // 2
        length = inner if shift >= 0 else inner + 2 * shift
        into.append(slice(max(shift, 0), max(shift, 0) + length))
        of.append(slice(max(-shift, 0), max(-shift, 0) + length))
    found = outer_CHW.clone()
    found[tuple(into)] = inner_CHW[tuple(of)]
    return found


FILL_BLURS = ((256, 1), (64, 1), (16, 2), (4, 4), (2, 2), (0, 1))
"""Radius in pixels of each blur, and how often it is laid on."""


def _filled_around(image: Image.Image, mask: Image.Image, size: tuple[int, int]) -> Image.Image:
    """A picture at a size, its masked part filled with the blurred colours around it (A1111's fill)."""
    image, mask = (one.resize(size, Image.Resampling.LANCZOS) for one in (image.convert("RGB"), mask))
    known = Image.new("RGBa", size)
    known.paste(image.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(mask.convert("L")))
    filled = Image.new("RGBA", size)
    for radius, times in FILL_BLURS:
        blurred = known.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(times):
            filled.alpha_composite(blurred)
    return filled.convert("RGB")


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


def checked_size(
    model: Model, size: tuple[int, int] | None, image: Image.Image | None = None
) -> tuple[int, int]:
    """Width and height in pixels; where None the U-Net's own, in the shape of a picture to start from.

    InputError unless the model can make it.
    """
    unit = model.size_unit
    if size is None:
        side = model.sample_size
        return (side, side) if image is None else _fitted_size(image, side, unit)
    for side in size:
        if side % unit or not unit <= side <= MAX_SIDE:
            raise InputError(
                f"size {size[0]}x{size[1]}",
                allowed=f"sides of {unit} to {MAX_SIDE} pixels, multiples of {unit}",
                mend="nearest: " + "x".join(str(nearest_side(one, unit)) for one in size),
            )
    return size


def nearest_side(side: int, unit: int) -> int:
    """The multiple of `unit` that is nearest to a side, within what is allowed."""
    return min(max(unit, math.floor(side / unit + 0.5) * unit), MAX_SIDE // unit * unit)


def repaints(model: Model) -> bool:
    """Whether the U-Net sees a mask and a picture besides the latents, and so wants both."""
    assert model.unet is not None
    return int(model.unet.config.in_channels) != model.latent_channels


def check_pictures(settings: GenerateSettings, image: Image.Image | None, mask: Image.Image | None) -> None:
    """InputError unless settings, picture and mask go together."""
    if image is None and mask is not None:
        raise InputError("a mask without a picture", mend="give the picture too")
    if settings.only_masked is not None and mask is None:
        raise InputError("only_masked without a mask", mend="give the picture and its mask")
    if settings.masked_content is not None and mask is None:
        raise InputError("masked_content without a mask", mend="give the picture and its mask")
    if image is None and settings.strength is not None:
        raise InputError(f"strength {settings.strength:g} without a picture to start from", mend="give one")
    if image is not None and settings.hires is not None:
        raise InputError("hires with a picture to start from", mend="give a larger size instead")
    if image is not None and mask is not None:
        check_mask(mask, image)
