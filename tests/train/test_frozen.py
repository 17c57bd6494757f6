"""Frozen convolutions keep no input: the same numbers to the bit, in less memory."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import recipe_for
from torch import Tensor, nn

from darkroom.counting import counting
from darkroom.train.jobs import Pinned, TrainingSetup
from darkroom.train.memory import FrozenConv2d, activation_bytes, forget_inputs
from darkroom.train.setup import make_job

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "pointwise": {"kernel_size": 1},
    "grouped, without bias": {"kernel_size": 3, "groups": 2, "bias": False},
    "dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "wrapped around": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "named padding": {"kernel_size": 3, "padding": "same"},
}
LAYOUTS = {"rows": torch.contiguous_format, "channels last": torch.channels_last}


def gradients(net: nn.Module, given: Tensor) -> list[Tensor]:
    """Of what goes in, and of what is trained; after what came out."""
    pixels = given.clone().requires_grad_()
    trained = [param for param in net.parameters() if param.requires_grad]
    out = net(pixels)
    return [out, *torch.autograd.grad(out.float().square().sum(), [pixels, *trained])]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_torchs_to_the_bit(kind: str, layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.SiLU(), nn.Conv2d(8, 4, **KINDS[kind]), nn.Conv2d(4, 4, 1))
    net.to(dtype).to(memory_format=LAYOUTS[layout])
    net[2].requires_grad_(False)
    frugal = copy.deepcopy(net)
    forget_inputs(frugal)
    names = [type(layer).__name__ for layer in frugal]
    assert names == ["Conv2d", "SiLU", "Conv2d" if kind == "named padding" else "FrozenConv2d", "Conv2d"]
    given = torch.randn(2, 4, 12, 12).to(dtype).to(memory_format=LAYOUTS[layout])
    expected = gradients(net, given)
    found = gradients(frugal, given)
    assert same(found, expected)
    assert [one.stride() for one in found] == [one.stride() for one in expected]
    with torch.no_grad():
        frugal[2].weight[0, 0] += 0.5
    assert not same(gradients(frugal, given), expected)  # the control


def test_one_that_is_trained_again_learns() -> None:
    net = nn.Conv2d(2, 3, 3)
    plain = copy.deepcopy(net)
    forget_inputs(net.requires_grad_(False))
    net.requires_grad_(True)
    given = torch.randn(1, 2, 6, 6)
    assert isinstance(net, FrozenConv2d)
    found = gradients(net, given)
    assert len(found) == 4
    assert same(found, gradients(plain, given))


def test_a_weight_that_is_trained_keeps_its_convolution() -> None:
    net = nn.Conv2d(2, 3, 3)
    net.weight.requires_grad_(False)  # the bias is not
    forget_inputs(net)
    assert type(net) is nn.Conv2d


def lora_job(base: Path, photos: Path, where: Path, *overrides: str) -> TrainingSetup:
    recipe = recipe_for("lora", base, photos, "train.steps=2", "train.precision=float32", *overrides)
    return make_job(recipe, Pinned(where))


def plain_again(job: TrainingSetup) -> int:
    """Make its convolutions torch's own; how many were not."""
    frozen = [part for module in job.task.modules.values() for part in module.modules()]
    frozen = [part for part in frozen if type(part) is FrozenConv2d]
    for part in frozen:
        part.__class__ = nn.Conv2d
    return len(frozen)


def learned(job: TrainingSetup, steps: int = 2) -> dict[str, Tensor]:
    with job.feed(0) as batches:
        for step in range(steps):
            job.step(step, job.task.inputs(next(batches), job.device))
    return {name: master.detach().clone() for name, master in job.step.weights.masters.items()}


@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_an_adapter_learns_the_same_in_less_memory(
    base: Path, photos: Path, tmp_path: Path, checkpointing: str
) -> None:
    again = f"train.gradient_checkpointing={checkpointing}"
    plain = lora_job(base, photos, tmp_path / "plain", again)
    assert plain_again(plain) > 10
    frugal = lora_job(base, photos, tmp_path / "frugal", again)
    expected, found = learned(plain), learned(frugal)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    started = lora_job(base, photos, tmp_path / "before").step.weights.masters
    assert any(not torch.equal(found[name], started[name]) for name in found)  # something was learned


def test_checkpointing_a_text_encoder_too_says_nothing_and_changes_nothing(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    """transformers warns of the name it had for checkpointing before."""
    text = "adapter.text_encoder=true"
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        job = lora_job(base, photos, tmp_path / "again", text, "train.gradient_checkpointing=true")
    assert job.task.modules["text_encoder"].is_gradient_checkpointing
    found, expected = learned(job), learned(lora_job(base, photos, tmp_path / "plain", text))
    assert any("text_encoder" in name for name in found)
    assert all(torch.allclose(found[name], expected[name], atol=1e-7) for name in expected)


def test_a_run_that_frees_in_its_forward_pass_gives_freed_blocks_back(
    base: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("darkroom.train.setup.return_freed", lambda least, keep_top: asked.append(least))
    lora_job(base, photos, tmp_path / "adapter")
    assert asked == [2**20]
    for told, more in (("false", []), ("true", [2**20])):
        checkpointing = f"train.gradient_checkpointing={told}"
        recipe = recipe_for("finetune", base, photos, "train.steps=2", checkpointing)
        make_job(recipe, Pinned(tmp_path / told))
        assert asked == [2**20, *more]


def test_what_is_kept_falls_by_the_convolutions_inputs(base: Path, photos: Path, tmp_path: Path) -> None:
    job = lora_job(base, photos, tmp_path / "run")
    with job.feed(0) as batches:
        inputs = job.task.inputs(next(batches), job.device)
    sizes: list[int] = []
    watched = [part for part in job.task.modules["unet"].modules() if type(part) is FrozenConv2d]
    hooks = [
        part.register_forward_pre_hook(lambda _, args: sizes.append(args[0].nbytes * args[0].requires_grad))
        for part in watched
    ]
    frugal = activation_bytes(job.task, inputs)
    for hook in hooks:
        hook.remove()
    plain_again(job)
    plain = activation_bytes(job.task, inputs)
    assert 0.5 * sum(sizes) < plain - frugal <= sum(sizes)  # some inputs are kept by a norm or sum as well


def test_the_plan_counts_it(base: Path, photos: Path, tmp_path: Path) -> None:
    job = lora_job(base, photos, tmp_path / "run")
    with job.feed(0) as batches:
        inputs = job.task.inputs(next(batches), job.device)
    counts = []
    for _ in range(2):
        with counting(*job.task.modules.values()) as counter:
            torch.autograd.backward(job.task.losses(counter.fake(inputs))["loss"].sum())
            counts.append(counter.result().flops)
        plain_again(job)
    assert counts[0] == counts[1]  # no product is made twice or left out
