"""Every private name of Ray that is used is there, with the parameters that darkroom relies on."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import ray

from darkroom.cluster import private_ray
from darkroom.cluster.private_ray import NAMES, TESTED, private, to_extend
from darkroom.errors import DarkroomError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_this_ray_has_it(name: str) -> None:
    found, parameters = private(name), NAMES[name][1]
    if parameters is not None:
        assert tuple(inspect.signature(found).parameters) == parameters


def test_the_ray_that_it_was_tested_with_is_the_pinned_one() -> None:
    assert ray.__version__ == TESTED
    assert re.search(
        rf"^ray(\[.*\])?=={re.escape(TESTED)} ", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )


def test_a_ray_that_lacks_one_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "FixedScalingPolicy.ask", ("ray.train:TorchTrainer._gone", ()))
    told = (
        f"Ray {TESTED} has no ray.train:TorchTrainer._gone, which darkroom uses; "
        f"it was tested with Ray {TESTED}: pip install 'ray=={TESTED}'"
    ).replace("ray.train:", "ray.train.")
    with pytest.raises(DarkroomError) as caught:
        to_extend("FixedScalingPolicy")
    assert str(caught.value) == told
    assert to_extend("ElasticScalingPolicy") is private("ElasticScalingPolicy")
    monkeypatch.setitem(NAMES, "node", ("ray._no_such_module:x", None))
    with pytest.raises(DarkroomError, match="has no ray._no_such_module.x"):
        private("node")


def test_nothing_else_uses_a_private_name() -> None:
    own = Path(private_ray.__file__)
    pattern = re.compile(r"\bray(\.\w+)*\.(_(?!_version)\w+|v2\b)|from ray\S* import _")
    assert pattern.search("ray._private.state")
    assert pattern.search("from ray.train.v2._internal")
    files = [path for path in own.parents[1].rglob("*.py") if path != own]
    assert len(files) > 100
    assert [str(path) for path in files if pattern.search(path.read_text())] == []


LOOK = """
import inspect

import ray

from darkroom.cluster.private_ray import NAMES, private

for name, (_, parameters) in NAMES.items():
    found = private(name)
    if parameters is not None:
        assert tuple(inspect.signature(found).parameters) == parameters, name
print(ray.__version__)
"""


@pytest.mark.nightly
def test_the_newest_ray_that_is_allowed_has_them_too(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    allowed = re.search(r'"ray\[[\w,]+\](\S+)"', (ROOT / "pyproject.toml").read_text())
    assert allowed is not None
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", f"ray{allowed[1]}"]
    subprocess.run(install, check=True)
    (site,) = (tmp_path / "env").glob("[Ll]ib/**/site-packages")
    here = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", site, *here)))}
    done = subprocess.run([python, "-c", LOOK], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (site / f"ray-{done.stdout.split()[-1]}.dist-info").exists()
