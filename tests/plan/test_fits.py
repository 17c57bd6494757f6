"""What a card can do: tasks that fit with the quickest settings that do, and those that do not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from darkroom.cli.application import main
from darkroom.hardware import machine
from darkroom.plan import fits, targets
from darkroom.plan.ask import plans


def told(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "--model", "tiny", *arguments])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def test_a_card_is_shown_on_one_screen(capsys, monkeypatch):
    monkeypatch.setattr(fits, "TASKS", {"lora": ({}, fits.CHECKPOINTED)})
    monkeypatch.setattr(fits, "SMALLER", (64,))
    code, out, err = told(capsys, "--fits", "RTX 3060", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["card"] == "RTX 3060"
    generate, lora = found["tasks"]
    assert (generate["task"], generate["settings"]) == ("generate", {"--precision": "bf16"})
    assert lora["fits"]
    assert lora["settings"] == {}  # fits without recomputing
    assert lora["largest_resolution"] == 64
    assert lora["step_s_low"] < lora["step_s"] < lora["step_s_high"]
    (alone,) = plans(fits._asked("lora", "tiny", 64, {}), targets.Target(gpu="RTX 3060", precision="bf16"))
    assert lora["largest_batch"] == alone.largest_micro_batch > 100
    code, out, _ = told(capsys, "--fits", "RTX 3060")
    assert "lora, 64 px" in out
    assert len(out.splitlines()) < 12


def test_prices_and_precision_are_those_asked_for(capsys, monkeypatch):
    monkeypatch.setattr(fits, "TASKS", {})
    monkeypatch.setattr(fits, "SMALLER", (64,))
    assert "USD 0.77 an hour" in told(capsys, "--fits", "RTX 3060", "--price", "0.77")[1]
    _, out, _ = told(capsys, "--fits", "RTX 3060", "--precision", "float32")
    assert "--precision=float32" in out
    assert "--precision=bf16" in told(capsys, "--fits", "RTX 3060")[1]
    code, out, err = told(capsys, "--fits", "here")
    assert code == 0, err
    assert out.startswith(machine().cpu_class)


def test_where_nothing_fits_the_least_is_said(monkeypatch):
    monkeypatch.setattr(fits, "SMALLER", (64,))
    (plan,) = plans(fits._asked("lora", "tiny", 64, {}), targets.Target(gpu="RTX 3060"))
    monkeypatch.setattr(fits, "plans", lambda asked, target: [replace(plan, fits=False)])
    found = fits._training("lora", "tiny", targets.Target(gpu="RTX 3060"), "bf16", ({}, fits.CHECKPOINTED))
    assert not found.fits
    assert found.settings == fits.CHECKPOINTED  # even with what takes the least
    assert found.row()["fits"] == "no"


def test_a_card_that_nobody_knows_is_named(capsys):
    code, _, err = told(capsys, "--fits", "Voodoo 2")
    assert code == 2
    assert "Voodoo 2" in err
