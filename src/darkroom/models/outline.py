"""Models without weights: their shapes on the meta device, from the settings of a family, folder or file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from darkroom.errors import ModelError
from darkroom.models.checked import (
    check_complete,
    fetch,
    read_json,
    read_scheduler,
    tensor_types,
    weight_files,
)
from darkroom.models.families import FAMILIES, check_fit, create
from darkroom.models.folder import (
    BAD_SETTINGS,
    check_kind,
    denoiser_class,
    denoiser_of,
    load,
    text_class,
    vae_class,
)
from darkroom.models.model import PARTS, Model, numbered
from darkroom.models.quick_open import without_start
from darkroom.models.reference import PUBLISHED, check_reference, is_single_file
from darkroom.models.single_file import load_single_file
from darkroom.models.tokenizer import train_tokenizer


def outlined(
    ref: str,
    parts: tuple[str, ...],
    overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> Model:
    """A family, folder, single file or hub id without weights; its tokenizers know two words.

    Of a published model the settings are known: nothing is asked of the hub.
    """
    ref = ref if Path(ref).is_dir() else PUBLISHED.get(ref, ref)
    if ref in FAMILIES:
        wanted = tuple(part for part in parts if part != "tokenizer")
        model = create(ref, parts=wanted, overrides=dict(overrides or {}), device="meta")
    elif is_single_file(ref):
        wanted = tuple(part for part in parts if part != "tokenizer")
        model = load_single_file(ref, wanted, with_weights=False)
    else:
        model = _from_configs(_folder(ref, revision), parts)
    # Any tokenizer gives as many tokens a caption; which they are does not matter.
    lengths = [config.max_position_embeddings for config in text_configs(model)]
    words = ["a picture"]
    model.tokenizers = [train_tokenizer(words, vocab_size=514, model_max_length=length) for length in lengths]
    return model


WEIGHTY = ("unet", "vae", "text_encoder")


def looked_at(ref: str, *, variant: str | None = None, revision: str | None = None) -> Model:
    """A model as `load` would give it whole, without its weights: its own tokenizers, and files that have
    every tensor. ModelError where it could not be loaded."""
    model = load(ref, parts=("tokenizer",), variant=variant, revision=revision)
    place = Path(model.path or "")
    try:
        shapes = outlined(ref, WEIGHTY, revision=revision)
    except BAD_SETTINGS as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"'{ref}' could not be opened: {reason}") from error
    missing = [
        part for part in WEIGHTY if not getattr(shapes, f"{part}s" if part == "text_encoder" else part)
    ]
    if missing:
        raise ModelError(f"'{ref}' has no {' and no '.join(missing)}")
    model.unet, model.vae, model.text_encoders = shapes.unet, shapes.vae, shapes.text_encoders
    folder = place if place.is_dir() else None
    if folder is not None and ref not in FAMILIES:
        for name, module in model.modules.items():
            _check_weights(folder / (denoiser_of(folder) if name == "unet" else name), module, variant)
    check_fit(model, f"'{ref}'")
    return model


def _check_weights(folder: Path, module: Any, variant: str | None) -> None:
    """ModelError unless a part's files have all its tensors. Reads their headers alone."""
    there = tensor_types(weight_files(folder, variant))
    missing = [
        name for name in module.state_dict() if name not in there and not name.endswith("position_ids")
    ]
    check_complete(f"'{folder}'", missing=missing)


def text_configs(model: Model) -> list[Any]:
    """The text encoders' settings."""
    encoders: list[Any] = list(model.text_encoders)
    return [encoder.config for encoder in encoders]


def _folder(ref: str, revision: str | None) -> Path:
    if (path := Path(ref)).is_dir():
        return path
    check_reference(ref)
    return fetch(
        ref,
        ["*.json"],
        revision=revision,
        whole=lambda folder: any(folder.glob("*/config.json")),
        mend=f"give a folder, or a family's name: {', '.join(FAMILIES)}",
    )


def _from_configs(path: Path, parts: tuple[str, ...]) -> Model:
    file = path / "scheduler" / "scheduler_config.json"
    model = Model(
        family="custom",
        path=str(path),
        scheduler=read_scheduler(file) if file.is_file() else {},
    )
    with without_start("meta"):
        if "unet" in parts and (folder := path / denoiser_of(path)).is_dir():
            model.unet = _built(denoiser_class(folder), folder)
        if "vae" in parts and (path / "vae").is_dir():
            model.vae = _built(vae_class(path / "vae"), path / "vae")
        for i in range(2):
            if "text_encoder" in parts and (folder := path / numbered("text_encoder", i)).is_dir():
                model.text_encoders.append(_built(text_class(folder), folder))
    if not model.modules:
        raise ModelError(f"'{path}' is no model folder", mend=f"it should hold {', '.join(PARTS)}")
    for module in model.modules.values():
        module.eval()
    return model


def _built(cls: Any, folder: Path) -> Any:
    """A part by its configuration; ModelError for one that nothing can be built by."""
    from huggingface_hub.errors import StrictDataclassError

    from darkroom.models.parts import CLIPTextConfig

    of_transformers = cls.__module__.startswith("transformers")
    check_kind(cls, folder, of_transformers)
    config = read_json(folder / "config.json")
    try:
        return cls(CLIPTextConfig(**config)) if of_transformers else cls.from_config(config)
    except (StrictDataclassError, *BAD_SETTINGS) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"'{folder}' could not be opened: {reason}") from error
