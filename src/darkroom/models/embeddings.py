"""Textual inversions of others: words that stand for learned vectors, by the names of their files.

Read are diffusers' files ({token: vectors}), A1111's and kohya's (`emb_params`), and those for SDXL's two
text encoders (`clip_l`, `clip_g`), all as safetensors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from darkroom.errors import InputError, ModelError
from darkroom.models.checked import FLOATS, tensor_types
from darkroom.models.model import Model

SUFFIX = ".safetensors"
PICKLED = (".pt", ".bin", ".ckpt")
A1111_KEY, SDXL_KEYS = "emb_params", ("clip_l", "clip_g")
MAX_VECTORS = 75
"""What fits in one part of a prompt."""


@dataclass(frozen=True, eq=False, repr=False)
class Embedding:
    """A word that was learned: `vectors` [N, D] for each text encoder that it is for."""

    name: str
    vectors: tuple[torch.Tensor, ...]
    sha256: str
    token: str = ""
    """What the file itself calls it, such as `<cat-toy>`; empty where it says nothing."""

    @property
    def names(self) -> tuple[str, ...]:
        """What prompts may call it."""
        return tuple(dict.fromkeys(filter(None, (self.name, self.token))))

    def fit(self, model: Model) -> None:
        """ModelError unless it is for this model's text encoders."""
        encoders: list[Any] = model.text_encoders
        takes = [encoder.config.hidden_size for encoder in encoders]
        has = [vectors.shape[1] for vectors in self.vectors]
        if has != takes:
            raise ModelError(
                f"embedding '{self.name}' has vectors of width {_joined(has)}",
                allowed=f"{_joined(takes)} for {model.family}",
                mend="it was learned for another family",
            )


def read_embedding(file: str | Path) -> Embedding:
    """One file. ModelError for what is no textual inversion, or is pickled."""
    file = Path(file)
    if file.suffix in PICKLED:
        raise ModelError(
            f"'{file}' is pickled", mend="pickled files are never opened: convert it to safetensors"
        )
    from safetensors.torch import load_file

    types = tensor_types([file])
    if SDXL_KEYS[0] in types and SDXL_KEYS[1] in types:
        names, token = list(SDXL_KEYS), ""
    elif A1111_KEY in types:
        names, token = [A1111_KEY], ""
    elif len(types) == 1:
        names = list(types)
        token = names[0]
    else:
        allowed = f"one tensor, {A1111_KEY}, or {' and '.join(SDXL_KEYS)}"
        raise ModelError(f"'{file}' holds {len(types)} tensors and is no textual inversion", allowed=allowed)
    if whole := [name for name in names if types[name] not in FLOATS]:
        raise ModelError(f"'{file}' holds whole numbers for '{whole[0]}'", allowed="floats")
    tensors = load_file(str(file))
    # A copy: a file that stays mapped could not be replaced on Windows, and written over ends the process.
    vectors = tuple(tensors[name].to(torch.float32, copy=True) for name in names)
    vectors = tuple(one[None] if one.dim() == 1 else one for one in vectors)
    count = len(vectors[0])
    if any(one.dim() != 2 or len(one) != count for one in vectors) or not 1 <= count <= MAX_VECTORS:
        raise ModelError(
            f"'{file}' has vectors of shape {_joined(list(one.shape) for one in vectors)}",
            allowed=f"[N, width] with N of 1 to {MAX_VECTORS}",
        )
    if not all(bool(one.isfinite().all()) for one in vectors):
        raise ModelError(f"'{file}' holds numbers that are not finite")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Embedding(file.stem, vectors, digest, token)


def find_embeddings(folder: str | Path, texts: Iterable[str] | None = None) -> list[Embedding]:
    """The textual inversions of a folder, or of them those that texts name by file. InputError for no folder.

    A file that cannot be read is refused where a text names it, else passed over.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"--embeddings '{folder}' is no folder")
    text_list = None if texts is None else list(texts)
    found = []
    for file in sorted(folder.iterdir()):
        if not file.is_file() or file.suffix not in (SUFFIX, *PICKLED):
            continue
        named = text_list is not None and any(_pattern([file.stem]).search(text) for text in text_list)
        try:
            one = read_embedding(file)
        except ModelError:
            if named:
                raise
            continue
        if text_list is None or any(_pattern(one.names).search(text) for text in text_list):
            found.append(one)
    return found


def add_fitting(model: Model, folder: str | Path) -> tuple[list[Embedding], list[Embedding]]:
    """Teach a model all the textual inversions of a folder that are for it; gives those, and the others."""
    fitting: list[Embedding] = []
    others: list[Embedding] = []
    for one in find_embeddings(folder):
        try:
            one.fit(model)
        except ModelError:
            others.append(one)
        else:
            fitting.append(one)
    add_embeddings(model, fitting)
    return fitting, others


def add_embeddings(model: Model, embeddings: Sequence[Embedding]) -> None:
    """Teach a model's tokenizers and text encoders the words, in place: prompts may use them from now on.

    A name counts where it stands as a word, in capitals or not. ModelError where one does not fit, or two
    have the same name.
    """
    names = [name.lower() for one in embeddings for name in one.names]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ModelError(f"two embeddings are called '{min(twice)}'", mend="rename a file")
    for one in embeddings:
        one.fit(model)
    if not embeddings:
        return
    for i, (tokenizer, encoder) in enumerate(zip(model.tokenizers, model.text_encoders, strict=True)):
        _add(tokenizer, encoder, [(one, one.vectors[i]) for one in embeddings])


def _add(tokenizer: Any, encoder: Any, embeddings: Sequence[tuple[Embedding, torch.Tensor]]) -> None:
    table = encoder.get_input_embeddings()
    known = getattr(tokenizer, "darkroom_words", {})
    rows, words = [table.weight.detach()], dict(known)
    for one, vectors in embeddings:
        tokens = [f"<embedding:{one.name}>" + (f"_{i}" if i else "") for i in range(len(vectors))]
        first = len(tokenizer)
        if tokenizer.add_tokens(tokens) != len(tokens) or first != sum(map(len, rows)):
            raise ModelError(
                f"embedding '{one.name}' cannot be added: the tokenizer has {first} words, the text encoder "
                f"{sum(map(len, rows))}",
                mend="the model's tokenizer and text encoder do not go together",
            )
        rows.append(vectors.to(table.weight))
        words |= dict.fromkeys((name.lower() for name in one.names), tokens[0])
    joined = torch.cat(rows)
    count, width = joined.shape
    encoder.set_input_embeddings(nn.Embedding(count, width, _weight=joined).requires_grad_(False))
    encoder.config.vocab_size = len(joined)
    pool_at_end(encoder, tokenizer)
    tokenizer.darkroom_words = words


def pool_at_end(encoder: Any, tokenizer: Any) -> None:
    """Let an encoder pool at the end token, also where a new word has a higher id.

    By published configurations, whose eos_token_id is 2, transformers takes the state of the highest id: with
    a new word in the prompt the state of that word, which knows nothing of what follows.
    """
    for module in encoder.modules():
        if getattr(module, "eos_token_id", None) == 2:
            module.eos_token_id = tokenizer.eos_token_id
    if encoder.config.eos_token_id == 2:
        encoder.config.eos_token_id = tokenizer.eos_token_id


def with_words(tokenizer: Any, text: str) -> str:
    """A text with the names of embeddings replaced by the tokens that stand for their first vectors."""
    words = getattr(tokenizer, "darkroom_words", None)
    if not words:
        return text
    return _pattern(words).sub(lambda found: f" {words[found[0].lower()]} ", text)


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)


def _joined(values: Iterable[object]) -> str:
    return " and ".join(map(str, values))
