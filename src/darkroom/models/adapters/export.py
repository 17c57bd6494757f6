"""What the command line does with adapter files: tell what is in one, write it in other keys, merge it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from darkroom.errors import InputError, ModelError
from darkroom.hardware.system import write_atomically
from darkroom.models.adapters.adapter import Adapter
from darkroom.models.adapters.files import PEFT_CONFIG, PEFT_WEIGHTS, read_header, shown
from darkroom.models.adapters.keys import split_key
from darkroom.models.adapters.read import fit, merge_all, read_adapter, write_adapter
from darkroom.models.card import CARD, merged_card
from darkroom.models.families import create
from darkroom.models.folder import load, save

MOST_SHOWN = 200
TRIGGERS = ("modelspec.trigger_phrase", "ss_trigger", "trained_words")


def is_adapter(path: Path) -> bool:
    """Whether a file (or PEFT's folder) is an adapter, by the names in its header."""
    if path.is_dir():
        return (path / PEFT_CONFIG).is_file() and (path / PEFT_WEIGHTS).is_file()
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    return any(split_key(name) is not None for name in read_header(path))


def describe_adapter(file: str | Path) -> dict[str, Any]:
    """What `darkroom inspect ADAPTER` tells."""
    adapter = read_adapter(file)
    ranks = Counter(layer.rank for layer in adapter.layers.values())
    scales = Counter(round(layer.scale, 6) for layer in adapter.layers.values())
    trigger = next((adapter.metadata[key] for key in TRIGGERS if key in adapter.metadata), None)
    tensors = [t for layer in adapter.layers.values() for t in layer.tensors.values()]
    return {
        "path": str(file),
        "kind": adapter.kind,
        "layout": adapter.layout,
        "made_for": adapter.base or "unknown",
        "rank": _span(ranks),
        "scale": _span(scales),
        "layers": dict(Counter(name.partition(".")[0] for name in adapter.layers)),
        "parameters": adapter.num_parameters,
        "bytes": sum(t.nbytes for t in tensors),
        "precision": ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors})),
        "trigger": None if trigger is None else shown(trigger, MOST_SHOWN),
        "notes": list(adapter.notes) or None,
        "metadata": {
            shown(key): shown(text, MOST_SHOWN)
            for key, text in sorted(adapter.metadata.items())
            if ":" not in key
        },
        "sha256": adapter.sha256,
    }


def _span(counted: Counter[Any]) -> Any:
    return next(iter(counted)) if len(counted) == 1 else f"{min(counted)} to {max(counted)}"


def export_adapter(
    source: str | Path, to: str | Path, *, kohya: bool = False, dtype: torch.dtype | None = None
) -> Path:
    """An adapter of any layout written anew: diffusers' keys, or kohya's. A file that is there stays."""
    target = Path(to)
    if target.suffix != ".safetensors":
        raise InputError(f"an adapter to '{to}'", allowed="--to FILE.safetensors")
    if target.exists():
        raise InputError(f"'{target}' is there already", mend="choose another file")
    return write_adapter(_named_by_base(read_adapter(source)), target, kohya=kohya, dtype=dtype)


def _named_by_base(adapter: Adapter) -> Adapter:
    """Layers that are known by number get their names from the architecture that the adapter is made for."""
    if not adapter.numbered:
        return adapter
    if adapter.base is None:
        raise ModelError(f"adapter '{adapter.name}' numbers its layers and does not tell its base")
    return fit(adapter, create(adapter.base, parts=("unet", "text_encoder"), device="meta"))


def export_merged(
    model: str | Path,
    to: str | Path,
    adapters: Sequence[tuple[Adapter, float]],
    *,
    dtype: torch.dtype | None = None,
    **how: Any,
) -> Path:
    """A model with adapters merged into its weights, as a folder; merged in float32, then cast to `dtype`.

    `how` is what `load` takes besides: variant, revision. A folder that is there stays. Its card (README.md)
    has the sources and licences of the adapters and of the model.
    """
    target = Path(to)
    if target.exists():
        raise InputError(f"'{target}' is there already", mend="choose another folder")
    if target.suffix == ".safetensors":
        raise InputError(f"a merged model to '{to}'", allowed="a folder")
    opened = load(model, **how)
    merge_all(opened, adapters)
    save(opened.to(dtype=dtype), target)
    write_atomically(target / CARD, merged_card(target.resolve().name, model, adapters))
    return target
