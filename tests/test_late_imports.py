"""What a start imports: held by the modules that are there at the end, in processes of their own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from darkroom import models

LATE = {"torch._dynamo", "torch._inductor", "peft", "torchao", "scipy", "boto3", "matplotlib", "pandas"}
LATE |= {"lance", "sympy", "torch.distributed.tensor", "transformers.distributed.tensor_parallel"}


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


def test_transformers_is_whole_after_its_parts_have_waited(tmp_path):
    """Its other models, its sharding and the table of distributions, in a process that opened a model."""
    code = """
import importlib.metadata, sys
from darkroom.models import parts
print(sorted({"torch.distributed.tensor", "sympy"} & set(sys.modules)))
import transformers
from transformers import core_model_loading, modeling_utils
from transformers.models.bert import BertConfig, BertModel
held = transformers.models
config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
torn = transformers.AutoModel.from_config(config)
print(type(torn) is BertModel is transformers.models.bert.BertModel, len(dir(transformers.models)) > 100)
print(held.gpt2.GPT2Config.__name__, held.t5.T5Config.__name__, hasattr(held, "no_such_model"))
torn.save_pretrained("bert")
print(type(BertModel.from_pretrained("bert")) is BertModel)
import torch
same = modeling_utils._tied_params_are_equal
print(same(torch.ones(1), torch.ones(1)), same(torch.ones(1), torch.zeros(1)))
from transformers.distributed import tensor_parallel, sharding_utils
from torch.distributed.tensor import DTensor, Shard
print(tensor_parallel.DTensor is DTensor, "colwise" in tensor_parallel.ALL_PARALLEL_STYLES)
print(isinstance(sharding_utils.DtensorShardOperation, type), Shard(0) == Shard(0), Shard(0) == Shard(1))
from diffusers.utils import import_utils
print(import_utils._package_map["PIL"], "no such package" in import_utils._package_map)
print(import_utils._package_map == importlib.metadata.packages_distributions())
print(type(importlib.metadata.packages_distributions()))
"""
    done = fresh(code, tmp_path)
    assert done.stdout.splitlines() == [
        "[]",
        "True True",
        "GPT2Config T5Config False",
        "True",
        "True False",
        "True True",
        "True True False",
        "['pillow'] False",
        "True",
        "<class 'dict'>",
    ], done.stdout


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
