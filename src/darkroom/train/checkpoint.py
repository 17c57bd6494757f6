"""Atomic checkpoints: written to a temporary folder, flushed, hashed, renamed, verified.

A checkpoint is a folder `step-00000500/` of safetensors files, `state.json` with the scalars, and
`manifest.json` with every file's size and SHA-256. Nothing in it is code; nothing is unpickled.

Each process that trains writes a share of its own: whole tensors where all hold all, else its rows of each.
The manifest says which rows of what a file holds, so any number of processes reads it back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

import darkroom
from darkroom.errors import CheckpointError, DamagedCheckpoint, DarkroomError
from darkroom.hardware.system import atomic_replace, remove_file, remove_tree, sync_folder

FORMAT = 2
_NAME = re.compile(r"step-(\d{8,})")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Say = Callable[[str], None]


Parts = Mapping[str, tuple[int, int]]
"""Of a weight that is here only in part: its first row, and how many rows there are in all."""


class Saved(Mapping[str, Tensor]):
    """Tensors of a checkpoint by name, read when asked for: whole, or some rows of them."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[int, Any]]] = {}

    def add(self, file: Path, parts: Mapping[str, Sequence[int]]) -> None:
        """Take in a file; `parts` say which rows of which tensors it holds, where not all."""
        opened: Any = safe_open(file, "pt")
        for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
            self._pieces.setdefault(name, []).append((parts.get(name, (0,))[0], opened))

    def __getitem__(self, name: str) -> Tensor:
        pieces = sorted(self._pieces[name], key=lambda piece: piece[0])
        if len(pieces) == 1:
            whole: Tensor = pieces[0][1].get_tensor(name)
            return whole
        return torch.cat([opened.get_tensor(name) for _, opened in pieces])

    def close(self) -> None:
        """Let its files go, which on Windows could not be deleted: nothing can be read any more."""
        self._pieces.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows `first` to `first + count` of a tensor; of a single number, the number."""
        found = []
        for start, opened in sorted(self._pieces[name], key=lambda piece: piece[0]):
            piece = opened.get_slice(name)
            if not piece.get_shape():
                number: Tensor = opened.get_tensor(name)
                return number
            low, high = max(first - start, 0), min(first + count - start, piece.get_shape()[0])
            if low < high:
                found.append(piece[low:high])
        return torch.cat(found)


@dataclass(frozen=True)
class Checkpoint:
    """A state that was read back whole: tensors by file and name, and scalars."""

    step: int
    path: Path
    tensors: dict[str, Saved]
    scalars: dict[str, Any]


Tensors = Mapping[str, Mapping[str, Tensor]]
"""By what they are (`weights`, `ema`, `optimiser`, `best`) and name; of an optimiser `<weight>/<key>`."""


def temporary_folder(folder: Path, step: int, token: str) -> Path:
    """Where a checkpoint is written before it counts; `token` is the session's own."""
    return folder / f".writing-{step:08d}-{token}"


def write_share(temporary: Path, rank: int, size: int, tensors: Tensors, parts: Parts) -> None:
    """Write what one of `size` processes holds or has taken on, and last what it wrote."""
    temporary.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, chunks, cut in share_of(rank, size, tensors, parts):
        files[name] = _write_hashed(temporary / name, chunks) | cut
    written = temporary / f".{index_name(rank)}"
    _write_hashed(written, as_json(files))
    sync_folder(temporary)
    atomic_replace(written, temporary / index_name(rank))


def share_of(
    rank: int, size: int, tensors: Tensors, parts: Parts
) -> Iterator[tuple[str, Iterator[bytes | memoryview], dict[str, Any]]]:
    """The files that one of `size` processes writes: name, content, and which rows of what are in it."""
    for kind, named in tensors.items():
        if not named and rank:
            continue
        name = f"{kind}.safetensors" if size == 1 else f"{kind}-{rank:05d}.safetensors"
        cut = {key: parts[_weight(key)] for key in named if _weight(key) in parts and named[key].dim()}
        yield name, _safetensors(named), {"parts": cut} if cut else {}


def manifest_of(step: int, files: Mapping[str, Any]) -> dict[str, Any]:
    """What binds the files of a checkpoint together."""
    return {"format": FORMAT, "darkroom": darkroom.__version__, "step": step, "files": files}


def complete(
    temporary: Path,
    step: int,
    size: int,
    scalars: Mapping[str, Any],
    *,
    keep: int,
    wait_s: float = 600.0,
) -> Path:
    """When all shares are there: bind them together, prove them, and let them count."""
    files: dict[str, Any] = {}
    for rank in range(size):
        files |= _await(temporary, rank, wait_s)
    files["state.json"] = _write_hashed(temporary / "state.json", as_json(scalars))
    _write_hashed(temporary / "manifest.json", as_json(manifest_of(step, files)))
    for rank in range(size):
        remove_file(temporary / index_name(rank))
    sync_folder(temporary)
    folder = temporary.parent
    final = folder / f"step-{step:08d}"
    _retire(final)  # a damaged one of the same step, which resuming passed over
    atomic_replace(temporary, final)
    sync_folder(folder)
    _verify(final)
    for old in checkpoints(folder)[:-keep]:
        with suppress(
            PermissionError
        ):  # somebody has a file of it open, on Windows: the next save tries again
            _retire(old)
    for gone in folder.glob(".gone-*"):
        remove_tree(gone)
    return final


def _await(temporary: Path, rank: int, wait_s: float) -> dict[str, Any]:
    """What a process wrote, when it has."""
    until = time.monotonic() + wait_s
    while not (temporary / index_name(rank)).exists():
        if (failed := temporary / f"{index_name(rank)}.failed").exists():
            raise CheckpointError(f"rank {rank} could not write its share ({failed.name})")
        if time.monotonic() > until:
            raise CheckpointError(f"rank {rank} has not written its share for {wait_s:g} s")
        time.sleep(0.02)
    found: dict[str, Any] = json.loads((temporary / index_name(rank)).read_bytes())
    return found


def note_failure(temporary: Path, rank: int) -> None:
    """Tell the process that binds the shares that this one will not come; takes no space on the disk."""
    with suppress(OSError):
        temporary.mkdir(parents=True, exist_ok=True)
        (temporary / f"{index_name(rank)}.failed").touch()


def index_name(rank: int) -> str:
    """The file that says what a rank wrote."""
    return f"rank-{rank:05d}.json"


def _weight(key: str) -> str:
    """The weight that a tensor belongs to."""
    return key.rpartition("/")[0] or key


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; whether they are whole is not yet known."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """How many steps had been made when a checkpoint was saved, from its name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"'{path}' is no checkpoint; its name should be like step-00000500")
    return int(match.group(1))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint, every file's hash verified; CheckpointError says what is damaged."""
    _verify(path)
    return open_checkpoint(path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint that another process of the job has verified."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    tensors: dict[str, Saved] = {}
    for name, entry in manifest["files"].items():
        if name.endswith(".safetensors"):
            tensors.setdefault(re.split(r"[-.]", name)[0], Saved()).add(path / name, entry.get("parts", {}))
    return Checkpoint(
        manifest["step"], path, tensors, json.loads((path / "state.json").read_text(encoding="utf-8"))
    )


@contextmanager
def reading(label: str) -> Iterator[None]:
    """Within, files of a checkpoint are read, from a disk or an address; `label` is what messages call it.

    DamagedCheckpoint where one is gone, CheckpointError where a disk or a network fails: then an older
    checkpoint is no answer.
    """
    try:
        yield
    except DarkroomError:
        raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedCheckpoint(f"{label} is damaged: {line_of(error)}") from error
    except Exception as error:  # each kind of store has its own
        if is_bug(error):
            raise
        raise CheckpointError(
            f"{label} could not be read: {line_of(error)}; run the same command when it can be, or delete it "
            "to go on from the one before"
        ) from error


def is_bug(error: Exception) -> bool:
    """Whether an error out of a store's calls is a mistake of ours: stores have classes of their own."""
    return not isinstance(error, OSError) and type(error).__module__ == "builtins"


def line_of(error: BaseException) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, when every file is as it was written."""
    label = f"checkpoint '{path}'"
    with reading(label):
        manifest = read_manifest((path / "manifest.json").read_bytes(), step_of(path), label)
        files: dict[str, dict[str, Any]] = manifest["files"]
        with ThreadPoolExecutor(4) as threads:  # hashlib lets other threads run
            damage = threads.map(lambda name: _damage(path / name, files[name]), files)
            damaged = [*filter(None, damage)]
    if damaged:
        raise DamagedCheckpoint(f"{label} is damaged: {', '.join(damaged)}")
    return manifest


def read_manifest(raw: bytes, step: int, label: str) -> dict[str, Any]:
    """The list of files of a checkpoint of this step; DamagedCheckpoint where no save writes such a one."""
    try:
        manifest: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{label} is damaged: manifest.json: {line_of(error)}") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not all(_is_entry(entry) for entry in files.values()):
        raise DamagedCheckpoint(f"{label} is damaged: manifest.json lists no files")
    if strange := [name for name in files if Path(name).name != name]:
        raise DamagedCheckpoint(f"{label} is damaged: manifest.json: '{strange[0]}' is no file name")
    if manifest.get("format") not in (1, FORMAT) or manifest.get("step") != step or "state.json" not in files:
        raise DamagedCheckpoint(f"{label} is damaged: manifest.json does not belong to it")
    found: dict[str, Any] = manifest
    return found


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("bytes"), int)
        and isinstance(entry.get("sha256"), str)
    )


def _damage(file: Path, entry: Mapping[str, Any]) -> str | None:
    if not file.is_file():
        return f"{file.name}: No such file"
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if file.stat().st_size != entry["bytes"]:
        return f"{file.name} has {file.stat().st_size} bytes, not {entry['bytes']}"
    return None if digest == entry["sha256"] else f"{file.name} has another hash"


def _write_hashed(file: Path, chunks: Iterator[bytes | memoryview]) -> dict[str, Any]:
    """Write, flush to the disk, and hash on the way."""
    digest, size = hashlib.sha256(), 0
    with file.open("xb") as stream:
        for chunk in chunks:
            stream.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        _flush(stream)
    return {"bytes": size, "sha256": digest.hexdigest()}


def as_json(content: Mapping[str, Any]) -> Iterator[bytes]:
    """The content as JSON, for `_write_hashed`."""
    # Python writes a float so that reading gives the same bits back.
    yield (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The safetensors format, one tensor in memory at a time (its own writer wants them all)."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _retire(path: Path) -> None:
    """Take a checkpoint out of the count in one move, so that half of one is never found."""
    if path.exists():
        atomic_replace(path, path.with_name(f".gone-{path.name}-{os.getpid()}"))


def clear_leftovers(folder: Path) -> None:
    """Remove what killed processes left; only for who holds the run, while nothing is being saved."""
    for pattern in (".writing-*", ".gone-*", ".beside-*"):  # the last of an older darkroom
        for path in folder.glob(pattern):
            remove_tree(path)


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
