"""The memory layout of convolutions: measured at the start where nobody says it, and kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from darkroom import models
from darkroom.hardware import accelerator
from darkroom.recipe.sections import AdapterSettings, TrainSettings
from darkroom.sample import unet_call
from darkroom.train import jobs
from darkroom.train.checkpoint import checkpoints, load_checkpoint
from darkroom.train.jobs import FEW_CONVOLUTIONS, MOST_ROWS, Pinned, chosen_layout, lay_out
from darkroom.train.run import train
from darkroom.train.tasks.lora import add_adapters
from train.conftest import UNET, MakeRecipe

NOWHERE = Pinned(Path("nowhere"))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU measures as a card does, and what a card does of itself, channels last, a CPU does as well."""
    monkeypatch.setattr(accelerator, "CPU", replace(accelerator.CPU, own_memory=True))
    monkeypatch.setattr(accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(jobs, "channels_last", lambda asked, kind, sharded: asked == "auto" or asked)


def quicker(innermost: bool, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Passes are quicker in one layout; which one each pass was in."""
    seen: list[bool] = []

    def seconds(task: Any, inputs: Any, dtype: torch.dtype) -> float:
        weight = next(
            p for m in task.modules.values() for p in m.parameters() if p.ndim == 4 and p.shape[1] > 1
        )
        seen.append(weight.is_contiguous(memory_format=torch.channels_last))
        # The first pass of each layout chooses kernels.
        return 9.0 if len(seen) <= 2 else 1.0 if seen[-1] == innermost else 1.5

    monkeypatch.setattr(jobs, "_pass_seconds", seconds)
    return seen


class Net:
    """As many convolutions as count, and a pass that `losses` may fail."""

    rows_a_picture = 1

    def __init__(self, count: int = FEW_CONVOLUTIONS) -> None:
        self.modules = {"unet": nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(count)))}
        self.rows: list[int] = []

    def losses(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        self.rows.append(len(inputs["x"]))
        return {"loss": self.modules["unet"](inputs["x"]).square().mean(dim=(1, 2, 3))}


def choose(
    net: Net, pinned: Pinned = NOWHERE, *, micro: int = 32, sharded: bool = False, **train: Any
) -> Any:
    settings = TrainSettings(steps=1, global_batch=32, **train)
    one_row: Callable[[], dict[str, Tensor]] = lambda: {"x": torch.ones(1, 4, 8, 8)}  # noqa: E731
    made: Any = net
    return chosen_layout(made, settings, pinned, torch.bfloat16, one_row, micro, sharded=sharded)


@pytest.mark.parametrize("innermost", [True, False])
def test_the_quicker_layout_is_taken(innermost: bool, card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    net, seen = Net(), quicker(innermost, monkeypatch)
    found, why = choose(net)
    assert found is innermost
    assert seen == [True, False] * 4
    name, other = ("last", "first") if innermost else ("first", "last")
    assert (
        why == f"convolutions channels {name}: 1000.0 ms a pass of {MOST_ROWS} pictures, 1500.0 the other way"
    )
    assert other not in why
    weights = [conv.weight for conv in net.modules["unet"]]
    assert all(w.is_contiguous() for w in weights)  # as they were: the step lays them
    assert all(w.grad is None for w in weights)


def test_real_passes_are_timed_in_the_precision_that_is_computed_in(card: None) -> None:
    net = Net()
    before = [weight.detach().clone() for weight in net.modules["unet"].parameters()]
    found, why = choose(net, micro=2)
    assert net.rows == [2] * 8
    assert "ms a pass of 2 pictures" in why
    assert isinstance(found, bool)
    assert all(map(torch.equal, before, net.modules["unet"].parameters()))
    [kept] = {p.dtype for p in net.modules["unet"].parameters()}
    assert kept == torch.float32


def test_without_memory_to_measure_in_it_is_the_rules(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(jobs, "_pass_seconds", full)
    assert choose(Net()) == (True, "convolutions channels last: unmeasured, for memory ran out")

    def broken(*_: Any) -> float:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(jobs, "_pass_seconds", broken)
    with pytest.raises(RuntimeError, match="launch failure"):
        choose(Net())


def test_what_is_said_compiled_cut_or_has_no_convolutions_is_not_measured(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = quicker(innermost=False, monkeypatch=monkeypatch)
    assert choose(Net(), channels_last=True) == (True, "")
    assert choose(Net(), channels_last=False) == (False, "")
    assert choose(Net(), compile="blocks") == (True, "")
    assert choose(Net(), sharded=True)[1] == ""
    assert choose(Net(FEW_CONVOLUTIONS - 1)) == (True, "")
    older = replace(NOWHERE, micro_batch=4)  # a checkpoint of before there was such a choice
    assert choose(Net(), older) == (True, "")
    assert choose(Net(), replace(older, channels_last=False)) == (
        False,
        "convolutions channels first: as before",
    )
    assert seen == []
    assert choose(Net())[0] is False  # the control


def test_on_a_cpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = quicker(innermost=True, monkeypatch=monkeypatch)
    assert choose(Net()) == (False, "")
    assert seen == []


def test_a_run_that_goes_on_keeps_the_layout(
    card: None, recipe_of: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("train.micro_batch=4", "data.holdout=0", "checkpoint.every=2", "train.log_every=1")

    def laid(steps: int, out: str, innermost: bool) -> list[str]:
        quicker(innermost, monkeypatch)
        said: list[str] = []
        train(recipe_of("pretrain", *more, f"train.steps={steps}"), out=tmp_path / out, console=said.append)
        return [line.partition(":")[0::2] for line in said if line.startswith("convolutions")]  # type: ignore[misc]

    [(name, why)] = laid(2, "one", innermost=False)
    assert name == "convolutions channels first"
    assert why.startswith(" 1000.0 ms a pass of 4")
    kept = load_checkpoint(checkpoints(tmp_path / "one" / "checkpoints")[-1])
    assert kept.scalars["environment"]["channels_last"] is False
    assert laid(4, "one", innermost=True) == [("convolutions channels first", " as before")]
    assert laid(2, "other", innermost=True)[0][0] == "convolutions channels last"  # the control


def test_dora_of_convolutions_trains_channels_last() -> None:
    """As every GPU lays them: PEFT looks at the factors as matrices, which does not go with that layout."""

    def made(lay: Callable[[nn.Module], object]) -> Tensor:
        torch.manual_seed(0)
        model = models.create("tiny", overrides={"unet": UNET}, parts=("unet",))
        add_adapters(model, AdapterSettings(rank=2, targets="conv", dora=True), seed=0)
        unet = model.unet
        assert unet is not None
        lay(unet)
        given = torch.ones(1, 4, 8, 8), torch.ones(1), torch.ones(1, 7, 64)
        out: Tensor = unet_call(unet)(*given, {})
        out.square().mean().backward()
        grads = [
            p.grad.norm() for name, p in unet.named_parameters() if ".lora_B." in name and p.grad is not None
        ]
        return torch.stack([*grads, out.norm()]).detach()

    plain = made(lambda unet: lay_out([unet], innermost=False))
    torch.testing.assert_close(
        made(lambda unet: lay_out([unet], innermost=True)), plain, rtol=1e-3, atol=1e-5
    )
    assert len(plain) > 20
    with pytest.raises(RuntimeError, match="view size is not compatible"):  # the control
        made(lambda unet: unet.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def test_a_run_channels_last_ends_as_a_plain_one(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    """Steps, checkpoint, resume, held-out loss and the model that is written, as on every GPU."""
    more = ("train.micro_batch=4", "data.holdout=4", "checkpoint.every=2", "evaluate.every=2")

    def ended(name: str, *given: str, seed: int = 0) -> tuple[dict[str, Tensor], float]:
        for steps in (2, 4):  # the second goes on
            recipe = recipe_of("pretrain", *more, *given, f"train.steps={steps}", f"train.seed={seed}")
            result = train(recipe, out=tmp_path / name, console=lambda _: None)
        files = sorted(result.model.glob("unet/*.safetensors"))
        assert result.heldout_loss is not None
        return load_file(files[0]), result.heldout_loss

    (plain, loss), (last, lasts_loss), (other, _) = (
        ended("plain"),
        ended("last", "train.channels_last=true"),
        ended("other", seed=1),
    )
    assert lasts_loss == pytest.approx(loss, rel=1e-4)
    for name, weight in plain.items():
        torch.testing.assert_close(last[name], weight, rtol=1e-3, atol=2e-4)
    assert max(float((other[name] - weight).abs().max()) for name, weight in plain.items()) > 2e-3
