"""Routing and alignment: the maths against a plain reference, and through the trainer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from darkroom import models
from darkroom.errors import RecipeError
from darkroom.evaluate.extractors import open_extractor
from darkroom.evaluate.settings import SmallSettings
from darkroom.evaluate.small import SmallExtractor, TrainingHashes, normalised, save_small
from darkroom.recipe import Recipe
from darkroom.recipe.sections import AlignSettings, RoutingSettings
from darkroom.run import Run
from darkroom.train.run import train
from darkroom.train.tasks.repa import (
    Projector,
    RoutingAndAlignment,
    draw_bits,
    kept_tokens,
    make_extras,
    seen,
)
from train.conftest import SIDE, TEXT, VAE, MakeRecipe

DIT = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 8}
MODEL = {"base": "tiny-dit", "vae": VAE, "unet": DIT, "text_encoder": TEXT}


def network(seed: int = 3) -> Any:
    """A transformer with open gates, in float64."""
    made = models.create("tiny-dit", seed=seed, parts=("unet",), overrides={"transformer": DIT}).unet
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in made.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=draw))
    return made.double()


def given(rows: int = 3, side: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, side, side, generator=draw).double()
    return x, torch.linspace(90.0, 700.0, rows), torch.randn(rows, 5, 64, generator=draw).double()


def extras(**routing: Any) -> RoutingAndAlignment:
    settings = RoutingSettings(**routing)
    return RoutingAndAlignment(settings, (settings.before, 4 - settings.after), 2, AlignSettings())


# ---- which tokens are kept


def test_tokens_are_kept_by_the_rows_own_draw() -> None:
    u = torch.rand(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept = kept_tokens(draw_bits(u), 16, 6)
    assert kept.shape == (4000, 6)
    assert (kept.diff(dim=1) > 0).all()  # rising, none twice
    alone = torch.cat([kept_tokens(draw_bits(one[None]), 16, 6) for one in u[:50]])
    assert torch.equal(kept[:50], alone)
    share = torch.bincount(kept.flatten(), minlength=16) / 4000
    assert (share - 6 / 16).abs().max() < 0.03  # 4 standard deviations
    early = kept[u < 0.5]  # the time, which comes of the same draw, does not tell which
    share = torch.bincount(early.flatten(), minlength=16) / len(early)
    assert (share - 6 / 16).abs().max() < 0.045
    assert (kept[0] != kept[1]).any()


def by_hand(made: Any, keep_BK: Tensor, first: int, last: int) -> Tensor:
    """Row by row with lists of tokens, as the definition says it."""
    from darkroom.models.dit import GATES, modulated, patches, pictures, waves

    x, t, text = given(len(keep_BK))
    found = []
    for b, keep in enumerate(keep_BK.tolist()):
        tokens = made.patch_in(patches(x[b : b + 1], 2))
        time = made.time_in(waves(t[b : b + 1]).double())
        told = made.modulation(F.silu(time)).unflatten(-1, (GATES, -1))
        read = made.text_in(text[b : b + 1])
        cos, sin = made._turns(4, 4, x.device)
        for i, block in enumerate(made.blocks):
            if first <= i < last:
                part = block(tokens[:, keep], read, told, (cos[:, :, keep], sin[:, :, keep]))
                rows = [part[:, keep.index(n)] if n in keep else tokens[:, n] for n in range(16)]
                tokens = torch.stack(rows, dim=1)
            else:
                tokens = block(tokens, read, told, (cos, sin))
        shift, scale = (made.out_table + time[:, None]).unbind(1)
        found.append(pictures(made.patch_out(modulated(tokens, shift, scale)), 4, 4, 2))
    return torch.cat(found)


@pytest.mark.parametrize(("first", "last"), [(1, 3), (0, 4), (2, 4)])
def test_routing_and_its_gradient_are_the_definitions(first: int, last: int) -> None:
    made = network()
    keep = kept_tokens(draw_bits(torch.tensor([0.3, 0.6, 0.9])), 16, 7)
    x, t, text = given()
    out = made(x, t, text, keep_BK=keep, route=(first, last), return_dict=False)[0]
    expected = by_hand(made, keep, first, last)
    torch.testing.assert_close(out, expected, atol=1e-9, rtol=0)
    weights = list(made.parameters())
    ours, theirs = (torch.autograd.grad(y.square().mean(), weights) for y in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-6)
    plain = made(x, t, text, return_dict=False)[0]
    assert (plain - out).abs().max() > 1e-3


def test_a_loss_of_kept_tokens_counts_no_other() -> None:
    some = extras(keep=0.25, after=0, loss="kept")
    keep = some.keep(draw_bits(torch.tensor([0.1, 0.7])), 16)
    assert keep is not None
    assert keep.shape == (2, 4)
    mask = some.mask(keep, (4, 4))
    assert mask is not None
    assert mask.shape == (2, 1, 8, 8)
    assert mask.sum(dim=(1, 2, 3)).tolist() == [16.0, 16.0]
    first = keep[0, 0].item()
    row, column = 2 * (first // 4), 2 * (first % 4)
    assert mask[0, 0, row : row + 2, column : column + 2].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert extras(keep=0.25).mask(keep, (4, 4)) is None
    assert extras().keep(None, 16) is None


# ---- alignment


def write_extractor(folder: Path, side: int = SIDE) -> Path:
    """darkroom's own small extractor, untrained."""
    torch.manual_seed(7)
    empty = np.zeros(0, np.int64)
    made = SmallExtractor(SmallSettings(width=8, levels=3), resolution=side)
    save_small(made, folder, TrainingHashes(empty, empty).tensors())
    return folder


@pytest.fixture(scope="module")
def extractor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_extractor(tmp_path_factory.mktemp("extractors") / "small")


def test_features_are_the_map_as_fine_as_the_tokens(extractor: Path) -> None:
    opened = open_extractor(extractor)
    pixels = torch.randint(0, 256, (2, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(0)).byte()
    assert opened.maps is not None
    maps = opened.maps(normalised(pixels))
    assert [m.shape[-1] for m in maps] == [8, 4, 2]
    found = seen(opened, pixels, (4, 4))
    torch.testing.assert_close(found, maps[1].flatten(2).transpose(1, 2), atol=1e-5, rtol=0)
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert seen(opened, pixels, (16, 16)).shape == (2, 256, maps[2].shape[1])  # none is as fine
    assert seen(opened, torch.zeros(1, 3, 32, 32).byte(), (4, 4)).shape == (1, 16, maps[1].shape[1])


def test_alignment_teaches_the_blocks_before_its_own() -> None:
    made, projector = network(), Projector(16, 32, 6).double()
    x, t, text = given()
    some = RoutingAndAlignment(RoutingSettings(), (2, 3), 2, AlignSettings(), 1, projector)
    features = torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(4)).double()
    _, tapped = made(x, t, text, return_dict=False, **some.arguments(None))
    distance = some.distance(tapped, features, None)
    expected = 1 - F.cosine_similarity(projector(tapped), features, dim=-1).mean(dim=1)
    torch.testing.assert_close(distance, expected.float())
    assert some.distance(tapped, projector(tapped).detach(), None).abs().max() < 1e-6
    distance.mean().backward()
    touched = [block.attn1.to_q.weight.grad is not None for block in made.blocks]
    assert touched == [True, True, False, False]
    assert projector.layers[0].weight.grad.abs().max() > 0


def test_alignment_of_a_routed_block_takes_the_kept_tokens() -> None:
    some = RoutingAndAlignment(
        RoutingSettings(keep=0.5, before=1), (1, 3), 2, AlignSettings(), 2, Projector(4, 8, 4)
    )
    keep = torch.tensor([[0, 3]])
    features = torch.eye(4)[None]

    class Same(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    object.__setattr__(some, "projector", Same())
    assert some.distance(features[:, [0, 3]], features, keep).item() == pytest.approx(0.0, abs=1e-6)
    assert some.distance(features[:, [3, 0]], features, keep).item() == pytest.approx(1.0, abs=1e-6)


# ---- through the trainer


def dit(recipe_of: MakeRecipe, *overrides: str, model: dict[str, Any] = MODEL) -> Recipe:
    return recipe_of("pretrain", "data.holdout=4", *overrides, model=model)


def trained(recipe: Recipe, out: Path) -> list[dict[str, Any]]:
    train(recipe, out=out, console=lambda _: None)
    return [row for row in Run.open(out).metrics() if "loss" in row]


@pytest.fixture(scope="module")
def plain(recipe_of: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "run"
    trained(dit(recipe_of), out)
    return out


def weights(run: Path) -> dict[str, Tensor]:
    return dict(models.load(run / "model").unet.state_dict())


def test_routing_through_the_trainer(plain: Path, recipe_of: MakeRecipe, tmp_path: Path) -> None:
    first = [row["loss"] for row in Run.open(plain).metrics() if "loss" in row]
    recipe = dit(recipe_of, "train.routing.keep=0.5", "train.routing.before=1")
    rows = trained(recipe, tmp_path / "run")
    # A fresh transformer answers zero, whatever it sees; from then on it is another run.
    assert rows[0]["loss"] == pytest.approx(first[0], abs=1e-6)
    assert abs(rows[-1]["loss"] - first[-1]) > 1e-6
    assert weights(tmp_path / "run").keys() == weights(plain).keys()
    everything = dit(recipe_of, "train.routing.keep=0.999", "train.routing.before=1")  # 16 of 16 tokens
    again = [row["loss"] for row in trained(everything, tmp_path / "all")]
    assert np.abs(np.array(again) - first).max() < 1e-6
    masked = dit(recipe_of, "train.routing={keep: 0.25, before: 1, after: 0, loss: kept}")
    assert abs(trained(masked, tmp_path / "masked")[0]["loss"] - first[0]) > 1e-4


def test_alignment_through_the_trainer(
    plain: Path, extractor: Path, recipe_of: MakeRecipe, tmp_path: Path
) -> None:
    align = (f"train.align.extractor={extractor}", "train.align.block=2", "train.align.hidden=16")
    recipe = dit(recipe_of, *align, "optim.lr=0.02", "train.micro_batch=4")
    rows = trained(recipe, tmp_path / "run")
    for row in rows:
        assert row["loss"] == pytest.approx(row["denoise_loss"] + 0.5 * row["align_loss"], rel=1e-5)
    assert rows[-1]["align_loss"] < rows[0]["align_loss"]
    first = next(row["loss"] for row in Run.open(plain).metrics() if "loss" in row)
    assert rows[0]["denoise_loss"] == pytest.approx(first, abs=1e-6)
    assert weights(tmp_path / "run").keys() == weights(plain).keys()  # the projector stays in the run
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    shutil.rmtree(again / "model")
    shutil.rmtree(again / "checkpoints" / "step-00000004")
    assert [row["loss"] for row in trained(recipe, again)] == [row["loss"] for row in rows]
    one, other = weights(tmp_path / "run"), weights(again)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_both_together_in_bf16_with_checkpointing(
    extractor: Path, recipe_of: MakeRecipe, tmp_path: Path
) -> None:
    recipe = dit(
        recipe_of,
        f"train.align.extractor={extractor}",
        "train.routing={keep: 0.5, before: 1}",
        "train.precision=bf16",
        "train.gradient_checkpointing=true",
    )
    rows = trained(recipe, tmp_path / "run")
    assert np.isfinite([row["loss"] for row in rows]).all()


REFUSED = [
    (("train.routing.before=1",), r"train.routing: given, but train.routing.keep is 1"),
    (("train.align.weight=1",), r"train.align: given without an extractor"),
    (("train.routing={keep: 0.5, before: 2, after: 2}",), r"before 2 and after 2 leave none of 4 blocks"),
    (("train.align.extractor={here}", "train.align.block=5"), r"train.align.block: 5 of 4 blocks"),
    (("train.align.extractor={here}", "data.flip=true"), r"data.flip: true with train.align"),
    (("train.align.extractor={here}", "data.crop=random"), r"data.crop: random with train.align"),
]


@pytest.mark.parametrize(("overrides", "told"), REFUSED)
def test_what_cannot_be_is_refused(
    overrides: tuple[str, ...], told: str, extractor: Path, recipe_of: MakeRecipe, tmp_path: Path
) -> None:
    said = [override.replace("{here}", str(extractor)) for override in overrides]
    with pytest.raises(RecipeError, match=told):
        train(dit(recipe_of, *said), out=tmp_path / "run", console=lambda _: None)
    assert not (tmp_path / "run").exists()


def test_a_u_net_has_neither(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train.routing: given, but the model has a U-Net"):
        train(recipe_of("pretrain", "train.routing.keep=0.5"), out=tmp_path / "run", console=lambda _: None)
    settings, cpu = recipe_of("pretrain").train, torch.device("cpu")
    assert make_extras(settings.routing, settings.align, models.create("tiny"), cpu, side=16, seed=0) is None


def test_phases_set_both_anew(recipe_of: MakeRecipe, extractor: Path, tmp_path: Path) -> None:

    phases = "[{resolution: 16, samples: 16, keep: 0.5}, {resolution: 32, samples: 16, keep: 1, align: 0}]"
    align = f"train.align.extractor={extractor}"
    recipe = dit(recipe_of, f"phases={phases}", "train.routing={keep: 0.25, before: 1}", align)
    (_, first), (_, second) = recipe.in_phases(tmp_path)
    assert (first.train.routing.keep, first.train.routing.before) == (0.5, 1)
    assert first.train.align.extractor == str(extractor)
    assert second.train.routing == RoutingSettings()
    assert second.train.align == AlignSettings()
