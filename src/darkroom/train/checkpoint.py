"""Checkpoints that are whole or not there: written beside, flushed, hashed, renamed, proven.

A checkpoint is a folder `step-00000500/` of safetensors files, `state.json` with the scalars, and
`manifest.json` with every file's size and SHA-256. Nothing in it is code; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file
from torch import Tensor

import darkroom
from darkroom.errors import CheckpointError

FORMAT = 1
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


class CheckpointSettings(BaseModel):
    """When the state of a run is saved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(default=500, gt=0, description="steps between checkpoints (the last is always saved)")
    keep: int = Field(default=2, ge=1, description="how many to keep; one goes only when a newer is proven")


@dataclass(frozen=True)
class Checkpoint:
    """A state that was read back whole: tensors by file and name, and scalars."""

    step: int
    path: Path
    tensors: dict[str, dict[str, Tensor]]
    scalars: dict[str, Any]


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    scalars: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write the state after `step` steps into `folder`, and let go of all but the newest `keep`.

    `tensors` are by file (`weights`, `ema`, `optimiser`) and name. A process killed at any moment leaves
    the older checkpoints as they were, and at worst a folder `.beside-*` that the next save clears away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(folder)
    beside = folder / f".beside-{step:08d}-{os.getpid()}"
    beside.mkdir()
    files = {}
    for name, named in tensors.items():
        files[f"{name}.safetensors"] = _write_hashed(beside / f"{name}.safetensors", _safetensors(named))
    files["state.json"] = _write_hashed(beside / "state.json", _json(scalars))
    manifest = {"format": FORMAT, "darkroom": darkroom.__version__, "step": step, "files": files}
    _write_hashed(beside / "manifest.json", _json(manifest))
    sync_folder(beside)
    final = folder / f"step-{step:08d}"
    _set_aside(final)  # a damaged one of the same step, which resuming passed over
    beside.rename(final)
    sync_folder(folder)
    _verify(final)
    for old in checkpoints(folder)[:-keep]:
        _set_aside(old)
    _clear_leftovers(folder)
    return final


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
    manifest = _verify(path)
    tensors = {
        Path(name).stem: load_file(path / name) for name in manifest["files"] if name.endswith(".safetensors")
    }
    return Checkpoint(manifest["step"], path, tensors, json.loads((path / "state.json").read_text()))


def newest_checkpoint(folder: Path, say: Say) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if there is none at all.

    A damaged one is passed over aloud. Raises CheckpointError where every one is damaged: to start from
    nothing then is for the user to decide.
    """
    found = checkpoints(folder)
    damaged = []
    for path in reversed(found):
        try:
            return load_checkpoint(path)
        except CheckpointError as error:
            damaged.append(str(error))
            say(f"{error}; trying the one before")
    if found:
        raise CheckpointError(f"none of {len(found)} checkpoints in '{folder}' is whole: {damaged[0]}")
    return None


def _verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, when every file is as it was written."""
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
        files: dict[str, dict[str, Any]] = manifest["files"]
        if strange := [name for name in files if Path(name).name != name]:
            raise ValueError(f"'{strange[0]}' is no file name")
        with ThreadPoolExecutor(4) as threads:  # hashlib lets other threads run
            damage = threads.map(lambda name: _damage(path / name, files[name]), files)
            damaged = [told for told in damage if told]
        if manifest["format"] != FORMAT or manifest["step"] != step_of(path) or "state.json" not in files:
            damaged.append("manifest.json does not belong to it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint '{path}' is damaged: manifest.json: {error}") from error
    if damaged:
        raise CheckpointError(f"checkpoint '{path}' is damaged: {', '.join(damaged)}")
    return manifest


def _damage(file: Path, said: Mapping[str, Any]) -> str | None:
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{file.name}: {error.strerror}"
    if file.stat().st_size != said["bytes"]:
        return f"{file.name} has {file.stat().st_size} bytes, not {said['bytes']}"
    return None if digest == said["sha256"] else f"{file.name} has another hash"


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


def _json(content: Mapping[str, Any]) -> Iterator[bytes]:
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


def _set_aside(path: Path) -> None:
    """Take a checkpoint out of the count in one move, so that half of one is never found."""
    if path.exists():
        path.rename(path.with_name(f".gone-{path.name}-{os.getpid()}"))


def _clear_leftovers(folder: Path) -> None:
    for pattern in (".beside-*", ".gone-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
