"""Prompts to text states: parts, weights in two syntaxes, clip-skip, both encoders of SDXL."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from darkroom.errors import InputError
from darkroom.models.model import Model
from darkroom.sample.prompts import a1111_pieces, compel_pieces, encode_prompts, read_prompt

SIZE = (32, 32)


def states(model: Model, prompt: str, **options: Any) -> torch.Tensor:
    (condition,), _ = encode_prompts(model, [prompt], SIZE, **options)
    return condition.text_LD


def plain_states(model: Model, i: int, prompt: str) -> torch.Tensor:
    """Straight through transformers: what every weighting starts from."""
    ids = model.tokenizers[i](prompt, padding="max_length", max_length=77, return_tensors="pt").input_ids
    with torch.no_grad():
        given = model.text_encoders[i](ids, output_hidden_states=True)
    return given.hidden_states[-2][0] if model.is_sdxl else given[0][0]


def test_a_prompt_is_read_in_parts_of_75_tokens_with_a_notice(tiny: Model) -> None:
    tokenizer = tiny.tokenizers[0]
    words = [f"horse{i}" for i in range(40)]
    ids = tokenizer(" ".join(words)).input_ids[1:-1]
    parts = read_prompt(tokenizer, " ".join(words))
    assert [len(part.ids) for part in parts] == [75] * (len(ids) // 75) + [len(ids) % 75]
    assert [token for part in parts for token in part.ids] == ids
    _, notices = encode_prompts(tiny, [" ".join(words), "a horse"], SIZE)
    assert len(notices) == 1
    assert notices[0].startswith(
        f"prompt 'horse0 horse1 horse2 horse3 horse4 ho...' is read in {len(parts)} parts"
    )


def test_75_tokens_are_one_part_and_76_are_two(tiny: Model) -> None:
    for count, parts in ((75, 1), (76, 2)):
        assert len(read_prompt(tiny.tokenizers[0], " ".join(["a"] * count))) == parts


def test_a_prompt_without_end_is_refused(tiny: Model) -> None:
    with pytest.raises(InputError, match=r"17 parts of 75 tokens; allowed: up to 16"):
        encode_prompts(tiny, ["a " * (75 * 16 + 1)], SIZE)


def test_each_part_stands_with_its_own_start_and_end(tiny: Model) -> None:
    first, second = " ".join(["a"] * 75), "red circle"
    text_LD = states(tiny, f"{first} {second}")
    assert text_LD.shape == (154, 64)
    torch.testing.assert_close(text_LD[:77], plain_states(tiny, 0, first), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(text_LD[77:], plain_states(tiny, 0, second), rtol=1e-4, atol=1e-5)
    assert (text_LD[:77] - text_LD[77:]).abs().max() > 1e-2


def test_shorter_prompts_are_filled_up_with_empty_parts(tiny: Model) -> None:
    text_LD = states(tiny, "a horse", parts=[3])
    assert text_LD.shape == (231, 64)
    torch.testing.assert_close(text_LD[154:], plain_states(tiny, 0, ""), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(text_LD[:77], plain_states(tiny, 0, "a horse"), rtol=1e-4, atol=1e-5)


def test_states_do_not_depend_on_the_other_prompts(tiny: Model) -> None:
    prompts = [f"a photo of {i} horses" for i in range(40)]  # more than one batch
    prompts[3] = "horse " * 100
    together, _ = encode_prompts(tiny, prompts, SIZE)
    (alone,), _ = encode_prompts(tiny, prompts[37:38], SIZE)
    assert len(together) == 40
    assert together[37].text_LD.shape == (77, 64)
    assert together[3].text_LD.shape[0] % 77 == 0
    assert together[3].text_LD.shape[0] > 77
    torch.testing.assert_close(together[37].text_LD, alone.text_LD, rtol=1e-4, atol=1e-5)
    assert (together[36].text_LD - alone.text_LD).abs().max() > 1e-2
    assert together[0].added == {}


def test_sdxl_reads_with_both_encoders(small_xl: Model) -> None:
    (condition, other), _ = encode_prompts(small_xl, ["a red circle", "a horse"], (48, 32))
    ids_BL = small_xl.tokenizers[1]("a red circle", padding="max_length", return_tensors="pt").input_ids
    second = small_xl.text_encoders[1](ids_BL, output_hidden_states=True)
    assert condition.text_LD.shape == (77, 64)
    torch.testing.assert_close(condition.text_LD[:, 32:], second.hidden_states[-2][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(condition.added["text_embeds"], second.text_embeds[0], rtol=1e-4, atol=1e-5)
    assert condition.added["time_ids"].tolist() == [32, 48, 0, 0, 32, 48]
    assert (condition.added["text_embeds"] - other.added["text_embeds"]).abs().max() > 1e-3


def test_sdxl_pools_the_first_part(small_xl: Model) -> None:
    first = " ".join(["a"] * 75)
    (long, short), notices = encode_prompts(small_xl, [f"{first} horse", first], SIZE)
    assert long.text_LD.shape == (154, 64)
    torch.testing.assert_close(long.added["text_embeds"], short.added["text_embeds"], rtol=1e-4, atol=1e-5)
    assert len(notices) == 1


@pytest.mark.parametrize("weighting", ["a1111", "compel"])
def test_weights_of_one_change_no_bit(tiny: Model, small_xl: Model, weighting: str) -> None:
    for model in (tiny, small_xl):
        plain = states(model, "a red circle, on blue")
        assert torch.equal(states(model, "a red circle, on blue", weighting=weighting), plain)
        assert torch.equal(states(model, "a (red circle:1.0), on blue", weighting="a1111"), plain)
        assert torch.equal(states(model, "a (red circle)1.0, on blue", weighting="compel"), plain)
        assert not torch.equal(states(model, "a (red circle:1.1), on blue", weighting="a1111"), plain)
    # Without weighting brackets are what they are.
    assert not torch.equal(states(tiny, "a (red) circle"), states(tiny, "a red circle"))


def token_weights(model: Model, before: str, words: str, weight: float) -> torch.Tensor:
    tokenizer = model.tokenizers[0]
    start = len(tokenizer(before).input_ids) - 1
    weights = torch.ones(77, 1)
    weights[start : start + len(tokenizer(words).input_ids) - 2] = weight
    return weights


def test_a1111_scales_and_brings_the_mean_back(
    tiny: Model, small_xl: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias = tiny.text_encoders[0].final_layer_norm.bias  # without one, states have no mean
    monkeypatch.setattr(bias, "data", torch.full_like(bias, 0.2))
    for model in (tiny, small_xl):
        expected = []
        for i in range(len(model.text_encoders)):
            z = plain_states(model, i, "a red circle on blue")
            scaled = z * token_weights(model, "a", "red circle", 1.3)
            expected.append(scaled * z.mean() / scaled.mean())
        got = states(model, "a (red circle:1.3) on blue", weighting="a1111")
        torch.testing.assert_close(got, torch.cat(expected, dim=-1), rtol=1e-4, atol=1e-5)
        assert (got - states(model, "a (red circle:1.5) on blue", weighting="a1111")).abs().max() > 1e-2


def test_compel_moves_away_from_the_empty_prompt(tiny: Model) -> None:
    z, empty = plain_states(tiny, 0, "a red circle on blue"), plain_states(tiny, 0, "")
    expected = empty + (z - empty) * token_weights(tiny, "a", "red circle", 1.21)
    got = states(tiny, "a (red circle)++ on blue", weighting="compel")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert (got - states(tiny, "a (red circle)-- on blue", weighting="compel")).abs().max() > 1e-2


def test_only_the_part_with_weights_is_scaled(tiny: Model) -> None:
    got = states(tiny, "a horse BREAK a (red:1.4) circle", weighting="a1111")
    assert got.shape == (154, 64)
    torch.testing.assert_close(got[:77], states(tiny, "a horse"), rtol=1e-4, atol=1e-5)
    assert (got[77:] - states(tiny, "a red circle")).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a (red:1.3) b", [("a ", 1), ("red", 1.3), (" b", 1)]),
        ("((x)) [y]", [("x", 1.21), (" ", 1), ("y", 1 / 1.1)]),
        ("(a (b:2) c)", [("a ", 1.1), ("b", 2.2), (" c", 1.1)]),
        (r"\(plain\) \[one\] \\", [("(plain) [one] \\", 1)]),
        ("(open and [unclosed", [("open and ", 1.1), ("unclosed", 1)]),
        ("stray) at 12:30 :)", [("stray) at 12:30 :)", 1)]),
        ("[(a:1.2), (b:1.3)]", [("a", 1.2 / 1.1), (", ", 1 / 1.1), ("b", 1.3 / 1.1)]),
        ("(x:0)", [("x", 0)]),
        ("(a:-0.5)", [("a", -0.5)]),
        ("a BREAK b", [("a ", 1), None, (" b", 1)]),
        ("", [("", 1)]),
    ],
)
def test_a1111_syntax(prompt: str, expected: list[tuple[str, float] | None]) -> None:
    got = [None if one.ends_part else (one.text, pytest.approx(one.weight)) for one in a1111_pieces(prompt)]
    assert got == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a red++ ball--, b", [("a ", 1), ("red", 1.21), (" ", 1), ("ball", 0.81), (", b", 1)]),
        ("a (red ball)1.3, b", [("a ", 1), ("red ball", 1.3), (", b", 1)]),
        ("(a (b)++)1.2", [("a ", 1.2), ("b", 1.2 * 1.21)]),
        ("(a b)- c+.", [("a b", 0.9), (" ", 1), ("c", 1.1), (".", 1)]),
        (r"a well-known C\+\+ \(x\)", [("a well-known C++ (x)", 1)]),
        ("a - b -- 3.5", [("a - b -- 3.5", 1)]),
        ("(a)1.2.", [("a", 1.2), (".", 1)]),
        ("", [("", 1)]),
    ],
)
def test_compel_syntax(prompt: str, expected: list[tuple[str, float]]) -> None:
    assert [(one.text, pytest.approx(one.weight)) for one in compel_pieces(prompt)] == expected


@pytest.mark.parametrize(
    ("weighting", "prompt", "said"),
    [
        ("a1111", "[red:blue:0.5] ball", "prompts that change between steps"),
        ("a1111", "[red|blue] ball", "prompts that change between steps"),
        ("a1111", "a cat AND a dog", "AND in a prompt"),
        ("a1111", "<lora:style:0.8> cat", "--adapter"),
        ("a1111", "(x:1e9)", None),
        ("a1111", "(x:1000)", "allowed: -100 to 100"),
        ("compel", "('a', 'b').and()", r".and() in a prompt"),
        ("compel", "('a', 'b').blend(0.5, 0.5)", r".blend() in a prompt"),
        ("compel", "a (b", "leaves a bracket open"),
        ("compel", "a) b", "closes a bracket"),
        ("compel", "(" * 200 + ")" * 200, "brackets 101 deep"),
        ("compel", "a" + "+" * 300, "allowed: -100 to 100"),
        ("midjourney", "a", "allowed: none, a1111, compel"),
    ],
)
def test_what_weighting_refuses(tiny: Model, weighting: str, prompt: str, said: str | None) -> None:
    if said is None:
        states(tiny, prompt, weighting=weighting)
        return
    with pytest.raises(InputError) as caught:
        states(tiny, prompt, weighting=weighting)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_part_breaks_behind_its_last_comma_in_a1111(tiny: Model) -> None:
    tokenizer = tiny.tokenizers[0]
    prompt = " ".join(["a"] * 69) + " , " + " ".join(["a"] * 15)
    assert [len(part.ids) for part in read_prompt(tokenizer, prompt, weighting="a1111")] == [70, 15]
    assert [len(part.ids) for part in read_prompt(tokenizer, prompt)] == [75, 10]
    far = " ".join(["a"] * 40) + " , " + " ".join(["a"] * 44)
    assert [len(part.ids) for part in read_prompt(tokenizer, far, weighting="a1111")] == [75, 10]


def test_nothing_behind_the_last_break_is_no_part(tiny: Model) -> None:
    """A1111 keeps an empty part in the middle, and none at the end."""
    tokenizer = tiny.tokenizers[0]
    for prompt, parts in (
        ("a BREAK", [1]),
        ("a BREAK ", [1]),
        ("BREAK a", [0, 1]),
        ("a BREAK BREAK b", [1, 0, 1]),
    ):
        assert [len(part.ids) for part in read_prompt(tokenizer, prompt, weighting="a1111")] == parts
    assert [len(part.ids) for part in read_prompt(tokenizer, "", weighting="a1111")] == [0]


def test_a_word_of_several_vectors_is_not_torn_between_parts(tiny: Model) -> None:
    """As A1111: it begins the next part where it does not fit in this one."""
    tokenizer = copy.deepcopy(tiny.tokenizers[0])
    tokenizer.add_tokens(["<sks>", *(f"<sks>_{i}" for i in range(1, 8))])
    for before, parts in ((67, [75, 1]), (68, [68, 9]), (74, [74, 9]), (75, [75, 9])):
        prompt = " ".join(["a"] * before) + " <sks> a"
        for weighting in ("a1111", "none"):
            read = read_prompt(tokenizer, prompt, weighting=weighting)
            assert [len(part.ids) for part in read] == parts


def test_clip_skip_takes_an_earlier_layer_and_norms_it(tiny: Model, small_xl: Model) -> None:
    ids = tiny.tokenizers[0]("a horse", padding="max_length", return_tensors="pt").input_ids
    encoder: Any = tiny.text_encoders[0]
    with torch.no_grad():
        hidden = encoder(ids, output_hidden_states=True).hidden_states
        expected = encoder.final_layer_norm(hidden[-2])[0]
    got = states(tiny, "a horse", clip_skip=1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert (got - states(tiny, "a horse")).abs().max() > 1e-2
    assert torch.equal(states(tiny, "a horse", clip_skip=0), states(tiny, "a horse"))
    ids = small_xl.tokenizers[0]("a horse", padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        hidden = small_xl.text_encoders[0](ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(
        states(small_xl, "a horse", clip_skip=1)[:, :32], hidden[-3][0], rtol=1e-4, atol=1e-5
    )
    with pytest.raises(InputError, match="clip-skip 2; allowed: up to 1"):
        states(tiny, "a horse", clip_skip=2)
