"""The Inception v3 network that FID is defined over, as plain torch; no torchvision is needed.

It differs from the common one (Szegedy et al. 2015): average pools leave the padding out, the last block's
pool takes the maximum, and there is a class more. Names of the weights are those of the file
`pt_inception-2015-12-05` that the PyTorch FID tools use; converted to safetensors it is opened as it is.

Shapes: B pictures, C channels, h w cells.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darkroom.errors import ModelError
from darkroom.evaluate.preprocess import Preprocess

WEIGHTS_FILE = "model.safetensors"
FEATURES = 2048
_MIDDLE = 128 / 255, 128 / 255, 128 / 255
# As clean-fid has it: both sides squeezed to 299 without rounding, then (pixel - 128) / 128.
PREPROCESS = Preprocess(shortest=None, size=(299, 299), crop=None, mean=_MIDDLE, std=_MIDDLE, unrounded=True)


class _Conv(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(
        self, wide: int, narrow: int, size: int | tuple[int, int], stride: int = 1, padding: int | str = 0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(wide, narrow, size, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(narrow, eps=0.001)

    def forward(self, x_BChw: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x_BChw)), inplace=True)


def _mean_pool(x_BChw: Tensor) -> Tensor:
    return F.avg_pool2d(x_BChw, 3, stride=1, padding=1, count_include_pad=False)


class _A(nn.Module):
    def __init__(self, wide: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = _Conv(wide, 64, 1)
        self.branch5x5_1, self.branch5x5_2 = _Conv(wide, 48, 1), _Conv(48, 64, 5, padding=2)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = _Conv(wide, 64, 1), _Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = _Conv(96, 96, 3, padding=1)
        self.branch_pool = _Conv(wide, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, three, self.branch_pool(_mean_pool(x))], dim=1)


class _B(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.branch3x3 = _Conv(wide, 384, 3, stride=2)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = _Conv(wide, 64, 1), _Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = _Conv(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), three, F.max_pool2d(x, 3, stride=2)], dim=1)


class _C(nn.Module):
    def __init__(self, wide: int, inner: int) -> None:
        super().__init__()
        self.branch1x1 = _Conv(wide, 192, 1)
        self.branch7x7_1 = _Conv(wide, inner, 1)
        self.branch7x7_2 = _Conv(inner, inner, (1, 7), padding="same")
        self.branch7x7_3 = _Conv(inner, 192, (7, 1), padding="same")
        self.branch7x7dbl_1 = _Conv(wide, inner, 1)
        self.branch7x7dbl_2 = _Conv(inner, inner, (7, 1), padding="same")
        self.branch7x7dbl_3 = _Conv(inner, inner, (1, 7), padding="same")
        self.branch7x7dbl_4 = _Conv(inner, inner, (7, 1), padding="same")
        self.branch7x7dbl_5 = _Conv(inner, 192, (1, 7), padding="same")
        self.branch_pool = _Conv(wide, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), seven, double, self.branch_pool(_mean_pool(x))], dim=1)


class _D(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.branch3x3_1, self.branch3x3_2 = _Conv(wide, 192, 1), _Conv(192, 320, 3, stride=2)
        self.branch7x7x3_1 = _Conv(wide, 192, 1)
        self.branch7x7x3_2 = _Conv(192, 192, (1, 7), padding="same")
        self.branch7x7x3_3 = _Conv(192, 192, (7, 1), padding="same")
        self.branch7x7x3_4 = _Conv(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_2(self.branch7x7x3_1(x))
        seven = self.branch7x7x3_4(self.branch7x7x3_3(seven))
        return torch.cat([three, seven, F.max_pool2d(x, 3, stride=2)], dim=1)


class _E(nn.Module):
    def __init__(self, wide: int, *, largest: bool) -> None:
        super().__init__()
        self.largest = largest
        self.branch1x1 = _Conv(wide, 320, 1)
        self.branch3x3_1 = _Conv(wide, 384, 1)
        self.branch3x3_2a = _Conv(384, 384, (1, 3), padding="same")
        self.branch3x3_2b = _Conv(384, 384, (3, 1), padding="same")
        self.branch3x3dbl_1, self.branch3x3dbl_2 = _Conv(wide, 448, 1), _Conv(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = _Conv(384, 384, (1, 3), padding="same")
        self.branch3x3dbl_3b = _Conv(384, 384, (3, 1), padding="same")
        self.branch_pool = _Conv(wide, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.largest else _mean_pool(x)
        parts = [self.branch1x1(x), self.branch3x3_2a(three), self.branch3x3_2b(three)]
        parts += [self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double), self.branch_pool(pooled)]
        return torch.cat(parts, dim=1)


class Inception(nn.Module):
    """Pictures [B, 3, 299, 299] of -1 to 1 to the 2,048 numbers of the last pool."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = _Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = _Conv(32, 32, 3)
        self.Conv2d_2b_3x3 = _Conv(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = _Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = _Conv(80, 192, 3)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = _A(192, 32), _A(256, 64), _A(288, 64)
        self.Mixed_6a = _B(288)
        self.Mixed_6b, self.Mixed_6c = _C(768, 128), _C(768, 160)
        self.Mixed_6d, self.Mixed_6e = _C(768, 160), _C(768, 192)
        self.Mixed_7a = _D(768)
        self.Mixed_7b, self.Mixed_7c = _E(1280, largest=False), _E(2048, largest=True)

    def maps(self, x: Tensor) -> list[Tensor]:
        """What the four stages see, of 64, 192, 768 and 2,048 channels."""
        first = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(first, 3, stride=2)
        second = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(second, 3, stride=2))))
        third = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        return [first, second, third, self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(third)))]

    def forward(self, x: Tensor) -> Tensor:
        """Pixels [B, 3, 299, 299] of -1 to 1 to features [B, 2048]."""
        return self.maps(x)[-1].mean(dim=(2, 3))


def open_inception(folder: Path) -> Inception:
    """The network with the folder's weights; the classifier in the file is not needed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(str(folder / WEIGHTS_FILE))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"'{folder}' has no {WEIGHTS_FILE} that can be read") from error
    network = Inception()
    told = network.load_state_dict(state, strict=False)
    missing = [name for name in told.missing_keys if not name.endswith("num_batches_tracked")]
    unknown = [name for name in told.unexpected_keys if not name.startswith(("fc.", "AuxLogits."))]
    if missing or unknown:
        odd = f"{missing[0]} lacks" if missing else f"{unknown[0]} is new"
        raise ModelError(
            f"'{folder}' holds other weights than FID's Inception v3: {odd}",
            mend="convert pt_inception-2015-12-05 to safetensors, names as they are",
        )
    return network.eval()
