"""benchmarks/finetune/against_diffusers.py: its two peers, and what its rows compare."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from darkroom import models
from scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/finetune/against_diffusers.py")


@pytest.fixture
def told(tmp_path: Path) -> dict[str, object]:
    models.save(models.create("tiny"), tmp_path / "model")
    draws = np.random.default_rng(0)
    for i in range(3):
        Image.fromarray(draws.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(tmp_path / f"{i}.jpg")
    return {
        "model": str(tmp_path / "model"),
        "photos": str(tmp_path),
        "batch": 2,
        "rank": 4,
        "resolution": 32,
        "precision": "float32",
        "checkpointing": False,
        "steps": 2,
    }


def test_the_caching_peer_encodes_each_photograph_once(script, told, monkeypatch):
    """And neither VAE nor text encoder runs in its steps; in the other peer's they do."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel

    calls = []
    for kind, method in ((AutoencoderKL, "encode"), (CLIPTextModel, "forward")):
        own = getattr(kind, method)

        def counted(self, *given, _own=own, _method=method, **more):
            calls.append(_method)
            return _own(self, *given, **more)

        monkeypatch.setattr(kind, method, counted)
    steps = []
    timed = script._timed

    def watched(train_step, number, device):
        steps.append(len(calls))
        return timed(train_step, number, device)

    monkeypatch.setattr(script, "_timed", watched)
    caching = script.caching(told)
    assert (calls.count("encode"), calls.count("forward"), steps) == (3, 3, [6])
    calls.clear()
    encoding = script.encoding(told)
    assert (calls.count("encode"), calls.count("forward"), steps) == (6, 6, [6, 0])  # 3 steps of 2
    assert caching["trained"] == encoding["trained"] > 0
    assert len(caching["seconds"]) == len(encoding["seconds"]) == 2


def test_rows_say_caching_and_step_apart(script, told, monkeypatch):
    def run(side, told):
        seconds = {script.encoding: 4.0, script.caching: 2.0, script.ours: 1.0}[side]
        peak = round(seconds * 100)
        done = {"seconds": [seconds], "warmup_s": 1.0, "peak": peak, "device": "cpu", "trained": 7}
        return done | {"whole_peak": 9 * peak, "prepared_s": 3.0}

    monkeypatch.setattr(script, "alone", run)
    rows = script.compare(told, 2)
    found = {(row.case, row.ratio_to): (row.ratio, row.settings["memory_ratio"]) for row in rows}
    encoding, caching = "diffusers + peft, encoding", "diffusers + peft, caching"
    assert found == {
        (encoding, encoding): (1.0, 1.0),
        (caching, encoding): (0.5, 0.5),
        ("darkroom", encoding): (0.25, 0.25),
        ("darkroom", caching): (0.5, 0.5),
    }
    assert {row.settings["model"] for row in rows} == {"model"}, "no path of the machine"


def test_a_family_is_made_with_random_weights_and_removed(script, tmp_path):
    with script.opened("tiny") as folder:
        assert (Path(folder) / "unet" / "config.json").is_file()
        assert Path(folder).name == "tiny"
    assert not Path(folder).exists()
    with script.opened(str(tmp_path)) as folder:
        assert folder == str(tmp_path)
    assert tmp_path.is_dir()
