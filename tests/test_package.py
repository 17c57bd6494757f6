"""The package as a user installs it: what a wheel holds, and the oldest and newest dependencies it allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import make
import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WITH_TORCH = ("torch", "nvidia", "cuda", "triton")
SMOKE = """
from importlib.metadata import version
from pathlib import Path

from darkroom.quickstart.journey import TOY, quickstart

quickstart(Path("quickstart"), seed=0, scale=TOY)
for name in ("diffusers", "numpy", "transformers"):
    print(name, version(name))
"""
"""Imports, encodes, trains, generates and writes a report."""


def test_the_package_says_who_made_it_and_for_whom():
    assert PROJECT["authors"]
    assert PROJECT["license"] == "Apache-2.0"
    assert {"Intended Audience :: Science/Research", "Typing :: Typed"} <= set(PROJECT["classifiers"])
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)}
    assert versions <= set(PROJECT["classifiers"])


def environment(folder: Path, *more: Path) -> tuple[str, dict[str, str]]:
    """The Python of a new virtual environment, and variables that let it see further packages."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return str(python), {**env, **({"PYTHONPATH": os.pathsep.join(map(str, more))} if more else {})}


def ran(
    *command: str, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, check=False)


@pytest.mark.nightly
def test_a_wheel_holds_the_recipes_and_finds_them_from_any_folder(tmp_path):
    built = ran(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--quiet", "-w", str(tmp_path))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("darkroom_sd-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    shipped = {path.name for path in (ROOT / "recipes").iterdir()}
    assert shipped == {Path(name).name for name in names if "/share/darkroom/recipes/" in name}
    assert {"darkroom/serve/page/index.html", "darkroom/py.typed"} <= set(names)
    assert "Name: darkroom-sd" in metadata
    assert re.search(r"^Requires-Dist: mkdocs-material.*extra == .docs", metadata, re.M)
    seen = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    python, env = environment(tmp_path / "env", *seen)
    installed = ran(python, "-m", "pip", "install", "--no-deps", "--quiet", str(wheel), env=env)
    assert installed.returncode == 0, installed.stderr
    (site,) = (tmp_path / "env").glob("[Ll]ib/**/site-packages")
    env["PYTHONPATH"] = os.pathsep.join([str(site), env["PYTHONPATH"]])  # before a checkout that is installed
    for recipe, message in (
        ("emoji", "train.steps: 0 was given"),
        ("none", "allowed: autoencoder, dit-budget"),
    ):
        arguments = ("-m", "darkroom", "train", f"recipes:{recipe}", "train.steps=0")
        found = ran(python, *arguments, env=env, cwd=tmp_path)
        assert found.returncode == 2
        assert message in found.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_darkroom_works_with_the_oldest_and_the_newest_dependencies(resolution, tmp_path):
    """With every package that it requires, but torch, which is gigabytes: that is this environment's."""
    python, env = environment(tmp_path / "env")
    assert ran(python, "-m", "pip", "install", "--quiet", make.UV).returncode == 0
    places = make.uv_options({**make.pip_settings(make.listed_by_pip(python)), "constraint": ""})
    uv = (python, "-m", "uv", "pip")

    def pins(*extras: str) -> dict[str, str]:
        wanted = (*extras, "--resolution", resolution, "--no-header", "--no-annotate")
        resolved = ran(*uv, "compile", "pyproject.toml", *wanted, *places)
        assert resolved.returncode == 0, resolved.stderr
        return dict(re.findall(r"^([\w.-]+)==(\S+)", resolved.stdout, re.M))

    assert {"torch", "diffusers", "ray"} <= set(pins("--all-extras"))
    base = {name: version for name, version in pins().items() if not name.startswith(WITH_TORCH)}
    lowest = dict(re.findall(r"'([\w-]+)>=([\d.]+)", repr(PROJECT)))
    assert base["diffusers"].startswith(lowest["diffusers"])
    exact = [f"{name}=={version}" for name, version in base.items()]
    installed = ran(*uv, "install", "--no-deps", "--python", python, *exact, *places)
    assert installed.returncode == 0, installed.stderr
    (site,) = (tmp_path / "env").glob("[Ll]ib/**/site-packages")
    here = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "src", site, *here)))
    for arguments in (("--help",), ("recipe", "optim.lr"), ("recipe", "--schema"), ("train", "--help")):
        done = ran(python, "-m", "darkroom", *arguments, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = ran(python, "-c", SMOKE, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    used = dict(line.split() for line in done.stdout.splitlines()[-3:])
    assert used == {name: base[name] for name in ("diffusers", "numpy", "transformers")}
    assert (tmp_path / "quickstart" / "report.html").exists()
