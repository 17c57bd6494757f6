"""Pictures of every kind become upright RGB or a reason; crops, buckets and the perceptual hash."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from material import encoded, noise_picture
from PIL import Image, ImageCms

from darkroom.data.images import (
    PictureError,
    buckets,
    decode,
    examine,
    nearest_bucket,
    resize_crop,
    to_tensor,
)
from darkroom.errors import InputError


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def distance(a: int, b: int) -> int:
    return ((a ^ b) & (2**64 - 1)).bit_count()


def test_a_plain_picture_is_itself():
    image = noise_picture(1)
    assert (pixels(decode(encoded(image))) == pixels(image)).all()
    facts = examine(encoded(image))
    assert (facts.width, facts.height, facts.format) == (24, 20, "PNG")


TOLERANCES = {
    "1": 255,
    "L": 0,
    "LA": 0,
    "P": 20,
    "PA": 20,
    "RGB": 0,
    "RGBA": 0,
    "CMYK": 1,
    "YCbCr": 2,
    "LAB": 4,
}


@pytest.mark.parametrize("mode", [*TOLERANCES, "I;16", "I"])
def test_every_mode_becomes_rgb(mode):
    grey = Image.linear_gradient("L").resize((32, 32))
    if mode in ("I;16", "I"):
        image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257).convert(mode)
    elif mode in ("P", "PA"):
        image = grey.convert("RGBA" if mode == "PA" else "RGB").quantize(method=Image.Quantize.FASTOCTREE)
    elif mode == "LAB":
        image = ImageCms.profileToProfile(
            grey.convert("RGB"),
            ImageCms.createProfile("sRGB"),
            ImageCms.createProfile("LAB"),
            outputMode="LAB",
        )
    else:
        image = grey.convert("RGB").convert(mode)
    data = encoded(image, "PNG" if mode == "PA" else "TIFF")
    told = pixels(decode(data))
    assert abs(told.mean(axis=2) - np.asarray(grey)).max() <= TOLERANCES.get(mode, 0)
    assert told[-1].mean() > told[0].mean() + 150
    assert examine(data).width == 32


def test_sixteen_bits_are_scaled_not_clipped():
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    told = pixels(decode(encoded(Image.fromarray(ramp), "PNG")))
    assert (told[..., 0].ravel() == np.arange(256)).all()


def test_numbers_without_a_white_are_refused():
    floats = Image.fromarray(np.ones((16, 16), np.float32))
    with pytest.raises(PictureError, match="mode F") as caught:
        decode(encoded(floats, "TIFF"))
    assert caught.value.reason == "unsupported"


def see_through() -> Image.Image:
    image = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 10, 20))
    return image


@pytest.mark.parametrize("format", ["PNG", "WEBP", "palette"])
def test_transparency_is_laid_on_a_colour(format):
    image = see_through()
    data = (
        encoded(image.quantize(method=Image.Quantize.FASTOCTREE), "PNG")
        if format == "palette"
        else encoded(image, format, lossless=True)
    )
    for name, rgb in (("white", (255, 255, 255)), ("#102030", (16, 32, 48))):
        told = decode(data, background=name)
        assert told.getpixel((15, 5)) == rgb
        assert told.getpixel((5, 5)) == (0, 0, 255)


def test_a_transparent_colour_of_rgb_is_transparency_too():
    data = encoded(Image.new("RGB", (16, 16), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert decode(data, background="lime").getpixel((0, 0)) == (0, 255, 0)


def test_an_unknown_background_is_the_users_mistake():
    with pytest.raises(InputError, match="no colour 'wite'"):
        decode(encoded(noise_picture(1)), background="wite")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_exif_turns_the_picture_upright(orientation, format):
    upright = Image.new("RGB", (48, 32), "white")
    upright.paste("red", (0, 0, 24, 16))
    undo = {
        1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4
    }[orientation]  # fmt: skip
    stored = upright if undo is None else upright.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, format, exif=exif, quality=95)
    told = decode(data)
    assert told.size == (48, 32)
    assert abs(pixels(told) - pixels(upright))[4:12, 4:20].max() < 12
    facts = examine(data)
    assert (facts.width, facts.height) == (48, 32)


def test_damaged_exif_leaves_the_picture_alone():
    data = encoded(noise_picture(3), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\xff\xff")
    assert decode(data).size == (24, 20)
    assert examine(data).width == 24


def test_no_memory_for_exif_is_not_taken_for_damaged_exif(monkeypatch):
    """Else a picture that lies on its side is kept so, for good."""

    def no_memory(_):
        raise MemoryError

    data = encoded(noise_picture(3), "JPEG")
    monkeypatch.setattr(Image.Image, "getexif", no_memory)
    for read in (decode, examine):
        with pytest.raises(MemoryError):
            read(data)


def test_of_an_animation_the_first_frame_is_taken():
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    for format in ("GIF", "WEBP", "PNG"):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
        assert decode(data).getpixel((8, 8)) == (255, 0, 0)
        assert examine(data).width == 16


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "undecodable"),
        (b"GIF89a", "undecodable"),
        (b"<html>404</html>", "undecodable"),
        (encoded(noise_picture(1))[:200], "undecodable"),
        (encoded(noise_picture(1, (200, 200)), "JPEG")[:2000], "undecodable"),
        (encoded(noise_picture(1), "WEBP")[:100], "undecodable"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 50 50\n", "undecodable"),
        (png_header(20_000, 20_000), "bomb"),
        (png_header(2, 2**31 - 1), "bomb"),
        (encoded(noise_picture(1, (15, 400))), "too-small"),
    ],
)
def test_bad_pictures_have_a_reason(data, reason):
    with pytest.raises(PictureError) as caught:
        examine(data, min_size=16)
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)


def test_a_bomb_is_refused_before_it_is_decoded():
    """The pixels of these headers are not there: decoding them would be another error."""
    with pytest.raises(PictureError, match="20000x8000 pixels, more than 1000000") as caught:
        decode(png_header(20_000, 8_000), max_pixels=1_000_000)
    assert caught.value.reason == "bomb"
    with pytest.raises(PictureError) as caught:
        decode(png_header(100, 100))
    assert caught.value.reason == "undecodable"


def test_the_perceptual_hash_survives_scaling_and_compression_only():
    image = noise_picture(7, (256, 256))
    same = [
        encoded(image.resize((100, 90)), "JPEG", quality=60),
        encoded(image.resize((700, 500)), "WEBP", quality=50),
        encoded(image.convert("RGBA"), "PNG"),
    ]
    base = examine(encoded(image)).phash
    assert max(distance(base, examine(data).phash) for data in same) <= 4
    others = [examine(encoded(noise_picture(i, (256, 256)))).phash for i in range(8, 16)]
    assert min(distance(base, other) for other in others) >= 12
    assert -(2**63) <= base < 2**63


def test_large_pictures_are_examined_too():
    data = encoded(Image.new("RGB", (5000, 4000), "red"), "PNG")
    assert (examine(data).width, examine(data).height) == (5000, 4000)


def test_to_tensor_is_channels_first():
    image = noise_picture(2)
    tensor = to_tensor(image)
    assert (tuple(tensor.shape), str(tensor.dtype)) == ((3, 20, 24), "torch.uint8")
    assert (tensor.permute(1, 2, 0).numpy() == np.asarray(image)).all()


def stripes() -> Image.Image:
    """100 x 40, its red value says the column."""
    columns = np.repeat(np.arange(100, dtype=np.uint8)[None, :, None], 40, axis=0)
    return Image.fromarray(np.repeat(columns, 3, axis=2))


@pytest.mark.parametrize(
    ("crop", "first"), [("centre", 30), ((0.0, 0.0), 0), ((1.0, 1.0), 60), ((0.25, 0.9), 15)]
)
def test_crops_cut_where_they_should(crop, first):
    cut = pixels(resize_crop(stripes(), 40, crop=crop))[..., 0]
    assert cut.shape == (40, 40)
    assert (cut[20] == np.arange(first, first + 40)).all()
    flipped = pixels(resize_crop(stripes(), 40, crop=crop, flip=True))[..., 0]
    assert (flipped == cut[:, ::-1]).all()


def test_resizing_covers_and_keeps_the_shape():
    assert resize_crop(stripes(), (64, 24)).size == (64, 24)
    halved = pixels(resize_crop(stripes(), 20, crop=(0.0, 0.0)))[10, :, 0]
    assert abs(halved - (np.arange(20) * 2 + 0.5)).max() <= 1
    assert resize_crop(stripes(), 256).size == (256, 256)


def test_buckets_as_the_trainers_make_them():
    assert buckets(512) == [(384, 640), (448, 576), (512, 512), (576, 448), (640, 384)]
    assert (64, 64) in buckets(64, step=8)
    assert buckets(64, step=8, max_ratio=1.0) == [(64, 64)]
    for width, height in buckets(1024, max_ratio=4.0):
        assert width % 64 == height % 64 == 0
        assert 0.75 * 1024**2 < width * height <= 1024**2
        assert (height, width) in buckets(1024, max_ratio=4.0)
    with pytest.raises(InputError, match="take a smaller step"):
        buckets(32)


def test_the_nearest_bucket_is_nearest_by_ratio():
    sizes = buckets(512)
    assert nearest_bucket(1000, 1000, sizes) == (512, 512)
    assert nearest_bucket(4000, 3000, sizes) == (576, 448)
    assert nearest_bucket(300, 4000, sizes) == (384, 640)
    mirrored = [nearest_bucket(h, w, sizes) for w, h in ((801, 600), (70, 33))]
    assert [size[::-1] for size in mirrored] == [
        nearest_bucket(w, h, sizes) for w, h in ((801, 600), (70, 33))
    ]


def test_decoding_does_not_touch_the_bytes():
    data = encoded(noise_picture(4))
    file = io.BytesIO(data)
    decode(data)
    assert file.getvalue() == data


def test_no_memory_left_is_no_damaged_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that the machine could not hold just then is not left out as one that cannot be read."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    assert decode(file.getvalue()).size == (8, 8)

    def without_memory(_: Image.Image) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", without_memory)
    with pytest.raises(MemoryError):
        decode(file.getvalue())
