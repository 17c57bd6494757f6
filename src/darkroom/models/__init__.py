"""Stable Diffusion models: families, folders in the diffusers layout, tokenizers.

A model is a folder (`unet/ vae/ text_encoder/ tokenizer/ scheduler/ model_index.json`), a hub id, or the
name of a family (random weights of that architecture). `create`, `load` and `save` are the three doors;
everything loaded from here is plain diffusers and transformers modules, from safetensors only.
"""

from darkroom.models.families import FAMILIES, Family, create
from darkroom.models.folder import describe, identity, load, save
from darkroom.models.model import PARTS, Model
from darkroom.models.place import device, precision
from darkroom.models.tokenizer import find_tokenizer, train_tokenizer

__all__ = [
    "FAMILIES",
    "PARTS",
    "Family",
    "Model",
    "create",
    "describe",
    "device",
    "find_tokenizer",
    "identity",
    "load",
    "precision",
    "save",
    "train_tokenizer",
]
