"""Textual inversions by name in prompts: against diffusers, in every format, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from darkroom import models
from darkroom.errors import InputError, ModelError
from darkroom.models.model import Model
from darkroom.prepare.columns import text_states, tokenize
from darkroom.recipe.sections import WordSettings
from darkroom.sample import encode_prompts
from darkroom.train.tasks.lora import add_word
from sample.conftest import SMALL_TEXT, SMALL_XL


@pytest.fixture
def model() -> Model:
    return models.create("tiny", seed=1)


def vectors(count: int, width: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def states(model: Model, prompt: str, weighting: str = "none") -> torch.Tensor:
    return encode_prompts(model, [prompt], (32, 32), weighting=weighting)[0][0].text_LD


@pytest.mark.parametrize("key", ["<sks>", "emb_params"])
def test_a_word_is_read_as_diffusers_reads_it(model: Model, tmp_path: Path, key: str) -> None:
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    file = tmp_path / "sks-style.safetensors"
    save_file({key: vectors(3)}, str(file))
    theirs = models.create("tiny", seed=1)
    pipe = StableDiffusionPipeline(
        vae=theirs.vae,
        unet=theirs.unet,
        text_encoder=theirs.text_encoders[0],
        tokenizer=theirs.tokenizers[0],
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.load_textual_inversion({"<x>": vectors(3)}, token="<x>")
    expected = pipe.encode_prompt("a photo of <x>", "cpu", 1, False)[0][0]
    models.add_embeddings(model, [models.read_embedding(file)])
    assert torch.equal(states(model, "a photo of sks-style"), expected)
    assert torch.equal(states(model, "a photo of SKS-Style"), expected)
    if key == "<sks>":
        assert torch.equal(states(model, "a photo of <sks>"), expected)
    assert not torch.equal(states(model, "a photo of sks-styles"), expected)
    assert not torch.allclose(states(models.create("tiny", seed=1), "a photo of sks-style"), expected)


def test_other_words_stay_and_weights_hold(model: Model, tmp_path: Path) -> None:
    before = states(model, "a photo of a cat")
    save_file({"emb_params": vectors(2)}, str(tmp_path / "cat.safetensors"))
    save_file({"emb_params": vectors(1, seed=5)}, str(tmp_path / "cat-ears.safetensors"))
    models.add_embeddings(model, models.find_embeddings(tmp_path))
    assert torch.equal(
        states(model, "a photo of a horse"), states(models.create("tiny", seed=1), "a photo of a horse")
    )
    assert not torch.equal(states(model, "a photo of a cat"), before)
    assert not torch.equal(states(model, "cat-ears"), states(model, "cat"))
    assert not torch.equal(states(model, "(cat:1.5) photo", "a1111"), states(model, "cat photo", "a1111"))


def test_only_named_files_are_read(model: Model, tmp_path: Path) -> None:
    save_file({"emb_params": vectors(1)}, str(tmp_path / "one.safetensors"))
    save_file({"emb_params": vectors(1)}, str(tmp_path / "two.safetensors"))
    (tmp_path / "broken.safetensors").write_bytes(b"x")
    (tmp_path / "old.pt").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    assert [one.name for one in models.find_embeddings(tmp_path, ["draw two, oneness"])] == ["two"]
    assert [one.name for one in models.find_embeddings(tmp_path)] == ["one", "two"]
    for name in ("broken", "old"):
        with pytest.raises(ModelError, match=name):
            models.find_embeddings(tmp_path, [f"draw {name}"])


def test_sdxl_has_one_for_each_encoder(tmp_path: Path) -> None:
    file = tmp_path / "xl.safetensors"
    save_file({"clip_l": vectors(2, 768), "clip_g": vectors(2, 1280)}, str(file))
    one = models.read_embedding(file)
    assert [tuple(v.shape) for v in one.vectors] == [(2, 768), (2, 1280)]
    with pytest.raises(ModelError, match="width 768 and 1280; allowed: 64 for tiny"):
        models.add_embeddings(models.create("tiny", seed=1), [one])


@pytest.fixture
def published() -> Model:
    """A small model of SDXL's build whose eos_token_id is 2, as those of published models are."""
    tokenizer = models.train_tokenizer(["a photo of a cat in the snow by the sea"] * 3, vocab_size=600)
    text = {**SMALL_TEXT, "eos_token_id": 2, "vocab_size": len(tokenizer)}
    overrides = {**SMALL_XL, "text_encoder": text, "text_encoder_2": text}
    return models.create("sdxl", seed=1, tokenizer=tokenizer, overrides=overrides)


def pooled(model: Model, prompt: str) -> torch.Tensor:
    return encode_prompts(model, [prompt], (32, 32))[0][0].added["text_embeds"]


def at_the_end(model: Model, prompt: str) -> torch.Tensor:
    """The projected state of the first end token, written out."""
    tokenizer, encoder = model.tokenizers[-1], model.text_encoders[-1]
    ids = tokenizer(prompt, padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        states = encoder(ids, output_hidden_states=True).last_hidden_state
        end = ids[0].tolist().index(tokenizer.eos_token_id)
        return encoder.text_projection(states[:, end])[0]


PLACES = ("in the snow", "by the sea")


def test_sdxls_pooled_text_is_of_the_whole_prompt_also_with_a_new_word(
    published: Model, tmp_path: Path
) -> None:
    """transformers takes the state of the highest id, which is the word's: nothing behind it would count."""
    before = pooled(published, "a photo of a cat")
    save_file({"clip_l": vectors(1, 32), "clip_g": vectors(1, 32)}, str(tmp_path / "sks.safetensors"))
    models.add_embeddings(published, models.find_embeddings(tmp_path))
    snow, sea = (pooled(published, f"a photo of sks {place}") for place in PLACES)
    torch.testing.assert_close(snow, at_the_end(published, f"a photo of <embedding:sks> {PLACES[0]}"))
    assert (snow - sea).abs().max() > 1e-3
    assert torch.equal(pooled(published, "a photo of a cat"), before)


def test_so_is_the_pooled_text_that_a_new_word_is_trained_with(published: Model) -> None:
    add_word(published, WordSettings(token="<x>", initial="a"))
    ids = tokenize(published.tokenizers, [f"a photo of <x> {place}" for place in PLACES])
    with torch.no_grad():
        _, both = text_states(published.text_encoders, ids)
    assert both is not None
    for place, found in zip(PLACES, both, strict=True):
        torch.testing.assert_close(found, at_the_end(published, f"a photo of <x> {place}"))
    assert (both[0] - both[1]).abs().max() > 1e-3
    assert published.text_encoders[-1].config.eos_token_id == published.tokenizers[-1].eos_token_id


def test_what_is_no_embedding_is_refused(model: Model, tmp_path: Path) -> None:
    def refused(message: str, **tensors: torch.Tensor) -> None:
        file = tmp_path / "x.safetensors"
        save_file(tensors, str(file))
        with pytest.raises(ModelError, match=message):
            models.add_embeddings(model, [models.read_embedding(file)])

    refused("2 tensors", a=vectors(1), b=vectors(1, seed=2))
    refused("whole numbers", emb_params=torch.zeros(1, 64, dtype=torch.int64))
    refused("1 to 75", emb_params=vectors(76))
    refused("not finite", emb_params=torch.full((1, 64), torch.nan))
    refused("width 32", emb_params=vectors(1, 32))
    with pytest.raises(InputError, match="is no folder"):
        models.find_embeddings(tmp_path / "none")
    save_file({"same": vectors(1)}, str(tmp_path / "x.safetensors"))
    save_file({"emb_params": vectors(1)}, str(tmp_path / "SAME.safetensors"))
    with pytest.raises(ModelError, match="two embeddings are called 'same'"):
        models.add_embeddings(model, models.find_embeddings(tmp_path))
