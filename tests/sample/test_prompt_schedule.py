"""Prompts that change between steps: read as A1111 reads them, and drawn so."""

from __future__ import annotations

import pytest
import torch

from darkroom.errors import InputError
from darkroom.models.model import Model
from darkroom.sample import RunningBatch
from darkroom.sample.generate import GenerateSettings, Generation
from darkroom.sample.prompt_schedule import schedule

TURNS = [(i, "female" if i % 2 else "male") for i in range(1, 11)]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("test", [(10, "test")]),
        ("a [b:3]", [(3, "a "), (10, "a b")]),
        ("a [b: 3]", [(3, "a "), (10, "a b")]),
        ("a [[[b]]:2]", [(2, "a "), (10, "a [[b]]")]),
        ("[(a:2):3]", [(3, ""), (10, "(a:2)")]),
        ("a [b : c : 1] d", [(1, "a b  d"), (10, "a  c  d")]),
        ("a[b:[c:d:2]:1]e", [(1, "abe"), (2, "ace"), (10, "ade")]),
        ("a [unbalanced", [(10, "a [unbalanced")]),
        ("a [b:.5] c", [(5, "a  c"), (10, "a b c")]),
        ("((a][:b:c [d:3]", [(3, "((a][:b:c "), (10, "((a][:b:c d")]),
        ("[fe|]male", TURNS),
        (r"\[a:b:0.5\]", [(10, r"\[a:b:0.5\]")]),
        ("[less] (more:1.2)", [(10, "[less] (more:1.2)")]),
        ("[a:b:0]", [(10, "b")]),
        ("[a:b:99]", [(10, "a")]),
    ],
)
def test_texts_and_their_last_steps_are_a1111s(prompt: str, texts: list[tuple[int, str]]) -> None:
    """The cases are those of A1111's own documentation of its reader."""
    assert schedule(prompt, 10) == texts


def test_a_second_pass_counts_on() -> None:
    assert schedule("[a:b:0.5] [c:d:1.5]", 10, second_pass=True) == [(5, "b c"), (10, "b d")]
    assert schedule("[a:b:12]", 10, second_pass=True) == [(2, "a"), (10, "b")]


def test_hostile_brackets_take_no_time() -> None:
    assert schedule("[" * 50_000, 10) == [(10, "[" * 50_000)]
    with pytest.raises(InputError, match="brackets 51 deep"):
        schedule("[" * 2_000 + "]" * 2_000, 10)


def job(model: Model, prompt: str, negative: str = "") -> Generation:
    settings = GenerateSettings.of(size=(32, 32), steps=6, seed=3, weighting="a1111", negative=negative)
    return Generation(model, [prompt], settings, notice=lambda _: None)


def latents(*jobs: Generation) -> list[torch.Tensor]:
    rows = [one.row(0) for one in jobs]
    batch = RunningBatch(rows)
    while batch.steps_left:
        batch.advance(jobs[0].backend.unet)
    batch.unpack()
    return [row.latents_CHW for row in rows]


def test_the_text_changes_between_the_steps(tiny: Model) -> None:
    """As a row is drawn whose texts are exchanged by hand; in a batch with rows that do not change."""
    changing = job(tiny, "[red:blue:2] ball", "[grey:green:3]")
    plain = job(tiny, "red ball", "grey")
    [alone] = latents(changing)
    together, other = latents(changing, plain)
    row = plain.row(0)
    after = {3: ("blue ball", "grey"), 4: ("blue ball", "green")}
    for step in range(6):
        if step in after:
            made = job(tiny, *after[step]).row(0)
            row.positive, row.negative = made.positive, made.negative
        batch = RunningBatch([row])
        batch.advance(plain.backend.unet)
        batch.unpack()
    assert torch.allclose(alone, row.latents_CHW, atol=1e-5)
    assert torch.allclose(together, alone, atol=1e-4)
    assert torch.allclose(other, latents(plain)[0], atol=1e-4)
    assert (alone - other).abs().max() > 1e-2
