"""darkroom's own small extractor: a convolutional network, and a text encoder where it learned captions.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor, nn

from darkroom.data.images import PictureError, examine
from darkroom.errors import ModelError, first_line, is_system_failure
from darkroom.evaluate.pictures import FILE as PREPROCESS_FILE
from darkroom.evaluate.pictures import Pictures
from darkroom.evaluate.settings import SmallSettings
from darkroom.hardware.accelerator import new_tensor
from darkroom.models.checked import read_json
from darkroom.models.folder import replaced_folder
from darkroom.models.model import write_tensors

KIND = "darkroom-extractor"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
WORD = re.compile(r"[^\W_]+")
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


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
    mean, std = (new_tensor(three, pixels_B3HW.device).view(1, 3, 1, 1) for three in (MEAN, STD))
    return (pixels_B3HW.float() / 255 - mean) / std


def save_small(network: SmallExtractor, folder: Path, seen: dict[str, Tensor]) -> None:
    """Write an extractor's folder: to a temporary name first, then renamed."""
    with replaced_folder(folder) as temporary:
        state = {name: value.float().contiguous().cpu() for name, value in network.state_dict().items()}
        write_tensors(temporary / WEIGHTS_FILE, state)
        write_tensors(temporary / SEEN_FILE, {name: values.contiguous() for name, values in seen.items()})
        (temporary / CONFIG_FILE).write_text(json.dumps(network.config, indent=2) + "\n", "utf-8")
        (temporary / PREPROCESS_FILE).write_text(
            json.dumps(_preprocess(network.resolution), indent=2) + "\n", "utf-8"
        )


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

    config = read_json(folder / CONFIG_FILE)
    try:
        settings = SmallSettings(**{name: config[name] for name in SmallSettings.model_fields})
        network = SmallExtractor(
            settings, resolution=int(config["resolution"]), text=bool(config["text"]), labels=config["labels"]
        )
        network.load_state_dict(load_file(str(folder / WEIGHTS_FILE)))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        ValidationError,
        SafetensorError,
    ) as error:
        if is_system_failure(error):
            raise
        raise ModelError(f"'{folder}' is no whole extractor of darkroom: {first_line(error)}") from error
    return network.eval()


Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TrainingHashes:
    """Training pictures by 64 bits of their bytes' BLAKE2b, and by perceptual hash; both sorted."""

    bytes_N: Ids
    looks_N: Ids

    @classmethod
    def of(cls, pictures: Iterable[tuple[bytes, int]]) -> TrainingHashes:
        """Of pictures with their perceptual hashes (the store's column `phash`)."""
        pairs = [(digest(data), look) for data, look in pictures]
        exact, looks = (np.unique(np.array([pair[i] for pair in pairs], np.int64)) for i in (0, 1))
        return cls(exact, looks)

    def __or__(self, other: TrainingHashes) -> TrainingHashes:
        return TrainingHashes(
            np.union1d(self.bytes_N, other.bytes_N).astype(np.int64),
            np.union1d(self.looks_N, other.looks_N).astype(np.int64),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """As they are saved."""
        return {"bytes": torch.from_numpy(self.bytes_N), "looks": torch.from_numpy(self.looks_N)}

    @classmethod
    def read(cls, folder: Path) -> TrainingHashes | None:
        """What an extractor's folder says; None where it does not say (published extractors)."""
        from safetensors.torch import load_file

        file = folder / SEEN_FILE
        if not file.is_file():
            return None
        tensors = load_file(str(file))
        return cls(tensors["bytes"].numpy(), tensors["looks"].numpy())

    def overlap(self, pictures: Pictures) -> Overlap:
        """How many of these pictures were trained on: the very files, and those that look the same."""
        exact = alike = 0
        for data, look in _looked_at(pictures):
            is_exact = _in(digest(data), self.bytes_N)
            exact += is_exact
            alike += not is_exact and look is not None and _in(look, self.looks_N)
        return Overlap(exact, alike, len(pictures))


@dataclass(frozen=True)
class Overlap:
    """Pictures that an extractor was trained on, among those it is to judge."""

    exact: int
    alike: int
    of: int

    def __bool__(self) -> bool:
        return bool(self.exact or self.alike)

    def __str__(self) -> str:
        parts = [f"{self.exact} the same files"] if self.exact else []
        parts += [f"{self.alike} that look the same"] if self.alike else []
        return f"{self.exact + self.alike} of {self.of} pictures ({', '.join(parts)})"


def digest(data: bytes) -> int:
    """64 bits of a file, signed."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big", signed=True)


def _in(number: int, sorted_N: Ids) -> bool:
    place = int(np.searchsorted(sorted_N, number))
    return place < len(sorted_N) and int(sorted_N[place]) == number


def _looked_at(pictures: Pictures) -> Iterator[tuple[bytes, int | None]]:
    for data in pictures.bytes():
        try:
            look: int | None = examine(data).phash
        except PictureError:
            look = None
        # A picture of one colour hashes to zero, as all such pictures do.
        yield data, look or None
