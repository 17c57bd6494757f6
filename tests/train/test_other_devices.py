"""Devices that take no float64: every task's step and every solver's draw, on fake tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import get_args

import pytest

import warm
from darkroom.options import FLOW_SOLVER_NAMES, SOLVER_NAMES
from darkroom.recipe.sections import Task

PROGRAM = Path(__file__).parents[1] / "fake_device.py"


def results(folder: Path, *names: str) -> dict[str, dict[str, str | int]]:
    """By case: how many tensors were made on the device, or the error."""
    command = [sys.executable, str(PROGRAM), str(folder), *names]
    done = warm.run(command, stdout=warm.PIPE, stderr=warm.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    return {line.pop("case"): line for line in map(json.loads, done.stdout.splitlines())}


def check(found: dict[str, dict[str, str | int]]) -> None:
    """The control, which has float64 on the device, is refused; nothing else is."""
    [control] = [name for name in found if name.endswith("control")]
    assert "torch.float64 on other:0" in str(found.pop(control)["error"])
    assert {name: line["error"] for name, line in found.items() if "error" in line} == {}
    assert all(int(line["results"]) > 500 for line in found.values())


@pytest.mark.nightly
def test_every_solver_draws_without_float64(tmp_path: Path) -> None:
    found = results(tmp_path, "draw")
    names = {f"draw tiny {name}" for name in SOLVER_NAMES} | {
        f"draw tiny-dit {name}" for name in FLOW_SOLVER_NAMES
    }
    assert names <= set(found)
    check(found)


def test_a_draw_needs_no_float64(tmp_path: Path) -> None:
    found = results(tmp_path, "draw control", "draw tiny-dit flow_euler")
    assert len(found) == 2
    check(found)


@pytest.mark.nightly
def test_nets_and_preparing_need_no_float64(tmp_path: Path) -> None:
    """ControlNet, T2I-Adapter, both IP-Adapters; pictures and captions encoded."""
    found = results(tmp_path, "steer", "prepare")
    assert len(found) == 7
    check(found)


@pytest.mark.nightly
def test_every_task_trains_without_float64(tmp_path: Path) -> None:
    found = results(tmp_path, "train")
    tasks = {name.split()[1].rstrip(",") for name in found}
    assert tasks == {*get_args(Task), "control"}
    check(found)
