"""What a run pins of the pictures and the base model that it reads: fingerprints, compared on resuming.

A store's version is a number that another store may have too. Its fingerprint is of the names of its data
files, which are random and stay in a copy; where they differ, as in a store that was imported anew, ids,
captions and sizes of all rows decide (an id is a hash of a picture's bytes and caption).

A base's fingerprint is of the values at the start, the middle and the end of each tensor, of the scaling of
latents and of the words: the same for a folder, a single file and any division into files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch

from darkroom.data.mixing import parts_of
from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.models.families import FAMILIES
from darkroom.models.model import Model
from darkroom.recipe.sections import ModelSettings

READ_ROWS = 2_000_000
"""Of a larger store only the files' names are known: reading its ids would take a start minutes."""
SAMPLED = 256
TRAIN_UNET = ("pretrain", "finetune", "dreambooth")
_READ = ("id", "caption", "width", "height")
_KEPT = 16  # hexadecimal digits: 64 bits
_NEW_RUN = "bring the one back that it was started with, or start a new run on this one: --resume never"

Contents = list[dict[str, str]]
"""Of each store `files`, and `rows` where it is not too large."""


# ---- stores


def contents_of(store: Store, before: Contents | None) -> Contents:
    """Fingerprints of a run's stores; RecipeError where they are not those `before`."""
    stores = parts_of(store)
    earlier = before if before is not None and len(before) == len(stores) else [{}] * len(stores)
    return [_contents(one, known) for one, known in zip(stores, earlier, strict=True)]


def _contents(store: Store, known: Mapping[str, str]) -> dict[str, str]:
    found = {"files": _files(store)}
    if found["files"] == known.get("files"):
        return dict(known)
    if store.num_rows <= READ_ROWS:
        found["rows"] = _rows(store)
    if known and ("rows" not in found or found["rows"] != known.get("rows")):
        other = "other pictures or captions" if "rows" in found and "rows" in known else "other files"
        raise RecipeError(
            "data.store",
            f"'{store.path}' has {other} at version {store.version} than the run was started with",
            mend=_NEW_RUN,
        )
    return found


def _files(store: Store) -> str:
    """Of the files that hold the rows' ids, and of which rows are deleted; added columns change nothing."""
    wanted = store.dataset.lance_schema.field("id").id()
    digest = hashlib.sha256()
    for fragment in store.dataset.get_fragments():
        held = [file.path for file in fragment.metadata.files if wanted in file.fields]
        deleted = (fragment.deletion_file() or "").rpartition("/")[2]
        digest.update(json.dumps([held, deleted]).encode())
    return digest.hexdigest()[:_KEPT]


def _rows(store: Store) -> str:
    """Of ids, captions and sizes in their order, however they are cut into files."""
    digests = {name: hashlib.sha256() for name in _READ}
    lengths = {name: hashlib.sha256() for name in _READ}
    for batch in store.scan(_READ, batch_rows=8192):
        for name in _READ:
            column = batch.column(name)
            if pa.types.is_integer(column.type):
                digests[name].update(column.to_numpy(zero_copy_only=False).astype("<i8").tobytes())
                continue
            text = column.cast(pa.large_string())
            _, bounds, data = text.buffers()
            ends = np.frombuffer(bounds, "<i8", count=len(text) + 1, offset=8 * text.offset)
            lengths[name].update(np.diff(ends).tobytes())
            if data is not None:
                digests[name].update(memoryview(data)[int(ends[0]) : int(ends[-1])])
    parts = [each[name].digest() for name in _READ for each in (digests, lengths)]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:_KEPT]


# ---- the base model


def base_of(task: str, settings: ModelSettings, model: Model) -> dict[str, str]:
    """Fingerprints of the parts that a run takes from a folder, a file or the hub, as they are there.

    A family's random weights follow from the recipe. Those that the run trains whole are left out: a
    checkpoint holds them.
    """
    if task == "extractor":
        return {}
    found = {}
    given = settings.base not in FAMILIES
    gives_text = given or isinstance(settings.text_encoder, str)
    named = {
        "unet": given and not settings.fresh_unet and task not in TRAIN_UNET,
        "vae": (given or isinstance(settings.vae, str)) and task != "autoencoder",
        "text_encoder": gives_text and not settings.train_text_encoder,
    }
    for part, module in model.modules.items():
        if named.get(part.removesuffix("_2")):
            found[part] = sampled(module)
    if named["vae"] and model.vae is not None:
        found["scaling of latents"] = _short(json.dumps(model.latent_scaling.noted(), sort_keys=True))
    if model.tokenizers and (gives_text or settings.tokenizer not in (None, "train")):
        words = [tokenizer.get_vocab() for tokenizer in model.tokenizers]
        found["tokenizer"] = _short(json.dumps(words, sort_keys=True))
    return found


def sampled(module: torch.nn.Module) -> str:
    """Of names, shapes and some values of a module's tensors; of large files little is read."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        for start in (0, max(0, len(flat) // 2 - SAMPLED // 2), max(0, len(flat) - SAMPLED)):
            values = flat[start : start + SAMPLED].to("cpu", torch.float32).contiguous()
            digest.update(values.numpy().astype("<f4", copy=False).tobytes())
    return digest.hexdigest()[:_KEPT]


def check_base(now: Mapping[str, str], before: Mapping[str, str] | None, settings: ModelSettings) -> None:
    """RecipeError where a part of the base is another than when the run was started."""
    other: Sequence[str] = [part for part, was in (before or {}).items() if now.get(part, was) != was]
    if other:
        place = settings.vae if other == ["vae"] and isinstance(settings.vae, str) else settings.base
        raise RecipeError(
            "model.vae" if place is not settings.base else "model.base",
            f"in '{place}' the {' and the '.join(other)} is another than the run was started with",
            mend=_NEW_RUN,
        )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_KEPT]
