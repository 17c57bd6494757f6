"""What `deploy/` starts for training exists: verbs, options and recipe keys, torchrun's flags, extras."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from darkroom.cli.application import app
from darkroom.recipe import read_recipe

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
VALUES = {
    "RECIPE": "recipes/sd2-base-256.yaml",
    "STORE": "pictures.lance",
    "RUN": "runs/sd2",
    "CHECKPOINTS": "s3://bucket/runs/sd2",
    "BUDGET_USD": "40000",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_ID": "7",
    "PER_NODE": "8",
    "HEAD": "node1",
}


def check(words: list[str]) -> None:
    """An error unless `darkroom WORDS` is a verb with options that it has, and recipe keys that exist."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"no verb {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    command.make_parser(_context(command)).parse_args(list(words))
    for recipe in (word for word in words if word.endswith(".yaml")):
        overrides = [word for word in words if re.fullmatch(r"[a-z_.]+=.*", word)]
        read_recipe(ROOT / "recipes" / Path(recipe).name, overrides)


def _context(command: Any) -> Any:
    return command.context_class(command, info_name=command.name)


def filled(text: str) -> str:
    """A command's text with its variables' values."""
    joined = text.replace("\\\n", " ")
    return re.sub(r"\$\{?(\w+)\}?", lambda found: VALUES[found[1]], joined)


def commands_of(name: str) -> list[list[str]]:
    """The words behind `darkroom` in a file's commands."""
    text = (DEPLOY / name).read_text()
    if name == "train.Dockerfile":
        lines = [line for line in text.splitlines() if line.startswith("#   docker run")]
        return [shlex.split(line.split(" darkroom-train ", 1)[1]) for line in lines]
    text = yaml.safe_load(text)["run"] if name.endswith(".yaml") else text
    found = re.findall(r"(?:-m |bin/)darkroom ((?:.*\\\n)*.*)", text)
    return [shlex.split(filled(one).removesuffix("&").strip()) for one in found]


@pytest.mark.parametrize(
    ("name", "count"), [("train.Dockerfile", 7), ("slurm.sbatch", 1), ("skypilot.yaml", 1)]
)
def test_what_is_started_exists(name, count):
    found = commands_of(name)
    assert len(found) == count
    for words in found:
        check(words)


def test_the_check_finds_what_is_wrong():
    train = ["train", "recipes/sd2-base-256.yaml", "data.store=x"]
    check(train)
    for wrong in (["trian"], [*train, "--outt", "x"], [*train, "data.stoer=x"], ["bench", "trains"]):
        with pytest.raises(Exception, match="trian|outt|stoer|trains"):
            check(wrong)


def test_slurm_script_is_bash_and_torchrun_takes_its_flags():
    from torch.distributed.run import get_args_parser

    script = DEPLOY / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    started = re.search(r"torchrun ((?:.*\\\n)*.*)", text)
    assert started is not None
    given = get_args_parser().parse_args(shlex.split(filled(started[1]).removesuffix("&").strip()))
    assert given.module
    assert given.training_script == "darkroom"
    assert given.shutdown_timeout == 300
    assert given.training_script_args[0] == "train"
    options = re.findall(r"^#SBATCH --([a-z-]+)=", text, re.MULTILINE)
    assert {"nodes", "gpus-per-node", "signal", "time"} <= set(options)


def test_slurm_script_queues_again_only_when_time_ran_out(tmp_path):
    """The script itself, with stand-ins for the cluster's commands: a job that saves when it is told to."""
    (tmp_path / "bin").mkdir()
    stand_ins = {
        "scontrol": 'case "$1" in show) echo node1;; *) echo "$@" >> "$LOG";; esac',
        "scancel": 'echo "scancel $@" >> "$LOG"; kill -TERM "$(cat "$LOG.pid")"',
        "srun": 'echo $$ > "$LOG.pid"; trap "sleep 0.2; exit 1" TERM; echo "$@" >> "$LOG"; '
        'kill -USR1 "$PPID"; for i in $(seq 50); do sleep 0.1; done',
    }
    for name, body in stand_ins.items():
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    log = tmp_path / "log"
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "LOG": str(log), **VALUES}
    env["SLURM_JOB_NODELIST"] = "node[1-2]"
    done = subprocess.run(["bash", str(DEPLOY / "slurm.sbatch")], env=env, timeout=30, check=False)
    assert done.returncode == 1
    said = log.read_text().splitlines()
    assert "-m darkroom train recipes/sd2-base-256.yaml data.store=pictures.lance" in said[0]
    assert said[1:] == ["scancel --signal=TERM 7", "requeue 7"]
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\nexit 2\n")
    log.unlink()
    done = subprocess.run(["bash", str(DEPLOY / "slurm.sbatch")], env=env, timeout=30, check=False)
    assert done.returncode == 2  # a mistake in the recipe comes back as it is
    assert not log.exists()


def test_skypilot_file_says_what_the_job_needs():
    told = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert set(told) <= {"name", "resources", "num_nodes", "workdir", "envs", "setup", "run"}
    used = set(re.findall(r"\$(\w+)", told["run"]))
    assert used == set(told["envs"])
    assert all(isinstance(value, str) for value in told["envs"].values())


@pytest.mark.parametrize("name", ["Dockerfile", "train.Dockerfile", "skypilot.yaml"])
def test_extras_that_are_installed_exist(name):
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.search(r"make\.py (?:locked|setup) ([\w ]+)", (DEPLOY / name).read_text())
    assert asked is not None
    assert set(asked[1].split()) <= set(known)


def test_dockerfile_copies_what_is_there_and_starts_darkroom():
    lines = (DEPLOY / "train.Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / one).exists() for one in copied)
    assert 'ENTRYPOINT ["darkroom"]' in lines
