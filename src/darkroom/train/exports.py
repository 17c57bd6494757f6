"""From trained weights to files: a model folder that diffusers opens, an adapter, a learned word."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from darkroom import models
from darkroom.data.store import Store
from darkroom.errors import CheckpointError, InputError, StoreError
from darkroom.models.model import Model
from darkroom.train.data.feed import select_rows
from darkroom.train.distributed.weights import cast
from darkroom.train.model import build_model, no_captions
from darkroom.train.sharing import dataset_metadata, training_metadata
from darkroom.train.tasks.extractor import ExtractorModel, build_extractor
from darkroom.train.tasks.lora import START, adapter_of, read_noted_start
from darkroom.train.tasks.textual_inversion import FILE as WORDS
from darkroom.train.tasks.textual_inversion import add_word, settle_words, write_words
from darkroom.train.tasks.tiny_vae import TinyVaeModel

if TYPE_CHECKING:
    from darkroom.models.adapters.adapter import Adapter
    from darkroom.recipe.sections import Recipe, SampleSettings


ADAPTER = "adapter.safetensors"
Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Exporter:
    """Makes the results of a recipe's run of trained values: adapters, words, models."""

    recipe: Recipe
    run: Path

    def write_results(self, model: Model, values: Values, measured: Mapping[str, float]) -> None:
        """Leave what a task makes in the run: `adapter.safetensors`; `learned_embeds.safetensors` and a
        model; or a model. `model` is the one that was trained.
        """
        recipe, run = self.recipe, self.run
        if recipe.adapts:
            made = self.adapter(values, run.resolve().name)
            write_adapter_file(made, run / ADAPTER, base=described_base(model))
        elif recipe.model.word is not None:
            write_words(values, recipe.model.word, run / WORDS)
            self.write_whole_model(values, measured, run / "model")
        else:
            _note_guidance(recipe.sample, model)
            _write_model(model, values, measured, run / "model")

    def adapter(self, values: Values, name: str) -> Adapter:
        """The adapter that these values are, with its base, trigger and how it was trained in the header; and
        of which pictures, where the run is still there. InputError where the recipe trains no adapter.
        """
        from darkroom.models.adapters.metadata import about

        recipe = self.recipe
        if recipe.adapter is None or not recipe.adapts:
            raise InputError(
                f"an adapter of a run of the task {recipe.task}", mend="give a folder's name for its model"
            )
        side = recipe.data.resolution
        metadata = about(
            title=name,
            trigger=recipe.trigger,
            base_model=_base_name(recipe.model.base),
            resolution=f"{side}x{side}",
            **training_metadata(recipe.train, recipe.optim, recipe.data, recipe.objective, recipe.adapter),
        )
        with suppress(StoreError):  # pictures that are gone have no entry
            metadata |= dataset_metadata(recipe.data, self.run, recipe.train.global_batch)
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
        _write_model(model, values, measured, target)


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
