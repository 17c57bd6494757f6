"""Prompts to text states: padding, cutting with a notice, both encoders of SDXL."""

from __future__ import annotations

import torch

from darkroom.models import Model
from darkroom.sample import encode_prompts, tokenize

SIZE = (32, 32)


def test_tokens_are_padded_to_77_and_cut_with_a_notice(tiny: Model) -> None:
    tokenizer = tiny.tokenizers[0]
    long = "a red circle on a horse " * 40 + "zebra"
    ids_BL, notices = tokenize(tokenizer, ["a red circle", long, ""])
    assert ids_BL.shape == (3, 77)
    assert ids_BL[:, 0].tolist() == [tokenizer.bos_token_id] * 3
    assert ids_BL[1, -1] == tokenizer.eos_token_id
    assert (ids_BL[2, 1:] == tokenizer.pad_token_id).all()
    assert len(notices) == 1
    assert "a red circle on a horse a red circle ..." in notices[0]
    assert "75 tokens" in notices[0]
    assert notices[0].endswith("zebra'")


def test_a_prompt_of_exactly_75_tokens_is_not_cut(tiny: Model) -> None:
    tokenizer = tiny.tokenizers[0]
    assert len(tokenizer(" ".join(["a"] * 75)).input_ids) == 77
    assert tokenize(tokenizer, [" ".join(["a"] * 75)])[1] == []
    assert len(tokenize(tokenizer, [" ".join(["a"] * 76)])[1]) == 1


def test_states_do_not_depend_on_the_other_prompts(tiny: Model) -> None:
    prompts = [f"a photo of {i} horses" for i in range(40)]  # more than one batch
    together, _ = encode_prompts(tiny, prompts, SIZE)
    (alone,), _ = encode_prompts(tiny, prompts[37:38], SIZE)
    assert len(together) == 40
    assert together[37].text_LD.shape == (77, 64)
    torch.testing.assert_close(together[37].text_LD, alone.text_LD, rtol=1e-4, atol=1e-5)
    assert (together[36].text_LD - alone.text_LD).abs().max() > 1e-2
    assert together[0].added == {}


def test_sdxl_reads_with_both_encoders(small_xl: Model) -> None:
    (condition, other), _ = encode_prompts(small_xl, ["a red circle", "a horse"], (48, 32))
    ids_BL, _ = tokenize(small_xl.tokenizers[1], ["a red circle"])
    second = small_xl.text_encoders[1](ids_BL, output_hidden_states=True)
    assert condition.text_LD.shape == (77, 64)
    torch.testing.assert_close(condition.text_LD[:, 32:], second.hidden_states[-2][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(condition.added["text_embeds"], second.text_embeds[0], rtol=1e-4, atol=1e-5)
    assert condition.added["time_ids"].tolist() == [32, 48, 0, 0, 32, 48]
    assert (condition.added["text_embeds"] - other.added["text_embeds"]).abs().max() > 1e-3


def test_a_cut_is_told_once_for_two_encoders(small_xl: Model) -> None:
    _, notices = encode_prompts(small_xl, ["horse " * 200, "horse " * 200], SIZE)
    assert len(notices) == 1
