"""Textual inversion (Gal et al. 2022): a new word whose vectors alone are trained, and the file they become.

Shapes: B rows, L tokens, D width of a text encoder, n vectors of the new word.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darkroom.errors import RecipeError
from darkroom.hardware.system import atomic_replace
from darkroom.models.embeddings import pool_at_end
from darkroom.models.model import write_tensors
from darkroom.recipe.sections import WordSettings

if TYPE_CHECKING:
    from darkroom.models.model import Model


FILE = "learned_embeds.safetensors"
SDXL_KEYS = ("clip_l", "clip_g")


class ExtendedEmbedding(nn.Module):
    """An encoder's table of words with a few trained rows behind it; the old rows are left as they are."""

    def __init__(self, table: nn.Embedding, rows_nD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(table.weight.detach(), requires_grad=False)
        self.added = nn.Parameter(rows_nD)

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Token ids [B, L] to their vectors [B, L, D]."""
        known = len(self.weight)
        old_BLD = F.embedding(ids_BL.clamp(max=known - 1), self.weight)
        new_BLD = F.embedding((ids_BL - known).clamp(min=0), self.added)
        return torch.where((ids_BL >= known)[..., None], new_BLD, old_BLD)


def add_word(model: Model, word: WordSettings) -> dict[str, nn.Module]:
    """Teach tokenizers and text encoders the word; returns the encoders by part, the new rows trainable.

    Every vector starts as the initial word's. RecipeError where the word exists, or the initial word is
    not one token.
    """
    parts = {name: m for name, m in model.modules.items() if name.startswith("text_encoder")}
    for tokenizer, encoder in zip(model.tokenizers, parts.values(), strict=True):
        _add(tokenizer, encoder, word)
    return parts


def _add(tokenizer: Any, encoder: Any, word: WordSettings) -> None:
    start = tokenizer(word.initial, add_special_tokens=False).input_ids
    if len(start) != 1:
        raise RecipeError(
            "model.word.initial",
            f"'{word.initial}' is {len(start)} tokens of this model's tokenizer",
            allowed="a word that is one token",
            mend="take a commoner one",
        )
    table = encoder.get_input_embeddings()
    known = tokenizer.get_vocab()
    if any(token in known for token in word.tokens) or tokenizer.add_tokens(word.tokens) != word.vectors:
        raise RecipeError(
            "model.word.token", f"the tokenizer knows '{word.token}' already", mend="write it otherwise"
        )
    first = tokenizer.convert_tokens_to_ids(word.token)
    if first != len(table.weight):
        raise RecipeError(
            "model.word",
            f"the text encoder has {len(table.weight)} words and its tokenizer {first}",
            mend="this model cannot be taught a word",
        )
    rows_nD = table.weight.detach()[start[0]].repeat(word.vectors, 1)
    encoder.requires_grad_(False)
    encoder.set_input_embeddings(ExtendedEmbedding(table, rows_nD))
    pool_at_end(encoder, tokenizer)


def settle_words(model: Model) -> None:
    """Make the new rows ordinary rows of the encoders' tables, as files hold them."""
    for encoder in model.text_encoders:
        described: Any = encoder
        words = described.get_input_embeddings()
        if isinstance(words, ExtendedEmbedding):
            table = torch.cat([words.weight, words.added.to(words.weight)]).detach()
            rows, width = table.shape
            described.set_input_embeddings(nn.Embedding(rows, width, _weight=table))
            described.config.vocab_size = len(table)


def write_words(values: Mapping[str, Tensor], word: WordSettings, path: Path) -> Path:
    """Save the trained rows as diffusers' `load_textual_inversion` reads them.

    Of one encoder {token: [n, D]}; of SDXL's two `clip_l` and `clip_g`, as its scripts write them.
    """
    rows = [
        value.detach().to("cpu", torch.float32) for name, value in values.items() if name.endswith(".added")
    ]
    names = [word.token] if len(rows) == 1 else list(SDXL_KEYS)
    tensors = {name: value.contiguous() for name, value in zip(names, rows, strict=True)}
    temporary = path.with_name(f".{path.name}")
    write_tensors(temporary, tensors, {"format": "pt", "token": word.token, "initial": word.initial})
    return atomic_replace(temporary, path)
