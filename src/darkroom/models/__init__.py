"""Stable Diffusion models: families, folders in the diffusers layout, tokenizers.

A model is a folder (`unet/ vae/ text_encoder/ tokenizer/ scheduler/ model_index.json`), a hub id, or the
name of a family (random weights of that architecture). `create`, `load` and `save` are its three entries;
everything loaded from here is plain diffusers and transformers modules, from safetensors only.

An adapter is a file of what was learned on top of a model: `read_adapter`, `write_adapter`, `merge`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkroom.lazy import importer

if TYPE_CHECKING:
    from darkroom.models.adapters.adapter import Adapter, Factors, Layer
    from darkroom.models.adapters.bank import Bank
    from darkroom.models.adapters.files import about
    from darkroom.models.adapters.read import (
        describe_adapter,
        export_adapter,
        export_merged,
        fit,
        is_adapter,
        merge,
        merge_all,
        read_adapter,
        write_adapter,
    )
    from darkroom.models.control import ControlNet, describe_control, read_control
    from darkroom.models.embeddings import (
        Embedding,
        add_embeddings,
        add_fitting,
        find_embeddings,
        read_embedding,
    )
    from darkroom.models.families import FAMILIES, Family, check_fit, check_text_width, create
    from darkroom.models.folder import (
        base_family,
        describe,
        export_model,
        file_digest,
        has_quick_digest,
        identity,
        load,
        save,
    )
    from darkroom.models.model import (
        NAMES,
        PARTS,
        LatentScaling,
        Model,
        choose_precision,
        device,
        precision,
        slow_bf16,
    )
    from darkroom.models.outline import looked_at, outlined
    from darkroom.models.reference import PUBLISHED, is_model
    from darkroom.models.single_file import save_single_file
    from darkroom.models.tokenizer import find_tokenizer, spelled, train_tokenizer
    from darkroom.models.upscaler import Upscaler, Upscalers, read_upscaler

__all__ = [
    "FAMILIES",
    "NAMES",
    "PARTS",
    "PUBLISHED",
    "Adapter",
    "Bank",
    "ControlNet",
    "Embedding",
    "Factors",
    "Family",
    "LatentScaling",
    "Layer",
    "Model",
    "Upscaler",
    "Upscalers",
    "about",
    "add_embeddings",
    "add_fitting",
    "base_family",
    "check_fit",
    "check_text_width",
    "choose_precision",
    "create",
    "describe",
    "describe_adapter",
    "describe_control",
    "device",
    "export_adapter",
    "export_merged",
    "export_model",
    "file_digest",
    "find_embeddings",
    "find_tokenizer",
    "fit",
    "has_quick_digest",
    "identity",
    "is_adapter",
    "is_model",
    "load",
    "looked_at",
    "merge",
    "merge_all",
    "outlined",
    "precision",
    "read_adapter",
    "read_control",
    "read_embedding",
    "read_upscaler",
    "save",
    "save_single_file",
    "slow_bf16",
    "spelled",
    "train_tokenizer",
    "write_adapter",
]

_MODULES: dict[str, tuple[str, ...]] = {
    "adapters.adapter": ("Adapter", "Factors", "Layer"),
    "adapters.bank": ("Bank",),
    "adapters.files": ("about",),
    "adapters.read": (
        "describe_adapter",
        "export_adapter",
        "export_merged",
        "fit",
        "is_adapter",
        "merge",
        "merge_all",
        "read_adapter",
        "write_adapter",
    ),
    "control": (
        "ControlNet",
        "describe_control",
        "read_control",
    ),
    "embeddings": (
        "Embedding",
        "add_embeddings",
        "add_fitting",
        "find_embeddings",
        "read_embedding",
    ),
    "families": (
        "FAMILIES",
        "Family",
        "check_fit",
        "check_text_width",
        "create",
    ),
    "folder": (
        "base_family",
        "describe",
        "export_model",
        "file_digest",
        "has_quick_digest",
        "identity",
        "load",
        "save",
    ),
    "model": (
        "LatentScaling",
        "Model",
        "NAMES",
        "PARTS",
        "choose_precision",
        "device",
        "precision",
        "slow_bf16",
    ),
    "outline": (
        "looked_at",
        "outlined",
    ),
    "reference": (
        "PUBLISHED",
        "is_model",
    ),
    "single_file": ("save_single_file",),
    "tokenizer": (
        "find_tokenizer",
        "spelled",
        "train_tokenizer",
    ),
    "upscaler": (
        "Upscaler",
        "Upscalers",
        "read_upscaler",
    ),
}
__getattr__ = importer(__name__, _MODULES)
