"""The bare step on synthetic latents: every switch runs, rows hold what was measured."""

from __future__ import annotations

import subprocess
import sys

import pytest

from darkroom.errors import InputError
from darkroom.measure import pretraining
from darkroom.measure.pretraining import bench_pretraining
from darkroom.measure.timing import Measurement, Timing

UNET = {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2, "layers_per_block": 1}


def test_each_switch_has_a_row():
    cases = ("plain", "bf16", "channels_last,fused_adamw", "checkpointing")
    rows = list(
        bench_pretraining(
            "tiny", resolution=32, batch=2, cases=cases, repeats=2, warmup=1, device="cpu", unet=UNET
        )
    )
    assert [row.case for row in rows] == list(cases)
    assert all(row.images_per_s and row.peak_memory_bytes and row.settings["batch"] == 2 for row in rows)
    assert rows[0].ratio == 1.0
    assert {row.ratio_to for row in rows} == {"plain"}
    assert [row.settings["precision"] for row in rows] == ["float32", "bf16", "float32", "float32"]


def test_a_batch_is_found():
    [row] = bench_pretraining(
        "tiny", resolution=16, cases=("fused_adamw",), repeats=1, warmup=1, device="cpu", unet=UNET
    )
    assert 1 <= row.settings["batch"] <= 512


def test_what_compiles_takes_the_batch_that_was_found(monkeypatch):
    """Each size that is tried would be compiled anew."""
    asked = []

    def case(told, name, first, flops):
        asked.append((name, told.batch))
        if name == "compile":
            raise RuntimeError("no compiler")
        row = Measurement(
            benchmark="pretrain", case=name, settings={"batch": 64}, images_per_s=1.0, median_s=1.0
        )
        return row, Timing(name, (1.0,), 0.0, None), 1

    monkeypatch.setattr(pretraining, "_case", case)
    cases = ("bf16,compile", "bf16", "compile", "bf16,compile_regional", "checkpointing")
    assert len(list(bench_pretraining("tiny", cases=cases, device="cpu"))) == 5
    assert asked == [
        ("bf16,compile", "auto"), ("bf16", "auto"), ("compile", 64), ("bf16,compile_regional", 64),
        ("checkpointing", "auto"),
    ]  # fmt: skip


def test_unknown_names_are_told():
    with pytest.raises(InputError, match="case 'fast'; allowed: plain, or of bf16"):
        bench_pretraining("tiny", cases=("bf16,fast",))
    with pytest.raises(InputError, match="--model sd9; allowed: sd15"):
        bench_pretraining("sd9")


def test_it_needs_no_store():
    code = "import sys, darkroom.measure.pretraining; sys.exit(bool({'lance', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_transformer_is_timed_too():
    rows = list(
        bench_pretraining(
            "tiny-dit",
            resolution=32,
            batch=2,
            cases=("plain", "bf16,fused_adamw", "checkpointing"),
            repeats=1,
            warmup=1,
            device="cpu",
            unet={"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8},
        )
    )
    assert [row.settings["parameters"] for row in rows] == [rows[0].settings["parameters"]] * 3
    assert all(row.images_per_s for row in rows)
