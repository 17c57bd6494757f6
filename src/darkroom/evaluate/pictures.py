"""The pictures that are scored and compared with: a folder, a store, or what was just drawn."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin
from pydantic import BaseModel, ConfigDict, Field

from darkroom.data.images import EXTENSIONS, PictureError, decode
from darkroom.data.importers.source import pictures_below
from darkroom.data.store import Store
from darkroom.errors import InputError, ModelError
from darkroom.hardware.system import atomic_replace, remove_file, write_atomically
from darkroom.models.checked import read_json
from darkroom.models.model import Model

BATCH = 64
T = TypeVar("T")
GRID = "grid-"


class Pictures(Protocol):
    """A set of pictures that can be gone through more than once."""

    @property
    def name(self) -> str:
        """What it is called in a row of scores."""
        ...

    @property
    def sha256(self) -> str:
        """Of what the pictures are, whatever their names."""
        ...

    def __len__(self) -> int: ...

    def bytes(self) -> Iterator[bytes]:
        """The pictures as they lie on disk."""
        ...


def images(pictures: Pictures) -> Iterator[Image.Image]:
    """The pictures decoded, upright RGB; InputError for one that cannot be."""
    for i, data in enumerate(pictures.bytes()):
        try:
            yield decode(data)
        except PictureError as error:
            raise InputError(f"picture {i} of {pictures.name} cannot be read: {error}") from error


@dataclass(frozen=True, eq=False)
class FolderPictures:
    """Picture files in a fixed order."""

    name: str
    files: tuple[Path, ...]

    @classmethod
    def of(cls, folder: str | Path) -> FolderPictures:
        """All pictures below a folder but masks and contact sheets (`grid-*.png`); InputError for none."""
        path = Path(folder)
        if not path.is_dir():
            raise InputError(f"no folder '{folder}'")
        files = [file for file in pictures_below(path) if not file.name.startswith(GRID)]
        if not files:
            raise InputError(f"no pictures in '{folder}'", allowed=", ".join(sorted(EXTENSIONS)))
        return cls(str(folder), tuple(files))

    def __len__(self) -> int:
        return len(self.files)

    def bytes(self) -> Iterator[bytes]:
        """Each picture file's bytes, in order."""
        return (file.read_bytes() for file in self.files)

    @cached_property
    def sha256(self) -> str:
        """Of all their bytes, in any order: which pictures these are."""
        return _joint_sha256(hashlib.sha256(data).digest() for data in self.bytes())


@dataclass(frozen=True, eq=False)
class StorePictures:
    """Rows of a picture store at one version, optionally those that a filter lets through."""

    store: Store
    filter: str | None = None
    most: int | None = None
    positions: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        positions = self.store.select(self.filter)
        if not len(positions):
            chosen = f" where {self.filter}" if self.filter else ""
            raise InputError(f"no pictures in '{self.store.path}'{chosen}")
        if self.most is not None and self.most < len(positions):
            spread = np.linspace(0, len(positions) - 1, self.most).round().astype(np.int64)
            positions = positions[np.unique(spread)]
        object.__setattr__(self, "positions", positions)

    @property
    def name(self) -> str:
        """The store, its version and the filter, as rows say it."""
        chosen = f" where {self.filter}" if self.filter else ""
        return f"{self.store.path}@{self.store.version}{chosen}"

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> Iterator[Any]:
        """A column's values, part by part."""
        for start in range(0, len(self.positions), BATCH):
            yield from self.store.take(self.positions[start : start + BATCH], [name])[name].to_pylist()

    def bytes(self) -> Iterator[bytes]:
        """Each picture's bytes, in the store's order."""
        return self.column("picture")

    @cached_property
    def sha256(self) -> str:
        """Of all their ids: which pictures these are."""
        return _joint_sha256(str(id_).encode() for id_ in self.column("id"))


def _joint_sha256(parts: Iterator[bytes]) -> str:
    """One hash of many, in whatever order they come."""
    return hashlib.sha256(b"\n".join(sorted(parts))).hexdigest()


def open_pictures(where: str | Path, *, filter: str | None = None, most: int | None = None) -> Pictures:
    """A store where there is one, else a folder of pictures; InputError for neither."""
    path = Path(where)
    if str(where).endswith(".lance") or "://" in str(where) or (path / "_versions").is_dir():
        return StorePictures(Store.open(where), filter, most)
    if filter is not None:
        raise InputError(f"a filter on '{where}'", mend="only a store's rows can be filtered")
    found = FolderPictures.of(path)
    return found if most is None else FolderPictures(found.name, found.files[:most])


def in_batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Values in parts of `size`; the last may be smaller."""
    remaining = iter(values)
    while some := list(islice(remaining, size)):
        yield some


FILE = "preprocessor_config.json"
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Preprocess(BaseModel):
    """How pixels become an extractor's input [3, H, W]. Resizing is antialiased."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shortest: int | None = Field(None, gt=0, description="bring the shortest side to so many pixels")
    size: tuple[int, int] | None = Field(None, description="or both sides to this (height, width), squeezed")
    crop: tuple[int, int] | None = Field(None, description="then cut this (height, width) from the middle")
    resampling: str = Field("bicubic", description="nearest, lanczos, bilinear, bicubic, box or hamming")
    mean: tuple[float, float, float] = Field(IMAGENET[0], description="taken off pixels of 0 to 1")
    std: tuple[float, float, float] = Field(IMAGENET[1], description="what they are then divided by")
    unrounded: bool = Field(False, description="resize in float, each channel by itself, as clean-fid does")

    @classmethod
    def read(cls, folder: Path) -> Preprocess:
        """As the folder's file says; ModelError where there is none."""
        if not (folder / FILE).exists():
            raise ModelError(f"'{folder}' has no {FILE}", mend="it says how pictures are resized")
        config = read_json(folder / FILE)
        try:
            return cls.of(config)
        except (LookupError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"'{folder / FILE}' does not say how pictures are resized: {reason}") from error

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Preprocess:
        """From the content of such a file."""
        size = config.get("size", 224) if config.get("do_resize", True) else None
        crop = config.get("crop_size", 224) if config.get("do_center_crop", "crop_size" in config) else None
        shortest, both = _size(size)
        if isinstance(size, int) and crop is None:
            shortest, both = None, (size, size)  # ViT's old files mean both sides by one number
        normalises = config.get("do_normalize", True)
        return cls(
            shortest=shortest,
            size=both,
            crop=None if crop is None else _pair(crop),
            resampling=RESAMPLING[int(config.get("resample", 3))],
            mean=tuple(config["image_mean"]) if normalises else (0.0, 0.0, 0.0),
            std=tuple(config["image_std"]) if normalises else (1.0, 1.0, 1.0),
        )

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """An RGB picture as float32 [3, H, W]."""
        whole = image.convert("RGB")
        if self.unrounded:
            cut = [np.asarray(self._crop(self._resize(channel.convert("F")))) for channel in whole.split()]
            pixels = np.stack(cut, axis=-1).clip(0, 255)
        else:
            pixels = np.asarray(self._crop(self._resize(whole)), dtype=np.float32)
        pixels_HW3 = torch.from_numpy(pixels / np.float32(255))
        mean_3, std_3 = torch.tensor(self.mean), torch.tensor(self.std)
        return ((pixels_HW3 - mean_3) / std_3).permute(2, 0, 1).contiguous()

    def _resize(self, image: Image.Image) -> Image.Image:
        width, height = image.size
        if self.size is not None:
            height, width = self.size
        elif self.shortest is not None:
            # The longer side is cut to whole pixels, as CLIP's and DINOv2's processors do.
            least = min(width, height)
            width, height = (int(self.shortest * side / least) for side in (width, height))
        if (width, height) == image.size:
            return image
        return image.resize((width, height), Image.Resampling[self.resampling.upper()])

    def _crop(self, image: Image.Image) -> Image.Image:
        if self.crop is None:
            return image
        height, width = self.crop
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))


def _size(size: Any) -> tuple[int | None, tuple[int, int] | None]:
    if size is None:
        return None, None
    if isinstance(size, int):
        return size, None
    if "shortest_edge" in size:
        return int(size["shortest_edge"]), None
    return None, _pair(size)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size["height"]), int(size["width"]))


# ---- drawing: pictures are kept in a folder as they come, and drawn once
#
# A picture's file is named by its seed and prompt and holds its parameters, so a folder that was interrupted
# is filled up, more pictures of a prompt join those there are, and a folder of other settings is refused.

NOTE_FILE = "drawn.json"
TEXT_KEY = "darkroom"
PICTURES_A_CALL = 16  # what a kill costs at most
Progress = Callable[[int, int], None]


class Generate(Protocol):
    """What draws pictures: `darkroom.sample.generate`, handed in by a package above both."""

    def __call__(
        self, model: Model, prompts: Sequence[str], *, seed: int, num: int, **settings: Any
    ) -> Sequence[Any]:
        """`num` pictures of each prompt, with `image` and `parameters`; picture i has seed + i."""
        ...


def draw(
    generate: Generate,
    model: Model,
    prompts: Sequence[str],
    *,
    folder: Path,
    model_sha256: str,
    num: int = 1,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> FolderPictures:
    """`num` pictures of each prompt in a folder, picture i with seed + i, prompt by prompt.

    Pictures that are there already are taken as they are. InputError where the folder's pictures are another
    model's or were drawn with other settings.
    """
    recorded = {"model_sha256": model_sha256, **(settings or {})}
    _claim(folder, json.loads(json.dumps(recorded, default=str)))
    wanted = [(seed + i, prompts[i // num]) for i in range(len(prompts) * num)]
    files = [folder / file_name(one_seed, prompt) for one_seed, prompt in wanted]
    missing = [i for i, file in enumerate(files) if not file.is_file()]
    done = len(wanted) - len(missing)
    for run in _runs(missing):
        for part in in_batches(run, PICTURES_A_CALL):
            made = generate(
                model,
                [wanted[i][1] for i in part],
                seed=wanted[part[0]][0],
                num=1,
                **(settings or {}),
            )
            for i, picture in zip(part, made, strict=True):
                _save(picture, files[i])
            done += len(part)
            if progress is not None:
                progress(done, len(wanted))
    return FolderPictures(str(folder), tuple(files))


def file_name(seed: int, prompt: str) -> str:
    """`000007-a-red-dog-1a2b3c4d.png`: seed, the prompt's beginning, and a hash of all of it."""
    slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40].strip("-")
    return f"{seed:06d}-{slug or 'empty'}-{sha256(prompt.encode()).hexdigest()[:8]}.png"


def _runs(indices: Sequence[int]) -> Iterator[list[int]]:
    """Neighbouring numbers together: their seeds follow each other."""
    run: list[int] = []
    for i in indices:
        if run and i != run[-1] + 1:
            yield run
            run = []
        run.append(i)
    if run:
        yield run


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Note in the folder what its pictures are drawn with; refuse one that says something else."""
    note = folder / NOTE_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if note.is_file():
            _compare(folder, json.loads(note.read_text(encoding="utf-8")), settings)
        else:
            if any(folder.iterdir()):
                raise InputError(f"'{folder}' holds something else", mend="choose another --keep-pictures")
            write_atomically(note, json.dumps(settings, indent=2) + "\n")
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"pictures cannot be kept in '{folder}': {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"'{note}' cannot be read", mend="choose another --keep-pictures") from error


def _compare(folder: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    odd = [name for name in sorted(before.keys() | settings.keys()) if before.get(name) != settings.get(name)]
    if odd:
        changes = ", ".join(
            f"{name} {_short(before.get(name))}, not {_short(settings.get(name))}" for name in odd
        )
        raise InputError(
            f"'{folder}' holds pictures drawn with {changes}",
            mend="choose another --keep-pictures, or delete the folder",
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:12] + "..."


def _save(picture: Any, file: Path) -> None:
    """A PNG with the picture's parameters, written atomically."""
    info = PngImagePlugin.PngInfo()
    info.add_text(TEXT_KEY, json.dumps(picture.parameters, ensure_ascii=True, default=str))
    temporary = file.with_name(f".{uuid.uuid4().hex}.png")
    try:
        image: Image.Image = picture.image
        image.save(temporary, "PNG", pnginfo=info)
        atomic_replace(temporary, file)
    finally:
        remove_file(temporary)
