"""Every kind of training step on a card that is not there: nothing lies elsewhere, and no step is waited for.

The steps run in a process of their own (`fake_steps.py`), for torch keeps the card that they make.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import warm
from darkroom.recipe import make_recipe
from darkroom.recipe.objective import DistillSettings
from darkroom.recipe.sections import ModelSettings, Task
from darkroom.recipe.training import AdapterSettings, OptimSettings

HERE = Path(__file__).parent
GOLDEN: dict[str, int] = json.loads((HERE / "kernels.json").read_text())
"""Kernels of a whole step of a small model. A change that launches more has to say why.

`fake_steps.py NAME...` prints them; run it as `seen` does.
"""
FEW = ("pretrain",)


def seen(*names: str) -> dict[str, dict[str, Any]]:
    """What a step of each does, by name."""
    path = os.pathsep.join([*sys.path, str(HERE.parent)])
    command = [sys.executable, str(HERE / "fake_steps.py"), *names]
    done = warm.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(names), done.stderr[-2000:]
    return {told.pop("name"): told for told in map(json.loads, lines)}


def check(found: dict[str, dict[str, Any]]) -> None:
    assert {name: told.get("error", "") for name, told in found.items()} == dict.fromkeys(found, "")
    assert {name: told["waits"] for name, told in found.items()} == {name: [] for name in found}
    assert {name: told["elsewhere"] for name, told in found.items()} == {name: [] for name in found}
    assert {name: told["kernels"] for name, told in found.items()} == {name: GOLDEN[name] for name in found}


def choices(settings: type[BaseModel], field: str) -> set[str]:
    """What a setting may be; None aside."""
    kinds = settings.model_fields[field].annotation
    return {name for kind in (kinds, *get_args(kinds)) for name in get_args(kind) if isinstance(name, str)}


def test_every_choice_of_a_recipe_has_a_step_here():
    """What the recipe's tasks, adapters or optimisers gain, `fake_steps` gains, with its golden number."""
    from fake_steps import CASES  # which imports torchao

    cases = [make_recipe({"data": {"store": "x", "resolution": 32}, **case}) for case in CASES.values()]
    assert set(GOLDEN) == set(CASES)
    assert {case.task for case in cases} == set(get_args(Task))
    assert {case.optim.name for case in cases} == choices(OptimSettings, "name")
    assert {case.adapter.kind for case in cases if case.adapter} == choices(AdapterSettings, "kind")
    assert {case.objective.distill.method for case in cases if case.task == "distill"} == choices(
        DistillSettings, "method"
    )
    assert choices(ModelSettings, "base_precision") == {"int8", "fp8", "nf4"}
    assert {case.model.base_precision for case in cases} == choices(ModelSettings, "base_precision") | {None}


def test_a_step_stays_on_the_card_and_waits_for_nothing():
    check(seen(*FEW))


@pytest.mark.nightly
def test_so_does_every_other_task_and_way_of_training():
    check(seen(*(name for name in GOLDEN if name not in FEW)))


@pytest.mark.nightly
def test_a_step_that_waits_or_mixes_devices_is_seen():
    """The control."""
    found = seen("reads a number", "copies and waits", "mixes devices", "does not pin")
    assert "DataDependentOutputException" in found["reads a number"]["error"]
    assert "aten::_to_copy" in found["copies and waits"]["waits"][0]
    assert "cpu" in found["mixes devices"]["error"]
    assert "copy_ahead.py" in found["does not pin"]["waits"][0]
