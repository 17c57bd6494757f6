"""Networks that make pictures larger: ESRGAN and Real-ESRGAN (Wang et al. 2018, 2021) from `.safetensors`.

An RRDBNet of any width and depth, in the keys of Real-ESRGAN (`conv_first.weight`) or of ESRGAN's first code
and most shared models (`model.0.weight`). Pictures go through it in tiles, each with a border that is cut
away, so memory does not grow with the picture.

Shapes: B tiles, C channels, H W pixels of what is read, F features, G growth.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.nn.functional import interpolate, leaky_relu, pixel_unshuffle

from darkroom.errors import InputError, ModelError
from darkroom.hardware import accelerator
from darkroom.models.adapters.files import open_tensors

Pixels = NDArray[Any]
SLOPE, RESIDUAL = 0.2, 0.2
TILE, BORDER = 256, 32
"""Pixels a side that are kept of a tile, and those around that are cut away."""
MAX_BLOCKS = 64
OLD_KEYS = (
    (r"model\.0\.", "conv_first."),
    (r"model\.1\.sub\.(\d+)\.RDB(\d)\.conv(\d)\.0\.", r"body.\1.rdb\2.conv\3."),
    (r"model\.1\.sub\.\d+\.(weight|bias)$", r"conv_body.\1"),
)
"""ESRGAN's first keys as Real-ESRGAN's; what follows the body is found by its place."""


class DenseBlock(nn.Module):
    """Five convolutions, each of which sees all that came before."""

    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        for i in range(5):
            outputs = features if i == 4 else growth
            setattr(self, f"conv{i + 1}", nn.Conv2d(features + i * growth, outputs, 3, 1, 1))

    def forward(self, x_BFHW: torch.Tensor) -> torch.Tensor:
        """The input and a fifth of what was found."""
        seen = x_BFHW
        for i in range(4):
            seen = torch.cat([seen, leaky_relu(getattr(self, f"conv{i + 1}")(seen), SLOPE)], dim=1)
        return x_BFHW + RESIDUAL * self._last(seen)

    def _last(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.get_submodule("conv5")(x)
        return out


class ResidualBlock(nn.Module):
    """Three dense blocks in a row, and a residual around them."""

    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        self.rdb1, self.rdb2, self.rdb3 = (DenseBlock(features, growth) for _ in range(3))

    def forward(self, x_BFHW: torch.Tensor) -> torch.Tensor:
        """The input and a fifth of what was found."""
        found: torch.Tensor = self.rdb3(self.rdb2(self.rdb1(x_BFHW)))
        return x_BFHW + RESIDUAL * found


class RRDBNet(nn.Module):
    """Residual-in-residual dense blocks, then doublings. `fold` is how many pixels a side become channels."""

    def __init__(self, features: int, growth: int, blocks: int, doublings: int, fold: int = 1) -> None:
        super().__init__()
        self.fold, self.doublings = fold, doublings
        self.conv_first = nn.Conv2d(3 * fold**2, features, 3, 1, 1)
        self.body = nn.Sequential(*(ResidualBlock(features, growth) for _ in range(blocks)))
        self.conv_body = nn.Conv2d(features, features, 3, 1, 1)
        for i in range(doublings):
            setattr(self, f"conv_up{i + 1}", nn.Conv2d(features, features, 3, 1, 1))
        self.conv_hr = nn.Conv2d(features, features, 3, 1, 1)
        self.conv_last = nn.Conv2d(features, 3, 3, 1, 1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Colours of 0 to 1 to colours, `scale` times as large; sides are multiples of `fold`."""
        first = self.conv_first(pixel_unshuffle(x_BCHW, self.fold) if self.fold > 1 else x_BCHW)
        x = first + self.conv_body(self.body(first))
        for i in range(self.doublings):
            x = leaky_relu(getattr(self, f"conv_up{i + 1}")(interpolate(x, scale_factor=2.0)), SLOPE)
        out: torch.Tensor = self.conv_last(leaky_relu(self.conv_hr(x), SLOPE))
        return out


@dataclass(frozen=True, eq=False, repr=False)
class Upscaler:
    """A network that was read."""

    name: str
    net: RRDBNet
    sha256: str

    @property
    def scale(self) -> float:
        """How much larger each side becomes."""
        return float(2**self.net.doublings) / self.net.fold

    def to(self, device: torch.device) -> Upscaler:
        """On a device, in place."""
        self.net.to(device)
        return self

    @torch.inference_mode()
    def enlarge(self, image: Image.Image, tile: int = TILE, border: int = BORDER) -> Image.Image:
        """A picture as the network makes it larger, tile by tile; what is transparent is enlarged plainly."""
        array = np.asarray(image.convert("RGB"), np.float32) / 255
        width, height = round(image.width * self.scale), round(image.height * self.scale)
        out = np.empty((height, width, 3), np.uint8)
        for top in range(0, image.height, tile):
            for left in range(0, image.width, tile):
                made = self._tile(array, top, left, tile, border)
                y, x = round(top * self.scale), round(left * self.scale)
                out[y : y + made.shape[0], x : x + made.shape[1]] = made
        larger = Image.fromarray(out)
        if image.has_transparency_data:
            alpha = image.convert("RGBA").getchannel("A").resize(larger.size, Image.Resampling.LANCZOS)
            larger.putalpha(alpha)
        return larger

    def _tile(self, array: Pixels, top: int, left: int, tile: int, border: int) -> Pixels:
        """What is kept of a tile: [h, w, 3] of bytes."""
        rows, columns = array.shape[:2]
        fold = self.net.fold
        border = -(-border // fold) * fold
        y0, x0 = max(0, top - border), max(0, left - border)
        y1, x1 = min(rows, top + tile + border), min(columns, left + tile + border)
        part = array[y0:y1, x0:x1]
        more = ((0, -part.shape[0] % fold), (0, -part.shape[1] % fold), (0, 0))
        padded = np.pad(part, more, mode="edge")
        weight = self.net.conv_first.weight
        with accelerator.alone(weight.device):
            x_CHW = torch.from_numpy(padded.transpose(2, 0, 1).copy()).to(weight.device, weight.dtype)
            made_CHW: torch.Tensor = self.net(x_CHW[None])[0].float().clamp(0, 1).mul(255).round().byte()
            made: Pixels = made_CHW.permute(1, 2, 0).cpu().numpy()
        high, wide = min(tile, rows - top), min(tile, columns - left)
        y, x = round((top - y0) * self.scale), round((left - x0) * self.scale)
        return made[y : y + round(high * self.scale), x : x + round(wide * self.scale)]


class Upscalers:
    """The networks of a folder by name; the latest that was used stays in memory. For several threads."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        if folder is not None and not folder.is_dir():
            raise InputError(f"--upscalers '{folder}' is no folder", mend="make it, or name another")
        self._folder, self._device = folder, device
        self._lock = threading.Lock()
        self._kept: tuple[tuple[str, int], Upscaler] | None = None

    def names(self) -> list[str]:
        """What a request may name."""
        return sorted(self._files())

    def _files(self) -> dict[str, Path]:
        found = [] if self._folder is None else self._folder.glob("*.safetensors")
        return {file.stem: file for file in found if file.is_file() and not file.is_symlink()}

    def get(self, name: str) -> Upscaler:
        """A network on the device. InputError for none of that name; ModelError for no network."""
        file = {one.lower(): path for one, path in self._files().items()}.get(name.strip().lower())
        if file is None:
            raise InputError(f"no upscaler '{name[:100]}' here", allowed=", ".join(self.names()) or "none")
        stamp = str(file), file.stat().st_mtime_ns
        with accelerator.alone(self._device), self._lock:
            if self._kept is None or self._kept[0] != stamp:
                self._kept = None
                self._kept = stamp, read_upscaler(file).to(self._device)
            return self._kept[1]


def read_upscaler(file: str | Path) -> Upscaler:
    """A network from a `.safetensors` file; ModelError for one of another kind, naming what does not fit."""
    path = Path(file)
    if not path.is_file():
        raise ModelError(f"no upscaler at '{path}'", allowed="a .safetensors file")
    stored = open_tensors(path)
    tensors = _renamed(stored.tensors)
    blocks = {int(key.split(".")[1]) for key in tensors if key.startswith("body.")}
    first, second = tensors.get("conv_first.weight"), tensors.get("body.0.rdb1.conv2.weight")
    if first is None or second is None or first.ndim != 4 or second.ndim != 4:
        message = f"upscaler '{path.name}' is no ESRGAN or Real-ESRGAN network"
        raise ModelError(
            message, allowed="RRDBNet's keys: conv_first, body, conv_body, conv_up1, conv_hr, conv_last"
        )
    features, growth = int(first.shape[0]), int(second.shape[1] - first.shape[0])
    fold = {3: 1, 12: 2, 48: 4}.get(int(first.shape[1]))
    doublings = sum(key.startswith("conv_up") and key.endswith("weight") for key in tensors)
    if fold is None or growth < 1 or len(blocks) > MAX_BLOCKS:
        raise ModelError(
            f"upscaler '{path.name}' reads {first.shape[1]} channels with {len(blocks)} blocks of {growth}",
            allowed=f"3, 12 or 48 channels, up to {MAX_BLOCKS} blocks",
        )
    with torch.device("meta"):
        net = RRDBNet(features, growth, len(blocks), doublings, fold)
    expected = {key: tuple(tensor.shape) for key, tensor in net.state_dict().items()}
    given = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if wrong := sorted(key for key in expected.keys() | given.keys() if expected.get(key) != given.get(key)):
        first_of = f"{len(wrong)} tensors are not as in an RRDBNet, such as '{wrong[0][:80]}'"
        raise ModelError(f"upscaler '{path.name}': {first_of}")
    net.load_state_dict({key: tensor.float() for key, tensor in tensors.items()}, assign=True)
    net.eval().requires_grad_(False)
    return Upscaler(path.stem, net, stored.sha256)


def _renamed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In Real-ESRGAN's keys, where they are those of ESRGAN's first code."""
    if not any(key.startswith("model.") for key in tensors):
        return {key.removeprefix("params_ema.").removeprefix("params."): t for key, t in tensors.items()}
    behind = sorted(
        {int(m[1]) for key in tensors if (m := re.match(r"model\.(\d+)\.", key)) and int(m[1]) > 1}
    )
    names = [*(f"conv_up{i + 1}" for i in range(len(behind) - 2)), "conv_hr", "conv_last"]
    places = {f"model.{at}.": f"{name}." for at, name in zip(behind, names[-len(behind) :], strict=True)}
    found = {}
    for key, tensor in tensors.items():
        name = key
        for pattern, new in OLD_KEYS:
            name = re.sub(pattern, new, name)
        for old, new in places.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        found[name] = tensor
    return found
