"""The pictures that are scored and compared with: a folder, a store, or what was just drawn; and the prompts
that are drawn: from a file, a store's captions, or the DreamBooth paper's list.
"""

from __future__ import annotations

import csv
import hashlib
import io
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

from darkroom.data.images import EXTENSIONS, PictureError, decode, pictures_below
from darkroom.data.importers.folder import FolderSource
from darkroom.data.importers.source import CAPTION_NAMES, Columns, find_name, no_column
from darkroom.data.store import Store
from darkroom.data.texts import flaw_of
from darkroom.errors import InputError, ModelError, first_line, is_system_failure
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


# ---- prompts

DREAMBOOTH = "dreambooth:"
# The list of Ruiz et al. 2023 as github.com/google/dreambooth has it; it is not ours to hand out.
DREAMBOOTH_LIST = "dataset/prompts_and_classes.txt of github.com/google/dreambooth"
DREAMBOOTH_HEADINGS = {"object": "Object Prompts", "live": "Live Subject Prompts"}
TOKEN, CLASS = "{token}", "{class}"
DEFAULT_TOKEN = "sks"
KINDS = (
    ".txt (one a line), .jsonl, .csv, .tsv, .parquet, a store, dreambooth:live=FILE, dreambooth:object=FILE"
)


@dataclass(frozen=True)
class Prompts:
    """Prompts as they are drawn, and as a reader who does not know the rare token is asked."""

    name: str
    texts: tuple[str, ...]
    plain: tuple[str, ...]

    @classmethod
    def of(cls, name: str, texts: Sequence[str], token: str | None = None) -> Prompts:
        """Prompts at hand; `token` is what `plain` leaves out."""
        if not texts:
            raise InputError(f"no prompts in '{name}'", mend="give at least one")
        return cls(name, tuple(texts), tuple(without_token(text, token) for text in texts))

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def sha256(self) -> str:
        """Of the prompts: which ones these are."""
        return hashlib.sha256("\n".join(self.texts).encode()).hexdigest()


def without_token(text: str, token: str | None) -> str:
    """A prompt without the rare token, which CLIP has never seen with the subject."""
    if not token:
        return text
    return " ".join(re.sub(rf"(?<!\w){re.escape(token)}(?!\w)", " ", text).split())


def read_prompts(
    where: str | Path,
    *,
    class_word: str | None = None,
    token: str | None = None,
    column: str | None = None,
    most: int | None = None,
) -> Prompts:
    """Read prompts; InputError for what is none.

    `{token}` and `{class}` in a prompt are filled in. `column` names the column of a table, `most` takes
    the first so many.
    """
    name = str(where)
    if name.startswith(DREAMBOOTH):
        found, token = _dreambooth(name), token or DEFAULT_TOKEN
    elif name.endswith(".lance"):
        found = _captions(name, most)
    else:
        found = _file(Path(where), column)
    found = [text for raw in found if (text := " ".join(raw.split()))]
    if flaw := next((flaw for text in found if (flaw := flaw_of(text))), ""):
        raise InputError(f"prompts of '{name}': {flaw.replace('caption', 'prompt')}")
    if len(found) > (most or len(found)):
        found = found[:most]
    return Prompts.of(name, [_filled(text, token, class_word) for text in found], token)


def prompts_of_pictures(
    pictures: FolderPictures, own: Callable[[Path], str | None] | None = None
) -> tuple[str, ...]:
    """The prompt of each picture in a folder: what `own` reads in its file, else its caption file.

    Beside it are a text of the same name (`.txt`, `.caption`) or a line of `metadata.jsonl`, `captions.jsonl`
    or their `.csv`, as `import` reads them; of several captions the first. InputError where one has none.
    """
    found = {file: None if own is None else own(file) for file in pictures.files}
    if None in found.values():
        folder = Path(pictures.name)
        captions: dict[str, str | None] = {}
        for key, caption in _captions_of_pictures(folder):
            captions.setdefault(key, caption)
        for file, prompt in found.items():
            if prompt is None:
                found[file] = captions.get(file.relative_to(folder).as_posix())
    missing = [file for file, prompt in found.items() if prompt is None]
    if missing:
        raise InputError(
            f"{len(missing)} of {len(found)} pictures do not say their prompt, such as '{missing[0].name}'",
            allowed="pictures that darkroom or A1111 wrote, a .txt for each, or a metadata.jsonl",
        )
    return tuple(prompt or "" for prompt in found.values())


def _captions_of_pictures(folder: Path) -> Iterator[tuple[str, str | None]]:
    """Keys and captions as `import` reads them; InputError in terms of what can be said here."""
    try:
        yield from FolderSource(folder, Columns()).captions()
    except InputError as error:
        if "-column" not in error.mend:
            raise
        mend = "call its columns file_name and text, or rename the file and put a .txt next to each picture"
        raise InputError(error.given, mend=mend) from error


def _filled(text: str, token: str | None, class_word: str | None) -> str:
    for mark, value, option in ((TOKEN, token, "--token sks"), (CLASS, class_word, "--class-word dog")):
        if mark in text:
            if not value:
                raise InputError(f"the prompt '{text}' needs a {mark}", mend=f"say it with {option}")
            text = text.replace(mark, value)
    return text


def _dreambooth(name: str) -> list[str]:
    """The 25 prompts of a kind of subject, from the paper's own list."""
    kind, _, where = name.removeprefix(DREAMBOOTH).partition("=")
    if kind not in DREAMBOOTH_HEADINGS or not where:
        allowed = "dreambooth:live=FILE or dreambooth:object=FILE"
        raise InputError(f"prompts '{name}'", allowed=allowed, mend=f"FILE is {DREAMBOOTH_LIST}")
    if not Path(where).is_file():
        raise InputError(f"no prompts at '{where}'", mend=f"FILE is {DREAMBOOTH_LIST}")
    text = Path(where).read_text(encoding="utf-8-sig", errors="replace")
    part = re.search(rf"^{DREAMBOOTH_HEADINGS[kind]}\s*$(.*?)^\]", text, re.M | re.S)
    found = re.findall(r"^'(.*)'\.format\(", part[1], re.M) if part else []
    if not found:
        raise InputError(f"'{where}' has no '{DREAMBOOTH_HEADINGS[kind]}'", mend=f"FILE is {DREAMBOOTH_LIST}")
    return [prompt.replace("{0}", TOKEN).replace("{1}", CLASS) for prompt in found]


def _captions(name: str, most: int | None) -> list[str]:
    found: list[str] = []
    for batch in Store.open(name).scan(["caption"]):
        found += batch.column("caption").to_pylist()
        if most is not None and len(found) >= most:
            break
    return found


def _file(path: Path, column: str | None) -> list[str]:
    suffix = path.suffix.lower()
    if not path.is_file():
        raise InputError(f"no prompts at '{path}'", allowed=KINDS)
    if suffix == ".parquet":
        return _parquet(path, column)
    if suffix not in (".txt", ".jsonl", ".csv", ".tsv"):
        raise InputError(f"prompts '{path}'", allowed=KINDS)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is no UTF-8 text") from error
    if suffix == ".txt":
        return text.split("\n")  # splitlines() would cut a prompt at U+2028 and its like too
    rows = list(_json_rows(path, text) if suffix == ".jsonl" else _table_rows(path, text, suffix))
    names = list(dict.fromkeys(name for row in rows for name in row))
    chosen = _column(path, column, names)
    return [_text_of(row.get(chosen), f"'{path}', row {i}") for i, row in enumerate(rows, 1)]


def _text_of(value: Any, place: str) -> str:
    """A cell as a prompt, nothing where it is empty; InputError for a list or an object, which is none."""
    if value is None or value != value:  # not-a-number, which tables write where a cell is empty
        return ""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise InputError(f"{place}: {str(value)[:60]}", allowed="a prompt as text")


def _json_rows(path: Path, text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number} is no JSON: {error}") from error
        yield row if isinstance(row, dict) else {"prompt": row}


def _table_rows(path: Path, text: str, suffix: str) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(text), delimiter="\t" if suffix == ".tsv" else ",", strict=True)
    named = [column for column in reader.fieldnames or () if column]
    if twice := next((column for column in named if named.count(column) > 1), None):
        raise InputError(f"'{path}' has two columns '{twice}'", mend="take one out")
    try:
        for row in reader:
            if None in row or None in row.values():
                raise InputError(f"{path}:{reader.line_num} has another number of cells than the first line")
            yield row
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num + 1} is no CSV: {error}") from error


def _parquet(path: Path, column: str | None) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        chosen = _column(path, column, names)
        values = pq.read_table(path, columns=[chosen])[chosen].to_pylist()
        return [_text_of(value, f"'{path}', row {i}") for i, value in enumerate(values, 1)]
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' holds text that is no UTF-8") from error
    except (pa.ArrowInvalid, OSError) as error:
        if is_system_failure(error):
            raise
        raise InputError(f"'{path}' is no Parquet file: {first_line(error)}") from error


def _column(path: Path, column: str | None, names: Sequence[str]) -> str:
    if not names:
        raise InputError(f"no prompts in '{path}'")
    found = find_name(column, ("prompt", *CAPTION_NAMES), names, "prompt")
    if found is None:
        raise no_column("prompt", str(path), names)
    return found
