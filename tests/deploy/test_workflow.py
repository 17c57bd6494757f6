"""The workflow for public CI: both commands, on every system that the installation page names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".github" / "workflows" / "test.yml"
LINTERS = (
    ("--from", "zizmor==1.32.0", "zizmor", "--offline", "--no-progress", "--config", ".github/zizmor.yml"),
    (
        *("--from", "check-jsonschema==0.39.0", "check-jsonschema"),
        *("--builtin-schema", "vendor.github-workflows"),
    ),
)


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_both_commands_run_on_every_system() -> None:
    told = yaml.safe_load(FILE.read_text("utf-8"))
    assert told["permissions"] == {"contents": "read"}
    for name, job in told["jobs"].items():
        assert f"python make.py {name}" in commands(job)
        systems = job["strategy"]["matrix"]["system"]
        assert {system.partition("-")[0] for system in systems} == {"ubuntu", "macos", "windows"}
        assert any(system.endswith("-arm") for system in systems)
        assert job["runs-on"] == "${{ matrix.system }}"
    assert set(told["jobs"]) == {"quickstart", "test"}
    pythons = told["jobs"]["quickstart"]["strategy"]["matrix"]["python"]
    page = (ROOT / "docs" / "installation.md").read_text("utf-8")
    assert f"{pythons[0]} to {pythons[-1]}" in page
    assert FILE.read_text("utf-8").splitlines()[0].startswith("# Both commands on every system. Not yet run:")


def findings(linter: tuple[str, ...], file: Path) -> str:
    """What a linter says of a workflow; nothing where it finds nothing."""
    command = [sys.executable, "-m", "uv", "tool", "run", "--quiet", *linter, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.nightly
@pytest.mark.parametrize("linter", LINTERS, ids=lambda words: words[2])
def test_linters_find_nothing(linter: tuple[str, ...], tmp_path: Path) -> None:
    assert findings(linter, FILE) == ""
    text = FILE.read_text("utf-8")
    wrong = {
        "timeout-minute": text.replace("timeout-minutes", "timeout-minute"),
        "unpinned-uses": text.replace("actions/checkout@v5", "someone/checkout@v5"),
    }
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    control = tmp_path / ".github" / "workflows" / "test.yml"
    named = "unpinned-uses" if "zizmor" in linter else "timeout-minute"
    control.write_text(wrong[named], "utf-8")
    assert named in findings(linter, control)
