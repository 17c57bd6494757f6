"""Adapter files as untrusted input: safetensors opened with bounds, and written atomically."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from darkroom.errors import ModelError, is_system_failure
from darkroom.hardware.system import atomic_replace, remove_file
from darkroom.models.tensor_file import write_tensors

MAX_HEADER_BYTES = 32 * 1024**2
"""kohya's files list every tag of the training set in their header: some megabytes."""
MAX_FILE_BYTES = 8 * 1024**3
MAX_TENSORS = 20_000
MAX_NAME = 512
MAX_CONFIG_BYTES = 1024**2
PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
WHOLE = {"I64", "I32", "I16", "I8", "U8"}
"""What some files keep their alphas in."""


@dataclass(frozen=True, repr=False)
class Stored:
    """A file's tensors, what its header says in words, PEFT's configuration next to it, and its hash."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    config: dict[str, Any]
    sha256: str


def shown(name: str, most: int = 90) -> str:
    """A name out of a file, fit to print: no control characters, not too long."""
    text = name if len(name) <= most else name[: most - 3] + "..."
    return text if text.isprintable() else ascii(text)[1:-1]


def open_tensors(path: Path) -> Stored:
    """Every tensor of a safetensors file, checked; ModelError that says what is wrong with it."""
    if path.is_dir():
        path = path / PEFT_WEIGHTS
    if not path.is_file():
        raise ModelError(f"no adapter file at '{path}'", allowed="a .safetensors file, or PEFT's folder")
    header = read_header(path)
    _check_header(path, header)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path, device="cpu")
    except SafetensorError as error:
        raise ModelError(f"'{path.name}' is damaged: {shown(str(error), 200)}") from error
    for name, tensor in tensors.items():
        if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
            tensors[name] = tensor = tensor.float()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"'{path.name}': numbers in '{shown(name)}' are not finite")
    in_order = {name: tensors[name] for name in header if name in tensors}
    return Stored(in_order, _metadata(header), _peft_config(path), _hash_of(path))


def read_header(path: Path) -> dict[str, Any]:
    """The header as JSON, read by itself with a bound before anything else is."""
    file_name = f"'{path.name}'"
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ModelError(f"{file_name} has {size:,} bytes", allowed=f"at most {MAX_FILE_BYTES:,}")
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        is_whole = len(start) == 8 and 2 <= length <= min(MAX_HEADER_BYTES, size - 8)
        # A header of 640 or 19,280 bytes begins as a pickle does.
        pickled = not is_whole and start[:2] in (b"PK", b"\x80\x02")
        if pickled or path.suffix in (".pt", ".bin", ".ckpt", ".pkl", ".pth"):
            raise ModelError(f"{file_name} is a pickle, which can run code", mend="give it as .safetensors")
        if not is_whole:
            raise ModelError(
                f"{file_name} is no safetensors file: its header claims {length:,} of {size:,} bytes"
            )
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{file_name} is no safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file_name} is no safetensors file: its header is not an object")
    return header


def _check_header(path: Path, header: Mapping[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    if len(names) > MAX_TENSORS:
        raise ModelError(f"'{path.name}' has {len(names):,} tensors", allowed=f"at most {MAX_TENSORS:,}")
    for name in names:
        entry = header[name]
        dtype = str(entry.get("dtype")) if isinstance(entry, dict) else None
        if len(name) > MAX_NAME:
            raise ModelError(f"'{path.name}': a tensor's name of {len(name):,} characters")
        # Alphas are whole numbers in some files.
        if dtype not in FLOATS and not (
            dtype in ("BOOL", "I64", "I32", "I16", "I8", "U8") and name.endswith((".alpha", ".on_input"))
        ):
            raise ModelError(
                f"'{path.name}': '{shown(name)}' holds {shown(str(dtype))}", allowed=", ".join(sorted(FLOATS))
            )


def _metadata(header: Mapping[str, Any]) -> dict[str, str]:
    metadata = header.get("__metadata__")
    return {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}


def _peft_config(path: Path) -> dict[str, Any]:
    file = path.with_name(PEFT_CONFIG)
    if path.name != PEFT_WEIGHTS or not file.is_file():
        return {}
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(f"'{file.name}' has {file.stat().st_size:,} bytes", allowed=f"{MAX_CONFIG_BYTES:,}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"'{file}' is not JSON") from error
    if not isinstance(config, dict):
        return {}
    if config.get("peft_type") == "IA3":  # which has no rank and no alpha
        return {}
    if config.get("peft_type", "LORA") != "LORA":
        message = f"'{path.parent.name}' is PEFT's {shown(str(config['peft_type']))}"
        raise ModelError(message, allowed="PEFT's LORA and IA3, or LyCORIS' files")
    return config


def _hash_of(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    """Write to a temporary file, then rename it."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(temporary, tensors, metadata)
        atomic_replace(temporary, path)
    except OSError as error:
        if is_system_failure(error):
            raise
        raise ModelError(f"'{path}' cannot be written: {error.strerror or error}") from error
    finally:
        remove_file(temporary)
    return path
