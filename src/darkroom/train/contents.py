"""What a run pins of the pictures and the base model that it reads: fingerprints, compared on resuming.

A store's version is a number that another store may have too. Its fingerprint is of the names of its data
files, which are random and stay in a copy; where they differ, as in a store that was imported anew, ids,
captions and sizes of all rows decide (an id is a hash of a picture's bytes and caption), the bytes of
some pictures, and what else the recipe has read: masks, and the folders that say how often a picture comes.
What a filter chooses is compared by itself: it may read columns that no id speaks of.

A base's fingerprint is of the values at the start, the middle and the end of each tensor, of the parts'
configurations, of the noise schedule, of the scaling of latents and of the words: the same for a folder, a
single file and any division into files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from darkroom.data.mixing import parts_of
from darkroom.data.order import Rows
from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.models.adapters.read import read_adapter
from darkroom.models.families import FAMILIES
from darkroom.models.model import Model, is_flow
from darkroom.recipe.sections import AdapterSettings, DataSettings, ModelSettings
from darkroom.sample.schedule import Schedule
from darkroom.train.feed import SET
from darkroom.train.local_dataset import has_own_store
from darkroom.train.ranks import Ranks
from darkroom.train.tasks.diffusion import COLUMN as MASK
from darkroom.train.tasks.diffusion import Diffusion, Task

READ_ROWS = 2_000_000
"""Of a larger store only the files' names are known: reading its ids would take a start minutes."""
SAMPLED = 256
SAMPLED_PICTURES = 16
SAMPLED_MASKS = 16_384
TRAIN_UNET = ("pretrain", "finetune", "dreambooth")
CLASS_PICTURES = "set of pictures to compare with"
_READ = ("id", "caption", "width", "height")
_KEPT = 16  # hexadecimal digits: 64 bits
_NEW_RUN = "bring the one back that it was started with, or start a new run on this one: --resume never"

Contents = list[dict[str, str]]
"""Of each store `files`, and `rows`, `pictures` and what else is read by its column where it is not too
large."""

CONFIGURATION = " configuration"
"""Behind a part's name: what is noted is JSON, of which the keys are compared that both times have."""
_NO_MATTER = (
    "scaling_factor", "shift_factor", "latents_mean", "latents_std", "dtype", "torch_dtype",
    "transformers_version", "architectures", "force_upcast", "sample_size",
)  # fmt: skip
"""Of configurations: what is compared as the scaling of latents, and what changes no number."""
PROBE = "A photo of sks dog, 3 red-blue emoji & the quick brown foxes' jumping; naive cafe (unbelievably)!"
"""What a tokenizer makes of it tells its merges."""


# ---- stores


def contents_of(store: Store, before: Contents | None, more: Sequence[str] = ()) -> Contents:
    """Fingerprints of a run's stores; RecipeError where they are not those `before`. `more` columns are read
    besides ids, captions, sizes and pictures.
    """
    stores = parts_of(store)
    earlier = before if before is not None and len(before) == len(stores) else [{}] * len(stores)
    return [_contents(one, known, more) for one, known in zip(stores, earlier, strict=True)]


def columns_read(data: DataSettings) -> tuple[str, ...]:
    """Columns that decide what is learned and that no id speaks of, where a store has them."""
    keys = ("key",) if data.repeats == "folders" else ()
    mask = MASK if has_own_store(data) and data.mask in (None, "alpha") else data.mask
    return (*keys, *((SET,) if data.sets else ()), *(() if mask is None else (mask,)))


def _contents(store: Store, known: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    more = [name for name in more if name in store.columns()]
    found = {"files": _files(store, (*_READ, "picture", *more))}
    if found["files"] == known.get("files"):
        return dict(known)
    if store.num_rows <= READ_ROWS:
        found |= {"rows": _rows(store), "pictures": _pictures(store)}
        found |= {name: _column(store, name) for name in more}
    others = [name for name in found if name != "files" and name in known and found[name] != known[name]]
    if known and ("rows" not in found or "rows" not in known or others):
        other = "other pictures or captions" if "rows" in found and "rows" in known else "other files"
        if others and others[0] in more:
            other = f"other values of '{others[0]}'"
        raise RecipeError(
            "data.store",
            f"'{store.path}' has {other} at version {store.version} than the run was started with",
            mend=_NEW_RUN,
        )
    return found


def _files(store: Store, columns: Sequence[str]) -> str:
    """Of the files that hold the rows' ids, and these columns where they lie in others; and of which rows are
    deleted. Columns that are not read change nothing.
    """
    schema = store.dataset.lance_schema
    wanted, read = schema.field("id").id(), {schema.field(name).id() for name in columns}
    digest = hashlib.sha256()
    for fragment in store.dataset.get_fragments():
        held: list[Any] = [file.path for file in fragment.metadata.files if wanted in file.fields]
        for file in fragment.metadata.files:
            if wanted not in file.fields and (inside := sorted(read & set(file.fields))):
                held.append([file.path, inside])
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


def _pictures(store: Store) -> str:
    """Of the bytes of some pictures, spread over the store: ids stay where a file was written by hand."""
    count = min(store.num_rows, SAMPLED_PICTURES)
    digest = hashlib.sha256()
    for position in np.linspace(0, store.num_rows - 1, count).astype(np.int64).tolist():
        (picture,) = store.take([position], ["picture"])["picture"].to_pylist()
        digest.update(picture)
    return digest.hexdigest()[:_KEPT]


def _column(store: Store, name: str) -> str:
    """Of a column's values in the rows' order: all of them, or of masks at most so many, spread evenly."""
    digest = hashlib.sha256()
    count = store.num_rows if name == "key" else min(store.num_rows, SAMPLED_MASKS)
    positions = np.linspace(0, max(0, store.num_rows - 1), count).astype(np.int64)
    for start in range(0, count, 1024):
        for value in store.take(positions[start : start + 1024], [name])[name].to_pylist():
            plain = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
            digest.update(b"-" if value is None else f"{len(plain)}:".encode() + plain)
    return digest.hexdigest()[:_KEPT]


def _class_contents(store: Store) -> str:
    """The fingerprint of a run's pictures of the class, or of those that were not preferred."""
    return _short(_rows(store) + _pictures(store))


def chosen_of(rows: Sequence[Rows], data: DataSettings, before: str | None) -> str | None:
    """The fingerprint of the rows that a filter chooses, None without one; RecipeError for others than
    `before`. Of very many rows some, spread evenly.
    """
    if data.filter is None:
        return None
    digest = hashlib.sha256()
    for some in rows:
        count = len(some)
        index = np.linspace(0, max(0, count - 1), min(count, READ_ROWS)).astype(np.int64)
        digest.update(f"{count}:".encode() + some.positions(index).astype("<i8").tobytes())
    found = digest.hexdigest()[:_KEPT]
    if before not in (None, found):
        raise RecipeError(
            "data.filter",
            f"'{data.filter}' chooses other rows of the store than when the run was started",
            mend=_NEW_RUN,
        )
    return found


# ---- the base model


def base_of(task: str, settings: ModelSettings, model: Model) -> dict[str, str]:
    """Fingerprints of the parts that a run takes from a folder, a file or the hub, as they are there.

    A family's random weights follow from the recipe. Those that the run trains whole are left out: a
    checkpoint holds them.
    """
    if task == "extractor":
        return {}
    found: dict[str, str] = {}
    given = settings.base not in FAMILIES
    gives_text = given or isinstance(settings.text_encoder, str)
    named = {
        "unet": given and not settings.fresh_unet and task not in TRAIN_UNET,
        "vae": (given or isinstance(settings.vae, str)) and task != "autoencoder",
        "text_encoder": gives_text and not settings.train_text_encoder,
    }
    from_files = {
        "unet": given,
        "vae": given or isinstance(settings.vae, str),
        "text_encoder": gives_text,
    }
    for part, module in model.modules.items():
        if named.get(part.removesuffix("_2")):
            found[part] = sampled(module)
        if from_files.get(part.removesuffix("_2")):  # trained ones too: checkpoints hold weights alone
            found[part + CONFIGURATION] = _configuration(module)
    if given and model.scheduler:
        found["noise schedule"] = _noise_schedule(model)
    if named["vae"] and model.vae is not None:
        found["scaling of latents"] = _short(json.dumps(model.latent_scaling.noted(), sort_keys=True))
    if model.tokenizers and (gives_text or settings.tokenizer not in (None, "train")):
        words = [tokenizer.get_vocab() for tokenizer in model.tokenizers]
        found["tokenizer"] = _short(json.dumps(words, sort_keys=True))
        split = [tokenizer(PROBE, verbose=False)["input_ids"] for tokenizer in model.tokenizers]
        found["splitting into tokens"] = _short(json.dumps(split))
    return found


def others_of(
    task: Task, adapter: AdapterSettings | None, stores: Sequence[Store], ranks: Ranks
) -> dict[str, str]:
    """Fingerprints of what is read besides: the extractor that a transformer is aligned with, the adapter
    file that training starts from, the pictures of the class or those not preferred.
    """
    found = {}
    extractor = task.extractor if isinstance(task, Diffusion) else None
    if extractor is not None:
        found["extractor"] = extractor.sha256[:16]
    if adapter is not None and adapter.start is not None:
        found["adapter"] = read_adapter(adapter.start).sha256[:16]
    if len(stores) > 1:
        found[CLASS_PICTURES] = ranks.broadcast(lambda: _class_contents(stores[1]))
    return found


def _configuration(module: torch.nn.Module) -> str:
    """What a part's configuration says besides its weights' shapes: activations, heads, groups, ..."""
    config: Any = module.config
    settings = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    kept = {k: v for k, v in settings.items() if not k.startswith("_") and k not in _NO_MATTER}
    return json.dumps(kept, sort_keys=True, default=str)


def _noise_schedule(model: Model) -> str:
    """What is predicted, and from how much noise, as the model's scheduler and the recipe have it."""
    config = model.scheduler
    if is_flow(config):
        noise = [config.get(name) for name in ("shift", "logit_mean", "logit_std", "num_train_timesteps")]
    else:
        noise = [round(float(value), 6) for value in Schedule.from_config(config).alphas_cumprod]
    return _short(json.dumps([model.prediction, noise]))


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


Places = Mapping[str, tuple[str, str]]
"""Of what does not come from the base: the recipe's key, and what it says."""


def places_of(
    model: ModelSettings,
    data: DataSettings,
    adapter: AdapterSettings | None,
    extractor: str | None,
    run: Path,
) -> Places:
    """Where the recipe has the parts that fingerprints are of."""
    found: dict[str, tuple[str, str]] = {}
    if isinstance(model.vae, str):
        found |= dict.fromkeys(("vae", "scaling of latents"), ("model.vae", model.vae))
    words = ("tokenizer", "splitting into tokens")
    if isinstance(model.text_encoder, str):
        parts = ("text_encoder", "text_encoder_2", *words)
        found |= dict.fromkeys(parts, ("model.text_encoder", model.text_encoder))
    elif model.tokenizer is not None:
        found |= dict.fromkeys(words, ("model.tokenizer", model.tokenizer))
    if adapter is not None and adapter.start is not None:
        found["adapter"] = "adapter.from", adapter.start
    if extractor is not None:
        found["extractor"] = "train.align.extractor", extractor
    key = "data.class_images" if data.class_prompt is not None else "data.folder"
    found[CLASS_PICTURES] = key, data.class_images or data.folder or str(run / "data")
    return found


def check_base(
    now: Mapping[str, str], before: Mapping[str, str] | None, settings: ModelSettings, places: Places
) -> None:
    """RecipeError where a part of the base is another than when the run was started."""
    other = {part: _difference(part, was, now[part]) for part, was in (before or {}).items() if part in now}
    names = [name for name in other.values() if name]
    if names:
        first = next(part for part, name in other.items() if name)
        base = "model.base", settings.base
        key, place = places.get(first, places.get(first.removesuffix(CONFIGURATION), base))
        raise RecipeError(
            key,
            f"in '{place}' the {' and the '.join(names)} is another than the run was started with",
            mend=_NEW_RUN,
        )


def _difference(part: str, was: str, now: str) -> str:
    """A part's name where it is another, of a configuration with the keys that are; else nothing."""
    if not part.endswith(CONFIGURATION):
        return part if was != now else ""
    old, new = json.loads(was), json.loads(now)
    keys = [key for key in old if key in new and old[key] != new[key]]
    return f"{part} ({', '.join(keys)})" if keys else ""


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_KEPT]
