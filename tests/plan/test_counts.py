"""Straight lines: their envelope, memory by kind, and what the real code's lines say of other batch sizes."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from darkroom import count_cache
from darkroom.hardware.cards import find_card
from darkroom.plan import counts, targets
from darkroom.plan.counts import KINDS, Kernels, Line, Moment, Profile, highest
from darkroom.plan.roofline import Roofline, Software


def moment(stage, fixed, row, kind="activations"):
    return Moment(stage, {name: Line(fixed, row) if name == kind else Line(0, 0) for name in KINDS})


def test_a_line_goes_through_both_points():
    line = Line.through((2, 3), (14.0, 17.0))
    assert (line.fixed, line.row, line.at(10)) == (8.0, 3.0, 38.0)


def test_only_moments_that_can_be_the_peak_are_kept():
    flat, steep, low = moment("forward", 100, 1), moment("forward", 10, 10), moment("forward", 5, 2)
    kept = highest([flat, steep, low])
    assert kept == (flat, steep)
    profile = Profile((), kept, {}, 0)
    assert sum(profile.memory(2).values()) == 102
    assert sum(profile.memory(20).values()) == 210


def test_accumulation_keeps_gradients_alive_and_shards_share_them():
    kept = (moment("forward", 100, 10), moment("update", 80, 0, kind="gradients"))
    profile = Profile((), kept, {}, 0)
    assert sum(profile.memory(1).values()) == 110
    assert sum(profile.memory(1, accumulate=True).values()) == 190
    assert sum(profile.memory(1, accumulate=True, shards=4).values()) == 130


def test_encoders_never_take_more_than_their_chunk():
    profile = Profile((), (moment("inputs", 0, 10),), {}, 0, {"inputs": 4})
    assert sum(profile.memory(2, step_rows=100).values()) == 40


@pytest.fixture(scope="module")
def counted():
    from darkroom.plan.training import profile_recipe
    from darkroom.recipe import make_recipe

    recipe = make_recipe(
        {"task": "pretrain", "model": {"base": "tiny"}, "data": {"store": "no such store", "resolution": 64}}
    )
    return profile_recipe(recipe.dump(), "float32", gpu=True)


def test_a_recipe_is_counted_without_store_weights_or_gpu(counted):
    trained = counted.trained
    assert trained == counted.parameters["unet"] == 1_077_572
    held = counted.memory(1)
    assert held["ema"] == pytest.approx(4 * trained, rel=0.1)  # each tensor is rounded up to 512 bytes
    assert held["optimiser"] == pytest.approx(8 * trained, rel=0.15)
    assert counted.gradient_bytes == pytest.approx(4 * trained, rel=0.1)
    assert held["weights"] >= 4 * counted.total_parameters


def test_a_profile_comes_back_from_plain_values(counted):
    again = Profile.from_dict(counted.to_dict())
    assert again.memory(7) == counted.memory(7)
    assert again.flops(7) == counted.flops(7)


def test_a_process_keeps_some_of_what_it_frees():
    """Of activations alone; weights are never freed. A run that frees in its forward pass gives all back."""

    def kept(stage, **facts):
        moments = (moment(stage, 100, 10), moment(stage, 1000, 0, kind="weights"))
        held = [Profile((), (one,), {}, 0, {"latents": 4}, facts).memory(4, keeps=True) for one in moments]
        assert held[1]["allocator"] == 0
        return held[0]["allocator"] / held[0]["activations"]

    assert 0.1 < kept("forward") < kept("denoise") <= 0.5
    assert 0 < kept("latents") < kept("forward")
    assert {kept(stage, frees_in_forward=True) for stage in ("latents", "backward", "denoise")} == {0}
    assert "allocator" not in Profile((), (moment("forward", 1, 1),), {}, 0).memory(4)


def test_large_pictures_and_small_gradients_are_kept_differently():
    """Blocks from 32 MB on go back at once; small layers' gradients leave holes for the next activations."""

    def kept(stage, alive, **facts):
        return Profile((), (moment(stage, alive, 0),), {}, 0, {}, facts).memory(1, keeps=True)["allocator"]

    assert kept("decode", 1e8) == pytest.approx(0.5e8)
    assert kept("decode", 8e9) == kept("decode", 4e9) < 0.5e9
    plain = kept("backward", 1e9)
    assert kept("backward", 1e9, small_gradient_bytes=6e8) == pytest.approx(plain + 3e8)
    assert kept("backward", 1e9, small_gradient_bytes=6e9) == pytest.approx(
        plain + 5e8
    )  # no more than is alive
    assert kept("decode", 1e8, small_gradient_bytes=6e8) == pytest.approx(0.5e8)


NO_EFFECT = {
    "train": {
        "steps": 7, "global_batch": 12, "micro_batch": 3, "precision": "bf16", "device": "cpu", "seed": 5,
        "log_every": 3, "compile": "whole", "tf32": True, "cudnn_benchmark": True,
    },
    "optim": {"lr": 3e-4, "warmup_steps": 2, "lr_schedule": "cosine", "final_lr_ratio": 0.1},
    "data": {"filter": "width > 8", "holdout": 2, "workers": 1, "prefetch_batches": 2, "store": "another",
             "cache": "rows", "cache_gb": 3},
    "sample": {"seed": 4, "steps": 9, "solver": "ddim"},
    "parallel": {"reduce": "bf16", "shard": "full"},
    "checkpoint": {"every": 9},
    "evaluate": {"rows": 3, "timesteps": 3},
    "track": {"wandb": "a project"},
    "budget": {"usd": 3},
}  # fmt: skip


def as_counted(recipe):
    """A recipe's text without what its counts do not depend on."""
    changes = targets.as_counted(recipe.train, recipe.optim, recipe.data, recipe.sample)
    return recipe.model_copy(update=changes).dump()


def test_recipes_that_differ_in_nothing_that_is_counted_share_one_count(counted):
    from darkroom.plan.training import profile_recipe
    from darkroom.recipe import make_recipe

    content = {
        "task": "pretrain", "model": {"base": "tiny"}, "data": {"store": "no such store", "resolution": 64},
    }  # fmt: skip
    plain = make_recipe(content)
    other = make_recipe({**content, **NO_EFFECT, "data": {**content["data"], **NO_EFFECT["data"]}})
    named = {*((a, b) for a in targets.NO_EFFECT for b in targets.NO_EFFECT[a])}
    assert named <= {(a, b) for a in NO_EFFECT for b in NO_EFFECT[a]}
    assert {*targets.NO_EFFECT_SECTIONS} <= NO_EFFECT.keys()
    assert as_counted(other) == as_counted(plain) != plain.dump()
    assert profile_recipe(other.dump(), "float32", gpu=True) == counted
    for told in ("optim.unet_lr=1e-3", "train.ema.enabled=false", "data.encode=inline", "sample.num=3"):
        assert as_counted(make_recipe(content, [told])) != as_counted(plain)


def test_counts_that_come_with_darkroom_are_taken_of_the_same_question_and_libraries(tmp_path, monkeypatch):
    key, made = {"job": "any"}, []

    def count():
        made.append(1)
        return {"flops": len(made)}

    file = tmp_path / "common.json.gz"
    file.write_bytes(gzip.compress(json.dumps({count_cache.shipped_digest(key): {"flops": 7}}).encode()))
    monkeypatch.setattr(counts, "SHIPPED", file)
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path / "cache"))
    assert (counts.cached(key, count), made) == ({"flops": 7}, [])
    real = count_cache._version
    monkeypatch.setattr(count_cache, "_version", lambda name: f"{real(name)}.post1+cu130")  # the same release
    assert (counts.cached(key, count), made) == ({"flops": 7}, [])
    assert (counts.cached({"job": "other"}, count), made) == ({"flops": 1}, [1])
    monkeypatch.setattr(count_cache, "_version", lambda name: f"9.{real(name)}")
    assert (counts.cached(key, count), made) == ({"flops": 2}, [1, 1])
    assert (counts.cached(key, count), made) == ({"flops": 2}, [1, 1])  # kept here from then on
    monkeypatch.setattr(count_cache, "_version", real)
    assert (counts.cached(key, count), made) == ({"flops": 7}, [1, 1])
    # A stale file costs a count, never its figure.
    monkeypatch.setattr(count_cache, "_code", lambda: "changed")
    assert (counts.cached(key, count), made) == ({"flops": 3}, [1, 1, 1])


RUN_BESIDES = {
    "count_cache.py",  # knows a count by its code
    "errors.py",
    "lazy.py",  # which module is imported when
    "libraries.py",  # and which library
    "hardware/system.py",  # reads files
    "plan/ask.py",  # asks for the count
}
"""What runs while a count is made and changes none."""


def test_counts_are_known_by_all_the_code_that_makes_them(tmp_path, monkeypatch):
    """Every function of darkroom's that runs in between is in a file of CODE."""
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path))
    monkeypatch.setattr(counts, "SHIPPED", tmp_path / "none")
    ran, root = set[str](), Path(counts.__file__).parents[1]

    def seen(frame, event, _):
        if event == "call" and not frame.f_code.co_name.startswith("<module"):
            ran.add(frame.f_code.co_filename)

    def watched(key, make):
        def made():
            sys.setprofile(seen)
            try:
                return make()
            finally:
                sys.setprofile(None)

        return real(key, made)

    from darkroom.plan import ask, targets
    from darkroom.recipe import make_recipe

    for name in ("tracing", "training"):  # what runs while they are imported counts nothing
        importlib.import_module(f"darkroom.plan.{name}")
    real = counts.cached_profile
    for module in (ask, targets):
        monkeypatch.setattr(module, "cached_profile", watched)
    recipe = make_recipe(
        {"task": "lora", "model": {"base": "tiny"}, "data": {"folder": "here", "resolution": 64}}
    )
    ask.ask_recipe_object(recipe).profile("float32", False)
    targets.picture_profile("tiny", 64, 64, True, "float32", "fused")
    targets.preparing_profile("tiny", 64, True, "float32")
    own = {Path(name).relative_to(root).as_posix() for name in ran if Path(name).is_relative_to(root)}
    covered = {
        name for name in own if any(name == one or name.startswith(f"{one}/") for one in count_cache.CODE)
    }
    assert "sample/denoise.py" in covered
    assert own - covered <= RUN_BESIDES


@pytest.mark.nightly
def test_counts_that_come_with_darkroom_are_what_its_code_counts(monkeypatch):
    """Of every ninth command; benchmarks/plan/common_counts.py --check does it for all."""
    if not counts.SHIPPED.is_file():
        pytest.skip("no counts come with this checkout: benchmarks/plan/common_counts.py makes them")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks" / "plan")
    import common_counts

    monkeypatch.chdir(common_counts.ROOT)
    now = common_counts.counted(common_counts.commands()[::9])
    assert now
    assert common_counts.differing(now) == []
    digest, content = next(iter(now.items()))
    assert common_counts.differing({**now, digest: {**content, "trained": -1}}) == [digest]


def test_two_batch_sizes_of_an_encoder_tell_a_third():
    from darkroom.models.outline import outlined
    from darkroom.plan.tracing import PrepareSpec, _trace_encoders, fakes, profile_of

    model, spec = outlined("tiny", ("vae",)), PrepareSpec("tiny", 64, precision="float32")
    with fakes(*model.modules.values()) as counter:
        two, three, eight = (_trace_encoders(counter, model, spec, rows) for rows in (2, 3, 8))
    told = profile_of((two, three), (2, 3), parameters={}, trained=0)
    counted = profile_of((three, eight), (3, 8), parameters={}, trained=0)
    assert told.flops(8) == pytest.approx(counted.flops(8), rel=1e-9)
    assert sum(told.memory(8).values()) == pytest.approx(sum(counted.memory(8).values()), rel=0.01)
    assert told.flops(8) > 2.5 * told.flops(3)


@pytest.mark.nightly
def test_two_batch_sizes_tell_a_third(counted, monkeypatch):
    from darkroom.plan import training
    from darkroom.recipe import make_recipe

    recipe = make_recipe(
        {"task": "pretrain", "model": {"base": "tiny"}, "data": {"store": "no such store", "resolution": 64}}
    )
    traced = training.trace_training
    monkeypatch.setattr(
        training, "trace_training", lambda *args, rows, **more: tuple(traced(*args, rows=(8, 9), **more))
    )
    monkeypatch.setattr(training, "profile_of", lambda traces, _, **known: real(traces, (8, 9), **known))
    from darkroom.plan.tracing import profile_of as real

    other = training.profile_recipe(recipe.dump(), "float32", gpu=True)
    assert counted.flops(8) == pytest.approx(other.flops(8), rel=1e-9)
    assert sum(counted.memory(8).values()) == pytest.approx(sum(other.memory(8).values()), rel=0.01)
    assert sum(counted.memory(8).values()) > 1.3 * sum(counted.memory(2).values())


def test_a_transformers_recipe_and_pictures_are_counted():
    """Fewer FLOPs where tokens are routed; guidance doubles the rows of a picture's step."""
    from darkroom.plan.tracing import GenerateSpec, profile_generation
    from darkroom.plan.training import profile_recipe
    from darkroom.recipe import make_recipe

    def recipe(*overrides):
        content = {
            "task": "pretrain",
            "model": {"base": "tiny-dit"},
            "data": {"store": "no such store", "resolution": 64, "text": "stored"},
        }
        return profile_recipe(make_recipe(content, overrides).dump(), "float32", gpu=True)

    plain, routed = recipe(), recipe("train.routing={keep: 0.5, before: 1, after: 1}")
    assert plain.trained == plain.parameters["unet"]
    assert 0.6 * plain.flops(8) < routed.flops(8) < 0.9 * plain.flops(8)
    one, guided = (
        profile_generation(GenerateSpec("tiny-dit", 64, 64, guided=guided, precision="float32"))
        for guided in (False, True)
    )
    assert guided.flops(4, "denoise") == pytest.approx(2 * one.flops(4, "denoise"), rel=0.01)


def test_a_runs_own_latents_can_be_the_peak():
    """A small adapter trains in less than its pictures' latents were made in, many at once and in float32."""
    from darkroom.plan.tracing import PrepareSpec, profile_preparing
    from darkroom.plan.training import profile_recipe
    from darkroom.recipe import make_recipe

    def recipe(encode):
        content = {
            "task": "lora",
            "model": {"base": "tiny"},
            "data": {"folder": "x", "resolution": 64, "encode": encode},
            "adapter": {"rank": 4},
        }
        return profile_recipe(make_recipe(content, ()).dump(), "bf16", gpu=True)

    made, inline = recipe("auto"), recipe("inline")
    encoders = profile_preparing(PrepareSpec("tiny", 64, precision="float32"))
    beside = 2 * made.parameters["unet"] + 4 * made.parameters["text_encoder"]
    at_once = 2**19 // 64**2
    assert sum(made.memory(1).values()) == pytest.approx(
        sum(encoders.memory(at_once).values()) + beside, rel=0.02
    )
    assert made.memory(1) == made.memory(2)  # whatever the batch will be
    trains = replace(made, moments=tuple(one for one in made.moments if one.stage != "latents"))
    assert sum(made.memory(1).values()) > 2 * sum(trains.memory(1).values())
    # Of these too the work is counted, apart from a step's; inline it is done at each step.
    assert made.flops(1, "latents") == pytest.approx(encoders.flops(1), rel=0.001)
    assert inline.flops(1) == pytest.approx(made.flops(1) + encoders.flops(1), rel=0.001)


def test_families_whose_vae_overflows_in_fp16_are_planned_to_decode_in_float32(tmp_path):
    from darkroom.models.families import FAMILIES

    upcast = {name for name, family in FAMILIES.items() if family.vae.get("force_upcast")}
    assert set(targets.DECODES_IN_FLOAT32) == upcast
    (tmp_path / "vae").mkdir()
    for told in (True, False):
        (tmp_path / "vae" / "config.json").write_text(json.dumps({"force_upcast": told}))
        assert targets._decodes_in_float32(str(tmp_path)) is told


def test_decoding_in_float32_takes_longer_in_fp16_alone():
    """SDXL's VAE: in bf16 it is computed as it is."""
    kernels = (Kernels("decode", "conv", 1, Line(0, 1e12), Line(0, 1e6)),)
    profiles = {
        told: Profile(kernels, (), {}, 0, facts={"decodes_in_float32": told}) for told in (True, False)
    }
    h100 = find_card("H100")
    assert h100 is not None
    seconds = {
        (half, told): Roofline(h100, Software(half)).stage(profiles[told], "decode", 1).total
        for half in ("bf16", "fp16")
        for told in (True, False)
    }
    assert seconds["bf16", True] == seconds["bf16", False]
    assert seconds["fp16", True] > 1.5 * seconds["fp16", False]
