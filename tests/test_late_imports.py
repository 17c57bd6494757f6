"""What a start imports: held by the modules that are there at the end, in processes of their own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from darkroom import models
from darkroom.data.importers.job import import_pictures
from darkroom.data.store import Store
from darkroom.hardware.machine import may_find_accelerator, torch_build

LATE = {"torch._dynamo", "torch._inductor", "peft", "torchao", "scipy", "boto3", "matplotlib", "pandas"}
LATE |= {"lance", "sympy", "torch.distributed.tensor", "transformers.distributed.tensor_parallel"}
LATE |= {"accelerate"}


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


@pytest.mark.parametrize(("task", "more"), [("finetune", set()), ("lora", {"peft", "accelerate"})])
def test_training_steps_without_the_compiler_which_comes_when_it_is_asked(task, more, tmp_path):
    """torch's optimisers would import it; nor does an adapter bring what cuts weights among processes."""
    models.save(models.create("tiny", seed=3), tmp_path / "base")
    (tmp_path / "pictures").mkdir()
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{i}.png")
        (tmp_path / "pictures" / f"{i}.txt").write_text("a picture")
    import_pictures(tmp_path / "pictures", Store.create(tmp_path / "store.lance"))
    code = f"""
import sys
from darkroom.libraries import let_pandas_wait
let_pandas_wait()
from darkroom.recipe import make_recipe
from darkroom.train import train
recipe = make_recipe({{
    "task": {task!r}, "model": {{"base": "base"}}, "train": {{"steps": 2, "global_batch": 2}},
    "data": {{"store": "store.lance", "resolution": 32, "encode": "inline", "text": "inline"}},
}})
there = []
late = {LATE!r} - {{"torch._dynamo"}} | {{"torch._dynamo.convert_frame"}}
train(recipe, out="run", console=lambda line: there.append((line, sorted(late & set(sys.modules)))))
print(next(names for line, names in there if line.startswith("step ")))
import torch
zero = torch.optim.Optimizer.zero_grad.__wrapped__
one = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item()
print(one, hasattr(zero, "__dynamo_disable"))
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).zero_grad()
print(zero.__dynamo_disable is not zero)
"""
    done = fresh(code, tmp_path)
    found, compiled, disabled = done.stdout.splitlines()
    assert set(ast.literal_eval(found)) <= {"lance", *more}
    assert (compiled, disabled) == ("2.0 False", "True")


def test_the_compiler_can_be_asked_for_while_it_waits(tmp_path):
    """By one of its modules, which is there once, or by a name; its settings come alone, and stay."""
    code = """
import sys, torch
from darkroom.libraries import without_compiler
with without_compiler():
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    print("torch._dynamo.convert_frame" in sys.modules)
    import torch._dynamo as held
    own = torch.compiler.disable(lambda x: x)
    print(own(1), own.__wrapped__.__dynamo_disable is own.__wrapped__)
    import torch._dynamo.config as config
    print(config.cache_size_limit > 0, "torch._dynamo.convert_frame" in sys.modules)
    import torch._dynamo.utils as utils
    print(own(1), own.__wrapped__.__dynamo_disable is own.__wrapped__, held.is_compiling())
    print("torch._dynamo.convert_frame" in sys.modules)
    print(config is torch._dynamo.config is sys.modules["torch._dynamo.config"], utils is torch._dynamo.utils)
with without_compiler():
    print(torch._dynamo.is_compiling(), torch._dynamo is sys.modules["torch._dynamo"])
print(torch._dynamo.__file__ is not None)
"""
    lines = fresh(code, tmp_path).stdout.splitlines()
    assert lines == [
        "False", "1 True", "True False", "1 False False", "True", "True True", "False True", "True",
    ]  # fmt: skip


@pytest.mark.parametrize("waits", [True, False])
def test_pandas_comes_when_a_table_becomes_its_frame(waits, tmp_path):
    """The control: pyarrow's datasets bring it by themselves."""
    code = f"""
import sys
from darkroom.libraries import let_pandas_wait
if {waits}:
    let_pandas_wait()
import lance
import pyarrow as pa
print("pandas" in sys.modules)
frame = pa.table({{"a": [1, None]}}).to_pandas()
print(type(frame).__name__, pa.Table.from_pandas(frame).to_pydict(), pa.array(frame["a"]).to_pylist())
"""
    found = fresh(code, tmp_path).stdout.splitlines()
    assert found == [str(not waits), "DataFrame {'a': [1.0, None]} [1.0, None]"]


@pytest.mark.parametrize("counted", [True, False])
def test_a_plan_whose_counts_are_kept_comes_without_torch(counted, tmp_path):
    """For a machine whose devices torch need not be asked for. The control has to count."""
    if may_find_accelerator(torch_build()):
        pytest.skip("torch is asked what accelerator there is")
    words = ["plan", "generate", "--model", "tiny", "--size", "40x40"]
    environment = {**os.environ, "DARKROOM_CACHE": str(tmp_path)}
    if counted:
        subprocess.run([sys.executable, "-m", "darkroom", *words], env=environment, check=True)
    code = f"""
import os, sys
os.environ["DARKROOM_CACHE"] = {str(tmp_path)!r}
from darkroom.cli import main
try: main({words!r})
except SystemExit as left: assert left.code == 0, left
print("LATE", sorted({LATE | {"torch"}!r} & set(sys.modules)))
"""
    said = fresh(code, tmp_path).stdout.splitlines()[-1]
    assert (said == "LATE []") == counted


def test_a_call_is_counted_without_the_compiler(tmp_path):
    """Twice: its settings come with the first; the control asks for the compiler in between."""
    code = """
import sys, torch
from darkroom.counting import count
net = torch.nn.Linear(2, 2)
first = count(net, torch.ones(1, 2))
print(count(net, torch.ones(3, 2)).flops, 3 * first.flops, "torch._dynamo.convert_frame" in sys.modules)
held = torch._dynamo.config
compiled = torch.compile(net, backend="eager")
print(count(net, torch.ones(3, 2)).flops, "torch._dynamo.convert_frame" in sys.modules)
print(held is torch._dynamo.config is sys.modules["torch._dynamo.config"], compiled(torch.ones(1, 2)).shape)
"""
    lines = fresh(code, tmp_path).stdout.splitlines()
    assert lines == ["24 24 False", "24 True", "True torch.Size([1, 2])"]


def test_a_model_is_saved_without_the_compiler_or_what_cuts_weights(tmp_path):
    """After that a compiled part is still known as one, and a cut weight as cut."""
    code = f"""
import sys, torch
from darkroom import models
made = models.create("tiny")
models.save(made, "a")
print(sorted({LATE!r} & set(sys.modules)))
from torch.distributed.tensor import DTensor
from torch._dynamo.eval_frame import OptimizedModule
from accelerate.utils.other import is_compiled_module
print(isinstance(DTensor, type), DTensor.__module__.startswith("torch.distributed.tensor"))
net = torch.nn.Linear(2, 2)
compiled = torch.compile(net)
print(is_compiled_module(compiled), is_compiled_module(net), type(compiled) is OptimizedModule)
models.save(made, "b")
"""
    done = fresh(code, tmp_path)
    assert done.stdout.splitlines() == ["['accelerate']", "True True", "True False True"]
    weights = [tmp_path / name / "unet" / "diffusion_pytorch_model.safetensors" for name in "ab"]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_what_waits_comes_when_it_is_called_while_others_wait(tmp_path):
    """A name that was taken while all waited finds its library where waiting has begun anew."""
    code = """
import sys
from darkroom.libraries import waiting
with waiting():
    from accelerate.utils import extract_model_from_parallel
with waiting():
    import torch
    net = torch.nn.Linear(1, 1)
    print(extract_model_from_parallel(net) is net)
    import scipy, accelerate
    print(type(scipy).__name__, type(accelerate).__name__)
import accelerate.utils
print(extract_model_from_parallel is accelerate.utils.extract_model_from_parallel)
"""
    done = fresh(code, tmp_path)
    assert done.stdout.splitlines() == ["True", "_LateModule module", "False"]


def test_transformers_keeps_the_names_that_it_finds(tmp_path):
    """Kept names are those that it looks up; where their file is damaged it looks them up again."""
    code = """
import sys
from pathlib import Path
from darkroom.hardware.system import write_atomically
from darkroom.libraries import keep_names
if sys.argv[1:]:
    keep_names(Path(sys.argv[1]), write_atomically)
import transformers
from transformers.utils import import_utils
print(import_utils.create_import_structure_from_path.cache_info().misses > 100)
print(type(import_utils.define_import_structure).__name__, "BertModel" in dir(transformers))
print(sorted(transformers._class_to_module.items()), [
    (name, sorted(lacking)) for name, lacking in sorted(transformers._object_missing_backend.items())
])
"""

    def lines(*arguments: str) -> list[str]:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
        return done.stdout.splitlines()

    plain = lines()
    assert plain[:2] == ["True", "_lru_cache_wrapper True"]
    assert lines("kept") == plain
    assert lines("kept") == ["False", *plain[1:]]
    next((tmp_path / "kept").iterdir()).write_text("[[1, 2]]")
    assert lines("kept") == plain


def test_a_library_that_waits_says_its_version() -> None:
    """scikit-learn reads scipy's when it is imported; the control is another name of that kind."""
    code = """
from darkroom.libraries import waiting
with waiting():
    import scipy
    print(type(scipy).__name__, scipy.__version__, hasattr(scipy, "__none__"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["_LateModule", version("scipy"), "False"]
