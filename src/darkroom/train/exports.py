"""From trained weights to files: a model folder that diffusers opens, an adapter, a learned word; and what
these are given away with: kohya's `ss_` metadata, a model card, the hub.

No folder's path is written, only its last name.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from darkroom import __version__, models
from darkroom.data.mixing import parts_of
from darkroom.data.store import Store
from darkroom.errors import CheckpointError, DarkroomError, InputError, StoreError
from darkroom.hardware.system import write_atomically
from darkroom.models.card import (
    CARD,
    UNKNOWN,
    SourceCount,
    card_head,
    common_licence,
    last_name,
    source_tables,
    sources_in_header,
    without_path,
)
from darkroom.models.checked import without_token
from darkroom.models.model import Model
from darkroom.models.reference import is_hub_id
from darkroom.run import ENVIRONMENT, Run
from darkroom.train.feed import SET, select_rows, times_of
from darkroom.train.local_dataset import class_store_path, has_own_store, open_store, store_path
from darkroom.train.model import build_model, no_captions
from darkroom.train.precision import cast
from darkroom.train.tasks.encoders import ExtractorModel, TinyVaeModel, build_extractor
from darkroom.train.tasks.lora import FILE as WORDS
from darkroom.train.tasks.lora import START, adapter_of, add_word, read_noted_start, settle_words, write_words

if TYPE_CHECKING:
    from darkroom.models.adapters.adapter import Adapter
    from darkroom.recipe.recipe import Recipe
    from darkroom.recipe.sections import (
        AdapterSettings,
        DataSettings,
        ObjectiveSettings,
        OptimSettings,
        SampleSettings,
        TrainSettings,
    )

TAGS_KEPT = 5_000
"""Of a data set's tags, the most frequent: readers bound the size of a header."""
SETTINGS = ("learning_rate", "optimizer", "max_train_steps", "total_batch_size", "resolution", "loss_type")
"""Those that a card lists."""


# ---- metadata


def _training_metadata(
    train: TrainSettings,
    optim: OptimSettings,
    data: DataSettings,
    objective: ObjectiveSettings,
    adapter: AdapterSettings | None,
) -> dict[str, str]:
    """What kohya's tools read of how a LoRA was trained; what is not set is left out."""
    noise = objective.noise
    network = {} if adapter is None else adapter.model_dump(mode="json", exclude_defaults=True)
    network = {
        key: value for key, value in network.items() if key not in ("from", "trigger", "rank", "alpha")
    }
    micro = train.global_batch if train.micro_batch == "auto" else train.micro_batch
    metadata: dict[str, Any] = {
        "learning_rate": optim.lr,
        "unet_lr": optim.unet_lr,
        "text_encoder_lr": optim.text_encoder_lr,
        "optimizer": optim.name,
        "lr_scheduler": optim.lr_schedule,
        "lr_warmup_steps": optim.warmup_steps,
        "max_train_steps": train.steps,
        "total_batch_size": train.global_batch,
        "batch_size_per_device": micro,
        "gradient_accumulation_steps": train.global_batch // micro,
        "gradient_checkpointing": train.gradient_checkpointing,
        "mixed_precision": train.precision,
        "seed": train.seed,
        "resolution": f"({data.resolution}, {data.resolution})",
        "enable_bucket": data.buckets,
        "shuffle_caption": data.shuffle_tags,
        "keep_tokens": data.keep_tokens,
        "flip_aug": data.flip,
        "color_aug": data.augment.used,
        "random_crop": data.crop == "random",
        "caption_dropout_rate": data.caption_dropout,
        "caption_tag_dropout_rate": data.tag_dropout,
        "clip_skip": data.clip_skip + 1,
        "max_token_length": data.max_token_length,
        "min_snr_gamma": objective.min_snr_gamma,
        "debiased_estimation": objective.debiased_estimation,
        "scale_v_pred_loss_like_noise_pred": objective.scale_v_pred_loss_like_noise_pred or None,
        "loss_type": objective.loss.type,
        "noise_offset": noise.offset or None,
        "noise_offset_random_strength": noise.offset_random_strength or None,
        "adaptive_noise_scale": noise.adaptive_scale,
        "multires_noise_iterations": noise.multires_iterations or None,
        "multires_noise_discount": noise.multires_discount if noise.multires_iterations else None,
        "ip_noise_gamma": noise.perturbation or None,
        "ip_noise_gamma_random_strength": noise.perturbation_random_strength or None,
        "zero_terminal_snr": noise.zero_terminal_snr,
        "scale_weight_norms": None if adapter is None else adapter.scale_weight_norms,
        "network_dropout": None if adapter is None else adapter.dropout or None,
        "network_args": json.dumps(network, sort_keys=True) if network else None,
        "prior_loss_weight": data.prior_weight if data.class_prompt is not None else None,
    }
    return {f"ss_{key}": str(value) for key, value in metadata.items() if value is not None}


def _dataset_metadata(data: DataSettings, run: Path, global_batch: int) -> dict[str, str]:
    """What kohya's tools read of the pictures: how many of each folder, and how often each tag comes."""
    store = open_store(data, run)
    if not has_own_store(data):
        dirs = {
            last_name(part.path): {"n_repeats": 1, "img_count": part.num_rows} for part in parts_of(store)
        }
        return {"ss_num_train_images": str(store.num_rows), "ss_dataset_dirs": json.dumps(dirs)}
    counts: Counter[str] = Counter()
    repeats: dict[str, int] = {}
    tags: dict[str, Counter[str]] = {}
    for folder, times, caption in _rows(data, store):
        counts[folder] += 1
        repeats[folder] = times
        tags.setdefault(folder, Counter()).update(_tags(caption))
    dirs = {name: {"n_repeats": repeats[name], "img_count": count} for name, count in counts.items()}
    total = sum(repeats[name] * count for name, count in counts.items())
    frequent = {name: dict(counter.most_common(TAGS_KEPT)) for name, counter in tags.items()}
    return {
        "ss_num_train_images": str(total),
        "ss_num_batches_per_epoch": str(-(-total // global_batch)),
        "ss_dataset_dirs": json.dumps(dirs),
        "ss_tag_frequency": json.dumps(frequent, ensure_ascii=False),
    }


def _rows(data: DataSettings, store: Store) -> Iterable[tuple[str, int, str]]:
    """Of each picture its folder's last name, how often it comes, and its caption."""
    names = ["key", "caption", *([SET] if data.sets else [])]
    rows = store.take(range(store.num_rows), names).to_pylist()
    for row in rows:
        prompt = data.prompts[0] if data.prompts else ""
        if data.sets:
            one = data.sets[row[SET]]
            yield last_name(one.folder), one.repeats, row["caption"] or one.prompt or prompt
        else:
            inner, slash, _ = row["key"].partition("/")
            folder = inner if slash else last_name(data.folder or data.instance or "")
            times = times_of(row["key"]) if data.repeats == "folders" else 1
            yield folder, times, prompt if data.instance else row["caption"] or prompt


def _tags(caption: str) -> list[str]:
    return [tag for part in caption.split(",") if (tag := part.strip())]


# ---- the card


@dataclass(frozen=True)
class TrainingData:
    """Which pictures a run was trained on, by source. Names alone, never where something lies."""

    sources: list[SourceCount]
    changed: bool = False
    """Whether a version that was trained on is gone, and its store was counted as it is now."""
    held_out: bool = False

    @classmethod
    def of(cls, data: DataSettings, run: Path, noted: Mapping[str, Any]) -> TrainingData:
        """Count the pictures in a run's stores, in the versions that it `noted` (`version`, `rows`).

        A store that is no longer there counts as one unknown source of as many pictures as were noted.
        """
        paths = [one.store for one in data.stores] or [store_path(data, run)]
        version = noted.get("version")
        versions = version if isinstance(version, list) else [version] * len(paths)
        rows = noted.get("rows") if len(paths) == 1 and data.filter is None else None
        found, changed = list[SourceCount](), False
        for path, then in zip(paths, versions, strict=True):
            try:
                sources, as_then = _counted(path, then, data.filter)
                found += sources
                changed |= not as_then
            except (StoreError, OSError):
                name = _folders_of(data) if has_own_store(data) else last_name(path)
                found.append(SourceCount(name, "not at hand when this was written", rows, UNKNOWN))
        other = class_store_path(run)  # pictures of the class, or those that were not preferred
        with suppress(StoreError, OSError):
            found += _counted(str(other), None, None)[0]
        return cls(found, changed, data.holdout > 0)

    @property
    def licence(self) -> str | None:
        """The licence of all pictures; None where there are several, or one is not known."""
        return common_licence(self.sources)

    def lines(self) -> list[str]:
        """The card's section."""
        notes = ["Pictures held out of training are counted too."] if self.held_out else []
        notes += (
            ["A version that was trained on is gone; its store is counted as it was when this was written."]
            if self.changed
            else []
        )
        return ["## Training data", *source_tables(self.sources), *(["", *notes] if notes else [])]


def _counted(path: str, version: int | None, filter: str | None) -> tuple[list[SourceCount], bool]:
    """A store's sources at a version, with the licences of the pictures' own or else those that are known now
    of the source, and whether that version is there; else the newest is counted.
    """
    newest, as_then = Store.open(path), True
    store, licences = newest, newest.licences()
    if version is not None and version != newest.version:
        try:
            store = Store.open(path, version=version)
        except StoreError:
            as_then = False
    counts: Counter[tuple[str, str]] = Counter()
    counts.update({(source, ""): count for source, count in store.sources(filter).items()})
    for (source, licence), count in store.own_licences(filter).items():
        counts[source, ""] -= count
        counts[source, licence] += count
    rows = [
        SourceCount(
            last_name(path), without_path(source), count, without_path(own or licences.get(source, UNKNOWN))
        )
        for (source, own), count in sorted(counts.items())
        if count
    ]
    return rows, as_then


def _folders_of(data: DataSettings) -> str:
    folders = [one.folder for one in data.sets] or [data.folder or data.instance or ""]
    return ", ".join(map(last_name, folders))


# ---- the hub


def push(
    run: str | Path,
    repo: str,
    *,
    license: str | None = None,
    private: bool = False,
    hub: str | None = None,
) -> str:
    """Put what a finished run made on a hub, with a card and its last samples; returns its address.

    `repo` is OWNER/NAME; `hub` is another hub's address, null the usual one. The token is the one that the
    hub's own client finds. InputError for a run that has made nothing yet or a name that is none;
    DarkroomError, without the token in it, where the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from darkroom.recipe.recipe import recipe_of

    opened = Run.open(run)
    recipe = recipe_of(opened.recipe, opened.path)
    if repo.count("/") != 1:
        raise InputError(f"the repository '{repo}'", allowed="OWNER/NAME")
    with TemporaryDirectory(prefix="darkroom-push-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        name = repo.rpartition("/")[2]
        _stage(opened, folder, name)
        Exporter(recipe, opened.path).write_card(folder, name, hub=True, license=license)
        api = HfApi(endpoint=hub)
        try:
            if not api.repo_exists(repo):
                api.create_repo(repo, private=private)
            api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload from darkroom")
        except HFValidationError as error:
            raise InputError(f"the repository '{repo}': {without_token(str(error))}") from error
        except (HfHubHTTPError, OSError) as error:
            message = " ".join(without_token(str(error)).split())
            raise DarkroomError(f"the hub did not take '{repo}': {message}") from error
    return f"{api.endpoint.rstrip('/')}/{repo}"


def _stage(run: Run, folder: Path, name: str) -> None:
    """Lay out what goes to the hub."""
    adapter, model = run.path / "adapter.safetensors", run.path / "model"
    if adapter.is_file():
        shutil.copy(adapter, folder / f"{name}.safetensors")
    elif model.is_dir():
        shutil.copytree(model, folder, dirs_exist_ok=True)
    else:
        raise InputError(f"'{run.path}' has made nothing yet", mend="let it end, or export it first")
    if grids := sorted(run.samples.glob("step-*.png")):
        shutil.copy(grids[-1], folder / "samples.png")


def _base_named(ref: str, known: Mapping[str, str | None]) -> str:
    """What a card says of the base: a hub id as it is, else its family where that is known, or a name."""
    return ref if is_hub_id(ref) and not Path(ref).exists() else (known.get("family") or last_name(ref))


ADAPTER = "adapter.safetensors"
Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Exporter:
    """Makes the results of a recipe's run of trained values: adapters, words, models."""

    recipe: Recipe
    run: Path

    def write_results(self, model: Model, values: Values, measured: Mapping[str, float]) -> None:
        """Leave what a task makes in the run: `adapter.safetensors`; `learned_embeds.safetensors` and a
        model; or a model. `model` is the one that was trained, and is used up.
        """
        recipe, run = self.recipe, self.run
        if recipe.adapts:
            made = self.adapter(values, run.resolve().name)
            write_adapter_file(made, run / ADAPTER, base=described_base(model))
        elif recipe.model.word is not None:
            write_words(values, recipe.model.word, run / WORDS)
            values = {name: value.detach().clone() for name, value in values.items()}
            for module in model.modules.values():
                forget(module)  # two whole models at once would need more memory than the steps did
            self.write_whole_model(values, measured, run / "model")
        else:
            _note_guidance(recipe.sample, model)
            self._write_folder(model, values, measured, run / "model")

    def adapter(self, values: Values, name: str) -> Adapter:
        """The adapter that these values are, with its base, trigger and how it was trained in the header; and
        of which pictures, where the run is still there. InputError where the recipe trains no adapter.
        """
        from darkroom.models.adapters.files import about

        recipe = self.recipe
        if recipe.adapter is None or not recipe.adapts:
            raise InputError(
                f"an adapter of a run of the task {recipe.task}", mend="give a folder's name for its model"
            )
        side, data = recipe.data.resolution, self._training_data()
        metadata = about(
            title=name,
            trigger=recipe.trigger,
            base_model=_base_name(recipe.model.base),
            license=data.licence,
            resolution=f"{side}x{side}",
            **_training_metadata(recipe.train, recipe.optim, recipe.data, recipe.objective, recipe.adapter),
        )
        with suppress(StoreError):  # pictures that are gone have no entry
            metadata |= _dataset_metadata(recipe.data, self.run, recipe.train.global_batch)
        sources = data.sources
        if has_own_store(recipe.data):  # of a folder at home, whose name is nobody's business
            sources = [one._replace(source="the run's own folder") for one in sources]
        metadata |= sources_in_header(sources)
        start = None
        if recipe.adapter.changes_base:
            start = read_noted_start(self.run)
            if start is None:
                raise CheckpointError(
                    f"the run has lost {START}, without which its adapter cannot be written"
                )
        return adapter_of(name, values, recipe.adapter, metadata, start)

    def write_whole_model(self, values: Values, measured: Mapping[str, float], target: Path) -> None:
        """Write the run's model, made anew from its base: adapter merged, word taught, or weights put in."""
        recipe, side = self.recipe, self.recipe.data.resolution
        if recipe.task == "extractor":
            store = Store.open(str(recipe.data.store))
            rows, _ = select_rows(store, recipe.data)
            model: Model = build_extractor(recipe.model, recipe.objective.extractor, side, store, rows)
        else:
            model = build_model(recipe.task, recipe.model, recipe.objective, side, no_captions, self.run)
        if recipe.adapts:
            from darkroom.models.adapters.read import merge

            merge(model, self.adapter(values, target.name))
            values = {}
        elif recipe.model.word is not None:
            add_word(model, recipe.model.word)
        _note_guidance(recipe.sample, model)
        self._write_folder(model, values, measured, target)

    def _write_folder(
        self, model: Model, values: Values, measured: Mapping[str, float], target: Path
    ) -> None:
        """Write a model's folder with its card. The one at the end of a run has the run's name."""
        _write_model(model, values, measured, target)
        name = (self.run if target == Run(self.run).model else target).resolve().name
        self.write_card(target, name)

    def write_card(self, folder: Path, name: str, *, hub: bool = False, license: str | None = None) -> None:
        """Write the card of a folder with what the run made. Without a hub the licence is that of the
        pictures, where they all have the same.
        """
        noted, data = self._noted(), self._training_data()
        if not hub:
            license = (data.licence or "other").lower()
        base = _base_named(self.recipe.model.base, noted.get("base") or {})
        files = {path.name for path in folder.iterdir()}
        lines = [*self._head(base, license, files), *self._body(name, base, files), "", *data.lines()]
        write_atomically(folder / CARD, "\n".join(lines) + "\n")

    def _noted(self) -> Mapping[str, Any]:
        """What the run noted of its surroundings; nothing where it is gone."""
        return Run(self.run).environment if (self.run / ENVIRONMENT).is_file() else {}

    def _training_data(self) -> TrainingData:
        return TrainingData.of(self.recipe.data, self.run, self._noted().get("store") or {})

    def _head(self, base: str, license: str | None, files: Collection[str]) -> list[str]:
        """A card's YAML, for the hub's search."""
        trigger = self.recipe.trigger
        head: dict[str, Any] = {"library_name": "diffusers", "pipeline_tag": "text-to-image"}
        head |= {"license": license} if license else {}
        head |= {"base_model": base} if base.count("/") == 1 else {}
        head["tags"] = ["stable-diffusion", "text-to-image", *(["lora"] if self.recipe.adapter else [])]
        head |= {"instance_prompt": trigger} if trigger else {}
        if "samples.png" in files:
            head["widget"] = [{"text": trigger or "", "output": {"url": "samples.png"}}]
        return card_head(head)

    def _body(self, name: str, base: str, files: Collection[str]) -> list[str]:
        """How it was trained, and how to use it; `files` are those that the card is given away with."""
        recipe = self.recipe
        metadata = _training_metadata(
            recipe.train, recipe.optim, recipe.data, recipe.objective, recipe.adapter
        )
        trained = f"Trained on {base} with darkroom {__version__} (`task: {recipe.task}`)."
        lines = [f"# {name}", trained, ""]
        lines += [f"Trigger: `{recipe.trigger}`", ""] if recipe.trigger else []
        lines += ["![samples](samples.png)", ""] if "samples.png" in files else []
        lines += ["| setting | value |", "| --- | --- |"]
        lines += [f"| {key} | {metadata[f'ss_{key}']} |" for key in SETTINGS if f"ss_{key}" in metadata]
        if recipe.adapter is not None:
            lines += [f"| network | {recipe.adapter.kind}, rank {recipe.adapter.rank} |"]
        if f"{name}.safetensors" in files:
            lines += ["", "```python", f'pipeline.load_lora_weights("{name}.safetensors")', "```"]
        return lines


def described_base(model: Model) -> dict[str, str | None]:
    """What an adapter's file says of the model it was trained on."""
    return {"family": models.base_family(model), "prediction": model.prediction}


def write_adapter_file(
    made: Adapter, file: Path, *, base: Mapping[str, str | None], kohya: bool = False
) -> Path:
    """Write a trained adapter; `base` is what `described_base` said of the model it was trained on."""
    from darkroom.models.adapters.read import write_adapter

    kohya = kohya or made.kind not in ("lora", "dora")  # diffusers has no keys for the others
    return write_adapter(made, file, kohya=kohya, family=base["family"], prediction=base.get("prediction"))


def _base_name(ref: str) -> str:
    """What an adapter's file says of where its base was: a hub id, or a name without its path."""
    if ref.count("/") == 1 and not ref.startswith((".", "/", "~")) and not Path(ref).exists():
        return ref
    return models.Model("custom", path=ref).name


def _note_guidance(settings: SampleSettings, model: Model) -> None:
    """What the run's samples were drawn with is what its model is drawn with."""
    if settings.guidance is not None:
        model.guidance = settings.guidance


def _write_model(model: Model, values: Values, measured: Mapping[str, float], path: Path) -> None:
    """Save a whole model in float32 with these trained weights, named `<part>.<name>`; it holds them then.

    `measured` goes into the parts' configurations, named likewise: `vae.scaling_factor`.
    """
    for part, module in model.modules.items():
        cast(module.eval(), torch.float32)
        start = f"{part}."
        state = {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
        unknown = module.load_state_dict(state, strict=False).unexpected_keys
        if unknown:
            raise CheckpointError(f"the checkpoint has weights that the {part} lacks: {unknown[0]}, ...")
    settle_words(model)
    for name, value in measured.items():
        part, key = name.split(".", 1)
        described: Any = model.modules[part]
        described.register_to_config(**{key: value})
    if isinstance(model, ExtractorModel | TinyVaeModel):
        model.write(path)
    else:
        models.save(model, path)


def forget(module: torch.nn.Module) -> None:
    """Give back the memory of a module's weights; it cannot be used any more."""
    for inner in module.modules():
        for name in [name for name, _ in inner.named_parameters(recurse=False)]:
            inner.register_parameter(name, None)
