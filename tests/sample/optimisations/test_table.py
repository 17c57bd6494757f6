"""Each lossless optimisation against the plain model, the lossy ones against their claims, and refusals."""

from __future__ import annotations

import copy
import importlib
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from darkroom import models, sample
from darkroom.errors import InputError
from darkroom.models.adapters.adapter import Change
from darkroom.models.adapters.bank import Bank, Staged, lay_out
from darkroom.sample import optimisations
from darkroom.sample.likeness import likeness
from darkroom.sample.optimisations import compiled, table
from models.made_adapters import made

SETTINGS = {"steps": 4, "seed": 3, "guidance": 5.0, "size": (64, 32)}
LOSSLESS_HERE = [
    "auto",
    "channels_last",
    "fused_attention",
    "fused_qkv",
    "lean",
    "attention_slicing",
    "attention_slicing:1",
    "attention_slicing:max",
    "vae_slicing",
    "fused_qkv,channels_last,vae_slicing",
]


def pictures(model, names, prompt="a red circle", **changes):
    return sample.generate(model, prompt, optimise=names, **{**SETTINGS, **changes})


def furthest(some, others):
    """The largest difference in levels of any pixel."""
    return likeness([p.image for p in some], [p.image for p in others])["max_diff"]


def latents(some):
    return torch.stack([picture.latents for picture in some])


@pytest.fixture(scope="module")
def plain(tiny):
    return pictures(tiny, "none", num=3)


@pytest.mark.parametrize("names", LOSSLESS_HERE)
def test_lossless_ones_give_the_same_picture(tiny, plain, names):
    made = pictures(tiny, names, num=3)
    assert furthest(made, plain) <= 2
    torch.testing.assert_close(latents(made), latents(plain), atol=1e-4, rtol=1e-4)


def test_the_comparison_can_fail(tiny, plain):
    assert furthest(pictures(tiny, "none", num=3, seed=9), plain) >= 10
    assert furthest(pictures(tiny, "none", num=3, prompt="an astronaut riding a horse"), plain) >= 10


@pytest.mark.parametrize("names", ["channels_last", "fused_qkv", "lean", "attention_slicing", "vae_slicing"])
def test_the_same_holds_for_sdxl(small_xl, names):
    changes = {"size": (32, 16), "steps": 3}
    plain = pictures(small_xl, "none", **changes)
    assert furthest(pictures(small_xl, names, **changes), plain) <= 2
    assert furthest(pictures(small_xl, names, seed=8, **changes), plain) >= 10


def test_bf16_is_as_near_to_float32_as_a_bf16_model(plain, tiny):
    half = models.create("tiny", seed=1).to(dtype=torch.bfloat16)
    cast, stacked = pictures(tiny, "bf16", num=3), pictures(tiny, "bf16,channels_last,fused_qkv", num=3)
    errors = [
        (latents(p) - latents(plain)).abs().mean() for p in (pictures(half, "none", num=3), cast, stacked)
    ]
    assert 0 < errors[1] <= 1.5 * errors[0]
    assert 0 < errors[2] <= 1.5 * errors[0]
    assert cast[0].parameters["precision"] == "bfloat16"


def test_the_model_stays_as_it_was(tiny, plain):
    before = {name: value.clone() for name, value in tiny.unet.state_dict().items()}
    kinds = [type(processor) for processor in tiny.unet.attn_processors.values()]
    for names in ("bf16,channels_last,fused_qkv", "attention_slicing:1", "feature_cache:3,guidance_interval"):
        pictures(tiny, names)
    assert {name: value.dtype for name, value in tiny.unet.state_dict().items()} == {
        name: value.dtype for name, value in before.items()
    }
    assert all(torch.equal(value, before[name]) for name, value in tiny.unet.state_dict().items())
    assert [type(processor) for processor in tiny.unet.attn_processors.values()] == kinds
    assert not any(module._forward_pre_hooks for module in tiny.unet.modules())
    assert torch.equal(latents(pictures(tiny, "none", num=3)), latents(plain))


def test_a_look_alike_takes_no_memory(tiny):
    twin = optimisations.optimise(tiny, "fused_qkv").model.unet
    assert twin is not tiny.unet
    assert twin.conv_in.weight.data_ptr() == tiny.unet.conv_in.weight.data_ptr()


def test_every_optimisation_is_listed_with_what_it_is():
    assert {
        *("tf32", "fp16", "bf16", "autocast", "channels_last", "fused_attention", "fused_qkv", "compile"),
        *("compile_regional", "cuda_graphs", "attention_slicing", "vae_slicing", "vae_tiling"),
        *("offload_model", "offload_sequential", "offload_group", "int8", "fp8", "guidance_interval"),
        *("feature_cache", "tiny_vae", "lcm"),
    } <= set(optimisations.OPTIMISATIONS)
    assert all(one.kind in optimisations.KINDS and one.says for one in optimisations.OPTIMISATIONS.values())
    for one in optimisations.OPTIMISATIONS.values():
        assert set(one.excludes) <= set(optimisations.OPTIMISATIONS), one.name


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("fast", "'fast'; allowed: auto, none, lcm"),
        ("bf16,bf16", "twice"),
        ("channels_last:3", "without an argument"),
        ("attention_slicing,fused_attention", "replace the fused kernel"),
        ("bf16,fp16", "float16 on a CPU"),
        ("tf32", "Ampere"),
        ("fp8", "Ada"),
        ("cuda_graphs", "CUDA graphs are of CUDA; this is cpu"),
        ("fused_norm", "for NVIDIA cards since Turing"),
        ("offload_model", "CUDA card to main memory"),
        ("offload_sequential", "CUDA card to main memory"),
        ("offload_group", "CUDA card to main memory"),
        ("feature_cache:1", "2 to 10"),
        ("feature_cache:x", "2 to 10"),
        ("guidance_interval:5-1", "LOW-HIGH"),
        ("guidance_interval:a", "LOW-HIGH"),
        ("vae_tiling:60", "multiple of 8"),
        ("attention_slicing:0", "heads at a time"),
        ("compile:fastest", "max-autotune"),
        ("compile,feature_cache", "one by one"),
        ("compile,compile_regional", "one piece of code"),
        ("vae_tiling,tiny_vae", "whole pictures"),
        ("autocast:int4", "bf16"),
        ("autocast:fp16", "autocast:bf16"),
        ("fused_attention:xformers", "xformers"),
        ("fused_attention:flash", "sdpa"),
        ("lcm", "lcm:FILE"),
        ("int8", "leave it out"),
        ("tiny_vae:/nowhere", "tiny_vae:FOLDER"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(tiny, names, words):
    with pytest.raises(InputError, match=words) as refused:
        optimisations.optimise(tiny, names)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_auto_says_what_it_picks_and_leaves_out(tiny):
    applied = optimisations.optimise(tiny, "auto")
    assert applied.names == ("fused_attention", "lean")
    assert any("auto picks fused_attention" in reason for reason in applied.reasons)
    assert any("auto leaves out compile" in reason for reason in applied.reasons)


def test_auto_steps_back_from_what_was_asked_for(tiny):
    applied = optimisations.optimise(tiny, "auto,attention_slicing")
    assert applied.names == ("attention_slicing",)
    assert any("leaves out fused_attention" in reason for reason in applied.reasons)


@pytest.fixture
def card(monkeypatch):
    """A card of Hopper, with Triton and a C compiler beside it."""
    monkeypatch.setattr("darkroom.sample.optimisations.applied.capability", lambda device: (9, 0))
    monkeypatch.setattr("darkroom.sample.optimisations.fused_norm.lacks_c_compiler", lambda name: None)
    return optimisations.ComputeTarget(torch.device("cuda"), torch.float16)


def taken_by_auto(place, more=""):
    taken, reasons = table._with_auto(table.parse(["auto", more]), place)
    return {choice.name for choice in taken}, reasons


@pytest.mark.parametrize("captured", [False, True])
def test_auto_on_a_card_is_lossless(card, captured):
    picked, compiled = (
        table.best(card, captured=captured),
        table.best(card, compiled=True, captured=captured),
    )
    own = {"fused_norm"} if captured else set()
    assert set(picked) == {"fused_attention", "lean", "fused_qkv", *own}
    assert set(compiled) == {"fused_attention", "lean", "fused_qkv", "channels_last"}
    for names in (picked, compiled):
        assert all(optimisations.OPTIMISATIONS[name].kind == optimisations.LOSSLESS for name in names)
        assert all(not optimisations.conflict(a, b) for a in names for b in names)


@pytest.mark.parametrize("more", ["", "cuda_graphs", "compile", "compile_regional:max-autotune"])
def test_channels_innermost_come_with_a_compiler_or_the_kernels_that_read_them(card, more):
    """PyTorch's own group norm would turn every tensor back."""
    taken, reasons = taken_by_auto(card, more)
    assert ("channels_last" in taken) is more.startswith("compile")
    assert ("fused_norm" in taken) is (more == "cuda_graphs")
    why = {"": "PyTorch's group norm turns", "cuda_graphs": "is part of fused_norm"}.get(more)
    said = [reason for reason in reasons if "leaves out channels_last" in reason]
    assert [why in reason for reason in said] == ([] if why is None else [True])


@pytest.mark.parametrize(
    ("capability", "dtype", "lack"),
    [((7, 0), torch.float16, "Turing"), ((0, 0), torch.float16, "Turing"), ((9, 0), torch.float32, None)],
)
def test_auto_leaves_the_kernels_out_where_they_do_not_pay(card, monkeypatch, capability, dtype, lack):
    """On a Volta, on AMD's, whose capability is said to be (0, 0), and in float32."""
    monkeypatch.setattr("darkroom.sample.optimisations.applied.capability", lambda device: capability)
    taken, reasons = taken_by_auto(optimisations.ComputeTarget(torch.device("cuda"), dtype), "cuda_graphs")
    assert not {"fused_norm", "channels_last"} & taken
    said = [reason for reason in reasons if "fused_norm" in reason]
    assert [lack in reason for reason in said] == ([True] if lack else [])
    why = "gains nothing in float32" if lack is None else "PyTorch's group norm turns"
    assert any(f"leaves out channels_last: {why}" in reason for reason in reasons)


def test_auto_without_triton_says_what_is_missing(card, monkeypatch):
    said = "fused_norm needs Triton, which is not installed"
    monkeypatch.setattr("darkroom.sample.optimisations.fused_norm.lacks_c_compiler", lambda name: said)
    taken, reasons = taken_by_auto(card, "cuda_graphs")
    assert "fused_norm" not in taken
    assert f"auto leaves out fused_norm: {said}" in reasons


def test_a_model_of_ones_own_is_laid_out_in_place(monkeypatch, card):
    """So that a command holds its weights once."""
    model = models.create("tiny")
    weight = model.unet.conv_in.weight
    optimisations.set_layout(model, "auto,channels_last", "cpu")
    assert weight is model.unet.conv_in.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    own = optimisations.optimise(model, "channels_last").model.unet.conv_in.weight
    assert own.data_ptr() == weight.data_ptr()
    other = models.create("tiny")
    optimisations.set_layout(other, "auto", "cpu")
    assert not other.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


def test_pairs_are_refused_either_way_round():
    assert optimisations.conflict("fused_attention", "attention_slicing")
    assert optimisations.conflict("attention_slicing", "fused_attention")
    assert optimisations.conflict("channels_last", "fused_qkv") is None


def test_guidance_interval_drops_rows_and_says_so(tiny, plain):
    backend = sample.open_backend("torch", tiny, optimise="guidance_interval:1-4")
    sizes: list[int] = []
    inner = backend.unet

    def counting(x, t, text, added):
        sizes.append(len(x))
        return inner(x, t, text, added)

    backend.unet = counting
    made = sample.generate(tiny, "a red circle", backend=backend, **{**SETTINGS, "steps": 10})
    table = sample.make_table("ddim", tiny.scheduler, 10)
    levels = table.levels_S2[:, 1] / table.levels_S2[:, 0]
    assert sizes == [2 if 1 < level <= 4 else 1 for level in levels]
    assert 0 < sizes.count(2) < 10
    assert any("1 < sigma <= 4" in note for note in made[0].parameters["notes"])


def test_an_interval_of_all_levels_changes_nothing(tiny, plain):
    made = pictures(tiny, "guidance_interval:0-1000", num=3)
    assert torch.equal(latents(made), latents(plain))
    assert furthest(pictures(tiny, "guidance_interval:1-3", num=3), plain) >= 2


def test_the_paper_s_interval_covers_the_middle_of_sd_s_steps():
    table = sample.make_table("ddim", models.FAMILIES["sd15"].scheduler, 20)
    low, high = optimisations.interval_of(table, 0.28, 5.42)
    assert 0 < low < 0.5 < high < 1
    assert optimisations.interval_of(table, 1000, 2000) == (0.0, 0.0)


def test_two_models_in_one_process_share_nothing(tiny):
    other = models.create("tiny", seed=5)
    plain = [pictures(model, "none")[0].latents for model in (tiny, other)]
    fused = [pictures(model, "fused_qkv")[0].latents for model in (tiny, other)]
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(plain[0], plain[1], atol=0.1)


@pytest.mark.nightly
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler for torch.compile"
)
@pytest.mark.parametrize("name", ["compile", "compile_regional"])
def test_compiled_pictures_are_the_same_and_a_size_is_compiled_once(tiny, plain, name):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    backend = sample.open_backend("torch", tiny, optimise=name)
    run = {**SETTINGS, "backend": backend, "num": 3}
    made = sample.generate(tiny, "a red circle", **run)
    assert furthest(made, plain) <= 2
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    larger = {**run, "size": (96, 64)}
    sample.generate(tiny, "a red circle", **larger)
    of_both = counters["stats"]["unique_graphs"]
    assert of_both > graphs
    for again in (run, larger):
        sample.generate(tiny, "a blue square", **again)
    assert counters["stats"]["unique_graphs"] == of_both


@pytest.mark.parametrize("argument", ["dynamic", "weights"])
def test_int8_takes_the_large_layers_and_stays_near(argument):
    pytest.importorskip("torchao")
    wide = {"unet": {"block_out_channels": [32, 512], "attention_head_dim": 8}}
    model = models.create("tiny", seed=1, overrides=wide)
    plain, made = pictures(model, "none"), pictures(model, f"int8:{argument}")
    assert 0 < (latents(plain) - latents(made)).abs().max() < 0.5
    note = next(note for note in made[0].parameters["notes"] if note.startswith("int8"))
    taken = int(note.split()[1])
    large = [m for m in model.unet.modules() if type(m) is torch.nn.Linear and m.weight.numel() >= 640 * 640]
    assert taken == len(large) > 0
    assert all(type(m.weight) is torch.nn.Parameter for m in large)  # the model's own are as they were
    assert (latents(pictures(model, "none", seed=9)) - latents(plain)).abs().max() > 1


def recorded(model, most):
    """A U-Net whose calls are recorded as CUDA graphs are on a card; here by torch.jit.trace."""

    def traced(call, tensors, names):
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            return torch.jit.trace(
                compiled._positional(call, names), tuple(tensors), check_trace=False, strict=False
            )

    applied = optimisations.optimise(model, "none")
    applied.own("unet")
    applied.outer = lambda applied, call_of: compiled._ByShape(applied.plain(call_of), traced, applied, most)
    return applied.model, applied.unet(sample.unet_call)


def test_calls_are_recorded_by_shape_and_so_many_at_most(tiny):
    drawn = torch.Generator().manual_seed(7)
    _, unet = recorded(copy.deepcopy(tiny), 2)
    for rows in (1, 2, 1, 3):
        x, text = torch.randn(rows, 4, 8, 8, generator=drawn), torch.randn(rows, 77, 64, generator=drawn)
        t = torch.full((rows,), 500.0)
        with torch.no_grad():
            expected = sample.unet_call(tiny.unet)(x, t, text, {})
            torch.testing.assert_close(unet(x, t, text, {}), expected, atol=1e-5, rtol=1e-5)
            assert (unet(x, t * 0.5, text, {}) - expected).abs().max() > 1e-3  # the control
    assert sorted(key[0][0][0] for key in unet.made) == [1, 2]


def test_a_record_is_made_anew_where_adapters_change_other_layers(tiny):
    """What was recorded holds for the layers and matrices that there were."""
    drawn = torch.Generator().manual_seed(7)
    model, recorded_unet = recorded(copy.deepcopy(tiny), 16)
    unet = model.unet
    x, text = torch.randn(2, 4, 8, 8, generator=drawn), torch.randn(2, 77, 64, generator=drawn)
    plain, t = sample.unet_call(unet), torch.tensor([500.0, 20.0])

    def apart(*rows):
        """How far the recorded call is from the plain one, and the plain one from that without adapters."""
        added = lay_out(rows, "cpu")
        with torch.no_grad():
            expected, without = plain(x, t, text, added), plain(x, t, text, {})
            found = recorded_unet(x, t, text, added)
        return (found - expected).abs().max(), (expected - without).abs().max()

    def check(*rows):
        wrong, changed = apart(*rows)
        assert wrong < 1e-4 < 1e-2 < changed

    bank = Bank(model, slots=3, max_rank=4)
    keys = made(tiny, 1, where=lambda path: path.startswith("unet.") and path.endswith("to_k"))
    outs = made(tiny, 2, where=lambda path: path.startswith("unet.") and path.endswith("to_out.0"))
    bank.load(1, keys)
    check([(1, 1.0)], [])
    records = len(recorded_unet.made)
    check([], [(1, 0.5)])
    assert len(recorded_unet.made) == records  # other rows, and the same layers
    bank.load(2, outs)
    check([(2, 1.0)], [(1, 1.0)])
    path = next(iter(keys.layers))
    weight = models.adapters.adaptable(model)[path].weight
    whole = Change(delta=torch.randn(weight.shape, generator=drawn))
    bank.load(3, Staged("whole", {path: whole}))
    check([(3, 1.0)], [])
    check([], [(3, 1.0)])
    bank.clear(3)
    bank.detach()
    other = Bank(model, slots=1, max_rank=4)
    other.load(1, outs)
    check([(1, 1.0)], [])


def test_an_lcm_adapter_is_merged_into_a_look_alike(tiny, plain, tmp_path):
    drawn = torch.Generator().manual_seed(4)
    layers = {}
    for path, layer in models.adapters.adaptable(tiny).items():
        if "attn" in path and path.startswith("unet."):
            outputs, inputs = layer.weight.shape
            down = torch.randn(4, inputs, generator=drawn) / inputs**0.5
            layers[path] = models.Layer(down, torch.randn(outputs, 4, generator=drawn) * 0.3, 1.0)
    adapter = models.Adapter("few-steps", layers)
    file = models.write_adapter(adapter, tmp_path / "few.safetensors")
    few = {"solver": "lcm", "guidance": 1.0}
    made = pictures(tiny, f"lcm:{file}", **few)
    twin = copy.deepcopy(tiny)
    models.merge(twin, models.read_adapter(file))
    assert furthest(made, pictures(twin, "none", **few)) <= 2
    assert furthest(made, pictures(tiny, "none", **few)) >= 10
    assert any("another model's picture" in note for note in made[0].parameters["notes"])
    assert torch.equal(latents(pictures(tiny, "none", num=3)), latents(plain))


def test_the_compilers_graphs_know_the_thread_that_takes_the_steps(tiny, monkeypatch):
    """Before torch 2.13 only the thread that imported them: the server's ended with an assertion."""
    trees = importlib.import_module("torch._inductor.cudagraph_trees")

    def as_in_torch_212(local, name):
        if hasattr(local, name):
            return getattr(local, name)
        assert torch._C._is_key_in_tls(name)
        return torch._C._get_obj_in_tls(name)

    monkeypatch.setattr(trees, "get_obj", as_in_torch_212)
    monkeypatch.delattr(trees, "_initialize_tls", raising=False)

    def graphs(*_):
        trees.get_container(0)  # as each call of a graph begins
        return torch.zeros(1)

    def in_a_thread(call):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call, *[torch.zeros(1)] * 3, {}).exception()

    applied = optimisations.Applied(tiny, torch.device("cuda"))
    compiled._copy_outputs(applied, "reduce-overhead")
    assert isinstance(in_a_thread(graphs), AssertionError)
    assert in_a_thread(applied.inner[0](graphs)) is None


@pytest.mark.parametrize(("system", "there"), [("nt", "cl"), ("posix", "g++"), ("posix", "clang++")])
def test_the_compiler_that_inductor_takes_on_a_system_is_looked_for(system, there, monkeypatch):
    monkeypatch.setattr(compiled, "os", SimpleNamespace(name=system, environ={}))
    place = optimisations.ComputeTarget(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: name if name == there else None)
    assert compiled.lacks_compiler(place) is None
    other = "g++" if system == "nt" else "cl"
    monkeypatch.setattr(compiled.shutil, "which", lambda name: name if name == other else None)
    assert "there is no " in compiled.lacks_compiler(place)
