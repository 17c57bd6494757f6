"""The bill of a run is that of its process: from its start, with loading, latents and their memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import warm
from darkroom.run import Run

BEFORE = 2**30  # bytes that the process holds for a moment before it trains
TWICE = f"""
import json, resource, sys, time
import numpy as np
from darkroom.cli.application import app
from darkroom.cli import training
from darkroom.hardware.system import process_age_s
from darkroom.recipe.recipe import read_recipe
from darkroom.train.run import train
from pathlib import Path

block = np.ones({BEFORE // 8})
del block
time.sleep(0.5)
app(["train", "recipe.yaml", "--out", "as-a-command"], standalone_mode=False)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
age_s = process_age_s()
train(read_recipe(Path("recipe.yaml")), out="as-a-call", console=lambda _: None)
Path("seen.json").write_text(json.dumps({{"peak": peak, "age_s": age_s}}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA trained twice by one process: as a command, then as a call of Python's."""
    folder = tmp_path_factory.mktemp("bills")
    (folder / "pictures").mkdir()
    for i in range(2):
        pixels = np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{i}.png")
    recipe = {
        "task": "lora",
        "model": {"base": "tiny"},
        "data": {"folder": "pictures", "resolution": 32, "prompt": "a"},
        "train": {"steps": 2, "global_batch": 1, "device": "cpu", "precision": "float32"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = warm.run([sys.executable, "-c", TWICE], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def seen(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return found


def test_the_phases_of_a_command_are_its_wall_time_from_the_process_on(folder: Path) -> None:
    bill, called = Run.open(folder / "as-a-command").bill(), Run.open(folder / "as-a-call").bill()
    assert bill is not None
    assert called is not None
    assert {"start", "load", "latents", "train", "checkpoint"} <= bill.parts.keys()
    assert sum(bill.parts.values()) == pytest.approx(bill.wall_s, rel=1e-6)
    assert bill.parts["start"] >= 0.5
    assert bill.parts["start"] < bill.wall_s <= seen(folder)["age_s"]
    assert all(seconds > 0 for seconds in bill.parts.values())
    assert bill.device_hours == pytest.approx(bill.wall_s / 3600)
    # A call is not billed what its process did before, but it is billed its own loading and latents.
    assert "start" not in called.parts
    assert {"load", "latents"} <= called.parts.keys()
    assert sum(called.parts.values()) == pytest.approx(called.wall_s, rel=1e-6)


def test_the_peak_of_a_command_is_its_process_and_that_of_a_call_its_own(folder: Path) -> None:
    bill, called = Run.open(folder / "as-a-command").bill(), Run.open(folder / "as-a-call").bill()
    assert bill is not None
    assert called is not None
    peak = seen(folder)["peak"]
    assert peak > BEFORE
    assert bill.peak_memory_bytes == pytest.approx(peak, rel=0.01)
    assert bill.host_memory_bytes == bill.peak_memory_bytes
    if sys.platform == "linux":  # elsewhere the mark cannot be set back
        assert called.peak_memory_bytes < peak - BEFORE // 2
