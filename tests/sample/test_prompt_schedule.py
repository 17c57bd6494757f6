"""Prompts that change between steps: read as A1111 reads them, and drawn so."""

from __future__ import annotations

import diffusers
import pytest
import torch

from darkroom.errors import InputError
from darkroom.models.model import Model
from darkroom.sample import RunningBatch
from darkroom.sample.generate import GenerateSettings, Generation
from darkroom.sample.prompt_schedule import composed, readings, schedule
from darkroom.sample.prompts import encode_prompts

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
        ("[a:b:1e999]", [(10, "a")]),
        ("[a:b:1.0e999]", [(10, "a")]),
        ("[a:b:-1e999]", [(10, "b")]),
        ("[a:b:-1.5e999]", [(10, "b")]),
    ],
)
def test_texts_and_their_last_steps_are_a1111s(prompt: str, texts: list[tuple[int, str]]) -> None:
    """The cases are those of A1111's own documentation of its reader."""
    assert schedule(prompt, 10) == texts


def test_a_second_pass_counts_on() -> None:
    assert schedule("[a:b:0.5] [c:d:1.5]", 10, first_steps=10) == [(5, "b c"), (10, "b d")]
    assert schedule("[a:b:12]", 10, first_steps=10) == [(2, "a"), (10, "b")]
    assert schedule("[a:b:25]", 10, first_steps=20) == [(5, "a"), (10, "b")]
    assert schedule("[a:b:25]", 10, first_steps=30) == [(10, "b")]


@pytest.mark.parametrize(("solver", "calls"), [("ddim", 1), ("heun", 2), ("dpmpp_sde", 2)])
def test_half_the_steps_are_half_the_calls(tiny: Model, solver: str, calls: int) -> None:
    """A1111 counts the calls of samplers that call twice a step; a second pass has the steps it takes."""
    settings = {"size": (32, 32), "steps": 8, "weighting": "a1111", "solver": solver}
    wanted = GenerateSettings.of(**settings, hires={"scale": 1.5, "strength": 0.5, "steps": 12})
    made = Generation(tiny, ["[a:b:0.5] [c:d:1.5] [e:f:3]"], wanted, notice=lambda _: None)
    ends = {second: [one.until for one in made._stages[0, second]] for second in (False, True)}
    assert ends == {False: [3, 4 * calls, 8 * calls], True: [3 * calls, 6 * calls]}


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


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("a cat", [("a cat", 1.0)]),
        ("of 16:9", [("of 16:9", 1.0)]),
        ("a cat AND a dog", [("a cat", 1.0), (" a dog", 1.0)]),
        ("a cat :1.2 AND a dog AND a bird : -.5", [("a cat", 1.2), (" a dog", 1.0), (" a bird", -0.5)]),
        ("(a:2) AND [b:c:0.5]:3", [("(a:2)", 1.0), (" [b:c:0.5]", 3.0)]),
        ("BRAND AND SANDY", [("BRAND", 1.0), (" SANDY", 1.0)]),
    ],
)
def test_and_parts_prompts_as_a1111_does(prompt: str, parts: list[tuple[str, float]]) -> None:
    assert composed(prompt) == parts


def test_each_composed_prompt_changes_by_itself() -> None:
    told = readings("[a:b:2] AND [c:d:4] :0.5", "x AND y", "a1111", 10, 10)
    assert [(one.until, one.prompts, one.negative, one.second_pass) for one in told] == [
        (2, ("a", " c"), "x and y", False),
        (4, ("b", " c"), "x and y", False),
        (10, ("b", " d"), "x and y", False),
        (10, ("b", " d"), "x and y", True),
    ]


def composition(model: Model, texts: list[tuple[str, float]], guidance: float) -> torch.Tensor:
    """Latents by diffusers' scheduler and U-Net: u + guidance * sum of weight * (c - u) (Liu et al. 2022)."""
    scheduler = diffusers.DDIMScheduler.from_config(dict(model.scheduler))
    scheduler.set_timesteps(6)
    prompts = ["", *(text for text, _ in texts)]
    found, _ = encode_prompts(model, prompts, (32, 32), weighting="a1111")
    text = torch.stack([one.text_LD for one in found])
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    for t in scheduler.timesteps:
        with torch.no_grad():
            out = model.unet(x.expand(len(text), -1, -1, -1), t, text).sample
        mixed = out[:1] + guidance * sum(
            w * (one - out[:1]) for one, (_, w) in zip(out[1:], texts, strict=True)
        )
        x = scheduler.step(mixed, t, x).prev_sample
    return x[0]


def test_and_composes_predictions_by_weight_whoever_shares_the_batch(tiny: Model) -> None:
    """Also without guidance, where A1111's formula holds all the same."""

    def job_at(prompt: str, guidance: float) -> Generation:
        settings = GenerateSettings.of(
            size=(32, 32), steps=6, seed=3, weighting="a1111", guidance=guidance, solver="ddim"
        )
        return Generation(tiny, [prompt], settings, notice=lambda _: None)

    asked = "a red ball AND a (blue:1.2) horse :0.6 AND [grey|grey] sky : -0.4"
    parts = [("a red ball", 1.0), ("a (blue:1.2) horse", 0.6), ("grey sky", -0.4)]
    jobs = [job_at("a sky", 3.0), job_at(asked, 3.0), job_at("a ball", 1.0), job_at(asked, 1.0)]
    made = latents(*jobs)
    assert torch.allclose(made[1], composition(tiny, parts, 3.0), atol=1e-3)
    assert torch.allclose(made[3], composition(tiny, parts, 1.0), atol=1e-3)
    for i, alone in enumerate(jobs):
        assert torch.allclose(latents(alone)[0], made[i], atol=1e-4)
    unweighted = composition(tiny, [(text, 1.0) for text, _ in parts], 3.0)
    assert (made[1] - unweighted).abs().max() > 1e-2
    assert (made[1] - latents(job_at("a red ball", 3.0))[0]).abs().max() > 1e-2


def test_and_is_refused_where_it_cannot_be(tiny: Model) -> None:
    with pytest.raises(InputError, match="17 prompts joined by AND.*up to 16"):
        job(tiny, " AND ".join("abcdefghijklmnopq"))
    with pytest.raises(InputError, match="weight of 1000 after AND"):
        job(tiny, "a AND b:1000")
    settings = GenerateSettings.of(size=(32, 32), steps=2, weighting="a1111")
    with pytest.raises(InputError, match="a limit on memory with AND"):
        Generation(tiny, ["a AND b"], settings, memory="2GB", notice=lambda _: None)
