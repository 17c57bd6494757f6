"""The bare step: exact accumulation, float32 masters under bf16, and nothing that waits for the device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from darkroom import models
from darkroom.errors import CheckpointError, RecipeError
from darkroom.hardware import system
from darkroom.models.model import Model
from darkroom.recipe.sections import OptimSettings, TrainSettings
from darkroom.train.objective import Objective
from darkroom.train.precision import attend_in_float32, choose_precision
from darkroom.train.step import CastWeights, Step, Weights, make_weights, micro_batches

B, C, SIDE, L, D = 8, 4, 8, 6, 16
UNET = {
    "block_out_channels": [8, 16],
    "norm_num_groups": 4,
    "attention_head_dim": 2,
    "cross_attention_dim": D,
    "sample_size": SIDE,
}
TEXT = {"hidden_size": D, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
SCHEDULER = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


class Denoise:
    """A task as small as one can be."""

    def __init__(self, unet: nn.Module) -> None:
        self.unet: Any = unet
        self.objective = Objective.from_config(SCHEDULER)

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        t_b = self.objective.timesteps(inputs["u"])
        noisy = self.objective.add_noise(inputs["latents"], inputs["noise"], t_b).to(self.unet.dtype)
        out = self.unet(noisy, t_b, inputs["text"].to(self.unet.dtype)).sample
        loss_b = self.objective.loss(out, inputs["noise"], t_b)
        return {"loss": loss_b, "twice": 2 * loss_b}


def some_inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"latents": (B, C, SIDE, SIDE), "noise": (B, C, SIDE, SIDE), "text": (B, L, D)}
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return inputs | {"u": torch.rand(B, generator=generator)}


def make_step(micro_batch: int = B, dtype: torch.dtype = torch.float32, **optim: Any) -> Step:
    model = models.create("tiny", parts=("unet",), overrides={"unet": UNET})
    assert model.unet is not None
    train = TrainSettings(steps=10, global_batch=B)
    return Step(
        Denoise(model.unet.train()),
        make_weights({"unet": model.unet}, dtype),
        train=train,
        optim=OptimSettings(lr=1e-3, **optim),
        micro_batch=micro_batch,
    )


def weights_after(step: Step, steps: int = 2) -> dict[str, Tensor]:
    for k in range(steps):
        step(k, some_inputs(k))
    return {name: param.detach().clone() for name, param in step.weights.masters.items()}


def furthest(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_accumulation_is_the_mean_over_the_global_batch(micro_batch: int) -> None:
    """Also where the last micro-batch is smaller: rows count, not micro-batches. SGD-like eps shows scale."""
    whole, parts = make_step(eps=1.0, clip_norm=None), make_step(micro_batch, eps=1.0, clip_norm=None)
    one, other = whole(0, some_inputs()), parts(0, some_inputs())
    torch.testing.assert_close(one.losses["loss"], other.losses["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(one.losses["twice"], 2 * one.losses["loss"])
    torch.testing.assert_close(one.grad_norm, other.grad_norm, rtol=1e-5, atol=0)
    assert furthest(whole.weights.masters, parts.weights.masters) < 1e-8
    assert furthest(weights_after(whole, 1), weights_after(make_step(eps=1.0, clip_norm=None), 1)) > 1e-6


def test_a_step_is_the_same_each_time_and_another_batch_is_not() -> None:
    one = weights_after(make_step())
    assert furthest(one, weights_after(make_step())) == 0
    other = make_step()
    other(0, some_inputs(5))
    other(1, some_inputs(6))
    assert furthest(one, other.weights.masters) > 1e-5


def test_masters_stay_float32_while_bf16_computes() -> None:
    step = make_step(micro_batch=4, dtype=torch.bfloat16)
    exact = weights_after(make_step(micro_batch=4))
    rounded = weights_after(step)
    assert {param.dtype for param in step.task.unet.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    assert {param.dtype for param in rounded.values()} == {torch.float32}
    start = {name: p.detach() for name, p in make_step().weights.masters.items()}
    # Updates of 1e-3 are finer than bf16's grid around one; they survive in the masters alone.
    assert any(not torch.equal(t, t.bfloat16().float()) for t in rounded.values())
    assert furthest(exact, rounded) < 4.5e-3
    moved = torch.cat([(rounded[n] - start[n]).flatten() for n in start])
    wanted = torch.cat([(exact[n] - start[n]).flatten() for n in start])
    assert torch.cosine_similarity(moved, wanted, dim=0) > 0.9
    shown = dict(step.task.unet.named_parameters())  # type: ignore[attr-defined]
    assert all(torch.equal(shown[n.removeprefix("unet.")], t.bfloat16()) for n, t in rounded.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "schedule-free"])
def test_what_a_next_step_would_need_is_given_back(name: str, dtype: torch.dtype) -> None:
    step = make_step(dtype=dtype, name=name)
    weights_after(step)
    averaged = {key: value.detach().clone() for key, value in step.averaged().items()}
    made = step.averaged()
    assert step.optimiser.state
    step.release()
    assert not step.optimiser.state
    assert all(param.grad is None for param in step.weights.computing.values())
    assert furthest(averaged, made) == 0


def test_fp16_scales_its_loss_and_moves_the_weights() -> None:
    """Only CUDA trains so; on a CPU it is slow, and right all the same."""
    step = make_step(dtype=torch.float16)
    start = {name: p.detach().clone() for name, p in step.weights.masters.items()}
    result = step(0, some_inputs())
    assert step.scaler.get_scale() >= 32768
    assert 0 < result.losses["loss"].item() < 10
    assert result.grad_norm.item() < 100  # unscaled before it is measured
    assert furthest(start, step.weights.masters) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_weights_are_shown_for_a_while(dtype: torch.dtype) -> None:
    step = make_step(dtype=dtype)
    weights_after(step)
    unet: Any = step.task.unet  # type: ignore[attr-defined]
    before = {name: p.detach().clone() for name, p in unet.named_parameters()}
    averaged = step.ema.weights()
    assert averaged is not step.weights.masters
    with step.weights.showing(averaged):
        for name, param in unet.named_parameters():
            assert torch.equal(param, averaged[f"unet.{name}"].to(dtype))
        assert not torch.equal(unet.conv_in.weight, before["conv_in.weight"])
    assert all(torch.equal(p, before[name]) for name, p in unet.named_parameters())
    after = weights_after(step, 1)
    assert furthest(after, averaged) > 0


def test_weights_of_another_model_are_refused() -> None:
    weights = make_step().weights
    values = {name: p.detach() for name, p in weights.masters.items()}
    weights.load(values)
    with pytest.raises(CheckpointError, match="another model: unet.conv_in.bias"):
        weights.load({name: value for name, value in values.items() if name != "unet.conv_in.bias"})
    with pytest.raises(CheckpointError, match="another model: unet.conv_in.bias"):
        weights.load(values | {"unet.conv_in.bias": torch.zeros(1)})


class NoWaiting(TorchDispatchMode):
    """Refuses what would make the host wait for a CUDA device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal")
        assert func._schema.name.split("::")[1] not in waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_never_waits_for_the_device(dtype: torch.dtype) -> None:
    step, inputs = make_step(micro_batch=4, dtype=dtype), some_inputs()
    step(0, inputs)
    with NoWaiting():
        result = step(1, inputs)
        with pytest.raises(AssertionError, match="waits"):
            result.grad_norm.item()


def text_model() -> tuple[Model, Tensor]:
    model = models.create("tiny", parts=("text_encoder",), overrides={"text_encoder": TEXT})
    return model, torch.randint(0, 500, (3, 12), generator=torch.Generator().manual_seed(0))


def test_attention_in_float32_is_the_same_attention() -> None:
    """And stays causal in the text encoder: a later token must not move an earlier one's state."""
    model, ids = text_model()
    encoder: Any = model.text_encoders[0].bfloat16()
    plain = encoder(ids)[0].float()
    attend_in_float32(encoder)
    assert encoder.config._attn_implementation == "sdpa_float32"
    ours = encoder(ids)[0].float()
    torch.testing.assert_close(ours, plain, atol=0.05, rtol=0.05)
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 7) % 500
    moved = encoder(changed)[0].float()
    assert torch.equal(moved[:, :-1], ours[:, :-1])
    assert not torch.equal(moved[:, -1], ours[:, -1])

    unet: Any = models.create("tiny", parts=("unet",), overrides={"unet": UNET}).unet
    unet = unet.bfloat16()
    given = (
        torch.randn(2, C, SIDE, SIDE).bfloat16(),
        torch.tensor([3, 900]),
        torch.randn(2, L, D).bfloat16(),
    )
    plain = unet(*given).sample.float()
    attend_in_float32(unet)
    torch.testing.assert_close(unet(*given).sample.float(), plain, atol=0.05, rtol=0.05)
    assert "attn" not in unet.config
    taken = inspect.signature(next(iter(unet.attn_processors.values())).__call__).parameters
    assert inspect.signature(AttnProcessor2_0()).parameters.keys() <= taken.keys()  # else diffusers warns


@pytest.mark.parametrize("emulated", [True, False])
def test_bf16_that_is_emulated_is_told(monkeypatch, emulated: bool) -> None:
    has("avx2" if emulated else "avx512_bf16", monkeypatch)
    chosen, why = choose_precision("bf16", torch.device("cpu"))
    assert chosen == "bf16"
    assert ("float32 is many times as fast" in why) == emulated


def test_precision_is_chosen_for_a_reason(monkeypatch) -> None:
    place = torch.device("cpu")
    has("avx512_bf16", monkeypatch)
    assert choose_precision("auto", place) == ("bf16", "this processor has avx512_bf16")
    assert choose_precision("float32", place)[0] == "float32"
    has("avx2", monkeypatch)
    assert choose_precision("auto", place) == ("float32", "this processor has no bfloat16 instructions")
    with pytest.raises(RecipeError, match=r"train.precision: fp16 on a CPU.*use bf16"):
        choose_precision("fp16", place)


def test_fp16_is_refused_where_its_scaler_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's takes its scale in float64, which many of Intel's GPUs have not; on Apple's it does not."""
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda: True)
    assert choose_precision("auto", torch.device("xpu"))[0] == "bf16"
    with pytest.raises(RecipeError, match=r"train.precision: fp16 on xpu: .*float64; use bf16 or auto"):
        choose_precision("fp16", torch.device("xpu"))
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda: False)
    assert choose_precision("auto", torch.device("xpu"))[0] == "float32"
    assert [choose_precision("fp16", torch.device(kind))[0] for kind in ("mps", "cuda")] == ["fp16"] * 2


def has(instruction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with this beside AVX2, whatever this one has."""
    for name in system.LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(system, "hardware_instructions", lambda: ("avx2", instruction))


def test_micro_batches_cover_the_batch() -> None:
    parts = list(micro_batches(some_inputs(), 3))
    assert [len(part["u"]) for part in parts] == [3, 3, 2]
    assert torch.equal(torch.cat([part["text"] for part in parts]), some_inputs()["text"])


def test_only_parameters_that_ask_for_gradients_are_trained() -> None:
    model, _ = text_model()
    encoder = model.text_encoders[0].requires_grad_(False)
    next(encoder.parameters()).requires_grad_(True)
    assert len(Weights({"text_encoder": encoder}).masters) == 1
    assert len(CastWeights({"text_encoder": encoder}, torch.bfloat16).masters) == 1
