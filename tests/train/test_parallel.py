"""Several processes train what one does, and a checkpoint of some is read by any others."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

import warm
from darkroom import models
from darkroom.errors import RecipeError
from darkroom.recipe.rules import channels_last
from darkroom.train.checkpoint import checkpoints, load_checkpoint
from darkroom.train.ddp_fsdp import ShardedWeights, is_cut, rows_here, shard_frozen
from darkroom.train.ranks import Ranks

CLOSE = 1e-6


def command(recipe, out: Path, *more: str) -> list[str]:
    file = out.parent / f"{out.name}.yaml"
    content = recipe.model_dump(mode="json")
    file.write_text(yaml.safe_dump(content))
    return [sys.executable, "-m", "darkroom", "train", str(file), *more, "--out", str(out)]


def told(recipe, out: Path, *more: str, code: int = 0) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = command(recipe, out, *more)
    ranks = recipe.parallel.devices if recipe.parallel.mode != "none" else 0
    done = warm.run(job, capture_output=True, text=True, env=env, timeout=240, ranks=ranks)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stderr + done.stdout


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def furthest(a: dict[int, float], b: dict[int, float], after: int = 0) -> float:
    steps = [step for step in a if step > after]
    assert set(steps) <= b.keys()
    return max(abs(a[step] - b[step]) for step in steps)


@pytest.fixture(scope="module")
def long_recipe(recipe_of):
    return lambda *more: recipe_of(
        "pretrain",
        *("train.steps=20", "train.micro_batch=2", "checkpoint.every=10", "data.holdout=4"),
        *("optim.weight_decay=0.1", "optim.clip_norm=0.5", *more),
    )


@pytest.fixture(scope="module")
def alone(long_recipe, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    told(long_recipe(), out)
    return out


@pytest.fixture(scope="module")
def sharded(long_recipe, tmp_path_factory) -> Path:
    """The first half with two ranks that cut the weights between them."""
    out = tmp_path_factory.mktemp("sharded") / "run"
    told(long_recipe("train.steps=10", "parallel.mode=fsdp", "parallel.devices=2"), out)
    return out


def same_model(one: Path, other: Path) -> float:
    files = sorted(file.relative_to(one) for file in one.rglob("*.safetensors"))
    assert files
    pairs = [(load_file(one / file), load_file(other / file)) for file in files]
    return max(float((a[name] - b[name]).abs().max()) for a, b in pairs for name in a)


@pytest.fixture
def one_rank(tmp_path) -> Ranks:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(0, 1, 0, 1, sharded=True)
    dist.destroy_process_group()


def test_cut_weights_in_bf16_are_told_the_time_in_full(one_rank):
    """Rounded to bf16, 873.4 is 872. The latents are cast, or the first convolution could not take them."""
    unet = models.create("tiny", seed=3).unet
    weights = ShardedWeights({"unet": unet}, torch.bfloat16, one_rank, "grads")
    seen = []
    unet.time_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    unet.conv_in.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    times = torch.tensor([873.4, 12.7])
    text = torch.randn(2, 77, unet.config.cross_attention_dim)
    out = unet(torch.randn(2, 4, 8, 8), times, encoder_hidden_states=text).sample
    assert torch.equal(seen[0], times)
    assert seen[1].dtype == out.dtype == torch.bfloat16
    assert weights.dtype == torch.bfloat16
    assert not torch.equal(times.bfloat16().float(), times)


def rows_of(module: torch.nn.Module) -> dict[str, int]:
    return {name: len(rows_here(param)) for name, param in module.named_parameters() if param.ndim}


@pytest.mark.parametrize("shard", ["grads", "full", "hybrid"])
def test_a_teacher_is_cut_as_its_student(shard):
    """Of four ranks on two machines, as rank 0 of them sees it; hybrid cuts inside a machine."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        ranks = Ranks(0, 4, 0, 2, sharded=True)
        student, teacher = (models.create("tiny", seed=3).unet for _ in range(2))
        whole = rows_of(student)
        ShardedWeights({"unet": student}, torch.bfloat16, ranks, shard)
        shard_frozen(teacher.requires_grad_(False), torch.bfloat16, ranks, shard)
        assert rows_of(student) == rows_of(teacher)
        name = max(whole, key=whole.__getitem__)
        assert rows_of(teacher)[name] == whole[name] // (2 if shard == "hybrid" else 4)
        assert is_cut(teacher)
        assert teacher.dtype == torch.bfloat16
    finally:
        dist.destroy_process_group()


def test_a_cut_teacher_keeps_nothing_of_its_passes(one_rank):
    """A backward pass would forget them; it has none."""
    teacher = models.create("tiny", seed=3).unet.requires_grad_(False)
    if not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("this PyTorch cannot be asked to forget")
    shard_frozen(teacher, torch.float32, one_rank, "full")
    text = torch.randn(2, 77, teacher.config.cross_attention_dim)
    for _ in range(2):
        with torch.no_grad():
            teacher(torch.randn(2, 4, 8, 8), torch.tensor([5, 6]), encoder_hidden_states=text)
    assert teacher._get_fsdp_state()._comm_ctx.post_forward_order == []


@pytest.mark.nightly
def test_two_ranks_learn_what_one_process_does(alone, long_recipe, tmp_path):
    said = told(long_recipe("parallel.mode=ddp", "parallel.devices=2"), tmp_path / "run")
    assert "2 processes (ddp), 4 pictures a step each" in said
    assert said.count("step 20/20") == 1  # rank 0 alone tells
    assert furthest(losses(alone), losses(tmp_path / "run")) < CLOSE
    assert same_model(alone / "model", tmp_path / "run" / "model") < 1e-5
    other = tmp_path / "other"
    told(long_recipe("parallel.mode=ddp", "parallel.devices=2", "train.seed=1", "train.steps=5"), other)
    first = {step: loss for step, loss in losses(alone).items() if step <= 5}
    assert furthest(first, losses(other)) > 1e-3


@pytest.mark.nightly
def test_cut_weights_learn_the_same_and_go_on_alone(alone, sharded, long_recipe):
    """Ten steps of fsdp on two ranks, then one process goes on: the same losses, the same model."""
    newest = checkpoints(sharded / "checkpoints")[-1]
    names = {file.name for file in newest.iterdir()}
    assert {"weights-00000.safetensors", "weights-00001.safetensors", "ema-00001.safetensors"} <= names
    state = load_checkpoint(newest)
    whole = load_checkpoint(checkpoints(alone / "checkpoints")[-2])
    assert state.step == whole.step == 10
    for kind in ("weights", "ema", "optimiser"):
        assert state.tensors[kind].keys() == whole.tensors[kind].keys()
        for name, tensor in whole.tensors[kind].items():
            torch.testing.assert_close(state.tensors[kind][name], tensor, atol=1e-4, rtol=1e-3)
    said = told(long_recipe(), sharded)
    assert "going on after step 10 of 20" in said
    assert "no longer bit-identical" in said
    assert furthest(losses(alone), losses(sharded)) < CLOSE
    assert same_model(alone / "model", sharded / "model") < 1e-5


@pytest.mark.nightly
def test_weights_let_go_after_each_block_are_there_for_checkpointing_and_samples(
    alone, long_recipe, tmp_path
):
    """fsdp, shard=full: blocks are gathered again in the backward pass and while pictures are drawn."""
    draws = ("sample.every=3", "sample.prompts=[a red square]", "sample.steps=2", "train.steps=3")
    short = (*draws, "train.gradient_checkpointing=true", "data.holdout=4")
    cut = ("parallel.mode=fsdp", "parallel.devices=2", "parallel.shard=full")
    told(long_recipe(*short, *cut), tmp_path / "cut")
    first = {step: loss for step, loss in losses(alone).items() if step <= 3}
    assert len(first) == 3
    assert furthest(first, losses(tmp_path / "cut")) < CLOSE
    told(long_recipe(*short), tmp_path / "one")
    pictures = [tmp_path / name / "samples" / "step-00000003.png" for name in ("cut", "one")]
    a, b = (np.asarray(Image.open(picture), dtype=np.int16) for picture in pictures)
    assert np.abs(a - b).max() <= 1
    assert a.std() > 1
    assert len(list((tmp_path / "cut" / "samples").iterdir())) == 1  # the other rank's is gone


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "ranks", "micro"), [("ddp", 4, 1), ("fsdp", 2, 4)])
def test_one_process_goes_on_as_several(alone, long_recipe, tmp_path, mode, ranks, micro):
    out = tmp_path / "run"
    told(long_recipe("train.steps=10"), out)
    more = f"parallel.mode={mode}", f"parallel.devices={ranks}", f"train.micro_batch={micro}"
    said = told(long_recipe(*more), out)
    assert "going on after step 10 of 20" in said
    assert furthest(losses(alone), losses(out), after=10) < CLOSE


@pytest.mark.nightly
def test_bf16_masters_stay_alike(long_recipe, tmp_path):
    """Computing in bf16, two ranks differ from one by rounding only; masters are float32."""
    short = ("train.steps=6", "train.precision=bf16")
    told(long_recipe(*short), tmp_path / "one")
    for mode in ("ddp", "fsdp"):
        out = tmp_path / mode
        told(long_recipe(*short, f"parallel.mode={mode}", "parallel.devices=2"), out)
        assert furthest(losses(tmp_path / "one"), losses(out)) < 0.02
        weights = load_checkpoint(checkpoints(out / "checkpoints")[-1]).tensors["weights"]
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "precision"), [("lcm", "float32"), ("lcm", "bf16"), ("dmd2", "float32"), ("gan", "float32")]
)
def test_a_student_and_its_teacher_in_shards_are_what_they_are_whole(recipe_of, tmp_path, method, precision):
    """Also the averaged weights that LCM's student learns from; the control learns from its own answers."""
    models.save(models.create("tiny", seed=3), tmp_path / "base")
    short = ("train.steps=6", "train.micro_batch=2", "data.resolution=32", "checkpoint.every=3")
    kind = "dmd2" if method == "gan" else method
    short += ("optim.warmup_steps=0", f"objective.distill.method={kind}", "data.holdout=4")
    short += (f"train.precision={precision}",)
    close, alike = (1e-5, 1e-4) if precision == "float32" else (0.02, 0.02)
    if kind == "dmd2":
        short += ("objective.distill.fake_updates=2",)
    if method == "gan":
        short += ("objective.distill.gan_weight=1",)

    def recipe(*more):
        return recipe_of("distill", *short, *more, model={"base": str(tmp_path / "base")})

    told(recipe(), tmp_path / "one")
    told(recipe("parallel.mode=fsdp", "parallel.devices=2"), tmp_path / "cut")
    assert furthest(losses(tmp_path / "one"), losses(tmp_path / "cut")) < close
    assert same_model(tmp_path / "one" / "model", tmp_path / "cut" / "model") < alike
    if (method, precision) == ("lcm", "float32"):
        told(recipe("objective.distill.target=student"), tmp_path / "own")
        assert furthest(losses(tmp_path / "one"), losses(tmp_path / "own"), after=2) > 1e-4


@pytest.mark.nightly
def test_lion_in_shards_is_lion(long_recipe, tmp_path):
    """Each number has a step of its own; a sign may turn where two sums differ in their last bit."""
    short = ("train.steps=6", "optim.name=lion", "optim.lr=1e-3", "optim.beta2=0.99")
    told(long_recipe(*short), tmp_path / "one")
    told(long_recipe(*short, "parallel.mode=fsdp", "parallel.devices=2"), tmp_path / "cut")
    assert furthest(losses(tmp_path / "one"), losses(tmp_path / "cut")) < 0.02
    assert len(set(losses(tmp_path / "one").values())) == 6


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_of(pid: int) -> str:
    """`rank 1`, as `warm` names processes."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "ended by SIGKILL"), (signal.SIGSTOP, "hangs")]
)
def test_a_lost_or_hung_rank_is_named(long_recipe, tmp_path, number, words):
    out = tmp_path / "run"
    limit = ("train.steps=100000", "parallel.timeout_s=5", "checkpoint.every=20")
    recipe = long_recipe(*limit, "parallel.mode=ddp", "parallel.devices=2")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": warm.PIPE, "stderr": warm.STDOUT, "text": True}
    with warm.Popen(command(recipe, out), env=env, ranks=2, **pipes) as job:
        assert job.stdout is not None
        while "step" not in job.stdout.readline().split()[:1]:
            assert job.poll() is None
        victim = next(pid for pid in children(job.pid) if rank_of(pid) == "rank 1")
        os.kill(victim, number)
        began = time.monotonic()
        said = job.stdout.read()
        assert time.monotonic() - began < 120
        assert job.wait() == 1
    assert "rank 1" in said, said
    assert words in said, said


@pytest.mark.nightly
def test_sigterm_to_the_job_saves(long_recipe, tmp_path):
    out = tmp_path / "run"
    recipe = long_recipe(
        "train.steps=100000", "checkpoint.every=90000", "parallel.mode=ddp", "parallel.devices=2"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": warm.PIPE, "stderr": warm.STDOUT, "text": True}
    with warm.Popen(command(recipe, out), env=env, ranks=2, **pipes) as job:
        assert job.stdout is not None
        while "step" not in job.stdout.readline().split()[:1]:
            assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        said = job.stdout.read()
        assert job.wait() == 1, said
    saved = checkpoints(out / "checkpoints")
    assert len(saved) == 1, said
    assert load_checkpoint(saved[0]).step == max(losses(out))


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (("parallel.mode=fsdp", "optim.name=muon"), "optim.name"),
        (("parallel.mode=fsdp", "train.channels_last=true"), "train.channels_last"),
        (("parallel.devices=2",), "parallel.devices"),
        (("parallel.mode=ddp", "parallel.devices=0"), "parallel.devices"),
        (("parallel.mode=ddp", "optim.fused_backward=true", "optim.clip_norm=null"), "optim.fused_backward"),
    ],
)
def test_what_cannot_be_is_refused_at_once(recipe_of, more, key):
    with pytest.raises(RecipeError, match=f"^{key}: "):
        recipe_of("pretrain", *more)


@pytest.mark.parametrize(
    ("asked", "device_type", "sharded", "innermost"),
    [
        ("auto", "cuda", False, True),
        ("auto", "cuda", True, False),  # weights are cut in their plain layout
        ("auto", "cpu", False, False),
        (True, "cpu", False, True),
        (False, "cuda", False, False),
    ],
)
def test_convolutions_lie_channels_last_where_that_is_faster_and_possible(
    asked, device_type, sharded, innermost
):
    assert channels_last(asked, device_type, sharded=sharded) is innermost


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("parallel.devices=3", "train.global_batch: 8 over 3 processes; allowed: multiples of 3"),
        ("data.filter=width > 9000", "data.filter: no row of 44 matches 'width > 9000'"),  # found together
        ("data.store=nowhere.lance", "no picture store at nowhere.lance"),  # found by rank 0 for all
    ],
)
def test_a_mistake_that_all_ranks_find_is_told_once(long_recipe, tmp_path, more, words):
    recipe = long_recipe("parallel.mode=ddp", "parallel.devices=2", more)
    said = told(recipe, tmp_path / "run", code=2)
    assert said.count(words) == 1
    assert "Traceback" not in said
    assert "terminate" not in said
