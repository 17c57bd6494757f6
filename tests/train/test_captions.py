"""Captions as fine-tuners have them: long, weighted, with tags left out, wildcards and clip skip."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from subjects import check_resumes_exactly, recipe_for

from darkroom import models, sample
from darkroom.data.draws import chosen_wildcards, kept_tags, parts_of, shuffled_tags
from darkroom.errors import RecipeError
from darkroom.sample.prompts import encode_prompts
from darkroom.train.jobs import Pinned
from darkroom.train.run import export, train
from darkroom.train.setup import make_job
from darkroom.train.tasks.diffusion import Reading

LONG = "a photo of a (red:1.3) dog, " + "a blue square on a green ground, " * 12


@pytest.mark.parametrize("clip_skip", [0, 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_captions_are_read_as_generate_reads_prompts(base: Path, weighted: bool, clip_skip: int) -> None:
    model = models.load(base)
    weighting = "a1111" if weighted else "none"
    conditions, _ = encode_prompts(
        model, [LONG], (64, 64), weighting=weighting, clip_skip=clip_skip, parts=[3]
    )
    reading = Reading(3, weighted, clip_skip)
    found = reading.tokens(model, LONG)
    with torch.no_grad():
        states, pooled = reading.states(model, [found[0][None]], [found[1][None]])
    assert pooled is None
    torch.testing.assert_close(states[0], conditions[0].text_LD)
    other = Reading(3, not weighted, clip_skip).tokens(model, LONG)
    assert not torch.equal(other[0], found[0])
    with torch.no_grad():
        skipped, _ = Reading(3, weighted, 1 - clip_skip).states(model, [found[0][None]], [found[1][None]])
    assert (skipped - states).abs().max() > 1e-3


@pytest.mark.parametrize("bias", [0.0, 0.2])
def test_weights_keep_a_mean_only_where_there_is_one(base: Path, bias: float) -> None:
    """A1111's factor, old mean by new one, is rounding by rounding where the last norm has no bias."""
    model = models.load(base)
    encoder: Any = model.text_encoders[0]
    with torch.no_grad():
        encoder.final_layer_norm.bias.fill_(bias)
    for n in range(8):
        prompt = f"a {'blue ' * n}dog (one:1.2), a cat"
        plain, _ = encode_prompts(model, [prompt.replace("(", "").replace(":1.2)", "")], (64, 64))
        weighted, _ = encode_prompts(model, [prompt], (64, 64), weighting="a1111")
        was, now = plain[0].text_LD, weighted[0].text_LD
        found = Reading(1, True).tokens(model, prompt)
        scaled = was * found[1].T
        expected = scaled * (was.mean() / scaled.mean()) if bias else scaled
        torch.testing.assert_close(now, expected, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            states, _ = Reading(1, True).states(model, [found[0][None]], [found[1][None]])
        torch.testing.assert_close(states[0], expected, rtol=1e-4, atol=1e-5)


def test_a_caption_longer_than_all_parts_is_cut(base: Path) -> None:
    model = models.load(base)
    whole, cut = (Reading(n).tokens(model, LONG)[0] for n in (3, 1))
    assert cut.shape == (1, 77)
    assert torch.equal(whole[0], cut[0])


def test_the_text_of_a_batch_is_as_long_as_was_asked(base: Path, photos: Path, tmp_path: Path) -> None:
    recipe = recipe_for("lora", base, photos, "data.max_token_length=150", "data.clip_skip=1")
    job = make_job(recipe, Pinned(tmp_path / "run"))
    with job.feed(0) as batches:
        inputs = job.task.inputs(next(batches), job.device)
    assert inputs["text"].shape[1] == 154
    assert torch.isfinite(job.task.losses(inputs)["loss"]).all()


TAGS = "sks dog, red, blue, green, white, black"


def test_tags_are_left_out_at_their_rate_and_kept_ones_never() -> None:
    left = [kept_tags(TAGS, key, 1, dropout=0.3) for key in range(2000)]
    counts = Counter(tag for caption in left for tag in caption.split(", "))
    assert counts["sks dog"] == 2000
    for tag in TAGS.split(", ")[1:]:
        assert counts[tag] / 2000 == pytest.approx(0.7, abs=0.04)
    assert kept_tags(TAGS, 1, 1) == TAGS
    orders = {tuple(sorted(caption.split(", "), key=TAGS.split(", ").index)) for caption in left}
    assert all(", ".join(one) in left for one in orders)  # what is left stays in its order


def test_tags_warm_up_as_kohyas_do() -> None:
    """floor(step * (tags - least) / steps) + least of them, after those that are kept."""
    for step in range(10):
        expected = 1 + 2 + int(step / 10 * (5 - 2))
        assert len(kept_tags(TAGS, 0, 1, least=2, share=step / 10).split(", ")) == expected
    assert kept_tags(TAGS, 0, 1, least=9, share=0.0) == TAGS
    assert kept_tags(TAGS, 0, 0, least=0, share=0.0) == ""


def test_tags_warm_up_from_the_first_and_are_dealt_then(base: Path, photos: Path, tmp_path: Path) -> None:
    """sd-scripts cut a caption's tags before they shuffle them: the first of the caption come first."""
    prompt = "a, " + ", ".join(f"t{i}" for i in range(20))
    warm = ("data.token_warmup_steps=40", "data.token_warmup_min=2", "data.keep_tokens=1")
    recipe = recipe_for("lora", base, photos, f"data.prompt='{prompt}'", "data.shuffle_tags=true", *warm)
    job = make_job(recipe, Pinned(tmp_path / "run"))
    seen = []
    with job.feed(0) as batches:
        for k, batch in zip(range(5), batches, strict=False):
            there = 2 + int(k / 40 * 18)
            for caption in batch["caption"]:
                first, *rest = caption.split(", ")
                assert first == "a"
                assert sorted(rest) == sorted(f"t{i}" for i in range(there))
                seen.append(rest)
    assert any(rest != sorted(rest, key=lambda tag: int(tag[1:])) for rest in seen)


def test_separators_fix_what_stands_around_them(base: Path, photos: Path, tmp_path: Path) -> None:
    """sd-scripts: what is before the first stays, what is after the second too, all else is dealt."""
    prompt = "sks dog, a ||| b, c, d;;;e, f ||| best, sharp"
    recipe = recipe_for(
        "lora",
        base,
        photos,
        f"data.prompt='{prompt}'",
        *("data.shuffle_tags=true", "data.keep_tokens=3", "data.keep_tokens_separator='|||'"),
        "data.secondary_separator=';;;'",
    )
    job = make_job(recipe, Pinned(tmp_path / "run"))
    seen = set()
    with job.feed(0) as batches:
        for batch, _ in zip(batches, range(6), strict=False):
            for caption in batch["caption"]:
                tags = caption.split(", ")
                assert (tags[:2], tags[-2:]) == (["sks dog", "a"], ["best", "sharp"])
                assert sorted(tags[2:-2]) == ["b", "c", "d", "e", "f"]
                assert tags[tags.index("d") + 1] == "e"  # one tag until it was dealt
                seen.add(tuple(tags[2:-2]))
    assert len(seen) > 3
    assert parts_of("a, b", "|||").around("b, a") == "b, a"
    assert parts_of("||| b, a", "|||").around("a, b") == "a, b"
    assert parts_of("x |||", "|||").around("") == "x"


def test_wildcards_choose_evenly_and_inside_each_other() -> None:
    found = Counter(chosen_wildcards("a {red|{light|dark} blue} dog", key) for key in range(3000))
    assert set(found) == {"a red dog", "a light blue dog", "a dark blue dog"}
    assert found["a red dog"] / 3000 == pytest.approx(0.5, abs=0.05)
    assert found["a dark blue dog"] / 3000 == pytest.approx(0.25, abs=0.05)
    lines = Counter(chosen_wildcards("one\n\ntwo {a|b}", key) for key in range(400))
    assert set(lines) == {"one", "two a", "two b"}
    assert chosen_wildcards("plain {braces}", 5) == "plain {braces}"


def test_each_draw_has_its_own_purpose(base: Path, photos: Path, tmp_path: Path) -> None:
    """Shuffled and dropped together, tags are not tied: which are dropped is not where they stand."""
    places = Counter()
    for key in range(1000):
        shuffled = shuffled_tags(TAGS, key, 0)
        left = kept_tags(shuffled, key + 77, 0, dropout=0.5).split(", ")
        places.update(shuffled.split(", ").index(tag) for tag in left if tag)
    assert np.std([places[i] / 1000 for i in range(6)]) < 0.05


ALL = (
    "data.tag_dropout=0.3",
    "data.token_warmup_steps=3",
    "data.wildcards=true",
    "data.caption_prefix='sks, '",
    "data.weighted_captions=true",
    "data.max_token_length=150",
    "data.shuffle_tags=true",
    "data.prompt='a {red|blue|green} dog, (one:1.2), two, three, four, five'",
)


def test_a_run_with_all_of_them_resumes_to_the_bit(base: Path, photos: Path, tmp_path: Path) -> None:
    check_resumes_exactly(
        lambda *more: recipe_for("lora", base, photos, *ALL, *more),
        tmp_path,
        control=("data.tag_dropout=0.6",),
    )


@pytest.mark.parametrize(
    "key",
    [
        "keep_tokens_separator='|||'",
        "tag_dropout=0.1",
        "clip_skip=1",
        "caption_prefix=a",
        "max_token_length=150",
    ],
)
def test_prepared_text_is_refused_with_captions_that_change(key: str) -> None:
    nowhere = (
        "data.folder=null",
        "data.store=a.lance",
        "data.prompt=null",
        "data.text=stored",
        f"data.{key}",
    )
    with pytest.raises(RecipeError, match=r"data.text: stored, but with data\.\w+ the store's text states"):
        recipe_for("lora", Path("nowhere"), Path("nowhere"), *nowhere)


# ---- sample grids


def test_sample_prompts_have_settings_of_their_own(base: Path, photos: Path, tmp_path: Path) -> None:
    """Each picture of the grid is the one that generate draws with those settings."""
    own = "{prompt: a red dog, seed: 9, steps: 3, guidance: 2, negative: a blue square}"
    overrides = ("train.steps=1", "sample.steps=2", f"sample.prompts=[a dog, a dog, {own}, a dog]")
    recipe = recipe_for("lora", base, photos, *overrides)
    run = train(recipe, out=tmp_path / "run", console=lambda _: None).run
    grid = np.asarray(Image.open(run / "samples" / "step-00000001.png").convert("RGB"))
    model = models.load(export(run, tmp_path / "merged"))
    wanted = [
        {"seed": 0, "steps": 2},
        {"seed": 1, "steps": 2},
        {"seed": 9, "steps": 3, "guidance": 2.0, "negative": "a blue square"},
        {"seed": 3, "steps": 2},
    ]
    prompts = ["a dog", "a dog", "a red dog", "a dog"]
    cells = [grid[y : y + 32, x : x + 32].astype(int) for y in (0, 32) for x in (0, 32)]
    drawn = []
    for prompt, how in zip(prompts, wanted, strict=True):
        made = sample.generate(model, prompt, size=(32, 32), optimise="none", notice=lambda _: None, **how)
        drawn.append(np.asarray(made[0].image).astype(int))
    for i, cell in enumerate(cells):
        assert abs(cell - drawn[i]).max() <= 2, i
    assert abs(cells[0] - drawn[1]).max() > 10  # another seed is another picture
