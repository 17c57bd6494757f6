"""A frozen U-Net in 8 or 4 bits: torchao's numbers, exact layers, less memory, the same run after a stop."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from subjects import check_resumes_exactly, recipe_for
from torch import Tensor, nn
from torchao.quantization import Float8Tensor, Int8Tensor, PerRow
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from darkroom import models
from darkroom.errors import RecipeError
from darkroom.models.adapters.read import read_adapter
from darkroom.plan.training import profile_recipe
from darkroom.train.jobs import Pinned
from darkroom.train.memory import BLOCKS, pack, pack_layers, packed_weights, unpack
from darkroom.train.run import export, train
from darkroom.train.setup import make_job
from darkroom.train.tasks.lora import parameter_table

KINDS = ["int8", "fp8", "nf4"]
OFF = {"int8": 0.012, "fp8": 0.035, "nf4": 0.12}
"""Root mean square error of normal weights against their size, at most."""
BITS = {"int8": 8, "fp8": 8, "nf4": 4.5}


def restored(weight: Tensor, kind: str) -> Tensor:
    return unpack(*pack(weight, kind), kind, weight.shape, torch.float32)


def off(found: Tensor, weight: Tensor) -> float:
    return ((found - weight).square().mean().sqrt() / weight.square().mean().sqrt()).item()


# ---- the numbers


def test_the_numbers_are_torchaos() -> None:
    weight = 0.02 * torch.randn(96, 512, generator=torch.Generator().manual_seed(0))
    theirs = {
        "fp8": Float8Tensor.from_hp(weight, granularity=PerRow()).dequantize(),
        "int8": Int8Tensor.from_hp(weight, PerRow()).dequantize(),
        "nf4": to_nf4(weight, 64, 256).get_original_weight(),
    }
    # fp8 is the same to the bit but for a last place of the scale; torchao's int8 goes to -128, its nf4
    # rounds the scales themselves to 8 bits.
    tolerance = {"fp8": 1e-6, "int8": 0.012, "nf4": 0.02}
    for kind, expected in theirs.items():
        found = restored(weight, kind)
        assert off(found, expected) < tolerance[kind], kind
        assert tolerance[kind] < 10 * off(found, weight)
        assert 0.2 * OFF[kind] < off(found, weight) < OFF[kind], kind


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_few_values_comes_back_to_the_bit_and_zero_stays_zero(kind: str) -> None:
    weight = torch.tensor([1.0, -1.0, 0.0, 0.0] * 16).repeat(3, 1)
    assert torch.equal(restored(weight, kind), weight)
    assert torch.equal(restored(0 * weight, kind), 0 * weight)


# ---- the layers


class Small(nn.Module):
    """A linear layer and a convolution under a name of a U-Net's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mid_block = nn.ModuleDict(
            {"linear": nn.Linear(64, 96), "conv": nn.Conv2d(32, 32, 3, padding=1, stride=2)}
        )
        self.conv_out = nn.Conv2d(32, 32, 3)


def small(kind: str) -> tuple[Small, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Small().requires_grad_(False)
    weights = {name: layer.weight.clone() for name, layer in module.mid_block.items()}  # type: ignore[operator]
    assert pack_layers(module, kind) == 2
    return module, {name: restored(weight, kind) for name, weight in weights.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_bits_is_one_with_the_weight_that_they_are(kind: str, dtype: torch.dtype) -> None:
    module, weights = small(kind)
    module.to(dtype)
    assert module.conv_out.weight.dtype == dtype
    linear, conv = module.mid_block["linear"], module.mid_block["conv"]
    x, y = torch.randn(5, 64, dtype=dtype), torch.randn(2, 32, 9, 9, dtype=dtype)
    cases = (
        (x, linear, lambda x: F.linear(x, weights["linear"].to(dtype), linear.bias)),
        (y, conv, lambda y: F.conv2d(y, weights["conv"].to(dtype), conv.bias, stride=2, padding=1)),
    )
    for given, layer, plain in cases:
        ours, theirs = (given.clone().requires_grad_() for _ in range(2))
        out, expected = layer(ours), plain(theirs)
        assert torch.equal(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
        assert ours.grad.abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_weights_size_is_kept_for_the_backward_pass(kind: str) -> None:
    module, _ = small(kind)
    kept: list[int] = []

    def noted(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        module.mid_block["linear"](torch.randn(2, 64, requires_grad=True)).sum()
        module.mid_block["conv"](torch.randn(1, 32, 4, 4, requires_grad=True)).sum()
    assert kept == []
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        F.linear(torch.randn(2, 64, requires_grad=True), torch.zeros(96, 64))
    assert kept == [96 * 64]  # which a plain one keeps


def test_blocks_alone_are_packed_and_less_is_held() -> None:
    x, t = torch.randn(1, 4, 8, 8), torch.tensor([300])
    held, answers = {}, {}
    for kind in (None, *KINDS):
        unet = models.create("tiny", seed=3).unet
        assert unet is not None
        unet.requires_grad_(False)
        packed = 0
        if kind is not None:
            plain = {name for name, layer in unet.named_modules() if type(layer) in (nn.Linear, nn.Conv2d)}
            pack_layers(unet, kind)
            packed = packed_weights(unet)
            left = {name for name, layer in unet.named_modules() if type(layer) in (nn.Linear, nn.Conv2d)}
            assert all(BLOCKS.match(name) for name in plain - left)
            assert {"conv_in", "conv_out", "time_embedding.linear_1"} <= left
        held[kind] = sum(tensor.nbytes for tensor in chain(unet.parameters(), unet.buffers()))
        text = torch.randn(
            1, 5, unet.config["cross_attention_dim"], generator=torch.Generator().manual_seed(1)
        )
        torch.manual_seed(0)
        answers[kind] = unet(x, t, text, return_dict=False)[0].detach()
        if kind is not None:
            saved = held[None] - held[kind]
            assert saved == pytest.approx(packed * (4 - BITS[kind] / 8), rel=0.03), kind
            assert 0 < off(answers[kind], answers[None]) < 4 * OFF[kind], kind
            assert packed > 0.5 * parameter_table({"unet": unet})[1]


# ---- through the trainer


@pytest.mark.parametrize(
    "more",
    [
        ("model.base_precision=nf4", "adapter.targets=conv"),
        pytest.param(("model.base_precision=fp8", "adapter.dora=true"), marks=pytest.mark.nightly),
        pytest.param(
            ("model.base_precision=int8", "adapter.kind=loha", "train.precision=bf16"),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=" ".join,
)
def test_a_run_resumes_to_the_bit_and_its_adapter_is_merged_into_the_whole_base(
    more: tuple[str, ...], base: Path, photos: Path, tmp_path: Path
) -> None:
    run = check_resumes_exactly(
        lambda *over: recipe_for("lora", base, photos, *more, *over),
        tmp_path,
        control=("model.base_precision=null",),
    )
    merged, plain = models.load(export(run, tmp_path / "merged")), models.load(base)
    adapter = read_adapter(run / "adapter.safetensors")
    models.adapters.merge(plain, adapter)
    assert merged.unet is not None
    assert plain.unet is not None
    for (name, found), expected in zip(merged.unet.named_parameters(), plain.unet.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
    untouched = models.load(base)
    assert untouched.unet is not None
    assert any(
        not torch.equal(one, other)
        for one, other in zip(merged.unet.parameters(), untouched.unet.parameters(), strict=True)
    )


def test_a_new_word_learns_on_few_bits_and_its_model_has_the_whole_base(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    overrides = ("model.base_precision=int8", "train.steps=2", "checkpoint.every=2")
    made = train(
        recipe_for("textual-inversion", base, photos, *overrides),
        out=tmp_path / "run",
        console=lambda _: None,
    )
    written, plain = models.load(made.model), models.load(base)
    assert written.unet is not None
    assert plain.unet is not None
    assert all(
        torch.equal(one, other)
        for one, other in zip(written.unet.parameters(), plain.unet.parameters(), strict=True)
    )
    assert "<sks>" in written.tokenizers[0].get_vocab()


def test_a_plan_holds_what_the_run_holds(base: Path, photos: Path, tmp_path: Path) -> None:
    planned, real = {}, {}
    for kind in (None, "nf4"):
        told = f"model.base_precision={kind or 'null'}"
        recipe = recipe_for("lora", base, photos, told, "train.micro_batch=1", "train.global_batch=1")
        profile = profile_recipe(recipe.dump(), "float32", gpu=True)
        planned[kind] = max(m.bytes["weights"].fixed for m in profile.moments if m.stage == "forward")
        job = make_job(recipe, Pinned(tmp_path / str(kind)))
        parts = job.task.model.modules.values()
        real[kind] = sum(t.nbytes for part in parts for t in chain(part.parameters(), part.buffers()))
        assert profile.parameters["unet"] == parameter_table(job.task.modules)[1]
        assert profile.flops(1, "forward", "backward") > 0
    assert planned[None] - planned["nf4"] == pytest.approx(real[None] - real["nf4"], rel=0.05)
    assert planned["nf4"] == pytest.approx(real["nf4"], rel=0.25)  # in the allocator's pieces
    assert real["nf4"] < 0.9 * real[None]


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        ("finetune", (), "model.base_precision: fp8 with the task finetune, which trains the U-Net's own"),
        ("lora", ("adapter.kind=oft",), "adapter.kind: oft with model.base_precision=fp8"),
        ("lora", ("train.compile=blocks",), "train.compile: blocks with model.base_precision=fp8"),
        ("lora", ("model.base_precision=int4",), "model.base_precision: 'int4' was given"),
    ],
)
def test_impossible_pairs_are_refused(task: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        recipe_for(task, Path("nowhere"), Path("nowhere"), "model.base_precision=fp8", *overrides)
    assert "\n" not in str(caught.value)
