"""A run's own pictures: a folder brought into the run's store, and pictures of the class with it. And what a
run reads from its store instead of computing it: latents, text states and masks.

They lie in `RUN/data`: `pictures.lance`, `class/` (unless the recipe names a folder) and `class.lance`. A
run that goes on reads what was gathered when it started.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from darkroom import models
from darkroom.data.images import EXTENSIONS, MASK_ENDING, pictures_below
from darkroom.data.importers.job import ImportReport, import_pictures
from darkroom.data.mixing import MixedStore, parts_of, versions_of
from darkroom.data.store import Store
from darkroom.data.versions import plain, wait
from darkroom.errors import RecipeError, StoreError
from darkroom.hardware.system import atomic_replace, remove_tree, write_atomically
from darkroom.models.model import Model
from darkroom.prepare.columns import (
    TextEncoder,
    encoder_settings,
    latents_column,
    settings_that_differ,
    text_column,
)
from darkroom.prepare.job import prepare
from darkroom.train.feed import LOSS_WEIGHT, PROMPT, SET, check_repeats, inline_step
from darkroom.train.tasks.diffusion import COLUMN, Masks, alpha_of

if TYPE_CHECKING:
    from darkroom.recipe.sections import DataSet, DataSettings


Say = Callable[[str], None]
DATA = "data"
NOTE = ".darkroom.json"  # in a folder of class pictures: what they were generated with
CLASS_STEPS = 30
MOST_A_CALL = 8  # of class pictures


def has_own_store(data: DataSettings) -> bool:
    """Whether the pictures come from a folder."""
    return data.store is None and not data.stores


def store_path(data: DataSettings, run: Path) -> str:
    """Where the store is: the recipe's, or the run's own."""
    return data.store or str(run / DATA / "pictures.lance")


def open_store(data: DataSettings, run: Path, version: int | Sequence[int] | None = None) -> Store:
    """The recipe's store, or its several as one, at the versions that a run has pinned."""
    if not data.stores:
        assert version is None or isinstance(version, int)
        return Store.open(store_path(data, run), version=version)
    paths = [one.store for one in data.stores]
    pinned = version if isinstance(version, Sequence) else [version] * len(paths)
    stores = [Store.open(path, version=one) for path, one in zip(paths, pinned, strict=True)]
    return MixedStore(stores)


def open_pinned(
    data: DataSettings, run: Path, version: int | Sequence[int] | None, rows: int | None
) -> Store:
    """The same; RecipeError where it has not as many rows as a run that goes on has noted."""
    store = open_store(data, run, version)
    if rows is not None and store.num_rows != rows:
        raise RecipeError(
            "data.store",
            f"'{store.path}' has {store.num_rows} rows at version {store.version}, not {rows}",
            mend="it is not the store that this run was started with",
        )
    return store


def class_store_path(run: Path) -> Path:
    """Where the run's store of class pictures is."""
    return run / DATA / "class.lance"


def gather(task: str, data: DataSettings, run: Path, say: Say) -> None:
    """Bring a folder's pictures, and masks where there are any, into the run's own store, anew."""
    if data.sets:
        _gather_sets(task, data, run, say)
        return
    key = "folder" if data.folder else "instance"
    folder = Path(getattr(data, key))
    if task == "dpo":
        _gather_rejected(folder, run)
        folder = folder / "chosen"
    if not folder.exists():
        raise RecipeError(f"data.{key}", f"no folder '{folder}'")
    path = Path(store_path(data, run))
    report = _imported(folder, path, f"data.{key}", kind="auto" if key == "folder" else "folder")
    store = Store.open(path)
    if not store.num_rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.rejected.items())
        message = f"'{folder}' has no picture that can be used" + (f" ({reasons})" if reasons else "")
        raise RecipeError(
            f"data.{key}", message, allowed=f"files such as {', '.join(sorted(EXTENSIONS)[:8])}"
        )
    _check_captions(task, data, store, key)
    if task == "dpo":
        _check_pairs(store, Store.open(class_store_path(run)), folder.parent)
    check_repeats(data, store.take(range(store.num_rows), ["key"])["key"].to_pylist())
    masks = _add_masks(data, store, [folder] * store.num_rows)
    say(f"{store.num_rows} pictures from {folder}" + (f", {masks} with a mask" if masks else ""))
    if report.rejected:
        say(f"rejected: {report.rejected}; see {report.rejected_file}")


def _take_captions(sets: Sequence[DataSet], store: Store, numbers: Sequence[int]) -> None:
    """Give pictures the captions of their set's JSON file, found by name with or without its ending."""
    named = {i: _json_captions(i, one.captions) for i, one in enumerate(sets) if one.captions}
    ends = {i: _by_ends(captions) for i, captions in named.items()}
    rows = store.take(range(store.num_rows), ["id", "key", "caption"]).to_pylist()
    values, taken = {}, dict[tuple[int, str], str]()
    for i, row in zip(numbers, rows, strict=True):
        values[row["id"]] = row["caption"]
        entries = _entries_of(row["key"], ends.get(i, {}))
        if not entries:
            continue
        other = taken.setdefault((i, entries[0]), row["key"])
        if len(entries) > 1 or other != row["key"]:
            two = f"'{entries[0]}' alone for {other} and {row['key']}"
            if len(entries) > 1:
                two = f"'{entries[0]}' and '{entries[1]}' for {row['key']}"
            mend = "have it name pictures with the folders that lie in the set's folder"
            raise RecipeError(f"data.sets.{i}.captions", f"'{sets[i].captions}' has {two}", mend=mend)
        values[row["id"]] = named[i][entries[0]] or row["caption"]
    store.set_by_id("caption", values)


def _by_ends(names: Iterable[str]) -> dict[str, list[str]]:
    """The names by each end of their path: x/y/1.png is also y/1.png and 1.png."""
    found = defaultdict[str, list[str]](list)
    for name in names:
        parts = name.replace("\\", "/").split("/")
        for n in range(len(parts)):
            found["/".join(parts[n:])].append(name)
    return found


def _entries_of(key: str, ends: Mapping[str, list[str]]) -> list[str]:
    """The names that may mean a picture: by as much of its path as one has, with or without its ending."""
    parts = PurePosixPath(key).parts
    for n in range(len(parts)):
        end = "/".join(parts[n:])
        if found := ends.get(end) or ends.get(end.removesuffix(PurePosixPath(key).suffix)):
            return found
    return []


def _json_captions(number: int, file: str) -> dict[str, str]:
    """Captions by picture's name as the file has it, tags behind them."""
    key = f"data.sets.{number}.captions"
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RecipeError(key, f"no file '{file}'") from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(key, f"'{file}' is no JSON: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(one, dict) for one in content.values()):
        raise RecipeError(key, f"'{file}'", allowed="{picture: {caption: ..., tags: ...}}")
    found = {}
    for name, one in content.items():
        parts = [
            _text_in(one[part], f"'{file}', {name}", key) for part in ("caption", "tags") if one.get(part)
        ]
        found[name] = ", ".join(parts)
    return found


def _text_in(value: Any, place: str, key: str) -> str:
    """A caption, or tags as text or in a list."""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise RecipeError(key, f"{place}: {str(value)[:60]}", allowed="text, or a list of texts")
    return ", ".join(texts)


def _gather_rejected(folder: Path, run: Path) -> None:
    """Bring the pictures that were not preferred into a store next to the others'."""
    _imported(folder / "rejected", class_store_path(run), "data.folder")


def _check_pairs(chosen: Store, rejected: Store, folder: Path) -> None:
    """RecipeError unless each row of one store has its other picture in the same row of the other."""
    names = [
        [Path(k).stem for k in s.take(range(s.num_rows), ["key"])["key"].to_pylist()]
        for s in (chosen, rejected)
    ]
    alone = sorted(set(names[0]) ^ set(names[1]))
    if alone or names[0] != names[1]:
        problem = f"{alone[0]} has no partner" if alone else "chosen/ and rejected/ are in another order"
        raise RecipeError(
            "data.folder",
            f"'{folder}': {problem}",
            allowed="each picture under one name in chosen/ and rejected/",
        )


def _gather_sets(task: str, data: DataSettings, run: Path, say: Say) -> None:
    """Bring several folders into the run's own store, each row with its set's number, prompt and weight."""
    path, sets = Path(store_path(data, run)), data.sets
    numbers: list[int] = []
    for i, one in enumerate(sets):
        report = _imported(Path(one.folder), path, f"data.sets.{i}.folder", kind="auto", anew=not i)
        store = Store.open(path)
        new = store.num_rows - len(numbers)
        numbers += [i] * new
        more = f", {report.doubles} are in another set" if report.doubles else ""
        say(f"{new} pictures from {one.folder}{more}")
        if report.rejected:
            say(f"rejected: {report.rejected}; see {report.rejected_file}")
        if not new:
            raise RecipeError(f"data.sets.{i}.folder", f"'{one.folder}' adds no picture{more}")
    if any(one.captions for one in sets):
        _take_captions(sets, store, numbers)
    _check_captions(task, data, store, "sets", [sets[i].prompt for i in numbers])
    columns = {
        SET: pa.array(numbers, pa.int32()),
        PROMPT: pa.array([sets[i].prompt or "" for i in numbers], pa.string()),
        LOSS_WEIGHT: pa.array([sets[i].loss_weight for i in numbers], pa.float32()),
    }
    store.change(lambda dataset: dataset.add_columns(pa.table(columns).to_reader()))
    _add_masks(data, store, [Path(sets[i].folder) for i in numbers])


def forget(run: Path) -> None:
    """Let go of what was gathered for a run that cannot be; class pictures, which took time, stay."""
    for store in (run / DATA).glob("*.lance"):
        remove_tree(store)
    for folder in (run / DATA, run):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _imported(folder: Path, path: Path, key: str, *, kind: str = "folder", anew: bool = True) -> ImportReport:
    if anew:
        remove_tree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        raise RecipeError(key, f"no folder '{folder}'")
    return import_pictures(folder, path, kind=kind, on_missing_caption="keep", workers=2)


def _check_captions(
    task: str, data: DataSettings, store: Store, key: str, prompts: Sequence[str | None] | None = None
) -> None:
    """RecipeError where a picture has no caption and nothing else is said of it."""
    if data.prompts or task == "textual-inversion":
        return
    captions = store.take(range(store.num_rows), ["caption"])["caption"].to_pylist()
    pairs = zip(captions, prompts or [None] * len(captions), strict=True)
    bare = sum(not caption and not prompt for caption, prompt in pairs)
    if bare:
        raise RecipeError(
            "data.prompt",
            f"missing, and {bare} of {store.num_rows} pictures in data.{key} have no caption",
            mend="put a NAME.txt next to each picture, or say data.prompt for all of them",
        )


def _add_masks(data: DataSettings, store: Store, folders: Sequence[Path]) -> int:
    """Give the store a column of masks where a row's folder or the pictures have some; returns how many."""
    keys: list[str] = store.take(range(store.num_rows), ["key"])["key"].to_pylist()
    masks: list[bytes | None] = []
    for i, key in enumerate(keys):
        mask_file = folders[i] / f"{Path(key).with_suffix('')}{MASK_ENDING}"
        if data.mask == "alpha":
            masks.append(alpha_of(store.take([i], ["picture"])["picture"].to_pylist()[0]))
        else:
            masks.append(mask_file.read_bytes() if mask_file.is_file() else None)
    count = sum(mask is not None for mask in masks)
    if data.mask == "alpha" and not count:
        raise RecipeError("data.mask", f"alpha, but no picture in '{folders[0]}' is transparent anywhere")
    if count:
        table = pa.table({COLUMN: pa.array(masks, pa.large_binary())})
        store.change(lambda dataset: dataset.add_columns(table.to_reader()))
    return count


# ---- class pictures


def gather_class(
    data: DataSettings, base: str, model: Model, run: Path, dtype: torch.dtype, say: Say
) -> None:
    """Have as many class pictures as the recipe wants: those in the folder, the rest drawn by the model.

    Picture i has seed i, whichever were there before; each is written when it is done, so a second call
    goes on. They come into the run's own store. `base` is what the recipe calls the model.
    """
    folder = Path(data.class_images) if data.class_images else run / DATA / "class"
    folder.mkdir(parents=True, exist_ok=True)
    there = pictures_below(folder)
    note = class_note(data, base)
    if there:
        _check_note(note, folder)
    if len(there) < data.num_class_images:
        write_atomically(folder / NOTE, json.dumps(note, indent=1) + "\n", durable=True)
        _generate(data, model, folder, len(there), dtype, say)
    else:
        say(f"{len(there)} class pictures in {folder}, {data.num_class_images} are used")
    _imported(folder, class_store_path(run), "data.class_images")


def class_note(data: DataSettings, base: str) -> dict[str, Any]:
    """What class pictures are drawn with."""
    return {"prompt": data.class_prompt, "model": base, "side": data.resolution}


def _check_note(note: dict[str, Any], folder: Path) -> None:
    """RecipeError where the pictures in a folder were drawn otherwise; a user's own have no note."""
    file = folder / NOTE
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else note
    if before != note:
        odd = next(key for key in note if before.get(key) != note[key])
        raise RecipeError(
            "data.class_images",
            f"the pictures in '{folder}' were drawn with another {odd} ({before.get(odd)})",
            mend=f"choose another folder, or remove its {NOTE} to take them as they are",
        )


def class_call(side: int) -> int:
    """How many class pictures of a resolution are drawn together."""
    return max(1, min(MOST_A_CALL, 2**20 // side**2))


def _generate(
    data: DataSettings, model: Model, folder: Path, there: int, dtype: torch.dtype, say: Say
) -> None:
    from darkroom import sample

    wanted, side = data.num_class_images, data.resolution
    missing = [i for i in range(wanted) if not (folder / f"class-{i:06d}.png").exists()][: wanted - there]
    say(f"drawing {len(missing)} pictures of '{data.class_prompt}' into {folder}; {there} are there")
    device = next(model.unet.parameters()).device  # type: ignore[union-attr]
    plain = dtype == torch.float32
    # In calls of the same pictures whatever is missing: a picture's last bits depend on the size of its call.
    size, done = class_call(side), there
    for first in sorted({i - i % size for i in missing}):
        with nullcontext() if plain else torch.autocast(device.type, dtype):
            pictures = sample.generate(
                model,
                str(data.class_prompt),
                num=size,
                seed=first,
                size=(side, side),
                steps=CLASS_STEPS,
                notice=lambda _: None,
            )
        some = [i for i in missing if first <= i < first + size]
        for i in some:
            temporary = folder / f".class-{i:06d}.png"
            pictures[i - first].image.save(temporary)
            atomic_replace(temporary, folder / f"class-{i:06d}.png")
        done += len(some)
        say(f"class pictures: {done} of {wanted}")


# ---- latents, text states and masks that are read

PREPARED_PIXELS = 2**19  # at a time, where a run makes its own latents: two pictures of 512 px


def prepare_own(
    data: DataSettings,
    model: Model,
    stores: Sequence[Store],
    device: torch.device,
    say: Callable[[str], None],
) -> None:
    """Make the latents of a run's own stores, where they are not there yet, and tell how many."""
    side = data.resolution
    for store in stores:
        store.refresh()
        report = prepare(
            store,
            replace(model, unet=None, text_encoders=[], tokenizers=[]),
            resolution=side,
            bucket_step=inline_step(side, model) if data.buckets else 0,
            batch_rows=max(1, PREPARED_PIXELS // side**2),
            device=str(device),
        )
        made = sum(report.encoded.values())
        if made:
            say(f"latents of {made} pictures made, kept in {store.path} ({report.wall_s:.1f} s)")


def stored_latents(data: DataSettings, model: Model, store: Store) -> str | None:
    """The prepared column to read, or None to encode pictures at each step."""
    if data.encode in ("inline", "online"):
        return None
    if data.encode == "auto":
        made = [meta for meta in store.columns().values() if meta.get("darkroom.kind") == "latents"]
        if not data.caches_latents or not any(
            meta.get("darkroom.resolution") == str(data.resolution) for meta in made
        ):
            return None
    assert model.vae is not None
    made_by = models.identity(model.vae), encoder_settings(model.vae)
    columns = {latents_column(one, data.resolution, *made_by) for one in parts_of(store)}
    return _shared(store, columns)


def _shared(store: Store, columns: set[str]) -> str:
    """A prepared column that all of a mixture's stores have alike."""
    column: str = columns.pop()
    if columns or column not in store.columns():
        raise RecipeError(
            "data.stores",
            f"their columns {', '.join(sorted({column, *columns}))} are not alike",
            mend="prepare all of them with the same settings (square, or --buckets)",
        )
    return column


def stored_text(data: DataSettings, model: Model, store: Store, *, trained: bool) -> str | None:
    """The prepared text column to read, or None to encode captions at each step.

    `trained` says whether the text encoders are.
    """
    asked = data.text
    says = data.prompts or data.changes_captions or not data.reads_text_plainly
    if trained or asked == "inline" or (says and asked == "auto"):
        return None
    made = [meta for meta in store.columns().values() if meta.get("darkroom.kind") == "text"]
    if asked == "auto" and not made:
        return None
    encoder = TextEncoder(model.text_encoders, model.tokenizers)
    if asked == "auto" and all(_of_another(meta, encoder) for meta in made):
        return None
    return _shared(store, {text_column(one, encoder.identity, encoder.settings) for one in parts_of(store)})


def _of_another(noted: Mapping[str, str], encoder: TextEncoder) -> bool:
    """Whether a column is another encoder's."""
    if noted.get("darkroom.encoder") != encoder.identity:
        return True
    return bool(settings_that_differ(noted, encoder.settings))


def stored_masks(data: DataSettings, store: Store, *, factor: int, floor: float) -> Masks | None:
    """What reads the masks, where there are any; RecipeError for a column that is missing, or for a weight
    `floor` of what masks leave out without any.
    """
    given = data.mask
    column = COLUMN if has_own_store(data) and given in (None, "alpha") else given
    if column is None or (given is None and column not in store.columns()):
        if floor:
            mend = "put NAME.mask.png next to the pictures, or say data.mask"
            raise RecipeError("objective.unmasked_weight", "given, but there are no masks", mend=mend)
        return None
    if column not in store.columns():
        raise RecipeError(
            "data.mask", f"the store has no column '{column}'", allowed=", ".join(store.columns())
        )
    return Masks(column, factor=factor, floor=floor)


Versions = int | Sequence[int] | None
TRIES = 10


def settled(data: DataSettings, run: Path, version: Versions, say: Say) -> Versions:
    """The version of the run's store, or of each of several, kept from now on under the run's name.

    `version` is what the run settled before; without one it is the newest, and a newer one where that is
    dropped before it is pinned. A store of the run's own needs no pin. StoreError where there is no store or
    no such version.
    """
    if has_own_store(data):
        return version
    for attempt in range(TRIES):
        opened = open_store(data, run, version)
        try:
            for store in parts_of(opened):
                _pin(store, run, say)
        except ValueError as error:  # dropped since it was opened
            if version is not None:
                raise StoreError(f"{opened.path}: {plain(error)}") from error
            wait(attempt)
        else:
            return versions_of(opened)
    raise StoreError(
        f"{opened.path} is changed by others all the time", mend="run it again when they are done"
    )


def _pin(store: Store, run: Path, say: Say) -> None:
    try:
        store.pin(_name(run))
    except OSError as error:
        say(
            f"the store cannot be written ({error}): resuming works while its version {store.version} is kept"
        )


def release_pins(data: DataSettings, run: Path) -> None:
    """Unpin what was settled for a run that cannot be."""
    if has_own_store(data):
        return
    with suppress(OSError, ValueError, StoreError):
        for store in parts_of(open_store(data, run)):
            store.unpin(_name(run))


def _name(run: Path) -> str:
    """The folder's whole path makes the name its own."""
    return f"run {run.resolve()}"
