"""ESRGAN networks: both layouts of keys, tiles, and files that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn.functional import conv2d, leaky_relu

from darkroom.errors import InputError, ModelError
from darkroom.models.upscaler import RRDBNet, Upscalers, read_upscaler


def photo(width: int, height: int, seed: int = 1) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 255, (5, 6, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def made(fold: int = 1, doublings: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    net = RRDBNet(8, 4, 1, doublings, fold)
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    return {key: tensor.clone() for key, tensor in net.state_dict().items()}


def by_formula(t: dict[str, torch.Tensor], image: Image.Image, fold: int, doublings: int) -> np.ndarray:
    """Real-ESRGAN's RRDBNet, written out from its paper's figures with plain operations."""

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        return conv2d(x, t[f"{name}.weight"], t[f"{name}.bias"], padding=1)

    array = torch.from_numpy(np.asarray(image).astype(np.float32).transpose(2, 0, 1) / 255)[None]
    height, width = array.shape[2:]
    cells = array.reshape(1, 3, height // fold, fold, width // fold, fold)
    x = first = conv(
        cells.permute(0, 1, 3, 5, 2, 4).reshape(1, -1, height // fold, width // fold), "conv_first"
    )
    block = x
    for i in (1, 2, 3):
        seen = [block]
        for j in (1, 2, 3, 4):
            seen.append(leaky_relu(conv(torch.cat(seen, 1), f"body.0.rdb{i}.conv{j}"), 0.2))
        block = block + 0.2 * conv(torch.cat(seen, 1), f"body.0.rdb{i}.conv5")
    x = first + conv(x + 0.2 * block, "conv_body")
    for i in range(doublings):
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = leaky_relu(conv(x, f"conv_up{i + 1}"), 0.2)
    out = conv(leaky_relu(conv(x, "conv_hr"), 0.2), "conv_last")[0]
    return out.clamp(0, 1).mul(255).round().byte().numpy().transpose(1, 2, 0).astype(int)


@pytest.mark.parametrize(("fold", "doublings", "scale"), [(1, 2, 4), (2, 2, 2), (4, 2, 1), (1, 1, 2)])
def test_pictures_are_enlarged_as_the_formula_says(
    fold: int, doublings: int, scale: int, tmp_path: Path
) -> None:
    tensors = made(fold, doublings)
    save_file(tensors, str(tmp_path / "net.safetensors"))
    network = read_upscaler(tmp_path / "net.safetensors")
    image = photo(24, 16)
    larger = np.asarray(network.enlarge(image)).astype(int)
    assert network.scale == scale
    assert larger.shape == (16 * scale, 24 * scale, 3)
    expected = by_formula(tensors, image, fold, doublings)
    assert abs(larger - expected).max() <= 1
    assert abs(by_formula(made(fold, doublings, seed=2), image, fold, doublings) - expected).max() >= 20


def test_tiles_meet_without_a_seam(tmp_path: Path) -> None:
    """With a border as wide as the network sees (19 pixels here) tiles are the whole to the last bit; with
    none they are not."""
    save_file(made(2), str(tmp_path / "net.safetensors"))
    network = read_upscaler(tmp_path / "net.safetensors")
    image = photo(75, 51)
    whole, tiled, torn = (
        np.asarray(network.enlarge(image, tile, border)).astype(int)
        for tile, border in ((256, 32), (24, 40), (24, 0))
    )
    assert whole.shape == (102, 150, 3)
    assert abs(tiled - whole).max() <= 1
    assert abs(torn - whole).max() > 3


def test_the_first_codes_keys_are_the_same_network(tmp_path: Path) -> None:
    tensors = made()
    old = {}
    places = {"conv_first": "0", "conv_body": "1.sub.1", "conv_up1": "3", "conv_up2": "6", "conv_hr": "8"}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition(".")
        if name.startswith("body"):
            _, number, dense, conv = name.split(".")
            old[f"model.1.sub.{number}.RDB{dense[-1]}.{conv}.0.{kind}"] = tensor
        else:
            old[f"model.{places.get(name, '10')}.{kind}"] = tensor
    save_file(old, str(tmp_path / "old.safetensors"))
    save_file(tensors, str(tmp_path / "new.safetensors"))
    larger = [
        np.asarray(read_upscaler(tmp_path / f"{name}.safetensors").enlarge(photo(12, 12)))
        for name in ("old", "new")
    ]
    assert np.array_equal(*larger)


def test_transparency_is_enlarged_too(tmp_path: Path) -> None:
    save_file(made(), str(tmp_path / "net.safetensors"))
    image = photo(12, 12)
    image.putalpha(128)
    larger = read_upscaler(tmp_path / "net.safetensors").enlarge(image)
    assert (larger.mode, larger.size) == ("RGBA", (48, 48))
    assert np.asarray(larger)[..., 3].tolist() == [[128] * 48] * 48


def test_files_that_are_none_are_told_in_one_line(tmp_path: Path) -> None:
    wrong = {
        "other": ({"a": torch.zeros(1)}, "no ESRGAN or Real-ESRGAN"),
        "short": (
            {k: t for k, t in made().items() if "conv_hr" not in k},
            "2 tensors are not as in an RRDBNet",
        ),
        "odd": (made() | {"conv_first.weight": torch.zeros(8, 5, 3, 3)}, "reads 5 channels"),
    }
    for name, (tensors, told) in wrong.items():
        save_file(tensors, str(tmp_path / f"{name}.safetensors"))
        with pytest.raises(ModelError, match=told):
            read_upscaler(tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match="no upscaler at"):
        read_upscaler(tmp_path / "nobody.safetensors")
    folder = Upscalers(tmp_path, torch.device("cpu"))
    assert folder.names() == ["odd", "other", "short"]
    with pytest.raises(InputError, match="no upscaler 'x' here; allowed: odd, other, short"):
        folder.get("x")
    with pytest.raises(InputError, match="is no folder"):
        Upscalers(tmp_path / "nowhere", torch.device("cpu"))
