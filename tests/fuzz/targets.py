"""What reads files and texts of strangers, each as a function of bytes that may only refuse by name.

The tests give each a few hundred mutations of its seeds; benchmarks/fuzz.py goes on for hours.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from darkroom.data.importers.archives import WebdatasetSource, ZipReader
from darkroom.data.importers.shards import MdsSource
from darkroom.data.importers.source import Columns
from darkroom.errors import DarkroomError
from darkroom.models.adapters.adapter import Adapter, Layer
from darkroom.models.adapters.read import read_adapter, write_adapter
from darkroom.recipe import make_recipe, read_recipe
from darkroom.sample.adapters import read_tags
from darkroom.sample.pictures import parse_a1111, read_parameters
from darkroom.sample.prompt_schedule import schedule
from darkroom.sample.prompts import a1111_pieces, compel_pieces
from darkroom.sample.provenance import verify_picture

REFUSED = (DarkroomError,)
MOST_S = 10.0
"""CPU-seconds: an input that takes more hangs."""


@dataclass(frozen=True)
class Target:
    """A reader: what it is given, what a whole file of it looks like, and what it may raise."""

    read: Callable[[bytes, Path], object]
    seeds: Callable[[], list[bytes]]
    refuses: tuple[type[BaseException], ...] = REFUSED


def _adapter(content: bytes, folder: Path) -> object:
    file = folder / "style.safetensors"
    file.write_bytes(content)
    return read_adapter(file)


def _adapters() -> list[bytes]:
    path = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "style.safetensors"
        layer = Layer(torch.ones(2, 8), torch.ones(8, 2))
        found = []
        for kohya in (False, True):
            write_adapter(Adapter("style", {path: layer}), file, kohya=kohya)
            found.append(file.read_bytes())
    return found


def _png(content: bytes, folder: Path) -> object:
    file = folder / "a.png"
    file.write_bytes(content)
    return read_parameters(file)


def _pngs() -> list[bytes]:
    found = []
    for texts in ({"parameters": INFOTEXT}, {"darkroom": json.dumps({"prompt": "a", "seed": 3})}, {}):
        info, buffer = PngInfo(), io.BytesIO()
        for key, text in texts.items():
            info.add_text(key, text, zip=len(found) == 1)
        Image.new("RGB", (4, 4)).save(buffer, "PNG", pnginfo=info)
        found.append(buffer.getvalue())
    return found


INFOTEXT = (
    "a (cat:1.2) <lora:x:0.5>\nNegative prompt: dog\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 3, "
    'Size: 512x512, Model: "a, b", Hires upscale: 2, Hires steps: 9, Denoising strength: 0.5, Version: v1'
)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _prompt(content: bytes, _: Path) -> object:
    text = _text(content)
    for read in (a1111_pieces, compel_pieces, read_tags, lambda text: schedule(text, 20)):
        with contextlib.suppress(DarkroomError):
            read(text)
    return None


def _recipe(content: bytes, folder: Path) -> object:
    file = folder / "recipe.yaml"
    file.write_bytes(content)
    return read_recipe(file)


RECIPE = (Path(__file__).parents[2] / "recipes" / "emoji.yaml").read_bytes()
READ_ONCE = yaml.safe_load(RECIPE)


def _override(content: bytes, _: Path) -> object:
    return make_recipe(READ_ONCE, _text(content).split("\n"))


def _zip(content: bytes, folder: Path) -> object:
    file = folder / "a.zip"
    file.write_bytes(content)
    reader = ZipReader(file)
    try:
        for member in reader.members():
            with contextlib.suppress(ValueError):
                reader.read(member)
    finally:
        reader.close()
    return None


def _zips() -> list[bytes]:
    found = []
    for packing in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", packing) as archive:
            archive.writestr("a.png", _pngs()[0])
            archive.writestr("b/ä.txt", "a caption " * 20)
        found.append(buffer.getvalue())
    return found


def _tar(content: bytes, folder: Path) -> object:
    (folder / "a.tar").write_bytes(content)
    return sum(1 for _ in WebdatasetSource(folder / "a.tar", Columns()).items(()))


def _tars() -> list[bytes]:
    found = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
            for name, content in {"0.png": _pngs()[0], "0.txt": b"a cat", "0.json": b'{"a": 1}'}.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        found.append(buffer.getvalue())
    return found


def _mds(content: bytes, folder: Path) -> object:
    """The index and the shard in one: as long as the first four bytes say, then the other."""
    size = int.from_bytes(content[:4], "little") % (len(content) + 1)
    (folder / "index.json").write_bytes(content[4 : 4 + size])
    (folder / "shard.00000.mds").write_bytes(content[4 + size :])
    return sum(1 for _ in MdsSource(folder, Columns()).items(()))


def _mdses() -> list[bytes]:
    picture, caption = _pngs()[0], b"a cat"
    columns = {"column_names": ["caption", "image"], "column_encodings": ["str", "png"]}
    row = struct.pack("<II", len(caption), len(picture)) + caption + picture
    raw = struct.pack("<III", 1, 12, 12 + len(row)) + row
    shard = {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": {}}
    told = {**columns, "column_sizes": [None, None], "compression": None, "format": "mds", "hashes": []}
    told |= {"raw_data": shard, "samples": 1, "size_limit": 1 << 26, "version": 2, "zip_data": None}
    index = json.dumps({"shards": [told], "version": 2}).encode()
    return [struct.pack("<I", len(index)) + index + raw]


def _credentials(content: bytes, folder: Path) -> object:
    file = folder / "a.png"
    file.write_bytes(content)
    return verify_picture(file).to_dict()


def _signed() -> list[bytes]:
    from darkroom.sample import provenance

    if not provenance.installed():
        return _pngs()
    with tempfile.TemporaryDirectory() as folder:
        provenance.make_test_certificate(Path(folder) / "c.pem")
        marks = provenance.Provenance.opened(Path(folder) / "c.pem", Path(folder) / "own.pem")
        return [marks.signed(png, "PNG", {"model": "m", "seed": 3}) for png in _pngs()[:1]]


TARGETS = {
    "adapter": Target(_adapter, _adapters),
    "png": Target(_png, _pngs),
    "a1111": Target(lambda content, _: parse_a1111(_text(content)), lambda: [INFOTEXT.encode()], ()),
    "prompt": Target(
        _prompt, lambda: [b"a (cat:1.2) [dog] <lora:x:0.5> (a AND b)++ BREAK [a:b:1e9] (((x)))-"], ()
    ),
    "recipe": Target(_recipe, lambda: [RECIPE, b"<<: *x\n", b"a: &a [*a]\n"]),
    "override": Target(_override, lambda: [b"train.steps=60\noptim.lr=1e-4", b"data.folder=x"]),
    "zip": Target(_zip, _zips),
    "tar": Target(_tar, _tars),
    "mds": Target(_mds, _mdses),
    "credentials": Target(_credentials, _signed),
}
CORPUS = Path(__file__).parent / "corpus"
"""Inputs that once were read wrongly, a folder a target; each stays read rightly."""
GROWN = Path(__file__).parent / "grown"
"""Inputs that coverage led to, a zip a target: what further ones are made from."""


def check(name: str, content: bytes, folder: Path) -> None:
    """An error for whatever is no refusal by name, and for what takes too long."""
    target, begun = TARGETS[name], time.process_time()
    with contextlib.suppress(*target.refuses):
        target.read(content, folder)
    if time.process_time() - begun > MOST_S:
        raise TimeoutError(f"{name}: over {MOST_S:g} s")


INTERESTING = (
    b"",
    b"\0",
    b"\xff",
    b"\xff" * 8,
    b"\x80",
    b"-1",
    b"1e999",
    b"nan",
    b"{}",
    b"[]",
    b'"',
    b"\n",
    b",",
)


def mutated(draw: random.Random, seeds: list[bytes]) -> bytes:
    """A seed with a few changes: bits, bytes, numbers, pieces cut, doubled, or of another seed."""
    content = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        at = draw.randrange(len(content) + 1)
        change = draw.randrange(7)
        if change == 0 and at < len(content):
            content[at] ^= 1 << draw.randrange(8)
        elif change == 1:
            content[at : at + draw.randrange(4)] = draw.choice(INTERESTING)
        elif change == 2:
            del content[at : at + draw.choice((1, 2, 8, 200))]
        elif change == 3:
            piece = content[at : at + draw.choice((1, 4, 64))]
            content[at:at] = piece * draw.choice((1, 2, 50))
        elif change == 4:
            other = draw.choice(seeds)
            start = draw.randrange(len(other) + 1)
            content[at:at] = other[start : start + 32]
        elif change == 5 and at + 4 <= len(content):
            number = draw.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, draw.getrandbits(32)))
            content[at : at + 4] = struct.pack(draw.choice("<>") + "I", number)
        else:
            digits = [i for i, byte in enumerate(content) if 48 <= byte < 58]
            if digits:
                content[draw.choice(digits)] = draw.choice(b"0123456789-.e")
    return bytes(content)


def inputs(name: str, seed: int, more: Sequence[bytes] = ()) -> Iterator[bytes]:
    """The target's seeds and corpus, then mutations of them, always in the same order."""
    draw, seeds = random.Random(f"{name} {seed}"), [*TARGETS[name].seeds(), *corpus(name), *more]
    yield from seeds
    while True:
        yield mutated(draw, seeds)


def corpus(name: str) -> list[bytes]:
    """Inputs that were found before."""
    return [file.read_bytes() for file in sorted((CORPUS / name).glob("*"))]


def packed(name: str) -> list[bytes]:
    """Inputs of earlier goes that reached other branches than those before them."""
    file = GROWN / f"{name}.zip"
    if not file.exists():
        return []
    with zipfile.ZipFile(file) as archive:
        return [archive.read(member) for member in archive.infolist()]
