"""Tokenizers: CLIP's own from a folder, and one trained on captions."""

from __future__ import annotations

import pytest

from darkroom.errors import InputError
from darkroom.models import find_tokenizer, train_tokenizer

CAPTIONS = ["a red circle on a blue background", "a green square on a red background"] * 4


def test_a_trained_tokenizer_learns_the_words_and_loses_none(tmp_path):
    tokenizer = train_tokenizer(CAPTIONS, vocab_size=600, model_max_length=16)
    assert len(tokenizer) <= 600
    assert tokenizer.tokenize("a red circle") == ["a</w>", "red</w>", "circle</w>"]
    assert tokenizer.decode(tokenizer("zebra é 7").input_ids, skip_special_tokens=True) == "zebra é 7"
    padded = tokenizer("a red circle", padding="max_length").input_ids
    assert len(padded) == 16
    assert (padded[0], padded[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    tokenizer.save_pretrained(tmp_path)
    assert find_tokenizer(tmp_path)("a red zebra").input_ids == tokenizer("a red zebra").input_ids


def test_unseen_words_take_more_tokens_than_seen_ones():
    tokenizer = train_tokenizer(CAPTIONS, vocab_size=600)
    assert len(tokenizer.tokenize("background")) == 1
    assert len(tokenizer.tokenize("kangaroos")) > 3


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(InputError, match="at least 514"):
        train_tokenizer(CAPTIONS, vocab_size=100)


def test_clips_own_tokenizer_gives_its_ids(shared_data, monkeypatch):
    monkeypatch.setenv("DARKROOM_CLIP_TOKENIZER", str(shared_data / "clip_tokenizer"))
    ids = find_tokenizer()("a photo of sks dog").input_ids
    assert ids == [49406, 320, 1125, 539, 48136, 1929, 49407]
