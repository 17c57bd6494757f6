"""Variations of a seed, noise of another size, and what a masked part starts from: as A1111 has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps

from darkroom.errors import InputError
from darkroom.sample import generate
from darkroom.sample.inputs import Noise, _filled_around
from darkroom.sample.pictures import a1111_text, parse_a1111

QUIET: dict[str, Any] = {"optimise": "none", "notice": lambda _: None, "steps": 3}


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on_the_circle(share: float, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """A1111's: over the height of each column, in float64."""
    low, high = low.double(), high.double()
    units = [one / one.norm(dim=1, keepdim=True) for one in (low, high)]
    angle = torch.acos((units[0] * units[1]).sum(1))
    parts = [torch.sin(one * angle) / torch.sin(angle) for one in (1 - share, share)]
    return (parts[0].unsqueeze(1) * low + parts[1].unsqueeze(1) * high).float()


def in_the_middle(outer: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """A1111's: the middle of one noise in the middle of another, by its own arithmetic."""
    x = outer.clone()
    dx, dy = (x.shape[2] - inner.shape[2]) // 2, (x.shape[1] - inner.shape[1]) // 2
    w = inner.shape[2] if dx >= 0 else inner.shape[2] + 2 * dx
    h = inner.shape[1] if dy >= 0 else inner.shape[1] + 2 * dy
    tx, ty = max(dx, 0), max(dy, 0)
    dx, dy = max(-dx, 0), max(-dy, 0)
    x[:, ty : ty + h, tx : tx + w] = inner[:, dy : dy + h, dx : dx + w]
    return x


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_variations_noise_is_a1111s(share: float) -> None:
    made = Noise(3, 9, share)((4, 8, 6), torch.Generator().manual_seed(3))
    wanted = on_the_circle(share, drawn(3, 4, 8, 6), drawn(9, 4, 8, 6))
    assert torch.allclose(made, wanted, atol=1e-5)
    straight = torch.lerp(drawn(3, 4, 8, 6), drawn(9, 4, 8, 6), share)
    assert torch.allclose(made, straight, atol=1e-3) == (share == 1)
    flat = on_the_circle(share, *(one.flatten(0, 1)[None] for one in (drawn(3, 4, 8, 6), drawn(9, 4, 8, 6))))
    assert torch.allclose(made, flat.reshape(4, 8, 6), atol=1e-3) == (share == 1)  # columns by themselves


@pytest.mark.parametrize("size", [(6, 6), (12, 12), (6, 13), (8, 8)])
def test_the_noise_of_another_size_is_kept_in_the_middle(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    made = Noise(3, size_HW=size)((4, 8, 8), generator)
    assert torch.equal(made, in_the_middle(drawn(3, 4, 8, 8), drawn(3, 4, *size)))
    assert torch.equal(made, drawn(3, 4, 8, 8)) == (size == (8, 8))
    both = Noise(3, 9, 0.3, size)((4, 8, 8), torch.Generator().manual_seed(3))
    inner = on_the_circle(0.3, drawn(3, 4, *size), drawn(9, 4, *size))
    assert torch.allclose(both, in_the_middle(drawn(3, 4, 8, 8), inner), atol=1e-5)
    # Later noise is the picture's own, whatever the size.
    after = torch.Generator().manual_seed(3)
    torch.randn(4, 8, 8, generator=after)
    assert torch.equal(torch.randn(5, generator=generator), torch.randn(5, generator=after))


def test_noise_without_a_circle_is_finite() -> None:
    """Latents of one pixel's height have columns of one value, of one sign or of two."""
    assert torch.isfinite(Noise(3, 9, 0.4)((4, 1, 64), torch.Generator().manual_seed(3))).all()
    assert torch.equal(Noise(3, 3, 0.4)((4, 8, 8), torch.Generator().manual_seed(3)), drawn(3, 4, 8, 8))


def test_variations_are_of_one_seed_and_the_last_one_is_the_other_seeds_picture(tiny) -> None:
    own, other = (generate(tiny, "a red circle", seed=seed, **QUIET)[0] for seed in (5, 8))
    whole = generate(tiny, "a red circle", seed=5, variation_seed=8, variation_strength=1.0, **QUIET)[0]
    assert torch.allclose(whole.latents, other.latents, atol=1e-4)
    some = generate(tiny, "a red circle", seed=5, num=2, variation_seed=7, variation_strength=0.2, **QUIET)
    assert [one.parameters["seed"] for one in some] == [5, 5]
    assert [one.parameters["variation_seed"] for one in some] == [7, 8]
    lone = generate(tiny, "a red circle", seed=5, variation_seed=8, variation_strength=0.2, **QUIET)[0]
    assert torch.allclose(some[1].latents, lone.latents, atol=1e-4)
    far = [float((one.latents - own.latents).abs().mean()) for one in (lone, other)]
    assert 0 < far[0] < far[1]
    assert not torch.allclose(some[0].latents, lone.latents, atol=1e-2)


def test_parameters_tell_of_it_in_a1111s_words(tiny) -> None:
    asked = {"variation_seed": 8, "variation_strength": 0.2, "seed_size": (24, 40)}
    told = generate(tiny, "a red circle", seed=5, **asked, **QUIET)[0].parameters
    text = a1111_text(told)
    assert "Variation seed: 8, Variation seed strength: 0.2, Seed resize from: 24x40" in text
    keys = ("variation_seed", "variation_strength", "seed_width", "seed_height")
    assert {key: parse_a1111(text)[key] for key in keys} == {key: told[key] for key in keys}
    plain = a1111_text(generate(tiny, "a red circle", seed=5, **QUIET)[0].parameters)
    assert "Variation" not in plain
    assert "Seed resize" not in plain


def start_and_mask() -> tuple[Image.Image, Image.Image]:
    grey = Image.linear_gradient("L")
    start = Image.merge("RGB", [grey.rotate(turn).resize((32, 32)) for turn in (0, 90, 180)])
    mask = Image.new("L", (32, 32))
    mask.paste(255, (8, 8, 24, 24))
    start.paste((255, 0, 0), (8, 8, 24, 24))
    return start, mask


def test_fill_is_a1111s() -> None:
    start, mask = start_and_mask()
    known = Image.new("RGBa", start.size)
    known.paste(start.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(mask))
    wanted = Image.new("RGBA", start.size)
    for radius, repeats in [(256, 1), (64, 1), (16, 2), (4, 4), (2, 2), (0, 1)]:
        for _ in range(repeats):
            wanted.alpha_composite(known.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA"))
    made = np.asarray(_filled_around(start, mask, start.size)).astype(int)
    assert np.abs(made - np.asarray(wanted.convert("RGB"))).max() <= 1
    outside = np.asarray(mask) == 0
    assert np.array_equal(made[outside], np.asarray(start)[outside])
    red = made[~outside].mean(0)  # of the red square nothing is left
    assert red[0] < 200
    assert red[1:].min() > 40


def test_what_the_masked_part_starts_from(tiny) -> None:
    """Fill is the picture filled before; latent noise and nothing are A1111's latents, written down here."""
    start, mask = start_and_mask()
    asked = {"image": start, "mask": mask, "strength": 0.5, "seed": 5, "paste": False, **QUIET}
    made = {
        content: generate(tiny, "a red circle", masked_content=content, **asked)[0]
        for content in ("original", "fill", "noise", "nothing")
    }
    plain = generate(tiny, "a red circle", **asked)[0]
    assert torch.equal(made["original"].latents, plain.latents)
    filled = generate(tiny, "a red circle", **{**asked, "image": _filled_around(start, mask, (32, 32))})[0]
    assert torch.allclose(made["fill"].latents, filled.latents, atol=1e-4)
    names = list(made)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not torch.allclose(made[one].latents, made[other].latents, atol=1e-2), (one, other)
    assert made["noise"].parameters["masked_content"] == "noise"
    assert "Masked content: latent noise" in a1111_text(made["noise"].parameters)
    assert "masked_content" not in plain.parameters


def test_latent_noise_is_the_seeds_own_and_nothing_is_zero(tiny) -> None:
    from darkroom.sample.choice import make_table
    from darkroom.sample.inputs import Spread, StartPicture

    mask = torch.zeros(1, 4, 4)
    mask[:, 1:3, 1:3] = 1
    mean, std = drawn(1, 4, 4, 4), torch.zeros(4, 4, 4)
    table = make_table("euler", tiny.scheduler, 4, strength=0.5)
    levels = [float(level) for level in table.levels_S2[0]]
    for content, inside in (("noise", drawn(5, 4, 4, 4)), ("nothing", torch.zeros(4, 4, 4)), (None, mean)):
        source = StartPicture(Spread(mean, std), Spread(mean, std), mask, False, content)
        generator = torch.Generator().manual_seed(5)
        first, known, _ = source.start(table, 0.5, generator, Noise(5))
        own = torch.Generator().manual_seed(5)
        torch.randn(4, 4, 4, generator=own)  # of the picture's latents
        noise = torch.randn(4, 4, 4, generator=own)
        wanted = levels[0] * torch.where(mask > 0, inside, mean) + levels[1] * noise
        assert torch.allclose(first, wanted, atol=1e-5), content
        assert known is not None
        assert torch.allclose(known.latents_CHW[:, 0], mean[:, 0])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"variation_strength": 0.5}, "variation_strength without variation_seed"),
        ({"variation_seed": 2**63 - 1, "variation_strength": 0.5, "num": 2}, "seed"),
        ({"seed_size": (4, 64)}, "seed_size 4x64"),
        ({"masked_content": "fill"}, "masked_content without a mask"),
        ({"variation_seed": 1, "variation_strength": 1.5}, "variation_strength"),
    ],
)
def test_mistakes_are_told_in_one_line(tiny, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        generate(tiny, "a red circle", **asked, **QUIET)
