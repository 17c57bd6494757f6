"""The mark is found after what happens to pictures, carries its payload, and is not seen where it is not."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageFilter

from darkroom.sample import watermark

PAYLOAD = 0xC0FFEE42


def photo(side: int = 512, seed: int = 0) -> Image.Image:
    """Something with the spectrum of a photograph: 1/f noise in colour, edges, and flat places."""
    draw = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side)[None])
    frequency[0, 0] = 1
    layers = []
    for _ in range(3):
        noise = np.fft.fft2(draw.standard_normal((side, side))) / frequency**1.1
        layer = np.real(np.fft.ifft2(noise))
        layers.append((layer - layer.mean()) / layer.std() * 45 + 120)
    pixels = np.stack(layers, -1)
    pixels[side // 3 : side // 2, side // 4 : side // 2] = (200, 180, 40)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.7))


def psnr(one: Image.Image, other: Image.Image) -> float:
    apart = np.asarray(one, dtype=float) - np.asarray(other, dtype=float)
    return float(10 * np.log10(255**2 / np.mean(apart**2)))


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(io.BytesIO(buffer.getvalue()))


def scaled(image: Image.Image, scale: float) -> Image.Image:
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)


def cropped(image: Image.Image, part: float) -> Image.Image:
    width, height = (round(side * (1 - part)) for side in image.size)
    return image.crop((image.width - width, 7, image.width, 7 + height))


ATTACKS = {
    "as it is": lambda image: image,
    "JPEG 50": lambda image: jpeg(image, 50),
    "half": lambda image: scaled(image, 0.5),
    "two thirds": lambda image: scaled(image, 0.667),
    "one and a half": lambda image: scaled(image, 1.5),
    "a tenth cut off": lambda image: cropped(image, 0.1),
    "20 pixels cut off": lambda image: image.crop((20, 0, image.width, image.height)),
    "a degree": lambda image: cropped(image.rotate(1, Image.Resampling.BICUBIC), 0.05),
    "cut, scaled and JPEG": lambda image: jpeg(scaled(cropped(image, 0.1), 0.7), 75),
    "darker": lambda image: image.point(lambda value: value * 0.7),
}


@pytest.fixture(scope="module")
def marked() -> Image.Image:
    return watermark.embed(photo(), PAYLOAD, "ours")


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_payload_is_read_after(attack, marked):
    found = watermark.find(ATTACKS[attack](marked), "ours")
    assert found is not None
    assert found.payload == PAYLOAD


def test_it_is_not_seen_and_not_found_where_it_is_not(marked):
    assert psnr(photo(), marked) >= 40
    assert watermark.find(photo(), "ours") is None
    assert watermark.find(marked, "theirs") is None
    assert watermark.find(scaled(photo(), 0.7), "ours") is None


def test_scale_and_angle_are_told(marked):
    half = watermark.find(scaled(marked, 0.5), "ours")
    turned = watermark.find(cropped(marked.rotate(1, Image.Resampling.BICUBIC), 0.05), "ours")
    assert half is not None
    assert turned is not None
    assert half.scale == pytest.approx(0.5, abs=0.005)
    assert abs(turned.degrees) == pytest.approx(1, abs=0.15)


def test_small_pictures_are_left_as_they_are_and_alpha_stays():
    small = photo(128)
    assert watermark.embed(small, 1) is small
    image = photo(256).convert("RGBA")
    image.putalpha(77)
    assert watermark.embed(image, 1).getextrema()[3] == (77, 77)


def test_what_is_too_small_is_named_in_one_line():
    assert watermark.too_small([(256, 512), (1024, 1024)]) == ""
    told = watermark.too_small([(64, 64), (512, 512), (64, 64), (512, 255)])
    assert told == "no watermark in pictures of 64x64, 512x255: it needs 256 pixels a side"


def test_a_payload_has_32_bits():
    with pytest.raises(ValueError, match="32 bits"):
        watermark.embed(photo(256), 2**32)


def test_the_code_mends_a_fifth_of_its_bits():
    bits = watermark._with_check(PAYLOAD)
    soft = 1.0 - 2.0 * watermark._coded(bits)
    draw = np.random.default_rng(3)
    soft[draw.choice(len(soft), len(soft) // 10, replace=False)] *= -1
    assert watermark._decoded(soft) == bits
    soft[:] = draw.standard_normal(len(soft))
    assert watermark._decoded(soft) != bits


def attacked_photographs(shared_data, side=512):
    for file in sorted((shared_data / "dreambooth").glob("*/*.jpg")):
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        least = min(image.size)
        yield image.crop((0, 0, least, least)).resize((side, side), Image.Resampling.LANCZOS)


@pytest.mark.nightly
def test_99_of_100_photographs_keep_their_payload(shared_data):
    draw, lost, tried = np.random.default_rng(0), [], 0
    for number, image in enumerate(attacked_photographs(shared_data)):
        payload = int(draw.integers(0, 2**32))
        marked = watermark.embed(image, payload)
        assert psnr(image, marked) >= 40
        for name, attack in ATTACKS.items():
            found = watermark.find(attack(marked))
            tried += 1
            if found is None or found.payload != payload:
                lost.append((number, name))
    assert tried >= 300
    assert len(lost) <= tried / 100, lost


@pytest.mark.nightly
def test_no_mark_is_found_in_1000_unmarked_pictures(shared_data):
    """10,000 take a quarter of an hour: benchmarks/marks_and_bits.py."""
    draw = np.random.default_rng(1)
    images = list(attacked_photographs(shared_data, 1024))
    images += [photo(1024, seed) for seed in range(12)]  # and what resembles none of them
    for i in range(1000):
        image = images[i % len(images)]
        side = int(draw.integers(256, 1025))
        left, top = (int(draw.integers(0, 1025 - side)) for _ in range(2))
        part = image.crop((left, top, left + side, top + side)).resize((256, 256))
        assert watermark.find(part.transpose(i % 7) if i % 8 < 7 else part) is None, (i, side, left, top)
