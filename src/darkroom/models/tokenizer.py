"""CLIP's tokenizer: found where the user has it, or trained on captions for a model made from nothing."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from darkroom.errors import InputError, ModelError, is_system_failure
from darkroom.models.checked import check_tokenizer, fetch

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

START, END = "<|startoftext|>", "<|endoftext|>"
HUB_ID = "openai/clip-vit-large-patch14"
HUB_FILES = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
ENVIRONMENT = "DARKROOM_CLIP_TOKENIZER"
NUM_BYTES, MAX_LENGTH = 256, 77
LOG = logging.getLogger("darkroom")


def train_tokenizer(
    captions: Iterable[str], *, vocab_size: int = 1024, model_max_length: int = MAX_LENGTH
) -> CLIPTokenizer:
    """A tokenizer of CLIP's kind (lower-cased byte-level BPE, `</w>` at a word's end) learned from captions.

    The vocabulary starts with all 256 bytes, so any caption can be written with it; it ends with CLIP's two
    special tokens. Raises InputError where `vocab_size` is too small for them.
    """
    from tokenizers import pre_tokenizers, trainers

    from darkroom.models.parts import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = alphabet + [letter + "</w>" for letter in alphabet]
    if vocab_size < len(letters) + 2:
        raise InputError(f"a vocabulary of {vocab_size} tokens", allowed=f"at least {len(letters) + 2}")
    blank = CLIPTokenizer(vocab={START: 0, END: 1}, merges=[])
    backend = blank.backend_tokenizer
    # Letters at a word's end are given as special tokens, so that they are numbered here: the trainer would
    # number them in the order of a hash table, which differs from process to process, and by these numbers it
    # decides between pairs that are equally frequent. Only its merges are kept.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        special_tokens=letters,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    backend.train_from_iterator(captions, trainer)
    learned = json.loads(backend.to_str())["model"]
    merged = ["".join(pair) for pair in learned["merges"]]
    tokens = dict.fromkeys([*letters, *merged, START, END])
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(pair) for pair in learned["merges"]],
        model_max_length=model_max_length,
    )


def find_tokenizer(where: CLIPTokenizer | str | Path | None = None) -> CLIPTokenizer:
    """CLIP's own tokenizer: as given, a folder, the folder in $DARKROOM_CLIP_TOKENIZER, or from the hub."""
    from darkroom.models.parts import CLIPTokenizer

    if isinstance(where, CLIPTokenizer):
        return where
    place = where or os.environ.get(ENVIRONMENT)
    if place is not None and not Path(place).is_dir():
        raise ModelError(
            f"no tokenizer folder at '{place}'", mend="give a folder with vocab.json and merges.txt"
        )
    mend = f"set {ENVIRONMENT} to a folder with vocab.json and merges.txt"
    if place is None:
        place = fetch(HUB_ID, HUB_FILES, whole=lambda at: (at / "vocab.json").is_file(), mend=mend)
    missing = ModelError(f"CLIP's tokenizer could not be loaded from '{place}'", mend=mend)
    try:
        found = read_tokenizer(Path(place))
    except ModelError as error:
        raise ModelError(str(error), mend=missing.mend) from error
    except (OSError, ValueError) as error:
        if is_system_failure(error):
            raise
        raise missing from error
    if len(found) < NUM_BYTES:  # without a network transformers gives one of no words at all
        raise missing
    # A folder of vocabulary and merges alone does not say how long a text may be.
    found.model_max_length = min(found.model_max_length, MAX_LENGTH)
    return found


def read_tokenizer(folder: Path) -> CLIPTokenizer:
    """The tokenizer of a folder; ModelError names the file that is damaged."""
    from darkroom.models.parts import CLIPTokenizer

    check_tokenizer(folder)
    try:
        found = CLIPTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if is_system_failure(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"the tokenizer in '{folder}' could not be opened: {reason}") from error
    if len(found) < NUM_BYTES:  # transformers makes one of no words of what it does not understand
        raise ModelError(
            f"the tokenizer in '{folder}' has {len(found)} words", allowed=f"{NUM_BYTES} or more"
        )
    return found


def tokenizer_or_stand_in() -> CLIPTokenizer:
    """CLIP's own tokenizer, or where it is not at hand one of single letters, with a warning.

    For models of random weights, whose pictures mean nothing whatever they read.
    """
    try:
        return find_tokenizer()
    except ModelError as error:
        LOG.warning("%s; a tokenizer of single letters stands in", error)
        return train_tokenizer([], vocab_size=2 * NUM_BYTES + 2)


def spelled(tokenizer: CLIPTokenizer, texts: Sequence[str]) -> list[str]:
    """Texts with each learned word of several vectors written out: <x> is '<x> <x>_1 <x>_2'.

    As diffusers' pipelines do with words of textual inversion.
    """
    for word, count in _long_words(tokenizer).items():
        whole = " ".join([word, *(f"{word}_{i}" for i in range(1, count))]).replace("\\", r"\\")
        texts = [re.sub(re.escape(word) + r"(?!_\d)", whole, text) for text in texts]
    return list(texts)


def vectors_of_words(tokenizer: CLIPTokenizer) -> dict[int, int]:
    """How many vectors a learned word of several has, by the id of its first."""
    known = tokenizer.added_tokens_encoder
    return {known[word]: count for word, count in _long_words(tokenizer).items()}


def _long_words(tokenizer: CLIPTokenizer) -> dict[str, int]:
    known = tokenizer.added_tokens_encoder
    return {
        word: next(i for i in range(1, len(known) + 1) if f"{word}_{i}" not in known)
        for word in known
        if f"{word}_1" in known
    }


def with_padding(tokenizer: CLIPTokenizer, pad_token: str) -> CLIPTokenizer:
    """The same tokenizer with another padding: SD 2's and SDXL's second pad with '!', which has id 0."""
    from darkroom.models.parts import CLIPTokenizer

    # Built anew: a deep copy decodes wrongly, its decoder being bound to the original.
    learned = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return CLIPTokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        pad_token=pad_token,
        model_max_length=tokenizer.model_max_length,
    )
