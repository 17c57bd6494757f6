"""Every verb where only the base is installed: it works, or one line names the extra."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from needs import missing

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.nightly

SMALL = "data.store=p.lance train.steps=2 train.global_batch=4 data.resolution=32 optim.warmup_steps=0"
SMALL += " data.holdout=0.25"
VAE = f"train {ROOT}/recipes/autoencoder.yaml {SMALL}"
WORKS = [
    "doctor",
    "import photos p.lance",
    "inspect p.lance",
    f"{VAE} --out runs/vae",
    "prepare p.lance --model runs/vae/model --resolution 32",
    f"train {ROOT}/recipes/pretrain.yaml model.vae=runs/vae/model {SMALL} --out runs/first",
    f"train {ROOT}/recipes/extractor.yaml {SMALL} --out runs/ext",
    f"{VAE} optim.name=adafactor --out runs/adafactor",
    "runs",
    "runs compare runs/vae runs/first",
    "export runs/first --to model",
    "report runs/first --out report.html",
    "generate model red --steps 2 --num 4 --out drawn",
    "generate model red --steps 2 --image photos/1.png --strength 0.5 --out from-picture",
    "generate model red --steps 2 --optimise auto --memory 3GB --out auto",
    "evaluate drawn --reference photos --metrics kid --extractor all=runs/ext/model",
    "evaluate model --prompts prompts.txt --metrics div --extractor all=runs/ext/model --num 2 --steps 2",
    "plan generate --model tiny",
    "plan serve --model tiny",
    f"plan {ROOT}/recipes/pretrain.yaml data.store=p.lance model.vae=runs/vae/model",
    f"bench train {VAE.removeprefix('train ')} --repeats 1",
    "bench loader --rows 512 --repeats 5",
    "bench import --pictures 64 --repeats 5",
    "bench optimisations tiny bf16 --steps 1 --repeats 1",
    "bench batch tiny --steps 1 --most 1 --repeats 1",
    "bench precision tiny --steps 2 --repeats 1 --page precision.html",
    "delete p.lance --source photos",
]
NAMES_AN_EXTRA = {
    "serve --make-key you --api-key-file keys.txt": "serve",
    "serve model": "serve",
    "serve model --shared": "serve",
    "serve model --engine ray": "serve",
    "bench serve tiny --seconds 1 --adapters 0": "serve",
    "doctor --engine ray": "ray",
    "prepare p.lance --model model --resolution 32 --engine ray": "ray",
    f"{VAE} --out runs/on-ray --engine ray": "ray",
    f"{VAE} --out runs/prodigy optim.name=prodigy optim.lr=1": "optim",
    f"{VAE} --out runs/free optim.name=schedule-free optim.lr_schedule=constant": "optim",
    f"{VAE} --out runs/adamw8bit optim.name=adamw8bit": "quant",
    f"{VAE} --out runs/board track.tensorboard=true": "track",
    f"{VAE} --out runs/wandb track.wandb=project": "track",
    f"{VAE} --out runs/s3 checkpoint.url=s3://bucket/run": "s3",
    "generate model red --steps 2 --backend onnx --out onnx": "onnx",
    "generate model red --steps 2 --backend openvino --out openvino": "openvino",
    "generate model red --steps 2 --optimise int8 --out int8": "quant",
}
"""These come before the last of WORKS, which deletes the store's pictures."""

DRIVER = """
import contextlib, io, json, sys, traceback
from pathlib import Path
from PIL import Image
from darkroom import cli
Path("photos").mkdir()
Path("prompts.txt").write_text("red\\nblue\\n")
for i in range(12):
    Image.new("RGB", (40, 40), (20 * i, 255 - 20 * i, 90)).save(f"photos/{i}.png")
    Path(f"photos/{i}.txt").write_text(f"a photo of colour {i}")
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(command.split())
            code = 0
        except SystemExit as left:
            code = left.code or 0
        except BaseException:
            code = "not foreseen"
            traceback.print_exc()
    print(json.dumps([command, code, err.getvalue()]), flush=True)
"""


def set_up(folder: Path, python: str = sys.executable) -> tuple[Path, Path]:
    """A copy of the project that `make.py setup` has set up by a Python, and the Python there."""
    copy = folder / "darkroom"
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    command = [python, str(copy / "make.py"), "setup"]
    told = subprocess.run(command, env=clean(), capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "[darkroom] ready in " in told.stdout
    return copy, copy / ".venv" / ("Scripts" if os.name == "nt" else "bin") / "python"


def clean() -> dict[str, str]:
    """The environment without what leads to this checkout and its packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run_all(python: Path, commands: list[str], folder: Path) -> list[list[Any]]:
    """Of each command its words, exit code and errors, run one after the other in a folder of pictures."""
    told = subprocess.run(
        [python, "-c", DRIVER, json.dumps(commands)],
        cwd=folder,
        env=clean(),
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("[")]
    assert [command for command, _, _ in rows] == commands, told.stderr[-2000:]
    return rows


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> tuple[Path, Path]:
    return set_up(tmp_path_factory.mktemp("base"))


def interpreter(version: str, folder: Path) -> str:
    """A Python of this version: the machine's own, or pyenv's, or one that uv brings; else it is missing."""
    name = f"python{version}"
    found = shutil.which(name)
    places = [] if found is None else [Path(found)]
    if found is not None and places[0].parent.name == "shims":  # of pyenv: they work for one version
        places = sorted(places[0].parents[1].glob(f"versions/{version}.*/bin/{name}"))
    if not places and find_spec("uv"):
        command = [sys.executable, "-m", "uv", "python", "install", version, "--install-dir", str(folder)]
        subprocess.run(command, env=clean(), capture_output=True, timeout=300, check=False)
        places = sorted(folder.glob(f"*/bin/{name}"))
    return str(places[-1]) if places else missing(f"no Python {version} here, and uv could not bring one")


def test_every_verb_works_or_names_the_extra(base, tmp_path):
    _, python = base
    commands = [*WORKS[:-1], *NAMES_AN_EXTRA, WORKS[-1]]
    rows = run_all(python, commands, tmp_path)
    wrong = [row for row in rows if row[0] in WORKS and row[1] != 0]
    for command, code, err in rows:
        if command in NAMES_AN_EXTRA:
            mend = f"is not installed; pip install '.[{NAMES_AN_EXTRA[command]}]'"
            one_line = err.startswith("darkroom: ") and err.count("\n") == 1
            if code != 2 or mend not in err or not one_line:
                wrong.append([command, code, err])
    assert wrong == [], json.dumps(wrong, indent=1)


def test_the_base_has_no_package_of_the_tests_or_of_extras(base):
    _, python = base
    told = subprocess.check_output([python, "-m", "pip", "list", "--format", "json"], text=True)
    names = {row["name"].lower() for row in json.loads(told)}
    assert {"torch", "diffusers", "darkroom-sd"} <= names
    assert not {"moto", "cfn-lint", "jedi", "wandb", "ray", "fastapi", "pytest"} & names


def test_a_second_set_up_does_nothing_and_extras_are_added(base):
    copy, python = base
    command = [sys.executable, str(copy / "make.py"), "setup"]
    assert subprocess.check_output(command, text=True) == ""
    assert "extras: optim" in subprocess.check_output([*command, "optim"], text=True)
    subprocess.run([python, "-c", "import prodigyopt, schedulefree"], check=True)
    assert subprocess.check_output(command, text=True) == ""


FROM_PICTURES_TO_PICTURES = [
    "import photos p.lance",
    f"{VAE} --out runs/vae",
    "prepare p.lance --model runs/vae/model --resolution 32",
    f"train {ROOT}/recipes/pretrain.yaml model.vae=runs/vae/model {SMALL} --out runs/first",
    "generate runs/first/model red --steps 2 --out drawn",
    "inspect p.lance",
]


@pytest.mark.parametrize("version", ["3.11", "3.13", "3.14"])
def test_the_oldest_and_the_newest_python(version, base, tmp_path):
    """Set up from the lock by that Python, and used: pictures to a model to pictures."""
    if sys.version.startswith(f"{version}."):  # the one that all else here is run with
        _, python = base
    else:
        _, python = set_up(tmp_path, interpreter(version, tmp_path / "pythons"))
    told = subprocess.check_output([python, "-c", "import sys; print(sys.version)"], text=True)
    assert told.startswith(f"{version}.")
    rows = run_all(python, FROM_PICTURES_TO_PICTURES, tmp_path)
    assert [row for row in rows if row[1] != 0] == []
    assert len(list((tmp_path / "drawn").glob("*.png"))) == 1
