"""Reuse of deep features: exact where it must be, by row, and forgotten with the rows."""

from __future__ import annotations

import gc

import pytest
import torch

from darkroom import sample
from darkroom.errors import InputError
from darkroom.sample import denoise, unet_call
from darkroom.sample.choice import make_table
from darkroom.sample.denoise import Condition, Row
from darkroom.sample.optimisations.steps import FeatureCache, Shallow
from darkroom.sample.optimisations.table import conflict, optimise

STEPS = 9


def rows(model, seeds, *, steps=STEPS, guidance=5.0, interval=(0.0, 1.0), step=0):
    table = make_table("ddim", model.scheduler, steps)
    made = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(16, 64, generator=generator)
        latents = torch.randn(4, 8, 8, generator=generator)
        row = Row(table, latents, Condition(text), Condition(torch.zeros(16, 64)), guidance=guidance)
        row.guidance_interval = interval
        made.append(row)
    return made


def finish(unet, some):
    for _ in denoise(unet, some):
        pass
    return torch.stack([row.latents_CHW for row in some])


def cached(model, every=3):
    return optimise(model, f"feature_cache:{every}").unet(unet_call)


def test_a_shallow_pass_on_its_own_features_is_the_whole_pass(tiny, small_xl):
    for model, size, added in ((tiny, 8, {}), (small_xl, 8, xl_conditions(3))):
        unet = model.unet
        parts, seen = Shallow(unet), []
        hook = parts.entrance.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        x = torch.randn(3, 4, size, size)
        text = torch.randn(3, 16, unet.config.cross_attention_dim)
        given = {"encoder_hidden_states": text, "added_cond_kwargs": added or None, "return_dict": False}
        with torch.no_grad():
            whole = unet(x, torch.tensor([5.0, 300.0, 900.0]), **given)[0]
            hook.remove()
            parts.features = seen[0][:, : seen[0].shape[1] - parts.skip_channels()]
            shallow = parts(x, torch.tensor([5.0, 300.0, 900.0]), **given)[0]
            parts.features = torch.zeros_like(seen[0][:, : seen[0].shape[1] - parts.skip_channels()])
            without = parts(x, torch.tensor([5.0, 300.0, 900.0]), **given)[0]
        assert torch.equal(whole, shallow)
        assert (whole - without).abs().max() > 0.01


def xl_conditions(rows):
    return {"text_embeds": torch.randn(rows, 32), "time_ids": torch.rand(rows, 6) * 16}


def test_only_every_nth_step_runs_the_whole_unet(tiny):
    applied = optimise(tiny, "feature_cache:3")
    calls: list[int] = []
    applied.model.unet.mid_block.register_forward_hook(lambda *_: calls.append(1))
    finish(applied.unet(unet_call), rows(tiny, [0, 1]))
    assert len(calls) == STEPS // 3


def test_pictures_stay_near_and_the_more_is_reused_the_further_off(tiny):
    plain = finish(unet_call(tiny.unet), rows(tiny, [0, 1, 2]))
    errors = [
        (finish(cached(tiny, every), rows(tiny, [0, 1, 2])) - plain).abs().mean() for every in (2, 4, 8)
    ]
    other = finish(unet_call(tiny.unet), rows(tiny, [7, 8, 9]))
    assert 0 < errors[0] < errors[1] < errors[2] < 0.25 * (other - plain).abs().mean()


def test_a_second_run_keeps_nothing_of_the_first(tiny):
    unet = cached(tiny)
    first = finish(unet, rows(tiny, [0, 1]))
    finish(unet, rows(tiny, [5], steps=4))
    assert torch.equal(finish(unet, rows(tiny, [0, 1])), first)
    assert not torch.equal(finish(unet, rows(tiny, [2, 3])), first)


def test_a_run_broken_off_leaves_nothing_behind(tiny):
    unet = cached(tiny)
    alone = finish(cached(tiny), rows(tiny, [0]))
    broken = rows(tiny, [0])
    steps = denoise(unet, broken)
    next(steps)
    steps.close()
    assert isinstance(unet, FeatureCache)
    assert len(unet._kept) == 1
    del broken, steps
    gc.collect()
    assert len(unet._kept) == 0
    assert torch.equal(finish(unet, rows(tiny, [0])), alone)


def test_a_picture_does_not_depend_on_who_shares_its_batch(tiny):
    alone = finish(cached(tiny), rows(tiny, [0]))
    unet, shared = cached(tiny), rows(tiny, [0])
    late = rows(tiny, [4], steps=6)
    for state in denoise(unet, shared):
        if state.index == 1:  # joins at another phase of the cycle: whole and shallow rows in one batch
            shared += late
    torch.testing.assert_close(shared[0].latents_CHW, alone[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        late[0].latents_CHW, finish(cached(tiny), rows(tiny, [4], steps=6))[0], atol=1e-4, rtol=1e-4
    )


def test_rows_that_begin_to_be_guided_have_no_stale_features(tiny):
    interval = (0.34, 0.8)
    plain = finish(unet_call(tiny.unet), rows(tiny, [0, 1], interval=interval))
    near = finish(cached(tiny, 2), rows(tiny, [0, 1], interval=interval))
    assert 0 < (near - plain).abs().mean() < 0.2 * plain.abs().mean()


def test_calls_in_parts_are_the_same(tiny):
    applied = optimise(tiny, "feature_cache:3")
    applied.rows_a_call = 1
    parted = finish(applied.unet(unet_call), rows(tiny, [0, 1, 2]))
    torch.testing.assert_close(parted, finish(cached(tiny), rows(tiny, [0, 1, 2])), atol=1e-4, rtol=1e-4)


def test_it_is_told_with_the_pictures(tiny):
    made = sample.generate(tiny, "a red circle", steps=4, optimise="feature_cache:2")
    assert any("feature_cache" in note for note in made[0].parameters["notes"])
    assert made[0].parameters["optimise"] == ["feature_cache:2"]


@pytest.mark.parametrize("names", ["feature_cache,cuda_graphs", "feature_cache,compile"])
def test_it_does_not_go_with_one_piece_of_code(tiny, names):

    assert conflict(*names.split(","))
    with pytest.raises(InputError):
        optimise(tiny, names)
