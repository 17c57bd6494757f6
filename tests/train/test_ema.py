"""The averaged weights against the sum written out."""

from __future__ import annotations

import pytest
import torch

from darkroom.recipe.sections import EmaSettings
from darkroom.train.optim import Ema, ema_decay


def trained(settings: EmaSettings, values: list[float]) -> tuple[Ema, torch.Tensor]:
    param = torch.zeros(2, 3, requires_grad=True)
    ema = Ema({"w": param}, settings)
    for k, value in enumerate(values):
        param.data.fill_(value)
        ema.update(k)
    return ema, param


def test_average_is_the_sum_written_out() -> None:
    ema, _ = trained(EmaSettings(decay=0.9, warmup=False), [1.0, 2.0, 4.0])
    expected = 0.9 * (0.9 * 1.0 + 0.1 * 2.0) + 0.1 * 4.0
    torch.testing.assert_close(ema.weights()["w"], torch.full((2, 3), expected))
    other, _ = trained(EmaSettings(decay=0.5, warmup=False), [1.0, 2.0, 4.0])
    assert (other.weights()["w"] - expected).abs().min() > 0.5


def test_late_start_is_the_weights_until_then() -> None:
    ema, param = trained(EmaSettings(decay=0.9, start_step=2, warmup=False), [1.0, 2.0])
    assert ema.state() == {}
    assert torch.equal(ema.weights()["w"], param)
    ema, _ = trained(EmaSettings(decay=0.9, start_step=2, warmup=False), [1.0, 2.0, 4.0, 8.0])
    torch.testing.assert_close(ema.weights()["w"], torch.full((2, 3), 0.9 * 4.0 + 0.1 * 8.0))


def test_warm_up_lets_early_weights_go() -> None:
    settings = EmaSettings(decay=0.99)
    assert ema_decay(1, settings) == pytest.approx(2 / 11)
    assert ema_decay(10_000, settings) == 0.99
    assert ema_decay(1, EmaSettings(decay=0.99, warmup=False)) == 0.99


def test_switched_off_keeps_no_copy() -> None:
    ema, param = trained(EmaSettings(enabled=False), [1.0, 5.0])
    assert ema.state() == {}
    assert torch.equal(ema.weights()["w"], param)


def test_restored_average_goes_on_to_the_bit() -> None:
    settings, values = EmaSettings(decay=0.9), [0.1, 0.7, 0.3, 0.9, 0.2]
    whole, _ = trained(settings, values)
    first, param = trained(settings, values[:3])
    again = Ema({"w": param}, settings)
    again.restore(first.state())
    for k, value in enumerate(values[3:], 3):
        param.data.fill_(value)
        again.update(k)
    assert torch.equal(whole.weights()["w"], again.weights()["w"])


def test_updates_further_apart_keep_as_much_less() -> None:
    settings = EmaSettings(decay=0.9, every=2, warmup=False)
    ema, _ = trained(settings, [1.0, 2.0, 4.0, 8.0])  # taken in: 1 and 4
    torch.testing.assert_close(ema.weights()["w"], torch.full((2, 3), 0.81 * 1.0 + 0.19 * 4.0))
    each, _ = trained(EmaSettings(decay=0.9, warmup=False), [1.0, 2.0, 4.0, 8.0])
    assert (ema.weights()["w"] - each.weights()["w"]).abs().min() > 0.1
    values = [2.0 - 0.01 * k for k in range(200)]  # of slowly moving weights both are nearly one average
    apart, _ = trained(settings, values)
    close, _ = trained(EmaSettings(decay=0.9, warmup=False), values)
    assert (apart.weights()["w"] - close.weights()["w"]).abs().max() < 0.02
