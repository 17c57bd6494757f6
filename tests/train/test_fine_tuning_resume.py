"""Fine-tuning that is killed and started again ends as if it had never been disturbed, to the bit."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from killing import TrainingServer
from safetensors.torch import load_file
from subjects import recipe_for

from darkroom.recipe import Recipe
from darkroom.run import Run
from darkroom.train.checkpoint import checkpoints, load_checkpoint

STEPS = 24


def settings(task: str, base: Path, photos: Path, *more: str) -> Recipe:
    overrides = [f"train.steps={STEPS}", "checkpoint.every=2", "train.log_every=3", "optim.warmup_steps=3"]
    overrides += ["adapter.dropout=0.1", "adapter.text_encoder=true"] if "lora" in task else []
    if task.startswith("dreambooth"):
        overrides += ["data.class_prompt=a photo of a dog", "data.num_class_images=3", "data.holdout=1"]
        overrides += ["evaluate.every=7", "data.caption_dropout=0.2"]
    return recipe_for(task, base, photos, *overrides, *more)


def state_of(run: Path) -> dict[str, torch.Tensor]:
    last = load_checkpoint(checkpoints(run / "checkpoints")[-1])
    assert last.step == STEPS
    tensors = {f"{file}/{name}": t for file, named in last.tensors.items() for name, t in named.items()}
    for file in run.glob("*.safetensors"):
        tensors |= {f"{file.name}:{name}": tensor for name, tensor in load_file(file).items()}
    return tensors


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("dreambooth-lora", ("optim.name=adamw8bit",)),
        ("dreambooth", ("optim.fused_backward=true",)),
        ("textual-inversion", ()),
    ],
)
def test_killed_at_any_moment_ends_bit_identical(
    base: Path, photos: Path, tmp_path: Path, task: str, more: tuple[str, ...]
) -> None:
    moments = random.Random(1)
    recipe = settings(task, base, photos, *more).model_dump(mode="json")
    with TrainingServer() as server:
        server.start(recipe, tmp_path / "whole")
        assert server.wait() == 0, (tmp_path / "whole.log").read_text()
        kills = 0
        while True:
            pid = server.start(recipe, tmp_path / "killed")
            if kills < 6:
                time.sleep(moments.uniform(0.3, 2.5))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                kills += 1
            code = server.wait()
            if code == 0:
                break
            assert code == -signal.SIGKILL, (tmp_path / "killed.log").read_text()
        other = settings(task, base, photos, *more, "train.seed=1").model_dump(mode="json")
        server.start(other, tmp_path / "other")
        assert server.wait() == 0
    one, two, third = (state_of(tmp_path / name) for name in ("whole", "killed", "other"))
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    assert any(not torch.equal(one[name], third[name]) for name in one)  # the control
    rows = [
        [(row["step"], row.get("loss")) for row in Run.open(tmp_path / name).metrics()]
        for name in ("whole", "killed")
    ]
    assert rows[0] == rows[1]
