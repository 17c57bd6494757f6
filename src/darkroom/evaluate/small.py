"""darkroom's own small extractor: a convolutional network, and words beside it where it learned captions.

It is trained by `darkroom train` (task extractor) on a store's own pictures, so that similarities and Frechet
distances can be followed where no published extractor is at hand. Its numbers compare with numbers of the
same extractor alone.

A folder holds `config.json`, `model.safetensors`, `preprocessor_config.json`, and `seen.safetensors`: which
pictures it was trained on.

Shapes: B pictures, H W pixels, C channels, h w cells, D numbers of an embedding, W words.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from darkroom.errors import ModelError, is_out_of_memory
from darkroom.evaluate.preprocess import FILE as PREPROCESS_FILE
from darkroom.models.tensor_file import write_tensors

KIND = "darkroom-extractor"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
WORD = re.compile(r"[^\W_]+")
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


class SmallSettings(BaseModel):
    """The shape of darkroom's own extractor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(default=32, ge=8, le=1024, multiple_of=8, description="channels of the first level")
    levels: int = Field(default=4, ge=1, le=6, description="each halves the sides and doubles the channels")
    embedding: int = Field(default=128, ge=8, le=4096, description="numbers of an embedding")
    buckets: int = Field(default=8192, ge=64, le=2**20, description="words are hashed into so many")
    most_words: int = Field(default=32, ge=1, le=256, description="words of a caption that are read")


class SmallExtractor(nn.Module):
    """Pictures, and captions where it learned them, to embeddings of length 1."""

    def __init__(
        self, settings: SmallSettings, *, resolution: int, text: bool = False, labels: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.settings, self.resolution, self.labels = settings, resolution, tuple(labels)
        widths = [min(settings.width * 2**i, settings.width * 8) for i in range(settings.levels)]
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList(
            _Block(wide, narrow) for wide, narrow in zip([widths[0], *widths], widths, strict=False)
        )
        self.norm = nn.LayerNorm(2 * widths[-1])
        self.head = nn.Linear(2 * widths[-1], settings.embedding)
        self.scale = nn.Parameter(torch.tensor(10.0).log())  # of the logits: 1 / temperature
        self.words = _Words(settings) if text else None
        self.classes = nn.Linear(settings.embedding, len(labels), bias=False) if labels else None

    @property
    def config(self) -> dict[str, Any]:
        """What `config.json` says of it."""
        return {
            "kind": KIND,
            "resolution": self.resolution,
            "text": self.words is not None,
            "labels": list(self.labels),
            **self.settings.model_dump(),
        }

    def maps(self, x_B3HW: Tensor) -> list[Tensor]:
        """What each level sees, [B, C, h, w]."""
        h_BChw = self.stem(x_B3HW)
        found = []
        for block in self.blocks:
            h_BChw = block(h_BChw)
            found.append(h_BChw)
        return found

    def forward(self, x_B3HW: Tensor) -> Tensor:
        """Embeddings [B, D] of normalised pictures: mean and spread of the last level's cells, projected."""
        last_BChw = F.silu(self.maps(x_B3HW)[-1])
        spread_BC = (last_BChw.var(dim=(2, 3), correction=0) + 1e-6).sqrt()
        pooled_BE = torch.cat([last_BChw.mean(dim=(2, 3)), spread_BC], dim=1)
        return F.normalize(self.head(self.norm(pooled_BE)).float(), dim=-1)

    def read(self, ids_BW: Tensor) -> Tensor:
        """Embeddings [B, D] of captions, given as `word_ids`."""
        assert self.words is not None
        return F.normalize(self.words(ids_BW).float(), dim=-1)

    def class_logits(self, embeddings_BD: Tensor) -> Tensor:
        """Cosine with each class, scaled [B, classes]."""
        assert self.classes is not None
        return self.logit_scale * embeddings_BD @ F.normalize(self.classes.weight.float(), dim=-1).T

    @property
    def logit_scale(self) -> Tensor:
        """What cosines are multiplied by in the loss; at most 100."""
        return self.scale.float().exp().clamp(max=100.0)


class _Block(nn.Module):
    """A residual block that halves the sides."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(8, wide), nn.GroupNorm(8, narrow)
        self.conv_1 = nn.Conv2d(wide, narrow, 3, padding=1)
        self.conv_2 = nn.Conv2d(narrow, narrow, 3, padding=1)
        self.skip = nn.Conv2d(wide, narrow, 1)

    def forward(self, x_BChw: Tensor) -> Tensor:
        h_BChw = self.conv_1(F.silu(self.norm_1(x_BChw)))
        h_BChw = self.conv_2(F.silu(self.norm_2(h_BChw)))
        return F.avg_pool2d(self.skip(x_BChw) + h_BChw, 2, ceil_mode=True)


class _Words(nn.Module):
    """A bag of hashed words as an embedding: no vocabulary file, no order."""

    def __init__(self, settings: SmallSettings) -> None:
        super().__init__()
        self.table = nn.Embedding(settings.buckets + 1, settings.embedding, padding_idx=0)
        self.norm = nn.LayerNorm(settings.embedding)
        self.out = nn.Linear(settings.embedding, settings.embedding)

    def forward(self, ids_BW: Tensor) -> Tensor:
        count_B1 = (ids_BW > 0).sum(dim=1, keepdim=True).clamp(min=1)
        mean_BD = self.table(ids_BW).sum(dim=1) / count_B1
        return self.out(self.norm(mean_BD))  # type: ignore[no-any-return]


def word_ids(captions: Sequence[str], settings: SmallSettings) -> Tensor:
    """The words of captions as numbers of hash buckets [B, W], from 1; 0 is none."""
    ids_BW = torch.zeros(len(captions), settings.most_words, dtype=torch.long)
    for row, caption in zip(ids_BW, captions, strict=True):
        found = WORD.findall(caption.lower())[: settings.most_words]
        for i, word in enumerate(found):
            digest = int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "big")
            row[i] = 1 + digest % settings.buckets
    return ids_BW


def normalised(pixels_B3HW: Tensor) -> Tensor:
    """uint8 pictures as the network takes them."""
    mean, std = (torch.tensor(three, device=pixels_B3HW.device).view(1, 3, 1, 1) for three in (MEAN, STD))
    return (pixels_B3HW.float() / 255 - mean) / std


def save_small(network: SmallExtractor, folder: Path, seen: dict[str, Tensor]) -> None:
    """Write an extractor's folder: beside its place first, then renamed into it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        beside.chmod(0o755)
        state = {name: value.float().contiguous().cpu() for name, value in network.state_dict().items()}
        write_tensors(beside / WEIGHTS_FILE, state)
        write_tensors(beside / SEEN_FILE, {name: values.contiguous() for name, values in seen.items()})
        (beside / CONFIG_FILE).write_text(json.dumps(network.config, indent=2) + "\n")
        (beside / PREPROCESS_FILE).write_text(json.dumps(_preprocess(network.resolution), indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


SEEN_FILE = "seen.safetensors"


def _preprocess(resolution: int) -> dict[str, Any]:
    sides = {"height": resolution, "width": resolution}
    return {
        "do_resize": True,
        "size": {"shortest_edge": resolution},
        "do_center_crop": True,
        "crop_size": sides,
        "resample": 3,
        "do_normalize": True,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }


def open_small(folder: Path) -> SmallExtractor:
    """An extractor as it was saved; ModelError for a folder that is damaged or of another kind."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        told = json.loads((folder / CONFIG_FILE).read_text())
        settings = SmallSettings(**{name: told[name] for name in SmallSettings.model_fields})
        network = SmallExtractor(
            settings, resolution=int(told["resolution"]), text=bool(told["text"]), labels=told["labels"]
        )
        network.load_state_dict(load_file(str(folder / WEIGHTS_FILE)))
    except (OSError, ValueError, KeyError, RuntimeError, ValidationError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"'{folder}' is no whole extractor of darkroom: {reason}") from error
    return network.eval()
