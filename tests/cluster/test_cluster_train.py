"""Training in workers of a Ray cluster is the same training, also where workers are lost."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image
from ray.exceptions import ActorDiedError
from safetensors.torch import load_file

import warm
from darkroom import cli
from darkroom.cluster.connect import Capacity
from darkroom.cluster.train import Placement, _target, _uses_gpus, _why, _workers, train
from darkroom.data.importers import import_pictures
from darkroom.data.store import Store
from darkroom.errors import InputError, RecipeError, Stopped
from darkroom.recipe import make_recipe
from darkroom.train.checkpoint import checkpoints
from darkroom.train.run import train as train_here

pytestmark = pytest.mark.xdist_group("ray")
STEPS = 12
MARK = "NCCL_DARKROOM_TEST"  # an environment variable that workers get: tells this test's from others
VAE = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
UNET = {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2, "layers_per_block": 1}
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


def content(store: Path) -> dict[str, Any]:
    return {
        "task": "pretrain",
        "model": {"base": "tiny", "vae": VAE, "unet": UNET, "text_encoder": TEXT},
        "data": {"store": str(store), "resolution": 16, "encode": "inline"},
        "optim": {"lr": 2e-3},
        "parallel": {"mode": "ddp", "devices": 2},
        "train": {
            "steps": STEPS,
            "global_batch": 8,
            "micro_batch": 2,
            "precision": "float32",
            "log_every": 2,
            "ema": {"decay": 0.9},
        },
        "checkpoint": {"every": 3},
    }


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """A recipe for two processes, on 20 pictures of noise."""
    root = tmp_path_factory.mktemp("material")
    (root / "pictures").mkdir()
    draws = np.random.default_rng(0)
    names = [f"{i:02d}.png" for i in range(20)]
    for name in names:
        Image.fromarray(draws.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(root / "pictures" / name)
    lines = [json.dumps({"file_name": name, "text": f"noise number {name[:2]}"}) for name in names]
    (root / "pictures" / "metadata.jsonl").write_text("\n".join(lines))
    import_pictures(root / "pictures", Store.create(root / "pictures.lance"))
    (root / "recipe.yaml").write_text(yaml.safe_dump(content(root / "pictures.lance")))
    return root / "recipe.yaml"


def command(recipe: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-u", "-m", "darkroom", "train", str(recipe), *more, "--out", str(out)]


def environment(out: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", MARK: str(out)}


def trained(recipe: Path, out: Path, *more: str, code: int = 0) -> str:
    alone = "--engine" in more or "parallel.mode=none" in more
    settings = {"capture_output": True, "text": True, "env": environment(out), "timeout": 600}
    done = warm.run(command(recipe, out, *more), ranks=0 if alone else 2, **settings)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout + done.stderr


def weights(run: Path) -> dict[str, bytes]:
    """All trained numbers of a finished run, as bytes."""
    files = sorted((run / "model").rglob("*.safetensors"))
    assert len(files) >= 2
    return {
        f"{file.relative_to(run)}/{name}": tensor.numpy().tobytes()
        for file in files
        for name, tensor in load_file(file).items()
    }


@pytest.fixture(scope="module")
def by_torchrun(recipe, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("torchrun") / "run"
    trained(recipe, out)
    return out


def workers_of(out: Path) -> list[int]:
    """The training workers of this run that live now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            if b"RayTrainWorker" in title and f"{MARK}={out}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def disturbed(recipe: Path, out: Path, disturb: Callable[[int], None], *more: str) -> tuple[int, str]:
    """Run to the end, with `disturb(driver's pid)` once two checkpoints are there; its code and words."""
    with warm.Popen(
        command(recipe, out, "--engine", "ray", "--ray-address", "local", *more),
        stdout=warm.PIPE,
        stderr=warm.STDOUT,
        text=True,
        env=environment(out),
    ) as driver:
        until = time.monotonic() + 900
        while len(checkpoints(out / "checkpoints")) < 2:
            assert driver.poll() is None, "it ended too soon"
            assert time.monotonic() < until, "no checkpoints were made"
            time.sleep(0.02)
        disturb(driver.pid)
        said, _ = driver.communicate(timeout=400)
    return driver.returncode, said


def test_ray_learns_what_this_process_does_to_the_bit(laptop, recipe, tmp_path):
    said: list[str] = []
    alone = ["parallel.mode=none", "parallel.devices=auto", "train.micro_batch=8", "train.steps=4"]
    for name, more in (("here", []), ("other", ["train.seed=1"])):
        one = make_recipe(yaml.safe_load(recipe.read_text()), [*alone, *more])
        train_here(one, out=tmp_path / name, console=lambda _: None)
    one = make_recipe(yaml.safe_load(recipe.read_text()), alone)
    made = train(one, out=tmp_path / "ray", placement=Placement(laptop.address), console=said.append)
    assert made.steps == 4
    assert said[0].endswith("1 node, 2 CPUs (Ray 2.60.0)")
    assert sum("step 4/4" in line for line in said) == 1
    assert weights(tmp_path / "ray") == weights(tmp_path / "here")
    assert weights(tmp_path / "ray") != weights(tmp_path / "other")


@pytest.mark.nightly
def test_ray_learns_what_torchrun_does_to_the_bit(recipe, by_torchrun, tmp_path):
    said = trained(recipe, tmp_path / "run", "--engine", "ray", "--ray-address", "local")
    assert said.startswith("Ray on this machine: 1 node")
    assert "2 processes (ddp), 4 pictures a step each" in said
    assert said.count(f"step {STEPS}/{STEPS}") == 1
    assert weights(tmp_path / "run") == weights(by_torchrun)
    trained(recipe, tmp_path / "other", "train.seed=1")
    assert weights(tmp_path / "other") != weights(by_torchrun)


@pytest.mark.nightly
def test_a_killed_worker_is_started_again_and_the_bits_are_the_same(recipe, by_torchrun, tmp_path):
    def kill(driver: int) -> None:
        pids = workers_of(tmp_path / "run")
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)

    longer = "train.steps=40"
    code, said = disturbed(recipe, tmp_path / "run", kill, longer)
    assert code == 0, said
    assert "workers were lost and are started again (1 of at most 3)" in said
    assert "going on after step " in said
    trained(recipe, tmp_path / "calm", longer)
    assert weights(tmp_path / "run") == weights(tmp_path / "calm")
    assert weights(tmp_path / "run") != weights(by_torchrun)  # twelve steps are not forty


@pytest.mark.nightly
def test_too_many_lost_workers_end_the_job_and_the_same_command_goes_on(recipe, tmp_path):
    def kill(driver: int) -> None:
        os.kill(workers_of(tmp_path / "run")[-1], signal.SIGKILL)

    longer = "train.steps=40"
    code, said = disturbed(recipe, tmp_path / "run", kill, longer, "--max-failures", "0")
    assert code == 1
    ends = [line for line in said.splitlines() if line.startswith("darkroom: ")]
    assert len(ends) == 1, said
    assert "lost" in ends[0]
    assert "--max-failures is 0" in ends[0]
    assert "Traceback" not in said
    assert "going on after step " in trained(recipe, tmp_path / "run", longer)


@pytest.mark.nightly
def test_a_stop_saves_and_is_told(recipe, tmp_path):
    longer = "train.steps=200"
    code, said = disturbed(
        recipe, tmp_path / "run", lambda driver: os.kill(driver, signal.SIGTERM), longer, "checkpoint.every=2"
    )
    assert code == 1
    assert "darkroom: stopped after step " in said, said
    assert "saved; the same command goes on" in said
    step = int(said.split("stopped after step ")[1].split()[0])
    assert checkpoints(tmp_path / "run" / "checkpoints")[-1].name.startswith(f"step-{step:08d}")


@pytest.mark.nightly
def test_an_error_that_nobody_foresaw_is_told_by_its_type_and_last_line(recipe, tmp_path):
    (tmp_path / "file").write_text("no folder")
    ray = ("--engine", "ray", "--ray-address", "local", "--max-failures", "0")
    said = trained(recipe, tmp_path / "file" / "run", *ray, code=1)
    assert "FileExistsError: [Errno 17] File exists" in said, said
    assert "--max-failures is 0" in said
    assert "Traceback" not in said


@pytest.mark.nightly
def test_a_killed_controller_is_called_that_and_the_same_command_goes_on(recipe, tmp_path):
    """With nothing of Ray's own between the lines, and no new starts that nobody made."""

    def kill(driver: int) -> None:
        [controller] = [
            one
            for one in psutil.Process(driver).children(recursive=True)
            if "TrainController" in " ".join(one.cmdline())
        ]
        controller.kill()

    longer = ("train.steps=40", "parallel.mode=none", "parallel.devices=auto")
    code, said = disturbed(recipe, tmp_path / "run", kill, *longer)
    assert code == 1
    last = said.splitlines()[-1]
    assert last.startswith(
        "darkroom: Ray Train's controller was lost: its process was killed (was memory short?); "
        "the same command goes on from the last checkpoint; Ray's logs are in "
    )
    assert list(Path(last.split()[-1]).glob("raylet.*"))
    assert "raylet)" not in said
    assert "going on after step " in trained(recipe, tmp_path / "run", *longer)
    trained(recipe, tmp_path / "calm", *longer)
    assert weights(tmp_path / "run") == weights(tmp_path / "calm")


@pytest.mark.nightly
def test_a_missing_cluster_is_exit_2(recipe, tmp_path):
    said = trained(recipe, tmp_path / "run", "--engine", "ray", "--ray-address", "127.0.0.1:1", code=2)
    assert "no Ray cluster answers at 127.0.0.1:1" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_workers_are_for_ray(recipe):
    with pytest.raises(InputError, match="--workers with --engine local; allowed: with --engine ray"):
        cli.app(["train", str(recipe), "--engine", "local", "--workers", "2"], standalone_mode=False)


def test_workers_that_recipe_or_cluster_do_not_allow(recipe):
    two = make_recipe(content(Path("x.lance")), ["train.micro_batch=1"])
    one = make_recipe(content(Path("x.lance")), ["parallel.mode=none", "parallel.devices=auto"])
    room = Capacity(((2, 0), (2, 0)))
    assert _workers([two.train], two.parallel, Placement(), room) == [2]
    assert _workers([two.train], two.parallel, Placement(workers=4), room) == [4]
    assert _workers([one.train], one.parallel, Placement(), room) == [1]
    assert _workers([two.train], two.parallel, Placement(workers=8), Capacity((), grows=True)) == [8]
    with pytest.raises(InputError, match="8 workers of 1 CPUs each: the cluster's nodes fit 4"):
        _workers([two.train], two.parallel, Placement(workers=8), room)
    with pytest.raises(InputError, match="2 workers of 4 CPUs each: .* fit 0, the largest has 2 CPUs"):
        _workers([two.train], two.parallel, Placement(cpus=4), room)
    with pytest.raises(RecipeError, match="parallel.mode: none, with 2 workers"):
        _workers([one.train], one.parallel, Placement(workers=2), room)
    with pytest.raises(RecipeError, match="train.global_batch: 8 over 3 processes"):
        _workers([two.train], two.parallel, Placement(workers=3), room)


def test_an_accelerator_that_is_still_to_come_is_one_of_gpus():
    recipe = make_recipe(content(Path("x.lance")), ["train.micro_batch=1"])
    on_cpus = make_recipe(content(Path("x.lance")), ["train.micro_batch=1", "train.device=cpu"])
    later, none_up = Placement(accelerator="H100"), Capacity((), grows=True)
    assert _uses_gpus(recipe.train.device, later, none_up)
    assert not _uses_gpus(on_cpus.train.device, later, none_up)
    assert not _uses_gpus(
        recipe.train.device, later, Capacity(((8, 0),), grows=True)
    )  # nodes of that type have none
    assert not _uses_gpus(recipe.train.device, Placement(), none_up)
    automatic = make_recipe(content(Path("x.lance")), ["train.micro_batch=1", "parallel.devices=auto"])
    with pytest.raises(InputError, match="no GPU is up to count; give --workers"):
        _workers([automatic.train], automatic.parallel, later, none_up)


def test_a_new_run_is_placed_once(tmp_path):
    (tmp_path / "run").mkdir()
    assert _target(tmp_path / "run", "auto", in_phases=False) == tmp_path / "run"
    assert _target(tmp_path / "run", "never", in_phases=False) == tmp_path / "run-2"
    with pytest.raises(InputError, match="--resume nowhere; allowed: auto, never"):
        _target(tmp_path / "run", "nowhere", in_phases=False)


def test_the_first_final_error_is_the_one_told():
    """What a user did wrong is told before what broke because of it."""
    lost = ("RankLost", 1, False, "the connection broke")
    mine = ("RecipeError", 2, True, "optim.lr: is wrong")
    assert (_why(None, [lost, mine], 3).exit_code, str(_why(None, [lost, mine], 3))) == (2, mine[3])
    assert isinstance(_why(None, [("Stopped", 1, True, "stopped after step 3")], 3), Stopped)
    odd = ("OSError", 1, False, "OSError: [Errno 5] Input/output error")
    assert str(_why(None, [odd, lost], 0)).startswith("OSError: [Errno 5] Input/output error, and --max-f")
    told = str(_why(None, [lost], 2))
    assert told.startswith("the connection broke, after 2 new starts (--max-failures)")
    none, two = (str(_why(ActorDiedError(), [], 3, starts)) for starts in (0, 2))
    assert none.startswith("Ray Train's controller was lost: its process was killed (was memory short?); the")
    assert "(was memory short?), after 2 new starts of the workers; the" in two
    assert str(_why(ValueError("odd"), [], 3, 1)).startswith("odd, after 1 new starts; the same command")
