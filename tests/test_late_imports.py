"""What a start imports: held by the modules that are there at the end, in processes of their own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from darkroom import models

LATE = {"torch._dynamo", "torch._inductor", "peft", "torchao", "scipy", "boto3", "matplotlib", "pandas"}
LATE |= {"lance"}


def fresh(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A new interpreter: what a start imports cannot be asked of one that has imported everything."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_picture_comes_without_compiler_adapters_or_quantizers(tmp_path):
    """Also what waits is there afterwards: diffusers' marks reach the compiler, peft is the real one."""
    models.save(models.create("tiny"), tmp_path / "model")
    code = f"""
import sys, torch
from darkroom.cli import main
try: main(["generate", "model", "a red circle", "--steps", "1"])
except SystemExit as left: assert left.code == 0, left
late = sorted({LATE!r} & set(sys.modules))
print("LATE", late)
import torch._dynamo, peft, scipy.optimize
from torch._dynamo import trace_rules
from diffusers.models.attention_processor import Attention
from diffusers.models import AutoencoderOobleck
from diffusers.models.transformers import FluxTransformer2DModel
from diffusers.loaders import lora_base
from peft.tuners.tuners_utils import BaseTunerLayer
print("MARKED", id(Attention) in trace_rules._allowed_callable_ids.function_ids)
print("CONTROL", id(AutoencoderOobleck) in trace_rules._allowed_callable_ids.function_ids)
net = torch.nn.Sequential(torch.nn.Linear(2, 2))
peft.inject_adapter_in_model(peft.LoraConfig(r=1, target_modules=["0"]), net)
late = lora_base.BaseTunerLayer
print("ISINSTANCE", isinstance(net[0], late), isinstance(net[0].base_layer, late))
print("SUM", scipy.optimize.linear_sum_assignment([[1, 0], [0, 1]])[1].tolist())
"""
    done = fresh(code, tmp_path)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0].isupper())
    assert said == {
        "LATE": "[]",
        "MARKED": "True",
        "CONTROL": "False",
        "ISINSTANCE": "True False",
        "SUM": "[1, 0]",
    }
    foreign = [line for line in done.stderr.splitlines() if line and not line.startswith("note: ")]
    assert [line for line in foreign if "denoise" not in line] == []


def test_serving_and_training_start_without_what_they_may_not_need(tmp_path):
    """Training reads its store with lance, which brings pandas."""
    code = f"""
import sys
import darkroom.serve.api.app, darkroom.models.parts
print(sorted({LATE!r} & set(sys.modules)))
import darkroom.train.run
print(sorted({LATE!r} & set(sys.modules)))
"""
    done = fresh(code, tmp_path)
    assert done.stdout.splitlines()[0] == "[]"
    assert set(ast.literal_eval(done.stdout.splitlines()[1])) <= {"lance", "pandas"}
    assert done.stderr == ""
