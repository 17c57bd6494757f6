"""Tokenizers: CLIP's own from a folder, and one trained on captions."""

from __future__ import annotations

import pytest

from darkroom import models
from darkroom.errors import InputError, ModelError
from darkroom.models.tokenizer import find_tokenizer, train_tokenizer

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


def test_a_tokenizer_of_no_words_is_refused_and_a_family_gets_a_stand_in(tmp_path, monkeypatch, caplog):
    (tmp_path / "vocab.json").write_text('{"<|startoftext|>": 0, "<|endoftext|>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    monkeypatch.setenv("DARKROOM_CLIP_TOKENIZER", str(tmp_path))
    with pytest.raises(ModelError, match="DARKROOM_CLIP_TOKENIZER"):
        find_tokenizer()
    with pytest.raises(ModelError):
        models.create("sd2", parts=("tokenizer",))
    stand_in = models.load("sd2", parts=("tokenizer",)).tokenizers[0]
    assert "stands in" in caplog.text
    assert stand_in.pad_token == "!"
    assert stand_in.model_max_length == 77
    assert stand_in("dog").input_ids[-1] == stand_in.eos_token_id


def test_a_tokenizer_that_does_not_say_its_length_has_clips(shared_data, tmp_path, monkeypatch):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((shared_data / "clip_tokenizer" / name).read_bytes())
    monkeypatch.setenv("DARKROOM_CLIP_TOKENIZER", str(tmp_path))
    assert find_tokenizer().model_max_length == 77
